"""``flexrun score``: log-likelihoods of a file of texts, results appended as they finish."""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexrun.cli.flags import add_model_flags, add_policy_flags
from flexrun.cli.job import RESUMING, add_job_flags, finish_job, run_job_command
from flexrun.cli.session import choose_formats, load_llm, open_texts
from flexrun.jobs.manifest import earlier_settings

if TYPE_CHECKING:
    from flexrun.jobs.scoring import ScoreJob
    from flexrun.llm import LLM
    from policy.workload import Workload

DESCRIPTION = f"""\
Reads JSON lines: {{"context": ..., "continuation": ...}} scores the continuation given the context,
{{"text": ...}} a whole text of any length; each is text or a list of token ids, and a line may have an
"id". /v1/completions lines with echo, logprobs and max_tokens 0 are scored too. Writes one result
line per request with the sum of the natural log-probabilities ("logprob"), one per token
("token_logprobs"), and whether the model's likeliest tokens are these ("is_greedy").

{RESUMING}"""

_SAMPLED_LINES = 256
_BYTES_PER_TOKEN = 4


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "score",
        help="log-likelihoods of a file of texts",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    add_job_flags(parser)
    add_model_flags(parser)
    add_policy_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Run the job of the command line."""

    def make_kind(llm: LLM) -> ScoreJob:
        from flexrun.jobs.scoring import ScoreJob

        return ScoreJob(llm.scorer, model_name=str(args.model), tokenizer=llm.tokenizer)

    def prepare(args: argparse.Namespace) -> dict[str, Any]:
        workload = estimated_workload(args.input, args.limit)
        if "auto" in (args.weight_format, args.cache_format):
            earlier = {} if args.overwrite else earlier_settings(Path(args.output))
            texts = open_texts(args)
            choose_formats(args, workload, config=texts.config, native=texts.native_format, earlier=earlier)
        return {} if workload is None else {"workload": workload}

    # Windows end where the model's length does, so that results depend on it.
    settings = {"max_model_len": args.max_model_len}
    summary = run_job_command(
        args,
        name="score",
        settings=settings,
        make_kind=make_kind,
        load=load_llm,
        prepare=prepare,
        scoring=True,
    )
    return finish_job(summary, args)


def estimated_workload(name: str, limit: int | None) -> Workload | None:
    """What the planner is told of a file of texts to score: lengths of its first lines, about how many.

    None where nothing can be known: standard input, a pipe, an empty file.
    """
    from policy.workload import Workload

    path = Path(name)
    if name == "-" or not path.is_file():
        return None
    with path.open("rb") as stream:
        lines = [line for line in itertools.islice(stream, _SAMPLED_LINES) if line.strip()]
    if not lines or limit == 0:
        return None
    n_requests = max(1, path.stat().st_size * len(lines) // sum(map(len, lines)))
    sizes = sorted(_text_bytes(line) for line in lines)
    return Workload(
        prompt_len=max(2, sum(sizes) // len(sizes) // _BYTES_PER_TOKEN),
        gen_len=0,
        num_requests=min(n_requests, limit or n_requests),
    )


def _text_bytes(line: bytes) -> int:
    """Bytes of a line's texts, about; of a broken line, all of it."""
    try:
        fields = json.loads(line)
        fields = fields.get("body") or fields
        values = [fields.get(name) for name in ("context", "continuation", "text", "prompt")]
        return sum(
            len(value.encode()) if isinstance(value, str) else _BYTES_PER_TOKEN * len(value or ())
            for value in values
        )
    except (ValueError, AttributeError, TypeError, RecursionError):
        return len(line)
