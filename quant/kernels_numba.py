"""Weight kernels on the CPU: packed -> fp32 or bf16 values, and products of few tokens with packed weights.

Importing this module imports numba; `quant.packed` and `quant.linear` do so when they first need it. Compiled
code is cached on disk. bf16 is written as uint16, rounded to the nearest, ties to even.
"""

from typing import Any

import numpy as np
from numba import njit, prange

from quant.kernel_cache import cached_kernel
from quant.kernels_decode import COLS, ROWS, scratch_nbytes, unpack_row
from quant.threads import use_torch_threads

# Sums of products may be reordered, so that they run in vectors; values of weights are never touched by this.
_SUM_ANY_ORDER = {"reassoc", "contract", "nsz"}
# Chunks of rows per thread: uneven machines balance, yet the scratch arrays are allocated rarely.
_CHUNKS_PER_THREAD = 8
# Rows of a product's tile and columns of one stretch of it: two rows of 1024 fp32 stay in the first-level cache.
_STRETCH = 1024


@cached_kernel(parallel=True, nogil=True)
def _dequantize(
    layout: Any,
    data: int,
    permutation: Any,
    row_ids: Any,
    row_start: int,
    n_chunks: int,
    out: Any,
) -> None:
    n_rows = out.shape[0]
    cols = layout[COLS]
    tag = out.dtype.type(0)
    step = 32 * out.itemsize
    for chunk in prange(n_chunks):
        scratch = np.empty(scratch_nbytes(layout), np.uint8)
        shuffled = np.empty(permutation.size, out.dtype)
        for i in range(chunk * n_rows // n_chunks, (chunk + 1) * n_rows // n_chunks):
            row = row_ids[i] if row_ids.size else row_start + i
            if permutation.size:
                unpack_row(layout, data, row, scratch.ctypes.data, shuffled.ctypes.data, step, tag)
                target = out[i]
                for j in range(cols):
                    target[permutation[j]] = shuffled[j]
            else:
                at = out.ctypes.data + i * out.strides[0]
                unpack_row(layout, data, row, scratch.ctypes.data, at, step, tag)


@njit(fastmath=_SUM_ANY_ORDER)
def _dot_2x4(w0: Any, w1: Any, x0: Any, x1: Any, x2: Any, x3: Any, y: Any) -> None:
    """y (2, 4) += two weight rows times four tokens."""
    s00 = s01 = s02 = s03 = s10 = s11 = s12 = s13 = np.float32(0)
    for k in range(w0.size):
        a = w0[k]
        b = w1[k]
        s00 += a * x0[k]
        s10 += b * x0[k]
        s01 += a * x1[k]
        s11 += b * x1[k]
        s02 += a * x2[k]
        s12 += b * x2[k]
        s03 += a * x3[k]
        s13 += b * x3[k]
    y[0, 0] += s00
    y[0, 1] += s01
    y[0, 2] += s02
    y[0, 3] += s03
    y[1, 0] += s10
    y[1, 1] += s11
    y[1, 2] += s12
    y[1, 3] += s13


@cached_kernel(parallel=True, nogil=True)
def _few_tokens(layout: Any, data: int, x: Any, n_chunks: int, y: Any) -> None:
    n_tokens = x.shape[0]
    n_quads = (n_tokens + 3) // 4
    rows = layout[ROWS]
    cols = layout[COLS]
    n_pairs = (rows + 1) // 2
    for chunk in prange(n_chunks):
        scratch = np.empty(scratch_nbytes(layout), np.uint8)
        w = np.empty((2, cols), np.float32)
        sums = np.empty((n_quads, 2, 4), np.float32)
        for pair in range(chunk * n_pairs // n_chunks, (chunk + 1) * n_pairs // n_chunks):
            row = 2 * pair
            n_here = min(2, rows - row)
            for i in range(n_here):
                at = w.ctypes.data + 4 * i * cols
                unpack_row(layout, data, row + i, scratch.ctypes.data, at, 128, np.float32(0))
            if n_here == 1:
                w[1, :] = np.float32(0)
            sums[:] = np.float32(0)
            for start in range(0, cols, _STRETCH):
                end = min(start + _STRETCH, cols)
                for quad in range(n_quads):
                    # Missing tokens of the last quad repeat the last one: the same sums in the same order for
                    # a token whatever stands beside it.
                    t = 4 * quad
                    last = n_tokens - 1
                    _dot_2x4(
                        w[0, start:end],
                        w[1, start:end],
                        x[t, start:end],
                        x[min(t + 1, last), start:end],
                        x[min(t + 2, last), start:end],
                        x[min(t + 3, last), start:end],
                        sums[quad],
                    )
            for t in range(n_tokens):
                for i in range(n_here):
                    y[t, row + i] = sums[t // 4, i, t % 4]


def dequantize(layout: Any, data: int, permutation: Any, row_ids: Any, row_start: int, out: Any) -> None:
    """Write rows of a packed matrix to out (n, cols), float32 or uint16 for bf16; each row contiguous.

    data: the address of the matrix's buffer. row_ids: int64 (n,), the rows wanted, all
    within range; empty for rows row_start.. in order. permutation: int32 (cols,), or empty.
    """
    n_chunks = max(1, min(use_torch_threads() * _CHUNKS_PER_THREAD, out.shape[0]))
    _dequantize(layout, data, permutation, row_ids, row_start, n_chunks, out)


def few_tokens(layout: Any, data: int, x: Any, y: Any) -> None:
    """y (tokens, rows) = x (tokens, cols) times the transposed packed matrix at address data, in fp32.

    Each token's sums do not depend on the other tokens, bit for bit.
    """
    n_pairs = (y.shape[1] + 1) // 2
    n_chunks = max(1, min(use_torch_threads() * _CHUNKS_PER_THREAD, n_pairs))
    _few_tokens(layout, data, x, n_chunks, y)
