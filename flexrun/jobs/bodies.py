"""Bodies of results, in the web API's form: text completions and chat completions.

The fields beyond that form are vLLM's: stop_reason, prompt_logprobs, and token_ids / prompt_token_ids where
the line asks for them (return_token_ids) or the model has no tokenizer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flexrun.request import FINISH_LENGTH, CompletionOutput, Logprob, RequestOutput

if TYPE_CHECKING:
    from flexrun.jobs.generation import JobRequest, TextEncoder

LOGPROB_FLOOR = -9999.0
"""Stands for minus infinity, which JSON cannot write."""

Position = Mapping[int, Logprob] | None


def completion_body(
    request: JobRequest,
    results: Sequence[RequestOutput],
    *,
    model_name: str,
    created: int,
    tokenizer: TextEncoder | None,
) -> dict[str, Any]:
    """A "text_completion". Choice ``prompt * n + i`` is answer i of that prompt of the body."""
    choices: list[dict[str, Any]] = []
    for result in results:
        for output in sorted(result.outputs, key=lambda output: output.index):
            choices.append(_completion_choice(request, result, output, len(choices), tokenizer))
    return {
        "id": f"cmpl-{request.identity.content:016x}",
        "object": "text_completion",
        "created": created,
        "model": model_name,
        "choices": choices,
        "usage": usage(results, score_only=request.score_only),
    }


def chat_body(
    request: JobRequest,
    results: Sequence[RequestOutput],
    *,
    model_name: str,
    created: int,
    tokenizer: TextEncoder | None,
) -> dict[str, Any]:
    """A "chat.completion" with one choice per answer."""
    result = results[0]
    choices: list[dict[str, Any]] = []
    for output in sorted(result.outputs, key=lambda output: output.index):
        logprobs = None
        if output.logprobs is not None:
            logprobs = {"content": _chat_logprobs(request, output, tokenizer)}
        choice = {
            "index": len(choices),
            "message": {"role": "assistant", "content": output.text},
            "logprobs": logprobs,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        if request.return_token_ids:
            choice["token_ids"] = list(output.token_ids)
        choices.append(choice)
    body: dict[str, Any] = {
        "id": f"chatcmpl-{request.identity.content:016x}",
        "object": "chat.completion",
        "created": created,
        "model": model_name,
        "choices": choices,
        "usage": usage(results),
    }
    if result.prompt_logprobs is not None:
        body["prompt_logprobs"] = _prompt_logprobs(result.prompt_logprobs)
    if request.return_token_ids:
        body["prompt_token_ids"] = list(result.prompt_token_ids)
    return body


def usage(results: Sequence[RequestOutput], *, score_only: bool = False) -> dict[str, int]:
    """Token counts of one line: each prompt once, however many answers it has."""
    prompt = sum(len(result.prompt_token_ids) for result in results)
    generated = 0 if score_only else sum(len(o.token_ids) for result in results for o in result.outputs)
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


def _completion_choice(
    request: JobRequest,
    result: RequestOutput,
    output: CompletionOutput,
    index: int,
    tokenizer: TextEncoder | None,
) -> dict[str, Any]:
    text = "" if request.score_only else output.text
    if request.echo:
        text = _prompt_text(result, tokenizer) + text
    choice: dict[str, Any] = {
        "index": index,
        "text": text,
        "logprobs": _completion_logprobs(request, result, output, tokenizer),
        "finish_reason": FINISH_LENGTH if request.score_only else output.finish_reason,
        "stop_reason": None if request.score_only else output.stop_reason,
    }
    if result.prompt_logprobs is not None and not request.echo:
        choice["prompt_logprobs"] = _prompt_logprobs(result.prompt_logprobs)
    if request.return_token_ids or tokenizer is None:
        choice["token_ids"] = [] if request.score_only else list(output.token_ids)
        choice["prompt_token_ids"] = list(result.prompt_token_ids)
    return choice


def _prompt_text(result: RequestOutput, tokenizer: TextEncoder | None) -> str:
    if result.prompt is not None:
        return result.prompt
    return "" if tokenizer is None else tokenizer.decode(result.prompt_token_ids)


def _completion_logprobs(
    request: JobRequest, result: RequestOutput, output: CompletionOutput, tokenizer: TextEncoder | None
) -> dict[str, Any] | None:
    """Parallel lists over the text's tokens. text_offset counts characters from the start of "text"."""
    if output.logprobs is None:
        return None
    token_ids: list[int] = []
    positions: list[Position] = []
    if request.echo:
        token_ids += result.prompt_token_ids
        positions += result.prompt_logprobs or [None] * len(result.prompt_token_ids)
    if not request.score_only:
        token_ids += output.token_ids
        positions += output.logprobs
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []
    offset = 0
    for token_id, position in zip(token_ids, positions, strict=True):
        entry = None if position is None else position.get(token_id)
        token = token_string(token_id, entry, tokenizer)
        tokens.append(token)
        token_logprobs.append(None if entry is None else finite(entry.logprob))
        top_logprobs.append(
            None
            if position is None
            else {token_string(i, lp, tokenizer): finite(lp.logprob) for i, lp in position.items()}
        )
        text_offset.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": token_logprobs,
        "top_logprobs": top_logprobs,
        "text_offset": text_offset,
    }


def _chat_logprobs(
    request: JobRequest, output: CompletionOutput, tokenizer: TextEncoder | None
) -> list[dict[str, Any]]:
    wanted = request.params.logprobs or 0
    content = []
    for token_id, position in zip(output.token_ids, output.logprobs or (), strict=True):
        likeliest = sorted(position.items(), key=lambda item: -item[1].logprob)[:wanted]
        content.append(
            {
                **_chat_token(token_id, position.get(token_id), tokenizer),
                "top_logprobs": [_chat_token(i, logprob, tokenizer) for i, logprob in likeliest],
            }
        )
    return content


def _chat_token(token_id: int, entry: Logprob | None, tokenizer: TextEncoder | None) -> dict[str, Any]:
    token = token_string(token_id, entry, tokenizer)
    return {
        "token": token,
        "logprob": LOGPROB_FLOOR if entry is None else finite(entry.logprob),
        "bytes": list(token.encode("utf-8")),
    }


def _prompt_logprobs(positions: Sequence[Position]) -> list[dict[str, dict[str, Any]] | None]:
    return [
        None
        if position is None
        else {
            str(token_id): {"logprob": finite(lp.logprob), "rank": lp.rank, "decoded_token": lp.decoded_token}
            for token_id, lp in position.items()
        }
        for position in positions
    ]


def token_string(token_id: int, entry: Logprob | None, tokenizer: TextEncoder | None) -> str:
    """A token for display; "token_id:7" where no tokenizer can tell."""
    if entry is not None and entry.decoded_token is not None:
        return entry.decoded_token
    return f"token_id:{token_id}" if tokenizer is None else tokenizer.token_text(token_id)


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return logprob if math.isfinite(logprob) else LOGPROB_FLOOR
