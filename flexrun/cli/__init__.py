"""The command line: one module per subcommand, each with ``add_parser(subparsers)`` and ``run(args) -> int``.

A new subcommand is a new module and a line in `COMMANDS`. Only the chosen command's module is imported, and
modules import torch, and what imports it, inside `run` only: ``flexrun --help`` answers at once. Logs,
progress and errors go to standard error.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import signal
import sys
from collections.abc import Collection, Sequence
from typing import Any

from flexrun import __version__
from flexrun.cli.exits import (
    EXIT_CODES,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_REFUSED,
    explain,
    is_refusal,
)

COMMANDS = {
    "batch": "run a file of requests",
    "score": "log-likelihoods of a file of texts",
    "eval": "accuracy on questions with known answers",
    "lm-eval": "run lm-evaluation-harness",
    "helm": "run HELM scenarios",
    "generate": "answer one prompt",
    "info": "describe a model",
    "pack": "convert a model's weights once",
    "plan": "find the best placement",
    "profile": "measure this machine",
    "bench": "measure a run beside its bound",
}
"""Module name (its dashes are underscores there) -> the line that ``flexrun --help`` shows."""


def build_parser(chosen: Collection[str] = tuple(COMMANDS)) -> argparse.ArgumentParser:
    """The parser, complete for the `chosen` commands; ``args.run`` is the function of the one given."""
    parser = argparse.ArgumentParser(
        prog="flexrun",
        description="Runs language models that do not fit the GPU, in large batches, on one machine.",
        epilog=f"exit status: {EXIT_CODES}. FLEXRUN_DEBUG=1 shows the traceback of an error.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"flexrun {__version__}")
    subparsers = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for name, text in COMMANDS.items():
        if name in chosen:
            importlib.import_module(f"flexrun.cli.{name.replace('-', '_')}").add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=text)
    return parser


class _StderrHandler(logging.StreamHandler[Any]):
    """Writes to what sys.stderr is now: the live progress display puts itself in between."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def _set_up_logging(verbose: bool) -> None:
    handler = _StderrHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO if verbose else logging.WARNING)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status (see `EXIT_CODES`)."""
    argv = list(sys.argv[1:] if argv is None else argv)
    # The command is the first word: nothing before it takes a value.
    parser = build_parser([word for word in argv if not word.startswith("-")][:1])
    args, rest = parser.parse_known_args(argv)
    if rest and not getattr(args, "takes_rest", False):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    args.rest = rest
    _set_up_logging(getattr(args, "verbose", False))
    try:
        status = int(args.run(args))
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("flexrun: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our standard output is gone; keep the interpreter from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception as error:
        if os.environ.get("FLEXRUN_DEBUG", "") not in ("", "0"):
            raise
        print(f"flexrun: {explain(error)}", file=sys.stderr)
        return EXIT_REFUSED if is_refusal(error) else EXIT_FAILED
