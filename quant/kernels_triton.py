"""Unpacking on the accelerator in Triton: affine weights and packed KV pages to fp32, bf16 or fp16.

Importing this module imports triton; `quant.packed` and `quant.kv` fall back to torch where it is missing. With
TRITON_INTERPRET=1 the same kernels run on CPU tensors. Values are computed in fp32, one rounding per operation,
and rounded once to the result's type, as on the CPU.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quant import kernels_torch as plain_torch
from quant.formats import parse_format
from quant.kv import decode_pages, encode_pages
from quant.kv_batch import part_offsets
from quant.kv_formats import CacheFormat, parse_cache_format
from quant.packed import PackedTensor, empty_packed

_WEIGHT_BLOCK = 1024
_PAGE_TOKEN_BLOCK = 16
_ZERO_FORMS = {"min": 0, "int": 1, "sym": 2}


@triton.jit
def _plane_codes(codes, n_codes, index, inside, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Codes number `index` of a row's plane of WIDTH bits: byte index % n_bytes, run index // n_bytes."""
    n_bytes = n_codes * WIDTH // 8
    raw = tl.load(codes + index % n_bytes, mask=inside, other=0).to(tl.int32)
    return (raw >> ((index // n_bytes) * WIDTH)) & ((1 << WIDTH) - 1)


@triton.jit
def _dequantize_kernel(  # type: ignore[no-untyped-def]
    buffer,
    scales,
    mins,
    exponents,
    permutation,
    row_ids,
    out,
    row_start,
    cols,
    n_codes,
    n_groups,
    codes8_at,
    codes4_at,
    codes2_at,
    codes1_at,
    zeros_at,
    GROUP: tl.constexpr,
    HAS_8: tl.constexpr,
    HAS_4: tl.constexpr,
    HAS_2: tl.constexpr,
    HAS_1: tl.constexpr,
    PAIRED: tl.constexpr,
    ZERO_FORM: tl.constexpr,
    MIDDLE: tl.constexpr,
    HAS_EXPONENTS: tl.constexpr,
    PERMUTED: tl.constexpr,
    HAS_ROW_IDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    out_row = tl.program_id(0).to(tl.int64)
    if HAS_ROW_IDS:
        row = tl.load(row_ids + out_row)
    else:
        row = out_row + row_start
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < cols
    index = col % n_codes  # differs from col only at 3.5 bits, where a number holds columns j and j + n_codes
    code = index * 0
    if HAS_8:
        code = _plane_codes(buffer + codes8_at + row * n_codes, n_codes, index, inside, 8)
    if HAS_4:
        code = _plane_codes(buffer + codes4_at + row * (n_codes * 4 // 8), n_codes, index, inside, 4)
    after_4: tl.constexpr = 4 if HAS_4 else 0
    if HAS_2:
        plane = _plane_codes(buffer + codes2_at + row * (n_codes * 2 // 8), n_codes, index, inside, 2)
        code = code | (plane << after_4)
    after_2: tl.constexpr = after_4 + 2 if HAS_2 else after_4
    if HAS_1:
        plane = _plane_codes(buffer + codes1_at + row * (n_codes // 8), n_codes, index, inside, 1)
        code = code | (plane << after_2)
    if PAIRED:
        first = code // 11
        code = tl.where(col < n_codes, first, code - 11 * first)
    group = row * n_groups + col // GROUP
    scale = tl.load(scales + group, mask=inside, other=0.0).to(tl.float32)
    if HAS_EXPONENTS:
        exponent = tl.load(exponents + row).to(tl.int32)
        unit = ((exponent + 127) << 23).to(tl.float32, bitcast=True)  # 2^exponent
        scale = scale * unit
    value = code.to(tl.float32)
    if ZERO_FORM == 0:
        minimum = tl.load(mins + group, mask=inside, other=0.0).to(tl.float32)
        if HAS_EXPONENTS:
            minimum = minimum * unit
        value = scale * value + minimum
    elif ZERO_FORM == 1:
        zero = tl.load(buffer + zeros_at + group, mask=inside, other=0).to(tl.float32)
        value = scale * (value - zero)
    else:
        value = scale * (value - MIDDLE)
    target = col
    if PERMUTED:
        target = tl.load(permutation + col, mask=inside, other=0)
    tl.store(out + out_row * cols + target, value.to(out.dtype.element_ty), mask=inside)


def dequantize_rows(
    packed: PackedTensor,
    out: Tensor,
    *,
    row_ids: Tensor | None = None,
    row_start: int = 0,
    in_order: bool = True,
) -> None:
    """Rows row_ids (int64), or rows row_start.. if None, of an affine tensor -> contiguous out (n, cols).

    out: fp32, bf16 or fp16, on the tensor's device, all rows within range. in_order: put permuted columns in the
    matrix's order, else leave them in packed order. Raises ValueError for formats that are not affine.
    """
    fmt = packed.format
    if fmt.kind != "affine":
        raise ValueError(f"the Triton kernel unpacks affine formats, not {fmt}; use quant.kernels_torch")
    if out.numel() == 0:
        return
    cols = packed.shape[1]
    parts = packed.to_parts()
    offsets = {spec.name: spec.offset_bytes for spec in fmt.parts(packed.shape)}
    scales = parts["scales"]
    ordered = fmt.permuted and in_order
    _dequantize_kernel[(out.shape[0], triton.cdiv(cols, _WEIGHT_BLOCK))](
        packed.buffer,
        scales,
        parts.get("mins", scales),
        parts.get("exponents", scales),
        parts["permutation"] if ordered else scales,
        scales if row_ids is None else row_ids,
        out,
        row_start,
        cols,
        fmt.padded_cols(cols) // (2 if fmt.bits == 3.5 else 1),
        fmt.n_groups(cols),
        *(offsets.get(f"codes{width}", 0) for width in (8, 4, 2, 1)),
        offsets.get("zeros", 0),
        GROUP=fmt.group,
        HAS_8=8 in fmt.planes,
        HAS_4=4 in fmt.planes,
        HAS_2=2 in fmt.planes,
        HAS_1=1 in fmt.planes,
        PAIRED=fmt.bits == 3.5,
        ZERO_FORM=_ZERO_FORMS[fmt.zero],
        MIDDLE=fmt.middle_code,
        HAS_EXPONENTS="exponents" in offsets,
        PERMUTED=ordered,
        HAS_ROW_IDS=row_ids is not None,
        BLOCK=_WEIGHT_BLOCK,
        # A fused multiply-add would round once where the CPU's kernels round twice.
        **_launch_options(packed.buffer),
    )


@triton.jit
def _unpack_pages_kernel(  # type: ignore[no-untyped-def]
    pages,
    halves,
    floats,
    slots,
    rows,
    first_positions,
    k_out,
    v_out,
    page_stride,
    n_kv_heads,
    page_tokens,
    head_dim,
    row_nbytes,
    max_len,
    k_codes_at,
    k_scale_at,
    k_min_at,
    v_codes_at,
    v_scale_at,
    v_min_at,
    units_at,
    BITS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    page = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.arange(0, CHANNELS)
    token_inside = token < page_tokens
    channel_inside = channel < head_dim
    inside = token_inside[:, None] & channel_inside[None, :]
    start = tl.load(slots + page).to(tl.int64) * page_stride
    where = (head * page_tokens + token)[:, None] * row_nbytes + (channel % row_nbytes)[None, :]
    shift = ((channel // row_nbytes) * BITS)[None, :]
    mask: tl.constexpr = (1 << BITS) - 1
    to_row = tl.load(rows + page).to(tl.int64) * n_kv_heads + head
    to_token = to_row * max_len + tl.load(first_positions + page) + token
    to = to_token[:, None] * head_dim + channel[None, :]

    unit = tl.load(floats + (start + units_at) // 4 + head)
    at = head * head_dim + channel
    scale = tl.load(halves + (start + k_scale_at) // 2 + at, mask=channel_inside, other=0.0).to(tl.float32)
    minimum = tl.load(halves + (start + k_min_at) // 2 + at, mask=channel_inside, other=0.0).to(tl.float32)
    raw = tl.load(pages + start + k_codes_at + where, mask=inside, other=0).to(tl.int32)
    value = ((raw >> shift) & mask).to(tl.float32) * (scale * unit)[None, :] + (minimum * unit)[None, :]
    tl.store(k_out + to, value.to(k_out.dtype.element_ty), mask=inside)

    unit = tl.load(floats + (start + units_at) // 4 + n_kv_heads + head)
    at = head * page_tokens + token
    scale = tl.load(halves + (start + v_scale_at) // 2 + at, mask=token_inside, other=0.0).to(tl.float32)
    minimum = tl.load(halves + (start + v_min_at) // 2 + at, mask=token_inside, other=0.0).to(tl.float32)
    raw = tl.load(pages + start + v_codes_at + where, mask=inside, other=0).to(tl.int32)
    value = ((raw >> shift) & mask).to(tl.float32) * (scale * unit)[:, None] + (minimum * unit)[:, None]
    tl.store(v_out + to, value.to(v_out.dtype.element_ty), mask=inside)


def unpack_pages(
    arena: Tensor,
    fmt: CacheFormat,
    *,
    page_tokens: int,
    slots: Tensor,
    rows: Tensor,
    first_positions: Tensor,
    k_out: Tensor,
    v_out: Tensor,
) -> None:
    """Packed page slots[i] of an arena -> positions first_positions[i].. of row rows[i] of k_out and v_out.

    arena: uint8 (n_slots, >= page_nbytes), rows contiguous and multiples of 64 bytes apart; slots, rows,
    first_positions: int64 (n,); k_out, v_out: contiguous (batch, n_kv_heads, max_len, head_dim) in fp32, bf16 or
    fp16. Everything on one device and within range. Raises ValueError for plain formats.
    """
    if not fmt.is_packed:
        raise ValueError(f"the Triton kernel unpacks int8, int4 and int2 pages, not {fmt.name}")
    if slots.numel() == 0:
        return
    _, n_kv_heads, max_len, head_dim = k_out.shape
    geometry = {"page_tokens": page_tokens, "n_kv_heads": n_kv_heads, "head_dim": head_dim}
    pages = arena[:, : fmt.page_nbytes(**geometry)]
    _unpack_pages_kernel[(slots.numel(), n_kv_heads, triton.cdiv(page_tokens, _PAGE_TOKEN_BLOCK))](
        pages,
        pages.view(torch.float16),
        pages.view(torch.float32),
        slots,
        rows,
        first_positions,
        k_out,
        v_out,
        arena.stride(0),
        n_kv_heads,
        page_tokens,
        head_dim,
        fmt.row_nbytes(head_dim),
        max_len,
        *part_offsets(fmt, page_tokens, n_kv_heads, head_dim).tolist(),
        BITS=fmt.bits,
        TOKENS=_PAGE_TOKEN_BLOCK,
        CHANNELS=triton.next_power_of_2(head_dim),
        **_launch_options(arena),
    )


def self_test(device_type: str) -> None:
    """Unpack a small weight and a few pages and compare with plain torch. Raises RuntimeError if they differ, and
    whatever compiling or launching raises.
    """
    device = torch.device(device_type)
    generator = torch.Generator().manual_seed(0)
    weight_format = parse_format("int4-g64")
    shape = (5, 192)
    packed = empty_packed(weight_format, shape)
    packed.buffer.copy_(torch.randint(0, 100, packed.buffer.shape, dtype=torch.uint8, generator=generator))
    packed.part("exponents").fill_(-3)
    packed = packed.to(device)
    out = torch.empty(shape, dtype=torch.float32, device=device)
    dequantize_rows(packed, out)
    _compare("weights", out, plain_torch.dequantize_rows(packed))
    fmt = parse_cache_format("int4")
    geometry = {"page_tokens": 16, "n_kv_heads": 2, "head_dim": 64}
    values = torch.randn((2, 3, 2, 16, 64), generator=generator).to(device)
    pages = torch.empty((3, fmt.page_nbytes(**geometry)), dtype=torch.uint8, device=device)
    encode_pages(values[0], values[1], fmt, pages)
    slots = torch.tensor([2, 0, 1], device=device)
    gathered = torch.zeros((2, 1, 2, 48, 64), device=device)
    unpack_pages(
        pages,
        fmt,
        page_tokens=16,
        slots=slots,
        rows=torch.zeros_like(slots),
        first_positions=torch.tensor([0, 16, 32], device=device),
        k_out=gathered[0],
        v_out=gathered[1],
    )
    for name, found, stored in zip(
        "kv",
        gathered,
        decode_pages(pages[slots], fmt, page_tokens=16, n_kv_heads=2, head_dim=64),
        strict=True,
    ):
        # (3 pages, 2 heads, 16 tokens, 64) -> (2 heads, 48 tokens, 64)
        _compare(f"{name} pages", found[0], stored.transpose(0, 1).flatten(1, 2))


def _compare(what: str, found: Tensor, wanted: Tensor) -> None:
    if not torch.allclose(found, wanted, rtol=1e-5, atol=1e-6):
        raise RuntimeError(f"{what} differ by up to {float((found - wanted).abs().max()):.3g}")


def _launch_options(tensor: Tensor) -> dict[str, Any]:
    return {} if tensor.device.type == "cpu" else {"enable_fp_fusion": False}
