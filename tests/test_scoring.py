import random

import pytest
import torch
from eval_helpers import MAX_LEN, TEXTS, Reference, make_tiny_model

from flexrun.llm import LLM
from flexrun.request import RequestError, SamplingParams
from flexrun.scoring import Scorer, ScoreWindow, rolling_windows
from policy.tiers import Placement

TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def reference(folder):
    return Reference(folder)


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, device="cpu", dtype="float32", cpu_mem="512MiB") as llm:
        yield llm


def pairs():
    long = " ".join(TEXTS)
    return [
        ("The quick brown fox", " jumps over the lazy dog"),
        ("Question: which city is the capital of France? Answer:", " Paris"),
        ("Question: ", "which city"),  # the space belongs to the continuation
        ("", "one two three"),
        ("   ", "yes"),
        ("A", "B"),
        (long, " seven"),  # beyond the window: the context loses its beginning
        (long, " " + TEXTS[0][:40]),
    ]


def expected(reference, context, continuation, max_len=MAX_LEN):
    """The same by hand: joined text cut where the stripped context's tokens end."""
    encode = lambda text: reference.tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    kept = context.rstrip()
    whole = encode(context + continuation)
    n = len(whole) - len(encode(kept))
    if not kept:
        whole = [0, *whole]
    whole = whole[-(max_len + 1) :]
    return reference.logprobs(whole, n)


def close(score, logprobs, is_greedy):
    assert len(score.logprobs) == len(logprobs)
    assert score.logprobs == pytest.approx(logprobs, abs=TOLERANCE)
    assert score.logprob == pytest.approx(sum(logprobs), abs=TOLERANCE)
    assert score.is_greedy is is_greedy


def test_scores_equal_transformers_and_batched_equals_alone(llm, reference):
    batched = llm.score(pairs())
    for (context, continuation), score in zip(pairs(), batched, strict=True):
        close(score, *expected(reference, context, continuation))
        alone = llm.score([(context, continuation)])[0]
        assert alone.logprobs == pytest.approx(score.logprobs, abs=1e-4)
    assert not llm.engine.has_unfinished()


def test_is_greedy_tells_the_models_own_choice(llm):
    prompt = llm.tokenizer.encode("The quick brown")
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    answer = llm.generate([prompt], params)[0].outputs[0]
    own, other = llm.score([(prompt, answer.token_ids), (prompt, [*answer.token_ids[:4], 7])])
    assert own.is_greedy and own.token_ids == answer.token_ids
    assert not other.is_greedy and other.logprob < own.logprob


def test_rolling_scores_equal_windows_computed_by_transformers(llm, reference):
    texts = ["one", " ".join(TEXTS), " ".join(TEXTS * 3)]
    for text, score in zip(texts, llm.score_text(texts), strict=True):
        ids = reference.tokenizer.encode(text, add_special_tokens=False)
        assert score.token_ids == ids
        found = []
        for window in rolling_windows(ids, 0, MAX_LEN):
            found += reference.logprobs(window.token_ids, window.n_scored)[0]
        assert score.logprobs == pytest.approx(found, abs=TOLERANCE)
    assert len(score.logprobs) > 2 * MAX_LEN


@pytest.mark.parametrize("n_tokens", [1, 3, 4, 5, 8, 9, 30])
def test_rolling_windows_predict_every_token_once_from_all_that_fits(n_tokens):
    ids, max_len = list(range(100, 100 + n_tokens)), 4
    windows = rolling_windows(ids, 0, max_len)
    scored = [token for w in windows for token in w.token_ids[w.score_from :]]
    assert scored == ids
    assert all(len(w.token_ids) <= max_len + 1 for w in windows)
    assert windows[0].token_ids[0] == 0 and all(0 not in w.token_ids for w in windows[1:])
    # The last window is a full one, however few tokens it scores.
    assert n_tokens <= max_len or len(windows[-1].token_ids) == max_len + 1


@pytest.mark.parametrize(
    "options",
    [
        {"gpu_batch_size": 1},
        {"gpu_batch_size": 3, "num_gpu_batches": 2},
        {"weights": Placement(disk_frac=1.0), "gpu_batch_size": 4},
        {"cache": Placement(disk_frac=1.0), "activations": Placement(disk_frac=1.0), "num_gpu_batches": 2,
         "gpu_batch_size": 2},
        {"gpu_mem": "64MiB", "weights": Placement(gpu_frac=0.5, cpu_frac=0.5), "gpu_batch_size": 2,
         "cache": Placement(cpu_frac=1.0)},
        {"pass_tokens": 256, "page_tokens": 32, "schedule": "static", "gpu_batch_size": 5},
    ],
    ids=lambda options: "-".join(options),
)  # fmt: skip
def test_scores_are_the_same_for_every_placement_and_block(folder, llm, tmp_path, options):
    texts = [" ".join(TEXTS)]
    with LLM(
        folder, device="cpu", dtype="float32", cpu_mem="512MiB", disk_dir=tmp_path / "spill", **options
    ) as other:
        found = [*other.score(pairs()), *other.score_text(texts)]
    for score, base in zip(found, [*llm.score(pairs()), *llm.score_text(texts)], strict=True):
        assert score.token_ids == base.token_ids and score.is_greedy is base.is_greedy
        assert score.logprobs == pytest.approx(base.logprobs, abs=1e-4)


def test_context_and_window_limits(llm):
    context, tail = list(range(3, 3 + MAX_LEN)), [9, 10]
    window = llm.scorer.window(context, tail)
    assert window.token_ids == [*context[1:], *tail] and window.n_scored == 2
    full = llm.scorer.window([5], [6] * MAX_LEN)
    assert len(llm.score([([5], [6] * MAX_LEN)])[0].logprobs) == full.n_scored == MAX_LEN
    with pytest.raises(RequestError, match="65 tokens, the limit is 64"):
        llm.score([([5], [6] * (MAX_LEN + 1))])
    with pytest.raises(RequestError, match="nothing to score"):
        llm.score([("context", "")])
    with pytest.raises(RequestError, match="nothing to score"):
        llm.score_text([""])
    with pytest.raises(RequestError, match="400"):
        llm.score([("a", "b"), ([5], [400])])
    assert not llm.engine.has_unfinished()
    with pytest.raises(ValueError, match="score_from"):
        ScoreWindow(token_ids=[1, 2], score_from=2)


def test_a_start_token_in_the_text_is_not_doubled(llm):
    assert llm.scorer.pair("", "<s>one").token_ids == [0, *llm.tokenizer.encode("one")]
    assert llm.scorer.text("<s>one")[0].token_ids == [0, *llm.tokenizer.encode("one")]
    assert llm.scorer.pair([], [7, 8]).token_ids == [0, 7, 8]


def test_a_tokenizer_that_adds_bos_puts_it_before_the_context(tmp_path):
    folder = make_tiny_model(tmp_path, add_bos=True)
    reference = Reference(folder)
    with LLM(folder, device="cpu", dtype="float32", cpu_mem="512MiB") as llm:
        window = llm.scorer.pair("one two", " three")
        whole = reference.tokenizer.encode("one two three")
        assert whole[0] == 0 and window.token_ids == whole
        close(llm.score([("one two", " three")])[0], *reference.logprobs(whole, window.n_scored))


def test_token_ids_need_no_tokenizer_and_a_start_token_is_needed_only_without_context():
    scorer = Scorer(None, max_len=8)
    assert scorer.pair([1, 2], [3]).score_from == 2
    for make in (lambda: scorer.pair([], [3]), lambda: scorer.text([3])):
        with pytest.raises(RequestError, match="BOS or EOS"):
            make()
    assert Scorer(None, eos_token_ids=[5], max_len=8).pair([], [3]).token_ids == [5, 3]
    with pytest.raises(RequestError, match="no tokenizer"):
        scorer.pair("a", "b")


def test_a_large_vocabulary_is_never_held_for_all_positions(folder, llm, monkeypatch):
    """What the head hands to scoring is one slice of the vocabulary for one chunk of rows."""
    from flexrun.logits import ScoreRows

    sizes = []
    put = ScoreRows.put

    def spy(self, rows, first_id, logits):
        sizes.append(logits.shape)
        put(self, rows, first_id, logits)

    monkeypatch.setattr(ScoreRows, "put", spy)
    generator = random.Random(0)
    llm.score([([5], [generator.randrange(400) for _ in range(MAX_LEN)]) for _ in range(8)])
    slices = [unit for unit in llm.runtime.model.units if unit.name.startswith("head.")]
    assert len(slices) > 1
    assert max(width for _, width in sizes) < 400
    assert torch.tensor([rows * width for rows, width in sizes]).sum() == 8 * MAX_LEN * 400


def test_contexts_of_several_segments_and_pages_beside_short_ones(tmp_path):
    """Prompts are computed in segments of 256 tokens, the window here holds 700: every kind of boundary."""
    folder = make_tiny_model(tmp_path / "model", max_len=700)
    reference = Reference(folder)
    generator = random.Random(1)
    draw = lambda n: [generator.randrange(3, 400) for _ in range(n)]  # noqa: E731
    lengths = [(1, 2), (255, 3), (256, 1), (300, 300), (690, 10), (640, 200), (0, 520)]
    asked = [(draw(n_context), draw(n_tail)) for n_context, n_tail in lengths]
    base = {"device": "cpu", "dtype": "float32", "cpu_mem": "512MiB"}
    for options in (
        {},
        {"gpu_batch_size": 2, "weights": Placement(disk_frac=1.0), "cache": Placement(disk_frac=1.0)},
    ):
        with LLM(folder, disk_dir=tmp_path / "spill", **base, **options) as llm:
            for (head, tail), score in zip(asked, llm.score(asked), strict=True):
                whole = ((head or [0]) + tail)[-701:]
                close(score, *reference.logprobs(whole, len(tail)))
