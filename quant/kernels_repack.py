"""GGUF's affine blocks laid out anew, row by row: blocks of 32 weights -> bit planes and parameters, unchanged."""

from typing import Any

import numpy as np
from numba import njit, prange

from quant.kernel_cache import cached_kernel
from quant.kernels_decode import EXPONENTS, MINS, N_CODES, N_GROUPS, SCALES
from quant.kernels_pack import _put_codes
from quant.threads import use_torch_threads

_CHUNKS_PER_THREAD = 8
# (bytes of a block, bytes of its parameters, where its fifth bits are or -1, whether codes are int8)
_SHAPES = {
    "Q4_0": (18, 2, -1, False),
    "Q4_1": (20, 4, -1, False),
    "Q5_0": (22, 2, 2, False),
    "Q5_1": (24, 4, 4, False),
    "Q8_0": (34, 2, -1, True),
}


@njit
def _block_codes(block: Any, fifth: int, is_int8: bool, codes: Any) -> None:
    """One block's 32 codes."""
    if is_int8:
        for j in range(32):
            codes[j] = block[2 + j] ^ np.uint8(128)
        return
    nibbles = block[block.size - 16 :]
    for j in range(16):
        codes[j] = nibbles[j] & np.uint8(15)
    for j in range(16):
        codes[16 + j] = nibbles[j] >> np.uint8(4)
    if fifth >= 0:
        for i in range(4):
            byte = block[fifth + i]
            for j in range(8):
                codes[8 * i + j] |= ((byte >> np.uint8(j)) & np.uint8(1)) << np.uint8(4)


@cached_kernel(parallel=True, nogil=True)
def _repack(
    layout: Any,
    raw: Any,
    block_bytes: int,
    has_min: bool,
    fifth: int,
    is_int8: bool,
    row_start: int,
    n_chunks: int,
    buf8: Any,
    buf16: Any,
) -> int:
    n_rows = raw.shape[0]
    n_groups = layout[N_GROUPS]
    infinite = 0
    for chunk in prange(n_chunks):
        codes = np.empty(layout[N_CODES], np.uint8)
        found = 0
        for i in range(chunk * n_rows // n_chunks, (chunk + 1) * n_rows // n_chunks):
            row = row_start + i
            for g in range(n_groups):
                block = raw[i, g * block_bytes : (g + 1) * block_bytes]
                _block_codes(block, fifth, is_int8, codes[32 * g : 32 * g + 32])
                at = row * n_groups + g
                half = np.uint16(block[0]) | (np.uint16(block[1]) << np.uint16(8))
                found += (half & np.uint16(0x7C00)) == np.uint16(0x7C00)
                buf16[layout[SCALES] // 2 + at] = half
                if has_min:
                    half = np.uint16(block[2]) | (np.uint16(block[3]) << np.uint16(8))
                    found += (half & np.uint16(0x7C00)) == np.uint16(0x7C00)
                    buf16[layout[MINS] // 2 + at] = half
            buf8[layout[EXPONENTS] + row] = np.uint8(0)
            _put_codes(layout, codes, row, buf8)
        infinite += found
    return infinite


def repack_gguf(layout: Any, buffers: Any, raw: Any, ggml_type: str, row_start: int) -> int:
    """Write raw uint8 (n, bytes per row) of an affine GGUF type as rows row_start.. of a packed matrix.

    buffers: the matrix's buffer as uint8, uint16 and float32. Returns how many parameters are infinite or NaN.
    """
    block_bytes, param_bytes, fifth, is_int8 = _SHAPES[ggml_type]
    n_chunks = max(1, min(use_torch_threads() * _CHUNKS_PER_THREAD, raw.shape[0]))
    return int(
        _repack(
            layout,
            raw,
            block_bytes,
            param_bytes == 4,
            fifth,
            is_int8,
            row_start,
            n_chunks,
            buffers[0],
            buffers[1],
        )
    )
