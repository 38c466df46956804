"""Lengths in a job's input file, from a bounded sample."""

from __future__ import annotations

import json

import pytest
from jobs_fake import FakeTokenizer, encode_chat

from flexrun.jobs.generation import GenerationJob
from flexrun.jobs.sample import OPEN_ANSWER_TOKENS, rough_encode, rough_encode_chat, sample_input
from flexrun.jobs.scoring import ScoreJob
from flexrun.scoring import Scorer


def job() -> GenerationJob:
    return GenerationJob(model_name="m", tokenizer=FakeTokenizer(), encode_chat=encode_chat)


def write(tmp_path, lines):
    path = tmp_path / "in.jsonl"
    path.write_bytes(
        b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    )
    return path


def test_a_short_file_is_known_exactly(tmp_path) -> None:
    lines = [{"prompt": "x" * 20, "max_tokens": 5}, {"prompt": ["ab", "abc"], "n": 2}, b"{broken", b""]
    found = sample_input(write(tmp_path, lines), job())
    # A token per byte and one in front; completions generate 16 tokens where nothing is said.
    assert found.whole and found.n_lines == 3 and found.n_open == 0
    assert found.workload.lengths == ((3, 16, 2), (4, 16, 2), (21, 5, 1))
    assert found.workload.num_requests == 5


def test_lines_that_the_job_will_refuse_do_not_stop_the_planning(tmp_path) -> None:
    good = {"prompt": "x" * 20, "max_tokens": 5}
    deep = b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    lines = [
        b"\xef\xbb\xbf" + json.dumps(good).encode(),
        b"\xef\xbb\xbf",
        deep,
        b'{"prompt": "x", "max_tokens": NaN}',
        b"\xff",
    ]
    found = sample_input(write(tmp_path, [*lines, b'{"prompt": "x", "max_tokens": 1e999}', b" "]), job())
    assert found.workload.num_requests == 1 and found.workload.prompt_len == 21


def test_limits_of_the_job_count(tmp_path) -> None:
    path = write(tmp_path, [{"prompt": [1] * n, "max_tokens": 4} for n in (10, 10, 10, 90)])
    assert sample_input(path, job(), limit=2).workload.num_requests == 2
    assert sample_input(path, job(), max_tokens=50).workload.max_prompt_len == 10
    assert sample_input(path, job(), n_done=3).workload.num_requests == 1
    assert sample_input(path, job(), max_tokens=5) is None
    assert sample_input(write(tmp_path, [b"nothing", b"[]"]), job()) is None
    with pytest.raises(FileNotFoundError):
        sample_input(tmp_path / "missing", job())


def test_a_long_sorted_file_is_sampled_over_its_whole_length(tmp_path) -> None:
    lines = [{"prompt": "s" * 9, "max_tokens": 8}] * 4000 + [{"prompt": "l" * 199, "max_tokens": 8}] * 1000
    found = sample_input(write(tmp_path, lines), job())
    assert not found.whole and found.n_lines < 500
    # Places are even in bytes; each line met stands for as many as fit between two places.
    assert found.workload.max_prompt_len == 200 and min(found.workload.lengths)[0] == 10
    assert "sampled lines" in found.describe()
    assert found.workload.num_requests == pytest.approx(5000, rel=0.05)
    assert found.workload.prompt_len == pytest.approx(1 + (4000 * 9 + 1000 * 199) / 5000, rel=0.05)
    assert sample_input(tmp_path / "in.jsonl", job(), limit=1000).workload.num_requests == 1000


def test_lines_of_absurd_length_do_not_hide_the_others(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("flexrun.jobs.sample.LONGEST_LINE_BYTES", 5000)
    lines = [{"prompt": [1, 2], "max_tokens": 8}] * 500 + [{"prompt": "x" * 60_000}] * 3
    found = sample_input(write(tmp_path, lines), job())
    assert not found.whole and found.workload.lengths == () and found.workload.prompt_len == 2
    assert found.workload.num_requests == pytest.approx(500, rel=0.1)


def test_answers_without_a_limit_are_planned_with_a_stated_length(tmp_path) -> None:
    lines = [{"messages": [{"role": "user", "content": "hello"}]}] * 3
    found = sample_input(write(tmp_path, lines), job())
    assert found.n_open == 3 and found.workload.gen_len == OPEN_ANSWER_TOKENS
    assert str(OPEN_ANSWER_TOKENS) in found.describe()
    short = sample_input(write(tmp_path, lines), job(), max_tokens=100).workload
    assert short.prompt_len + short.gen_len == 100


def test_without_a_tokenizer_bytes_are_counted(tmp_path) -> None:
    kind = GenerationJob(model_name="m", encode=rough_encode, encode_chat=rough_encode_chat)
    lines = [{"prompt": "x" * 400}, {"messages": [{"role": "user", "content": "y" * 200}], "max_tokens": 3}]
    assert sample_input(write(tmp_path, lines), kind).workload.lengths == ((54, 3, 1), (100, 16, 1))


def test_of_a_long_file_only_the_lines_that_will_run_are_sampled(tmp_path, monkeypatch) -> None:
    lines = [{"prompt": "s" * 9, "max_tokens": 8}] * 3000 + [{"prompt": "l" * 1999, "max_tokens": 8}] * 3000
    path = write(tmp_path, lines)
    found = sample_input(path, job(), limit=2000)
    assert found.workload.num_requests == 2000
    assert found.workload.max_prompt_len == 10
    found = sample_input(path, job(), limit=4000)
    assert found.workload.num_requests == 4000
    assert found.workload.prompt_len == pytest.approx(1 + (3000 * 9 + 1000 * 1999) / 4000, rel=0.1)
    assert sample_input(path, job(), limit=9000).workload.num_requests == pytest.approx(6000, rel=0.05)
    monkeypatch.setattr("flexrun.jobs.sample.COUNTED_BYTES", 1)  # one piece of the file is read all the same
    assert sample_input(path, job(), limit=2000).workload.max_prompt_len == 10


def test_texts_to_score_are_sampled_in_windows(tmp_path) -> None:
    tokenizer = FakeTokenizer()
    tokenizer.bos_token_id, tokenizer.eos_token_ids = 1, ()  # type: ignore[attr-defined]
    scorer = Scorer(tokenizer, max_len=64)
    kind = ScoreJob(scorer, model_name="m", tokenizer=FakeTokenizer())
    lines = [
        {"context": "x" * 20, "continuation": "y" * 10},
        {"text": "z" * 150},
        {"text": "z" * 30},
        {"context": "only"},
        b"{broken",
    ]
    found = sample_input(write(tmp_path, lines), kind, max_tokens=64)
    assert found.workload.scoring and found.workload.num_requests == 5
    assert found.workload.max_prompt_len == 64 and min(found.workload.lengths)[0] == 30
