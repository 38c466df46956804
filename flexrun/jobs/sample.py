"""What a job's input file holds, from a bounded sample of its lines: for the planner, before anything runs.

A short file is read whole; of a long one, lines at evenly spaced places count, so that a file sorted by length is
seen as it is. Prompts are cut into tokens as the job will do it.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from flexrun.jobs.kinds import EnginePrompt, JobKind
from flexrun.jobs.lines import LineError, LineIdentity, parse_object, read_lines
from policy.workload import LengthCounts, Workload

SAMPLED_LINES = 384
SAMPLED_BYTES = 8 << 20
LONGEST_LINE_BYTES = 1 << 20
COUNTED_BYTES = 1 << 30
"""So much of a file is read to find the end of its first lines."""
PARTS = 16
"""A sampled line stands for so many parts of a line, at the least."""
OPEN_ANSWER_TOKENS = 512
"""Tokens that an answer without a limit is planned with."""

R = TypeVar("R")
_IDENTITY = LineIdentity(custom_id="sample", number=1, content=0, derived=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSample:
    """workload: of the lines that can run. n_lines: read for it; whole: these are all lines there are.

    n_open: sampled answers without a limit of tokens, planned with OPEN_ANSWER_TOKENS.
    """

    workload: Workload
    n_lines: int
    whole: bool
    n_open: int

    def describe(self) -> str:
        """In words, for the plan."""
        read = "all lines" if self.whole else f"{self.n_lines} sampled lines"
        text = f"{self.workload.describe()}, from {read}"
        if self.n_open:
            text += f"; answers without max_tokens planned with {OPEN_ANSWER_TOKENS} tokens"
        return text


def sample_input(
    path: Path,
    kind: JobKind[R],
    *,
    limit: int | None = None,
    n_done: int = 0,
    max_tokens: int | None = None,
) -> InputSample | None:
    """Lengths of a file's requests; None if no line of the sample can run.

    limit: only so many lines of the file count; n_done: so many have been run before. max_tokens: of one sequence;
    longer requests will be refused and do not count. Raises OSError if the file cannot be read.
    """
    end, counted = path.stat().st_size, False
    with path.open("rb") as stream:
        lines, whole = _head(stream, limit)
        if not whole:
            if limit is not None:
                end, counted = _end_of_lines(stream, limit, end)
            lines = list(_spread(stream, end))
    counts = LengthCounts()
    n_open = 0
    for line, stands_for in lines:
        try:
            prompts = kind.prompts(kind.parse(_fields(line), _IDENTITY))
        except (ValueError, KeyError, TypeError, AttributeError):
            continue  # the job itself says what is wrong with it
        for prompt in prompts:
            n_open += _count(prompt, counts, max_tokens, stands_for)
    if not len(counts):
        return None
    parts = 1 if whole else PARTS
    n_lines = sum(stands_for for _, stands_for in lines) / parts
    taken = limit if limit is not None and counted else min(n_lines, limit or n_lines)
    requests = max(1, round(len(counts) / parts * (taken / n_lines) * max(0.0, 1 - n_done / max(taken, 1))))
    workload = counts.workload(requests)
    assert workload is not None
    return InputSample(workload=workload, n_lines=len(lines), whole=whole, n_open=n_open)


def _count(prompt: EnginePrompt, counts: LengthCounts, max_tokens: int | None, stands_for: int) -> int:
    """Add a prompt's answers, as often as its line stands for; how many of them have no limit."""
    n = len(prompt.token_ids)
    if prompt.score_from is not None:
        if n and (max_tokens is None or n - 1 <= max_tokens):
            counts.add(max(1, n - 1), 0, stands_for)
        return 0
    answers, wanted = prompt.params.n, prompt.params.max_tokens
    gen = OPEN_ANSWER_TOKENS if wanted is None else wanted
    if wanted is None and max_tokens is not None:
        gen = max(1, min(gen, max_tokens - n))
    if n and (max_tokens is None or n + gen <= max_tokens):
        counts.add(n, gen, answers * stands_for)
        return answers if wanted is None else 0
    return 0


def _fields(line: bytes) -> dict[str, Any]:
    """A line as the job reads it. LineError for what the job refuses, and for a byte order mark by itself."""
    for raw in read_lines(io.BytesIO(line)):
        return parse_object(raw)
    raise LineError("invalid_json", "nothing but a byte order mark")


def _head(stream: BinaryIO, limit: int | None) -> tuple[list[tuple[bytes, int]], bool]:
    """The first lines, each standing for itself, and whether these are all that count."""
    lines: list[tuple[bytes, int]] = []
    n_bytes = 0
    while len(lines) < SAMPLED_LINES and n_bytes < SAMPLED_BYTES:
        if limit is not None and len(lines) >= limit:
            return lines, True
        line = stream.readline(LONGEST_LINE_BYTES + 1)
        if not line:
            return lines, True
        n_bytes += len(line)
        if len(line) > LONGEST_LINE_BYTES:
            return lines, False
        if line.strip():
            lines.append((line, 1))
    return lines, not stream.read(1)


def _spread(stream: BinaryIO, size: int) -> Iterator[tuple[bytes, int]]:
    """Lines that hold evenly spaced bytes of the file, and how many lines each stands for, in parts of one.

    A line is met as often as it is long, so it stands for as many of its length as fit between two places.
    """
    gap = size / SAMPLED_LINES
    n_bytes = past = 0
    for i in range(SAMPLED_LINES):
        place = int((i + 0.5) * gap)
        if place < past:
            continue  # in the line before
        start = _line_start(stream, place)
        if start is None:
            continue
        stream.seek(start)
        line = stream.readline(LONGEST_LINE_BYTES + 1)
        past = start + len(line)
        n_bytes += len(line)
        if len(line) <= LONGEST_LINE_BYTES and line.strip():
            yield line, max(PARTS, round(PARTS * gap / len(line)))
        if n_bytes > SAMPLED_BYTES:
            return


def _end_of_lines(stream: BinaryIO, n: int, size: int) -> tuple[int, bool]:
    """Where the file's first n lines end, and whether they were counted; beyond COUNTED_BYTES by their mean length."""
    stream.seek(0)
    n_bytes = seen = 0
    while n_bytes < COUNTED_BYTES:
        chunk = stream.read(1 << 20)
        if not chunk:
            return size, False
        found = chunk.count(b"\n")
        if seen + found >= n:
            return n_bytes + len(chunk) - len(chunk.split(b"\n", n - seen)[-1]), True
        seen += found
        n_bytes += len(chunk)
    return (min(size, n_bytes * n // seen) if seen else size), False


def _line_start(stream: BinaryIO, place: int) -> int | None:
    """Where the line begins that holds the byte at `place`, None for one of absurd length."""
    back = 1 << 12
    while True:
        begin = max(0, place - back)
        stream.seek(begin)
        before = stream.read(place - begin).rfind(b"\n")
        if before >= 0:
            return begin + before + 1
        if begin == 0:
            return 0
        if back > LONGEST_LINE_BYTES:
            return None
        back *= 4


def rough_encode(text: str) -> list[int]:
    """As many token ids as a text may have: one for about four bytes. For models that have no tokenizer here."""
    return [0] * max(1, len(text.encode()) // 4)


def rough_encode_chat(messages: Sequence[Mapping[str, Any]], **variables: Any) -> tuple[str, list[int]]:
    """The same of a conversation, with a few tokens around each message."""
    text = "".join(str(message["content"]) for message in messages)
    return text, rough_encode(text) + [0] * (4 * len(messages))
