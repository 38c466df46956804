"""The spill folder: private, locked, preallocated, and gone afterwards, whatever ends the run.

Below the base folder every run has its own subfolder, held by an exclusive lock on the lock file within. The
kernel drops the lock with the process, so a subfolder whose lock is free was left by a run that crashed,
and the next run removes it. Making, claiming and removing subfolders is itself done under a lock of the
base folder: nobody mistakes a folder that is just being made for a stale one.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from offload.disk import DiskFile
from offload.disk_io import DiskError, DiskFullError, DiskPool, is_full
from offload.host import free_disk_bytes
from offload.memory import aligned_bytes

_PREFIX = "flexrun-spill-"
_LOCK_NAME = "lock"
_BASE_LOCK_NAME = ".flexrun-spill.lock"


class SpillFolder:
    """A run's own folder of spill files, removed by close(), at the end of the process, or by the next run.

    base_dir: made if it is not there. budget_bytes: the most that all its files together may occupy.
    path: the private subfolder.
    """

    def __init__(self, base_dir: Path, budget_bytes: int, pool: DiskPool, *, direct: bool = True) -> None:
        """Raises DiskError if the folder cannot be made. direct=False asks for ordinary I/O."""
        if budget_bytes < 0:
            raise ValueError(f"the disk budget must not be negative, got {budget_bytes}")
        self.base_dir = base_dir
        self.budget_bytes = budget_bytes
        self.pool = pool
        self._direct = direct
        self._files: dict[str, DiskFile] = {}
        self._spent: dict[str, int] = {}
        try:
            base_dir.mkdir(parents=True, exist_ok=True)
            with _base_lock(base_dir):
                self.removed_stale = _remove_stale(base_dir)
                self.path = base_dir / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
                self.path.mkdir(mode=0o700)
                lock_fd = os.open(self.path / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise _folder_error(base_dir, error) from error
        self._remove = weakref.finalize(self, _release, self.path, lock_fd, os.getpid(), self._files)

    @property
    def spent_bytes(self) -> int:
        """Bytes given to files so far."""
        return sum(self._spent.values())

    @property
    def left_bytes(self) -> int:
        return self.budget_bytes - self.spent_bytes

    @property
    def measured_bytes(self) -> int:
        """Disk space that the files really occupy, from their blocks."""
        return sum(file.measured_bytes for file in self._files.values())

    def create(self, name: str, n_bytes: int) -> DiskFile:
        """A new file of `n_bytes` (rounded up to 4096), all of its space reserved on the disk now.

        Raises DiskFullError if the budget or the free space is too small, DiskError if the folder is gone.
        """
        if not name or name in (_LOCK_NAME, ".", "..") or Path(name).name != name:
            raise ValueError(f"a spill file needs a plain name, got {name!r}")
        if n_bytes < 1:
            raise ValueError(f"spill file {name!r} needs at least 1 byte, got {n_bytes}")
        if not self._remove.alive:
            raise RuntimeError(f"spill folder {self.path} has been closed")
        path = self.path / name
        if name in self._files:
            raise ValueError(f"there is a spill file {path} already")
        n_bytes = aligned_bytes(n_bytes)
        free_bytes = free_disk_bytes(self.path)
        if n_bytes > min(self.left_bytes, free_bytes):
            raise DiskFullError(
                path, asked_bytes=n_bytes, free_bytes=free_bytes, budget_left_bytes=self.left_bytes
            )
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _folder_error(self.path, error) from error
        try:
            _reserve(fd, n_bytes)
        except OSError as error:
            path.unlink(missing_ok=True)
            if is_full(error):
                raise DiskFullError(
                    path, asked_bytes=n_bytes, free_bytes=free_bytes, budget_left_bytes=self.left_bytes
                ) from error
            raise _folder_error(self.path, error) from error
        finally:
            os.close(fd)
        file = DiskFile(path, self.pool, writable=True, direct=self._direct)
        self._files[name] = file
        self._spent[name] = n_bytes
        return file

    def remove(self, name: str) -> None:
        """Close and delete one file, giving its bytes back to the budget."""
        file = self._files.pop(name)
        del self._spent[name]
        file.close()
        file.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close all files and remove the folder. May be called again."""
        self._remove()
        self._spent.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _reserve(fd: int, n_bytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, n_bytes)
    else:
        os.ftruncate(fd, n_bytes)


def _folder_error(path: Path, error: OSError) -> DiskError:
    gone = isinstance(error, FileNotFoundError)
    return DiskError(
        "use the spill folder",
        path,
        reason="it was removed while running" if gone else error.strerror or str(error),
        offset_bytes=0,
        expected_bytes=0,
        got_bytes=0,
        remedy="run again and leave the folder alone meanwhile"
        if gone
        else "name a folder that can be written to (--disk-dir)",
    )


@contextmanager
def _base_lock(base_dir: Path) -> Iterator[None]:
    """Hold the base folder's lock; waits for other runs that start just now."""
    fd = os.open(base_dir, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
        except OSError:  # network file systems lock only files that are open for writing
            os.close(fd)
            fd = os.open(base_dir / _BASE_LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _remove_stale(base_dir: Path) -> tuple[Path, ...]:
    """Remove the subfolders of runs that are no more; the caller holds the base lock."""
    removed = []
    for folder in sorted(base_dir.glob(f"{_PREFIX}*")):
        if folder.is_symlink() or not folder.is_dir() or _is_held(folder / _LOCK_NAME):
            continue
        shutil.rmtree(folder, ignore_errors=True)
        removed.append(folder)
    return tuple(removed)


def _is_held(lock_path: Path) -> bool:
    """Whether a live process holds the lock. Without a lock file the run ended before it had one."""
    try:
        fd = os.open(lock_path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:  # another user's: not ours to judge
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    else:
        return False
    finally:
        os.close(fd)


def _release(path: Path, lock_fd: int, owner_pid: int, files: dict[str, DiskFile]) -> None:
    """Close the files, remove the folder, let go of the lock. A forked child must leave it to its parent."""
    if os.getpid() != owner_pid:
        return
    for file in files.values():
        file.close()
    files.clear()
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock_fd)
