"""What a placed run is predicted to do: throughput, seconds, bytes, beside what no run can exceed.

One fidelity and one set of formulas for every plan, so that plans of any origin can be compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from policy.footprint import ModelFootprint
from policy.hardware import Hardware
from policy.lp import LpSolution
from policy.passes import BatchState, PassSeries
from policy.schedule import Lane
from policy.simulate import PlacedRun, Simulation, simulate
from policy.tiers import Plan, Policy, Tier
from policy.workload import Workload

SIMULATED_LAYERS = 12
SIMULATED_OPS = 24_000
"""Operations of a pass up to which all layers are simulated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontPoint:
    """One trade between throughput and latency. latency_seconds: from a request's start to its end."""

    generated_tokens_per_s: float
    latency_seconds: float
    policy: Policy


# -- simulation --------------------------------------------------------------------------------------------


def simulate_whole(
    run: PlacedRun, series: PassSeries, *, n_ops: int = SIMULATED_OPS, full: bool = False
) -> Simulation:
    """The whole workload; of a large model the first layers stand for all, unless `full`."""
    footprint = run.cost.footprint
    ops = 12 * len(footprint.units) * run.cost.n_batches
    layers = None if full else max(SIMULATED_LAYERS, footprint.n_layers * n_ops // ops)
    return simulate(run, series, n_points=2, full=full, n_layers=layers, refinements=2)


def latency_seconds(simulation: Simulation, workload: Workload, *, schedule: str) -> float:
    """Seconds of one request: its whole block (static), or its prompt's pass and one for each further token."""
    passes = simulation.pass_seconds
    if schedule == "static" or workload.scoring:
        return sum(passes)
    return sum(passes) / max(len(passes), 1) * max(1, workload.gen_len)


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


# -- the plan ----------------------------------------------------------------------------------------------


def predicted(
    run: PlacedRun, series: PassSeries, simulation: Simulation, workload: Workload
) -> dict[str, Any]:
    """The figures of `Plan.predicted`: of a placed run over the passes that were simulated."""
    cost, hardware = run.cost, run.cost.hardware
    footprint = cost.footprint
    seconds = max(simulation.total_seconds, 1e-12)
    rows = sum(s.rows for s in series.states) * cost.n_batches
    processed = sum(s.tokens for s in series.states) * cost.n_batches
    flops = footprint.flops_per_token() * processed + footprint.flops_per_row() * rows
    one_series = series.generated_tokens / series.blocks if series.steady is None else rows
    moved = bytes_moved(run, series.states)
    figures: dict[str, Any] = {
        "generated_tokens_per_s": series.generated_tokens / seconds,
        "total_tokens_per_s": series.total_tokens / seconds,
        "prefill_seconds": simulation.prefill_seconds,
        "decode_seconds": simulation.decode_seconds,
        "total_seconds": seconds,
        "latency_seconds": latency_seconds(simulation, workload, schedule=cost.schedule),
        "lanes": simulation.lanes,
        "bytes_per_token": {
            lane: n / max(one_series or series.total_tokens, 1e-12) for lane, n in moved.items()
        },
        "mfu": flops
        / max(sum(simulation.pass_seconds), 1e-12)
        / max(curve.peak for curve in hardware.gemm.values()),
        "limits": dataclasses.asdict(cost.limits),
        "memory": run.memory.by_purpose(),
    }
    if hardware.price_per_hour:
        tokens = series.generated_tokens or series.total_tokens
        figures["cost_per_million_tokens"] = hardware.price_per_hour / 3600 * seconds / max(tokens, 1) * 1e6
    return figures


def make_plan(
    run: PlacedRun,
    series: PassSeries,
    simulation: Simulation,
    workload: Workload,
    policy: Policy,
    *,
    solution: LpSolution | None = None,
) -> tuple[Plan, tuple[str, ...]]:
    """The plan of a placed run with its prediction, and warnings. solution: of the linear program, if it placed
    the run."""
    cost, memory = run.cost, run.memory
    bound = physical_bound(cost.footprint, cost.hardware, workload, cost.weight_format)
    figures = predicted(run, series, simulation, workload)
    speed = figures["generated_tokens_per_s"] or figures["total_tokens_per_s"]
    plan = Plan(
        policy=policy,
        unit_homes=memory.unit_homes,
        page_counts=memory.page_counts,
        planned_bytes=memory.planned_bytes,
        predicted=figures,
        bound={"generated_tokens_per_s": bound},
        binding_resource=_binding(solution, simulation),
    )
    return plan, _warnings(run, policy, workload, speed)


def _binding(solution: LpSolution | None, simulation: Simulation) -> str:
    if solution is not None and solution.lane_shares:
        return max(solution.lane_shares, key=lambda lane: solution.lane_shares[lane])
    return max(simulation.lanes, key=lambda lane: simulation.lanes[lane], default="compute")


def _warnings(run: PlacedRun, policy: Policy, workload: Workload, tokens_per_s: float) -> tuple[str, ...]:
    """Says when the plan does not offload, or when another way of running would be faster."""
    hardware, footprint = run.cost.hardware, run.cost.footprint
    if hardware.first_tier is not Tier.GPU:
        if policy.weights.disk_frac == 0.0 and policy.cache.disk_frac == 0.0:
            return ("everything fits memory: this plan does not offload",)
        return ()
    notes = []
    if policy.weights.gpu_frac == 1.0 and policy.cache.gpu_frac == 1.0:
        notes.append("everything fits the gpu: this plan does not offload")
    if hardware.cpu_gemm_flops_per_s:
        per_token = footprint.flops_per_token() * (workload.prompt_len + workload.gen_len)
        per_token /= max(1, workload.gen_len or workload.prompt_len)
        cpu_only = hardware.cpu_gemm_flops_per_s / per_token
        fits = footprint.weight_nbytes(run.cost.weight_format) <= hardware.cpu_mem_bytes
        if fits and cpu_only > tokens_per_s:
            notes.append(
                f"the CPU alone may reach {cpu_only:.3g} tokens/s, more than offloading: try without the gpu"
            )
    return tuple(notes)


# -- bounds and trades -------------------------------------------------------------------------------------


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
