"""How a lane's operations are run: to their end on a thread, or enqueued on a stream of the accelerator."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from offload.handles import Handle, LaneError
from offload.trace import Trace

Work = Callable[[], int | None]

# Operations that a stream may hold unfinished before the host waits: what they hold stays alive meanwhile.
_MAX_IN_FLIGHT = 256


@dataclass(frozen=True, slots=True)
class LaneStats:
    """Finished work of a lane. busy_seconds: while an operation was under way, without what it waited for."""

    busy_seconds: float = 0.0
    bytes: int = 0
    n_ops: int = 0


class Book:
    """Counts a lane's finished operations and passes them on to the trace.

    Operations of a lane that overlap are entered in the order of their beginnings, each from the end of the one
    before: no second is counted twice, and the trace's row shows one after the other.
    """

    def __init__(self, lane: str, trace: Trace | None) -> None:
        self._lane = lane
        self._trace = trace
        self._lock = threading.Lock()
        self._stats = LaneStats()
        self._n_begun = 0
        self._n_entered = 0
        self._ended: dict[int, tuple[str, float, float, int] | None] = {}
        self._until_seconds = 0.0

    def begin(self) -> tuple[int, float]:
        """An operation begins now: its number, which `end` must be told, and the time."""
        with self._lock:
            self._n_begun += 1
            return self._n_begun - 1, time.perf_counter()

    def end(self, begun: tuple[int, float], label: str, n_bytes: int | None) -> None:
        """An operation ends now; n_bytes is None if it failed and does not count."""
        number, begin_seconds = begun
        entry = None if n_bytes is None else (label, begin_seconds, time.perf_counter(), n_bytes)
        with self._lock:
            self._ended[number] = entry
            while self._n_entered in self._ended:
                entered = self._ended.pop(self._n_entered)
                self._n_entered += 1
                if entered is not None:
                    self._enter(*entered)

    def add(self, label: str, begin_seconds: float, end_seconds: float, n_bytes: int) -> None:
        """Enter an operation of a lane whose operations follow each other."""
        with self._lock:
            self._enter(label, begin_seconds, end_seconds, n_bytes)

    def _enter(self, label: str, begin_seconds: float, end_seconds: float, n_bytes: int) -> None:
        begin_seconds = max(begin_seconds, self._until_seconds)
        end_seconds = self._until_seconds = max(begin_seconds, end_seconds)
        old = self._stats
        self._stats = LaneStats(
            old.busy_seconds + end_seconds - begin_seconds, old.bytes + n_bytes, old.n_ops + 1
        )
        if self._trace is not None:
            self._trace.add(self._lane, label, begin_seconds, end_seconds, n_bytes)

    def read(self) -> LaneStats:
        with self._lock:
            return self._stats

    def reset(self) -> None:
        with self._lock:
            self._stats = LaneStats()


class HostRunner:
    """Runs operations to their end on the calling thread."""

    def __init__(self, book: Book) -> None:
        self._book = book

    def run(self, handle: Handle, work: Work, waits: Sequence[Handle], host_waits: bool) -> LaneError | None:
        for wait in waits:
            error = wait._settle()
            if error is not None:
                return error
        begun = self._book.begin()
        n_bytes = None
        try:
            n_bytes = work() or 0
        finally:
            self._book.end(begun, handle.label, n_bytes)
        handle._end()
        return None

    def collect(self) -> None:
        """Account for operations that ended since."""

    def quiesce(self) -> None:
        """Wait until nothing is in flight."""


@dataclass(slots=True)
class _InFlight:
    """An operation on a stream. work is kept: what it refers to must outlive the stream's use of it."""

    handle: Handle
    work: Work
    begin: Any
    n_bytes: int


class StreamRunner:
    """Enqueues operations on a stream of the accelerator; a handle ends when the stream gets there."""

    def __init__(
        self,
        book: Book,
        stream: torch.Stream,
        make_event: Callable[[], torch.Event],
        note: Callable[[LaneError], None],
    ) -> None:
        """make_event: an event of the stream's device that measures time.

        note: told of failures that only the device reports, after the operation was enqueued.
        """
        self._book = book
        self._stream = stream
        self._event = make_event
        self._note = note
        self._in_flight: deque[_InFlight] = deque()
        self._lock = threading.RLock()
        # The host time of one event of this stream places all others on the host's clock.
        self._base = self._event()
        self._base.record(stream)
        self._base.synchronize()
        self._base_seconds = time.perf_counter()

    def run(self, handle: Handle, work: Work, waits: Sequence[Handle], host_waits: bool) -> LaneError | None:
        for wait in waits:
            error = wait._settle() if host_waits else wait._issue_error()
            if error is not None:
                return error
            # The stream itself keeps the order among its own operations.
            if not host_waits and wait._event is not None and wait.lane != handle.lane:
                self._stream.wait_event(wait._event)
        begin, end = self._event(), self._event()
        try:
            with self._stream:
                begin.record(self._stream)
                n_bytes = work() or 0
                end.record(self._stream)
        except BaseException:
            # What was enqueued before the failure may still use what `work` holds.
            self._stream.synchronize()
            raise
        handle._end(event=end)
        with self._lock:
            self._in_flight.append(_InFlight(handle, work, begin, n_bytes))
            oldest = self._in_flight[0].handle if len(self._in_flight) > _MAX_IN_FLIGHT else None
        if oldest is not None:
            oldest._settle()
        self.collect()
        return None

    def collect(self) -> None:
        with self._lock:
            while self._in_flight and self._in_flight[0].handle.done():
                op = self._in_flight.popleft()
                if op.handle._error is not None:
                    self._note(op.handle._error)
                    continue
                end = op.handle._event
                begin_seconds = self._base_seconds + self._base.elapsed_time(op.begin) / 1e3
                end_seconds = begin_seconds + op.begin.elapsed_time(end) / 1e3
                self._book.add(op.handle.label, begin_seconds, end_seconds, op.n_bytes)
                # Event differences are float32 milliseconds: a near base keeps them exact.
                if end_seconds - self._base_seconds > 10.0:
                    self._base, self._base_seconds = end, end_seconds

    def quiesce(self) -> None:
        with self._lock:
            last = self._in_flight[-1].handle if self._in_flight else None
        if last is not None:
            last._settle()
        self.collect()
