"""What the runner needs from the outside: an engine, and a job kind that knows its lines and results.

`flexrun.jobs.generation` is the kind for completions and chats, `flexrun.jobs.scoring` the one for
log-likelihoods. Another kind of job is another class with the three methods of `JobKind`; reading ahead,
resuming, duplicate ids and whole output lines come with the runner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from flexrun.jobs.lines import LineIdentity
from flexrun.request import RequestOutput, SamplingParams

R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePrompt:
    """One prompt of a line, ready for the engine. ``text`` is None if the line gave token ids.

    score_from: nothing is generated, the tokens from this position on are scored.
    """

    token_ids: list[int]
    params: SamplingParams
    text: str | None = None
    score_from: int | None = None


class JobEngine(Protocol):
    """The part of an engine that a job drives (flexrun.engine.Engine has it)."""

    @property
    def num_waiting(self) -> int:
        """Requests that no pass has taken up yet."""
        ...

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        prompt_text: str | None = None,
        *,
        score_from: int | None = None,
    ) -> None:
        """Queue a request. ValueError if it can never run (too long, unknown token ids)."""
        ...

    def step(self) -> list[RequestOutput]:
        """Run one pass; the requests that it finished."""
        ...

    def has_unfinished(self) -> bool: ...

    def abort(self, request_id: str) -> None: ...


def add_prompt(engine: JobEngine, request_id: str, prompt: EnginePrompt) -> None:
    """Queue one prompt, for generation or for scoring. Raises ValueError if it can never run."""
    if prompt.score_from is None:
        engine.add_request(request_id, prompt.token_ids, prompt.params, prompt.text)
    else:
        engine.add_request(
            request_id, prompt.token_ids, prompt.params, prompt.text, score_from=prompt.score_from
        )


class JobKind(Protocol[R]):
    """Meaning of a line and of its results.

    ``name`` goes into the manifest: outputs of different kinds are never mixed.
    """

    @property
    def name(self) -> str: ...

    def parse(self, fields: dict[str, Any], identity: LineIdentity) -> R:
        """A request from a line's JSON object. Raises LineError."""
        ...

    def prompts(self, request: R) -> Sequence[EnginePrompt]:
        """The request's prompts as token ids, at least one. Raises ValueError if they cannot be made."""
        ...

    def body(self, request: R, results: Sequence[RequestOutput]) -> dict[str, Any]:
        """The result's body, from one finished output per prompt, in the order of `prompts`."""
        ...


class OpenAnswers(Generic[R]):
    """A job kind that tells of the first answer without a limit of its own, before it can run.

    Such an answer may go on to the longest sequence that the run admits, so that its result depends on that.
    """

    def __init__(self, kind: JobKind[R], on_first: Callable[[], None]) -> None:
        self._kind = kind
        self._on_first: Callable[[], None] | None = on_first

    @property
    def name(self) -> str:
        return self._kind.name

    def parse(self, fields: dict[str, Any], identity: LineIdentity) -> R:
        """See `JobKind`."""
        return self._kind.parse(fields, identity)

    def prompts(self, request: R) -> Sequence[EnginePrompt]:
        """See `JobKind`."""
        found = self._kind.prompts(request)
        if self._on_first and any(p.score_from is None and p.params.max_tokens is None for p in found):
            tell, self._on_first = self._on_first, None
            tell()
        return found

    def body(self, request: R, results: Sequence[RequestOutput]) -> dict[str, Any]:
        """See `JobKind`."""
        return self._kind.body(request, results)
