import io
import json
import random
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest
from jobs_fake import FakeEngine, FakeTokenizer, encode_chat, read_results

from flexrun.jobs.generation import GenerationJob
from flexrun.jobs.ids import IdTable, hash64
from flexrun.jobs.output import JobOutput, OutputError
from flexrun.jobs.runner import InputChangedError, JobRunner
from flexrun.request import NumericsError


class ListSink:
    def __init__(self):
        self.records, self.n_syncs = [], 0

    def append(self, record):
        self.records.append(record)

    def sync(self):
        self.n_syncs += 1

    @property
    def by_id(self):
        assert len({record["custom_id"] for record in self.records}) == len(self.records)
        return {record["custom_id"]: record for record in self.records}


def kind():
    return GenerationJob(model_name="tiny", tokenizer=FakeTokenizer(), encode_chat=encode_chat)


def run(data, sink=None, engine=None, **options):
    """Run lines (objects, or bytes as they are) and return (summary, sink)."""
    sink = sink if sink is not None else ListSink()
    lines = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in data]
    runner = JobRunner(engine or FakeEngine(), kind(), io.BytesIO(b"\n".join(lines)), sink, **options)
    return runner.run(), sink


def resume(path, data, **options):
    """The same through a file, as the command line does it."""
    ids = IdTable()
    with JobOutput(path) as output:
        output.recover(ids, retry_failed=options.pop("retry_failed", False))
        return run(data, output, ids=ids, **options)[0]


def prompts(n, **options):
    return [{"id": f"r{i}", "prompt": f"prompt {i}", **options} for i in range(n)]


def texts(results):
    return {
        custom_id: [c["text"] for c in record["response"]["body"]["choices"]]
        for custom_id, record in results.items()
    }


def test_every_line_gets_its_result_and_the_counts_fit():
    engine = FakeEngine()
    lines = prompts(50, max_tokens=3)
    lines[7] = {"id": "many", "prompt": ["a", "b"], "n": 2, "max_tokens": 5}
    lines[9] = {"prompt": "no id"}
    lines[11] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    summary, sink = run(lines, engine=engine)
    assert (summary.requests, summary.succeeded, summary.failed, summary.resumed) == (50, 50, 0, 0)
    assert len(sink.by_id["many"]["response"]["body"]["choices"]) == 4
    assert "line-10" in sink.by_id and "line-12" in sink.by_id
    bodies = [record["response"]["body"]["usage"] for record in sink.records]
    assert summary.generated_tokens == sum(usage["completion_tokens"] for usage in bodies)
    assert summary.prompt_tokens == sum(usage["prompt_tokens"] for usage in bodies)
    assert not engine.has_unfinished() and sink.n_syncs > 0
    names = "requests succeeded failed resumed prompt_tokens generated_tokens wall_seconds"
    names += " generated_tokens_per_s total_tokens_per_s peak_rss_bytes"
    assert set(summary.to_dict()) >= set(names.split())
    assert summary.peak_rss_bytes > 5_000_000


def test_one_bad_line_among_many_gets_its_record_and_the_others_finish():
    good = prompts(40)
    bad = {
        5: (b"{nonsense", "invalid_json", "line-6"),
        9: (b"[1]", "invalid_json", "line-10"),
        12: ({"id": "x"}, "missing_field", "x"),
        15: ({"id": "r3", "prompt": "again"}, "duplicate_custom_id", "line-16"),
        18: ({"custom_id": "u", "method": "POST", "url": "/v1/images", "body": {}}, "unsupported_url", "u"),
        21: ({"id": "long", "prompt": "x" * 600}, "invalid_request", "long"),
        24: ({"id": "two", "prompt": ["fits", "x" * 600]}, "invalid_request", "two"),
        27: ({"id": "opt", "prompt": "a", "temperature": -1}, "invalid_option", "opt"),
        30: ({"id": "none", "messages": []}, "invalid_request", "none"),
        33: ({"id": "typo", "prompt": "a", "tempreature": 1}, "unknown_option", "typo"),
        36: (b'{"id": "\\ud800", "prompt": "a"}', "invalid_json", "line-37"),
    }
    lines = list(good)
    for index, (line, _, _) in bad.items():
        lines[index] = line
    summary, sink = run(lines)
    assert (summary.succeeded, summary.failed) == (40 - len(bad), len(bad))
    for index, (_, code, custom_id) in bad.items():
        error = sink.by_id[custom_id]["error"]
        assert error["code"] == code and error["line"] == index + 1
        assert error["message"].startswith(f"line {index + 1}: ")
    assert "'r3'" in sink.by_id["line-16"]["error"]["message"]
    assert "512" in sink.by_id["long"]["error"]["message"]
    assert "prompt 2 of 2" in sink.by_id["two"]["error"]["message"]
    alone = texts(run([line for i, line in enumerate(good) if i not in bad])[1].by_id)
    assert texts({k: r for k, r in sink.by_id.items() if not r["error"]}) == alone


def test_a_refusal_after_the_engine_has_noted_a_part_leaves_nothing_behind():
    class Hasty(FakeEngine):
        def add_request(self, request_id, prompt_token_ids, params, prompt_text=None):
            super().add_request(request_id, prompt_token_ids, params, prompt_text)
            if prompt_text == "bad":
                raise ValueError("on second thoughts")

    engine = Hasty()
    summary, sink = run(
        [{"id": "x", "prompt": ["good", "bad"]}, {"id": "y", "prompt": "good"}], engine=engine
    )
    assert (summary.succeeded, summary.failed) == (1, 1) and not engine.has_unfinished()
    assert "on second thoughts" in sink.by_id["x"]["error"]["message"]


def test_an_input_of_nothing():
    for data in ([], [b"", b"  ", b"\r"], [b"\xef\xbb\xbf"]):
        summary, sink = run(data)
        assert summary.requests == 0 and sink.records == []


def test_the_window_is_bounded_by_number_and_bytes():
    engine = FakeEngine(block_size=4)
    run(prompts(500, max_tokens=2), engine=engine, max_waiting=16)
    assert engine.most_waiting == 16
    engine = FakeEngine(block_size=4)
    most_open = []
    run(
        prompts(100, max_tokens=2),
        engine=engine,
        max_open_bytes=2000,
        on_progress=lambda progress: most_open.append(progress.n_open),
    )
    assert 2 <= max(most_open) <= 5  # about 450 bytes each
    engine = FakeEngine()
    assert run(prompts(3), engine=engine, max_open_bytes=1)[0].succeeded == 3  # one at a time still runs


def test_many_bad_lines_do_not_hold_running_requests_up():
    seen = []
    run(
        [{"id": "good", "prompt": "a", "max_tokens": 3}, *([b"bad"] * 9000)],
        on_progress=lambda progress: seen.append(progress.n_failed),
    )
    assert seen[0] < 5000 and seen[-1] == 9000


def test_limit_counts_lines_from_the_start(tmp_path):
    path = tmp_path / "out.jsonl"
    lines = [b"", *prompts(10)]
    assert resume(path, lines, limit=3).succeeded == 3
    assert list(read_results(path)) == ["r0", "r1", "r2"]
    summary = resume(path, lines, limit=5)
    assert (summary.requests, summary.succeeded, summary.resumed, summary.orphaned) == (5, 2, 3, 0)
    assert resume(path, lines, limit=0).requests == 0
    with pytest.raises(ValueError, match="limit"):
        run([], limit=-1)


def test_a_second_run_does_only_the_rest_and_draws_the_same(tmp_path):
    path = tmp_path / "out.jsonl"
    lines = [*prompts(20), b"broken", {"prompt": "nameless"}, {"id": "r1", "prompt": "twice"}]
    whole, sink = run(lines)
    resume(path, lines[:8])
    engine = FakeEngine()
    summary = resume(path, lines, engine=engine)
    assert (summary.resumed, summary.succeeded, summary.failed) == (8, 13, 2) and engine.n_added == 13
    results = read_results(path)
    assert results.keys() == sink.by_id.keys()
    good = {k: r for k, r in results.items() if not r["error"]}
    assert texts(good) == texts({k: r for k, r in sink.by_id.items() if not r["error"]})
    before = path.read_bytes()
    again = resume(path, lines)
    assert (again.resumed, again.resumed_failed, again.succeeded, again.failed) == (23, 2, 0, 0)
    assert path.read_bytes() == before and whole.requests == again.requests


def test_reordered_and_longer_inputs_are_matched_by_id(tmp_path):
    path = tmp_path / "out.jsonl"
    resume(path, prompts(5))
    summary = resume(path, list(reversed(prompts(8)))[:-1])
    assert (summary.resumed, summary.succeeded, summary.orphaned) == (4, 3, 1)


def test_retry_failed_runs_failed_lines_again(tmp_path):
    path = tmp_path / "out.jsonl"
    lines = [*prompts(3), {"id": "x", "prompt": "a", "top_p": 7}]
    assert resume(path, lines).failed == 1
    lines[3] = {"id": "x", "prompt": "a"}
    summary = resume(path, lines)
    assert (summary.resumed_failed, summary.changed) == (1, 1)
    summary = resume(path, lines, retry_failed=True)
    assert (summary.succeeded, summary.resumed, summary.failed) == (1, 3, 0)
    assert read_results(path)["x"]["error"] is None


def test_lines_without_ids_must_keep_their_place(tmp_path):
    path = tmp_path / "out.jsonl"
    lines = [{"prompt": "a"}, {"prompt": "b"}]
    resume(path, lines)
    before = path.read_bytes()
    with pytest.raises(InputChangedError, match="line 1 of the input"):
        resume(path, [{"prompt": "new"}, *lines])
    assert path.read_bytes() == before
    assert resume(path, [*lines, {"prompt": "c"}, {"prompt": "d", "n": 0}]).failed == 1
    lines += [{"prompt": "c"}, {"prompt": "d", "n": 1}]
    with pytest.raises(InputChangedError, match=r"line 4 .* error record .* --retry-failed"):
        resume(path, lines)
    assert resume(path, lines, retry_failed=True).succeeded == 1


def test_results_before_an_engine_failure_stay(tmp_path):
    path = tmp_path / "out.jsonl"
    lines = prompts(40, max_tokens=2)
    with pytest.raises(RuntimeError, match="fell over"):
        resume(path, lines, engine=FakeEngine(block_size=4, fail_at_step=7))
    kept = list(read_results(path))
    assert len(kept) == 12
    assert resume(path, lines).resumed == 12
    assert len(read_results(path)) == 40


def test_requests_without_usable_logits_become_error_records_and_the_others_go_on(tmp_path):
    class Overflowing(FakeEngine):
        """The third line's logits overflow in the second pass."""

        def step(self):
            if self.n_steps == 1:
                self.n_steps += 1
                self.abort("3.0")
                raise NumericsError("the model gave no usable logits for 3.0", ["3.0"])
            return super().step()

    path = tmp_path / "out.jsonl"
    summary = resume(path, prompts(6, max_tokens=3), engine=Overflowing(block_size=4))
    assert (summary.succeeded, summary.failed) == (5, 1)
    errors = [r for r in read_results(path).values() if r["error"]]
    assert [r["custom_id"] for r in errors] == ["r2"]
    assert errors[0]["error"]["code"] == "no_usable_logits" and errors[0]["error"]["line"] == 3


def test_one_result_that_cannot_be_written_does_not_keep_the_others_back():
    class Picky(ListSink):
        def append(self, record):
            if record["custom_id"] == "r1":
                raise OutputError(28, "no room for r1")
            super().append(record)

    sink = Picky()
    with pytest.raises(OutputError, match="no room for r1"):
        run(prompts(4, max_tokens=2), sink)
    assert [record["custom_id"] for record in sink.records] == ["r0", "r2", "r3"] and sink.n_syncs > 0


def test_a_stop_is_heeded_after_the_pass(tmp_path):
    path = tmp_path / "out.jsonl"
    lines = prompts(40, max_tokens=1)
    summary = resume(path, lines, engine=FakeEngine(block_size=5), should_stop=lambda: True)
    assert summary.interrupted and summary.succeeded == 5 and len(read_results(path)) == 5
    assert resume(path, lines).succeeded == 35


def test_progress_estimates_the_number_of_lines():
    lines = prompts(1000, max_tokens=1)
    size = sum(len(json.dumps(line)) + 1 for line in lines)
    estimates = []
    run(
        lines,
        size_bytes=size,
        max_waiting=8,
        on_progress=lambda progress: estimates.append(progress.n_lines_estimated),
    )
    assert 900 < estimates[0] < 1100 and estimates[-1] == 1000
    estimates.clear()
    run(lines, size_bytes=size, limit=50, on_progress=lambda p: estimates.append(p.n_lines_estimated))
    assert set(estimates) == {50}


JOB = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]!r}
from test_jobs_runner import *
path, source = Path(sys.argv[1]), Path(sys.argv[2])
ids = IdTable()
with JobOutput(path) as output:
    output.recover(ids)
    print("started", flush=True)
    engine = FakeEngine(block_size=16, step_seconds=0.001)
    summary = JobRunner(engine, kind(), source.open("rb"), output, ids=ids).run()
print(json.dumps(summary.to_dict()))
"""


def test_killed_at_random_moments_every_request_is_there_once(tmp_path):
    path, source = tmp_path / "out.jsonl", tmp_path / "in.jsonl"
    lines = [*prompts(1500, max_tokens=4), b"broken", {"prompt": "nameless"}]
    source.write_bytes(b"\n".join(x if isinstance(x, bytes) else json.dumps(x).encode() for x in lines))
    rng = random.Random(5)
    sizes = [0]
    for _ in range(5):
        child = subprocess.Popen(
            [sys.executable, "-c", JOB, str(path), str(source)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout.readline() == "started\n"
        wanted = sizes[-1] + rng.randrange(100_000)
        while path.stat().st_size < wanted and child.poll() is None:
            time.sleep(rng.uniform(0.0, 0.005))
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        sizes.append(path.stat().st_size)
        # A kill seldom hits the middle of a write: tear the file by hand as well.
        with path.open("r+b") as stream:
            sizes[-1] = max(sizes[-1] - rng.randrange(40), 0)
            stream.truncate(sizes[-1])
    assert sizes[-1] > 0
    done = subprocess.run(
        [sys.executable, "-c", JOB, str(path), str(source)], capture_output=True, text=True, check=True
    )
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["requests"] == 1502 and 0 < summary["resumed"] < 1502
    results = read_results(path)
    assert len(results) == 1502
    assert sum(record["error"] is not None for record in results.values()) == 1
    expected = texts({k: r for k, r in run(lines)[1].by_id.items() if not r["error"]})
    assert texts({k: r for k, r in results.items() if not r["error"]}) == expected


def test_memory_does_not_grow_with_the_number_of_lines(tmp_path):
    """100,000 lines, 70,000 of them done before; they leave the id table alone behind, 17 bytes a slot."""
    n_lines, n_done, start = 100_000, 70_000, 95_000

    def line(number):
        return b'{"prompt": [%d], "max_tokens": 1, "temperature": 0}\n' % (number % 256)

    class Input(io.RawIOBase):
        """Lines made as they are read; tracing starts late, because it slows everything down."""

        number, pending = 0, b""

        def readable(self):
            return True

        def readinto(self, buffer):
            if not self.pending and self.number < n_lines:
                if self.number == start:
                    tracemalloc.start()
                self.pending = line(self.number)
                self.number += 1
            n = min(len(buffer), len(self.pending))
            buffer[:n] = self.pending[:n]
            self.pending = self.pending[n:]
            return n

    class NullSink(ListSink):
        def append(self, record):
            self.n_syncs += 1

    table = IdTable()
    for number in range(n_done):
        table.mark_done(f"line-{number + 1}", hash64(line(number).strip()))
    sink = NullSink()
    runner = JobRunner(
        FakeEngine(block_size=256), kind(), io.BufferedReader(Input(), 64), sink, ids=table, max_waiting=256
    )
    try:
        summary = runner.run()
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (summary.succeeded, summary.resumed, summary.changed) == (n_lines - n_done, n_done, 0)
    # The window of about 512 requests is replaced ten times while tracing, and the table has grown once.
    assert peak_bytes < 3_000_000 + table.nbytes
    assert table.nbytes < 48 * n_lines
