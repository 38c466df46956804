"""Norms, rotary positions and gated activations on the CPU: one walk over memory each, in fp32 inside.

torch makes several passes over the tokens for each of these, and in bf16 converts in between; where the processor
multiplies bf16 matrices quickly, that took as long as the products (experiments/LOG.md). A row is a token, or
a head of one; no row's result depends on another. Addresses are plain integers, owned and checked by
`quant.pointwise`.
"""

from typing import Any

import numpy as np
from numba import njit, prange

from quant.kernel_cache import cached_kernel
from quant.kernels_kv_simd import (
    add8,
    div8,
    exp8,
    first_lanes8,
    fma8,
    item_nbytes,
    load8,
    load_first,
    max8,
    min8,
    mul8,
    quiet8,
    splat8,
    store_as,
    store_first_as,
    sub8,
    sum_lanes,
)
from quant.kernels_simd import copy_bytes

_F32 = np.float32(0)  # the tag of fp32

# How a gate is activated: gate * sigmoid(z), where z is the gate, or for tanh-GELU an odd cubic of it.
SILU, GELU_TANH = 0, 1


@njit
def _load(address: Any, n_left: int, tag: Any) -> Any:
    """8 elements, or as many as are left, then zeros."""
    if n_left >= 8:
        return load8(address, 0, tag)
    return load_first(address, n_left, 0, tag)


@njit
def _store(address: Any, value: Any, n_left: int, tag: Any) -> None:
    value = quiet8(value)
    if n_left >= 8:
        store_as(address, value, tag)
    else:
        store_first_as(address, value, n_left, tag)


@njit
def _norm_row(
    source: int, target: int, size: int, scale: int, bias: int, eps: Any, centered: bool, tag: Any
) -> None:
    item = item_nbytes(tag)
    zero = splat8(np.float32(0))
    mean = zero
    if centered:
        total = zero
        for j in range(0, size, 8):
            total = add8(total, _load(source + j * item, size - j, tag))
        mean = splat8(sum_lanes(total) / np.float32(size))
    # Four sums side by side: one chain of additions would wait for itself.
    a, b, c, d = zero, zero, zero, zero
    j = 0
    while j + 32 <= size:
        at = source + j * item
        x = sub8(load8(at, 0, tag), mean)
        a = fma8(x, x, a)
        x = sub8(load8(at + 8 * item, 0, tag), mean)
        b = fma8(x, x, b)
        x = sub8(load8(at + 16 * item, 0, tag), mean)
        c = fma8(x, x, c)
        x = sub8(load8(at + 24 * item, 0, tag), mean)
        d = fma8(x, x, d)
        j += 32
    while j < size:
        x = sub8(_load(source + j * item, size - j, tag), mean)
        if size - j < 8:
            x = first_lanes8(size - j, x, zero)
        a = fma8(x, x, a)
        j += 8
    squares = sum_lanes(add8(add8(a, b), add8(c, d)))
    factor = splat8(np.float32(1) / np.sqrt(squares / np.float32(size) + eps))
    for j in range(0, size, 8):
        left = size - j
        y = mul8(sub8(_load(source + j * item, left, tag), mean), factor)
        if scale:
            y = mul8(y, _load(scale + 4 * j, left, _F32))
        if bias:
            y = add8(y, _load(bias + 4 * j, left, _F32))
        _store(target + j * item, y, left, tag)


@cached_kernel(parallel=True, nogil=True)
def norm_rows(
    source: int,
    outer_stride: int,
    inner_stride: int,
    n_outer: int,
    n_inner: int,
    size: int,
    target: int,
    scale: int,
    bias: int,
    eps: Any,
    centered: bool,
    tag: Any,
    n_chunks: int,
) -> None:
    """target (n_outer, n_inner, size), contiguous = norm of the rows of source, strides in bytes.

    scale, bias: addresses of fp32 (size,), or 0 for none. centered: layer norm, else RMS norm.
    """
    n_rows = n_outer * n_inner
    for chunk in prange(n_chunks):
        for row in range(chunk * n_rows // n_chunks, (chunk + 1) * n_rows // n_chunks):
            at = source + row // n_inner * outer_stride + row % n_inner * inner_stride
            _norm_row(at, target + row * size * item_nbytes(tag), size, scale, bias, eps, centered, tag)


@cached_kernel(parallel=True, nogil=True)
def rotate_heads(
    source: int,
    token_stride: int,
    head_stride: int,
    n_tokens: int,
    n_heads: int,
    head_dim: int,
    half: int,
    cos: int,
    sin: int,
    target: int,
    tag: Any,
    n_chunks: int,
) -> None:
    """target (n_tokens, n_heads, head_dim), contiguous = source with pairs (i, i + half) turned, strides in bytes.

    cos, sin: fp32 (n_tokens, half). Entries from 2 * half on are copied.
    """
    item = item_nbytes(tag)
    for chunk in prange(n_chunks):
        for token in range(chunk * n_tokens // n_chunks, (chunk + 1) * n_tokens // n_chunks):
            for head in range(n_heads):
                at = source + token * token_stride + head * head_stride
                to = target + (token * n_heads + head) * head_dim * item
                for j in range(0, half, 8):
                    left = half - j
                    first = _load(at + j * item, left, tag)
                    second = _load(at + (half + j) * item, left, tag)
                    c = _load(cos + 4 * (token * half + j), left, _F32)
                    s = _load(sin + 4 * (token * half + j), left, _F32)
                    _store(to + j * item, sub8(mul8(first, c), mul8(second, s)), left, tag)
                    _store(to + (half + j) * item, add8(mul8(second, c), mul8(first, s)), left, tag)
                for j in range(2 * half, head_dim, 8):
                    _store(to + j * item, _load(at + j * item, head_dim - j, tag), head_dim - j, tag)


@njit
def _sigmoid_factor(x: Any, kind: int) -> Any:
    """1 + e^-z, by which a gate x is divided."""
    z = x
    if kind == GELU_TANH:  # 0.5 x (1 + tanh u) = x sigmoid(2 u)
        cubic = mul8(mul8(x, x), mul8(x, splat8(np.float32(0.044715))))
        z = mul8(add8(x, cubic), splat8(np.float32(1.5957691216057308)))
    # exp8 takes -87..88; beyond, the gate is what it is to fp32's last place, or nothing.
    z = min8(max8(z, splat8(np.float32(-87.0))), splat8(np.float32(87.0)))
    return add8(exp8(sub8(splat8(np.float32(0)), z)), splat8(np.float32(1)))


@cached_kernel(parallel=True, nogil=True)
def gate_rows(
    source: int, row_stride: int, n_rows: int, size: int, target: int, kind: int, tag: Any, n_chunks: int
) -> None:
    """target (n_rows, size), contiguous = activation(gate) * up; a row of source is gate, then up, each of size."""
    item = item_nbytes(tag)
    for chunk in prange(n_chunks):
        for row in range(chunk * n_rows // n_chunks, (chunk + 1) * n_rows // n_chunks):
            at = source + row * row_stride
            to = target + row * size * item
            for j in range(0, size, 8):
                left = size - j
                gate = _load(at + j * item, left, tag)
                up = _load(at + (size + j) * item, left, tag)
                factor = _sigmoid_factor(gate, kind)
                # Far below zero the quotient is zero, for the largest numbers too; infinity less itself is NaN.
                wrong = sub8(gate, gate)
                gate = max8(splat8(np.float32(-1e4)), gate)
                _store(to + j * item, mul8(add8(div8(gate, factor), wrong), up), left, tag)


@cached_kernel(parallel=True, nogil=True)
def place_heads(
    source: int,
    token_stride: int,
    head_stride: int,
    tokens: Any,
    targets: Any,
    n_heads: int,
    target_head_stride: int,
    nbytes: int,
    n_chunks: int,
) -> None:
    """Heads of nbytes of tokens[i] -> address targets[i] and on, target_head_stride apart; strides in bytes."""
    n = tokens.size
    for chunk in prange(n_chunks):
        for i in range(chunk * n // n_chunks, (chunk + 1) * n // n_chunks):
            for head in range(n_heads):
                at = source + tokens[i] * token_stride + head * head_stride
                copy_bytes(targets[i] + head * target_head_stride, at, nbytes)


@cached_kernel(parallel=True, nogil=True)
def convert(source: int, target: int, n: int, source_tag: Any, target_tag: Any, n_chunks: int) -> None:
    """n elements of one type at address source -> those of another at address target, rounded to the nearest."""
    from_item, to_item = item_nbytes(source_tag), item_nbytes(target_tag)
    for chunk in prange(n_chunks):
        end = (chunk + 1) * n // n_chunks
        for i in range(chunk * n // n_chunks, end, 8):
            value = _load(source + i * from_item, end - i, source_tag)
            _store(target + i * to_item, value, end - i, target_tag)
