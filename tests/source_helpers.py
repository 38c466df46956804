"""Tiny random checkpoints of any family, with the tensors that its units ask for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from flexrun.model.assemble import DecoderModel, build_model
from flexrun.model.config import config_from_hf
from flexrun.model.schema import ModelConfig
from offload.units import TensorSpec
from offload.weights import WeightSource

VOCAB = 97
MODERN: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
CLASSIC = {key: value for key, value in MODERN.items() if key != "num_key_value_heads"}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **MODERN},
    "llama-tied": {"model_type": "llama", **MODERN, "tie_word_embeddings": True, "attention_bias": True},
    "qwen3": {"model_type": "qwen3", **MODERN, "head_dim": 16},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **MODERN,
        "head_dim": 12,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    },
    "gemma2": {"model_type": "gemma2", **MODERN, "head_dim": 16},
    "phi3": {"model_type": "phi3", **MODERN, "pad_token_id": 0},
    "gpt_neox": {"model_type": "gpt_neox", **CLASSIC, "rotary_pct": 0.5},
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": VOCAB,
        "n_embd": 48,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
    },
    "opt-350m": {
        "model_type": "opt",
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "ffn_dim": 56,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 40,
        "word_embed_proj_dim": 32,
        "do_layer_norm_before": False,
    },
    "falcon-40b": {
        "model_type": "falcon",
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_kv_heads": 2,
        "new_decoder_architecture": True,
    },
    "bloom": {"model_type": "bloom", "vocab_size": VOCAB, "hidden_size": 48, "n_layer": 2, "n_head": 4},
}


def tiny_model(family: str, **changes: Any) -> DecoderModel:
    return build_model(config_from_hf(CONFIGS[family] | changes))


def source_shapes(model: DecoderModel) -> dict[str, tuple[int, ...]]:
    """Canonical source name -> shape in the checkpoint."""
    shapes: dict[str, tuple[int, ...]] = {}
    for unit in model.units:
        for spec in unit.tensors:
            for part, rows in zip(spec.parts, _part_rows(model.config, spec), strict=True):
                shape = (rows, *spec.shape[1:])
                old = shapes.get(part.source, (0,))
                shapes[part.source] = max(old, shape[::-1] if spec.transposed else shape)
    return shapes


def _part_rows(config: ModelConfig, spec: TensorSpec) -> list[int]:
    """Rows of each part's whole source."""
    if spec.parts[0].rows is not None:
        return [max(stop for _, stop in part.rows or ()) for part in spec.parts]
    if len(spec.parts) == 3:
        q, kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
        return [q, kv, kv]
    return [spec.shape[0] // len(spec.parts)] * len(spec.parts)


def random_tensors(
    model: DecoderModel, dtype: torch.dtype = torch.float32, seed: int = 0
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator).mul_(0.1).to(dtype)
        for name, shape in sorted(source_shapes(model).items())
    }


def write_folder(
    folder: Path, family: str, tensors: Mapping[str, torch.Tensor], *, prefix: str = "", **changes: Any
) -> Path:
    """A Hugging Face folder with these tensors in one file. prefix: put before all names but the head's."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[family] | changes), encoding="utf-8")
    heads = ("lm_head.", "embed_out.")
    named = {(name if name.startswith(heads) else prefix + name): t for name, t in tensors.items()}
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def filled_runs(source: WeightSource, model: DecoderModel) -> dict[str, torch.Tensor]:
    """Every unit's run and every table, filled over bytes that must all be overwritten."""
    runs: dict[str, torch.Tensor] = {}
    for unit in model.units:
        runs[unit.name] = torch.full((source.layout(unit).nbytes,), 0xA5, dtype=torch.uint8)
        source.fill(unit, runs[unit.name])
        for spec in unit.tensors:
            if spec.kind == "rows":
                nbytes = source.table_format(spec).nbytes(spec.shape)
                table = torch.full((nbytes,), 0xA5, dtype=torch.uint8)
                source.fill_table(spec, table)
                runs[f"{unit.name}/{spec.name}"] = table
    return runs
