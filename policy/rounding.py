"""From the linear program's fractions to whole units, pages and gpu batches that fit, exactly.

A policy's fractions round to homes by fixed rules (`memory_plan`). Where the rounded plan exceeds a capacity,
the smallest share that helps moves to another tier, weights first: they are read once for the whole block.
Where room is left, weights move up again, unit by unit; a plan that is still far from the optimum is improved
by single moves. What the program promised and the rounded plan
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
MAX_POLISH = 8
POLISHED_GAP = 0.02
"""Rounded plans further than this from the optimum are improved by single moves."""


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


def _grains(problem: Problem) -> dict[str, tuple[float, float]]:
    """For weights, cache and activations: the share of one whole thing, and the bytes of all of them."""
    sizes, cost = problem.cost.sizes, problem.cost
    pages = float(cost.n_batches * sizes.slots * sizes.layers_page_bytes)
    return {
        "weights": (1.0 / max(1, cost.n_streamable), float(max(1, sizes.weights_bytes))),
        "cache": (1.0 / max(1, sizes.slots), max(1.0, pages)),
        "activations": (1.0 / cost.n_batches, float(cost.n_batches * sizes.hidden_bytes)),
    }


def _moved(policy: Policy, kind: str, source: Tier, target: Tier, amount: float) -> Policy:
    placement: Placement = getattr(policy, kind)
    return dataclasses.replace(policy, **{kind: _shift(placement, source, target, amount)})  # type: ignore[arg-type]


def _relieve(
    policy: Policy, problem: Problem, tier: Tier, excess: float, room: dict[Tier, float]
) -> Policy | None:
    """Take at least `excess` bytes off `tier`, None if nothing is left that could move.

    Tiers below come first, then those above that have room; weights first, then pages, then hidden states.
    """
    below = [t for t in problem.tiers if t > tier and room[t] > 0]
    above = [t for t in reversed(problem.tiers) if t < tier and room[t] > 0]
    for kind, (grain, total) in _grains(problem).items():
        if kind == "activations" and problem.cost.n_batches == 1:
            continue
        if kind == "cache" and not problem.cost.sizes.slots:
            continue
        share = getattr(policy, kind).fraction(tier)
        if share <= 0:
            continue
        amount = min(share, max(excess / total, (0.5 if kind == "weights" else 1.0) * grain))
        for target in (*below, *above):
            if target < tier and room[target] < amount * total:
                continue
            return _moved(policy, kind, tier, target, amount)
    return None


def fit(policy: Policy, problem: Problem) -> tuple[Policy, MemoryPlan] | None:
    """Move shares until the exact plan fits every capacity, None if it cannot."""
    hardware = problem.cost.hardware
    for _ in range(MAX_MOVES):
        memory = plan_memory(policy, problem)
        over = excess_bytes(memory, problem)
        if not over:
            return policy, memory
        tier = min(over)
        room = {t: hardware.capacity(t) - memory.tier_bytes(t) for t in problem.tiers}
        moved = _relieve(policy, problem, tier, over[tier], room)
        if moved is None or moved == policy:
            return None
        policy = moved
    return None


def polish(
    policy: Policy, memory: MemoryPlan, problem: Problem, seconds: float
) -> tuple[Policy, MemoryPlan, float]:
    """Improve a rounded policy by single moves of whole things between tiers, best first, until none helps."""
    for _ in range(MAX_POLISH):
        best: tuple[float, Policy, MemoryPlan] | None = None
        for kind, (grain, _) in _grains(problem).items():
            if kind == "activations" and problem.cost.n_batches == 1:
                continue
            for source in problem.tiers:
                if getattr(policy, kind).fraction(source) <= 0:
                    continue
                for target in problem.tiers:
                    for steps in (1, 4) if target != source else ():
                        tried = _moved(policy, kind, source, target, steps * grain)
                        plan = plan_memory(tried, problem)
                        if excess_bytes(plan, problem):
                            continue
                        cost = evaluate(tried, plan, problem)
                        if cost < (best[0] if best else seconds) * (1 - 1e-4):
                            best = (cost, tried, plan)
        if best is None:
            break
        seconds, policy, memory = best
    return policy, memory, seconds


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


def improve(rounded: Rounded, solution: LpSolution, problem: Problem) -> Rounded:
    """The rounded plan, improved by single moves if it is far from the optimum."""
    if rounded.gap_frac <= POLISHED_GAP:
        return rounded
    policy, memory, seconds = polish(rounded.policy, rounded.memory, problem, rounded.seconds_per_token)
    gap = seconds / solution.seconds_per_token - 1
    return Rounded(policy=policy, memory=memory, seconds_per_token=seconds, gap_frac=gap)
