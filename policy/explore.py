"""Place candidates one after another, in the order of what they promise, and measure them by simulation.

Each is placed by the linear program and rounded to whole units; the search stops when no bound is above the best
found, so that a first dip stops nothing.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from policy import lp
from policy.candidates import Candidates, Shape
from policy.passes import PassSeries, pass_series
from policy.prediction import SIMULATED_OPS, simulate_whole
from policy.rounding import Rounded, evaluate, excess_bytes, improve, plan_memory, round_solution
from policy.simulate import PlacedRun, Simulation, simulate
from policy.tiers import Policy
from policy.workload import Workload

STOP_GAIN = 1.01
"""A candidate is placed only if its bound promises at least this factor over the best found."""
TRUSTED_RATIOS = 3
EXPLORED_LAYERS = 12
FINE_BUCKETS = 12


@dataclass(slots=True)
class Found:
    """A placed candidate: throughput by its slowest lanes, then by simulation."""

    shape: Shape
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
    """What one search has placed so far."""

    def __init__(self, space: Candidates) -> None:
        self.space = space
        self.n_candidates = self.n_placed = 0
        self.ratios: dict[tuple[object, ...], list[float]] = {}

    def place(self, shape: Shape, problem: lp.Problem, best: float = 0.0, ratio: float = 1.0) -> Found | None:
        """The candidate placed by the linear program and rounded, None if it does not fit.

        One whose optimum promises more than `best` tokens/s is improved if rounding costs much.
        """
        self.n_placed += 1
        solution = lp.solve(problem)
        rounded = round_solution(solution, problem) if solution is not None else None
        if solution is None or rounded is None:
            return None
        if self.space.throughput(problem, solution.seconds_per_token, shape) / ratio > best * STOP_GAIN:
            rounded = improve(rounded, solution, problem)
        return self._found(shape, problem, rounded, solution)

    def _found(
        self, shape: Shape, problem: lp.Problem, rounded: Rounded, solution: lp.LpSolution | None
    ) -> Found:
        # The few mean passes of the LP hide when the slowest lane changes as the cache grows.
        fine = problem
        if problem.ordered:
            fine = lp.make_problem(problem.cost, self.space.workload, n_buckets=FINE_BUCKETS)
        seconds = evaluate(rounded.policy, rounded.memory, fine)
        return Found(
            shape=shape,
            problem=problem,
            rounded=rounded,
            solution=solution,
            seconds_per_token=seconds,
            tokens_per_s=self.space.throughput(problem, seconds, shape),
            latency_seconds=self.space.latency(problem, seconds, shape),
        )

    def given(self, policy: Policy) -> Found | None:
        """A policy that the caller names, as a candidate; None if it does not fit."""
        for slots in self.space.weights_slots:
            shape = Shape(
                gpu_batch_size=policy.gpu_batch_size,
                num_gpu_batches=policy.num_gpu_batches,
                weight_format=self.space.footprint.resolve_format(policy.weight_format),
                cache_format=policy.cache_format,
                n_cpu_attention=policy.num_cpu_attention_batches,
                schedule=policy.schedule,
                weights_slots=slots,
            )
            problem = self.space.problem(shape)
            memory = plan_memory(policy, problem)
            if excess_bytes(memory, problem):
                continue
            seconds = evaluate(policy, memory, problem)
            rounded = Rounded(policy=policy, memory=memory, seconds_per_token=seconds, gap_frac=0.0)
            return self._found(shape, problem, rounded, None)
        return None

    def explore(self, shapes: Iterable[Shape], found: dict[Shape, Found | None], budget: int) -> None:
        """Place candidates in the order of their bounds until none can beat the best found.

        Promising ones are simulated too: what overlap really costs, at the least among those of a kind, is
        then divided out of the bounds of that kind.
        """
        heap: list[tuple[float, int, int, Shape, lp.Problem]] = []
        for given in shapes:
            self.n_candidates += 1
            for bound, shape, problem in self.space.options(given):
                if shape not in found:
                    # Among equal bounds the smaller block has the lower latency.
                    heap.append((-bound, shape.block, len(heap), shape, problem))
        heapq.heapify(heap)
        best = max((f.tokens_per_s for f in found.values() if f is not None), default=0.0)
        adjusted: set[Shape] = set()
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

    def kind_ratio(self, shape: Shape) -> float:
        """The least ratio seen among shapes of this kind, 1 before enough of them were simulated."""
        seen = self.ratios.get(shape.kind, [])
        return max(1.0, min(seen)) if len(seen) >= TRUSTED_RATIOS else 1.0

    # -- ranking -------------------------------------------------------------------------------------------

    def simulated_ratio(self, found: Found, n_layers: int) -> float:
        """Simulated seconds over the slowest lanes' seconds, on the first layers of the model alone."""
        problem = found.problem
        run, workload = self.placed(found), self.space.workload
        series = self.series(found, workload if found.shape.schedule == "static" else _endless(workload))
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

    def settle(self, found: Found) -> None:
        """Replace a candidate's figures by those of a simulation of the whole workload."""
        _, series, simulation = self.simulate(found, n_ops=SIMULATED_OPS // 3)
        tokens = series.generated_tokens or series.total_tokens
        found.slow_down(found.ratio * found.tokens_per_s * simulation.total_seconds / tokens)
        found.simulated = True

    def simulate(
        self, found: Found, *, n_ops: int = SIMULATED_OPS, full: bool = False
    ) -> tuple[PlacedRun, PassSeries, Simulation]:
        """A candidate over the whole workload."""
        run, series = self.placed(found), self.series(found, self.space.workload)
        return run, series, simulate_whole(run, series, n_ops=n_ops, full=full)

    def placed(self, found: Found) -> PlacedRun:
        return PlacedRun(found.problem.cost, found.rounded.memory)

    def series(self, found: Found, workload: Workload) -> PassSeries:
        return pass_series(
            workload,
            found.problem.cost.limits,
            gpu_batch_size=found.shape.gpu_batch_size,
            num_gpu_batches=found.shape.num_gpu_batches,
            schedule=found.shape.schedule,
        )


def _endless(workload: Workload) -> Workload:
    return dataclasses.replace(workload, num_requests=None)
