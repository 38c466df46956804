"""HELM's requests on the engine, one or thousands in a call.

Each request keeps its own settings. Log-probabilities are the model's; completions come with their tokens, cut
exactly at stop sequences; echo_prompt with max_tokens 0 scores the prompt. Results go into HELM's cache as they
land, so that a run that was killed goes on, and one that is repeated loads no model.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from helm.clients.client import CachingClient
from helm.common.cache import CacheConfig, cache_stats, create_key_value_store, write_to_key_value_store
from helm.common.hierarchical_logger import hlog
from helm.common.request import ErrorFlags, GeneratedOutput, Request, RequestResult, Token
from helm.proxy.retry import NonRetriableException

from flexrun.evaluate.helm_engine import cache_settings, engine_for, engine_lock
from flexrun.evaluate.pieces import fitted, token_pieces
from flexrun.jobs.bodies import finite
from flexrun.jobs.ids import hash64
from flexrun.jobs.kinds import EnginePrompt
from flexrun.llm import LLM
from flexrun.request import FINISH_LENGTH, RequestOutput, SamplingParams
from flexrun.scoring import run_prompts
from flexrun.tokenizer import Tokenizer

_PERMANENT = ErrorFlags(is_retriable=False)


class FlexrunClient(CachingClient):
    """Args: cache_config: HELM's; flags: the model's flags, as of flexrun's commands."""

    def __init__(self, cache_config: CacheConfig, flags: Sequence[str]) -> None:
        super().__init__(cache_config=cache_config)
        self._flags = tuple(flags)
        self._settings: dict[str, Any] | None = None
        self._n_jobs = 0

    def make_request(self, request: Request) -> RequestResult:
        """One request; the batched runner hands over many."""
        return self.make_requests([request])[0]

    def make_requests(self, requests: Sequence[Request]) -> list[RequestResult]:
        """All requests in one engine job, in order; those in HELM's cache are not computed.

        A request that cannot run gives a result with its error, which HELM does not try again.
        """
        results: list[RequestResult | None] = [None] * len(requests)
        config = self.cache.config
        path = config.cache_stats_key
        todo: list[int] = []
        with engine_lock(), create_key_value_store(config) as store:
            keys = [self._key(request) for request in requests]
            for i, key in enumerate(keys):
                cache_stats.increment_query(path)
                response = store.get(key)
                if response is None:
                    todo.append(i)
                else:
                    results[i] = _result(response, cached=True)
            began, n_passes = time.time(), 0
            if todo:
                llm = self._engine()
                self._n_jobs += 1
                before = llm.engine.stats.passes
                work = self._work(llm, requests, todo, results)
                for i, outputs in run_prompts(llm.engine, work, name=f"helm-{self._n_jobs}"):
                    response = {
                        "completions": _completions(llm, requests[i], outputs),
                        "request_time": time.time() - began,
                        "request_datetime": int(began),
                    }
                    cache_stats.increment_compute(path)
                    write_to_key_value_store(store, keys[i], response)
                    results[i] = _result(response, cached=False)
                n_passes = llm.engine.stats.passes - before
        hlog(f"flexrun: {len(requests)} requests, {len(todo)} computed in {n_passes} passes")
        return [result if result is not None else _refusal("no result") for result in results]

    def _engine(self) -> LLM:
        """The model; what keeps it from being loaded is not going to change by asking again."""
        try:
            return engine_for(self._flags)
        except (ValueError, OSError) as error:
            raise NonRetriableException(f"flexrun cannot load the model: {error}") from error

    def _work(
        self, llm: LLM, requests: Sequence[Request], todo: Sequence[int], results: list[RequestResult | None]
    ) -> Any:
        """(index, prompts) of what the engine takes; the others get their error at once."""
        for i in todo:
            try:
                prompt = _prompt(llm, requests[i])
                if prompt is not None:
                    n_more = prompt.params.max_tokens or 0 if prompt.score_from is None else -1
                    if len(prompt.token_ids) + n_more > llm.max_model_len:
                        raise ValueError(
                            f"{len(prompt.token_ids)} prompt tokens and max_tokens {requests[i].max_tokens} are beyond"
                            f" the limit of {llm.max_model_len} tokens"
                        )
            except ValueError as error:
                results[i] = _refusal(str(error))
            else:
                yield i, [] if prompt is None else [prompt]

    def _key(self, request: Request) -> dict[str, Any]:
        if self._settings is None:
            self._settings = cache_settings(self._flags)
        raw: dict[str, Any] = {
            "engine": "flexrun",
            "settings": self._settings,
            "prompt": request.prompt,
            "messages": request.messages,
            "embedding": request.embedding,
            "multimodal": request.multimodal_prompt is not None,
            "temperature": request.temperature,
            "num_completions": request.num_completions,
            "max_tokens": request.max_tokens,
            "stop_sequences": list(request.stop_sequences),
            "echo_prompt": request.echo_prompt,
            "top_p": request.top_p,
            "presence_penalty": request.presence_penalty,
            "frequency_penalty": request.frequency_penalty,
        }
        return dict(CachingClient.make_cache_key(raw, request))


def _prompt(llm: LLM, request: Request) -> EnginePrompt | None:
    """The engine's request; None if there is nothing to compute. Raises ValueError."""
    if request.embedding or request.multimodal_prompt is not None or request.image_generation_parameters:
        raise ValueError("flexrun answers texts: no embeddings, no images, no multimodal prompts")
    if request.messages:
        ids, text = llm.encode_chat(request.messages)
    else:
        text = request.prompt
        assert llm.tokenizer is not None
        ids = llm.tokenizer.encode(text)
    if not ids:
        ids = [llm.scorer.start_token_id]
    scores = 0 if request.echo_prompt else None
    if request.max_tokens == 0:
        if not request.echo_prompt:
            return None
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, logprobs=0)
        return EnginePrompt(token_ids=ids, params=params, text=text, score_from=1)
    seed = None
    if request.temperature:
        # The same request draws the same; `random` asks for another draw.
        seed = hash64(f"{request.random or ''}\0{text}".encode()) >> 1
    params = SamplingParams(
        n=request.num_completions,
        temperature=request.temperature,
        top_p=request.top_p,
        max_tokens=request.max_tokens,
        stop=list(request.stop_sequences),
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logprobs=0,
        prompt_logprobs=scores,
        seed=seed,
    )
    return EnginePrompt(token_ids=ids, params=params, text=text)


def _completions(llm: LLM, request: Request, outputs: Sequence[RequestOutput]) -> list[dict[str, Any]]:
    """What HELM's cache keeps of each completion."""
    if not outputs:
        empty = {"text": "", "tokens": [], "logprobs": [], "finish_reason": FINISH_LENGTH}
        return [empty] * request.num_completions
    (output,) = outputs
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    before = _echoed(tokenizer, output) if request.echo_prompt else ("", [], [])
    found = []
    for answer in sorted(output.outputs, key=lambda answer: answer.index):
        text, tokens, logprobs = "", [], []
        if answer.token_ids:
            text = answer.text
            tokens = fitted(token_pieces(tokenizer, answer.token_ids), text)
            positions = answer.logprobs or []
            logprobs = [
                finite(position[token_id].logprob)
                for token_id, position in zip(answer.token_ids, positions, strict=False)
            ][: len(tokens)]
        found.append(
            {
                "text": before[0] + text,
                "tokens": [*before[1], *tokens],
                "logprobs": [*before[2], *logprobs],
                "finish_reason": answer.finish_reason,
            }
        )
    return found if request.max_tokens else found * request.num_completions


def _echoed(tokenizer: Tokenizer, output: RequestOutput) -> tuple[str, list[str], list[float]]:
    """The prompt's text, tokens and log-probabilities; the first token has nothing before it: 0, as in HELM."""
    ids = output.prompt_token_ids
    skip = 1 if tokenizer.adds_bos and ids[:1] == [tokenizer.bos_token_id] and len(ids) > 1 else 0
    tokens = token_pieces(tokenizer, ids[skip:], skip_special_tokens=False)
    positions = output.prompt_logprobs or [None] * len(ids)
    logprobs = [
        0.0 if position is None else finite(position[token_id].logprob)
        for token_id, position in zip(ids[skip:], positions[skip:], strict=True)
    ]
    return output.prompt or "", tokens, logprobs


def _result(response: dict[str, Any], *, cached: bool) -> RequestResult:
    completions = [
        GeneratedOutput(
            text=found["text"],
            logprob=sum(found["logprobs"]),
            tokens=[
                Token(text=text, logprob=logprob)
                for text, logprob in zip(found["tokens"], found["logprobs"], strict=True)
            ],
            finish_reason={"reason": found["finish_reason"]},
        )
        for found in response["completions"]
    ]
    return RequestResult(
        success=True,
        cached=cached,
        request_time=response["request_time"],
        request_datetime=response["request_datetime"],
        completions=completions,
        embedding=[],
    )


def _refusal(message: str) -> RequestResult:
    return RequestResult(
        success=False,
        cached=False,
        error=f"flexrun: {message}",
        error_flags=_PERMANENT,
        completions=[],
        embedding=[],
    )
