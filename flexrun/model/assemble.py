"""A ModelConfig turned into units that compute. See offload.units for what the runtime expects of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexrun.model.attention import ParallelBlock, SelfAttention
from flexrun.model.blocks import UnitBase, add_projection, add_residual, apply_norm, mlp_inner, norm_input
from flexrun.model.moe import expert_mlp
from flexrun.model.schema import ModelConfig
from flexrun.model.specs import UnitSpec, unit_specs
from offload.units import Context, Unit, Weights


class Embedding(UnitBase):
    """`embed`: token rows, scaled, normed or projected as the family has it, plus learned positions."""

    def forward(self, weights: Weights, hidden: torch.Tensor, context: Context) -> torch.Tensor:
        config, dtype = self.config, context.compute_dtype
        out: torch.Tensor = weights["tokens"].gather(context.token_ids, dtype)  # (tokens, embed_size)
        if config.embed_scale != 1.0:
            # Trained with the scale rounded to the type of the weights: 55.4256 is 55.5 in bfloat16.
            out = out * torch.tensor(config.embed_scale, dtype=dtype, device=out.device)
        if config.embed_norm:
            out = apply_norm(config, "norm", weights, out)
        if "project_in" in weights:
            out = context.linear(out, weights["project_in"])
        if config.n_learned_positions:
            out = out + weights["positions"].gather(context.positions + config.position_offset, dtype)
        return out


class Mlp(UnitBase):
    """`layers.N.mlp`: norm, dense MLP or experts, residual."""

    def forward(self, weights: Weights, hidden: torch.Tensor, context: Context) -> torch.Tensor:
        config, moe = self.config, self.layer_config.moe
        x = norm_input(config, "mlp", weights, hidden)
        if moe is not None:
            out = expert_mlp(config, moe, weights, x, context)
            return add_residual(config, "mlp", weights, hidden, out)
        inner = mlp_inner(config, weights, x, context)
        return add_projection(config, "mlp", weights, hidden, inner, "down", context)


class FinalNorm(UnitBase):
    """`final`: (rows, hidden_size) -> (rows, embed_size), what the head reads."""

    def forward(self, weights: Weights, hidden: torch.Tensor, context: Context) -> torch.Tensor:
        if self.config.final_norm:
            hidden = apply_norm(self.config, "norm", weights, hidden)
        if "project_out" in weights:
            hidden = context.linear(hidden, weights["project_out"])
        return hidden


class HeadSlice(UnitBase):
    """`head.K`: logits of one slice of the vocabulary, handed to the context."""

    def __init__(self, spec: UnitSpec, config: ModelConfig) -> None:
        super().__init__(spec, config)
        self.start = spec.head_start

    def forward(self, weights: Weights, hidden: torch.Tensor, context: Context) -> torch.Tensor:
        config = self.config
        logits = context.linear(hidden, weights["weight"], weights.get("bias"))  # (rows, slice)
        if config.logit_scale != 1.0:
            logits = logits * config.logit_scale
        if config.logit_softcap:
            capped = torch.tanh(logits.float() / config.logit_softcap) * config.logit_softcap
            logits = capped.to(logits.dtype)
        context.put_logits(self.start, logits)
        return hidden


_UNIT_CLASSES: dict[str, type[Embedding | SelfAttention | Mlp | ParallelBlock | FinalNorm | HeadSlice]] = {
    "embed": Embedding,
    "attention": SelfAttention,
    "mlp": Mlp,
    "layer": ParallelBlock,
    "final": FinalNorm,
    "head": HeadSlice,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderModel:
    """An ordered list of units (offload.units.Model) and the configuration that they came from."""

    config: ModelConfig
    units: tuple[Unit, ...]

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def n_layers(self) -> int:
        return self.config.n_layers

    @property
    def max_positions(self) -> int:
        return self.config.max_positions


def build_model(config: ModelConfig) -> DecoderModel:
    """The units of the model, in order. They hold no weights, so this is instant for any size."""
    units = tuple(_UNIT_CLASSES[spec.kind](spec, config) for spec in unit_specs(config))
    return DecoderModel(config=config, units=units)
