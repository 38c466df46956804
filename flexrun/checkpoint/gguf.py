"""GGUF files: metadata and tensor table of versions 2 and 3, little-endian, in one file or in parts.

Layout (ggml/docs/gguf.md): magic, version, tensor count, key-value count; the key-value pairs; per
tensor its name, dimensions (fastest first), type and offset; padding; the data, to which the offsets
are relative. The header is mapped while it is parsed and every field is checked against what is left of
the file before anything of its size is made.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from flexrun.checkpoint.base import (
    MAX_DIM_SIZE,
    Checkpoint,
    CheckpointError,
    TensorInfo,
    open_data_file,
    shown,
    stored_nbytes,
)

GGUF_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")

DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
MAX_TENSOR_DIMS = 4
MAX_NAME_BYTES = 65_535  # keys, by the specification; tensor names are far shorter
MAX_STRING_BYTES = 16 << 20
MAX_ARRAY_LEN = 1 << 21  # eight times the largest vocabulary in use
MAX_ARRAY_DEPTH = 4
MAX_PARTS = 10_000
_DOWNLOAD_AGAIN = "The file is damaged or cut off; download it again"

# Metadata value types: id -> struct code; bool, string and array are handled by their ids.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9

# ggml tensor types, by id. Those missing from DTYPE_BLOCKS are known but not supported.
_GGML_TYPES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    30: "BF16",
}
_UNSUPPORTED_TYPES = {
    4: "Q4_2 (removed from ggml)",
    5: "Q4_3 (removed from ggml)",
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def open_gguf(path: Path) -> Checkpoint:
    """Open a GGUF model: one file, or any one of its parts (STEM-00001-of-0000N.gguf).

    ``config`` is the metadata of the (first) file; arrays are lists. Every header is checked, no weight
    is read.
    """
    path = path.absolute()
    part = _read_part(path)
    count = part.metadata.get("split.count", 1)
    if type(count) is not int or not 0 <= count <= MAX_PARTS:
        raise CheckpointError("bad split.count", file=path, found=repr(count), expected=f"0 to {MAX_PARTS}")
    metadata, tensors = part.metadata, part.tensors
    first = path
    if count > 1:
        first, metadata, tensors = _read_all_parts(path, part, count)
    if not isinstance(metadata.get("general.architecture"), str):
        raise CheckpointError("the metadata names no general.architecture", file=first)
    if not tensors:
        raise CheckpointError(
            "no tensors: a file that holds only a vocabulary", file=first, remedy="Give the model's own file"
        )
    return Checkpoint(
        path=first,
        kind="gguf",
        tensors=MappingProxyType(tensors),
        config=metadata,
        generation_config=_special_tokens(first, metadata),
    )


def _read_all_parts(
    path: Path, part: _Part, count: int
) -> tuple[Path, dict[str, Any], dict[str, TensorInfo]]:
    match = GGUF_PART.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        raise CheckpointError(
            f"this is one of {count} parts, and its name does not lead to the others",
            file=path,
            expected=f"a name such as MODEL-00001-of-{count:05d}.gguf",
            remedy="Give the parts their original names",
        )
    files = [path.with_name(f"{match['stem']}-{n:05d}-of-{count:05d}.gguf") for n in range(1, count + 1)]
    missing = [file for file in files if not file.exists()]
    if missing:
        raise CheckpointError(
            f"{len(missing)} of {count} parts are missing",
            file=missing[0],
            remedy="Download the missing parts",
        )
    tensors: dict[str, TensorInfo] = {}
    metadata: dict[str, Any] = {}
    for number, file in enumerate(files):
        one = part if file == path else _read_part(file)
        stated = (one.metadata.get("split.no"), one.metadata.get("split.count"))
        if stated != (number, count):
            raise CheckpointError(
                "the part's metadata disagrees with its name",
                file=file,
                found=f"split.no {stated[0]}, split.count {stated[1]}",
                expected=f"{number} and {count}",
                remedy="Give the parts their original names",
            )
        if number == 0:
            metadata = one.metadata
        for name, info in one.tensors.items():
            if name in tensors:
                raise CheckpointError(
                    f"also stored in {tensors[name].file.name}",
                    file=file,
                    tensor=name,
                    remedy=_DOWNLOAD_AGAIN,
                )
            tensors[name] = info
    total = metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise CheckpointError(
            f"the {count} parts do not hold all tensors",
            file=files[0],
            found=f"{len(tensors)} tensors",
            expected=f"{total}",
            remedy=_DOWNLOAD_AGAIN,
        )
    return files[0], metadata, tensors


def _read_part(path: Path) -> _Part:
    with open_data_file(path) as handle:
        try:
            file_bytes = os.fstat(handle.fileno()).st_size
            if file_bytes < 24:
                raise CheckpointError(
                    "too short for a GGUF header",
                    file=path,
                    found=f"{file_bytes} bytes",
                    expected="at least 24",
                    remedy=_DOWNLOAD_AGAIN,
                )
            mapped = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"cannot be read: {error}", file=path) from None
    with mapped:
        return _HeaderReader(path, mapped).read()


class _HeaderReader:
    """Walks one file's header; every read is bounded by the file's end."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self.path = path
        self.buffer = buffer
        self.file_bytes = len(buffer)
        self.position = 0

    def read(self) -> _Part:
        magic = self.take(4, "the magic")
        if magic != b"GGUF":
            raise CheckpointError(
                "not a GGUF file",
                file=self.path,
                found=f"first bytes {magic!r}",
                expected="b'GGUF'",
                remedy="If this is a Git LFS pointer or a web page, download the file itself",
            )
        version = self.number("I", "the version")
        if version not in (2, 3):
            if version & 0xFFFF == 0:
                self.fail("a big-endian file; only little-endian GGUF is supported", f"version {version:#x}")
            self.fail("unsupported GGUF version", version, "2 or 3", "Convert it with a current llama.cpp")
        n_tensors = self.number("Q", "the tensor count")
        n_pairs = self.number("Q", "the key-value count")
        left = self.file_bytes - self.position
        # The smallest entries: name length, dimension count, type, offset; key length, type, one byte.
        if n_tensors > left // 24:
            self.fail("impossible tensor count", n_tensors, f"at most {left // 24} in {left} bytes")
        if n_pairs > left // 13:
            self.fail("impossible key-value count", n_pairs, f"at most {left // 13} in {left} bytes")
        metadata: dict[str, Any] = {}
        for _ in range(n_pairs):
            key = self.string("a metadata key", MAX_NAME_BYTES)
            if not key or key in metadata:
                self.fail(f"metadata key {shown(key)} is {'repeated' if key else 'empty'}")
            metadata[key] = self.value(self.number("I", f"the type of {shown(key)}"), key)
        tensors = self.tensor_table(n_tensors, self.alignment(metadata))
        return _Part(metadata=metadata, tensors=tensors)

    def alignment(self, metadata: Mapping[str, Any]) -> int:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        power_of_two = type(alignment) is int and alignment > 0 and alignment & (alignment - 1) == 0
        if not power_of_two or alignment > MAX_ALIGNMENT:
            self.fail("bad general.alignment", alignment, f"a power of two up to {MAX_ALIGNMENT}")
        return alignment

    def tensor_table(self, n_tensors: int, alignment: int) -> dict[str, TensorInfo]:
        entries: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
        for _ in range(n_tensors):
            name = self.string("a tensor's name", MAX_NAME_BYTES)
            if not name or name in entries:
                self.fail(f"its name is {'repeated' if name else 'empty'}", tensor=name)
            entries[name] = self.tensor_entry(name, alignment)
        data_start = (self.position + alignment - 1) // alignment * alignment
        tensors = {
            name: TensorInfo(
                name=name,
                dtype=dtype,
                shape=shape,
                file=self.path,
                offset_bytes=data_start + offset,
                nbytes=nbytes,
            )
            for name, (dtype, shape, offset, nbytes) in entries.items()
        }
        end, previous = data_start, "the header"
        for info in sorted(tensors.values(), key=lambda t: (t.offset_bytes, t.nbytes)):
            if info.offset_bytes < end:
                self.fail(
                    f"its data overlaps {shown(previous)}",
                    f"begin at byte {info.offset_bytes}",
                    f"{end} or later",
                    tensor=info.name,
                )
            end, previous = info.offset_bytes + info.nbytes, info.name
            if end > self.file_bytes:
                self.fail(
                    "its data ends beyond the file",
                    f"a file of {self.file_bytes} bytes",
                    f"at least {end}",
                    tensor=info.name,
                )
        return tensors

    def tensor_entry(self, name: str, alignment: int) -> tuple[str, tuple[int, ...], int, int]:
        """dtype, row-major shape, offset within the data, bytes."""
        n_dims = self.number("I", f"the dimension count of {shown(name)}")
        if n_dims > MAX_TENSOR_DIMS:
            self.fail("too many dimensions", n_dims, f"at most {MAX_TENSOR_DIMS}", tensor=name)
        dims = [self.number("Q", f"a dimension of {shown(name)}") for _ in range(n_dims)]
        if any(dim > MAX_DIM_SIZE for dim in dims):
            self.fail("absurd dimensions", dims, f"at most {MAX_DIM_SIZE} each", tensor=name)
        type_id = self.number("I", f"the type of {shown(name)}")
        dtype = _GGML_TYPES.get(type_id)
        if dtype is None:
            raise CheckpointError(
                "unsupported tensor type",
                file=self.path,
                tensor=name,
                found=_UNSUPPORTED_TYPES.get(type_id, f"type id {type_id}"),
                expected=f"one of {', '.join(_GGML_TYPES.values())}",
                remedy="Use a file of another quantisation, such as Q4_K_M, Q5_K_M, Q6_K or Q8_0",
            )
        offset = self.number("Q", f"the offset of {shown(name)}")
        if offset % alignment:
            self.fail("its offset is not aligned", offset, f"a multiple of {alignment}", tensor=name)
        if offset > self.file_bytes:
            self.fail(
                "its data begins beyond the file",
                f"offset {offset}",
                f"at most {self.file_bytes}",
                tensor=name,
            )
        shape = tuple(reversed(dims))
        try:
            nbytes = stored_nbytes(dtype, shape)
        except ValueError as error:
            self.fail(f"bad shape: {error}", tensor=name)
        return dtype, shape, offset, nbytes

    def value(self, type_id: int, key: str, depth: int = 0) -> Any:
        if type_id in _SCALARS:
            return self.number(_SCALARS[type_id], f"the value of {shown(key)}")
        if type_id == _BOOL:
            return self.booleans(1, key)[0]
        if type_id == _STRING:
            return self.string(f"the value of {shown(key)}", MAX_STRING_BYTES)
        if type_id == _ARRAY:
            return self.array(key, depth)
        self.fail(f"unknown value type of metadata key {shown(key)}", type_id, "0 to 12")

    def array(self, key: str, depth: int) -> list[Any]:
        if depth >= MAX_ARRAY_DEPTH:
            self.fail(f"arrays of {shown(key)} are nested too deeply", f"over {MAX_ARRAY_DEPTH} levels")
        type_id = self.number("I", f"the element type of {shown(key)}")
        length = self.number("Q", f"the length of {shown(key)}")
        # Bytes that an element takes at least: strings and arrays begin with their lengths.
        code = _SCALARS.get(type_id)
        smallest = struct.calcsize(f"<{code}") if code else {_BOOL: 1, _STRING: 8, _ARRAY: 12}.get(type_id, 0)
        if smallest == 0:
            self.fail(f"unknown element type of metadata array {shown(key)}", type_id, "0 to 12")
        limit = min(MAX_ARRAY_LEN, (self.file_bytes - self.position) // smallest)
        if length > limit:
            self.fail(f"impossible length of metadata array {shown(key)}", length, f"at most {limit}")
        if code:
            return list(
                struct.unpack(f"<{length}{code}", self.take(length * smallest, f"array {shown(key)}"))
            )
        if type_id == _BOOL:
            return self.booleans(length, key)
        if type_id == _STRING:
            return self.strings(length, key)
        return [self.value(_ARRAY, key, depth + 1) for _ in range(length)]

    def booleans(self, length: int, key: str) -> list[bool]:
        raw = self.take(length, f"the value of {shown(key)}")
        if raw.strip(b"\0\1"):
            self.fail(f"metadata key {shown(key)} holds a boolean that is neither 0 nor 1")
        return [byte == 1 for byte in raw]

    def strings(self, length: int, key: str) -> list[str]:
        # Vocabularies make this the hot loop of opening a file, hence local names and one bound check.
        buffer, position, file_bytes = self.buffer, self.position, self.file_bytes
        unpack = struct.Struct("<Q").unpack_from
        found: list[str] = []
        try:
            for _ in range(length):
                begin = position + 8
                position = begin + unpack(buffer, position)[0]
                if position > file_bytes or position - begin > MAX_STRING_BYTES:
                    raise OverflowError
                found.append(buffer[begin:position].decode("utf-8"))
        except (struct.error, OverflowError):
            self.fail(
                f"a string of metadata array {shown(key)} has an impossible length",
                f"element {len(found)} of {length}",
                f"at most {min(MAX_STRING_BYTES, file_bytes)} bytes, inside the file",
            )
        except UnicodeDecodeError as error:
            self.fail(f"element {len(found)} of metadata array {shown(key)} is not UTF-8: {error.reason}")
        self.position = position
        return found

    def string(self, what: str, limit: int) -> str:
        length = self.number("Q", f"the length of {what}")
        if length > limit:
            self.fail(f"impossible length of {what}", f"{length} bytes", f"at most {limit}")
        raw = self.take(length, what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            self.fail(f"{what} is not UTF-8: {error.reason}")

    def number(self, code: str, what: str) -> Any:
        packed = struct.Struct(f"<{code}")
        return packed.unpack(self.take(packed.size, what))[0]

    def take(self, nbytes: int, what: str) -> bytes:
        begin = self.position
        if nbytes > self.file_bytes - begin:
            self.fail(f"the file ends inside {what}", f"{self.file_bytes - begin} bytes", f"{nbytes}")
        self.position = begin + nbytes
        return self.buffer[begin : begin + nbytes]

    def fail(
        self,
        what: str,
        found: object = None,
        expected: object = None,
        remedy: str = _DOWNLOAD_AGAIN,
        *,
        tensor: str | None = None,
    ) -> NoReturn:
        raise CheckpointError(
            f"{what} (near byte {self.position})" if tensor is None else what,
            file=self.path,
            tensor=tensor,
            found=found,
            expected=expected,
            remedy=remedy,
        )


def _special_tokens(path: Path, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Token ids under generation_config.json's names. Every end-of-turn token ends a generation."""

    def token_id(key: str) -> int | None:
        value = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if value is not None and (type(value) is not int or value < 0):
            raise CheckpointError(
                f"bad tokenizer.ggml.{key}_token_id", file=path, found=repr(value), expected="a token id"
            )
        return value

    special: dict[str, Any] = {}
    ends = [end for end in (token_id("eos"), token_id("eot"), token_id("eom")) if end is not None]
    if ends:
        special["eos_token_id"] = list(dict.fromkeys(ends))
    for ours, theirs in (("bos", "bos"), ("pad", "padding")):
        value = token_id(theirs)
        if value is not None:
            special[f"{ours}_token_id"] = value
    return special
