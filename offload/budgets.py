"""How many bytes each tier may use: what the user gave, and safe values for what was left open."""

from __future__ import annotations

from pathlib import Path

from offload.device import Device
from offload.host import format_bytes, free_disk_bytes, host_memory, parse_bytes
from offload.memory import TierBudgets

# Memory that stays free for the interpreter's growth, other programs and the page cache.
_CPU_FREE_FRAC = 0.8
_GPU_FREE_FRAC = 0.9
_DISK_FREE_FRAC = 0.9


def choose_budgets(
    device: Device,
    *,
    cpu_mem: str | int | None = None,
    disk_mem: str | int | None = None,
    disk_dir: Path | None = None,
) -> tuple[TierBudgets, tuple[str, ...]]:
    """The budgets of the three tiers, and notes for the user.

    cpu_mem, disk_mem: sizes such as "12GiB", or "80%" (of the memory available to this process, of the free
        space of disk_dir). Left open, 80% of the available memory, 90% of the accelerator's free memory
        and, if there is a disk_dir, 90% of its free space are taken. The gpu budget is the device's own,
        device.gpu_mem_bytes; an emulated gpu tier spends main memory, so it is taken off an open cpu budget.
    A budget above what is available now is kept, with a note: what the machine runs may change.
    Raises ValueError for a size that cannot be read.
    """
    notes: list[str] = []
    memory = host_memory()
    gpu_bytes = 0
    emulated_bytes = 0
    gpu_memory = device.gpu_memory()
    if gpu_memory is not None:
        free_bytes, _ = gpu_memory
        gpu_bytes = device.gpu_mem_bytes or int(free_bytes * _GPU_FREE_FRAC)
        if gpu_bytes > free_bytes:
            notes.append(_too_much("gpu", gpu_bytes, free_bytes))
        if not device.is_accelerator:
            emulated_bytes = gpu_bytes
    if cpu_mem is None:
        cpu_bytes = max(0, int(memory.available_bytes * _CPU_FREE_FRAC) - emulated_bytes)
    else:
        cpu_bytes = parse_bytes(cpu_mem, total_bytes=memory.available_bytes, what="cpu memory budget")
    if cpu_bytes + emulated_bytes > memory.available_bytes:
        notes.append(_too_much("cpu", cpu_bytes + emulated_bytes, memory.available_bytes))
    free_disk = free_disk_bytes(disk_dir) if disk_dir is not None else 0
    if disk_mem is None:
        disk_bytes = int(free_disk * _DISK_FREE_FRAC)
    else:
        total = free_disk if disk_dir is not None else None
        disk_bytes = parse_bytes(disk_mem, total_bytes=total, what="disk budget")
    if disk_dir is not None and disk_bytes > free_disk:
        notes.append(_too_much("disk", disk_bytes, free_disk))
    return TierBudgets(gpu_bytes=gpu_bytes, cpu_bytes=cpu_bytes, disk_bytes=disk_bytes), tuple(notes)


def _too_much(tier: str, budget_bytes: int, available_bytes: int) -> str:
    return (
        f"the {tier} budget of {format_bytes(budget_bytes)} is more than the {format_bytes(available_bytes)} "
        f"available now; a run that uses all of it would fail"
    )
