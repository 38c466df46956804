"""``flexrun batch``: a file of requests through the model, results appended as they finish."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING, Any

from flexrun.cli.flags import add_model_flags, add_policy_flags, add_sampling_flags, sampling_options
from flexrun.cli.job import RESUMING, add_job_flags, finish_job, run_job_command
from flexrun.cli.session import Texts, load_llm, prepare_job
from flexrun.jobs.generation import GenerationJob
from flexrun.request import SamplingParams

if TYPE_CHECKING:
    from flexrun.llm import LLM

DESCRIPTION = f"""\
Reads JSON lines: OpenAI Batch requests for /v1/completions and /v1/chat/completions, or plain
{{"prompt": ...}} and {{"messages": [...]}} lines with an optional "id" and any sampling option.
Writes one OpenAI Batch result line per request, in the order in which they finish.

Where this machine has been measured (flexrun profile), the input's lengths are sampled and the best
plan for them is printed and taken. At the end the run is set beside its plan.

{RESUMING}"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "batch",
        help="run a file of requests",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    add_job_flags(parser)
    add_model_flags(parser)
    add_sampling_flags(parser, title="sampling, where a request says nothing else")
    add_policy_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Run the job of the command line."""
    options = sampling_options(args)
    SamplingParams.from_dict(options)

    def make_kind(llm: LLM | Texts) -> GenerationJob:
        from flexrun.chat import encode_chat

        return GenerationJob(
            model_name=str(args.model),
            tokenizer=llm.tokenizer,
            encode_chat=partial(encode_chat, llm.tokenizer, llm.chat_template),
            defaults=options,
            seed=args.seed,
        )

    def prepare(args: argparse.Namespace) -> dict[str, Any]:
        return prepare_job(args, make_kind)

    summary = run_job_command(
        args,
        name=GenerationJob.name,
        settings={"sampling": options},
        make_kind=make_kind,
        load=load_llm,
        prepare=prepare,
    )
    return finish_job(summary, args)
