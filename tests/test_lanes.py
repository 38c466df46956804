"""Lanes: order, dependencies, failures, closing, statistics; streams are exercised with a simulated one."""

from __future__ import annotations

import gc
import itertools
import json
import queue
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload.device import make_device
from offload.lanes import Handle, LaneCancelled, LaneError, LaneName, Lanes
from offload.trace import Trace

LANES = [name.value for name in LaneName]


class FakeStream:
    """An in-order queue that runs on its own thread, as an accelerator's stream does."""

    current = threading.local()

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            self._queue.get()()

    def enqueue(self, action: Any) -> None:
        self._queue.put(action)

    def wait_event(self, event: FakeEvent) -> None:
        self.enqueue(event.reached.wait)

    def synchronize(self) -> None:
        reached = threading.Event()
        self.enqueue(reached.set)
        reached.wait()

    def __enter__(self) -> None:
        FakeStream.current.stream = self

    def __exit__(self, *_: object) -> None:
        FakeStream.current.stream = None


class FakeEvent:
    broken = False  # as after an illegal access: every query of the device raises

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.seconds = 0.0

    def record(self, stream: FakeStream) -> None:
        def reach() -> None:
            self.seconds = time.perf_counter()
            self.reached.set()

        stream.enqueue(reach)

    def query(self) -> bool:
        if FakeEvent.broken:
            raise RuntimeError("device-side failure")
        return self.reached.is_set()

    def synchronize(self) -> None:
        self.reached.wait()

    def elapsed_time(self, later: FakeEvent) -> float:
        return (later.seconds - self.seconds) * 1e3


class FakeDevice:
    """As much of offload.device.Device as Lanes asks for."""

    is_accelerator = True
    torch_device = torch.device("meta")

    def __init__(self) -> None:
        self._current = FakeStream()

    def current_stream(self) -> FakeStream:
        return self._current

    def new_stream(self) -> FakeStream:
        return FakeStream()

    def new_event(self) -> FakeEvent:
        return FakeEvent()


def _make_lanes(streams: bool, **more: Any) -> Lanes:
    return Lanes(FakeDevice() if streams else make_device("cpu"), **more)  # type: ignore[arg-type]


def _perform(action: Any) -> None:
    """Run an effect where the operation's lane runs: on the current stream if there is one, else here."""
    stream = getattr(FakeStream.current, "stream", None)
    if stream is None:
        action()
    else:
        stream.enqueue(action)


@st.composite
def _dags(draw: st.DrawFn) -> list[tuple[str, list[int], bool, bool]]:
    """Operations as (lane, indices waited for, whether it fails, whether it takes a moment)."""
    ops = []
    for index in range(draw(st.integers(1, 14))):
        waits = draw(st.lists(st.integers(0, index - 1), max_size=3)) if index else []
        fails = draw(st.integers(0, 9)) == 0
        ops.append((draw(st.sampled_from(LANES)), waits, fails, draw(st.booleans())))
    return ops


@pytest.mark.parametrize("streams", [False, True], ids=["threads", "streams"])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(dag=_dags())
def test_random_graphs(streams: bool, dag: list[tuple[str, list[int], bool, bool]]) -> None:
    """Every operation starts after its waits ended, lanes keep their order, failures reach dependants only."""
    clock = itertools.count()
    begun: dict[int, int] = {}
    ended: dict[int, int] = {}
    should_fail: list[bool] = []
    handles: list[Handle] = []
    lanes = _make_lanes(streams)
    for index, (lane, waits, fails, slow) in enumerate(dag):

        def effect(index: int = index, slow: bool = slow) -> None:
            begun[index] = next(clock)
            if slow:
                time.sleep(0.0005)
            ended[index] = next(clock)

        def work(index: int = index, fails: bool = fails, effect: Any = effect) -> int:
            if fails:
                raise OSError(f"injected into {index}")
            _perform(effect)
            return index

        should_fail.append(fails or any(should_fail[w] for w in waits))
        try:
            handles.append(lanes.submit(lane, work, [handles[w] for w in waits], f"op {index}"))
        except LaneError:
            assert should_fail[index] and lane == "compute"
            failed = Handle(lane, f"op {index}")
            failed._end(error=LaneError(lane, f"op {index}", OSError("injected")))
            handles.append(failed)
    for handle, fails in zip(handles, should_fail):
        if fails:
            with pytest.raises(LaneError, match="injected"):
                handle.wait()
        else:
            handle.wait()
        assert handle.done()
    lanes.close()
    assert sorted(ended) == [i for i, fails in enumerate(should_fail) if not fails]
    for index, (_, waits, _, _) in enumerate(dag):
        if index in begun:
            assert all(ended[w] < begun[index] for w in waits)
    for name in LANES:
        mine = [i for i, op in enumerate(dag) if op[0] == name and i in begun]
        if name == "disk_read":  # two at a time
            assert all(sum(begun[a] < begun[b] < ended[a] for a in mine) <= 1 for b in mine)
        else:
            assert all(ended[a] < begun[b] for a, b in itertools.pairwise(mine))
        assert lanes.stats()[name].n_ops == len(mine)
        assert lanes.stats()[name].bytes == sum(mine)
    assert (lanes.first_error is not None) == any(should_fail)


@pytest.mark.parametrize("streams", [False, True], ids=["threads", "streams"])
def test_lanes_overlap(streams: bool) -> None:
    """Two lanes run at once: each waits, inside its operation, for the other to have begun."""
    with _make_lanes(streams) as lanes:
        both = threading.Barrier(2, timeout=20)
        a = lanes.submit("disk_read", lambda: both.wait() and None)
        b = lanes.submit("upload", lambda: _perform(both.wait))
        a.wait()
        b.wait()


def test_two_disk_reads_are_under_way_and_no_second_counts_twice() -> None:
    """The first read ends after the second; both are entered, one after the other, once both have ended."""
    trace = Trace()
    lanes = Lanes(make_device("cpu"), trace=trace)
    began = time.perf_counter()
    second_is_over = threading.Event()

    def first() -> int:
        assert second_is_over.wait(20)
        time.sleep(0.02)
        return 10

    slow = lanes.submit("disk_read", first, label="first")
    quick = lanes.submit("disk_read", lambda: time.sleep(0.02) or 1, label="second")
    quick.wait()
    assert lanes.stats()["disk_read"].n_ops == 0  # the first goes in before it
    second_is_over.set()
    lanes.drain()
    assert slow.done()
    stats = lanes.stats()["disk_read"]
    assert (stats.n_ops, stats.bytes) == (2, 11)
    assert 0.04 <= stats.busy_seconds <= time.perf_counter() - began
    spans = trace.spans()
    assert [span.label for span in spans] == ["first", "second"]
    assert spans[1].begin_seconds >= spans[0].end_seconds
    lanes.close()


def test_a_failed_read_does_not_hold_up_the_book() -> None:
    lanes = _make_lanes(False)
    bad = lanes.submit("disk_read", lambda: 1 // 0)
    with pytest.raises(LaneError):
        bad.wait()
    lanes.submit("disk_read", lambda: 5).wait()
    assert lanes.stats()["disk_read"].bytes == 5
    lanes.close()


def test_draining_waits_for_a_slow_read_before_a_quick_one() -> None:
    over: list[str] = []
    with _make_lanes(False) as lanes:
        lanes.submit("disk_read", lambda: time.sleep(0.05) or over.append("slow"))
        lanes.submit("disk_read", lambda: over.append("quick")).wait()
        lanes.drain()
        assert sorted(over) == ["quick", "slow"]


def test_the_first_error_is_what_every_dependant_sees() -> None:
    lanes = _make_lanes(False)

    def fail() -> None:
        raise OSError("the disk is gone")

    ran: list[int] = []
    bad = lanes.submit("disk_read", fail, label="read unit 3")
    next_ = lanes.submit("upload", lambda: ran.append(1), [bad], "upload unit 3")
    with pytest.raises(LaneError) as caught:
        lanes.submit("compute", lambda: ran.append(2), [next_], "compute unit 3")
    assert (caught.value.lane, caught.value.label) == ("disk_read", "read unit 3")
    assert isinstance(caught.value.cause, OSError) and caught.value.__cause__ is caught.value.cause
    assert str(caught.value) == "disk_read lane, read unit 3: the disk is gone"
    assert ran == []
    lanes.submit("disk_read", lambda: ran.append(3)).wait()  # what does not depend on it goes on
    assert ran == [3]
    with pytest.raises(LaneError, match="the disk is gone"):
        lanes.check()
    with pytest.raises(LaneError, match="the disk is gone"):
        lanes.drain()
    lanes.close()


def test_a_failure_nobody_saw_is_raised_at_the_end() -> None:
    with pytest.raises(LaneError, match="by zero"), _make_lanes(False) as lanes:
        lanes.submit("disk_write", lambda: 1 // 0)


def test_a_failure_somebody_handled_is_not_raised_again() -> None:
    with _make_lanes(False) as lanes, pytest.raises(LaneError):
        lanes.submit("disk_write", lambda: 1 // 0).wait()


def test_device_failures_reach_the_waiting_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes = _make_lanes(True)
    handle = lanes.submit("upload", lambda: None, label="upload unit 1")
    handle.wait()
    monkeypatch.setattr(FakeEvent, "broken", True)
    late = lanes.submit("upload", lambda: None, label="upload unit 2")
    with pytest.raises(LaneError, match="upload unit 2: device-side failure"):
        late.wait()
    lanes.close()
    assert lanes.first_error is not None


def test_a_stream_keeps_what_its_operations_use() -> None:
    """The closure of an enqueued operation lives until the stream has passed it, and not much longer."""
    with _make_lanes(True) as lanes:
        gate = threading.Event()
        data = torch.zeros(4)
        alive = weakref.ref(data)
        handle = lanes.submit("download", lambda data=data: _perform(gate.wait) or data.numel() * 0)
        del data
        handle._issued.wait()
        gc.collect()
        assert alive() is not None and not handle.done()
        gate.set()
        handle.wait()
        lanes.stats()
        gc.collect()
        assert alive() is None


def test_host_waits_on_streams() -> None:
    """With host_waits the operation's own host code sees what a stream wrote."""
    with _make_lanes(True) as lanes:
        written: list[int] = []
        gate = threading.Event()

        def slow() -> None:
            gate.wait()
            written.append(1)

        seen: list[int] = []
        down = lanes.submit("download", lambda: _perform(slow))
        up = lanes.submit("upload", lambda: seen.extend(written), [down], host_waits=True)
        gate.set()
        up.wait()
        assert seen == [1]


def test_finished_operations_leave_nothing_behind() -> None:
    for streams in (False, True):
        with _make_lanes(streams) as lanes:
            handles: weakref.WeakSet[Handle] = weakref.WeakSet()
            previous = None
            for _ in range(3000):
                waits = [previous] if previous is not None else []
                previous = lanes.submit("upload", lambda: None, waits)
                handles.add(previous)
                if len(handles) > 300:
                    previous.wait()
            del waits
            lanes.drain()
            gc.collect()
            assert len(handles) <= 2  # the one held here, the lane's last


def test_close_finishes_or_cancels() -> None:
    for cancel in (False, True):
        lanes = _make_lanes(False)
        gate, begun = threading.Event(), threading.Event()

        def block(gate: threading.Event = gate, begun: threading.Event = begun) -> None:
            begun.set()
            gate.wait()

        first = lanes.submit("upload", block)
        rest = [lanes.submit("upload", lambda: None) for _ in range(3)]
        after = lanes.submit("disk_write", lambda: None, [rest[-1]])
        assert begun.wait(20)
        closer = threading.Thread(target=lambda cancel=cancel, lanes=lanes: lanes.close(cancel=cancel))
        closer.start()
        while not lanes["disk_write"]._closed:
            time.sleep(0.001)
        gate.set()
        closer.join(20)
        assert not closer.is_alive()
        first.wait()
        for handle in [*rest, after]:
            if cancel:
                with pytest.raises(LaneError) as caught:
                    handle.wait()
                assert isinstance(caught.value.cause, LaneCancelled)
            else:
                handle.wait()
        lanes.close()  # again, harmless
        for name in LANES:
            with pytest.raises(RuntimeError, match="closed"):
                lanes.submit(name, lambda: None)


def test_interrupt_on_the_callers_thread_stops_everything() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    ran: list[int] = []
    gate = threading.Event()
    with pytest.raises(KeyboardInterrupt), _make_lanes(False) as lanes:
        lanes.submit("upload", lambda: gate.wait() and None)
        lanes.submit("upload", lambda: ran.append(1))
        threading.Timer(0.05, gate.set).start()
        lanes.submit("compute", interrupt)
    assert ran == []
    assert not any(thread.is_alive() for thread in lanes._threads)


def test_ctrl_c_while_waiting_in_a_real_process(tmp_path: Path) -> None:
    script = """
import sys, time
from offload.device import make_device
from offload.lanes import Lanes
try:
    with Lanes(make_device("cpu")) as lanes:
        slow = lanes.submit("disk_read", lambda: time.sleep(0.5))
        for _ in range(1000):
            last = lanes.submit("disk_read", lambda: time.sleep(0.5))
        print("waiting", flush=True)
        last.wait()
except KeyboardInterrupt:
    print("joined", [t.is_alive() for t in lanes._threads].count(True), flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert out == "joined 0\n" and process.returncode == 0


def test_lanes_nobody_closed_stop_with_the_object() -> None:
    lanes = _make_lanes(False)
    threads = lanes._threads
    del lanes
    gc.collect()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def test_byte_moving_lanes_use_one_thread_and_leave_the_setting_alone() -> None:
    before = torch.get_num_threads()
    found: dict[str, int] = {}
    with _make_lanes(False) as lanes:
        for name in LANES:
            lanes.submit(name, lambda name=name: found.update({name: torch.get_num_threads()})).wait()
    assert torch.get_num_threads() == before
    assert found["compute"] == found["cpu_attention"] == before
    assert {found[n] for n in ("disk_read", "disk_write", "upload", "download")} == {1}
    later: list[int] = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert later == [before]


@pytest.mark.parametrize("streams", [False, True], ids=["threads", "streams"])
def test_statistics_and_trace(streams: bool, tmp_path: Path) -> None:
    trace = Trace()
    with _make_lanes(streams, trace=trace) as lanes:
        blocker = lanes.submit("disk_read", lambda: time.sleep(0.02) or 11, label="read")
        lanes.submit("upload", lambda: _perform(lambda: time.sleep(0.01)) or 7, [blocker], "up").wait()
        stats = lanes.stats()
        assert (stats["disk_read"].n_ops, stats["disk_read"].bytes) == (1, 11)
        assert (stats["upload"].n_ops, stats["upload"].bytes) == (1, 7)
        assert stats["disk_read"].busy_seconds >= 0.02 and stats["upload"].busy_seconds >= 0.01
        lanes.reset_stats()
        assert lanes.stats()["upload"].n_ops == 0
    read, up = sorted(trace.spans(), key=lambda span: span.begin_seconds)
    assert (read.lane, up.lane) == ("disk_read", "upload")
    # Time spent waiting is no part of the operation; clocks of stream and host agree within a little.
    assert up.begin_seconds >= read.end_seconds - 1e-3
    path = tmp_path / "trace.json"
    trace.write(path, lane_order=LANES)
    events = json.loads(path.read_text())["traceEvents"]
    rows = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    assert list(rows) == LANES
    span = next(e for e in events if e["name"] == "up")
    assert span["tid"] == rows["upload"] and span["args"]["bytes"] == 7
    assert span["dur"] == pytest.approx((up.end_seconds - up.begin_seconds) * 1e6, abs=0.01)


def test_trace_is_bounded(tmp_path: Path) -> None:
    trace = Trace(max_spans=2)
    for i in range(5):
        trace.add("compute", f'op "{i}"', i, i + 1)
    path = tmp_path / "trace.json"
    trace.write(path)
    data = json.loads(path.read_text())
    assert data["otherData"] == {"dropped_spans": 3}
    assert [e["name"] for e in data["traceEvents"] if e["ph"] == "X"] == ['op "0"', 'op "1"']
    Trace().write(path)
    assert json.loads(path.read_text())["traceEvents"] == []
    with pytest.raises(ValueError, match="max_spans"):
        Trace(max_spans=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_real_streams_order_copies() -> None:
    device = make_device("auto")
    n = 1 << 22
    host = torch.arange(n, dtype=torch.int32).pin_memory()
    back = torch.zeros(n, dtype=torch.int32).pin_memory()
    on_device = torch.empty(n, dtype=torch.int32, device=device.torch_device)

    def upload() -> int:
        on_device.copy_(host, non_blocking=True)
        return n * 4

    def compute() -> None:
        on_device.add_(1)

    def download() -> None:
        back.copy_(on_device, non_blocking=True)

    found: list[int] = []
    with Lanes(device) as lanes:
        for _ in range(8):
            up = lanes.submit("upload", upload)
            down = lanes.submit("download", download, [lanes.submit("compute", compute, [up])])
            lanes.submit("disk_write", lambda: found.append(int(back[-1])), [down]).wait()
            host.add_(1)
        assert found == [n + i for i in range(8)]
        assert lanes.stats()["upload"].bytes == 8 * n * 4
        assert lanes.stats()["upload"].busy_seconds > 0
