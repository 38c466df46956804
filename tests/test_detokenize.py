import random

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from flexrun.detokenize import IncrementalDetokenizer
from flexrun.tokenizer import Tokenizer, byte_alphabet


def byte_level(*extra):
    """Every byte is a token (id = byte), then extra tokens."""
    alphabet = byte_alphabet()
    vocab = {alphabet[byte]: byte for byte in range(256)}
    for i, text in enumerate(extra):
        vocab["".join(alphabet[byte] for byte in text.encode())] = 256 + i
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


def sentencepiece():
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", "▁the", "▁Paris", "a", "s", ".", "日"]
    vocab = {word: i for i, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(backend), vocab


def words():
    """No decoder: the library joins tokens with spaces, so a token's text depends on its neighbours."""
    vocab = {word: i for i, word in enumerate(["the", "dog", "ran", "home", "<end>", "[UNK]"])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<end>"])
    return Tokenizer(backend)


def run(detokenizer, ids):
    deltas = [detokenizer.feed(token_id) for token_id in ids]
    deltas.append(detokenizer.finish())
    assert "".join(deltas) == detokenizer.text
    return deltas


BYTES = byte_level("j;", " Paris", "ab", "bc", "END", "\n\n")


def test_characters_are_never_split():
    text = "é日👩‍👩‍👧🇫🇷 e\u0301x"
    deltas = run(IncrementalDetokenizer(BYTES), list(text.encode()))
    assert "".join(deltas) == text
    assert "\ufffd" not in "".join(deltas)
    assert deltas[0] == "" and deltas[1] == "é"
    assert [len(delta) for delta in deltas[2:5]] == [0, 0, 1]


def test_unfinished_characters_become_replacements_at_the_end_only():
    detokenizer = IncrementalDetokenizer(BYTES)
    assert detokenizer.feed(0xE6) == "" and detokenizer.feed(0x97) == ""
    assert detokenizer.finish() == "\ufffd" == detokenizer.text


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 261), max_size=40))
def test_any_bytes_give_what_the_whole_would_give(ids):
    detokenizer = IncrementalDetokenizer(BYTES)
    run(detokenizer, ids)
    assert detokenizer.text == BYTES.decode(ids)


def reference(text, stops):
    """The stop string that is complete first (the longest of several), by trying every prefix."""
    for end in range(len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            stop = max(hits, key=len)
            return text[: end - len(stop)], stop
    return text, None


@settings(deadline=None, max_examples=400)
@given(
    st.lists(st.sampled_from([*b"abcj;", 256, 258, 259]), max_size=30),
    st.lists(st.text("abcj;", min_size=1, max_size=5), min_size=1, max_size=4, unique=True),
)
def test_stop_strings_cut_exactly_and_nothing_later_is_given(ids, stops):
    full = BYTES.decode(ids)
    text, stop = reference(full, stops)
    detokenizer = IncrementalDetokenizer(BYTES, stop=stops)
    given_text = ""
    for token_id in ids:
        given_text += detokenizer.feed(token_id)
        assert text.startswith(given_text), "text was handed out that a stop string takes back"
    given_text += detokenizer.finish()
    assert (given_text, detokenizer.stopped_by) == (text, stop)
    assert detokenizer.text == text
    kept = IncrementalDetokenizer(BYTES, stop=stops, include_stop=True)
    run(kept, ids)
    assert kept.text == text + (stop or "")


def test_stop_inside_a_token():
    detokenizer = IncrementalDetokenizer(BYTES, stop=[";"])
    assert detokenizer.feed(256) == "j"
    assert detokenizer.stopped_by == ";"
    assert detokenizer.feed(ord("x")) == "" == detokenizer.finish()
    assert detokenizer.text == "j"


def test_stop_across_tokens_is_held_back_and_released():
    detokenizer = IncrementalDetokenizer(BYTES, stop=["END."])
    assert detokenizer.feed(ord("x")) == "x"
    assert detokenizer.feed(260) == ""
    assert detokenizer.feed(ord("!")) == "END!"
    assert detokenizer.feed(260) == ""
    assert detokenizer.feed(ord(".")) == "" and detokenizer.stopped_by == "END."
    held = IncrementalDetokenizer(BYTES, stop=["END."])
    assert held.feed(260) == "" and held.finish() == "END" and held.stopped_by is None


def test_the_stop_complete_first_wins():
    detokenizer = IncrementalDetokenizer(BYTES, stop=["abcd", "bc"])
    run(detokenizer, list(b"xabcd"))
    assert (detokenizer.text, detokenizer.stopped_by) == ("xa", "bc")
    detokenizer = IncrementalDetokenizer(BYTES, stop=["d", "abcd"])
    run(detokenizer, list(b"xabcd"))
    assert (detokenizer.text, detokenizer.stopped_by) == ("x", "abcd")


def test_min_tokens_delays_stop_strings():
    for min_tokens, expected in ((0, ""), (1, ""), (2, "j;"), (3, "j;j;"), (9, "j;j;j;")):
        detokenizer = IncrementalDetokenizer(BYTES, stop=["j"], min_tokens=min_tokens)
        run(detokenizer, [256, 256, 256])
        assert detokenizer.text == expected
    # Text of the first tokens is no part of a stop string either.
    detokenizer = IncrementalDetokenizer(BYTES, stop=["ab"], min_tokens=2)
    run(detokenizer, list(b"abab"))
    assert detokenizer.text == "ab"


def test_sentencepiece_spaces_and_bytes():
    tokenizer, vocab = sentencepiece()
    ids = [vocab["▁Paris"], vocab["<0xC3>"], vocab["<0xA9>"], vocab["▁"], vocab["▁the"], vocab["日"]]
    with_prompt = IncrementalDetokenizer(tokenizer, [1, vocab["▁the"]])
    assert run(with_prompt, ids) == [" Paris", "", "é", " ", " the", "日", ""]
    alone = IncrementalDetokenizer(tokenizer, [1])
    run(alone, ids)
    assert alone.text == "Paris\u00e9  the日" == tokenizer.decode(ids)
    assert with_prompt.text == tokenizer.decode([vocab["▁the"], *ids]).removeprefix("the")


def test_special_tokens_are_left_out_unless_wanted():
    tokenizer, vocab = sentencepiece()
    ids = [vocab["a"], 2, vocab["s"]]
    detokenizer = IncrementalDetokenizer(tokenizer, [1])
    run(detokenizer, ids)
    assert detokenizer.text == "as"
    detokenizer = IncrementalDetokenizer(tokenizer, [1], skip_special_tokens=False, stop=["</s>"])
    run(detokenizer, ids)
    assert (detokenizer.text, detokenizer.stopped_by) == ("a", "</s>")


@pytest.mark.parametrize("prompt", [[], [0, 1, 2]])
def test_decoders_that_join_tokens_use_the_window(prompt):
    tokenizer = words()
    assert not tokenizer.byte_exact
    generator = random.Random(1)
    for _ in range(20):
        ids = [generator.randrange(5) for _ in range(40)]
        detokenizer = IncrementalDetokenizer(tokenizer, prompt)
        run(detokenizer, ids)
        assert detokenizer.text == tokenizer.decode([*prompt, *ids]).removeprefix(tokenizer.decode(prompt))
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, stop=["g ra"])
    run(detokenizer, [0, 1, 2, 3])
    assert detokenizer.text.strip() == "the do"


def test_long_runs_without_text_keep_the_window_short():
    tokenizer = words()
    detokenizer = IncrementalDetokenizer(tokenizer, [0])
    run(detokenizer, [4] * 500 + [1])
    assert detokenizer.text.strip() == "dog"
    assert len(detokenizer._source._window) < 20


def test_work_per_token_does_not_grow():
    """Counted in decoded bytes, not in seconds."""

    class Counting(Tokenizer):
        decoded = 0

        def token_bytes(self, token_id):
            type(self).decoded += 1
            return super().token_bytes(token_id)

        def decode(self, token_ids, skip_special_tokens=True):
            type(self).decoded += len(token_ids)
            return super().decode(token_ids, skip_special_tokens)

    for tokenizer, limit in ((BYTES, 1), (words(), 40)):
        Counting.decoded = 0
        detokenizer = IncrementalDetokenizer(Counting(tokenizer.backend), stop=["zz"])
        run(detokenizer, [1, 2, 3] * 700)
        assert 0 < Counting.decoded <= limit * 2101
