"""Products by AMX: sizes, addresses and working memory behind the kernels of `quant.kernels_amx`.

Importing this module imports torch, not numba.
"""

from __future__ import annotations

import threading

import numpy as np
import torch
from torch import Tensor

from quant.kernel_choice import has_amx
from quant.packed import PackedTensor
from quant.pointwise import GATES

_NO_LAYOUT = np.empty(0, np.int64)
_PANEL_STEP = 64  # rows: the kernel takes two or four tiles of them at once
_PANEL_BYTES = 1 << 18
# Beyond this many numbers tokens come from the third-level cache for every panel, so panels are larger, for all of
# the second-level one's 2 MiB.
_FAR_TOKENS = 1 << 18
_FAR_PANEL_BYTES = 1 << 20
_MOST_PANEL_ROWS = 256
# With rows of 576 and from 512 tokens on torch's product was up to 1.5 times as fast, unpacking included; with rows of
# 1,536 and more ours was level or faster for any number of tokens, without counting what is fused.
FEW_TOKENS = 384
SHORT_ROWS = 1024


class _Local(threading.local):
    """A thread's working memory, kept from product to product."""

    work = torch.empty(0, dtype=torch.uint8)


_LOCAL = _Local()


def workspace(nbytes: int) -> Tensor:
    """This thread's working memory, of at least so many bytes.

    Memory of this size, taken and given back between the results of every layer, made the C library's heap grow by
    hundreds of megabytes in one process of three.
    """
    if _LOCAL.work.numel() < nbytes:
        _LOCAL.work = torch.empty(0, dtype=torch.uint8)  # given back before more is taken
        _LOCAL.work = torch.empty(nbytes, dtype=torch.uint8)
    return _LOCAL.work


def can_multiply(x: Tensor, weight: Tensor | PackedTensor) -> bool:
    """Whether `multiply` takes these and is the faster: bf16 tokens on the CPU, weights bf16 or packed."""
    if x.dtype != torch.bfloat16 or x.device.type != "cpu" or x.stride(-1) != 1 or not has_amx():
        return False
    if isinstance(weight, Tensor) and (weight.dtype != torch.bfloat16 or weight.stride(-1) != 1):
        return False
    pays = x.shape[0] <= FEW_TOKENS or x.shape[1] >= SHORT_ROWS
    return pays and min(*x.shape, weight.shape[0]) > 0


def multiply(
    x: Tensor,
    weight: Tensor | PackedTensor,
    bias: Tensor | None,
    out: Tensor | None,
    *,
    mode: str = "write",
) -> Tensor:
    """x (tokens, in) times weight (out, in) transposed, plus bias (out,): what `can_multiply` allows.

    mode: a name in `kernels_amx.MODES`; "write" to out, (tokens, out), if given, "add" to it, or for the name of an
    activation write activation(first half of the columns) * second half, (tokens, out / 2).
    Columns of x are in packed order. Sums are fp32 and rounded once; a token's result does not depend on the others.
    Working memory: x once more, and for each thread a panel of the weight in bf16 of about 1 MiB at most, unless
    64 rows need more; kept for the next product.
    """
    if not has_amx():  # without the system's permission the first tile would end the process
        raise RuntimeError("this processor, system or build has no AMX; ask can_multiply first")
    from quant import kernels_amx, kernels_amx_simd
    from quant.kernels_decode import layout_of
    from quant.threads import use_torch_threads

    n_tokens, n_cols = x.shape
    n_rows = weight.shape[0]
    gates = mode in GATES
    if gates and n_rows % 2:
        raise ValueError(f"gates and ups are as many rows each, got {n_rows} rows together")
    shape = (n_tokens, n_rows // 2 if gates else n_rows)
    if out is None:
        out = x.new_empty(shape)
    if out.shape != shape or out.dtype != x.dtype or out.device != x.device or out.stride(-1) != 1:
        raise ValueError(
            f"out must be {shape}, {x.dtype}, in whole rows on {x.device}; got {tuple(out.shape)}, {out.dtype}, "
            f"strides {out.stride()}, on {out.device}"
        )
    if weight.device != x.device or weight.shape[1] != n_cols:
        raise ValueError(
            f"x {tuple(x.shape)} on {x.device} and weight {tuple(weight.shape)} on {weight.device} do not fit"
        )
    if bias is not None and (bias.shape != (n_rows,) or bias.device != x.device):
        raise ValueError(f"bias must be ({n_rows},) on {x.device}, got {tuple(bias.shape)} on {bias.device}")
    if isinstance(weight, PackedTensor):
        layout = layout_of(weight.format, (n_rows, n_cols))
        data, stride = weight.buffer.data_ptr(), 0
    else:
        layout, data, stride = _NO_LAYOUT, weight.data_ptr(), weight.stride(0) * 2
    biases = None if bias is None else bias.to(torch.float32).contiguous()

    n_threads = use_torch_threads()
    n_steps = -(-n_cols // 32)
    row_bytes = (n_steps + 1) * 64
    n_tiles = -(-n_tokens // 16) * n_steps
    are_far = n_tokens * n_cols > _FAR_TOKENS
    # Tiles are loaded from where the weight lies if that is not slower than copying them first.
    is_direct = isinstance(weight, Tensor) and data % 64 == 0 and stride % 64 == 0 and n_cols % 32 == 0
    panel_bytes = _FAR_PANEL_BYTES if are_far else _PANEL_BYTES
    panel_rows = min(panel_bytes // row_bytes, _MOST_PANEL_ROWS, -(-n_rows // n_threads))
    panel_rows = max(1, round(panel_rows / _PANEL_STEP)) * _PANEL_STEP
    workspace_step = panel_rows * row_bytes + 2 * kernels_amx.SQUARE
    tiles_nbytes = n_tiles * kernels_amx_simd.TILE
    work = workspace(tiles_nbytes + n_threads * workspace_step)
    tiles = work.data_ptr()
    n_chunks = max(1, min(4 * n_threads, n_tiles // 16))
    kernels_amx.lay_out_tokens(x.data_ptr(), x.stride(0) * 2, n_tokens, n_cols, tiles, n_chunks)
    kernels_amx.multiply(
        layout,
        data,
        stride,
        n_rows,
        n_cols,
        tiles,
        n_tokens,
        0 if biases is None else biases.data_ptr(),
        out.data_ptr(),
        out.stride(0) * 2,
        kernels_amx.MODES[mode],
        panel_rows,
        is_direct,
        are_far,
        kernels_amx.CONFIGURATION,
        tiles + tiles_nbytes,
        workspace_step,
        n_threads,
    )
    return out
