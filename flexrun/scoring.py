"""Log-likelihoods: from texts to windows of tokens the engine scores, and back to numbers.

A pair is a context and a continuation, of which the continuation is scored. A text alone is scored whole, in
windows of the model's length that predict every token once ("rolling"). Where context ends and continuation
begins, what stands for an empty context and what is cut off beyond the window follow lm-evaluation-harness, so
that figures are comparable. A window is one engine request: prefill only, logits at the scored positions alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

from flexrun.jobs.kinds import EnginePrompt, JobEngine, add_prompt
from flexrun.request import RequestError, RequestOutput, SamplingParams

TextOrIds: TypeAlias = str | Sequence[int]
T = TypeVar("T")

SCORE_PARAMS = SamplingParams(temperature=0.0, max_tokens=1)
"""What a request that generates nothing says of sampling."""


class Encoder(Protocol):
    """The part of flexrun.tokenizer.Tokenizer that scoring uses."""

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreWindow:
    """Tokens of one engine request, of which those from `score_from` on are scored.

    token_ids: at most the model's length plus one, since the last token is scored but never fed.
    """

    token_ids: list[int]
    score_from: int

    def __post_init__(self) -> None:
        if not 1 <= self.score_from < len(self.token_ids):
            raise ValueError(
                f"score_from must be in 1..{len(self.token_ids) - 1} for {len(self.token_ids)} tokens,"
                f" got {self.score_from}"
            )

    @property
    def n_scored(self) -> int:
        return len(self.token_ids) - self.score_from

    def prompt(self) -> EnginePrompt:
        """The request for the engine."""
        return EnginePrompt(token_ids=self.token_ids, params=SCORE_PARAMS, score_from=self.score_from)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Log-likelihood of a continuation or of a text.

    Attributes:
        logprob: natural log-probability, the sum of `logprobs`.
        logprobs: of each scored token.
        token_ids: the scored tokens.
        is_greedy: every scored token is the likeliest at its place.
    """

    logprob: float
    logprobs: list[float]
    token_ids: list[int]
    is_greedy: bool


class Scorer:
    """Makes windows for one model.

    Args:
        tokenizer: None for a model that takes token ids only.
        eos_token_ids: the model's end tokens; the first stands for an empty context if there is no BOS.
        max_len: most tokens that the model sees at once.
    """

    def __init__(self, tokenizer: Encoder | None, *, eos_token_ids: Sequence[int] = (), max_len: int) -> None:
        if max_len < 1:
            raise ValueError(f"max_len must be at least 1, got {max_len}")
        self.tokenizer = tokenizer
        self.max_len = max_len
        self._eos_token_ids = tuple(eos_token_ids)

    @property
    def start_token_id(self) -> int:
        """What stands before a text that nothing precedes: BOS, else EOS. RequestError if there is neither."""
        if self.tokenizer is not None:
            if self.tokenizer.bos_token_id is not None:
                return self.tokenizer.bos_token_id
            if self.tokenizer.eos_token_ids:
                return self.tokenizer.eos_token_ids[0]
        if self._eos_token_ids:
            return self._eos_token_ids[0]
        raise RequestError("an empty context needs a BOS or EOS token, and this model names none")

    def pair(self, context: TextOrIds, continuation: TextOrIds) -> ScoreWindow:
        """The window of a pair; a context beyond the model's length loses its beginning.

        Raises RequestError: nothing to score, a continuation longer than the model's length, or text for
        a model without a tokenizer.
        """
        if isinstance(context, str) and isinstance(continuation, str):
            head, tail = self.encode_pair(context, continuation)
        else:
            head, tail = self._ids(context, special=True), self._ids(continuation, special=False)
        return self.window(head, tail)

    def window(self, context_ids: Sequence[int], continuation_ids: Sequence[int]) -> ScoreWindow:
        """The same from token ids. Raises RequestError."""
        head, tail = list(context_ids), list(continuation_ids)
        if not tail:
            raise RequestError("the continuation has no tokens, so there is nothing to score")
        if not head:
            head, tail = self._after_start(tail)
        if len(tail) > self.max_len:
            raise RequestError(
                f"the continuation has {len(tail)} tokens, the limit is {self.max_len}; shorten it, or score it"
                " as a text"
            )
        tokens = (head + tail)[-(self.max_len + 1) :]
        return ScoreWindow(token_ids=tokens, score_from=len(tokens) - len(tail))

    def text(self, text: TextOrIds) -> list[ScoreWindow]:
        """Windows that together score every token of a text once. RequestError if it has none."""
        ids = self._ids(text, special=False)
        if not ids:
            raise RequestError("the text has no tokens, so there is nothing to score")
        head, tail = self._after_start(ids)
        return rolling_windows(tail, head[0], self.max_len)

    def encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Token ids of both, as they are in the joined text.

        White space at the end of the context belongs to the continuation: tokenizers join it to the next
        word. A context of nothing else is an empty one.
        """
        kept = context.rstrip()
        continuation = context[len(kept) :] + continuation
        tokenizer = self._tokenizer()
        if not kept:
            return [], tokenizer.encode(continuation, add_special_tokens=False)
        head = tokenizer.encode(kept)
        whole = tokenizer.encode(kept + continuation)
        if len(whole) > len(head):
            return head, whole[len(head) :]
        # The continuation disappeared into the context's last token; alone it has tokens of its own.
        return head, tokenizer.encode(continuation, add_special_tokens=False)

    def _ids(self, value: TextOrIds, *, special: bool) -> list[int]:
        if isinstance(value, str):
            return self._tokenizer().encode(value, add_special_tokens=special) if value else []
        ids = list(value)
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise RequestError("a text given as a list must hold token ids (whole numbers) only")
        return ids

    def _tokenizer(self) -> Encoder:
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer: give token ids instead of text")
        return self.tokenizer

    def _after_start(self, ids: list[int]) -> tuple[list[int], list[int]]:
        """The token that stands before a text, and the text's own; a start token in the text is that one."""
        start = self.start_token_id
        if ids[0] == start and len(ids) > 1:
            return ids[:1], ids[1:]
        return [start], ids


def rolling_windows(token_ids: Sequence[int], prefix_token_id: int, max_len: int) -> list[ScoreWindow]:
    """Windows that predict every token of a text once, none seeing more than max_len tokens.

    The first predicts from the prefix token on; each further one predicts as many as fit after one token of
    context; the last sees a full window and predicts what is left (lm-evaluation-harness's rolling windows).
    """
    ids = list(token_ids)
    windows: list[ScoreWindow] = []
    n_done = 0
    while n_done < len(ids):
        n_new = min(len(ids) - n_done, max_len)
        end = n_done + n_new
        if n_done == 0:
            tokens = [prefix_token_id, *ids[:end]]
        else:
            tokens = ids[end - max_len - 1 : end]
        windows.append(ScoreWindow(token_ids=tokens, score_from=len(tokens) - n_new))
        n_done = end
    return windows


def score_of(windows: Sequence[ScoreWindow], outputs: Sequence[RequestOutput]) -> Score:
    """The score of a pair or a text from the finished requests of its windows, in their order."""
    logprobs: list[float] = []
    token_ids: list[int] = []
    is_greedy = True
    for window, output in zip(windows, outputs, strict=True):
        assert output.prompt_logprobs is not None
        scored = window.token_ids[window.score_from :]
        for token, entry in zip(scored, output.prompt_logprobs[window.score_from :], strict=True):
            assert entry is not None
            logprobs.append(entry[token].logprob)
            is_greedy = is_greedy and entry[token].rank == 1
        token_ids += scored
    return Score(logprob=sum(logprobs), logprobs=logprobs, token_ids=token_ids, is_greedy=is_greedy)


def run_prompts(
    engine: JobEngine, work: Iterable[tuple[T, Sequence[EnginePrompt]]], *, name: str, max_waiting: int = 1024
) -> Iterator[tuple[T, list[RequestOutput]]]:
    """Run items of one or more prompts each; yield each item with its outputs in the pass that ends it.

    Items are taken from `work` only as the engine needs them; `name` begins the requests' ids. Results of
    others' requests are dropped. Closing the iterator early aborts what is unfinished.

    Raises RequestError: a prompt that can never run; the items before it are lost, as with any other error.
    """
    source = iter(work)
    open_items: dict[int, tuple[T, list[RequestOutput | None]]] = {}
    ids: dict[str, tuple[int, int]] = {}
    ready: deque[int] = deque()
    n_items = 0
    exhausted = False
    try:
        while True:
            while not exhausted and (not open_items or engine.num_waiting < max_waiting):
                try:
                    item, prompts = next(source)
                except StopIteration:
                    exhausted = True
                    break
                open_items[n_items] = (item, [None] * len(prompts))
                for index, prompt in enumerate(prompts):
                    request_id = f"{name}-{n_items}.{index}"
                    ids[request_id] = (n_items, index)
                    add_prompt(engine, request_id, prompt)
                if not prompts:
                    ready.append(n_items)
                n_items += 1
            if exhausted and not open_items:
                return
            for output in engine.step() if ids else ():
                if output.request_id not in ids:
                    continue
                number, index = ids.pop(output.request_id)
                outputs = open_items[number][1]
                outputs[index] = output
                if all(o is not None for o in outputs):
                    ready.append(number)
            while ready:
                item, found = open_items.pop(ready.popleft())
                yield item, [output for output in found if output is not None]
    finally:
        for request_id in ids:
            engine.abort(request_id)
