"""Everything the mathematics of a decoder needs, as plain frozen data. Needs no torch."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "factors"]
NormKind = Literal["rms", "layer"]
NormPlacement = Literal["pre", "post", "sandwich"]
Residual = Literal["serial", "parallel", "parallel_one_norm"]
QkvLayout = Literal["split", "stacked", "per_group"]

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "quick_gelu")
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "factors")


class ModelConfigError(ValueError):
    """A configuration that cannot be run as described. The message names the field and what was found."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ModelConfigError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position encoding of one kind of layer, on the first `dim` entries of each head.

    original_max_positions: positions before any scaling (dynamic, llama3, yarn, longrope).
    attention_factor: multiplies cos and sin (yarn, longrope).
    short_factors, long_factors: divisors of each frequency (longrope); `long_factors` holds for sequences
        longer than original_max_positions. Kind "factors" divides by `short_factors` at any length.
    """

    dim: int
    kind: RopeKind = "default"
    base: float = 10_000.0
    factor: float = 1.0
    original_max_positions: int = 0
    attention_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        _require(self.kind in ROPE_KINDS, f"rope kind {self.kind!r}: must be one of {', '.join(ROPE_KINDS)}")
        _require(
            self.dim > 0 and self.dim % 2 == 0,
            f"rotary dimensions per head: must be positive and even, got {self.dim}",
        )
        for name in ("base", "factor", "attention_factor"):
            value = getattr(self, name)
            _require(math.isfinite(value) and value > 0, f"rope {name}: must be positive, got {value}")
        if self.kind in ("dynamic", "llama3", "yarn", "longrope"):
            _require(
                self.original_max_positions > 0,
                f"rope kind {self.kind}: original_max_position_embeddings must be positive, "
                f"got {self.original_max_positions}",
            )
        if self.kind == "llama3":
            _require(
                0 < self.low_freq_factor < self.high_freq_factor,
                f"rope kind llama3: needs 0 < low_freq_factor < high_freq_factor, "
                f"got {self.low_freq_factor} and {self.high_freq_factor}",
            )
        if self.kind == "dynamic":
            _require(self.dim > 2, f"rope kind dynamic: needs more than 2 rotary dimensions, got {self.dim}")
        needed = {"longrope": ("short_factors", "long_factors"), "factors": ("short_factors",)}
        for name in needed.get(self.kind, ()):
            count = len(getattr(self, name))
            _require(
                count == self.dim // 2,
                f"rope {name}: needs one entry per frequency ({self.dim // 2}), got {count}",
            )

    @property
    def length_dependent(self) -> bool:
        """Whether frequencies follow the length of the sequence."""
        return self.kind in ("dynamic", "longrope")


@dataclass(frozen=True, slots=True, kw_only=True)
class NormConfig:
    """A normalisation: RMS or layer norm, computed in fp32; the weight is stored minus `offset`."""

    kind: NormKind = "rms"
    eps: float = 1e-6
    offset: float = 0.0
    affine: bool = True

    def __post_init__(self) -> None:
        _require(self.kind in ("rms", "layer"), f"norm kind must be rms or layer, got {self.kind!r}")
        _require(math.isfinite(self.eps) and self.eps >= 0, f"norm eps: must not be negative, got {self.eps}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """A layer of experts: softmax over all, the best `n_experts_per_token` of them, their weights
    renormalised to a sum of one or not."""

    n_experts: int
    n_experts_per_token: int
    ffn_size: int
    normalize_weights: bool = True

    def __post_init__(self) -> None:
        _require(self.n_experts > 0, f"number of experts: must be positive, got {self.n_experts}")
        _require(
            0 < self.n_experts_per_token <= self.n_experts,
            f"experts per token: must be 1 to {self.n_experts} (all experts), got {self.n_experts_per_token}",
        )
        _require(self.ffn_size > 0, f"expert hidden size: must be positive, got {self.ffn_size}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """What may differ from layer to layer.

    scale: factor on q.k; window: positions seen, the query's own included (0 = all);
    ffn_size: hidden size of the dense MLP (unused where `moe` is set).
    """

    scale: float
    window: int = 0
    rope: RopeConfig | None = None
    ffn_size: int = 0
    moe: MoeConfig | None = None

    def __post_init__(self) -> None:
        _require(
            math.isfinite(self.scale) and self.scale > 0,
            f"attention scale: must be positive, got {self.scale}",
        )
        _require(self.window >= 0, f"attention window: must not be negative, got {self.window}")
        _require(
            self.moe is not None or self.ffn_size > 0,
            f"MLP hidden size: must be positive, got {self.ffn_size}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """Where a checkpoint keeps each tensor: stems without ".weight", None where the family has none.

    Names below `layer` follow its prefix, in which "{}" is the layer's number; in `expert_*`, "{}" is the
    expert's number. qkv_layout tells how a fused `qkv` lies: stacked (all q, all k, all v) or per_group (for
    each KV head in turn its query heads, its k, its v).
    transposed: linear weights of the layers are (in_features, out_features).
    stacked_experts: one three-dimensional tensor holds all experts of a layer.
    permuted_qk: the rotary rows of q and k are interleaved (GGUF files of llama models).
    ignored: regular expressions of further tensors that are no weights of this model.
    """

    embed: str
    layer: str
    final_norm: str
    attn_norm: str
    attn_out: str
    mlp_norm: str
    down: str
    head: str = "lm_head"
    positions: str | None = None
    embed_norm: str | None = None
    project_in: str | None = None
    project_out: str | None = None
    q: str | None = None
    k: str | None = None
    v: str | None = None
    qkv: str | None = None
    qkv_layout: QkvLayout = "split"
    q_norm: str | None = None
    k_norm: str | None = None
    attn_post_norm: str | None = None
    mlp_post_norm: str | None = None
    gate: str | None = None
    up: str | None = None
    gate_up: str | None = None
    router: str | None = None
    expert_gate: str | None = None
    expert_up: str | None = None
    expert_down: str | None = None
    transposed: bool = False
    stacked_experts: bool = False
    permuted_qk: bool = False
    ignored: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        split = self.qkv_layout == "split"
        present = [name for name in (self.q, self.k, self.v) if name is not None]
        _require(
            (len(present) == 3) if split else (self.qkv is not None),
            f"tensor names: layout {self.qkv_layout} needs {'q, k and v' if split else 'qkv'}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder, ready to be built.

    embed_size: width of the embedding table and of the head (differs from hidden_size in OPT-350m, which
        projects in and out). embed_scale: factor on embeddings, rounded to the compute dtype.
    n_learned_positions: rows of a table of learned positions (0 = none), read at position +
        position_offset. alibi_slopes: one per query head, or None.
    residual: "serial"; "parallel" (attention and MLP from the same input, a norm each);
        "parallel_one_norm". qk_norm: q and k are RMS-normed per head before rope.
    attn_softcap, logit_softcap: 0 = none. dtype: the checkpoint's stated type, or None.
    source: "hf" or "gguf", the naming that `names` follows.
    """

    family: str
    vocab_size: int
    hidden_size: int
    max_positions: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    names: TensorNames
    norm: NormConfig
    activation: str = "silu"
    gated: bool = True
    norm_placement: NormPlacement = "pre"
    residual: Residual = "serial"
    qk_norm: bool = False
    qkv_bias: bool = False
    attn_out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    embed_size: int = 0
    embed_scale: float = 1.0
    embed_norm: bool = False
    n_learned_positions: int = 0
    position_offset: int = 0
    alibi_slopes: tuple[float, ...] | None = None
    final_norm: bool = True
    attn_softcap: float = 0.0
    logit_softcap: float = 0.0
    logit_scale: float = 1.0
    tied: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    dtype: str | None = None
    source: Literal["hf", "gguf"] = "hf"

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "max_positions", "n_heads", "n_kv_heads", "head_dim"):
            value = getattr(self, name)
            _require(type(value) is int and value > 0, f"{name}: must be a positive integer, got {value!r}")
        if self.embed_size == 0:
            object.__setattr__(self, "embed_size", self.hidden_size)
        _require(bool(self.layers), "number of layers: must be positive, got 0")
        _require(
            self.n_heads % self.n_kv_heads == 0,
            f"query heads: must be a multiple of the KV heads, got {self.n_heads} and {self.n_kv_heads}",
        )
        _require(
            self.activation in ACTIVATIONS,
            f"activation {self.activation!r}: must be one of {', '.join(ACTIVATIONS)}",
        )
        slopes = self.alibi_slopes
        _require(
            slopes is None or len(slopes) == self.n_heads,
            f"alibi slopes: needs one per head ({self.n_heads}), got {len(slopes or ())}",
        )
        for index, layer in enumerate(self.layers):
            _require(
                layer.rope is None or layer.rope.dim <= self.head_dim,
                f"layer {index}: rotary dimensions exceed head_dim {self.head_dim}",
            )
            _require(
                layer.moe is None or (self.gated and self.residual == "serial"),
                f"layer {index}: experts need a gated MLP and serial residuals",
            )
        _require(
            self.residual == "serial" or self.norm_placement == "pre",
            f"parallel residuals need norm_placement 'pre', got {self.norm_placement!r}",
        )

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @property
    def rope_switch_len(self) -> int:
        """Longest sequence whose keys are rotated by the short factors (longrope), else 0.

        When a sequence grows past it, keys made before were rotated by other frequencies: its KV cache has
        to be made anew to equal a prefill of the whole sequence.
        """
        lengths = [
            layer.rope.original_max_positions
            for layer in self.layers
            if layer.rope is not None and layer.rope.kind == "longrope"
        ]
        return min(lengths, default=0)

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready values; `ModelConfig.from_dict` is the inverse."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelConfig:
        """Inverse of `to_dict`, also after a trip through JSON. Raises ModelConfigError."""
        try:
            layers = []
            for layer in values["layers"]:
                rope, moe = layer.get("rope"), layer.get("moe")
                if rope is not None:
                    rope = RopeConfig(
                        **rope | {key: tuple(rope.get(key, ())) for key in ("short_factors", "long_factors")}
                    )
                moe = None if moe is None else MoeConfig(**moe)
                layers.append(LayerConfig(**layer | {"rope": rope, "moe": moe}))
            slopes = values.get("alibi_slopes")
            names = values["names"]
            return cls(
                **values
                | {
                    "layers": tuple(layers),
                    "names": TensorNames(**names | {"ignored": tuple(names.get("ignored", ()))}),
                    "norm": NormConfig(**values["norm"]),
                    "alibi_slopes": None if slopes is None else tuple(slopes),
                    "eos_token_ids": tuple(values.get("eos_token_ids", ())),
                }
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ModelConfigError(f"not a saved model configuration: {error}") from error
