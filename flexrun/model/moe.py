"""A layer of experts: each token goes through the few experts that its router picks."""

from __future__ import annotations

import torch

from flexrun.model.schema import ModelConfig, MoeConfig
from offload.units import Context, Weights


def route(
    moe: MoeConfig, weights: Weights, x: torch.Tensor, context: Context
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights (fp32) and indices of each token's experts, both (tokens, n_experts_per_token)."""
    scores = context.linear(x, weights["router"]).float().softmax(dim=-1)  # (tokens, n_experts)
    shares, experts = scores.topk(moe.n_experts_per_token, dim=-1)
    if moe.normalize_weights:
        shares = shares / shares.sum(dim=-1, keepdim=True)
    return shares, experts


def expert_mlp(
    config: ModelConfig, moe: MoeConfig, weights: Weights, x: torch.Tensor, context: Context
) -> torch.Tensor:
    """x (tokens, hidden_size) -> the weighted sum of its experts' outputs, same shape and type.

    Tokens are sorted by expert, so that each expert is applied once, to all its tokens together.
    """
    shares, experts = route(moe, weights, x, context)
    order = experts.flatten().argsort(stable=True)  # (tokens * n_experts_per_token,)
    tokens = order // moe.n_experts_per_token
    shares = shares.flatten()[order, None]
    counts = torch.bincount(experts.flatten(), minlength=moe.n_experts).tolist()
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    begin = 0
    for expert, count in enumerate(counts):
        if count == 0:
            continue
        rows = tokens[begin : begin + count]
        inner = context.gated(x[rows], weights[f"experts.{expert}.gate_up"], None, config.activation)
        out = context.linear(inner, weights[f"experts.{expert}.down"])
        total.index_add_(0, rows, out.float() * shares[begin : begin + count])
        begin += count
    return total.to(x.dtype)
