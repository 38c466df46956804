"""The cost model: exact counts, and one set of formulas for simulator and linear program."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import planner_cases as cases
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy.cost import CostModel
from policy.hardware import Hardware
from policy.lp import Problem
from policy.memory_plan import memory_plan
from policy.passes import BatchState
from policy.schedule import Lane, OpKind
from policy.simulate import PlacedRun
from policy.tiers import Placement, Policy, Tier

FREE = dict.fromkeys(("compute", "transfer", "disk", "cpu_attention", "pass", "row"), 0.0)


def run_of(
    problem: Problem,
    weights: tuple[float, float, float],
    cache: tuple[float, float, float],
    activations: tuple[float, float, float],
) -> PlacedRun:
    def place(p: tuple[float, float, float]) -> Placement:
        return Placement(gpu_frac=p[0], cpu_frac=p[1], disk_frac=p[2])

    cost = problem.cost
    policy = Policy(
        weights=place(weights),
        cache=place(cache),
        activations=place(activations),
        gpu_batch_size=cost.gpu_batch_size,
        num_gpu_batches=cost.n_batches,
        weight_format=cost.weight_format,
        cache_format=cost.cache_format,
        cpu_attention_frac=cost.n_cpu_attention / cost.n_batches,
        schedule=cost.schedule,  # type: ignore[arg-type]
    )
    memory = memory_plan(
        cost.footprint,
        policy,
        cost.limits,
        first_tier=cost.first_tier,
        compute_dtype=cost.hardware.compute_dtype,
    )
    return PlacedRun(cost, memory)


def sums_by_lane(run: PlacedRun, state: BatchState) -> dict[Lane, float]:
    """Seconds by lane of one pass's operations. The weights' loads of the next pass are left out."""
    sums: dict[Lane, float] = defaultdict(float)
    for op, seconds in run.timed_ops([state], ends=True):
        sums[op.lane] += seconds
    return sums


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["gpu", "cpu"]),
    st.integers(1, 3),
    st.sampled_from(["static", "refill"]),
    st.sampled_from([(0.2, 0.5, 0.3), (0.0, 0.0, 1.0), (0.0, 1.0, 0.0), (0.6, 0.2, 0.2)]),
    st.sampled_from([(0.2, 0.5, 0.3), (0.0, 0.0, 1.0), (0.7, 0.3, 0.0)]),
    st.integers(0, 3),
    st.sampled_from(["f16", "int4"]),
    st.sampled_from(["f16", "int4-g64"]),
)
def test_operations_add_up_to_the_lanes(
    kind: str,
    n: int,
    schedule: str,
    weights: tuple[float, float, float],
    cache: tuple[float, float, float],
    attends: int,
    cache_format: str,
    weight_format: str,
) -> None:
    """What the simulator charges op by op is what the linear program's rows charge lane by lane."""
    hardware: Hardware = cases.machine() if kind == "gpu" else cases.cpu_machine()
    hardware = hardware.replace(overhead_seconds=FREE)
    if kind == "cpu":
        weights, cache = (0.0, weights[0] + weights[1], weights[2]), (0.0, cache[0] + cache[1], cache[2])
        attends = 0
    problem = cases.problem(
        hardware=hardware,
        num_gpu_batches=n,
        schedule=schedule,
        n_cpu_attention=min(attends, n),
        weight_format=weight_format,
        cache_format=cache_format,
    )
    run = run_of(problem, weights, cache, (0.0, 1.0, 0.0) if kind == "gpu" else (0.0, 0.5, 0.5))
    for state, _ in problem.passes:
        expected = sums_by_lane(run, state)
        lanes = run.cost.lane_seconds(state, run.flow(state))
        for lane in Lane:
            assert lanes.get(lane, 0.0) == pytest.approx(expected[lane], rel=1e-9, abs=1e-12), (lane, state)


@pytest.mark.parametrize("kind", ["gpu", "cpu"])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("weights", [(0.0, 1.0, 0.0), (0.0, 0.0, 1.0)])
@pytest.mark.parametrize("cache", [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)])
@pytest.mark.parametrize("activations", [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)])
@pytest.mark.parametrize("attends", [0, 1, 3])
def test_pieces_of_weights_have_their_fixed_costs(
    kind: str,
    n: int,
    overlap: bool,
    weights: tuple[float, float, float],
    cache: tuple[float, float, float],
    activations: tuple[float, float, float],
    attends: int,
) -> None:
    """What fixed costs add to the operations, those of the cache apart, they add to the lanes; no more in any case."""
    make = cases.machine if kind == "gpu" else cases.cpu_machine
    if kind == "cpu":  # what would be on the gpu is in memory
        cache, activations = (
            (0.0, cache[0] + cache[1], cache[2]),
            (0.0, activations[0] + activations[1], activations[2]),
        )
        attends = 0
    cache_kinds = {OpKind.READ_CACHE, OpKind.UPLOAD_CACHE, OpKind.DOWNLOAD_CACHE, OpKind.WRITE_CACHE}
    free, dear = (
        run_of(
            cases.problem(
                cases.model(n_layers=1),
                make(overhead_seconds=FREE | over),
                num_gpu_batches=n,
                n_cpu_attention=min(attends, n),
                overlap=overlap,
            ),
            weights,
            cache,
            activations,
        )
        for over in ({}, {"transfer": 1e-3, "disk": 2e-3})
    )
    problem = cases.problem(num_gpu_batches=n)
    for state, _ in problem.passes:
        expected: dict[Lane, float] = defaultdict(float)
        pieces = {1}
        for run, sign in ((dear, 1), (free, -1)):
            for op, seconds in run.timed_ops([state], ends=True):
                if op.kind not in cache_kinds:
                    expected[op.lane] += sign * seconds
                if op.kind in (OpKind.READ_WEIGHTS, OpKind.UPLOAD_WEIGHTS):
                    pieces = {op.n_pieces}
        before, after = (run.cost.lane_seconds(state, run.flow(state)) for run in (free, dear))
        for lane in Lane:
            added = after.get(lane, 0.0) - before.get(lane, 0.0)
            if pieces == {dear.cost.weight_pieces(state, dear.flow(state))}:
                assert added == pytest.approx(expected[lane], rel=1e-9, abs=1e-9), (lane, state)
            assert added <= expected[lane] + 1e-9, (lane, state)
        certain = kind == "gpu" and overlap and not cache[0] and not attends and state.tail_tokens > 0
        if certain:
            assert pieces == {n} == {dear.cost.weight_pieces(state, dear.flow(state))}


def test_transfers_count_exact_bytes_for_grouped_queries() -> None:
    """Bytes up per pass: filled pages and tails of 2 * n_kv_heads * head_dim elements, whatever n_heads."""
    for n_kv_heads in (1, 2, 8):
        hw = cases.machine(upload_bytes_per_s=1.0, overhead_seconds=FREE)
        problem = cases.problem(cases.model(n_kv_heads=n_kv_heads), hw, num_gpu_batches=1)
        state = problem.passes[1][0]
        run = run_of(problem, (1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (1.0, 0.0, 0.0))
        token = 2 * n_kv_heads * 32 * 2
        expected = 6 * (state.filled * 16 + state.tail_tokens) * token
        assert run.cost.lane_seconds(state, run.flow(state))[Lane.UPLOAD] == pytest.approx(expected)


def test_attention_reads_grouped_keys_once() -> None:
    def decode_attention(n_kv_heads: int) -> float:
        fp = cases.model(n_kv_heads=n_kv_heads)
        hw = cases.machine(overhead_seconds=FREE)
        huge = dataclasses.replace(hw.device_attention, decode_flops_per_s=1e30)
        cost = cases.problem(fp, hw.replace(device_attention=huge), num_gpu_batches=1).cost
        kv = fp.units[1].kv
        assert kv is not None
        state = BatchState(decode_tokens=8, context=500)
        return cost._attention_seconds(state, kv, huge, "cache_unpack")

    assert decode_attention(8) == pytest.approx(8 * decode_attention(1))
    assert decode_attention(1) == pytest.approx(8 * 500 * 2 * 32 * 2 / 1e10)


def test_attention_on_the_device_has_a_fixed_cost_per_launch() -> None:
    free = cases.machine(overhead_seconds=FREE)
    dear = free.replace(overhead_seconds={**FREE, "attention": 1e-3})
    state = BatchState(decode_tokens=4, context=65, filled=4, tail_tokens=4, new_tail_tokens=4, rows=4)
    seconds = []
    for hardware in (free, dear):
        cost = cases.problem(cases.model(), hardware).cost
        seconds.append(cost.compute_lane_seconds(state))
    layers = cases.model().n_layers
    assert seconds[1] - seconds[0] == pytest.approx(1e-3 * layers * cost.n_batches)


def test_window_limits_what_attention_reads() -> None:
    full, windowed = cases.model(), cases.model(window=64)
    seconds = []
    for fp in (full, windowed):
        problem = cases.problem(fp, num_gpu_batches=1)
        run = run_of(problem, (1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (1.0, 0.0, 0.0))
        state = BatchState(decode_tokens=8, context=3000, filled=8 * 187, rows=8)
        lanes = run.cost.lane_seconds(state, run.flow(state))
        seconds.append((lanes[Lane.UPLOAD], lanes[Lane.COMPUTE]))
    assert seconds[1][0] < 0.05 * seconds[0][0] and seconds[1][1] < seconds[0][1]


def test_packed_weights_are_unpacked_once_per_unit() -> None:
    def compute(n: int, per_batch: bool) -> float:
        base = cases.problem(num_gpu_batches=n, weight_format="int4-g64").cost
        cost = CostModel(
            base.footprint,
            base.hardware.replace(overhead_seconds=FREE),
            base.limits,
            gpu_batch_size=8,
            num_gpu_batches=n,
            weight_format="int4-g64",
            cache_format="f16",
            schedule="static",
            unpack_per_batch=per_batch,
        )
        state = BatchState(decode_tokens=8, context=50, rows=8)
        flow_run = run_of(
            dataclasses.replace(cases.problem(num_gpu_batches=n, weight_format="int4-g64"), cost=cost),
            (1.0, 0.0, 0.0),
            (1.0, 0.0, 0.0),
            (1.0, 0.0, 0.0),
        )
        return float(cost.lane_seconds(state, flow_run.flow(state))[Lane.COMPUTE])

    elements = sum(u.n_elements for u in cases.model().units)
    assert compute(4, True) - compute(4, False) == pytest.approx(3 * elements / 1e10, rel=1e-6)
    assert compute(1, True) == pytest.approx(compute(1, False))


def test_a_kernel_on_packed_weights_is_used_where_it_is_faster() -> None:
    hw = cases.machine()
    flat = dataclasses.replace(hw.gemm["f16"], flops_per_s=(9e10, 9e10, 9e10))
    fused = hw.replace(gemm={**hw.gemm, "int4-g64": flat})
    few, many = BatchState(decode_tokens=2, rows=2), BatchState(prefill_tokens=800, rows=8)

    def seconds(hardware: Hardware, state: BatchState) -> float:
        cost = cases.problem(hardware=hardware, num_gpu_batches=1, weight_format="int4-g64").cost
        return cost.compute_seconds(OpKind.COMPUTE, 2, state, True)

    assert seconds(fused, few) < seconds(hw, few)
    assert seconds(fused, many) == seconds(hw, many)


def test_growth_of_the_cache_costs_time() -> None:
    problem = cases.problem(num_gpu_batches=1)
    run = run_of(problem, (1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (1.0, 0.0, 0.0))
    early, late = problem.passes[1][0], problem.passes[-1][0]
    assert run.analytic(late)[1][Lane.UPLOAD] > run.analytic(early)[1][Lane.UPLOAD]


def test_without_overlap_lanes_add_up() -> None:
    problem = cases.problem(overlap=False)
    run = run_of(problem, (0.3, 0.4, 0.3), (0.0, 1.0, 0.0), (0.0, 1.0, 0.0))
    state = problem.passes[1][0]
    seconds, lanes = run.analytic(state)
    assert seconds == pytest.approx(sum(lanes.values()) + run.cost.fixed_seconds(state))


def test_shared_resources_bind() -> None:
    problem = cases.problem(hardware=cases.cpu_machine())
    alone = cases.problem(hardware=cases.cpu_machine(sharing={}))
    place = ((0.0, 0.5, 0.5), (0.0, 1.0, 0.0), (0.0, 1.0, 0.0))
    state = problem.passes[1][0]
    shared, free = run_of(problem, *place), run_of(alone, *place)
    lanes = shared.analytic(state)[1]
    cores = lanes[Lane.COMPUTE] + 0.1 * lanes[Lane.DISK_READ] + 0.1 * lanes[Lane.DISK_WRITE]
    assert shared.analytic(state)[0] >= cores
    assert shared.analytic(state)[0] >= free.analytic(state)[0]


def test_cpu_attention_holds_the_device_back() -> None:
    slow = cases.machine(
        cpu_attention=dataclasses.replace(cases.machine().cpu_attention, decode_bytes_per_s=1e7)
    )
    problem = cases.problem(hardware=slow, n_cpu_attention=2)
    state = problem.passes[1][0]
    cost = problem.cost
    attend = cost.compute_seconds(OpKind.CPU_ATTENTION, 1, state, False)
    assert cost.device_seconds(state) >= 6 * 2 * attend
    assert cases.problem(hardware=slow).cost.device_seconds(state) == 0.0


def test_first_tier_decides_what_exists() -> None:
    problem = cases.problem(hardware=cases.cpu_machine())
    run = run_of(problem, (0.0, 0.0, 1.0), (0.0, 0.5, 0.5), (0.0, 1.0, 0.0))
    lanes = run.analytic(problem.passes[1][0])[1]
    assert problem.cost.first_tier is Tier.CPU
    assert Lane.UPLOAD not in lanes and Lane.DOWNLOAD not in lanes and lanes[Lane.DISK_READ] > 0


def test_a_packed_tensor_has_a_fixed_cost_per_product_or_unpacking() -> None:
    free = cases.machine(overhead_seconds=FREE)
    dear = free.replace(overhead_seconds={**FREE, "packed": 1e-3})
    state = BatchState(decode_tokens=4, context=65, filled=4, tail_tokens=4, new_tail_tokens=4, rows=4)

    def seconds(hardware: Hardware, weight_format: str) -> float:
        cost = cases.problem(cases.model(), hardware, weight_format=weight_format).cost
        return cost.compute_lane_seconds(state)

    tensors = sum(len(u.linear_shapes) for u in cases.model().units)
    assert seconds(dear, "f16") == seconds(free, "f16")
    # Unpacked once per unit and pass, whatever the number of gpu batches.
    assert seconds(dear, "int4-g64") - seconds(free, "int4-g64") == pytest.approx(1e-3 * tensors)
