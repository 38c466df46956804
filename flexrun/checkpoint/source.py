"""A checkpoint as a source of weights: each unit's tensors in one run of bytes, stacked, cut and converted.

What a tensor is stored as is decided from headers alone, so that sizes are exact before anything is read.
Parts of one stacked tensor that a checkpoint stores differently stay as they are, each a run of rows of its own.
Filling streams: bytes that lie in the file as they are wanted are read straight into the run, everything else
passes through row blocks of at most 32 MiB.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from flexrun.checkpoint.base import Checkpoint
from flexrun.checkpoint.filling import Piece, TensorPlan, fill_tensor, slots_between_zeros, table_slot
from flexrun.checkpoint.gptq import quantized_readers
from flexrun.checkpoint.rows import FileRange, RowReader, TransposedReader, open_rows
from flexrun.model.assemble import DecoderModel
from flexrun.model.mapping import match_tensors
from offload.units import TensorPart, TensorSpec, Unit
from offload.weights import Extent, StoredAs, TensorSlot, UnitLayout, unit_layout
from quant.formats import WeightFormat, parse_format
from quant.pack import METHODS

AUTO = "auto"


class CheckpointSource:
    """Weights of a Hugging Face or GGUF checkpoint for a built model (offload.weights.WeightSource).

    weight_format: "auto" keeps what the checkpoint has, bit for bit where a format for it exists, and each part of
        a stacked matrix by itself; a plain or
        affine format's name converts all matrices and tables while they are filled in. Vectors always keep
        the checkpoint's floating type.
    unpacked_format: the plain format for quantised tensors that cannot stay packed (types without a format).
        f32 loses nothing; bf16 suits bf16 arithmetic.
    method: the quantiser of affine formats, "search" or "minmax".
    notes: what was decided that the user may want to know.
    Raises ModelConfigError where names or shapes do not match the model, CheckpointError for tensors that
    cannot be used, ValueError for an unknown format.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        model: DecoderModel,
        weight_format: str = AUTO,
        *,
        unpacked_format: str = "f32",
        method: str = "search",
    ) -> None:
        self.checkpoint = checkpoint
        self.weight_format = weight_format
        self.method = method
        self.unpacked_format = unpacked_format
        if method not in METHODS:
            raise ValueError(f"unknown quantiser {method!r}; use one of {', '.join(METHODS)}")
        self._wanted = None if weight_format == AUTO else _writable(weight_format)
        self._unpacked = parse_format(unpacked_format)
        if not self._unpacked.is_plain:
            raise ValueError(f"unpacked_format must be f32, f16 or bf16, got {unpacked_format!r}")
        wanted = {part.source for unit in model.units for spec in unit.tensors for part in spec.parts}
        quantized, self._infos = quantized_readers(checkpoint, wanted, self._unpacked)
        flip = -1 if model.config.names.transposed else 1
        shapes = {name: reader.shape[::flip] for name, reader in quantized.items()}
        self._names = match_tensors(model.config, model.units, {**self._infos, **shapes})
        self._readers: dict[tuple[str, bool], RowReader] = {
            (name, transposed): reader for name, reader in quantized.items() for transposed in (False, True)
        }
        self._unkept: dict[str, set[str]] = {}  # stored types without a format -> what they are held as
        self._plans: dict[str, dict[str, tuple[TensorPlan, ...]]] = {
            unit.name: {spec.name: self._plan(spec) for spec in unit.tensors} for unit in model.units
        }
        self._tables = {
            spec.parts: self._plans[unit.name][spec.name][0]
            for unit in model.units
            for spec in unit.tensors
            if spec.kind == "rows"
        }
        self.notes = tuple(self._make_notes())

    def fingerprint(self) -> str:
        """Identity of the checkpoint, 32 hex digits; the same after a copy or a rename."""
        return self.checkpoint.fingerprint()

    # -- what is stored --------------------------------------------------------------------------------

    def formats_of(self, unit: Unit) -> dict[str, StoredAs]:
        """Tensor name -> format, or runs of rows in several, tables included."""
        return {
            name: plans[0].format if len(plans) == 1 else tuple((plan.n_rows, plan.format) for plan in plans)
            for name, plans in self._plans[unit.name].items()
        }

    def unit_nbytes(self, unit: Unit) -> int:
        """Bytes of the unit's run (tables are apart)."""
        return self.layout(unit).nbytes

    def layout(self, unit: Unit) -> UnitLayout:
        plans = self._plans[unit.name]
        transposed = frozenset(name for name, runs in plans.items() if runs[0].transposed)
        return unit_layout(unit.tensors, self.formats_of(unit), transposed)

    def table_format(self, spec: TensorSpec) -> WeightFormat:
        return self._table(spec).format

    def extents(self, unit: Unit) -> list[Extent] | None:
        """Where the unit lies in the checkpoint's files, if all of it lies there as it is stored."""
        found: list[Extent] = []
        for slot, plan in self._slots(unit, self.layout(unit)):
            offset = slot.offset_bytes
            for piece in plan.pieces:
                where = _place(plan, piece)
                if where is None:
                    return None
                found.append(
                    Extent(
                        file=where.file,
                        offset_bytes=where.offset_bytes,
                        nbytes=where.nbytes,
                        dest_offset=offset,
                    )
                )
                offset += where.nbytes
        return _merged(found)

    def _slots(self, unit: Unit, layout: UnitLayout) -> Iterator[tuple[TensorSlot, TensorPlan]]:
        """The slots of a unit's layout, each with what goes into it."""
        for name, slots in layout.tensors.items():
            yield from zip(slots, self._plans[unit.name][name], strict=True)

    # -- filling ---------------------------------------------------------------------------------------

    def fill(self, unit: Unit, run: Tensor) -> None:
        layout = self.layout(unit)
        pairs = zip(slots_between_zeros(unit, layout, run), self._slots(unit, layout), strict=True)
        for slot, (planned, plan) in pairs:
            assert slot is planned, "slots of one tensor lie one after the other"
            fill_tensor(plan, slot, run, self.method)

    def fill_table(self, spec: TensorSpec, run: Tensor) -> None:
        plan = self._table(spec)
        fill_tensor(plan, table_slot(spec, plan.format, run), run, self.method)

    # -- decisions -------------------------------------------------------------------------------------

    def _table(self, spec: TensorSpec) -> TensorPlan:
        plan = self._tables.get(spec.parts)
        if plan is None:
            raise ValueError(f"{spec.name} is not a table of this model")
        return plan

    def _reader(self, part: TensorPart, transposed: bool) -> RowReader:
        name = self._names[part.source]
        if (name, transposed) not in self._readers:
            info = self._infos[name]
            self._readers[name, transposed] = open_rows(info, transposed=transposed, unpacked=self._unpacked)
        return self._readers[name, transposed]

    def _plan(self, spec: TensorSpec) -> tuple[TensorPlan, ...]:
        """What a tensor is made of: one plan for each run of rows in one format, in order."""
        runs: list[tuple[WeightFormat, list[Piece]]] = []
        row = 0  # within the run
        readers = [self._reader(part, spec.transposed and len(spec.shape) == 2) for part in spec.parts]
        whole = self._whole_format(spec, readers)
        for part, reader in zip(spec.parts, readers, strict=True):
            fmt = whole if whole is not None else _kept_format(reader)
            for start, stop in self._row_ranges(spec, part, reader):
                if not runs or not (
                    runs[-1][0] == fmt and (whole is not None or _joinable(runs[-1][1][0].reader, reader))
                ):
                    runs.append((fmt, []))
                    row = 0
                runs[-1][1].append(
                    Piece(reader=reader, start=start, stop=stop, dest_row=row, heads=part.unpermute_heads)
                )
                row += stop - start
        plans = tuple(
            TensorPlan(
                spec=spec,
                format=fmt,
                pieces=tuple(pieces),
                transposed=len(runs) == 1 and fmt.is_plain and _is_whole_transposed(pieces),
            )
            for fmt, pieces in runs
        )
        n_rows = sum(plan.n_rows for plan in plans)
        assert n_rows == spec.shape[0], f"{spec.name}: {n_rows} rows of {spec.shape[0]}"
        return plans

    def _row_ranges(self, spec: TensorSpec, part: TensorPart, reader: RowReader) -> list[tuple[int, int]]:
        if part.rows is None:
            return [(0, reader.n_rows)]
        info = self._infos.get(self._names[part.source])
        # A row of a three-dimensional source is a whole matrix, of which the reader makes one tall one.
        step = info.shape[1] if info is not None and len(info.shape) == 3 and len(spec.shape) == 2 else 1
        return [(start * step, stop * step) for start, stop in part.rows]

    def _whole_format(self, spec: TensorSpec, readers: Sequence[RowReader]) -> WeightFormat | None:
        """The one format of all of a tensor's rows; None where each part keeps its own."""
        if spec.kind == "vector":
            return _widest([_kept_format(reader) for reader in readers])
        if self._wanted is not None:
            return self._wanted
        for reader in readers:
            if reader.native is None and reader.quantized:
                self._unkept.setdefault(reader.stored_type, set()).add(reader.plain.name)
        return None

    def _make_notes(self) -> Iterator[str]:
        for stored, formats in sorted(self._unkept.items()):
            yield (
                f"{stored} tensors are held as {', '.join(sorted(formats))} (no packed form); "
                "--weight-format int8-g32 or int4-g64 makes them small again"
            )


def _writable(name: str) -> WeightFormat:
    fmt = parse_format(name)
    if fmt.kind == "block" or fmt.permuted:
        raise ValueError(
            f"weights cannot be converted to {name}: it only exists for checkpoints that have it already; "
            "choose f32, f16, bf16 or an affine format such as int4-g64"
        )
    return fmt


def _kept_format(reader: RowReader) -> WeightFormat:
    """The format that keeps a tensor as it is, or the plain one that holds its values."""
    return reader.plain if reader.native is None else reader.native


def _joinable(reader: RowReader, first: RowReader) -> bool:
    """Whether two tensors of one format can be rows of one: only columns in the same order can."""
    if reader.permutation is None or first.permutation is None:
        return reader.permutation is first.permutation
    return torch.equal(reader.permutation, first.permutation)


def _is_whole_transposed(pieces: Sequence[Piece]) -> bool:
    """Whether these are all rows of one tensor that lies as (in_features, out_features)."""
    piece = pieces[0]
    whole = len(pieces) == 1 and piece.stop - piece.start == piece.reader.n_rows
    return whole and isinstance(piece.reader, TransposedReader)


def _widest(formats: Sequence[WeightFormat]) -> WeightFormat:
    """The narrowest plain format that holds the values of all of these."""
    names = {fmt.name for fmt in formats}
    return formats[0] if len(names) == 1 else parse_format("f32")


def _place(plan: TensorPlan, piece: Piece) -> FileRange | None:
    """Where a piece lies in a file exactly as the plan stores it."""
    reader = piece.reader
    if plan.format != reader.native or piece.heads:
        return None
    if plan.transposed:
        assert isinstance(reader, TransposedReader)
        return reader.as_stored.where(0, reader.as_stored.n_rows)
    return reader.where(piece.start, piece.stop)


def _merged(extents: Sequence[Extent]) -> list[Extent]:
    """Neighbours in the file that are neighbours in the run too become one extent."""
    out: list[Extent] = []
    for extent in extents:
        last = out[-1] if out else None
        if (
            last is not None
            and last.file == extent.file
            and last.offset_bytes + last.nbytes == extent.offset_bytes
            and last.dest_offset + last.nbytes == extent.dest_offset
        ):
            nbytes = last.nbytes + extent.nbytes
            out[-1] = Extent(
                file=last.file, offset_bytes=last.offset_bytes, nbytes=nbytes, dest_offset=last.dest_offset
            )
        else:
            out.append(extent)
    return out
