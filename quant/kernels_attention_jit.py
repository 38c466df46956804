"""Decode attention over KV pages where they lie: the numba kernels. `quant.kernels_attention` calls them.

Work is cut into segments: a run of full pages, or the tail, of one KV head of one sequence. A segment keeps
an online softmax (maximum, sum, weighted values) per query head; a second step merges the segments of a
head (FlashDecoding). A page's K and V come from memory once for all query heads of the group.

Packed pages are never unpacked. With k = unit * (min_c + code * scale_c), c a channel, the parameters move
into the query:
    q.k = sum_c code * (q_c * scale_c * unit) + sum_c q_c * min_c * unit.
With v = unit * (min_t + code * scale_t), t a token, they move into the probabilities:
    sum_t p_t v_t = sum_t code * (p_t * scale_t * unit) + sum_t p_t * min_t * unit.
"""

from typing import Any

import numpy as np
from numba import njit, prange

from quant.kernel_cache import cached_kernel
from quant.kernels_attention_tiles import (
    K_CODES,
    K_MIN,
    K_SCALE,
    LOWEST,
    MAXIMUM,
    SCORE_BIAS,
    SUM,
    UNITS,
    V_CODES,
    V_MIN,
    V_SCALE,
    VALUE_BIAS,
    dot_minima,
    fold_probabilities,
    fold_query,
    padded,
    scores_1,
    scores_2,
    softmax_page,
    units,
    values_1,
    values_2,
    vector_start,
)
from quant.kernels_kv_simd import (
    is_packed,
    item_nbytes,
    load8,
    mul8,
    n_planes,
    splat8,
    store8,
)

_F32 = np.float32(0)  # the tag of fp32

# Columns of a segment. The tail's first and end page are both the number of full pages.
SEQUENCE, KV_HEAD, FIRST_PAGE, END_PAGE = 0, 1, 2, 3


@njit
def _attend_page(
    page: int,
    part_offsets: Any,
    kv_head: int,
    n_kv_heads: int,
    page_tokens: int,
    row: int,
    t0: int,
    t1: int,
    distance: int,
    q: Any,
    folded: Any,
    scores: Any,
    state: Any,
    acc: Any,
    scale: Any,
    softcap: Any,
    slopes: Any,
    tag: Any,
) -> None:
    """Add tokens t0..t1 of one KV head of one page to the running state of all heads of its group.

    q (group, head_dim); folded and acc (group, planes * padded row); scores (group, padded page); state as in
    MAXIMUM.. above. slopes: (group,) or empty.
    """
    group, head_dim = q.shape
    codes_nbytes = page_tokens * row * item_nbytes(tag)
    k = page + part_offsets[K_CODES] + kv_head * codes_nbytes
    v = page + part_offsets[V_CODES] + kv_head * codes_nbytes
    if is_packed(tag):
        parameters = 2 * kv_head * head_dim
        k_unit, v_unit = units(page + part_offsets[UNITS], kv_head, n_kv_heads)
        for g in range(group):
            q_head = q.ctypes.data + g * q.strides[0]
            fold_query(
                q_head,
                page + part_offsets[K_SCALE] + parameters,
                scale * k_unit,
                folded.ctypes.data + g * folded.strides[0],
                head_dim,
                row,
                tag,
            )
            minima = dot_minima(q_head, page + part_offsets[K_MIN] + parameters, head_dim)
            state[SCORE_BIAS, g] = minima * scale * k_unit
    block = t0 // 4 * 4
    for g in range(0, group - 1, 2):
        scores_2(
            k,
            row,
            folded.ctypes.data + g * folded.strides[0],
            folded.strides[0],
            block,
            t1,
            scores.ctypes.data + g * scores.strides[0],
            scores.strides[0],
            tag,
        )
    if group % 2:
        g = group - 1
        scores_1(
            k,
            row,
            folded.ctypes.data + g * folded.strides[0],
            block,
            t1,
            scores.ctypes.data + g * scores.strides[0],
            tag,
        )
    for g in range(group):
        weights = scores.ctypes.data + g * scores.strides[0]
        slope = slopes[g] if len(slopes) else np.float32(0)
        decay = softmax_page(weights, t0, t1, distance, state, g, softcap, slope)
        if decay != 1:
            for i in range(0, acc.shape[1], 8):
                at = acc.ctypes.data + g * acc.strides[0] + 4 * i
                store8(at, mul8(load8(at, 0, _F32), splat8(decay)))
        if is_packed(tag):
            parameters = 2 * kv_head * page_tokens
            bias = fold_probabilities(
                weights,
                t0,
                t1,
                page_tokens,
                page + part_offsets[V_SCALE] + parameters,
                page + part_offsets[V_MIN] + parameters,
                v_unit,
            )
            state[VALUE_BIAS, g] = state[VALUE_BIAS, g] * decay + bias
    for g in range(0, group - 1, 2):
        values_2(
            v,
            row,
            scores.ctypes.data + g * scores.strides[0],
            scores.strides[0],
            t0,
            t1,
            acc.ctypes.data + g * acc.strides[0],
            acc.strides[0],
            tag,
        )
    if group % 2:
        g = group - 1
        values_1(
            v,
            row,
            scores.ctypes.data + g * scores.strides[0],
            t0,
            t1,
            acc.ctypes.data + g * acc.strides[0],
            tag,
        )


@njit
def _begin_segment(q: Any, folded: Any, state: Any, acc: Any, scale: Any, row: int, tag: Any) -> None:
    """Reset the state and, for plain pages, fold the scale into the query once."""
    group, head_dim = q.shape
    state[MAXIMUM, :] = LOWEST
    state[SUM:, :] = 0
    acc[:, :] = 0
    if not is_packed(tag):
        for g in range(group):
            to = folded.ctypes.data + g * folded.strides[0]
            fold_query(q.ctypes.data + g * q.strides[0], 0, scale, to, head_dim, row, tag)


@njit
def _end_segment(out_acc: Any, out_state: Any, state: Any, acc: Any, row: int, tag: Any) -> None:
    """out_acc (group, head_dim) = weighted values by channel; out_state (2, group) = maximum and sum."""
    group, head_dim = out_acc.shape
    for g in range(group):
        out_state[MAXIMUM, g] = state[MAXIMUM, g]
        out_state[SUM, g] = state[SUM, g]
        for plane in range(n_planes(tag)):
            for j in range(0, row, 8):
                start = vector_start(j, row)
                for lane in range(min(8, row - start, head_dim - plane * row - start)):
                    value = acc[g, plane * padded(row) + j + lane] + state[VALUE_BIAS, g]
                    out_acc[g, plane * row + start + lane] = value


@cached_kernel()
def _attend_segment(
    q: Any,
    out_acc: Any,
    out_state: Any,
    addresses: Any,
    part_offsets: Any,
    kv_head: int,
    n_kv_heads: int,
    page_tokens: int,
    row: int,
    first_token: int,
    n_tokens: int,
    distance: int,
    scale: Any,
    softcap: Any,
    slopes: Any,
    tag: Any,
) -> None:
    """Attend the pages at `addresses`, which hold n_tokens tokens, from first_token on; both count from the
    first page's token 0, from which the query is `distance` positions away. Compiled once per tag.
    """
    group, head_dim = q.shape
    width = n_planes(tag) * padded(row)
    folded = np.empty((group, width), np.float32)
    acc = np.empty((group, width), np.float32)
    # Scores are written four tokens at a time and read eight at a time, so a few past the page.
    scores = np.empty((group, padded(page_tokens) + 8), np.float32)
    state = np.empty((4, group), np.float32)
    _begin_segment(q, folded, state, acc, scale, row, tag)
    for p in range(len(addresses)):
        before = p * page_tokens
        _attend_page(
            addresses[p],
            part_offsets,
            kv_head,
            n_kv_heads,
            page_tokens,
            row,
            max(0, first_token - before),
            min(page_tokens, n_tokens - before),
            distance - before,
            q,
            folded,
            scores,
            state,
            acc,
            scale,
            softcap,
            slopes,
            tag,
        )
    _end_segment(out_acc, out_state, state, acc, row, tag)


@njit
def _attend_share(
    begin: int,
    end: int,
    q: Any,
    page_addresses: Any,
    tail_addresses: Any,
    seq_lens: Any,
    tail_lens: Any,
    window: int,
    segments: Any,
    partial_acc: Any,
    partial_state: Any,
    page_offsets: Any,
    tail_offsets: Any,
    page_row: int,
    page_tokens: int,
    scale: Any,
    softcap: Any,
    slopes: Any,
    page_tag: Any,
    tail_tag: Any,
) -> None:
    """Run segments begin..end; arguments as in decode_attention."""
    n_kv_heads, head_dim = q.shape[1], q.shape[3]
    for i in range(begin, end):
        s = np.int64(segments[i, SEQUENCE])
        h = np.int64(segments[i, KV_HEAD])
        length = np.int64(seq_lens[s])
        n_full = (length - tail_lens[s]) // page_tokens
        first_page = np.int64(segments[i, FIRST_PAGE])
        end_page = np.int64(segments[i, END_PAGE])
        before = first_page * page_tokens
        first_token = max(np.int64(0), length - window) - before if window > 0 else np.int64(0)
        if first_page < n_full:
            _attend_segment(
                q[s, h],
                partial_acc[i],
                partial_state[i],
                page_addresses[s, first_page:end_page],
                page_offsets,
                h,
                n_kv_heads,
                page_tokens,
                page_row,
                first_token,
                (end_page - first_page) * page_tokens,
                length - 1 - before,
                scale,
                softcap,
                slopes[h],
                page_tag,
            )
        else:
            _attend_segment(
                q[s, h],
                partial_acc[i],
                partial_state[i],
                tail_addresses[s : s + 1],
                tail_offsets,
                h,
                n_kv_heads,
                page_tokens,
                head_dim,
                first_token,
                length - before,
                length - 1 - before,
                scale,
                softcap,
                slopes[h],
                tail_tag,
            )


@njit
def merge_segments(out: Any, partial_acc: Any, partial_state: Any, begin: int, end: int) -> None:
    """out (group, head_dim) = weighted mean of the values of segments begin..end; 0 without tokens."""
    group, head_dim = out.shape
    for g in range(group):
        maximum = LOWEST
        for i in range(begin, end):
            maximum = max(maximum, partial_state[i, MAXIMUM, g])
        total = np.float32(0)
        out[g, :] = 0
        for i in range(begin, end):
            weight = np.float32(np.exp(partial_state[i, MAXIMUM, g] - maximum))
            total += weight * partial_state[i, SUM, g]
            for d in range(head_dim):
                out[g, d] += weight * partial_acc[i, g, d]
        if total > 0:
            for d in range(head_dim):
                out[g, d] /= total


@cached_kernel(parallel=True, nogil=True)
def decode_attention(
    q: Any,
    out: Any,
    page_addresses: Any,
    tail_addresses: Any,
    seq_lens: Any,
    tail_lens: Any,
    window: int,
    segments: Any,
    share_bounds: Any,
    head_bounds: Any,
    partial_acc: Any,
    partial_state: Any,
    page_offsets: Any,
    tail_offsets: Any,
    page_row: int,
    page_tokens: int,
    scale: Any,
    softcap: Any,
    slopes: Any,
    page_tag: Any,
    tail_tag: Any,
) -> None:
    """out = attention of q, both (batch, n_kv_heads, group, head_dim) fp32, over pages and tails.

    segments (n, 4); share b is segments share_bounds[b] up to the next entry; segment i leaves its result in
    partial_acc[i] (group, head_dim) and partial_state[i] (2, group). Those of sequence s and KV head h are
    head_bounds[s * n_kv_heads + h] up to the next entry. slopes: (n_kv_heads, group) or (n_kv_heads, 0).
    """
    for b in prange(len(share_bounds) - 1):
        _attend_share(
            share_bounds[b],
            share_bounds[b + 1],
            q,
            page_addresses,
            tail_addresses,
            seq_lens,
            tail_lens,
            window,
            segments,
            partial_acc,
            partial_state,
            page_offsets,
            tail_offsets,
            page_row,
            page_tokens,
            scale,
            softcap,
            slopes,
            page_tag,
            tail_tag,
        )
    n_kv_heads = q.shape[1]
    for head in prange(len(head_bounds) - 1):
        merge_segments(
            out[head // n_kv_heads, head % n_kv_heads],
            partial_acc,
            partial_state,
            head_bounds[head],
            head_bounds[head + 1],
        )
