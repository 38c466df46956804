"""Token ids as the pieces of text that they add: their concatenation is the text."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from flexrun.tokenizer import Tokenizer


def token_pieces(
    tokenizer: Tokenizer, token_ids: Sequence[int], *, skip_special_tokens: bool = True
) -> list[str]:
    """One piece per token; a character of several tokens belongs to the last one, special tokens are empty."""
    special = tokenizer.special_ids if skip_special_tokens else frozenset()
    pieces: list[str] = []
    if tokenizer.byte_exact:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token_id in token_ids:
            pieces.append("" if token_id in special else decoder.decode(tokenizer.token_bytes(token_id)))
        if pieces:
            pieces[-1] += decoder.decode(b"", final=True)
        return pieces
    n_done = 0
    for end in range(1, len(token_ids) + 1):
        text = tokenizer.decode(token_ids[:end], skip_special_tokens=skip_special_tokens)
        if text.endswith("\ufffd") and end < len(token_ids):  # the character goes on in the next token
            pieces.append("")
            continue
        pieces.append(text[n_done:])
        n_done = max(n_done, len(text))
    return pieces


def fitted(pieces: Sequence[str], text: str) -> list[str]:
    """Pieces cut, at the end, to a text that begins with them (a stop sequence was cut off it).

    A leading space that the decoder of the text has dropped is dropped too. Pieces beyond the text are left
    out, so there may be fewer than before; the last one may be a part of its token.
    """
    result: list[str] = []
    if pieces and pieces[0].startswith(" ") and not text.startswith(" "):
        pieces = [pieces[0][1:], *pieces[1:]]
    room = len(text)
    for piece in pieces:
        if room <= 0 and piece:
            break
        result.append(piece[:room])
        room -= len(piece)
    return result
