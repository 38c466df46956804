"""What this host offers: sizes as people write them, and the memory and disk space really available.

Needs no torch, so that command lines and planners can use it.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "k": 2**10,
    "m": 2**20,
    "g": 2**30,
    "t": 2**40,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-z]*|%)\s*", re.IGNORECASE)
# A cgroup v1 group without a limit reports the largest page-aligned int64.
_NO_LIMIT_BYTES = 1 << 60


def parse_bytes(text: str | int, *, total_bytes: int | None = None, what: str = "size") -> int:
    """Read a size: an int of bytes, ``512MB`` (10^6), ``12GiB`` or ``12G`` (2^30), ``80%`` of `total_bytes`.

    Raises ValueError naming `what`.
    """
    if isinstance(text, bool) or not isinstance(text, str | int):
        raise ValueError(f"{what} must be a size such as 12GiB or a whole number of bytes, got {text!r}")
    if isinstance(text, int):
        if text < 0:
            raise ValueError(f"{what} must not be negative, got {text}")
        return text
    match = _SIZE.fullmatch(text)
    unit = match[2].lower() if match else ""
    if match is None or (unit != "%" and unit not in _UNITS):
        raise ValueError(
            f"{what} must be a size such as 12GiB, 512MB, 80% or a number of bytes; got {text!r} "
            f"(units: B, KB, MB, GB, TB, KiB, MiB, GiB, TiB, %)"
        )
    number = float(match[1])
    if unit == "%":
        if total_bytes is None:
            raise ValueError(f"{what} cannot be a percentage here; give bytes such as 12GiB, got {text!r}")
        if number > 100:
            raise ValueError(f"{what} must be at most 100%, got {text!r}")
        return int(total_bytes * number / 100)
    if "." not in match[1]:
        return int(match[1]) * _UNITS[unit]
    return int(number * _UNITS[unit])


def format_bytes(n_bytes: int) -> str:
    """A size for people: ``1.50 GiB``, ``700.0 MiB``, ``512 B``."""
    if abs(n_bytes) >= 2**30:
        return f"{n_bytes / 2**30:.2f} GiB"
    if abs(n_bytes) >= 2**20:
        return f"{n_bytes / 2**20:.1f} MiB"
    if abs(n_bytes) >= 2**10:
        return f"{n_bytes / 2**10:.1f} KiB"
    return f"{n_bytes} B"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Main memory as this process may use it. limited_by: "memory", or the cgroup file that is tighter."""

    total_bytes: int
    available_bytes: int
    limited_by: str = "memory"


def host_memory(
    *,
    proc_cgroup: Path = Path("/proc/self/cgroup"),
    cgroup_root: Path = Path("/sys/fs/cgroup"),
) -> HostMemory:
    """The smaller of what the machine has free and what the process's memory cgroups still allow.

    Reads cgroup v2 (memory.max) and v1 (memory.limit_in_bytes) limits of the process's group and of every
    group above it. Page cache that the kernel can drop counts as available.
    """
    total, available = _machine_memory()
    best = HostMemory(total_bytes=total, available_bytes=available)
    for limit_file, limit, used in _cgroup_limits(proc_cgroup, cgroup_root):
        left = max(0, limit - used)
        if left < best.available_bytes:
            best = HostMemory(
                total_bytes=min(limit, best.total_bytes), available_bytes=left, limited_by=str(limit_file)
            )
        elif limit < best.total_bytes:
            best = HostMemory(
                total_bytes=limit, available_bytes=best.available_bytes, limited_by=best.limited_by
            )
    return best


def _machine_memory(meminfo: Path = Path("/proc/meminfo")) -> tuple[int, int]:
    """(total, available) bytes of the machine: by psutil, else by the kernel's own account."""
    try:
        import psutil
    except ImportError:
        pass
    else:
        machine = psutil.virtual_memory()
        return int(machine.total), int(machine.available)
    kib: dict[str, int] = {}
    try:
        for line in meminfo.read_text().splitlines():
            name, _, rest = line.partition(":")
            if rest.endswith(" kB"):
                kib[name] = int(rest.split()[0])
    except OSError:  # not Linux
        pass
    page = os.sysconf("SC_PAGE_SIZE")
    total = kib["MemTotal"] << 10 if "MemTotal" in kib else page * os.sysconf("SC_PHYS_PAGES")
    free = kib["MemFree"] << 10 if "MemFree" in kib else total // 2
    return total, kib["MemAvailable"] << 10 if "MemAvailable" in kib else free


def _cgroup_limits(proc_cgroup: Path, cgroup_root: Path) -> list[tuple[Path, int, int]]:
    """(limit file, limit, bytes in use that cannot be dropped) of each limited group, innermost first."""
    try:
        lines = proc_cgroup.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, inner = line.split(":", 2)
        if controllers == "":
            root, names = cgroup_root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            root = cgroup_root / "memory"
        else:
            continue
        group = root / inner.lstrip("/")
        # Inside a container the path may be the outer one; the mount's root is then the own group.
        if not group.is_dir():
            group = root
        while True:
            limit, used = _read_int(group / names[0]), _read_int(group / names[1])
            if limit is not None and used is not None and limit < _NO_LIMIT_BYTES:
                droppable = _read_stat(group / "memory.stat", names[2])
                found.append((group / names[0], limit, max(0, used - droppable)))
            if group == root or root not in group.parents:
                break
            group = group.parent
    return found


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None


def _read_stat(path: Path, key: str) -> int:
    try:
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == key:
                return int(value)
    except (OSError, ValueError):
        pass
    return 0


def free_disk_bytes(folder: Path) -> int:
    """Bytes an ordinary user may still write below `folder` (or its nearest existing parent)."""
    folder = folder.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize
