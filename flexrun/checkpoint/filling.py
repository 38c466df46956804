"""Rows of checkpoint tensors into their places in a unit's run, straight or through row blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flexrun.checkpoint.rows import BLOCK_BYTES, RowReader, TransposedReader
from offload.units import TensorSpec, Unit
from offload.weights import TensorSlot, UnitLayout
from quant.formats import WeightFormat
from quant.pack import quantize_rows_into
from quant.packed import PackedTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Rows start..stop of a source, at dest_row of a plan's rows. heads: see TensorPart.unpermute_heads."""

    reader: RowReader
    start: int
    stop: int
    dest_row: int
    heads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlan:
    """How a run of rows of one tensor of a unit (often all of them) is stored and what it is made of."""

    spec: TensorSpec
    format: WeightFormat
    pieces: tuple[Piece, ...]
    transposed: bool

    @property
    def n_rows(self) -> int:
        return sum(piece.stop - piece.start for piece in self.pieces)


def fill_tensor(plan: TensorPlan, slot: TensorSlot, run: Tensor, method: str) -> None:
    """Write a plan's rows into their slot of a unit's run. method: the quantiser, should one be needed."""
    view = slot.view(run)
    if isinstance(view, PackedTensor):
        zero_gaps(view)
        _fill_packed(plan, view, method)
        return
    raw = run[slot.offset_bytes : slot.offset_bytes + slot.nbytes]
    if plan.transposed:
        reader = plan.pieces[0].reader
        assert isinstance(reader, TransposedReader)
        _fill_plain(reader.as_stored, 0, reader.width, 0, view.t(), raw)
        return
    row_nbytes = slot.nbytes // slot.shape[0]
    for piece in plan.pieces:
        begin, end = piece.dest_row, piece.dest_row + piece.stop - piece.start
        target_raw = raw[begin * row_nbytes : end * row_nbytes]
        _fill_plain(piece.reader, piece.start, piece.stop, piece.heads, view[begin:end], target_raw)


def check_run(what: str, nbytes: int, run: Tensor) -> None:
    """ValueError if the memory given for a unit or table is not of its size."""
    if run.dtype != torch.uint8 or run.numel() != nbytes:
        raise ValueError(f"{what} takes {nbytes} bytes (uint8), the run is {run.numel()} of {run.dtype}")


def slots_between_zeros(unit: Unit, layout: UnitLayout, run: Tensor) -> Iterator[TensorSlot]:
    """The slots of a unit in order, to be filled one by one; gaps between and after them become zero."""
    check_run(f"unit {unit.name}", layout.nbytes, run)
    end = 0
    for slot in layout.slots:
        run[end : slot.offset_bytes].zero_()
        end = slot.offset_bytes + slot.nbytes
        yield slot
    run[end:].zero_()


def table_slot(spec: TensorSpec, fmt: WeightFormat, run: Tensor) -> TensorSlot:
    """A whole table as a slot at the start of `run`. Raises ValueError for a run of another size."""
    nbytes = fmt.nbytes(spec.shape)
    check_run(f"table {spec.name}", nbytes, run)
    return TensorSlot(
        name=spec.name, shape=spec.shape, format=fmt, offset_bytes=0, nbytes=nbytes, is_linear=True
    )


def zero_gaps(packed: PackedTensor) -> None:
    """Zero the bytes between and after the parts of a packed tensor, so that equal tensors have equal bytes."""
    end = 0
    for part in packed.format.parts(packed.shape):
        packed.buffer[end : part.offset_bytes].zero_()
        end = part.offset_bytes + part.nbytes
    packed.buffer[end:].zero_()


def row_blocks(start: int, stop: int, row_nbytes: int) -> Iterable[tuple[int, int]]:
    """start..stop cut into ranges of rows that take at most BLOCK_BYTES together (one row at least)."""
    step = max(1, BLOCK_BYTES // max(1, row_nbytes))
    for first in range(start, stop, step):
        yield first, min(first + step, stop)


def _fill_plain(
    reader: RowReader, start: int, stop: int, heads: int, target: Tensor, target_raw: Tensor
) -> None:
    """Rows start..stop into target (rows, width) or (rows,); target_raw: the same memory as bytes."""
    native = reader.native
    straight = native is not None and native.is_plain and getattr(torch, native.plain_dtype) == target.dtype
    if straight and not heads and reader.where(start, stop) is not None:
        reader.read_where(start, stop, target_raw)
        return
    for first, last in row_blocks(start, stop, 4 * reader.width):
        target[first - start : last - start] = _values(reader, first, last, heads, target.dtype)


def _fill_packed(plan: TensorPlan, dest: PackedTensor, method: str) -> None:
    for piece in plan.pieces:
        reader, offset = piece.reader, piece.dest_row - piece.start
        as_is = reader.native == plan.format
        if as_is and plan.format.kind == "block" and not piece.heads:
            row_nbytes = dest.nbytes // dest.shape[0]
            begin, end = (piece.start + offset) * row_nbytes, (piece.stop + offset) * row_nbytes
            reader.read_where(piece.start, piece.stop, dest.buffer[begin:end])
            continue
        row_nbytes = plan.format.nbytes((1, reader.width)) if as_is else 4 * reader.width
        for first, last in row_blocks(piece.start, piece.stop, row_nbytes):
            if as_is:
                begin, end, chosen = first, last, None
                if piece.heads:
                    begin, end, chosen = _permuted_rows(reader.n_rows, piece.heads, first, last)
                reader.pack_into(dest, first + offset, begin, end, chosen)
            else:
                values = _values(reader, first, last, piece.heads, torch.float32)
                quantize_rows_into(dest, first + offset, values, method=method, name=reader.name)


def _values(reader: RowReader, start: int, stop: int, heads: int, dtype: torch.dtype) -> Tensor:
    if not heads:
        return reader.values(start, stop, dtype)
    first, last, chosen = _permuted_rows(reader.n_rows, heads, start, stop)
    return reader.values(first, last, dtype)[chosen]


def _permuted_rows(n_rows: int, heads: int, start: int, stop: int) -> tuple[int, int, Tensor]:
    """Which stored rows make up rows start..stop in their proper order: a range of whole heads, and the
    rows to take from it."""
    per_head = n_rows // heads
    rows = torch.arange(start, stop)
    head, within = rows // per_head, rows % per_head
    half = per_head // 2
    stored = head * per_head + (within % half) * 2 + within // half
    first, last = start // per_head * per_head, -(-stop // per_head) * per_head
    return first, last, stored - first
