"""Packed rows -> codes and fp32 group parameters: the compiled helpers that every weight kernel starts with.

Every format decodes a row into the same four arrays: codes (uint8, one per column) and, per group, scale, zero
and min, so that value = scale * (code - zero) + min. Affine formats have zero or min, never both. Memory is given by
addresses: numba's array views cost more here than the work on them.
"""

from functools import lru_cache
from typing import Any

import numpy as np
from numba import njit

from quant.formats import SUPER_BLOCK, WeightFormat
from quant.kernels_kv_simd import item_nbytes
from quant.kernels_simd import (
    byte_at,
    can_look_up,
    converts_halves,
    expand16,
    expand32,
    fill16,
    float_at,
    half_at,
    look_up32,
    merge_bits32,
    prefetch,
    put_byte,
    put_float,
    scale_halves16,
    split_nibbles32,
    split_pairs16,
)
from quant.kernels_simd16 import can_look_up_nibbles, look_up_nibbles

# Slots of a layout, the int64 array that describes a packed matrix to the kernels. Offsets are in bytes,
# -1 for a part that the format does not have.
KIND, ROWS, COLS, GROUP, N_GROUPS, N_CODES, PAIRED, MIDDLE, PARAMS_F32, BELOW_16, NIBBLES = range(11)
CODES8, CODES4, CODES2, CODES1, SCALES, MINS, ZEROS, EXPONENTS = range(11, 19)
N_SLOTS = 19
AFFINE, Q4_K, Q5_K, Q6_K = range(4)
_SPARE = 64  # bytes: 16 values of a row's unfinished vector

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
    layout[NIBBLES] = 0
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
    # Bytes hold a code of each half of the row; so halves of whole groups can be unpacked straight from them.
    layout[NIBBLES] = fmt.planes == (4,) and cols % (2 * fmt.group) == 0
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
def scratch_nbytes(layout: Any) -> int:
    """Bytes of working memory that `unpack_row` needs for a row's codes and parameters."""
    return _codes_nbytes(layout) + 12 * _groups_up(layout) + _SPARE


@njit
def _codes_nbytes(layout: Any) -> int:
    # Twice for pairs; and whole vectors may be read where a row ends within one.
    return (2 * layout[N_CODES] + 63) // 64 * 64 + 64


@njit
def _groups_up(layout: Any) -> int:
    """Groups of a row, rounded up to whole vectors: how far scales, zeros and minima of a row are apart."""
    return (layout[N_GROUPS] + 15) // 16 * 16


@njit
def _params_of(layout: Any, scratch: int) -> int:
    """Where the row's scales are; its zeros and minima follow, `_groups_up` fp32 each."""
    return scratch + _codes_nbytes(layout)


@njit
def _take_plane(plane: int, size: int, codes: int, width: int, shift: int) -> None:
    """Put the codes of a plane of `width` bits above the lowest `shift` bits of codes; higher bits become 0."""
    whole = size // 32 * 32
    if width == 4 and shift == 0:
        for j in range(0, whole, 32):
            split_nibbles32(plane + j, codes + j, codes + size + j)
    else:
        for part in range(8 // width):
            target = codes + part * size
            for j in range(0, whole, 32):
                merge_bits32(target + j, plane + j, part * width, (1 << width) - 1, shift, (1 << shift) - 1)
    for part in range(8 // width):
        for j in range(part * size + whole, (part + 1) * size):
            bits = (byte_at(plane + j - part * size) >> (part * width)) & ((1 << width) - 1)
            put_byte(codes + j, np.uint8((byte_at(codes + j) & ((1 << shift) - 1)) | (bits << shift)))


@njit
def _affine_codes(layout: Any, data: int, row: int, codes: int) -> int:
    n = layout[N_CODES]
    if layout[CODES8] >= 0:
        return data + layout[CODES8] + row * n
    shift = 0
    if layout[CODES4] >= 0:
        _take_plane(data + layout[CODES4] + row * (n // 2), n // 2, codes, 4, shift)
        shift += 4
    if layout[CODES2] >= 0:
        _take_plane(data + layout[CODES2] + row * (n // 4), n // 4, codes, 2, shift)
        shift += 2
    if layout[CODES1] >= 0:
        _take_plane(data + layout[CODES1] + row * (n // 8), n // 8, codes, 1, shift)
    if layout[PAIRED]:
        for j in range(0, n, 16):  # codes = 11 * a + b; n is a multiple of 16
            split_pairs16(codes + j, codes + n + j)
    return codes


@njit
def _half_row(stored: int, n: int, unit: Any, out: int) -> None:
    """n fp16 at address stored, times unit, as fp32 at address out."""
    whole = n // 16 * 16 if converts_halves() else 0
    for g in range(0, whole, 16):
        scale_halves16(stored + 2 * g, unit, out + 4 * g)
    for g in range(whole, n):
        put_float(out + 4 * g, half_to_float(half_at(stored + 2 * g)) * unit)


@njit
def _fill(out: int, n: int, value: Any) -> None:
    """fp32 at address out = value, n of them and up to a whole vector."""
    for g in range(0, n, 16):
        fill16(out + 4 * g, value)


@njit
def _float_row(stored: int, n: int, out: int) -> None:
    for g in range(n):
        put_float(out + 4 * g, float_at(stored + 4 * g))


@njit
def _affine_params(layout: Any, data: int, row: int, s: int, z: int, m: int) -> None:
    n = layout[N_GROUPS]
    at = row * n
    if layout[PARAMS_F32]:
        _float_row(data + layout[SCALES] + 4 * at, n, s)
        if layout[MINS] >= 0:
            _float_row(data + layout[MINS] + 4 * at, n, m)
    else:
        unit = power_of_two(np.int8(byte_at(data + layout[EXPONENTS] + row)))
        _half_row(data + layout[SCALES] + 2 * at, n, unit, s)
        if layout[MINS] >= 0:
            _half_row(data + layout[MINS] + 2 * at, n, unit, m)
    if layout[MINS] < 0:
        _fill(m, n, np.float32(0))
    if layout[ZEROS] >= 0:
        for g in range(n):
            put_float(z + 4 * g, np.float32(byte_at(data + layout[ZEROS] + at + g)))
    else:
        _fill(z, n, np.float32(layout[MIDDLE]))


@njit
def _six_bit_scales(start: int, s: int, z: int, m: int) -> None:
    """8 groups of a Q4_K or Q5_K block: d, dmin (fp16), then 8 (scale, min) pairs of 6 bits in 12 bytes."""
    d = half_to_float(half_at(start))
    d_min = half_to_float(half_at(start + 2))
    for i in range(4):
        a = byte_at(start + 4 + i)
        b = byte_at(start + 8 + i)
        c = byte_at(start + 12 + i)
        put_float(s + 4 * i, d * np.float32(a & 63))
        put_float(m + 4 * i, -(d_min * np.float32(b & 63)))
        put_float(s + 4 * (4 + i), d * np.float32((c & 15) | ((a >> 6) << 4)))
        put_float(m + 4 * (4 + i), -(d_min * np.float32((c >> 4) | ((b >> 6) << 4))))
    for i in range(8):
        put_float(z + 4 * i, np.float32(0))


@njit
def _nibble_runs(low: int, codes: int) -> None:
    """128 bytes at address low -> 256 codes: in runs of 32 bytes, low nibbles first."""
    for run in range(4):
        split_nibbles32(low + 32 * run, codes + 64 * run, codes + 64 * run + 32)


@njit
def _q6_k_params(start: int, s: int, z: int, m: int) -> None:
    """16 groups of a Q6_K block: 16 int8 scales and d (fp16); value = d * scale * (code - 32)."""
    d = half_to_float(half_at(start + 208))
    for i in range(16):
        put_float(s + 4 * i, d * np.float32(np.int8(byte_at(start + 192 + i))))
    fill16(z, np.float32(32))
    fill16(m, np.float32(0))


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
def _block_nbytes(layout: Any) -> int:
    return 144 if layout[KIND] == Q4_K else (176 if layout[KIND] == Q5_K else 210)


@njit
def _block_row(layout: Any, data: int, row: int, codes: int, s: int, z: int, m: int) -> None:
    """Q4_K: 144 bytes, parameters then 128 bytes of nibbles. Q5_K: 176, with 32 bytes of fifth bits between,
    bit i for sub-block i. Q6_K: 210.
    """
    kind = layout[KIND]
    nbytes = _block_nbytes(layout)
    n_blocks = layout[COLS] // SUPER_BLOCK
    groups = SUPER_BLOCK // layout[GROUP]
    for b in range(n_blocks):
        block = data + (row * n_blocks + b) * nbytes
        target = codes + b * SUPER_BLOCK
        g = 4 * b * groups
        if kind == Q6_K:
            _q6_k_params(block, s + g, z + g, m + g)
            _q6_k_codes(block, target)
            continue
        _six_bit_scales(block, s + g, z + g, m + g)
        _nibble_runs(block + nbytes - 128, target)
        if kind == Q5_K:
            for i in range(8):
                merge_bits32(target + 32 * i, block + 16, i, 1, 4, 15)


@njit
def unpack_row(layout: Any, data: int, row: int, scratch: int, out: int, step: int, tag: Any) -> None:
    """Write row `row` of the packed matrix at address data to address out: fp32 if tag is one, bf16 if it is uint16.

    value = scale * (code - zero) + min, each operation rounded to fp32, then to the target. step: bytes from one
    32 columns to the next, 32 elements for a row in one piece. scratch: the address of `scratch_nbytes` bytes.
    """
    s = _params_of(layout, scratch)
    z = s + 4 * _groups_up(layout)
    m = z + 4 * _groups_up(layout)
    if layout[KIND] == AFFINE:
        if can_look_up_nibbles(tag) and layout[NIBBLES] != 0 and _is_normal(layout, data, row):
            _nibble_row(layout, data, row, s, z, m, out, step)
            return
        _affine_params(layout, data, row, s, z, m)
        codes = _affine_codes(layout, data, row, scratch)
    else:
        _block_row(layout, data, row, scratch, s, z, m)
        codes = scratch
    _expand_row(layout, codes, s, z, m, out, step, tag)


@njit
def _is_normal(layout: Any, data: int, row: int) -> Any:
    """Whether no value of an affine row is subnormal: fp16 numbers are multiples of 2^-24, and so are their sums."""
    return layout[PARAMS_F32] == 0 and np.int8(byte_at(data + layout[EXPONENTS] + row)) >= -100


@njit
def _nibble_row(layout: Any, data: int, row: int, s: int, z: int, m: int, out: int, step: int) -> None:
    """A row whose bytes hold a code of either half, as bf16.

    Its parameters are short numbers in fp32: scale * code and scale * zero are exact, so that scale * code + (min -
    scale * zero), rounded once, is what the format says.
    """
    _affine_params(layout, data, row, s, z, m)
    n = layout[N_GROUPS]
    if layout[MINS] < 0:
        for g in range(n):
            put_float(m + 4 * g, -float_at(s + 4 * g) * float_at(z + 4 * g))
    nibbles = data + layout[CODES4] + row * (layout[COLS] // 2)
    if layout[GROUP] == 32:
        _look_up_halves(nibbles, s, m, out, step, n // 2, 1)
    elif layout[GROUP] == 64:
        _look_up_halves(nibbles, s, m, out, step, n // 2, 2)
    else:
        _look_up_halves(nibbles, s, m, out, step, n // 2, 4)


@njit
def _look_up_halves(nibbles: int, s: int, m: int, out: int, step: int, n: int, chunks: int) -> None:
    """n groups of chunks * 32 codes of either half; compiled for each number of chunks it is called with."""
    far = n * chunks * step
    for g in range(n):
        at = g * chunks
        look_up_nibbles(
            nibbles + 32 * at,
            chunks,
            out + at * step,
            out + at * step + far,
            step,
            float_at(s + 4 * g),
            float_at(m + 4 * g),
            float_at(s + 4 * (g + n)),
            float_at(m + 4 * (g + n)),
        )


@njit
def prefetch_row(layout: Any, data: int, row: int) -> None:
    """Ask for a row's bytes in the second-level cache; rows beyond the matrix are allowed."""
    if layout[KIND] != AFFINE:
        nbytes = _block_nbytes(layout) * (layout[COLS] // SUPER_BLOCK)
        _prefetch(data + row * nbytes, nbytes)
        return
    n = layout[N_CODES]
    for slot, share in ((CODES8, 1), (CODES4, 2), (CODES2, 4), (CODES1, 8)):
        if layout[slot] >= 0:
            _prefetch(data + layout[slot] + row * (n // share), n // share)
    nbytes = layout[N_GROUPS] * (4 if layout[PARAMS_F32] else 2)
    _prefetch(data + layout[SCALES] + row * nbytes, nbytes)
    if layout[MINS] >= 0:
        _prefetch(data + layout[MINS] + row * nbytes, nbytes)


@njit
def _prefetch(address: int, nbytes: int) -> None:
    for at in range(address, address + nbytes, 64):
        prefetch(at)


@njit
def _expand_row(layout: Any, codes: int, s: int, z: int, m: int, out: int, step: int, tag: Any) -> None:
    """codes may be read up to the end of the last 16 columns begun."""
    cols = layout[COLS]
    group = layout[GROUP]
    nbytes = item_nbytes(tag)
    spare = m + 4 * _groups_up(layout)
    first = 0
    if can_look_up(tag) and layout[BELOW_16] != 0:
        first = cols // group
        if group == 32:
            _look_up_groups(codes, s, z, m, out, step, first, 1)
        elif group == 64:
            _look_up_groups(codes, s, z, m, out, step, first, 2)
        elif group == 128:
            _look_up_groups(codes, s, z, m, out, step, first, 4)
        else:
            first = 0
    for g in range(first, layout[N_GROUPS]):
        scale, zero, least = float_at(s + 4 * g), float_at(z + 4 * g), float_at(m + 4 * g)
        start = g * group
        n = min(group, cols - start)
        for j in range(start, start + n // 32 * 32, 32):
            expand32(out + j // 32 * step, codes + j, scale, zero, least, tag)
        j = start + n // 32 * 32
        if start + n - j >= 16:
            expand16(out + j // 32 * step + j % 32 * nbytes, codes + j, scale, zero, least, tag)
            j += 16
        if j < start + n:
            # What is left of a vector goes through the row's spare bytes: out ends with its last column.
            expand16(spare, codes + j, scale, zero, least, tag)
            target = out + j // 32 * step + j % 32 * nbytes
            for i in range((start + n - j) * nbytes):
                put_byte(target + i, byte_at(spare + i))


@njit
def _look_up_groups(codes: int, s: int, z: int, m: int, out: int, step: int, n: int, chunks: int) -> None:
    """n whole groups of chunks * 32 codes below 16 as bf16; compiled for each number of chunks it is called with."""
    for g in range(n):
        at = g * chunks
        scale, zero, least = float_at(s + 4 * g), float_at(z + 4 * g), float_at(m + 4 * g)
        look_up32(out + at * step, step, codes + 32 * at, chunks, scale, zero, least)
