"""Lines of a job's input: cut, decoded, parsed and named, each bad one with its reason.

The input is split at "\\n" only (JSON strings may hold every other line separator), never held whole, and one
absurdly long line costs no memory beyond the limit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from flexrun.jobs.ids import IdTable, hash64
from flexrun.request import unknown_option

MAX_LINE_BYTES = 64 << 20
_BOM = b"\xef\xbb\xbf"
_SKIP_CHUNK_BYTES = 1 << 20


class LineError(ValueError):
    """One line cannot become a request. ``code`` is a short name for programs, the message is for people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class RawLine:
    """One non-blank line. ``data`` has neither newline nor BOM; it is empty where the line is too long.

    end_offset: bytes of the input read when this line ended; size_bytes: the line's own size.
    """

    number: int
    data: bytes
    end_offset: int
    size_bytes: int
    too_long: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LineIdentity:
    """What names a line in the output: its id, its number and a hash of its bytes.

    derived: the id comes from the line's number, because the line has none (or none that can be used).
    """

    custom_id: str
    number: int
    content: int
    derived: bool


def read_lines(stream: BinaryIO, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[RawLine]:
    """Non-blank lines of `stream` with their numbers, counted from 1; blank lines are counted too."""
    number = offset = 0
    while data := stream.readline(max_line_bytes + 1):
        number += 1
        size = len(data)
        too_long = size > max_line_bytes and not data.endswith(b"\n")
        if too_long:
            while rest := stream.readline(_SKIP_CHUNK_BYTES):
                size += len(rest)
                if rest.endswith(b"\n"):
                    break
            data = b""
        offset += size
        if number == 1:
            data = data.removeprefix(_BOM)
        data = data.strip(b" \t\r\n")
        if data or too_long:
            yield RawLine(number=number, data=data, end_offset=offset, size_bytes=size, too_long=too_long)


def _refuse_constant(name: str) -> Any:
    raise LineError("invalid_json", f"not valid JSON: {name} is not a JSON number")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def parse_object(line: RawLine, max_line_bytes: int = MAX_LINE_BYTES) -> dict[str, Any]:
    """The JSON object of a line.

    Raises:
        LineError: too long, not UTF-8, not JSON, or not an object.
    """
    if line.too_long:
        raise LineError(
            "line_too_long", f"the line has {line.size_bytes} bytes, the limit is {max_line_bytes}"
        )
    try:
        text = line.data.decode("utf-8")
    except UnicodeDecodeError as error:
        utf16 = line.data.startswith((b"\xff\xfe", b"\xfe\xff"))
        hint = "; the file looks like UTF-16, convert it to UTF-8" if utf16 else ""
        raise LineError(
            "invalid_json", f"not valid UTF-8: {error.reason} at byte {error.start + 1} of the line{hint}"
        ) from None
    try:
        value = _DECODER.decode(text)
        if "\\u" in text:  # an escape may be half of a surrogate pair, which no text can hold
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except LineError:
        raise
    except json.JSONDecodeError as error:
        raise LineError("invalid_json", f"not valid JSON: {error.msg} at character {error.pos + 1}") from None
    except UnicodeEncodeError:
        raise LineError(
            "invalid_json", "not valid Unicode: a \\u escape is half of a surrogate pair"
        ) from None
    except RecursionError:
        raise LineError("invalid_json", "not valid JSON here: nested too deeply") from None
    except ValueError as error:  # an integer of thousands of digits
        raise LineError("invalid_json", f"not valid JSON here: {error}") from None
    if not isinstance(value, dict):
        raise LineError("invalid_json", f"a line must be a JSON object, found {json_type(value)}")
    return value


def json_type(value: Any) -> str:
    """What a JSON value is called in a message."""
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def shortened(value: Any, limit: int = 80) -> str:
    """`value` for a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def refuse_unknown_fields(fields: dict[str, Any], known: Sequence[str], what: str) -> None:
    """Raise LineError for the first name that is not in `known`, with the nearest ones."""
    for name in fields:
        if name not in known:
            raise LineError("unknown_option", unknown_option(name, known, what))


def own_id(fields: dict[str, Any]) -> str | None:
    """The id that a line gives itself: "custom_id", or "id" (text or an integer) in a plain line.

    Raises:
        LineError: an id of another type, an empty one, or two that differ.
    """
    found: list[str] = []
    for name in ("custom_id", "id"):
        value = fields.get(name)
        if value is None:
            continue
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if not isinstance(value, str) or not value:
            raise LineError("invalid_id", f"{name} must be a non-empty string, found {shortened(value)}")
        found.append(value)
    if len(found) == 2 and found[0] != found[1]:
        raise LineError(
            "invalid_id", f"custom_id {shortened(found[0])} and id {shortened(found[1])} differ; give one"
        )
    return found[0] if found else None


def identify(line: RawLine, custom_id: str | None, ids: IdTable) -> tuple[LineIdentity, bool]:
    """The identity of a line, and whether an earlier line of this input has taken its id.

    A line without an id, and one whose id is taken, is named after its number ("line-17"), so that
    every line has exactly one name in the output.
    """
    content = hash64(line.data)
    if custom_id is not None and ids.mark_seen(custom_id):
        return LineIdentity(custom_id=custom_id, number=line.number, content=content, derived=False), False
    name = f"line-{line.number}"
    attempt = 1
    while not ids.mark_seen(name):  # an earlier line bears this very name
        attempt += 1
        name = f"line-{line.number}-{attempt}"
    return (
        LineIdentity(custom_id=name, number=line.number, content=content, derived=True),
        custom_id is not None,
    )
