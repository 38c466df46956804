"""Attention units: projections and position encoding here, the attention itself in the runtime."""

from __future__ import annotations

from typing import Any

import torch

from flexrun.model.blocks import UnitBase, add_projection, apply_norm, mlp_inner, norm_input, normalize
from flexrun.model.rope import apply_rope, rope_tables
from flexrun.model.schema import ModelConfig
from flexrun.model.specs import UnitSpec
from offload.units import AttentionParams, Context, Weights


class SelfAttention(UnitBase):
    """`layers.N.attn`: norm, q, k and v, attention, output projection, residual."""

    def __init__(self, spec: UnitSpec, config: ModelConfig) -> None:
        super().__init__(spec, config)
        self.n_heads = config.n_heads
        self.n_kv_heads = config.n_kv_heads
        self.head_dim = config.head_dim
        layer = config.layers[spec.layer]
        self.attention = AttentionParams(
            scale=layer.scale,
            window=layer.window,
            softcap=config.attn_softcap,
            alibi_slopes=config.alibi_slopes,
        )

    def project(
        self, weights: Weights, hidden: torch.Tensor, context: Context
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any]:
        """query (tokens, n_heads, head_dim), key and value (tokens, n_kv_heads, head_dim), and None."""
        config, rope = self.config, self.layer_config.rope
        x = norm_input(config, "attn", weights, hidden)
        qkv = context.linear(x, weights["qkv"], weights.get("qkv.bias"))
        heads = qkv.view(qkv.shape[0], -1, self.head_dim)  # (tokens, n_heads + 2 * n_kv_heads, head_dim)
        query, key, value = torch.split(heads, [self.n_heads, self.n_kv_heads, self.n_kv_heads], dim=1)
        if config.qk_norm:
            query = normalize(config.norm, query, weights["q_norm"])
            key = normalize(config.norm, key, weights["k_norm"])
        if rope is not None:
            cos, sin = context.memo(
                ("rope", rope), lambda: rope_tables(rope, context.positions, context.rope_lens)
            )
            query, key = apply_rope(query, cos, sin), apply_rope(key, cos, sin)
        return query, key, value, None

    def finish(
        self, weights: Weights, hidden: torch.Tensor, attended: torch.Tensor, carry: Any, context: Context
    ) -> torch.Tensor:
        # attended (tokens, n_heads, head_dim) -> (tokens, hidden_size)
        return add_projection(self.config, "attn", weights, hidden, attended.flatten(1), "out", context)

    def forward(self, weights: Weights, hidden: torch.Tensor, context: Context) -> torch.Tensor:
        query, key, value, carry = self.project(weights, hidden, context)
        attended = context.attend(query, key, value, self.attention)
        return self.finish(weights, hidden, attended, carry, context)


class ParallelBlock(SelfAttention):
    """`layers.N`: attention and MLP read the same hidden states, and both are added to them."""

    def finish(
        self, weights: Weights, hidden: torch.Tensor, attended: torch.Tensor, carry: Any, context: Context
    ) -> torch.Tensor:
        # The norm is made again rather than carried: it is cheap, and may have been made long ago.
        name = "mlp_norm" if self.config.residual == "parallel" else "attn_norm"
        x = apply_norm(self.config, name, weights, hidden)
        total = context.add_linear(hidden, attended.flatten(1), weights["out"], weights.get("out.bias"))
        inner = mlp_inner(self.config, weights, x, context)
        return context.add_linear(total, inner, weights["down"], weights.get("down.bias"))
