"""``flexrun batch``: a file of requests through the model, results appended as they finish."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import stat
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from flexrun.cli.exits import EXIT_INTERRUPTED, EXIT_OK, EXIT_SOME_FAILED, UsageError
from flexrun.cli.flags import (
    add_model_flags,
    add_policy_flags,
    add_sampling_flags,
    sampling_options,
    whole_number,
)
from flexrun.cli.interrupts import StopRequest
from flexrun.cli.session import load_llm, requested_settings, resolve, resolved_dtype
from flexrun.jobs.generation import GenerationJob
from flexrun.jobs.ids import IdTable
from flexrun.jobs.manifest import check_settings, write_manifest
from flexrun.jobs.output import JobOutput, RecordSink, StreamSink
from flexrun.jobs.runner import MAX_WAITING, JobProgress, JobRunner, JobSummary
from flexrun.report import ProgressDisplay, print_table, summary_rows
from flexrun.request import SamplingParams

if TYPE_CHECKING:
    from flexrun.llm import LLM

DESCRIPTION = """\
Reads JSON lines: OpenAI Batch requests for /v1/completions and /v1/chat/completions, or plain
{"prompt": ...} and {"messages": [...]} lines with an optional "id" and any sampling option.
Writes one OpenAI Batch result line per request, in the order in which they finish.

Started again with the same command it does only what is left. A bad line gets an error record
with its line number; the others go on. OUTPUT.manifest.json remembers the settings that results
depend on, and results of other settings are never mixed in; budgets and placement may change.
Requests are recognised by their id, lines without one by their line number."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "batch",
        help="run a file of requests",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "-i", "--input", required=True, metavar="FILE", help="JSON lines; - is standard input"
    )
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="results; - is standard output")
    parser.add_argument("--overwrite", action="store_true", help="start again, dropping earlier results")
    parser.add_argument(
        "--retry-failed", action="store_true", help="run requests again that have error records"
    )
    parser.add_argument("--limit", type=whole_number(0), metavar="N", help="only the first N requests")
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object")
    add_model_flags(parser)
    add_sampling_flags(parser, title="sampling, where a request says nothing else")
    add_policy_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Check everything that can be checked, load the model, run the job."""
    _check_usage(args)
    options = sampling_options(args)
    SamplingParams.from_dict(options)
    with contextlib.ExitStack() as stack:
        model = resolve(args)
        stream, size_bytes = _open_input(args.input, stack)
        output, sink = _open_output(args, stack)
        settings = {**requested_settings(args, model), "sampling": options}
        if output is not None and not args.overwrite:
            check_settings(output, GenerationJob.name, settings)
        settings["dtype"] = resolved_dtype(args)
        if output is not None and not args.overwrite:
            check_settings(output, GenerationJob.name, settings)
        llm = load_llm(args)
        stack.callback(llm.close)
        ids = _begin(output, settings, args) if output is not None else IdTable()
        summary = _run_job(llm, args, options, stream, sink, ids, size_bytes)
    _report(summary, args)
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


def _begin(output: JobOutput, settings: dict[str, Any], args: argparse.Namespace) -> IdTable:
    """Fit the file to this run: empty it, or note what it holds."""
    if args.overwrite:
        output.truncate()
    write_manifest(output, GenerationJob.name, settings)
    ids = IdTable()
    output.recover(ids, retry_failed=args.retry_failed)
    return ids


def _run_job(
    llm: LLM,
    args: argparse.Namespace,
    options: dict[str, Any],
    stream: BinaryIO,
    sink: RecordSink,
    ids: IdTable,
    size_bytes: int | None,
) -> JobSummary:
    from flexrun.chat import encode_chat

    engine = llm.engine
    kind = GenerationJob(
        model_name=str(args.model),
        tokenizer=llm.tokenizer,
        encode_chat=partial(encode_chat, llm.tokenizer, llm.chat_template),
        defaults=options,
        seed=args.seed,
    )
    with StopRequest() as should_stop, ProgressDisplay() as display:

        def on_progress(progress: JobProgress) -> None:
            display.update(progress, engine.stats.generated_tokens)

        runner = JobRunner(
            engine,
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
        return runner.run()


def _report(summary: JobSummary, args: argparse.Namespace) -> None:
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
    if args.json:
        print(json.dumps(summary.to_dict()), flush=True)
