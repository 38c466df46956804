"""Needs HELM's environment: make helm-venv, make test-helm."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("helm.benchmark.executor")

from eval_helpers import TEXTS, make_tiny_model
from helm.common.cache import BlackHoleCacheConfig, SqliteCacheConfig
from helm.common.request import Request
from helm.common.tokenization_request import DecodeRequest, TokenizationRequest

from flexrun.cli.helm import with_model
from flexrun.evaluate.helm_client import FlexrunClient
from flexrun.evaluate.helm_engine import engine_for
from flexrun.evaluate.helm_tokenizer import FlexrunTokenizer

# A run of HELM takes minutes where the cores are shared.
pytestmark = [pytest.mark.helm, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("helm") / "tiny", max_len=2048)


@pytest.fixture(scope="module")
def flags(folder):
    return ["-m", str(folder), "--device", "cpu", "--dtype", "float32", "--cpu-mem", "1GiB"]


@pytest.fixture(scope="module")
def client(flags):
    return FlexrunClient(BlackHoleCacheConfig(), flags)


def ask(prompt, **settings):
    return Request(model_deployment="flexrun/tiny", model="flexrun/tiny", prompt=prompt, **settings)


def test_completions_come_with_honest_logprobs_and_each_requests_settings(client, flags):
    requests = [
        ask(TEXTS[0], temperature=0, max_tokens=6),
        ask(TEXTS[1], temperature=0, max_tokens=2),
        ask(TEXTS[2], temperature=0.9, max_tokens=4, num_completions=3, top_p=0.8),
        ask(TEXTS[3], max_tokens=0),
    ]
    results = client.make_requests(requests)
    llm = engine_for(flags)
    assert all(result.success and not result.cached for result in results)
    assert [len(result.completions) for result in results] == [1, 1, 3, 1]
    assert len(results[1].completions[0].tokens) <= 2 and results[3].completions[0].text == ""
    completion = results[0].completions[0]
    assert "".join(token.text for token in completion.tokens) == completion.text
    ids = llm.generate([TEXTS[0]], None)[0].prompt_token_ids
    answer = llm.tokenizer.encode(completion.text)
    if llm.tokenizer.decode(answer) == completion.text and len(answer) == len(completion.tokens):
        expected = llm.score([(ids, answer)])[0]
        assert completion.logprob == pytest.approx(expected.logprob, abs=1e-3)
    assert completion.logprob < 0 and completion.logprob == sum(token.logprob for token in completion.tokens)
    assert (
        client.make_requests(requests)[2].completions == results[2].completions
    )  # seeds come from the content
    other = client.make_request(ask(TEXTS[2], temperature=0.9, max_tokens=4, num_completions=3, random="2"))
    assert other.completions != results[2].completions


def test_an_echoed_prompt_is_scored(client, flags):
    result = client.make_request(ask(TEXTS[0], echo_prompt=True, max_tokens=0))
    (completion,) = result.completions
    llm = engine_for(flags)
    ids = llm.tokenizer.encode(TEXTS[0])
    expected = llm.score([(ids[:1], ids[1:])])[0]
    assert completion.text == TEXTS[0] == "".join(token.text for token in completion.tokens)
    assert completion.tokens[0].logprob == 0
    assert [token.logprob for token in completion.tokens[1:]] == pytest.approx(expected.logprobs, abs=1e-3)
    longer = client.make_request(ask(TEXTS[0], echo_prompt=True, max_tokens=2, temperature=0)).completions[0]
    assert longer.text.startswith(TEXTS[0]) and len(longer.tokens) > len(completion.tokens)


def test_stop_sequences_cut_text_and_tokens(client):
    whole = client.make_request(ask(TEXTS[0], temperature=0, max_tokens=12)).completions[0]
    stop = whole.text[3:5]  # inside a token or over two: text, not tokens
    cut = client.make_request(
        ask(TEXTS[0], temperature=0, max_tokens=12, stop_sequences=["never", stop])
    ).completions[0]
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert "".join(token.text for token in cut.tokens) == cut.text
    assert cut.finish_reason == {"reason": "stop"}


def test_refusals_are_not_tried_again_and_leave_others_alone(client):
    results = client.make_requests(
        [ask("x " * 3000, max_tokens=4), ask("a", embedding=True), ask("one", temperature=0, max_tokens=1)]
    )
    assert [result.success for result in results] == [False, False, True]
    assert "limit of 2048" in results[0].error and "no embeddings" in results[1].error
    assert all(result.error_flags.is_retriable is False for result in results[:2])


def test_the_cache_answers_without_a_model(flags, tmp_path, monkeypatch):
    cache = SqliteCacheConfig(str(tmp_path / "cache.sqlite"))
    requests = [ask(text, temperature=0, max_tokens=2) for text in TEXTS]
    first = FlexrunClient(cache, flags).make_requests(requests[:3])
    monkeypatch.setattr("flexrun.evaluate.helm_client.engine_for", lambda flags: pytest.fail("not needed"))
    again = FlexrunClient(cache, flags).make_requests(requests[:3])
    assert [a.completions for a in again] == [f.completions for f in first] and all(a.cached for a in again)
    monkeypatch.undo()
    more = FlexrunClient(cache, flags).make_requests(requests)
    assert [m.cached for m in more] == [True, True, True, False]


def test_the_tokenizer_gives_ids_pieces_and_text_back(folder):
    tokenizer = FlexrunTokenizer(str(folder))
    text = "The quick brown fox, café ☃ <s>!"
    ids = tokenizer.tokenize(TokenizationRequest(text, tokenizer="flexrun/tiny", encode=True)).raw_tokens
    pieces = tokenizer.tokenize(TokenizationRequest(text, tokenizer="flexrun/tiny")).raw_tokens
    assert "".join(pieces) == text and len(pieces) == len(ids)
    assert tokenizer.decode(DecodeRequest(ids, tokenizer="flexrun/tiny")).text == text
    request = TokenizationRequest(text, tokenizer="flexrun/tiny", encode=True, truncation=True, max_length=3)
    assert tokenizer.tokenize(request).raw_tokens == ids[:3]


def test_entries_get_the_model_where_they_name_none():
    assert with_model("a", "m/n") == "a:model=m/n"
    assert with_model("a:b=1,c=2", "m/n") == "a:b=1,c=2,model=m/n"
    assert with_model("a:model=x/y,b=1", "m/n") == "a:model=x/y,b=1"


ENTRIES = [
    "simple_mcqa",
    "synthetic_reasoning:mode=pattern_match",
    "dyck_language:num_parenthesis_pairs=3",
    "synthetic_reasoning_natural:difficulty=easy",
]


def helm(flags, tmp_path, entries, *more):
    command = [sys.executable, "-m", "flexrun", "helm", *flags, "--run-entries", *entries, "--suite", "s"]
    command += ["--max-eval-instances", "5", "--output-path", str(tmp_path / "out"), "-n", "1"]
    command += ["--local-path", str(tmp_path / "local"), *more]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    jobs = re.findall(r"flexrun: (\d+) requests, (\d+) computed in (\d+) passes", done.stdout + done.stderr)
    return done, [tuple(map(int, job)) for job in jobs]


def test_helm_run_makes_one_job_per_run_spec_and_a_rerun_comes_from_the_cache(flags, tmp_path):
    done, jobs = helm(flags, tmp_path, ENTRIES)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(jobs) == len(ENTRIES) and all(n == computed > 0 for n, computed, _ in jobs)
    runs = sorted(
        path for path in (tmp_path / "out" / "runs" / "s").iterdir() if (path / "stats.json").exists()
    )
    assert len(runs) == len(ENTRIES)
    for run in runs:
        state = json.loads((run / "scenario_state.json").read_text())
        for request_state in state["request_states"]:
            for completion in request_state["result"]["completions"]:
                assert "".join(token["text"] for token in completion["tokens"]) == completion["text"]
                assert completion["logprob"] < 0 or not completion["tokens"]
        names = {stat["name"]["name"] for stat in json.loads((run / "stats.json").read_text())}
        assert {"num_completion_tokens", "logprob", "finish_reason_length"} <= names
    done, jobs = helm(flags, tmp_path, ENTRIES)
    assert (
        done.returncode == 0 and all(computed == 0 for _, computed, _ in jobs) and len(jobs) == len(ENTRIES)
    )


def test_a_failing_run_ends_at_once(flags, tmp_path):
    done, _ = helm([*flags, "--cpu-mem", "1MiB"], tmp_path, ["simple_mcqa"])
    text = done.stdout + done.stderr
    assert done.returncode != 0 and "cannot load the model" in text and "Retrying" not in text


def test_a_failure_is_not_tried_again_by_helms_own_runner(flags):
    from helm.proxy.retry import NonRetriableException

    client = FlexrunClient(BlackHoleCacheConfig(), [*flags, "--cpu-mem", "1MiB"])
    with pytest.raises(NonRetriableException, match="cannot load"):
        client.make_request(ask("one"))


def test_the_entry_point_registers_the_model_of_the_environment(flags, folder, monkeypatch):
    import importlib
    from importlib.metadata import entry_points

    from helm.benchmark.model_deployment_registry import get_model_deployment

    import flexrun.evaluate.helm_plugin as plugin

    (point,) = entry_points(group="helm", name="flexrun")
    assert point.value == plugin.__name__
    monkeypatch.setenv(plugin.FLAGS_VARIABLE, " ".join(flags))
    importlib.reload(plugin)
    deployment = get_model_deployment(f"flexrun/{folder.name}")
    assert deployment.max_sequence_length == 2048
    assert deployment.client_spec.args["flags"] == flags
