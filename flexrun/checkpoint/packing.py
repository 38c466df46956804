"""Writing a packed model folder: each unit's run of bytes at a multiple of 4 KiB of one safetensors file.

The folder appears whole or not at all (flexrun.checkpoint.staging). All sizes are known from headers, so the
disk is asked for its space before the first byte is written. One run at a time is in memory; a source fills it
in row blocks of at most 32 MiB.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from flexrun import __version__
from flexrun.checkpoint.base import Checkpoint, CheckpointError
from flexrun.checkpoint.manifest import WEIGHTS_FILE, PackedManifest, PackedRun, table_key
from flexrun.checkpoint.packed import PackedSource, checksum, head_slices
from flexrun.checkpoint.resolve import PACKED_MANIFEST, is_packed_folder
from flexrun.checkpoint.staging import StagedFolder, exclusive, write_file
from flexrun.model.assemble import DecoderModel
from offload.disk import DiskFile, DiskPool
from offload.host import format_bytes, free_disk_bytes
from offload.units import TensorSpec, Unit
from offload.weights import UNIT_ALIGN_BYTES, TensorSlot, UnitLayout, WeightSource, align_up

GGUF_METADATA_FILE = "gguf_metadata.json"
# Files of a model's folder that packing takes along, so that the folder is a model of its own.
_COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "LICENSE*",
    "NOTICE*",
    "additional_chat_templates/*.jinja",
)
_MAX_COMPANION_BYTES = 256 << 20
# For the manifest and the file system's own records of the files.
_OVERHEAD_BYTES = 1 << 20

Progress = Callable[[int, int, str], None]
"""Called with (done_bytes, total_bytes, what was written) after each unit and table."""


class PackableSource(WeightSource, Protocol):
    """What packing needs to know of a source beyond its weights."""

    weight_format: str
    notes: tuple[str, ...]

    def fingerprint(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedFolder:
    """A packed folder on disk. nbytes: what its files take; reused: it was there already."""

    path: Path
    nbytes: int
    reused: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Item:
    """A unit or table, and where it goes in the file; spec is None for a unit."""

    name: str
    unit: Unit
    spec: TensorSpec | None
    layout: UnitLayout
    offset_bytes: int

    @property
    def space_bytes(self) -> int:
        return align_up(self.layout.nbytes, UNIT_ALIGN_BYTES)


def pack_model(
    source: PackableSource,
    model: DecoderModel,
    folder: Path,
    *,
    name: str = "",
    overwrite: bool = False,
    progress: Progress | None = None,
) -> PackedFolder:
    """Write all weights of `source`, as it stores them, into a new packed folder.

    name: what the model is called, for people. A checkpoint's configuration, tokenizer, template and licence
    files are taken along. overwrite: replace a packed folder of that name once the new one is complete; anything
    else of that name is never touched.
    Raises CheckpointError before the first byte is written if the folder exists or the disk lacks the space;
    DiskError if writing fails. Nothing is left behind then.
    """
    folder = Path(folder).absolute()
    _check_target(folder, overwrite)
    header, items, file_bytes = _lay_out(source, model)
    checkpoint = getattr(source, "checkpoint", None)
    companions = _companions(checkpoint) if isinstance(checkpoint, Checkpoint) else {}
    needed = file_bytes + sum(len(data) for data in companions.values()) + _OVERHEAD_BYTES
    check_space(folder, needed)
    with StagedFolder(folder) as staged:
        runs = _write_weights(staged.path / WEIGHTS_FILE, source, header, items, file_bytes, progress)
        for file_name, data in companions.items():
            (staged.path / file_name).parent.mkdir(exist_ok=True)
            write_file(staged.path / file_name, data)
        manifest = PackedManifest(
            created_by=f"flexrun {__version__}",
            source_name=name,
            source_kind=checkpoint.kind if isinstance(checkpoint, Checkpoint) else "dummy",
            source_fingerprint=source.fingerprint(),
            weight_format=source.weight_format,
            method=str(getattr(source, "method", "")),
            model=model.config,
            file_bytes=file_bytes,
            units={run.name: run for item, run in runs if item.spec is None},
            tables={run.name: run for item, run in runs if item.spec is not None},
            notes=source.notes,
        )
        write_file(staged.path / PACKED_MANIFEST, manifest.to_json().encode())
        staged.publish()
    return PackedFolder(path=folder, nbytes=_folder_nbytes(folder), reused=False)


def packed_nbytes(source: PackableSource, model: DecoderModel) -> int:
    """Exact bytes of the file of weights that `pack_model` would write. Reads no weights."""
    return _lay_out(source, model)[2]


def cache_key(source: PackableSource) -> str:
    """Names what packing a source gives: its fingerprint, format and quantiser. Fit for a folder's name."""
    method = str(getattr(source, "method", ""))
    unpacked = getattr(source, "unpacked_format", None)
    text = json.dumps([source.fingerprint(), source.weight_format, method, str(unpacked)])
    return f"{source.weight_format}-{hashlib.sha256(text.encode()).hexdigest()[:24]}"


def cached_pack(
    source: PackableSource,
    model: DecoderModel,
    cache_folder: Path,
    key: str | None = None,
    *,
    name: str = "",
    progress: Progress | None = None,
) -> PackedFolder:
    """The packed form of `source` in a cache folder, made once and found again by `key` (`cache_key`).

    Processes that want the same one wait for the first. An entry that is damaged, or that lays its tensors out in
    another way than the source does now, is made anew. Raises as `pack_model` does.
    """
    cache_folder = Path(cache_folder).absolute()
    key = cache_key(source) if key is None else key
    if not key or Path(key).name != key:
        raise ValueError(f"a cache key must be fit for a folder's name, got {key!r}")
    folder = cache_folder / key
    with exclusive(cache_folder / f".{key}.lock"):
        if is_packed_folder(folder):
            with contextlib.suppress(CheckpointError):
                if _is_current(PackedSource(folder), source, model):
                    return PackedFolder(path=folder, nbytes=_folder_nbytes(folder), reused=True)
        return pack_model(source, model, folder, name=name, overwrite=True, progress=progress)


def _is_current(packed: PackedSource, source: PackableSource, model: DecoderModel) -> bool:
    """Whether a packed folder holds what packing the source would give."""
    return packed.fingerprint() == source.fingerprint() and all(
        packed.layout(unit) == source.layout(unit) for unit in model.units
    )


def check_space(folder: Path, needed_bytes: int) -> None:
    """Raise CheckpointError if the disk of `folder` has less than needed_bytes free."""
    free = free_disk_bytes(folder.parent)
    if free < needed_bytes:
        raise CheckpointError(
            "not enough disk space for the packed model",
            file=folder,
            found=f"{format_bytes(free)} free",
            expected=f"{format_bytes(needed_bytes)}",
            remedy="Free some space, choose a smaller weight format, or name a folder on a larger disk",
        )


def _check_target(folder: Path, overwrite: bool) -> None:
    if not os.path.lexists(folder):
        return
    if folder.is_dir() and not folder.is_symlink():
        if not any(folder.iterdir()):
            folder.rmdir()
            return
        if is_packed_folder(folder):
            if overwrite:
                return
            raise CheckpointError(
                "a packed model is there already", file=folder, remedy="Add --overwrite to replace it"
            )
    raise CheckpointError(
        "something that is not a packed model is there, and it is not replaced",
        file=folder,
        remedy="Name another folder, or remove it yourself",
    )


def _lay_out(source: WeightSource, model: DecoderModel) -> tuple[bytes, list[_Item], int]:
    """The file's header, its units and tables in the order in which a pass visits them, and its bytes."""
    tied = head_slices(model)
    parts: list[tuple[str, Unit, TensorSpec | None, UnitLayout]] = []
    for unit in model.units:
        parts.append((unit.name, unit, None, source.layout(unit)))
        for spec in unit.tensors:
            if spec.kind == "rows" and spec.parts[0].source not in tied:
                fmt = source.table_format(spec)
                slot = TensorSlot(
                    name=spec.name,
                    shape=spec.shape,
                    format=fmt,
                    offset_bytes=0,
                    nbytes=fmt.nbytes(spec.shape),
                    is_linear=True,
                )
                layout = UnitLayout(slots=(slot,), nbytes=slot.nbytes)
                parts.append((table_key(unit.name, spec.name), unit, spec, layout))
    entries: dict[str, object] = {"__metadata__": {"format": "pt", "producer": f"flexrun {__version__}"}}
    offset = 0
    offsets: list[int] = []
    for name, _, _, layout in parts:
        offsets.append(offset)
        for tensor, nbytes in _with_padding(name, layout.nbytes):
            entries[tensor] = {"dtype": "U8", "shape": [nbytes], "data_offsets": [offset, offset + nbytes]}
            offset += nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    # Spaces after the JSON put the data, too, at a multiple of the alignment.
    data_start = align_up(8 + len(text), UNIT_ALIGN_BYTES)
    header = (data_start - 8).to_bytes(8, "little") + text.ljust(data_start - 8)
    items = [
        _Item(name=name, unit=unit, spec=spec, layout=layout, offset_bytes=data_start + place)
        for (name, unit, spec, layout), place in zip(parts, offsets, strict=True)
    ]
    return header, items, data_start + offset


def _with_padding(name: str, nbytes: int) -> Iterator[tuple[str, int]]:
    """The tensors that hold nbytes: the bytes themselves, and what fills up the last page."""
    if nbytes:
        yield name, nbytes
    gap = align_up(nbytes, UNIT_ALIGN_BYTES) - nbytes
    if gap:
        yield f"{name}/padding", gap


def _write_weights(
    path: Path,
    source: WeightSource,
    header: bytes,
    items: list[_Item],
    file_bytes: int,
    progress: Progress | None,
) -> list[tuple[_Item, PackedRun]]:
    _reserve(path, file_bytes)
    runs: list[tuple[_Item, PackedRun]] = []
    total = sum(item.layout.nbytes for item in items)
    done = 0
    # Page-aligned, so that it can be written past the page cache.
    largest = max(len(header), *(item.space_bytes for item in items))
    memory = torch.frombuffer(mmap.mmap(-1, largest), dtype=torch.uint8)
    with DiskPool() as pool, DiskFile(path, pool, writable=True) as file:
        memory[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        file.write_from(memory, 0, len(header))
        for item in items:
            run = memory[: item.layout.nbytes]
            if item.spec is None:
                source.fill(item.unit, run)
            else:
                source.fill_table(item.spec, run)
            memory[item.layout.nbytes : item.space_bytes].zero_()
            file.write_from(memory, item.offset_bytes, item.space_bytes)
            runs.append((item, _run_of(item, run)))
            done += item.layout.nbytes
            if progress is not None:
                progress(done, total, item.name)
        file.sync()
    return runs


def _run_of(item: _Item, run: Tensor) -> PackedRun:
    return PackedRun(
        name=item.name,
        offset_bytes=item.offset_bytes,
        nbytes=item.layout.nbytes,
        checksum=checksum(iter([run.numpy().data])),
        slots=item.layout.slots,
    )


def _reserve(path: Path, nbytes: int) -> None:
    """A file of nbytes whose blocks are set aside, where the file system can."""
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666)
    try:
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise CheckpointError(
                    f"not enough disk space for the packed model: {error.strerror}",
                    file=path.parent,
                    expected=format_bytes(nbytes),
                    remedy="Free some space, choose a smaller weight format, or name a folder on a larger disk",
                ) from None
            os.ftruncate(fd, nbytes)
    finally:
        os.close(fd)


def _companions(checkpoint: Checkpoint) -> Mapping[str, bytes]:
    """File name -> content of what is taken along beside the weights."""
    if checkpoint.kind == "gguf":
        files = {GGUF_METADATA_FILE: json.dumps(checkpoint.config, ensure_ascii=False).encode()}
        if checkpoint.generation_config:
            files["generation_config.json"] = json.dumps(checkpoint.generation_config).encode()
        return files
    found: dict[str, bytes] = {}
    for pattern in _COMPANIONS:
        for file in sorted(checkpoint.path.glob(pattern)):
            if file.is_file() and file.stat().st_size <= _MAX_COMPANION_BYTES:
                found[file.relative_to(checkpoint.path).as_posix()] = file.read_bytes()
    return found


def _folder_nbytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
