"""The engine: how answers end, what neighbours may not change, scores, refusals, restarts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_helpers import (
    MemorySource,
    drain,
    letters,
    make_policy,
    open_runtime,
    prompts,
    reference_greedy,
    reference_logprobs,
    run_jobs,
    tiny_model,
)

from flexrun.engine import Engine, NumericsError
from flexrun.model.assemble import build_model
from flexrun.model.config import config_from_hf
from flexrun.model.mapping import match_tensors
from flexrun.request import RequestError, RequestOutput, SamplingParams
from flexrun.runtime import Runtime

LISTED = 90  # tokens that the tokenizer knows; the model's vocabulary is padded beyond
TOKENIZER = letters(LISTED)
PROMPTS = prompts([7, 300, 20, 33])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> MemorySource:
    """A head of several slices."""
    source = MemorySource(tiny_model(vocab_size=700), folder=tmp_path_factory.mktemp("weights"))
    assert sum(unit.name.startswith("head") for unit in source.model.units) > 1
    return source


@pytest.fixture(scope="module")
def runtime(source: MemorySource, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    policy = make_policy(weights="cd", cache="cd", shape=(3, 2))
    with open_runtime(source, policy, tmp_path_factory.mktemp("spill"), limits={"logit_rows": 64}) as runtime:
        yield runtime


@pytest.fixture
def engine(runtime: Runtime) -> Iterator[Engine]:
    engine = Engine(runtime, tokenizer=TOKENIZER)
    yield engine
    assert not engine.has_unfinished()
    assert engine._scheduler.num_running == engine._scheduler.num_waiting == 0


def greedy(**more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, **more)


def answer(engine: Engine, prompt: list[int], params: SamplingParams) -> Any:
    return run_jobs(engine, [(prompt, params)])[0].outputs[0]


def expected_greedy(source: MemorySource, prompt: list[int], n: int) -> list[int]:
    return reference_greedy(source, prompt, n, LISTED)


# -- sampling ------------------------------------------------------------------------------------------


def test_ids_beyond_the_tokenizer_are_never_sampled(engine: Engine, source: MemorySource) -> None:
    assert engine.vocab_size == LISTED
    plain = reference_greedy(source, PROMPTS[0], 12)
    assert max(plain) >= LISTED, "the padding must tempt"
    assert answer(engine, PROMPTS[0], greedy(max_tokens=12)).token_ids == expected_greedy(
        source, PROMPTS[0], 12
    )
    hot = SamplingParams(temperature=50.0, max_tokens=30, seed=1)
    assert max(answer(engine, PROMPTS[0], hot).token_ids) < LISTED


def test_a_seed_gives_the_same_answer_whatever_runs_beside_it(engine: Engine) -> None:
    seeded = SamplingParams(temperature=1.5, max_tokens=10, seed=11)
    alone = answer(engine, PROMPTS[2], seeded).token_ids
    noise = SamplingParams(temperature=1.5, max_tokens=14)
    crowd = run_jobs(engine, [(p, noise) for p in PROMPTS] + [(PROMPTS[2], seeded)] + [(PROMPTS[0], noise)])
    assert crowd[4].outputs[0].token_ids == alone
    other = SamplingParams(temperature=1.5, max_tokens=10, seed=12)
    assert answer(engine, PROMPTS[2], other).token_ids != alone


def test_several_answers_of_one_request_differ_and_the_first_is_that_of_one(engine: Engine) -> None:
    many = run_jobs(engine, [(PROMPTS[0], SamplingParams(n=4, temperature=1.5, max_tokens=8, seed=3))])[0]
    assert [c.index for c in many.outputs] == [0, 1, 2, 3]
    assert len({tuple(c.token_ids) for c in many.outputs}) == 4
    one = answer(engine, PROMPTS[0], SamplingParams(temperature=1.5, max_tokens=8, seed=3))
    assert many.outputs[0].token_ids == one.token_ids


def test_logprobs_of_the_answer_are_those_of_the_reference(engine: Engine, source: MemorySource) -> None:
    output = answer(engine, PROMPTS[3], greedy(max_tokens=5, logprobs=2))
    table = reference_logprobs(source, PROMPTS[3] + output.token_ids)[len(PROMPTS[3]) - 1 :]
    total = 0.0
    for row, token, entries in zip(table, output.token_ids, output.logprobs, strict=False):
        assert entries[token].logprob == pytest.approx(float(row[token]), abs=1e-3)
        assert set(row[:LISTED].topk(2).indices.tolist()) <= set(entries)
        total += entries[token].logprob
    assert output.cumulative_logprob == pytest.approx(total)


# -- ends ----------------------------------------------------------------------------------------------


def test_a_stop_string_cuts_the_text_and_no_neighbour(engine: Engine, source: MemorySource) -> None:
    full = [expected_greedy(source, prompt, 12) for prompt in PROMPTS[:2]]
    text = "".join(chr(33 + t) for t in full[0])
    stop = text[4:6]
    end = text.index(stop)
    jobs = [(PROMPTS[0], greedy(max_tokens=12, stop=stop)), (PROMPTS[1], greedy(max_tokens=12))]
    stopped, other = (output.outputs[0] for output in run_jobs(engine, jobs))
    assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == (text[:end], "stop", stop)
    assert stopped.token_ids == full[0][: end + 2]
    assert (other.token_ids, other.finish_reason, other.stop_reason) == (full[1], "length", None)
    included = answer(engine, PROMPTS[0], greedy(max_tokens=12, stop=stop, include_stop_str_in_output=True))
    assert included.text == text[: end + 2]


def test_any_end_token_stops_unless_ignored(runtime: Runtime, source: MemorySource) -> None:
    full = expected_greedy(source, PROMPTS[0], 12)
    end = max(full.index(token) for token in full)  # the token that appears latest for the first time
    assert end > 2
    engine = Engine(runtime, tokenizer=TOKENIZER, eos_token_ids=(LISTED + 5, full[end]))
    output = answer(engine, PROMPTS[0], greedy(max_tokens=12))
    assert (output.token_ids, output.finish_reason, output.stop_reason) == (full[: end + 1], "stop", None)
    assert answer(engine, PROMPTS[0], greedy(max_tokens=12, ignore_eos=True)).token_ids == full
    late = answer(engine, PROMPTS[0], greedy(max_tokens=16, min_tokens=end + 2))
    assert len(late.token_ids) >= end + 2 and full[end] not in late.token_ids[: end + 1]
    stop = answer(engine, PROMPTS[0], greedy(max_tokens=12, stop_token_ids=[full[1]], ignore_eos=True))
    assert (stop.token_ids, stop.stop_reason) == (full[: full.index(full[1]) + 1], full[1])


def test_finished_sequences_leave_at_once(engine: Engine) -> None:
    engine.add_request("short", PROMPTS[0], greedy(max_tokens=1))
    engine.add_request("long", PROMPTS[2], greedy(max_tokens=4))
    assert [output.request_id for output in engine.step()] == ["short"]
    assert engine._scheduler.num_running == 1
    assert set(drain(engine)) == {"long"}
    assert engine.stats.passes == 4
    assert engine.stats.prompt_tokens == len(PROMPTS[0]) + len(PROMPTS[2])
    assert engine.stats.generated_tokens == 5


# -- scores --------------------------------------------------------------------------------------------


def check_scores(output: RequestOutput, table: torch.Tensor, first: int, n_top: int) -> None:
    entries = output.prompt_logprobs
    assert entries is not None and len(entries) == len(output.prompt_token_ids)
    assert entries[:first] == [None] * first
    for position in range(first, len(entries)):
        row, token, entry = table[position - 1], output.prompt_token_ids[position], entries[position]
        assert entry is not None
        assert entry[token].logprob == pytest.approx(float(row[token]), abs=2e-3)
        assert (entry[token].rank == 1) == (int(row[:LISTED].argmax()) == token)
        best = row[:LISTED].topk(n_top)
        for rank, (other, value) in enumerate(zip(best.indices.tolist(), best.values.tolist(), strict=True)):
            assert entry[other].logprob == pytest.approx(value, abs=2e-3)
            assert other == token or entry[other].rank == rank + 1


def test_prompt_logprobs_equal_the_reference(engine: Engine, source: MemorySource) -> None:
    jobs = [(p, greedy(max_tokens=3, prompt_logprobs=2)) for p in (PROMPTS[0], PROMPTS[1])]
    jobs.append((PROMPTS[2], greedy(max_tokens=3)))
    outputs = run_jobs(engine, jobs)
    for output in outputs[:2]:
        check_scores(output, reference_logprobs(source, output.prompt_token_ids), 1, 2)
    assert outputs[2].prompt_logprobs is None
    for output in outputs:
        expected = expected_greedy(source, output.prompt_token_ids, 3)
        assert output.outputs[0].token_ids == expected


@pytest.mark.parametrize("length", [2, 40, 530])
def test_scores_from_a_position_equal_the_reference(
    engine: Engine, source: MemorySource, length: int
) -> None:
    prompt = prompts([length], seed=5)[0]
    first = max(1, length - 20)
    engine.add_request("score", prompt, greedy(max_tokens=1), score_from=first)
    engine.add_request("beside", PROMPTS[0], greedy(max_tokens=2))
    done = drain(engine)
    assert done["score"].outputs[0].token_ids == []
    check_scores(done["score"], reference_logprobs(source, prompt), first, 0)
    assert done["beside"].outputs[0].token_ids == expected_greedy(source, PROMPTS[0], 2)


def test_a_score_may_be_one_token_longer_than_the_limit(engine: Engine, source: MemorySource) -> None:
    prompt = prompts([engine.max_model_len + 1], seed=6)[0]
    engine.add_request("score", prompt, greedy(max_tokens=1), score_from=len(prompt) - 2)
    check_scores(drain(engine)["score"], reference_logprobs(source, prompt), len(prompt) - 2, 0)


# -- refusals and aborts -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], greedy(), "the prompt is empty"),
        ([1, 700], greedy(), "token id 700; this model's ids are 0 to 699"),
        ([1] * 590, greedy(max_tokens=11), "590 tokens and max_tokens 11 make 601; the limit is 600"),
        ([1], greedy(logit_bias={LISTED: 1.0}), "logit_bias names token 90"),
        ([1], greedy(stop_token_ids=[500]), "stop_token_ids names token 500"),
    ],
)
def test_what_can_never_run_is_refused_and_leaves_nothing_behind(
    engine: Engine, prompt: list[int], params: SamplingParams, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        engine.add_request("bad", prompt, params)
    assert not engine.has_unfinished() and engine.num_waiting == 0


def test_a_request_without_pages_enough_in_any_batch_is_refused(source: MemorySource, tmp_path: Path) -> None:
    # 600 tokens may be asked for, and pages of 37 exist: the limits' longest sequence always fits.
    with open_runtime(source, make_policy(), tmp_path, limits={"mean_pages": 1.0}) as runtime:
        engine = Engine(runtime, tokenizer=None)
        assert runtime.executor.allocator.fits(600)
        engine.add_request("longest", [1] * 590, greedy(max_tokens=10))
        engine.abort("longest")
        with pytest.raises(RequestError, match="stop strings need a tokenizer"):
            engine.add_request("text", [1], greedy(stop="a"))


def test_a_prompt_longer_than_any_pass_is_refused(source: MemorySource, tmp_path: Path) -> None:
    with open_runtime(source, make_policy(), tmp_path, limits={"pass_tokens": 100}) as runtime:
        engine = Engine(runtime, tokenizer=None)
        with pytest.raises(RequestError, match="101 tokens do not fit into a pass, which takes 100"):
            engine.add_request("a", [1] * 101, greedy())
        engine.add_request("b", [1] * 100, greedy(max_tokens=1))
        assert set(drain(engine)) == {"b"}


def test_an_id_is_in_use_until_its_request_is_done(engine: Engine) -> None:
    engine.add_request("a", [1, 2], greedy(max_tokens=1))
    with pytest.raises(RequestError, match="'a' is in use"):
        engine.add_request("a", [1, 2], greedy(max_tokens=1))
    drain(engine)
    engine.add_request("a", [1, 2], greedy(max_tokens=1))
    drain(engine)


def test_aborted_requests_vanish_and_the_others_do_not_notice(engine: Engine, source: MemorySource) -> None:
    for i in range(9):  # six slots: some wait
        engine.add_request(str(i), PROMPTS[i % 4], greedy(max_tokens=8))
    engine.step()
    engine.step()
    for name in ("0", "4", "8", "unknown"):
        engine.abort(name)
    done = drain(engine)
    assert sorted(done) == ["1", "2", "3", "5", "6", "7"]
    for name, output in done.items():
        assert output.outputs[0].token_ids == expected_greedy(source, PROMPTS[int(name) % 4], 8)


def test_nan_in_one_sequence_drops_only_that_request(tmp_path: Path) -> None:
    source = MemorySource(tiny_model())
    table = next(iter(source._tables.values()))
    table[95] = torch.nan
    good = [[t % 95 for t in prompt] for prompt in PROMPTS]
    with open_runtime(source, make_policy(shape=(4, 1)), tmp_path) as runtime:
        engine = Engine(runtime, tokenizer=None)
        allowed = {"logit_bias": {95: -100.0}}
        engine.add_request("good", good[0], greedy(max_tokens=6, **allowed))
        engine.add_request("short", good[2], greedy(max_tokens=1, **allowed))
        engine.add_request("bad", [1, 95, 2], greedy(max_tokens=6))
        with pytest.raises(NumericsError, match="request bad at token 3") as caught:
            drain(engine)
        assert caught.value.request_ids == ("bad",)
        done = drain(engine)
        assert sorted(done) == ["good", "short"]
        again = answer(engine, good[0], greedy(max_tokens=6, **allowed))
        assert done["good"].outputs[0].token_ids == again.token_ids


# -- longrope ------------------------------------------------------------------------------------------


def test_a_sequence_that_outgrows_the_short_frequencies_equals_a_whole_prefill(tmp_path: Path) -> None:
    """transformers recomputes nothing when it crosses; a prefill of the whole sequence is the truth."""
    transformers = pytest.importorskip("transformers")
    rng = torch.Generator().manual_seed(0)
    factors = {
        "short_factor": (1 + torch.rand(8, generator=rng)).tolist(),
        "long_factor": (2 + 6 * torch.rand(8, generator=rng)).tolist(),
    }
    config = transformers.Phi3Config(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        original_max_position_embeddings=40,
        rope_scaling={"type": "longrope", **factors},
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    reference = transformers.Phi3ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.25)
    model = build_model(config_from_hf(config.to_dict() | {"architectures": ["Phi3ForCausalLM"]}))
    assert model.config.rope_switch_len == 40
    state = {name: tensor.detach().clone() for name, tensor in reference.state_dict().items()}
    names = match_tensors(model.config, model.units, state)
    source = MemorySource(model, sources={canonical: state[name] for canonical, name in names.items()})
    sizes = [(30, 20), (39, 6), (45, 6), (20, 8), (40, 4)]
    expected = []
    for prompt, (_, n) in zip(prompts([n for n, _ in sizes]), sizes, strict=True):
        ids = list(prompt)
        for _ in range(n):
            with torch.no_grad():
                logits = reference(torch.tensor([ids]), use_cache=False).logits[0, -1]
            ids.append(int(logits.argmax()))
        expected.append(ids[len(prompt) :])
    jobs = [
        (prompt, greedy(max_tokens=n))
        for prompt, (_, n) in zip(prompts([n for n, _ in sizes]), sizes, strict=True)
    ]
    for schedule, cache in (("refill", "c"), ("static", "d")):
        policy = make_policy(cache=cache, shape=(2, 2), schedule=schedule)
        with open_runtime(source, policy, tmp_path, limits={"max_tokens": 128}) as runtime:
            engine = Engine(runtime, tokenizer=None)
            assert [o.outputs[0].token_ids for o in run_jobs(engine, jobs)] == expected
            assert engine.stats.prompt_tokens == sum(n for n, _ in sizes)
