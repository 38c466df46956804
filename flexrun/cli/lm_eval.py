"""``flexrun lm-eval``: lm-evaluation-harness with this engine as its model."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from flexrun.cli.exits import EXIT_OK, UsageError
from flexrun.cli.flags import add_model_flags, add_policy_flags
from flexrun.cli.session import load_llm, resolve

if TYPE_CHECKING:
    from flexrun.llm import LLM

DESCRIPTION = """\
Runs lm-evaluation-harness (install flexrun[eval]) on the engine. Flags that are not listed here go to
lm-eval as they are: --tasks, --num_fewshot, --limit, --include_path, --output_path, --log_samples,
--apply_chat_template, --gen_kwargs and so on ('lm-eval run --help' lists them). --model and
--model_args are made from the flags below; --batch_size has no effect.

All requests of a kind, of all tasks, are one job, and each result goes into a journal as it lands:
the same command after a kill recomputes nothing."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "lm-eval",
        help="run lm-evaluation-harness",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        conflict_handler="resolve",
    )
    parser.set_defaults(run=run, takes_rest=True)
    add_model_flags(parser)
    parser.add_argument(
        "--seed", metavar="N[,N,N,N]", help="lm-eval's seeds; the first one is also that of --dummy-weights"
    )
    add_policy_flags(parser)
    group = parser.add_argument_group("journal")
    group.add_argument(
        "--journal", metavar="FILE", default="auto", help="default: one per model in the cache folder"
    )
    group.add_argument(
        "--no-journal", dest="journal", action="store_const", const=None, help="keep nothing, look up nothing"
    )


def run(args: argparse.Namespace) -> int:
    """Hand over to lm-eval, with a model class that loads our model when lm-eval asks for it."""
    for flag in ("--model_args", "-a", "-M"):
        if any(word == flag or word.startswith(f"{flag}=") for word in args.rest):
            raise UsageError(f"{flag} is made from flexrun's own flags; see flexrun lm-eval --help")
    try:
        import lm_eval.models  # noqa: F401  (fills the registry, which would otherwise refuse ours)
        from lm_eval.__main__ import cli_evaluate
        from lm_eval.api.registry import register_model
    except ImportError as error:
        raise UsageError(
            f"lm-evaluation-harness is not installed ({error}): pip install 'flexrun[eval]'"
        ) from None
    from flexrun.evaluate.lm_eval import FlexrunLM

    given_seed, args.seed = args.seed, _first_seed(args.seed)
    resolve(args)
    opened: list[FlexrunLM] = []

    class CommandLM(FlexrunLM):
        """The model of the command line, whatever lm-eval passes on."""

        def __init__(self, **ignored: Any) -> None:
            llm: LLM = load_llm(args)
            super().__init__(llm, journal=args.journal)
            opened.append(self)

    register_model("flexrun")(CommandLM)
    words = ["run", "--model", "flexrun", "--model_args", json.dumps({"pretrained": args.model})]
    if given_seed is not None:
        words += ["--seed", given_seed]
    before, sys.argv = sys.argv, ["lm-eval", *words, *args.rest]
    try:
        cli_evaluate()
    finally:
        sys.argv = before
        for model in opened:
            model.close()
            model.llm.close()
    return EXIT_OK


def _first_seed(text: str | None) -> int:
    """The first of lm-eval's seeds as a number; 0 if there is none."""
    first = (text or "0").split(",")[0].strip()
    try:
        return 0 if first == "None" else int(first)
    except ValueError:
        raise UsageError(f"--seed needs one number or four, such as 0,1234,1234,1234; got {text!r}") from None
