"""GPTQ and AWQ tensors of a Hugging Face checkpoint, read as the matrices that they stand for.

A quantised linear layer `X` is stored as X.qweight, X.qzeros, X.scales and maybe X.g_idx. It is offered as one
tensor X.weight of shape (out_features, in_features); `quant.native` states the formulas.

All three matrices lie with the output features along their rows of bytes, so rows of X.weight are columns of the
file, of which it has no contiguous run: a block of them is picked out of the whole matrix, read in slabs of 16 MiB.
So few blocks are read, of at most BLOCK_BYTES packed, and the last one is held until its rows have been asked for or
another matrix is: a usual matrix is read once, and memory is bounded by one block of a checkpoint, its copy and a
slab, whatever the matrix's size and however few of its rows are wanted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexrun.checkpoint.base import Checkpoint, CheckpointError, TensorInfo
from flexrun.checkpoint.reading import TORCH_DTYPES, read_tensor
from flexrun.checkpoint.rows import BLOCK_BYTES, FileRange, put_rows, read_columns
from quant.formats import WeightFormat
from quant.native import gptq_format, pack_awq, pack_gptq
from quant.packed import PackedTensor, write_rows

METHODS = ("gptq", "awq")
# Rows that share whole words of packed zero points, at any number of bits.
_ROW_STEP = 32
_SUFFIXES = ("qweight", "qzeros", "scales", "g_idx")


@dataclass(slots=True)
class HeldBlock:
    """The one packed block that the readers of a checkpoint share: whose it is, its first row, its rows."""

    owner: str = ""
    first: int = 0
    rows: PackedTensor | None = None


class QuantizedReader:
    """One GPTQ or AWQ matrix (flexrun.checkpoint.rows.RowReader). permutation: of its columns, or None."""

    quantized = True

    def __init__(
        self,
        stem: str,
        parts: Mapping[str, TensorInfo],
        settings: Mapping[str, Any],
        unpacked: WeightFormat,
        held: HeldBlock,
    ) -> None:
        self.name = f"{stem}.weight"
        self._method, self._parts = settings["method"], parts
        self._bits, self._zero_offset = settings["bits"], settings["zero_offset"]
        self.stored_type = f"{self._method.upper()} {self._bits}-bit"
        self.plain = unpacked
        self._held = held
        qweight = parts["qweight"]
        if qweight.dtype != "I32" or len(qweight.shape) != 2:
            raise self._error("qweight is not a matrix of int32", f"{qweight.dtype} {list(qweight.shape)}")
        if self._method == "gptq":
            self.n_rows, self.width = qweight.shape[1], qweight.shape[0] * 32 // self._bits
        else:
            self.n_rows, self.width = qweight.shape[1] * 8, qweight.shape[0]
        group_size = settings["group_size"]
        self._group_size = self.width if group_size == -1 else group_size
        self._g_idx = read_tensor(parts["g_idx"]) if "g_idx" in parts and self._method == "gptq" else None
        self.permutation: Tensor | None = None
        if self._g_idx is not None and bool((self._g_idx[1:] < self._g_idx[:-1]).any()):
            self.permutation = torch.argsort(self._g_idx, stable=True)
        try:
            self.native: WeightFormat | None = gptq_format(
                self._bits,
                self._group_size,
                self.width,
                act_order=self.permutation is not None,
                scales_dtype=TORCH_DTYPES[parts["scales"].dtype],
                name=self.name,
            )
        except ValueError as error:
            raise self._error(str(error)) from None

    @property
    def shape(self) -> tuple[int, int]:
        return self.n_rows, self.width

    def values(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        first, block = self._block(start, stop)
        out = torch.empty((stop - start, self.width), dtype=dtype)
        write_rows(block, out, row_start=start - first)
        return out

    def _block(self, start: int, stop: int) -> tuple[int, PackedTensor]:
        """A packed block that holds rows start..stop, and its first row."""
        held = self._held
        first, block = held.first, held.rows if held.owner == self.name else None
        if block is None or start < first or stop > first + block.shape[0]:
            assert self.native is not None
            held.rows = block = None  # before the next one is read
            first = start // _ROW_STEP * _ROW_STEP
            n_rows = BLOCK_BYTES // self.native.nbytes((1, self.width))
            block = self.packed(first, min(max(stop, first + n_rows), self.n_rows))
        # Rows are asked for in order: nothing is held once the block's last row has been.
        held.owner, held.first = self.name, first
        held.rows = None if stop == first + block.shape[0] else block
        return first, block

    def packed(self, start: int, stop: int) -> PackedTensor:
        """Rows start..stop in the native format, at most BLOCK_BYTES of them at a time if memory is to be bounded."""
        first = start // _ROW_STEP * _ROW_STEP
        last = min(-(-stop // _ROW_STEP) * _ROW_STEP, self.n_rows)
        per_word = 32 // 4 if self._method == "awq" else 1
        qweight = read_columns(self._parts["qweight"], first // per_word, last // per_word)
        qzeros = read_columns(self._parts["qzeros"], first * self._bits // 32, last * self._bits // 32)
        scales = read_columns(self._parts["scales"], first, last)
        try:
            if self._method == "awq":
                rows = pack_awq(qweight, qzeros, scales, group_size=self._group_size, name=self.name)
            else:
                rows = pack_gptq(
                    qweight,
                    qzeros,
                    scales,
                    self._g_idx,
                    bits=self._bits,
                    group_size=self._group_size,
                    zero_offset=self._zero_offset,
                    act_order=self.permutation is not None,
                    name=self.name,
                )
        except ValueError as error:
            raise self._error(str(error)) from None
        return rows if (first, last) == (start, stop) else rows.slice_rows(start - first, stop - first)

    def pack_into(
        self, dest: PackedTensor, dest_row: int, start: int, stop: int, chosen: Tensor | None
    ) -> None:
        assert chosen is None, "rows of GPTQ and AWQ tensors lie in order"
        put_rows(dest, dest_row, self.packed(start, stop))

    def where(self, start: int, stop: int) -> FileRange | None:
        return None

    def read_where(self, start: int, stop: int, out: Tensor) -> None:
        raise TypeError(f"tensor {self.name}: its rows do not lie together")

    def _error(self, what: str, found: object = None) -> CheckpointError:
        return CheckpointError(what, file=self._parts["qweight"].file, tensor=self.name, found=found)


def quantized_readers(
    checkpoint: Checkpoint, wanted: Iterable[str], unpacked: WeightFormat
) -> tuple[dict[str, QuantizedReader], dict[str, TensorInfo]]:
    """Readers of the quantised matrices by the names X.weight, and the checkpoint's other tensors.

    wanted: canonical names that the model asks for. Quantisers write a bias of zeros for layers that have none;
    such a bias is left out. Raises CheckpointError for a method or setting that cannot be read.
    """
    others = dict(checkpoint.tensors)
    if checkpoint.quantization_config is None:
        return {}, others
    settings = _settings(checkpoint)
    names, held = set(wanted), HeldBlock()
    readers: dict[str, QuantizedReader] = {}
    for name in checkpoint.tensors:
        if not name.endswith(".qweight"):
            continue
        stem = name.removesuffix(".qweight")
        parts = {s: others.pop(f"{stem}.{s}") for s in _SUFFIXES if f"{stem}.{s}" in others}
        missing = [s for s in ("qzeros", "scales") if s not in parts]
        if missing:
            raise CheckpointError(
                f"the quantised layer lacks {' and '.join(missing)}",
                file=parts["qweight"].file,
                tensor=name,
                remedy="Download the model completely",
            )
        readers[f"{stem}.weight"] = QuantizedReader(stem, parts, settings, unpacked, held)
        bias = others.get(f"{stem}.bias")
        if bias is not None and not _is_wanted(bias.name, names) and not bool(read_tensor(bias).any()):
            del others[bias.name]
    return readers, others


def _is_wanted(name: str, wanted: set[str]) -> bool:
    """Whether a name, less any number of its first words, is among the canonical ones."""
    words = name.split(".")
    return any(".".join(words[skip:]) in wanted for skip in range(len(words)))


def _settings(checkpoint: Checkpoint) -> dict[str, Any]:
    config = checkpoint.quantization_config or {}

    def refuse(what: str, found: object, expected: str) -> CheckpointError:
        return CheckpointError(
            what,
            file=checkpoint.path,
            found=repr(found),
            expected=expected,
            remedy="Use the model's unquantised, GPTQ, AWQ or GGUF files",
        )

    method = config.get("quant_method")
    if method not in METHODS:
        raise refuse("weights quantised by a method that is not supported", method, "gptq or awq")
    bits = config.get("bits", config.get("w_bit"))
    group_size = config.get("group_size", config.get("q_group_size", 128))
    if type(bits) is not int or type(group_size) is not int:
        raise refuse(f"{method}: bad bits or group_size", (bits, group_size), "whole numbers")
    zero_offset = 0
    if method == "awq":
        version = str(config.get("version", "gemm")).lower()
        if version != "gemm" or bits != 4:
            raise refuse("AWQ weights in a layout that is not supported", (version, bits), "gemm with 4 bits")
    else:
        layout = config.get("checkpoint_format", "gptq")
        if layout not in ("gptq", "gptq_v2"):
            raise refuse("GPTQ weights in a layout that is not supported", layout, "gptq or gptq_v2")
        zero_offset = 1 if layout == "gptq" else 0
    return {"method": method, "bits": bits, "group_size": group_size, "zero_offset": zero_offset}
