"""Tensors of a checkpoint as rows of output features, whatever their container stores.

A reader gives any range of rows as values, or packed exactly as the checkpoint holds them. What a tensor can
be kept as is known from its header alone: `native` is the format that keeps it bit for bit (None if there is
none), `plain` the narrowest plain format that holds its values without loss.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from flexrun.checkpoint.base import CheckpointError, TensorInfo
from flexrun.checkpoint.reading import MAX_IO_BYTES, TORCH_DTYPES, read_dense, read_into, read_tensor
from quant.formats import WeightFormat, parse_format
from quant.native import gguf_format, pack_gguf, pack_gguf_rows_into
from quant.packed import PackedTensor

# How much of a tensor is held unpacked at a time while it is converted, as fp32.
BLOCK_BYTES = 32 << 20

_PLAIN_FORMATS = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
_WIDENED = {"F64": "f32", "F8_E4M3": "bf16", "F8_E5M2": "bf16"}


class FileRange(NamedTuple):
    """Bytes of a file."""

    file: Path
    offset_bytes: int
    nbytes: int


class RowReader(Protocol):
    """One tensor of a checkpoint: `n_rows` rows of `width` values (single elements for a vector, width 0).

    permutation: of the columns of a native format that is permuted, else None.
    quantized: its values are codes and parameters in the checkpoint, not numbers; stored_type names their kind.
    """

    name: str
    stored_type: str
    n_rows: int
    width: int
    plain: WeightFormat
    native: WeightFormat | None
    quantized: bool
    permutation: Tensor | None

    def values(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Rows start..stop as floating point: (rows, width), or (rows,) for a vector."""
        ...

    def pack_into(
        self, dest: PackedTensor, dest_row: int, start: int, stop: int, chosen: Tensor | None
    ) -> None:
        """Rows start..stop (of these `chosen`, if given) into dest, which has the native, packed format."""
        ...

    def where(self, start: int, stop: int) -> FileRange | None:
        """Where the rows lie in the file exactly as the native format stores them; None if they do not."""
        ...

    def read_where(self, start: int, stop: int, out: Tensor) -> None:
        """Read the bytes that `where` names into out (uint8, contiguous)."""
        ...


class PlainReader:
    """Floating-point numbers, row by row. Three dimensions count as one tall matrix."""

    quantized = False
    permutation: Tensor | None = None

    def __init__(self, info: TensorInfo) -> None:
        self._info = info if len(info.shape) < 3 else _flattened(info)
        self.name = info.name
        self.stored_type = info.dtype
        self.n_rows = self._info.n_rows
        self.width = self._info.shape[1] if len(self._info.shape) == 2 else 0
        self.plain = parse_format(_PLAIN_FORMATS.get(info.dtype) or _WIDENED[info.dtype])
        self.native = self.plain if info.dtype in _PLAIN_FORMATS else None

    def values(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        return read_dense(self._info, dtype, slice(start, stop))

    def pack_into(
        self, dest: PackedTensor, dest_row: int, start: int, stop: int, chosen: Tensor | None
    ) -> None:
        raise TypeError(f"tensor {self.name}: {self._info.dtype} is not packed")

    def where(self, start: int, stop: int) -> FileRange | None:
        row_nbytes = self._info.row_nbytes
        offset = self._info.offset_bytes + start * row_nbytes
        return FileRange(self._info.file, offset, (stop - start) * row_nbytes) if self.native else None

    def read_where(self, start: int, stop: int, out: Tensor) -> None:
        read_into(self._info, out, slice(start, stop))


class TransposedReader:
    """Floating-point numbers stored (in_features, out_features); rows are the output features."""

    quantized = False
    permutation: Tensor | None = None

    def __init__(self, info: TensorInfo) -> None:
        self._info = info
        self.name = info.name
        self.stored_type = info.dtype
        self.width, self.n_rows = info.shape
        self.plain = parse_format(_PLAIN_FORMATS.get(info.dtype) or _WIDENED[info.dtype])
        self.native = self.plain if info.dtype in _PLAIN_FORMATS else None
        self.as_stored = PlainReader(info)

    def values(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        return read_columns(self._info, start, stop).to(dtype).t().contiguous()

    def pack_into(
        self, dest: PackedTensor, dest_row: int, start: int, stop: int, chosen: Tensor | None
    ) -> None:
        raise TypeError(f"tensor {self.name}: {self._info.dtype} is not packed")

    def where(self, start: int, stop: int) -> FileRange | None:
        return None

    def read_where(self, start: int, stop: int, out: Tensor) -> None:
        raise TypeError(f"tensor {self.name}: its rows do not lie together")


class GgufReader:
    """A block-quantised matrix of a GGUF file. Types without a format of their own unpack to `unpacked`."""

    quantized = True
    permutation: Tensor | None = None

    def __init__(self, info: TensorInfo, unpacked: WeightFormat) -> None:
        self._info = info if len(info.shape) < 3 else _flattened(info)
        self.name = info.name
        self.stored_type = info.dtype
        self.n_rows, self.width = self._info.shape
        self.plain = unpacked
        self.native = gguf_format(info.dtype)

    def values(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        if self.native is not None:
            raw = read_tensor(self._info, slice(start, stop))
            return pack_gguf(raw, self._info.dtype, name=self.name).dequantize(
                dtype
            )  # the kernels are several times faster
        return read_dense(self._info, dtype, slice(start, stop))

    def pack_into(
        self, dest: PackedTensor, dest_row: int, start: int, stop: int, chosen: Tensor | None
    ) -> None:
        raw = read_tensor(self._info, slice(start, stop))
        raw = raw if chosen is None else raw.index_select(0, chosen)
        pack_gguf_rows_into(dest, dest_row, raw, self._info.dtype, name=self.name)

    def where(self, start: int, stop: int) -> FileRange | None:
        if self.native is None or self.native.kind != "block":
            return None
        row_nbytes = self._info.row_nbytes
        offset = self._info.offset_bytes + start * row_nbytes
        return FileRange(self._info.file, offset, (stop - start) * row_nbytes)

    def read_where(self, start: int, stop: int, out: Tensor) -> None:
        read_into(self._info, out, slice(start, stop))


def put_rows(dest: PackedTensor, dest_row: int, rows: PackedTensor) -> None:
    """Copy all rows of a packed tensor into another one of the same format and width."""
    n = rows.shape[0]
    for name, part in rows.to_parts().items():
        target = dest.part(name)
        if name == "permutation":
            target.copy_(part)
        else:
            target[dest_row : dest_row + n].copy_(part)


def open_rows(info: TensorInfo, *, transposed: bool, unpacked: WeightFormat) -> RowReader:
    """A reader of one stored tensor. transposed: it lies as (in_features, out_features).

    Raises CheckpointError for a type that holds no weights.
    """
    if info.is_block_quantized:
        if len(info.shape) < 2 or transposed:
            shape = "a vector" if len(info.shape) < 2 else "stored (in, out)"
            raise CheckpointError(
                f"{info.dtype} blocks of {shape} cannot be read as rows", file=info.file, tensor=info.name
            )
        return GgufReader(info, unpacked)
    if info.dtype not in _PLAIN_FORMATS and info.dtype not in _WIDENED:
        raise CheckpointError(
            "its type holds no weights",
            file=info.file,
            tensor=info.name,
            found=info.dtype,
            expected=f"one of {', '.join((*_PLAIN_FORMATS, *_WIDENED))}",
        )
    return TransposedReader(info) if transposed and len(info.shape) == 2 else PlainReader(info)


def read_columns(info: TensorInfo, start: int, stop: int) -> Tensor:
    """Columns start..stop of a matrix in its stored type, (rows, stop - start).

    All of it is read, in slabs of rows: files have no other direction.
    """
    out = torch.empty((info.n_rows, stop - start), dtype=TORCH_DTYPES[info.dtype])
    step = max(1, MAX_IO_BYTES // max(1, info.row_nbytes))
    for first in range(0, info.n_rows, step):
        last = min(first + step, info.n_rows)
        out[first:last] = read_tensor(info, slice(first, last))[:, start:stop]
    return out


def _flattened(info: TensorInfo) -> TensorInfo:
    *outer, width = info.shape
    n_rows = 1
    for size in outer:
        n_rows *= size
    return dataclasses.replace(info, shape=(n_rows, width))
