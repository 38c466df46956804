"""``flexrun score``: log-likelihoods of a file of texts, results appended as they finish."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from flexrun.cli.flags import add_model_flags, add_policy_flags
from flexrun.cli.job import RESUMING, add_job_flags, finish_job, run_job_command
from flexrun.cli.session import Texts, load_llm, prepare_job

if TYPE_CHECKING:
    from flexrun.jobs.scoring import ScoreJob
    from flexrun.llm import LLM

DESCRIPTION = f"""\
Reads JSON lines: {{"context": ..., "continuation": ...}} scores the continuation given the context,
{{"text": ...}} a whole text of any length; each is text or a list of token ids, and a line may have an
"id". /v1/completions lines with echo, logprobs and max_tokens 0 are scored too. Writes one result
line per request with the sum of the natural log-probabilities ("logprob"), one per token
("token_logprobs"), and whether the model's likeliest tokens are these ("is_greedy").

{RESUMING}"""


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

    def sampled_kind(texts: Texts) -> ScoreJob:
        from flexrun.defaults import MAX_MODEL_LEN
        from flexrun.jobs.scoring import ScoreJob
        from flexrun.scoring import Scorer

        # Windows are those of a run that knows nothing of the texts: results do not depend on the sample.
        window = args.max_model_len or min(texts.max_positions, MAX_MODEL_LEN)
        scorer = Scorer(texts.tokenizer, eos_token_ids=texts.config.eos_token_ids, max_len=window)
        return ScoreJob(scorer, model_name=str(args.model), tokenizer=texts.tokenizer)

    def prepare(args: argparse.Namespace) -> dict[str, Any]:
        return prepare_job(args, sampled_kind)

    summary = run_job_command(
        args,
        name="score",
        settings={},
        make_kind=make_kind,
        load=load_llm,
        prepare=prepare,
        scoring=True,
        windows=True,
    )
    return finish_job(summary, args)
