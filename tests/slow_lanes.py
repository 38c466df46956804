"""Lanes that dawdle and buffers that are filled with NaN as soon as nobody may need them: early reuse shows."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from flexrun.runtime import Runtime
from offload.disk import DiskPool
from policy.schedule import Lane

POISON = 0xFF  # NaN as fp32 and as the fp16 scales of packed pages


def poison(tensor: torch.Tensor) -> None:
    tensor.view(-1).view(torch.uint8).fill_(POISON)


def slow_pool(seed: int, longest_seconds: float) -> DiskPool:
    """A disk whose transfers take up to that much longer, each by another amount."""
    rng = random.Random(seed)

    def late(transfer: Callable[..., int]) -> Callable[..., int]:
        def run(*args: Any) -> int:
            time.sleep(rng.random() * longest_seconds)
            return transfer(*args)

        return run

    return DiskPool(n_in_flight=2, preadv=late(os.preadv), pwritev=late(os.pwritev))


class SlowLanes:
    """Lanes whose operations start late: up to longest_seconds, by lane."""

    def __init__(self, lanes: Any, longest_seconds: dict[Lane, float], seed: int = 0) -> None:
        self._lanes = lanes
        self._longest = longest_seconds
        self._rng = random.Random(seed)

    def submit(self, name: Lane, work: Callable[[], Any], waits: Sequence[Any], label: str) -> Any:
        pause_seconds = self._rng.random() * self._longest.get(name, 0.0)

        def late() -> Any:
            time.sleep(pause_seconds)
            return work()

        return self._lanes.submit(name, late, waits, label)

    def drain(self) -> None:
        self._lanes.drain()


def poison_buffers(runtime: Runtime) -> None:
    """Ring slots hold NaN from the moment that they may be filled until they are, and after they were stored."""
    executor = runtime.executor
    weights, cache, hidden = executor.weights, executor.cache, executor.hidden

    def before(store: Any, name: str, slots: Callable[..., list[torch.Tensor]]) -> None:
        move = getattr(store, name)

        def poisoned(*args: Any) -> Any:
            for slot in slots(*args):
                poison(slot)
            time.sleep(0.001)
            return move(*args)

        setattr(store, name, poisoned)

    def after(store: Any, name: str, slots: Callable[..., list[torch.Tensor]]) -> None:
        move = getattr(store, name)

        def poisoned(*args: Any) -> Any:
            moved = move(*args)
            for slot in slots(*args):
                poison(slot)
            return moved

        setattr(store, name, poisoned)

    def ring(slots: Sequence[torch.Tensor], index: int) -> list[torch.Tensor]:
        return [slots[index]] if slots and index >= 0 else []

    def share_to_read(index: int, slot: int, piece: int, n_pieces: int) -> list[torch.Tensor]:
        # Each piece its own share: two are read at once, and the first need not begin first.
        begin, end = weights.piece(index, piece, n_pieces)
        return [run[begin:end] for run in ring(weights._staging or weights._ring, slot)]

    before(weights, "read", share_to_read)

    def first_upload(index: int, slot: int, staging: int, piece: int, n_pieces: int) -> list[torch.Tensor]:
        return ring(weights._ring, slot) if piece == 0 else []

    def uploaded(index: int, slot: int, staging: int, piece: int, n_pieces: int) -> list[torch.Tensor]:
        begin, end = weights.piece(index, piece, n_pieces)
        return [run[begin:end] for run in ring(weights._staging, staging)]

    before(weights, "upload", first_upload)
    after(weights, "upload", uploaded)
    before(cache, "read", lambda layer, j, slot: ring(cache._staging or cache._ring, slot))
    before(
        cache,
        "upload",
        lambda layer, j, slot, staging: ring(cache._ring, slot) + ring(cache._ring_tails, slot),
    )
    after(cache, "download", lambda layer, j, slot: ring(cache._out, slot) + ring(cache._out_tails, slot))
    after(cache, "write", lambda layer, j, slot: ring(cache._out_staging or cache._out, slot))
    before(hidden, "read", lambda j, slot, n: ring(hidden._staging or hidden._ring, slot))
    before(hidden, "upload", lambda j, slot, n: ring(hidden._ring, slot))
    after(hidden, "download", lambda j, slot, n: ring(hidden._ring, slot))
    after(hidden, "write", lambda j, slot, n: ring(hidden._staging or hidden._ring, slot))
