"""A discrete-event run of the schedule: predicted makespan, lane utilisation, and a trace.

Operations come from `policy.schedule`, their seconds from `policy.cost`; a lane starts its next operation
when the one before it is over and everything it waits for is. Where lanes share a resource (`Hardware.
sharing`), those that run together slow each other down in proportion; else one sweep over the operations
suffices.

Long runs: only some passes are simulated, in a row, so that prefetch across passes is kept. Each gives the
ratio of its simulated seconds to those of its slowest lane (`CostModel.pass_seconds`, which costs
microseconds); the ratio is interpolated over all other passes, separately for those in which all sequences
fill a page at once.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from policy.cost import CostModel, Flow, Pages
from policy.hardware import Hardware
from policy.memory_plan import MemoryPlan, pages_by_tier
from policy.passes import BatchState, PassSeries
from policy.schedule import BatchPlan, Depths, Lane, Op, UnitPlan, ZigZag
from policy.tiers import Tier

LANES = tuple(Lane)


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """total_seconds of all passes and blocks; lanes: busy seconds of each; pass_seconds: of every pass of
    one series. events: Chrome-trace events of the simulated passes, if asked for."""

    total_seconds: float
    prefill_seconds: float
    decode_seconds: float
    lanes: dict[str, float]
    pass_seconds: tuple[float, ...]
    n_simulated_passes: int
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def utilisation(self) -> dict[str, float]:
        return {lane: busy / self.total_seconds for lane, busy in self.lanes.items()}


class PlacedRun:
    """A cost model together with integer homes: what the simulator needs of a policy."""

    def __init__(self, cost: CostModel, memory: MemoryPlan, *, depths: Depths | None = None) -> None:
        self.cost, self.memory = cost, memory
        self.depths = depths or cost.depths
        footprint = cost.footprint
        homes = [cost.first_tier] * len(footprint.units)
        for index, home in zip(footprint.streamable, memory.unit_homes, strict=True):
            homes[index] = home
        loads, stores = set(cost.hidden_loads), set(cost.hidden_stores)
        self.units = tuple(
            UnitPlan(
                home=homes[i],
                has_cache=unit.kv is not None,
                loads_hidden=i in loads,
                stores_hidden=i in stores,
            )
            for i, unit in enumerate(footprint.units)
        )
        fmt = cost.weight_format
        by_tier = [0.0, 0.0, 0.0]
        for index in footprint.streamable:
            by_tier[homes[index]] += footprint.units[index].nbytes[fmt]
        total = sum(by_tier) or 1.0
        self.weight_fracs = (by_tier[0] / total, by_tier[1] / total, by_tier[2] / total)
        hidden = memory.hidden_homes
        n = [sum(home is tier for home in hidden) / len(hidden) for tier in Tier]
        self.hidden_fracs = (n[0], n[1], n[2])

    def with_hardware(self, hardware: Hardware) -> PlacedRun:
        """The same placement costed at other rates."""
        cost = copy.copy(self.cost)
        cost.hardware = hardware
        cost.forget()
        run = copy.copy(self)
        run.cost = cost
        return run

    def shortened(self, n_layers: int) -> PlacedRun:
        """The same run on the model's first layers only, for ranking: homes are spread evenly, so the first
        layers look like all of them."""
        footprint = self.cost.footprint
        if footprint.n_layers <= n_layers:
            return self
        kept = [i for i, u in enumerate(footprint.units) if u.layer < n_layers]
        short = replace(
            footprint, units=tuple(footprint.units[i] for i in kept), n_layers=n_layers, n_parameters=0
        )
        homes = dict(zip(footprint.streamable, self.memory.unit_homes, strict=True))
        memory = replace(self.memory, unit_homes=tuple(homes[i] for i in kept if i in homes))
        return PlacedRun(self.cost.for_footprint(short), memory, depths=self.depths)

    def flow(self, state: BatchState) -> Flow:
        """Where the pass finds its pages and where it leaves new ones."""
        slots = self.memory.page_counts
        read = pages_by_tier(state.filled, slots)
        if state.prefill_tokens and state.decode_tokens and state.filled:
            # A mixed pass frees about as many pages as it fills: new ones follow the old.
            new = [state.new_pages * r / state.filled for r in read]
        else:
            after = pages_by_tier(state.filled + state.new_pages, slots)
            new = [a - b for a, b in zip(after, read)]
        return Flow(
            weights=self.weight_fracs,
            hidden=self.hidden_fracs,
            read=Pages(*read),
            new=Pages(*new),
            tails_on_gpu=self.memory.tails_tier is Tier.GPU,
        )

    def batch_plans(self, state: BatchState, flow: Flow) -> list[BatchPlan]:
        cost, three = self.cost, self.cost.three
        plans = []
        for j in range(cost.n_batches):
            stays = cost.cpu_flags[j]
            read = flow.read.for_cpu_attention(cost.first_tier) if stays else flow.read
            new = flow.new.for_cpu_attention(cost.first_tier) if stays else flow.new
            on_gpu = flow.tails_on_gpu and not stays
            small = 1e-9
            plans.append(
                BatchPlan(
                    reads_disk=read.disk > small,
                    reads_cpu=three
                    and (read.cpu + read.disk > small or (state.tail_tokens > small and not on_gpu)),
                    stores_cpu=three
                    and (new.cpu + new.disk > small or (state.new_tail_tokens > small and not on_gpu)),
                    writes_disk=new.disk > small,
                    cpu_attention=cost.attends_on_cpu(state, j),
                    hidden_home=self.memory.hidden_homes[min(j, len(self.memory.hidden_homes) - 1)],
                )
            )
        return plans

    def analytic(self, state: BatchState) -> tuple[float, dict[Lane, float]]:
        """(seconds of the pass by its slowest lane, seconds of every lane)."""
        flow = self.flow(state)
        lanes = self.cost.lane_seconds(state, flow)
        return self.cost.pass_seconds(lanes, state, flow), lanes

    def timed_ops(self, states: Sequence[BatchState], *, ends: bool) -> Iterator[tuple[Op, float]]:
        """Operations of the passes with their seconds alone. ends: nothing follows the last pass."""
        zigzag = ZigZag(
            self.units,
            first_tier=self.cost.first_tier,
            depths=self.depths,
            overlap=self.cost.overlap,
            whole_units=self.cost.whole_units,
        )
        for i, state in enumerate(states):
            flow = self.flow(state)
            known: dict[tuple[Any, ...], float] = {}
            classes, seconds = self.cost.unit_class, self.cost.op_seconds
            flags = self.cost.cpu_flags
            plans = self.batch_plans(state, flow)
            for op in zigzag.pass_ops(plans, last=ends and i == len(states) - 1):
                key = (
                    op.kind,
                    classes[op.unit],
                    op.batch == 0,
                    op.batch >= 0 and flags[op.batch],
                    op.n_pieces,
                )
                found = known.get(key)
                if found is None:
                    found = known[key] = seconds(op, state, flow)
                yield op, found


def run_lanes(
    ops: Iterable[tuple[Op, float]],
    n_passes: int,
    *,
    sharing: Any = None,
    pass_gaps: Sequence[float] | None = None,
    events: list[tuple[Op, float, float]] | None = None,
) -> list[float]:
    """Times at which the compute lane ends each pass. events collects (op, start, seconds)."""
    gaps = pass_gaps or [0.0] * n_passes
    if sharing:
        return _run_shared(list(ops), n_passes, sharing, gaps, events)
    finish: list[float] = []
    free = dict.fromkeys(LANES, 0.0)
    ends = [0.0] * n_passes
    current = 0
    for op, seconds in ops:
        if op.pass_index != current:
            # Sampling and bookkeeping: the next pass's computation starts behind them.
            free[Lane.COMPUTE] = ends[current] + gaps[current]
            ends[current] += gaps[current]
            current = op.pass_index
        lane = op.lane
        start = free[lane]
        for w in op.waits:
            if finish[w] > start:
                start = finish[w]
        end = start + seconds
        free[lane] = end
        finish.append(end)
        if lane is Lane.COMPUTE and end > ends[current]:
            ends[current] = end
        if events is not None:
            events.append((op, start, seconds))
    ends[current] += gaps[current]
    return ends


def _speeds(active: Sequence[Lane], sharing: dict[str, dict[str, float]]) -> dict[Lane, float]:
    """Speed of each active lane: 1, or less where the shares of a resource add up to more than 1."""
    speed = dict.fromkeys(active, 1.0)
    for shares in sharing.values():
        total = sum(shares.get(lane.value, 0.0) for lane in active)
        if total > 1.0:
            for lane in active:
                if shares.get(lane.value, 0.0) > 0.0:
                    speed[lane] = min(speed[lane], 1.0 / total)
    return speed


def _run_shared(
    ops: Sequence[tuple[Op, float]],
    n_passes: int,
    sharing: dict[str, dict[str, float]],
    gaps: Sequence[float],
    events: list[tuple[Op, float, float]] | None,
) -> list[float]:
    """The same with lanes that slow each other down: time advances from completion to completion."""
    queues: dict[Lane, deque[tuple[Op, float]]] = {lane: deque() for lane in LANES}
    computes_left = [0] * n_passes
    for op, seconds in ops:
        queues[op.lane].append((op, seconds))
        if op.lane is Lane.COMPUTE:
            computes_left[op.pass_index] += 1
    done = bytearray(len(ops))
    running: dict[Lane, list[Any]] = {}  # lane -> [op, seconds left, start]
    known_speeds: dict[tuple[Lane, ...], dict[Lane, float]] = {}
    ends = [0.0] * n_passes
    now, compute_free = 0.0, 0.0
    left = len(ops)
    while left:
        held_until = None
        for lane, queue in queues.items():
            if lane in running or not queue:
                continue
            op, seconds = queue[0]
            if any(not done[w] for w in op.waits):
                continue
            if lane is Lane.COMPUTE and compute_free > now:
                held_until = compute_free
                continue
            queue.popleft()
            running[lane] = [op, seconds, now]
        if not running:
            assert held_until is not None, "every lane waits for another"
            now = held_until
            continue
        active = tuple(running)
        speeds = known_speeds.get(active)
        if speeds is None:
            speeds = known_speeds[active] = _speeds(active, sharing)
        step = min(running[lane][1] / speeds[lane] for lane in active)
        if held_until is not None:
            step = min(step, held_until - now)
        now += step
        for lane in active:
            entry = running[lane]
            entry[1] -= step * speeds[lane]
            if entry[1] <= 1e-12:
                op = entry[0]
                done[op.id] = 1
                left -= 1
                del running[lane]
                if events is not None:
                    events.append((op, entry[2], now - entry[2]))
                if lane is Lane.COMPUTE:
                    p = op.pass_index
                    computes_left[p] -= 1
                    if not computes_left[p]:
                        compute_free = ends[p] = now + gaps[p]
    return ends


def chrome_events(run: PlacedRun, timed: Iterable[tuple[Op, float, float]]) -> list[dict[str, Any]]:
    """Events in Chrome's trace format (microseconds), one thread per lane."""
    units = run.cost.footprint.units
    return [
        {
            "name": f"{op.kind.value} {units[op.unit].name}" + (f" [{op.batch}]" if op.batch >= 0 else ""),
            "ph": "X",
            "ts": start * 1e6,
            "dur": seconds * 1e6,
            "pid": 0,
            "tid": op.lane.value,
            "args": {"pass": op.pass_index},
        }
        for op, start, seconds in timed
    ]


def _samples(states: Sequence[BatchState], n_prefill: int, n_points: int) -> list[int]:
    """Passes to simulate: those with prompts (at most three), then pairs of neighbours spread over the rest,
    with the passes that fill pages seen beside them."""
    n = len(states)
    if n <= n_prefill + 2 * n_points:
        return list(range(n))
    chosen = {0, min(1, n_prefill - 1), max(0, n_prefill - 1)} if n_prefill else set()
    points = [n_prefill + 1 + (n - n_prefill - 2) * i // (n_points - 1) for i in range(n_points)]
    for k in points:
        chosen |= {k - 1, k}
    # Passes in which every sequence fills a page stand out from their neighbours.
    spikes = [k for k in range(max(1, n_prefill), n) if _spike(states, k)]
    if spikes:
        chosen |= {k for s in (spikes[0], spikes[len(spikes) // 2], spikes[-1]) for k in (s - 1, s)}
    return sorted(chosen)


def _spike(states: Sequence[BatchState], k: int) -> bool:
    return not states[k].prefill_tokens and states[k].new_pages >= states[k].decode_tokens > 0


def _interpolate(points: Sequence[tuple[int, float]], k: int) -> float:
    """Piecewise linear through `points` (increasing), constant outside."""
    if k <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in pairwise(points):
        if k <= x1:
            return y0 + (y1 - y0) * (k - x0) / (x1 - x0)
    return points[-1][1]


class _Analytic:
    """Remembers a run's analytic seconds by state."""

    def __init__(self, run: PlacedRun) -> None:
        self._run = run
        self._known: dict[BatchState, tuple[float, dict[Lane, float]]] = {}

    def __call__(self, state: BatchState) -> tuple[float, dict[Lane, float]]:
        found = self._known.get(state)
        if found is None:
            found = self._known[state] = self._run.analytic(state)
        return found


def simulate(
    run: PlacedRun,
    series: PassSeries,
    *,
    n_points: int = 3,
    full: bool = False,
    trace: bool = False,
    n_layers: int | None = None,
    refinements: int = 4,
) -> Simulation:
    """Predict a run.

    n_points: places in a long run at which two passes are simulated; full: all passes. refinements: rounds in
    which intervals whose ends differ too much are halved (a tier that fills up changes the pace at once).
    n_layers: simulate the
    first layers only and scale each pass by its analytic seconds (homes are spread evenly over the layers).
    """
    states = series.states
    short = run if n_layers is None else run.shortened(n_layers)
    analytic = _Analytic(run)
    analytic_short = analytic if short is run else _Analytic(short)
    steady_only = series.steady is not None and len(states) == 1
    refined: set[int] = set()
    if steady_only:
        chosen, simulated = [0], [states[0]] * 3
    else:
        chosen = list(range(len(states))) if full else _samples(states, series.n_prefill_passes, n_points)
        simulated = [states[k] for k in chosen]
    events: list[tuple[Op, float, float]] | None = [] if trace else None
    ends = run_lanes(
        short.timed_ops(simulated, ends=not steady_only),
        len(simulated),
        sharing=run.cost.hardware.sharing,
        pass_gaps=[short.cost.fixed_seconds(state) for state in simulated],
        events=events,
    )
    spans = [b - a for a, b in zip([0.0, *ends], ends)]
    if steady_only:
        spans = spans[-1:]
    ratio = {k: s / max(analytic_short(states[k])[0], 1e-12) for k, s in zip(chosen, spans, strict=True)}
    n_simulated = len(simulated)
    ratios = _ratios(states, series.n_prefill_passes, chosen, ratio)
    for _ in range(0 if steady_only else refinements):
        halves = _midpoints(states, chosen, ratio, ratios, [analytic(state)[0] for state in states])
        if not halves:
            break
        pairs = sorted({j for k in halves for j in (k - 1, k)})
        spans = _spans(short, [states[k] for k in pairs])
        n_simulated += len(pairs)
        for k, span in zip(pairs, spans, strict=True):
            if k in halves:
                ratio[k] = span / max(analytic_short(states[k])[0], 1e-12)
        # The midpoints' predecessors were simulated as well, so that none follows a jump.
        chosen = sorted({*chosen, *halves})
        refined |= halves
        ratios = _ratios(states, series.n_prefill_passes, chosen, ratio, refined)
    seconds = [analytic(state)[0] * r for state, r in zip(states, ratios, strict=True)]
    totals = dict.fromkeys(LANES, 0.0)
    for state in states:
        for lane, busy in analytic(state)[1].items():
            totals[lane] += busy
    prefill, decode = _split(states, seconds)
    if series.extra_passes and series.steady is not None:
        slowest, lanes = analytic(series.steady)
        middle = states[len(states) // 2]
        pace = seconds[len(states) // 2] / max(analytic(middle)[0], 1e-12)
        more = series.extra_passes * slowest * pace
        share = prefill / max(prefill + decode, 1e-12)
        prefill, decode = prefill + more * share, decode + more * (1 - share)
        for lane, busy in lanes.items():
            totals[lane] += series.extra_passes * busy
    return Simulation(
        total_seconds=(prefill + decode) * series.blocks,
        prefill_seconds=prefill * series.blocks,
        decode_seconds=decode * series.blocks,
        lanes={lane.value: busy * series.blocks for lane, busy in totals.items() if busy},
        pass_seconds=tuple(seconds),
        n_simulated_passes=n_simulated,
        events=chrome_events(short, events) if events is not None else [],
    )


def _ratios(
    states: Sequence[BatchState],
    n_prefill: int,
    chosen: Sequence[int],
    ratio: dict[int, float],
    settled: Collection[int] = (),
) -> list[float]:
    """For every pass, simulated over analytic seconds: its own, or interpolated over passes of its kind."""
    if len(chosen) == len(states):
        return [ratio[k] for k in range(len(states))]
    points: dict[str, list[tuple[int, float]]] = {"prompts": [], "usual": [], "fills": []}

    def kind(k: int) -> str:
        return "prompts" if k < n_prefill else "fills" if _spike(states, k) else "usual"

    for position, k in enumerate(chosen):
        # The first of a pair follows a jump: what was prefetched for it belonged to another pass.
        jumped = k > 0 and (position == 0 or chosen[position - 1] != k - 1) and k not in settled
        if not (jumped and k >= n_prefill):
            points[kind(k)].append((k, ratio[k]))
    fallback = points["usual"] or list(ratio.items())
    return [_interpolate(points[kind(k)] or fallback, k) for k in range(len(states))]


def _midpoints(
    states: Sequence[BatchState],
    chosen: Sequence[int],
    ratio: dict[int, float],
    ratios: Sequence[float],
    analytic: Sequence[float],
) -> set[int]:
    """Passes in the middle of intervals where interpolation may be off by more than 0.1% of the run."""
    total = sum(r * a for r, a in zip(ratios, analytic, strict=True))
    points = [k for k in chosen if not _spike(states, k)]
    more = set()
    for a, b in pairwise(points):
        if b - a < 3:
            continue
        doubt = 0.5 * abs(ratios[b] - ratios[a]) * sum(analytic[a:b])
        if doubt > 1e-3 * total:
            middle = (a + b) // 2
            more.add(middle + 1 if _spike(states, middle) else middle)
    return {k for k in more if k not in ratio}


def _spans(run: PlacedRun, states: Sequence[BatchState]) -> list[float]:
    """Seconds of each of these passes, run one after the other."""
    ends = run_lanes(
        run.timed_ops(states, ends=False),
        len(states),
        sharing=run.cost.hardware.sharing,
        pass_gaps=[run.cost.fixed_seconds(state) for state in states],
    )
    return [b - a for a, b in zip([0.0, *ends], ends)]


def _split(states: Sequence[BatchState], seconds: Sequence[float]) -> tuple[float, float]:
    """Seconds of prefill and of decode; a mixed pass is divided by its tokens."""
    prefill = sum(s * (x.prefill_tokens / x.tokens if x.tokens else 0.0) for s, x in zip(seconds, states))
    return prefill, sum(seconds) - prefill
