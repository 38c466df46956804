"""The output file of a job: whole lines only, whatever happens, and one writer at a time.

Every result is one os.write of one line to a descriptor opened for appending, so a killed process leaves at
most one incomplete line, at the end; the next start cuts it off. A full disk is handled the same way at once.
Data reaches the disk itself (fsync) every few seconds and at the end.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import stat
import time
from pathlib import Path
from typing import Any, Protocol

from flexrun.jobs.ids import IdTable
from flexrun.jobs.lines import LineIdentity

logger = logging.getLogger(__name__)

FSYNC_INTERVAL_SECONDS = 5.0
MIN_FREE_BYTES = 16 << 20

# Legal inside JSON strings, but line ends to some readers (Python's splitlines, for one).
_LINE_SEPARATORS = {ord(char): f"\\u{ord(char):04x}" for char in "\x85\u2028\u2029"}


class OutputError(OSError):
    """The output cannot be written. Results already written stay."""


class OutputRefusedError(OutputError):
    """The output cannot be used at all: found before anything ran, and nothing has been changed."""


def encode_record(record: dict[str, Any]) -> bytes:
    """One output line, newline included."""
    text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    return (text.translate(_LINE_SEPARATORS) if not text.isascii() else text).encode() + b"\n"


def success_record(identity: LineIdentity, body: dict[str, Any]) -> dict[str, Any]:
    """An OpenAI Batch output line. Its id holds the hash of the input line that the result was made from."""
    name = f"{identity.content:016x}"
    return {
        "id": f"batch_req_{name}",
        "custom_id": identity.custom_id,
        "response": {"status_code": 200, "request_id": f"req_{name}", "body": body},
        "error": None,
    }


def error_record(identity: LineIdentity, code: str, message: str) -> dict[str, Any]:
    """An OpenAI Batch output line for a request that failed; "line" is its number in the input."""
    return {
        "id": f"batch_req_{identity.content:016x}",
        "custom_id": identity.custom_id,
        "response": None,
        "error": {"code": code, "message": f"line {identity.number}: {message}", "line": identity.number},
    }


class RecordSink(Protocol):
    """Where a job's records go."""

    def append(self, record: dict[str, Any]) -> None: ...

    def sync(self) -> None: ...


class StreamSink:
    """Records on a descriptor that cannot be resumed: standard output, a pipe, a device."""

    def __init__(self, descriptor: int, name: str) -> None:
        self._descriptor = descriptor
        self._name = name

    def append(self, record: dict[str, Any]) -> None:
        data = memoryview(encode_record(record))
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except OSError as error:
                raise OutputError(error.errno, f"cannot write to {self._name}: {error.strerror}") from None

    def sync(self) -> None:
        """Nothing is buffered."""


class JobOutput:
    """An output file, locked while it is open.

    Raises:
        OutputRefusedError: the folder is missing, the path is no regular file, another run holds the lock, or the
            disk is nearly full. Nothing has been changed then (an empty file may have been made).
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._descriptor = self._open_locked()
        self._synced_at = time.monotonic()
        self._dirty = False
        try:
            self._check_free_space()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> JobOutput:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_locked(self) -> int:
        while True:
            descriptor = self._open()
            try:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise OutputRefusedError(
                        errno.EINVAL, f"{self.path} is not a regular file; use -o - for pipes"
                    )
                self._lock(descriptor)
                # A run that rewrote the file may have replaced it between opening and locking.
                if os.path.samestat(os.fstat(descriptor), self.path.stat()):
                    return descriptor
            except FileNotFoundError:
                pass
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def _open(self) -> int:
        try:
            return os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o666)
        except FileNotFoundError:
            raise OutputRefusedError(
                errno.ENOENT, f"the folder of the output {self.path} does not exist; make it first"
            ) from None
        except OSError as error:
            raise OutputRefusedError(
                error.errno, f"cannot open the output {self.path}: {error.strerror}"
            ) from None

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutputRefusedError(
                errno.EWOULDBLOCK,
                f"another run is writing {self.path}; wait for it, or use another output file",
            ) from None
        except OSError as error:  # some network file systems have no locks
            logger.warning("%s cannot be locked (%s): do not start a second run", self.path, error.strerror)

    def _check_free_space(self) -> None:
        info = os.fstatvfs(self._descriptor)
        free_bytes = info.f_bavail * info.f_frsize
        if free_bytes < MIN_FREE_BYTES:
            raise OutputRefusedError(
                errno.ENOSPC,
                f"only {free_bytes} bytes are free where {self.path} lies, at least {MIN_FREE_BYTES} are"
                " needed; free some space or use another place",
            )

    @property
    def size_bytes(self) -> int:
        return os.fstat(self._descriptor).st_size

    def truncate(self) -> None:
        """Forget all results."""
        os.ftruncate(self._descriptor, 0)
        os.fsync(self._descriptor)

    def recover(self, ids: IdTable, *, retry_failed: bool = False) -> None:
        """Note every result of earlier runs in `ids`; repair a torn last line.

        A last line without its newline is completed if it is a whole record, else cut off: its request
        runs again. With `retry_failed`, error records are removed, so that their requests run again.

        Raises:
            OutputRefusedError: a line is not a result. The file is left as it is.
        """
        whole_bytes = n_lines = n_dropped = 0
        complete = True
        with open(self.path, "rb") as stream:
            for data in stream:
                n_lines += 1
                complete = data.endswith(b"\n")
                record = _parse_record(data)
                if record is None:
                    if not complete:
                        logger.warning("%s: incomplete last line of %d bytes removed", self.path, len(data))
                        break
                    raise OutputRefusedError(
                        errno.EINVAL,
                        f"{self.path}, line {n_lines}, is not a result of a batch job; remove that line, use"
                        " another output file, or --overwrite to start again",
                    )
                whole_bytes += len(data)
                custom_id, content, failed = record
                if failed and retry_failed:
                    n_dropped += 1
                else:
                    ids.mark_done(custom_id, content, failed)
        if not complete:
            os.ftruncate(self._descriptor, whole_bytes)
            if whole_bytes and not self._ends_with_newline(whole_bytes):
                self._write_whole(b"\n")
            os.fsync(self._descriptor)
        if n_dropped:
            self._rewrite_without_failed()

    def _ends_with_newline(self, size_bytes: int) -> bool:
        return os.pread(self._descriptor, 1, size_bytes - 1) == b"\n"

    def _rewrite_without_failed(self) -> None:
        """Replace the file by a copy without error records: all of it or, if interrupted, none of it."""
        draft = self.path.with_name(self.path.name + ".tmp")
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC
        descriptor = os.open(draft, flags, stat.S_IMODE(os.fstat(self._descriptor).st_mode))
        try:
            self._lock(descriptor)
            with open(self.path, "rb") as stream, open(os.dup(descriptor), "wb") as copy:
                for data in stream:
                    record = _parse_record(data)
                    if record is not None and not record[2]:
                        copy.write(data)
            os.fsync(descriptor)
            draft.replace(self.path)
        except BaseException:
            os.close(descriptor)
            draft.unlink(missing_ok=True)
            raise
        os.close(self._descriptor)
        self._descriptor = descriptor
        fsync_folder(self.path)

    def append(self, record: dict[str, Any]) -> None:
        """Write one record, whole or not at all.

        Raises:
            OutputError: the disk is full or failing; what was there before is still whole.
        """
        self._write_whole(encode_record(record))
        self._dirty = True
        if time.monotonic() - self._synced_at >= FSYNC_INTERVAL_SECONDS:
            self.sync()

    def _write_whole(self, data: bytes) -> None:
        before = self.size_bytes
        rest = memoryview(data)
        try:
            while rest:  # one call, except on a nearly full disk or after a signal
                rest = rest[os.write(self._descriptor, rest) :]
        except BaseException as error:
            with contextlib.suppress(OSError):
                if before < self.size_bytes < before + len(data):
                    os.ftruncate(self._descriptor, before)
            if isinstance(error, OSError):
                raise OutputError(
                    error.errno,
                    f"cannot write to {self.path}: {error.strerror}; the {before} bytes of results before"
                    " this one are whole. Make room and run the same command again to go on",
                ) from None
            raise

    def sync(self) -> None:
        """Bring what was written to the disk itself."""
        if self._dirty:
            try:
                os.fsync(self._descriptor)
            except OSError as error:
                raise OutputError(error.errno, f"cannot sync {self.path}: {error.strerror}") from None
            self._dirty = False
        self._synced_at = time.monotonic()

    def close(self) -> None:
        """Release the file and its lock. Does not raise for a failing disk: `sync` does."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1


def fsync_folder(path: Path) -> None:
    """Make a rename in the folder of `path` last through a power failure, where the system can."""
    descriptor = os.open(path.absolute().parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _parse_record(data: bytes) -> tuple[str, int, bool] | None:
    """(custom_id, hash of the input line, failed) of an output line, None if it is not one."""
    try:
        record = json.loads(data.decode("utf-8"))
        custom_id, name, error = record["custom_id"], record["id"], record["error"]
        if not isinstance(custom_id, str) or (record["response"] is None) == (error is None):
            return None
        return custom_id, int(name.removeprefix("batch_req_"), 16), error is not None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
