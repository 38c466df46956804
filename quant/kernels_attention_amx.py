"""Decode attention over bf16 pages by AMX: the kernels of `quant.kernels_attention` for processors that have it.

The same segments, online softmax and merge as in `quant.kernels_attention_jit`, but up to 16 query heads of a KV head
at once. Scores of 32 tokens are K's rows, tiles as they lie in the page, times the queries in pairs; a lane of a vector
is a query head, so the softmax needs no sums across lanes. Values are the probabilities, turned and rounded to bf16,
times V's rows, paired by two tokens. Products are summed in fp32.
"""

from typing import Any

import numpy as np
from numba import njit, prange

from quant.kernel_cache import cached_kernel
from quant.kernels_amx_simd import (
    TILE,
    add_in_order,
    configure_tiles,
    load_tile,
    multiply_tiles,
    pair_rows,
    release_tiles,
    store_tile,
    turn_tile,
    turn_tokens,
    zero_tile,
)
from quant.kernels_attention_jit import END_PAGE, FIRST_PAGE, KV_HEAD, SEQUENCE, merge_segments
from quant.kernels_attention_tiles import K_CODES, LOWEST, MAXIMUM, SUM, V_CODES
from quant.kernels_simd import float_at, prefetch, put_float
from quant.kernels_simd16 import (
    add16,
    div16,
    exp16,
    fma16,
    load16,
    max16,
    min16,
    mul16,
    splat16,
    store16,
    sub16,
)

HEADS = 16  # query heads at once
BLOCK = 32  # tokens at once
_ROW = 64  # bytes: the fp32 scores of a token for 16 heads


def scratch_nbytes(page_tokens: int, head_dim: int) -> int:
    """Working memory of a share: queries, a page's scores, its probabilities and V's pairs, sums of 32 channels."""
    return head_dim * 32 + page_tokens * (_ROW + 32 + 2 * head_dim) + 2 * TILE + 4 * _ROW


@njit
def _score_page(
    k: int, row_bytes: int, t0: int, t1: int, queries: int, n_steps: int, scores: int, ahead: int
) -> None:
    """scores (page_tokens, 16 heads) = K's rows times the queries, for the blocks that hold tokens t0..t1.

    ahead: rows that are needed next, V's, are fetched meanwhile.
    """
    for t in range(t0 // BLOCK * BLOCK, t1, BLOCK):
        for line in range(t * row_bytes, min(t + BLOCK, t1) * row_bytes, 64):
            prefetch(ahead + line)
        zero_tile(0)
        zero_tile(1)
        at = k + t * row_bytes
        for step in range(n_steps):
            load_tile(4, queries + step * TILE, 64)
            load_tile(5, at + 64 * step, row_bytes)
            multiply_tiles(0, 5, 4)
            load_tile(6, at + 16 * row_bytes + 64 * step, row_bytes)
            multiply_tiles(1, 6, 4)
        store_tile(0, scores + t * _ROW, 64)
        store_tile(1, scores + (t + 16) * _ROW, 64)


@njit
def _softmax_page(
    scores: int,
    t0: int,
    t1: int,
    distance: int,
    state: int,
    scale: Any,
    softcap: Any,
    slopes: int,
    row_bytes: int,
    ahead: int,
) -> None:
    """scores of tokens t0..t1 -> exp(score - maximum), of the other tokens of their blocks -> 0.

    state: four vectors: the largest score and the sum so far, what earlier sums are multiplied by, the slopes.
    distance: positions from token 0 of this page to the query. ahead: rows that are needed next, the next page's K, are
    fetched meanwhile.
    """
    maximum = load16(state)
    largest = maximum
    factor = splat16(scale)
    for t in range(t0, t1):
        for line in range(t * row_bytes, (t + 1) * row_bytes, 64):
            prefetch(ahead + line)
        x = mul16(load16(scores + t * _ROW), factor)
        if softcap > 0:
            # cap * tanh(x / cap), with tanh(y) = 1 - 2 / (e^2y + 1), which is 1 in fp32 beyond y = 20.
            two, one = splat16(np.float32(2)), splat16(np.float32(1))
            doubled = min16(mul16(x, splat16(np.float32(2) / softcap)), splat16(np.float32(40)))
            x = mul16(sub16(one, div16(two, add16(exp16(doubled), one))), splat16(softcap))
        if slopes:
            x = fma16(splat16(np.float32(t - distance)), load16(slopes), x)
        store16(scores + t * _ROW, x)
        largest = max16(largest, x)
    decay = exp16(sub16(maximum, largest))
    total = mul16(load16(state + _ROW), decay)
    for t in range(t0, t1):
        p = exp16(sub16(load16(scores + t * _ROW), largest))
        store16(scores + t * _ROW, p)
        total = add16(total, p)
    zero = splat16(np.float32(0))
    for t in range(t0 // BLOCK * BLOCK, t0):
        store16(scores + t * _ROW, zero)
    for t in range(t1, (t1 + BLOCK - 1) // BLOCK * BLOCK):
        store16(scores + t * _ROW, zero)
    store16(state, largest)
    store16(state + _ROW, total)
    store16(state + 2 * _ROW, decay)


@njit
def _add_values(
    v: int,
    row_bytes: int,
    head_dim: int,
    t0: int,
    t1: int,
    scores: int,
    probabilities: int,
    pairs: int,
    sums: int,
    decays: int,
    n_heads: int,
    acc: int,
) -> None:
    """acc (n_heads, head_dim) fp32 = acc * decay + probabilities times V's rows t0..t1."""
    first = t0 // BLOCK * BLOCK
    n_blocks = (t1 - first + BLOCK - 1) // BLOCK
    for block in range(n_blocks):
        t = first + block * BLOCK
        at = scores + t * _ROW
        for half in range(2):
            turn_tile(at + half * 16 * _ROW, 16, probabilities + block * TILE + 32 * half, 64, 16)
        for i in range(16):
            # Rows outside t0..t1 may hold anything; not even zero times that would be zero.
            row = t + 2 * i
            keeps_first, keeps_second = t0 <= row < t1, t0 <= row + 1 < t1
            for channel in range(0, head_dim, 32):
                to = pairs + (block * head_dim // 16 + channel // 16) * TILE + 64 * i
                source = v + row * row_bytes + 2 * channel
                pair_rows(source, source + row_bytes, keeps_first, keeps_second, to, to + TILE)
    for channel in range(0, head_dim, 32):
        zero_tile(0)
        zero_tile(1)
        for block in range(n_blocks):
            at = pairs + (block * head_dim // 16 + channel // 16) * TILE
            load_tile(4, probabilities + block * TILE, 64)
            load_tile(5, at, 64)
            multiply_tiles(0, 4, 5)
            load_tile(6, at + TILE, 64)
            multiply_tiles(1, 4, 6)
        store_tile(0, sums, 64)
        store_tile(1, sums + TILE, 64)
        for g in range(n_heads):
            to = acc + 4 * (g * head_dim + channel)
            add_in_order(to, float_at(decays + 4 * g), sums + g * _ROW, sums + TILE + g * _ROW)


@njit
def _attend_segment(
    query: int,
    n_heads: int,
    head_dim: int,
    acc: int,
    out_state: Any,
    addresses: Any,
    k_offset: int,
    v_offset: int,
    page_tokens: int,
    first_token: int,
    n_tokens: int,
    distance: int,
    scale: Any,
    softcap: Any,
    slopes: Any,
    scratch: int,
    ahead: int,
) -> None:
    """Attend the pages at `addresses`, as in `kernels_attention_jit`, with n_heads query rows at address query.

    acc: address of (n_heads, head_dim) fp32; out_state (2, n_heads). k_offset, v_offset: of the KV head in a page.
    ahead: the first K row of the next segment.
    """
    n_steps = head_dim // 32
    row_bytes = 2 * head_dim
    queries = scratch
    state = queries + n_steps * TILE
    scores = state + 4 * _ROW
    probabilities = scores + page_tokens * _ROW
    sums = probabilities + page_tokens * 32
    pairs = sums + 2 * TILE
    for step in range(n_steps):
        turn_tokens(query + 64 * step, row_bytes, n_heads, 32, queries + step * TILE)
    store16(state, splat16(LOWEST))
    store16(state + _ROW, splat16(np.float32(0)))
    store16(state + 3 * _ROW, splat16(np.float32(0)))
    for g in range(len(slopes)):
        put_float(state + 3 * _ROW + 4 * g, slopes[g])
    to_slopes = state + 3 * _ROW if len(slopes) else 0
    for i in range(0, n_heads * head_dim, 16):
        store16(acc + 4 * i, splat16(np.float32(0)))
    for p in range(len(addresses)):
        before = p * page_tokens
        t0, t1 = max(0, first_token - before), min(page_tokens, n_tokens - before)
        if t0 >= t1:
            continue
        page = addresses[p]
        _score_page(page + k_offset, row_bytes, t0, t1, queries, n_steps, scores, page + v_offset)
        following = addresses[p + 1] + k_offset if p + 1 < len(addresses) else ahead
        _softmax_page(
            scores, t0, t1, distance - before, state, scale, softcap, to_slopes, row_bytes, following
        )
        _add_values(
            page + v_offset,
            row_bytes,
            head_dim,
            t0,
            t1,
            scores,
            probabilities,
            pairs,
            sums,
            state + 2 * _ROW,
            n_heads,
            acc,
        )
    for g in range(n_heads):
        out_state[MAXIMUM, g] = float_at(state + 4 * g)
        out_state[SUM, g] = float_at(state + _ROW + 4 * g)


@njit
def _first_row(
    segment: Any,
    page_addresses: Any,
    tail_addresses: Any,
    seq_lens: Any,
    tail_lens: Any,
    page_tokens: int,
    page_offsets: Any,
    tail_offsets: Any,
    side: int,
) -> int:
    """Where a segment's K begins; side: bytes of one KV head's K in a page."""
    s, h, page = segment[SEQUENCE], np.int64(segment[KV_HEAD]), segment[FIRST_PAGE]
    if page < (seq_lens[s] - tail_lens[s]) // page_tokens:
        return page_addresses[s, page] + page_offsets[K_CODES] + h * side
    return tail_addresses[s] + tail_offsets[K_CODES] + h * side


@cached_kernel(parallel=True, nogil=True)
def decode_attention(
    query: int,
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
    page_tokens: int,
    scale: Any,
    softcap: Any,
    slopes: Any,
    configuration: Any,
    workspace: int,
    workspace_step: int,
) -> None:
    """As `kernels_attention_jit.decode_attention`, for bf16 pages and tails.

    query: address of bf16 (batch, n_kv_heads, group, head_dim), contiguous. head_dim, page_tokens: multiples of 32.
    workspace: for each share, workspace_step bytes on, `scratch_nbytes`, on 64 bytes.
    """
    n_kv_heads, group, head_dim = out.shape[1], out.shape[2], out.shape[3]
    side = page_tokens * head_dim * 2
    for b in prange(len(share_bounds) - 1):
        configure_tiles(configuration.ctypes.data)
        scratch = workspace + b * workspace_step
        for i in range(share_bounds[b], share_bounds[b + 1]):
            s = np.int64(segments[i, SEQUENCE])
            h = np.int64(segments[i, KV_HEAD])
            length = np.int64(seq_lens[s])
            first_page = np.int64(segments[i, FIRST_PAGE])
            before = first_page * page_tokens
            first_token = max(np.int64(0), length - window) - before if window > 0 else np.int64(0)
            if first_page < (length - tail_lens[s]) // page_tokens:
                end_page = np.int64(segments[i, END_PAGE])
                addresses = page_addresses[s, first_page:end_page]
                offsets, n_tokens = page_offsets, (end_page - first_page) * page_tokens
            else:
                addresses = tail_addresses[s : s + 1]
                offsets, n_tokens = tail_offsets, length - before
            following = min(i + 1, share_bounds[b + 1] - 1)
            ahead = _first_row(
                segments[following],
                page_addresses,
                tail_addresses,
                seq_lens,
                tail_lens,
                page_tokens,
                page_offsets,
                tail_offsets,
                side,
            )
            for g in range(0, group, HEADS):
                end = min(g + HEADS, group)
                _attend_segment(
                    query + 2 * head_dim * ((s * n_kv_heads + h) * group + g),
                    end - g,
                    head_dim,
                    partial_acc.ctypes.data + 4 * head_dim * (i * group + g),
                    partial_state[i, :, g:end],
                    addresses,
                    offsets[K_CODES] + h * side,
                    offsets[V_CODES] + h * side,
                    page_tokens,
                    first_token,
                    n_tokens,
                    length - 1 - before,
                    scale,
                    softcap,
                    slopes[h, g:end],
                    scratch,
                    ahead,
                )
        release_tiles()
    for head in prange(len(head_bounds) - 1):
        merge_segments(
            out[head // n_kv_heads, head % n_kv_heads],
            partial_acc,
            partial_state,
            head_bounds[head],
            head_bounds[head + 1],
        )
