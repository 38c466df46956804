"""Packed rows -> codes and fp32 group parameters: the compiled helpers that every weight kernel starts with.

Every format decodes a row into the same four arrays: codes (uint8, one per column) and, per group, scale, zero
and min, so that value = scale * (code - zero) + min. Affine formats have zero or min, never both.
"""

from functools import lru_cache
from typing import Any

import numpy as np
from numba import njit

from quant.formats import SUPER_BLOCK, WeightFormat
from quant.kernels_simd import merge_bits32, split_pairs16

# Slots of a layout, the int64 array that describes a packed matrix to the kernels. Offsets are in bytes,
# -1 for a part that the format does not have.
KIND, ROWS, COLS, GROUP, N_GROUPS, N_CODES, PAIRED, MIDDLE, PARAMS_F32 = range(9)
CODES8, CODES4, CODES2, CODES1, SCALES, MINS, ZEROS, EXPONENTS = range(9, 17)
N_SLOTS = 17
AFFINE, Q4_K, Q5_K, Q6_K = range(4)

_KINDS = {"q4_k": Q4_K, "q5_k": Q5_K, "q6_k": Q6_K}
_PART_SLOTS = {
    "codes8": CODES8,
    "codes4": CODES4,
    "codes2": CODES2,
    "codes1": CODES1,
    "scales": SCALES,
    "mins": MINS,
    "zeros": ZEROS,
    "exponents": EXPONENTS,
}


@lru_cache(maxsize=4096)
def layout_of(fmt: WeightFormat, shape: tuple[int, int]) -> Any:
    """The layout array of a matrix in an affine or block format."""
    layout = np.full(N_SLOTS, -1, np.int64)
    rows, cols = shape
    layout[ROWS], layout[COLS], layout[PAIRED], layout[MIDDLE], layout[PARAMS_F32] = rows, cols, 0, 0, 0
    if fmt.kind == "block":
        layout[KIND] = _KINDS[fmt.base]
        layout[GROUP] = 16 if fmt.base == "q6_k" else 32
        layout[N_GROUPS] = cols // layout[GROUP]
        layout[N_CODES] = cols
        return layout
    layout[KIND], layout[GROUP], layout[N_GROUPS] = AFFINE, fmt.group, fmt.n_groups(cols)
    layout[PAIRED] = fmt.bits == 3.5
    layout[N_CODES] = fmt.padded_cols(cols) // (2 if fmt.bits == 3.5 else 1)
    layout[MIDDLE] = fmt.middle_code if fmt.zero == "sym" else 0
    layout[PARAMS_F32] = fmt.param_dtype == "float32"
    for part in fmt.parts(shape):
        if part.name in _PART_SLOTS:
            layout[_PART_SLOTS[part.name]] = part.offset_bytes
    return layout


@njit
def half_to_float(half: Any) -> Any:
    """fp16 bits (uint16) -> fp32, exact for finite numbers, whatever the processor does with subnormals."""
    magnitude = np.uint32(half & np.uint16(0x7FFF))
    small = np.float32(magnitude) * np.float32(2.0**-24)
    normal = np.uint32((magnitude << np.uint32(13)) + np.uint32(112 << 23)).view(np.float32)
    value = normal if magnitude >= np.uint32(0x400) else small
    return -value if half & np.uint16(0x8000) else value


@njit
def power_of_two(exponent: Any) -> Any:
    """2^exponent in fp32, for exponents of normal numbers."""
    return np.uint32((np.int32(exponent) + np.int32(127)) << np.int32(23)).view(np.float32)


@njit
def merge_bits(target: Any, source: Any, down: int, mask: int, up: int, keep: int) -> None:
    """target = (target & keep) | ((source >> down) & mask) << up, for bytes; both arrays are of one size."""
    whole = source.size // 32 * 32
    for j in range(0, whole, 32):
        merge_bits32(target.ctypes.data + j, source.ctypes.data + j, down, mask, up, keep)
    for j in range(whole, source.size):
        target[j] = np.uint8((target[j] & keep) | (((source[j] >> down) & mask) << up))


@njit
def _take_plane(plane: Any, codes: Any, width: int, shift: int) -> None:
    """Put the codes of a plane of `width` bits above the lowest `shift` bits of codes; higher bits become 0."""
    size = plane.size
    for part in range(8 // width):
        merge_bits(
            codes[part * size : (part + 1) * size],
            plane,
            part * width,
            (1 << width) - 1,
            shift,
            (1 << shift) - 1,
        )


@njit
def _split_pairs(codes: Any, n: int) -> None:
    """codes[:n] = 11 * a + b -> codes[:n] = a, codes[n:2n] = b; n is a multiple of 16."""
    for j in range(0, n, 16):
        split_pairs16(codes.ctypes.data + j, codes.ctypes.data + n + j)


@njit
def _affine_codes(layout: Any, buf8: Any, row: int, codes: Any) -> None:
    n = layout[N_CODES]
    if layout[CODES8] >= 0:
        start = layout[CODES8] + row * n
        codes[:n] = buf8[start : start + n]
        return
    shift = 0
    if layout[CODES4] >= 0:
        start = layout[CODES4] + row * (n // 2)
        _take_plane(buf8[start : start + n // 2], codes, 4, shift)
        shift += 4
    if layout[CODES2] >= 0:
        start = layout[CODES2] + row * (n // 4)
        _take_plane(buf8[start : start + n // 4], codes, 2, shift)
        shift += 2
    if layout[CODES1] >= 0:
        start = layout[CODES1] + row * (n // 8)
        _take_plane(buf8[start : start + n // 8], codes, 1, shift)
    if layout[PAIRED]:
        _split_pairs(codes, n)


@njit
def _half_row(stored: Any, unit: Any, out: Any) -> None:
    for g in range(out.size):
        out[g] = half_to_float(stored[g]) * unit


@njit
def _affine_params(layout: Any, buf8: Any, buf16: Any, buf32: Any, row: int, s: Any, z: Any, m: Any) -> None:
    n = layout[N_GROUPS]
    at = row * n
    if layout[PARAMS_F32]:
        start = layout[SCALES] // 4 + at
        s[:n] = buf32[start : start + n]
        if layout[MINS] >= 0:
            start = layout[MINS] // 4 + at
            m[:n] = buf32[start : start + n]
    else:
        unit = power_of_two(np.int8(buf8[layout[EXPONENTS] + row]))
        start = layout[SCALES] // 2 + at
        _half_row(buf16[start : start + n], unit, s[:n])
        if layout[MINS] >= 0:
            start = layout[MINS] // 2 + at
            _half_row(buf16[start : start + n], unit, m[:n])
    if layout[MINS] < 0:
        m[:n] = np.float32(0)
    if layout[ZEROS] >= 0:
        zeros = buf8[layout[ZEROS] + at : layout[ZEROS] + at + n]
        for g in range(n):
            z[g] = np.float32(zeros[g])
    else:
        z[:n] = np.float32(layout[MIDDLE])


@njit
def _six_bit_scales(packed: Any, d: Any, d_min: Any, s: Any, z: Any, m: Any) -> None:
    """The 8 (scale, min) pairs of 6 bits in the 12 bytes that Q4_K and Q5_K share."""
    for i in range(4):
        s[i] = d * np.float32(packed[i] & 63)
        m[i] = -(d_min * np.float32(packed[i + 4] & 63))
        s[i + 4] = d * np.float32((packed[i + 8] & 15) | ((packed[i] >> 6) << 4))
        m[i + 4] = -(d_min * np.float32((packed[i + 8] >> 4) | ((packed[i + 4] >> 6) << 4)))
    z[:8] = np.float32(0)


@njit
def _half_at(buf8: Any, at: int) -> Any:
    return half_to_float(np.uint16(np.uint16(buf8[at]) | (np.uint16(buf8[at + 1]) << np.uint16(8))))


@njit
def _nibbles(low_bytes: Any, codes: Any) -> None:
    """32 bytes -> 64 codes, low nibbles first."""
    merge_bits(codes[:32], low_bytes, 0, 15, 0, 0)
    merge_bits(codes[32:64], low_bytes, 4, 15, 0, 0)


@njit
def _q4_k_block(block: Any, codes: Any, s: Any, z: Any, m: Any) -> None:
    """144 bytes: d, dmin (fp16), 12 bytes of scales, 128 bytes of nibbles in runs of 32 low, 32 high."""
    _six_bit_scales(block[4:16], _half_at(block, 0), _half_at(block, 2), s, z, m)
    for run in range(4):
        _nibbles(block[16 + 32 * run : 48 + 32 * run], codes[64 * run : 64 * run + 64])


@njit
def _q5_k_block(block: Any, codes: Any, s: Any, z: Any, m: Any) -> None:
    """176 bytes: as Q4_K with 32 bytes of fifth bits before the nibbles; bit i belongs to sub-block i."""
    _six_bit_scales(block[4:16], _half_at(block, 0), _half_at(block, 2), s, z, m)
    high = block[16:48]
    for run in range(4):
        _nibbles(block[48 + 32 * run : 80 + 32 * run], codes[64 * run : 64 * run + 64])
    for i in range(8):
        merge_bits(codes[32 * i : 32 * i + 32], high, i, 1, 4, 15)


@njit
def _q6_k_block(block: Any, codes: Any, s: Any, z: Any, m: Any) -> None:
    """210 bytes: 128 low nibbles, 64 high bit pairs, 16 int8 scales, d (fp16); value = d * scale * (code - 32)."""
    for half in range(2):
        high = block[128 + 32 * half : 160 + 32 * half]
        for quarter in range(4):
            low = block[64 * half + 32 * (quarter % 2) : 64 * half + 32 * (quarter % 2) + 32]
            target = codes[128 * half + 32 * quarter : 128 * half + 32 * quarter + 32]
            merge_bits(target, low, 4 * (quarter // 2), 15, 0, 0)
            merge_bits(target, high, 2 * quarter, 3, 4, 15)
    d = _half_at(block, 208)
    for i in range(16):
        s[i] = d * np.float32(np.int8(block[192 + i]))
    z[:16] = np.float32(32)
    m[:16] = np.float32(0)


@njit
def _block_row(layout: Any, buf8: Any, row: int, codes: Any, s: Any, z: Any, m: Any) -> None:
    kind = layout[KIND]
    nbytes = 144 if kind == Q4_K else (176 if kind == Q5_K else 210)
    n_blocks = layout[COLS] // SUPER_BLOCK
    groups = SUPER_BLOCK // layout[GROUP]
    for b in range(n_blocks):
        start = (row * n_blocks + b) * nbytes
        block = buf8[start : start + nbytes]
        out = codes[b * SUPER_BLOCK : (b + 1) * SUPER_BLOCK]
        first = b * groups
        last = first + groups
        if kind == Q4_K:
            _q4_k_block(block, out, s[first:last], z[first:last], m[first:last])
        elif kind == Q5_K:
            _q5_k_block(block, out, s[first:last], z[first:last], m[first:last])
        else:
            _q6_k_block(block, out, s[first:last], z[first:last], m[first:last])


@njit
def decode_row(
    layout: Any, buf8: Any, buf16: Any, buf32: Any, row: int, codes: Any, s: Any, z: Any, m: Any
) -> None:
    """Decode one row: codes (N_CODES, doubled if paired), s, z, m (N_GROUPS).

    buf8, buf16 and buf32 view the same buffer as uint8, uint16 and float32; buf32 may be empty if no part is
    fp32.
    """
    if layout[KIND] == AFFINE:
        _affine_codes(layout, buf8, row, codes)
        _affine_params(layout, buf8, buf16, buf32, row, s, z, m)
    else:
        _block_row(layout, buf8, row, codes, s, z, m)
