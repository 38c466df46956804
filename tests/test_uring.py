"""The ring itself: results, errors, waiting for some, more transfers than it holds, and what an interrupt leaves."""

from __future__ import annotations

import errno
import mmap
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from offload import uring
from offload.uring import Ring, open_ring

BLOCK = 4096


@pytest.fixture
def ring() -> Iterator[Ring]:
    ring = open_ring()
    if ring is None:
        pytest.skip("no io_uring on this system")
    with ring:
        yield ring


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    path = tmp_path / "file.bin"
    path.write_bytes(b"".join(bytes([i]) * BLOCK for i in range(100)))
    fd = os.open(path, os.O_RDWR)
    yield fd
    os.close(fd)


def _memory(n_bytes: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(-1, n_bytes), dtype=torch.uint8)


def _read(ring: Ring, fd: int, memory: torch.Tensor, block: int, place: int, n_bytes: int = BLOCK) -> None:
    ring.push(
        fd=fd,
        address=memory.data_ptr() + place * BLOCK,
        n_bytes=n_bytes,
        offset_bytes=block * BLOCK,
        write=False,
        tag=block,
    )


def _all(ring: Ring) -> dict[int, int]:
    ended: dict[int, int] = {}
    while ring.in_flight:
        ring.enter(ring.in_flight)
        ended.update(ring.reap())
    return ended


def test_reads_land_where_they_should_again_and_again(ring: Ring, fd: int) -> None:
    memory = _memory(40 * BLOCK)
    for first in (0, 30, 60):  # 120 transfers pass the end of both queues
        for i in range(40):
            _read(ring, fd, memory, first + i, 39 - i)
        assert ring.in_flight == 40
        assert _all(ring) == {first + i: BLOCK for i in range(40)}
        expected = torch.arange(first + 39, first - 1, -1, dtype=torch.uint8).repeat_interleave(BLOCK)
        assert torch.equal(memory, expected)


def test_writes_reach_the_file(ring: Ring, fd: int) -> None:
    memory = _memory(BLOCK).fill_(200)
    ring.push(
        fd=fd, address=memory.data_ptr(), n_bytes=BLOCK, offset_bytes=3 * BLOCK, write=True, tag=1 << 40
    )
    assert _all(ring) == {1 << 40: BLOCK}
    assert os.pread(fd, 2 * BLOCK, 3 * BLOCK) == bytes([200]) * BLOCK + bytes([4]) * BLOCK


def test_short_and_failed_results_are_told(ring: Ring, fd: int) -> None:
    memory = _memory(2 * BLOCK)
    _read(ring, fd, memory, 99, 0, 2 * BLOCK)  # the file ends in the middle
    _read(ring, fd, memory, 100, 0)  # and here
    ring.push(fd=-1, address=memory.data_ptr(), n_bytes=BLOCK, offset_bytes=0, write=False, tag=7)
    assert _all(ring) == {99: BLOCK, 100: 0, 7: -errno.EBADF}


def test_waiting_for_some(ring: Ring, fd: int) -> None:
    """A read from an empty pipe stays in flight: waiting for the other does not wait for it."""
    reader, writer = os.pipe()
    memory = _memory(2 * BLOCK)
    ring.push(fd=reader, address=memory.data_ptr(), n_bytes=1, offset_bytes=0, write=False, tag=1)
    _read(ring, fd, memory, 5, 1)
    ring.enter(1)
    assert ring.reap() == [(5, BLOCK)] and ring.in_flight == 1
    ring.enter()
    assert ring.reap() == []
    os.write(writer, b"x")
    assert _all(ring) == {1: 1}
    assert memory[0] == ord("x")
    os.close(reader)
    os.close(writer)


def test_a_full_ring_refuses_and_draining_empties_it(ring: Ring, fd: int) -> None:
    memory = _memory(BLOCK)
    for _ in range(ring.n_entries):
        _read(ring, fd, memory, 1, 0)
    with pytest.raises(RuntimeError, match=f"holds {ring.n_entries} transfers"):
        _read(ring, fd, memory, 1, 0)
    ring.drain()
    assert ring.in_flight == 0 and ring.reap() == []


def test_an_interrupt_loses_no_count(ring: Ring, fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C arrives after the kernel has taken what was pushed, before the caller learns it."""
    memory = _memory(10 * BLOCK)
    for i in range(10):
        _read(ring, fd, memory, i, i)
    real, interrupts = ring._syscall, iter([True, True])

    def syscall(*args: object) -> int:
        result = int(real(*args))
        if next(interrupts, False):
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(ring, "_syscall", syscall)
    with pytest.raises(KeyboardInterrupt):
        ring.enter(10)
    assert ring.in_flight == 10
    ring.drain()  # interrupted once more
    assert ring.in_flight == 0
    assert torch.equal(memory, torch.arange(10, dtype=torch.uint8).repeat_interleave(BLOCK))


def test_systems_without_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "darwin")
        assert open_ring() is None
    with monkeypatch.context() as patch:
        patch.setattr(uring, "_FEATURES", 1 << 31)  # one that no kernel has
        n_fds = psutil.Process().num_fds() if sys.platform.startswith("linux") else 0
        assert open_ring() is None
        assert n_fds == 0 or psutil.Process().num_fds() == n_fds
    with monkeypatch.context() as patch:
        patch.setattr(uring, "_SYSCALL_SETUP", -1)  # ENOSYS
        assert open_ring() is None
