"""Records of runs: predicted again as they were, and what a refit learns from them."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import planner_cases as cases
import pytest

from policy.audit import (
    FIT_PASSES,
    PhaseTimes,
    RunRecord,
    RunTimes,
    lane_seconds,
    thinned,
    weighted_passes,
)
from policy.calibrate import KNOWN, UNSEEN, refit
from policy.tiers import Placement, Policy
from policy.workload import Workload, limits_for

NOTHING = RunTimes(phases={}, sampling_seconds=0.0)


def record(schedule: str = "static", prompt_len: int = 100, gen_len: int = 12) -> RunRecord:
    workload = Workload(prompt_len=prompt_len, gen_len=gen_len, num_requests=48)
    policy = Policy(
        weights=Placement(gpu_frac=0.2, cpu_frac=0.5, disk_frac=0.3),
        cache=Placement(cpu_frac=0.5, disk_frac=0.5),
        activations=Placement(cpu_frac=1.0),
        gpu_batch_size=8,
        num_gpu_batches=2,
        schedule=schedule,  # type: ignore[arg-type]
    )
    limits = limits_for(
        workload,
        gpu_batch_size=8,
        schedule=policy.schedule,
        page_tokens=16,
        chunk_tokens=256,
        attention_staging_bytes=1 << 18,
        weights_slots=3,
    )
    return RunRecord(
        machine="test",
        machine_id="1",
        footprint=cases.model(),
        policy=policy,
        limits=limits,
        compute_dtype="f16",
        gpu_mem_bytes=float(cases.machine().gpu_mem_bytes),
        workload=workload,
        measured=NOTHING,
    )


def measured_as(run: RunRecord, times: RunTimes, **factors: float) -> RunRecord:
    """The run as if it had taken these times, lanes named in factors so much longer."""
    phases = {
        name: PhaseTimes(
            wall_seconds=phase.wall_seconds,
            busy_seconds={lane: s * factors.get(lane, 1.0) for lane, s in phase.busy_seconds.items()},
        )
        for name, phase in times.phases.items()
    }
    return replace(run, measured=RunTimes(phases=phases, sampling_seconds=times.sampling_seconds))


@pytest.mark.parametrize(
    "lane, constant, schedule",
    [
        ("compute", "gemm", "static"),
        ("compute", "gemm", "refill"),
        ("disk_read", "disk_read_bytes_per_s", "static"),
        ("upload", "upload_bytes_per_s", "refill"),
    ],
)
def test_a_lane_that_took_twice_as_long_halves_its_constant(lane, constant, schedule) -> None:
    hardware = cases.machine()
    runs = [record(schedule), record(schedule, prompt_len=180, gen_len=20)]
    runs = [measured_as(run, run.predict(hardware), **{lane: 2.0}) for run in runs]
    runs = [RunRecord.from_dict(json.loads(json.dumps(run.to_dict()))) for run in runs]
    fitted = refit(hardware, [run.observation(hardware, "run") for run in runs])
    assert fitted.factors[constant] == pytest.approx(0.5, rel=0.12)
    assert fitted.seen[constant] == KNOWN
    assert fitted.error_before > 0.05 and fitted.error_after < 0.01
    for other in {"disk_read_bytes_per_s", "upload_bytes_per_s", "overhead.pass"} - {constant}:
        assert fitted.factors[other] == pytest.approx(1.0, abs=0.05)
    for name in ("cpu_attention.prefill", "unpack_elements_per_s"):
        assert fitted.seen[name] == UNSEEN and fitted.factors[name] == pytest.approx(1.0, abs=0.01)


def test_a_prediction_splits_every_lane_by_phase() -> None:
    hardware, run = cases.machine(), record("refill")
    times = run.predict(hardware)
    passes = weighted_passes(run.series())
    assert sum(n for _, n in passes) == pytest.approx(len(run.series().states) + run.series().extra_passes)
    placed = run.placed(hardware)
    for lane in ("compute", "disk_read", "upload"):
        whole = sum(
            n * next(v for k, v in placed.analytic(state)[1].items() if k.value == lane)
            for state, n in passes
        )
        parts = [phase.busy_seconds.get(lane, 0.0) for phase in times.phases.values()]
        assert sum(parts) == pytest.approx(whole, rel=1e-6) and all(p > 0 for p in parts)
    assert (
        times.wall_seconds
        >= max(
            sum(p.busy_seconds.get(lane, 0.0) for p in times.phases.values())
            for lane in ("compute", "upload")
        )
        * 0.99
    )


def test_twice_the_prompt_takes_more_of_the_prefill() -> None:
    hardware = cases.machine()
    short = record(prompt_len=60).predict(hardware).phases["prefill"].busy_seconds["compute"]
    long = record(prompt_len=120).predict(hardware).phases["prefill"].busy_seconds["compute"]
    assert long > 1.6 * short


def test_few_mean_passes_stand_for_many() -> None:
    hardware, run = cases.machine(), record("refill", gen_len=60)
    passes = weighted_passes(run.series())
    few = thinned(passes, FIT_PASSES)
    assert len(few) <= FIT_PASSES + 2 < len(passes)
    assert sum(n for _, n in few) == pytest.approx(sum(n for _, n in passes))
    slower = hardware.replace(upload_bytes_per_s=hardware.upload_bytes_per_s / 3)
    busy, _ = lane_seconds(run.placed(slower), passes)
    rough = run.observation(hardware, "run").predict(slower)
    for phase, lanes in busy.items():
        for lane, seconds in lanes.items():
            assert rough[f"{phase}/{lane}"] == pytest.approx(seconds, rel=0.03)


@pytest.mark.parametrize(
    "damage, message",
    [
        ({"version": 99}, "record version 99"),
        ({"policy": {"gpu_batch_size": 1}}, "policy lacks"),
        ({"workload": {"prompt_len": 3}}, "not a workload"),
        ({"limits": {"max_tokens": 0}}, "damaged"),
        ({"measured": {}}, "lacks 'phases'"),
        ({"workload": {"prompt_len": 3, "gen_len": 1, "num_requests": math.inf, "lengths": []}}, "damaged"),
        ({"footprint": {"name": "x"}}, "lacks 'kinds'"),
    ],
)
def test_a_damaged_record_says_what_is_wrong(damage, message) -> None:
    hardware, run = cases.machine(), record()
    data = measured_as(run, run.predict(hardware)).to_dict()
    with pytest.raises(ValueError, match=message):
        RunRecord.from_dict({**data, **damage})
    with pytest.raises(ValueError, match="must be an object"):
        RunRecord.from_dict([data])
