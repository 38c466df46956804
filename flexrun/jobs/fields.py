"""Fields of one generation line: which there may be, and what their values may look like.

Sampling options themselves are checked by `SamplingParams`; this module knows the two forms of line, the web
API's other fields, and the forms of a prompt and of messages.
"""

from __future__ import annotations

from typing import Any, Literal

from flexrun.jobs.lines import LineError, json_type, refuse_unknown_fields, shortened
from flexrun.request import SamplingParams

COMPLETIONS_URL = "/v1/completions"
CHAT_URL = "/v1/chat/completions"

Endpoint = Literal["completion", "chat"]
Prompt = str | list[int]

OPTIONS = SamplingParams.option_names()
_BATCH_FIELDS = ("custom_id", "method", "url", "body")
_PLAIN_FIELDS = ("id", "custom_id", "prompt", "prompt_token_ids", "messages", "echo", "return_token_ids",
                 "chat_template_kwargs")  # fmt: skip
_BODY_FIELDS = ("model", "echo", "return_token_ids", *OPTIONS)
_COMPLETION_FIELDS = ("prompt", *_BODY_FIELDS)
_CHAT_FIELDS = ("messages", "max_completion_tokens", "top_logprobs", "chat_template_kwargs", *_BODY_FIELDS)

# Fields of the web API that mean nothing here, with the values that ask for nothing. Others are refused.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "stream_options": (),
    "suffix": ("",),
    "best_of": (1,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
_IGNORED = ("user", "metadata", "store", "service_tier")


def open_batch_line(fields: dict[str, Any]) -> tuple[Endpoint, dict[str, Any]]:
    """Endpoint and body of an OpenAI Batch line. Raises LineError."""
    refuse_unknown_fields(fields, _BATCH_FIELDS, "field of a batch line")
    for name in ("custom_id", "method", "url", "body"):
        if fields.get(name) is None:
            raise LineError(
                "missing_field", f"field {name!r} is missing; a batch line has {', '.join(_BATCH_FIELDS)}"
            )
    if not isinstance(fields["custom_id"], str):
        raise LineError("invalid_id", f"custom_id must be a string, found {json_type(fields['custom_id'])}")
    if fields["method"] != "POST":
        raise LineError("unsupported_method", f"method must be 'POST', found {shortened(fields['method'])}")
    url, body = fields["url"], fields["body"]
    if url not in (COMPLETIONS_URL, CHAT_URL):
        raise LineError(
            "unsupported_url", f"url must be {COMPLETIONS_URL!r} or {CHAT_URL!r}, found {shortened(url)}"
        )
    if not isinstance(body, dict):
        raise LineError("invalid_request", f"body must be an object, found {json_type(body)}")
    chat = url == CHAT_URL
    known = _CHAT_FIELDS if chat else _COMPLETION_FIELDS
    refuse_unknown_fields(
        {name: value for name, value in body.items() if name not in _NEUTRAL and name not in _IGNORED},
        known,
        f"option of {url}",
    )
    wanted = "messages" if chat else "prompt"
    if body.get(wanted) is None:
        raise LineError("missing_field", f"body.{wanted} is missing")
    if not isinstance(body.get("model", ""), str | None):
        raise LineError("invalid_option", f"body.model must be a string, found {json_type(body['model'])}")
    return ("chat" if chat else "completion"), body


def open_plain_line(fields: dict[str, Any]) -> tuple[Endpoint, dict[str, Any]]:
    """Endpoint and body of a plain line: its fields without the id. Raises LineError."""
    refuse_unknown_fields(fields, (*_PLAIN_FIELDS, *OPTIONS), "field or option")
    given = [name for name in ("prompt", "prompt_token_ids", "messages") if fields.get(name) is not None]
    if not given:
        raise LineError("missing_field", "field 'prompt' or 'messages' is missing")
    if len(given) > 1:
        raise LineError("invalid_request", f"give one of prompt and messages, found {' and '.join(given)}")
    body = {name: value for name, value in fields.items() if name not in ("id", "custom_id")}
    if given == ["prompt_token_ids"]:
        body["prompt"] = {"prompt_token_ids": body.pop("prompt_token_ids")}
    if given != ["messages"] and body.get("chat_template_kwargs") is not None:
        raise LineError("invalid_option", "chat_template_kwargs is for messages, not for a prompt")
    return ("chat" if given == ["messages"] else "completion"), body


def refuse_web_features(body: dict[str, Any]) -> None:
    """Raise LineError if the body asks for something of the web API that does not exist here."""
    for name, neutral in _NEUTRAL.items():
        if name in body and body[name] not in neutral:
            if name == "best_of" and body[name] == body.get("n", 1):
                continue
            raise LineError("unsupported_option", f"{name} is not supported, found {shortened(body[name])}")


def chat_options(options: dict[str, Any], body: dict[str, Any], *, plain: bool) -> None:
    """Rewrite a chat's options into SamplingParams' own, in place; a plain line may use either spelling."""
    wanted, top = options.get("logprobs"), body.get("top_logprobs")
    if not (isinstance(wanted, bool) or wanted is None or plain):
        raise LineError("invalid_option", f"logprobs must be true or false in a chat, found {wanted!r}")
    if top is not None and wanted is not True:
        raise LineError("invalid_option", f"top_logprobs needs logprobs: true, found {wanted!r}")
    if isinstance(wanted, bool):
        options["logprobs"] = (top or 0) if wanted else None
    newer = body.get("max_completion_tokens")
    if newer is not None and options.setdefault("max_tokens", newer) != newer:
        older = options["max_tokens"]
        raise LineError(
            "invalid_option",
            f"max_tokens {shortened(older)} and max_completion_tokens {shortened(newer)} differ; give one",
        )


def boolean(body: dict[str, Any], name: str) -> bool:
    """A flag of the body, false if absent."""
    value = body.get(name, False)
    if not isinstance(value, bool):
        raise LineError("invalid_option", f"{name} must be true or false, found {shortened(value)}")
    return value


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def read_prompts(value: Any) -> tuple[Prompt, ...]:
    """The prompts of one body: text, texts, token ids or lists of token ids."""
    if isinstance(value, dict) and set(value) == {"prompt_token_ids"}:
        value = value["prompt_token_ids"]
        if isinstance(value, list) and value and not all(_is_token(item) for item in value):
            raise LineError("invalid_prompt", f"prompt_token_ids must be token ids, found {shortened(value)}")
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list):
        if not value:
            raise LineError("invalid_prompt", "the prompt is empty")
        if all(isinstance(item, str) for item in value):
            return tuple(value)
        if all(_is_token(item) for item in value):
            return (value,)
        if all(isinstance(item, list) and all(_is_token(token) for token in item) for item in value):
            if not all(value):
                raise LineError("invalid_prompt", f"prompt {value.index([]) + 1} is empty")
            return tuple(value)
    raise LineError(
        "invalid_prompt",
        "prompt must be a string, a list of strings, a list of token ids (integers from 0) or a list of such"
        f" lists, found {shortened(value)}",
    )
