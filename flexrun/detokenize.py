"""Token ids to text as they come, and the end of an answer in that text.

An :class:`IncrementalDetokenizer` takes one answer's tokens and hands out text that will never change: no
part of a character, nothing that could still turn out to be the beginning of a stop string. Work per token
does not grow with the length of the answer: where a tokenizer's text is the concatenation of its tokens'
bytes (byte-level BPE, sentencepiece) bytes are decoded as they come; elsewhere a short window of tokens is
decoded with and without the new one.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from flexrun.tokenizer import Tokenizer

_REPLACEMENT = "�"
_CONTEXT_TOKENS = 6
"""Prompt tokens that give the window decoder its context (a leading space, joined scripts)."""

_MAX_HELD_TOKENS = 8
"""A character spans at most 4 bytes; a longer run that still ends in U+FFFD is not going to become one."""


class _TextSource(Protocol):
    def feed(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class _ByteSource:
    """Text from exact token bytes through an incremental UTF-8 decoder."""

    def __init__(self, tokenizer: Tokenizer, at_start: bool, skip: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skip = skip
        self._strip = at_start and tokenizer.strips_leading_space
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_id: int) -> str:
        if token_id in self._skip:
            return ""
        data = self._tokenizer.token_bytes(token_id)
        if self._strip and data:
            data = data.removeprefix(b" ")
            self._strip = False
        return self._decoder.decode(data)

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowSource:
    """Text as the difference of two decoded windows, for decoders that look at neighbouring tokens.

    The window starts at the tokens of the last piece of text handed out, so that what they add to each
    other (spaces between words) is seen, and moves on with every piece.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window = list(context)
        self._n_given = len(self._window)

    def _text(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)

    def feed(self, token_id: int) -> str:
        self._window.append(token_id)
        return self._give(final=len(self._window) - self._n_given > _MAX_HELD_TOKENS)

    def _give(self, final: bool) -> str:
        before = self._text(self._window[: self._n_given])
        after = self._text(self._window)
        if len(after) <= len(before) or (after.endswith(_REPLACEMENT) and not final):
            if len(self._window) > _CONTEXT_TOKENS + _MAX_HELD_TOKENS:  # a run of tokens without text
                del self._window[: len(self._window) - _CONTEXT_TOKENS]
                self._n_given = len(self._window)
            return ""
        self._window = self._window[self._n_given :][-_CONTEXT_TOKENS:]
        self._n_given = len(self._window)
        return after[len(before) :]

    def finish(self) -> str:
        return self._give(final=True) if len(self._window) > self._n_given else ""


class _StopMatcher:
    """Finds the first of several strings to be complete, in text that comes in pieces (Aho-Corasick).

    Of several that end with the same character it is the longest. Going by characters makes the result
    independent of how the text was cut into tokens.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._children: list[dict[str, int]] = [{}]
        self._fail: list[int] = [0]
        self._depth: list[int] = [0]
        self._ends: list[str | None] = [None]
        for stop in stops:
            node = 0
            for char in stop:
                child = self._children[node].get(char)
                if child is None:
                    child = len(self._children)
                    self._children[node][char] = child
                    self._children.append({})
                    self._fail.append(0)
                    self._depth.append(self._depth[node] + 1)
                    self._ends.append(None)
                node = child
            self._ends[node] = stop
        queue = list(self._children[0].values())
        for node in queue:  # breadth first: a node's shorter suffixes are complete before it
            for char, child in self._children[node].items():
                fallback = self._fail[node]
                while fallback and char not in self._children[fallback]:
                    fallback = self._fail[fallback]
                self._fail[child] = self._children[fallback].get(char, 0)
                if self._ends[child] is None:
                    self._ends[child] = self._ends[self._fail[child]]
                queue.append(child)
        self.node = 0

    def reset(self) -> None:
        self.node = 0

    @property
    def pending(self) -> int:
        """Characters at the end of the text so far that may begin a stop string."""
        return self._depth[self.node]

    def feed(self, char: str) -> str | None:
        """The stop string that ends with this character, if any (the longest)."""
        node = self.node
        while node and char not in self._children[node]:
            node = self._fail[node]
        self.node = node = self._children[node].get(char, 0)
        return self._ends[node]


class IncrementalDetokenizer:
    """Text of one answer, piece by piece, with stop strings.

    Args:
        tokenizer: the model's tokenizer.
        prompt_token_ids: what the answer continues; decides about a leading space.
        stop: strings that end the answer; the text is cut exactly before the one that is complete first.
        include_stop: keep that string at the end of the text.
        min_tokens: stop strings that end within fewer tokens than this do not count.
        skip_special_tokens: leave special tokens out of the text.

    Attributes:
        text: all text handed out so far.
        stopped_by: the stop string that ended the answer, None before that.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
    ) -> None:
        skip = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._source: _TextSource
        if tokenizer.byte_exact:
            at_start = all(token_id in skip for token_id in prompt_token_ids)
            self._source = _ByteSource(tokenizer, at_start, skip)
        else:
            context = list(prompt_token_ids)[-_CONTEXT_TOKENS:]
            self._source = _WindowSource(tokenizer, context, skip_special_tokens)
        self._matcher = _StopMatcher(stop) if stop else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._n_tokens = 0
        self._held = ""  # decoded, but may begin a stop string
        self._pieces: list[str] = []
        self.stopped_by: str | None = None

    @property
    def text(self) -> str:
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def feed(self, token_id: int) -> str:
        """Take the next token; returns the text that is now certain (often "").

        Once :attr:`stopped_by` is set, further tokens are ignored.
        """
        if self.stopped_by is not None:
            return ""
        self._n_tokens += 1
        return self._scan(self._source.feed(token_id))

    def finish(self) -> str:
        """The answer is over: returns what was held back. Parts of a character become U+FFFD."""
        if self.stopped_by is not None:
            return ""
        delta = self._scan(self._source.finish())
        if self.stopped_by is None and self._held:
            delta += self._give(self._held)
            self._held = ""
        return delta

    def _give(self, text: str) -> str:
        if text:
            self._pieces.append(text)
        return text

    def _scan(self, new: str) -> str:
        """Move text from held back to certain, up to a stop string or what may begin one."""
        matcher = self._matcher
        if matcher is None:
            return self._give(new)
        if not new:
            return ""
        text = self._held + new
        self._held = ""
        if self._n_tokens < self._min_tokens:
            # Text of these tokens cannot be part of a stop string either.
            matcher.reset()
            return self._give(text)
        for position in range(len(text) - len(new), len(text)):
            stop = matcher.feed(text[position])
            if stop is not None:
                end = position + 1
                self.stopped_by = stop
                return self._give(text[: end if self._include_stop else end - len(stop)])
        keep = len(text) - matcher.pending
        self._held = text[keep:]
        return self._give(text[:keep])
