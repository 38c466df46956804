"""The engine: requests in, finished results out, one pass at a time.

    step = plan a pass (scheduler) -> run it (executor) -> sample -> note what ended

It holds no policy of its own: what rests where is the runtime's, who runs next is the scheduler's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from flexrun.detokenize import IncrementalDetokenizer
from flexrun.logits import BatchSink, ScoreRows
from flexrun.request import (
    FINISH_LENGTH,
    FINISH_STOP,
    CompletionOutput,
    Logprob,
    NumericsError,
    RequestError,
    RequestOutput,
    SamplingParams,
)
from flexrun.runtime import Runtime
from flexrun.sampling import SamplingState, TokenLogprobs, sample
from flexrun.scheduler import Completion, Scheduler, Step
from flexrun.tokenizer import Tokenizer
from offload.executor import BatchInput, SequenceInput


@dataclass(slots=True, kw_only=True)
class EngineStats:
    """Totals since the engine was made (or `reset`).

    A pass that mixes prompts with running sequences counts towards prefill and decode by their tokens.
    """

    prompt_tokens: int = 0
    generated_tokens: int = 0
    passes: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    sampling_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        return self.prefill_seconds + self.decode_seconds


@dataclass(slots=True, kw_only=True)
class _Request:
    prompt: list[int]
    text: str | None
    outputs: list[CompletionOutput | None]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scored:
    """Which completion's prompt positions a run of scored rows belongs to."""

    completion: Completion
    positions: range


def _fed(scored: list[int]) -> list[int]:
    """The tokens to compute for scoring: nothing follows the last one, so only its own score is wanted."""
    return scored[:-1] if len(scored) > 1 else scored


class Engine:
    """Runs requests over a runtime.

    Args:
        runtime: model, homes and lanes (flexrun.runtime).
        tokenizer: for text, stop strings and token texts; None works with token ids alone.
        eos_token_ids: the model's own end tokens.
    """

    def __init__(
        self, runtime: Runtime, *, tokenizer: Tokenizer | None, eos_token_ids: Sequence[int] = ()
    ) -> None:
        self._runtime = runtime
        self._executor = runtime.executor
        self._tokenizer = tokenizer
        self._eos = frozenset(eos_token_ids)
        model_vocab = runtime.model.vocab_size
        self.vocab_size = min(model_vocab, tokenizer.vocab_size) if tokenizer is not None else model_vocab
        self._scheduler = Scheduler(
            self._executor.allocator,
            schedule=runtime.policy.schedule,
            pass_tokens=runtime.limits.pass_tokens,
            compact=runtime.plan.n_weights_slots == 0,
        )
        self._requests: dict[str, _Request] = {}
        self._finished_early: list[RequestOutput] = []
        self._failure: BaseException | None = None
        # Keys of a longer sequence turn by other frequencies (longrope); 0 for most models.
        config = getattr(runtime.model, "config", None)
        self._rope_switch_len: int = getattr(config, "rope_switch_len", 0)
        self.stats = EngineStats()

    # -- requests ----------------------------------------------------------------------------------------

    @property
    def max_model_len(self) -> int:
        """Most tokens of one sequence, prompt and answer together."""
        return self._runtime.max_model_len

    @property
    def num_waiting(self) -> int:
        """Sequences that no pass has taken up yet."""
        return self._scheduler.num_waiting

    def has_unfinished(self) -> bool:
        return bool(self._requests) or bool(self._finished_early)

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        prompt_text: str | None = None,
        *,
        score_from: int | None = None,
    ) -> None:
        """Queue a request.

        score_from: score only (nothing is generated): log-probabilities of the prompt's tokens from this
            position on; the result's prompt_logprobs has them, None before. The last token is only scored,
            never fed, so a prompt may be one token longer than max_model_len.
        Raises RequestError if the request can never run: empty or unknown tokens, too long, stop strings
        without a tokenizer, a request_id in use. RuntimeError after a failed step.
        """
        self._refuse_after_failure()
        prompt = list(prompt_token_ids)
        max_tokens = self._check(request_id, prompt, params, score_from)
        first_scored = -1
        if score_from is not None:
            first_scored = max(1, score_from)
        elif params.prompt_logprobs is not None:
            first_scored = 1
        n = 1 if score_from is not None else params.n
        request = _Request(prompt=prompt, text=prompt_text, outputs=[None] * n)
        fed = prompt if score_from is None else _fed(prompt)
        if first_scored >= 0:
            request.prompt_logprobs = []
        completions = []
        for index in range(n):
            detokenizer = None
            if self._tokenizer is not None and score_from is None:
                detokenizer = IncrementalDetokenizer(
                    self._tokenizer,
                    prompt,
                    stop=params.stop_strings,
                    include_stop=params.include_stop_str_in_output,
                    min_tokens=params.min_tokens,
                    skip_special_tokens=params.skip_special_tokens,
                )
            try:
                sampling = SamplingState(
                    params,
                    vocab_size=self.vocab_size,
                    prompt_token_ids=prompt,
                    eos_token_ids=self._eos,
                    index=index,
                )
            except ValueError as error:
                raise RequestError(str(error)) from None
            completions.append(
                Completion(
                    request_id=request_id,
                    index=index,
                    prompt=fed,
                    known=prompt,
                    params=params,
                    max_tokens=max_tokens,
                    sampling=sampling,
                    detokenizer=detokenizer,
                    score_from=first_scored if index == 0 else -1,
                )
            )
        self._requests[request_id] = request
        for completion in completions:
            self._scheduler.add(completion)

    def _check(
        self, request_id: str, prompt: list[int], params: SamplingParams, score_from: int | None
    ) -> int:
        """The number of tokens to generate; RequestError for a request that can never run."""
        if request_id in self._requests:
            raise RequestError(f"request id {request_id!r} is in use; give each request its own")
        if not prompt:
            raise RequestError("the prompt is empty; a model needs at least one token (its BOS, for example)")
        vocab = self._runtime.model.vocab_size
        bad = next((t for t in prompt if not 0 <= t < vocab), None)
        if bad is not None:
            raise RequestError(f"the prompt holds token id {bad}; this model's ids are 0 to {vocab - 1}")
        if params.stop_strings and self._tokenizer is None:
            raise RequestError(
                "stop strings need a tokenizer, and this model folder has none; use stop_token_ids"
            )
        limit = self.max_model_len
        max_tokens = 0 if score_from is not None else params.max_tokens
        if max_tokens is None:
            max_tokens = max(1, limit - len(prompt))
        fed = prompt if score_from is None else _fed(prompt)
        if len(fed) + max_tokens > limit:
            raise RequestError(
                f"the prompt's {len(prompt)} tokens and max_tokens {max_tokens} make {len(prompt) + max_tokens}; "
                f"the limit is {limit} {self._runtime.len_limit_reason}. Shorten the prompt or lower max_tokens"
            )
        longest = self._scheduler.longest_prompt
        # A sequence that outgrows the short frequencies is computed anew, as a prompt, with its answer so far.
        grown = len(fed) + (max_tokens if self._rope_switch_len else 0)
        if longest is not None and grown > longest:
            raise RequestError(
                f"the prompt's {len(fed)} tokens do not fit into a pass, which takes {longest} per gpu batch here "
                "(pass_tokens); plan for longer prompts or shorten this one"
            )
        total = len(fed) + max(max_tokens - 1, 0)
        if not self._executor.allocator.fits(total):
            raise RequestError(
                f"{total} tokens need more KV pages than a gpu batch has; raise the memory budgets, use a "
                "smaller block or a smaller cache format"
            )
        return max_tokens

    def partial_text(self, request_id: str) -> str:
        """The text of a running request's first answer that is certain so far; "" before that."""
        for completion in self._scheduler.running():
            if (
                completion.request_id == request_id
                and completion.index == 0
                and completion.detokenizer is not None
            ):
                return completion.detokenizer.text
        return ""

    def abort(self, request_id: str) -> None:
        """Drop a request, whatever its state; unknown ids are ignored. Not while a step runs."""
        if self._requests.pop(request_id, None) is not None:
            self._scheduler.remove(request_id)

    # -- a pass ------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Run one pass and return the requests that finished with it.

        Raises NumericsError for requests without usable logits, which are dropped while the others go on.
        Any other error, of a disk for example, leaves the block in an unknown state: the engine then only
        closes, and what earlier steps returned is all there is.
        """
        self._refuse_after_failure()
        if self._finished_early:
            finished, self._finished_early = self._finished_early, []
            return finished
        try:
            return self._step()
        except NumericsError:
            raise
        except BaseException as error:
            self._failure = error
            raise

    def _refuse_after_failure(self) -> None:
        if self._failure is not None:
            raise RuntimeError(
                f"this engine failed in an earlier step ({self._failure}) and cannot go on; make a new one"
            ) from self._failure

    def _step(self) -> list[RequestOutput]:
        plan = self._scheduler.next_pass()
        n_tokens = sum(step.n_tokens for steps in plan for step in steps)
        if n_tokens == 0:
            assert not self._requests, "requests are left, but none can go on"
            return []
        began = time.perf_counter()
        inputs, sampled_steps, scored, scores = self._inputs(plan)
        self._executor.run_pass(inputs, last=self._scheduler.is_last(plan))
        self._runtime.device.synchronize_compute()
        sampling_began = time.perf_counter()
        prompt_frac = self._count(plan)
        scored_up = [
            step.completion
            for steps in plan
            for step in steps
            if step.ends_prompt and step.completion.max_tokens == 0
        ]
        for steps in plan:
            for step in steps:
                step.completion.n_stored += step.n_tokens
        self._note_scores(scored, scores)
        finished: list[RequestOutput] = []
        for completion in scored_up:
            finished += self._end(completion, FINISH_LENGTH, None)
        try:
            finished += self._sample(sampled_steps)
        except NumericsError:
            self._finished_early += finished
            raise
        finally:
            ended = time.perf_counter()
            stats = self.stats
            stats.generated_tokens += len(sampled_steps)
            stats.prefill_seconds += (ended - began) * prompt_frac
            stats.decode_seconds += (ended - began) * (1 - prompt_frac)
            stats.sampling_seconds += ended - sampling_began
        return finished

    def _count(self, plan: list[list[Step]]) -> float:
        """Add a pass's tokens to the totals; the share of them that belongs to prompts."""
        tokens = {True: 0, False: 0}  # by whether they belong to a prompt
        again = 0  # of the former, those of sequences that are computed anew
        for steps in plan:
            for step in steps:
                tokens[step.in_prompt] += step.n_tokens
                again += step.n_tokens if step.in_prompt and step.completion.n_restarted else 0
        self.stats.passes += 1
        self.stats.prompt_tokens += tokens[True] - again
        return tokens[True] / (tokens[True] + tokens[False])

    def _inputs(
        self, plan: list[list[Step]]
    ) -> tuple[list[BatchInput], list[Step], list[list[_Scored]], list[ScoreRows | None]]:
        inputs: list[BatchInput] = []
        sampled_steps: list[Step] = []
        scored_of: list[list[_Scored]] = []
        scores_of: list[ScoreRows | None] = []
        for steps in plan:
            sequences: list[SequenceInput] = []
            is_score: list[bool] = []
            scored: list[_Scored] = []
            targets: list[int] = []
            first_sampled = len(sampled_steps)
            for step in steps:
                c = step.completion
                ids = c.token_ids(c.n_stored, c.n_stored + step.n_tokens)
                rows: list[int] = []
                if step.in_prompt and c.score_from >= 0 and not c.n_restarted:
                    # The row at position p tells of the token at p + 1.
                    low = max(c.score_from - 1, c.n_stored)
                    high = min(len(c.known) - 1, c.n_stored + step.n_tokens)
                    if low < high:
                        rows.extend(range(low - c.n_stored, high - c.n_stored))
                        targets.extend(c.known[low + 1 : high + 1])
                        is_score.extend([True] * (high - low))
                        scored.append(_Scored(completion=c, positions=range(low + 1, high + 1)))
                if step.samples:
                    rows.append(step.n_tokens - 1)
                    is_score.append(False)
                    sampled_steps.append(step)
                assert c.place is not None
                total = c.prefill_len if step.in_prompt else c.n_stored + 1
                sequences.append(
                    SequenceInput(
                        sequence=c.place,
                        token_ids=ids,
                        total_len=total,
                        decode=not step.in_prompt,
                        rows=rows,
                    )
                )
            num_top = max((s.completion.params.prompt_logprobs or 0 for s in scored), default=0)
            scores = None
            if targets:
                device = self._runtime.device.torch_device
                scores = ScoreRows(targets, num_top, self.vocab_size, device)
            buffer = self._runtime.logits[first_sampled : len(sampled_steps)]
            inputs.append(BatchInput(sequences=sequences, sink=BatchSink(buffer, is_score, scores)))
            scored_of.append(scored)
            scores_of.append(scores)
        return inputs, sampled_steps, scored_of, scores_of

    # -- results -----------------------------------------------------------------------------------------

    def _note_scores(self, scored_of: list[list[_Scored]], scores_of: list[ScoreRows | None]) -> None:
        for scored, scores in zip(scored_of, scores_of, strict=True):
            if scores is None:
                continue
            values, greedy, top = scores.logprobs(), scores.greedy(), scores.top()
            row = 0
            for item in scored:
                c = item.completion
                request = self._requests[c.request_id]
                assert request.prompt_logprobs is not None
                for position in item.positions:
                    request.prompt_logprobs.append(
                        self._prompt_entry(c, position, values[row], greedy[row], top[row])
                    )
                    row += 1

    def _prompt_entry(
        self, c: Completion, position: int, value: float, greedy: bool, top: tuple[list[int], list[float]]
    ) -> dict[int, Logprob]:
        token = c.known[position]
        n_top = c.params.prompt_logprobs or 0
        ids, logprobs = top[0][:n_top], top[1][:n_top]
        rank = 1 if greedy else ids.index(token) + 1 if token in ids else None
        entry = {token: Logprob(logprob=value, rank=rank, decoded_token=self._token_text(token))}
        for i, (other, logprob) in enumerate(zip(ids, logprobs, strict=True), 1):
            if other not in entry:
                entry[other] = Logprob(logprob=logprob, rank=i, decoded_token=self._token_text(other))
        return entry

    def _token_text(self, token_id: int) -> str | None:
        if self._tokenizer is None or token_id >= self.vocab_size:
            return None
        return self._tokenizer.token_text(token_id)

    def _sample(self, steps: list[Step]) -> list[RequestOutput]:
        if not steps:
            return []
        logits = self._runtime.logits[: len(steps)]
        states = [step.completion.sampling for step in steps]
        result = sample(logits, states, vocab_size=self.vocab_size)
        finished: list[RequestOutput] = []
        unusable: dict[str, int] = {}  # request -> position of the token that could not be chosen
        for step, token, logprobs, valid in zip(
            steps, result.token_ids, result.logprobs, result.valid, strict=True
        ):
            c = step.completion
            if not valid:
                unusable.setdefault(c.request_id, len(c.prompt) + len(c.tokens))
                continue
            done = self._take(c, token, logprobs)
            if done is not None:
                finished += self._end(c, *done)
            elif c.prefill_len <= self._rope_switch_len < len(c.prompt) + len(c.tokens):
                self._scheduler.restart(c)
        if unusable:
            self._drop_unusable(unusable, finished)
        return finished

    def _drop_unusable(self, unusable: dict[str, int], finished: list[RequestOutput]) -> None:
        for request_id in unusable:
            self.abort(request_id)
        self._finished_early += finished
        places = ", ".join(f"{name} at token {position}" for name, position in unusable.items())
        raise NumericsError(
            f"the model gave no usable logits (NaN, infinity, or no token possible) for request {places}; the "
            "checkpoint may be damaged, its values may overflow in "
            f"{self._executor.compute_dtype} (try --dtype float32), or logit_bias forbids every token",
            list(unusable),
        )

    def _take(
        self, c: Completion, token: int, logprobs: TokenLogprobs | None
    ) -> tuple[str, int | str | None] | None:
        """Add a sampled token; (finish reason, stop reason) if the answer ends with it."""
        c.tokens.append(token)
        c.sampling.observe(token)
        if logprobs is not None:
            c.cumulative_logprob += logprobs.logprob
            c.logprobs.append(logprobs.as_dict(self._token_text))  # type: ignore[arg-type]
        if len(c.tokens) >= c.params.min_tokens:
            if token in (c.params.stop_token_ids or ()):
                return FINISH_STOP, token
            if token in self._eos and not c.params.ignore_eos:
                return FINISH_STOP, None
        if c.detokenizer is not None:
            c.detokenizer.feed(token)
            if c.detokenizer.stopped_by is not None:
                return FINISH_STOP, c.detokenizer.stopped_by
        if len(c.tokens) >= c.max_tokens:
            return FINISH_LENGTH, None
        return None

    def _end(self, c: Completion, finish_reason: str, stop_reason: int | str | None) -> list[RequestOutput]:
        self._scheduler.finish(c)
        text = ""
        if c.detokenizer is not None:
            c.detokenizer.finish()
            if c.detokenizer.stopped_by is not None and finish_reason == FINISH_LENGTH:
                finish_reason, stop_reason = FINISH_STOP, c.detokenizer.stopped_by
            text = c.detokenizer.text
        wants = c.params.logprobs is not None
        request = self._requests[c.request_id]
        request.outputs[c.index] = CompletionOutput(
            index=c.index,
            text=text,
            token_ids=c.tokens,
            cumulative_logprob=c.cumulative_logprob if wants else None,
            logprobs=c.logprobs if wants else None,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )
        return self._collect(c.request_id)

    def _collect(self, request_id: str) -> list[RequestOutput]:
        """The request's output if all its completions have ended."""
        request = self._requests[request_id]
        if any(output is None for output in request.outputs):
            return []
        del self._requests[request_id]
        prompt_logprobs = request.prompt_logprobs
        if prompt_logprobs is not None:
            missing = len(request.prompt) - len(prompt_logprobs)
            prompt_logprobs = [*([None] * missing), *prompt_logprobs]
        return [
            RequestOutput(
                request_id=request_id,
                prompt=request.text,
                prompt_token_ids=request.prompt,
                prompt_logprobs=prompt_logprobs,
                outputs=[output for output in request.outputs if output is not None],
            )
        ]

    def close(self) -> None:
        """Let go of memory, threads and spill files."""
        self._runtime.close()
