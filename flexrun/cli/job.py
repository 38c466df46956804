"""What commands that run a file of requests have in common: files, settings, resuming, the closing table."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import stat
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from flexrun.cli.exits import EXIT_INTERRUPTED, EXIT_OK, EXIT_SOME_FAILED, UsageError
from flexrun.cli.flags import whole_number
from flexrun.cli.interrupts import StopRequest
from flexrun.cli.session import requested_settings, resolve, resolved_dtype
from flexrun.jobs.ids import IdTable
from flexrun.jobs.kinds import JobKind, OpenAnswers
from flexrun.jobs.manifest import check_settings, earlier_settings, write_manifest
from flexrun.jobs.output import JobOutput, RecordSink, StreamSink
from flexrun.jobs.runner import MAX_WAITING, JobProgress, JobRunner, JobSummary
from flexrun.report import ProgressDisplay, print_audit, print_table, summary_rows

if TYPE_CHECKING:
    from flexrun.llm import LLM
    from policy.workload import Workload

RESUMING = """\
Started again with the same command it does only what is left. A bad line gets an error record
with its line number; the others go on. OUTPUT.manifest.json remembers the settings that results
depend on, and results of other settings are never mixed in; budgets and placement may change.
Requests are recognised by their id, lines without one by their line number."""


LENGTH = "max_model_len"
"""Setting: the longest sequence that the run admits, where results depend on it."""


def add_job_flags(parser: argparse.ArgumentParser, *, what: str = "requests") -> None:
    """-i, -o, --overwrite, --retry-failed, --limit, --json."""
    parser.add_argument(
        "-i", "--input", required=True, metavar="FILE", help="JSON lines; - is standard input"
    )
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="results; - is standard output")
    add_run_flags(parser, what=what)


def add_run_flags(parser: argparse.ArgumentParser, *, what: str = "requests") -> None:
    """The job's flags without those of its files."""
    parser.add_argument("--overwrite", action="store_true", help="start again, dropping earlier results")
    parser.add_argument(
        "--retry-failed", action="store_true", help=f"run {what} again that have error records"
    )
    parser.add_argument("--limit", type=whole_number(0), metavar="N", help=f"only the first N {what}")
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object")


def run_job_command(
    args: argparse.Namespace,
    *,
    name: str,
    settings: Mapping[str, Any],
    make_kind: Callable[[LLM], JobKind[Any]],
    load: Callable[..., LLM],
    prepare: Callable[[argparse.Namespace], dict[str, Any]] | None = None,
    scoring: bool = False,
    windows: bool = False,
) -> JobSummary:
    """Check everything that can be checked, load the model, run the job.

    name: the job's kind, for the manifest; settings: what results depend on besides the model's flags.
    prepare: looks at the input before anything else, may settle flags, and returns what `load` is told besides
        (its "workload" is what the plan is made for). scoring: progress counts the prompts' tokens, since none are
        generated. windows: results depend on the longest sequence that the run admits, as those of answers without
        a limit do in any job.
    """
    _check_usage(args)
    with contextlib.ExitStack() as stack:
        model = resolve(args)
        stream, size_bytes = _open_input(args.input, stack)
        output, sink = _open_output(args, stack)
        more = prepare(args) if prepare is not None else {}
        settings = {**requested_settings(args, model), **settings}
        resumed = output is not None and not args.overwrite
        earlier = earlier_settings(output.path) if output is not None and resumed else {}
        if output is not None and resumed:
            check_settings(output, name, settings)
        settings["dtype"] = resolved_dtype(args)
        counts = LENGTH not in settings and (windows or LENGTH in earlier)
        asked = args.max_model_len
        if output is not None and resumed:
            # Known before the model is loaded: sequences never get longer than what was asked for.
            too_short = counts and asked is not None and earlier.get(LENGTH) and asked < earlier[LENGTH]
            check_settings(output, name, {**settings, LENGTH: asked} if too_short else settings)
        llm = load(args, **more)
        stack.callback(llm.close)
        if counts:
            settings[LENGTH] = llm.max_model_len
            if output is not None and resumed:
                check_settings(output, name, settings)
        ids = _begin(output, name, settings, args) if output is not None else IdTable()
        kind, planned = make_kind(llm), more.get("workload")
        if output is not None and LENGTH not in settings:
            kind = _noting_length(kind, llm, output, name, settings)
        return _run(llm, kind, args, stream, sink, ids, size_bytes, scoring=scoring, planned=planned)


def _noting_length(
    kind: JobKind[Any], llm: LLM, output: JobOutput, name: str, settings: Mapping[str, Any]
) -> JobKind[Any]:
    """The kind, such that the manifest gets the longest sequence before the first answer that depends on it."""

    def note() -> None:
        write_manifest(output, name, {**settings, LENGTH: llm.max_model_len})

    return OpenAnswers(kind, note)


def finish_job(
    summary: JobSummary, args: argparse.Namespace, *, result: Mapping[str, Any] | None = None
) -> int:
    """Tell how a job went; the exit status. result: more for --json."""
    if summary.orphaned:
        print(
            f"note: {summary.orphaned} results in {args.output} belong to no line of {args.input}; they stay",
            file=sys.stderr,
        )
    if summary.changed:
        print(
            f"note: {summary.changed} lines of {args.input} have changed since their results were written; the"
            " results stay (--overwrite makes all of them anew)",
            file=sys.stderr,
        )
    if summary.interrupted:
        print("interrupted: the same command goes on from here", file=sys.stderr)
    print_table(summary_rows(summary))
    if summary.audit is not None and (summary.succeeded or summary.failed):
        print_audit(summary.audit)
    if args.json:
        print(json.dumps({**summary.to_dict(), **(result or {})}), flush=True)
    if summary.interrupted:
        return EXIT_INTERRUPTED
    return EXIT_SOME_FAILED if summary.failed or summary.resumed_failed else EXIT_OK


def _check_usage(args: argparse.Namespace) -> None:
    if args.json and args.output == "-":
        raise UsageError("--json and -o - both write to standard output; give the results a file")
    if args.overwrite and args.retry_failed:
        raise UsageError("--overwrite runs everything again; leave --retry-failed out")
    source, target = Path(args.input), Path(args.output)
    files = "-" not in (args.input, args.output) and source.is_file() and target.is_file()
    if files and source.samefile(target):
        raise UsageError(f"input and output are the same file {source}; give another output")


def _open_input(name: str, stack: contextlib.ExitStack) -> tuple[BinaryIO, int | None]:
    if name == "-":
        return sys.stdin.buffer, None
    try:
        stream = Path(name).open("rb")  # noqa: SIM115  (the stack closes it)
    except OSError as error:
        raise UsageError(f"cannot open the input {name}: {error.strerror}") from None
    stack.callback(stream.close)
    info = os.fstat(stream.fileno())
    return stream, info.st_size if stat.S_ISREG(info.st_mode) else None


def _open_output(
    args: argparse.Namespace, stack: contextlib.ExitStack
) -> tuple[JobOutput | None, RecordSink]:
    """The locked output file and its sink; no file for standard output, pipes and devices."""
    if args.output == "-":
        sys.stdout.flush()
        return None, StreamSink(sys.stdout.fileno(), "standard output")
    path = Path(args.output)
    if path.exists() and not path.is_file() and not path.is_dir():
        descriptor = os.open(path, os.O_WRONLY)
        stack.callback(os.close, descriptor)
        return None, StreamSink(descriptor, str(path))
    output = stack.enter_context(JobOutput(path))
    return output, output


def _begin(output: JobOutput, name: str, settings: dict[str, Any], args: argparse.Namespace) -> IdTable:
    """Fit the file to this run: empty it, or note what it holds."""
    if args.overwrite:
        output.truncate()
    write_manifest(output, name, settings)
    ids = IdTable()
    output.recover(ids, retry_failed=args.retry_failed)
    return ids


def _run(
    llm: LLM,
    kind: JobKind[Any],
    args: argparse.Namespace,
    stream: BinaryIO,
    sink: RecordSink,
    ids: IdTable,
    size_bytes: int | None,
    *,
    scoring: bool,
    planned: Workload | None = None,
) -> JobSummary:
    from flexrun.audit import MeteredEngine, audit_run

    engine = llm.engine
    # Something that answers like an LLM need not have a runtime; then there is nothing to audit.
    meter = MeteredEngine(llm) if getattr(llm, "runtime", None) is not None else None
    unit = "tokens/s" if scoring else "generated tokens/s"
    with StopRequest() as should_stop, ProgressDisplay(rate_name=unit) as display:

        def on_progress(progress: JobProgress) -> None:
            stats = engine.stats
            display.update(progress, stats.prompt_tokens if scoring else stats.generated_tokens)

        runner = JobRunner(
            engine if meter is None else meter,
            kind,
            stream,
            sink,
            ids=ids,
            limit=args.limit,
            size_bytes=size_bytes,
            max_waiting=max(MAX_WAITING, 2 * llm.policy.block_size),
            should_stop=should_stop,
            on_progress=on_progress,
        )
        summary = runner.run()
    return summary if meter is None else replace(summary, audit=audit_run(llm, meter, planned))
