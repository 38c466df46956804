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
KIND, ROWS, COLS, GROUP, N_GROUPS, N_CODES, PAIRED, MIDDLE, PARAMS_F32, BELOW_16 = range(10)
CODES8, CODES4, CODES2, CODES1, SCALES, MINS, ZEROS, EXPONENTS = range(10, 18)
N_SLOTS = 18
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
    layout[BELOW_16] = fmt.base == "q4_k" if fmt.kind == "block" else fmt.top_code < 16
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
def _affine_codes(layout: Any, buf8: Any, row: int, codes: Any) -> Any:
    n = layout[N_CODES]
    if layout[CODES8] >= 0:
        start = layout[CODES8] + row * n
        return buf8[start : start + n]
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
    return codes


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
def _half_at(buf8: Any, at: int) -> Any:
    return half_to_float(np.uint16(np.uint16(buf8[at]) | (np.uint16(buf8[at + 1]) << np.uint16(8))))


@njit
def _six_bit_scales(buf8: Any, start: int, g: int, s: Any, z: Any, m: Any) -> None:
    """Groups g..g+8 of a Q4_K or Q5_K block: d, dmin (fp16), then 8 (scale, min) pairs of 6 bits in 12 bytes."""
    d = _half_at(buf8, start)
    d_min = _half_at(buf8, start + 2)
    for i in range(4):
        a = buf8[start + 4 + i]
        b = buf8[start + 8 + i]
        c = buf8[start + 12 + i]
        s[g + i] = d * np.float32(a & 63)
        m[g + i] = -(d_min * np.float32(b & 63))
        s[g + 4 + i] = d * np.float32((c & 15) | ((a >> 6) << 4))
        m[g + 4 + i] = -(d_min * np.float32((c >> 4) | ((b >> 6) << 4)))
    for i in range(8):
        z[g + i] = np.float32(0)


@njit
def _nibble_runs(low: int, codes: int) -> None:
    """128 bytes at address low -> 256 codes: in runs of 32 bytes, low nibbles first."""
    for run in range(4):
        merge_bits32(codes + 64 * run, low + 32 * run, 0, 15, 0, 0)
        merge_bits32(codes + 64 * run + 32, low + 32 * run, 4, 15, 0, 0)


@njit
def _q6_k_params(buf8: Any, start: int, g: int, s: Any, z: Any, m: Any) -> None:
    """Groups g..g+16 of a Q6_K block: 16 int8 scales and d (fp16); value = d * scale * (code - 32)."""
    d = _half_at(buf8, start + 208)
    for i in range(16):
        s[g + i] = d * np.float32(np.int8(buf8[start + 192 + i]))
        z[g + i] = np.float32(32)
        m[g + i] = np.float32(0)


@njit
def _q6_k_codes(block: int, codes: int) -> None:
    """128 low nibbles, then 64 high bit pairs; halves of 128 codes, quarters of 32 within."""
    for half in range(2):
        high = block + 128 + 32 * half
        for quarter in range(4):
            target = codes + 128 * half + 32 * quarter
            merge_bits32(target, block + 64 * half + 32 * (quarter % 2), 4 * (quarter // 2), 15, 0, 0)
            merge_bits32(target, high, 2 * quarter, 3, 4, 15)


@njit
def _block_row(layout: Any, buf8: Any, row: int, codes: Any, s: Any, z: Any, m: Any) -> None:
    """Q4_K: 144 bytes, parameters then 128 bytes of nibbles. Q5_K: 176, with 32 bytes of fifth bits between,
    bit i for sub-block i. Q6_K: 210.
    """
    kind = layout[KIND]
    nbytes = 144 if kind == Q4_K else (176 if kind == Q5_K else 210)
    n_blocks = layout[COLS] // SUPER_BLOCK
    groups = SUPER_BLOCK // layout[GROUP]
    for b in range(n_blocks):
        start = (row * n_blocks + b) * nbytes
        block = buf8.ctypes.data + start
        target = codes.ctypes.data + b * SUPER_BLOCK
        if kind == Q6_K:
            _q6_k_params(buf8, start, b * groups, s, z, m)
            _q6_k_codes(block, target)
            continue
        _six_bit_scales(buf8, start, b * groups, s, z, m)
        _nibble_runs(block + nbytes - 128, target)
        if kind == Q5_K:
            for i in range(8):
                merge_bits32(target + 32 * i, block + 16, i, 1, 4, 15)


@njit
def decode_row(
    layout: Any, buf8: Any, buf16: Any, buf32: Any, row: int, codes: Any, s: Any, z: Any, m: Any
) -> Any:
    """Decode one row: s, z, m (N_GROUPS) are written, its codes returned: codes, or a view of the buffer.

    codes has room for N_CODES, doubled if paired. buf8, buf16 and buf32 view the same buffer as uint8, uint16
    and float32; buf32 may be empty if no part is fp32.
    """
    if layout[KIND] == AFFINE:
        _affine_params(layout, buf8, buf16, buf32, row, s, z, m)
        return _affine_codes(layout, buf8, row, codes)
    _block_row(layout, buf8, row, codes, s, z, m)
    return codes
