"""What a run tells people: sizes and times in words, the live progress, the closing table, peak memory.

Everything here writes to standard error; standard output belongs to results.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from offload.host import format_bytes

if TYPE_CHECKING:
    from flexrun.jobs.runner import JobProgress, JobSummary

PLAIN_INTERVAL_SECONDS = 10.0
_RATE_WINDOW_SECONDS = 30.0


def peak_rss_bytes() -> int:
    """Largest resident memory of this process so far.

    Read from /proc: the figure of getrusage starts at the parent's size in a process that was just made.
    """
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as stream:
            for line in stream:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def format_count(n: float) -> str:
    """A large number in words' short forms: 134515008 -> "134.5 M"."""
    value = float(n)
    for unit in ("", " k", " M", " G"):
        if abs(value) < 1000:
            return f"{value:.0f}{unit}" if not unit else f"{value:.1f}{unit}"
        value /= 1000
    return f"{value:.1f} T"


def format_seconds(seconds: float) -> str:
    """A duration: 75 -> "1:15", 4000 -> "1:06:40"; under ten seconds with a decimal."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def seconds_left(progress: JobProgress) -> float | None:
    """Time left at the pace of this run's finished lines; None as long as nothing can be said."""
    total = progress.n_lines_estimated
    if total is None or progress.n_finished == 0 or progress.seconds <= 0:
        return None
    left = max(total - progress.n_finished - progress.n_resumed, progress.n_open)
    return left * progress.seconds / progress.n_finished


class ProgressDisplay:
    """Progress of a job: a live line on a terminal, else a plain line every few seconds.

    Use as a context manager and call `update` after every pass; its `generated_tokens` counts those of
    unfinished requests too, so that the rate moves with every pass. `rate_name` says what is counted.
    """

    def __init__(
        self,
        *,
        stream: TextIO | None = None,
        interval_seconds: float = PLAIN_INTERVAL_SECONDS,
        rate_name: str = "generated tokens/s",
    ) -> None:
        self._rate_name = rate_name
        self._stream = sys.stderr if stream is None else stream
        self._interval_seconds = interval_seconds
        self._live: Any = None
        self._printed_at = 0.0
        self._samples: list[tuple[float, int]] = []
        self._generated_tokens = 0
        self._progress: JobProgress | None = None
        self._updated_at = 0.0

    def __enter__(self) -> ProgressDisplay:
        self._printed_at = time.monotonic()
        self._samples = [(self._printed_at, 0)]
        if self._stream.isatty():
            from rich.console import Console
            from rich.live import Live

            console = Console(file=self._stream)
            self._live = Live(
                get_renderable=self._renderable, console=console, refresh_per_second=4, transient=True
            )
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def update(self, progress: JobProgress, generated_tokens: int | None = None) -> None:
        """Take the state after a pass."""
        now = time.monotonic()
        self._progress = progress
        self._updated_at = now
        tokens = progress.generated_tokens if generated_tokens is None else generated_tokens
        self._generated_tokens = tokens
        if now - self._samples[-1][0] >= 0.25:
            self._samples.append((now, tokens))
            while len(self._samples) > 2 and now - self._samples[1][0] > _RATE_WINDOW_SECONDS:
                self._samples.pop(0)
        if self._live is None and now - self._printed_at >= self._interval_seconds:
            self._printed_at = now
            print(self.line(), file=self._stream, flush=True)

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second over the last half minute."""
        start, before = self._samples[0]
        elapsed = self._updated_at - start
        return (self._generated_tokens - before) / elapsed if elapsed > 0 else 0.0

    def line(self) -> str:
        """The state in one line."""
        progress = self._progress
        if progress is None:
            return "starting"
        done = progress.n_finished + progress.n_resumed
        total = progress.n_lines_estimated
        exact = total is not None and total == progress.n_read
        parts = [
            f"{done:,}" + (f" of {'' if exact else 'about '}{total:,}" if total is not None else "") + " done"
        ]
        if progress.n_failed:
            parts.append(f"{progress.n_failed:,} failed")
        if progress.n_resumed:
            parts.append(f"{progress.n_resumed:,} from before")
        parts.append(f"{progress.n_open:,} in flight")
        parts.append(f"{self.tokens_per_s:,.1f} {self._rate_name}")
        left = seconds_left(progress)
        if left is not None:
            parts.append(f"{format_seconds(left)} left")
        return ", ".join(parts)

    def _renderable(self) -> Any:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(padding=(0, 1))
        progress = self._progress
        if progress is not None and progress.n_lines_estimated:
            done = progress.n_finished + progress.n_resumed
            grid.add_row(
                ProgressBar(total=progress.n_lines_estimated, completed=done, width=24), Text(self.line())
            )
        else:
            grid.add_row(Text(self.line()))
        return grid


def summary_rows(summary: JobSummary) -> list[tuple[str, str]]:
    """The closing table's rows."""
    rows = [("requests", f"{summary.requests:,}"), ("succeeded", f"{summary.succeeded:,}")]
    rows.append(("failed", f"{summary.failed:,}"))
    if summary.resumed:
        before = f" ({summary.resumed_failed:,} failed)" if summary.resumed_failed else ""
        rows.append(("done before", f"{summary.resumed:,}{before}"))
    rows += [
        ("prompt tokens", f"{summary.prompt_tokens:,}"),
        ("generated tokens", f"{summary.generated_tokens:,}"),
        ("time", format_seconds(summary.wall_seconds)),
        ("generated tokens/s", f"{summary.generated_tokens_per_s:,.1f}"),
        ("all tokens/s", f"{summary.total_tokens_per_s:,.1f}"),
        ("peak memory", format_bytes(summary.peak_rss_bytes)),
    ]
    return rows


def print_table(
    rows: Sequence[tuple[str, str]], *, title: str | None = None, stream: TextIO | None = None
) -> None:
    """Two columns, names and values."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(justify="right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(file=sys.stderr if stream is None else stream, markup=False, highlight=False).print(table)


def print_columns(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str | None = None,
    stream: TextIO | None = None,
) -> None:
    """A table with headings; the first column names things, the others hold figures."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for i, head in enumerate(heads):
        table.add_column(head, no_wrap=i == 0, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*row)
    Console(file=sys.stderr if stream is None else stream, markup=False, highlight=False).print(table)


def audit_rows(audit: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """(what, planned or predicted, measured, measured / predicted) of a report's audit (flexrun.audit)."""
    measured, predicted = audit["measured"], audit["predicted"]
    rows: list[tuple[str, str, str, str]] = []

    def add(name: str, expected: float | None, seconds: float) -> None:
        if max(expected or 0.0, seconds) < 5e-4:
            return
        shown = "-" if expected is None else f"{expected:.2f} s"
        ratio = f"{seconds / expected:.2f}" if expected else "-"
        rows.append((name, shown, f"{seconds:.2f} s", ratio))

    add("all passes", predicted and predicted["wall_seconds"], measured["wall_seconds"])
    for name, phase in measured["phases"].items():
        theirs = None if predicted is None else predicted["phases"].get(name)
        add(name, theirs and theirs["wall_seconds"], phase["wall_seconds"])
        expected = {} if theirs is None else theirs["busy_seconds"]
        for lane in dict.fromkeys([*phase["busy_seconds"], *expected]):
            known = None if theirs is None else expected.get(lane, 0.0)
            add(f"  {lane} busy", known, phase["busy_seconds"].get(lane, 0.0))
    add("sampling", predicted and predicted["sampling_seconds"], measured["sampling_seconds"])
    for tier, entry in audit["tiers"].items():
        planned, used = entry["planned_bytes"], entry["measured_bytes"]
        ratio = f"{used / planned:.3f}" if planned else "-"
        # What torch takes while it computes is an allowance beside the arenas, not measured.
        name = f"{tier} memory, arenas" if tier != "disk" else "disk"
        rows.append((name, format_bytes(planned), format_bytes(used), ratio))
    return rows


def print_audit(audit: dict[str, Any], *, stream: TextIO | None = None) -> None:
    """The audit for people: the table, then what is to be said about it."""
    heads = ("", "planned", "measured", "measured / planned")
    print_columns(heads, audit_rows(audit), title="the run beside its plan", stream=stream)
    for note in audit["notes"]:
        print(f"note: {note}", file=sys.stderr if stream is None else stream)
