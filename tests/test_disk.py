"""Disk transfers: any offset, size and address, direct or not; short, failing and truncated files."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload.device import make_device
from offload.disk import (
    CacheUse,
    DiskError,
    DiskFile,
    DiskFullError,
    DiskPool,
    Extent,
    choose_cache_use,
    read_extents,
    write_extents,
)
from offload.disk_io import BOUNCE_BYTES, query_direct_alignment
from offload.memory import Arena
from offload.profile import read_bytes_per_s
from offload.uring import Ring, open_ring
from policy.tiers import Tier

SIZE = 300_001  # odd on purpose
PIECE = 16_384
FALLBACKS = [True, False]
DEVICE = make_device("cpu")


def _buffer(n_bytes: int) -> torch.Tensor:
    return Arena("test", Tier.CPU, n_bytes, DEVICE).take(n_bytes, "buffer")


@pytest.fixture(params=["ring", "threads"])
def pool(request: pytest.FixtureRequest) -> Iterator[DiskPool]:
    make_ring = open_ring if request.param == "ring" else lambda: None
    with DiskPool(n_in_flight=4, piece_bytes=PIECE, make_ring=make_ring) as pool:
        yield pool


@pytest.fixture
def content() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, SIZE, dtype=np.uint8)


@pytest.fixture
def path(tmp_path: Path, content: np.ndarray) -> Path:
    path = tmp_path / "file.bin"
    path.write_bytes(content.tobytes())
    return path


_ranges = st.tuples(
    st.one_of(st.integers(0, SIZE), st.integers(0, SIZE // 4096).map(lambda n: n * 4096)),
    st.one_of(st.integers(0, SIZE), st.integers(0, 20).map(lambda n: n * 4096)),
    st.integers(0, 5000),
)


@pytest.mark.parametrize("direct", FALLBACKS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=_ranges)
def test_reads_at_any_offset_size_and_address(
    direct: bool, where: tuple[int, int, int], path: Path, content: np.ndarray, pool: DiskPool
) -> None:
    offset, n_bytes, shift = where
    n_bytes = min(n_bytes, SIZE - offset)
    dest = _buffer(SIZE + 8192).fill_(0xEE)
    with DiskFile(path, pool, direct=direct) as file:
        assert file.read_into(dest[shift:], offset, n_bytes) == n_bytes
    assert np.array_equal(dest[shift : shift + n_bytes].numpy(), content[offset : offset + n_bytes])
    assert bool((dest[:shift] == 0xEE).all()) and bool((dest[shift + n_bytes :] == 0xEE).all())


@pytest.mark.parametrize("direct", FALLBACKS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=_ranges, seed=st.integers(0, 255))
def test_writes_at_any_offset_size_and_address(
    direct: bool, where: tuple[int, int, int], seed: int, path: Path, pool: DiskPool
) -> None:
    offset, n_bytes, shift = where
    n_bytes = min(n_bytes, SIZE - offset)
    expected = bytearray(path.read_bytes())
    src = _buffer(SIZE + 8192)
    src.copy_(torch.arange(src.numel(), dtype=torch.int64).add_(seed).mul_(31).to(torch.uint8))
    with DiskFile(path, pool, writable=True, direct=direct) as file:
        assert file.write_from(src[shift:], offset, n_bytes) == n_bytes
        back = _buffer(SIZE)
        file.read_into(back, 0, SIZE)
    expected[offset : offset + n_bytes] = bytes(src[shift : shift + n_bytes].numpy())
    assert bytes(back.numpy()) == bytes(expected) == path.read_bytes()


def test_a_long_misaligned_range_passes_through_the_bounce_buffer_in_turns(tmp_path: Path) -> None:
    n_bytes = 2 * BOUNCE_BYTES + 777
    data = torch.from_numpy(np.random.default_rng(1).integers(0, 256, n_bytes, dtype=np.uint8))
    path = tmp_path / "long.bin"
    path.write_bytes(b"\0" * (n_bytes + 5))
    with (
        DiskPool(n_in_flight=1, piece_bytes=4 * BOUNCE_BYTES) as pool,
        DiskFile(path, pool, writable=True) as file,
    ):
        file.write_from(data, 5)
        back = _buffer(n_bytes + 64)[64:]
        file.read_into(back, 5, n_bytes)
        assert file.direct == (pool.measured_bytes > 0)
    assert torch.equal(back, data)


def test_many_extents_land_where_they_should(path: Path, content: np.ndarray, pool: DiskPool) -> None:
    other_path = path.with_name("other.bin")
    other_path.write_bytes(content[::-1].tobytes())
    dest = _buffer(200_000).fill_(0)
    with DiskFile(path, pool) as one, DiskFile(other_path, pool) as two:
        extents = [
            (one, 0, 4096, 0),
            (one, 4096, 50_000, 4096),
            Extent(two, 123, 4567, 60_000),
            (two, 0, 0, 0),
            (one, 299_999, 2, 70_000),
        ]
        assert read_extents(extents, dest) == 4096 + 50_000 + 4567 + 2
    expected = np.zeros(200_000, np.uint8)
    expected[:54_096] = content[:54_096]
    expected[60_000:64_567] = content[::-1][123:4690]
    expected[70_000:70_002] = content[299_999:]
    assert np.array_equal(dest.numpy(), expected)
    assert read_extents([], dest) == 0


def test_scattered_writes(path: Path, content: np.ndarray, pool: DiskPool) -> None:
    src = _buffer(40_960).copy_(torch.arange(40_960).to(torch.uint8))
    with DiskFile(path, pool, writable=True) as file:
        assert write_extents([(file, 8192, 4096, 4096), (file, 40_960, 8192, 0)], src) == 12_288
        file.sync()
    expected = content.copy()
    expected[8192:12_288] = src[4096:8192].numpy()
    expected[40_960:49_152] = src[:8192].numpy()
    assert path.read_bytes() == expected.tobytes()


class _Recorder:
    """An os.preadv that notes what it is asked and may misbehave."""

    def __init__(self, misbehave: Any = None) -> None:
        self.calls: list[tuple[int, int]] = []
        self.misbehave = misbehave

    def __call__(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        self.calls.append((offset, len(buffers[0])))
        if self.misbehave is not None:
            result = self.misbehave(fd, buffers, offset)
            if result is not None:
                return int(result)
        return os.preadv(fd, buffers, offset)


def test_neighbours_are_read_together_in_aligned_pieces(path: Path) -> None:
    recorder = _Recorder()
    dest = _buffer(100_000)
    with DiskPool(n_in_flight=1, piece_bytes=32_768, preadv=recorder) as pool, DiskFile(path, pool) as file:
        read_extents([(file, i * 8192, 8192, i * 8192) for i in range(10)], dest)
    assert recorder.calls == [(0, 32_768), (32_768, 32_768), (65_536, 16_384)]


def test_congruent_address_needs_a_copy_only_at_the_ends(path: Path, content: np.ndarray) -> None:
    recorder = _Recorder()
    with DiskPool(n_in_flight=1, preadv=recorder) as pool, DiskFile(path, pool) as file:
        if not file.direct:
            pytest.skip("the file system of the temporary folder has no direct I/O")
        block = file.alignment_bytes
        dest = _buffer(200_000)[8:]  # address and file offset agree modulo the block
        file.read_into(dest, block + 8, 100_000)
        end = (block + 8 + 100_000) // block * block
        assert recorder.calls == [(block, block), (2 * block, end - 2 * block), (end, block)]
    assert np.array_equal(dest[:100_000].numpy(), content[block + 8 :][:100_000])


def test_several_pieces_are_in_flight(path: Path) -> None:
    meeting = threading.Barrier(4, timeout=20)  # breaks unless four reads are under way at once

    def meet(fd: int, buffers: Sequence[Any], offset: int) -> None:
        meeting.wait()

    with (
        DiskPool(n_in_flight=4, piece_bytes=4096, preadv=_Recorder(meet)) as pool,
        DiskFile(path, pool) as file,
    ):
        file.read_into(_buffer(4 * 4096), 0)


def test_short_reads_are_resumed(path: Path, content: np.ndarray) -> None:
    def shorten(fd: int, buffers: Sequence[Any], offset: int) -> int:
        data = content[offset : offset + max(1, len(buffers[0]) // 3)].tobytes()
        buffers[0][: len(data)] = data
        return len(data)

    dest = _buffer(SIZE)
    with (
        DiskPool(n_in_flight=4, piece_bytes=PIECE, preadv=_Recorder(shorten)) as pool,
        DiskFile(path, pool) as file,
    ):
        file.read_into(dest)
    assert np.array_equal(dest.numpy(), content)


def test_read_error_names_file_place_and_remedy(path: Path) -> None:
    def fail(fd: int, buffers: Sequence[Any], offset: int) -> None:
        if offset <= 5 * PIECE < offset + len(buffers[0]):
            raise OSError(errno.EIO, "Input/output error")

    with (
        DiskPool(n_in_flight=4, piece_bytes=PIECE, preadv=_Recorder(fail)) as pool,
        DiskFile(path, pool) as file,
    ):
        with pytest.raises(DiskError) as caught:
            file.read_into(_buffer(SIZE))
        assert (caught.value.path, caught.value.offset_bytes) == (path, 5 * PIECE)
        assert (caught.value.expected_bytes, caught.value.got_bytes) == (PIECE, 0)
        assert "(EIO)" in str(caught.value) and "check the disk" in str(caught.value)
        assert isinstance(caught.value.__cause__, OSError)
        file.read_into(_buffer(PIECE))  # the pool goes on


def test_no_transfer_is_under_way_after_a_failure(path: Path) -> None:
    """The caller may reuse the buffer as soon as the error is raised."""
    under_way = 0
    lock = threading.Lock()

    def slow_or_failing(fd: int, buffers: Sequence[Any], offset: int) -> None:
        nonlocal under_way
        if offset == 0:
            raise OSError(errno.EIO, "Input/output error")
        with lock:
            under_way += 1
        threading.Event().wait(0.05)
        with lock:
            under_way -= 1

    recorder = _Recorder(slow_or_failing)
    with DiskPool(n_in_flight=4, piece_bytes=4096, preadv=recorder) as pool, DiskFile(path, pool) as file:
        with pytest.raises(DiskError):
            file.read_into(_buffer(SIZE))
        assert under_way == 0
        n_calls = len(recorder.calls)
        assert n_calls < 20  # of 74: the rest was not started
        threading.Event().wait(0.05)
        assert len(recorder.calls) == n_calls


def test_reading_beyond_the_end_is_refused(path: Path, pool: DiskPool) -> None:
    with DiskFile(path, pool) as file:
        with pytest.raises(DiskError, match=f"the file ends at byte {SIZE}") as caught:
            file.read_into(_buffer(8192), SIZE - 100, 8192)
        assert (caught.value.expected_bytes, caught.value.got_bytes) == (8192, 100)


@pytest.mark.parametrize("direct", FALLBACKS)
def test_a_file_cut_short_while_open(direct: bool, path: Path, pool: DiskPool) -> None:
    with DiskFile(path, pool, direct=direct) as file:
        os.truncate(path, 100_000)
        with pytest.raises(DiskError, match=r"the file ends at byte 100000.*cut short"):
            file.read_into(_buffer(SIZE))
        assert file.read_into(_buffer(100_000), 0, 100_000) == 100_000


def test_direct_io_refused_later_falls_back(path: Path, content: np.ndarray) -> None:
    direct_fds = set()

    def refuse(fd: int, buffers: Sequence[Any], offset: int) -> None:
        if fd in direct_fds:
            raise OSError(errno.EINVAL, "Invalid argument")

    dest = _buffer(SIZE)
    with (
        DiskPool(n_in_flight=2, piece_bytes=PIECE, preadv=_Recorder(refuse)) as pool,
        DiskFile(path, pool) as file,
    ):
        was_direct = file.direct
        direct_fds.add(file._direct_fd)
        file.read_into(dest)
        assert not file.direct
        assert len(file.notes) == 1 and "ordinary reads and writes" in file.notes[0]
    assert was_direct or "refuses" in file.notes[0] or "no direct" in file.notes[0]
    assert np.array_equal(dest.numpy(), content)


def test_full_disk_while_writing(path: Path) -> None:
    def full(fd: int, buffers: Sequence[Any], offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    refusal = pytest.raises(DiskFullError, match=r"needs 8\.0 KiB of disk space.*--disk-dir")
    with DiskPool(pwritev=full) as pool, DiskFile(path, pool, writable=True) as file, refusal:
        file.write_from(_buffer(8192))


def test_wrong_uses_are_refused(path: Path, pool: DiskPool) -> None:
    with pytest.raises(DiskError, match=r"cannot open .*No such file"):
        DiskFile(path.with_name("absent"), pool)
    with DiskFile(path, pool) as file:
        with pytest.raises(ValueError, match="uint8"):
            file.read_into(torch.zeros(10))
        with pytest.raises(ValueError, match="contiguous: False"):
            file.read_into(_buffer(100)[::2])
        with pytest.raises(ValueError, match="do not lie within"):
            file.read_into(_buffer(100), 0, 101)
        with pytest.raises(DiskError, match="opened for reading only"):
            file.write_from(_buffer(100))
    with pytest.raises(DiskError, match="closed"):
        file.read_into(_buffer(100))
    with (
        DiskFile(path, pool, writable=True) as file,
        pytest.raises(DiskError, match=f"was given {SIZE} bytes"),
    ):
        file.write_from(_buffer(100), SIZE - 50)
    with pytest.raises(ValueError, match="n_in_flight"):
        DiskPool(n_in_flight=0)
    with pytest.raises(ValueError, match="multiple of 4096"):
        DiskPool(piece_bytes=5000)


def test_keep_or_drop_the_page_cache(path: Path, pool: DiskPool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_cache_use(100, 100) is CacheUse.KEEP
    assert choose_cache_use(101, 100) is CacheUse.DROP
    advised: list[tuple[int, int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, *args: advised.append(args))
    with DiskFile(path, pool, cache_use=CacheUse.KEEP, writable=True) as file:
        assert not file.direct and file.notes == ()
        file.read_into(_buffer(PIECE))
        file.write_from(_buffer(PIECE))
        assert advised == []
    with DiskFile(path, pool, direct=False, writable=True) as file:
        file.read_into(_buffer(PIECE))
        assert advised == [(0, PIECE, os.POSIX_FADV_DONTNEED)]
        file.write_from(_buffer(PIECE))
        assert advised[1:] == [(0, 0, os.POSIX_FADV_DONTNEED)]


def test_measured_bytes_are_blocks(tmp_path: Path, pool: DiskPool) -> None:
    path = tmp_path / "sparse.bin"
    with path.open("wb") as raw:
        raw.truncate(1 << 20)
    with DiskFile(path, pool, writable=True) as file:
        assert file.measured_bytes == 0
        file.write_from(_buffer(8192).fill_(1))
        file.sync()
        assert file.measured_bytes == 8192


def test_alignment_is_asked_of_the_kernel(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        alignment = query_direct_alignment(fd)
    finally:
        os.close(fd)
    assert alignment is None or alignment == 0 or alignment in (512, 1024, 2048, 4096, 8192, 16_384)


def test_interrupt_while_transferring_leaves_nothing_under_way(path: Path) -> None:
    main = threading.get_ident()
    under_way = threading.Semaphore(0)
    finished: list[int] = []

    def interrupt_main(fd: int, buffers: Sequence[Any], offset: int) -> None:
        if threading.get_ident() == main:
            under_way.acquire(timeout=20)
            raise KeyboardInterrupt
        under_way.release()
        threading.Event().wait(0.05)
        finished.append(offset)

    recorder = _Recorder(interrupt_main)
    with DiskPool(n_in_flight=3, piece_bytes=4096, preadv=recorder) as pool, DiskFile(path, pool) as file:
        with pytest.raises(KeyboardInterrupt):
            file.read_into(_buffer(SIZE))
        n_finished = len(finished)
        threading.Event().wait(0.1)
        assert len(finished) == n_finished > 0


class _FaultyRing(Ring):
    """A ring that notes what it is asked and may report other results than the kernel's."""

    def __init__(self, misbehave: Callable[[int, int], int]) -> None:
        super().__init__()
        self.misbehave = misbehave  # (offset, result) -> result
        self.offsets: dict[int, int] = {}

    def push(self, *, fd: int, address: int, n_bytes: int, offset_bytes: int, write: bool, tag: int) -> None:
        self.offsets[tag] = offset_bytes
        super().push(fd=fd, address=address, n_bytes=n_bytes, offset_bytes=offset_bytes, write=write, tag=tag)

    def reap(self) -> list[tuple[int, int]]:
        return [(tag, self.misbehave(self.offsets[tag], result)) for tag, result in super().reap()]


@pytest.fixture
def rings(path: Path, pool: DiskPool) -> None:
    """Skips where transfers cannot go through a ring."""
    with DiskFile(path, pool) as file:
        if not file.direct or open_ring() is None:
            pytest.skip("no io_uring here, or no direct I/O in the temporary folder")


def test_a_ring_takes_the_whole_blocks(path: Path, content: np.ndarray, rings: None) -> None:
    made: list[_FaultyRing] = []

    def make() -> Ring:
        made.append(_FaultyRing(lambda offset, result: result))
        return made[-1]

    dest = _buffer(SIZE)
    with DiskPool(piece_bytes=4096, make_ring=make) as pool, DiskFile(path, pool) as file:
        file.read_into(dest)
        block = file.alignment_bytes
        # More pieces than the ring holds; the last, odd one ends in the bounce buffer.
        assert sorted(made[0].offsets.values()) == list(range(0, SIZE // block * block, 4096))
        assert len(made[0].offsets) > made[0].n_entries
        assert pool.measured_bytes == BOUNCE_BYTES
        other = threading.Thread(target=lambda: file.read_into(_buffer(8192), 0, 8192))
        other.start()
        other.join()
        assert len(made) == 2  # each thread has its own
    assert np.array_equal(dest.numpy(), content)


def test_short_results_of_a_ring_are_resumed(path: Path, content: np.ndarray, rings: None) -> None:
    dest = _buffer(SIZE)
    cut: set[int] = set()

    def shorten(offset: int, result: int) -> int:
        # Zeros in what the kernel is said not to have read: only a second read can make it good.
        kept = result // 3
        cut.add(offset)
        dest[offset + kept : offset + result] = 0
        return kept

    with (
        DiskPool(piece_bytes=PIECE, make_ring=lambda: _FaultyRing(shorten)) as pool,
        DiskFile(path, pool) as file,
    ):
        file.read_into(dest)
    assert len(cut) == -(-SIZE // PIECE)
    assert np.array_equal(dest.numpy(), content)


def test_a_failed_result_of_a_ring_names_its_place_and_leaves_nothing_under_way(
    path: Path, rings: None
) -> None:
    broken = [5 * 4096]
    made: list[_FaultyRing] = []

    def make() -> Ring:
        made.append(_FaultyRing(lambda offset, result: -errno.EIO if offset in broken else result))
        return made[-1]

    with DiskPool(piece_bytes=4096, make_ring=make) as pool, DiskFile(path, pool) as file:
        with pytest.raises(DiskError) as caught:
            file.read_into(_buffer(SIZE))
        assert (caught.value.path, caught.value.offset_bytes) == (path, 5 * 4096)
        assert (caught.value.expected_bytes, caught.value.got_bytes) == (4096, 0)
        assert "(EIO)" in str(caught.value) and isinstance(caught.value.__cause__, OSError)
        assert made[0].in_flight == 0 and len(made[0].offsets) == made[0].n_entries  # the rest did not start
        broken.clear()
        file.read_into(_buffer(SIZE))  # the ring goes on


def test_a_full_disk_is_told_by_a_ring(path: Path, rings: None) -> None:
    refusal = pytest.raises(DiskFullError, match=r"needs 8\.0 KiB of disk space.*--disk-dir")
    full = lambda: _FaultyRing(lambda offset, result: -errno.ENOSPC)  # noqa: E731
    with DiskPool(make_ring=full) as pool, DiskFile(path, pool, writable=True) as file, refusal:
        file.write_from(_buffer(8192))


def test_a_ring_refused_direct_io_falls_back(path: Path, content: np.ndarray, rings: None) -> None:
    dest = _buffer(SIZE)

    def refuse(offset: int, result: int) -> int:
        dest[offset : offset + result] = 0
        return -errno.EINVAL

    with (
        DiskPool(piece_bytes=PIECE, make_ring=lambda: _FaultyRing(refuse)) as pool,
        DiskFile(path, pool) as file,
    ):
        file.read_into(dest)
        assert not file.direct and len(file.notes) == 1 and "refused a direct read" in file.notes[0]
    assert np.array_equal(dest.numpy(), content)


def test_interrupt_of_a_ring_leaves_nothing_under_way(path: Path, rings: None) -> None:
    made: list[Ring] = []
    interrupts = iter([True])

    def interrupt(offset: int, result: int) -> int:
        if next(interrupts, False):
            raise KeyboardInterrupt
        return result

    def make() -> Ring:
        made.append(_FaultyRing(interrupt))
        return made[-1]

    with DiskPool(piece_bytes=4096, make_ring=make) as pool, DiskFile(path, pool) as file:
        with pytest.raises(KeyboardInterrupt):
            file.read_into(_buffer(SIZE))
        assert made[0].in_flight == 0


def test_the_read_rate_is_that_of_all_slots_in_turn(tmp_path: Path) -> None:
    """Reads into one slot alone would arrive in the processor's cache, faster than a run's."""
    page = 4096
    path = tmp_path / "data"
    path.write_bytes(b"".join(bytes([i]) * page for i in range(7)))
    slots = torch.zeros(3, 2 * page, dtype=torch.uint8)
    with DiskPool() as pool, DiskFile(path, pool) as file:
        assert read_bytes_per_s([(file, i * page, page) for i in range(7)], slots, repeats=1) > 0
    last = slots[:, 0].tolist()
    assert last[0] in (0, 3, 6) and last[1] in (1, 4) and last[2] in (2, 5)
    assert bool((slots[:, page:] == 0).all())
