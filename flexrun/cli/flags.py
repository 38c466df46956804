"""Flags that several commands share, in groups: model, sampling, placement and budgets.

Flags are field names with dashes. A flag that was not given is None, so that a command can tell it from one
that repeats a default.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

from offload.host import parse_bytes
from policy.tiers import Placement, Policy, ScheduleName, load_policy
from quant.formats import parse_format
from quant.kv_formats import CACHE_FORMAT_NAMES, parse_cache_format

DTYPES = ("auto", "float32", "bfloat16", "float16")


def value_of(parse: Callable[[str], Any], name: str) -> Callable[[str], Any]:
    """`parse` as an argparse type: its ValueError becomes the usage message."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    convert.__name__ = name
    return convert


def size_text(text: str) -> str:
    """A size such as 12GiB or 80%, checked and left as text: what a percentage means depends on the tier."""
    parse_bytes(text, total_bytes=1 << 40)
    return text


def whole_number(low: int) -> Callable[[str], int]:
    """An argparse type: an integer of at least `low`."""

    def convert(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None
        if number < low:
            raise argparse.ArgumentTypeError(f"must be at least {low}, got {number}")
        return number

    return convert


def _token_ids(text: str) -> list[int]:
    try:
        return [int(piece) for piece in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be token ids such as 2,50256; got {text!r}") from None


def _logit_bias(text: str) -> dict[str, float]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"must be a JSON object such as '{{\"7\": -100}}': {error}"
        ) from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}")
    return value


def _format_name(text: str) -> str:
    if text != "auto":
        parse_format(text)
    return text


def _cache_format_name(text: str) -> str:
    if text != "auto":
        parse_cache_format(text)
    return text


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """-m/--model, --device, --dtype, --dummy-weights, --seed, --verbose."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "-m",
        "--model",
        required=True,
        metavar="MODEL",
        help="a folder, a .gguf file, org/name in the local Hugging Face cache, or a preset's name",
    )
    group.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, xpu (default: auto)")
    group.add_argument("--dtype", default="auto", choices=DTYPES, help="what is computed in (default: auto)")
    group.add_argument(
        "--dummy-weights", action="store_true", help="random weights from --seed, for measuring speed"
    )
    group.add_argument(
        "--seed",
        type=whole_number(0),
        default=0,
        help="requests without a seed of their own draw from this and their id (default: 0)",
    )
    group.add_argument("-v", "--verbose", action="store_true", help="say more on standard error")


_SAMPLING_FLAGS: dict[str, dict[str, Any]] = {
    "max_tokens": {"type": int, "metavar": "N", "help": "most tokens to generate"},
    "temperature": {"type": float, "metavar": "T", "help": "0 takes the likeliest token"},
    "top_p": {"type": float, "metavar": "P", "help": "keep the likeliest tokens up to this probability"},
    "top_k": {"type": int, "metavar": "K", "help": "keep the K likeliest tokens; 0 keeps all"},
    "min_p": {"type": float, "metavar": "P", "help": "drop tokens below this share of the likeliest"},
    "typical_p": {"type": float, "metavar": "P", "help": "locally typical sampling"},
    "presence_penalty": {"type": float, "metavar": "X", "help": "subtracted once from tokens in the answer"},
    "frequency_penalty": {"type": float, "metavar": "X", "help": "subtracted per occurrence in the answer"},
    "repetition_penalty": {"type": float, "metavar": "X", "help": "1 is off"},
    "n": {"type": int, "metavar": "N", "help": "answers per prompt"},
    "stop": {"action": "append", "metavar": "TEXT", "help": "ends the answer; may be given several times"},
    "stop_token_ids": {"type": _token_ids, "metavar": "IDS", "help": "ids that end the answer, as 2,50256"},
    "ignore_eos": {"action": argparse.BooleanOptionalAction, "help": "go on after the model's end token"},
    "min_tokens": {"type": int, "metavar": "N", "help": "nothing ends the answer before so many tokens"},
    "logprobs": {"type": int, "metavar": "K", "help": "log-probabilities of tokens and K alternatives"},
    "prompt_logprobs": {"type": int, "metavar": "K", "help": "the same for the prompt's tokens"},
    "logit_bias": {"type": _logit_bias, "metavar": "JSON", "help": "added to logits, as '{\"7\": -100}'"},
    "include_stop_str_in_output": {
        "action": argparse.BooleanOptionalAction,
        "help": "keep the stop string in the text",
    },
    "skip_special_tokens": {
        "action": argparse.BooleanOptionalAction,
        "help": "leave special tokens out of the text (default: yes)",
    },
}


def add_sampling_flags(parser: argparse.ArgumentParser, *, title: str = "sampling") -> None:
    """One flag per sampling option, apart from the seed (`add_model_flags`)."""
    group = parser.add_argument_group(title)
    for name, settings in _SAMPLING_FLAGS.items():
        group.add_argument(f"--{name.replace('_', '-')}", default=None, **settings)


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling options that were given, as SamplingParams takes them."""
    return {name: value for name in _SAMPLING_FLAGS if (value := getattr(args, name)) is not None}


def add_policy_flags(parser: argparse.ArgumentParser) -> None:
    """Where everything rests, the shape of a block, formats, and the memory budgets."""
    group = parser.add_argument_group("placement and budgets")
    group.add_argument(
        "--policy",
        default="auto",
        metavar="POLICY",
        help="auto: the planner's choice where this machine has been measured (flexrun profile); default: the"
        " safe built-in choice; or a file with a policy or plan in JSON, whose fields the flags below change"
        " (default: auto)",
    )
    group.add_argument(
        "--gpu-batch-size", type=whole_number(1), metavar="N", help="sequences per kernel launch"
    )
    group.add_argument(
        "--num-gpu-batches",
        type=whole_number(1),
        metavar="N",
        help="gpu batches that share a read of weights",
    )
    for name in ("weights", "cache", "activations"):
        group.add_argument(
            f"--{name}",
            type=value_of(partial(Placement.parse, what=name), name),
            metavar="GPU,CPU,DISK",
            help=f"fractions of the {name} on each tier, such as 0.2,0.8,0",
        )
    group.add_argument(
        "--weight-format",
        type=value_of(_format_name, "format"),
        metavar="FORMAT",
        help="bf16, int8-g64, int4-g64, ...; auto lets the planner quantise (default: the checkpoint's own)",
    )
    group.add_argument(
        "--cache-format",
        type=value_of(_cache_format_name, "format"),
        metavar="FORMAT",
        help=f"{', '.join(CACHE_FORMAT_NAMES)}; auto lets the planner quantise (default: the compute type)",
    )
    group.add_argument(
        "--cpu-attention-frac", type=float, metavar="F", help="share of attention done on the CPU"
    )
    group.add_argument("--no-overlap", action="store_true", help="one transfer or computation at a time")
    group.add_argument("--schedule", choices=get_args(ScheduleName), help="how finished slots are used")
    for name, what in (
        ("gpu-mem", "GPU memory; with --device cpu, a GPU tier emulated in main memory"),
        ("cpu-mem", "main memory for weights, cache and buffers"),
        ("disk-mem", "space in --disk-dir"),
    ):
        group.add_argument(
            f"--{name}", type=value_of(size_text, "size"), metavar="SIZE", help=f"{what}, as 12GiB or 80%%"
        )
    group.add_argument("--disk-dir", metavar="FOLDER", help="where the disk tier keeps its files")
    group.add_argument(
        "--max-model-len",
        type=whole_number(1),
        metavar="N",
        help="most tokens of a prompt with its answer (default: the model's positions)",
    )


_POLICY_FIELDS = (
    "weights",
    "cache",
    "activations",
    "gpu_batch_size",
    "num_gpu_batches",
    "weight_format",
    "cache_format",
    "cpu_attention_frac",
    "schedule",
)


def wants_plan(args: argparse.Namespace) -> bool:
    """Whether the flags leave the placement to the planner."""
    placed = (args.weights, args.cache, args.activations, args.cpu_attention_frac)
    return args.policy == "auto" and not any(placed)


def policy_options(args: argparse.Namespace) -> dict[str, Any]:
    """What the flags say of the policy, as LLM takes it: a whole policy, or the single fields given.

    With --policy FILE the other flags change that policy's fields; with auto and default, LLM chooses what is not
    given.

    Raises:
        ValueError: names the field or the policy file.
    """
    given = {name: value for name in _POLICY_FIELDS if (value := getattr(args, name)) is not None}
    if args.no_overlap:
        given["overlap"] = False
    if args.policy == "default":
        return {"policy": "default", **given}
    if args.policy == "auto":
        return given
    policy: Policy = replace(load_policy(Path(args.policy)), **given)
    return {"policy": policy}
