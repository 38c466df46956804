"""Find the plan with the highest throughput that fits, with its prediction, its reasons and its proof.

Candidates are block shapes x formats x share of CPU attention x schedule. Each has an optimistic bound that
costs microseconds (all memory used for what saves most traffic). Candidates are taken in the order of
their bounds; each is placed by the linear program, rounded, and costed; the search stops when no bound is
above the best found, so a first dip stops nothing. Shapes around the best are tried next. The best few are
ranked by simulated time, the winner is simulated in full length.
"""

from __future__ import annotations

import dataclasses
import heapq
import sys
import time
import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from policy import lp
from policy.cost import CostModel, Flow, Pages
from policy.footprint import ModelFootprint
from policy.hardware import Hardware
from policy.memory_plan import MemoryPlan
from policy.passes import BatchState, pass_series
from policy.rounding import Rounded, evaluate, excess_bytes, improve, plan_memory, round_solution
from policy.schedule import Depths, Lane
from policy.simulate import PlacedRun, Simulation, simulate
from policy.tiers import Plan, Policy, ScheduleName, Tier
from policy.workload import DEFAULT_CHUNK_TOKENS, Limits, Workload, limits_for
from quant.kv_formats import DEFAULT_PAGE_TOKENS

GPU_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
COARSE_GPU_BATCH_SIZES = GPU_BATCH_SIZES[::2]
"""Where many formats are to be compared; shapes around the best are tried in any case."""
NUM_GPU_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
AUTO_WEIGHT_FORMATS = ("int8-g64", "int4-g64")
AUTO_CACHE_FORMATS = ("int8", "int4")
STOP_GAIN = 1.01
"""A candidate is placed only if its bound promises at least this factor over the best found."""
MAX_PLACED = 36
MAX_PLACED_NEAR = 16
RANKED = 4
TRUSTED_RATIOS = 3
EXPLORED_LAYERS = 12
RANKED_LAYERS = 12
FINE_BUCKETS = 12
SIMULATED_OPS = 24_000


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontPoint:
    """One trade between throughput and latency. latency_seconds: from a request's start to its end."""

    generated_tokens_per_s: float
    latency_seconds: float
    policy: Policy


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    gpu_batch_size: int
    num_gpu_batches: int
    weight_format: str
    cache_format: str
    n_cpu_attention: int
    schedule: ScheduleName

    @property
    def block(self) -> int:
        return self.gpu_batch_size * self.num_gpu_batches

    @property
    def kind(self) -> tuple[object, ...]:
        """Candidates of one kind are alike in how far their lanes overlap."""
        share = round(2 * self.n_cpu_attention / self.num_gpu_batches)
        few = self.num_gpu_batches.bit_length()
        return self.schedule, self.weight_format, self.cache_format, share, few


@dataclass(slots=True)
class _Found:
    """A placed candidate: throughput by its slowest lanes, then by simulation."""

    shape: _Shape
    problem: lp.Problem
    rounded: Rounded
    solution: lp.LpSolution | None
    seconds_per_token: float
    tokens_per_s: float
    latency_seconds: float
    ratio: float = 1.0  # simulated over analytic seconds, of this candidate or of its kind
    simulated: bool = False

    def slow_down(self, ratio: float) -> None:
        """Replace the ratio by which the analytic figures are corrected."""
        self.tokens_per_s *= self.ratio / ratio
        self.latency_seconds *= ratio / self.ratio
        self.ratio = ratio


class Searcher:
    """One search; see `search` for the arguments."""

    def __init__(
        self,
        footprint: ModelFootprint,
        hardware: Hardware,
        workload: Workload,
        *,
        schedules: Sequence[ScheduleName],
        overlap: bool,
        depths: Depths,
        chunk_tokens: int,
        page_tokens: int,
        unpack_per_batch: bool,
    ) -> None:
        self.footprint, self.hardware, self.workload = footprint, hardware, workload
        self.schedules, self.overlap, self.depths = schedules, overlap, depths
        self.chunk_tokens, self.page_tokens = chunk_tokens, page_tokens
        self.unpack_per_batch = unpack_per_batch
        self.n_candidates = self.n_placed = 0
        self.ratios: dict[tuple[object, ...], list[float]] = {}

    # -- candidates ----------------------------------------------------------------------------------------

    def limits(self, gpu_batch_size: int, schedule: ScheduleName) -> Limits:
        return limits_for(
            self.workload,
            gpu_batch_size=gpu_batch_size,
            schedule=schedule,
            chunk_tokens=self.chunk_tokens,
            page_tokens=self.page_tokens,
        )

    def problem(self, shape: _Shape) -> lp.Problem:
        cost = CostModel(
            self.footprint,
            self.hardware,
            self.limits(shape.gpu_batch_size, shape.schedule),
            gpu_batch_size=shape.gpu_batch_size,
            num_gpu_batches=shape.num_gpu_batches,
            weight_format=shape.weight_format,
            cache_format=shape.cache_format,
            n_cpu_attention=shape.n_cpu_attention,
            schedule=shape.schedule,
            overlap=self.overlap,
            unpack_per_batch=self.unpack_per_batch,
            depths=self.depths,
        )
        return lp.make_problem(cost, self.workload, depths=self.depths)

    def shapes(
        self,
        gpu_batch_sizes: Iterable[int],
        num_gpu_batches: Iterable[int],
        weight_formats: Sequence[str],
        cache_formats: Sequence[str],
        cpu_fractions: Sequence[float],
    ) -> list[_Shape]:
        requests = self.workload.num_requests
        batches = sorted(set(num_gpu_batches))
        found: dict[_Shape, None] = {}
        for gbs in sorted(set(gpu_batch_sizes)):
            for n in batches:
                if gbs < 1 or n < 1 or (requests is not None and gbs * (n - 1) >= requests > 1):
                    continue
                for fraction in cpu_fractions:
                    for wf in weight_formats:
                        for cf in cache_formats:
                            for schedule in self.schedules:
                                shape = _Shape(
                                    gpu_batch_size=gbs,
                                    num_gpu_batches=n,
                                    weight_format=wf,
                                    cache_format=cf,
                                    n_cpu_attention=round(fraction * n),
                                    schedule=schedule,
                                )
                                found[shape] = None
        return list(found)

    def throughput(self, problem: lp.Problem, seconds_per_token: float, shape: _Shape) -> float:
        """Tokens per second of the whole workload: a finite one ends with a block that is not full, or
        with slots that fill and drain."""
        return self._filled_frac(shape) / seconds_per_token

    def _filled_frac(self, shape: _Shape) -> float:
        requests = self.workload.num_requests
        if requests is None:
            return 1.0
        turns = requests / shape.block
        if shape.schedule == "static" or self.workload.scoring:
            return turns / -(-requests // shape.block)
        # Slots fill within half a turn and drain within another; those passes are about half as long.
        return turns / (turns + 0.5)

    def bound(self, problem: lp.Problem, shape: _Shape) -> float:
        """Tokens per second that no placement of this shape exceeds, 0 if nothing can fit.

        Traffic: what is not on the gpu is uploaded in each pass, what is neither there nor in cpu memory is
        read from disk; fixed sizes, tails and the weights' ring are subtracted first, other rings are not.
        """
        cost, sizes, hw = problem.cost, problem.cost.sizes, self.hardware
        n_device = cost.n_batches - cost.n_cpu_attention
        caps = {t: hw.capacity(t) for t in problem.tiers}
        first = cost.first_tier
        caps[first] -= sizes.pinned_bytes + sizes.scratch_bytes + sizes.work.nbytes + sizes.logits_bytes
        caps[first] -= sizes.hidden_bytes
        caps[Tier.CPU] -= sizes.tables_bytes
        arena = cost.n_batches * sizes.slots * sizes.layers_page_bytes
        tails = cost.n_batches * sizes.layers_tail_bytes
        if any(c < 0 for c in caps.values()) or sizes.weights_bytes + arena + tails > sum(caps.values()):
            return 0.0
        if sizes.weights_bytes > caps[first]:
            rings = [r.ring_bytes for r in problem.rings if r.resident_bytes + r.ring_bytes <= caps[first]]
            if not rings:
                return 0.0
            caps[first] -= min(rings)
        gpu = caps.get(Tier.GPU, 0.0)
        memory = gpu + caps[Tier.CPU] - tails
        if memory < 0:
            return 0.0
        nothing = Flow(
            weights=(1.0, 0.0, 0.0),
            hidden=(1.0, 0.0, 0.0),
            read=Pages(0.0, 0.0, 0.0),
            new=Pages(0.0, 0.0, 0.0),
            tails_on_gpu=True,
        )
        total = 0.0
        for state, repeats in problem.passes:
            lanes = cost.lane_seconds(state, nothing)
            cached = min(state.filled, float(sizes.slots)) * sizes.layers_page_bytes
            if not any(u.window for u in (x.kv for x in self.footprint.units) if u is not None):
                n_up = n_device if not (cost.schedule == "static" and not state.filled) else 0
                up = sizes.weights_bytes + n_up * cached - gpu
                down = sizes.weights_bytes + cost.n_batches * cached - memory
            else:
                up = sizes.weights_bytes - gpu
                down = sizes.weights_bytes - memory
            if cost.three:
                lanes[Lane.UPLOAD] = lanes.get(Lane.UPLOAD, 0.0) + max(0.0, up) / hw.upload_bytes_per_s
            lanes[Lane.DISK_READ] = max(0.0, down) / hw.disk_read_bytes_per_s
            total += repeats * cost.pass_seconds(lanes, state)
        return self.throughput(problem, total / problem.tokens, shape)

    # -- placing -------------------------------------------------------------------------------------------

    def latency(self, problem: lp.Problem, seconds_per_token: float, shape: _Shape) -> float:
        """Seconds that one request takes: its whole block (static), or its prompt's pass and all others."""
        seconds = seconds_per_token * problem.tokens
        if shape.schedule == "refill" and not self.workload.scoring:
            return seconds * max(1, self.workload.gen_len)
        return seconds

    def place(
        self, shape: _Shape, problem: lp.Problem, best: float = 0.0, ratio: float = 1.0
    ) -> _Found | None:
        """The candidate placed by the linear program and rounded, None if it does not fit.

        One whose optimum promises more than `best` tokens/s is improved if rounding costs much.
        """
        self.n_placed += 1
        solution = lp.solve(problem)
        rounded = round_solution(solution, problem) if solution is not None else None
        if solution is None or rounded is None:
            return None
        if self.throughput(problem, solution.seconds_per_token, shape) / ratio > best * STOP_GAIN:
            rounded = improve(rounded, solution, problem)
        return self._found(shape, problem, rounded, solution)

    def _found(
        self, shape: _Shape, problem: lp.Problem, rounded: Rounded, solution: lp.LpSolution | None
    ) -> _Found:
        # The few mean passes of the LP hide when the slowest lane changes as the cache grows.
        fine = problem
        if problem.ordered:
            fine = lp.make_problem(problem.cost, self.workload, depths=self.depths, n_buckets=FINE_BUCKETS)
        seconds = evaluate(rounded.policy, rounded.memory, fine)
        return _Found(
            shape=shape,
            problem=problem,
            rounded=rounded,
            solution=solution,
            seconds_per_token=seconds,
            tokens_per_s=self.throughput(problem, seconds, shape),
            latency_seconds=self.latency(problem, seconds, shape),
        )

    def given(self, policy: Policy) -> _Found | None:
        """A policy that the caller names, as a candidate; None if it does not fit."""
        shape = _Shape(
            gpu_batch_size=policy.gpu_batch_size,
            num_gpu_batches=policy.num_gpu_batches,
            weight_format=self.footprint.resolve_format(policy.weight_format),
            cache_format=policy.cache_format,
            n_cpu_attention=policy.num_cpu_attention_batches,
            schedule=policy.schedule,
        )
        problem = self.problem(shape)
        memory = plan_memory(policy, problem)
        if excess_bytes(memory, problem):
            return None
        seconds = evaluate(policy, memory, problem)
        return self._found(
            shape,
            problem,
            Rounded(policy=policy, memory=memory, seconds_per_token=seconds, gap_frac=0.0),
            None,
        )

    def explore(self, shapes: Iterable[_Shape], found: dict[_Shape, _Found | None], budget: int) -> None:
        """Place candidates in the order of their bounds until none can beat the best found.

        Promising ones are simulated too: what overlap really costs, at the least among those of a kind, is
        then divided out of the bounds of that kind.
        """
        heap: list[tuple[float, int, int, _Shape, lp.Problem]] = []
        for order, shape in enumerate(s for s in shapes if s not in found):
            self.n_candidates += 1
            problem = self.problem(shape)
            bound = self.bound(problem, shape)
            if bound > 0:
                # Among equal bounds the smaller block has the lower latency.
                heap.append((-bound, shape.block, order, shape, problem))
        heapq.heapify(heap)
        best = max((f.tokens_per_s for f in found.values() if f is not None), default=0.0)
        adjusted: set[_Shape] = set()
        while heap and budget > 0:
            negative, block, order, shape, problem = heapq.heappop(heap)
            if -negative <= best * STOP_GAIN:
                break
            ratio = self.kind_ratio(shape)
            if ratio > 1.0 and shape not in adjusted:
                adjusted.add(shape)
                heapq.heappush(heap, (negative / ratio, block, order, shape, problem))
                continue
            budget -= 1
            result = found[shape] = self.place(shape, problem, best, ratio)
            if result is not None:
                if result.tokens_per_s > best:
                    own = self.simulated_ratio(result, EXPLORED_LAYERS)
                    result.slow_down(own)
                    self.ratios.setdefault(shape.kind, []).append(own)
                else:
                    result.slow_down(ratio)
                best = max(best, result.tokens_per_s)

    def kind_ratio(self, shape: _Shape) -> float:
        """The least ratio seen among shapes of this kind, 1 before enough of them were simulated."""
        seen = self.ratios.get(shape.kind, [])
        return max(1.0, min(seen)) if len(seen) >= TRUSTED_RATIOS else 1.0

    def around(self, shape: _Shape) -> list[_Shape]:
        """Shapes between the grid's points next to a good one."""
        sizes = {max(1, round(shape.gpu_batch_size * f)) for f in (0.75, 0.85, 1.0, 1.15, 1.3)}
        counts = {max(1, shape.num_gpu_batches + d) for d in (-2, -1, 0, 1, 2)}
        return [
            dataclasses.replace(
                shape,
                gpu_batch_size=gbs,
                num_gpu_batches=n,
                n_cpu_attention=min(n, round(shape.n_cpu_attention / shape.num_gpu_batches * n)),
            )
            for gbs in sorted(sizes)
            for n in sorted(counts)
        ]

    # -- ranking -------------------------------------------------------------------------------------------

    def simulated_ratio(self, found: _Found, n_layers: int) -> float:
        """Simulated seconds over the slowest lanes' seconds, on the first layers of the model alone."""
        problem = found.problem
        run = PlacedRun(problem.cost, found.rounded.memory, depths=self.depths)
        series = pass_series(
            self.workload if found.shape.schedule == "static" else _endless(self.workload),
            problem.cost.limits,
            gpu_batch_size=found.shape.gpu_batch_size,
            num_gpu_batches=found.shape.num_gpu_batches,
            schedule=found.shape.schedule,
        )
        if series.steady is None:
            # Its prompts and its last two passes stand for the block.
            kept = (*series.states[: series.n_prefill_passes][:1], *series.states[-2:])
            series = dataclasses.replace(series, states=kept, n_prefill_passes=1, blocks=1)
        simulation = simulate(run, series, n_layers=n_layers)
        slowest = [run.analytic(state)[0] for state in series.states]
        if series.steady is not None:
            return simulation.total_seconds / max(sum(slowest), 1e-12)
        weights = [repeats for _, repeats in problem.passes[:1]]
        weights += [sum(r for _, r in problem.passes[1:])]
        spans = simulation.pass_seconds
        planned = found.seconds_per_token * problem.tokens
        first = weights[0] * slowest[0]
        return (first * spans[0] / slowest[0] + (planned - first) * spans[-1] / slowest[-1]) / planned

    def settle(self, found: _Found) -> None:
        """Replace a candidate's figures by those of a simulation of the whole workload."""
        simulation, generated, total = self.simulate(found, n_ops=SIMULATED_OPS // 3)
        tokens = generated or total
        found.slow_down(found.ratio * found.tokens_per_s * simulation.total_seconds / tokens)
        found.simulated = True

    def simulate(
        self, found: _Found, *, n_ops: int = SIMULATED_OPS, full: bool = False
    ) -> tuple[Simulation, float, float]:
        """(simulation of the whole workload, generated tokens, all tokens)."""
        series = pass_series(
            self.workload,
            found.problem.cost.limits,
            gpu_batch_size=found.shape.gpu_batch_size,
            num_gpu_batches=found.shape.num_gpu_batches,
            schedule=found.shape.schedule,
        )
        run = PlacedRun(found.problem.cost, found.rounded.memory, depths=self.depths)
        ops = 12 * len(self.footprint.units) * found.shape.num_gpu_batches
        layers = None if full else max(RANKED_LAYERS, self.footprint.n_layers * n_ops // ops)
        simulation = simulate(run, series, n_points=2, full=full, n_layers=layers, refinements=2)
        return simulation, series.generated_tokens, series.total_tokens


def _endless(workload: Workload) -> Workload:
    return dataclasses.replace(workload, num_requests=None)


def bytes_moved(run: PlacedRun, states: Sequence[BatchState]) -> dict[str, float]:
    """Bytes that each copying lane moves in these passes."""
    hw = run.cost.hardware
    unit_rates = dict.fromkeys(
        (
            "upload_bytes_per_s",
            "download_bytes_per_s",
            "download_cache_bytes_per_s",
            "disk_read_bytes_per_s",
            "disk_write_bytes_per_s",
            "disk_write_small_bytes_per_s",
        ),
        1.0,
    )
    free = dict.fromkeys(hw.overhead_seconds, 0.0)
    counting = run.with_hardware(hw.replace(overhead_seconds=free, **unit_rates))
    moved = dict.fromkeys((Lane.UPLOAD, Lane.DOWNLOAD, Lane.DISK_READ, Lane.DISK_WRITE), 0.0)
    memo: dict[BatchState, dict[Lane, float]] = {}
    for state in states:
        if state not in memo:
            memo[state] = counting.analytic(state)[1]
        for lane in moved:
            moved[lane] += memo[state].get(lane, 0.0)
    return {lane.value: n for lane, n in moved.items()}


def physical_bound(footprint: ModelFootprint, hardware: Hardware, workload: Workload, fmt: str) -> float:
    """Tokens per second (generated; scored for scoring) that no block shape in this format can exceed.

    Compute: every prompt and answer token's linear FLOPs at the GEMM curve's peak. Traffic: each pass moves
    at least the weights beyond the gpu's memory up, and those beyond all memory from disk; a pass serves at
    most the sequences whose prompts' pages fit into all tiers together beside the weights.
    """
    peak = max(curve.peak for curve in hardware.gemm.values())
    prompt, gen = float(workload.prompt_len), float(workload.gen_len)
    rows = max(1.0, gen) if not workload.scoring else prompt
    flops = footprint.flops_per_token() * (prompt + max(0.0, gen - 1)) + footprint.flops_per_row() * rows
    per_token = flops / (gen if gen else prompt) / peak
    weights = footprint.weight_nbytes(fmt)
    gpu = hardware.capacity(Tier.GPU) if hardware.first_tier is Tier.GPU else 0.0
    memory = gpu + hardware.capacity(Tier.CPU)
    # The densest cache format there is has a quarter of a byte per element.
    kv = max(1.0, footprint.kv_elements_per_token() * prompt * 0.25)
    room = memory + hardware.capacity(Tier.DISK) - weights
    sequences = max(1.0, room / kv)
    if workload.num_requests is not None:
        sequences = min(sequences, float(workload.num_requests))
    pass_seconds = max(0.0, weights - memory) / hardware.disk_read_bytes_per_s
    if hardware.first_tier is Tier.GPU:
        pass_seconds = max(pass_seconds, max(0.0, weights - gpu) / hardware.upload_bytes_per_s)
    tokens_per_pass = sequences * (prompt if workload.scoring else 1.0)
    return 1.0 / max(per_token, pass_seconds / tokens_per_pass, 1e-15)


def pareto(points: Iterable[FrontPoint]) -> tuple[FrontPoint, ...]:
    """Points that no other beats in both throughput and latency, highest throughput first."""
    front: list[FrontPoint] = []
    for point in sorted(points, key=lambda p: (-p.generated_tokens_per_s, p.latency_seconds)):
        if not front or point.latency_seconds < front[-1].latency_seconds * (1 - 1e-9):
            front.append(point)
    return tuple(front)


def _format_choices(asked: str | None, native: str, auto: Sequence[str]) -> list[str]:
    if asked is None:
        return [native]
    if asked == "auto":
        return list(dict.fromkeys([native, *auto]))
    return [asked]


def search(
    footprint: ModelFootprint,
    hardware: Hardware,
    workload: Workload,
    *,
    gpu_mem_bytes: float | None = None,
    cpu_mem_bytes: float | None = None,
    disk_mem_bytes: float | None = None,
    weight_format: str | None = None,
    cache_format: str | None = None,
    schedules: Sequence[ScheduleName] = ("refill", "static"),
    gpu_batch_size: int | None = None,
    num_gpu_batches: int | None = None,
    cpu_attention: bool = True,
    overlap: bool = True,
    depths: Depths | None = None,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    page_tokens: int = DEFAULT_PAGE_TOKENS,
    unpack_per_batch: bool = False,
    also: Sequence[Policy] = (),
    full_simulation: bool = False,
) -> SearchResult:
    """The plan with the highest throughput for this model, machine and workload.

    Budgets replace the hardware's capacities. weight_format and cache_format: None keeps the checkpoint's
    and the compute dtype, "auto" also tries int8 and int4, any other name is used as it is. gpu_batch_size,
    num_gpu_batches: fix the block's shape. also: policies that compete too, if they fit.
    Raises ValueError for unknown formats or nonsense; memory that does not suffice is no exception but
    `SearchResult.infeasible`.
    """
    began = time.perf_counter()
    hardware = hardware.with_budgets(
        gpu_mem_bytes=gpu_mem_bytes, cpu_mem_bytes=cpu_mem_bytes, disk_mem_bytes=disk_mem_bytes
    )
    if workload.max_tokens > footprint.max_positions:
        raise ValueError(
            f"prompt and answer have {workload.max_tokens} tokens together, {footprint.name} has"
            f" {footprint.max_positions} positions; shorten one of them"
        )
    if workload.scoring:
        schedules = ("static",)
    known = [f for f in AUTO_WEIGHT_FORMATS if f in footprint.weight_formats]
    weights = [
        footprint.resolve_format(f) for f in _format_choices(weight_format, footprint.native_format, known)
    ]
    caches = _format_choices(cache_format, hardware.compute_dtype, AUTO_CACHE_FORMATS)
    searcher = Searcher(
        footprint,
        hardware,
        workload,
        schedules=tuple(schedules),
        overlap=overlap,
        depths=depths or Depths(),
        chunk_tokens=chunk_tokens,
        page_tokens=page_tokens,
        unpack_per_batch=unpack_per_batch,
    )
    three = hardware.first_tier is Tier.GPU
    fractions = (0.0, 0.5, 1.0) if three and cpu_attention and not workload.scoring else (0.0,)
    grid = GPU_BATCH_SIZES if len(weights) * len(caches) <= 2 else COARSE_GPU_BATCH_SIZES
    sizes = (gpu_batch_size,) if gpu_batch_size else grid
    counts = (num_gpu_batches,) if num_gpu_batches else NUM_GPU_BATCHES
    found: dict[_Shape, _Found | None] = {}
    candidates = searcher.shapes(sizes, counts, weights, caches, fractions)
    if workload.num_requests is not None and not gpu_batch_size:
        # A block that takes in all requests at once.
        exact = [-(-workload.num_requests // n) for n in counts if workload.num_requests >= n]
        candidates += searcher.shapes(
            [b for b in exact if b <= 2 * GPU_BATCH_SIZES[-1]], counts, weights, caches, fractions
        )
    for policy in also:
        named = searcher.given(policy)
        if named is not None:
            searcher.settle(named)
            found[named.shape] = named
    searcher.explore(candidates, found, MAX_PLACED)
    placed = [f for f in found.values() if f is not None]
    if not placed:
        return _infeasible(searcher, weights, caches, began, footprint, hardware)
    best = _rank(searcher, placed)
    if not (gpu_batch_size and num_gpu_batches):
        near = [
            s
            for s in searcher.around(best.shape)
            if (not gpu_batch_size or s.gpu_batch_size == gpu_batch_size)
            and (not num_gpu_batches or s.num_gpu_batches == num_gpu_batches)
            and (workload.num_requests is None or s.block < workload.num_requests + s.num_gpu_batches)
        ]
        tried: dict[_Shape, _Found | None] = {best.shape: best}
        searcher.explore(near, tried, MAX_PLACED_NEAR)
        found |= tried
        best = _rank(searcher, [f for f in tried.values() if f is not None])
    simulation, generated, total = searcher.simulate(best, full=full_simulation)
    front = _front(searcher, candidates, found, best)
    return _result(searcher, best, simulation, generated, total, front, began)


def _rank(searcher: Searcher, placed: Sequence[_Found]) -> _Found:
    """The best by simulated throughput: candidates are simulated until none that is left looks better."""
    best: _Found | None = None
    for n, found in enumerate(sorted(placed, key=lambda f: -f.tokens_per_s)):
        if best is not None and (found.tokens_per_s <= best.tokens_per_s or n >= RANKED):
            break
        if not found.simulated:
            searcher.settle(found)
        if best is None or found.tokens_per_s > best.tokens_per_s:
            best = found
    assert best is not None
    return best


def _front(
    searcher: Searcher, candidates: Sequence[_Shape], found: dict[_Shape, _Found | None], best: _Found
) -> tuple[FrontPoint, ...]:
    """Pareto front: the placed candidates, and one more for each smaller block size."""
    blocks = {f.shape.block for f in found.values() if f is not None}
    sizes = sorted({s.block for s in candidates if s.block < best.shape.block})
    step = max(1, len(sizes) // 6)
    for block in sizes[::step]:
        if any(block / 2 < b <= block for b in blocks):
            continue
        options = [s for s in candidates if s.block == block and s not in found]
        bounded = [(searcher.bound(p, s), s, p) for s in options for p in [searcher.problem(s)]]
        bounded = [item for item in bounded if item[0] > 0]
        if bounded:
            _, shape, problem = max(bounded, key=lambda item: item[0])
            placed = found[shape] = searcher.place(shape, problem, best.tokens_per_s)
            if placed is not None:
                placed.slow_down(max(1.0, min(searcher.ratios.get(shape.kind, [best.ratio]))))
            blocks.add(block)
    return pareto(
        FrontPoint(
            generated_tokens_per_s=f.tokens_per_s,
            latency_seconds=f.latency_seconds,
            policy=f.rounded.policy,
        )
        for f in found.values()
        if f is not None
    )


def _binding(solution: lp.LpSolution | None, simulation: Simulation) -> str:
    if solution is not None and solution.lane_shares:
        return max(solution.lane_shares, key=lambda lane: solution.lane_shares[lane])
    return max(simulation.lanes, key=lambda lane: simulation.lanes[lane], default="compute")


def _helps(found: _Found) -> tuple[tuple[str, float], ...]:
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


def _warnings(searcher: Searcher, found: _Found, tokens_per_s: float) -> list[str]:
    """Says when the plan does not offload, or when another way of running would be faster."""
    hw, workload, footprint = searcher.hardware, searcher.workload, searcher.footprint
    notes = []
    policy = found.rounded.policy
    if hw.first_tier is Tier.GPU:
        if policy.weights.gpu_frac == 1.0 and policy.cache.gpu_frac == 1.0:
            notes.append("everything fits the gpu: this plan does not offload")
        if hw.cpu_gemm_flops_per_s:
            per_token = footprint.flops_per_token() * (workload.prompt_len + workload.gen_len)
            per_token /= max(1, workload.gen_len or workload.prompt_len)
            cpu_only = hw.cpu_gemm_flops_per_s / per_token
            fits = footprint.weight_nbytes(policy.weight_format) <= hw.cpu_mem_bytes
            if fits and cpu_only > tokens_per_s:
                notes.append(
                    f"the CPU alone may reach {cpu_only:.3g} tokens/s, more than offloading:"
                    " try without the gpu"
                )
    elif policy.weights.disk_frac == 0.0 and policy.cache.disk_frac == 0.0:
        notes.append("everything fits memory: this plan does not offload")
    return notes


def _result(
    searcher: Searcher,
    best: _Found,
    simulation: Simulation,
    generated: float,
    total: float,
    front: tuple[FrontPoint, ...],
    began: float,
) -> SearchResult:
    footprint, hw, workload = searcher.footprint, searcher.hardware, searcher.workload
    policy, memory, cost = best.rounded.policy, best.rounded.memory, best.problem.cost
    seconds = simulation.total_seconds
    tokens = generated or total
    series = pass_series(
        workload,
        cost.limits,
        gpu_batch_size=best.shape.gpu_batch_size,
        num_gpu_batches=best.shape.num_gpu_batches,
        schedule=best.shape.schedule,
    )
    run = PlacedRun(cost, memory, depths=searcher.depths)
    moved = bytes_moved(run, series.states)
    rows = sum(s.rows for s in series.states) * cost.n_batches
    processed = sum(s.tokens for s in series.states) * cost.n_batches
    flops = footprint.flops_per_token() * processed + footprint.flops_per_row() * rows
    block_seconds = max(sum(simulation.pass_seconds), 1e-12)
    one_series = generated / series.blocks if series.steady is None else rows
    predicted: dict[str, Any] = {
        "generated_tokens_per_s": generated / seconds,
        "total_tokens_per_s": total / seconds,
        "prefill_seconds": simulation.prefill_seconds,
        "decode_seconds": simulation.decode_seconds,
        "total_seconds": seconds,
        "latency_seconds": best.latency_seconds,
        "lanes": simulation.lanes,
        "bytes_per_token": {k: n / max(one_series or total, 1e-12) for k, n in moved.items()},
        "mfu": flops / block_seconds / max(c.peak for c in hw.gemm.values()),
        "limits": dataclasses.asdict(cost.limits),
        "memory": memory.by_purpose(),
    }
    if hw.price_per_hour:
        predicted["cost_per_million_tokens"] = hw.price_per_hour / 3600 * seconds / max(tokens, 1) * 1e6
    limit = physical_bound(footprint, hw, workload, policy.weight_format)
    binding = _binding(best.solution, simulation)
    warnings = _warnings(searcher, best, tokens / seconds)
    reasons = [
        f"{binding} is what binds",
        f"rounding to whole units costs {best.rounded.gap_frac:.2%} over the linear program's optimum",
        f"{searcher.n_candidates} candidates bounded, {searcher.n_placed} placed by the linear program",
    ]
    if policy.weight_format != footprint.native_format:
        reasons.append(
            f"weights are stored as {policy.weight_format} (checkpoint: {footprint.native_format})"
        )
    if policy.cache_format != hw.compute_dtype:
        reasons.append(f"full cache pages are stored as {policy.cache_format}")
    plan = Plan(
        policy=policy,
        unit_homes=memory.unit_homes,
        page_counts=memory.page_counts,
        planned_bytes=memory.planned_bytes,
        predicted=predicted,
        bound={"generated_tokens_per_s": limit},
        binding_resource=binding,
        notes=(*reasons, *warnings),
    )
    return SearchResult(
        best=plan,
        front=front,
        reasons=tuple(reasons),
        binding_resource=binding,
        search_seconds=time.perf_counter() - began,
        helps=_helps(best),
        warnings=tuple(warnings),
        gap_frac=best.rounded.gap_frac,
        n_candidates=searcher.n_candidates,
        n_placed=searcher.n_placed,
        limits=cost.limits,
        memory=memory,
        simulation=simulation,
    )


def format_gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.3g} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.3g} MB"


def _infeasible(
    searcher: Searcher,
    weight_formats: Sequence[str],
    cache_formats: Sequence[str],
    began: float,
    footprint: ModelFootprint,
    hardware: Hardware,
) -> SearchResult:
    """Which capacity is short by how much for the smallest block, and the least change that would do."""

    def short(wf: str, cf: str) -> dict[str, float]:
        options = []
        for schedule in searcher.schedules:
            shape = _Shape(
                gpu_batch_size=1,
                num_gpu_batches=1,
                weight_format=wf,
                cache_format=cf,
                n_cpu_attention=0,
                schedule=schedule,
            )
            options.append(lp.shortage(searcher.problem(shape)))
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
        f"{footprint.name} does not fit: for one sequence of {searcher.workload.max_tokens} tokens {parts}."
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


class _CallableModule(types.ModuleType):
    """`from policy import search` gives this module; calling it is calling its function of the same name."""

    def __call__(self, *args: Any, **options: Any) -> SearchResult:
        return search(*args, **options)


sys.modules[__name__].__class__ = _CallableModule
