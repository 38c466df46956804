"""Runs a job: lines of the input through an engine into whole lines of the output.

The runner reads ahead only as far as the engine needs (a window bounded by number and by bytes), so memory
does not depend on the number of lines; it writes each result in the pass that finishes it. Lines that are
done already are skipped by their id; a line that cannot become a request gets its error record and nothing
else changes.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Generic

from flexrun.jobs.ids import IdTable
from flexrun.jobs.kinds import JobEngine, JobKind, R, add_prompt
from flexrun.jobs.lines import (
    LineError,
    LineIdentity,
    RawLine,
    identify,
    own_id,
    parse_object,
    read_lines,
)
from flexrun.jobs.output import OutputError, RecordSink, error_record, success_record
from flexrun.report import peak_rss_bytes
from flexrun.request import NumericsError, RequestOutput

logger = logging.getLogger(__name__)

MAX_WAITING = 1024
MAX_OPEN_BYTES = 256 << 20
_LINES_PER_FILL = 4096
_BYTES_PER_TOKEN = 40  # a list's pointer and a small int object


class InputChangedError(ValueError):
    """A line that is named after its number is not the line that its result was made from."""


@dataclass(slots=True, kw_only=True)
class JobProgress:
    """Counts of a job, kept up to date while it runs.

    n_read: lines taken from the input, resumed ones included. n_lines_estimated: None if the input's size is
    unknown. prompt_tokens and generated_tokens are those of finished requests of this run.
    """

    n_read: int = 0
    n_succeeded: int = 0
    n_failed: int = 0
    n_resumed: int = 0
    n_resumed_failed: int = 0
    n_open: int = 0
    n_lines_estimated: int | None = None
    prompt_tokens: int = 0
    generated_tokens: int = 0
    seconds: float = 0.0
    interrupted: bool = False

    @property
    def n_finished(self) -> int:
        """Lines with a result written in this run."""
        return self.n_succeeded + self.n_failed


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSummary:
    """What a job did. ``requests`` = succeeded + failed + resumed, unless it was interrupted.

    resumed: lines whose result was there already, resumed_failed of them as error records.
    orphaned: earlier results whose ids are in no line (0 unless the whole input was read).
    changed: resumed lines whose text differs from the one that their result was made from.
    wall_seconds leaves loading the model out. audit: the run beside its plan (flexrun.audit), if it was metered.
    """

    requests: int
    succeeded: int
    failed: int
    resumed: int
    resumed_failed: int
    orphaned: int
    changed: int
    prompt_tokens: int
    generated_tokens: int
    wall_seconds: float
    peak_rss_bytes: int
    interrupted: bool
    audit: dict[str, Any] | None = None

    @property
    def generated_tokens_per_s(self) -> float:
        return self.generated_tokens / self.wall_seconds if self.wall_seconds > 0 else 0.0

    @property
    def total_tokens_per_s(self) -> float:
        tokens = self.prompt_tokens + self.generated_tokens
        return tokens / self.wall_seconds if self.wall_seconds > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        found: dict[str, Any] = {
            "requests": self.requests,
            "succeeded": self.succeeded,
            "failed": self.failed,
            "resumed": self.resumed,
            "resumed_failed": self.resumed_failed,
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": self.generated_tokens,
            "wall_seconds": self.wall_seconds,
            "generated_tokens_per_s": self.generated_tokens_per_s,
            "total_tokens_per_s": self.total_tokens_per_s,
            "peak_rss_bytes": self.peak_rss_bytes,
            "interrupted": self.interrupted,
        }
        return found if self.audit is None else {**found, "audit": self.audit}


@dataclass(slots=True, kw_only=True)
class _Open(Generic[R]):
    """A line in the engine: its request and the outputs of its prompts so far."""

    identity: LineIdentity
    request: R
    cost_bytes: int
    results: list[RequestOutput | None] = field(default_factory=list)
    n_missing: int = 0


class JobRunner(Generic[R]):
    """One run of one job.

    Args:
        engine: does the work; must have no requests of others.
        kind: what lines and results mean.
        stream: the input, binary.
        sink: takes the records.
        ids: results of earlier runs (`JobOutput.recover`); the runner adds what it sees.
        limit: take only so many lines, those already done included.
        size_bytes: the input's size if known, for the estimate of time left.
        max_waiting: requests kept waiting in the engine; at least one block, so that every free slot is
            refilled at once.
        max_open_bytes: most memory for lines and token ids in flight (at least one line runs anyway).
        should_stop: asked after each pass; True ends the run, with everything finished written.
        on_progress: called after each pass.
    """

    def __init__(
        self,
        engine: JobEngine,
        kind: JobKind[R],
        stream: BinaryIO,
        sink: RecordSink,
        *,
        ids: IdTable | None = None,
        limit: int | None = None,
        size_bytes: int | None = None,
        max_waiting: int = MAX_WAITING,
        max_open_bytes: int = MAX_OPEN_BYTES,
        should_stop: Callable[[], bool] = lambda: False,
        on_progress: Callable[[JobProgress], None] = lambda progress: None,
    ) -> None:
        if limit is not None and limit < 0:
            raise ValueError(f"limit must be at least 0, got {limit}")
        if max_waiting < 1 or max_open_bytes < 1:
            raise ValueError(
                f"max_waiting and max_open_bytes must be at least 1, got {max_waiting} and {max_open_bytes}"
            )
        self._engine, self._kind, self._sink = engine, kind, sink
        self._ids = IdTable() if ids is None else ids
        self._limit = limit
        self._size_bytes = size_bytes
        self._max_waiting, self._max_open_bytes = max_waiting, max_open_bytes
        self._should_stop, self._on_progress = should_stop, on_progress
        self._lines: Iterator[RawLine] = read_lines(stream)
        self._exhausted = limit == 0
        self._read_all = False
        self._open: dict[str, tuple[_Open[R], int]] = {}
        self._open_bytes = 0
        self._n_changed = 0
        self.progress = JobProgress()

    def run(self) -> JobSummary:
        """Run to the end of the input, or until asked to stop.

        Raises:
            OutputError: the output cannot be written; what was written is whole.
            InputChangedError: the input's lines have moved since an earlier run.
            Exception: whatever the engine raised. Results finished before are written in every case.
        """
        started = time.monotonic()
        progress = self.progress
        try:
            while not progress.interrupted:
                self._fill()
                if self._engine.has_unfinished():
                    try:
                        self._write_finished(self._engine.step())
                    except NumericsError as error:
                        self._fail_running(error)
                elif self._exhausted:
                    break
                progress.seconds = time.monotonic() - started
                self._on_progress(progress)
                progress.interrupted = self._should_stop()
        except BaseException:
            with contextlib.suppress(OutputError):  # the first failure is the one to report
                self._sink.sync()
            raise
        finally:
            progress.seconds = time.monotonic() - started
        self._sink.sync()
        return self._summary()

    def _summary(self) -> JobSummary:
        progress = self.progress
        return JobSummary(
            requests=progress.n_read,
            succeeded=progress.n_succeeded,
            failed=progress.n_failed,
            resumed=progress.n_resumed,
            resumed_failed=progress.n_resumed_failed,
            orphaned=self._ids.n_done - progress.n_resumed if self._read_all else 0,
            changed=self._n_changed,
            prompt_tokens=progress.prompt_tokens,
            generated_tokens=progress.generated_tokens,
            wall_seconds=progress.seconds,
            peak_rss_bytes=peak_rss_bytes(),
            interrupted=progress.interrupted,
        )

    # -- input ---------------------------------------------------------------------------------------------

    def _wants_more(self) -> bool:
        if not self._open:
            return True
        return self._engine.num_waiting < self._max_waiting and self._open_bytes < self._max_open_bytes

    def _fill(self) -> None:
        """Take lines until the engine has enough waiting. Bounded, so that running requests go on."""
        for _ in range(_LINES_PER_FILL):
            if self._exhausted or not self._wants_more():
                return
            line = next(self._lines, None)
            if line is None:
                self._exhausted = self._read_all = True
                self.progress.n_lines_estimated = self.progress.n_read
                return
            self.progress.n_read += 1
            self._take(line)
            if self.progress.n_read == self._limit:
                self._exhausted = True
                self.progress.n_lines_estimated = self.progress.n_read
            elif self._size_bytes is not None:
                estimated = max(self._size_bytes * self.progress.n_read // line.end_offset, 1)
                self.progress.n_lines_estimated = min(estimated, self._limit or estimated)

    def _take(self, line: RawLine) -> None:
        """Skip a line that is done, start its requests, or write its error record."""
        fields: dict[str, Any] = {}
        custom_id = None
        problem: LineError | None = None
        try:
            fields = parse_object(line)
            custom_id = own_id(fields)
        except LineError as error:
            problem = error
        identity, duplicate = identify(line, custom_id, self._ids)
        if duplicate:
            problem = LineError("duplicate_custom_id", f"custom_id {custom_id!r} is taken by an earlier line")
        if self._is_done(identity):
            return
        try:
            if problem is not None:
                raise problem
            self._start(identity, fields, line.size_bytes)
        except ValueError as error:  # LineError, or the engine's or tokenizer's refusal of this request
            self._fail(identity, error)

    def _is_done(self, identity: LineIdentity) -> bool:
        content = self._ids.done_content(identity.custom_id)
        if content is None:
            return False
        if content != identity.content:
            if identity.derived:
                failed = self._ids.is_failed(identity.custom_id)
                remedy = "--retry-failed removes error records, " if failed else ""
                raise InputChangedError(
                    f"line {identity.number} of the input is not the line that the"
                    f" {'error record' if failed else 'result'} {identity.custom_id!r} was made from: lines"
                    " without an id are known by their place, which must not change between runs."
                    f" {remedy or 'Give the lines ids, or '}--overwrite starts again"
                )
            self._n_changed += 1
            if self._n_changed == 1:
                logger.warning(
                    "line %d (%r) has changed since its result was written; the result stays",
                    identity.number,
                    identity.custom_id,
                )
        self.progress.n_resumed += 1
        self.progress.n_resumed_failed += self._ids.is_failed(identity.custom_id)
        return True

    def _start(self, identity: LineIdentity, fields: dict[str, Any], size_bytes: int) -> None:
        """Give a line's prompts to the engine, all or none."""
        request = self._kind.parse(fields, identity)
        prompts = self._kind.prompts(request)
        opened: _Open[R] = _Open(
            identity=identity,
            request=request,
            cost_bytes=size_bytes + sum(_BYTES_PER_TOKEN * len(prompt.token_ids) for prompt in prompts),
            results=[None] * len(prompts),
            n_missing=len(prompts),
        )
        started: list[str] = []
        try:
            for index, prompt in enumerate(prompts):
                if not prompt.token_ids:
                    raise LineError("invalid_prompt", _which(index, prompts, "the prompt has no tokens"))
                request_id = f"{identity.number}.{index}"
                try:
                    add_prompt(self._engine, request_id, prompt)
                except ValueError as error:
                    raise LineError("invalid_request", _which(index, prompts, str(error))) from None
                finally:
                    started.append(request_id)  # also after a refusal: the engine may have noted a part of it
        except ValueError:
            for request_id in started:
                self._engine.abort(request_id)
            raise
        for index, request_id in enumerate(started):
            self._open[request_id] = (opened, index)
        self._open_bytes += opened.cost_bytes
        self.progress.n_open += 1

    # -- output --------------------------------------------------------------------------------------------

    def _fail(self, identity: LineIdentity, error: ValueError) -> None:
        code = error.code if isinstance(error, LineError) else "invalid_request"
        self._sink.append(error_record(identity, code, str(error)))
        self.progress.n_failed += 1

    def _fail_running(self, error: NumericsError) -> None:
        """Error records for lines whose requests the engine had to drop; the others go on."""
        for request_id in error.request_ids:
            found = self._open.pop(request_id, None)
            if found is None:
                continue
            opened = found[0]
            for other in [name for name, (line, _) in self._open.items() if line is opened]:
                self._engine.abort(other)  # one prompt without a result leaves the line without one
                del self._open[other]
            self.progress.n_open -= 1
            self._open_bytes -= opened.cost_bytes
            self._fail(opened.identity, LineError("no_usable_logits", str(error)))

    def _write_finished(self, outputs: list[RequestOutput]) -> None:
        """Write what a pass finished; one result that cannot be written does not keep the others back."""
        failure: Exception | None = None
        for output in outputs:
            try:
                self._finish(output)
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _finish(self, output: RequestOutput) -> None:
        found = self._open.pop(output.request_id, None)
        if found is None:  # of a line refused after this prompt had been queued
            return
        opened, index = found
        opened.results[index] = output
        opened.n_missing -= 1
        if opened.n_missing:
            return
        self.progress.n_open -= 1
        self._open_bytes -= opened.cost_bytes
        results = [result for result in opened.results if result is not None]
        self._sink.append(success_record(opened.identity, self._kind.body(opened.request, results)))
        self.progress.n_succeeded += 1
        self.progress.prompt_tokens += sum(len(result.prompt_token_ids) for result in results)
        self.progress.generated_tokens += sum(len(o.token_ids) for result in results for o in result.outputs)


def _which(index: int, prompts: Any, message: str) -> str:
    """`message`, naming the prompt where a line has several."""
    return message if len(prompts) == 1 else f"prompt {index + 1} of {len(prompts)}: {message}"


def run_job(
    engine: JobEngine, kind: JobKind[R], stream: BinaryIO, sink: RecordSink, **options: Any
) -> JobSummary:
    """Run one job to its end; `options` are those of `JobRunner`."""
    return JobRunner(engine, kind, stream, sink, **options).run()
