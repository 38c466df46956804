"""The weight store: units at home on a tier, streamed through rings of slots to the compute device.

A unit's tensors lie in one run of bytes, each at a multiple of 64 (`UnitLayout`), the same in memory, in a
ring slot and in a packed file; what a unit's forward receives are views of that run. A linear tensor whose parts
are stored in different formats takes a slot for each run of rows in one format, and stays so. Formats stay packed
until they are on the compute device. There, linear tensors whose stored format is not the compute type are
unpacked once per pass into one scratch buffer where many tokens use them, and multiplied packed where few do.

Tables (embeddings) are gathered row by row where they rest: from memory, from the head slices of a tied model
wherever those are at home, or row by row from disk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from offload.device import Device
from offload.disk import DiskFile, DiskPool, read_extents
from offload.disk import Extent as FileExtent
from offload.memory import Arena, aligned_bytes
from offload.units import TensorSpec, Unit, Weights
from policy.tiers import Tier
from quant.formats import WeightFormat, parse_format
from quant.linear import crossover_tokens, packed_row_len, unpack
from quant.packed import PackedTensor, StackedTensor

TENSOR_ALIGN_BYTES = 64
UNIT_ALIGN_BYTES = 4096

DTYPE_FORMATS = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


def align_up(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple


RowRuns: TypeAlias = tuple[tuple[int, WeightFormat], ...]
"""How the rows of a matrix are stored, from the first on: (number of rows, their format) of each run."""

StoredAs: TypeAlias = WeightFormat | RowRuns
"""How a tensor is stored: in one format, or in several runs of rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSlot:
    """Where a tensor of a unit, or a run of its rows in one format, lies in the unit's bytes.

    shape: of the rows that lie here; row_start: the first of them within the tensor.
    transposed: a plain linear tensor stored (in_features, out_features), as its checkpoint has it.
    """

    name: str
    shape: tuple[int, ...]
    format: WeightFormat
    offset_bytes: int
    nbytes: int
    is_linear: bool
    transposed: bool = False
    row_start: int = 0

    def view(self, run: Tensor) -> Tensor | PackedTensor:
        """The rows inside the unit's run of bytes (uint8), without a copy."""
        raw = run[self.offset_bytes : self.offset_bytes + self.nbytes]
        if not self.format.is_plain:
            return PackedTensor(self.format, (self.shape[0], self.shape[1]), raw)
        values = raw.view(getattr(torch, self.format.plain_dtype))
        return values.view(self.shape[::-1]).t() if self.transposed else values.view(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitLayout:
    """All tensors of a unit but its tables, in one run of nbytes; slots of one tensor lie one after the other.

    Raises ValueError if the slots of a tensor are not its rows in order, from the first on.
    """

    slots: tuple[TensorSlot, ...]
    nbytes: int

    def __post_init__(self) -> None:
        for name, slots in self.tensors.items():
            row = 0
            for slot in slots:
                alike = slot.shape[1:] == slots[0].shape[1:] and slot.is_linear == slots[0].is_linear
                if slot.row_start != row or not alike or (len(slots) > 1 and not slot.is_linear):
                    raise ValueError(
                        f"tensor {name} is in pieces that do not make up a matrix: rows from {slot.row_start} of "
                        f"shape {slot.shape} follow {row} rows of shape {slots[0].shape}"
                    )
                row += slot.shape[0]

    @property
    def tensors(self) -> dict[str, tuple[TensorSlot, ...]]:
        """Tensor name -> its slots: one for each run of rows in one format, in order."""
        found: dict[str, tuple[TensorSlot, ...]] = {}
        for slot in self.slots:
            found[slot.name] = (*found.get(slot.name, ()), slot)
        return found

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Tensor name -> shape of the whole tensor."""
        return {
            name: (sum(slot.shape[0] for slot in slots), *slots[0].shape[1:])
            if len(slots) > 1
            else slots[0].shape
            for name, slots in self.tensors.items()
        }

    @property
    def linear_shapes(self) -> tuple[tuple[int, int], ...]:
        """(out_features, in_features) of the linear tensors."""
        shapes = self.shapes
        return tuple(
            (shapes[name][0], shapes[name][1]) for name, slots in self.tensors.items() if slots[0].is_linear
        )

    @property
    def stored_as(self) -> dict[str, StoredAs]:
        """Tensor name -> its format, or its runs of rows."""
        return {
            name: slots[0].format
            if len(slots) == 1
            else tuple((slot.shape[0], slot.format) for slot in slots)
            for name, slots in self.tensors.items()
        }

    def views(self, run: Tensor) -> dict[str, Tensor | PackedTensor | StackedTensor]:
        """All tensors inside the unit's run of bytes (uint8), without a copy."""
        return {name: joined([slot.view(run) for slot in slots]) for name, slots in self.tensors.items()}


def joined(parts: Sequence[Tensor | PackedTensor]) -> Tensor | PackedTensor | StackedTensor:
    """Runs of rows as one weight: the run itself where there is only one."""
    return parts[0] if len(parts) == 1 else StackedTensor(tuple(parts))


def unit_layout(
    specs: Sequence[TensorSpec],
    formats: Mapping[str, StoredAs],
    transposed: frozenset[str] = frozenset(),
) -> UnitLayout:
    """Lay a unit's tensors out in order: formats by tensor name; `transposed` names stay (in, out)."""
    slots: list[TensorSlot] = []
    end_bytes = 0
    for spec in specs:
        if spec.kind == "rows":
            continue
        stored = formats[spec.name]
        runs = stored if isinstance(stored, tuple) else ((spec.shape[0], stored),)
        row = 0
        for n_rows, fmt in runs:
            shape = (n_rows, *spec.shape[1:])
            nbytes = fmt.nbytes(shape)
            slots.append(
                TensorSlot(
                    name=spec.name,
                    shape=shape,
                    format=fmt,
                    offset_bytes=end_bytes,
                    nbytes=nbytes,
                    is_linear=spec.kind == "linear",
                    transposed=spec.name in transposed,
                    row_start=row,
                )
            )
            row += n_rows
            end_bytes = align_up(end_bytes + nbytes, TENSOR_ALIGN_BYTES)
        if row != spec.shape[0]:
            raise ValueError(f"{spec.name} has {spec.shape[0]} rows, its formats are given for {row}")
    return UnitLayout(slots=tuple(slots), nbytes=align_up(end_bytes, UNIT_ALIGN_BYTES))


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Bytes of a file that belong at dest_offset of a unit's run."""

    file: Path
    offset_bytes: int
    nbytes: int
    dest_offset: int


class WeightSource(Protocol):
    """Where weights come from: a checkpoint, a packed folder, or a random generator."""

    def layout(self, unit: Unit) -> UnitLayout: ...

    def fill(self, unit: Unit, run: Tensor) -> None:
        """Write the unit's tensors into `run` (uint8, layout(unit).nbytes, CPU)."""
        ...

    def extents(self, unit: Unit) -> Sequence[Extent] | None:
        """The unit's bytes where they lie on disk in this layout, or None if they must be made first."""
        ...

    def table_format(self, spec: TensorSpec) -> WeightFormat:
        """How a table (kind rows) is stored."""
        ...

    def fill_table(self, spec: TensorSpec, run: Tensor) -> None:
        """Write a whole table into `run` (uint8, table_format(spec).nbytes(spec.shape), CPU)."""
        ...


class MemoryRows:
    """Rows of a matrix in memory, plain or packed."""

    def __init__(self, rows: Tensor | PackedTensor) -> None:
        self._rows = rows

    def gather(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        if isinstance(self._rows, PackedTensor):
            return self._rows.gather_rows(ids.to(self._rows.device), dtype)
        return self._rows[ids.to(self._rows.device)].to(dtype)


class DiskRows:
    """Rows of one tensor of a unit that is at home on disk: each part's rows are read where they lie."""

    def __init__(self, slot: TensorSlot, extents: Sequence[FileExtent]) -> None:
        self._slot = slot
        self._extents = extents

    def gather(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        unique, inverse = torch.unique(ids.cpu(), return_inverse=True)
        n_rows, cols = self._slot.shape
        fmt = self._slot.format
        small = (len(unique), cols)
        run = torch.empty(align_up(fmt.nbytes(small), TENSOR_ALIGN_BYTES), dtype=torch.uint8)
        wanted: list[FileExtent] = []
        for big, part in zip(fmt.parts((n_rows, cols)), fmt.parts(small), strict=True):
            row_nbytes = big.nbytes // n_rows
            for i, row in enumerate(unique.tolist()):
                begin = self._slot.offset_bytes + big.offset_bytes + row * row_nbytes
                wanted.extend(_located(self._extents, begin, row_nbytes, part.offset_bytes + i * row_nbytes))
        read_extents(wanted, run)
        view = TensorSlot(
            name=self._slot.name,
            shape=small,
            format=fmt,
            offset_bytes=0,
            nbytes=fmt.nbytes(small),
            is_linear=True,
        ).view(run)
        rows = view.dequantize(dtype) if isinstance(view, PackedTensor) else view.to(dtype)
        return rows[inverse]


def _located(extents: Sequence[FileExtent], begin: int, nbytes: int, dest_offset: int) -> list[FileExtent]:
    """File ranges that hold bytes begin .. begin + nbytes of a unit's run, for a buffer at dest_offset."""
    found = []
    for extent in extents:
        low = max(begin, extent.tensor_offset_bytes)
        high = min(begin + nbytes, extent.tensor_offset_bytes + extent.n_bytes)
        if low < high:
            offset = extent.offset_bytes + low - extent.tensor_offset_bytes
            found.append(FileExtent(extent.file, offset, high - low, dest_offset + low - begin))
    return found


class StackedRows:
    """A table whose rows lie in several places one after the other (the slices of a tied head)."""

    def __init__(self, pieces: Sequence[tuple[int, MemoryRows | DiskRows]], device: torch.device) -> None:
        self._starts = torch.tensor([start for start, _ in pieces])
        self._pieces = [piece for _, piece in pieces]
        self._device = device

    def gather(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """ids (tokens,) -> (tokens, width) of dtype on the compute device."""
        if len(self._pieces) == 1:
            return self._pieces[0].gather(ids, dtype).to(self._device)
        ids = ids.cpu()
        where = torch.bucketize(ids, self._starts, right=True) - 1
        out: Tensor | None = None
        for i in where.unique().tolist():
            chosen = (where == i).nonzero().squeeze(1)
            rows = self._pieces[i].gather(ids[chosen] - self._starts[i], dtype).to(self._device)
            if out is None:
                out = torch.empty((len(ids), rows.shape[1]), dtype=dtype, device=self._device)
            out[chosen.to(self._device)] = rows
        assert out is not None, "no token to embed"
        return out


class WeightStore:
    """Holds every unit at its home and hands the executor what a unit's forward needs.

    homes: one tier per unit (pinned units are on the first tier whatever they say). scratch_bytes: planned size
    of the buffer for unpacked tensors; it grows to what the largest unit needs. Arenas give the memory;
    everything is taken at construction, nothing later.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        source: WeightSource,
        homes: Sequence[Tier],
        *,
        device: Device,
        compute_dtype: torch.dtype,
        arenas: Mapping[Tier, Arena],
        pool: DiskPool,
        ring_slots: int = 2,
        staging_slots: int = 2,
        scratch_bytes: int = 0,
    ) -> None:
        self.units = tuple(units)
        self.device = device
        self.compute_dtype = compute_dtype
        self._pool = pool
        self._files: dict[Path, DiskFile] = {}
        self.layouts = tuple(source.layout(unit) for unit in units)
        first = device.first_tier
        self.homes = tuple(first if unit.pinned else home for unit, home in zip(units, homes, strict=True))
        self._extents: dict[int, list[FileExtent]] = {}
        self._at_home: dict[int, Tensor] = {}
        for index, home in enumerate(self.homes):
            if home is Tier.DISK:
                extents = source.extents(units[index])
                if extents is None:
                    raise ValueError(
                        f"unit {units[index].name} cannot stay on disk: its stored form differs from the "
                        "checkpoint's; pack the model first"
                    )
                self._extents[index] = [
                    FileExtent(self._file(e.file), e.offset_bytes, e.nbytes, e.dest_offset) for e in extents
                ]
        streamed = [i for i, home in enumerate(self.homes) if home > first]
        slot_bytes = max((self.layouts[i].nbytes for i in streamed), default=0)
        n_ring = min(ring_slots, len(streamed))
        ring = _slots(arenas[first], n_ring, slot_bytes, "weights ring")
        on_disk = [i for i in streamed if self.homes[i] is Tier.DISK]
        staging = torch.empty(0, 0, dtype=torch.uint8)
        if first is Tier.GPU and on_disk:
            largest = max(self.layouts[i].nbytes for i in on_disk)
            n_staging = min(staging_slots, len(on_disk))
            staging = _slots(arenas[Tier.CPU], n_staging, largest, "weights staging")
        self._ring, self._staging = list(ring), list(staging)
        self._read_slots = staging if self._staging else ring
        unpacked = [self._scratch_elements(i) for i in range(len(units))]
        scratch_bytes = max(scratch_bytes, max(unpacked, default=0) * compute_dtype.itemsize)
        self._scratch = (
            arenas[first].take(scratch_bytes, "unpack scratch").view(compute_dtype) if scratch_bytes else None
        )
        for index, home in enumerate(self.homes):
            if home is not Tier.DISK and self.layouts[index].nbytes:
                self._at_home[index] = self._settle(units[index], index, source, home, arenas)
        self._foreign = [self._foreign_tensors(layout) for layout in self.layouts]
        self._tables = self._make_tables(source, arenas)
        self._ready: tuple[int, Weights] | None = None
        self._made: dict[tuple[int, int], dict[str, Any]] = {}

    def _file(self, path: Path) -> DiskFile:
        if path not in self._files:
            self._files[path] = DiskFile(path, self._pool)
        return self._files[path]

    @property
    def disk_bytes(self) -> int:
        """Bytes of the files' ranges that units at home on disk are read from."""
        return sum(e.n_bytes for extents in self._extents.values() for e in extents)

    def disk_extents(self) -> list[list[FileExtent]]:
        """Where the units at home on disk lie, one list per unit."""
        return list(self._extents.values())

    def read_slots(self) -> Tensor | None:
        """(slots, bytes of each), uint8: the memory that disk reads go into, if there is any."""
        slots = self._read_slots
        return slots if len(slots) and slots.device.type == "cpu" else None

    def close(self) -> None:
        """Close the files that units are read from."""
        for file in self._files.values():
            file.close()

    # -- homes -----------------------------------------------------------------------------------------

    def _scratch_elements(self, index: int) -> int:
        layout = self.layouts[index]
        return sum(
            s.shape[0] * s.shape[1]
            for s in layout.slots
            if s.is_linear and self._must_unpack(s) and not self._is_never_unpacked(s)
        )

    def _is_never_unpacked(self, slot: TensorSlot) -> bool:
        least = packed_row_len(self.compute_dtype, self.device.torch_device.type)
        return not slot.format.is_plain and least is not None and slot.shape[1] >= least

    def _foreign_tensors(self, layout: UnitLayout) -> dict[str, tuple[TensorSlot, ...]]:
        """The linear tensors of which some rows are not of the compute type."""
        return {
            name: slots
            for name, slots in layout.tensors.items()
            if slots[0].is_linear and any(self._must_unpack(slot) for slot in slots)
        }

    def _must_unpack(self, slot: TensorSlot) -> bool:
        return slot.format.name != DTYPE_FORMATS[self.compute_dtype]

    def _settle(
        self, unit: Unit, index: int, source: WeightSource, home: Tier, arenas: Mapping[Tier, Arena]
    ) -> Tensor:
        run = arenas[home].take(self.layouts[index].nbytes, "weights")
        if home is Tier.GPU and self.device.is_accelerator:
            staging = torch.empty(run.numel(), dtype=torch.uint8)
            source.fill(unit, staging)
            run.copy_(staging)
        else:
            source.fill(unit, run)
        return run

    def _make_tables(
        self, source: WeightSource, arenas: Mapping[Tier, Arena]
    ) -> dict[tuple[int, str], StackedRows]:
        """Row tables of all units; a table that the head's slices hold too is gathered from those."""
        tables: dict[tuple[int, str], StackedRows] = {}
        slices: dict[str, list[tuple[int, int, TensorSlot]]] = {}  # source -> (first row, unit, slot)
        for index, unit in enumerate(self.units):
            tensors = self.layouts[index].tensors
            for spec in unit.tensors:
                if spec.kind == "linear" and unit.rows_only and len(spec.parts) == 1:
                    rows = spec.parts[0].rows or ((0, spec.shape[0]),)
                    slices.setdefault(spec.parts[0].source, []).extend(
                        (rows[0][0] + slot.row_start, index, slot) for slot in tensors[spec.name]
                    )
        for index, unit in enumerate(self.units):
            for spec in unit.tensors:
                if spec.kind != "rows":
                    continue
                tied = slices.get(spec.parts[0].source)
                pieces: list[tuple[int, MemoryRows | DiskRows]]
                if tied:
                    pieces = [
                        (first, self._slice_rows(i, slot)) for first, i, slot in sorted(tied, key=_first)
                    ]
                else:
                    fmt = source.table_format(spec)
                    run = arenas[Tier.CPU].take(fmt.nbytes(spec.shape), "tables")
                    source.fill_table(spec, run)
                    slot = TensorSlot(
                        name=spec.name,
                        shape=spec.shape,
                        format=fmt,
                        offset_bytes=0,
                        nbytes=fmt.nbytes(spec.shape),
                        is_linear=True,
                    )
                    pieces = [(0, MemoryRows(slot.view(run)))]
                tables[index, spec.name] = StackedRows(pieces, self.device.torch_device)
        return tables

    def _slice_rows(self, index: int, slot: TensorSlot) -> MemoryRows | DiskRows:
        if index in self._at_home:
            return MemoryRows(slot.view(self._at_home[index]))
        return DiskRows(slot, self._extents[index])

    # -- movement, called on the lanes -------------------------------------------------------------------

    def piece(self, index: int, piece: int, n_pieces: int) -> tuple[int, int]:
        """First and last + 1 of the bytes that are piece `piece` of n_pieces of a unit; small units have empty ones."""
        total = self.layouts[index].nbytes
        step = align_up(-(-total // n_pieces), UNIT_ALIGN_BYTES)
        return min(piece * step, total), min((piece + 1) * step, total)

    def read(self, index: int, slot: int, piece: int, n_pieces: int) -> int:
        """Read an equal share of a unit from disk into its staging or ring slot; returns the bytes read."""
        run = self._staging[slot] if self._staging else self._ring[slot]
        begin, end = self.piece(index, piece, n_pieces)
        wanted = _located(self._extents[index], begin, end - begin, begin)
        return read_extents(wanted, run)

    def upload(self, index: int, slot: int, staging_slot: int, piece: int, n_pieces: int) -> int:
        """Copy an equal share of a unit from cpu memory, or from its staging slot, to its ring slot on the device.

        Returns the bytes copied. The shares are those of `read`: a staged piece needs its own read alone.
        """
        begin, end = self.piece(index, piece, n_pieces)
        run = self._staging[staging_slot] if staging_slot >= 0 else self._at_home[index]
        self._ring[slot][begin:end].copy_(run[begin:end], non_blocking=True)
        return end - begin

    # -- use, called on the compute lane -----------------------------------------------------------------

    def weights(self, index: int, slot: int, pass_tokens: int) -> Weights:
        """What the unit's forward needs. pass_tokens: how many tokens this pass sends through the unit.

        Unpacked tensors are views of the one scratch buffer, valid until the next unit is asked for; asking
        again for the same unit within a pass costs nothing (call `forget` when a pass begins).
        """
        if self._ready is not None and self._ready[0] == index:
            return self._ready[1]
        made = dict(self._views(index, slot))
        begin = 0
        for name, slots in self._foreign[index].items():
            chosen = [self._must_unpack(s) and self._worth_unpacking(s, pass_tokens) for s in slots]
            n = sum(s.shape[0] * s.shape[1] for s, wanted in zip(slots, chosen, strict=True) if wanted)
            if n:
                assert self._scratch is not None
                made[name] = _unpacked(made[name], slots, chosen, self._scratch[begin : begin + n])
                begin += n
        self._ready = (index, made)
        return made

    def _views(self, index: int, slot: int) -> dict[str, Any]:
        """Every tensor and table of a unit as it is stored, where it is now; the views are made once."""
        key = (index, slot)
        if key not in self._made:
            run = self._ring[slot] if slot >= 0 else self._at_home.get(index)
            views: dict[str, Any] = {}
            if self.layouts[index].slots:
                assert run is not None
                views.update(self.layouts[index].views(run))
            for spec in self.units[index].tensors:
                if spec.kind == "rows":
                    views[spec.name] = self._tables[index, spec.name]
            self._made[key] = views
        return self._made[key]

    def _worth_unpacking(self, part: TensorSlot, pass_tokens: int) -> bool:
        # An accelerator has no kernel for few tokens: it would unpack anew for every gpu batch, beyond the plan.
        return not self._is_never_unpacked(part) and (
            part.format.is_plain
            or self.device.is_accelerator
            or pass_tokens > crossover_tokens(part.format, self.compute_dtype, part.shape[1])
        )

    def forget(self) -> None:
        """A pass begins: what was unpacked before no longer counts."""
        self._ready = None


def _slots(arena: Arena, n: int, nbytes: int, what: str) -> Tensor:
    """n slots that hold nbytes each: (n, aligned bytes) uint8, one piece of memory."""
    step = aligned_bytes(nbytes)
    return arena.take(n * step, what).view(n, step)


def _unpacked(
    stored: Tensor | PackedTensor | StackedTensor,
    slots: Sequence[TensorSlot],
    chosen: Sequence[bool],
    place: Tensor,
) -> Tensor | PackedTensor | StackedTensor:
    """A weight whose `chosen` runs of rows are unpacked into place (flat, of the compute type) one after the other.

    Where all are chosen, they lie there as one plain matrix.
    """
    parts = list(stored.parts) if isinstance(stored, StackedTensor) else [stored]
    begin = 0
    for i, (part, slot, wanted) in enumerate(zip(parts, slots, chosen, strict=True)):
        if not wanted:
            continue
        n = slot.shape[0] * slot.shape[1]
        out = place[begin : begin + n]
        begin += n
        if slot.transposed and isinstance(part, Tensor):
            out.view(slot.shape[::-1]).copy_(part.t())
            parts[i] = out.view(slot.shape[::-1]).t()
        else:
            parts[i] = unpack(part, place.dtype, out.view(slot.shape))
    if len(parts) > 1 and all(chosen) and not any(slot.transposed for slot in slots):
        return place.view(-1, slots[0].shape[1])
    return joined(parts)


def _first(piece: tuple[int, int, TensorSlot]) -> int:
    return piece[0]


__all__ = [
    "DiskRows",
    "Extent",
    "MemoryRows",
    "RowRuns",
    "StackedRows",
    "StoredAs",
    "TensorSlot",
    "UnitLayout",
    "WeightSource",
    "WeightStore",
    "parse_format",
    "unit_layout",
]
