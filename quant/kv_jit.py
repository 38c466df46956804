"""The KV page codec's CPU kernels in numba: extremes and codes of full pages, and gathering into staging buffers.

`quant.kv` calls them with checked arguments; results equal its torch code bit for bit when encoding, and to the
last place of fp32 when decoding. head_dim is at least 8.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import njit, prange
from torch import Tensor

from quant.kernel_cache import cached_kernel
from quant.kernels_kv_simd import (
    TAGS,
    add8,
    broadcast8,
    first_lanes8,
    fma8,
    is_packed,
    item_nbytes,
    load8,
    load_first,
    max8,
    max_lanes,
    min8,
    mul8,
    n_planes,
    round8,
    splat8,
    store8,
    store_as,
    store_first_as,
    sub8,
    sum_lanes,
)
from quant.kv_batch import PagedBatch, part_offsets, plain_format
from quant.kv_formats import CacheFormat
from quant.threads import use_torch_threads

_F32 = np.float32(0)
_F16 = np.int16(0)
_U8 = np.uint8(0)
# Entries of part_offsets.
K_CODES, K_SCALE, K_MIN, V_CODES, V_SCALE, V_MIN, UNITS = range(7)


def extremes(x: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Least and greatest of contiguous x (n_pages, n_kv_heads, page_tokens, head_dim) over axis 2 or 3, fp32."""
    n_pages, n_kv_heads, page_tokens, head_dim = x.shape
    kept = head_dim if axis == 2 else page_tokens
    low = torch.empty((n_pages, n_kv_heads, kept), dtype=torch.float32)
    high = torch.empty_like(low)
    use_torch_threads()
    run = _extremes_of_channels if axis == 2 else _extremes_of_tokens
    shape = (n_pages * n_kv_heads, page_tokens, head_dim)
    run(x.data_ptr(), *shape, low.data_ptr(), high.data_ptr(), TAGS[plain_format(x.dtype).name])
    return low, high


@cached_kernel(parallel=True, nogil=True)
def _extremes_of_tokens(
    x: int, n_blocks: int, page_tokens: int, head_dim: int, low: int, high: int, tag: Any
) -> None:
    for block in prange(n_blocks):
        for t in range(block * page_tokens, (block + 1) * page_tokens):
            least, greatest = _row_extremes(x + t * head_dim * item_nbytes(tag), head_dim, tag)
            _store_scalar(low + 4 * t, least)
            _store_scalar(high + 4 * t, greatest)


@njit
def _store_scalar(address: int, value: Any) -> None:
    store_first_as(address, splat8(value), 1, _F32)


@njit
def _row_extremes(row: int, head_dim: int, tag: Any) -> Any:
    least = load8(row, 0, tag)
    greatest = least
    poison = splat8(_F32)  # 0, or NaN from the first value that is not finite: comparisons lose NaN
    for j in range(0, head_dim, 8):
        value = load8(row + min(j, head_dim - 8) * item_nbytes(tag), 0, tag)
        least = min8(value, least)
        greatest = max8(value, greatest)
        poison = fma8(value, splat8(_F32), poison)
    bad = sum_lanes(poison)
    return -max_lanes(sub8(splat8(_F32), least)) + bad, max_lanes(greatest) + bad


@cached_kernel(parallel=True, nogil=True)
def _extremes_of_channels(
    x: int, n_blocks: int, page_tokens: int, head_dim: int, low: int, high: int, tag: Any
) -> None:
    for block in prange(n_blocks):
        _column_extremes(
            x + block * page_tokens * head_dim * item_nbytes(tag),
            page_tokens,
            head_dim,
            low + 4 * block * head_dim,
            high + 4 * block * head_dim,
            tag,
        )


@njit
def _column_extremes(x: int, page_tokens: int, head_dim: int, low: int, high: int, tag: Any) -> None:
    stride = head_dim * item_nbytes(tag)
    for j in range(0, head_dim, 8):
        start = min(j, head_dim - 8)
        at = x + start * item_nbytes(tag)
        least = load8(at, 0, tag)
        greatest = least
        poison = splat8(_F32)
        for t in range(page_tokens):
            value = load8(at + t * stride, 0, tag)
            least = min8(value, least)
            greatest = max8(value, greatest)
            poison = fma8(value, splat8(_F32), poison)
        store8(low + 4 * start, add8(least, poison))
        store8(high + 4 * start, add8(greatest, poison))


def encode_codes(
    x: Tensor,
    axis: int,
    fmt: CacheFormat,
    codes: Tensor,
    inverse_unit: Tensor,
    base: Tensor,
    inverse_step: Tensor,
) -> None:
    """codes[...] = packed clamp(round((x * inverse_unit - base) * inverse_step)).

    x: contiguous (n_pages, n_kv_heads, page_tokens, head_dim); codes: a view of the codes in the pages;
    inverse_unit (n_pages, n_kv_heads); base and inverse_step per channel (axis 2) or per token (axis 3).
    """
    n_pages, n_kv_heads, page_tokens, head_dim = x.shape
    use_torch_threads()
    _encode_blocks(
        x.data_ptr(),
        n_pages,
        n_kv_heads,
        page_tokens,
        head_dim,
        codes.data_ptr(),
        codes.stride(0),
        fmt.row_nbytes(head_dim),
        inverse_unit.contiguous().numpy().reshape(-1),
        base.contiguous().data_ptr(),
        inverse_step.contiguous().data_ptr(),
        axis == 2,
        np.float32(fmt.levels),
        TAGS[plain_format(x.dtype).name],
        TAGS[fmt.name],
    )


@cached_kernel(parallel=True, nogil=True)
def _encode_blocks(
    x: int,
    n_pages: int,
    n_kv_heads: int,
    page_tokens: int,
    head_dim: int,
    codes: int,
    page_stride: int,
    row: int,
    inverse_unit: Any,
    base: int,
    inverse_step: int,
    by_channel: bool,
    levels: Any,
    tag: Any,
    code_tag: Any,
) -> None:
    for block in prange(n_pages * n_kv_heads):
        page = block // n_kv_heads
        head = block % n_kv_heads
        at = block * (head_dim if by_channel else page_tokens)
        _encode_block(
            x + block * page_tokens * head_dim * item_nbytes(tag),
            page_tokens,
            head_dim,
            codes + page * page_stride + head * page_tokens * row,
            row,
            inverse_unit[block],
            base + 4 * at,
            inverse_step + 4 * at,
            by_channel,
            levels,
            tag,
            code_tag,
        )


@njit
def _encode_block(
    x: int,
    page_tokens: int,
    head_dim: int,
    codes: int,
    row: int,
    inverse_unit: Any,
    base: int,
    inverse_step: int,
    by_channel: bool,
    levels: Any,
    tag: Any,
    code_tag: Any,
) -> None:
    unit = splat8(inverse_unit)
    for t in range(page_tokens):
        for j in range(0, row, 8):
            start = max(0, min(j, row - 8))
            packed = splat8(_F32)
            factor = np.float32(1)
            for plane in range(n_planes(code_tag)):
                channel = plane * row + start
                count = min(8, head_dim - channel)
                value = _load_some(x + (t * head_dim + channel) * item_nbytes(tag), count, tag)
                if by_channel:
                    origin = _load_some(base + 4 * channel, count, _F32)
                    per_step = _load_some(inverse_step + 4 * channel, count, _F32)
                else:
                    origin = broadcast8(base + 4 * t)
                    per_step = broadcast8(inverse_step + 4 * t)
                code = round8(mul8(sub8(mul8(value, unit), origin), per_step))
                code = min8(max8(code, splat8(_F32)), splat8(levels))
                code = first_lanes8(count, code, splat8(_F32))
                packed = fma8(code, splat8(factor), packed)  # whole numbers below 256: exact
                factor *= np.float32(levels + 1)
            to = codes + t * row + start
            if row >= 8:
                store_as(to, packed, _U8)
            else:
                store_first_as(to, packed, row, _U8)


@njit
def _load_some(address: int, count: int, tag: Any) -> Any:
    if count >= 8:
        return load8(address, 0, tag)
    return load_first(address, count, 0, tag)


def gather(
    batch: PagedBatch,
    page_addresses: npt.NDArray[np.int64],
    tail_addresses: npt.NDArray[np.int64],
    k_out: Tensor,
    v_out: Tensor,
) -> None:
    """Unpack all pages and tails into k_out, v_out (batch, n_kv_heads, max_len, head_dim), zeros past the end."""
    n_full = batch.full_pages().numpy()
    sequence = np.repeat(np.arange(batch.batch), n_full)
    page = np.arange(len(sequence)) - np.repeat(np.cumsum(n_full) - n_full, n_full)
    tail_tokens = batch.tail_lens.numpy()
    page_tokens = batch.page_tokens
    geometry = (batch.n_kv_heads, page_tokens, batch.head_dim)
    outputs = (k_out.data_ptr(), v_out.data_ptr(), k_out.shape[2])
    use_torch_threads()
    for fmt, addresses, rows, first, tokens, fill in (
        (batch.fmt, page_addresses[sequence, page], sequence, page * page_tokens, None, False),
        (
            plain_format(batch.tails.dtype),
            tail_addresses,
            np.arange(batch.batch),
            n_full * page_tokens,
            tail_tokens,
            True,
        ),
    ):
        _gather_pages(
            np.ascontiguousarray(addresses),
            rows.astype(np.int64),
            first.astype(np.int64),
            np.full(len(rows), page_tokens, np.int32) if tokens is None else tokens,
            fill,
            *geometry,
            part_offsets(fmt, page_tokens, batch.n_kv_heads, batch.head_dim),
            fmt.row_nbytes(batch.head_dim) if fmt.is_packed else batch.head_dim,
            *outputs,
            TAGS[fmt.name],
            TAGS[plain_format(k_out.dtype).name],
        )


@cached_kernel(parallel=True, nogil=True)
def _gather_pages(
    addresses: Any,
    sequences: Any,
    first_positions: Any,
    n_tokens: Any,
    fill: bool,
    n_kv_heads: int,
    page_tokens: int,
    head_dim: int,
    offsets: Any,
    row: int,
    k_out: int,
    v_out: int,
    max_len: int,
    tag: Any,
    out_tag: Any,
) -> None:
    """Unpack page i into positions first_positions[i].. of row sequences[i]; with fill, zeros up to max_len."""
    for item in prange(len(addresses) * n_kv_heads):
        i = item // n_kv_heads
        head = item % n_kv_heads
        to = (
            ((sequences[i] * n_kv_heads + head) * max_len + first_positions[i])
            * head_dim
            * item_nbytes(out_tag)
        )
        if n_tokens[i] > 0:
            _unpack_head(
                addresses[i],
                np.int64(n_tokens[i]),
                head,
                n_kv_heads,
                page_tokens,
                head_dim,
                offsets,
                row,
                k_out + to,
                v_out + to,
                tag,
                out_tag,
            )
        if fill:
            begin = n_tokens[i] * head_dim
            end = (max_len - first_positions[i]) * head_dim
            _fill_zeros(k_out + to, begin, end, out_tag)
            _fill_zeros(v_out + to, begin, end, out_tag)


@njit
def _fill_zeros(to: int, begin: int, end: int, out_tag: Any) -> None:
    for j in range(begin, end - 7, 8):
        store_as(to + j * item_nbytes(out_tag), splat8(_F32), out_tag)
    rest = (end - begin) % 8
    if rest > 0:
        store_first_as(to + (end - rest) * item_nbytes(out_tag), splat8(_F32), rest, out_tag)


@njit
def _unpack_head(
    page: int,
    n_tokens: int,
    head: int,
    n_kv_heads: int,
    page_tokens: int,
    head_dim: int,
    offsets: Any,
    row: int,
    k_out: int,
    v_out: int,
    tag: Any,
    out_tag: Any,
) -> None:
    stride = row * item_nbytes(tag)
    out_stride = head_dim * item_nbytes(out_tag)
    k = page + offsets[K_CODES] + head * page_tokens * stride
    v = page + offsets[V_CODES] + head * page_tokens * stride
    if not is_packed(tag):
        for t in range(n_tokens):
            for j in range(0, row, 8):
                at = t * stride + min(j, row - 8) * item_nbytes(tag)
                to = t * out_stride + min(j, row - 8) * item_nbytes(out_tag)
                store_as(k_out + to, load8(k + at, 0, tag), out_tag)
                store_as(v_out + to, load8(v + at, 0, tag), out_tag)
        return
    units = page + offsets[UNITS] + 4 * head
    k_unit = broadcast8(units)
    v_unit = broadcast8(units + 4 * n_kv_heads)
    k_scale = page + offsets[K_SCALE] + 2 * head * head_dim
    k_min = page + offsets[K_MIN] + 2 * head * head_dim
    v_scale = page + offsets[V_SCALE] + 2 * head * page_tokens
    v_min = page + offsets[V_MIN] + 2 * head * page_tokens
    scales = np.empty(8, np.float32)
    minima = np.empty(8, np.float32)
    for plane in range(n_planes(tag)):
        for j in range(0, row, 8):
            start = max(0, min(j, row - 8))
            channel = plane * row + start
            count = min(8, row - start, head_dim - channel)
            to = channel * item_nbytes(out_tag)
            scale = mul8(_load_some(k_scale + 2 * channel, count, _F16), k_unit)
            minimum = mul8(_load_some(k_min + 2 * channel, count, _F16), k_unit)
            for t in range(n_tokens):
                value = fma8(load8(k + t * stride + start, plane, tag), scale, minimum)
                _store_some(k_out + t * out_stride + to, value, count, out_tag)
            for t in range(0, n_tokens, 8):
                tokens = min(8, n_tokens - t)
                store8(scales.ctypes.data, mul8(_load_some(v_scale + 2 * t, tokens, _F16), v_unit))
                store8(minima.ctypes.data, mul8(_load_some(v_min + 2 * t, tokens, _F16), v_unit))
                for lane in range(tokens):
                    value = fma8(
                        load8(v + (t + lane) * stride + start, plane, tag),
                        splat8(scales[lane]),
                        splat8(minima[lane]),
                    )
                    _store_some(v_out + (t + lane) * out_stride + to, value, count, out_tag)


@njit
def _store_some(to: int, value: Any, count: int, out_tag: Any) -> None:
    if count >= 8:
        store_as(to, value, out_tag)
    elif count > 0:
        store_first_as(to, value, count, out_tag)
