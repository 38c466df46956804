import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from eval_helpers import TEXTS, make_tiny_model
from jobs_fake import read_results

from flexrun.cli import main
from flexrun.llm import LLM

FLAGS = ["--device", "cpu", "--dtype", "float32", "--cpu-mem", "512MiB"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, device="cpu", dtype="float32", cpu_mem="512MiB") as llm:
        yield llm


@pytest.fixture
def score(folder, tmp_path):
    """A function that scores lines: (exit status, records by id)."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"

    def run(lines, *flags):
        source.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
        status = main(["score", "-m", str(folder), "-i", str(source), "-o", str(target), *FLAGS, *flags])
        return status, read_results(target)

    run.source, run.target = source, target
    return run


def body(record):
    assert record["error"] is None
    return record["response"]["body"]


def test_pairs_and_texts_get_what_the_python_api_gives(score, llm):
    long = " ".join(TEXTS * 2)
    status, results = score(
        [
            {"id": "pair", "context": "The quick brown", "continuation": " fox"},
            {"id": "text", "text": long},
            {"continuation": "one two"},
            {"id": "ids", "context": [5, 6], "continuation": [7]},
        ]
    )
    assert status == 0 and set(results) == {"pair", "text", "line-3", "ids"}
    pairs = llm.score([("The quick brown", " fox"), ("", "one two"), ([5, 6], [7])])
    for name, expected in zip(
        ["pair", "line-3", "ids", "text"], [*pairs, *llm.score_text([long])], strict=True
    ):
        found = body(results[name])
        assert found["token_logprobs"] == pytest.approx(expected.logprobs, abs=1e-4)
        assert found["logprob"] == pytest.approx(sum(found["token_logprobs"]))
        assert found["token_ids"] == expected.token_ids and found["num_tokens"] == len(expected.token_ids)
        assert found["is_greedy"] is expected.is_greedy and found["object"] == "score"
    assert body(results["text"])["num_bytes"] == len(long) and body(results["ids"])["num_bytes"] is None
    usage = body(results["ids"])["usage"]
    assert usage == {"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3}


def test_completions_lines_that_only_echo_are_scored(score, llm, folder, tmp_path):
    def line(custom_id, **options):
        return {
            "custom_id": custom_id,
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "m", "prompt": TEXTS[0], **options},
        }

    lines = [
        line("echo", echo=True, logprobs=2, max_tokens=0),
        line("more", echo=True, logprobs=1, max_tokens=3),
        line("one", echo=True, logprobs=0, max_tokens=0, prompt=[7]),
    ]
    status, results = score(lines)
    assert status == 1
    assert "flexrun batch" in results["more"]["error"]["message"]
    choice = body(results["echo"])["choices"][0]
    expected = llm.score_text([llm.tokenizer.encode(TEXTS[0])])[0]
    ids = llm.tokenizer.encode(TEXTS[0])
    assert choice["text"] == TEXTS[0] and len(choice["logprobs"]["tokens"]) == len(ids)
    # The prompt's first token has nothing before it, unlike a text to score.
    scored = llm.score([(ids[:1], ids[1:])])[0]
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(scored.logprobs, abs=1e-4)
    assert len(choice["logprobs"]["top_logprobs"][1]) in (2, 3)
    assert body(results["echo"])["usage"]["completion_tokens"] == 0
    assert body(results["one"])["choices"][0]["logprobs"]["token_logprobs"] == [None]
    assert len(expected.logprobs) == len(ids)
    # 'flexrun batch' gives the same for the same line.
    target = tmp_path / "batch.jsonl"
    assert main(["batch", "-m", str(folder), "-i", str(score.source), "-o", str(target), *FLAGS]) == 0
    other = body(read_results(target)["echo"])["choices"][0]["logprobs"]
    assert other["token_logprobs"][1:] == pytest.approx(scored.logprobs, abs=1e-4)


def test_bad_lines_get_their_errors_and_the_others_their_scores(score):
    bad = {
        "both": {"continuation": "a", "text": "b"},
        "none": {"context": "a"},
        "empty": {"context": "a", "continuation": ""},
        "type": {"context": "a", "continuation": 5},
        "mixed": {"text": [1, "a"]},
        "unknown": {"context": "a", "continuations": "b"},
        "vocabulary": {"context": [1], "continuation": [400]},
        "long": {"context": "a", "continuation": [5] * 65},
        "stray": {"context": "a", "text": "b"},
    }
    lines = [{"id": name, **fields} for name, fields in bad.items()]
    status, results = score([*lines, "{broken", {"id": "good", "context": "a", "continuation": "b"}])
    assert status == 1 and len(results) == len(bad) + 2
    assert {name for name, record in results.items() if record["error"] is None} == {"good"}
    said = {
        "both": "found both", "none": "found neither", "empty": "nothing to score", "type": "a number",
        "mixed": "of other things", "unknown": "did you mean continuation", "vocabulary": "400", "long": "limit is 64",
        "stray": "not with text", "line-10": "not valid JSON",
    }  # fmt: skip
    for name, words in said.items():
        assert words in results[name]["error"]["message"], results[name]


def test_results_of_other_settings_or_commands_are_not_mixed(score, folder, capsys):
    lines = [{"id": "a", "text": "one"}]
    assert score(lines)[0] == 0
    before = score.target.read_bytes()
    assert main(["batch", "-m", str(folder), "-i", str(score.source), "-o", str(score.target), *FLAGS]) == 2
    assert "flexrun score" in capsys.readouterr().err
    assert score(lines, "--max-model-len", "32")[0] == 2
    assert "max_model_len" in capsys.readouterr().err
    assert score.target.read_bytes() == before


def test_a_killed_job_goes_on_without_recomputing(score, folder):
    lines = [{"id": f"r{i}", "context": TEXTS[i % 4], "continuation": f" {i}"} for i in range(300)]
    score.source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [sys.executable, "-m", "flexrun", "score", "-m", str(folder), "-i", str(score.source)]
    command += ["-o", str(score.target), "--gpu-batch-size", "2", *FLAGS]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, cwd=Path(__file__).parents[1], env=environment, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while not (score.target.exists() and score.target.read_bytes().count(b"\n") >= 5):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = score.target.read_bytes()
    kept = kept[: kept.rfind(b"\n") + 1]
    status, results = score(lines)  # with another block: placement may change
    assert status == 0 and len(results) == 300
    assert score.target.read_bytes().startswith(kept)


def test_a_resumed_job_needs_the_same_windows_whatever_flag_they_come_from(score, monkeypatch, capsys):
    lines = [{"id": "a", "text": "one"}, {"id": "b", "text": "two"}]
    assert score(lines, "--limit", "1", "--max-model-len", "64")[0] == 0
    manifest = json.loads(score.target.with_name("out.jsonl.manifest.json").read_text())
    assert manifest["settings"]["max_model_len"] == 64
    assert score(lines, "--limit", "1")[0] == 0, "64 is what the model has by itself"
    before = score.target.read_bytes()
    monkeypatch.setattr(LLM, "max_model_len", property(lambda llm: 48))  # memory for no more
    assert score(lines)[0] == 2
    assert "max_model_len was 64, now 48" in capsys.readouterr().err
    assert score.target.read_bytes() == before


def test_answers_without_a_limit_need_the_same_longest_sequence(score, folder, monkeypatch, capsys):
    def batch(*lines):
        score.source.write_text("".join(json.dumps(line) + "\n" for line in lines))
        status = main(["batch", "-m", str(folder), "-i", str(score.source), "-o", str(score.target), *FLAGS])
        return status, json.loads(score.target.with_name("out.jsonl.manifest.json").read_text())["settings"]

    closed = {"id": "a", "prompt": "one", "max_tokens": 2}
    opened = {"id": "b", "messages": [{"role": "user", "content": "two"}]}
    assert "max_model_len" not in batch(closed)[1]
    with monkeypatch.context() as patch:
        patch.setattr(LLM, "max_model_len", property(lambda llm: 48))
        assert batch(closed)[0] == 0, "no result depends on it"
        status, settings = batch(closed, opened)
        assert status == 0 and settings["max_model_len"] == 48
    capsys.readouterr()
    assert batch(closed, opened)[0] == 2
    assert "max_model_len was 48, now 64" in capsys.readouterr().err
