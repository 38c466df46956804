"""Norms, rotary positions and gated activations in one walk over memory, where compiled CPU kernels can do them.

Each function answers for tensors that `fits` admits, `gate` for all. Importing this module imports torch, not numba.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quant.kernel_choice import has_numba

_TAGS = {torch.float32: np.float32(0), torch.bfloat16: np.uint16(0)}
# By their names in model configurations.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}
# Those of gates that the kernels know, by the kernels' numbers.
GATES = {"silu": 0, "gelu_tanh": 1}
# Chunks of rows per thread: a thread that is late holds up the others for less.
_CHUNKS_PER_THREAD = 2


def fits(x: Tensor) -> bool:
    """Whether these kernels take x: (rows, size) or (tokens, heads, size), fp32 or bf16 on the CPU, in whole rows."""
    return (
        x.device.type == "cpu"
        and x.dtype in _TAGS
        and x.dim() in (2, 3)
        and x.stride(-1) == 1
        and has_numba()
    )


def norm(x: Tensor, scale: Tensor | None, bias: Tensor | None, *, eps: float, centered: bool) -> Tensor:
    """RMS norm, or layer norm if centered, over the last dimension: contiguous, of x's shape and dtype.

    scale, bias: contiguous fp32 (size,), or None. Sums are fp32; the result is rounded once.
    """
    from quant.kernels_pointwise import norm_rows

    out, rows = _like(x), _rows(x)
    if out.numel():
        norm_rows(
            *rows,
            out.data_ptr(),
            0 if scale is None else scale.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            np.float32(eps),
            centered,
            _TAGS[x.dtype],
            _n_chunks(rows[3] * rows[4]),
        )
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn pairs (i, i + half) of each head: x (tokens, heads, head_dim) -> contiguous, of its shape and dtype.

    cos, sin: contiguous fp32 (tokens, 1, half), half at most head_dim / 2; entries from 2 * half on are copied.
    """
    from quant.kernels_pointwise import rotate_heads

    out, rows = _like(x), _rows(x)
    if out.numel():
        rotate_heads(
            *rows,
            cos.shape[-1],
            cos.data_ptr(),
            sin.data_ptr(),
            out.data_ptr(),
            _TAGS[x.dtype],
            _n_chunks(x.shape[0]),
        )
    return out


def gate(gate_up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up of gate_up (tokens, 2 * size), the gate first: contiguous (tokens, size).

    activation: a name in ACTIVATIONS. Any device and dtype; where no kernel does it, torch's operations do.
    """
    if activation not in GATES or not fits(gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return ACTIVATIONS[activation](gate).mul_(up)
    from quant.kernels_pointwise import gate_rows

    n_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((n_rows, size), dtype=gate_up.dtype)
    if out.numel():
        gate_rows(
            gate_up.data_ptr(),
            gate_up.stride(0) * gate_up.element_size(),
            n_rows,
            size,
            out.data_ptr(),
            GATES[activation],
            _TAGS[gate_up.dtype],
            _n_chunks(n_rows),
        )
    return out


def place(x: Tensor, tokens: Any, targets: Any, head_stride: int) -> None:
    """Copy heads of x (tokens, heads, size): those of tokens[i] to address targets[i] and on, head_stride bytes apart.

    tokens, targets: int64 numpy arrays; the caller owns the memory there.
    """
    from quant.kernels_pointwise import place_heads

    if len(tokens):
        item = x.element_size()
        place_heads(
            x.data_ptr(),
            x.stride(0) * item,
            x.stride(1) * item,
            tokens,
            targets,
            x.shape[1],
            head_stride,
            x.shape[2] * item,
            _n_chunks(len(tokens)),
        )


def can_convert(x: Tensor, out: Tensor) -> bool:
    """Whether `convert` takes these: fp16 to bf16, for which torch needs four times as long."""
    dtypes = x.dtype == torch.float16 and out.dtype == torch.bfloat16
    on_cpu = x.device.type == "cpu" and x.is_contiguous() and out.is_contiguous()
    return dtypes and on_cpu and has_numba()


def convert(x: Tensor, out: Tensor) -> Tensor:
    """out = x in out's type, of as many elements; what `can_convert` allows."""
    from quant.kernels_pointwise import convert

    if out.numel():
        tags = (np.int16(0), np.uint16(0))
        convert(x.data_ptr(), out.data_ptr(), out.numel(), *tags, _n_chunks(-(-out.numel() // 4096)))
    return out


def _like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype)


def _rows(x: Tensor) -> tuple[int, int, int, int, int, int]:
    """Address, strides in bytes of the outer and inner dimension, their lengths, and the size of a row."""
    item = x.element_size()
    if x.dim() == 2:
        return x.data_ptr(), x.stride(0) * item, 0, x.shape[0], 1, x.shape[1]
    return x.data_ptr(), x.stride(0) * item, x.stride(1) * item, x.shape[0], x.shape[1], x.shape[2]


def _n_chunks(n_rows: int) -> Any:
    from quant.threads import use_torch_threads

    return max(1, min(use_torch_threads() * _CHUNKS_PER_THREAD, n_rows))
