"""manifest.json of a packed model folder: what lies where in its one file of weights.

A tensor in several formats has a slot for each run of its rows, under one name, told apart by row_start. That
needed no new version: an older flexrun finds a tensor of another shape than it asks for, and refuses the folder.

The manifest is written last, so its presence means that everything else is complete. It names a format
version, the source and how it was converted, the model's configuration, and for every unit and table the
place, size and checksum of its bytes, and the layout within. Needs torch only through offload.weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexrun.checkpoint.base import CheckpointError, open_data_file
from flexrun.checkpoint.resolve import PACKED_KEY, PACKED_MANIFEST
from flexrun.model.schema import ModelConfig, ModelConfigError
from offload.weights import TENSOR_ALIGN_BYTES, UNIT_ALIGN_BYTES, TensorSlot, UnitLayout
from quant.formats import parse_format

VERSION = 1
WEIGHTS_FILE = "model.safetensors"
MAX_JSON_BYTES = 256 << 20
_PACK_AGAIN = "Pack the model again"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRun:
    """One unit's run of bytes, or one table, at a multiple of UNIT_ALIGN_BYTES of the file.

    checksum: "crc32:" and eight hex digits. A table has one slot, and its bytes may end before its space does.
    Raises ValueError if the slots of a tensor do not make up a whole.
    """

    name: str
    offset_bytes: int
    nbytes: int
    checksum: str
    slots: tuple[TensorSlot, ...]

    def __post_init__(self) -> None:
        UnitLayout(slots=self.slots, nbytes=self.nbytes)

    @property
    def layout(self) -> UnitLayout:
        return UnitLayout(slots=self.slots, nbytes=self.nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedManifest:
    """Everything that manifest.json says. units: by unit name; tables: by "unit/tensor"."""

    created_by: str
    source_name: str
    source_kind: str
    source_fingerprint: str
    weight_format: str
    method: str
    model: ModelConfig
    file_bytes: int
    units: Mapping[str, PackedRun]
    tables: Mapping[str, PackedRun]
    notes: tuple[str, ...] = ()

    @property
    def weight_bytes(self) -> int:
        """Bytes of all runs and tables."""
        return sum(run.nbytes for runs in (self.units, self.tables) for run in runs.values())

    def to_json(self) -> str:
        return json.dumps(
            {
                PACKED_KEY: VERSION,
                "created_by": self.created_by,
                "source": {
                    "name": self.source_name,
                    "kind": self.source_kind,
                    "fingerprint": self.source_fingerprint,
                },
                "weight_format": self.weight_format,
                "method": self.method,
                "notes": list(self.notes),
                "model": self.model.to_dict(),
                "file": WEIGHTS_FILE,
                "file_bytes": self.file_bytes,
                "units": [_run_to_dict(run) for run in self.units.values()],
                "tables": [_run_to_dict(run) for run in self.tables.values()],
            },
            indent=1,
        )


def table_key(unit: str, tensor: str) -> str:
    """What a table is called in the manifest and in the file."""
    return f"{unit}/{tensor}"


def read_manifest(folder: Path) -> PackedManifest:
    """Read and check manifest.json and the size of the file it describes; no weight is read.

    Raises CheckpointError: missing, damaged, of another version, or contradicting itself or the file.
    """
    path = folder / PACKED_MANIFEST
    values = read_large_json(path)
    version = values.get(PACKED_KEY)
    if version != VERSION:
        raise CheckpointError(
            "a packed model of another version",
            file=path,
            found=f"version {version!r}",
            expected=VERSION,
            remedy=_PACK_AGAIN + " with this version of flexrun",
        )
    try:
        source = values["source"]
        manifest = PackedManifest(
            created_by=str(values["created_by"]),
            source_name=str(source["name"]),
            source_kind=str(source["kind"]),
            source_fingerprint=str(source["fingerprint"]),
            weight_format=str(values["weight_format"]),
            method=str(values["method"]),
            notes=tuple(str(note) for note in values["notes"]),
            model=ModelConfig.from_dict(values["model"]),
            file_bytes=_size(values["file_bytes"]),
            units={run.name: run for run in map(_run_from_dict, values["units"])},
            tables={run.name: run for run in map(_run_from_dict, values["tables"])},
        )
    except (KeyError, TypeError, AttributeError, ValueError, ModelConfigError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(f"the manifest is damaged: {reason}", file=path, remedy=_PACK_AGAIN) from None
    _check_places(path, manifest)
    weights = folder / WEIGHTS_FILE
    with open_data_file(weights) as handle:
        size = handle.seek(0, 2)
    if size != manifest.file_bytes:
        raise CheckpointError(
            "the file of weights is cut off"
            if size < manifest.file_bytes
            else "the file of weights is too long",
            file=weights,
            found=f"{size} bytes",
            expected=f"{manifest.file_bytes}",
            remedy="Copy the folder again, or pack the model again",
        )
    return manifest


def read_large_json(path: Path) -> dict[str, Any]:
    """A JSON object that packing wrote: vocabularies and manifests may be larger than a usual description."""
    with open_data_file(path) as handle:
        try:
            raw = handle.read(MAX_JSON_BYTES + 1)
        except OSError as error:
            raise CheckpointError(f"cannot be read: {error.strerror}", file=path) from None
    if len(raw) > MAX_JSON_BYTES:
        raise CheckpointError(
            "the file is damaged: too large", file=path, expected=f"at most {MAX_JSON_BYTES}"
        )
    try:
        values = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"the file is damaged: {error}", file=path, found=f"{len(raw)} bytes", remedy=_PACK_AGAIN
        ) from None
    if not isinstance(values, dict):
        raise CheckpointError(
            "must hold a JSON object", file=path, found=type(values).__name__, remedy=_PACK_AGAIN
        )
    return values


def _check_places(path: Path, manifest: PackedManifest) -> None:
    end, previous = 0, "the file's header"
    runs = [run for runs in (manifest.units, manifest.tables) for run in runs.values() if run.nbytes]
    for run in sorted(runs, key=lambda run: run.offset_bytes):
        if run.offset_bytes < end or run.offset_bytes % UNIT_ALIGN_BYTES or not run.offset_bytes:
            raise CheckpointError(
                f"the manifest is damaged: {run.name} overlaps {previous} or is not aligned",
                file=path,
                found=f"byte {run.offset_bytes}",
                expected=f"a multiple of {UNIT_ALIGN_BYTES} from {end} on",
                remedy=_PACK_AGAIN,
            )
        end, previous = run.offset_bytes + run.nbytes, run.name
    if end > manifest.file_bytes:
        raise CheckpointError(
            f"the manifest is damaged: {previous} ends beyond the file",
            file=path,
            found=f"byte {end}",
            expected=f"at most {manifest.file_bytes}",
            remedy=_PACK_AGAIN,
        )


def _run_to_dict(run: PackedRun) -> dict[str, Any]:
    return {
        "name": run.name,
        "offset_bytes": run.offset_bytes,
        "nbytes": run.nbytes,
        "checksum": run.checksum,
        "slots": [
            {
                "name": slot.name,
                "shape": list(slot.shape),
                "format": slot.format.name,
                "offset_bytes": slot.offset_bytes,
                "nbytes": slot.nbytes,
                "is_linear": slot.is_linear,
                "transposed": slot.transposed,
                "row_start": slot.row_start,
            }
            for slot in run.slots
        ],
    }


def _run_from_dict(values: Mapping[str, Any]) -> PackedRun:
    name = values["name"]
    nbytes = _size(values["nbytes"])
    slots = tuple(_slot_from_dict(slot) for slot in values["slots"])
    end = 0
    for slot in slots:
        fits = slot.nbytes == slot.format.nbytes(slot.shape) and slot.offset_bytes + slot.nbytes <= nbytes
        if not fits or slot.offset_bytes < end or slot.offset_bytes % TENSOR_ALIGN_BYTES:
            raise ValueError(f"tensor {slot.name} of {name} does not fit its place")
        end = slot.offset_bytes + slot.nbytes
    return PackedRun(
        name=str(name),
        offset_bytes=_size(values["offset_bytes"]),
        nbytes=nbytes,
        checksum=str(values["checksum"]),
        slots=slots,
    )


def _slot_from_dict(values: Mapping[str, Any]) -> TensorSlot:
    return TensorSlot(
        name=str(values["name"]),
        shape=tuple(_size(n) for n in values["shape"]),
        format=parse_format(values["format"]),
        offset_bytes=_size(values["offset_bytes"]),
        nbytes=_size(values["nbytes"]),
        is_linear=bool(values["is_linear"]),
        transposed=bool(values["transposed"]),
        # Folders packed before tensors could be in several formats say nothing: every slot is a whole tensor.
        row_start=_size(values.get("row_start", 0)),
    )


def _size(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no size")
    return value
