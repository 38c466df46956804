"""The outcome of an operation on a lane: handles to wait on, and the error that says where it failed."""

from __future__ import annotations

import threading
import time
from typing import Any


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
