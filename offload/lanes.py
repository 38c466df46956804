"""Lanes: resources that work at the same time, each in its own submission order.

A lane is a worker thread; on an accelerator the upload, download and compute lanes are streams too. Disk reads
have two workers: the second read is on its way to the disk before the first has ended, so that the disk does
not stand still between them. Operations of that lane begin in order, as far as what they wait for allows, and
may end in another order; what must come first is among their waits, as for any other lane.

An operation names the handles that it waits for; nothing here ever waits for the whole device. Compute runs
inline, on the submitting thread: on a CPU it is that thread's work, on an accelerator it only enqueues.

Who waits for what: an operation on a stream lane waits on the host until its predecessors on other streams
have been enqueued, then makes its stream wait for their events; predecessors on threads it waits for on the
host. An operation on a thread waits on the host for everything. The waits always name operations submitted
earlier and every lane takes operations up in submission order, so the oldest unfinished operation can always
run: nothing can deadlock.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from queue import SimpleQueue
from types import TracebackType
from typing import Self

import torch

from offload.device import Device
from offload.handles import Handle, LaneCancelled, LaneError
from offload.runners import Book, HostRunner, LaneStats, StreamRunner, Work
from offload.trace import Trace
from policy.schedule import Lane as LaneName

__all__ = ["Handle", "Lane", "LaneCancelled", "LaneError", "LaneName", "LaneStats", "Lanes", "Work"]

_JOIN_SECONDS = 60.0
# Three gain nothing over two: measured with reads of 1 to 20 MB.
_WORKERS = {LaneName.DISK_READ: 2}


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
    """One resource. Operations are taken up in the order of submission, each by one of n_workers threads."""

    def __init__(
        self,
        name: str,
        runner: HostRunner | StreamRunner,
        book: Book,
        failures: _Failures,
        *,
        n_workers: int,
    ) -> None:
        """n_workers: 0 runs operations on the submitting thread."""
        self.name = name
        self._runner = runner
        self._book = book
        self._failures = failures
        self._closed = False
        self._lock = threading.Lock()
        self.n_workers = n_workers
        self._submitted: deque[Handle] = deque()  # without those at its front that are known to have ended
        self._queue: SimpleQueue[_Item | None] | None = SimpleQueue() if n_workers else None

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
            self._remember(handle)
            self._perform(handle, work, waits, host_waits)
            if handle._error is not None:
                raise handle._error.again()
            return handle
        with self._lock:
            if self._closed:
                raise RuntimeError(f"the {self.name} lane is closed")
            self._remember(handle)
            self._queue.put((handle, work, tuple(waits), host_waits))
        return handle

    def _remember(self, handle: Handle) -> None:
        self._forget_ended()
        self._submitted.append(handle)

    def _forget_ended(self) -> None:
        while self._submitted and self._submitted[0].done():
            self._submitted.popleft()

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
        """A worker thread's life."""
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
        with self._lock:
            submitted = tuple(self._submitted)
        for handle in submitted:
            handle._settle()
        with self._lock:
            self._forget_ended()
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
                for _ in range(lane.n_workers):
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
            book = Book(name.value, trace)
            runner: HostRunner | StreamRunner
            if name in streamed:
                # Compute shares the submitting thread's own stream, so that what this thread does outside
                # of the lanes is in order with it.
                stream = device.current_stream() if name is LaneName.COMPUTE else device.new_stream()
                runner = StreamRunner(book, stream, device.new_event, self._failures.note)
            else:
                runner = HostRunner(book)
            n_workers = 0 if name is LaneName.COMPUTE else _WORKERS.get(name, 1)
            lane = Lane(name.value, runner, book, self._failures, n_workers=n_workers)
            self._lanes[name.value] = lane
            # Lanes that only move bytes must not each bring a team of compute threads along.
            own_threads = None if name is LaneName.CPU_ATTENTION else 1
            for i in range(n_workers):
                ready = threading.Event()
                thread = threading.Thread(
                    target=lane._work,
                    args=(ready, own_threads),
                    name=f"lane-{name.value}" + (f"-{i + 1}" if i else ""),
                    daemon=True,
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
