"""Ctrl-C and SIGTERM: the first asks for an orderly end after the pass, the second ends at once."""

from __future__ import annotations

import signal
import sys
from types import FrameType, TracebackType
from typing import Any


class StopRequest:
    """While active, turns the first signal into `requested`.

    A pass over a large offloaded model takes minutes; ending after it keeps what it finished.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        print("stopping after this pass; once more to stop at once", file=sys.stderr, flush=True)

    def __call__(self) -> bool:
        return self.requested
