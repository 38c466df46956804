"""From a searched plan to what a run needs: a policy and limits that fit, for the model as it is stored."""

from __future__ import annotations

from dataclasses import replace

from offload.memory import TierBudgets
from policy.footprint import ModelFootprint
from policy.hardware import Hardware
from policy.memory_plan import memory_plan
from policy.search import SearchResult, search
from policy.tiers import Policy, Tier
from policy.workload import Limits, Workload


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
    max_model_len: int | None = None,
    page_tokens: int = 64,
) -> tuple[Policy, Limits, SearchResult]:
    """Search for the best policy of a run, and the limits it is planned for.

    footprint: as the weights are laid out, in one format. max_model_len: longest sequence to be admitted, where
    the workload is only an estimate. Raises ValueError if nothing fits, with what would do, or if the
    hardware's description is of another compute type.
    """
    if hardware.compute_dtype != compute_dtype or hardware.first_tier is not first_tier:
        hardware = _as_run(hardware, compute_dtype, budgets, first_tier)
    found = search(
        footprint,
        hardware,
        workload,
        gpu_mem_bytes=float(budgets.gpu_bytes) if first_tier is Tier.GPU else 0.0,
        cpu_mem_bytes=float(budgets.cpu_bytes),
        disk_mem_bytes=float(budgets.disk_bytes),
        cache_format=None if cache_format == "auto" else cache_format,
        gpu_batch_size=gpu_batch_size,
        num_gpu_batches=num_gpu_batches,
        overlap=overlap,
        page_tokens=page_tokens,
    )
    if found.best is None or found.limits is None:
        raise ValueError(found.infeasible)
    policy, limits = found.best.policy, found.limits
    if max_model_len is not None and max_model_len > limits.max_tokens:
        limits = _lengthened(footprint, policy, limits, max_model_len, budgets, first_tier, compute_dtype)
    return policy, limits, found


def _as_run(hardware: Hardware, compute_dtype: str, budgets: TierBudgets, first_tier: Tier) -> Hardware:
    """The machine's description for a run that computes in another type or emulates a gpu tier."""
    gemm = dict(hardware.gemm)
    if compute_dtype not in gemm:
        gemm[compute_dtype] = gemm[hardware.compute_dtype]
    gpu = float(budgets.gpu_bytes) if first_tier is Tier.GPU else 0.0
    return replace(hardware, compute_dtype=compute_dtype, gemm=gemm, gpu_mem_bytes=gpu)


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
