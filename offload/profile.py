"""Short measurements of this machine's rates, on the shapes and files that a run uses.

`best_seconds` repeats its work for a fraction of a second and takes the best repetition: what the hardware reaches
when nothing disturbs it, which is what a bound is made of. `typical_seconds` takes medians over rounds that
alternate between all works: what a run of minutes will see, which is what a prediction is made of.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from offload.device import Device
from offload.disk import DiskFile, Extent, read_extents, write_extents
from offload.memory import Arena
from policy.tiers import Tier
from quant.formats import WeightFormat
from quant.linear import linear, unpack
from quant.packed import PackedTensor

_SECONDS = 0.25
_MAX_REPEATS = 50

Key = TypeVar("Key")


def best_seconds(
    work: Callable[[], object], device: Device | None = None, *, seconds: float = _SECONDS
) -> float:
    """The shortest of repeated runs of `work`, which takes `seconds` altogether or runs twice at least."""

    def once() -> float:
        if device is not None:
            device.synchronize()
        began = time.perf_counter()
        work()
        if device is not None:
            device.synchronize()
        return time.perf_counter() - began

    work()  # compiles, allocates, warms caches
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 2 or (time.perf_counter() < end and len(times) < _MAX_REPEATS):
        times.append(once())
    return min(times)


def typical_seconds(
    works: Mapping[Key, Callable[[], object]],
    device: Device | None = None,
    *,
    rounds: int = 5,
    seconds: float = 0.04,
) -> dict[Key, float]:
    """Median seconds of one execution of each work: every round runs each for about `seconds`, one after the other.

    A disturbance of the machine then falls on a round of all works rather than on all rounds of one.
    """

    def timed(work: Callable[[], object], repeats: int) -> float:
        if device is not None:
            device.synchronize()
        began = time.perf_counter()
        for _ in range(repeats):
            work()
        if device is not None:
            device.synchronize()
        return (time.perf_counter() - began) / repeats

    repeats = {}
    for key, work in works.items():
        work()  # compiles, allocates, warms caches
        repeats[key] = max(1, round(seconds / max(timed(work, 1), 1e-5)))
    times: dict[Key, list[float]] = {key: [] for key in works}
    for _ in range(rounds):
        for key, work in works.items():
            times[key].append(timed(work, repeats[key]))
    return {key: statistics.median(seen) for key, seen in times.items()}


def random_weight(shape: tuple[int, int], fmt: WeightFormat, device: Device) -> Tensor | PackedTensor:
    """A matrix of that format with arbitrary finite content."""
    if fmt.is_plain:
        return _random(shape, getattr(torch, fmt.plain_dtype), device)
    buffer = torch.randint(0, 64, (fmt.nbytes(shape),), dtype=torch.uint8)
    return PackedTensor(fmt, shape, buffer.to(device.torch_device))


def _random(shape: tuple[int, int], dtype: torch.dtype, device: Device) -> Tensor:
    # In place: beside a run that fills its budget there is no room for the same in fp32.
    return torch.empty(shape, dtype=dtype, device=device.torch_device).normal_()


def gemm_seconds(shape: tuple[int, int], tokens: int, dtype: torch.dtype, device: Device) -> float:
    """One linear layer with an unpacked weight (out, in) and that many tokens."""
    weight, x = _random(shape, dtype, device), _random((tokens, shape[1]), dtype, device)
    return best_seconds(lambda: linear(x, weight), device)


def packed_linear_seconds(
    shape: tuple[int, int], fmt: WeightFormat, tokens: int, dtype: torch.dtype, device: Device
) -> float:
    """One linear layer of few tokens, multiplied with the packed weight as it is."""
    weight = random_weight(shape, fmt, device)
    x = _random((tokens, shape[1]), dtype, device)
    return best_seconds(lambda: linear(x, weight), device)


def unpack_seconds(shape: tuple[int, int], fmt: WeightFormat, dtype: torch.dtype, device: Device) -> float:
    """Unpacking one weight of that format into a reused buffer of `dtype`."""
    weight = random_weight(shape, fmt, device)
    out = torch.empty(shape, dtype=dtype, device=device.torch_device)
    return best_seconds(lambda: unpack(weight, dtype, out), device)


def read_bytes_per_s(
    pieces: Sequence[tuple[DiskFile, int, int]], slots: Tensor, *, repeats: int = 2
) -> float:
    """Sequential read rate over (file, offset, bytes) pieces, read into the slots (n, bytes), page-aligned, in turn.

    The disk has as much to do at once as it can take: a run that waits between reads does not lower its own bound.
    One slot alone would stay in the processor's cache, where data arrives up to 1.4 times as fast as in memory.
    A round before the others is not counted: a disk that is held to a rate may have saved up for it while idle.
    """
    n_slots, step = slots.shape
    extents = [
        Extent(file, offset, min(n_bytes, step), i % n_slots * step)
        for i, (file, offset, n_bytes) in enumerate(pieces)
    ]
    best = 0.0
    for counts in [False] + [True] * repeats:
        began = time.perf_counter()
        moved = read_extents(extents, slots)
        if counts:
            best = max(best, moved / (time.perf_counter() - began))
    return best


def write_bytes_per_s(file: DiskFile, n_bytes: int, buffer: Tensor) -> float:
    """Write rate of a preallocated file from `buffer`, twice over; the second pass counts (blocks exist)."""
    rate = 0.0
    for _ in range(2):
        began, done = time.perf_counter(), 0
        while done < n_bytes:
            step = min(buffer.numel(), n_bytes - done)
            done += write_extents([Extent(file, done, step, 0)], buffer)
        rate = n_bytes / (time.perf_counter() - began)
    return rate


def copy_bytes_per_s(device: Device, *, upload: bool, n_bytes: int = 64 << 20) -> float:
    """Rate of copies between (pinned) cpu memory and the device's first tier, one way."""
    host = Arena("copy test", Tier.CPU, n_bytes, device, pinned=True)
    there = Arena("copy test", Tier.GPU if device.first_tier is Tier.GPU else Tier.CPU, n_bytes, device)
    a, b = host.take(n_bytes, "copy"), there.take(n_bytes, "copy")
    source, dest = (a, b) if upload else (b, a)
    source.fill_(1)
    seconds = best_seconds(lambda: dest.copy_(source, non_blocking=True), device)
    host.close()
    there.close()
    return n_bytes / seconds


__all__ = [
    "best_seconds",
    "copy_bytes_per_s",
    "gemm_seconds",
    "packed_linear_seconds",
    "random_weight",
    "read_bytes_per_s",
    "typical_seconds",
    "unpack_seconds",
    "write_bytes_per_s",
]
