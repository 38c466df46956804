"""What disk transfers share: errors, the direct-I/O alignment of a file, and the pool that keeps several pieces
in flight: in rings of the kernel, and on threads where there are none."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from offload.host import format_bytes
from offload.uring import Ring, open_ring

# Measured on an ext4 virtual disk: 4 MiB pieces reach its rate from 4 in flight on, a single one about 85%
# of it, 1 MiB pieces about 75%; larger pieces and more threads gain nothing.
PIECE_BYTES = 4 << 20
IN_FLIGHT = 8
# Transfers that cannot go straight to their destination pass through a buffer of this size per thread.
BOUNCE_BYTES = 1 << 20

# (file descriptor, buffers, offset) -> bytes moved: os.preadv and os.pwritev, replaceable to inject faults.
VectorIo = Callable[[int, Sequence[Any], int], int]


class DiskError(RuntimeError):
    """A transfer failed. The message names file, place, bytes and remedy."""

    def __init__(
        self,
        action: str,
        path: Path,
        *,
        reason: str,
        offset_bytes: int,
        expected_bytes: int,
        got_bytes: int,
        remedy: str,
    ) -> None:
        super().__init__(
            f"cannot {action} {path} at byte {offset_bytes}: {reason}; expected {expected_bytes} bytes, "
            f"got {got_bytes}; {remedy}"
        )
        self.path = path
        self.offset_bytes = offset_bytes
        self.expected_bytes = expected_bytes
        self.got_bytes = got_bytes


class DiskFullError(DiskError):
    """The disk, or the disk budget, cannot hold what was asked."""

    def __init__(
        self, path: Path, *, asked_bytes: int, free_bytes: int, budget_left_bytes: int | None = None
    ) -> None:
        over_budget = budget_left_bytes is not None and asked_bytes > budget_left_bytes
        budget = (
            "" if budget_left_bytes is None else f" and {format_bytes(budget_left_bytes)} left of the budget"
        )
        remedy = (
            "raise the disk budget (--disk-mem)"
            if over_budget
            else "free some space or name a folder on a larger disk (--disk-dir)"
        )
        RuntimeError.__init__(
            self,
            f"{path} needs {format_bytes(asked_bytes)} of disk space, there are {format_bytes(free_bytes)} "
            f"free{budget}; {remedy}, or place less on disk",
        )
        self.path = path
        self.offset_bytes = 0
        self.expected_bytes = asked_bytes
        self.got_bytes = 0
        self.asked_bytes = asked_bytes
        self.free_bytes = free_bytes
        self.budget_left_bytes = budget_left_bytes


def is_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def query_direct_alignment(fd: int) -> int | None:
    """Bytes that direct I/O on this file must align to (offset, length and memory), from statx.

    0: the file system refuses direct I/O; None: the kernel (before 6.1) or file system does not say.
    """
    try:
        statx = ctypes.CDLL(None, use_errno=True).statx
    except (AttributeError, OSError):
        return None
    at_empty_path, statx_dioalign = 0x1000, 0x2000
    buffer = ctypes.create_string_buffer(256)
    if statx(fd, b"", at_empty_path, statx_dioalign, buffer) != 0:
        return None
    # struct statx: stx_mask at 0, stx_dio_mem_align at 152, stx_dio_offset_align at 156, all 32 bits.
    mask, memory, offset = (
        int.from_bytes(buffer.raw[start : start + 4], sys.byteorder) for start in (0, 152, 156)
    )
    if not mask & statx_dioalign:
        return None
    return 0 if offset == 0 else max(memory, offset)


class Bounce:
    """A thread's own page-aligned buffer: view and address."""

    def __init__(self) -> None:
        mapping = mmap.mmap(-1, BOUNCE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.view = memoryview(mapping)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))


Task = Callable[[Bounce], None]


class DirectPart(NamedTuple):
    """A transfer of whole blocks between `address` and a file opened for direct I/O.

    ended: told the bytes moved, or a negative error number; finishes what is left, or raises.
    """

    fd: int
    address: int
    n_bytes: int
    offset_bytes: int
    write: bool
    ended: Callable[[int], None]


class _Batch:
    """Tasks that several threads take turns to run. After the first failure no further one is started."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = tasks
        self._next = 0
        self._lock = threading.Lock()
        self.error: BaseException | None = None

    def work(self, bounce: Bounce) -> None:
        while True:
            with self._lock:
                if self.error is not None or self._next == len(self._tasks):
                    return
                task = self._tasks[self._next]
                self._next += 1
            try:
                task(bounce)
            except BaseException as error:
                with self._lock:
                    self.error = self.error or error
                return

    def stop(self, error: BaseException) -> None:
        with self._lock:
            self.error = self.error or error


class DiskPool:
    """Keeps pieces of `piece_bytes` in flight. One pool serves all files of a run.

    Direct transfers go through a ring of io_uring, one per thread that asks for them. Where there is none, and
    for what is not direct, up to `n_in_flight` threads move a piece each; the thread that asks for a transfer
    works on it too, so that a write makes progress while reads keep the other threads busy.
    preadv, pwritev: replaceable to inject faults; rings are not used then. make_ring: likewise.
    """

    def __init__(
        self,
        *,
        n_in_flight: int = IN_FLIGHT,
        piece_bytes: int = PIECE_BYTES,
        preadv: VectorIo = os.preadv,
        pwritev: VectorIo = os.pwritev,
        make_ring: Callable[[], Ring | None] = open_ring,
    ) -> None:
        if n_in_flight < 1:
            raise ValueError(f"n_in_flight must be at least 1, got {n_in_flight}")
        if piece_bytes < 4096 or piece_bytes % 4096:
            raise ValueError(f"piece_bytes must be a multiple of 4096, got {piece_bytes}")
        self.n_in_flight = n_in_flight
        self.piece_bytes = piece_bytes
        self.preadv = preadv
        self.pwritev = pwritev
        self._make_ring = make_ring
        self._has_rings = preadv is os.preadv and pwritev is os.pwritev
        self._rings: list[Ring] = []
        self._local = threading.local()
        self._lock = threading.Lock()
        self._n_bounces = 0
        self._executor = ThreadPoolExecutor(max(1, n_in_flight - 1), thread_name_prefix="disk")

    @property
    def measured_bytes(self) -> int:
        """Memory of the threads' bounce buffers so far: at most BOUNCE_BYTES per thread."""
        return self._n_bounces * BOUNCE_BYTES

    def _bounce(self) -> Bounce:
        bounce: Bounce | None = getattr(self._local, "bounce", None)
        if bounce is None:
            bounce = self._local.bounce = Bounce()
            with self._lock:
                self._n_bounces += 1
        return bounce

    def ring(self) -> Ring | None:
        """The calling thread's ring, or None if there are none here."""
        ring: Ring | None = getattr(self._local, "ring", None)
        if ring is None and self._has_rings:
            ring = self._local.ring = self._make_ring()
            with self._lock:
                if ring is None:
                    self._has_rings = False
                else:
                    self._rings.append(ring)
        return ring

    def move(self, parts: Sequence[DirectPart], tasks: Sequence[Task]) -> None:
        """Move parts through the thread's ring while tasks run on threads.

        Raises the first failure once nothing is under way any more; what had not started is left out.
        """
        if not parts:
            self.run(tasks)
            return
        ring = self.ring()
        assert ring is not None, "parts are for rings"
        started = 0
        try:
            while started < len(parts) or ring.in_flight:
                while started < len(parts) and ring.in_flight < ring.n_entries:
                    fd, address, n_bytes, offset_bytes, write, _ = parts[started]
                    ring.push(
                        fd=fd,
                        address=address,
                        n_bytes=n_bytes,
                        offset_bytes=offset_bytes,
                        write=write,
                        tag=started,
                    )
                    started += 1
                if tasks:
                    ring.enter()
                    self.run(tasks)
                    tasks = ()
                # One wake-up for all, unless more are to follow: then as soon as half of the ring is free.
                ring.enter(ring.in_flight if started == len(parts) else ring.n_entries // 2)
                for tag, result in ring.reap():
                    parts[tag].ended(result)
        except BaseException:  # Ctrl-C as well: nothing may write to the buffers later
            ring.drain()
            raise

    def run(self, tasks: Sequence[Task]) -> None:
        """Run all tasks; raise the first failure once none is under way any more."""
        if not tasks:
            return
        if len(tasks) == 1:
            tasks[0](self._bounce())
            return
        batch = _Batch(tasks)
        helpers: list[Future[None]] = []
        try:
            for _ in range(min(self.n_in_flight, len(tasks)) - 1):
                helpers.append(self._executor.submit(lambda: batch.work(self._bounce())))
            batch.work(self._bounce())
            _wait(helpers)
        except BaseException as error:  # Ctrl-C on this thread: nothing may write to the buffers later
            batch.stop(error)
            _wait(helpers)
            raise
        if batch.error is not None:
            raise batch.error

    def close(self) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._has_rings = False
        with self._lock:
            rings, self._rings = self._rings, []
        for ring in rings:
            ring.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _wait(helpers: Sequence[Future[None]]) -> None:
    """Wait for helpers that have started; those that have not are taken back."""
    for helper in helpers:
        if not helper.cancel():
            helper.result()
