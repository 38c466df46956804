"""Devices, sizes as people write them, memory limits of the host, and budgets left open."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from offload.budgets import choose_budgets
from offload.device import Device, make_device, parse_bytes
from offload.host import format_bytes, free_disk_bytes, host_memory
from policy.tiers import Tier


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("12GiB", 12 << 30),
        ("512MB", 512_000_000),
        ("1.5 GiB", 3 << 29),
        ("700m", 700 << 20),
        ("2T", 2 << 40),
        ("4096", 4096),
        (".5kib", 512),
        ("80%", 800),
        ("0", 0),
        (123, 123),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_parse_bytes(text: str | int, n_bytes: int) -> None:
    assert parse_bytes(text, total_bytes=1000) == n_bytes


@pytest.mark.parametrize("text", ["", "12XiB", "-1GiB", "1e9", "GiB", "110%", -1, True, None, 1.5])
def test_parse_bytes_refuses(text: object) -> None:
    with pytest.raises(ValueError, match="cpu_mem"):
        parse_bytes(text, total_bytes=1000, what="cpu_mem")  # type: ignore[arg-type]


def test_a_percentage_needs_a_total() -> None:
    with pytest.raises(ValueError, match="percentage"):
        parse_bytes("80%")


def test_format_bytes() -> None:
    assert [format_bytes(n) for n in (512, 1536, 700 << 20, 3 << 29)] == [
        "512 B",
        "1.5 KiB",
        "700.0 MiB",
        "1.50 GiB",
    ]


def test_plain_cpu_has_two_tiers_and_a_budget_emulates_the_third() -> None:
    plain, emulated = make_device("cpu"), make_device("cpu", 1 << 20)
    assert (plain.kind, plain.first_tier, plain.gpu_memory()) == ("cpu", Tier.CPU, None)
    assert (emulated.kind, emulated.first_tier) == ("emulated", Tier.GPU)
    assert emulated.gpu_memory() == (1 << 20, 1 << 20)
    assert plain.torch_device == emulated.torch_device == torch.device("cpu")
    assert make_device("cpu", 0).kind == "cpu"


@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without an accelerator")
def test_without_an_accelerator() -> None:
    assert make_device("auto").kind == "cpu"
    emulated = make_device("auto", 1 << 20)
    assert emulated.kind == "emulated" and "emulated" in emulated.notes[0]
    with pytest.raises(ValueError, match="'cuda' was asked for, but torch finds no accelerator"):
        make_device("cuda")
    with pytest.raises(ValueError, match="not known"):
        make_device("quantum")
    with pytest.raises(ValueError, match="negative"):
        make_device("cpu", -1)


def test_kernels_are_tried_when_an_accelerator_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their self test compiles and allocates, which no pass should do."""
    tried: list[str] = []
    monkeypatch.setattr("offload.device.has_triton", tried.append)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert make_device("cpu").kind == "cpu" and not tried
    assert make_device("cuda:1").torch_device == torch.device("cuda", 1) and tried == ["cuda"]


def test_device_refuses_contradictions() -> None:
    cpu = torch.device("cpu")
    with pytest.raises(ValueError, match="no gpu tier"):
        Device(kind="cpu", torch_device=cpu, gpu_mem_bytes=1)
    with pytest.raises(ValueError, match="budget above zero"):
        Device(kind="emulated", torch_device=cpu)
    with pytest.raises(ValueError, match="does not go with"):
        Device(kind="cuda", torch_device=cpu)


@pytest.mark.parametrize(
    ("has_mkldnn", "machine", "avx512_bf16", "expected"),
    [
        (False, "x86_64", True, torch.float32),
        (True, "x86_64", False, torch.float32),  # AVX512 without bf16 instructions
        (True, "x86_64", True, torch.bfloat16),
        (True, "aarch64", False, torch.bfloat16),
    ],
)
def test_auto_dtype_on_cpu(
    monkeypatch: pytest.MonkeyPatch, has_mkldnn: bool, machine: str, avx512_bf16: bool, expected: torch.dtype
) -> None:
    monkeypatch.setattr("torch.ops.mkldnn._is_mkldnn_bf16_supported", lambda: has_mkldnn)
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False, raising=False)
    assert make_device("cpu").compute_dtype("auto") is expected


def test_requested_dtype_on_cpu() -> None:
    device = make_device("cpu")
    assert device.compute_dtype("float32") is torch.float32
    assert device.compute_dtype("bfloat16") is torch.bfloat16
    with pytest.raises(ValueError, match="float16 is not supported on the CPU"):
        device.compute_dtype("float16")
    with pytest.raises(ValueError, match="must be auto"):
        device.compute_dtype("int8")


def _group(folder: Path, limit: str, used: int, inactive: int, names: tuple[str, str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {inactive}\n")


_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = ("memory.max", "memory.current", "inactive_file")


def test_cgroup_v2_limit_of_a_parent_counts(tmp_path: Path) -> None:
    _group(tmp_path / "fs/a", "10000", 4000, 1000, _V2)
    _group(tmp_path / "fs/a/b", "max", 4000, 0, _V2)
    (tmp_path / "cgroup").write_text("0::/a/b\n")
    memory = host_memory(proc_cgroup=tmp_path / "cgroup", cgroup_root=tmp_path / "fs")
    assert memory.available_bytes == 10000 - 3000  # droppable page cache is available
    assert memory.total_bytes == 10000
    assert memory.limited_by.endswith("fs/a/memory.max")


def test_cgroup_v1_limit_and_a_container_path(tmp_path: Path) -> None:
    _group(tmp_path / "fs/memory", "5000", 6000, 0, _V1)
    (tmp_path / "cgroup").write_text("5:cpu:/\n4:memory:/docker/abc\n0::/\n")
    memory = host_memory(proc_cgroup=tmp_path / "cgroup", cgroup_root=tmp_path / "fs")
    assert (memory.total_bytes, memory.available_bytes) == (5000, 0)


def test_without_limits_the_machine_counts(tmp_path: Path) -> None:
    _group(tmp_path / "fs/memory", str(2**63 - 4096), 0, 0, _V1)
    (tmp_path / "cgroup").write_text("4:memory:/\n")
    memory = host_memory(proc_cgroup=tmp_path / "cgroup", cgroup_root=tmp_path / "fs")
    assert memory.limited_by == "memory" and memory.available_bytes <= memory.total_bytes
    assert host_memory(proc_cgroup=tmp_path / "absent").limited_by == "memory"


def test_free_disk_of_a_folder_to_be_made(tmp_path: Path) -> None:
    assert free_disk_bytes(tmp_path / "not" / "yet") > 0


def test_budgets_given_and_open(tmp_path: Path) -> None:
    available = host_memory().available_bytes
    open_, notes = choose_budgets(make_device("cpu"))
    assert open_.gpu_bytes == open_.disk_bytes == 0 and notes == ()
    assert 0.5 * available < open_.cpu_bytes < 0.9 * available
    given, _ = choose_budgets(
        make_device("cpu", 1 << 20), cpu_mem="1GiB", disk_mem="2MiB", disk_dir=tmp_path / "spill"
    )
    assert (given.gpu_bytes, given.cpu_bytes, given.disk_bytes) == (1 << 20, 1 << 30, 2 << 20)
    emulated, _ = choose_budgets(make_device("cpu", 1 << 30))
    assert emulated.cpu_bytes < open_.cpu_bytes - (1 << 29)  # the emulated tier is carved from RAM


def test_budgets_above_what_is_there_are_told(tmp_path: Path) -> None:
    _, notes = choose_budgets(make_device("cpu"), cpu_mem="900TiB", disk_mem="900TiB", disk_dir=tmp_path)
    assert len(notes) == 2 and "cpu budget" in notes[0] and "disk budget" in notes[1]
    with pytest.raises(ValueError, match="disk budget cannot be a percentage"):
        choose_budgets(make_device("cpu"), disk_mem="50%")
