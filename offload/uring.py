"""Linux's io_uring, as far as disk transfers need it: many reads and writes submitted and waited for at once.

A thread that moves a unit of several pieces enters the kernel once and wakes once, where a thread per piece
wakes, and waits for a core that computes, for each of them. Source: io_uring(7), io_uring_setup(2) and
io_uring_enter(2), whose structures are laid out alike on all architectures that Python runs on.

The state is the ring's own: what is queued, in flight and not yet reaped follows from its four counters, so
that an interrupt between two statements leaves nothing uncounted.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
import sys
import threading
from typing import Self

RING_ENTRIES = 64

_SYSCALL_SETUP, _SYSCALL_ENTER = 425, 426
_OFFSET_SQES = 0x10000000
_ENTER_GETEVENTS = 1
# One mapping for both queues, completions never dropped, and plain reads and writes (5.6).
_FEATURES = 1 << 0 | 1 << 1 | 1 << 3
_OP_READ, _OP_WRITE = 22, 23
# struct io_uring_sqe: opcode, flags, ioprio, fd, off, addr, len, rw_flags, user_data, and 24 bytes unused.
_SQE = struct.Struct("<BBHiQQIIQ24x")
_SQE_BYTES = 64
_CQE = struct.Struct("<QiI")  # struct io_uring_cqe: user_data, res, flags
_COUNTER = 0xFFFFFFFF


class _Params(ctypes.Structure):
    """struct io_uring_params, its two structs of offsets as arrays."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("sq_entries", "cq_entries", "flags", "sq_thread_cpu")),
        *((name, ctypes.c_uint32) for name in ("sq_thread_idle", "features", "wq_fd")),
        ("resv", ctypes.c_uint32 * 3),
        ("sq_off", ctypes.c_uint32 * 8),  # head, tail, ring_mask, ring_entries, flags, dropped, array, -
        ("sq_user_addr", ctypes.c_uint64),
        ("cq_off", ctypes.c_uint32 * 8),  # head, tail, ring_mask, ring_entries, overflow, cqes, flags, -
        ("cq_user_addr", ctypes.c_uint64),
    )


class Ring:
    """A submission and a completion queue. One thread uses it at a time.

    Buffers must stay in place until their transfer has been reaped.
    """

    def __init__(self, n_entries: int = RING_ENTRIES) -> None:
        """n_entries: most transfers in flight. Raises OSError where the system has no io_uring for us."""
        self.fd = -1
        if not sys.platform.startswith("linux") or sys.byteorder != "little":
            raise OSError(errno.ENOSYS, "io_uring is Linux's, and used on little-endian machines")
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        self._syscall.restype = ctypes.c_long
        params = _Params()
        fd = self._syscall(_SYSCALL_SETUP, ctypes.c_uint(n_entries), ctypes.byref(params))
        if fd < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"io_uring_setup: {os.strerror(number)}")
        self.fd = fd
        self._fence = threading.Lock()
        try:
            if params.features & _FEATURES != _FEATURES:
                raise OSError(errno.ENOSYS, "this kernel's io_uring is too old")
            self._map(params)
        except BaseException:
            os.close(fd)
            self.fd = -1
            raise

    def _map(self, params: _Params) -> None:
        sq, cq = list(params.sq_off), list(params.cq_off)
        n_bytes = max(sq[6] + 4 * params.sq_entries, cq[5] + _CQE.size * params.cq_entries)
        self._queues = mmap.mmap(self.fd, n_bytes)
        self._sqes = mmap.mmap(self.fd, _SQE_BYTES * params.sq_entries, offset=_OFFSET_SQES)
        self._words = memoryview(self._queues).cast("I")
        self._sq_head, self._sq_tail, self._cq_head, self._cq_tail = (
            offset // 4 for offset in (sq[0], sq[1], cq[0], cq[1])
        )
        self._sq_mask, self._cq_mask = self._words[sq[2] // 4], self._words[cq[2] // 4]
        self._cqes = cq[5]
        self.n_entries = int(params.sq_entries)
        for i in range(self.n_entries):  # the n-th entry pushed is the n-th of the array, for good
            self._words[sq[6] // 4 + i] = i

    @property
    def in_flight(self) -> int:
        """Transfers pushed and not yet reaped."""
        return (self._words[self._sq_tail] - self._words[self._cq_head]) & _COUNTER

    def push(self, *, fd: int, address: int, n_bytes: int, offset_bytes: int, write: bool, tag: int) -> None:
        """Queue a transfer between memory and a file; `enter` starts it. tag: comes back with its result."""
        if self.in_flight >= self.n_entries:
            raise RuntimeError(f"the ring holds {self.n_entries} transfers")
        tail = self._words[self._sq_tail]
        opcode = _OP_WRITE if write else _OP_READ
        place = (tail & self._sq_mask) * _SQE_BYTES
        _SQE.pack_into(self._sqes, place, opcode, 0, 0, fd, offset_bytes, address, n_bytes, 0, tag)
        self._words[self._sq_tail] = (tail + 1) & _COUNTER

    def enter(self, n_wait: int = 0) -> None:
        """Start what was pushed and wait until at least n_wait of those in flight have ended.

        May return early (a signal); call again. Raises OSError.
        """
        queued = (self._words[self._sq_tail] - self._words[self._sq_head]) & _COUNTER
        n_wait = min(n_wait, self.in_flight)
        flags = _ENTER_GETEVENTS if n_wait else 0
        if self._syscall(_SYSCALL_ENTER, self.fd, queued, n_wait, flags, None, ctypes.c_size_t(0)) < 0:
            number = ctypes.get_errno()
            if number not in (errno.EINTR, errno.EAGAIN, errno.EBUSY):
                raise OSError(number, f"io_uring_enter: {os.strerror(number)}")

    def reap(self) -> list[tuple[int, int]]:
        """(tag, result) of the transfers that ended: bytes moved, or a negative error number."""
        head, tail = self._words[self._cq_head], self._words[self._cq_tail]
        with self._fence:  # entries are read after the counter that announces them
            ended = []
            while head != tail:
                place = self._cqes + (head & self._cq_mask) * _CQE.size
                tag, result, _ = _CQE.unpack_from(self._queues, place)
                ended.append((tag, result))
                head = (head + 1) & _COUNTER
        self._words[self._cq_head] = head
        return ended

    def drain(self) -> None:
        """Wait until nothing is in flight, whatever its result; Ctrl-C does not shorten it."""
        while self.in_flight:
            try:
                self.enter(self.in_flight)
                self.reap()
            except KeyboardInterrupt:
                continue

    def close(self) -> None:
        """Close the ring; nothing may be in flight."""
        if self.fd >= 0:
            self._words.release()
            self._queues.close()
            self._sqes.close()
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def open_ring() -> Ring | None:
    """A ring, or None where the system has none: another system, an old kernel, or a container that forbids it."""
    try:
        return Ring()
    except OSError:
        return None
