"""Configurations: defaults, spellings, refusals; and the matching of checkpoint tensors to units."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from flexrun import presets
from flexrun.model.config import (
    ModelConfig,
    ModelConfigError,
    config_from_hf,
    supported_architectures,
)
from flexrun.model.families_classic import alibi_slopes
from flexrun.model.footprint import count_parameters
from flexrun.model.mapping import match_tensors
from flexrun.model.specs import UnitSpec, unit_specs

LLAMA = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
QWEN2 = {**LLAMA, "model_type": "qwen2", "num_hidden_layers": 4}
GEMMA3 = {
    **LLAMA,
    "model_type": "gemma3_text",
    "num_hidden_layers": 7,
    "head_dim": 8,
    "sliding_window": 16,
}


def make(values: dict[str, Any], **changes: Any) -> ModelConfig:
    return config_from_hf({**values, **changes})


def windows(config: ModelConfig) -> list[int]:
    return [layer.window for layer in config.layers]


@pytest.mark.parametrize("name", presets.names())
def test_presets_parse_and_survive_json(name: str) -> None:
    config = config_from_hf(presets.load(name))
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_damaged_saved_configuration_is_refused() -> None:
    values = make(LLAMA).to_dict()
    del values["norm"]
    with pytest.raises(ModelConfigError, match="not a saved model configuration"):
        ModelConfig.from_dict(values)


def test_unknown_architecture_lists_the_supported_ones() -> None:
    with pytest.raises(ModelConfigError, match="'mamba' is not supported; supported are bloom, falcon"):
        make(LLAMA, model_type="mamba")
    with pytest.raises(ModelConfigError, match="model_type None"):
        config_from_hf({"hidden_size": 3})
    assert {"llama", "opt", "gemma3", "qwen3_moe"} <= set(supported_architectures())


@pytest.mark.parametrize("field", ["residual_multiplier", "attention_multiplier", "some_new_gate"])
def test_unknown_fields_that_may_matter_are_refused(field: str) -> None:
    with pytest.raises(ModelConfigError, match=field):
        make(LLAMA, **{field: 0.22})
    neutral = {field: None, "other": False, "third": 1.0, "fourth": [], "_private": 3}
    assert make(LLAMA, **neutral) == make(LLAMA)


def test_harmless_fields_change_nothing() -> None:
    extra = {
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "initializer_range": 0.02,
        "attention_dropout": 0.1,
        "pretraining_tp": 4,
        "transformers_version": "4.31.0",
        "architectures": ["LlamaForCausalLM"],
        "temperature": 0.7,
    }
    assert dataclasses.replace(make(LLAMA, **extra), dtype=None) == make(LLAMA)


def test_head_dim_null_or_of_its_own() -> None:
    assert make(LLAMA, head_dim=None).head_dim == 8
    assert make(LLAMA, head_dim=20).head_dim == 20
    assert make(LLAMA, num_key_value_heads=None).n_kv_heads == 4


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", "32"),
        ("hidden_size", 0),
        ("num_hidden_layers", -1),
        ("num_attention_heads", 2.5),
        ("vocab_size", True),
        ("attention_bias", "yes"),
        ("hidden_act", "prelu"),
        ("eos_token_id", "end"),
        ("rms_norm_eps", float("nan")),
    ],
)
def test_bad_values_name_the_field(field: str, value: Any) -> None:
    with pytest.raises(ModelConfigError, match=field):
        make(LLAMA, **{field: value})


def test_missing_field_is_named() -> None:
    values = {key: value for key, value in LLAMA.items() if key != "intermediate_size"}
    with pytest.raises(ModelConfigError, match="no intermediate_size"):
        config_from_hf(values)


def test_heads_must_divide() -> None:
    with pytest.raises(ModelConfigError, match="multiple of the KV heads"):
        make(LLAMA, num_key_value_heads=3)


@pytest.mark.parametrize(("given", "ids"), [(2, (2,)), ([5, 7], (5, 7)), (None, ()), ([], ()), (-1, ())])
def test_eos_ids(given: Any, ids: tuple[int, ...]) -> None:
    assert make(LLAMA, eos_token_id=given).eos_token_ids == ids


@pytest.mark.parametrize(("key", "value"), [("dtype", "bfloat16"), ("torch_dtype", "torch.bfloat16")])
def test_dtype_spellings(key: str, value: str) -> None:
    assert make(LLAMA, **{key: value}).dtype == "bfloat16"


def test_tying_defaults() -> None:
    assert not make(LLAMA).tied
    assert make(GEMMA3).tied
    assert config_from_hf(presets.load("opt-125m")).tied
    assert not make(GEMMA3, tie_word_embeddings=False).tied


def test_sliding_windows_per_layer() -> None:
    assert windows(make(QWEN2, sliding_window=16)) == [0] * 4
    used = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}
    assert windows(make(QWEN2, **used)) == [0, 0, 16, 16]
    types = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    assert windows(make(QWEN2, **used, layer_types=types)) == [16, 0, 0, 16]
    mistral = {**LLAMA, "model_type": "mistral"}
    assert windows(make(mistral)) == [4096] * 2
    assert windows(make(mistral, sliding_window=None)) == windows(make(mistral, sliding_window=0)) == [0, 0]
    gemma2 = {**GEMMA3, "model_type": "gemma2"}
    assert windows(make(gemma2)) == [16, 0, 16, 0, 16, 0, 16]
    assert windows(make(GEMMA3)) == [16] * 5 + [0, 16]
    with pytest.raises(ModelConfigError, match="layer_types"):
        make(QWEN2, layer_types=["chunked_attention"] * 4)


def test_gemma3_old_and_new_rope_are_the_same() -> None:
    old = {
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 6,
    }
    new = {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    }
    assert make(GEMMA3, **old) == make(GEMMA3, **new)
    local, full = make(GEMMA3, **old).layers[4].rope, make(GEMMA3, **old).layers[5].rope
    assert local is not None and full is not None
    assert (local.kind, local.base, full.kind, full.base) == ("default", 1e4, "linear", 1e6)


def test_gemma3_text_part_of_a_multimodal_file() -> None:
    outer = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {key: value for key, value in GEMMA3.items() if key != "model_type"},
        "vision_config": {"model_type": "siglip_vision_model"},
        "eos_token_id": [1, 106],
        "image_token_index": 30,
    }
    config = config_from_hf(outer)
    assert config.eos_token_ids == (1, 106)
    plain = dataclasses.replace(make(GEMMA3), eos_token_ids=(1, 106), names=config.names)
    assert config == plain
    with pytest.raises(ModelConfigError, match="llava"):
        config_from_hf({**outer, "model_type": "llava"})


def test_gemma3_4b_as_published_relies_on_defaults() -> None:
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = config_from_hf({"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106]})
    sizes = (config.vocab_size, config.n_heads, config.n_kv_heads, config.head_dim, config.n_layers)
    assert sizes == (262_208, 8, 4, 256, 34)
    assert count_parameters(config) == 3_880_263_168


def test_neox_old_rotary_fields() -> None:
    base = {
        "model_type": "gpt_neox",
        "vocab_size": 40,
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 64,
    }
    rope = make(base, rotary_pct=0.5, rotary_emb_base=5000).layers[0].rope
    assert rope is not None and (rope.dim, rope.base) == (8, 5000.0)
    default = make(base).layers[0].rope
    assert default is not None and (default.dim, default.base) == (4, 10_000.0)


def test_opt_variants() -> None:
    small = config_from_hf(presets.load("opt-350m"))
    assert (small.embed_size, small.norm_placement, small.final_norm) == (512, "post", False)
    assert small.n_learned_positions == 2050 and small.position_offset == 2
    large = config_from_hf(presets.load("opt-1.3b"))
    assert (large.embed_size, large.norm_placement, large.final_norm) == (2048, "pre", True)
    removed = config_from_hf({**presets.load("opt-1.3b"), "_remove_final_layer_norm": True})
    assert not removed.final_norm


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
        ("falcon", {"new_decoder_architecture": True, "parallel_attn": False}, "parallel_attn"),
        ("gemma3_text", {"use_bidirectional_attention": True, "intermediate_size": 3}, "bidirectional"),
    ],
)
def test_variants_that_are_not_supported(model_type: str, changes: dict[str, Any], message: str) -> None:
    values = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    with pytest.raises(ModelConfigError, match=message):
        config_from_hf({"model_type": model_type, **values, **changes})


def test_alibi_slopes_of_eight_and_six_heads() -> None:
    assert alibi_slopes(8) == tuple(2.0**-i for i in range(1, 9))
    assert alibi_slopes(6) == pytest.approx((2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3))


def test_longrope_tells_where_its_keys_change() -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    scaling = {"type": "su", **factors}
    phi3 = {**LLAMA, "model_type": "phi3", "original_max_position_embeddings": 4096}
    assert make(phi3, rope_scaling=scaling, max_position_embeddings=131_072).rope_switch_len == 4096
    assert make(LLAMA).rope_switch_len == 0


def test_unit_order_and_names() -> None:
    names = [unit.name for unit in unit_specs(make(LLAMA))]
    assert names == [
        "embed",
        "layers.0.attn",
        "layers.0.mlp",
        "layers.1.attn",
        "layers.1.mlp",
        "final",
        "head.0",
    ]
    parallel = config_from_hf(presets.load("pythia-160m"))
    assert [unit.name for unit in unit_specs(parallel)][1:3] == ["layers.0", "layers.1"]


def checkpoint_shapes(config: ModelConfig, prefix: str, head_prefix: str = "") -> dict[str, tuple[int, ...]]:
    """Shapes of a checkpoint of a family whose tensors are stored one by one."""
    shapes: dict[str, tuple[int, ...]] = {}
    for unit in unit_specs(config):
        for spec in unit.tensors:
            for part in spec.parts:
                front = head_prefix if part.source.startswith("lm_head") else prefix
                rows = spec.shape[0]
                if spec.name == "qkv":
                    heads = config.n_heads if "q_proj" in part.source else config.n_kv_heads
                    rows = heads * config.head_dim
                elif spec.name == "gate_up":
                    rows //= 2
                elif unit.kind == "head":
                    rows = config.vocab_size
                shapes[front + part.source] = (rows, *spec.shape[1:])
    return shapes


@pytest.mark.parametrize(
    ("prefix", "head_prefix"),
    [
        ("model.", ""),
        ("", ""),
        ("transformer.", "transformer."),
        ("language_model.model.", "language_model."),
        ("model.language_model.", ""),
    ],
)
def test_any_prefix_is_found(prefix: str, head_prefix: str) -> None:
    config = make(LLAMA)
    shapes = checkpoint_shapes(config, prefix, head_prefix)
    found = match_tensors(config, unit_specs(config), shapes)
    assert found["norm.weight"] == prefix + "norm.weight"
    assert found["lm_head.weight"] == head_prefix + "lm_head.weight"
    assert set(found.values()) == set(shapes)


def tied_with_file() -> tuple[ModelConfig, tuple[UnitSpec, ...], dict[str, tuple[int, ...]]]:
    config = make(LLAMA, tie_word_embeddings=True)
    units = unit_specs(config)
    return config, units, checkpoint_shapes(config, "model.")


def test_tied_files_may_or_may_not_hold_the_head() -> None:
    config, units, shapes = tied_with_file()
    assert "lm_head.weight" not in shapes
    without = match_tensors(config, units, shapes)
    assert match_tensors(config, units, {**shapes, "lm_head.weight": (40, 32)}) == without
    assert units[-1].tensors[0].parts[0].source == units[0].tensors[0].parts[0].source


def test_missing_head_of_an_untied_file_says_what_to_do() -> None:
    _, _, shapes = tied_with_file()
    config = make(LLAMA)
    with pytest.raises(ModelConfigError, match=r"lm_head\.weight.*set tie_word_embeddings"):
        match_tensors(config, unit_specs(config), shapes)


def test_missing_tensors_are_named() -> None:
    config, units, shapes = tied_with_file()
    del shapes["model.layers.1.self_attn.k_proj.weight"]
    with pytest.raises(ModelConfigError, match=r"lacks 1 .*model\.layers\.1\.self_attn\.k_proj\.weight"):
        match_tensors(config, units, shapes)
    with pytest.raises(ModelConfigError, match="no tensor embed_tokens"):
        match_tensors(config, units, {"bert.pooler.weight": (3, 3)})


def test_unused_tensors_are_named_and_known_buffers_are_not() -> None:
    config, units, shapes = tied_with_file()
    buffers = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": (4,),
        "model.layers.0.attn.masked_bias": (),
        "model.layers.0.attention.bias": (1, 1, 8, 8),
    }
    assert match_tensors(config, units, {**shapes, **buffers})
    extra = {"model.layers.0.self_attn.q_proj.bias": (32,), "model.layers.2.mlp.down_proj.weight": (1, 1)}
    with pytest.raises(ModelConfigError, match=r"holds 2 .*q_proj\.bias.*layers\.2\.mlp"):
        match_tensors(config, units, {**shapes, **extra})


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        (
            "model.embed_tokens.weight",
            (41, 32),
            r"embed_tokens.weight is \(41, 32\), tokens takes \(40, 32\)",
        ),
        ("model.norm.weight", (31,), r"model.norm.weight is \(31\), norm.weight takes \(32\)"),
        ("model.layers.0.self_attn.q_proj.weight", (24, 32), "give 56 rows, qkv has 64"),
        ("model.layers.0.self_attn.o_proj.weight", (32, 24), r"o_proj.weight is \(32, 24\)"),
        ("model.layers.1.mlp.up_proj.weight", (24, 32, 1), r"up_proj.weight is \(24, 32, 1\)"),
    ],
)
def test_shapes_are_checked(name: str, shape: tuple[int, ...], message: str) -> None:
    config, units, shapes = tied_with_file()
    with pytest.raises(ModelConfigError, match=message):
        match_tensors(config, units, {**shapes, name: shape})


def test_vision_tensors_of_gemma3_are_left_out() -> None:
    outer = {"model_type": "gemma3", "text_config": {**GEMMA3, "model_type": "gemma3_text"}}
    config = config_from_hf(outer)
    shapes = checkpoint_shapes(config, "language_model.model.")
    vision = {"vision_tower.vision_model.post_layernorm.bias": (3,), "multi_modal_projector.x": (2, 2)}
    assert match_tensors(config, unit_specs(config), {**shapes, **vision})
    with pytest.raises(ModelConfigError, match="vision_tower"):
        match_tensors(make(GEMMA3), unit_specs(config), {**shapes, **vision})
