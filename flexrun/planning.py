"""From a searched plan to what a run needs: a policy and limits that fit, for the model as it is stored.

The built-in choice (flexrun.defaults) competes with the search: a plan is taken only if it is predicted to be
at least as fast.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flexrun.defaults import Wish, default_policy
from offload.memory import TierBudgets
from policy.audit import for_run, placed_run, series_of
from policy.candidates import LONG_PROMPT_PASS_TOKENS
from policy.footprint import ModelFootprint
from policy.hardware import Hardware
from policy.memory_plan import memory_plan, resolve_cache_format
from policy.prediction import make_plan, simulate_whole
from policy.search import SearchResult, search
from policy.tiers import Plan, Policy, ScheduleName, Tier
from policy.workload import Limits, Workload

BUILT_IN_BETTER = 1.01
"""The built-in choice replaces a plan only if it is predicted to be faster by more than this factor."""


def plan_run(
    footprint: ModelFootprint,
    hardware: Hardware,
    workload: Workload,
    *,
    budgets: TierBudgets,
    first_tier: Tier,
    compute_dtype: str,
    cache_format: str = "auto",
    gpu_batch_size: int | None = None,
    num_gpu_batches: int | None = None,
    overlap: bool = True,
    schedule: ScheduleName | None = None,
    max_model_len: int | None = None,
    page_tokens: int = 64,
    packed_row_len: int | None = None,
) -> tuple[Policy, Limits, SearchResult]:
    """Search for the best policy of a run, and the limits it is planned for.

    footprint: as the weights are laid out, in one format. schedule: None takes the faster one. max_model_len:
    longest sequence to be admitted, where the workload is only an estimate; limits.max_tokens is less only where
    no block has memory for one of that length. packed_row_len: as in Limits. The built-in choice is taken where it
    is predicted to be faster, or where it alone fits. Raises ValueError if nothing fits, with what would do.
    """
    gpu_bytes = float(budgets.gpu_bytes) if first_tier is Tier.GPU else 0.0
    machine = replace(for_run(hardware, compute_dtype, gpu_bytes), packed_row_len=packed_row_len)
    found, longest = search_admitting(
        footprint,
        machine,
        workload,
        max_model_len=max_model_len,
        gpu_mem_bytes=gpu_bytes,
        cpu_mem_bytes=float(budgets.cpu_bytes),
        disk_mem_bytes=float(budgets.disk_bytes),
        cache_format=None if cache_format == "auto" else cache_format,
        schedules=(schedule,) if schedule else ("refill", "static"),
        gpu_batch_size=gpu_batch_size,
        num_gpu_batches=num_gpu_batches,
        overlap=overlap,
        page_tokens=page_tokens,
    )
    wish = Wish(
        gpu_batch_size=gpu_batch_size,
        num_gpu_batches=num_gpu_batches,
        cache_format=cache_format,
        overlap=overlap,
        schedule=schedule or "refill",
    )
    built_in = None
    for tokens in dict.fromkeys((max(workload.max_tokens, max_model_len or 0), longest)):
        built_in = _built_in(
            footprint,
            machine,
            workload,
            wish,
            budgets=budgets,
            first_tier=first_tier,
            compute_dtype=compute_dtype,
            page_tokens=page_tokens,
            admit_tokens=tokens,
        )
        if built_in is not None:
            if tokens > longest:
                # It has memory for sequences that no plan of the search has.
                found = replace(found, best=None, limits=None)
            break
    found, limits = better_of(found, built_in)
    if found.best is None or limits is None:
        raise ValueError(found.infeasible)
    return found.best.policy, limits, found


def search_admitting(
    footprint: ModelFootprint,
    hardware: Hardware,
    workload: Workload,
    *,
    max_model_len: int | None,
    gpu_batch_size: int | None = None,
    num_gpu_batches: int | None = None,
    **options: Any,
) -> tuple[SearchResult, int]:
    """`search` with memory for a sequence of max_model_len tokens, and the longest that the result admits.

    Memory is set aside before anything is placed, so that the limit does not depend on the plan. Where even the
    smallest block (or the one asked for), working on few tokens at once, has none for such a sequence, the longest
    that it has memory for counts. options: of `search`.
    """

    def attempt(tokens: int, **more: Any) -> SearchResult:
        return search(footprint, hardware, workload, max_tokens=tokens, **options, **more)

    shape = {"gpu_batch_size": gpu_batch_size, "num_gpu_batches": num_gpu_batches}
    least = workload.max_tokens
    longest = max(least, max_model_len or least)
    found = attempt(longest, **shape)
    if found.best is not None or longest == least:
        return found, longest
    tight = {**shape, "chunk_tokens": LONG_PROMPT_PASS_TOKENS}
    found = attempt(longest, **tight)
    if found.best is not None:
        return found, longest
    smallest = {name: n or 1 for name, n in tight.items()}
    low, high = least - 1, longest  # the longest known to fit, the shortest known not to
    while high - low > 1:
        # The workload's own length is tried first: where that does not fit, nothing does.
        middle = least if low < least else (low + high) // 2
        if attempt(middle, **smallest).best is None:
            if middle == least:
                break
            high = middle
        else:
            low = middle
    longest = max(low, least)
    return attempt(longest, **(shape if longest == least else tight)), longest


def better_of(
    found: SearchResult, built_in: tuple[Plan, Limits] | None
) -> tuple[SearchResult, Limits | None]:
    """The search's plan, or the built-in choice if that is predicted to be faster or nothing else fits."""
    if built_in is None:
        return found, found.limits
    plan, limits = built_in
    if found.best is not None:
        # Tokens of all kinds are the same work for both, also where nothing is generated.
        ours = found.best.predicted["total_tokens_per_s"]
        theirs = plan.predicted["total_tokens_per_s"]
        if theirs <= ours * BUILT_IN_BETTER:
            reason = f"the built-in choice is predicted to reach {theirs / ours:.0%} of this plan's speed"
            return replace(found, reasons=(*found.reasons, reason)), found.limits
        reason = (
            f"the built-in choice, predicted to be {theirs / ours:.2f} times as fast as the search's best"
        )
    else:
        reason = "the built-in choice: the search found no plan that fits"
    return (
        replace(
            found,
            best=replace(plan, notes=(reason, *plan.notes)),
            reasons=(reason,),
            warnings=plan.notes,
            binding_resource=plan.binding_resource,
            helps=(),
            limits=limits,
            memory=None,
            simulation=None,
        ),
        limits,
    )


def _built_in(
    footprint: ModelFootprint,
    hardware: Hardware,
    workload: Workload,
    wish: Wish,
    *,
    budgets: TierBudgets,
    first_tier: Tier,
    compute_dtype: str,
    page_tokens: int,
    admit_tokens: int,
) -> tuple[Plan, Limits] | None:
    """The built-in choice for this workload, with its prediction and, as notes, warnings; None if it does not
    fit. admit_tokens: longest sequence to have memory for."""
    try:
        policy, limits = default_policy(
            footprint,
            wish,
            budgets=budgets,
            first_tier=first_tier,
            compute_dtype=compute_dtype,
            max_model_len=admit_tokens,
            prompt_len=workload.max_prompt_len,
            gen_len=max(1, workload.max_gen_len),
            num_requests=workload.num_requests,
            page_tokens=page_tokens,
            admit_tokens=admit_tokens,
            packed_row_len=hardware.packed_row_len,
        )
    except ValueError:
        return None
    memory = memory_plan(footprint, policy, limits, first_tier=first_tier, compute_dtype=compute_dtype)
    policy = replace(
        policy,
        weight_format=footprint.native_format,
        cache_format=resolve_cache_format(policy.cache_format, compute_dtype),
    )
    run = placed_run(
        footprint,
        hardware,
        policy,
        limits,
        compute_dtype=compute_dtype,
        gpu_mem_bytes=hardware.gpu_mem_bytes,
        memory=memory,
    )
    series = series_of(policy, limits, workload)
    plan, warnings = make_plan(run, series, simulate_whole(run, series), workload, policy)
    return replace(plan, notes=warnings), limits
