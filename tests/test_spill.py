"""Spill folders: budgets, free space, locks, and nothing left behind however a run ends."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from offload.disk import DiskError, DiskFile, DiskFullError, DiskPool
from offload.host import free_disk_bytes
from offload.spill import SpillFolder


@pytest.fixture
def pool() -> Iterator[DiskPool]:
    with DiskPool(n_in_flight=2) as pool:
        yield pool


def test_files_are_preallocated_and_removed(tmp_path: Path, pool: DiskPool) -> None:
    base = tmp_path / "made" / "here"
    with SpillFolder(base, 1 << 20, pool) as spill:
        file = spill.create("cache", 100_000)
        assert file.size_bytes == 102_400 == spill.spent_bytes
        assert 102_400 <= spill.measured_bytes <= 102_400 + 8192
        data = torch.arange(102_400).to(torch.uint8)
        file.write_from(data)
        back = torch.empty_like(data)
        file.read_into(back)
        assert torch.equal(back, data)
        assert spill.left_bytes == (1 << 20) - 102_400
        spill.remove("cache")
        assert (spill.spent_bytes, spill.measured_bytes) == (0, 0) and not file.path.exists()
        spill.create("cache", 1)
        assert [p.name.startswith("flexrun-spill-") for p in base.iterdir()] == [True]
    assert list(base.iterdir()) == []
    spill.close()
    with pytest.raises(RuntimeError, match="closed"):
        spill.create("more", 1)


def test_budget_and_free_space_are_checked_first(tmp_path: Path, pool: DiskPool) -> None:
    with SpillFolder(tmp_path, 1 << 20, pool) as spill:
        spill.create("a", 600_000)
        with pytest.raises(DiskFullError) as caught:
            spill.create("b", 600_000)
        assert caught.value.asked_bytes == 602_112
        assert caught.value.budget_left_bytes == spill.left_bytes == (1 << 20) - 602_112
        assert "--disk-mem" in str(caught.value)
        assert not (spill.path / "b").exists()
    with SpillFolder(tmp_path, 1 << 60, pool) as spill:
        with pytest.raises(DiskFullError, match="--disk-dir") as caught:
            spill.create("huge", 1 << 50)
        assert 0 < caught.value.free_bytes < 1 << 50
        assert not (spill.path / "huge").exists()


def test_space_lost_between_check_and_reservation(
    tmp_path: Path, pool: DiskPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, offset: int, n_bytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with SpillFolder(tmp_path, 1 << 20, pool) as spill:
        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(DiskFullError, match=r"needs 4\.0 KiB"):
            spill.create("a", 4096)
        assert not (spill.path / "a").exists() and spill.spent_bytes == 0


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"cannot mount a tmpfs here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_really_full_disk(small_tmpfs: Path, pool: DiskPool) -> None:
    with SpillFolder(small_tmpfs, 1 << 30, pool) as spill:
        with pytest.raises(DiskFullError, match="free"):
            spill.create("too much", 2 << 20)
        file = spill.create("fits", 512 << 10)
        (small_tmpfs / "other").write_bytes(b"x" * free_disk_bytes(small_tmpfs))
        file.write_from(torch.ones(512 << 10, dtype=torch.uint8))  # what was reserved can be written
        sparse = spill.path / "sparse"
        sparse.touch()
        os.truncate(sparse, 8192)
        with DiskFile(sparse, pool, writable=True) as unreserved, pytest.raises(DiskFullError):
            unreserved.write_from(torch.ones(8192, dtype=torch.uint8))


def test_names_and_sizes_are_checked(tmp_path: Path, pool: DiskPool) -> None:
    with SpillFolder(tmp_path, 1 << 20, pool) as spill:
        for name in ("", "a/b", "..", "lock", "/etc/x"):
            with pytest.raises(ValueError, match="plain name"):
                spill.create(name, 1)
        with pytest.raises(ValueError, match="at least 1 byte"):
            spill.create("a", 0)
        spill.create("a", 1)
        with pytest.raises(ValueError, match="already"):
            spill.create("a", 1)
    with pytest.raises(ValueError, match="negative"):
        SpillFolder(tmp_path, -1, pool)


def test_unusable_base_folder(tmp_path: Path, pool: DiskPool) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError, match="--disk-dir"):
        SpillFolder(tmp_path / "file", 1, pool)


def test_folder_removed_while_running(tmp_path: Path, pool: DiskPool) -> None:
    spill = SpillFolder(tmp_path, 1 << 20, pool)
    file = spill.create("a", 8192)
    shutil.rmtree(spill.path)
    data = torch.arange(8192).to(torch.uint8)
    file.write_from(data)  # open files stay usable: their space lives as long as they are open
    back = torch.empty_like(data)
    file.read_into(back)
    assert torch.equal(back, data)
    with pytest.raises(DiskError, match="removed while running"):
        spill.create("b", 8192)
    spill.close()


def test_an_exception_removes_the_folder(tmp_path: Path, pool: DiskPool) -> None:
    with pytest.raises(KeyboardInterrupt), SpillFolder(tmp_path, 1 << 20, pool) as spill:
        spill.create("a", 8192)
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_two_live_runs_coexist(tmp_path: Path, pool: DiskPool) -> None:
    with SpillFolder(tmp_path, 1 << 20, pool) as one:
        kept = one.create("a", 4096)
        with SpillFolder(tmp_path, 1 << 20, pool) as two:
            two.create("a", 4096)
            assert two.removed_stale == () and one.path != two.path
            assert kept.path.exists()
        assert kept.path.exists() and not two.path.exists()


_CHILD = """
import os, signal, sys, time
from pathlib import Path
from offload.disk import DiskPool
from offload.spill import SpillFolder
spill = SpillFolder(Path(sys.argv[1]), 1 << 20, DiskPool())
spill.create("a", 4096)
print(spill.path, flush=True)
if sys.argv[2] == "exit":
    sys.exit(3)  # without close()
time.sleep(60)
"""


def _child(base: Path, how: str) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(base), how],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_a_killed_run_is_cleaned_up_by_the_next_and_a_live_one_is_not(tmp_path: Path, pool: DiskPool) -> None:
    process, folder = _child(tmp_path, "wait")
    try:
        with SpillFolder(tmp_path, 1 << 20, pool) as spill:
            assert spill.removed_stale == () and (folder / "a").exists()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    assert (folder / "a").exists()
    unrelated = tmp_path / "results.jsonl"
    unrelated.write_text("kept")
    with SpillFolder(tmp_path, 1 << 20, pool) as spill:
        assert spill.removed_stale == (folder,) and not folder.exists()
    assert list(tmp_path.iterdir()) == [unrelated]


@pytest.mark.parametrize("how", ["exit", "interrupt"])
def test_the_end_of_the_process_removes_the_folder(tmp_path: Path, how: str) -> None:
    process, folder = _child(tmp_path, how)
    if how == "interrupt":
        process.send_signal(signal.SIGINT)
    assert process.wait(30) != 0
    assert folder.name.startswith("flexrun-spill-") and list(tmp_path.iterdir()) == []


def test_a_forked_child_leaves_the_folder_to_its_parent(tmp_path: Path, pool: DiskPool) -> None:
    with SpillFolder(tmp_path, 1 << 20, pool) as spill:
        file = spill.create("a", 4096)
        child = os.fork()
        if child == 0:
            try:
                spill.close()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert file.path.exists()
