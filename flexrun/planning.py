"""From a searched plan to what a run needs: a policy and limits that fit, for the model as it is stored.

The built-in choice (flexrun.defaults) competes with the search: a plan is taken only if it is predicted to be
at least as fast.
"""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

from flexrun.defaults import Wish, default_policy
from offload.memory import TierBudgets
from policy.audit import for_run, placed_run, series_of
from policy.footprint import ModelFootprint
from policy.hardware import Hardware
from policy.memory_plan import memory_plan, resolve_cache_format
from policy.search import SearchResult, bytes_moved, physical_bound, search
from policy.simulate import simulate
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
) -> tuple[Policy, Limits, SearchResult]:
    """Search for the best policy of a run, and the limits it is planned for.

    footprint: as the weights are laid out, in one format. schedule: None takes the faster one. max_model_len:
    longest sequence to be admitted, where the workload is only an estimate. The built-in choice is taken where
    it is predicted to be faster, or where it alone fits. Raises ValueError if nothing fits, with what would do.
    """
    gpu_bytes = float(budgets.gpu_bytes) if first_tier is Tier.GPU else 0.0
    machine = for_run(hardware, compute_dtype, gpu_bytes)
    found = search(
        footprint,
        machine,
        workload,
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
    built_in = _built_in(
        footprint,
        machine,
        workload,
        wish,
        budgets=budgets,
        first_tier=first_tier,
        compute_dtype=compute_dtype,
        page_tokens=page_tokens,
    )
    found, limits = better_of(found, built_in)
    if found.best is None or limits is None:
        raise ValueError(found.infeasible)
    policy = found.best.policy
    if max_model_len is not None and max_model_len > limits.max_tokens:
        limits = _lengthened(footprint, policy, limits, max_model_len, budgets, first_tier, compute_dtype)
        memory = memory_plan(footprint, policy, limits, first_tier=first_tier, compute_dtype=compute_dtype)
        predicted = {
            **found.best.predicted,
            "limits": dataclasses.asdict(limits),
            "memory": memory.by_purpose(),
        }
        best = replace(found.best, planned_bytes=memory.planned_bytes, predicted=predicted)
        found = replace(found, best=best, limits=limits, memory=memory)
    return policy, limits, found


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
            best=replace(plan, notes=(reason,)),
            reasons=(reason,),
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
) -> tuple[Plan, Limits] | None:
    """The built-in choice for this workload, with its prediction; None if it does not fit."""
    try:
        policy, limits = default_policy(
            footprint,
            wish,
            budgets=budgets,
            first_tier=first_tier,
            compute_dtype=compute_dtype,
            max_model_len=footprint.max_positions,
            prompt_len=workload.max_prompt_len,
            gen_len=max(1, workload.max_gen_len),
            num_requests=workload.num_requests,
            page_tokens=page_tokens,
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
    simulation = simulate(run, series)
    seconds = max(simulation.total_seconds, 1e-12)
    n_batches = policy.num_gpu_batches
    tokens = sum(state.tokens for state in series.states) * n_batches
    rows = sum(state.rows for state in series.states) * n_batches
    flops = footprint.flops_per_token() * tokens + footprint.flops_per_row() * rows
    one_series = rows if series.steady is not None else series.generated_tokens / series.blocks
    predicted: dict[str, Any] = {
        "generated_tokens_per_s": series.generated_tokens / seconds,
        "total_tokens_per_s": series.total_tokens / seconds,
        "prefill_seconds": simulation.prefill_seconds,
        "decode_seconds": simulation.decode_seconds,
        "total_seconds": seconds,
        "latency_seconds": _latency(simulation.pass_seconds, policy, workload),
        "lanes": simulation.lanes,
        "bytes_per_token": {
            lane: n / max(one_series or tokens, 1e-12) for lane, n in bytes_moved(run, series.states).items()
        },
        "mfu": flops
        / max(sum(simulation.pass_seconds), 1e-12)
        / max(curve.peak for curve in hardware.gemm.values()),
        "limits": dataclasses.asdict(limits),
        "memory": memory.by_purpose(),
    }
    binding = max(simulation.lanes, key=lambda lane: simulation.lanes[lane], default="compute")
    plan = Plan(
        policy=policy,
        unit_homes=memory.unit_homes,
        page_counts=memory.page_counts,
        planned_bytes=memory.planned_bytes,
        predicted=predicted,
        bound={"generated_tokens_per_s": physical_bound(footprint, hardware, workload, policy.weight_format)},
        binding_resource=binding,
    )
    return plan, limits


def _latency(pass_seconds: tuple[float, ...], policy: Policy, workload: Workload) -> float:
    """Seconds of one request: its block (static), or its prompt's pass and one for each further token."""
    if policy.schedule == "static" or workload.scoring:
        return sum(pass_seconds)
    return sum(pass_seconds) / max(len(pass_seconds), 1) * max(1, workload.gen_len)


def _lengthened(
    footprint: ModelFootprint,
    policy: Policy,
    limits: Limits,
    max_model_len: int,
    budgets: TierBudgets,
    first_tier: Tier,
    compute_dtype: str,
) -> Limits:
    """Admit sequences as long as the budgets allow beyond the planned ones, up to max_model_len."""
    longest = max_model_len
    while longest > limits.max_tokens:
        wider = replace(limits, max_tokens=longest)
        plan = memory_plan(footprint, policy, wider, first_tier=first_tier, compute_dtype=compute_dtype)
        if all(plan.tier_bytes(tier) <= budgets.of(tier) for tier in Tier):
            return wider
        longest = (longest + limits.max_tokens) // 2
    return limits
