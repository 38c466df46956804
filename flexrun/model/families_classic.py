"""Families with layer norms and plain MLPs: GPT-2, GPT-NeoX (Pythia), OPT, Falcon, BLOOM. Needs no torch."""

from __future__ import annotations

import math
from typing import Any

from flexrun.model.families_common import activation, common, finish
from flexrun.model.fields import Fields
from flexrun.model.rope_config import rope_from_hf
from flexrun.model.schema import LayerConfig, ModelConfig, NormConfig, TensorNames


def _shared(fields: Fields, family: str, names: TensorNames, *, eps: float, tied: bool) -> dict[str, Any]:
    shared = common(fields, family)
    hidden_size, n_heads = shared["hidden_size"], shared["n_heads"]
    if hidden_size % n_heads:
        raise fields.error("hidden_size", f"must be a multiple of the {n_heads} heads", hidden_size)
    return shared | {
        "n_kv_heads": n_heads,
        "head_dim": hidden_size // n_heads,
        "norm": NormConfig(
            kind="layer", eps=fields.number("layer_norm_epsilon", "layer_norm_eps", default=eps)
        ),
        "gated": False,
        "tied": fields.flag("tie_word_embeddings", default=tied),
        "names": names,
    }


def gpt2(fields: Fields, ignored: tuple[str, ...]) -> ModelConfig:
    """Learned positions; linear weights stored as (in, out)."""
    names = TensorNames(
        embed="wte",
        positions="wpe",
        layer="h.{}.",
        final_norm="ln_f",
        attn_norm="ln_1",
        qkv="attn.c_attn",
        qkv_layout="stacked",
        attn_out="attn.c_proj",
        mlp_norm="ln_2",
        up="mlp.c_fc",
        down="mlp.c_proj",
        transposed=True,
    )
    shared = _shared(fields, "gpt2", names, eps=1e-5, tied=True)
    max_positions = fields.integer("n_positions", "max_position_embeddings", default=1024)
    shared |= {
        "max_positions": max_positions,
        "n_learned_positions": max_positions,
        "activation": activation(fields, "activation_function", default="gelu_new"),
        "qkv_bias": True,
        "attn_out_bias": True,
        "mlp_bias": True,
    }
    fields.fixed("add_cross_attention", False)
    scale = shared["head_dim"] ** -0.5 if fields.flag("scale_attn_weights", default=True) else 1.0
    by_layer = fields.flag("scale_attn_by_inverse_layer_idx", default=False)
    ffn_size = fields.integer("n_inner", default=None) or 4 * shared["hidden_size"]
    layers = tuple(
        LayerConfig(scale=scale / (i + 1) if by_layer else scale, ffn_size=ffn_size)
        for i in range(shared.pop("n_layers"))
    )
    return finish(fields, shared, layers, ignored)


def gpt_neox(fields: Fields, ignored: tuple[str, ...]) -> ModelConfig:
    """Partial rope; attention and MLP in parallel (or not); q, k and v of each head lie together."""
    names = TensorNames(
        embed="embed_in",
        head="embed_out",
        layer="layers.{}.",
        final_norm="final_layer_norm",
        attn_norm="input_layernorm",
        qkv="attention.query_key_value",
        qkv_layout="per_group",
        attn_out="attention.dense",
        mlp_norm="post_attention_layernorm",
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
    )
    shared = _shared(fields, "gpt_neox", names, eps=1e-5, tied=False)
    max_positions = fields.integer("max_position_embeddings", default=2048)
    bias = fields.flag("attention_bias", default=True)
    shared |= {
        "max_positions": max_positions,
        "activation": activation(fields, "hidden_act", default="gelu"),
        "residual": "parallel" if fields.flag("use_parallel_residual", default=True) else "serial",
        "qkv_bias": bias,
        "attn_out_bias": bias,
        "mlp_bias": True,
    }
    rope = rope_from_hf(fields, shared["head_dim"], max_positions, partial=0.25)
    layer = LayerConfig(
        scale=shared["head_dim"] ** -0.5,
        rope=rope,
        ffn_size=fields.integer("intermediate_size", default=24_576),
    )
    return finish(fields, shared, (layer,) * shared.pop("n_layers"), ignored)


def opt(fields: Fields, ignored: tuple[str, ...]) -> ModelConfig:
    """Learned positions from row 2 on; OPT-350m norms after the residual and projects its embeddings."""
    names = TensorNames(
        embed="embed_tokens",
        positions="embed_positions",
        project_in="project_in",
        project_out="project_out",
        layer="layers.{}.",
        final_norm="final_layer_norm",
        attn_norm="self_attn_layer_norm",
        q="self_attn.q_proj",
        k="self_attn.k_proj",
        v="self_attn.v_proj",
        attn_out="self_attn.out_proj",
        mlp_norm="final_layer_norm",
        up="fc1",
        down="fc2",
    )
    shared = _shared(fields, "opt", names, eps=1e-5, tied=True)
    max_positions = fields.integer("max_position_embeddings", default=2048)
    bias = fields.flag("enable_bias", default=True)
    norm_first = fields.flag("do_layer_norm_before", default=True)
    affine = fields.flag("layer_norm_elementwise_affine", default=True)
    shared |= {
        "norm": NormConfig(kind="layer", eps=1e-5, affine=affine),
        "norm_placement": "pre" if norm_first else "post",
        "final_norm": norm_first and not fields.flag("_remove_final_layer_norm", default=False),
        "max_positions": max_positions,
        "n_learned_positions": max_positions + 2,
        "position_offset": 2,
        "embed_size": fields.integer("word_embed_proj_dim", default=shared["hidden_size"]),
        "activation": activation(fields, "activation_function", default="relu"),
        "qkv_bias": bias,
        "attn_out_bias": bias,
        "mlp_bias": bias,
    }
    layer = LayerConfig(scale=shared["head_dim"] ** -0.5, ffn_size=fields.integer("ffn_dim", default=3072))
    return finish(fields, shared, (layer,) * shared.pop("n_layers"), ignored)


def falcon(fields: Fields, ignored: tuple[str, ...]) -> ModelConfig:
    """Three fused layouts: one KV head (7b), groups (40b), or q, k, v head by head (rw, with alibi)."""
    new = fields.flag("new_decoder_architecture", default=False)
    multi_query = fields.flag("multi_query", default=True)
    parallel = fields.flag("parallel_attn", default=True)
    n_norms = fields.integer("num_ln_in_parallel_attn", default=None)
    if new and not parallel:
        raise fields.error("parallel_attn", "must be true with new_decoder_architecture", parallel)
    two_norms = new and n_norms in (None, 2)
    names = TensorNames(
        embed="word_embeddings",
        layer="h.{}.",
        final_norm="ln_f",
        attn_norm="ln_attn" if two_norms else "input_layernorm",
        qkv="self_attention.query_key_value",
        qkv_layout="stacked" if multi_query and not new else "per_group",
        attn_out="self_attention.dense",
        mlp_norm="ln_mlp" if two_norms else "post_attention_layernorm",
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
    )
    shared = _shared(fields, "falcon", names, eps=1e-5, tied=True)
    kv_heads = fields.integer("num_kv_heads", "n_head_kv", default=shared["n_heads"])
    if not new:
        kv_heads = 1 if multi_query else shared["n_heads"]
    max_positions = fields.integer("max_position_embeddings", default=2048)
    bias = fields.flag("bias", default=False)
    alibi = fields.flag("alibi", default=False)
    scale = shared["head_dim"] ** -0.5
    shared |= {
        "n_kv_heads": kv_heads,
        "max_positions": max_positions,
        "residual": "parallel" if two_norms else "parallel_one_norm" if parallel else "serial",
        "activation": activation(fields, "activation", default="gelu"),
        "qkv_bias": bias,
        "attn_out_bias": bias,
        "mlp_bias": bias,
    }
    if alibi:
        # Falcon's slopes are bfloat16, and its position term is scaled together with q.k.
        slopes = alibi_slopes(shared["n_heads"])
        shared["alibi_slopes"] = tuple(_round_to_bfloat16(slope) * scale for slope in slopes)
        fields.raw("rope_theta")
        fields.raw("rope_parameters")
    layer = LayerConfig(
        scale=scale,
        rope=None if alibi else rope_from_hf(fields, shared["head_dim"], max_positions),
        ffn_size=fields.integer("ffn_hidden_size", default=4 * shared["hidden_size"]),
    )
    return finish(fields, shared, (layer,) * shared.pop("n_layers"), ignored)


def bloom(fields: Fields, ignored: tuple[str, ...]) -> ModelConfig:
    """Alibi; a norm on the embeddings; q, k and v of each head lie together."""
    names = TensorNames(
        embed="word_embeddings",
        embed_norm="word_embeddings_layernorm",
        layer="h.{}.",
        final_norm="ln_f",
        attn_norm="input_layernorm",
        qkv="self_attention.query_key_value",
        qkv_layout="per_group",
        attn_out="self_attention.dense",
        mlp_norm="post_attention_layernorm",
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
    )
    shared = _shared(fields, "bloom", names, eps=1e-5, tied=True)
    fields.fixed("apply_residual_connection_post_layernorm", False)
    fields.fixed("n_inner", 4 * shared["hidden_size"])
    shared |= {
        # Alibi sets no limit; the trained length does.
        "max_positions": fields.integer("seq_length", "max_position_embeddings", default=2048),
        "alibi_slopes": alibi_slopes(shared["n_heads"]),
        "embed_norm": True,
        "activation": "gelu_tanh",
        "qkv_bias": True,
        "attn_out_bias": True,
        "mlp_bias": True,
    }
    layer = LayerConfig(scale=shared["head_dim"] ** -0.5, ffn_size=4 * shared["hidden_size"])
    return finish(fields, shared, (layer,) * shared.pop("n_layers"), ignored)


def alibi_slopes(n_heads: int) -> tuple[float, ...]:
    """Slopes of the alibi paper (Press et al. 2022): a geometric series for the largest power of two of
    heads, then every second slope of the series for twice as many."""

    def series(n: int) -> list[float]:
        return [2.0 ** (-8.0 * (i + 1) / n) for i in range(n)]

    power = 2 ** int(math.log2(n_heads))
    return tuple(series(power) + series(2 * power)[0::2][: n_heads - power])


def _round_to_bfloat16(value: float) -> float:
    # bfloat16 keeps 8 bits of mantissa; the slopes are normal numbers, so rounding is to a power of two.
    mantissa, exponent = math.frexp(value)
    return math.ldexp(round(mantissa * 256), exponent - 8)
