"""Attention over keys and values that lie dense on one device: prompt segments and gathered decode batches.

Everything is computed in the dtype of the inputs with fp32 softmax, prompts by AMX's tiles where the processor has
them. Query heads are grouped by the KV head they share, so that no key is repeated in memory.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from offload.units import AttentionParams
from quant import prefill_attention as tiles
from quant.kernels_attention import AttentionParams as KernelParams

# Scores of one block of queries: bounds the memory of the explicit path to about 32 MiB of fp32.
_MAX_SCORES = 8 << 20


def attend_segments(query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
    """Causal attention of equally long prompt segments to the whole of their sequences so far.

    query (batch, n, n_heads, head_dim): the last n positions; key, value (batch, total, n_kv_heads,
    head_dim) with total >= n -> (batch, n, n_heads, head_dim).
    """
    if tiles.can_prefill(query, key, value):
        return _attend_by_tiles(query, key, value, params)
    batch, n, n_heads, head_dim = query.shape
    total, n_kv_heads = key.shape[1], key.shape[2]
    heads_per_kv = n_heads // n_kv_heads
    windowed = 0 < params.window < total
    # torch's CPU kernel reads a KV head for all its query heads; other devices' fused kernels may not, and would
    # be passed over.
    shares_heads = heads_per_kv > 1 and query.device.type == "cpu"
    if params.softcap or params.alibi_slopes is not None:
        return _explicit(query, key, value, params)
    # (batch, n, heads, head_dim) -> (batch, heads, n, head_dim)
    q = query.transpose(1, 2)
    k = key.transpose(1, 2)
    v = value.transpose(1, 2)
    if heads_per_kv > 1 and not shares_heads:
        # (batch, n_kv_heads, total, head_dim) -> (batch, n_heads, total, head_dim)
        k = k.repeat_interleave(heads_per_kv, dim=1)
        v = v.repeat_interleave(heads_per_kv, dim=1)
    if n == total and not windowed:
        out = scaled_dot_product_attention(
            q, k, v, is_causal=n > 1, scale=params.scale, enable_gqa=shares_heads
        )
    else:
        mask = causal_mask(n, total, params.window, query.device)
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=params.scale, enable_gqa=shares_heads
        )
    return out.transpose(1, 2)


def _attend_by_tiles(query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
    batch, n, n_heads, head_dim = query.shape
    total, n_kv_heads = key.shape[1], key.shape[2]
    plan = tiles.plan_prefill(
        [tiles.PrefillSegment(b * n, n, b * total, total) for b in range(batch)],
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        window=params.window,
    )
    out = torch.empty(query.shape, dtype=query.dtype)
    q, k, v = (x.flatten(0, 1) for x in (query, key, value))  # (batch * n, heads, head_dim)
    tiles.prefill_attention(q, k, v, kernel_params(params), plan, out.flatten(0, 1))
    return out


@lru_cache(maxsize=256)
def kernel_params(params: AttentionParams) -> KernelParams:
    """The same for quant's kernels."""
    return KernelParams(
        scale=params.scale,
        softcap=params.softcap,
        window=params.window,
        alibi_slopes=params.alibi_slopes,
    )


def causal_mask(n: int, total: int, window: int, device: torch.device) -> Tensor:
    """bool (n, total): may the i-th of the last n positions see position j of total."""
    rows = torch.arange(total - n, total, device=device)[:, None]
    cols = torch.arange(total, device=device)[None, :]
    mask = cols <= rows
    if window > 0:
        mask &= cols > rows - window
    return mask


def _explicit(query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
    """Attention with softcap or alibi, in blocks of queries that bound the score matrix."""
    batch, n, n_heads, head_dim = query.shape
    total, n_kv_heads = key.shape[1], key.shape[2]
    heads_per_kv = n_heads // n_kv_heads
    out = torch.empty_like(query)
    step = max(1, _MAX_SCORES // max(1, batch * n_heads * total))
    k = key.permute(0, 2, 3, 1).unsqueeze(2)  # (batch, n_kv_heads, 1, head_dim, total)
    v = value.transpose(1, 2).unsqueeze(2)  # (batch, n_kv_heads, 1, total, head_dim)
    for begin in range(0, n, step):
        end = min(begin + step, n)
        # (batch, rows, n_heads, head_dim) -> (batch, n_kv_heads, heads_per_kv, rows, head_dim)
        q = query[:, begin:end].unflatten(2, (n_kv_heads, heads_per_kv)).permute(0, 2, 3, 1, 4)
        scores = torch.matmul(q, k).float()
        shown = total - n + end
        mask = causal_mask(end - begin, shown, params.window, query.device)
        scores = scores[..., :shown]
        positions = torch.arange(total - n + begin, shown, device=query.device)
        probs = _softmax(scores, mask, positions[:, None], params, n_kv_heads, heads_per_kv)
        mixed = torch.matmul(probs.to(v.dtype), v[..., :shown, :])
        # (batch, n_kv_heads, heads_per_kv, rows, head_dim) -> (batch, rows, n_heads, head_dim)
        out[:, begin:end] = mixed.permute(0, 3, 1, 2, 4).flatten(2, 3)
    return out


def _softmax(
    scores: Tensor,
    mask: Tensor,
    query_positions: Tensor,
    params: AttentionParams,
    n_kv_heads: int,
    heads_per_kv: int,
) -> Tensor:
    """fp32 probabilities of raw q.k scores (..., n_kv_heads, heads_per_kv, rows, cols).

    mask (..., rows, cols) broadcasts; query_positions broadcasts against (rows, cols).
    """
    scores = scores * params.scale
    if params.softcap:
        scores = torch.tanh(scores / params.softcap) * params.softcap
    if params.alibi_slopes is not None:
        slopes = torch.tensor(params.alibi_slopes, device=scores.device, dtype=torch.float32)
        distance = torch.arange(scores.shape[-1], device=scores.device) - query_positions
        bias = slopes.view(n_kv_heads, heads_per_kv, 1, 1) * distance.float().unsqueeze(-3).unsqueeze(-3)
        scores = scores + bias
    return scores.masked_fill(~mask, float("-inf")).softmax(-1)


def attend_dense(
    query: Tensor, key: Tensor, value: Tensor, seq_lens: Tensor, params: AttentionParams
) -> Tensor:
    """One query per sequence against padded keys and values.

    query (batch, n_heads, head_dim), key and value (batch, n_kv_heads, max_len, head_dim), seq_lens
    (batch,) on the same device, the query's own token being the last -> (batch, n_heads, head_dim).
    """
    batch, n_heads, head_dim = query.shape
    n_kv_heads, max_len = key.shape[1], key.shape[2]
    heads_per_kv = n_heads // n_kv_heads
    cols = torch.arange(max_len, device=query.device)
    lens = seq_lens.to(query.device)[:, None]
    mask = cols < lens
    if params.window > 0:
        mask &= cols >= lens - params.window
    # (batch, n_heads, head_dim) -> (batch, n_kv_heads, heads_per_kv, head_dim)
    q = query.unflatten(1, (n_kv_heads, heads_per_kv))
    if params.softcap == 0.0 and params.alibi_slopes is None:
        out = scaled_dot_product_attention(
            q, key, value, attn_mask=mask[:, None, None, :], scale=params.scale
        )
        return out.flatten(1, 2)
    scores = torch.matmul(q, key.transpose(2, 3)).float().unsqueeze(3)  # (batch, kv, per_kv, 1, max_len)
    probs = _softmax(
        scores,
        mask[:, None, None, None, :],
        (lens - 1).view(batch, 1, 1),
        params,
        n_kv_heads,
        heads_per_kv,
    )
    return torch.matmul(probs.squeeze(3).to(value.dtype), value).flatten(1, 2)
