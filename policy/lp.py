"""The linear program: where weights, cache and activations of one block shape should rest.

Minimise seconds per generated token. Symbols: w, c, a = fractions of weights, cache and activations by tier;
r[p], n[p] = page slots of a pair, as fractions of all its slots, that are filled or being filled in pass p by
tier; T[p] = milliseconds of pass p, which stands for m[p] passes alike. Fractions lie in 0..1, bytes are in
GB, times in ms. Placement of whole things makes some sizes discrete (rings exist or not, tails rest here or
there); `Variant` fixes those, and the best variant counts.

The optimum bounds what a policy of this shape can reach: every row relaxes the exact formulas of
`memory_plan` and `CostModel.lane_seconds`, and the rounded policy is checked against the exact ones.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pulp

from policy.cost import CostModel, Flow, Pages
from policy.memory_plan import ATTEND_DEPTH, tier_labels
from policy.passes import BatchState, mean_passes
from policy.rings import WeightsRing, weights_rings
from policy.schedule import Depths, Lane
from policy.tiers import Placement, Tier
from policy.workload import Workload

GB = 1e9
MS = 1e3
TIE_BREAK = 1e-4
KINDS = ("weights", "cache", "activations")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """weights_resident: all weights on the first tier, no ring. ring: else, which of `Problem.rings` the
    streamed units need. activations_resident: all hidden states on the first tier, no ring. tails_on_gpu:
    tails of device batches rest on the gpu (cache.gpu_frac >= 0.5)."""

    weights_resident: bool = False
    ring: int = 0
    activations_resident: bool = False
    tails_on_gpu: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One block shape to place. passes: (state, how many passes are like it), in the run's order.

    tokens: generated in all these passes by the block. ordered: pages stay where they are from pass to pass
    (a static run); else every pass refills what it frees.
    """

    cost: CostModel
    passes: tuple[tuple[BatchState, float], ...]
    tokens: float
    ordered: bool
    depths: Depths = field(default_factory=Depths)

    @property
    def tiers(self) -> tuple[Tier, ...]:
        return tier_labels(self.cost.first_tier)

    @property
    def rings(self) -> tuple[WeightsRing, ...]:
        """The rings that streamed weights may need, largest first."""
        return weights_rings(self.cost.footprint, self.cost.weight_format, self.depths)


@dataclass(frozen=True, slots=True, kw_only=True)
class LpSolution:
    """seconds_per_token: the optimum. duals: row name -> change of the objective (ms per token) per unit of
    its right-hand side. values: variable name -> value."""

    variant: Variant
    seconds_per_token: float
    weights: Placement
    cache: Placement
    activations: Placement
    values: dict[str, float]
    duals: dict[str, float]
    lane_shares: dict[str, float]


def make_problem(
    cost: CostModel, workload: Workload, *, depths: Depths | None = None, n_buckets: int = 3
) -> Problem:
    """The problem of a run: its prompts' passes and `n_buckets` means of the others, or its steady state.

    A run without answers (scoring) counts the prompts' tokens instead of generated ones.
    """
    passes, tokens, ordered = mean_passes(
        workload,
        cost.limits,
        gpu_batch_size=cost.gpu_batch_size,
        schedule=cost.schedule,
        n_buckets=n_buckets,
    )
    return Problem(
        cost=cost,
        passes=passes,
        tokens=tokens * cost.n_batches,
        ordered=ordered,
        depths=depths or cost.depths,
    )


def variants(problem: Problem) -> list[Variant]:
    """The discrete choices worth trying: resident where it may fit."""
    cost, sizes = problem.cost, problem.cost.sizes
    capacity = cost.hardware.capacity(cost.first_tier)
    free = capacity - sizes.pinned_bytes - sizes.scratch_bytes - sizes.work.nbytes - sizes.logits_bytes
    smaller = [
        i for i, ring in enumerate(problem.rings) if i and ring.resident_bytes + ring.ring_bytes <= free
    ]
    weights = [(False, 0), *((False, i) for i in smaller)]
    if sizes.weights_bytes <= free:
        weights.append((True, 0))
    resident = cost.n_batches * sizes.hidden_bytes <= 0.5 * free
    activations = [True] if cost.n_batches == 1 else [False, True] if resident else [False]
    device = cost.n_batches - cost.n_cpu_attention
    half = 0.5 * device * sizes.slots * sizes.layers_page_bytes + device * sizes.layers_tail_bytes
    tails = [False, True] if cost.three and device and half <= free else [False]
    return [
        Variant(weights_resident=w, ring=r, activations_resident=a, tails_on_gpu=t)
        for w, r in weights
        for a in activations
        for t in tails
    ]


# -- the program -------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Program:
    """The LP while it is built: variables by kind and tier, expressions of every pass."""

    problem: Problem
    variant: Variant
    lp: Any
    fractions: dict[str, dict[Tier, Any]] = field(default_factory=dict)
    read: list[dict[Tier, Any]] = field(default_factory=list)
    new: list[dict[Tier, Any]] = field(default_factory=list)
    seconds: list[Any] = field(default_factory=list)
    busy: list[Any] = field(default_factory=list)
    excess: dict[Tier, Any] = field(default_factory=dict)

    @property
    def ring(self) -> WeightsRing:
        return self.problem.rings[self.variant.ring]

    def add(self, row: Any, name: str) -> None:
        self.lp.addConstraint(row, name)


def define_fractions(program: _Program) -> None:
    """w, c, a >= 0; sum over tiers = 1 for each; what the variant holds resident is 1 on the first tier.

    w[first] * all units >= the units that are larger than the variant's ring.

    Tails on the gpu need c[gpu] >= 1/2, tails elsewhere c[gpu] <= 1/2 (device batches only)."""
    first = program.problem.cost.first_tier
    for kind in KINDS:
        tiers = program.problem.tiers
        program.fractions[kind] = {t: pulp.LpVariable(f"{kind}_{t.label}", 0, 1) for t in tiers}
        program.add(pulp.lpSum(program.fractions[kind].values()) == 1, f"sum_{kind}")
    if program.variant.weights_resident:
        program.add(program.fractions["weights"][first] == 1, "resident_weights")
    elif program.ring.resident_bytes:
        share = program.ring.resident_bytes / program.problem.cost.sizes.weights_bytes
        program.add(program.fractions["weights"][first] >= share, "larger_than_ring")
    if program.variant.activations_resident:
        program.add(program.fractions["activations"][first] == 1, "resident_activations")
    elif program.problem.cost.n_batches > 1:
        # At least one gpu batch moves, else there would be no ring.
        n = program.problem.cost.n_batches
        program.add(program.fractions["activations"][first] <= (n - 1) / n, "moving_activations")
    if program.problem.cost.three and program.problem.cost.n_cpu_attention < program.problem.cost.n_batches:
        gpu = program.fractions["cache"][Tier.GPU]
        if program.variant.tails_on_gpu:
            program.add(gpu >= 0.5, "tails_gpu")
        else:
            program.add(gpu <= 0.5 - 1e-6, "tails_cpu")
    elif program.problem.cost.three:
        # What batches on the CPU would keep on the gpu is in cpu memory; say so in the fractions.
        program.add(program.fractions["cache"][Tier.GPU] == 0, "cache_not_on_gpu")


def define_pages(program: _Program) -> None:
    """sum_t r[p,t] = filled[p] / slots; r[p,t] <= c[t]; in a static run r[p+1,t] >= r[p,t],
    sum_t n[p,t] = new[p] / slots and m[p] * n[p,t] <= c[t]; in the steady state n = r * new / filled."""
    problem = program.problem
    slots = max(problem.cost.sizes.slots, 1)
    cache = program.fractions["cache"]
    for p, (state, repeats) in enumerate(problem.passes):
        read: dict[Tier, Any]
        if state.filled > 0:
            read = {t: pulp.LpVariable(f"read_{p}_{t.label}", 0, 1) for t in problem.tiers}
            program.add(pulp.lpSum(read.values()) == min(1.0, state.filled / slots), f"filled_{p}")
            for t in problem.tiers:
                program.add(read[t] <= cache[t], f"read_in_home_{p}_{t.label}")
                if program.read and problem.ordered:
                    program.add(read[t] >= program.read[-1][t], f"pages_stay_{p}_{t.label}")
        else:
            read = dict.fromkeys(problem.tiers, 0.0)
        program.read.append(read)
        if not problem.ordered and state.filled > 0:
            new = {t: read[t] * (state.new_pages / state.filled) for t in problem.tiers}
        elif state.new_pages > 0:
            new = {t: pulp.LpVariable(f"new_{p}_{t.label}", 0, 1) for t in problem.tiers}
            share = min(1.0 / repeats, state.new_pages / slots)
            program.add(pulp.lpSum(new.values()) == share, f"made_{p}")
            for t in problem.tiers:
                program.add(repeats * new[t] <= cache[t], f"new_in_home_{p}_{t.label}")
        else:
            new = dict.fromkeys(problem.tiers, 0.0)
        program.new.append(new)


def pass_flow(program: _Program, p: int) -> Flow:
    """The placement that pass p sees, as expressions."""
    slots = float(program.problem.cost.sizes.slots)

    def by_tier(values: dict[Tier, Any], factor: float) -> tuple[Any, Any, Any]:
        gpu, cpu, disk = (values.get(t, 0.0) * factor for t in Tier)
        return gpu, cpu, disk

    return Flow(
        weights=by_tier(program.fractions["weights"], 1.0),
        hidden=by_tier(program.fractions["activations"], 1.0),
        read=Pages(*by_tier(program.read[p], slots)),
        new=Pages(*by_tier(program.new[p], slots)),
        tails_on_gpu=program.variant.tails_on_gpu,
    )


def define_lanes(program: _Program) -> None:
    """T[p] >= milliseconds of every lane in pass p (CostModel.lane_seconds), and of every shared resource:
    sum over lanes of share * lane; T[p] >= the device's seconds with its waits for CPU attention,
    and the phases in which the cache's rings bind (CostModel.phase_seconds).
    Without overlap: T[p] >= sum over lanes."""
    problem = program.problem
    sharing = problem.cost.hardware.sharing
    for p, (state, _) in enumerate(problem.passes):
        seconds = pulp.LpVariable(f"pass_{p}_ms", 0)
        program.seconds.append(seconds)
        flow = pass_flow(program, p)
        lanes = problem.cost.lane_seconds(state, flow)
        program.busy.append(pulp.lpSum(lanes.values()))
        if not problem.cost.overlap:
            program.add(seconds >= MS * pulp.lpSum(lanes.values()), f"lane_{p}_all")
            continue
        for lane, busy in lanes.items():
            program.add(seconds >= MS * busy, f"lane_{p}_{lane.value}")
        device = problem.cost.device_seconds(state)
        if device:
            program.add(seconds >= MS * device, f"lane_{p}_compute_and_cpu_attention")
        for name, phase in problem.cost.phase_seconds(state, flow).items():
            program.add(seconds >= MS * phase, f"lane_{p}_{name}")
        for resource, shares in sharing.items():
            busy = pulp.lpSum(shares[lane] * lanes[Lane(lane)] for lane in shares if Lane(lane) in lanes)
            program.add(seconds >= MS * busy, f"lane_{p}_shared.{resource}")


def define_capacities(program: _Program) -> None:
    """Bytes on each tier <= its capacity.

    weights: w[t] * all units + the variant's ring on the first tier (unless resident), its staging in cpu
    memory in proportion to w[disk]; cache: c[t] * arenas + tails + rings in proportion to what is
    away; activations: a[t] * all batches + ring; and the fixed sizes (pinned, tables, scratch, work,
    logits, CPU attention)."""
    problem, variant = program.problem, program.variant
    cost, sizes, depths = problem.cost, problem.cost.sizes, problem.depths
    first, three, n_batches = cost.first_tier, cost.three, cost.n_batches
    weights, cache = program.fractions["weights"], program.fractions["cache"]
    hidden = program.fractions["activations"]
    used: dict[Tier, Any] = {t: pulp.LpAffineExpression() for t in problem.tiers}

    def put(tier: Tier, nbytes: Any) -> None:
        used[tier] += nbytes * (1 / GB)

    for t in problem.tiers:
        put(t, weights[t] * float(sizes.weights_bytes))
    if not variant.weights_resident:
        put(first, float(program.ring.ring_bytes))
        if three:
            put(Tier.CPU, weights[Tier.DISK] * (program.ring.staging_frac * sizes.weights_bytes))
    put(first, float(sizes.pinned_bytes + sizes.scratch_bytes + sizes.work.nbytes + sizes.logits_bytes))
    put(Tier.CPU, float(sizes.tables_bytes))
    n_cpu = cost.n_cpu_attention
    n_device = n_batches - n_cpu
    for n, stays in ((n_device, False), (n_cpu, True)):
        for t in problem.tiers:
            layers = sizes.layers_page_disk_bytes if t is Tier.DISK else sizes.layers_page_bytes
            home = Tier.CPU if stays and t is Tier.GPU else t
            put(home, cache[t] * float(n * sizes.slots * layers))
    tails = Tier.GPU if variant.tails_on_gpu else Tier.CPU
    put(tails, float(n_device * sizes.layers_tail_bytes))
    put(Tier.CPU, float(n_cpu * sizes.layers_tail_bytes))
    disk_pages = cache[Tier.DISK] * float(sizes.slots * sizes.page_disk_bytes)
    new_disk = cache[Tier.DISK] * float(sizes.new_pages * sizes.page_disk_bytes)
    if three:
        away = 1 - cache[Tier.GPU] if n_device else 1.0
        leaving = 1.0 if n_cpu else away
        if n_device:
            slot = away * float(sizes.slots * sizes.page_bytes)
            slot = slot + (0.0 if variant.tails_on_gpu else float(sizes.tail_bytes))
            put(first, slot * float(depths.cache))
        new = leaving * float(sizes.new_pages * sizes.page_bytes)
        new = new + (float(sizes.new_tail_bytes) if not variant.tails_on_gpu or n_cpu else 0.0)
        put(first, new * float(depths.cache_out))
        put(Tier.CPU, disk_pages * float(depths.cache_staging))
    else:
        put(first, disk_pages * float(depths.cache))
    put(Tier.CPU, new_disk * float(depths.cache_out))
    for t in problem.tiers:
        put(t, hidden[t] * float(n_batches * sizes.hidden_bytes) if n_batches > 1 else 0.0)
    if n_batches == 1:
        put(first, float(sizes.hidden_bytes))
    elif not variant.activations_resident:
        put(first, float(depths.hidden * sizes.hidden_bytes))
        if three:
            put(Tier.CPU, hidden[Tier.DISK] * float(depths.hidden * sizes.hidden_bytes))
    if n_cpu:
        put(first, float(ATTEND_DEPTH * sizes.attend_bytes))
        if three:
            put(Tier.CPU, float(ATTEND_DEPTH * sizes.attend_bytes + sizes.work.attention_staging_bytes))
    for t in problem.tiers:
        over = program.excess.get(t, 0.0)
        program.add(used[t] - over <= cost.hardware.capacity(t) / GB, f"capacity_{t.label}")


def define_objective(program: _Program) -> None:
    """Milliseconds per generated token: sum over p of m[p] * (T[p] + TIE_BREAK * sum of all lanes) / tokens.

    Where the slowest lane leaves a choice, the small second term keeps the other lanes' work low."""
    repeats = [m for _, m in program.problem.passes]
    total = pulp.lpSum(
        m * (t + TIE_BREAK * MS * busy)
        for m, t, busy in zip(repeats, program.seconds, program.busy, strict=True)
    )
    # What no pass touches (page slots that fill late or never) prefers the faster tier where there is room.
    homes = pulp.lpSum(
        int(t) * program.fractions[kind][t]
        for kind in ("cache", "activations")
        for t in program.problem.tiers
    )
    first, repeats_0 = program.problem.passes[0]
    compute = program.problem.cost.compute_lane_seconds(first) * repeats_0
    program.lp.setObjective(
        (total + homes * (TIE_BREAK * 0.01 * MS * compute)) * (1.0 / program.problem.tokens)
    )


def build(problem: Problem, variant: Variant, *, elastic: bool = False) -> _Program:
    """The program of one variant, not yet solved. elastic: capacities may be exceeded, at a price."""
    program = _Program(problem, variant, pulp.LpProblem("placement", pulp.LpMinimize))
    if elastic:
        program.excess = {t: pulp.LpVariable(f"excess_{t.label}", 0) for t in problem.tiers}
    define_fractions(program)
    define_pages(program)
    define_lanes(program)
    define_capacities(program)
    define_objective(program)
    return program


def _solver() -> Any:
    """HiGHS in this process; CBC where highspy is missing."""
    highs = pulp.HiGHS(msg=False)
    return highs if highs.available() else pulp.PULP_CBC_CMD(msg=False)


def _solve(program: _Program) -> int:
    """Solve in place. HiGHS greets on the process's standard output at its first use; that belongs to results."""
    global _greeted
    if _greeted:
        return int(program.lp.solve(_solver()))
    with _quiet_stdout():
        status = int(program.lp.solve(_solver()))
    _greeted = True
    return status


_greeted = False


@contextlib.contextmanager
def _quiet_stdout() -> Iterator[None]:
    """Send file descriptor 1 to nowhere for a moment: the greeting does not come from Python."""
    sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:  # no standard output at all
        yield
        return
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        try:
            yield
        finally:
            os.dup2(kept, 1)
            os.close(kept)


def solve_variant(problem: Problem, variant: Variant) -> LpSolution | None:
    """The optimum of one variant, None if nothing fits."""
    program = build(problem, variant)
    status = _solve(program)
    if pulp.LpStatus[status] != "Optimal":
        return None
    values = {v.name: float(v.varValue or 0.0) for v in program.lp.variables()}
    duals = {name: float(row.pi or 0.0) for name, row in program.lp.constraints.items()}
    fixed = sum(problem.cost.fixed_seconds(state) * m for state, m in problem.passes) / problem.tokens
    total = sum(values[f"pass_{p}_ms"] * m for p, (_, m) in enumerate(problem.passes))
    objective = total / problem.tokens / MS
    lane_shares: dict[str, float] = {}
    for p, _ in enumerate(problem.passes):
        for name, dual in duals.items():
            if name.startswith(f"lane_{p}_"):
                lane = name.removeprefix(f"lane_{p}_")
                part = abs(dual) * values[f"pass_{p}_ms"] / MS  # the dual is m[p] / tokens, or a share of it
                lane_shares[lane] = lane_shares.get(lane, 0.0) + part / max(objective, 1e-15)
    return LpSolution(
        variant=variant,
        seconds_per_token=objective + fixed,
        weights=_placement(values, "weights"),
        cache=_placement(values, "cache"),
        activations=_placement(values, "activations"),
        values=values,
        duals=duals,
        lane_shares=lane_shares,
    )


def _placement(values: dict[str, float], kind: str) -> Placement:
    """The fractions of one kind, cleaned of the solver's rounding."""
    raw = [min(1.0, max(0.0, values.get(f"{kind}_{t.label}", 0.0))) for t in Tier]
    raw = [0.0 if x < 1e-7 else x for x in raw]
    total = sum(raw)
    gpu, cpu, disk = (x / total for x in raw)
    return Placement(gpu_frac=gpu, cpu_frac=cpu, disk_frac=disk)


def solve(problem: Problem) -> LpSolution | None:
    """The best variant's optimum, None if nothing fits. Among equals the one with most at home counts: it
    leaves out rings that the others pay for."""
    best: LpSolution | None = None
    for variant in reversed(variants(problem)):
        found = solve_variant(problem, variant)
        if found is None:
            continue
        if best is None or found.seconds_per_token < best.seconds_per_token * (1 - 1e-7):
            best = found
    return best


def shortage(problem: Problem) -> dict[str, float]:
    """Least bytes that each tier lacks if every capacity could be exceeded, cheapest tier first.

    Minimises gpu shortage, then cpu shortage, then disk shortage (weights 10^4, 10^2, 1), so the answer is
    the least change of the scarcest memory that makes the shape fit.
    """
    best: dict[str, float] | None = None
    best_cost = float("inf")
    for variant in variants(problem):
        program = build(problem, variant, elastic=True)
        excess = program.excess
        price = {Tier.GPU: 1e4, Tier.CPU: 1e2, Tier.DISK: 1.0}
        program.lp.setObjective(pulp.lpSum(price[t] * excess[t] for t in problem.tiers))
        status = _solve(program)
        if pulp.LpStatus[status] != "Optimal":
            continue
        cost = float(pulp.value(program.lp.objective))
        if cost < best_cost:
            best_cost = cost
            best = {t.label: float(excess[t].varValue or 0.0) * GB for t in problem.tiers}
    return best or {}
