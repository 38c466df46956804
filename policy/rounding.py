"""From the linear program's fractions to whole units, pages and gpu batches that fit, exactly.

A policy's fractions round to homes by fixed rules (`memory_plan`). Where the rounded plan exceeds a capacity,
the smallest share that helps moves one tier down, weights first: they are read once for the whole block.
Where room is left, weights move up again, unit by unit. What the program promised and the rounded plan
still costs are compared by the same cost functions.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from policy.lp import LpSolution, Problem
from policy.memory_plan import MemoryPlan, memory_plan
from policy.simulate import PlacedRun
from policy.tiers import Placement, Policy, ScheduleName, Tier

MAX_MOVES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounded:
    """policy and its exact memory; seconds_per_token by its slowest lanes; gap_frac: how much slower than
    the linear program's optimum, as a fraction of the latter."""

    policy: Policy
    memory: MemoryPlan
    seconds_per_token: float
    gap_frac: float


def _shift(placement: Placement, source: Tier, target: Tier, amount: float) -> Placement:
    """Move up to `amount` of the fractions from source to target."""
    values = [placement.fraction(t) for t in Tier]
    amount = min(amount, values[source])
    values[source] = max(0.0, values[source] - amount)
    values[target] += amount
    if values[source] < 1e-9:
        values[target] += values[source]
        values[source] = 0.0
    total = sum(values)
    gpu, cpu, disk = (v / total for v in values)
    return Placement(gpu_frac=gpu, cpu_frac=cpu, disk_frac=disk)


def excess_bytes(memory: MemoryPlan, problem: Problem) -> dict[Tier, float]:
    """Bytes above capacity by tier, only where there are any."""
    hardware = problem.cost.hardware
    over = {t: memory.tier_bytes(t) - hardware.capacity(t) for t in problem.tiers}
    return {t: n for t, n in over.items() if n > 0}


def _move_down(policy: Policy, problem: Problem, tier: Tier, excess: float) -> Policy | None:
    """Take at least `excess` bytes off `tier`, None if nothing is left that could move."""
    if tier is Tier.DISK:
        return None
    target = Tier(tier + 1)
    if problem.cost.hardware.capacity(target) <= 0:
        return None
    sizes, cost = problem.cost.sizes, problem.cost
    pages = max(1.0, float(cost.n_batches * sizes.slots * sizes.layers_page_bytes))
    unit = sizes.weights_bytes / max(1, cost.n_streamable)
    if policy.weights.fraction(tier) > 0:
        amount = max(excess, 0.5 * unit) / max(1, sizes.weights_bytes)
        return dataclasses.replace(policy, weights=_shift(policy.weights, tier, target, amount))
    if sizes.slots and policy.cache.fraction(tier) > 0:
        one = 1.0 / sizes.slots
        amount = max(one, excess / pages)
        return dataclasses.replace(policy, cache=_shift(policy.cache, tier, target, amount))
    if cost.n_batches > 1 and policy.activations.fraction(tier) > 0:
        amount = 1.0 / cost.n_batches
        return dataclasses.replace(policy, activations=_shift(policy.activations, tier, target, amount))
    return None


def fit(policy: Policy, problem: Problem) -> tuple[Policy, MemoryPlan] | None:
    """Move shares down until the exact plan fits every capacity, None if it cannot."""
    for _ in range(MAX_MOVES):
        memory = plan_memory(policy, problem)
        over = excess_bytes(memory, problem)
        if not over:
            return policy, memory
        tier = min(over)
        moved = _move_down(policy, problem, tier, over[tier])
        if moved is None:
            return None
        policy = moved
    return None


def _fill(policy: Policy, memory: MemoryPlan, problem: Problem) -> tuple[Policy, MemoryPlan]:
    """Move weights up one tier while a whole unit still fits there."""
    sizes, hardware = problem.cost.sizes, problem.cost.hardware
    unit = sizes.weights_bytes / max(1, problem.cost.n_streamable)
    for tier in problem.tiers[:-1]:
        source = Tier(tier + 1)
        for _ in range(3):
            room = hardware.capacity(tier) - memory.tier_bytes(tier)
            if room < unit or policy.weights.fraction(source) <= 0:
                break
            amount = room / sizes.weights_bytes
            tried = dataclasses.replace(policy, weights=_shift(policy.weights, source, tier, amount))
            grown = plan_memory(tried, problem)
            if excess_bytes(grown, problem):
                amount = max(0.0, amount - 2 * unit / sizes.weights_bytes)
                tried = dataclasses.replace(policy, weights=_shift(policy.weights, source, tier, amount))
                grown = plan_memory(tried, problem)
                if excess_bytes(grown, problem):
                    break
            if grown.unit_homes == memory.unit_homes:
                break
            policy, memory = tried, grown
    return policy, memory


def plan_memory(policy: Policy, problem: Problem) -> MemoryPlan:
    cost = problem.cost
    return memory_plan(
        cost.footprint,
        policy,
        cost.limits,
        first_tier=cost.first_tier,
        compute_dtype=cost.hardware.compute_dtype,
        depths=problem.depths,
    )


def evaluate(policy: Policy, memory: MemoryPlan, problem: Problem) -> float:
    """Seconds per token of a rounded policy over the problem's passes, by its slowest lanes."""
    run = PlacedRun(problem.cost, memory, depths=problem.depths)
    total = sum(run.analytic(state)[0] * repeats for state, repeats in problem.passes)
    return total / problem.tokens


def round_solution(solution: LpSolution, problem: Problem) -> Rounded | None:
    """The best whole placement near the optimum, None if no rounding fits."""
    cost = problem.cost
    schedule: ScheduleName = "static" if cost.schedule == "static" else "refill"
    activations = solution.activations
    if cost.n_batches == 1:
        activations = Placement.all_on(cost.first_tier)
    wanted = Policy(
        weights=solution.weights,
        cache=solution.cache,
        activations=activations,
        gpu_batch_size=cost.gpu_batch_size,
        num_gpu_batches=cost.n_batches,
        weight_format=cost.weight_format,
        cache_format=cost.cache_format,
        cpu_attention_frac=cost.n_cpu_attention / cost.n_batches,
        overlap=cost.overlap,
        schedule=schedule,
    )
    best: Rounded | None = None
    starts = [wanted]
    if cost.n_batches > 1 and 0 < activations.fraction(cost.first_tier) < 1:
        # A ring and some resident batches may take more room than a ring alone.
        away = dataclasses.replace(wanted, activations=Placement.all_on(Tier(cost.first_tier + 1)))
        starts.append(away)
    for start in starts:
        fitted = fit(start, problem)
        if fitted is None:
            continue
        policy, memory = _fill(*fitted, problem)
        seconds = evaluate(policy, memory, problem)
        if best is None or seconds < best.seconds_per_token:
            gap = seconds / solution.seconds_per_token - 1
            best = Rounded(policy=policy, memory=memory, seconds_per_token=seconds, gap_frac=gap)
    return best
