"""What a checkpoint is to the rest of flexrun: named tensors at byte offsets, and a configuration.

Nothing here reads weights or imports torch; ``flexrun.checkpoint.reading`` turns a `TensorInfo` into a
tensor. Sizes are exact, so that planning works from headers alone.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

# dtype name -> (elements per block, bytes per block). Plain types have blocks of one element.
# safetensors names for plain types; ggml names for block-quantised ones (ggml/docs/gguf.md).
DTYPE_BLOCKS: dict[str, tuple[int, int]] = {
    "F64": (1, 8),
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "F8_E4M3": (1, 1),
    "F8_E5M2": (1, 1),
    "I64": (1, 8),
    "I32": (1, 4),
    "I16": (1, 2),
    "I8": (1, 1),
    "U64": (1, 8),
    "U32": (1, 4),
    "U16": (1, 2),
    "U8": (1, 1),
    "BOOL": (1, 1),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}

MAX_DIMS = 16
MAX_DIM_SIZE = 2**48
MAX_CONFIG_BYTES = 16 << 20

CheckpointKind = Literal["hf", "gguf"]


class CheckpointError(ValueError):
    """A checkpoint cannot be used. The message names file, tensor, what was found and the remedy.

    The parts are also attributes, for reports: ``file``, ``tensor``, ``found``, ``expected``, ``remedy``
    (None where they do not apply).
    """

    def __init__(
        self,
        what: str,
        *,
        file: Path | str | None = None,
        tensor: str | None = None,
        found: object = None,
        expected: object = None,
        remedy: str | None = None,
    ) -> None:
        self.what, self.file, self.tensor = what, file, tensor
        self.found, self.expected, self.remedy = found, expected, remedy
        text = "" if file is None else f"{file}: "
        if tensor is not None:
            text += f"tensor {shown(tensor)}: "
        text += what
        facts = [f"{k} {v}" for k, v in (("found", found), ("expected", expected)) if v is not None]
        if facts:
            text += f" ({', '.join(facts)})"
        if remedy is not None:
            text += f". {remedy}"
        super().__init__(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One stored tensor: where its bytes lie and what they mean.

    ``shape`` is row-major, [out, in] for linear weights whatever the container's own order. ``nbytes``
    equals the exact size of ``shape`` in ``dtype``; block-quantised types need a last dimension that is
    a multiple of the block.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset_bytes: int
    nbytes: int

    def __post_init__(self) -> None:
        if self.offset_bytes < 0:
            raise ValueError(f"tensor {shown(self.name)}: offset_bytes is {self.offset_bytes}, must be >= 0")
        expected = stored_nbytes(self.dtype, self.shape)
        if self.nbytes != expected:
            raise ValueError(
                f"tensor {shown(self.name)}: {self.dtype} of shape {list(self.shape)} takes {expected} "
                f"bytes, got nbytes={self.nbytes}"
            )

    @property
    def numel(self) -> int:
        """Number of elements (1 for a zero-dimensional tensor)."""
        return math.prod(self.shape)

    @property
    def is_block_quantized(self) -> bool:
        """True for ggml's block types, whose raw form is uint8 of shape (..., bytes per row)."""
        return DTYPE_BLOCKS[self.dtype][0] > 1

    @property
    def raw_shape(self) -> tuple[int, ...]:
        """Shape of what `read_tensor` returns: ``shape``, or (..., bytes per row) for block types."""
        if not self.is_block_quantized:
            return self.shape
        block_len, block_bytes = DTYPE_BLOCKS[self.dtype]
        return (*self.shape[:-1], self.shape[-1] // block_len * block_bytes)

    @property
    def row_nbytes(self) -> int:
        """Bytes of one index of the first dimension (of the whole tensor if it has none)."""
        return stored_nbytes(self.dtype, self.shape[1:]) if len(self.shape) > 1 else self._vector_row_nbytes

    @property
    def _vector_row_nbytes(self) -> int:
        # A block-quantised vector cannot be cut at single elements: it counts as one row.
        block_len, block_bytes = DTYPE_BLOCKS[self.dtype]
        return self.nbytes if block_len > 1 else block_bytes

    @property
    def n_rows(self) -> int:
        """Length of the dimension that ``rows`` slices in the reading functions."""
        if not self.shape or (len(self.shape) == 1 and self.is_block_quantized):
            return 1
        return self.shape[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """An opened checkpoint: every header checked, no weight read.

    ``config`` is the parsed config.json for kind "hf" and the raw metadata (key -> value) for "gguf".
    ``generation_config`` is generation_config.json, or the special token ids of a GGUF file under the
    same names; {} if there is none. ``quantization_config`` describes GPTQ/AWQ safetensors, else None.
    """

    path: Path
    kind: CheckpointKind
    tensors: Mapping[str, TensorInfo]
    config: dict[str, Any]
    generation_config: dict[str, Any] = field(default_factory=dict)
    quantization_config: dict[str, Any] | None = None

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that hold tensors, each once, sorted."""
        return tuple(sorted({info.file for info in self.tensors.values()}))

    @property
    def nbytes(self) -> int:
        """Bytes of all stored tensors."""
        return sum(info.nbytes for info in self.tensors.values())

    def fingerprint(self) -> str:
        """Identity of configuration and weights, 32 hex digits; the same after a copy or a rename.

        Hashes the configuration, every tensor's name, type, shape and size, and a short sample from the
        middle of each tensor: a fine-tuned copy of equal shapes differs, yet only a few kilobytes per
        hundred tensors are read.
        """
        digest = hashlib.sha256()
        digest.update(json.dumps([self.kind, self.config], sort_keys=True, default=str).encode())
        by_file: dict[Path, list[TensorInfo]] = {}
        for name in sorted(self.tensors):
            info = self.tensors[name]
            digest.update(f"\0{name}\0{info.dtype}\0{info.shape}".encode("utf-8", "surrogatepass"))
            by_file.setdefault(info.file, []).append(info)
        samples: dict[str, bytes] = {}
        for file, infos in by_file.items():
            with open_data_file(file) as handle:
                for info in infos:
                    length = min(info.nbytes, 64)
                    position = info.offset_bytes + (info.nbytes - length) // 2
                    samples[info.name] = os.pread(handle.fileno(), length, position)
        for name in sorted(samples):
            digest.update(samples[name])
        return digest.hexdigest()[:32]


def stored_nbytes(dtype: str, shape: Iterable[int]) -> int:
    """Exact bytes of a tensor of ``shape`` (row-major) in ``dtype``.

    Raises ValueError for an unknown dtype, bad dimensions, or a last dimension that is no multiple of
    the block of a block-quantised type.
    """
    if dtype not in DTYPE_BLOCKS:
        raise ValueError(f"unknown dtype {dtype!r}; known: {', '.join(DTYPE_BLOCKS)}")
    dims = tuple(shape)
    if len(dims) > MAX_DIMS:
        raise ValueError(f"{len(dims)} dimensions, the limit is {MAX_DIMS}")
    for dim in dims:
        if type(dim) is not int or not 0 <= dim <= MAX_DIM_SIZE:
            raise ValueError(f"bad dimension {dim!r}: must be an integer in 0..{MAX_DIM_SIZE}")
    block_len, block_bytes = DTYPE_BLOCKS[dtype]
    if block_len > 1 and (not dims or dims[-1] % block_len):
        raise ValueError(f"{dtype} needs rows of a multiple of {block_len} elements, got shape {list(dims)}")
    return math.prod(dims) // block_len * block_bytes


def shown(name: str, limit: int = 120) -> str:
    """``name`` quoted for a message, shortened when it is absurdly long (a corrupt header)."""
    text = repr(name[: limit + 1])
    return text if len(name) <= limit else f"{text[:limit]}...'"


def open_data_file(path: Path) -> Any:
    """Open a checkpoint file for unbuffered binary reading; CheckpointError if that fails."""
    try:
        return path.open("rb", buffering=0)
    except FileNotFoundError:
        dangling = path.is_symlink()
        raise CheckpointError(
            "the link points to a file that does not exist" if dangling else "the file does not exist",
            file=path,
            remedy="Download the model again; an interrupted download leaves such gaps",
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"cannot be opened: {error.strerror}",
            file=path,
            remedy="Check that it is a regular file and its access rights",
        ) from None


def read_json_object(path: Path) -> dict[str, Any]:
    """Parse a small JSON file that must hold one object; every failure is a CheckpointError."""
    with open_data_file(path) as handle:
        try:
            size = os.fstat(handle.fileno()).st_size
            if size > MAX_CONFIG_BYTES:
                raise CheckpointError(
                    "too large for a JSON description",
                    file=path,
                    found=f"{size} bytes",
                    expected=f"at most {MAX_CONFIG_BYTES}",
                )
            raw = handle.read(size)
        except OSError as error:
            raise CheckpointError(f"cannot be read: {error.strerror}", file=path) from None
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"not valid JSON: {str(error) or type(error).__name__}",
            file=path,
            found=f"{len(raw)} bytes",
            remedy="Download or save the file again",
        ) from None
    if not isinstance(value, dict):
        raise CheckpointError("must hold a JSON object", file=path, found=type(value).__name__)
    return value
