"""Packing weights: float tensors -> PackedTensor, whole or as rows stream past.

`minmax` is FlexGen's quantiser: the levels span each group's range. `search`, the default, looks for the scale and
minimum of least squared error, optionally weighted by how large each input tends to be (the second moments
of a layer's inputs over a calibration batch); it is never worse than min-max in any group. See
`quant.kernels_pack` for the method and `WeightFormat.max_error` for the bound that min-max keeps.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quant.formats import WeightFormat, parse_format
from quant.packed import PackedTensor, empty_packed, numpy_views

METHODS = ("search", "minmax")
# fp32 rows held at a time while a tensor is packed.
ROW_BLOCK_BYTES = 32 * 2**20
# Affine formats refuse larger magnitudes: a group's range, twice as large, must stay finite in fp32.
MAX_ABS_VALUE = 2.0**126


def quantize(
    weight: Tensor,
    format: WeightFormat | str,
    *,
    method: str = "search",
    importance: Tensor | None = None,
    name: str = "",
) -> PackedTensor:
    """Pack weight (rows, cols), any float dtype, strides and device, into a CPU PackedTensor.

    importance: (cols,), non-negative, weighs the squared error of each column in the search. name appears in
    errors. Works in row blocks of at most ROW_BLOCK_BYTES of fp32. Raises ValueError for NaN or infinite
    values, for a weight that the format cannot hold, an unknown method or a bad importance.
    """
    fmt = parse_format(format) if isinstance(format, str) else format
    packed = empty_packed(fmt, tuple(weight.shape))
    quantize_rows_into(packed, 0, weight, method=method, importance=importance, name=name)
    return packed


def quantize_rows_into(
    packed: PackedTensor,
    row_start: int,
    rows: Tensor,
    *,
    method: str = "search",
    importance: Tensor | None = None,
    name: str = "",
) -> None:
    """Pack rows (n, cols) as rows row_start..row_start+n of packed, in place; other rows are left alone.

    Packing a tensor in pieces gives the same bytes as packing it whole. Arguments and errors as for `quantize`.
    """
    fmt = packed.format
    label = f"tensor {name!r}" if name else "the tensor"
    if method not in METHODS:
        raise ValueError(f"unknown quantiser {method!r}; use one of {', '.join(METHODS)}")
    if fmt.kind == "block" or fmt.permuted:
        raise ValueError(
            f"{label}: {fmt} only holds weights that come in it; pack to an affine format such as int4-g64"
        )
    if not rows.is_floating_point() or rows.shape[1:] != packed.shape[1:] or rows.dim() != len(packed.shape):
        raise ValueError(
            f"{label}: rows of shape {tuple(rows.shape)} and {rows.dtype} do not fit a {fmt} tensor of shape "
            f"{packed.shape}; give floating-point rows of its width"
        )
    if rows.dim() == 0:
        raise ValueError(f"{label}: a scalar cannot be packed")
    n = rows.shape[0]
    if not 0 <= row_start <= packed.shape[0] - n:
        raise ValueError(f"{label}: rows {row_start}..{row_start + n} are not within 0..{packed.shape[0]}")
    if packed.device.type != "cpu":
        raise ValueError(f"{label}: packing writes to the CPU, the buffer is on {packed.device}")
    weights = _check_importance(importance, packed, label)
    row_bytes = max(4 * rows[:1].numel(), 1)
    step = max(ROW_BLOCK_BYTES // row_bytes, 1)
    for first in range(0, n, step):
        block = rows[first : first + step].to("cpu", torch.float32)
        if block.numel():
            _check_values(block, math.inf if fmt.is_plain else MAX_ABS_VALUE, label, row_start + first)
            _pack_block(packed, row_start + first, block.contiguous(), weights, method)
            if fmt.is_plain:  # rounding to a shorter type may overflow
                stored = packed.part("data")[row_start + first : row_start + first + block.shape[0]]
                _check_values(stored, math.inf, label, row_start + first)


def _pack_block(packed: PackedTensor, row: int, block: Tensor, weights: Tensor, method: str) -> None:
    if packed.format.is_plain:
        packed.part("data")[row : row + block.shape[0]].copy_(block)
        return
    from quant.kernels_decode import layout_of
    from quant.kernels_pack import quantize_rows

    quantize_rows(
        layout_of(packed.format, packed.shape),
        numpy_views(packed),
        block.detach().numpy(),
        weights.numpy(),
        packed.format.top_code,
        row,
        method == "search",
    )


def _check_values(block: Tensor, limit: float, label: str, row: int) -> None:
    """Refuse NaN and magnitudes above limit (infinity: above the largest finite number)."""
    low, high = torch.aminmax(block)
    if (
        bool(torch.isfinite(low))
        and bool(torch.isfinite(high))
        and -limit <= low.item()
        and high.item() <= limit
    ):
        return
    bad = ~torch.isfinite(block) | (block.abs() > limit)
    where = torch.nonzero(bad)[0].tolist()
    value = block[tuple(where)].item()
    where[0] += row
    raise ValueError(
        f"{label} holds {value} at {tuple(where)} as it would be stored; only finite values up to {limit:.4g} can be "
        "packed. Check the checkpoint's file, or keep the tensor in f32"
    )


def _check_importance(importance: Tensor | None, packed: PackedTensor, label: str) -> Tensor:
    if importance is None:
        return torch.empty(0)
    weights = importance.detach().to("cpu", torch.float32).contiguous()
    if len(packed.shape) != 2 or tuple(weights.shape) != packed.shape[1:]:
        raise ValueError(
            f"{label}: importance must have one number per column of {packed.shape}, its shape is "
            f"{tuple(weights.shape)}"
        )
    if not bool(torch.isfinite(weights).all()) or bool((weights < 0).any()):
        raise ValueError(f"{label}: importance must be finite and not negative")
    # The search sums in fp32: keep the weights near one.
    return weights / weights.mean().clamp_min(1e-30)
