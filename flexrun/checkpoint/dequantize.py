"""GGUF block types to floating point, in torch operations over cache-sized pieces.

Each decoder follows the block layouts of ggml (ggml-common.h) and computes in fp32 in the order that
defines the format, so values equal the reference bit for bit. A block's bytes are described at its
decoder; fields are little-endian, `half` is fp16.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from flexrun.checkpoint.base import DTYPE_BLOCKS, TensorInfo

# fp32 elements decoded at a time: few enough to stay near the caches, enough to pay for the calls.
PIECE_ELEMENTS = 1 << 19

_Decoder = Callable[[torch.Tensor], torch.Tensor]


def dequantize_blocks(raw: torch.Tensor, dtype: str, out: torch.Tensor) -> None:
    """Decode contiguous uint8 ``raw`` of block type ``dtype`` into ``out``, a contiguous float tensor.

    ``out`` has the decoded number of elements, in any shape; its type may be fp32, bf16 or fp16.
    """
    block_len, block_bytes = DTYPE_BLOCKS[dtype]
    decode = _DECODERS[dtype]
    blocks = raw.view(-1, block_bytes)
    target = out.view(-1, block_len)
    if blocks.shape[0] != target.shape[0]:
        raise ValueError(
            f"{blocks.shape[0]} blocks of {dtype} decode to {blocks.shape[0] * block_len} elements, "
            f"but out has {out.numel()}"
        )
    step = PIECE_ELEMENTS // block_len
    for start in range(0, blocks.shape[0], step):
        piece = blocks[start : start + step]
        target[start : start + step] = decode(piece).view(-1, block_len)


def dequantize_gguf(info: TensorInfo, raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values of ``raw``, as `read_tensor` gave it for ``info`` (all of it or some rows), as ``dtype``.

    Block types give shape (..., elements per row); F32, F16 and BF16 are only converted. ValueError for
    integer tensors.
    """
    if not info.is_block_quantized:
        if not raw.is_floating_point():
            raise ValueError(f"tensor {info.name!r}: {info.dtype} holds no weights to convert to {dtype}")
        return raw.to(dtype)
    block_len, block_bytes = DTYPE_BLOCKS[info.dtype]
    if raw.dtype != torch.uint8 or raw.shape[-1:] != info.raw_shape[-1:]:
        raise ValueError(
            f"tensor {info.name!r}: expected uint8 rows of {info.raw_shape[-1]} bytes, "
            f"got {raw.dtype} of shape {list(raw.shape)}"
        )
    row_len = raw.shape[-1] // block_bytes * block_len
    out = torch.empty((*raw.shape[:-1], row_len), dtype=dtype)
    dequantize_blocks(raw.contiguous(), info.dtype, out)
    return out


def _half(blocks: torch.Tensor, begin: int) -> torch.Tensor:
    """The fp16 at byte ``begin`` of every block as fp32, (n_blocks, 1)."""
    return blocks[:, begin : begin + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """(n, bytes) -> (n, 2 * bytes): all low halves, then all high halves."""
    return torch.cat((packed & 15, packed >> 4), dim=1)


def _bit_of_32(blocks: torch.Tensor, begin: int) -> torch.Tensor:
    """The 32 bits of the uint32 at byte ``begin`` as (n_blocks, 32) of 0 or 1, lowest first."""
    shifts = torch.arange(8, dtype=torch.uint8)
    word = blocks[:, begin : begin + 4]
    return ((word.unsqueeze(2) >> shifts) & 1).view(-1, 32)


def _q4_0(b: torch.Tensor) -> torch.Tensor:
    """half scale; 16 bytes of nibbles."""
    return (_nibbles(b[:, 2:]).float() - 8).mul_(_half(b, 0))


def _q4_1(b: torch.Tensor) -> torch.Tensor:
    """half scale, half minimum; 16 bytes of nibbles."""
    return _nibbles(b[:, 4:]).float().mul_(_half(b, 0)).add_(_half(b, 2))


def _q5_0(b: torch.Tensor) -> torch.Tensor:
    """half scale; 32 fifth bits; 16 bytes of nibbles."""
    q = _nibbles(b[:, 6:]) | (_bit_of_32(b, 2) << 4)
    return (q.float() - 16).mul_(_half(b, 0))


def _q5_1(b: torch.Tensor) -> torch.Tensor:
    """half scale, half minimum; 32 fifth bits; 16 bytes of nibbles."""
    q = _nibbles(b[:, 8:]) | (_bit_of_32(b, 4) << 4)
    return q.float().mul_(_half(b, 0)).add_(_half(b, 2))


def _q8_0(b: torch.Tensor) -> torch.Tensor:
    """half scale; 32 signed bytes."""
    return b[:, 2:].view(torch.int8).float().mul_(_half(b, 0))


def _two_bit_planes(packed: torch.Tensor) -> torch.Tensor:
    """64 bytes as 2 halves of 32 -> (n, 2, 4, 32): within each half, bits 0-1, then 2-3, 4-5, 6-7."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 1, 4, 1)
    return (packed.reshape(-1, 2, 1, 32) >> shifts) & 3


def _q2_k(b: torch.Tensor) -> torch.Tensor:
    """16 bytes of 4-bit scale and 4-bit minimum; 64 bytes of 2-bit values; half scale, half minimum."""
    d, dmin = _half(b, 80), _half(b, 82)
    scale = (d * (b[:, :16] & 15).float()).unsqueeze(2)  # (n, 16 groups of 16, 1)
    minimum = (dmin * (b[:, :16] >> 4).float()).unsqueeze(2)
    q = _two_bit_planes(b[:, 16:80]).reshape(-1, 16, 16)
    return q.float().mul_(scale).sub_(minimum)


def _q3_k(b: torch.Tensor) -> torch.Tensor:
    """32 bytes of third bits; 64 bytes of 2-bit values; 12 bytes of 16 6-bit scales; half scale."""
    packed = b[:, 96:108]
    low = _nibbles(packed[:, :8])  # scale bits 0-3 of groups 0..7 and 8..15
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 4, 1)
    high = ((packed[:, 8:].unsqueeze(1) >> shifts) & 3).reshape(-1, 16)
    scale = (_half(b, 108) * ((low | (high << 4)).float() - 32)).unsqueeze(2)  # (n, 16, 1)
    bits = torch.arange(8, dtype=torch.uint8).view(1, 8, 1)
    third = ((b[:, :32].unsqueeze(1) >> bits) & 1).reshape(-1, 16, 16)  # bit i belongs to values 32i..32i+31
    q = _two_bit_planes(b[:, 32:96]).reshape(-1, 16, 16) | (third << 2)
    return (q.float() - 4).mul_(scale)


def _k_scales_and_minima(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """12 bytes -> eight 6-bit scales and eight 6-bit minima, each (n, 8).

    Bytes 0-3 and 4-7 hold scales and minima 0-3 in their low six bits and the top two bits of numbers
    4-7 above; the nibbles of bytes 8-11 are the low bits of scales and minima 4-7.
    """
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), dim=1)
    minima = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=1)
    return scales, minima


def _k_affine(b: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Apply the scales and minima shared by Q4_K and Q5_K to ``q`` of shape (n, 8 groups, 32)."""
    scales, minima = _k_scales_and_minima(b[:, 4:16])
    scale = (_half(b, 0) * scales.float()).unsqueeze(2)
    minimum = (_half(b, 2) * minima.float()).unsqueeze(2)
    return q.float().mul_(scale).sub_(minimum)


def _k_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """128 bytes in 4 runs of 32 -> (n, 8, 32): each run's low halves, then its high halves."""
    runs = packed.reshape(-1, 4, 1, 32)
    return torch.cat((runs & 15, runs >> 4), dim=2).view(-1, 8, 32)


def _q4_k(b: torch.Tensor) -> torch.Tensor:
    """half scale, half minimum; 12 bytes of scales and minima; 128 bytes of nibbles."""
    return _k_affine(b, _k_nibbles(b[:, 16:]))


def _q5_k(b: torch.Tensor) -> torch.Tensor:
    """As Q4_K, with 32 bytes of fifth bits before the nibbles: bit i belongs to group i."""
    bits = torch.arange(8, dtype=torch.uint8).view(1, 8, 1)
    fifth = (b[:, 16:48].unsqueeze(1) >> bits) & 1  # (n, 8, 32)
    return _k_affine(b, _k_nibbles(b[:, 48:]) | (fifth << 4))


def _q6_k(b: torch.Tensor) -> torch.Tensor:
    """128 bytes of nibbles; 64 bytes of 2 upper bits; 16 signed byte scales; half scale."""
    low = b[:, :128].reshape(-1, 2, 1, 64)
    q = torch.cat((low & 15, low >> 4), dim=2).view(-1, 16, 16)  # halves of 128 values
    q = q | (_two_bit_planes(b[:, 128:192]).reshape(-1, 16, 16) << 4)
    scale = (_half(b, 208) * b[:, 192:208].view(torch.int8).float()).unsqueeze(2)
    return (q.float() - 32).mul_(scale)


_DECODERS: dict[str, _Decoder] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
