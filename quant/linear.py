"""y = x W^T + b for weights in any format: the one place that decides how a packed weight meets its inputs.

Few tokens: each packed row is unpacked into the first-level cache and multiplied there; memory is read at the
packed size. Many tokens: the weight is unpacked to the compute dtype once, into a scratch, and multiplied by the
BLAS. `crossover_tokens` says where the second becomes faster; the figures come from
experiments/kernel_speed.py. Cutting the weight into pieces that stay in the cache was tried and is slower: the
BLAS packs its operands anew for every piece. With AMX our own product (quant/amx.py) does so for any number of tokens.

Importing this module imports torch, not numba.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quant import amx, pointwise
from quant.formats import WeightFormat
from quant.kernel_choice import has_amx, has_native_bf16, has_numba
from quant.packed import PackedTensor, StackedTensor, write_rows

# Largest number of tokens for which the few-token kernel is the faster, on two cores. With AVX2, at 64 tokens it won
# for every format by 20 to 25%, at 96 it was level, at 128 it lost by 2 to 12%. AVX512 doubles the BLAS's rate and
# not the kernel's: at 16 tokens it won by a fifth, at 24 it was level, at 32 it lost by a tenth.
_CROSSOVER_TOKENS_F32 = 80
_CROSSOVER_TOKENS_F32_AVX512 = 24
# bf16 without instructions for it: torch multiplies at a seventh of the speed of fp32, at any number of tokens.
_CROSSOVER_TOKENS_EMULATED_BF16 = 1024
# bf16 with instructions for it: products of up to 64 tokens take as long as reading the weight, so unpacking decides.
# The kernel won at 4 tokens by 15 to 35%, at 8 it was level.
_CROSSOVER_TOKENS_NATIVE_BF16 = 6
# With AMX `quant.amx` unpacks into the second-level cache and multiplies there, faster for any number of tokens unless
# rows are short.
_ALWAYS = 1 << 40


def crossover_tokens(
    format: WeightFormat, dtype: torch.dtype = torch.float32, width: int = amx.SHORT_ROWS
) -> int:
    """Tokens up to which `linear` multiplies with the packed weight as it is; 0 for plain formats.

    Beyond them it pays to unpack the weight once, for a whole pass, and multiply by the BLAS. 0 too without numba.
    width: length of the weight's rows.
    """
    if format.is_plain or not has_numba():
        return 0
    if dtype == torch.bfloat16 and has_amx():
        return _ALWAYS if width >= amx.SHORT_ROWS else amx.FEW_TOKENS
    if dtype == torch.bfloat16:
        return _CROSSOVER_TOKENS_NATIVE_BF16 if has_native_bf16() else _CROSSOVER_TOKENS_EMULATED_BF16
    if torch.backends.cpu.get_cpu_capability() == "AVX512":
        return _CROSSOVER_TOKENS_F32_AVX512
    return _CROSSOVER_TOKENS_F32


def packed_row_len(dtype: torch.dtype, device_type: str) -> int | None:
    """Length from which on rows of packed weights are multiplied as they are, however many tokens there are.

    None: they are unpacked for many tokens, whatever their length.
    """
    is_never_unpacked = device_type == "cpu" and dtype == torch.bfloat16 and has_amx()
    return amx.SHORT_ROWS if is_never_unpacked else None


def linear(
    x: Tensor,
    weight: Tensor | PackedTensor | StackedTensor,
    bias: Tensor | None = None,
    *,
    scratch: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """x (tokens, in) times weight (out, in) transposed, plus bias (out,): (tokens, out) in x's dtype.

    weight is a tensor of any float dtype, a PackedTensor or a StackedTensor, on x's device; each part of a stacked
    one is multiplied as it is stored, into its own columns of the result. scratch: flat, contiguous, of x's
    dtype, at least `in` elements, best out * in; the unpacked weight lives there, piece by piece if it must
    (allocated if None). out: where the result goes, (tokens, out) of x's dtype; its rows may be further apart than
    they are long. On the CPU a token's result in the few-token kernel does not depend on the others.
    Raises ValueError for shapes, devices, a scratch or an out that do not fit.
    """
    if isinstance(weight, PackedTensor) and weight.format.is_plain:
        weight = weight.part("data")
    if x.dim() != 2 or len(weight.shape) != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"linear needs x (tokens, in) and weight (out, in) of one width, got {tuple(x.shape)} and "
            f"{tuple(weight.shape)}"
        )
    if x.device != weight.device:
        raise ValueError(f"x is on {x.device}, the weight on {weight.device}; bring them to one device")
    if out is not None and (
        out.shape != (x.shape[0], weight.shape[0]) or out.dtype != x.dtype or out.device != x.device
    ):
        raise ValueError(
            f"out must be {(x.shape[0], weight.shape[0])}, {x.dtype}, on {x.device}; got {tuple(out.shape)}, "
            f"{out.dtype}, on {out.device}"
        )
    if isinstance(weight, StackedTensor):
        out = x.new_empty(x.shape[0], weight.shape[0]) if out is None else out
        for start, stop, part in weight.ranges():
            cut = None if bias is None else bias[start:stop]
            linear(x, part, cut, scratch=scratch, out=out[:, start:stop])
        return out
    if isinstance(weight, Tensor):
        if weight.dtype == x.dtype:
            return _multiply(x, weight, bias, out)
        return _unpack_and_multiply(x, weight, bias, scratch, out)
    permutation = weight.permutation
    if permutation is not None:
        # The columns of x are put in packed order, so that neither path has to reorder the weight.
        x = x.index_select(1, permutation.to(torch.int64))
    if x.dtype == torch.bfloat16 and x.stride(-1) != 1:
        x = x.contiguous()
    if amx.can_multiply(x, weight) and (out is None or out.stride(-1) == 1):
        return amx.multiply(x, weight, bias, out)
    most = crossover_tokens(weight.format, x.dtype, weight.shape[1])
    if x.device.type == "cpu" and 0 < x.shape[0] <= most:
        return _few_tokens(x, weight, bias, out)
    return _unpack_and_multiply(x, weight, bias, scratch, out)


def gated_linear(
    x: Tensor, weight: Tensor | PackedTensor | StackedTensor, bias: Tensor | None, activation: str
) -> Tensor:
    """activation(gate) * up, (tokens, out / 2), of `linear`'s result, whose first half are the gates.

    activation: a name in `quant.pointwise.ACTIVATIONS`. Fused where a kernel can: nothing is rounded in between.
    """
    is_even = weight.shape[0] % 2 == 0
    taken = _for_tiles(x, weight) if activation in pointwise.GATES and is_even else None
    if taken is not None:
        return amx.multiply(*taken, bias, None, mode=activation)
    return pointwise.gate(linear(x, weight, bias), activation)


def add_linear(
    total: Tensor, x: Tensor, weight: Tensor | PackedTensor | StackedTensor, bias: Tensor | None
) -> Tensor:
    """total (tokens, out) += `linear`'s result, in place; rounded once where a kernel can do it in one walk."""
    taken = _for_tiles(x, weight)
    fits = total.shape == (x.shape[0], weight.shape[0]) and total.device == x.device
    if taken is not None and fits and total.dtype == x.dtype and total.stride(-1) == 1:
        return amx.multiply(*taken, bias, total, mode="add")
    return total.add_(linear(x, weight, bias))


def _for_tiles(
    x: Tensor, weight: Tensor | PackedTensor | StackedTensor
) -> tuple[Tensor, Tensor | PackedTensor] | None:
    """x and weight as `amx.multiply` takes them, or None if it does not."""
    if isinstance(weight, StackedTensor):
        return None
    if isinstance(weight, PackedTensor) and weight.format.is_plain:
        weight = weight.part("data")
    if x.shape[1] != weight.shape[1] or x.device != weight.device or not amx.can_multiply(x, weight):
        return None
    if isinstance(weight, PackedTensor) and weight.permutation is not None:
        x = x.index_select(1, weight.permutation.to(torch.int64))
    return x, weight


def unpack(
    weight: Tensor | PackedTensor | StackedTensor, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """The values of a weight in dtype, in out if given (contiguous, of dtype, with as many elements, any shape).

    Without out, a tensor that is of dtype already is returned as it is.
    """
    if isinstance(weight, StackedTensor):
        return weight.dequantize(dtype, out)
    if isinstance(weight, PackedTensor):
        if weight.format.is_plain:
            weight = weight.part("data")
        else:
            return weight.dequantize(dtype, out)
    if out is None:
        return weight.to(dtype)
    if out.dtype != dtype or out.numel() != weight.numel() or not out.is_contiguous():
        raise ValueError(
            f"out must be contiguous, {dtype}, with {weight.numel()} elements; got {out.dtype} of shape "
            f"{tuple(out.shape)}, contiguous: {out.is_contiguous()}"
        )
    if pointwise.can_convert(weight, out):
        return pointwise.convert(weight, out).view(weight.shape)
    return out.view(weight.shape).copy_(weight)


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
    """A weight of x's dtype. The BLAS takes a row stride for its result: columns of a wider out need no copy."""
    if amx.can_multiply(x, weight) and (out is None or out.stride(-1) == 1):
        return amx.multiply(x, weight, bias, out)
    if out is None:
        return F.linear(x, weight, bias)
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias.to(x.dtype), x, weight.t(), out=out)


def _few_tokens(x: Tensor, weight: PackedTensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
    from quant.kernels_decode import layout_of
    from quant.kernels_numba import few_tokens

    rows, cols = weight.shape
    # Few numbers beside the weight's: a kernel of its own for results with strides would not pay.
    y = torch.empty((x.shape[0], rows), dtype=torch.float32)
    if y.numel():
        few_tokens(
            layout_of(weight.format, (rows, cols)),
            weight.buffer.data_ptr(),
            x.detach().to(torch.float32).contiguous().numpy(),
            y.numpy(),
        )
    if bias is not None:
        y += bias
    return y.to(x.dtype) if out is None else out.copy_(y)


def _unpack_and_multiply(
    x: Tensor,
    weight: Tensor | PackedTensor,
    bias: Tensor | None,
    scratch: Tensor | None,
    out: Tensor | None = None,
) -> Tensor:
    """Unpack to the scratch as many rows as fit, multiply, go on. Packed columns stay in packed order."""
    rows, cols = weight.shape
    if x.shape[0] == 0 or rows == 0 or cols == 0:
        out = x.new_empty(x.shape[0], rows) if out is None else out
        return out.zero_() if bias is None else out.copy_(bias.expand(x.shape[0], rows))
    if scratch is None:
        scratch = torch.empty(rows * cols, dtype=x.dtype, device=x.device)
    if scratch.dtype != x.dtype or scratch.device != x.device or scratch.dim() != 1 or scratch.numel() < cols:
        raise ValueError(
            f"scratch must be flat, {x.dtype}, on {x.device}, with at least one row of {cols} elements; got "
            f"{scratch.dtype} on {scratch.device} of shape {tuple(scratch.shape)}"
        )
    step = min(rows, scratch.numel() // cols)
    if step < rows and out is None:
        out = x.new_empty(x.shape[0], rows)
    product = out
    for start in range(0, rows, step):
        end = min(start + step, rows)
        piece = scratch[: (end - start) * cols].view(end - start, cols)
        if isinstance(weight, PackedTensor):
            write_rows(weight, piece, row_start=start, in_order=False)
        else:
            piece.copy_(weight[start:end])
        cut = None if bias is None else bias[start:end].to(x.dtype)
        product = _multiply(x, piece, cut, None if out is None else out[:, start:end])
    assert product is not None
    return product if out is None else out
