"""Quantisers on the CPU: fp32 rows -> codes and parameters of affine formats, min-max or searched.

Min-max takes the parameters that make the levels span the group: the minimum rounded down, the scale up, to
what can be stored. The search then looks for less squared error. It tries narrower grids than the group's range
(clipping a few outliers pays for a finer step), solves for the least-squares scale and minimum of each grid's
codes, keeps the best, alternates rounding and solving until it stands still, and keeps the result only where
its error with the stored parameters is below min-max's. So a searched group is never worse than min-max.

Parameters are computed in fp64, so that groups of subnormals or of huge numbers need no case of their own.
"""

import math
from typing import Any

import numpy as np
from numba import njit, prange

from quant.formats import MAX_ROW_EXPONENT, MIN_ROW_EXPONENT
from quant.kernel_cache import cached_kernel
from quant.kernels_decode import (
    CODES1,
    CODES2,
    CODES4,
    CODES8,
    EXPONENTS,
    GROUP,
    MIDDLE,
    MINS,
    N_CODES,
    N_GROUPS,
    PAIRED,
    PARAMS_F32,
    SCALES,
    ZEROS,
    half_to_float,
)
from quant.kernels_simd import merge_bits32
from quant.threads import use_torch_threads

_SUM_ANY_ORDER = {"reassoc", "contract", "nsz"}
_NO_NAN = {"nnan", "ninf", "nsz", "reassoc"}
_CHUNKS_PER_THREAD = 8
# Widths of the grids tried, as fractions of the group's range; the coarser the format, the more clipping pays.
_N_WIDTHS = 10
_MAX_REFITS = 6
DOWN, NEAREST, UP = -1, 0, 1


@njit
def _exponent_of(value: float) -> int:
    """e with 2^(e-1) <= value < 2^e, for a positive fp64 that is not subnormal."""
    return int((np.float64(value).view(np.int64) >> 52) & 0x7FF) - 1022


@njit
def _power(exponent: int) -> float:
    """2^exponent in fp64, for exponents of normal numbers."""
    return np.int64((exponent + 1023) << 52).view(np.float64)


@njit
def _round_to_half(value: float, direction: int) -> int:
    """fp16 bits of a finite value, rounded down, to the nearest or up; magnitudes are held to 65504."""
    if value == 0.0:
        return 0
    sign = 0x8000 if value < 0.0 else 0
    magnitude = min(abs(value), 65504.0)
    unit_exponent = max(_exponent_of(magnitude) - 11, -24)
    steps = magnitude * _power(-unit_exponent)
    whole = np.int64(steps)
    if direction == NEAREST:
        whole = np.int64(steps + 0.5)
    elif (direction == UP) == (value > 0.0) and whole < steps:
        whole += 1
    # Below 2^-13 the bits are the number of steps; above, 1024 steps of each binade are its implicit bit.
    bits = whole + ((unit_exponent + 24) << 10)
    if bits > 0x7BFF:
        bits = 0x7BFF
    return sign | bits


@njit
def _round_to_float(value: float, direction: int) -> Any:
    """fp32 of a finite value, rounded in that direction; magnitudes are held to the largest finite number."""
    largest = 3.4028234663852886e38
    value = min(max(value, -largest), largest)
    rounded = np.float32(value)
    back = np.float64(rounded)
    if (direction == UP and back < value) or (direction == DOWN and back > value):
        if rounded == 0.0:
            tiny = np.float32(1.401298464324817e-45)
            return tiny if direction == UP else -tiny
        bits = rounded.view(np.int32)
        away_from_zero = (rounded > 0.0) == (direction == UP)
        return np.int32(bits + (1 if away_from_zero else -1)).view(np.float32)
    return rounded


@njit
def _storable(value: float, direction: int, params_f32: int, exponent: int) -> float:
    """The stored parameter nearest to value in that direction."""
    if params_f32:
        return np.float64(_round_to_float(value, direction))
    half = _round_to_half(value * _power(-exponent), direction)
    return np.float64(half_to_float(np.uint16(half))) * _power(exponent)


@njit(fastmath=_NO_NAN)
def _extremes(values: Any) -> Any:
    low = values[0]
    high = values[0]
    for j in range(values.size):
        low = min(low, values[j])
        high = max(high, values[j])
    return low, high


@njit
def _encode(values: Any, s: float, z: float, m: float, top: int, codes: Any) -> None:
    """codes = the levels s * (code - z) + m nearest to values."""
    inverse = 1.0 / s if s != 0.0 else 0.0
    limit = top + 0.5
    for j in range(values.size):
        level = (np.float64(values[j]) - m) * inverse + z + 0.5
        codes[j] = np.uint8(np.int32(min(max(level, 0.0), limit)))


@njit(fastmath=_SUM_ANY_ORDER)
def _error(values: Any, weights: Any, codes: Any, s: float, z: float, m: float) -> float:
    total = 0.0
    for j in range(values.size):
        gap = np.float64(values[j]) - (s * (np.float64(codes[j]) - z) + m)
        total += np.float64(weights[j]) * gap * gap
    return total


@njit(fastmath=_SUM_ANY_ORDER)
def _refit_affine(u: Any, weights: Any, s: Any, m: Any, top: Any) -> Any:
    """Round u to the levels s * q + m and solve for better s and m; return them and their squared error."""
    zero = np.float32(0)
    half = np.float32(0.5)
    limit = np.float32(top) + half
    inverse = np.float32(1) / s
    w_sum = wq = wqq = wd = wdd = wdq = zero
    for j in range(u.size):
        level = (u[j] - m) * inverse + half
        q = np.float32(np.int32(min(max(level, zero), limit)))
        w = weights[j]
        # Sums over the residual, not over u: it is small, so that fp32 sums lose nothing.
        d = u[j] - (s * q + m)
        w_sum += w
        wq += w * q
        wqq += w * q * q
        wd += w * d
        wdd += w * d * d
        wdq += w * d * q
    a, b, c = np.float64(w_sum), np.float64(wq), np.float64(wqq)
    determinant = a * c - b * b
    if determinant <= 1e-6 * a * c:
        return s, m, np.float64(wdd)
    ds = (a * wdq - b * wd) / determinant
    dm = (c * wd - b * wdq) / determinant
    return np.float32(s + ds), np.float32(m + dm), wdd - ds * wdq - dm * wd


@njit(fastmath=_SUM_ANY_ORDER)
def _refit_scale(u: Any, weights: Any, s: Any, z: Any, top: Any) -> Any:
    """Round u to the levels s * (q - z) and solve for a better s; return it and its squared error."""
    zero = np.float32(0)
    offset = z + np.float32(0.5)
    limit = np.float32(top) + np.float32(0.5)
    inverse = np.float32(1) / s
    wpp = wdd = wdp = zero
    for j in range(u.size):
        level = u[j] * inverse + offset
        p = np.float32(np.int32(min(max(level, zero), limit))) - z
        w = weights[j]
        d = u[j] - s * p
        wpp += w * p * p
        wdd += w * d * d
        wdp += w * d * p
    if wpp <= zero:
        return s, np.float64(wdd)
    ds = np.float64(wdp) / np.float64(wpp)
    return np.float32(s + ds), wdd - ds * wdp


@njit
def _least_width(top: int) -> float:
    """The narrowest grid worth trying, as a fraction of the range: measured on Gaussian and Student-t groups."""
    if top <= 3:
        return 0.45
    if top <= 15:
        return 0.62
    return 0.8 if top <= 63 else 0.93


@njit
def _search_affine(u: Any, weights: Any, top: int) -> Any:
    """(scale, minimum) of little squared error for u in [0, 1]."""
    best_s = np.float32(1.0 / top)
    best_m = np.float32(0)
    best = math.inf
    least = _least_width(top)
    for i in range(_N_WIDTHS):
        width = 1.0 - (1.0 - least) * i / (_N_WIDTHS - 1)
        # A narrow grid may leave out the low end, the high end or some of both.
        for place in range(3 if i else 1):
            start = (1.0 - width) * (0.5 if i == 0 else 0.5 * place)
            s, m, error = _refit_affine(u, weights, np.float32(width / top), np.float32(start), top)
            if error < best:
                best, best_s, best_m = error, s, m
    for _ in range(_MAX_REFITS):
        s, m, error = _refit_affine(u, weights, best_s, best_m, top)
        if not error < best * 0.9999:
            break
        best, best_s, best_m = error, s, m
    return np.float64(best_s), np.float64(best_m)


@njit
def _search_scale(u: Any, weights: Any, s_range: float, z: float, top: int) -> Any:
    """(scale, error) of little squared error for levels scale * (q - z); s_range: the scale that spans u."""
    best_s = np.float32(s_range)
    best = math.inf
    least = _least_width(top)
    zero = np.float32(z)
    for i in range(_N_WIDTHS):
        width = 1.0 - (1.0 - least) * i / (_N_WIDTHS - 1)
        s, error = _refit_scale(u, weights, np.float32(s_range * width), zero, top)
        if error < best:
            best, best_s = error, s
    for _ in range(_MAX_REFITS):
        s, error = _refit_scale(u, weights, best_s, zero, top)
        if not error < best * 0.9999:
            break
        best, best_s = error, s
    return np.float64(best_s), best


@njit
def _span_scale(low: float, high: float, z: int, top: int) -> float:
    """The least scale with which levels scale * (q - z), q in 0..top, span low, high and 0."""
    scale = 0.0
    if low < 0.0:
        scale = -low / z if z > 0 else math.inf
    if high > 0.0:
        scale = max(scale, high / (top - z) if z < top else math.inf)
    return scale


@njit
def _span_zero(low: float, high: float, top: int) -> int:
    """The zero point that spans low, high and 0 with the least scale."""
    below = max(-low, 0.0)
    span = below + max(high, 0.0)
    if span == 0.0:
        return 0
    first = min(int(below / span * top), top)
    second = min(first + 1, top)
    return first if _span_scale(low, high, first, top) <= _span_scale(low, high, second, top) else second


@njit
def _choose_min(
    values: Any, weights: Any, search: bool, top: int, f32: int, e: int, u: Any, codes: Any, trial: Any
) -> Any:
    """Parameters (s, z, m) of a (scale, min) group as stored, its codes written."""
    low32, high32 = _extremes(values)
    low, high = np.float64(low32), np.float64(high32)
    m = _storable(low, DOWN, f32, e)
    s = _storable((high - m) / top, UP, f32, e)
    _encode(values, s, 0.0, m, top, codes)
    if not search or high == low:
        return s, 0.0, m
    span = high - low
    for j in range(values.size):
        u[j] = np.float32((np.float64(values[j]) - low) / span)
    found_s, found_m = _search_affine(u[: values.size], weights, top)
    new_m = _storable(low + found_m * span, NEAREST, f32, e)
    new_s = _storable(found_s * span, NEAREST, f32, e)
    _encode(values, new_s, 0.0, new_m, top, trial)
    if _error(values, weights, trial, new_s, 0.0, new_m) < _error(values, weights, codes, s, 0.0, m):
        codes[:] = trial
        return new_s, 0.0, new_m
    return s, 0.0, m


@njit
def _choose_zero(
    values: Any,
    weights: Any,
    search: bool,
    middle: int,
    top: int,
    f32: int,
    e: int,
    u: Any,
    codes: Any,
    trial: Any,
) -> Any:
    """Parameters (s, z, m = 0) of a group with a zero point: the fixed code `middle`, or any if it is -1."""
    low32, high32 = _extremes(values)
    low, high = np.float64(low32), np.float64(high32)
    z = middle
    sign = 1.0
    if middle < 0:
        z = _span_zero(low, high, top)
        span = _span_scale(low, high, z, top)
    else:
        span = _span_scale(low, high, z, top)
        mirrored = _span_scale(-high, -low, z, top)
        if mirrored < span:
            sign, span = -1.0, mirrored
    s = sign * _storable(span, UP, f32, e)
    _encode(values, s, z, 0.0, top, codes)
    extreme = max(abs(low), abs(high))
    if not search or extreme == 0.0:
        return s, np.float64(z), 0.0
    for j in range(values.size):
        u[j] = np.float32(np.float64(values[j]) / extreme)
    best = math.inf
    best_s = s
    best_z = z
    for step in range(-1, 2):
        # Neighbouring zero points where they are free, else the two signs of the scale.
        if middle < 0:
            try_z, try_sign = z + step, 1.0
        else:
            try_z, try_sign = z, (1.0 if step < 0 else -1.0)
        if try_z < 0 or try_z > top or (middle >= 0 and step > 0):
            continue
        flip = try_sign < 0.0
        start = _span_scale(-high if flip else low, -low if flip else high, try_z, top) / extreme
        if not 0.0 < start < 4.0:
            continue
        found, error = _search_scale(u[: values.size], weights, try_sign * start, try_z, top)
        if error < best:
            best, best_s, best_z = error, found * extreme, try_z
    new_s = _storable(best_s, NEAREST, f32, e)
    _encode(values, new_s, best_z, 0.0, top, trial)
    if _error(values, weights, trial, new_s, best_z, 0.0) < _error(values, weights, codes, s, z, 0.0):
        codes[:] = trial
        return new_s, np.float64(best_z), 0.0
    return s, np.float64(z), 0.0


@njit
def _put_param(layout: Any, offset: int, value: float, e: int, at: int, buf16: Any, buf32: Any) -> None:
    if layout[PARAMS_F32]:
        buf32[offset // 4 + at] = np.float32(value)
    else:
        buf16[offset // 2 + at] = np.uint16(_round_to_half(value * _power(-e), NEAREST))


@njit
def _merge_bits(target: Any, source: Any, down: int, mask: int, up: int, keep: int) -> None:
    """target = (target & keep) | ((source >> down) & mask) << up, for bytes; both arrays are of one size."""
    whole = source.size // 32 * 32
    for j in range(0, whole, 32):
        merge_bits32(target.ctypes.data + j, source.ctypes.data + j, down, mask, up, keep)
    for j in range(whole, source.size):
        target[j] = np.uint8((target[j] & keep) | (((source[j] >> down) & mask) << up))


@njit
def _put_plane(codes: Any, plane: Any, width: int, shift: int) -> None:
    """Collect `width` bits of codes, from bit `shift` on, into a plane."""
    size = plane.size
    for part in range(8 // width):
        source = codes[part * size : (part + 1) * size]
        _merge_bits(plane, source, shift, (1 << width) - 1, part * width, (1 << (part * width)) - 1)


@njit
def _put_codes(layout: Any, codes: Any, row: int, buf8: Any) -> None:
    n = layout[N_CODES]
    if layout[PAIRED]:
        for j in range(n):
            codes[j] = np.uint8(11 * codes[j] + codes[n + j])
    if layout[CODES8] >= 0:
        start = layout[CODES8] + row * n
        buf8[start : start + n] = codes[:n]
    shift = 0
    if layout[CODES4] >= 0:
        start = layout[CODES4] + row * (n // 2)
        _put_plane(codes, buf8[start : start + n // 2], 4, shift)
        shift += 4
    if layout[CODES2] >= 0:
        start = layout[CODES2] + row * (n // 4)
        _put_plane(codes, buf8[start : start + n // 4], 2, shift)
        shift += 2
    if layout[CODES1] >= 0:
        start = layout[CODES1] + row * (n // 8)
        _put_plane(codes, buf8[start : start + n // 8], 1, shift)


@njit
def _row_exponent(values: Any) -> int:
    """As formats.row_exponent."""
    low, high = _extremes(values)
    extreme = max(abs(np.float64(low)), abs(np.float64(high)))
    if extreme == 0.0:
        return 0
    return min(max(math.frexp(extreme)[1] - 13, MIN_ROW_EXPONENT), MAX_ROW_EXPONENT)


@cached_kernel(parallel=True, nogil=True)
def _quantize(
    layout: Any,
    values: Any,
    weights: Any,
    search: bool,
    top: int,
    row_start: int,
    n_chunks: int,
    buf8: Any,
    buf16: Any,
    buf32: Any,
) -> None:
    n_rows, cols = values.shape
    group = layout[GROUP]
    n_groups = layout[N_GROUPS]
    f32 = layout[PARAMS_F32]
    for chunk in prange(n_chunks):
        codes = np.empty(n_groups * group, np.uint8)
        trial = np.empty(group, np.uint8)
        u = np.empty(group, np.float32)
        even = np.ones(group, np.float32)
        for i in range(chunk * n_rows // n_chunks, (chunk + 1) * n_rows // n_chunks):
            row = row_start + i
            e = 0 if f32 else _row_exponent(values[i])
            if layout[EXPONENTS] >= 0:
                buf8[layout[EXPONENTS] + row] = np.uint8(np.int8(e))
            codes[cols:] = np.uint8(0)
            for g in range(n_groups):
                start = g * group
                end = min(start + group, cols)
                part = values[i, start:end]
                w = even[: end - start]
                if weights.size and weights[start:end].sum() > 0.0:
                    w = weights[start:end]
                out = codes[start:end]
                tried = trial[: end - start]
                if layout[MINS] >= 0:
                    s, z, m = _choose_min(part, w, search, top, f32, e, u, out, tried)
                else:
                    middle = -1 if layout[ZEROS] >= 0 else layout[MIDDLE]
                    s, z, m = _choose_zero(part, w, search, middle, top, f32, e, u, out, tried)
                at = row * n_groups + g
                _put_param(layout, layout[SCALES], s, e, at, buf16, buf32)
                if layout[MINS] >= 0:
                    _put_param(layout, layout[MINS], m, e, at, buf16, buf32)
                elif layout[ZEROS] >= 0:
                    buf8[layout[ZEROS] + at] = np.uint8(z)
            _put_codes(layout, codes, row, buf8)


def quantize_rows(
    layout: Any, buffers: Any, values: Any, weights: Any, top_code: int, row_start: int, search: bool
) -> None:
    """Pack fp32 values (n, cols), all finite, as rows row_start.. of an affine matrix.

    buffers: the matrix's buffer as uint8, uint16 and float32, written in place. weights: fp32 (cols,), how much
    a squared error in each column counts, or empty for all alike.
    """
    n_chunks = max(1, min(use_torch_threads() * _CHUNKS_PER_THREAD, values.shape[0]))
    _quantize(layout, values, weights, search, top_code, row_start, n_chunks, *buffers)
