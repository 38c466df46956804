"""The built-in choice: a policy and limits that fit the budgets when nothing was given or planned.

Safe rather than best: weights stay in the fastest memory while they fit, the rest streams from below; the
block is as large as the cache budget allows. The planner (policy.search) does better when asked.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from offload.memory import TierBudgets
from policy.footprint import ModelFootprint
from policy.memory_plan import memory_plan
from policy.tiers import Placement, Policy, ScheduleName, Tier
from policy.workload import Limits

MEAN_TOKENS = 1024
"""Tokens per sequence that the page pool is sized for when lengths are unknown; longer ones take more pages."""

MAX_MODEL_LEN = 32_768
"""Longest sequence that is admitted where nobody asks for more and the known work has none: every gpu batch sets
memory aside for one, which models of 128k positions would spend their whole machine on."""

LEANER = ((1024, 4), (1024, 3), (1024, 2), (512, 2), (256, 2))
"""Tokens computed at once, and units of streamed weights held at once: fewer need less memory and cost little, so
they are tried before less of anything else is kept in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the user fixed; None leaves the choice open."""

    weights: Placement | None = None
    cache: Placement | None = None
    activations: Placement | None = None
    gpu_batch_size: int | None = None
    num_gpu_batches: int | None = None
    cache_format: str = "auto"
    cpu_attention_frac: float = 0.0
    overlap: bool = True
    schedule: ScheduleName = "refill"


def default_limits(
    *,
    gpu_batch_size: int,
    max_model_len: int,
    prompt_len: int | None,
    gen_len: int | None,
    schedule: ScheduleName,
    page_tokens: int = 64,
    chunk_tokens: int = 1024,
    pass_tokens: int | None = None,
    admit_tokens: int = 0,
    weights_slots: int = 2,
    packed_row_len: int | None = None,
) -> Limits:
    """Limits of a block: exact where lengths are known, else for MEAN_TOKENS on average.

    admit_tokens: longest sequence to have memory for, where known lengths are an estimate. packed_row_len: as in
    Limits.
    """
    if prompt_len is not None and gen_len is not None:
        longest = min(max_model_len, prompt_len + gen_len)
        mean_pages = float(longest // page_tokens)
        whole = gpu_batch_size * prompt_len
    else:
        longest = max_model_len
        mean_pages = min(longest, MEAN_TOKENS) / page_tokens
        whole = gpu_batch_size * 256
    if pass_tokens is None:
        cap = 65536 if schedule == "static" else 16384
        pass_tokens = min(whole, cap)
    pass_tokens = max(pass_tokens, gpu_batch_size, 256)
    return Limits(
        max_tokens=max(longest, admit_tokens),
        pass_tokens=pass_tokens,
        chunk_tokens=max(256, min(chunk_tokens, pass_tokens)),
        page_tokens=page_tokens,
        mean_pages=mean_pages,
        logit_rows=gpu_batch_size,
        weights_slots=weights_slots,
        packed_row_len=packed_row_len,
    )


def default_policy(
    footprint: ModelFootprint,
    wish: Wish,
    *,
    budgets: TierBudgets,
    first_tier: Tier,
    compute_dtype: str,
    max_model_len: int,
    prompt_len: int | None = None,
    gen_len: int | None = None,
    num_requests: int | None = None,
    page_tokens: int = 64,
    pass_tokens: int | None = None,
    admit_tokens: int = 0,
    packed_row_len: int | None = None,
) -> tuple[Policy, Limits]:
    """The largest block and the fastest homes that fit. ValueError with the least that would do if none fits."""
    sizes = [64, 48, 32, 24, 16, 12, 8, 4, 2, 1]
    if wish.gpu_batch_size is not None:
        sizes = [wish.gpu_batch_size]
    elif num_requests is not None:
        sizes = sorted({min(size, max(1, num_requests)) for size in sizes}, reverse=True)
    shortfalls: list[tuple[int, Tier, int]] = []
    for size in sizes:
        options = [
            default_limits(
                gpu_batch_size=size,
                max_model_len=max_model_len,
                prompt_len=prompt_len,
                gen_len=gen_len,
                schedule=wish.schedule,
                page_tokens=page_tokens,
                chunk_tokens=chunk_tokens,
                pass_tokens=pass_tokens,
                admit_tokens=admit_tokens,
                weights_slots=weights_slots,
                packed_row_len=packed_row_len,
            )
            for chunk_tokens, weights_slots in LEANER
        ]
        candidates = _candidates(footprint, wish, size, budgets, first_tier)
        for policy, limits in itertools.product(candidates, dict.fromkeys(options)):
            plan = memory_plan(footprint, policy, limits, first_tier=first_tier, compute_dtype=compute_dtype)
            short = [
                (plan.tier_bytes(t) - budgets.of(t), t) for t in Tier if plan.tier_bytes(t) > budgets.of(t)
            ]
            if not short:
                return policy, limits
            worst = max(short)
            shortfalls.append((worst[0], worst[1], plan.tier_bytes(worst[1])))
    missing, tier, needed = min(shortfalls)
    flag = {Tier.GPU: "--gpu-mem", Tier.CPU: "--cpu-mem", Tier.DISK: "--disk-mem"}[tier]
    raise ValueError(
        f"no placement fits: {tier.label} memory is short by {missing} bytes even for the smallest block; "
        f"the least that would do is {flag} {needed}"
    )


def _candidates(
    footprint: ModelFootprint, wish: Wish, size: int, budgets: TierBudgets, first_tier: Tier
) -> list[Policy]:
    """Policies to try for one block size, fastest homes first."""
    placements: list[Placement]
    if wish.weights is not None:
        placements = [wish.weights]
    else:
        placements = []
        weights_bytes = max(1, footprint.weight_nbytes("auto"))
        first_budget = budgets.of(first_tier)
        # Shares of the weights at home on the first tier, then the rest on the tier below while it fits.
        for tenths in range(10, -1, -1):
            first = tenths / 10
            if first * weights_bytes > first_budget:
                continue
            if first_tier is Tier.GPU:
                cpu = min(1 - first, 0.9 * budgets.cpu_bytes / weights_bytes)
                placements.append(
                    Placement(gpu_frac=first, cpu_frac=cpu, disk_frac=max(0.0, 1 - first - cpu))
                )
            else:
                placements.append(Placement(cpu_frac=first, disk_frac=1 - first))
    caches = [wish.cache] if wish.cache else [Placement.all_on(t) for t in Tier if t >= first_tier]
    activations = wish.activations or Placement.all_on(first_tier)
    return [
        Policy(
            weights=weights,
            cache=cache,
            activations=activations,
            gpu_batch_size=size,
            num_gpu_batches=wish.num_gpu_batches or 1,
            weight_format="auto",
            cache_format=wish.cache_format,
            cpu_attention_frac=wish.cpu_attention_frac,
            overlap=wish.overlap,
            schedule=wish.schedule,
        )
        for cache in caches
        for weights in placements
    ]
