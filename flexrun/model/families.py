"""The table of families: how each config.json describes its mathematics and names its tensors.

A family is a function from the fields of config.json to a ModelConfig. Most share `_modern`, the
RMS-norm, rope and gated-MLP decoder; the older ones (GPT-2, GPT-NeoX, OPT, Falcon, BLOOM) are in
`families_classic`. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from flexrun.model import families_classic as classic
from flexrun.model.families_common import (
    activation,
    common,
    finish,
    layer_windows,
    sliding_window,
)
from flexrun.model.fields import Fields
from flexrun.model.rope_config import LAYER_TYPES, parse_rope, rope_from_hf, rope_parameters
from flexrun.model.schema import (
    LayerConfig,
    ModelConfig,
    ModelConfigError,
    MoeConfig,
    NormConfig,
    RopeConfig,
    TensorNames,
)

Family = Callable[[Fields, tuple[str, ...]], ModelConfig]

LLAMA_NAMES = TensorNames(
    embed="embed_tokens",
    layer="layers.{}.",
    final_norm="norm",
    attn_norm="input_layernorm",
    q="self_attn.q_proj",
    k="self_attn.k_proj",
    v="self_attn.v_proj",
    attn_out="self_attn.o_proj",
    mlp_norm="post_attention_layernorm",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
)
_QK_NORM: dict[str, Any] = {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
_SANDWICH: dict[str, Any] = {
    "attn_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}


def _modern(
    fields: Fields,
    family: str,
    *,
    max_positions: int,
    rope: Mapping[str, Any] | None = None,
    head_dim: int | None = None,
    kv_heads: int | None = None,
    eps: float = 1e-6,
    act: str = "silu",
    norm_offset: float = 0.0,
) -> tuple[dict[str, Any], RopeConfig]:
    """What all RMS-norm families share: arguments of ModelConfig without layers, and the rope setting.

    The keyword arguments are the family's defaults. kv_heads None: as many as query heads.
    """
    shared = common(fields, family)
    n_heads, hidden_size = shared["n_heads"], shared["hidden_size"]
    default_head_dim = head_dim or hidden_size // n_heads
    shared["head_dim"] = fields.integer("head_dim", default=default_head_dim)
    shared["n_kv_heads"] = fields.integer("num_key_value_heads", default=kv_heads or n_heads)
    shared["max_positions"] = fields.integer("max_position_embeddings", default=max_positions)
    shared["norm"] = NormConfig(eps=fields.number("rms_norm_eps", default=eps), offset=norm_offset)
    shared["activation"] = activation(fields, "hidden_activation", "hidden_act", default=act)
    shared["names"] = LLAMA_NAMES
    if rope is None:
        return shared, RopeConfig(dim=2)  # replaced by a family whose layers differ in rope
    return shared, rope_from_hf(fields, shared["head_dim"], shared["max_positions"], **rope)


def _layers(
    fields: Fields, shared: dict[str, Any], rope: RopeConfig, windows: list[int]
) -> tuple[LayerConfig, ...]:
    ffn_size = fields.integer("intermediate_size")
    scale = shared["head_dim"] ** -0.5
    return tuple(LayerConfig(scale=scale, window=w, rope=rope, ffn_size=ffn_size) for w in windows)


def _llama(fields: Fields, ignored: tuple[str, ...]) -> ModelConfig:
    shared, rope = _modern(fields, "llama", max_positions=2048, rope={})
    bias = fields.flag("attention_bias", default=False)
    shared |= {"qkv_bias": bias, "attn_out_bias": bias, "mlp_bias": fields.flag("mlp_bias", default=False)}
    windows = [0] * shared.pop("n_layers")
    return finish(fields, shared, _layers(fields, shared, rope, windows), ignored)


def _mistral(fields: Fields, ignored: tuple[str, ...]) -> ModelConfig:
    shared, rope = _modern(fields, "mistral", max_positions=131_072, rope={}, kv_heads=8)
    n_layers = shared.pop("n_layers")
    window = sliding_window(fields, 4096)
    windows = [window] * n_layers
    if fields.has("layer_types") and len(set(layer_windows(fields, n_layers, window, []))) > 1:
        raise fields.error("layer_types", "must be the same for all layers", fields.raw("layer_types"))
    return finish(fields, shared, _layers(fields, shared, rope, windows), ignored)


def _qwen(fields: Fields, ignored: tuple[str, ...], family: str) -> ModelConfig:
    qwen3 = family == "qwen3"
    shared, rope = _modern(
        fields, family, max_positions=32_768, rope={}, head_dim=128 if qwen3 else None, kv_heads=32
    )
    n_layers = shared.pop("n_layers")
    if qwen3:
        bias = fields.flag("attention_bias", default=False)
        shared |= {"qkv_bias": bias, "attn_out_bias": bias, "qk_norm": True}
        shared["names"] = replace(LLAMA_NAMES, **_QK_NORM)
    else:
        shared |= {"qkv_bias": True}
    window = sliding_window(fields, 4096) if fields.flag("use_sliding_window", default=False) else 0
    fields.raw("sliding_window")
    first = fields.integer("max_window_layers", default=28, minimum=0)
    default = ["sliding_attention" if window and i >= first else "full_attention" for i in range(n_layers)]
    windows = layer_windows(fields, n_layers, window, default)
    return finish(fields, shared, _layers(fields, shared, rope, windows), ignored)


def _gemma_shared(
    fields: Fields, family: str, max_positions: int, *, rope: Mapping[str, Any] | None, tied: bool = True
) -> tuple[dict[str, Any], RopeConfig]:
    shared, rope_config = _modern(
        fields,
        family,
        max_positions=max_positions,
        rope=rope,
        head_dim=256,
        kv_heads=4,
        act="gelu_pytorch_tanh",
        norm_offset=1.0,
    )
    bias = fields.flag("attention_bias", default=False)
    shared |= {
        "qkv_bias": bias,
        "attn_out_bias": bias,
        "embed_scale": shared["hidden_size"] ** 0.5,
        "norm_placement": "sandwich",
        "names": replace(LLAMA_NAMES, **_SANDWICH),
        "tied": fields.flag("tie_word_embeddings", default=tied),
    }
    fields.fixed("use_bidirectional_attention", False)
    return shared, rope_config


def _gemma2(fields: Fields, ignored: tuple[str, ...]) -> ModelConfig:
    shared, rope = _gemma_shared(fields, "gemma2", 8192, rope={})
    n_layers = shared.pop("n_layers")
    shared["attn_softcap"] = fields.number("attn_logit_softcapping", default=_softcap(fields, "attn", 50.0))
    shared["logit_softcap"] = fields.number(
        "final_logit_softcapping", default=_softcap(fields, "final", 30.0)
    )
    default = ["sliding_attention" if i % 2 == 0 else "full_attention" for i in range(n_layers)]
    windows = layer_windows(fields, n_layers, sliding_window(fields, 4096), default)
    layers = _layers(fields, shared, rope, windows)
    scale = fields.number("query_pre_attn_scalar", default=256.0) ** -0.5
    return finish(fields, shared, tuple(replace(layer, scale=scale) for layer in layers), ignored)


def _softcap(fields: Fields, which: str, default: float) -> float:
    # Null switches a softcap off; only a file without the field means the family's default.
    return 0.0 if fields.mentions(f"{which}_logit_softcapping") else default


def _gemma3(fields: Fields, ignored: tuple[str, ...]) -> ModelConfig:
    shared, _ = _gemma_shared(fields, "gemma3", 131_072, rope=None)
    n_layers = shared.pop("n_layers")
    shared |= {"qk_norm": True, "names": replace(LLAMA_NAMES, **_SANDWICH, **_QK_NORM)}
    # The reference implementation reads attn_logit_softcapping but never applies it.
    fields.raw("attn_logit_softcapping")
    shared["logit_softcap"] = fields.number("final_logit_softcapping", default=0.0)
    pattern = fields.integer("sliding_window_pattern", "_sliding_window_pattern", default=6)
    default = ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(n_layers)]
    windows = layer_windows(fields, n_layers, sliding_window(fields, 4096), default)
    # A window of 0 cannot tell the kind of layer apart when sliding_window is null, so ropes go by type.
    types = fields.raw("layer_types", default=default)
    ropes = _gemma3_ropes(fields, shared["head_dim"], shared["max_positions"])
    ffn_size = fields.integer("intermediate_size")
    scale = fields.number("query_pre_attn_scalar", default=256.0) ** -0.5
    layers = tuple(
        LayerConfig(scale=scale, window=window, rope=ropes[kind], ffn_size=ffn_size)
        for window, kind in zip(windows, types, strict=True)
    )
    return finish(fields, shared, layers, ignored)


def _gemma3_ropes(fields: Fields, head_dim: int, max_positions: int) -> dict[str, RopeConfig]:
    params = rope_parameters(fields)
    bases = {
        "full_attention": fields.number("rope_theta", default=1_000_000.0),
        "sliding_attention": fields.number("rope_local_base_freq", default=10_000.0),
    }
    nested = any(kind in params for kind in LAYER_TYPES)
    # The old form scales the full-attention layers alone.
    by_type = params if nested else {"full_attention": params}
    return {
        kind: parse_rope(by_type.get(kind) or {}, head_dim, max_positions, base=bases[kind])
        for kind in LAYER_TYPES
    }


def _phi3(fields: Fields, ignored: tuple[str, ...]) -> ModelConfig:
    rope_defaults = {"original_max_positions": 4096, "yarn_is_longrope": True}
    shared, rope = _modern(fields, "phi3", max_positions=4096, rope=rope_defaults, eps=1e-5)
    shared["names"] = replace(
        LLAMA_NAMES,
        q=None,
        k=None,
        v=None,
        qkv="self_attn.qkv_proj",
        qkv_layout="stacked",
        gate=None,
        up=None,
        gate_up="mlp.gate_up_proj",
    )
    fields.fixed("attention_bias", False)
    windows = [sliding_window(fields, 0)] * shared.pop("n_layers")
    return finish(fields, shared, _layers(fields, shared, rope, windows), ignored)


def _mixtral(fields: Fields, ignored: tuple[str, ...]) -> ModelConfig:
    shared, rope = _modern(fields, "mixtral", max_positions=131_072, rope={"base": 1e6}, kv_heads=8, eps=1e-5)
    moe = MoeConfig(
        n_experts=fields.integer("num_local_experts", "num_experts", default=8),
        n_experts_per_token=fields.integer("num_experts_per_tok", default=2),
        ffn_size=fields.integer("intermediate_size"),
    )
    shared["names"] = replace(
        LLAMA_NAMES,
        gate=None,
        up=None,
        router="block_sparse_moe.gate",
        expert_gate="block_sparse_moe.experts.{}.w1",
        expert_up="block_sparse_moe.experts.{}.w3",
        expert_down="block_sparse_moe.experts.{}.w2",
    )
    layer = LayerConfig(
        scale=shared["head_dim"] ** -0.5, window=sliding_window(fields, 0), rope=rope, moe=moe
    )
    return finish(fields, shared, (layer,) * shared.pop("n_layers"), ignored)


def _qwen3_moe(fields: Fields, ignored: tuple[str, ...]) -> ModelConfig:
    shared, rope = _modern(fields, "qwen3_moe", max_positions=32_768, rope={}, kv_heads=4)
    bias = fields.flag("attention_bias", default=False)
    shared |= {"qkv_bias": bias, "attn_out_bias": bias, "qk_norm": True}
    shared["names"] = replace(
        LLAMA_NAMES,
        **_QK_NORM,
        router="mlp.gate",
        expert_gate="mlp.experts.{}.gate_proj",
        expert_up="mlp.experts.{}.up_proj",
        expert_down="mlp.experts.{}.down_proj",
    )
    moe = MoeConfig(
        n_experts=fields.integer("num_experts", "num_local_experts", default=128),
        n_experts_per_token=fields.integer("num_experts_per_tok", default=8),
        ffn_size=fields.integer("moe_intermediate_size", default=768),
        normalize_weights=fields.flag("norm_topk_prob", default=False),
    )
    window = sliding_window(fields, 4096) if fields.flag("use_sliding_window", default=False) else 0
    fields.raw("sliding_window")
    fields.raw("max_window_layers")
    dense = LayerConfig(
        scale=shared["head_dim"] ** -0.5,
        window=window,
        rope=rope,
        ffn_size=fields.integer("intermediate_size", default=6144),
    )
    sparse_step = fields.integer("decoder_sparse_step", default=1)
    dense_layers = fields.raw("mlp_only_layers", default=[])
    layers = tuple(
        dense if i in dense_layers or (i + 1) % sparse_step else replace(dense, moe=moe)
        for i in range(shared.pop("n_layers"))
    )
    return finish(fields, shared, layers, ignored)


FAMILIES: dict[str, Family] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": lambda fields, ignored: _qwen(fields, ignored, "qwen2"),
    "qwen3": lambda fields, ignored: _qwen(fields, ignored, "qwen3"),
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma3_text": _gemma3,
    "phi3": _phi3,
    "gpt2": classic.gpt2,
    "gpt_neox": classic.gpt_neox,
    "opt": classic.opt,
    "falcon": classic.falcon,
    "bloom": classic.bloom,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
}

# Parts of a multimodal file that text generation does not touch.
_VISION = (r"(^|\.)vision_tower\.", r"(^|\.)multi_modal_projector\.")
# Files with vision write only what differs from these.
_GEMMA3_DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
}


def text_config(values: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The language model's part of a config.json, and patterns of the tensors that belong to other parts.

    Gemma 3 files with vision keep it under "text_config"; every other file is its own text configuration.
    """
    inner = values.get("text_config")
    if not isinstance(inner, Mapping):
        return dict(values), ()
    if values.get("model_type") != "gemma3":
        raise ModelConfigError(
            f"config.json: multimodal models of type {values.get('model_type')!r} are not supported "
            "(of these, only gemma3's text part is)"
        )
    outer = {name: values[name] for name in ("tie_word_embeddings", "torch_dtype", "dtype") if name in values}
    for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
        if values.get(name) is not None:
            outer[name] = values[name]
    merged = {
        **_GEMMA3_DEFAULTS,
        **inner,
        **{name: value for name, value in outer.items() if value is not None},
    }
    return {**merged, "model_type": "gemma3_text"}, _VISION
