"""Hardware files: strict reading, presets, curves."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import planner_cases as cases
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.hardware import Curve, Hardware, load_hardware, preset_names
from policy.tiers import Tier


def test_presets_load_and_round_trip(tmp_path: Path) -> None:
    assert {"t4-gcp", "rtx-3090", "rtx-4090", "a6000", "h200"} <= set(preset_names())
    for name in preset_names():
        hw = Hardware.preset(name)
        assert hw.name == name and hw.first_tier is Tier.GPU
        assert hw.source == ("published" if name == "t4-gcp" else "datasheet")
        path = tmp_path / f"{name}.json"
        hw.save(path)
        assert Hardware.load(path) == hw == load_hardware(str(path)) == load_hardware(name)


def test_t4_has_the_published_constants() -> None:
    t4 = Hardware.preset("t4-gcp")
    assert t4.upload_bytes_per_s == 12.89e9
    assert t4.download_cache_bytes_per_s == 0.97e9 and t4.download_bytes_per_s == 4.82e9
    assert t4.disk_write_bytes_per_s == 0.746e9 and t4.disk_write_small_bytes_per_s == 2.015e9
    assert t4.gemm["f16"].rate(1e5) == 21.24e12 and t4.gemm["f16"].rate(64) == pytest.approx(4.3e12)
    assert t4.gpu_mem_bytes == 15 * 2**30 and t4.cpu_mem_bytes == 200 * 2**30


def test_unknown_preset_suggests_the_nearest() -> None:
    with pytest.raises(ValueError, match="rtx-4090"):
        Hardware.preset("rtx4090")


def broken(change: Any) -> dict[str, Any]:
    data = cases.machine().to_dict()
    change(data)
    return data


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda d: d.pop("upload_bytes_per_s"), "lacks upload_bytes_per_s"),
        (
            lambda d: d.update(upload_bytes_per_s=-1),
            "upload_bytes_per_s must be a finite number above 0, got -1",
        ),
        (lambda d: d.update(upload_bytes_per_s=0), "upload_bytes_per_s"),
        (lambda d: d.update(upload_bytes_per_s=math.nan), "upload_bytes_per_s"),
        (lambda d: d.update(disk_read_bytes_per_s=math.inf), "disk_read_bytes_per_s"),
        (lambda d: d.update(upload_bytes_per_s="fast"), "upload_bytes_per_s"),
        (lambda d: d.update(cpu_mem_bytes=True), "cpu_mem_bytes"),
        (lambda d: d.update(gpu_mem_bytes=-5), "gpu_mem_bytes"),
        (lambda d: d.update(uplod_bytes_per_s=1), "did you mean upload_bytes_per_s"),
        (lambda d: d.update(version=2), "version 2"),
        (lambda d: d.update(source="guess"), "source"),
        (lambda d: d.update(compute_dtype="int4"), "compute_dtype"),
        (lambda d: d.update(compute_dtype="bf16"), "gemm lacks"),
        (lambda d: d.update(gemm=[]), "gemm must be an object"),
        (lambda d: d["gemm"]["f16"].update(tokens=[4, 2, 1]), "must increase"),
        (lambda d: d["gemm"]["f16"].update(tokens=[1]), "as many tokens"),
        (lambda d: d["gemm"]["f16"].update(flops_per_s=[1, 0, 1]), r"gemm\.f16.*flops_per_s"),
        (lambda d: d["gemm"]["f16"].update(tokens=5), "must be lists"),
        (lambda d: d["device_attention"].pop("decode_bytes_per_s"), "device_attention lacks"),
        (lambda d: d["cpu_attention"].update(prefill_flops_per_s=math.nan), "cpu_attention"),
        (lambda d: d["overhead_seconds"].pop("pass"), "overhead_seconds lacks pass"),
        (lambda d: d["overhead_seconds"].update(row=-1), r"overhead_seconds\.row"),
        (lambda d: d["unpack_elements_per_s"].pop("default"), 'lacks "default"'),
        (lambda d: d.update(sharing={"cores": {"compute": 2.0}}), "at most 1"),
        (lambda d: d.update(sharing={"cores": {"compte": 0.5}}), "did you mean compute"),
        (lambda d: d.update(sharing={"cores": 3}), r"sharing\.cores must be an object"),
    ],
)
def test_nonsense_gives_one_clear_error(change: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=text):
        Hardware.from_dict(broken(change))
    path = tmp_path / "hardware.json"
    path.write_text(json.dumps(broken(change)))
    with pytest.raises(ValueError, match=r"hardware\.json") as error:
        Hardware.load(path)
    assert "\n" not in str(error.value)


def test_unreadable_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "hardware.json"
    path.write_text("{")
    with pytest.raises(ValueError, match=r"hardware\.json"):
        load_hardware(str(path))
    with pytest.raises(ValueError, match="must be an object"):
        Hardware.from_dict([])


@given(st.floats(0.5, 1e6), st.floats(0.5, 1e6))
def test_curve_never_makes_more_tokens_faster(a: float, b: float) -> None:
    curve = Curve(tokens=(2, 30, 500), flops_per_s=(1e9, 9e9, 2e10))
    low, high = sorted((a, b))
    assert low / curve.rate(low) <= high / curve.rate(high) * (1 + 1e-9)
    assert curve.rate(low) <= curve.rate(high) * (1 + 1e-9) <= 2e10 * (1 + 1e-6)


def test_curve_meets_its_points() -> None:
    curve = Curve(tokens=(2, 30, 500), flops_per_s=(1e9, 9e9, 2e10))
    assert [curve.rate(t) for t in (1, 2, 30, 500, 9999)] == pytest.approx([5e8, 1e9, 9e9, 2e10, 2e10])


def test_budgets_replace_capacities_and_choose_the_first_tier() -> None:
    hw = cases.machine()
    assert hw.with_budgets(gpu_mem_bytes=0).first_tier is Tier.CPU
    assert hw.with_budgets(cpu_mem_bytes=7).capacity(Tier.CPU) == 7
    assert hw.with_budgets() == hw
    with pytest.raises(ValueError, match="cpu_mem_bytes"):
        hw.with_budgets(cpu_mem_bytes=0)
