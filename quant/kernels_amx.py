"""Products of bf16 tokens with bf16 or packed weights by AMX: y = x W^T + b, sums in fp32, rounded once.

Tokens are first laid out as tiles (`lay_out_tokens`). Then each thread walks over its rows of the weight in panels that
the second-level cache holds: a panel is unpacked there, or lies in memory as it is, and meets all tokens, two tiles of
rows with two of tokens at a time, their four squares of sums in registers. So a row is read from memory once, at its
packed size. Nothing about a token's result depends on the other tokens: they have columns of their own in
every tile, and the order of a sum is that of the weight's columns.

Addresses are plain integers, owned and checked by `quant.amx`.
"""

from typing import Any

import numpy as np
from numba import njit, prange

from quant.kernel_cache import cached_kernel
from quant.kernels_amx_simd import (
    TILE,
    configuration,
    configure_tiles,
    copy32,
    load_tile,
    multiply_tiles,
    release_tiles,
    store_tile,
    turn_sums,
    turn_tokens,
    zero_tile,
)
from quant.kernels_decode import prefetch_row, scratch_nbytes, unpack_row
from quant.kernels_simd import prefetch, prefetch_for_writing

CONFIGURATION = configuration()
_BF16 = np.uint16(0)  # the tag of bf16
_PAIR = 2 * TILE
_ROWS_AHEAD = 8
_MOST_LINES = 8  # fetched for each step: more than memory can deliver only get in the way
_MOST_AHEAD = 1 << 19  # bytes of a panel of which the next one fits into the second-level cache besides
_SQUARE = 4 * TILE  # bytes of the sums of two tiles of rows and two of tokens


@cached_kernel(parallel=True, nogil=True)
def lay_out_tokens(x: int, stride: int, n_tokens: int, n_cols: int, tiles: int, n_chunks: int) -> None:
    """x, bf16 (n_tokens, n_cols), rows stride bytes apart -> tiles (token blocks of 16, column blocks of 32)."""
    n_blocks = (n_tokens + 15) // 16
    n_steps = (n_cols + 31) // 32
    n_all = n_blocks * n_steps
    for chunk in prange(n_chunks):
        for i in range(chunk * n_all // n_chunks, (chunk + 1) * n_all // n_chunks):
            block = i // n_steps
            step = i % n_steps
            source = x + 16 * block * stride + 64 * step
            turn_tokens(source, stride, n_tokens - 16 * block, n_cols - 32 * step, tiles + i * TILE)


@njit
def _unpack_panel(
    layout: Any, data: int, row: int, n_rows: int, n_cols: int, scratch: int, panel: int, panel_stride: int
) -> None:
    """Rows of a packed matrix -> rows of the panel, zeros up to whole tiles of columns."""
    for i in range(n_rows):
        at = panel + i * panel_stride
        if n_cols % 32:
            last = at + n_cols // 32 * 64
            copy32(last, 0, last)
        prefetch_row(layout, data, row + i + _ROWS_AHEAD)
        unpack_row(layout, data, row + i, scratch, at, 64, _BF16)


@njit
def _copy_panel(data: int, stride: int, n_rows: int, n_cols: int, panel: int, panel_stride: int) -> None:
    """Rows of a bf16 matrix, stride bytes apart -> rows of the panel, zeros up to whole tiles of columns."""
    for i in range(n_rows):
        for col in range(0, n_cols, 32):
            copy32(data + i * stride + 2 * col, n_cols - col, panel + i * panel_stride + 2 * col)


@njit
def _multiply_square(
    w: int,
    w_stride: int,
    w_next: int,
    x: int,
    x_next: int,
    n_steps: int,
    y: int,
    y_stride: int,
    w_ahead: int,
    w_ahead_stride: int,
    n_w: int,
    x_ahead: int,
    n_x: int,
) -> None:
    """Registers 0 to 3 += two tiles of rows times two tiles of tokens, along n_steps tiles of columns.

    w_stride, w_next, x_next: bytes from a row, a tile of rows and a tile of tokens to the next. Meanwhile memory that
    is needed next is fetched: y, where the result goes, 32 rows of one line each; n_w lines for each step from w_ahead
    on, w_ahead_stride bytes apart; n_x lines for each step, n_steps lines apart, from x_ahead on.
    """
    for step in range(n_steps):
        load_tile(4, w, w_stride)
        load_tile(6, x, 64)
        multiply_tiles(0, 4, 6)
        load_tile(5, w + w_next, w_stride)
        multiply_tiles(1, 5, 6)
        load_tile(7, x + x_next, 64)
        multiply_tiles(2, 4, 7)
        multiply_tiles(3, 5, 7)
        if step < 32:
            prefetch_for_writing(y + step * y_stride)
        for i in range(n_w):
            prefetch(w_ahead + i * w_ahead_stride)
        for i in range(n_x):
            prefetch(x_ahead + i * n_steps * 64)
        w += 64
        x += TILE
        w_ahead += 64
        x_ahead += 64


@njit
def _multiply_column(w: int, w_stride: int, w_next: int, x: int, n_steps: int) -> None:
    """Registers 0 to 3 += four tiles of rows times one of tokens."""
    for _ in range(n_steps):
        load_tile(7, x, 64)
        load_tile(4, w, w_stride)
        multiply_tiles(0, 4, 7)
        load_tile(5, w + w_next, w_stride)
        multiply_tiles(1, 5, 7)
        load_tile(6, w + 2 * w_next, w_stride)
        multiply_tiles(2, 6, 7)
        load_tile(4, w + 3 * w_next, w_stride)
        multiply_tiles(3, 4, 7)
        w += 64
        x += TILE


@njit
def _multiply_panel(
    w: int,
    w_stride: int,
    n_rows: int,
    x: int,
    n_tokens: int,
    n_steps: int,
    bias: int,
    y: int,
    y_stride: int,
    sums: int,
    w_ahead: int,
    w_ahead_stride: int,
    n_ahead: int,
    are_far: bool,
) -> None:
    """All tokens with the n_rows of a panel; the results are columns of y."""
    n_blocks = (n_tokens + 15) // 16
    n_pairs = (n_rows + 31) // 32
    x_next = n_steps * TILE
    w_next = 16 * w_stride
    n_x = (32 + n_pairs - 1) // n_pairs if are_far else 0
    for block in range(0, n_blocks - 1, 2):
        tokens = x + block * x_next
        for pair in range(n_pairs):
            row = 32 * pair
            _zero_sums()
            _multiply_square(
                w + row * w_stride,
                w_stride,
                w_next,
                tokens,
                x_next,
                n_steps,
                y + 16 * block * y_stride + 2 * row,
                y_stride,
                w_ahead,
                w_ahead_stride,
                n_ahead,
                tokens + 2 * x_next + n_x * pair * n_steps * 64,
                n_x,
            )
            w_ahead += n_ahead * w_ahead_stride
            _store_sums(sums)
            for i in range(2):
                token = 16 * (block + i)
                _write(sums + i * _PAIR, bias, row, n_rows, y, y_stride, token, n_tokens)
    if n_blocks % 2:
        block = n_blocks - 1
        for row in range(0, n_rows, 64):
            _zero_sums()
            _multiply_column(w + row * w_stride, w_stride, w_next, x + block * x_next, n_steps)
            _store_sums(sums)
            for i in range(min(2, (n_rows - row + 31) // 32)):
                _write(sums + i * _PAIR, bias, row + 32 * i, n_rows, y, y_stride, 16 * block, n_tokens)


@njit
def _zero_sums() -> None:
    zero_tile(0)
    zero_tile(1)
    zero_tile(2)
    zero_tile(3)


@njit
def _store_sums(sums: int) -> None:
    store_tile(0, sums, 64)
    store_tile(1, sums + TILE, 64)
    store_tile(2, sums + 2 * TILE, 64)
    store_tile(3, sums + 3 * TILE, 64)


@njit
def _write(
    sums: int, bias: int, row: int, n_rows: int, y: int, y_stride: int, token: int, n_tokens: int
) -> None:
    """Sums of 32 rows and 16 tokens -> y."""
    to_bias = bias + 4 * row if bias else 0
    target = y + token * y_stride + 2 * row
    turn_sums(sums, sums + TILE, to_bias, n_rows - row, target, y_stride, n_tokens - token)


@cached_kernel(parallel=True, nogil=True)
def multiply(
    layout: Any,
    data: int,
    stride: int,
    n_rows: int,
    n_cols: int,
    x: int,
    n_tokens: int,
    bias: int,
    y: int,
    y_stride: int,
    panel_rows: int,
    is_direct: bool,
    are_far: bool,
    configuration: Any,
    workspace: int,
    workspace_step: int,
    n_threads: int,
) -> None:
    """y = the tokens laid out at x times the matrix at data, transposed, plus bias; bf16, rows y_stride bytes apart.

    layout: of a packed matrix; empty for bf16 rows stride bytes apart, whose tiles are loaded from where they lie if
    is_direct. bias: fp32 (n_rows,) or 0. panel_rows: a multiple of 64. are_far: whether tokens are too many to stay in
    the second-level cache. workspace: for each thread, workspace_step bytes on, a square of sums and a panel's rows.
    """
    n_steps = (n_cols + 31) // 32
    n_units = (n_rows + 31) // 32
    # An odd number of lines: rows that are a power of two apart would share few sets of the first-level cache.
    panel_stride = (n_steps // 2 * 2 + 1) * 64
    n_ahead = 0
    if not layout.size and panel_rows * panel_stride <= _MOST_AHEAD:
        n_squares = (n_tokens + 31) // 32
        n_ahead = min(_MOST_LINES, (32 + n_squares - 1) // n_squares)
    for thread in prange(n_threads):
        configure_tiles(configuration.ctypes.data)
        scratch = np.empty(scratch_nbytes(layout) if layout.size else 0, np.uint8)
        sums = workspace + thread * workspace_step
        panel = sums + _SQUARE
        first = thread * n_units // n_threads * 32
        last = min((thread + 1) * n_units // n_threads * 32, n_rows)
        for row in range(first, last, panel_rows):
            n_here = min(panel_rows, last - row)
            source = data + row * stride
            ahead = source + panel_rows * stride
            w, w_stride = panel, panel_stride
            if layout.size:
                _unpack_panel(layout, data, row, n_here, n_cols, scratch.ctypes.data, panel, panel_stride)
            elif is_direct and n_here % 64 == 0:
                w, w_stride = source, stride
            else:
                _copy_panel(source, stride, n_here, n_cols, panel, panel_stride)
            _multiply_panel(
                w,
                w_stride,
                n_here,
                x,
                n_tokens,
                n_steps,
                bias + 4 * row if bias else 0,
                y + 2 * row,
                y_stride,
                sums,
                ahead,
                stride,
                n_ahead,
                are_far,
            )
        release_tiles()
