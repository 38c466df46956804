"""A packed model folder as a source of weights: every unit lies in the file exactly as it is wanted."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flexrun.checkpoint.base import CheckpointError, TensorInfo, open_data_file
from flexrun.checkpoint.filling import zero_gaps
from flexrun.checkpoint.manifest import WEIGHTS_FILE, PackedManifest, PackedRun, read_manifest, table_key
from flexrun.checkpoint.reading import read_into
from flexrun.checkpoint.rows import put_rows
from flexrun.checkpoint.safetensors import read_header
from flexrun.model.assemble import DecoderModel, build_model
from flexrun.model.config import ModelConfig
from offload.units import TensorSpec, Unit
from offload.weights import Extent, StoredAs, TensorSlot, UnitLayout
from quant.formats import WeightFormat
from quant.packed import PackedTensor

_VERIFY_PIECE_BYTES = 16 << 20
_PACK_AGAIN = "Pack the model again"


class PackedSource:
    """Weights of a packed folder (offload.weights.WeightSource).

    manifest: what the folder says of itself; model: the units that it was packed for.
    Raises CheckpointError for a folder that is incomplete, damaged or of another version. Checksums are not
    read here but by `verify`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder).absolute()
        self.manifest: PackedManifest = read_manifest(self.folder)
        self.file = self.folder / WEIGHTS_FILE
        self.config: ModelConfig = self.manifest.model
        self.model: DecoderModel = build_model(self.config)
        self.weight_format = self.manifest.weight_format
        self.notes = self.manifest.notes
        self._slices = head_slices(self.model)
        self._tables: dict[tuple[str, ...], PackedRun | None] = {}
        for unit in self.model.units:
            self._check_unit(unit)

    def fingerprint(self) -> str:
        """Identity of what was packed: its source's fingerprint."""
        return self.manifest.source_fingerprint

    def formats_of(self, unit: Unit) -> dict[str, StoredAs]:
        """Tensor name -> format, or runs of rows in several, tables included."""
        formats = self.layout(unit).stored_as
        return {
            spec.name: self.table_format(spec) if spec.kind == "rows" else formats[spec.name]
            for spec in unit.tensors
        }

    def unit_nbytes(self, unit: Unit) -> int:
        """Bytes of the unit's run (tables are apart)."""
        return self.layout(unit).nbytes

    def layout(self, unit: Unit) -> UnitLayout:
        return self.manifest.units[unit.name].layout

    def extents(self, unit: Unit) -> list[Extent]:
        run = self.manifest.units[unit.name]
        if not run.nbytes:
            return []
        return [Extent(file=self.file, offset_bytes=run.offset_bytes, nbytes=run.nbytes, dest_offset=0)]

    def fill(self, unit: Unit, run: Tensor) -> None:
        self._read(self.manifest.units[unit.name], run)

    def table_format(self, spec: TensorSpec) -> WeightFormat:
        table = self._table(spec)
        if table is not None:
            return table.slots[0].format
        unit, name, _ = self._slices[spec.parts[0].source][0]
        return self._slot(unit, name).format

    def fill_table(self, spec: TensorSpec, run: Tensor) -> None:
        table = self._table(spec)
        if table is not None:
            self._read(table, run)
        else:
            self._join_slices(spec, run)

    def _join_slices(self, spec: TensorSpec, run: Tensor) -> None:
        """A tied table is stored once, as the slices of the head."""
        fmt = self.table_format(spec)
        whole = TensorSlot(
            name=spec.name,
            shape=spec.shape,
            format=fmt,
            offset_bytes=0,
            nbytes=fmt.nbytes(spec.shape),
            is_linear=True,
        ).view(run)
        if isinstance(whole, PackedTensor):
            zero_gaps(whole)
        for unit, name, first in self._slices[spec.parts[0].source]:
            slot = self._slot(unit, name)
            stored = self.manifest.units[unit]
            piece = torch.empty(slot.nbytes, dtype=torch.uint8)
            read_into(_raw(self.file, unit, stored.offset_bytes + slot.offset_bytes, slot.nbytes), piece)
            rows = replace(slot, offset_bytes=0).view(piece)
            if isinstance(whole, PackedTensor):
                assert isinstance(rows, PackedTensor)
                put_rows(whole, first, rows)
            else:
                assert isinstance(rows, Tensor)
                whole[first : first + slot.shape[0]] = rows

    def _slot(self, unit: str, name: str) -> TensorSlot:
        return next(slot for slot in self.manifest.units[unit].slots if slot.name == name)

    def _table(self, spec: TensorSpec) -> PackedRun | None:
        key = tuple(part.source for part in spec.parts)
        if key not in self._tables:
            raise ValueError(f"{spec.name} is not a table of this model")
        return self._tables[key]

    def _read(self, stored: PackedRun, run: Tensor) -> None:
        if run.dtype != torch.uint8 or run.numel() != stored.nbytes:
            raise ValueError(
                f"{stored.name} takes {stored.nbytes} bytes (uint8), the run is {run.numel()} of {run.dtype}"
            )
        if stored.nbytes:
            read_into(_raw(self.file, stored.name, stored.offset_bytes, stored.nbytes), run)

    def _check_unit(self, unit: Unit) -> None:
        stored = self.manifest.units.get(unit.name)
        if stored is None:
            raise self._damaged(f"unit {unit.name} is missing", f"{len(self.manifest.units)} units")
        wanted = {spec.name: spec.shape for spec in unit.tensors if spec.kind != "rows"}
        found = stored.layout.shapes
        if wanted != found:
            raise self._damaged(f"unit {unit.name} has other tensors", f"{found}", f"{wanted}")
        for spec in unit.tensors:
            if spec.kind != "rows":
                continue
            table = self.manifest.tables.get(table_key(unit.name, spec.name))
            if table is None and spec.parts[0].source not in self._slices:
                raise self._damaged(
                    f"table {table_key(unit.name, spec.name)} is missing",
                    f"{len(self.manifest.tables)} tables",
                )
            if table is not None and [slot.shape for slot in table.slots] != [spec.shape]:
                shapes = [slot.shape for slot in table.slots]
                raise self._damaged(f"table {table.name} has another shape", f"{shapes}", f"{spec.shape}")
            self._tables[tuple(part.source for part in spec.parts)] = table

    def _damaged(self, what: str, found: str, expected: str | None = None) -> CheckpointError:
        return CheckpointError(
            f"the packed model does not hold what its configuration asks for: {what}",
            file=self.folder,
            found=found,
            expected=expected,
            remedy=_PACK_AGAIN,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What `verify` found. problems: one sentence per unit or table whose bytes are not those that were packed."""

    folder: Path
    n_runs: int
    nbytes: int
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems


def verify(folder: Path, progress: Callable[[int, int, str], None] | None = None) -> VerifyReport:
    """Read all weights of a packed folder and compare every checksum; bad ones are listed, not raised.

    progress(done_bytes, total_bytes, name) is called after each unit. Raises CheckpointError for a folder
    that cannot be opened as a packed model at all.
    """
    source = PackedSource(folder)
    manifest = source.manifest
    problems: list[str] = []
    header = read_header(source.file)
    runs = [run for runs in (manifest.units, manifest.tables) for run in runs.values()]
    done, total = 0, manifest.weight_bytes
    with open_data_file(source.file) as handle:
        for run in runs:
            if run.nbytes:
                tensor = header.get(run.name)
                if tensor is None or (tensor.offset_bytes, tensor.nbytes) != (run.offset_bytes, run.nbytes):
                    problems.append(f"{run.name}: the file's header does not name it where the manifest does")
            found = _checksum_of(handle.fileno(), run)
            if found != run.checksum:
                problems.append(f"{run.name}: wrong checksum, found {found}, expected {run.checksum}")
            done += run.nbytes
            if progress is not None:
                progress(done, total, run.name)
    return VerifyReport(
        folder=source.folder, n_runs=len(runs), nbytes=done, problems=tuple(dict.fromkeys(problems))
    )


def checksum(pieces: Iterator[Any]) -> str:
    """The checksum of these pieces of bytes put together."""
    value = 0
    for piece in pieces:
        value = zlib.crc32(piece, value)
    return f"crc32:{value:08x}"


def head_slices(model: DecoderModel) -> dict[str, list[tuple[str, str, int]]]:
    """Source -> [(unit, tensor, first row)] of tables that the head holds, slice by slice.

    A table that is tied to the head is gathered from these and not stored a second time.
    """
    slices: dict[str, list[tuple[str, str, int]]] = {}
    for unit in model.units:
        for spec in unit.tensors:
            if unit.rows_only and spec.kind == "linear" and len(spec.parts) == 1:
                part = spec.parts[0]
                first = part.rows[0][0] if part.rows else 0
                slices.setdefault(part.source, []).append((unit.name, spec.name, first))
    return slices


def _checksum_of(fd: int, run: PackedRun) -> str:
    def pieces() -> Iterator[bytes]:
        for begin in range(0, run.nbytes, _VERIFY_PIECE_BYTES):
            yield os.pread(fd, min(_VERIFY_PIECE_BYTES, run.nbytes - begin), run.offset_bytes + begin)

    return checksum(pieces())


def _raw(file: Path, name: str, offset_bytes: int, nbytes: int) -> TensorInfo:
    return TensorInfo(
        name=name, dtype="U8", shape=(nbytes,), file=file, offset_bytes=offset_bytes, nbytes=nbytes
    )
