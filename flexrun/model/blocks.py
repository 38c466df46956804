"""Blocks that units are made of: norms, activations, the dense MLP. All take flat lists of tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from flexrun.model.schema import LayerConfig, ModelConfig, NormConfig
from flexrun.model.specs import UnitSpec
from offload.units import Context, TensorSpec, Weights
from quant import pointwise
from quant.pointwise import ACTIVATIONS


def normalize(
    norm: NormConfig, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Norm over the last dimension in fp32, returned in x's type."""
    scale = None if weight is None else weight.float()
    if scale is not None and norm.offset:
        scale = scale + norm.offset
    size = (x.shape[-1],)
    if pointwise.fits(x):
        shift = None if bias is None else bias.float()
        return pointwise.norm(x, scale, shift, eps=norm.eps, centered=norm.kind != "rms")
    if norm.kind == "rms":
        out = F.rms_norm(x.float(), size, scale, norm.eps)
    else:
        out = F.layer_norm(x.float(), size, scale, None if bias is None else bias.float(), norm.eps)
    return out.to(x.dtype)


def apply_norm(config: ModelConfig, name: str, weights: Weights, hidden: torch.Tensor) -> torch.Tensor:
    """The norm called `name` of a unit: its tensors are `name`.weight and, for layer norms, `name`.bias."""
    return normalize(config.norm, hidden, weights.get(name + ".weight"), weights.get(name + ".bias"))


class UnitBase:
    """What all units share: the fields of their UnitSpec. No weights are kept."""

    def __init__(self, spec: UnitSpec, config: ModelConfig) -> None:
        self.name: str = spec.name
        self.layer: int = spec.layer
        self.tensors: tuple[TensorSpec, ...] = spec.tensors
        self.pinned: bool = spec.pinned
        self.rows_only: bool = spec.rows_only
        self.config = config

    @property
    def layer_config(self) -> LayerConfig:
        return self.config.layers[self.layer]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name})"


def mlp_inner(config: ModelConfig, weights: Weights, x: torch.Tensor, context: Context) -> torch.Tensor:
    """x (tokens, hidden_size) -> what the down projection reads, (tokens, ffn_size)."""
    if config.gated:
        return context.gated(x, weights["gate_up"], weights.get("gate_up.bias"), config.activation)
    return ACTIVATIONS[config.activation](context.linear(x, weights["up"], weights.get("up.bias")))


def add_projection(
    config: ModelConfig,
    name: str,
    weights: Weights,
    hidden: torch.Tensor,
    x: torch.Tensor,
    projection: str,
    context: Context,
) -> torch.Tensor:
    """hidden + the projection of x, as `add_residual` adds: in one walk where no norm comes between."""
    weight, bias = weights[projection], weights.get(projection + ".bias")
    if config.norm_placement == "sandwich":
        return add_residual(config, name, weights, hidden, context.linear(x, weight, bias))
    total = context.add_linear(hidden, x, weight, bias)
    return _post_norm(config, name, weights, total)


def add_residual(
    config: ModelConfig, name: str, weights: Weights, hidden: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """hidden + out, in hidden's memory, with the norm that the placement asks for: `name`_post_norm before adding
    (sandwich), or `name`_norm after it (post), which makes a tensor of its own."""
    if config.norm_placement == "sandwich":
        out = apply_norm(config, f"{name}_post_norm", weights, out)
    return _post_norm(config, name, weights, hidden.add_(out))


def _post_norm(config: ModelConfig, name: str, weights: Weights, total: torch.Tensor) -> torch.Tensor:
    if config.norm_placement == "post":
        return apply_norm(config, f"{name}_norm", weights, total)
    return total


def norm_input(config: ModelConfig, name: str, weights: Weights, hidden: torch.Tensor) -> torch.Tensor:
    """What a sublayer reads: the normed hidden states, or these themselves where norms come after."""
    if config.norm_placement == "post":
        return hidden
    return apply_norm(config, f"{name}_norm", weights, hidden)
