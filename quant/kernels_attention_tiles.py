"""Decode attention on one page: scores of a query against K, softmax, weighted sums of V. numba, single thread.

A row of `row` elements (bytes, for codes) is read as vectors that start at 0, 8, 16, ...; the last one is moved
back to end with the row, and the lanes that it then repeats have weight zero in the folded query and are written
twice, with the same value, to the output. Rows of fewer than 8 bytes of codes are read past their end, which
stays inside the page because parameters follow; plain rows have at least 8 elements.

Two query heads at a time share each conversion of a code to fp32. numba's disk cache belongs to the functions
of `quant.kernels_attention_jit`: touch that file after editing this one.
"""

from typing import Any

import numpy as np
from numba import njit

from quant.kernels_kv_simd import (
    add8,
    broadcast8,
    div8,
    exp8,
    first_lanes8,
    fma8,
    iota8,
    is_packed,
    item_nbytes,
    load8,
    load_first,
    max8,
    max_lanes,
    min8,
    mul8,
    n_planes,
    splat8,
    store8,
    store_sums4,
    sub8,
    sum_lanes,
)

_F32 = np.float32(0)  # the tag of fp32
_F16 = np.int16(0)  # the tag of fp16: stored scales and minima
# A finite stand-in for minus infinity, so that no difference is NaN.
LOWEST = np.float32(-1e30)

# Entries of part_offsets: where the arrays of a page start, in bytes.
K_CODES, K_SCALE, K_MIN, V_CODES, V_SCALE, V_MIN, UNITS = 0, 1, 2, 3, 4, 5, 6
# Rows of the running state of a segment, (4, heads of the group).
MAXIMUM, SUM, VALUE_BIAS, SCORE_BIAS = 0, 1, 2, 3


@njit
def padded(n: int) -> int:
    """n rounded up to whole vectors."""
    return (n + 7) // 8 * 8


@njit
def vector_start(j: int, row: int) -> int:
    """Where the vector that covers element j of a row begins."""
    return max(0, min(j, row - 8))


@njit
def load_some(address: int, count: int, tag: Any) -> Any:
    """Plain elements at address, zero from lane `count` on. Masked loads are slow: used only where needed."""
    if count >= 8:
        return load8(address, 0, tag)
    return load_first(address, count, 0, tag)


@njit
def fold_query(q: int, scales: int, factor: Any, folded: int, head_dim: int, row: int, tag: Any) -> None:
    """folded (planes, padded row) = q * factor * scales, per channel; lanes that count for nothing are 0."""
    for plane in range(n_planes(tag)):
        for j in range(0, row, 8):
            start = vector_start(j, row)
            channel = plane * row + start
            count = min(8, row - start, head_dim - channel)
            value = mul8(load_some(q + 4 * channel, count, _F32), splat8(factor))
            if is_packed(tag):
                value = mul8(value, load_some(scales + 2 * channel, count, _F16))
            store8(folded + 4 * (plane * padded(row) + j), first_lanes8(j - start, splat8(_F32), value))


@njit
def dot_minima(q: int, minima: int, head_dim: int) -> Any:
    """Sum over channels of q * minimum."""
    total = splat8(_F32)
    for c in range(0, head_dim, 8):
        count = min(8, head_dim - c)
        total = fma8(load_some(q + 4 * c, count, _F32), load_some(minima + 2 * c, count, _F16), total)
    return sum_lanes(total)


@njit
def scores_1(k: int, row: int, q: int, begin: int, end: int, scores: int, tag: Any) -> None:
    """scores[t] = q . k_t for t from begin, four at a time, until end is passed."""
    stride = row * item_nbytes(tag)
    for t in range(begin, end, 4):
        k0 = k + t * stride
        a0 = splat8(_F32)
        a1 = a0
        a2 = a0
        a3 = a0
        for j in range(0, row, 8):
            at = k0 + vector_start(j, row) * item_nbytes(tag)
            for plane in range(n_planes(tag)):
                qa = load8(q + 4 * (plane * padded(row) + j), 0, _F32)
                a0 = fma8(load8(at, plane, tag), qa, a0)
                a1 = fma8(load8(at + stride, plane, tag), qa, a1)
                a2 = fma8(load8(at + 2 * stride, plane, tag), qa, a2)
                a3 = fma8(load8(at + 3 * stride, plane, tag), qa, a3)
        store_sums4(scores + 4 * t, a0, a1, a2, a3)


@njit
def scores_2(
    k: int, row: int, q: int, q_stride: int, begin: int, end: int, scores: int, s_stride: int, tag: Any
) -> None:
    """Like scores_1 for two query heads, q_stride and s_stride bytes apart: each code is converted once."""
    stride = row * item_nbytes(tag)
    for t in range(begin, end, 4):
        k0 = k + t * stride
        a0 = splat8(_F32)
        a1 = a0
        a2 = a0
        a3 = a0
        b0 = a0
        b1 = a0
        b2 = a0
        b3 = a0
        for j in range(0, row, 8):
            at = k0 + vector_start(j, row) * item_nbytes(tag)
            for plane in range(n_planes(tag)):
                qa = load8(q + 4 * (plane * padded(row) + j), 0, _F32)
                qb = load8(q + q_stride + 4 * (plane * padded(row) + j), 0, _F32)
                x = load8(at, plane, tag)
                a0 = fma8(x, qa, a0)
                b0 = fma8(x, qb, b0)
                x = load8(at + stride, plane, tag)
                a1 = fma8(x, qa, a1)
                b1 = fma8(x, qb, b1)
                x = load8(at + 2 * stride, plane, tag)
                a2 = fma8(x, qa, a2)
                b2 = fma8(x, qb, b2)
                x = load8(at + 3 * stride, plane, tag)
                a3 = fma8(x, qa, a3)
                b3 = fma8(x, qb, b3)
        store_sums4(scores + 4 * t, a0, a1, a2, a3)
        store_sums4(scores + s_stride + 4 * t, b0, b1, b2, b3)


@njit
def softmax_page(
    scores: int, t0: int, t1: int, distance: int, state: Any, head: int, softcap: Any, slope: Any
) -> Any:
    """Turn scores of tokens t0..t1 into exp(score - maximum); returns what earlier sums are multiplied by.

    distance: positions from token 0 of this page to the query. Lanes outside t0..t1 become about 1e-38.
    """
    largest = splat8(LOWEST)
    for t in range(t0 // 8 * 8, t1, 8):
        x = add8(load8(scores + 4 * t, 0, _F32), splat8(state[SCORE_BIAS, head]))
        if softcap > 0:
            # cap * tanh(x / cap), with tanh(y) = 1 - 2 / (e^2y + 1), which is 1 in fp32 beyond y = 20.
            doubled = min8(mul8(x, splat8(np.float32(2) / softcap)), splat8(np.float32(40)))
            part = div8(splat8(np.float32(2)), add8(exp8(doubled), splat8(np.float32(1))))
            x = mul8(sub8(splat8(np.float32(1)), part), splat8(softcap))
        if slope != 0:
            x = fma8(add8(iota8(), splat8(np.float32(t - distance))), splat8(slope), x)
        x = first_lanes8(t1 - t, x, splat8(LOWEST))
        x = first_lanes8(t0 - t, splat8(LOWEST), x)
        store8(scores + 4 * t, x)
        largest = max8(largest, x)
    maximum = max(state[MAXIMUM, head], max_lanes(largest))
    decay = np.float32(np.exp(state[MAXIMUM, head] - maximum))
    total = splat8(_F32)
    for t in range(t0 // 8 * 8, t1, 8):
        p = exp8(sub8(load8(scores + 4 * t, 0, _F32), splat8(maximum)))
        store8(scores + 4 * t, p)
        total = add8(total, p)
    state[MAXIMUM, head] = maximum
    state[SUM, head] = state[SUM, head] * decay + sum_lanes(total)
    return decay


@njit
def fold_probabilities(
    weights: int, t0: int, t1: int, page_tokens: int, scales: int, minima: int, unit: Any
) -> Any:
    """weights[t] *= scale_t * unit, in place; returns sum_t weights[t] * min_t * unit."""
    bias = splat8(_F32)
    for t in range(t0 // 8 * 8, t1, 8):
        count = min(8, page_tokens - t)
        p = mul8(load8(weights + 4 * t, 0, _F32), splat8(unit))
        bias = fma8(p, load_some(minima + 2 * t, count, _F16), bias)
        store8(weights + 4 * t, mul8(p, load_some(scales + 2 * t, count, _F16)))
    return sum_lanes(bias)


@njit
def values_1(v: int, row: int, weights: int, t0: int, t1: int, acc: int, tag: Any) -> None:
    """acc (planes, padded row) += sum over t of weights[t] * v_t. Four vectors of sums stay in registers."""
    planes = n_planes(tag)
    stride = row * item_nbytes(tag)
    width = 4 * padded(row)  # bytes of one plane of acc
    span = 32 // planes
    whole = row // span * span
    for j in range(0, whole, span):
        at0 = v + j * item_nbytes(tag)
        at1 = v + (j + 8 * (1 // planes)) * item_nbytes(tag)
        at2 = v + (j + 8 * (2 // planes)) * item_nbytes(tag)
        at3 = v + (j + 8 * (3 // planes)) * item_nbytes(tag)
        acc0 = acc + 4 * j
        acc1 = acc0 + (1 % planes) * width + 32 * (1 // planes)
        acc2 = acc0 + (2 % planes) * width + 32 * (2 // planes)
        acc3 = acc0 + (3 % planes) * width + 32 * (3 // planes)
        a0 = load8(acc0, 0, _F32)
        a1 = load8(acc1, 0, _F32)
        a2 = load8(acc2, 0, _F32)
        a3 = load8(acc3, 0, _F32)
        for t in range(t0, t1):
            wa = broadcast8(weights + 4 * t)
            a0 = fma8(load8(at0 + t * stride, 0, tag), wa, a0)
            a1 = fma8(load8(at1 + t * stride, 1 % planes, tag), wa, a1)
            a2 = fma8(load8(at2 + t * stride, 2 % planes, tag), wa, a2)
            a3 = fma8(load8(at3 + t * stride, 3 % planes, tag), wa, a3)
        store8(acc0, a0)
        store8(acc1, a1)
        store8(acc2, a2)
        store8(acc3, a3)
    for j in range(whole, row, 8):
        at0 = v + vector_start(j, row) * item_nbytes(tag)
        for plane in range(planes):
            a0 = load8(acc + plane * width + 4 * j, 0, _F32)
            for t in range(t0, t1):
                a0 = fma8(load8(at0 + t * stride, plane, tag), broadcast8(weights + 4 * t), a0)
            store8(acc + plane * width + 4 * j, a0)


@njit
def values_2(
    v: int, row: int, weights: int, w_stride: int, t0: int, t1: int, acc: int, acc_stride: int, tag: Any
) -> None:
    """Like values_1 for two query heads, w_stride and acc_stride bytes apart."""
    planes = n_planes(tag)
    stride = row * item_nbytes(tag)
    width = 4 * padded(row)
    span = 32 // planes
    whole = row // span * span
    for j in range(0, whole, span):
        at0 = v + j * item_nbytes(tag)
        at1 = v + (j + 8 * (1 // planes)) * item_nbytes(tag)
        at2 = v + (j + 8 * (2 // planes)) * item_nbytes(tag)
        at3 = v + (j + 8 * (3 // planes)) * item_nbytes(tag)
        acc0 = acc + 4 * j
        acc1 = acc0 + (1 % planes) * width + 32 * (1 // planes)
        acc2 = acc0 + (2 % planes) * width + 32 * (2 // planes)
        acc3 = acc0 + (3 % planes) * width + 32 * (3 // planes)
        a0 = load8(acc0, 0, _F32)
        a1 = load8(acc1, 0, _F32)
        a2 = load8(acc2, 0, _F32)
        a3 = load8(acc3, 0, _F32)
        b0 = load8(acc0 + acc_stride, 0, _F32)
        b1 = load8(acc1 + acc_stride, 0, _F32)
        b2 = load8(acc2 + acc_stride, 0, _F32)
        b3 = load8(acc3 + acc_stride, 0, _F32)
        for t in range(t0, t1):
            wa = broadcast8(weights + 4 * t)
            wb = broadcast8(weights + w_stride + 4 * t)
            x = load8(at0 + t * stride, 0, tag)
            a0 = fma8(x, wa, a0)
            b0 = fma8(x, wb, b0)
            x = load8(at1 + t * stride, 1 % planes, tag)
            a1 = fma8(x, wa, a1)
            b1 = fma8(x, wb, b1)
            x = load8(at2 + t * stride, 2 % planes, tag)
            a2 = fma8(x, wa, a2)
            b2 = fma8(x, wb, b2)
            x = load8(at3 + t * stride, 3 % planes, tag)
            a3 = fma8(x, wa, a3)
            b3 = fma8(x, wb, b3)
        store8(acc0, a0)
        store8(acc1, a1)
        store8(acc2, a2)
        store8(acc3, a3)
        store8(acc0 + acc_stride, b0)
        store8(acc1 + acc_stride, b1)
        store8(acc2 + acc_stride, b2)
        store8(acc3 + acc_stride, b3)
    for j in range(whole, row, 8):
        at0 = v + vector_start(j, row) * item_nbytes(tag)
        for plane in range(planes):
            acc0 = acc + plane * width + 4 * j
            a0 = load8(acc0, 0, _F32)
            b0 = load8(acc0 + acc_stride, 0, _F32)
            for t in range(t0, t1):
                x = load8(at0 + t * stride, plane, tag)
                a0 = fma8(x, broadcast8(weights + 4 * t), a0)
                b0 = fma8(x, broadcast8(weights + w_stride + 4 * t), b0)
            store8(acc0, a0)
            store8(acc0 + acc_stride, b0)


@njit
def units(units: int, kv_head: int, n_kv_heads: int) -> Any:
    """The powers of two of K and V of this head."""
    k_unit = sum_lanes(load_first(units + 4 * kv_head, 1, 0, _F32))
    v_unit = sum_lanes(load_first(units + 4 * (n_kv_heads + kv_head), 1, 0, _F32))
    return k_unit, v_unit
