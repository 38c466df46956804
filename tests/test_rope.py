"""Rotary frequencies and rotation against transformers' own functions, also far beyond the original context."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from flexrun.model.config import config_from_hf
from flexrun.model.rope import apply_rope, inverse_frequencies, rope_tables
from flexrun.model.schema import ModelConfigError, RopeConfig

HEAD_DIM = 64
BASE = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 128,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 8192,
}
HALF = HEAD_DIM // 2
FACTORS = {
    "short_factor": [1.0 + 0.01 * i for i in range(HALF)],
    "long_factor": [1.0 + 0.5 * i for i in range(HALF)],
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 2048,
}
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {"rope_type": "llama3", **LLAMA3},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048},
    "yarn-attention": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 2048,
        "attention_factor": 1.3,
        "beta_fast": 20.0,
        "truncate": False,
    },
    "longrope": {"rope_type": "longrope", "original_max_position_embeddings": 2048, **FACTORS},
}


def reference_tables(values: dict[str, Any], positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values = {key: value for key, value in values.items() if key != "model_type"}
    rotary = LlamaRotaryEmbedding(transformers.LlamaConfig(**values))
    cos, sin = rotary(torch.zeros(1, dtype=torch.float32), positions[None])
    return cos[0, :, :HALF], sin[0, :, :HALF]


def rope_of(values: dict[str, Any]) -> RopeConfig:
    rope = config_from_hf(values).layers[0].rope
    assert rope is not None
    return rope


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1000, 8192, 20_000])
def test_tables_equal_transformers(kind: str, length: int) -> None:
    values = {**BASE, "rope_parameters": {"rope_theta": 500_000.0, **KINDS[kind]}}
    positions = torch.tensor([0, 1, 17, 999, length - 1])
    cos, sin = rope_tables(rope_of(values), positions, torch.full((5,), length))
    expected_cos, expected_sin = reference_tables(values, positions)
    torch.testing.assert_close(cos[:, 0], expected_cos, atol=2e-5, rtol=0)
    torch.testing.assert_close(sin[:, 0], expected_sin, atol=2e-5, rtol=0)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_tables_follow_the_length_of_each_token(kind: str) -> None:
    rope = rope_of({**BASE, "rope_parameters": {"rope_theta": 10_000.0, **KINDS[kind]}})
    lens = torch.tensor([50, 30_000, 8192, 30_000])
    positions = torch.tensor([40, 40, 40, 2999])
    mixed = rope_tables(rope, positions, lens)
    for i in range(4):
        alone = rope_tables(rope, positions[i : i + 1], lens[i : i + 1])
        for table, own in zip(mixed, alone, strict=True):
            assert torch.equal(table[i : i + 1], own)
    assert not torch.equal(mixed[0][0], mixed[0][1])


@pytest.mark.parametrize("kind", KINDS)
def test_old_and_new_spelling_are_the_same(kind: str) -> None:
    settings = dict(KINDS[kind])
    new = {**BASE, "rope_parameters": {"rope_theta": 77_000.0, **settings}}
    old_settings = {"type": settings.pop("rope_type"), **settings}
    old = {**BASE, "rope_theta": 77_000.0, "rope_scaling": old_settings}
    assert rope_of(new) == rope_of(old)
    if kind == "default":
        assert rope_of({**BASE, "rope_theta": 77_000.0, "rope_scaling": None}) == rope_of(new)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_equals_transformers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(7, 3, HEAD_DIM).to(dtype)
    positions = torch.arange(100, 107)
    cos, sin = rope_tables(RopeConfig(dim=HEAD_DIM), positions, positions + 1)
    both = [torch.cat([table[:, 0], table[:, 0]], dim=-1)[None] for table in (cos, sin)]
    x4 = x.float().transpose(0, 1)[None]  # (1, heads, tokens, head_dim)
    expected, _ = apply_rotary_pos_emb(x4, x4, *both)
    out = apply_rope(x, cos, sin)
    assert out.dtype == dtype and out.is_contiguous()
    torch.testing.assert_close(out, expected[0].transpose(0, 1).to(dtype), atol=1e-5, rtol=1e-2)


def test_entries_beyond_the_rotary_part_pass_through() -> None:
    x = torch.randn(4, 2, 20)
    positions = torch.arange(4)
    cos, sin = rope_tables(RopeConfig(dim=8), positions, positions + 1)
    out = apply_rope(x, cos, sin)
    assert torch.equal(out[..., 8:], x[..., 8:])
    assert torch.equal(out[0, :, :8], x[0, :, :8])  # position 0 turns nothing
    assert not torch.allclose(out[1:, :, :8], x[1:, :, :8])


def test_factors_divide_the_frequencies() -> None:
    plain = inverse_frequencies(RopeConfig(dim=8))
    scaled = inverse_frequencies(RopeConfig(dim=8, kind="factors", short_factors=(1.0, 2.0, 4.0, 8.0)))
    torch.testing.assert_close(scaled * torch.tensor([1.0, 2.0, 4.0, 8.0]), plain)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rope_type": "spiral"}, "rope type 'spiral'"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": -2.0}, "rope factor"),
        ({"rope_type": "default", "mrope_section": [2, 3, 3]}, "mrope_section"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, "one entry per frequency"),
        ({"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}, "low_freq_factor < high_freq_factor"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_bad_rope_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        config_from_hf({**BASE, "rope_scaling": settings})
