import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from flexrun import sampling
from flexrun.request import SamplingParams
from flexrun.sampling import SamplingState, sample, token_logprobs

V = 40


def reference_distribution(logits, params, vocab_size, prompt=(), generated=(), ends=()):
    """Probabilities of one row in plain Python (float64), straight from the module's list of steps."""
    x = [float(value) for value in logits[:vocab_size]]
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    if len(generated) < params.min_tokens:
        for token in {*ends, *params.stop_token_ids}:
            x[token] = -math.inf
    for token in range(vocab_size):
        count = list(generated).count(token)
        if count or token in prompt:
            r = params.repetition_penalty
            x[token] = x[token] / r if x[token] > 0 else x[token] * r
        x[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    if params.greedy:
        return [float(token == x.index(max(x))) for token in range(vocab_size)]
    top = max(x)
    x = [(value - top) / params.temperature for value in x]
    keep = [value >= (math.log(params.min_p) if params.min_p else -math.inf) for value in x]
    if 0 < params.top_k < vocab_size:
        kth = sorted((v if k else -math.inf for v, k in zip(x, keep)), reverse=True)[params.top_k - 1]
        keep = [k and v >= kth for v, k in zip(x, keep)]

    def probs():
        weights = [math.exp(v) if k else 0.0 for v, k in zip(x, keep)]
        return [weight / sum(weights) for weight in weights]

    if params.top_p < 1.0:
        total, last = 0.0, 0.0
        for p in sorted(probs(), reverse=True):
            if total >= params.top_p:
                break
            total, last = total + p, p
        keep = [p >= last and p > 0 for p in probs()]
    if params.typical_p < 1.0:
        p = probs()
        entropy = -sum(q * math.log(q) for q in p if q > 0)
        order = sorted(
            (t for t in range(vocab_size) if p[t] > 0), key=lambda t: abs(-math.log(p[t]) - entropy)
        )
        total, kept = 0.0, set()
        for token in order:
            if total >= params.typical_p:
                break
            total += p[token]
            kept.add(token)
        keep = [token in kept for token in range(vocab_size)]
    return probs()


def state(params, *, vocab_size=V, **kwargs):
    return SamplingState(params, vocab_size=vocab_size, **kwargs)


def exact_distribution(logits, row_state, vocab_size, monkeypatch=None):
    """Probabilities that sample() draws from: the weights it hands to the draw."""
    seen = {}
    draw = sampling._draw

    def spy(weights, uniform):
        seen["weights"] = weights[0].clone()
        return draw(weights, uniform)

    sampling._draw = spy
    try:
        result = sample(logits[None], [row_state], vocab_size=vocab_size)
    finally:
        sampling._draw = draw
    if "weights" not in seen:
        return [float(token == result.token_ids[0]) for token in range(vocab_size)], result
    weights = seen["weights"].double()
    return (weights / weights.sum()).tolist(), result


options = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.5]),
        "top_k": st.sampled_from([1, 2, 7, V, 100]),
        "top_p": st.sampled_from([0.05, 0.5, 0.9, 0.999]),
        "min_p": st.sampled_from([0.01, 0.2, 1.0]),
        "typical_p": st.sampled_from([0.2, 0.9]),
        "presence_penalty": st.sampled_from([-1.5, 0.7]),
        "frequency_penalty": st.sampled_from([-0.4, 1.1]),
        "repetition_penalty": st.sampled_from([0.6, 1.3]),
        "logit_bias": st.dictionaries(st.integers(0, V - 1), st.floats(-5, 5, width=32), max_size=3),
        "min_tokens": st.sampled_from([0, 3, 9]),
        "stop_token_ids": st.lists(st.integers(0, V - 1), max_size=3),
    },
)


@settings(deadline=None, max_examples=200)
@given(options, st.integers(0, 10**6), st.integers(1, 8), st.sampled_from([1, 8, 1024]))
def test_distribution_is_that_of_the_plain_reference(values, seed, spread, candidates):
    params = SamplingParams(**values)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(V + 6, generator=generator) * spread
    logits[V:] = 1e4  # padding rows of the head
    prompt, generated = [1, 2, 3, 3], [3, 4, 4, 9]
    row = state(params, prompt_token_ids=prompt, eos_token_ids=[5])
    for token in generated:
        row.observe(token)
    before = logits.clone()
    sampling._CANDIDATES, saved = candidates, sampling._CANDIDATES
    try:
        actual, result = exact_distribution(logits, row, V)
    finally:
        sampling._CANDIDATES = saved
    expected = reference_distribution(logits, params, V, prompt, generated, [5])
    assert torch.equal(logits, before)
    assert actual == pytest.approx(expected, abs=2e-6)
    assert result.valid == [True] and expected[result.token_ids[0]] > 0


def test_rows_do_not_influence_each_other():
    """The same request gives the same tokens alone, in any company and at any place."""
    generator = torch.Generator().manual_seed(3)
    kinds = [
        SamplingParams(temperature=0),
        SamplingParams(seed=1),
        SamplingParams(seed=2, top_p=0.8, top_k=11),
        SamplingParams(seed=3, repetition_penalty=1.5, frequency_penalty=0.3),
        SamplingParams(seed=4, typical_p=0.7, min_p=0.02),
        SamplingParams(temperature=0, presence_penalty=1.0, logprobs=2),
        SamplingParams(seed=6, logit_bias={1: 3.0}, min_tokens=16, stop_token_ids=[0]),
    ]
    steps = [torch.randn(len(kinds), V, generator=generator) * 2 for _ in range(12)]

    def run(order, noise):
        states = {row: state(kinds[row], prompt_token_ids=[1, 2]) for row in order}
        tokens = {row: [] for row in order}
        for step in steps:
            logits = torch.cat([step[order], torch.randn(noise, V)])
            company = [state(SamplingParams()) for _ in range(noise)]
            result = sample(logits, [*states.values(), *company], vocab_size=V)
            for row, token in zip(order, result.token_ids):
                tokens[row].append(token)
                states[row].observe(token)
        return tokens

    together = run(list(range(len(kinds))), 0)
    backwards = run(list(range(len(kinds)))[::-1], 5)
    assert together == {row: backwards[row] for row in together}
    for row in together:
        assert run([row], 0)[row] == together[row]
    assert len({tuple(tokens) for tokens in together.values()}) == len(kinds)


def test_work_is_cut_into_parts_without_changing_results(monkeypatch):
    logits = torch.randn(9, V)
    params = [SamplingParams(seed=i, top_p=0.9, logprobs=i % 3) for i in range(9)]

    def run():
        return sample(logits, [state(p) for p in params], vocab_size=V)

    whole = run()
    monkeypatch.setattr(sampling, "_WORK_ELEMENTS", 2 * V)
    parts = run()
    assert parts.token_ids == whole.token_ids
    for a, b in zip(parts.logprobs, whole.logprobs):
        assert (a.token_id, a.rank, a.top_ids) == (b.token_id, b.rank, b.top_ids)


@pytest.mark.parametrize(
    "options", [{}, {"top_p": 0.7}, {"top_k": 5, "temperature": 2.0}, {"typical_p": 0.8}]
)
def test_draws_follow_the_distribution(options):
    logits = torch.randn(12, generator=torch.Generator().manual_seed(5)) * 1.5
    n = 2500
    params = SamplingParams(seed=11, **options)
    states = [state(params, vocab_size=12, index=i) for i in range(n)]
    ids = sample(logits.expand(n, 12), states, vocab_size=12).token_ids
    expected = np.array(reference_distribution(logits, params, 12))
    counts = np.bincount(ids, minlength=12)
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    if kept.sum() > 1:
        assert stats.chisquare(counts[kept], expected[kept] * n).pvalue > 1e-3


def test_draws_are_as_stable_as_greedy_choices():
    """Rounding in the logits must not flip draws, as it did where the cumulative distribution was walked."""
    generator = torch.Generator().manual_seed(3)
    rows, vocab = 200, 20_000
    logits = torch.randn((rows, vocab), generator=generator)
    drifted = logits.clone()
    drifted[:, : vocab // 2] += 1e-4
    keys = [state(SamplingParams(seed=i), vocab_size=vocab).draw_key() for i in range(rows)]

    def walked(values):
        cumulative = values.double().softmax(-1).cumsum(-1)
        return torch.searchsorted(cumulative, torch.tensor(keys, dtype=torch.float64)[:, :1] * 2.0**-32)[:, 0]

    flips = int((sampling._draw(logits.exp(), keys) != sampling._draw(drifted.exp(), keys)).sum())
    walked_flips = int((walked(logits) != walked(drifted)).sum())
    assert flips <= 2 and walked_flips >= 20  # about 40 of 200 are walked to a neighbour


def test_the_hash_is_the_same_on_every_device():
    keys = [(0, 0), (2**32 - 1, 1), (123456789, 2**32 - 1)]
    by_numpy = sampling._hash_numpy(np.array(keys, np.uint32), 3000).astype(np.int64)
    assert np.array_equal(by_numpy, sampling._hash_torch(torch.tensor(keys), 3000).numpy())
    noise = sampling._exponentials(keys, 100_000, torch.device("cpu"))
    assert bool((noise > 0).all() and noise.isfinite().all())
    assert all(stats.kstest(row.double().numpy(), "expon").pvalue > 1e-3 for row in noise)


def test_consecutive_tokens_of_one_request_are_independent():
    logits = torch.zeros(1, 4)
    row = state(SamplingParams(seed=0), vocab_size=4)
    tokens = []
    for _ in range(1600):
        (token,) = sample(logits, [row], vocab_size=4).token_ids
        tokens.append(token)
        row.observe(token)
    pairs = np.bincount([4 * a + b for a, b in pairwise(tokens)], minlength=16)
    assert stats.chisquare(pairs).pvalue > 1e-3


def test_seeds():
    logits = torch.zeros(1, V)

    def first(params, index=0, skip=0):
        row = state(params, index=index)
        row.n_generated = skip
        return sample(logits, [row], vocab_size=V).token_ids[0]

    seeded = [first(SamplingParams(seed=5), skip=i) for i in range(30)]
    assert seeded == [first(SamplingParams(seed=5), skip=i) for i in range(30)]
    assert len(set(seeded)) > 10
    assert seeded != [first(SamplingParams(seed=6), skip=i) for i in range(30)]
    assert seeded != [first(SamplingParams(seed=5), index=1, skip=i) for i in range(30)]
    assert first(SamplingParams(seed=-(2**63))) in range(V)
    assert len({first(SamplingParams()) for _ in range(60)}) > 10, "without a seed draws differ"


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-6, 1e30])
def test_extreme_temperatures(temperature):
    logits = torch.tensor([[1.0, 3.0, 3.0 - 1e-5, -2.0]])
    params = SamplingParams(seed=1, temperature=temperature, logprobs=1)
    rows = [state(params, vocab_size=4, index=i) for i in range(200)]
    result = sample(logits.expand(200, 4), rows, vocab_size=4)
    assert all(result.valid)
    if temperature < 1e-5:
        assert set(result.token_ids) == {1}
    if temperature > 1:
        assert set(result.token_ids) == {0, 1, 2, 3}


def test_extreme_logits():
    big = torch.tensor([[3e38, -3e38, 0.0, 3e38]])
    for params in (SamplingParams(seed=1), SamplingParams(seed=1, top_p=0.5, min_p=0.1, typical_p=0.9)):
        result = sample(
            big.expand(40, 4), [state(params, vocab_size=4, index=i) for i in range(40)], vocab_size=4
        )
        assert all(result.valid) and set(result.token_ids) == {0, 3}
    assert sample(big, [state(SamplingParams(temperature=0), vocab_size=4)], vocab_size=4).token_ids == [0]
    masked = torch.tensor([[-math.inf, 1.0, -math.inf, -math.inf]])
    for params in (SamplingParams(), SamplingParams(top_p=0.9), SamplingParams(typical_p=0.5, top_k=3)):
        assert sample(masked, [state(params, vocab_size=4)], vocab_size=4).token_ids == [1]


def test_ties_at_the_cut_stay():
    logits = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.0])
    for options in ({"top_k": 2}, {"top_p": 0.5}):
        probs, _ = exact_distribution(logits, state(SamplingParams(**options), vocab_size=5), 5)
        assert [p > 0 for p in probs] == [True, True, True, True, False]
    flat, _ = exact_distribution(torch.zeros(3000), state(SamplingParams(top_p=0.5), vocab_size=3000), 3000)
    assert flat == pytest.approx([1 / 3000] * 3000)


def test_flat_distributions_beyond_the_candidates_are_sorted_whole():
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(0)) * 0.01
    params = SamplingParams(top_p=0.8)
    probs, _ = exact_distribution(logits, state(params, vocab_size=5000), 5000)
    expected = logits.double().softmax(0)
    kept = sum(p > 0 for p in probs)
    ordered = expected.sort(descending=True).values.cumsum(0)
    assert kept == int((ordered < 0.8).sum()) + 1


def test_broken_rows_are_reported_and_leave_others_alone():
    logits = torch.zeros(5, V)
    logits[0, 3] = math.nan
    logits[1] = -math.inf
    logits[2, 7] = math.inf
    logits[3, 9] = 50.0
    for params in (
        SamplingParams(temperature=0),
        SamplingParams(seed=1, top_p=0.9, typical_p=0.8, logprobs=1),
    ):
        result = sample(logits, [state(params) for _ in range(5)], vocab_size=V)
        assert result.valid == [False, False, False, True, True]
        assert result.token_ids[:4] == [0, 0, 0, 9]
    ends = SamplingParams(temperature=0, min_tokens=5, stop_token_ids=range(4))
    assert sample(logits[3:, :4], [state(ends, vocab_size=4)] * 2, vocab_size=4).valid == [False, False]


def test_padding_of_the_vocabulary_is_never_sampled():
    logits = torch.zeros(64, 100)
    logits[:, V:] = 9.0
    params = [SamplingParams(temperature=i % 2, logprobs=3) for i in range(64)]
    result = sample(logits, [state(p) for p in params], vocab_size=V)
    assert max(result.token_ids) < V
    entry = result.logprobs[0]
    assert max(entry.top_ids) < V and entry.rank == 1
    assert entry.logprob == pytest.approx(torch.log_softmax(logits[0], 0)[0].item(), abs=1e-6)


def test_min_tokens_forbids_end_tokens_until_then():
    logits = torch.zeros(1, V)
    logits[0, 5], logits[0, 6], logits[0, 7] = 9.0, 8.0, 7.0
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[6])
    row = state(params, eos_token_ids=[5, V + 3])
    tokens = []
    for _ in range(3):
        (token,) = sample(logits, [row], vocab_size=V).token_ids
        tokens.append(token)
        row.observe(token)
    assert tokens == [7, 7, 5]
    ignoring = state(SamplingParams(temperature=0, min_tokens=2, ignore_eos=True), eos_token_ids=[5])
    assert sample(logits, [ignoring], vocab_size=V).token_ids == [5], "an ignored end token is a token"


def test_penalties_count_what_was_observed():
    """More distinct tokens than the first allocation holds."""
    params = SamplingParams(temperature=0, frequency_penalty=2.0)
    row = state(params, vocab_size=500)
    logits = -torch.arange(500.0)[None] * 1e-3
    for expected in range(300):
        (token,) = sample(logits, [row], vocab_size=500).token_ids
        assert token == expected
        row.observe(token)
    ids, counts = row.seen
    assert ids.tolist() == list(range(300)) and counts.tolist() == [1.0] * 300


def test_repetition_penalty_counts_the_prompt_and_others_do_not():
    logits = torch.tensor([[2.0, 1.5, -1.0]])

    def pick(**options):
        row = state(SamplingParams(temperature=0, **options), vocab_size=3, prompt_token_ids=[0, 0, 99])
        return sample(logits, [row], vocab_size=3).token_ids[0]

    assert pick(repetition_penalty=2.0) == 1
    assert pick(presence_penalty=2.0) == 0 == pick(frequency_penalty=2.0)


def test_logprobs_are_those_of_the_raw_logits():
    logits = torch.randn(6, V, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(seed=1, temperature=0.3, top_k=3, logit_bias={7: 50.0}, logprobs=4)
    counts = [None, 0, 4, 4, 4, 4]
    rows = [
        state(SamplingParams(seed=1, temperature=0.3, top_k=3, logit_bias={7: 50.0}, logprobs=n))
        for n in counts
    ]
    assert params.logprobs == 4
    result = sample(logits, rows, vocab_size=V)
    expected = torch.log_softmax(logits.double(), -1)
    assert result.logprobs[0] is None and result.logprobs[1].top_ids == []
    for row in range(1, 6):
        entry = result.logprobs[row]
        assert entry.token_id == 7 == result.token_ids[row]
        assert entry.logprob == pytest.approx(expected[row, 7].item(), abs=1e-5)
        assert entry.rank == int((expected[row] > expected[row, 7]).sum()) + 1
        best = expected[row].topk(counts[row])
        assert entry.top_ids == best.indices.tolist()
        assert entry.top_logprobs == pytest.approx(best.values.tolist(), abs=1e-5)
    listed = result.logprobs[2].as_dict(lambda token: f"<{token}>")
    assert next(iter(listed)) == 7 and listed[7].decoded_token == "<7>"
    assert sorted(entry.rank for token, entry in listed.items() if token != 7)[:1] == [1]
    assert len(listed) in (4, 5)


def test_logprobs_of_given_tokens():
    logits = torch.randn(5, V)
    entries = token_logprobs(logits, [1, 2, 3, 4, 5], 2, V)
    expected = torch.log_softmax(logits, -1)
    assert [e.logprob for e in entries] == pytest.approx(
        [expected[i, i + 1].item() for i in range(5)], abs=1e-5
    )
    assert all(len(e.top_ids) == 2 for e in entries)
    assert token_logprobs(logits[:0], [], 2, V) == []
    (wide,) = token_logprobs(logits[:1], [0], 100, V)
    assert len(wide.top_ids) == V


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match=r"logit_bias names token 40; the vocabulary ends at 39"):
        state(SamplingParams(logit_bias={V: 1.0}))
    with pytest.raises(ValueError, match="stop_token_ids names token 99"):
        state(SamplingParams(stop_token_ids=[99]))
    one = [state(SamplingParams())]
    with pytest.raises(ValueError, match="logits must be"):
        sample(torch.zeros(2, V), one, vocab_size=V)
    with pytest.raises(ValueError, match="vocab_size"):
        sample(torch.zeros(1, V), one, vocab_size=V + 1)
    assert sample(torch.zeros(0, V), [], vocab_size=V).token_ids == []


def test_plain_greedy_rows_cost_no_copy(monkeypatch):
    monkeypatch.setattr(sampling, "_choose", lambda work, states: pytest.fail("greedy rows were copied"))
    logits = torch.randn(3, V)
    rows = [state(SamplingParams(temperature=0, min_tokens=1), eos_token_ids=[]) for _ in range(3)]
    assert sample(logits, rows, vocab_size=V).token_ids == logits.argmax(-1).tolist()
    assert sample(logits.bfloat16(), rows, vocab_size=V).token_ids == logits.bfloat16().argmax(-1).tolist()
