"""Causal attention of prompt segments on a CPU with AMX: plans, addresses and working memory behind
`quant.kernels_prefill_amx`.

Segments of any lengths go together: of prompts that begin here, and of longer ones whose earlier tokens lie in bf16
pages, which are read where they are. Importing this module imports torch, not numba.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quant.amx import workspace
from quant.kernel_choice import has_amx
from quant.kernels_attention import AttentionParams

MOST_BYTES = 64 << 20
# What a unit of queries costs beside its keys, in keys.
_UNIT_COST = 48
# The kernel compares positions as fp32.
MAX_KEYS = 1 << 24


class PrefillSegment(NamedTuple):
    """Queries first..first + n of a call. They see n_pages whole pages, then the call's keys
    first_key..first_key + n_keys, of which the last n are their own."""

    first: int
    n: int
    first_key: int
    n_keys: int
    n_pages: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPlan:
    """How the work of one call is cut: the same for all layers of a pass that share heads and window.

    n_queries, n_keys, n_pages: what a call must bring at least. items, units, share_bounds: as the kernel takes them.
    Of each block of up to 32 keys: its KV head, how many they are, and the page and the first one's place in it, or
    page -1 and the place among the call's keys. most_blocks: of an item.
    """

    window: int
    page_tokens: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_queries: int
    n_keys: int
    n_pages: int
    items: npt.NDArray[np.int64]
    units: npt.NDArray[np.int64]
    share_bounds: npt.NDArray[np.int64]
    block_head: npt.NDArray[np.int64]
    block_keys: npt.NDArray[np.int64]
    block_page: npt.NDArray[np.int64]
    block_token: npt.NDArray[np.int64]
    most_blocks: int


class Pages(NamedTuple):
    """Addresses of bf16 pages, of all segments in order, int64 (n_pages,), and where V begins in a page, in bytes."""

    addresses: npt.NDArray[np.int64]
    v_offset: int


def can_prefill(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether `prefill_attention` takes these: bf16 on the CPU, heads of whole tiles, and this processor has AMX."""
    tensors = (query, key, value)
    return (
        all(t.dtype == torch.bfloat16 and t.device.type == "cpu" and t.stride(-1) == 1 for t in tensors)
        and query.shape[-1] % 32 == 0
        and has_amx()
    )


def plan_prefill(
    segments: Sequence[PrefillSegment],
    *,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    window: int = 0,
    page_tokens: int = 0,
    n_threads: int | None = None,
    most_bytes: int = MOST_BYTES,
) -> PrefillPlan:
    """Cut the attention of these segments into even shares for n_threads, torch.get_num_threads() if None.

    most_bytes: for packed keys, which decide how many threads work; one does in any case.
    Raises ValueError for segments that cannot be, and for pages that do not hold a multiple of 32 tokens.
    """
    from quant.kernels_prefill_amx import KEYS, LANES

    if n_heads % n_kv_heads or head_dim % 32:
        raise ValueError(
            f"{n_heads} query heads of {head_dim} numbers for {n_kv_heads} KV heads: each KV head must serve as many, "
            f"and {head_dim} be a multiple of 32"
        )
    for s in segments:
        if s.n < 1 or s.n_keys < s.n or min(s.first, s.first_key, s.n_pages) < 0:
            raise ValueError(f"{s} has no queries, or fewer keys than queries, or begins before its tensors")
        if s.n_pages and (page_tokens < 1 or page_tokens % KEYS):
            raise ValueError(f"pages must hold a multiple of {KEYS} tokens, got {page_tokens}")
        if s.n_pages * page_tokens + s.n_keys > MAX_KEYS:
            raise ValueError(f"{s} sees more than {MAX_KEYS} keys")
    group, of_page = n_heads // n_kv_heads, max(page_tokens, 1)
    items: list[tuple[int, ...]] = []
    units, costs, blocks = [], [], []
    first_block = first_page = most_blocks = 0
    heads = np.arange(n_kv_heads)
    for s in segments:
        stored = s.n_pages * page_tokens
        seen = stored + s.n_keys
        # For one KV head; then repeated for all.
        rows = np.arange(0, s.n * group, LANES)
        last = seen - s.n + np.minimum(rows + LANES - 1, s.n * group - 1) // group
        begin = np.maximum(seen - s.n + rows // group - window + 1, 0) if window else 0
        paged, own = np.arange(0, stored, KEYS), np.arange(0, s.n_keys, KEYS)
        n_paged, n_blocks = len(paged), len(paged) + len(own)
        block = np.empty((3, n_blocks), np.int64)  # keys, page, token
        block[0, :n_paged], block[0, n_paged:] = KEYS, np.minimum(s.n_keys - own, KEYS)
        block[1, :n_paged], block[1, n_paged:] = first_page + paged // of_page, -1
        block[2, :n_paged], block[2, n_paged:] = paged % of_page, s.first_key + own
        units.append(np.stack((np.repeat(len(items) + heads, len(rows)), np.tile(rows, n_kv_heads))))
        costs.append(np.tile(last + 1 - begin + _UNIT_COST, n_kv_heads))
        blocks.append(np.concatenate((np.repeat(heads, n_blocks)[None], np.tile(block, n_kv_heads))))
        items.extend((s.first, s.n, seen, head, first_block + head * n_blocks) for head in range(n_kv_heads))
        first_block += n_kv_heads * n_blocks
        first_page += s.n_pages
        most_blocks = max(most_blocks, n_blocks)
    item_bytes = max(1, most_blocks * 2 * KEYS * head_dim * 2)
    n_shares = max(1, min(n_threads or torch.get_num_threads(), most_bytes // item_bytes))
    cost = np.concatenate([np.empty(0, np.int64), *costs])
    bounds = np.arange(n_shares + 1) * (cost.sum() / n_shares)
    block_head, block_keys, block_page, block_token = np.concatenate(
        [np.empty((4, 0), np.int64), *blocks], axis=1
    )
    return PrefillPlan(
        window=window,
        page_tokens=page_tokens,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        n_queries=max((s.first + s.n for s in segments), default=0),
        n_keys=max((s.first_key + s.n_keys for s in segments), default=0),
        n_pages=first_page,
        items=np.array(items, dtype=np.int64).reshape(-1, 5),
        units=np.ascontiguousarray(np.concatenate([np.empty((2, 0), np.int64), *units], axis=1).T),
        share_bounds=np.searchsorted(np.cumsum(cost) - cost / 2, bounds).astype(np.int64),
        block_head=block_head,
        block_keys=block_keys,
        block_page=block_page,
        block_token=block_token,
        most_blocks=most_blocks,
    )


def prefill_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    params: AttentionParams,
    plan: PrefillPlan,
    out: Tensor,
    pages: Pages | None = None,
) -> Tensor:
    """Attend the plan's segments, writing their tokens of out and no others. Returns out.

    query, out: bf16 (tokens, n_heads, head_dim), out's heads side by side; key, value: bf16 (keys, n_kv_heads,
    head_dim); of any strides otherwise. pages: where the plan's segments have any, bf16 (2, n_kv_heads, page_tokens,
    head_dim) each, K first; the caller keeps them in memory. A query's result does not depend on the others.
    Working memory, kept for the next call: K and V of one KV head of the longest segment and about 60 KB for each
    thread.
    Raises ValueError if these do not fit the plan.
    """
    _check(query, key, value, params, plan, out, pages)
    from quant import kernels_prefill_amx as kernels
    from quant.kernels_amx import CONFIGURATION
    from quant.threads import use_torch_threads

    use_torch_threads()
    slopes = np.asarray(params.alibi_slopes or (), dtype=np.float32).reshape(plan.n_kv_heads, -1)
    source = query if query.stride(1) == plan.head_dim else query.contiguous()
    n_shares = len(plan.share_bounds) - 1
    packed_step = plan.most_blocks * kernels.packed_nbytes(plan.head_dim)
    work = workspace(n_shares * (packed_step + kernels.scratch_nbytes(plan.head_dim)))
    kernels.prefill_attention(
        source.data_ptr(),
        source.stride(0) * 2,
        out.data_ptr(),
        out.stride(0) * 2,
        plan.n_heads // plan.n_kv_heads,
        plan.head_dim,
        _blocks(plan, key, value, pages),
        plan.items,
        plan.units,
        plan.share_bounds,
        plan.window,
        np.float32(params.scale),
        np.float32(params.softcap),
        slopes,
        CONFIGURATION,
        work.data_ptr(),
        packed_step,
        work.data_ptr() + n_shares * packed_step,
    )
    return out


def _blocks(plan: PrefillPlan, key: Tensor, value: Tensor, pages: Pages | None) -> npt.NDArray[np.int64]:
    """The kernel's blocks: K and V rows, their strides, how many, whether K's are read in place."""
    from quant.kernels_prefill_amx import KEYS

    row = plan.head_dim * 2
    columns = np.empty((6, len(plan.block_head)), np.int64)
    for column, tensor in enumerate((key, value)):
        stride, head = tensor.stride(0) * 2, tensor.stride(1) * 2
        columns[column] = tensor.data_ptr() + plan.block_token * stride + plan.block_head * head
        columns[2 + column] = stride
    if pages is not None:
        stored = plan.block_page >= 0
        within = (plan.block_head * plan.page_tokens + plan.block_token)[stored] * row
        columns[0, stored] = pages.addresses[plan.block_page[stored]] + within
        columns[1, stored] = columns[0, stored] + pages.v_offset
        columns[2:4, stored] = row
    columns[4] = plan.block_keys
    columns[5] = (plan.block_keys == KEYS) & (columns[2] == row) & (columns[0] % 64 == 0)
    return np.ascontiguousarray(columns.T)


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    params: AttentionParams,
    plan: PrefillPlan,
    out: Tensor,
    pages: Pages | None,
) -> None:
    if not has_amx():  # without the system's permission the first tile would end the process
        raise RuntimeError("this processor, system or build has no AMX; ask can_prefill first")
    is_whole = out.dtype == query.dtype and out.stride(-1) == 1 and out.stride(1) == out.shape[2]
    if not can_prefill(query, key, value) or not is_whole:
        raise ValueError(
            f"query, key, value and out must be bf16 on the CPU, heads multiples of 32 numbers, out's side by side; "
            f"got {[(t.dtype, t.device.type, tuple(t.shape), t.stride()) for t in (query, key, value, out)]}"
        )
    heads = (query.shape[1:], key.shape[1:], value.shape[1:], out.shape)
    kv = (plan.n_kv_heads, plan.head_dim)
    if heads != ((plan.n_heads, plan.head_dim), kv, kv, query.shape):
        raise ValueError(
            f"the plan is for {plan.n_heads} query and {plan.n_kv_heads} KV heads of {plan.head_dim}; got query "
            f"{tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}, out {tuple(out.shape)}"
        )
    found = (query.shape[0], min(key.shape[0], value.shape[0]), len(pages.addresses) if pages else 0)
    if any(
        have < need for have, need in zip(found, (plan.n_queries, plan.n_keys, plan.n_pages), strict=True)
    ):
        raise ValueError(
            f"the plan needs {plan.n_queries} queries, {plan.n_keys} keys and {plan.n_pages} pages, got {found}"
        )
    if params.window != plan.window:
        raise ValueError(f"the plan is for a window of {plan.window}, the layer has {params.window}")
    if params.alibi_slopes is not None and len(params.alibi_slopes) != plan.n_heads:
        raise ValueError(
            f"alibi_slopes has {len(params.alibi_slopes)} entries for {plan.n_heads} query heads"
        )


__all__ = [
    "Pages",
    "PrefillPlan",
    "PrefillSegment",
    "can_prefill",
    "plan_prefill",
    "prefill_attention",
]
