import io
import os
import subprocess
import sys

import pytest

from flexrun.jobs.runner import JobProgress, JobSummary
from flexrun.report import (
    ProgressDisplay,
    format_count,
    format_seconds,
    peak_rss_bytes,
    print_table,
    seconds_left,
    summary_rows,
)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def progress(**kwargs):
    defaults = {"n_read": 40, "n_succeeded": 18, "n_failed": 2, "n_resumed": 10, "n_open": 10, "seconds": 5.0}
    return JobProgress(**{**defaults, **kwargs})


def test_words_for_numbers():
    assert [format_seconds(s) for s in (0.0, 9.94, 75, 3599.6, 4000)] == [
        "0.0 s",
        "9.9 s",
        "1:15",
        "1:00:00",
        "1:06:40",
    ]
    assert [format_count(n) for n in (7, 1500, 134_515_008, 7e9, 2e13)] == [
        "7",
        "1.5 k",
        "134.5 M",
        "7.0 G",
        "20.0 T",
    ]


def test_peak_memory_is_of_this_process_alone():
    """A child's figure must not begin at the size of the parent that made it."""
    ballast = bytearray(os.urandom(1 << 20)) * 200
    code = "import sys; sys.path.insert(0, ''); from flexrun.report import peak_rss_bytes; print(peak_rss_bytes())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 5_000_000 < int(done.stdout) < len(ballast) < peak_rss_bytes()


def test_time_left():
    assert seconds_left(progress()) is None
    # 20 lines took 5 s in this run; of 110 there are 80 left.
    assert seconds_left(progress(n_lines_estimated=110)) == pytest.approx(20.0)
    assert seconds_left(progress(n_lines_estimated=110, n_succeeded=0, n_failed=0)) is None
    assert seconds_left(progress(n_lines_estimated=30)) == pytest.approx(2.5)  # those in flight at least


def test_plain_lines_come_at_intervals():
    stream = io.StringIO()
    with ProgressDisplay(stream=stream, interval_seconds=0.0) as display:
        display.update(progress(n_lines_estimated=110), 4000)
        display.update(progress(n_lines_estimated=40))
    first, second = stream.getvalue().splitlines()
    assert first.startswith("30 of about 110 done, 2 failed, 10 from before, 10 in flight, ")
    assert first.endswith("0:20 left")
    assert second.startswith("30 of 40 done")
    stream = io.StringIO()
    with ProgressDisplay(stream=stream, interval_seconds=3600.0) as display:
        display.update(progress())
    assert stream.getvalue() == ""


def test_a_terminal_gets_a_live_line_that_goes_away():
    stream = Terminal()
    with ProgressDisplay(stream=stream) as display:
        display.update(progress(n_lines_estimated=110), 4000)
        display._live.refresh()
        assert "30 of about 110 done" in stream.getvalue()
        display.update(progress(n_lines_estimated=None))
        display._live.refresh()
    assert stream.getvalue().rstrip("\n").endswith(("\x1b[2K", "\x1b[?25h"))


def test_rate_follows_the_last_half_minute(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("flexrun.report.time.monotonic", lambda: now[0])
    with ProgressDisplay(stream=io.StringIO(), interval_seconds=1e9) as display:
        for second in range(1, 101):
            now[0] = float(second)
            display.update(progress(), 10 * second if second <= 50 else 500 + 100 * (second - 50))
    assert display.tokens_per_s == pytest.approx(100.0)
    assert len(display._samples) < 50


def test_closing_table():
    summary = JobSummary(
        requests=10, succeeded=6, failed=1, resumed=3, resumed_failed=1, orphaned=0, changed=0,
        prompt_tokens=1000, generated_tokens=2000, wall_seconds=4.0, peak_rss_bytes=3 << 30, interrupted=False,
    )  # fmt: skip
    rows = dict(summary_rows(summary))
    assert rows["done before"] == "3 (1 failed)" and rows["generated tokens/s"] == "500.0"
    assert rows["all tokens/s"] == "750.0" and rows["peak memory"].startswith("3.00 GiB")
    stream = io.StringIO()
    print_table(summary_rows(summary), title="[job]", stream=stream)
    assert "2,000" in stream.getvalue() and "[job]" in stream.getvalue()
