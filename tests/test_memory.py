"""Arenas hand out aligned, accounted memory; the ledger compares plans with real allocations."""

from __future__ import annotations

import gc
import subprocess
import sys
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload.device import make_device
from offload.memory import ALIGNMENT, Arena, Ledger, MemoryBudgetError, TierBudgets, aligned_bytes
from policy.tiers import Tier

CPU = make_device("cpu")


@given(sizes=st.lists(st.integers(0, 20_000), max_size=12))
def test_pieces_are_aligned_disjoint_and_accounted(sizes: list[int]) -> None:
    arena = Arena("test", Tier.CPU, sum(map(aligned_bytes, sizes)), CPU)
    pieces = [arena.take(size, f"piece {i % 3}") for i, size in enumerate(sizes)]
    for i, piece in enumerate(pieces):
        piece.fill_(i + 1)
    for i, (piece, size) in enumerate(zip(pieces, sizes)):
        assert piece.shape == (size,) and piece.dtype == torch.uint8 and piece.is_contiguous()
        assert size == 0 or piece.data_ptr() % ALIGNMENT == 0
        assert bool((piece == i + 1).all())
    assert arena.used_bytes == arena.capacity_bytes == arena.measured_bytes
    assert sum(arena.report().values()) == arena.used_bytes
    with pytest.raises(MemoryBudgetError):
        arena.take(1, "one more")


def test_over_budget_says_what_and_how_much() -> None:
    arena = Arena("weights ring", Tier.CPU, 10 << 20, CPU)
    arena.take(4 << 20, "slot 0")
    with pytest.raises(MemoryBudgetError) as caught:
        arena.take(7 << 20, "slot 1")
    error = caught.value
    assert (error.what, error.asked_bytes, error.left_bytes, error.capacity_bytes) == (
        "slot 1",
        7 << 20,
        6 << 20,
        10 << 20,
    )
    assert "slot 1 needs 7.0 MiB of weights ring (cpu memory), of which 6.0 MiB is left" in str(error)
    assert "--cpu-mem" in str(error)
    assert arena.used_bytes == 4 << 20 and arena.report() == {"slot 0": 4 << 20}


def test_tensors_from_an_arena() -> None:
    arena = Arena("test", Tier.CPU, 1 << 16, CPU)
    ints = arena.take_tensor((3, 5), torch.int32, "ints")
    ints.copy_(torch.arange(15).view(3, 5))
    scalar = arena.take_tensor((), torch.float64, "scalar")
    scalar.fill_(2.5)
    assert ints.tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 12, 13, 14]]
    assert float(scalar) == 2.5 and arena.used_bytes == 2 * ALIGNMENT


def test_an_arena_costs_memory_only_when_used_and_frees_it() -> None:
    process = psutil.Process()
    gc.collect()
    before = process.memory_info().rss
    size = 256 << 20
    arena = Arena("big", Tier.CPU, size, CPU)
    assert arena.measured_bytes == size
    assert process.memory_info().rss - before < size // 4
    piece = arena.take(size, "all of it")
    piece.fill_(1)
    assert process.memory_info().rss - before > size // 2
    arena.close()
    assert bool((piece[:10] == 1).all())  # what was taken stays valid while somebody holds it
    del piece
    gc.collect()
    assert process.memory_info().rss - before < size // 4
    assert arena.measured_bytes == 0
    with pytest.raises(RuntimeError, match="released"):
        arena.take(1, "more")
    arena.close()


def test_emulated_gpu_tier_is_main_memory_and_pinning_needs_an_accelerator() -> None:
    device = make_device("cpu", 1 << 20)
    arena = Arena("ring", Tier.GPU, 1 << 20, device, pinned=True)
    assert arena.take(10, "x").device.type == "cpu" and not arena.pinned and arena.notes == ()


def test_refusals() -> None:
    with pytest.raises(ValueError, match="spill file"):
        Arena("test", Tier.DISK, 1, CPU)
    with pytest.raises(ValueError, match="negative"):
        Arena("test", Tier.CPU, -1, CPU)
    with pytest.raises(ValueError, match="cannot take"):
        Arena("test", Tier.CPU, 1, CPU).take(-1, "x")
    with pytest.raises(ValueError, match="gpu_bytes"):
        TierBudgets(gpu_bytes=-1)
    with pytest.raises(ValueError, match="cpu_bytes"):
        TierBudgets(cpu_bytes=True)


def test_the_system_refusing_is_a_clear_error() -> None:
    with pytest.raises(MemoryError, match=r"huge: the system refuses .* GiB of memory"):
        Arena("huge", Tier.CPU, 1 << 60, CPU)


class _Runtime:
    """Stands for the accelerator's runtime: registers pages, or refuses."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, n_bytes: int, flags: int) -> int:
        if self.status == 0:
            self.registered[address] = n_bytes
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


class _Accelerator:
    kind = "cuda"
    is_accelerator = True
    torch_device = torch.device("meta")


@pytest.mark.parametrize("status", [0, 2])
def test_pinning_and_its_fallback(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    runtime = _Runtime(status)

    class Module:
        @staticmethod
        def cudart() -> _Runtime:
            return runtime

    monkeypatch.setattr(torch, "get_device_module", lambda device: Module)
    device: Any = _Accelerator()
    arena = Arena("staging", Tier.CPU, 1 << 20, device, pinned=True)
    assert arena.pinned == (status == 0)
    assert list(runtime.registered.values()) == ([1 << 20] if status == 0 else [])
    assert (len(arena.notes) == 0) == (status == 0)
    if status:
        assert "staging: could not pin 1.0 MiB" in arena.notes[0]
    arena.take(100, "x").fill_(1)
    arena.close()
    assert runtime.registered == {}
    # Left to the garbage collector, the pages are unpinned as well.
    forgotten = Arena("staging", Tier.CPU, 1 << 20, device, pinned=True)
    del forgotten
    gc.collect()
    assert runtime.registered == {}


class _File:
    measured_bytes = 12288


def test_ledger_compares_planned_and_measured() -> None:
    ledger = Ledger()
    arena = Arena("ring", Tier.CPU, 8192, CPU)
    loose = torch.zeros(100, dtype=torch.float32)
    ledger.plan(Tier.CPU, "weights", 5000)
    ledger.plan(Tier.CPU, "weights", 3192)
    ledger.plan(Tier.DISK, "cache", 8192)
    ledger.track(Tier.CPU, "weights", arena)
    ledger.track(Tier.CPU, "norms", loose[:10])
    ledger.track(Tier.CPU, "norms", loose[50:])  # the same storage, counted once
    ledger.track(Tier.DISK, "cache", _File())
    assert ledger.planned() == {"gpu": 0, "cpu": 8192, "disk": 8192}
    assert ledger.measured() == {"gpu": 0, "cpu": 8192 + 400, "disk": 12288}
    lines = {(line.tier, line.purpose): (line.planned_bytes, line.measured_bytes) for line in ledger.lines()}
    assert lines == {
        (Tier.CPU, "norms"): (0, 400),
        (Tier.CPU, "weights"): (8192, 8192),
        (Tier.DISK, "cache"): (8192, 12288),
    }
    arena.close()
    assert ledger.measured()["cpu"] == 400
    with pytest.raises(ValueError, match="negative"):
        ledger.plan(Tier.CPU, "weights", -1)


def test_ledger_checks_budgets_before_anything_is_allocated() -> None:
    ledger = Ledger()
    ledger.plan(Tier.CPU, "weights ring", 3000)
    ledger.plan(Tier.CPU, "cache", 5000)
    ledger.check(TierBudgets(cpu_bytes=8000))
    with pytest.raises(MemoryBudgetError) as caught:
        ledger.check(TierBudgets(cpu_bytes=7999, gpu_bytes=1 << 30))
    assert (caught.value.what, caught.value.asked_bytes, caught.value.left_bytes) == ("cache", 5000, 4999)
    assert "the cpu budget" in str(caught.value)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_pinned_and_device_arenas() -> None:
    device = make_device("auto")
    staging = Arena("staging", Tier.CPU, 1 << 20, device, pinned=True)
    ring = Arena("ring", Tier.GPU, 1 << 20, device)
    assert staging.pinned or staging.notes
    there, here = ring.take(1 << 20, "slot"), staging.take(1 << 20, "slot")
    here.fill_(7)
    there.copy_(here, non_blocking=True)
    device.synchronize()
    assert int(there.max()) == int(there.min()) == 7
    assert ring.measured_bytes == staging.measured_bytes == 1 << 20
    staging.close()


def test_sizes_and_limits_need_no_torch() -> None:
    code = "import sys, offload.host; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_touching_has_every_page_backed_and_changes_nothing() -> None:
    arena = Arena("test", Tier.CPU, 8 << 20, CPU)
    first, second = arena.take(3 << 20, "first"), arena.take(4 << 20, "second")
    first.random_(0, 256)
    before = first.clone()
    rss = psutil.Process().memory_info().rss
    arena.touch()
    assert psutil.Process().memory_info().rss - rss >= 3 << 20
    assert torch.equal(first, before) and not bool(second.any())
    empty = Arena("empty", Tier.CPU, 0, CPU)
    empty.touch()
