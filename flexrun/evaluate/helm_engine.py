"""The engine behind HELM's clients: one per model and settings in a process, made when first needed.

Everything that names a model travels as a list of flags, those of flexrun's own commands, because HELM builds
clients and tokenizers from strings in its deployment files.
"""

from __future__ import annotations

import argparse
import atexit
import re
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flexrun.cli.flags import add_model_flags, add_policy_flags
from flexrun.cli.session import load_llm, requested_settings, resolve, resolved_dtype

if TYPE_CHECKING:
    from flexrun.llm import LLM
    from flexrun.tokenizer import Tokenizer

GROUP = "flexrun"

_LOCK = threading.RLock()
_ENGINES: dict[tuple[str, ...], LLM] = {}
_TOKENIZERS: dict[str, Tokenizer] = {}


def parse_flags(flags: Sequence[str]) -> argparse.Namespace:
    """The model's flags as a command has them. Raises ValueError for flags that are not ours."""
    parser = argparse.ArgumentParser(prog="flexrun helm", allow_abbrev=False, exit_on_error=False)
    add_model_flags(parser)
    add_policy_flags(parser)
    try:
        args, rest = parser.parse_known_args(list(flags))
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from None
    if rest:
        raise ValueError(f"not flags of flexrun: {' '.join(rest)}")
    return args


def engine_lock() -> threading.RLock:
    """Held while an engine is made or runs: HELM calls from several threads."""
    return _LOCK


def engine_for(flags: Sequence[str]) -> LLM:
    """The engine of these flags, loaded on first use and closed when the process ends. Hold the lock."""
    key = tuple(flags)
    if key not in _ENGINES:
        for other in list(_ENGINES):  # two models would not fit side by side where one was planned for
            _ENGINES.pop(other).close()
        _ENGINES[key] = load_llm(parse_flags(flags))
    return _ENGINES[key]


def tokenizer_for(model: str) -> Tokenizer:
    """A model's tokenizer alone, without its weights. Raises ValueError if it has none."""
    from flexrun.checkpoint.open_model import open_model

    with _LOCK:
        if model not in _TOKENIZERS:
            tokenizer = open_model(model).load_tokenizer()
            if tokenizer is None:
                raise ValueError(f"{model} has no tokenizer, which HELM needs")
            _TOKENIZERS[model] = tokenizer
        return _TOKENIZERS[model]


def cache_settings(flags: Sequence[str]) -> dict[str, Any]:
    """What results depend on, for HELM's cache; known without loading the model."""
    args = parse_flags(flags)
    return {**requested_settings(args, resolve(args)), "dtype": resolved_dtype(args)}


@atexit.register
def close_all() -> None:
    """Close every engine."""
    with _LOCK:
        while _ENGINES:
            _ENGINES.popitem()[1].close()


def deployment_name(model: str) -> str:
    """What HELM calls a model: flexrun/ and the last part of its name."""
    last = re.split(r"[/\\]", model.rstrip("/\\"))[-1].removesuffix(".gguf")
    return f"{GROUP}/{re.sub(r'[^A-Za-z0-9._-]', '-', last) or 'model'}"


def deployment_files(flags: Sequence[str]) -> dict[str, dict[str, Any]]:
    """HELM's model_deployments and tokenizer_configs for a model, by file name. Reads headers only."""
    from flexrun.checkpoint.open_model import open_model
    from flexrun.defaults import MAX_MODEL_LEN

    args = parse_flags(flags)
    opened = open_model(args.model, dummy_weights=args.dummy_weights)
    tokenizer = tokenizer_for(args.model)
    name = deployment_name(args.model)
    max_len = min(opened.model.max_positions, args.max_model_len or MAX_MODEL_LEN)
    eos = tokenizer.eos_token_ids or opened.config.eos_token_ids
    bos = tokenizer.bos_token_id
    return {
        "model_deployments.yaml": {
            "model_deployments": [
                {
                    "name": name,
                    "model_name": name,
                    "tokenizer_name": name,
                    "max_sequence_length": max_len,
                    "max_sequence_and_generated_tokens_length": max_len,
                    "client_spec": {
                        "class_name": "flexrun.evaluate.helm_client.FlexrunClient",
                        "args": {"flags": list(flags)},
                    },
                }
            ]
        },
        "tokenizer_configs.yaml": {
            "tokenizer_configs": [
                {
                    "name": name,
                    "tokenizer_spec": {
                        "class_name": "flexrun.evaluate.helm_tokenizer.FlexrunTokenizer",
                        "args": {"model": args.model},
                    },
                    "end_of_text_token": tokenizer.token_text(eos[0]) if eos else "",
                    "prefix_token": tokenizer.token_text(bos) if bos is not None else "",
                }
            ]
        },
    }
