"""What every lane did and when, as a Chrome trace (chrome://tracing, ui.perfetto.dev): one row per lane."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Span:
    """One operation on a lane; begin and end are seconds since the trace began."""

    lane: str
    label: str
    begin_seconds: float
    end_seconds: float
    n_bytes: int = 0


class Trace:
    """Collects spans from all lanes; safe to call from any thread.

    Memory is bounded: after `max_spans` further spans are counted, not kept, and the file says so.
    Times given to add() are time.perf_counter() seconds.
    """

    def __init__(self, *, max_spans: int = 500_000) -> None:
        if max_spans < 1:
            raise ValueError(f"max_spans must be at least 1, got {max_spans}")
        self.max_spans = max_spans
        self.n_dropped = 0
        self.began_seconds = time.perf_counter()
        self._spans: list[Span] = []
        self._lock = threading.Lock()

    def add(self, lane: str, label: str, begin_seconds: float, end_seconds: float, n_bytes: int = 0) -> None:
        span = Span(
            lane, label, begin_seconds - self.began_seconds, end_seconds - self.began_seconds, n_bytes
        )
        with self._lock:
            if len(self._spans) < self.max_spans:
                self._spans.append(span)
            else:
                self.n_dropped += 1

    def spans(self) -> list[Span]:
        with self._lock:
            return list(self._spans)

    def write(self, path: Path, *, lane_order: Sequence[str] = ()) -> None:
        """Write the trace as JSON. Rows follow `lane_order`, then the order of first use."""
        spans = self.spans()
        rows = {lane: row for row, lane in enumerate(dict.fromkeys([*lane_order, *(s.lane for s in spans)]))}
        with path.open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit": "ms", "otherData": ')
            json.dump({"dropped_spans": self.n_dropped}, file)
            file.write(', "traceEvents": [\n')
            lines = []
            for lane, row in rows.items():
                name = {"name": "thread_name", "ph": "M", "pid": 1, "tid": row, "args": {"name": lane}}
                order = {
                    "name": "thread_sort_index",
                    "ph": "M",
                    "pid": 1,
                    "tid": row,
                    "args": {"sort_index": row},
                }
                lines += [json.dumps(name), json.dumps(order)]
            file.write(",\n".join(lines))
            for span in spans:
                event = {
                    "name": span.label,
                    "ph": "X",
                    "pid": 1,
                    "tid": rows[span.lane],
                    "ts": round(span.begin_seconds * 1e6, 3),
                    "dur": round((span.end_seconds - span.begin_seconds) * 1e6, 3),
                    "args": {"bytes": span.n_bytes},
                }
                file.write(",\n" if lines else "")
                lines.append("")
                json.dump(event, file)
            file.write("\n]}\n")
