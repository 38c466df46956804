"""Accounted memory: every tier's bytes come from arenas of a planned size, and a ledger compares the two."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from offload.device import Device
from offload.host import format_bytes
from policy.tiers import Tier

# Offsets within an arena: a page, which is also what direct I/O asks of memory and of file offsets.
ALIGNMENT = 4096
_HUGE_PAGE_BYTES = 2 << 20


def aligned_bytes(n_bytes: int, alignment: int = ALIGNMENT) -> int:
    """`n_bytes` rounded up to the alignment: what an arena or a spill file really spends on it."""
    return -(-n_bytes // alignment) * alignment


class MemoryBudgetError(MemoryError):
    """Something does not fit the budget that it was given. Raised by the accounting, never by the kernel."""

    def __init__(
        self, *, what: str, where: str, asked_bytes: int, left_bytes: int, capacity_bytes: int
    ) -> None:
        super().__init__(
            f"{what} needs {format_bytes(asked_bytes)} of {where}, of which {format_bytes(left_bytes)} is "
            f"left of {format_bytes(capacity_bytes)}; give that tier more memory (--gpu-mem, --cpu-mem, "
            f"--disk-mem), move more to a slower tier, or use a smaller block"
        )
        self.what = what
        self.asked_bytes = asked_bytes
        self.left_bytes = left_bytes
        self.capacity_bytes = capacity_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TierBudgets:
    """The most bytes that may be used on each tier."""

    gpu_bytes: int = 0
    cpu_bytes: int = 0
    disk_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("gpu_bytes", "cpu_bytes", "disk_bytes"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"{name} must be a whole number of bytes, at least 0; got {value!r}")

    def of(self, tier: Tier) -> int:
        return (self.gpu_bytes, self.cpu_bytes, self.disk_bytes)[tier]


class Arena:
    """One allocation of `capacity_bytes` that hands out page-aligned pieces until it is full.

    tier: whose budget it spends. On an accelerator the gpu tier is device memory; everything else, the
        emulated gpu tier included, is anonymous mapped memory, page-aligned for direct I/O. The system
        backs mapped pages when they are first written, so an arena costs nothing before it is used, but the
        whole capacity is accounted from the start.
    pinned: lock the pages for asynchronous copies to an accelerator (ignored without one). Where the system
        refuses, the memory stays pageable and `notes` says so.
    """

    def __init__(
        self, name: str, tier: Tier, capacity_bytes: int, device: Device, *, pinned: bool = False
    ) -> None:
        if tier is Tier.DISK:
            raise ValueError(f"arena {name!r}: disk space is not memory; use a spill file")
        if capacity_bytes < 0:
            raise ValueError(f"arena {name!r}: capacity must not be negative, got {capacity_bytes}")
        self.name = name
        self.tier = tier
        self.capacity_bytes = aligned_bytes(capacity_bytes)
        self.used_bytes = 0
        self.pinned = False
        self.notes: tuple[str, ...] = ()
        self._report: dict[str, int] = {}
        self._unpin: Callable[[], Any] | None = None
        self._closed = False
        on_device = tier is Tier.GPU and device.is_accelerator
        if on_device:
            self._flat = torch.empty(self.capacity_bytes, dtype=torch.uint8, device=device.torch_device)
        elif self.capacity_bytes == 0:
            self._flat = torch.empty(0, dtype=torch.uint8)
        else:
            self._flat = _mapped(name, self.capacity_bytes)
            if pinned and device.is_accelerator:
                self._pin(device)

    def _pin(self, device: Device) -> None:
        """Pin the mapping itself: torch's own pinned allocator rounds up to a power of two."""
        module: Any = torch.get_device_module(device.torch_device)
        try:
            runtime = module.cudart()
            status = int(runtime.cudaHostRegister(self._flat.data_ptr(), self.capacity_bytes, 0))
            if status != 0:
                raise RuntimeError(f"status {status}")
        except (AttributeError, RuntimeError) as error:
            _clear_device_error(device)
            self.notes += (
                f"{self.name}: could not pin {format_bytes(self.capacity_bytes)} of memory ({error}); "
                f"copies to the {device.kind} device will be slower (is the locked-memory limit, ulimit -l, "
                f"too low?)",
            )
            return
        self.pinned = True
        # The finalizer keeps the mapping alive until it has been unpinned.
        self._unpin = weakref.finalize(self, _unregister, runtime, self._flat)

    @property
    def left_bytes(self) -> int:
        return self.capacity_bytes - self.used_bytes

    @property
    def measured_bytes(self) -> int:
        """The size of the real allocation."""
        return 0 if self._closed else self._flat.untyped_storage().nbytes()

    def take(self, n_bytes: int, what: str) -> torch.Tensor:
        """The next `n_bytes`: (n_bytes,) uint8, contiguous, start aligned to ALIGNMENT. Content undefined.

        Spends aligned_bytes(n_bytes). Raises MemoryBudgetError if that is more than what is left.
        """
        if n_bytes < 0:
            raise ValueError(f"{what}: cannot take {n_bytes} bytes")
        if self._closed:
            raise RuntimeError(f"{what}: arena {self.name} has been released")
        spent = aligned_bytes(n_bytes)
        if spent > self.left_bytes:
            raise MemoryBudgetError(
                what=what,
                where=f"{self.name} ({self.tier.label} memory)",
                asked_bytes=spent,
                left_bytes=self.left_bytes,
                capacity_bytes=self.capacity_bytes,
            )
        start = self.used_bytes
        self.used_bytes += spent
        self._report[what] = self._report.get(what, 0) + spent
        return self._flat[start : start + n_bytes]

    def take_tensor(self, shape: tuple[int, ...], dtype: torch.dtype, what: str) -> torch.Tensor:
        """take() viewed as a contiguous tensor of `shape` and `dtype`. Content undefined."""
        n_elements = 1
        for size in shape:
            n_elements *= size
        return self.take(n_elements * dtype.itemsize, what).view(dtype).view(shape)

    def touch(self) -> None:
        """Have the system back every page that was handed out, now rather than when it is first written.

        Contents stay; nobody may write meanwhile. Device memory is backed from the start.
        """
        if self._flat.device.type == "cpu":
            pages = self._flat[: self.used_bytes : ALIGNMENT]
            pages.copy_(pages.clone())

    def report(self) -> dict[str, int]:
        """Bytes spent by purpose."""
        return dict(self._report)

    def close(self) -> None:
        """Let go of the memory. It is freed when the last tensor taken from it is gone; unpinned at once, so
        no copy may be under way."""
        if not self._closed:
            self._closed = True
            if self._unpin is not None:
                self._unpin()
            self._flat = torch.empty(0, dtype=torch.uint8)


def _mapped(name: str, n_bytes: int) -> torch.Tensor:
    """Anonymous private memory as a uint8 tensor, page-aligned, in huge pages where that pays."""
    try:
        mapping = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{name}: the system refuses {format_bytes(n_bytes)} of memory: {error}") from error
    if n_bytes >= _HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            mapping.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without huge pages
            pass
    return torch.frombuffer(mapping, dtype=torch.uint8)


def _clear_device_error(device: Device) -> None:
    """The runtime remembers a refused call and blames the next kernel launch: let that be this one."""
    try:
        torch.ones(1, device=device.torch_device)
    except RuntimeError:
        pass


def _unregister(runtime: Any, flat: torch.Tensor) -> None:
    runtime.cudaHostUnregister(flat.data_ptr())


class Measurable(Protocol):
    """Something that knows the bytes it really occupies: an Arena, a DiskFile, a SpillFolder."""

    @property
    def measured_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerLine:
    tier: Tier
    purpose: str
    planned_bytes: int
    measured_bytes: int


class Ledger:
    """Planned bytes by tier and purpose beside the bytes of the real allocations."""

    def __init__(self) -> None:
        self._planned: dict[tuple[Tier, str], int] = {}
        self._sources: dict[tuple[Tier, str], list[Measurable | torch.Tensor]] = {}

    def plan(self, tier: Tier, purpose: str, n_bytes: int) -> None:
        """Add to what the plan gives `purpose` on `tier`."""
        if n_bytes < 0:
            raise ValueError(f"planned bytes of {purpose} must not be negative, got {n_bytes}")
        key = (tier, purpose)
        self._planned[key] = self._planned.get(key, 0) + n_bytes

    def track(self, tier: Tier, purpose: str, source: Measurable | torch.Tensor) -> None:
        """Count what `source` really occupies (a tensor: its whole storage) from now on."""
        self._sources.setdefault((tier, purpose), []).append(source)

    def lines(self) -> list[LedgerLine]:
        """One line per tier and purpose. A storage seen twice is counted once, where it was tracked first."""
        seen: set[int] = set()
        measured: dict[tuple[Tier, str], int] = {}
        for key, sources in self._sources.items():
            total = 0
            for source in sources:
                if isinstance(source, torch.Tensor):
                    storage = source.untyped_storage()
                    identity, n_bytes = storage.data_ptr(), storage.nbytes()
                else:
                    identity, n_bytes = id(source), source.measured_bytes
                if n_bytes and identity not in seen:
                    seen.add(identity)
                    total += n_bytes
            measured[key] = total
        keys = sorted({*self._planned, *measured})
        return [
            LedgerLine(
                tier=tier,
                purpose=purpose,
                planned_bytes=self._planned.get((tier, purpose), 0),
                measured_bytes=measured.get((tier, purpose), 0),
            )
            for tier, purpose in keys
        ]

    def planned(self) -> dict[str, int]:
        """Planned bytes by tier label."""
        return _by_tier((line.tier, line.planned_bytes) for line in self.lines())

    def measured(self) -> dict[str, int]:
        """Measured bytes by tier label."""
        return _by_tier((line.tier, line.measured_bytes) for line in self.lines())

    def check(self, budgets: TierBudgets) -> None:
        """Raise MemoryBudgetError, naming the largest part, if the plan asks more than a tier's budget."""
        for tier in Tier:
            lines = [line for line in self.lines() if line.tier is tier]
            total = sum(line.planned_bytes for line in lines)
            if total > budgets.of(tier):
                largest = max(lines, key=lambda line: line.planned_bytes)
                raise MemoryBudgetError(
                    what=largest.purpose,
                    where=f"the {tier.label} budget",
                    asked_bytes=largest.planned_bytes,
                    left_bytes=budgets.of(tier) - (total - largest.planned_bytes),
                    capacity_bytes=budgets.of(tier),
                )


def _by_tier(pairs: Any) -> dict[str, int]:
    totals = {tier.label: 0 for tier in Tier}
    for tier, n_bytes in pairs:
        totals[tier.label] += n_bytes
    return totals
