"""Short runs settle the profile: they really run, and what they took moves the constants that explain it."""

from __future__ import annotations

import math
from dataclasses import replace

import planner_cases as cases
import pytest

from flexrun import probe
from offload.device import make_device
from policy import calibrate
from policy.audit import PhaseTimes, RunTimes
from policy.calibrate import apply_factors
from policy.hardware import AttentionRates, Curve, Hardware

TINY = probe.Probe(
    hidden_size=64, ffn=128, n_layers=2, n_heads=4, n_kv_heads=2, block=(2, 2), prompt_len=5, gen_len=3
)


def hardware() -> Hardware:
    """About what a small CPU has, in the type that this CPU computes in."""
    return cases.cpu_machine(
        compute_dtype="f32",
        cpu_mem_bytes=1 << 34,
        gemm={"f32": Curve(tokens=(1, 64, 512), flops_per_s=(1e10, 8e10, 1.2e11))},
        unpack_elements_per_s={"default": 4e9},
        elementwise_bytes_per_s=1e10,
        device_attention=AttentionRates(
            prefill_flops_per_s=4e10, decode_bytes_per_s=2e10, decode_flops_per_s=5e10
        ),
        overhead_seconds={
            "compute": 1e-4,
            "attention": 2e-4,
            "transfer": 3e-5,
            "disk": 1e-4,
            "cpu_attention": 3e-4,
            "pass": 1e-3,
            "row": 2e-5,
        },
    )


def test_a_probe_runs_what_it_says(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(
        probe,
        "PROBES",
        (
            TINY,
            replace(TINY, weight_format="int4-g64"),
            replace(TINY, three_tiers=True, cpu_attention_frac=0.5),
        ),
    )
    said: list[str] = []
    records = []
    run = probe._run
    monkeypatch.setattr(probe, "_run", lambda *args: records.append(run(*args)) or records[-1])
    found = probe.probe_hardware(hardware(), make_device("cpu"), say=said.append)
    assert said == ["short runs"] and found.hardware.source == hardware().source
    assert set(found.factors) == set(probe.CONSTANTS)
    assert len(records) == 3 * probe.ROUNDS

    def doubt(machine: Hardware) -> float:
        """What the refit makes small: deviations of all lanes, a few large ones counting little."""
        observations = [r.observation(machine, "probe") for r in records]
        return sum((1 + (x / 0.3) ** 2) ** 0.5 - 1 for x in calibrate._relative(observations, machine))

    assert doubt(found.hardware) < doubt(hardware())
    untouched = ("disk_read_bytes_per_s", "upload_bytes_per_s", "sharing")  # none of these shares
    assert all(getattr(found.hardware, name) == getattr(hardware(), name) for name in untouched)


def test_reads_that_slow_computing_down_share_the_cores(monkeypatch, tmp_path) -> None:
    """Half a second more of computing for every second of reads is a share of a half."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(probe, "PROBES", (TINY,))
    monkeypatch.setattr(probe, "SHARED", (TINY,))
    run = probe._run
    asked_for: list[bool] = []

    def with_reads(asked, folder, device):
        record = run(asked, folder, device)
        asked_for.append(asked.on_disk)
        assert (record.policy.weights.disk_frac == 1.0) is asked.on_disk
        busy = {"compute": 3.0, "disk_read": 2.0} if asked.on_disk else {"compute": 2.0}
        phases = {
            name: PhaseTimes(wall_seconds=3.0, busy_seconds=busy if name == "decode" else {})
            for name in ("prefill", "decode")
        }
        return replace(record, measured=RunTimes(phases=phases, sampling_seconds=0.0))

    monkeypatch.setattr(probe, "_run", with_reads)
    found = probe.probe_hardware(hardware(), make_device("cpu"))
    assert asked_for == [False, True] * probe.ROUNDS
    assert found.hardware.sharing["cores"]["disk_read"] == pytest.approx(0.5)
    assert found.hardware.sharing["cores"]["compute"] == 1.0


@pytest.mark.parametrize(
    "name, factor", [("gemm", 0.5), ("overhead.compute", 6.0), ("device_attention.decode", 0.3)]
)
def test_what_runs_took_moves_the_constant_behind_it(name, factor, tmp_path, monkeypatch) -> None:
    """Runs that are as slow as on a machine with one other constant bring that constant back."""
    truth = apply_factors(hardware(), {name: factor})
    run = probe._run
    shortened = tuple(
        replace(p, n_layers=min(2, p.n_layers), gen_len=3, block=(2, p.block[1]), prompt_len=16)
        for p in probe.PROBES
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(probe, "ROUNDS", 1)

    def as_on_the_true_machine(asked, folder, device):
        if asked.on_disk:  # as long as in memory: reads cost nothing
            return as_on_the_true_machine(replace(asked, on_disk=False), folder, device)
        record = run(shortened[probe.PROBES.index(asked)], folder, device)
        # The shapes of the whole probe, with the times of the true machine.
        policy = record.policy
        workload = replace(
            record.workload,
            prompt_len=asked.prompt_len,
            gen_len=asked.gen_len,
            num_requests=asked.block[0] * asked.block[1],
            lengths=(),
        )
        limits = replace(
            record.limits,
            max_tokens=asked.prompt_len + asked.gen_len,
            pass_tokens=asked.block[0] * asked.prompt_len,
            mean_pages=None,
        )
        policy = replace(record.policy, gpu_batch_size=asked.block[0], num_gpu_batches=asked.block[1])
        record = replace(record, workload=workload, limits=limits, policy=policy)
        return replace(record, measured=record.predict(truth))

    monkeypatch.setattr(probe, "_run", as_on_the_true_machine)
    found = probe.probe_hardware(hardware(), make_device("cpu"))
    assert found.error_after < 0.5 * found.error_before
    # Constants of like effect share the deviation; the one behind it takes its part in the right direction.
    assert math.log(found.factors[name]) / math.log(factor) > 0.25


def test_a_profile_is_measured_and_probed_once(tmp_path, monkeypatch) -> None:
    from offload import measure

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(measure, "measure_hardware", lambda device, *, folder, say: hardware())
    monkeypatch.setattr(probe, "PROBES", (TINY,))
    device = make_device("cpu")
    first = probe.machine_profile(device)
    monkeypatch.setattr(probe, "PROBES", ())  # would have nothing to refit from
    assert probe.machine_profile(device) == first
    with pytest.raises(ValueError, match="nothing to refit"):
        probe.machine_profile(device, fresh=True)
