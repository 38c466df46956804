"""A llama of a few thousand weights as a folder that holds its configuration alone, for runs with dummy weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "eos_token_id": 2,
}


def tiny_folder(base: Path, **changes: Any) -> Path:
    """The model's folder under base; changes: of its configuration."""
    place = base / "tiny"
    place.mkdir()
    (place / "config.json").write_text(json.dumps({**TINY, **changes}))
    return place
