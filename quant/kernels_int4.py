"""torch's own int4 matrix product, for packed weights whose parameters it represents exactly.

The kernel multiplies bf16 tokens with 4-bit codes on tensor cores (and, on the CPU, with AVX-512) without
unpacking the weight to memory. It computes (code - 8) * scale + zero with bf16 scale and zero, so it serves only
where every group's scale and minimum + 8 * scale are bf16 numbers: symmetric groups with bf16 scales above all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quant.packed import PackedTensor

_INNER_K_TILES = 8
_K_MULTIPLE = 16 * _INNER_K_TILES
_N_MULTIPLE = 64


@dataclass(frozen=True, slots=True, eq=False)
class Int4Weight:
    """A weight rearranged for the kernel. Get one from `int4_weight`.

    tiles: codes in the kernel's own order; parameters: bf16 (groups, rows, 2), scale and zero; on one device.
    """

    rows: int
    group: int
    tiles: Tensor
    parameters: Tensor

    def matmul(self, x: Tensor) -> Tensor:
        """x bf16 (tokens, cols) times the weight transposed: bf16 (tokens, rows), on the weight's device."""
        if x.dtype != torch.bfloat16 or x.dim() != 2:
            raise ValueError(f"the int4 kernel takes bf16 (tokens, cols), got {x.dtype} {tuple(x.shape)}")
        if x.device.type == "cpu":
            product = torch.ops.aten._weight_int4pack_mm_for_cpu
        else:
            product = torch.ops.aten._weight_int4pack_mm
        return product(x.contiguous(), self.tiles, self.group, self.parameters)


def int4_weight(packed: PackedTensor) -> Int4Weight | None:
    """Rearrange a packed weight for the kernel, or None where the kernel would change its values or cannot run.

    That needs 4 bits, columns in order, a width that is whole groups and a multiple of 128, rows a multiple of
    64, parameters that are bf16 numbers, and an NVIDIA GPU from compute capability 8.0 on, or the CPU.
    """
    fmt = packed.format
    if fmt.kind != "affine" or fmt.bits != 4 or fmt.permuted or not _device_has_kernel(packed.device):
        return None
    rows, cols = packed.shape
    if cols % _K_MULTIPLE or cols % fmt.group or rows % _N_MULTIPLE or not rows:
        return None
    parameters = _exact_parameters(packed)
    if parameters is None:
        return None
    plane = packed.part("codes4")  # byte j of a row: columns j and j + cols / 2
    codes = torch.cat([plane & 15, plane >> 4], dim=1)  # (rows, cols)
    if packed.device.type == "cpu":
        tiles = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), _INNER_K_TILES)
    else:
        pairs = (codes[:, ::2] << 4) | codes[:, 1::2]  # (rows, cols / 2), the even column in the high bits
        tiles = torch.ops.aten._convert_weight_to_int4pack(pairs.contiguous(), _INNER_K_TILES)
    return Int4Weight(rows=rows, group=fmt.group, tiles=tiles, parameters=parameters)


def _exact_parameters(packed: PackedTensor) -> Tensor | None:
    """bf16 (groups, rows, 2) of scale and zero, or None if one of them is no bf16 number."""
    fmt = packed.format
    scale = packed.part("scales").float()
    if fmt.param_dtype == "float16":
        exponent = packed.part("exponents").to(torch.int32)[:, None]
        unit = ((exponent + 127) << 23).view(torch.float32)  # 2^exponent
    else:
        unit = torch.ones((), device=packed.device)
    scale = scale * unit  # (rows, groups)
    if fmt.zero == "min":
        zero = packed.part("mins").float() * unit + 8 * scale
        exact = zero - 8 * scale == packed.part("mins").float() * unit
    elif fmt.zero == "int":
        zero = (8 - packed.part("zeros").float()) * scale
        exact = torch.ones_like(scale, dtype=torch.bool)
    else:
        zero = torch.zeros_like(scale)
        exact = torch.ones_like(scale, dtype=torch.bool)
    both = torch.stack([scale, zero], dim=-1)  # (rows, groups, 2)
    rounded = both.to(torch.bfloat16)
    if not bool(exact.all()) or not torch.equal(rounded.float(), both):
        return None
    return rounded.transpose(0, 1).contiguous()


def _device_has_kernel(device: torch.device) -> bool:
    if device.type == "cpu":
        return hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu")
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)
