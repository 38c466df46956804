"""The simulator: exact on hand-made cases, sampling close to the full run, sharing, traces."""

from __future__ import annotations

from itertools import pairwise

import planner_cases as cases
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cost import run_of

from policy.passes import pass_series
from policy.schedule import Lane, Op, OpKind
from policy.simulate import PlacedRun, run_lanes, simulate
from policy.workload import Workload, limits_for


def op(index: int, lane: Lane, *waits: int, pass_index: int = 0) -> Op:
    return Op(index, OpKind.COMPUTE, lane, 0, 0, -1, waits, pass_index)


CHAIN = [
    (op(0, Lane.DISK_READ), 2.0),
    (op(1, Lane.DISK_READ), 2.0),
    (op(2, Lane.COMPUTE, 0), 3.0),
    (op(3, Lane.COMPUTE, 1), 1.0),
]


def test_lanes_overlap_and_wait() -> None:
    assert run_lanes(CHAIN, 1) == [6.0]


def test_gaps_hold_the_next_pass_back() -> None:
    ops = [(op(0, Lane.COMPUTE), 1.0), (op(1, Lane.COMPUTE, pass_index=1), 1.0)]
    assert run_lanes(ops, 2, pass_gaps=[0.5, 0.25]) == [1.5, 2.75]
    assert run_lanes(ops, 2, pass_gaps=[0.5, 0.25], sharing={"bus": {"compute": 0.1}}) == [1.5, 2.75]


def test_shared_lanes_slow_each_other_down() -> None:
    """Both lanes want a whole core: the read and the computation that overlap run at half speed."""
    both = {"cores": {"disk_read": 1.0, "compute": 1.0}}
    # 0-2 read alone; 2-6 both at half speed, read ends; compute has 1 s left; then 1 s more.
    assert run_lanes(CHAIN, 1, sharing=both) == [8.0]
    light = {"cores": {"disk_read": 0.5, "compute": 1.0}}
    assert 6.0 < run_lanes(CHAIN, 1, sharing=light)[0] < 8.0
    assert run_lanes(CHAIN, 1, sharing={"cores": {"disk_read": 0.4, "compute": 0.6}}) == [6.0]


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([(0.2, 0.5, 0.3), (0.0, 0.0, 1.0), (1.0, 0.0, 0.0)]),
    st.sampled_from([(0.0, 0.5, 0.5), (0.7, 0.3, 0.0)]),
    st.integers(1, 3),
    st.booleans(),
)
def test_both_engines_agree_where_nothing_is_shared(
    weights: tuple[float, float, float], cache: tuple[float, float, float], n: int, overlap: bool
) -> None:
    problem = cases.problem(num_gpu_batches=n, overlap=overlap, n_cpu_attention=n - 1)
    run = run_of(problem, weights, cache, (0.0, 1.0, 0.0))
    states = [state for state, _ in problem.passes]
    timed = list(run.timed_ops(states, ends=True))
    ends = run_lanes(timed, len(states))
    shared = run_lanes(timed, len(states), sharing={"none": {"compute": 0.0}})
    assert shared == pytest.approx(ends, rel=1e-6)
    busy = max(sum(s for o, s in timed if o.lane is lane) for lane in Lane)
    assert ends[-1] >= busy * (1 - 1e-9)
    if not overlap:
        assert ends[-1] == pytest.approx(sum(s for _, s in timed))


def long_run(schedule: str, workload: Workload, **more: object) -> tuple[PlacedRun, object]:
    problem = cases.problem(workload=workload, schedule=schedule, **more)  # type: ignore[arg-type]
    cost = problem.cost
    series = pass_series(
        workload,
        cost.limits,
        gpu_batch_size=cost.gpu_batch_size,
        num_gpu_batches=cost.n_batches,
        schedule=schedule,  # type: ignore[arg-type]
    )
    gpu = cost.three
    run = run_of(
        problem,
        (0.2, 0.5, 0.3) if gpu else (0.0, 0.5, 0.5),
        (0.2, 0.5, 0.3) if gpu else (0.0, 0.6, 0.4),
        (0.0, 1.0, 0.0),
    )
    return run, series


@pytest.mark.parametrize("cache_format", ["f16", "int4"])
@pytest.mark.parametrize("kind", ["gpu", "cpu"])
@pytest.mark.parametrize("n_cpu_attention", [0, 1])
def test_sampled_passes_are_within_one_percent(cache_format: str, kind: str, n_cpu_attention: int) -> None:
    hardware = cases.machine() if kind == "gpu" else cases.cpu_machine()
    if kind == "cpu":
        n_cpu_attention = 0
    run, series = long_run(
        "static",
        Workload(prompt_len=60, gen_len=100),
        hardware=hardware,
        cache_format=cache_format,
        n_cpu_attention=n_cpu_attention,
    )
    full = simulate(run, series, full=True)  # type: ignore[arg-type]
    sampled = simulate(run, series)  # type: ignore[arg-type]
    assert sampled.n_simulated_passes < 0.5 * full.n_simulated_passes
    assert sampled.total_seconds == pytest.approx(full.total_seconds, rel=0.01)
    assert sampled.prefill_seconds == pytest.approx(full.prefill_seconds, rel=0.02)


def test_sampled_refill_is_within_two_percent() -> None:
    run, series = long_run("refill", Workload(prompt_len=60, gen_len=20, num_requests=60))
    full = simulate(run, series, full=True)  # type: ignore[arg-type]
    sampled = simulate(run, series, n_points=6)  # type: ignore[arg-type]
    assert sampled.n_simulated_passes < full.n_simulated_passes
    assert sampled.total_seconds == pytest.approx(full.total_seconds, rel=0.02)


def test_folded_layers_are_close() -> None:
    run, series = long_run("static", Workload(prompt_len=60, gen_len=20), footprint=cases.model(n_layers=24))
    full = simulate(run, series)  # type: ignore[arg-type]
    folded = simulate(run, series, n_layers=8)  # type: ignore[arg-type]
    assert folded.total_seconds == pytest.approx(full.total_seconds, rel=0.05)


def test_steady_state_is_one_pass() -> None:
    run, series = long_run("refill", Workload(prompt_len=60, gen_len=20))
    found = simulate(run, series)  # type: ignore[arg-type]
    assert len(found.pass_seconds) == 1
    assert found.total_seconds >= run.analytic(series.states[0])[0] * (1 - 1e-9)  # type: ignore[attr-defined]


def test_prediction_is_never_below_the_slowest_lane() -> None:
    run, series = long_run("static", Workload(prompt_len=60, gen_len=10))
    found = simulate(run, series, full=True)  # type: ignore[arg-type]
    assert found.total_seconds >= max(found.lanes.values()) * (1 - 1e-9)
    assert all(0 <= u <= 1 for u in found.utilisation.values())


def test_trace_has_chrome_events_that_do_not_overlap_in_a_lane() -> None:
    run, series = long_run("static", Workload(prompt_len=60, gen_len=3))
    events = simulate(run, series, full=True, trace=True).events  # type: ignore[arg-type]
    assert {"name", "ph", "ts", "dur", "pid", "tid"} <= set(events[0]) and events[0]["ph"] == "X"
    lanes = {e["tid"] for e in events}
    assert {"compute", "upload", "disk_read", "download", "disk_write"} <= lanes
    for lane in lanes:
        spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["tid"] == lane)
        assert all(b[0] >= a[1] - 1e-3 for a, b in pairwise(spans))


def test_blocks_repeat_a_static_run() -> None:
    one = Workload(prompt_len=60, gen_len=8, num_requests=16)
    three = Workload(prompt_len=60, gen_len=8, num_requests=48)
    seconds = [simulate(*long_run("static", w)).total_seconds for w in (one, three)]  # type: ignore[arg-type]
    assert seconds[1] == pytest.approx(3 * seconds[0])


def test_a_third_slot_for_weights_hides_that_units_differ_in_size() -> None:
    """Reading and computing level: with two slots the next MLP waits until the last one has been computed."""

    def seconds(slots: int, rate: float) -> tuple[float, dict[Lane, float]]:
        hardware = cases.cpu_machine(cpu_mem_bytes=64 * cases.MIB, disk_read_bytes_per_s=rate, sharing={})
        footprint = cases.model(hidden_size=512, n_layers=12, ffn_size=2048)
        problem = cases.problem(footprint, hardware, num_gpu_batches=1, weights_slots=slots)
        run = run_of(problem, (0.0, 0.0, 1.0), (0.0, 1.0, 0.0), (0.0, 1.0, 0.0))
        states = [problem.passes[1][0]] * 8
        timed = list(run.timed_ops(states, ends=True))
        busy = {lane: sum(s for o, s in timed if o.lane is lane) for lane in (Lane.DISK_READ, Lane.COMPUTE)}
        return run_lanes(timed, len(states))[-1], busy

    _, busy = seconds(2, 1e8)
    level = 1e8 * busy[Lane.DISK_READ] / busy[Lane.COMPUTE]
    two, three = seconds(2, level)[0], seconds(3, level)[0]
    assert two > 1.3 * busy[Lane.COMPUTE]
    assert three < 1.05 * busy[Lane.COMPUTE]


def test_limits_are_shared_with_the_runtime() -> None:
    limits = limits_for(Workload(prompt_len=60, gen_len=8), gpu_batch_size=4, schedule="static")
    assert limits.pass_tokens == 240 and limits.chunk_tokens == 240 and limits.logit_rows == 4
