import pytest
from eval_helpers import make_tiny_model

from flexrun.evaluate.pieces import fitted, token_pieces
from flexrun.tokenizer import load_tokenizer

TEXT = "The quick café ☃ fox 日本 yes"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(make_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.mark.parametrize("byte_exact", [True, False])
def test_pieces_join_to_the_text_with_whole_characters(tokenizer, byte_exact, monkeypatch):
    monkeypatch.setattr(type(tokenizer), "byte_exact", byte_exact)
    ids = tokenizer.encode(TEXT)
    pieces = token_pieces(tokenizer, ids)
    assert len(pieces) == len(ids) and "".join(pieces) == TEXT
    assert not any("\ufffd" in piece for piece in pieces)
    # A text that ends inside a character shows that it does.
    cut = token_pieces(tokenizer, tokenizer.encode("a日")[:2])
    assert len(cut) == 2 and cut[1].startswith("\ufffd")


def test_special_tokens_add_nothing_unless_they_are_wanted(tokenizer):
    ids = [0, *tokenizer.encode("yes"), 1]
    assert token_pieces(tokenizer, ids)[0] == token_pieces(tokenizer, ids)[-1] == ""
    assert token_pieces(tokenizer, ids, skip_special_tokens=False)[0] == "<s>"
    assert token_pieces(tokenizer, []) == []


@pytest.mark.parametrize(
    ("pieces", "text", "expected"),
    [
        (["ab", "cd", ""], "abcd", ["ab", "cd", ""]),
        (["ab", "cd", "ef"], "abc", ["ab", "c"]),
        (["ab", "cd"], "ab", ["ab"]),
        (["ab"], "", []),
        ([" ab", "c"], "abc", ["ab", "c"]),
        (["", "ab"], "a", ["", "a"]),
    ],
)
def test_pieces_are_cut_to_a_text_that_ends_earlier(pieces, text, expected):
    assert fitted(pieces, text) == expected
