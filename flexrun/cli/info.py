"""``flexrun info``: what a model is and weighs, from its headers alone."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from flexrun.checkpoint import ResolvedModel, open_checkpoint, resolve_model
from flexrun.cli.exits import EXIT_OK, UsageError
from flexrun.report import format_count, print_table
from offload.host import format_bytes

if TYPE_CHECKING:
    from flexrun.model.config import ModelConfig

_KV_BYTES = {"f32": 4, "bf16": 2}


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "info",
        help="describe a model",
        description="Shows a model's architecture, parameters, bytes of weights, KV cache bytes and FLOPs per"
        " token. Reads headers only; a preset's name works too.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    parser.add_argument("model", metavar="MODEL", help="a folder, a .gguf file, org/name, or a preset's name")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--verify", action="store_true", help="read a packed folder whole and compare every checksum"
    )


def run(args: argparse.Namespace) -> int:
    """Print the description of one model; with --verify, fail if a checksum does not hold."""
    model = resolve_model(args.model)
    description = describe(model)
    if args.verify:
        description["verified"] = _verify(model)
    if args.json:
        print(json.dumps(description))
    else:
        rows = _rows(description)
        if "verified" in description:
            rows.append(("verified", f"{description['verified']['units']} checksums hold"))
        print_table(rows, title=str(description["model"]), stream=sys.stdout)
    return EXIT_OK


def _verify(model: ResolvedModel) -> dict[str, Any]:
    """Checksums of a packed folder's units. CheckpointError names the first that does not hold."""
    from flexrun.checkpoint.base import CheckpointError
    from flexrun.checkpoint.packed import verify

    if model.kind != "packed" or model.path is None:
        raise UsageError(
            f"--verify compares the checksums of a packed folder; {model.name} is none (flexrun pack)"
        )
    report = verify(model.path)
    if not report.ok:
        raise CheckpointError(
            f"{len(report.problems)} of {report.n_runs} checksums do not hold",
            file=model.path,
            found="; ".join(report.problems[:3]),
            remedy="The disk or the copy is damaged; pack the model again",
        )
    return {"units": report.n_runs, "bytes": report.nbytes}


def describe(model: ResolvedModel) -> dict[str, Any]:
    """Everything that ``info --json`` prints. weight_bytes is what the files store, None for a preset."""
    from flexrun.model.footprint import (
        attention_flops,
        count_parameters,
        kv_elements_per_token,
        linear_flops_per_token,
        model_footprint,
        native_format,
    )

    config, stored = _read(model)
    kv_elements = kv_elements_per_token(config)
    native = native_format(config)
    footprint = model_footprint(config, name=model.name, weight_formats=("bf16", "int8-g64", "int4-g64"))
    return {
        "model": model.name,
        "path": None if model.path is None else str(model.path),
        "kind": model.kind,
        "family": config.family,
        "dtype": config.dtype,
        "n_layers": config.n_layers,
        "hidden_size": config.hidden_size,
        "n_heads": config.n_heads,
        "n_kv_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "ffn_size": max(layer.moe.ffn_size if layer.moe else layer.ffn_size for layer in config.layers),
        "n_experts": max((layer.moe.n_experts for layer in config.layers if layer.moe), default=0),
        "n_experts_per_token": max(
            (layer.moe.n_experts_per_token for layer in config.layers if layer.moe), default=0
        ),
        "vocab_size": config.vocab_size,
        "max_positions": config.max_positions,
        "tied_embeddings": config.tied,
        "parameters": count_parameters(config),
        "weight_bytes": stored["weight_bytes"],
        "stored_types": stored["types"],
        "weight_bytes_as": {
            name: footprint.weight_nbytes(name) for name in (native, "bf16", "int8-g64", "int4-g64")
        },
        "kv_bytes_per_token": kv_elements * _KV_BYTES["bf16"],
        "kv_bytes_per_token_as": {name: kv_elements * size for name, size in _KV_BYTES.items()},
        "flops_per_token": linear_flops_per_token(config, head=True),
        "attention_flops_per_token_at_1024": attention_flops(config, 1024),
    }


def _read(model: ResolvedModel) -> tuple[ModelConfig, dict[str, Any]]:
    """Configuration and what is stored, of any kind of model."""
    from flexrun.model.config import config_from_checkpoint, config_from_hf

    if model.path is None:
        return config_from_hf(model.preset_config()), {"weight_bytes": None, "types": {}}
    types: dict[str, int] = {}
    if model.kind == "packed":
        from flexrun.checkpoint.manifest import read_manifest

        manifest = read_manifest(model.path)
        for slot in (slot for run in manifest.units.values() for slot in run.slots):
            types[slot.format.name] = types.get(slot.format.name, 0) + 1
        return manifest.model, {"weight_bytes": manifest.weight_bytes, "types": dict(sorted(types.items()))}
    checkpoint = open_checkpoint(model.path)
    for tensor in checkpoint.tensors.values():
        types[tensor.dtype] = types.get(tensor.dtype, 0) + 1
    stored = {"weight_bytes": checkpoint.nbytes, "types": dict(sorted(types.items()))}
    return config_from_checkpoint(checkpoint), stored


def _rows(info: dict[str, Any]) -> list[tuple[str, str]]:
    experts = ""
    if info["n_experts"]:
        experts = f", {info['n_experts']} experts, {info['n_experts_per_token']} per token"
    stored = ", ".join(f"{count} {name}" for name, count in info["stored_types"].items())
    rows = [
        ("kind", f"{info['kind']}, {info['family']}"),
        ("layers", f"{info['n_layers']}{experts}"),
        ("hidden, MLP", f"{info['hidden_size']:,}, {info['ffn_size']:,}"),
        ("heads, KV heads, head_dim", f"{info['n_heads']}, {info['n_kv_heads']}, {info['head_dim']}"),
        ("vocabulary", f"{info['vocab_size']:,}{', tied' if info['tied_embeddings'] else ''}"),
        ("positions", f"{info['max_positions']:,}"),
        ("parameters", f"{info['parameters']:,} ({format_count(info['parameters'])})"),
    ]
    if info["weight_bytes"] is not None:
        rows.append(("stored weights", f"{format_bytes(info['weight_bytes'])} ({stored})"))
    rows += [(f"weights as {name}", format_bytes(size)) for name, size in info["weight_bytes_as"].items()]
    rows += [
        (f"KV per token as {name}", format_bytes(size))
        for name, size in info["kv_bytes_per_token_as"].items()
    ]
    rows += [
        ("FLOPs per token, linear", format_count(info["flops_per_token"])),
        ("attention FLOPs at 1,024", format_count(info["attention_flops_per_token_at_1024"])),
    ]
    return rows
