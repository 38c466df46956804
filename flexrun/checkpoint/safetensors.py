"""Hugging Face folders: the safetensors header, shards with or without an index, configuration files.

Format: 8 bytes little-endian header length, a JSON object {name: {dtype, shape, data_offsets}}, then
the data, to which the offsets are relative (huggingface/safetensors, README "Format").
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

from flexrun.checkpoint.base import (
    DTYPE_BLOCKS,
    Checkpoint,
    CheckpointError,
    TensorInfo,
    open_data_file,
    read_json_object,
    shown,
    stored_nbytes,
)

MAX_HEADER_BYTES = 100_000_000  # the reference implementation's own limit
_DOWNLOAD_AGAIN = "The file is damaged or cut off; download it again"
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_NOT_WEIGHTS = re.compile(r"(training_args|optimizer|scheduler|rng_state.*)\.(bin|pt|pth)")


def open_safetensors_folder(folder: Path) -> Checkpoint:
    """Open a folder with config.json and safetensors files; every header is checked, no weight is read."""
    folder = folder.absolute()
    config_path = folder / "config.json"
    if not config_path.exists():
        raise CheckpointError(
            "config.json is missing: the architecture is read from it and never guessed",
            file=folder,
            remedy="Copy config.json from the model's page into the folder",
        )
    config = read_json_object(config_path)
    generation_path = folder / "generation_config.json"
    return Checkpoint(
        path=folder,
        kind="hf",
        tensors=MappingProxyType(_folder_tensors(folder)),
        config=config,
        generation_config=read_json_object(generation_path) if generation_path.exists() else {},
        quantization_config=_quantization_config(folder, config),
    )


def has_weights(folder: Path) -> bool:
    """True if the folder holds a safetensors file or an index of some."""
    return bool(_weight_files(folder)) or _index_file(folder) is not None


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Parse and check one safetensors file's header.

    Every tensor's type, shape and offsets must agree, and the tensors must fill the data exactly: no
    overlap, no hole, nothing beyond or after. CheckpointError otherwise.
    """
    path = path.absolute()
    header, data_start, file_bytes = _read_header_json(path)
    data_bytes = file_bytes - data_start
    tensors: dict[str, TensorInfo] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        tensors[name] = _tensor_info(path, name, entry, data_start, data_bytes)
    position = data_start
    previous = "the header"
    for info in sorted(tensors.values(), key=lambda t: (t.offset_bytes, t.nbytes)):
        if info.offset_bytes != position:
            kind = "overlaps" if info.offset_bytes < position else "leaves a hole after"
            raise CheckpointError(
                f"its data {kind} {shown(previous)}",
                file=path,
                tensor=info.name,
                found=f"begin at byte {info.offset_bytes}",
                expected=f"{position}",
                remedy=_DOWNLOAD_AGAIN,
            )
        position += info.nbytes
        previous = info.name
    if position != file_bytes:
        raise CheckpointError(
            "bytes after the last tensor belong to no tensor",
            file=path,
            found=f"{file_bytes} bytes",
            expected=f"{position}",
            remedy=_DOWNLOAD_AGAIN,
        )
    return tensors


def refuse_pickle(folder: Path, files: Iterable[Path]) -> None:
    """Raise CheckpointError with the way to convert if ``files`` holds pickled weights."""
    pickles = [f.name for f in files if f.suffix in _PICKLE_SUFFIXES and not _NOT_WEIGHTS.fullmatch(f.name)]
    if pickles:
        raise CheckpointError(
            "only pickled weights are here, and flexrun never unpickles: a pickle can run any code",
            file=folder,
            found=", ".join(pickles[:4]) + (", ..." if len(pickles) > 4 else ""),
            expected="*.safetensors",
            remedy=(
                "Convert it, if you trust its source, with transformers: "
                'python -c "from transformers import AutoModelForCausalLM as M; '
                f"M.from_pretrained(r'{folder}', dtype='auto').save_pretrained(r'{folder}-safetensors')\" "
                "and copy the tokenizer files beside the result"
            ),
        )


def _read_header_json(path: Path) -> tuple[dict[str, Any], int, int]:
    """The header object, where the data begins, and the file's size."""
    with open_data_file(path) as handle:
        fd = handle.fileno()
        try:
            file_bytes = os.fstat(fd).st_size
            prefix = os.pread(fd, 9, 0)
            if len(prefix) < 9:
                raise CheckpointError(
                    "too short for a safetensors header",
                    file=path,
                    found=f"{file_bytes} bytes",
                    expected="at least 10",
                    remedy=_DOWNLOAD_AGAIN,
                )
            header_bytes = int.from_bytes(prefix[:8], "little")
            if prefix.startswith(b"version https://git-lfs"[:9]):
                raise CheckpointError(
                    "this is a Git LFS pointer, not the file itself",
                    file=path,
                    found=f"{file_bytes} bytes",
                    remedy="Run git lfs pull in the repository, or download the file",
                )
            limit = min(MAX_HEADER_BYTES, file_bytes - 8)
            if not 2 <= header_bytes <= limit:
                raise CheckpointError(
                    "impossible header length",
                    file=path,
                    found=f"{header_bytes} bytes",
                    expected=f"2 to {limit} in a file of {file_bytes} bytes",
                    remedy=_DOWNLOAD_AGAIN,
                )
            # Looked at before the whole header is read: a wrong length nearly never ends in a brace.
            tail_bytes = min(header_bytes, 4096)
            tail = os.pread(fd, tail_bytes, 8 + header_bytes - tail_bytes).rstrip(b" ")
            if prefix[8:9] != b"{" or not tail.endswith(b"}"):
                raise CheckpointError(
                    f"the header of {header_bytes} bytes is not a JSON object",
                    file=path,
                    remedy=_DOWNLOAD_AGAIN,
                )
            raw = os.pread(fd, header_bytes, 8)
        except OSError as error:
            raise CheckpointError(f"cannot be read: {error.strerror}", file=path) from None
    try:
        header = json.loads(raw, object_pairs_hook=_unique_keys)
    except _DuplicateKey as error:
        raise CheckpointError(
            f"the header names {shown(error.key)} twice", file=path, remedy=_DOWNLOAD_AGAIN
        ) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"the header of {header_bytes} bytes is not valid JSON: {str(error) or type(error).__name__}",
            file=path,
            remedy=_DOWNLOAD_AGAIN,
        ) from None
    if not isinstance(header, dict):
        raise CheckpointError("the header is not a JSON object", file=path, found=type(header).__name__)
    return header, 8 + header_bytes, file_bytes


class _DuplicateKey(Exception):
    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique: dict[str, Any] = {}
    for key, value in pairs:
        if key in unique:
            raise _DuplicateKey(key)
        unique[key] = value
    return unique


def _tensor_info(path: Path, name: str, entry: Any, data_start: int, data_bytes: int) -> TensorInfo:
    def bad(what: str, found: object, expected: object = None) -> CheckpointError:
        return CheckpointError(
            what, file=path, tensor=name, found=found, expected=expected, remedy=_DOWNLOAD_AGAIN
        )

    if not isinstance(entry, dict):
        raise bad("its header entry is not an object", type(entry).__name__)
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or DTYPE_BLOCKS.get(dtype, (0, 0))[0] != 1:
        plain = ", ".join(d for d, (block_len, _) in DTYPE_BLOCKS.items() if block_len == 1)
        raise CheckpointError(
            "unsupported dtype", file=path, tensor=name, found=shown(str(dtype)), expected=f"one of {plain}"
        )
    if not isinstance(shape, list):
        raise bad("its shape is not a list", type(shape).__name__)
    if not (isinstance(offsets, list) and len(offsets) == 2 and all(type(o) is int for o in offsets)):
        raise bad("bad data_offsets", shown(repr(offsets)), "two integers")
    begin, end = offsets
    if not 0 <= begin <= end <= data_bytes:
        raise bad("its data lies outside the file", f"bytes {begin} to {end}", f"0 to {data_bytes}")
    try:
        nbytes = stored_nbytes(dtype, shape)
    except ValueError as error:
        raise bad(f"bad shape: {error}", shown(repr(shape))) from None
    if nbytes != end - begin:
        raise bad(f"{dtype} of shape {shape} does not fit its offsets", f"{end - begin} bytes", f"{nbytes}")
    return TensorInfo(
        name=name,
        dtype=dtype,
        shape=tuple(shape),
        file=path,
        offset_bytes=data_start + begin,
        nbytes=nbytes,
    )


def _folder_tensors(folder: Path) -> dict[str, TensorInfo]:
    index = _index_file(folder)
    weight_map: Mapping[str, str] = {}
    if index is not None:
        weight_map = _read_index(folder, index)
        files = [folder / name for name in sorted(set(weight_map.values()))]
        _check_shards_present(folder, index, weight_map)
    else:
        files = _weight_files(folder)
        _check_shard_numbers(folder, files)
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for name, info in read_header(file).items():
            if name in weight_map and folder / weight_map[name] != file:
                continue  # the index says which of two copies counts
            if name in tensors:
                raise CheckpointError(
                    "stored in two files, and no index says which one counts",
                    file=folder,
                    tensor=name,
                    found=f"{tensors[name].file.name} and {file.name}",
                    remedy="Move the files that do not belong to the model out of the folder",
                )
            tensors[name] = info
    for name, file_name in weight_map.items():
        if name not in tensors:
            raise CheckpointError(
                f"the index {index.name if index else ''} says it is in {file_name}, which does not hold it",
                file=folder / file_name,
                tensor=name,
                remedy="The shards and the index are of different versions; download the model again",
            )
    if not tensors:
        raise CheckpointError("no tensors", file=folder, found=f"{len(files)} empty safetensors files")
    return tensors


def _index_file(folder: Path) -> Path | None:
    indices = sorted(folder.glob("*.safetensors.index.json"))
    plain = folder / "model.safetensors.index.json"
    if plain in indices:
        indices = [plain]
    if len(indices) > 1:
        raise CheckpointError(
            "more than one index of shards",
            file=folder,
            found=", ".join(file.name for file in indices),
            remedy="Keep the one that belongs to the model",
        )
    if not indices:
        return None
    # One whole file beside an index of shards counts, as it does for transformers.
    single = folder / "model.safetensors"
    if single.exists() and single.name not in _read_index(folder, indices[0]).values():
        return None
    return indices[0]


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the model of a folder without an index."""
    single = folder / "model.safetensors"
    if single.exists():
        return [single]
    files = [f for f in sorted(folder.glob("*.safetensors")) if not f.name.startswith("adapter_")]
    # Some repositories hold the weights twice, the second time in their author's own naming.
    others = [f for f in files if not f.name.startswith("consolidated")]
    return others or files


def _read_index(folder: Path, index: Path) -> dict[str, str]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError("the index has no weight_map", file=index, remedy=_DOWNLOAD_AGAIN)
    for name, file_name in weight_map.items():
        inside = isinstance(file_name, str) and file_name.endswith(".safetensors")
        if inside:
            pure = PurePosixPath(file_name)
            inside = not pure.is_absolute() and ".." not in pure.parts and not set("\\:\0") & set(file_name)
        if not inside:
            raise CheckpointError(
                "the index names a file that is not a safetensors file inside the model folder",
                file=index,
                tensor=name,
                found=shown(str(file_name)),
                remedy="Do not use this model unless you trust its source and have corrected the index",
            )
    return weight_map


def _check_shards_present(folder: Path, index: Path, weight_map: Mapping[str, str]) -> None:
    missing = [name for name in sorted(set(weight_map.values())) if not (folder / name).exists()]
    if missing:
        lost = sum(file_name in set(missing) for file_name in weight_map.values())
        raise CheckpointError(
            f"{len(missing)} of {len(set(weight_map.values()))} shards named by {index.name} are missing",
            file=folder / missing[0],
            found=f"no {', '.join(missing[:4])}{', ...' if len(missing) > 4 else ''}; {lost} tensors lost",
            remedy="Download the missing files",
        )


def _check_shard_numbers(folder: Path, files: list[Path]) -> None:
    """Numbered shards without an index must be complete: the names say how many there are."""
    present: dict[tuple[str, int], set[int]] = {}
    for file in files:
        match = _SHARD.fullmatch(file.name)
        if match:
            present.setdefault((match["stem"], int(match["count"])), set()).add(int(match["number"]))
    for (stem, count), numbers in present.items():
        absent = next((n for n in range(1, count + 1) if n not in numbers), None)
        if absent is not None:
            raise CheckpointError(
                "a shard is missing",
                file=folder / f"{stem}-{absent:05d}-of-{count:05d}.safetensors",
                found=f"{len(numbers)} shards",
                expected=f"{count}",
                remedy="Download the missing files",
            )


def _quantization_config(folder: Path, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """How the weights are quantised: from config.json, or the separate file of older GPTQ/AWQ tools."""
    own = config.get("quantization_config")
    if own is not None:
        if not isinstance(own, dict):
            raise CheckpointError(
                "quantization_config is not an object",
                file=folder / "config.json",
                found=type(own).__name__,
            )
        return own
    for file_name, method in (("quantize_config.json", "gptq"), ("quant_config.json", "awq")):
        if (folder / file_name).exists():
            return {"quant_method": method, **read_json_object(folder / file_name)}
    return None
