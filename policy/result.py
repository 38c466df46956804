"""What a search hands back: the plan with its reasons and what would help, or what is short and what would do."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from policy import lp
from policy.candidates import AUTO_WEIGHT_FORMATS, Shape
from policy.explore import Found, Searcher
from policy.memory_plan import MemoryPlan
from policy.passes import PassSeries
from policy.prediction import FrontPoint, make_plan
from policy.simulate import PlacedRun, Simulation
from policy.tiers import Plan, Tier
from policy.workload import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """best: the plan, None if nothing fits (`infeasible` then says what is short and what would do).

    front: Pareto-optimal (throughput, latency) points, highest throughput first. reasons: sentences on why.
    helps: what would help most, (change, factor on throughput). gap_frac: how far rounding is from the LP.
    limits, memory, simulation: of the best plan.
    """

    best: Plan | None
    front: tuple[FrontPoint, ...]
    reasons: tuple[str, ...]
    binding_resource: str
    search_seconds: float
    infeasible: str = ""
    shortage_bytes: dict[str, float] = field(default_factory=dict)
    helps: tuple[tuple[str, float], ...] = ()
    warnings: tuple[str, ...] = ()
    gap_frac: float = 0.0
    n_candidates: int = 0
    n_placed: int = 0
    limits: Limits | None = None
    memory: MemoryPlan | None = None
    simulation: Simulation | None = None


def describe(
    searcher: Searcher,
    best: Found,
    simulated: tuple[PlacedRun, PassSeries, Simulation],
    front: tuple[FrontPoint, ...],
    began: float,
) -> SearchResult:
    """The best candidate as a plan. began: when the search did, by time.perf_counter."""
    space, policy = searcher.space, best.rounded.policy
    plan, warnings = make_plan(*simulated, space.workload, policy, solution=best.solution)
    reasons = [
        f"{plan.binding_resource} is what binds",
        f"rounding to whole units costs {best.rounded.gap_frac:.2%} over the linear program's optimum",
        f"{searcher.n_candidates} candidates bounded, {searcher.n_placed} placed by the linear program",
    ]
    native = space.footprint.native_format
    if policy.weight_format != native:
        reasons.append(f"weights are stored as {policy.weight_format} (checkpoint: {native})")
    if policy.cache_format != space.hardware.compute_dtype:
        reasons.append(f"full cache pages are stored as {policy.cache_format}")
    return SearchResult(
        best=replace(plan, notes=(*reasons, *warnings)),
        front=front,
        reasons=tuple(reasons),
        binding_resource=plan.binding_resource,
        search_seconds=time.perf_counter() - began,
        helps=_helps(best),
        warnings=warnings,
        gap_frac=best.rounded.gap_frac,
        n_candidates=searcher.n_candidates,
        n_placed=searcher.n_placed,
        limits=best.problem.cost.limits,
        memory=best.rounded.memory,
        simulation=simulated[2],
    )


def _helps(found: Found) -> tuple[tuple[str, float], ...]:
    """What would help most, from the duals: one GB more of a tier, a lane ten percent faster."""
    solution = found.solution
    if solution is None:
        return ()
    ms = solution.seconds_per_token * 1e3
    helps: list[tuple[str, float]] = []
    for tier in found.problem.tiers:
        gain = -solution.duals.get(f"capacity_{tier.label}", 0.0)
        if gain > 1e-4 * ms:
            helps.append((f"+1 GB {tier.label} memory", ms / max(ms - gain, 0.1 * ms)))
    for lane, share in solution.lane_shares.items():
        if share > 0.01:
            helps.append((f"{lane} 10% faster", 1 / (1 - share * (1 - 1 / 1.1))))
    return tuple(sorted(helps, key=lambda item: -item[1]))


def format_gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.3g} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.3g} MB"


def infeasible(
    searcher: Searcher,
    weight_formats: Sequence[str],
    cache_formats: Sequence[str],
    began: float,
) -> SearchResult:
    """What to say where nothing fits: which capacity is short by how much for the smallest block, and the least
    change that would do."""
    space = searcher.space
    footprint, hardware = space.footprint, space.hardware

    def short(wf: str, cf: str) -> dict[str, float]:
        options = []
        for schedule in space.schedules:
            shape = Shape(
                gpu_batch_size=1,
                num_gpu_batches=1,
                weight_format=wf,
                cache_format=cf,
                n_cpu_attention=0,
                schedule=schedule,
                weights_slots=space.weights_slots[-1],
            )
            options.append(lp.shortage(space.problem(shape)))
        return min(options, key=lambda s: sum(s.values()))

    missing = min(
        (short(wf, cf) for wf in weight_formats for cf in cache_formats), key=lambda s: sum(s.values())
    )
    asked = {t: n for t, n in missing.items() if n > 0}
    parts = ", ".join(f"{t} memory is short by {format_gb(n)}" for t, n in asked.items())
    if not asked:
        # Fractions would fit, whole units do not: a few units more always do.
        unit = 2.0 * max(u.nbytes[footprint.native_format] for u in footprint.units)
        asked = {t.label: unit for t in (Tier.CPU, hardware.first_tier)}
        parts = "whole units leave too little room"
    remedies = [" and ".join(f"{format_gb(n)} more {t} memory" for t, n in asked.items())]
    smaller = [f for f in AUTO_WEIGHT_FORMATS if f in footprint.weight_formats and f not in weight_formats]
    enough = [f for f in smaller if not any(n > 1 for n in short(f, cache_formats[0]).values())]
    remedies += [f"weight format {fmt}" for fmt in enough[:1]]
    text = (
        f"{footprint.name} does not fit: for one sequence of {space.max_tokens} tokens {parts}."
        f" What would do: {', or '.join(remedies)}."
    )
    return SearchResult(
        best=None,
        front=(),
        reasons=(text,),
        binding_resource=f"{next(iter(asked))} memory",
        search_seconds=time.perf_counter() - began,
        infeasible=text,
        shortage_bytes=asked,
        n_candidates=searcher.n_candidates,
        n_placed=searcher.n_placed,
    )
