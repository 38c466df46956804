"""``flexrun eval``: questions with known answers, accuracy with its interval."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexrun.cli.exits import UsageError
from flexrun.cli.flags import add_model_flags, add_policy_flags, whole_number
from flexrun.cli.job import RESUMING, add_run_flags, finish_job, run_job_command
from flexrun.cli.session import load_llm
from flexrun.report import print_table

if TYPE_CHECKING:
    from flexrun.evaluate.questions import Accuracy, EvalJob, PromptStyle, Question, Tally
    from flexrun.llm import LLM

DESCRIPTION = f"""\
Asks the questions of a JSON lines file and counts right answers. A line has "question" and "answer";
with "choices" (a list of texts) it is a multiple choice, whose answer is an index from 0, a letter or
the text of a choice, and the choice that the model finds likeliest counts. Without, the model's own
words up to the end of the line count, compared without case and outer punctuation, and answer may be a
list of texts that are all right. "category" groups questions in the report; "id" names them.

{RESUMING}"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "eval",
        help="accuracy on questions with known answers",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    parser.add_argument("input", metavar="FILE", help="questions, JSON lines")
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="results per question (default: FILE's name with .results.jsonl, here)",
    )
    add_run_flags(parser, what="questions")
    group = parser.add_argument_group("prompts")
    group.add_argument("--shots", metavar="FILE", help="answered questions to show before each one")
    group.add_argument("--num-shots", type=whole_number(0), metavar="N", help="only the first N of them")
    group.add_argument(
        "--template",
        metavar="TEXT",
        help="text around {question} (default: 'Question: {question}\\nAnswer:')",
    )
    group.add_argument(
        "--letters", action="store_true", help="list the choices in the prompt and score their letters"
    )
    group.add_argument("--chat", action="store_true", help="ask through the model's chat template")
    group.add_argument(
        "--max-tokens", type=whole_number(1), default=32, metavar="N", help="of a free answer (default: 32)"
    )
    add_model_flags(parser)
    add_policy_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Ask, count, report."""
    from flexrun.evaluate.questions import DEFAULT_TEMPLATE, PromptStyle

    if args.input == "-" or args.output == "-":
        raise UsageError("eval reads its results again to count them: give files, not -")
    if args.output is None:
        args.output = f"{Path(args.input).stem}.results.jsonl"
    template = args.template.replace("\\n", "\n") if args.template is not None else DEFAULT_TEMPLATE
    shots, digest = _read_shots(args)
    style = PromptStyle(template=template, letters=args.letters, shots=shots)

    def make_kind(llm: LLM) -> EvalJob:
        return _make_kind(llm, style, args)

    settings = {
        "template": template,
        "letters": args.letters,
        "chat": args.chat,
        "shots": digest,
        "max_tokens": args.max_tokens,
        "max_model_len": args.max_model_len,
    }
    summary = run_job_command(
        args, name="eval", settings=settings, make_kind=make_kind, load=load_llm, scoring=True
    )
    tally, n_errors = count_results(Path(args.output))
    _print_accuracy(tally, n_errors)
    result = {
        "accuracy": tally.overall.to_dict(),
        "accuracy_by_bytes": tally.by_bytes.to_dict(),
        "categories": {name: accuracy.to_dict() for name, accuracy in tally.categories.items()},
        "n_errors": n_errors,
    }
    return finish_job(summary, args, result=result)


def _make_kind(llm: LLM, style: PromptStyle, args: argparse.Namespace) -> EvalJob:
    from flexrun.evaluate.questions import EvalJob

    encode_chat = None
    if args.chat:
        template = llm.chat_template
        if template is None:
            raise UsageError("the model has no chat template: leave --chat out")

        def encode_chat(text: str) -> str:
            return template.render([{"role": "user", "content": text}])

    return EvalJob(llm.scorer, style, encode_chat=encode_chat, max_tokens=args.max_tokens)


def _read_shots(args: argparse.Namespace) -> tuple[tuple[Question, ...], str | None]:
    """Questions to show, and a hash of them for the manifest."""
    from flexrun.evaluate.questions import read_question
    from flexrun.jobs.lines import LineError, parse_object, read_lines

    if args.shots is None:
        if args.num_shots:
            raise UsageError("--num-shots needs --shots FILE")
        return (), None
    shots: list[Question] = []
    digest = hashlib.sha256()
    try:
        with open(args.shots, "rb") as stream:
            for line in read_lines(stream):
                if args.num_shots is not None and len(shots) == args.num_shots:
                    break
                try:
                    shots.append(read_question(parse_object(line)))
                except LineError as error:
                    raise UsageError(f"{args.shots}, line {line.number}: {error}") from None
                digest.update(line.data + b"\n")
    except OSError as error:
        raise UsageError(f"cannot open {args.shots}: {error.strerror}") from None
    return tuple(shots), digest.hexdigest()[:32]


def count_results(path: Path) -> tuple[Tally, int]:
    """What a results file holds: counts, and how many questions have an error instead."""
    from flexrun.evaluate.questions import Tally

    tally, n_errors = Tally(), 0
    with path.open("rb") as stream:
        for line in stream:
            record = json.loads(line)
            if record["error"] is not None:
                n_errors += 1
            else:
                tally.add(record["response"]["body"])
    return tally, n_errors


def _print_accuracy(tally: Tally, n_errors: int) -> None:
    rows = [("accuracy", _shown(tally.overall))]
    if tally.by_bytes.n:
        rows.append(("by likelihood per byte", _shown(tally.by_bytes)))
    rows += [(name, _shown(accuracy)) for name, accuracy in tally.categories.items()]
    if n_errors:
        rows.append(("without an answer", f"{n_errors:,}"))
    print_table(rows, title="right answers, with a 95% interval", stream=sys.stderr)


def _shown(accuracy: Accuracy) -> str:
    low, high = accuracy.interval_frac()
    return (
        f"{accuracy.accuracy_frac:.3f}  ({low:.3f} to {high:.3f})  {accuracy.n_correct:,} of {accuracy.n:,}"
    )
