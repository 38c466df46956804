"""The job kind behind ``flexrun score``: lines whose texts are scored, not continued.

Three forms of line, which may be mixed in one file:

- {"context": ..., "continuation": ...}: the continuation given the context, which may be empty or left out.
- {"text": ...}: the whole text, in windows of the model's length if it is longer.
- an OpenAI Batch line for /v1/completions with echo true, logprobs and max_tokens 0 (prompt scoring); its
  result is that of ``flexrun batch``.

Each text is a string or a list of token ids; "id" or "custom_id" names the line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flexrun.jobs.bodies import finite
from flexrun.jobs.generation import GenerationJob, JobRequest, TextEncoder
from flexrun.jobs.kinds import EnginePrompt
from flexrun.jobs.lines import LineError, LineIdentity, json_type, refuse_unknown_fields
from flexrun.request import RequestOutput
from flexrun.scoring import Scorer, ScoreWindow, TextOrIds, score_of

_FIELDS = ("id", "custom_id", "context", "continuation", "text")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """One line of ours: its windows, and the UTF-8 bytes of what is scored (None for token ids)."""

    windows: list[ScoreWindow]
    n_bytes: int | None


class ScoreJob:
    """Log-likelihoods.

    Args:
        scorer: makes windows for the model.
        model_name: what results name as their model.
        tokenizer: for the tokens' texts in /v1/completions results; None for a model without.
    """

    name = "score"

    def __init__(self, scorer: Scorer, *, model_name: str, tokenizer: TextEncoder | None = None) -> None:
        self._scorer = scorer
        self._model_name = model_name
        self._completions = GenerationJob(model_name=model_name, tokenizer=tokenizer)

    def parse(self, fields: dict[str, Any], identity: LineIdentity) -> ScoreRequest | JobRequest:
        """See `JobKind`. LineError names the field, RequestError what cannot be scored."""
        if any(name in fields for name in ("method", "url", "body")):
            request = self._completions.parse(fields, identity)
            if not request.score_only:
                raise LineError(
                    "invalid_request",
                    "only /v1/completions lines with echo true and max_tokens 0 are scored; 'flexrun batch'"
                    " runs the others",
                )
            return request
        refuse_unknown_fields(fields, _FIELDS, "field of a line to score")
        text, continuation = _given(fields, "text"), _given(fields, "continuation")
        if (text is None) == (continuation is None):
            found = "both" if text is not None else "neither"
            raise LineError("missing_field", f"a line has context and continuation, or text; found {found}")
        if text is not None:
            if fields.get("context") is not None:
                raise LineError("invalid_request", "context goes with continuation, not with text")
            return ScoreRequest(windows=self._scorer.text(text), n_bytes=_n_bytes(text))
        assert continuation is not None
        context = _given(fields, "context")
        if context is None:
            context = "" if isinstance(continuation, str) else []
        return ScoreRequest(
            windows=[self._scorer.pair(context, continuation)], n_bytes=_n_bytes(continuation)
        )

    def prompts(self, request: ScoreRequest | JobRequest) -> list[EnginePrompt]:
        """See `JobKind`."""
        if isinstance(request, JobRequest):
            return self._completions.prompts(request)
        return [window.prompt() for window in request.windows]

    def body(self, request: ScoreRequest | JobRequest, results: Sequence[RequestOutput]) -> dict[str, Any]:
        """See `JobKind`: log-probabilities are natural, num_bytes is null for token ids."""
        if isinstance(request, JobRequest):
            return self._completions.body(request, results)
        score = score_of(request.windows, results)
        n_tokens = sum(len(result.prompt_token_ids) for result in results)
        return {
            "object": "score",
            "model": self._model_name,
            "logprob": finite(score.logprob),
            "is_greedy": score.is_greedy,
            "num_tokens": len(score.token_ids),
            "num_bytes": request.n_bytes,
            "token_ids": score.token_ids,
            "token_logprobs": [finite(logprob) for logprob in score.logprobs],
            "usage": {"prompt_tokens": n_tokens, "completion_tokens": 0, "total_tokens": n_tokens},
        }


def _given(fields: dict[str, Any], name: str) -> TextOrIds | None:
    """A text or a list of token ids; None if the field is missing or null."""
    value = fields.get(name)
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and all(
        isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in value
    ):
        return value
    what = json_type(value) + (" of other things" if isinstance(value, list) else "")
    raise LineError("invalid_prompt", f"{name} must be a string or a list of token ids, found {what}")


def _n_bytes(value: TextOrIds) -> int | None:
    return len(value.encode()) if isinstance(value, str) else None
