"""ModelConfig from the metadata of a GGUF file.

All architectures share one naming of tensors (gguf-py's constants), so the table below only says what
differs. What the metadata leaves out is seen from the tensors that exist: biases, fused projections, q and
k norms, tied embeddings. Fused projections are stacked in GGUF files, whatever the original layout, and
norm weights of Gemma are stored with their 1 added. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flexrun.model.families_classic import alibi_slopes
from flexrun.model.fields import Fields
from flexrun.model.rope_config import longrope_attention_factor, yarn_attention_factor
from flexrun.model.schema import (
    LayerConfig,
    ModelConfig,
    ModelConfigError,
    MoeConfig,
    NormConfig,
    RopeConfig,
    TensorNames,
)

ReadVector = Callable[[str], Sequence[float]]

GGUF_NAMES = TensorNames(
    embed="token_embd",
    layer="blk.{}.",
    final_norm="output_norm",
    head="output",
    attn_norm="attn_norm",
    q="attn_q",
    k="attn_k",
    v="attn_v",
    attn_out="attn_output",
    mlp_norm="ffn_norm",
    gate="ffn_gate",
    up="ffn_up",
    down="ffn_down",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arch:
    """What the architecture implies beyond its metadata."""

    family: str
    classic: bool = False  # layer norms and a plain MLP
    activation: str = "silu"
    gemma: bool = False
    alibi: bool = False
    rope: bool = True


GGUF_ARCHITECTURES = {
    "llama": _Arch(family="llama"),
    "qwen2": _Arch(family="qwen2"),
    "qwen3": _Arch(family="qwen3"),
    "qwen3moe": _Arch(family="qwen3_moe"),
    "gemma2": _Arch(family="gemma2", activation="gelu_tanh", gemma=True),
    "gemma3": _Arch(family="gemma3", activation="gelu_tanh", gemma=True),
    "phi3": _Arch(family="phi3"),
    "gpt2": _Arch(family="gpt2", classic=True, activation="gelu_tanh", rope=False),
    "gptneox": _Arch(family="gpt_neox", classic=True, activation="gelu"),
    "falcon": _Arch(family="falcon", classic=True, activation="gelu"),
    "bloom": _Arch(family="bloom", classic=True, activation="gelu_tanh", alibi=True, rope=False),
}

# Metadata of an architecture that says nothing about the mathematics, below "{arch}.".
_HARMLESS = ("vocab_size", "rope.scaling.finetuned", "tensor_data_layout", "embedding_length_per_layer_input")
# Gemma models whose query scale comes from the hidden size: recognised by their depth, as the metadata
# does not tell (27B of either generation).
_GEMMA_HIDDEN_SCALE_DEPTHS = {"gemma2": 46, "gemma3": 62}


class _Metadata:
    """Fields below "{arch}."; lists that hold one value per layer must agree."""

    def __init__(self, metadata: Mapping[str, Any], arch: str) -> None:
        self.arch = arch
        self.fields = Fields(metadata, where="GGUF metadata")

    def raw(self, name: str, default: Any = None) -> Any:
        value = self.fields.raw(f"{self.arch}.{name}", default=default)
        if isinstance(value, list | tuple):
            if len(set(value)) != 1:
                raise self.fields.error(f"{self.arch}.{name}", "must be the same for all layers", value)
            value = value[0]
        return value

    def integer(self, name: str, default: Any = None, minimum: int = 1) -> int:
        value = self.raw(name)
        if value is None:
            if default is None:
                raise ModelConfigError(f"GGUF metadata: {self.arch}.{name} is missing")
            return default
        return Fields({name: value}, where=f"GGUF metadata, {self.arch}").integer(name, minimum=minimum)

    def number(self, name: str, default: float) -> float:
        return self.fields.number(f"{self.arch}.{name}", default=default)


def gguf_config(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], read_vector: ReadVector | None
) -> ModelConfig:
    """See `flexrun.model.config.config_from_gguf`; the architecture is known to be supported."""
    name = str(metadata["general.architecture"])
    arch, meta = GGUF_ARCHITECTURES[name], _Metadata(metadata, name)
    n_layers = meta.integer("block_count")
    hidden_size = meta.integer("embedding_length")
    n_heads = meta.integer("attention.head_count")
    head_dim = meta.integer("attention.key_length", hidden_size // n_heads)
    value_dim = meta.integer("attention.value_length", head_dim)
    if value_dim != head_dim:
        raise ModelConfigError(
            f"GGUF metadata: {name}.attention.value_length must equal key_length {head_dim}, got {value_dim}"
        )
    meta.fields.fixed(f"{name}.attention.causal", True)
    has = _Presence(shapes)
    names = _tensor_names(arch, has, moe=meta.integer("expert_count", 0, 0) > 0)
    settings: dict[str, Any] = {
        "source": "gguf",
        "family": arch.family,
        "vocab_size": has.rows("token_embd.weight"),
        "hidden_size": hidden_size,
        "max_positions": meta.integer("context_length"),
        "n_heads": n_heads,
        "n_kv_heads": meta.integer("attention.head_count_kv", 1 if name == "falcon" else n_heads),
        "head_dim": head_dim,
        "norm": NormConfig(
            kind="layer" if arch.classic else "rms",
            eps=meta.number(
                "attention.layer_norm_rms_epsilon", meta.number("attention.layer_norm_epsilon", 1e-5)
            ),
        ),
        "activation": arch.activation,
        "gated": not arch.classic,
        "qkv_bias": has.layer("attn_qkv.bias") or has.layer("attn_q.bias"),
        "attn_out_bias": has.layer("attn_output.bias"),
        "mlp_bias": has.layer("ffn_down.bias"),
        "head_bias": "output.bias" in shapes,
        "tied": "output.weight" not in shapes,
        "qk_norm": has.layer("attn_q_norm.weight"),
        "logit_softcap": meta.number("final_logit_softcapping", 0.0),
        "attn_softcap": meta.number("attn_logit_softcapping", 0.0),
        "names": names,
        **_tokens(meta.fields),
    }
    settings |= _peculiarities(name, arch, meta, has, settings)
    settings["layers"] = _layers(name, arch, meta, has, settings, n_layers, read_vector)
    if settings["family"] == "llama" and settings["layers"][0].moe is not None:
        settings["family"] = "mixtral"
    meta.fields.refuse_unknown([f"{name}.{key}" for key in _HARMLESS], f"GGUF {name}", prefix=f"{name}.")
    return ModelConfig(**settings)


class _Presence:
    """Questions about which tensors exist; layer 0 answers for all."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = shapes

    def layer(self, name: str) -> bool:
        return f"blk.0.{name}" in self.shapes

    def rows(self, name: str) -> int:
        shape = self.shapes.get(name)
        if not shape:
            raise ModelConfigError(f"GGUF file: tensor {name} is missing")
        return int(shape[0])


def _tokens(fields: Fields) -> dict[str, Any]:
    def token(name: str) -> int | None:
        return fields.integer(f"tokenizer.ggml.{name}_token_id", default=None, minimum=0)

    ends = dict.fromkeys(item for item in (token("eos"), token("eot")) if item is not None)
    return {"eos_token_ids": tuple(ends), "bos_token_id": token("bos"), "pad_token_id": token("padding")}


def _tensor_names(arch: _Arch, has: _Presence, *, moe: bool) -> TensorNames:
    changes: dict[str, Any] = {"permuted_qk": arch.family == "llama"}
    if has.layer("attn_qkv.weight"):
        changes |= {"q": None, "k": None, "v": None, "qkv": "attn_qkv", "qkv_layout": "stacked"}
    if has.layer("attn_q_norm.weight"):
        changes |= {"q_norm": "attn_q_norm", "k_norm": "attn_k_norm"}
    if arch.gemma:
        changes |= {"attn_post_norm": "post_attention_norm", "mlp_post_norm": "post_ffw_norm"}
    if arch.family == "phi3" and not has.layer("ffn_gate.weight"):
        changes |= {"gate": None, "up": None, "gate_up": "ffn_up"}
    if arch.classic:
        changes |= {"gate": None, "positions": "position_embd", "embed_norm": "token_embd_norm"}
    if has.layer("attn_norm_2.weight"):
        changes |= {"attn_norm": "attn_norm_2", "mlp_norm": "attn_norm"}
    if moe:
        stacked = has.layer("ffn_gate_exps.weight")
        changes |= {
            "gate": None,
            "up": None,
            "router": "ffn_gate_inp",
            "stacked_experts": stacked,
            "expert_gate": "ffn_gate_exps" if stacked else "ffn_gate.{}",
            "expert_up": "ffn_up_exps" if stacked else "ffn_up.{}",
            "expert_down": "ffn_down_exps" if stacked else "ffn_down.{}",
        }
    return replace(GGUF_NAMES, **changes)


def _peculiarities(
    name: str, arch: _Arch, meta: _Metadata, has: _Presence, settings: dict[str, Any]
) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    if arch.gemma:
        changes |= {"embed_scale": settings["hidden_size"] ** 0.5, "norm_placement": "sandwich"}
    if arch.alibi:
        meta.fields.fixed(f"{name}.attention.max_alibi_bias", 8)
        changes |= {"alibi_slopes": alibi_slopes(settings["n_heads"])}
    if name == "gemma2":
        changes |= {
            "attn_softcap": meta.number("attn_logit_softcapping", 50.0),
            "logit_softcap": meta.number("final_logit_softcapping", 30.0),
        }
    if name == "gpt2":
        changes["n_learned_positions"] = has.rows("position_embd.weight")
    if name == "bloom":
        changes["embed_norm"] = True
    if name == "gptneox":
        parallel = meta.fields.flag("gptneox.use_parallel_residual", default=True)
        changes["residual"] = "parallel" if parallel else "serial"
    if name == "falcon":
        changes["residual"] = "parallel" if has.layer("attn_norm_2.weight") else "parallel_one_norm"
    return changes


def _layers(
    name: str,
    arch: _Arch,
    meta: _Metadata,
    has: _Presence,
    settings: dict[str, Any],
    n_layers: int,
    read_vector: ReadVector | None,
) -> tuple[LayerConfig, ...]:
    head_dim, n_heads = settings["head_dim"], settings["n_heads"]
    scale = meta.number("attention.scale", 0.0) or head_dim**-0.5
    if n_layers == _GEMMA_HIDDEN_SCALE_DEPTHS.get(name):
        scale = (settings["hidden_size"] / n_heads) ** -0.5
    rope = _rope(meta, head_dim, settings["max_positions"], has, read_vector) if arch.rope else None
    ffn_size = meta.integer("feed_forward_length", 0, 0)
    moe = None
    n_experts = meta.integer("expert_count", 0, 0)
    n_used = meta.integer("expert_used_count", 0, 0)
    expert_size = meta.integer("expert_feed_forward_length", 0, 0)
    if n_experts:
        moe = MoeConfig(n_experts=n_experts, n_experts_per_token=n_used, ffn_size=expert_size or ffn_size)
    base = LayerConfig(scale=scale, rope=rope, ffn_size=ffn_size, moe=moe)
    window = meta.integer("attention.sliding_window", 0, 0)
    if arch.gemma:
        return _gemma_layers(name, meta, base, window or 4096, n_layers)
    return (replace(base, window=window),) * n_layers


def _gemma_layers(
    name: str, meta: _Metadata, base: LayerConfig, window: int, n_layers: int
) -> tuple[LayerConfig, ...]:
    period = meta.integer("attention.sliding_window_pattern", 2 if name == "gemma2" else 6)
    local_base = meta.number("rope.freq_base_swa", 10_000.0)
    local = replace(base, window=window)
    if name == "gemma3":
        assert base.rope is not None
        local = replace(local, rope=RopeConfig(dim=base.rope.dim, base=local_base))
    return tuple(base if (i + 1) % period == 0 else local for i in range(n_layers))


def _rope(
    meta: _Metadata, head_dim: int, max_positions: int, has: _Presence, read_vector: ReadVector | None
) -> RopeConfig:
    kind = meta.fields.text(f"{meta.arch}.rope.scaling.type", default="none")
    factor = meta.number("rope.scaling.factor", meta.number("rope.scale_linear", 1.0)) or 1.0
    original = meta.integer("rope.scaling.original_context_length", 0, 0) or max_positions
    attention = meta.number("rope.scaling.attn_factor", 0.0)
    base = RopeConfig(
        dim=meta.integer("rope.dimension_count", head_dim), base=meta.number("rope.freq_base", 10_000.0)
    )

    def vector(tensor: str) -> tuple[float, ...]:
        if read_vector is None:
            raise ModelConfigError(
                f"GGUF file: the values of {tensor} are needed to know the rope frequencies"
            )
        return tuple(float(value) for value in read_vector(tensor))

    if kind == "longrope" or "rope_factors_long.weight" in has.shapes:
        growth = max_positions / original
        return replace(
            base,
            kind="longrope",
            original_max_positions=original,
            attention_factor=attention or longrope_attention_factor(growth, original),
            short_factors=vector("rope_factors_short.weight"),
            long_factors=vector("rope_factors_long.weight"),
        )
    if kind == "yarn":
        return replace(
            base,
            kind="yarn",
            factor=factor,
            original_max_positions=original,
            attention_factor=(attention or 1.0) * yarn_attention_factor(factor),
            beta_fast=meta.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=meta.number("rope.scaling.yarn_beta_slow", 1.0),
        )
    if kind not in ("none", "linear"):
        raise ModelConfigError(
            f"GGUF metadata: {meta.arch}.rope.scaling.type {kind!r} is not supported; supported are none, "
            "linear, yarn and longrope"
        )
    if "rope_freqs.weight" in has.shapes:  # llama3 scaling, worked out by the converter
        return replace(base, kind="factors", short_factors=vector("rope_freqs.weight"))
    return replace(base, kind="linear", factor=factor) if factor != 1.0 else base
