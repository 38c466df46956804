"""Show a batch job's requests beside their answers, and what failed.

    python examples/show_results.py requests.jsonl results.jsonl [--limit N]

Reads OpenAI Batch lines and plain {"prompt": ...} or {"messages": ...} lines; a line without an id is known
by its number, as in `flexrun batch`. Uses rich for colours where it is installed.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEAD_CHARS = 60
TAIL_CHARS = 180


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of each line that holds one; a torn or blank line is passed over."""
    with open(path, encoding="utf-8", newline="\n") as handle:
        for number, line in enumerate(handle, 1):
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict):
                yield number, value


def request_id(number: int, request: dict[str, Any]) -> str:
    for field in ("custom_id", "id"):
        if request.get(field) not in (None, ""):
            return str(request[field])
    return f"line-{number}"


def request_text(request: dict[str, Any]) -> str:
    """What was asked, shortened in the middle."""
    body = request.get("body", request)
    if "messages" in body:
        said = [(message.get("role"), message.get("content")) for message in body["messages"]]
        text = said[0][1] if len(said) == 1 else "\n".join(f"{role}: {content}" for role, content in said)
    else:
        text = body.get("prompt")
    text = text if isinstance(text, str) else json.dumps(text)
    if len(text) > HEAD_CHARS + TAIL_CHARS:
        text = f"{text[:HEAD_CHARS].rstrip()} [...] {text[-TAIL_CHARS:].lstrip()}"
    return text.strip("\n").replace("\n\n", "\n")


def answers(result: dict[str, Any]) -> list[tuple[str, str]]:
    """(kind, text) of a result's choices, or of its error."""
    response = result.get("response")
    if result.get("error") or not response:
        error = result.get("error") or {}
        return [("error", str(error.get("message") or error.get("code") or "no response"))]
    body = response["body"]
    if "choices" not in body:
        return [("error", str(body.get("error") or body))]
    found = []
    for choice in body["choices"]:
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        found.append((str(choice.get("finish_reason")), text.strip()))
    return found


class Printer:
    """Prints plainly, or in colour through rich on a terminal."""

    def __init__(self) -> None:
        self.console: Any = None
        if sys.stdout.isatty():
            try:
                from rich.console import Console

                self.console = Console(highlight=False)
            except ImportError:
                pass

    def line(self, text: str, style: str = "") -> None:
        if self.console is None:
            print(text)
        else:
            self.console.print(text, style=style or None, markup=False, soft_wrap=True)

    def block(self, label: str, text: str, style: str = "") -> None:
        lead = f"  {label} "
        width = max(40, (self.console.width if self.console is not None else 110) - len(lead))
        rows = [
            row
            for line in text.split("\n")
            for row in (textwrap.wrap(line, width, replace_whitespace=False, drop_whitespace=False) or [""])
        ]
        for i, row in enumerate(rows or [""]):
            self.line((lead if i == 0 else " " * len(lead)) + row, style)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("requests", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--limit", type=int, help="show at most this many requests")
    arguments = parser.parse_args()
    try:
        requests = {request_id(number, value): value for number, value in json_lines(arguments.requests)}
        results = {str(value.get("custom_id")): value for _, value in json_lines(arguments.results)}
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    printer = Printer()
    n_done = n_failed = n_tokens = 0
    for shown, (name, request) in enumerate(requests.items()):
        result = results.get(name)
        found = answers(result) if result is not None else [("missing", "no result yet")]
        bad = found[0][0] in ("error", "missing")
        n_failed += bad
        n_done += not bad
        if not bad and result is not None:
            n_tokens += (result["response"]["body"].get("usage") or {}).get("completion_tokens", 0)
        if arguments.limit is not None and shown >= arguments.limit:
            continue
        printer.line(name, "bold cyan")
        printer.block("Q", request_text(request), "dim")
        for kind, text in found:
            cut = " [...]" if kind == "length" else ""
            printer.block("!" if bad else "A", text + cut, "red" if bad else "green")
        printer.line("")
    printer.line(f"{n_done} answered, {n_failed} failed or missing, {n_tokens} tokens generated", "bold")
    return 1 if n_failed else 0


if __name__ == "__main__":
    sys.exit(main())
