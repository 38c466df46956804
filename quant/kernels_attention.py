"""Attention of one new token per sequence over its KV pages, on the CPU, where the pages lie.

`decode_attention` reads plain and packed pages directly (numba, compiled on first use and cached on disk).
`packed_is_faster` says for which shapes that beats unpacking the pages first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quant.kernel_choice import has_amx, has_native_bf16, has_numba
from quant.kv import MIN_VECTOR_DIM, gather_pages
from quant.kv_batch import PagedBatch, page_addresses, part_offsets, plain_format, tail_addresses
from quant.kv_formats import CacheFormat

# A head is cut into segments no smaller than this, whatever the number of threads.
MIN_SEGMENT_TOKENS = 256
# Shares of whole segments are even enough when each holds several.
SEGMENTS_PER_THREAD = 8
# K and V gathered at a time where plain torch attends.
_GATHER_BYTES = 64 << 20

# Largest number of query heads per KV head at which reading pages in place beats unpacking them into a reused
# buffer and torch's grouped attention. Measured by experiments/attention_speed.py, head_dim 64, 2,000 tokens,
# AVX2 and fp32 products: in place won at every number tried, by 1.5 to 5.9 times; 64 is the largest tried.
IN_PLACE_MAX_HEADS = {"f32": 64, "bf16": 64, "f16": 64, "int8": 64, "int4": 64, "int2": 64}
# The same where the processor multiplies bf16 matrices itself (AVX512 and AMX): in place won by 1.1 to 1.4 times at 16,
# at 32 torch won by a twentieth.
IN_PLACE_MAX_HEADS_NATIVE_BF16 = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionParams:
    """What the scores go through: score = softcap(scale * q.k) + alibi, over the last `window` positions.

    scale: factor on q.k. softcap: cap * tanh(score / cap), 0 for none. window: positions that the query sees,
    its own included, 0 for all. alibi_slopes: one per query head, score += slope * (key position - query
    position), or None. Raises ValueError for negative or non-finite values.
    """

    scale: float
    softcap: float = 0.0
    window: int = 0
    alibi_slopes: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if not np.isfinite(self.scale):
            raise ValueError(f"attention scale must be finite, got {self.scale}")
        if not 0.0 <= self.softcap < float("inf"):
            raise ValueError(f"softcap must be 0 (none) or positive, got {self.softcap}")
        if self.window < 0:
            raise ValueError(f"window must be 0 (none) or a number of positions, got {self.window}")
        if self.alibi_slopes is not None and not all(np.isfinite(self.alibi_slopes)):
            raise ValueError(f"alibi_slopes must be finite, got {self.alibi_slopes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePlan:
    """How the work of one call is cut: the same for all layers of a pass that share lengths and window.

    segments: int32 (n, 4) of sequence, KV head, first page, end page, by sequence and head; the tail is a
    segment that starts at the number of full pages. share_bounds: the run of segments of each thread.
    head_bounds: the run of segments of each (sequence, KV head). Both hold one entry more than runs.
    """

    window: int
    page_tokens: int
    n_kv_heads: int
    segments: npt.NDArray[np.int32]
    share_bounds: npt.NDArray[np.int32]
    head_bounds: npt.NDArray[np.int32]


def plan_decode(
    seq_lens: Tensor,
    tail_lens: Tensor,
    *,
    page_tokens: int,
    n_kv_heads: int,
    window: int = 0,
    n_threads: int | None = None,
) -> DecodePlan:
    """Cut the attention over sequences of these lengths (int32 (batch,) each) into even shares.

    n_threads: number of shares, torch.get_num_threads() if None. Long sequences are cut so that a segment is
    small against a share; pages before the window are left out.
    """
    n_shares = n_threads or torch.get_num_threads()
    lengths = seq_lens.numpy().astype(np.int64)
    tails = tail_lens.numpy().astype(np.int64)
    n_full = (lengths - tails) // page_tokens
    first_token = np.maximum(lengths - window, 0) if window else np.zeros_like(lengths)
    first_page = np.minimum(first_token // page_tokens, n_full)
    paged = (n_full - first_page) * page_tokens
    total_tokens = int(paged.sum() + tails.sum()) * n_kv_heads
    segment_tokens = max(MIN_SEGMENT_TOKENS, -(-total_tokens // (n_shares * SEGMENTS_PER_THREAD)))
    pages_per_segment = max(1, segment_tokens // page_tokens)
    n_runs = -(-(n_full - first_page) // pages_per_segment)
    per_head = n_runs + (tails > 0)

    # Rows of one KV head of each sequence, then repeated for all heads.
    sequence = np.repeat(np.arange(len(lengths)), per_head)
    index = np.arange(len(sequence)) - np.repeat(np.cumsum(per_head) - per_head, per_head)
    begin = np.minimum(first_page[sequence] + index * pages_per_segment, n_full[sequence])
    end = np.minimum(begin + pages_per_segment, n_full[sequence])
    cost = np.where(begin < n_full[sequence], (end - begin) * page_tokens, tails[sequence])
    head_counts = np.repeat(per_head, n_kv_heads)  # (batch * n_kv_heads,)
    head_bounds = np.concatenate(([0], np.cumsum(head_counts))).astype(np.int32)
    row = np.arange(head_bounds[-1]) - np.repeat(head_bounds[:-1], head_counts)
    row += np.repeat(np.repeat(np.cumsum(per_head) - per_head, n_kv_heads), head_counts)
    kv_head = np.repeat(np.tile(np.arange(n_kv_heads), len(lengths)), head_counts)
    segments = np.stack((sequence[row], kv_head, begin[row], end[row]), axis=1).astype(np.int32)
    # Contiguous shares of nearly equal cost, so that a thread walks memory forwards: a share ends at the
    # segment whose middle passes its part of the total, and a segment is small against a share.
    segment_cost = cost[row]
    middle = np.cumsum(segment_cost) - segment_cost / 2
    shares = np.arange(n_shares + 1) * (segment_cost.sum() / n_shares)
    share_bounds = np.searchsorted(middle, shares).astype(np.int32)
    return DecodePlan(
        window=window,
        page_tokens=page_tokens,
        n_kv_heads=n_kv_heads,
        segments=np.ascontiguousarray(segments),
        share_bounds=share_bounds,
        head_bounds=head_bounds,
    )


def decode_attention(
    q: Tensor,
    batch: PagedBatch,
    params: AttentionParams,
    *,
    plan: DecodePlan | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of one query per row of `batch`, which holds the query's own K and V as its last position.

    q: (batch, n_heads, head_dim), any float dtype; query heads of one KV head are neighbours. plan: from
    plan_decode with the same lengths and window, made here if None; one serves all layers of a pass. out:
    fp32 (batch, n_heads, head_dim) or None. Returns out. Sums are fp32 throughout. A row of length 0 gives zeros.
    Several query tokens of one sequence are several rows that share page slots and grow in length.
    Raises ValueError if shapes, plan or page slots do not fit.
    """
    if batch.device.type != "cpu" or q.device.type != "cpu":
        raise ValueError(f"decode_attention runs on the CPU, got pages on {batch.device}, q on {q.device}")
    group = _check_query(q, batch, params)
    if out is None:
        out = torch.empty(q.shape, dtype=torch.float32)
    elif out.dtype != torch.float32 or out.shape != q.shape or not out.is_contiguous():
        raise ValueError(f"out must be contiguous fp32 {tuple(q.shape)}, got {out.dtype} {tuple(out.shape)}")
    if batch.head_dim < MIN_VECTOR_DIM or not has_numba():
        return _attend_in_torch(q, batch, params, out)
    if plan is None:
        plan = plan_decode(
            batch.seq_lens,
            batch.tail_lens,
            page_tokens=batch.page_tokens,
            n_kv_heads=batch.n_kv_heads,
            window=params.window,
        )
    planned = (plan.window, plan.page_tokens, plan.n_kv_heads, len(plan.head_bounds) - 1)
    wanted = (params.window, batch.page_tokens, batch.n_kv_heads, batch.batch * batch.n_kv_heads)
    if planned != wanted:
        raise ValueError(
            f"the decode plan is for (window, page_tokens, n_kv_heads, sequences x KV heads) = {planned}, "
            f"the batch has {wanted}; make a plan for each distinct window and set of lengths"
        )
    from quant import kernels_attention_jit as jit
    from quant.kernels_kv_simd import TAGS
    from quant.threads import use_torch_threads

    use_torch_threads()
    grouped = (batch.batch, batch.n_kv_heads, group, batch.head_dim)
    n_segments = len(plan.segments)
    slopes = np.asarray(params.alibi_slopes or (), dtype=np.float32).reshape(batch.n_kv_heads, -1)
    tail_format = plain_format(batch.tails.dtype)
    where = (
        out.view(grouped).numpy(),
        page_addresses(batch),
        tail_addresses(batch),
        batch.seq_lens.numpy(),
        batch.tail_lens.numpy(),
        params.window,
        plan.segments,
        plan.share_bounds,
        plan.head_bounds,
        np.empty((n_segments, group, batch.head_dim), dtype=np.float32),
        np.empty((n_segments, 2, group), dtype=np.float32),
        part_offsets(batch.fmt, batch.page_tokens, batch.n_kv_heads, batch.head_dim),
        part_offsets(tail_format, batch.page_tokens, batch.n_kv_heads, batch.head_dim),
    )
    how = (np.float32(params.scale), np.float32(params.softcap), slopes)
    if _suits_tiles(q, batch):
        from quant import kernels_attention_amx
        from quant.kernels_amx import CONFIGURATION

        query = q.contiguous()
        step = kernels_attention_amx.scratch_nbytes(batch.page_tokens, batch.head_dim)
        work = torch.empty((len(plan.share_bounds) - 1) * step, dtype=torch.uint8)
        kernels_attention_amx.decode_attention(
            query.data_ptr(), *where, batch.page_tokens, *how, CONFIGURATION, work.data_ptr(), step
        )
        return out
    jit.decode_attention(
        q.float().contiguous().view(grouped).numpy(),
        *where,
        batch.fmt.row_nbytes(batch.head_dim) if batch.fmt.is_packed else batch.head_dim,
        batch.page_tokens,
        *how,
        TAGS[batch.fmt.name],
        TAGS[tail_format.name],
    )
    return out


def _suits_tiles(q: Tensor, batch: PagedBatch) -> bool:
    """Whether the kernel for AMX takes these: bf16 throughout, in whole tiles."""
    is_bf16 = q.dtype == batch.tails.dtype == torch.bfloat16 and batch.fmt.name == "bf16"
    return is_bf16 and batch.head_dim % 32 == 0 and batch.page_tokens % 32 == 0 and has_amx()


def _attend_in_torch(q: Tensor, batch: PagedBatch, params: AttentionParams, out: Tensor) -> Tensor:
    """By gathering as many rows at a time as _GATHER_BYTES hold."""
    longest = int(batch.seq_lens.max()) if batch.batch else 0
    row_bytes = 2 * 4 * batch.n_kv_heads * max(1, longest) * batch.head_dim
    step = max(1, _GATHER_BYTES // row_bytes)
    for first in range(0, batch.batch, step):
        rows = slice(first, min(first + step, batch.batch))
        part = batch.rows(rows)
        out[rows] = attend_gathered(q[rows], *gather_pages(part), part.seq_lens, params)
    return out.masked_fill_((batch.seq_lens == 0)[:, None, None], 0.0)


def attend_gathered(q: Tensor, k: Tensor, v: Tensor, seq_lens: Tensor, params: AttentionParams) -> Tensor:
    """The same attention by torch, on any device, over gathered k, v (batch, n_kv_heads, max_len, head_dim).

    Positions from seq_lens[i] (int32 (batch,)) on are masked, but must be finite. Computes in k's dtype with
    fp32 softmax. Returns fp32 (batch, n_heads, head_dim).
    """
    n_sequences, n_heads, head_dim = q.shape
    n_kv_heads, max_len = k.shape[1:3]
    # Queries of one KV head as rows of one product: (batch, n_kv_heads, group, head_dim).
    grouped = q.to(k.dtype).view(n_sequences, n_kv_heads, n_heads // n_kv_heads, head_dim)
    scores = torch.matmul(grouped, k.transpose(2, 3)).float().mul_(params.scale)
    if params.softcap:
        scores = scores.div_(params.softcap).tanh_().mul_(params.softcap)
    ends = seq_lens.to(k.device)[:, None, None, None]
    distance = torch.arange(max_len, device=k.device) - (ends - 1)  # (batch, 1, 1, max_len), 0 at the query
    if params.alibi_slopes is not None:
        slopes = torch.tensor(params.alibi_slopes, device=k.device).view(1, n_kv_heads, -1, 1)
        scores += slopes * distance
    hidden = distance > 0
    if params.window:
        hidden = hidden | (distance <= -params.window)
    weights = scores.masked_fill_(hidden, -1e30).softmax(dim=-1)
    return torch.matmul(weights.to(k.dtype), v).float().reshape(n_sequences, n_heads, head_dim)


def packed_is_faster(fmt: CacheFormat, heads_per_kv: int) -> bool:
    """Whether decode_attention on pages of this format beats gather_pages followed by attend_gathered here."""
    limit = IN_PLACE_MAX_HEADS[fmt.name]
    if has_native_bf16():
        limit = min(limit, IN_PLACE_MAX_HEADS_NATIVE_BF16)
    return heads_per_kv <= limit


def _check_query(q: Tensor, batch: PagedBatch, params: AttentionParams) -> int:
    """Query heads per KV head, or ValueError if q or the slopes do not fit the batch."""
    if q.dim() != 3 or q.shape[0] != batch.batch or q.shape[2] != batch.head_dim:
        raise ValueError(
            f"q must be ({batch.batch}, n_heads, {batch.head_dim}) like the pages, got {tuple(q.shape)}"
        )
    n_heads = q.shape[1]
    if n_heads % batch.n_kv_heads or not n_heads:
        raise ValueError(f"n_heads={n_heads} is no multiple of n_kv_heads={batch.n_kv_heads}")
    if params.alibi_slopes is not None and len(params.alibi_slopes) != n_heads:
        raise ValueError(f"alibi_slopes has {len(params.alibi_slopes)} entries for {n_heads} query heads")
    return n_heads // batch.n_kv_heads
