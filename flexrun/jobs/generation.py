"""The job kind behind ``flexrun batch``: lines that ask for completions or chat answers.

Two forms of line, which may be mixed in one file:

- OpenAI Batch: {"custom_id", "method": "POST", "url": "/v1/completions" or "/v1/chat/completions", "body"}.
- plain: {"prompt": ...} or {"messages": [...]}, with "id" or "custom_id" and any sampling option beside it.

A prompt is text, a list of texts, a list of token ids or a list of such lists. Options of the line win
over the job's, the job's over the API's defaults (max_tokens is 16 for completions and the model's limit for
chats).
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from flexrun.jobs.bodies import chat_body, completion_body
from flexrun.jobs.fields import (
    OPTIONS,
    Endpoint,
    Prompt,
    boolean,
    chat_options,
    open_batch_line,
    open_plain_line,
    read_prompts,
    refuse_web_features,
)
from flexrun.jobs.ids import hash64
from flexrun.jobs.kinds import EnginePrompt
from flexrun.jobs.lines import LineError, LineIdentity, json_type
from flexrun.request import RequestOutput, SamplingParams


class TextEncoder(Protocol):
    """The part of flexrun.tokenizer.Tokenizer that a job uses."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def token_text(self, token_id: int) -> str: ...


logger = logging.getLogger(__name__)

_MAX_KNOWN_PARAMS = 64
_MAX_KNOWN_CHARS = 4096

EncodeChat = Callable[..., tuple[str, list[int]]]
"""(messages, **chat_template_kwargs) -> the prompt as text and as token ids (flexrun.chat.encode_chat)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """One line, checked. A chat has `messages` (which the chat template checks) and no prompts.

    own_seed: the line or the job gave the seed that is in `params`; otherwise it was derived.
    score_only: max_tokens 0 with echo: only the prompt's log-probabilities are wanted.
    """

    identity: LineIdentity
    endpoint: Endpoint
    params: SamplingParams
    prompts: tuple[Prompt, ...] = ()
    messages: Any = None
    template_kwargs: Mapping[str, Any] | None = None
    echo: bool = False
    score_only: bool = False
    return_token_ids: bool = False
    own_seed: bool = True


def derived_seed(job_seed: int, custom_id: str, prompt_index: int = 0) -> int:
    """The seed of a request that has none: from the job's seed and the request's id alone.

    A resumed job, or one with its lines in another order, so draws the same tokens.
    """
    return hash64(f"{job_seed}\0{prompt_index}\0{custom_id}".encode()) >> 1


class GenerationJob:
    """Completions and chats.

    Args:
        model_name: what results name as their model.
        tokenizer: None for a model that takes and gives token ids only.
        encode: token ids of a prompt's text, where not the tokenizer's.
        encode_chat: None for a model that cannot chat.
        defaults: sampling options of the job, as SamplingParams takes them.
        seed: the job's seed, see `derived_seed`.
    """

    name = "batch"

    def __init__(
        self,
        *,
        model_name: str,
        tokenizer: TextEncoder | None = None,
        encode: Callable[[str], list[int]] | None = None,
        encode_chat: EncodeChat | None = None,
        defaults: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        self._model_name = model_name
        self._tokenizer = tokenizer
        self._encode = tokenizer.encode if encode is None and tokenizer is not None else encode
        self._encode_chat = encode_chat
        self._defaults = {name: value for name, value in (defaults or {}).items() if value is not None}
        self._seed = seed
        self._warned_of_length = False
        self._known_params: dict[str, SamplingParams] = {}
        SamplingParams.from_dict(self._defaults)  # a bad default is the job's error, not each line's

    def parse(self, fields: dict[str, Any], identity: LineIdentity) -> JobRequest:
        """See `JobKind`. LineError names the field, what was found and what is valid."""
        if any(name in fields for name in ("method", "url", "body")):
            endpoint, body = open_batch_line(fields)
        else:
            endpoint, body = open_plain_line(fields)
        body = {name: value for name, value in body.items() if value is not None}
        refuse_web_features(body)
        options = {name: body[name] for name in OPTIONS if name in body}
        if endpoint == "chat":
            chat_options(options, body, plain="body" not in fields)
        options = self._with_defaults(options, endpoint)
        echo = boolean(body, "echo")
        score_only = echo and endpoint == "completion" and options.get("max_tokens") == 0
        if score_only:
            options["max_tokens"] = 1  # unused: nothing is sampled
        if echo:
            if endpoint == "chat":
                raise LineError("invalid_option", "echo is for prompts, not for messages")
            options.setdefault("prompt_logprobs", options.get("logprobs"))
        own_seed = options.get("seed") not in (None, -1)
        if not own_seed and options.get("temperature") != 0:
            options["seed"] = derived_seed(self._seed, identity.custom_id)
        common: dict[str, Any] = {
            "identity": identity,
            "endpoint": endpoint,
            "params": self._params(options),
            "echo": echo,
            "score_only": score_only,
            "return_token_ids": boolean(body, "return_token_ids"),
            "own_seed": own_seed,
        }
        if endpoint == "chat":
            kwargs = body.get("chat_template_kwargs", {})
            if not isinstance(kwargs, dict):
                raise LineError(
                    "invalid_option", f"chat_template_kwargs must be an object, found {json_type(kwargs)}"
                )
            for name in ("messages", "tokenizer", "template"):
                if name in kwargs:
                    raise LineError("invalid_option", f"chat_template_kwargs cannot hold {name!r}")
            return JobRequest(**common, messages=body["messages"], template_kwargs=kwargs)
        return JobRequest(**common, prompts=read_prompts(body["prompt"]))

    def _params(self, options: dict[str, Any]) -> SamplingParams:
        """Checked options. Most lines of a job have the same ones, and checking takes longer than reading."""
        key = json.dumps(options, sort_keys=True)
        params = self._known_params.get(key)
        if params is None:
            try:
                params = SamplingParams(**options)
            except ValueError as error:
                raise LineError("invalid_option", str(error)) from None
            if len(self._known_params) >= _MAX_KNOWN_PARAMS:
                self._known_params.clear()
            if len(key) <= _MAX_KNOWN_CHARS:
                self._known_params[key] = params
        return params

    def _with_defaults(self, options: dict[str, Any], endpoint: Endpoint) -> dict[str, Any]:
        merged = {**self._defaults, **options}
        if endpoint == "chat" and "max_tokens" not in merged:
            merged["max_tokens"] = None
            if not self._warned_of_length:
                self._warned_of_length = True
                logger.warning(
                    "chats without max_tokens may be as long as the model allows, and each takes cache memory for"
                    " that; --max-tokens sets a limit, so that more of them run at once"
                )
        return merged

    def prompts(self, request: JobRequest) -> list[EnginePrompt]:
        """See `JobKind`."""
        if request.messages is not None:
            if self._encode_chat is None:
                raise LineError("no_chat_template", "this model cannot chat: give a prompt, not messages")
            text, ids = self._encode_chat(request.messages, **(request.template_kwargs or {}))
            return [EnginePrompt(token_ids=ids, params=request.params, text=text)]
        return [self._prompt(request, index, prompt) for index, prompt in enumerate(request.prompts)]

    def _prompt(self, request: JobRequest, index: int, prompt: Prompt) -> EnginePrompt:
        params = request.params
        if index > 0 and not request.own_seed and params.seed is not None:
            # Neighbours of one line draw differently, as separate lines would.
            params = replace(params, seed=derived_seed(self._seed, request.identity.custom_id, index))
        text: str | None = None
        if not isinstance(prompt, str):
            ids = prompt
        elif self._encode is None:
            raise LineError("no_tokenizer", "this model has no tokenizer: give the prompt as token ids")
        else:
            ids, text = self._encode(prompt), prompt
        score_from = None
        if request.score_only:
            score_from = 1 if params.prompt_logprobs is not None else len(ids)
        return EnginePrompt(token_ids=ids, params=params, text=text, score_from=score_from)

    def body(self, request: JobRequest, results: Sequence[RequestOutput]) -> dict[str, Any]:
        """See `JobKind`."""
        make = chat_body if request.endpoint == "chat" else completion_body
        return make(
            request,
            results,
            model_name=self._model_name,
            created=int(time.time()),
            tokenizer=self._tokenizer,
        )
