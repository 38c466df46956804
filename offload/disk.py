"""Files read and written in large aligned pieces, several in flight, past the page cache where possible.

Direct I/O needs file offset, length and memory address aligned alike. What is not (the ends of an odd
range, or a whole range whose memory is aligned differently from its file offset) passes through a small
buffer per thread. To read an odd range without that copy, give it a destination whose address equals the
file offset modulo DiskFile.alignment_bytes.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterable, Sequence
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import torch

from offload.disk_io import (
    BOUNCE_BYTES,
    Bounce,
    DirectPart,
    DiskError,
    DiskFullError,
    DiskPool,
    Task,
    is_full,
    query_direct_alignment,
)
from offload.host import free_disk_bytes

__all__ = [
    "CacheUse",
    "DiskError",
    "DiskFile",
    "DiskFullError",
    "DiskPool",
    "Extent",
    "choose_cache_use",
    "read_extents",
    "write_extents",
]


class CacheUse(Enum):
    """What a file's transfers do to the system's page cache."""

    DROP = "drop"  # go past it (direct I/O), or give the pages back at once
    KEEP = "keep"  # ordinary buffered reads: for files that fit in spare memory


def choose_cache_use(file_bytes: int, spare_bytes: int) -> CacheUse:
    """KEEP if files of `file_bytes`, read again each pass, fit in memory that nothing else will need.

    A cyclic read larger than the cache evicts every page before its next use, so it is all or nothing.
    """
    return CacheUse.KEEP if file_bytes <= spare_bytes else CacheUse.DROP


class DiskFile:
    """A file opened for direct I/O, or with ordinary I/O where the file system refuses it.

    direct: whether transfers go past the page cache now. alignment_bytes: what direct transfers align to.
    notes: why direct I/O is not used, if it was wanted.
    """

    def __init__(
        self,
        path: Path,
        pool: DiskPool,
        *,
        writable: bool = False,
        cache_use: CacheUse = CacheUse.DROP,
        direct: bool = True,
    ) -> None:
        """Open an existing file; one to write to already has its full size. Raises DiskError.

        direct=False asks for ordinary I/O from the start.
        """
        self.path = path
        self.pool = pool
        self.writable = writable
        self.cache_use = cache_use
        self.direct = False
        self.alignment_bytes = 4096
        self.notes: tuple[str, ...] = ()
        self._direct_fd = -1
        self._fd = -1
        access = (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC
        try:
            self._fd = os.open(path, access)
            self.size_bytes = os.fstat(self._fd).st_size
        except OSError as error:
            self.close()
            raise DiskError(
                "open",
                path,
                reason=error.strerror or str(error),
                offset_bytes=0,
                expected_bytes=0,
                got_bytes=0,
                remedy="check that the file is there and may be read",
            ) from error
        if direct and cache_use is CacheUse.DROP:
            self._open_direct(access)

    def _open_direct(self, access: int) -> None:
        flag = getattr(os, "O_DIRECT", 0)
        alignment = query_direct_alignment(self._fd)
        if flag == 0 or alignment == 0:
            self._fall_back("the file system has no direct I/O")
            return
        try:
            self._direct_fd = os.open(self.path, access | flag)
        except OSError as error:
            self._fall_back(f"the file system refuses direct I/O ({error.strerror})")
            return
        self.alignment_bytes = max(512, alignment) if alignment is not None else 4096
        self.direct = True

    def _fall_back(self, reason: str) -> None:
        self.direct = False
        if not self.notes:
            self.notes = (f"{self.path}: ordinary reads and writes, because {reason}",)

    @property
    def measured_bytes(self) -> int:
        """Disk space that the file really occupies: its blocks, not its length."""
        return os.fstat(self._fd).st_blocks * 512 if self._fd >= 0 else 0

    # -- whole transfers -----------------------------------------------------------------------------

    def read_into(self, dest: torch.Tensor, offset_bytes: int = 0, n_bytes: int | None = None) -> int:
        """Fill dest[:n_bytes] (uint8, contiguous, CPU; default all of it) from `offset_bytes` of the file.

        Any offset, size and address will do; aligned ones are fastest. Returns n_bytes. Raises DiskError.
        """
        n_bytes = dest.numel() if n_bytes is None else n_bytes
        return read_extents([Extent(self, offset_bytes, n_bytes, 0)], dest)

    def write_from(self, src: torch.Tensor, offset_bytes: int = 0, n_bytes: int | None = None) -> int:
        """Write src[:n_bytes] (uint8, contiguous, CPU; default all) at `offset_bytes`. Returns n_bytes.

        Raises DiskFullError or DiskError.
        """
        n_bytes = src.numel() if n_bytes is None else n_bytes
        return write_extents([Extent(self, offset_bytes, n_bytes, 0)], src)

    def sync(self) -> None:
        """Have what was written on the disk itself."""
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise self._error("write", error, 0, self.size_bytes, 0) from error

    def close(self) -> None:
        for name in ("_direct_fd", "_fd"):
            fd = getattr(self, name)
            setattr(self, name, -1)
            if fd >= 0:
                os.close(fd)
        self.direct = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # -- pieces, through the pool --------------------------------------------------------------------

    def _cut(
        self, view: memoryview, address: int, offset: int, *, write: bool, ringed: bool
    ) -> tuple[list[DirectPart], list[Task]]:
        """A piece as what goes through a ring and what is left to threads."""
        move = self._write_piece if write else self._read_piece

        def task(begin: int, end: int) -> Task:
            return lambda bounce: move(view[begin:end], address + begin, offset + begin, bounce)

        head, middle = self._split(address, offset, len(view)) if self.direct and ringed else (0, 0)
        if not middle:
            return [], [task(0, len(view))]
        action = "write" if write else "read"

        def ended(result: int) -> None:
            part = view[head : head + middle]
            if result < 0:
                self._refused(action, OSError(-result, os.strerror(-result)), offset + head, middle, 0, True)
            self._move(action, part, offset + head, done=max(result, 0))

        part = DirectPart(self._direct_fd, address + head, middle, offset + head, write, ended)
        ends = [(0, head)] * (head > 0) + [(head + middle, len(view))] * (head + middle < len(view))
        return [part], [task(*end) for end in ends]

    def _read_piece(self, view: memoryview, address: int, offset: int, bounce: Bounce) -> None:
        """Fill `view`, which lies at `address`, from `offset`."""
        if self.direct:
            head, middle = self._split(address, offset, len(view))
            direct = head + middle
            if head:
                self._read_bounced(head, address, offset, bounce)
            if middle:
                self._move("read", view[head:direct], offset + head)
            if direct < len(view):
                self._read_bounced(len(view) - direct, address + direct, offset + direct, bounce)
        else:
            self._move("read", view, offset)
            if self.cache_use is CacheUse.DROP and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._fd, offset, len(view), os.POSIX_FADV_DONTNEED)

    def _write_piece(self, view: memoryview, address: int, offset: int, bounce: Bounce) -> None:
        if not self.direct:
            self._move("write", view, offset)
            return
        head, middle = self._split(address, offset, len(view))
        direct = head + middle
        if head:
            self._write_bounced(view[:head], address, offset, bounce)
        if middle:
            self._move("write", view[head:direct], offset + head)
        if direct < len(view):
            self._write_bounced(view[direct:], address + direct, offset + direct, bounce)

    def _split(self, address: int, offset: int, n_bytes: int) -> tuple[int, int]:
        """Bytes before the part that can go directly, and that part's size."""
        alignment = self.alignment_bytes
        if (address - offset) % alignment:
            return 0, 0
        head = min(-offset % alignment, n_bytes)
        return head, (n_bytes - head) // alignment * alignment

    def _read_bounced(self, n_bytes: int, address: int, offset: int, bounce: Bounce) -> None:
        """Read the aligned blocks around a range into the bounce buffer and copy the range to `address`."""
        done = 0
        while done < n_bytes:
            skip = (offset + done) % self.alignment_bytes
            size = min(n_bytes - done, BOUNCE_BYTES - skip)
            blocks = -(-(skip + size) // self.alignment_bytes) * self.alignment_bytes
            self._move("read", bounce.view[:blocks], offset + done - skip, needed=skip + size)
            # memmove, because copying one memoryview to another would hold the interpreter lock.
            ctypes.memmove(address + done, bounce.address + skip, size)
            done += size

    def _write_bounced(self, view: memoryview, address: int, offset: int, bounce: Bounce) -> None:
        """Whole blocks go through the bounce buffer; the ragged ends through the page cache, because writing
        a block back from a copy would undo a neighbour's write. The kernel keeps the two coherent."""
        done = 0
        while done < len(view):
            left, lead = len(view) - done, -(offset + done) % self.alignment_bytes
            if lead or left < self.alignment_bytes:
                size = min(left, lead or left)
                self._move("write", view[done : done + size], offset + done, buffered=True)
            else:
                size = min(left, BOUNCE_BYTES) // self.alignment_bytes * self.alignment_bytes
                ctypes.memmove(bounce.address, address + done, size)
                self._move("write", bounce.view[:size], offset + done)
            done += size

    def _move(
        self,
        action: str,
        view: memoryview,
        offset: int,
        *,
        needed: int | None = None,
        buffered: bool = False,
        done: int = 0,
    ) -> None:
        """Read or write all of `view` (at least its first `needed` bytes), resuming after `done` bytes and after
        short transfers."""
        needed = len(view) if needed is None else needed
        transfer = self.pool.preadv if action == "read" else self.pool.pwritev
        while done < needed:
            # The remainder of a transfer cut short at an odd place cannot go on directly.
            direct = self.direct and not buffered and done % self.alignment_bytes == 0
            try:
                n = transfer(self._direct_fd if direct else self._fd, [view[done:]], offset + done)
            except OSError as error:
                self._refused(action, error, offset, needed, done, direct)
                continue
            if n == 0:
                raise DiskError(
                    action,
                    self.path,
                    reason=f"the file ends at byte {os.fstat(self._fd).st_size}",
                    offset_bytes=offset,
                    expected_bytes=needed,
                    got_bytes=done,
                    remedy="the file was cut short after it was opened or copied; get or build it again",
                )
            done += n

    def _refused(
        self, action: str, error: OSError, offset: int, expected: int, got: int, direct: bool
    ) -> None:
        """Raise what a transfer's error means, unless it is one that ordinary I/O does not have."""
        if not direct or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise self._error(action, error, offset, expected, got) from error
        self._fall_back(f"the file system refused a direct {action} ({error.strerror})")

    def _error(self, action: str, error: OSError, offset: int, expected: int, got: int) -> DiskError:
        if is_full(error):
            return DiskFullError(
                self.path, asked_bytes=expected - got, free_bytes=free_disk_bytes(self.path.parent)
            )
        return DiskError(
            action,
            self.path,
            reason=f"{error.strerror or error} ({errno.errorcode.get(error.errno or 0, 'unknown error')})",
            offset_bytes=offset,
            expected_bytes=expected,
            got_bytes=got,
            remedy="check the disk (system log) and its mount, or move the file to another disk",
        )


class Extent(NamedTuple):
    """`n_bytes` at `offset_bytes` of a file, and where they lie in the tensor."""

    file: DiskFile
    offset_bytes: int
    n_bytes: int
    tensor_offset_bytes: int


def read_extents(extents: Iterable[Extent | tuple[DiskFile, int, int, int]], dest: torch.Tensor) -> int:
    """Fill `dest` (uint8, contiguous, CPU) from many places at once; neighbours are read together.

    Returns the bytes read. Raises DiskError naming the first piece that failed, when none is under way.
    """
    return _transfer([Extent(*extent) for extent in extents], dest, write=False)


def write_extents(extents: Iterable[Extent | tuple[DiskFile, int, int, int]], src: torch.Tensor) -> int:
    """Write parts of `src` (uint8, contiguous, CPU) to many places at once. Returns the bytes written."""
    pieces = [Extent(*extent) for extent in extents]
    n_bytes = _transfer(pieces, src, write=True)
    for file in {piece.file for piece in pieces}:
        # Only clean pages can be given back.
        if not file.direct and file.cache_use is CacheUse.DROP and hasattr(os, "posix_fadvise"):
            file.sync()
            os.posix_fadvise(file._fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return n_bytes


def _coalesce(extents: Sequence[Extent]) -> list[Extent]:
    """Join extents that follow each other both in the file and in memory; leave out empty ones."""
    joined: list[Extent] = []
    for extent in extents:
        if extent.n_bytes == 0:
            continue
        if joined:
            last = joined[-1]
            if (
                last.file is extent.file
                and last.offset_bytes + last.n_bytes == extent.offset_bytes
                and last.tensor_offset_bytes + last.n_bytes == extent.tensor_offset_bytes
            ):
                joined[-1] = last._replace(n_bytes=last.n_bytes + extent.n_bytes)
                continue
        joined.append(extent)
    return joined


def _transfer(extents: Sequence[Extent], tensor: torch.Tensor, *, write: bool) -> int:
    if tensor.dtype != torch.uint8 or tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(
            f"disk transfers need a contiguous uint8 tensor in main memory, got {tensor.dtype} on "
            f"{tensor.device}, contiguous: {tensor.is_contiguous()}"
        )
    view = memoryview(tensor.view(-1).numpy().data)
    address = tensor.data_ptr()
    parts: list[DirectPart] = []
    tasks: list[Task] = []
    ringed = bool(extents) and extents[0].file.pool.ring() is not None
    total = 0
    for extent in _coalesce(extents):
        file, offset, n_bytes, place = extent
        if offset < 0 or n_bytes < 0 or place < 0 or place + n_bytes > len(view):
            raise ValueError(
                f"{file.path}: {n_bytes} bytes at tensor offset {place} do not lie within {len(view)} bytes"
            )
        _check_range(file, offset, n_bytes, write=write)
        piece_bytes = file.pool.piece_bytes
        end = offset + n_bytes
        while offset < end:
            # Cut at multiples of the piece size in the file, so that only an extent's own ends are ragged.
            stop = min(end, (offset // piece_bytes + 1) * piece_bytes)
            piece = view[place : place + stop - offset]
            direct, others = file._cut(piece, address + place, offset, write=write, ringed=ringed)
            parts.extend(direct)
            tasks.extend(others)
            place += stop - offset
            offset = stop
        total += n_bytes
    if parts or tasks:
        extents[0].file.pool.move(parts, tasks)
    return total


def _check_range(file: DiskFile, offset: int, n_bytes: int, *, write: bool) -> None:
    action = "write" if write else "read"
    reason, remedy = "", ""
    if file._fd < 0:
        reason, remedy = "it has been closed", "keep the file open while it is used"
    elif write and not file.writable:
        reason, remedy = "it was opened for reading only", "open it with writable=True"
    elif not write and offset + n_bytes > file.size_bytes:
        reason = f"the file ends at byte {file.size_bytes}"
        remedy = "the file is incomplete; get or build it again"
    elif write and offset + n_bytes > file.size_bytes:
        reason = f"the file was given {file.size_bytes} bytes"
        remedy = "preallocate it for all that it is to hold"
    if reason:
        raise DiskError(
            action,
            file.path,
            reason=reason,
            offset_bytes=offset,
            expected_bytes=n_bytes,
            got_bytes=max(0, min(n_bytes, file.size_bytes - offset)) if not write else 0,
            remedy=remedy,
        )
