"""Causal attention of prompt segments by AMX, bf16 in and out, scores and sums in fp32.

Lanes are queries, 32 at a time: those of consecutive tokens and of all query heads that share a KV head, token by
token, so that a lane block needs few keys beyond its diagonal and short prompts fill lanes too. Keys are tiles as their
rows lie, queries are turned into pairs once for a lane block, so a tile of scores has a key in each row and a query in
each lane: maxima, exponentials and sums are whole vectors, nothing is summed across lanes. Two rows of probabilities
interleaved are what AMX takes as its second operand; the first one is V turned, once for all lane blocks of a segment.
Keys are taken BLOCK at a time with the online softmax (Milakov and Gimelshein, 2018; FlashAttention, Dao et al., 2022).

A lane's result depends on its own query and the keys that it sees, not on the other lanes: keys that are hidden from a
lane add exact zeros.

Addresses are plain integers, owned and checked by `quant.prefill_attention`.
"""

from typing import Any

import numpy as np
from numba import njit, prange

from quant.kernel_cache import cached_kernel
from quant.kernels_amx_simd import (
    TILE,
    configure_tiles,
    copy32,
    load_tile,
    multiply_tiles,
    release_tiles,
    store_pairs16,
    store_tile,
    turn_divided,
    turn_listed,
    turn_pairs,
    zero_tile,
)
from quant.kernels_simd import put_float, put_word
from quant.kernels_simd16 import (
    add16,
    div16,
    exp2_16,
    exp16,
    fma16,
    load16,
    max16,
    min16,
    mul16,
    splat16,
    store16,
    sub16,
    visible16,
)

LANES = 32  # queries at once: two tiles
KEYS = 32  # keys of two tiles of K rows, and of one of V turned
BLOCK = 64  # keys of one step of the online softmax; 128 was a little slower, 256 more so
_ROW = 4 * LANES  # bytes: the fp32 scores of a key
_VECTOR = 64
_LOG2_E = np.float32(1.4426950408889634)
# Scores that nobody sees. Half of it is the least a maximum can be, so that their exponentials are zero.
_HIDDEN = np.float32(-1e30)
_LOWEST = np.float32(-5e29)

# Columns of the arrays that say what to do.
K_ROWS, V_ROWS, K_STRIDE, V_STRIDE, N_KEYS, IS_DIRECT = range(6)  # of blocks of keys
FIRST_QUERY, N_QUERIES, N_SEEN, KV_HEAD, FIRST_BLOCK = range(5)  # of items
ITEM, FIRST_ROW = range(2)  # of units


@njit
def packed_nbytes(head_dim: int) -> int:
    """Working memory of KEYS keys of one KV head: a copy of K's rows, and V turned."""
    return 2 * KEYS * head_dim * 2


@njit
def scratch_nbytes(head_dim: int) -> int:
    """Working memory of a thread: queries, scores, probabilities, sums, results, state, what is known of lanes."""
    return LANES * head_dim * (2 + 4) + BLOCK * (_ROW + 2 * LANES) + 4 * TILE + 6 * _VECTOR + LANES * 24


@njit
def _pack(block: Any, head_dim: int, k_copy: int, v_turned: int) -> None:
    """A block of keys: K's rows -> contiguous rows unless they are, V's -> tiles of 16 channels by KEYS keys."""
    n_keys = block[N_KEYS]
    if block[IS_DIRECT] == 0:
        for i in range(KEYS):
            for channel in range(0, head_dim, 32):
                source = block[K_ROWS] + i * block[K_STRIDE] + 2 * channel
                copy32(source, 32 if i < n_keys else 0, k_copy + 2 * (i * head_dim + channel))
    for channel in range(0, head_dim, 16):
        turn_pairs(block[V_ROWS] + 2 * channel, block[V_STRIDE], n_keys, v_turned + channel // 16 * TILE)


@njit
def _take_lanes(
    query: int,
    q_stride: int,
    out: int,
    out_stride: int,
    group: int,
    first_row: int,
    n_lanes: int,
    before: int,
    head_dim: int,
    slopes: Any,
    queries: int,
    lanes: int,
) -> None:
    """LANES rows of (token, head of the group) from first_row on: queries -> tiles of pairs, zeros beyond n_lanes.

    lanes: where the rows lie in query and out, their positions and slopes go; before: the position of token 0.
    """
    sources, targets = lanes, lanes + 8 * LANES
    positions, lane_slopes = lanes + 16 * LANES, lanes + 20 * LANES
    token, head = first_row // group, first_row % group
    for i in range(LANES):
        put_word(sources + 8 * i, query + token * q_stride + head * head_dim * 2)
        put_word(targets + 8 * i, out + token * out_stride + head * head_dim * 2)
        put_float(positions + 4 * i, np.float32(before + token))
        put_float(lane_slopes + 4 * i, slopes[head] if len(slopes) else np.float32(0))
        if i < n_lanes - 1:
            head += 1
            if head == group:
                token, head = token + 1, 0
    n_steps = head_dim // 32
    for half in range(2):
        for step in range(n_steps):
            tile = queries + (half * n_steps + step) * TILE
            turn_listed(sources + half * 8 * 16, 64 * step, n_lanes - 16 * half, tile)


@njit
def _score(k: int, head_dim: int, queries: int, scores: int) -> None:
    """scores (KEYS, LANES) fp32 = K's rows times the queries."""
    n_steps = head_dim // 32
    stride = 2 * head_dim
    zero_tile(0)
    zero_tile(1)
    zero_tile(2)
    zero_tile(3)
    for step in range(n_steps):
        load_tile(4, k + 64 * step, stride)
        load_tile(6, queries + step * TILE, 64)
        multiply_tiles(0, 4, 6)
        load_tile(5, k + 16 * stride + 64 * step, stride)
        multiply_tiles(1, 5, 6)
        load_tile(7, queries + (n_steps + step) * TILE, 64)
        multiply_tiles(2, 4, 7)
        multiply_tiles(3, 5, 7)
    store_tile(0, scores, _ROW)
    store_tile(1, scores + 16 * _ROW, _ROW)
    store_tile(2, scores + _VECTOR, _ROW)
    store_tile(3, scores + 16 * _ROW + _VECTOR, _ROW)


@njit
def _prepare(
    scores: int,
    n_keys: int,
    first_key: int,
    scale: Any,
    softcap: Any,
    has_slopes: bool,
    lanes: int,
    window: int,
) -> None:
    """Raw scores -> scale, softcap and alibi applied, times log2 e; those that a lane does not see -> _HIDDEN."""
    for half in range(2):
        last = load16(lanes + 16 * LANES + half * _VECTOR)  # positions are exact up to 2^24
        slopes = load16(lanes + 20 * LANES + half * _VECTOR)
        first = splat16(np.float32(0))
        if window > 0:
            first = sub16(last, splat16(np.float32(window - 1)))
        for t in range(n_keys):
            at = scores + t * _ROW + half * _VECTOR
            key = splat16(np.float32(first_key + t))
            x = mul16(load16(at), splat16(scale))
            if softcap > 0:
                # cap * tanh(x / cap), with tanh(y) = 1 - 2 / (e^2y + 1), which is 1 in fp32 beyond y = 20.
                one, two = splat16(np.float32(1)), splat16(np.float32(2))
                doubled = min16(mul16(x, splat16(np.float32(2) / softcap)), splat16(np.float32(40)))
                x = mul16(sub16(one, div16(two, add16(exp16(doubled), one))), splat16(softcap))
            if has_slopes:
                x = fma16(sub16(key, last), slopes, x)
            x = mul16(x, splat16(_LOG2_E))
            store16(at, visible16(x, key, first, last, splat16(_HIDDEN)))


@njit
def _softmax(scores: int, n_keys: int, factor: Any, state: int, probabilities: int) -> None:
    """exp2(factor * score - maximum) of n_keys rows, in pairs of keys as bf16; the state is brought up to date.

    state: vectors of the two halves of lanes: maxima so far, sums so far, what earlier sums are multiplied by.
    """
    a = splat16(_LOWEST)
    b, c, d = a, a, a
    for t in range(0, n_keys, 2):
        at = scores + t * _ROW
        a = max16(load16(at), a)
        b = max16(load16(at + _VECTOR), b)
        c = max16(load16(at + _ROW), c)
        d = max16(load16(at + _ROW + _VECTOR), d)
    times = splat16(factor)
    old_a, old_b = load16(state), load16(state + _VECTOR)
    a = max16(max16(mul16(max16(a, c), times), old_a), splat16(_LOWEST))
    b = max16(max16(mul16(max16(b, d), times), old_b), splat16(_LOWEST))
    decay_a, decay_b = exp2_16(sub16(old_a, a)), exp2_16(sub16(old_b, b))
    store16(state, a)
    store16(state + _VECTOR, b)
    store16(state + 4 * _VECTOR, decay_a)
    store16(state + 5 * _VECTOR, decay_b)
    sum_a = mul16(load16(state + 2 * _VECTOR), decay_a)
    sum_b = mul16(load16(state + 3 * _VECTOR), decay_b)
    zero = splat16(np.float32(0))
    a, b = sub16(zero, a), sub16(zero, b)
    for t in range(0, n_keys, 2):
        at = scores + t * _ROW
        even, odd = exp2_16(fma16(load16(at), times, a)), exp2_16(fma16(load16(at + _ROW), times, a))
        sum_a = add16(sum_a, add16(even, odd))
        to = probabilities + t // KEYS * 2 * TILE + t % KEYS // 2 * 64
        store_pairs16(to, even, odd)
        at += _VECTOR
        even, odd = exp2_16(fma16(load16(at), times, b)), exp2_16(fma16(load16(at + _ROW), times, b))
        sum_b = add16(sum_b, add16(even, odd))
        store_pairs16(to + TILE, even, odd)
    store16(state + 2 * _VECTOR, sum_a)
    store16(state + 3 * _VECTOR, sum_b)


@njit
def _add_values(
    v: int,
    v_step: int,
    n_blocks: int,
    head_dim: int,
    probabilities: int,
    sums: int,
    state: int,
    acc: int,
    is_first: bool,
) -> None:
    """acc, tiles of 16 channels by 16 lanes, = V turned times the probabilities of n_blocks blocks, + acc * decay."""
    for channel in range(0, head_dim // 16, 2):
        zero_tile(0)
        zero_tile(1)
        zero_tile(2)
        zero_tile(3)
        for block in range(n_blocks):
            at = v + block * v_step + channel * TILE
            load_tile(4, at, 64)
            load_tile(6, probabilities + 2 * block * TILE, 64)
            multiply_tiles(0, 4, 6)
            load_tile(7, probabilities + (2 * block + 1) * TILE, 64)
            multiply_tiles(1, 4, 7)
            load_tile(5, at + TILE, 64)
            multiply_tiles(2, 5, 6)
            multiply_tiles(3, 5, 7)
        to = acc + 2 * channel * TILE
        there = to if is_first else sums
        store_tile(0, there, 64)
        store_tile(1, there + TILE, 64)
        store_tile(2, there + 2 * TILE, 64)
        store_tile(3, there + 3 * TILE, 64)
        if is_first:
            continue
        for half in range(2):
            decay = load16(state + (4 + half) * _VECTOR)
            for i in range(half * TILE, half * TILE + TILE, _VECTOR):
                for k in range(i, i + 2 * TILE + 1, 2 * TILE):
                    store16(to + k, fma16(load16(to + k), decay, load16(sums + k)))


@njit
def _attend(
    query: int,
    q_stride: int,
    out: int,
    out_stride: int,
    group: int,
    item: Any,
    first_row: int,
    head_dim: int,
    blocks: Any,
    packed: int,
    window: int,
    scale: Any,
    softcap: Any,
    slopes: Any,
    scratch: int,
) -> None:
    """One lane block of an item. query, out: addresses of the item's first query, KV head included; blocks: its own."""
    queries = scratch
    scores = queries + 2 * LANES * head_dim
    probabilities = scores + BLOCK * _ROW
    sums = probabilities + BLOCK * 2 * LANES
    acc = sums + 4 * TILE
    state = acc + 4 * LANES * head_dim
    lanes = state + 6 * _VECTOR
    n_lanes = min(LANES, item[N_QUERIES] * group - first_row)
    before = item[N_SEEN] - item[N_QUERIES]
    _take_lanes(
        query, q_stride, out, out_stride, group, first_row, n_lanes, before, head_dim, slopes, queries, lanes
    )
    for half in range(2):
        store16(state + half * _VECTOR, splat16(_LOWEST))
        store16(state + (2 + half) * _VECTOR, splat16(np.float32(0)))
    first_position = before + first_row // group
    last_position = before + (first_row + n_lanes - 1) // group
    has_slopes = len(slopes) > 0
    begin = max(0, first_position - window + 1) // BLOCK * BLOCK if window > 0 else 0
    step = packed_nbytes(head_dim)
    for key in range(begin, last_position + 1, BLOCK):
        n_blocks = (min(BLOCK, last_position + 1 - key) + KEYS - 1) // KEYS
        n_keys = n_blocks * KEYS
        first = key // KEYS
        for i in range(n_blocks):
            k = blocks[first + i, K_ROWS] if blocks[first + i, IS_DIRECT] else packed + (first + i) * step
            _score(k, head_dim, queries, scores + i * KEYS * _ROW)
        factor = scale * _LOG2_E
        is_whole = key + n_keys - 1 <= first_position and (window == 0 or key > last_position - window)
        if not is_whole or softcap > 0 or has_slopes or scale < 0:
            _prepare(scores, n_keys, key, scale, softcap, has_slopes, lanes, window)
            factor = np.float32(1)
        _softmax(scores, n_keys, factor, state, probabilities)
        v = packed + first * step + KEYS * head_dim * 2
        _add_values(v, step, n_blocks, head_dim, probabilities, sums, state, acc, key == begin)
    targets = lanes + 8 * LANES
    for half in range(2):
        for channel in range(0, head_dim, 32):
            tile = acc + (channel // 16 * 2 + half) * TILE
            divisors = state + (2 + half) * _VECTOR
            at = targets + 8 * 16 * half
            turn_divided(tile, tile + 2 * TILE, divisors, at, 2 * channel, n_lanes - 16 * half)


@cached_kernel(parallel=True, nogil=True)
def prefill_attention(
    query: int,
    q_stride: int,
    out: int,
    out_stride: int,
    group: int,
    head_dim: int,
    blocks: Any,
    items: Any,
    units: Any,
    share_bounds: Any,
    window: int,
    scale: Any,
    softcap: Any,
    slopes: Any,
    configuration: Any,
    packed: int,
    packed_step: int,
    scratch: int,
) -> None:
    """Attend the items, segments of one KV head each, cut into units of LANES queries and shared by the threads.

    query, out: addresses of bf16 (tokens, n_heads, head_dim), heads side by side, tokens their strides apart in bytes.
    blocks (n, 6): of KEYS keys each, in the order of the items: where their rows of K and V begin, bytes from row to
    row, how many there are, and whether K may be read where it lies: all KEYS of them, side by side, on 64 bytes.
    items (n, 5): first query token, tokens, keys up to the last token's own, KV head, first block. units (n, 2).
    share_bounds: the units of each thread. slopes: (n_kv_heads, group) fp32, (n_kv_heads, 0) for none. packed: for each
    share packed_step bytes, `packed_nbytes` for each block of the longest item; scratch: of `scratch_nbytes` for each
    share; both on 64 bytes.
    """
    scratch_step = scratch_nbytes(head_dim)
    step = packed_nbytes(head_dim)
    for share in prange(len(share_bounds) - 1):
        configure_tiles(configuration.ctypes.data)
        here = packed + share * packed_step
        packed_item = -1
        for i in range(share_bounds[share], share_bounds[share + 1]):
            item = items[units[i, ITEM]]
            first = item[FIRST_BLOCK]
            own_blocks = blocks[first : first + (item[N_SEEN] + KEYS - 1) // KEYS]
            if units[i, ITEM] != packed_item:
                packed_item = units[i, ITEM]
                for k in range(len(own_blocks)):
                    _pack(own_blocks[k], head_dim, here + k * step, here + k * step + step // 2)
            head = item[KV_HEAD] * group * head_dim * 2
            _attend(
                query + item[FIRST_QUERY] * q_stride + head,
                q_stride,
                out + item[FIRST_QUERY] * out_stride + head,
                out_stride,
                group,
                item,
                units[i, FIRST_ROW],
                head_dim,
                own_blocks,
                here,
                window,
                scale,
                softcap,
                slopes[item[KV_HEAD]],
                scratch + share * scratch_step,
            )
        release_tiles()
