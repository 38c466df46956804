"""Exit statuses, and errors in one sentence."""

from __future__ import annotations

import json

from flexrun.jobs.output import OutputRefusedError

EXIT_OK = 0
EXIT_SOME_FAILED = 1
EXIT_REFUSED = 2
EXIT_FAILED = 3
EXIT_INTERRUPTED = 130

EXIT_CODES = (
    "0 all requests succeeded, 1 some failed (their records say why), 2 usage, bad input or refused before"
    " running, 3 failed while running (finished results stay), 130 interrupted (finished results stay)"
)


class UsageError(ValueError):
    """The command line asks for something that does not go together."""


def is_refusal(error: BaseException) -> bool:
    """True for what the user can put right: a bad value, a missing file or package."""
    if isinstance(error, json.JSONDecodeError | UnicodeError):
        return False
    return isinstance(
        error, ValueError | FileNotFoundError | PermissionError | ImportError | OutputRefusedError
    )


def explain(error: BaseException) -> str:
    """One message for people, without a traceback."""
    text = str(error)
    if isinstance(error, MemoryError):
        return f"out of memory{': ' + text if text else ''}; give smaller budgets or a smaller batch"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, OSError):
        return error.strerror or text or type(error).__name__
    if isinstance(error, ValueError | ImportError) and is_refusal(error) and text:
        return text
    detail = f": {text}" if text else ""
    return f"{type(error).__name__}{detail} (FLEXRUN_DEBUG=1 shows where)"
