"""From flags to a loaded model, and to what names it in a manifest."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexrun.checkpoint import ResolvedModel, is_packed_folder, open_checkpoint, resolve_model
from flexrun.cli.exits import UsageError
from flexrun.cli.flags import policy_options
from flexrun.report import format_seconds

if TYPE_CHECKING:
    from flexrun.llm import LLM

# Files of a model's folder that change prompts or texts without touching a weight.
_TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


def resolve(args: argparse.Namespace) -> ResolvedModel:
    """Find the model before anything is loaded. UsageError for a preset without --dummy-weights.

    For dummy weights a folder needs no more than its config.json.
    """
    folder = Path(args.model).expanduser().absolute()
    if args.dummy_weights and (folder / "config.json").is_file() and not is_packed_folder(folder):
        return ResolvedModel(name=args.model, kind="hf", path=folder)
    model = resolve_model(args.model)
    if model.kind == "preset" and not args.dummy_weights:
        raise UsageError(
            f"{args.model!r} is a preset, a configuration without weights: add --dummy-weights to measure speed,"
            " or give the folder of a real model"
        )
    return model


def model_fingerprint(model: ResolvedModel, *, dummy_weights: bool = False) -> str:
    """Identity of weights, configuration, tokenizer and chat template; the same after a move or a copy.

    Weights are sampled, not read whole, so this takes milliseconds; with `dummy_weights` they do not count.
    """
    digest = hashlib.sha256()
    if model.path is None:
        digest.update(json.dumps(model.preset_config(), sort_keys=True).encode())
    elif model.kind == "hf" and dummy_weights:
        digest.update((model.path / "config.json").read_bytes())
    elif model.kind == "packed":
        digest.update((model.path / "manifest.json").read_bytes())
    else:
        digest.update(open_checkpoint(model.path).fingerprint().encode())
    if model.path is not None and model.path.is_dir():
        for name in _TEXT_FILES:
            file = model.path / name
            if file.is_file():
                content = hashlib.sha256(file.read_bytes()).hexdigest()
                digest.update(f"\0{name}\0{content}".encode())
    return digest.hexdigest()[:32]


def requested_settings(args: argparse.Namespace, model: ResolvedModel) -> dict[str, Any]:
    """Settings that can change a result, as far as they are known before the model is loaded."""
    settings: dict[str, Any] = {
        "model_fingerprint": model_fingerprint(model, dummy_weights=args.dummy_weights),
        "dummy_weights": bool(args.dummy_weights),
        "seed": args.seed,
    }
    options = policy_options(args)
    policy = options.get("policy")
    for name in ("weight_format", "cache_format"):
        settings[name] = options.get(name, "auto") if policy is None else getattr(policy, name)
    return settings


def resolved_dtype(args: argparse.Namespace) -> str:
    """What "auto" means on this machine, since results of two dtypes must not be mixed. Imports torch."""
    from offload.device import make_device

    device = make_device(args.device)
    return str(device.compute_dtype(args.dtype)).removeprefix("torch.")


def load_llm(args: argparse.Namespace, **more: Any) -> LLM:
    """The model that the flags describe, ready to run; `more` goes to LLM as it is."""
    from flexrun.llm import LLM

    started = time.monotonic()
    llm = LLM(
        args.model,
        device=args.device,
        dtype=args.dtype,
        gpu_mem=args.gpu_mem,
        cpu_mem=args.cpu_mem,
        disk_dir=args.disk_dir,
        disk_mem=args.disk_mem,
        max_model_len=args.max_model_len,
        dummy_weights=args.dummy_weights,
        seed=args.seed,
        **policy_options(args),
        **more,
    )
    for note in llm.notes:
        print(f"note: {note}", file=sys.stderr)
    if args.verbose:
        print(f"model ready after {format_seconds(time.monotonic() - started)}", file=sys.stderr)
    return llm
