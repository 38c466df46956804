"""Products of bf16 tokens with bf16 or packed weights by AMX: y = x W^T + b, sums in fp32, rounded once.

Tokens are first laid out as tiles (`lay_out_tokens`). Then each thread walks over its rows of the weight in panels that
the second-level cache holds: a panel is unpacked there, or lies in memory as it is, and meets all tokens, two tiles of
rows with two of tokens at a time, their four squares of sums in registers. So a row is read from memory once, at its
packed size. Nothing about a token's result depends on the other tokens: they have columns of their own in
every tile, and the order of a sum is that of the weight's columns.

Where rows are gates and ups of an MLP, a square holds 16 of either, and what is written is activation(gate) * up.
Results can also be added to what is there: the residual, without another walk over memory.

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
    gate_gelu,
    gate_silu,
    load_tile,
    multiply_tiles,
    release_tiles,
    store_tile,
    turn_added,
    turn_biased,
    turn_tile,
    turn_tokens,
    zero_tile,
)
from quant.kernels_decode import ROWS, prefetch_row, scratch_nbytes, unpack_row
from quant.kernels_simd import float_at, prefetch, prefetch_for_writing

CONFIGURATION = configuration()
# What becomes of a product: it is written, added to what is there, or its first half of rows gates the second.
WRITE, ADD, SILU, GELU_TANH = range(4)
MODES = {"write": WRITE, "add": ADD, "silu": SILU, "gelu_tanh": GELU_TANH}
_BF16 = np.uint16(0)  # the tag of bf16
_PAIR = 2 * TILE
_ROWS_AHEAD = 8
_MOST_LINES = 8  # fetched for each step: more than memory can deliver only get in the way
_MOST_AHEAD = 1 << 19  # bytes of a panel of which the next one fits into the second-level cache besides
SQUARE = 4 * TILE  # bytes of the sums of two tiles of rows and two of tokens
_PARTS = (2, 2, 9, 9)  # that the sums of 16 tokens are written in, by mode: see `_write_part`
_FIRST_PART = (
    4  # step of a square at which the one before it begins to be written: its last sums need that long
)


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
def _source_row(i: int, row: int, up_rows: int) -> int:
    """The matrix row behind row i of the panel that begins with row `row`: in order, or 16 gates, 16 ups and so on.

    up_rows: how many rows after its gate an up is, 0 for matrices without.
    """
    if up_rows == 0:
        return row + i
    return row + i // 32 * 16 + i % 16 + (up_rows if i % 32 >= 16 else 0)


@njit
def _unpack_panel(
    layout: Any,
    data: int,
    row: int,
    up_rows: int,
    n_rows: int,
    n_cols: int,
    scratch: int,
    panel: int,
    panel_stride: int,
) -> None:
    """Rows of a packed matrix -> n_rows rows of the panel, zeros up to whole tiles of columns."""
    last = layout[ROWS] - 1
    for i in range(n_rows):
        at = panel + i * panel_stride
        if n_cols % 32:
            end = at + n_cols // 32 * 64
            copy32(end, 0, end)
        prefetch_row(layout, data, _source_row(i + _ROWS_AHEAD, row, up_rows))
        # Where gates end within a tile, rows that nobody reads fill it.
        source = min(_source_row(i, row, up_rows), last)
        unpack_row(layout, data, source, scratch, at, 64, _BF16)


@njit
def _copy_panel(
    data: int,
    stride: int,
    row: int,
    up_rows: int,
    n_rows: int,
    last: int,
    n_cols: int,
    panel: int,
    panel_stride: int,
) -> None:
    """Rows of a bf16 matrix, stride bytes apart -> n_rows rows of the panel, zeros up to whole tiles of columns."""
    for i in range(n_rows):
        source = data + min(_source_row(i, row, up_rows), last) * stride
        for col in range(0, n_cols, 32):
            copy32(source + 2 * col, n_cols - col, panel + i * panel_stride + 2 * col)


@njit
def _multiply_square(
    w: int,
    w_stride: int,
    w_next: int,
    x: int,
    x_next: int,
    n_steps: int,
    target: int,
    w_ahead: int,
    w_twin: int,
    n_w: int,
    x_ahead: int,
    n_x: int,
    n_parts: int,
    late: int,
    late_row: int,
    late_token: int,
    bias: int,
    up_bias: int,
    n_rows: int,
    y: int,
    y_stride: int,
    n_tokens: int,
    mode: int,
) -> None:
    """Registers 0 to 3 += two tiles of rows times two tiles of tokens, along n_steps tiles of columns.

    w_stride, w_next, x_next: bytes from a row, a tile of rows and a tile of tokens to the next. Meanwhile memory that
    is needed next is fetched: target, where the result goes, 32 rows of one line each; for each step lines of n_w rows
    from w_ahead on, and as many w_twin bytes after them unless that is 0; n_x lines for each step, n_steps lines
    apart, from x_ahead on. And the square before, whose sums are at late, is written between the steps, in n_parts
    for each 16 tokens: tiles and vectors compute at the same time.
    """
    part, parts_left = 0, 2 * n_parts
    apart = max(1, (n_steps - _FIRST_PART) // max(1, parts_left))
    next_part = _FIRST_PART
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
            prefetch_for_writing(target + step * y_stride)
        for i in range(n_w):
            prefetch(w_ahead + i * w_stride)
        if w_twin:
            for i in range(n_w):
                prefetch(w_ahead + w_twin + i * w_stride)
        for i in range(n_x):
            prefetch(x_ahead + i * n_steps * 64)
        # What is left when the steps end is written at the last of them.
        while parts_left and (step == next_part or step == n_steps - 1):
            _write_part(part, late, bias, up_bias, late_row, n_rows, y, y_stride, late_token, n_tokens, mode)
            part += 1
            parts_left -= 1
            next_part = step + apart
            if part == n_parts:
                part, late, late_token = 0, late + _PAIR, late_token + 16
        w += 64
        x += TILE
        w_ahead += 64
        x_ahead += 64


@njit
def _multiply_column(w: int, w_stride: int, w_next: int, w_pair: int, x: int, n_steps: int) -> None:
    """Registers 0 to 3 += four tiles of rows, two pairs, times one of tokens."""
    for _ in range(n_steps):
        load_tile(7, x, 64)
        load_tile(4, w, w_stride)
        multiply_tiles(0, 4, 7)
        load_tile(5, w + w_next, w_stride)
        multiply_tiles(1, 5, 7)
        load_tile(6, w + w_pair, w_stride)
        multiply_tiles(2, 6, 7)
        load_tile(4, w + w_pair + w_next, w_stride)
        multiply_tiles(3, 4, 7)
        w += 64
        x += TILE


@njit
def _multiply_panel(
    w: int,
    w_stride: int,
    w_next: int,
    w_pair: int,
    n_rows: int,
    x: int,
    n_tokens: int,
    n_steps: int,
    bias: int,
    up_bias: int,
    y: int,
    y_stride: int,
    mode: int,
    sums: int,
    w_ahead: int,
    w_twin: int,
    n_ahead: int,
    are_far: bool,
) -> None:
    """All tokens with a panel of n_rows results, which are columns of y.

    w_next, w_pair: bytes from the first tile of rows of a square to the second, and from a square to the next.
    """
    n_blocks = (n_tokens + 15) // 16
    width = 32 if mode < SILU else 16  # results of a square
    n_pairs = (n_rows + width - 1) // width
    x_next = n_steps * TILE
    n_x = (32 + n_pairs - 1) // n_pairs if are_far else 0
    n_parts = _PARTS[mode]
    late, late_row, late_token = 0, 0, 0
    for block in range(0, n_blocks - 1, 2):
        tokens = x + block * x_next
        for pair in range(n_pairs):
            row = width * pair
            _zero_sums()
            _multiply_square(
                w + pair * w_pair,
                w_stride,
                w_next,
                tokens,
                x_next,
                n_steps,
                y + 16 * block * y_stride + 2 * row,
                w_ahead,
                w_twin,
                n_ahead,
                tokens + 2 * x_next + n_x * pair * n_steps * 64,
                n_x,
                n_parts if late else 0,
                late,
                late_row,
                late_token,
                bias,
                up_bias,
                n_rows,
                y,
                y_stride,
                n_tokens,
                mode,
            )
            w_ahead += n_ahead * w_stride
            late = sums + SQUARE if late == sums else sums
            late_row, late_token = row, 16 * block
            _store_sums(late)
    if late:
        for part in range(2 * n_parts):
            at, token = late + part // n_parts * _PAIR, late_token + part // n_parts * 16
            _write_part(
                part % n_parts, at, bias, up_bias, late_row, n_rows, y, y_stride, token, n_tokens, mode
            )
    if n_blocks % 2:
        token = 16 * (n_blocks - 1)
        for pair in range(0, n_pairs, 2):
            _zero_sums()
            tokens = x + (n_blocks - 1) * x_next
            _multiply_column(w + pair * w_pair, w_stride, w_next, w_pair, tokens, n_steps)
            _store_sums(sums)
            for i in range(min(2, n_pairs - pair)):
                row = width * (pair + i)
                for part in range(n_parts):
                    at = sums + i * _PAIR
                    _write_part(part, at, bias, up_bias, row, n_rows, y, y_stride, token, n_tokens, mode)


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
def _write_part(
    part: int,
    sums: int,
    bias: int,
    up_bias: int,
    row: int,
    n_rows: int,
    y: int,
    y_stride: int,
    token: int,
    n_tokens: int,
    mode: int,
) -> None:
    """One of the parts, in order, that the sums of two tiles of rows and 16 tokens are written to y in.

    Those are the two tiles; or 16 rows that gates are made of, two at a time, then the tile of those.
    """
    if mode >= SILU and part < 8:
        for i in range(2 * part, 2 * part + 2):
            _gate(sums + 64 * i, i, bias, up_bias, row, n_rows, mode)
        return
    if mode < SILU:
        sums += part * TILE
        row += part * 16
        if row >= n_rows:
            return
    target = y + token * y_stride + 2 * row
    at = bias + 4 * row if bias else 0
    if mode == WRITE:
        turn_biased(sums, at, n_rows - row, target, y_stride, n_tokens - token)
    elif mode == ADD:
        turn_added(sums, at, n_rows - row, target, y_stride, n_tokens - token)
    else:
        turn_tile(sums, n_rows - row, target, y_stride, n_tokens - token)


@njit
def _gate(at: int, i: int, bias: int, up_bias: int, row: int, n_rows: int, mode: int) -> None:
    """Row i of a tile of gates and, a tile on, of ups: what they become takes the gates' place."""
    gate_bias, ups_bias = np.float32(0), np.float32(0)
    if bias:
        of_row = 4 * min(row + i, n_rows - 1)
        gate_bias, ups_bias = float_at(bias + of_row), float_at(up_bias + of_row)
    if mode == SILU:
        gate_silu(at, at + TILE, gate_bias, ups_bias)
    else:
        gate_gelu(at, at + TILE, gate_bias, ups_bias)


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
    mode: int,
    panel_rows: int,
    is_direct: bool,
    are_far: bool,
    configuration: Any,
    workspace: int,
    workspace_step: int,
    n_threads: int,
) -> None:
    """The tokens laid out at x times the n_rows rows of the matrix at data, plus bias -> y, bf16, as mode says.

    Rows of y are y_stride bytes apart; where the first half of the rows gates the second, y has n_rows / 2 columns.
    layout: of a packed matrix; empty for bf16 rows stride bytes apart, whose tiles are loaded from where they lie if
    is_direct. bias: fp32 (n_rows,) or 0. panel_rows: a multiple of 64. are_far: whether tokens are too many to stay in
    the second-level cache. workspace: for each thread, workspace_step bytes on, two squares of sums and a panel's rows.
    """
    n_steps = (n_cols + 31) // 32
    up_rows = n_rows // 2 if mode >= SILU else 0
    n_results = up_rows if up_rows else n_rows
    width = 16 if up_rows else 32  # results of a square
    step = panel_rows // 32 * width
    n_units = (n_results + width - 1) // width
    # An odd number of lines: rows that are a power of two apart would share few sets of the first-level cache.
    panel_stride = (n_steps // 2 * 2 + 1) * 64
    n_ahead = 0
    if not layout.size and panel_rows * panel_stride <= _MOST_AHEAD:
        n_squares = (n_tokens + 31) // 32
        n_ahead = min(_MOST_LINES * width // 32, (width + n_squares - 1) // n_squares)
    for thread in prange(n_threads):
        configure_tiles(configuration.ctypes.data)
        scratch = np.empty(scratch_nbytes(layout) if layout.size else 0, np.uint8)
        sums = workspace + thread * workspace_step
        panel = sums + 2 * SQUARE
        first = thread * n_units // n_threads * width
        last = min((thread + 1) * n_units // n_threads * width, n_results)
        for row in range(first, last, step):
            n_here = min(step, last - row)
            n_filled = n_here if up_rows == 0 else (n_here + 15) // 16 * 32
            w, w_stride, w_next, w_pair = panel, panel_stride, 16 * panel_stride, 32 * panel_stride
            ahead, twin, n_lines = 0, 0, 0
            if layout.size:
                at = scratch.ctypes.data
                _unpack_panel(layout, data, row, up_rows, n_filled, n_cols, at, panel, panel_stride)
            elif is_direct and n_here % (2 * width) == 0:
                w, w_stride, w_pair = data + row * stride, stride, width * stride
                w_next = up_rows * stride if up_rows else 16 * stride
                ahead, twin, n_lines = w + step * stride, up_rows * stride, n_ahead
            else:
                _copy_panel(data, stride, row, up_rows, n_filled, n_rows - 1, n_cols, panel, panel_stride)
            _multiply_panel(
                w,
                w_stride,
                w_next,
                w_pair,
                n_here,
                x,
                n_tokens,
                n_steps,
                bias + 4 * row if bias else 0,
                bias + 4 * (up_rows + row) if bias else 0,
                y + 2 * row,
                y_stride,
                mode,
                sums,
                ahead,
                twin,
                n_lines,
                are_far,
            )
        release_tiles()
