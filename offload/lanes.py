"""Lanes: resources that work at the same time, each in its own submission order.

A lane is a worker thread; on an accelerator the upload, download and compute lanes are streams too. An
operation names the handles that it waits for; nothing here ever waits for the whole device. Compute runs
inline, on the submitting thread: on a CPU it is that thread's work, on an accelerator it only enqueues.

Who waits for what: an operation on a stream lane waits on the host until its predecessors on other streams
have been enqueued, then makes its stream wait for their events; predecessors on threads it waits for on the
host. An operation on a thread waits on the host for everything. The waits always name operations submitted
earlier and every lane runs in submission order, so the oldest unfinished operation can always run: nothing
can deadlock.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

import torch

from offload.device import Device
from offload.trace import Trace
from policy.schedule import Lane as LaneName

Work = Callable[[], int | None]

# Operations that a stream may hold unfinished before the host waits: what they hold stays alive meanwhile.
_MAX_IN_FLIGHT = 256
_JOIN_SECONDS = 60.0


class LaneError(RuntimeError):
    """An operation on a lane failed. cause is the original exception, also chained as __cause__."""

    def __init__(self, lane: str, label: str, cause: BaseException) -> None:
        super().__init__(f"{lane} lane, {label or 'unnamed operation'}: {cause or type(cause).__name__}")
        self.lane = lane
        self.label = label
        self.cause = cause
        self.seen = False  # whether a caller has been told

    def again(self) -> LaneError:
        """A fresh exception with the same content, for one more caller."""
        self.seen = True
        error = LaneError(self.lane, self.label, self.cause)
        error.__cause__ = self.cause
        return error


class LaneCancelled(Exception):
    """The operation had not started when the lanes were closed."""


class Handle:
    """The outcome of one submitted operation. Holds no reference to the operation or what it waited for."""

    __slots__ = ("__weakref__", "_error", "_event", "_issued", "label", "lane")

    def __init__(self, lane: str, label: str) -> None:
        self.lane = lane
        self.label = label
        self._issued = threading.Event()  # ran (thread lanes), or was enqueued on its stream
        self._event: Any = None  # torch.Event at the operation's end on its stream
        self._error: LaneError | None = None

    def done(self) -> bool:
        """Whether the operation has ended, well or badly. Never blocks."""
        if not self._issued.is_set():
            return False
        return self._event is None or self._error is not None or self._query()

    def wait(self) -> None:
        """Block until the operation has ended. Raises LaneError with the first failure on its path."""
        error = self._settle()
        if error is not None:
            raise error.again()

    def _query(self) -> bool:
        try:
            return bool(self._event.query())
        except RuntimeError as cause:  # the device reports asynchronous errors here
            self._error = LaneError(self.lane, self.label, cause)
            return True

    def _issue_error(self) -> LaneError | None:
        """Wait until the operation ran or was enqueued."""
        self._issued.wait()
        return self._error

    def _settle(self) -> LaneError | None:
        """Wait until the operation has ended."""
        self._issued.wait()
        if self._event is not None and self._error is None:
            # Polling with sleeps: synchronize() would spin on a core and ignore Ctrl-C.
            pause_seconds = 20e-6
            while not self._query():
                time.sleep(pause_seconds)
                pause_seconds = min(2 * pause_seconds, 500e-6)
        return self._error

    def _end(self, *, event: Any = None, error: LaneError | None = None) -> None:
        self._event = event
        self._error = error
        self._issued.set()


@dataclass(frozen=True, slots=True)
class LaneStats:
    """Finished work of a lane. busy_seconds counts the operations themselves, not what they waited for."""

    busy_seconds: float = 0.0
    bytes: int = 0
    n_ops: int = 0


class _Book:
    """Counts a lane's finished operations and passes them on to the trace."""

    def __init__(self, lane: str, trace: Trace | None) -> None:
        self._lane = lane
        self._trace = trace
        self._lock = threading.Lock()
        self._stats = LaneStats()

    def add(self, label: str, begin_seconds: float, end_seconds: float, n_bytes: int) -> None:
        with self._lock:
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


class _HostRunner:
    """Runs operations to their end on the calling thread."""

    def __init__(self, book: _Book) -> None:
        self._book = book

    def run(self, handle: Handle, work: Work, waits: Sequence[Handle], host_waits: bool) -> LaneError | None:
        for wait in waits:
            error = wait._settle()
            if error is not None:
                return error
        begin = time.perf_counter()
        n_bytes = work() or 0
        self._book.add(handle.label, begin, time.perf_counter(), n_bytes)
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


class _StreamRunner:
    """Enqueues operations on a stream of the accelerator; a handle ends when the stream gets there."""

    def __init__(self, book: _Book, stream: torch.Stream) -> None:
        self._book = book
        self._stream = stream
        self._device = stream.device
        self._in_flight: deque[_InFlight] = deque()
        self._lock = threading.RLock()
        # The host time of one event of this stream places all others on the host's clock.
        self._base = self._event()
        self._base.record(stream)
        self._base.synchronize()
        self._base_seconds = time.perf_counter()

    def _event(self) -> Any:
        return torch.Event(self._device, enable_timing=True)

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
        self.collect()
        while len(self._in_flight) > _MAX_IN_FLIGHT:
            self._in_flight[0].handle._settle()
            self.collect()
        return None

    def collect(self) -> None:
        with self._lock:
            while self._in_flight and self._in_flight[0].handle.done():
                op = self._in_flight.popleft()
                if op.handle._error is not None:
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


class _Failures:
    """The first failure of a set of lanes, and whether their remaining operations are cancelled."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.first: LaneError | None = None
        self.cancelled = False

    def note(self, error: LaneError) -> None:
        with self._lock:
            if self.first is None and not isinstance(error.cause, LaneCancelled):
                self.first = error


_Item = tuple[Handle, Work, Sequence[Handle], bool]


class Lane:
    """One resource. Operations run one after another in the order of submission."""

    def __init__(
        self,
        name: str,
        runner: _HostRunner | _StreamRunner,
        book: _Book,
        failures: _Failures,
        *,
        inline: bool,
    ) -> None:
        self.name = name
        self._runner = runner
        self._book = book
        self._failures = failures
        self._closed = False
        self._lock = threading.Lock()
        self._last: Handle | None = None
        self._queue: SimpleQueue[_Item | None] | None = None if inline else SimpleQueue()

    def submit(
        self, work: Work, waits: Sequence[Handle] = (), label: str = "", *, host_waits: bool = False
    ) -> Handle:
        """Run `work` after everything submitted here before and after all of `waits`, earlier operations.

        work: takes nothing, returns the bytes that it moved (None = 0). On a stream lane it only enqueues;
            whatever it refers to is kept alive until the stream has passed it.
        host_waits: on a stream lane, wait for `waits` on the host even if they are on streams, because
            `work` itself reads or writes host memory that they use.
        If one of `waits` failed, the operation fails likewise without running. An inline lane (compute)
        raises LaneError here and now, since its caller is the thread that would wait.
        """
        handle = Handle(self.name, label)
        if self._queue is None:
            if self._closed:
                raise RuntimeError(f"the {self.name} lane is closed")
            self._last = handle
            self._perform(handle, work, waits, host_waits)
            if handle._error is not None:
                raise handle._error.again()
            return handle
        with self._lock:
            if self._closed:
                raise RuntimeError(f"the {self.name} lane is closed")
            self._last = handle
            self._queue.put((handle, work, tuple(waits), host_waits))
        return handle

    def _perform(self, handle: Handle, work: Work, waits: Sequence[Handle], host_waits: bool) -> None:
        """Run one operation; whatever happens, its handle ends."""
        try:
            if self._failures.cancelled:
                raise LaneCancelled("cancelled before it started, because the run was being stopped")
            error = self._runner.run(handle, work, waits, host_waits)
        except BaseException as cause:
            error = LaneError(self.name, handle.label, cause)
            self._failures.note(error)
            handle._end(error=error)
            if self._queue is None and not isinstance(cause, Exception):
                raise  # Ctrl-C on the caller's own thread stays what it is
            return
        if error is not None:
            handle._end(error=error)

    def _work(self, started: threading.Event, n_torch_threads: int | None) -> None:
        """The worker thread's life."""
        assert self._queue is not None
        if n_torch_threads is not None:
            torch.set_num_threads(n_torch_threads)
            torch.get_num_threads()  # a thread's first query would otherwise overwrite its own setting
        started.set()
        with torch.inference_mode():
            while True:
                item = self._queue.get()
                if item is None:
                    return
                self._perform(*item)
                del item  # a blocked worker must not keep the last operation's tensors alive

    def drain(self) -> None:
        """Wait until everything submitted so far has ended, well or badly."""
        last = self._last
        if last is not None:
            last._settle()
        self._runner.quiesce()

    def stats(self) -> LaneStats:
        self._runner.collect()
        return self._book.read()


def _shut(
    lanes: Sequence[Lane], threads: Sequence[threading.Thread], failures: _Failures, cancel: bool
) -> None:
    if cancel:
        failures.cancelled = True
    for lane in lanes:
        with lane._lock:
            if not lane._closed and lane._queue is not None:
                lane._queue.put(None)
            lane._closed = True
    for thread in threads:
        thread.join(_JOIN_SECONDS if cancel else None)


class Lanes:
    """The lanes of one run: disk_read, disk_write, upload, download, compute, cpu_attention.

    Use as a context manager: a clean exit finishes all operations and raises a failure that nobody has been
    told of; an exit by an exception, Ctrl-C included, cancels what has not started, and joins.
    """

    def __init__(self, device: Device, *, trace: Trace | None = None) -> None:
        self.device = device
        self.trace = trace
        self._failures = _Failures()
        self._lanes: dict[str, Lane] = {}
        threads: list[threading.Thread] = []
        started: list[threading.Event] = []
        streamed = (LaneName.UPLOAD, LaneName.DOWNLOAD, LaneName.COMPUTE) if device.is_accelerator else ()
        n_torch_threads = torch.get_num_threads()
        for name in LaneName:
            book = _Book(name.value, trace)
            runner: _HostRunner | _StreamRunner
            if name in streamed:
                # Compute shares the submitting thread's own stream, so that what this thread does outside
                # of the lanes is in order with it.
                if name is LaneName.COMPUTE:
                    stream = torch.accelerator.current_stream(device.torch_device)
                else:
                    stream = torch.Stream(device.torch_device)
                runner = _StreamRunner(book, stream)
            else:
                runner = _HostRunner(book)
            inline = name is LaneName.COMPUTE
            lane = Lane(name.value, runner, book, self._failures, inline=inline)
            self._lanes[name.value] = lane
            if inline:
                continue
            ready = threading.Event()
            # Lanes that only move bytes must not each bring a team of compute threads along.
            own_threads = None if name is LaneName.CPU_ATTENTION else 1
            thread = threading.Thread(
                target=lane._work, args=(ready, own_threads), name=f"lane-{name.value}", daemon=True
            )
            thread.start()
            threads.append(thread)
            started.append(ready)
        for ready in started:
            ready.wait()
        # The workers' setting also became the default of threads to come; put that back.
        torch.set_num_threads(n_torch_threads)
        self._threads = tuple(threads)
        # Daemon threads die badly in the middle of native code: stop them even if nobody calls close().
        self._stop = weakref.finalize(
            self, _shut, tuple(self._lanes.values()), self._threads, self._failures, True
        )

    def __getitem__(self, name: str) -> Lane:
        return self._lanes[name]

    def submit(
        self,
        name: str,
        work: Work,
        waits: Sequence[Handle] = (),
        label: str = "",
        *,
        host_waits: bool = False,
    ) -> Handle:
        """Lane.submit on the lane called `name` (policy.schedule.Lane, or its string)."""
        return self._lanes[name].submit(work, waits, label, host_waits=host_waits)

    @property
    def first_error(self) -> LaneError | None:
        """The first operation that failed in any lane, if any did."""
        return self._failures.first

    def check(self) -> None:
        """Raise the first failure of any lane, without waiting for anything."""
        if self._failures.first is not None:
            raise self._failures.first.again()

    def drain(self) -> None:
        """Wait for everything submitted so far, then raise the first failure of any lane, if any."""
        for lane in self._lanes.values():
            lane.drain()
        self.check()

    def stats(self) -> dict[str, LaneStats]:
        """Finished work by lane name since the start or the last reset_stats()."""
        return {name: lane.stats() for name, lane in self._lanes.items()}

    def reset_stats(self) -> None:
        for lane in self._lanes.values():
            lane.stats()
            lane._book.reset()

    def close(self, *, cancel: bool = False) -> None:
        """Stop the lanes: finish what was submitted, or with cancel=True only what has started.

        May be called again. Ctrl-C while finishing turns it into a cancel.
        """
        self._stop.detach()
        lanes = tuple(self._lanes.values())
        try:
            _shut(lanes, self._threads, self._failures, cancel)
        except BaseException:
            _shut(lanes, self._threads, self._failures, True)
            raise
        for lane in self._lanes.values():
            lane._runner.quiesce()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(cancel=error is not None)
        first = self._failures.first
        if error is None and first is not None and not first.seen:
            raise first.again()
