"""Folders that appear whole or not at all: made under another name beside their place, synced, renamed.

A folder in the making carries a lock file whose lock its process holds. The system drops the lock when the
process ends, however it ends, so leftovers are told from work in progress without guessing by ids or ages.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

_MARK = ".packing-"
_LOCK_FILE = ".lock"
# A folder without a lock file is either just being made, just being renamed, or a leftover.
_GRACE_SECONDS = 60.0


class StagedFolder:
    """A folder in the making, for `target`. Use as a context; `publish` gives it its name.

    Leaving the context without `publish` removes it. Entering removes leftovers of processes that ended.
    """

    def __init__(self, target: Path) -> None:
        self.target = target.absolute()
        self.path = self.target
        self._lock_fd = -1

    def __enter__(self) -> StagedFolder:
        self.target.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self.target)
        while True:
            self.path = self.target.with_name(
                f".{self.target.name}{_MARK}{os.getpid()}-{time.monotonic_ns():x}"
            )
            self.path.mkdir()
            self._lock_fd = os.open(self.path / _LOCK_FILE, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
            if (self.path / _LOCK_FILE).exists():
                return self
            os.close(self._lock_fd)  # taken for a leftover in the moment before it was locked

    def publish(self) -> None:
        """Sync the folder and give it its name. A folder of that name is replaced."""
        (self.path / _LOCK_FILE).unlink()
        sync_folder(self.path)
        old = self.path.with_name(self.path.name + "-old")
        replaced = os.path.lexists(self.target)
        if replaced:
            self.target.rename(old)
        try:
            self.path.rename(self.target)
        except OSError:
            if replaced:
                old.rename(self.target)
            raise
        sync_folder(self.target.parent)
        if replaced:
            shutil.rmtree(old, ignore_errors=True)

    def __exit__(self, *exception: object) -> None:
        if self.path != self.target:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock_fd)


def remove_leftovers(target: Path) -> None:
    """Remove what processes that ended in the middle of making `target` left beside it."""
    for entry in target.parent.glob(f".{_escaped(target.name)}{_MARK}*"):
        with contextlib.suppress(OSError):
            _remove_if_abandoned(entry)


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the lock file `path` (made if needed); waits for whoever holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        # Unlocked by name: a process forked meanwhile has the file open too, and closing would not do.
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def write_file(path: Path, data: bytes) -> None:
    """Write a whole file and have it on the disk itself."""
    with path.open("xb") as handle:
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())


def sync_folder(folder: Path) -> None:
    """Make what was created and renamed in a folder last through a power failure, where the system can."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(fd)
    finally:
        os.close(fd)


def _remove_if_abandoned(folder: Path) -> None:
    try:
        fd = os.open(folder / _LOCK_FILE, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        if time.time() - folder.stat().st_ctime >= _GRACE_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    else:
        # Removed with the lock held: an owner that was about to lock it sees that it is gone.
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(fd)


def _escaped(name: str) -> str:
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)
