"""Unpacking in plain torch operations, on any device: where no faster kernel exists, and to check those that do.

It allocates several times the size of its result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quant.formats import SUPER_BLOCK
from quant.packed import PackedTensor

# Values unpacked at a time by unpack_rows: bounds its temporary memory to some 64 MiB.
_BLOCK_ELEMENTS = 4 << 20


def unpack_rows(
    packed: PackedTensor, out: Tensor, row_ids: Tensor | None, row_start: int, in_order: bool
) -> None:
    """`quant.packed.write_rows` in blocks of rows: rows row_ids, or row_start.. if None -> out (n, cols)."""
    step = max(1, _BLOCK_ELEMENTS // max(1, packed.shape[1]))
    for first in range(0, out.shape[0], step):
        block = out[first : first + step]
        if row_ids is None:
            start = row_start + first
            ids = torch.arange(start, start + block.shape[0], device=packed.device)
        else:
            ids = row_ids[first : first + step]
        block.copy_(dequantize_rows(packed, ids, in_order=in_order))


def dequantize_rows(packed: PackedTensor, row_ids: Tensor | None = None, *, in_order: bool = True) -> Tensor:
    """Rows row_ids (int64; all rows if None) of an affine or block tensor in fp32: (n, cols).

    in_order: put permuted columns in the matrix's order, else leave them in packed order.
    """
    parts = packed.to_parts()
    if row_ids is not None:
        parts = {
            n: part if n == "permutation" else part.index_select(0, row_ids) for n, part in parts.items()
        }
    if packed.format.kind == "block":
        codes, s, z, m = _BLOCK_DECODERS[packed.format.base](parts["blocks"])
    else:
        codes, s, z, m = _affine(packed, parts)
    rows, n = s.shape
    values = codes.view(rows, n, -1).float()  # (rows, groups, group)
    values = s[..., None] * (values - z[..., None]) + m[..., None]
    values = values.view(rows, -1)[:, : packed.shape[1]]
    if packed.format.permuted and in_order:
        ordered = torch.empty_like(values)
        ordered[:, parts["permutation"].long()] = values
        return ordered
    return values


def _planes(raw: Tensor, width: int) -> Tensor:
    """(rows, n * width / 8) bytes -> (rows, n) codes of a plane."""
    mask = (1 << width) - 1
    return torch.cat([(raw >> shift) & mask for shift in range(0, 8, width)], dim=1)


def _affine(packed: PackedTensor, parts: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    fmt = packed.format
    if fmt.bits == 8:
        codes = parts["codes8"]
    else:
        shift = 0
        codes = torch.zeros((), dtype=torch.uint8, device=packed.device)
        for width in fmt.planes:
            codes = codes | (_planes(parts[f"codes{width}"], width) << shift)
            shift += width
    if fmt.bits == 3.5:
        first = torch.div(codes, 11, rounding_mode="floor")
        codes = torch.cat([first, codes - 11 * first], dim=1)
    s = parts["scales"].float()
    unit = torch.ones((), device=packed.device)
    if "exponents" in parts:
        unit = ((parts["exponents"].to(torch.int32) + 127) << 23).view(torch.float32)[:, None]  # 2^exponent
    s = s * unit
    m = parts["mins"].float() * unit if fmt.zero == "min" else torch.zeros_like(s)
    if fmt.zero == "int":
        z = parts["zeros"].float()
    else:
        z = torch.full_like(s, float(fmt.middle_code if fmt.zero == "sym" else 0))
    return codes, s, z, m


def _halves(blocks: Tensor, at: int) -> Tensor:
    """The fp16 number at byte `at` of each block: (rows, blocks, 1) in fp32."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).float()


def _nibble_runs(low: Tensor) -> Tensor:
    """(rows, blocks, 32 * k) bytes -> (rows, blocks, 64 * k) codes: 32 low nibbles, then 32 high, by run of 32."""
    runs = low.unflatten(-1, (-1, 1, 32))
    return torch.cat([runs & 15, runs >> 4], dim=-2).flatten(-3)


def _q45(raw: Tensor, nbytes: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    blocks = raw.view(raw.shape[0], -1, nbytes)
    packed = blocks[..., 4:16]
    a, b, c = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scale = torch.cat([a & 63, (c & 15) | ((a >> 6) << 4)], dim=-1).float()
    least = torch.cat([b & 63, (c >> 4) | ((b >> 6) << 4)], dim=-1).float()
    s = (_halves(blocks, 0) * scale).flatten(1)  # (rows, groups of 32)
    m = -(_halves(blocks, 2) * least).flatten(1)
    codes = _nibble_runs(blocks[..., nbytes - 128 :])
    if nbytes == 176:
        high = blocks[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8, device=raw.device)[:, None]
        codes = codes | ((high & 1) << 4).flatten(-2)
    return codes.flatten(1), s, torch.zeros_like(s), m


def _q4_k(raw: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _q45(raw, 144)


def _q5_k(raw: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _q45(raw, 176)


def _q6_k(raw: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    blocks = raw.view(raw.shape[0], -1, 210)
    low = blocks[..., :128].unflatten(-1, (2, 1, 64))  # halves of 128 codes; 64 low nibbles, then 64 high
    high = blocks[..., 128:192].unflatten(-1, (2, 1, 32))
    low = torch.cat([low & 15, low >> 4], dim=-2).flatten(-2)  # (rows, blocks, 2, 128)
    high = torch.cat([(high >> shift) & 3 for shift in (0, 2, 4, 6)], dim=-2).flatten(-2)
    codes = (low | (high << 4)).reshape(raw.shape[0], blocks.shape[1] * SUPER_BLOCK)
    scales = blocks[..., 192:208].contiguous().view(torch.int8).float()
    s = (_halves(blocks, 208) * scales).flatten(1)  # (rows, groups of 16)
    return codes, s, torch.full_like(s, 32.0), torch.zeros_like(s)


_BLOCK_DECODERS = {"q4_k": _q4_k, "q5_k": _q5_k, "q6_k": _q6_k}
