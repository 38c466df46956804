"""Stored bytes to torch tensors, by positioned reads of exactly the bytes that are needed.

No file is mapped: mapped pages would count towards resident memory and stay there. A read goes straight
into the target tensor, in pieces, so one tensor may be larger than any buffer.
"""

from __future__ import annotations

import os

import torch

from flexrun.checkpoint.base import DTYPE_BLOCKS, CheckpointError, TensorInfo, open_data_file
from flexrun.checkpoint.dequantize import dequantize_blocks, dequantize_gguf

__all__ = ["MAX_IO_BYTES", "TORCH_DTYPES", "dequantize_gguf", "read_dense", "read_into", "read_tensor"]

MAX_IO_BYTES = 16 << 20

TORCH_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def read_tensor(info: TensorInfo, rows: slice | None = None) -> torch.Tensor:
    """Read a tensor, or the ``rows`` of its first dimension, in the stored type, on the CPU.

    Returns shape ``info.raw_shape`` with the first dimension cut to ``rows`` (step 1 only). Block types
    of GGUF come as uint8 of shape (..., bytes per row), for `dequantize_gguf`.
    """
    start, stop = row_range(info, rows)
    raw = torch.empty((stop - start) * info.row_nbytes, dtype=torch.uint8)
    read_into(info, raw, slice(start, stop))
    shape = info.raw_shape
    if shape and info.n_rows == shape[0]:
        shape = (stop - start, *shape[1:])
    if info.is_block_quantized:
        return raw.view(shape)
    if info.dtype == "BOOL":
        return raw.ne(0).view(shape)
    return raw.view(TORCH_DTYPES[info.dtype]).view(shape)


def read_into(info: TensorInfo, out: torch.Tensor, rows: slice | None = None) -> None:
    """Read the bytes of ``rows`` (all by default) into ``out``, a contiguous uint8 CPU tensor.

    ``out`` must have exactly as many elements as there are bytes to read, in any shape.
    """
    start, stop = row_range(info, rows)
    nbytes = (stop - start) * info.row_nbytes
    if out.dtype != torch.uint8 or not out.is_contiguous() or out.device.type != "cpu":
        raise ValueError(f"out must be a contiguous uint8 CPU tensor, got {out.dtype} on {out.device}")
    if out.numel() != nbytes:
        raise ValueError(f"tensor {info.name!r}: {nbytes} bytes to read, but out holds {out.numel()}")
    _read_bytes(info, out.view(-1), start * info.row_nbytes)


def read_dense(info: TensorInfo, dtype: torch.dtype, rows: slice | None = None) -> torch.Tensor:
    """Read ``rows`` as floating point ``dtype``, whatever the stored type; the shape is ``info.shape``'s.

    Converts in pieces of at most 16 MiB of stored bytes, so memory holds the result and one piece.
    ValueError for integer tensors: they are no weights by themselves.
    """
    start, stop = row_range(info, rows)
    shape = info.shape
    if shape and info.n_rows == shape[0]:
        shape = (stop - start, *shape[1:])
    if not info.is_block_quantized:
        stored = TORCH_DTYPES[info.dtype]
        if not stored.is_floating_point:
            raise ValueError(f"tensor {info.name!r}: {info.dtype} holds no weights to convert to {dtype}")
        if stored == dtype:
            return read_tensor(info, slice(start, stop))
    out = torch.empty(shape, dtype=dtype)
    flat = out.view(-1)
    # Rows may be of any size, pieces not: cut the byte range at block borders instead of row borders.
    block_len, block_bytes = DTYPE_BLOCKS[info.dtype]
    blocks_per_row = info.row_nbytes // block_bytes
    n_blocks, first_block = (stop - start) * blocks_per_row, start * blocks_per_row
    scratch = torch.empty(min(n_blocks, MAX_IO_BYTES // block_bytes) * block_bytes, dtype=torch.uint8)
    step = max(1, MAX_IO_BYTES // block_bytes)
    for done in range(0, n_blocks, step):
        count = min(step, n_blocks - done)
        raw = scratch[: count * block_bytes]
        _read_bytes(info, raw, (first_block + done) * block_bytes)
        target = flat[done * block_len : (done + count) * block_len]
        if info.is_block_quantized:
            dequantize_blocks(raw, info.dtype, target)
        else:
            target.copy_(raw.view(TORCH_DTYPES[info.dtype]))
    return out


def row_range(info: TensorInfo, rows: slice | None) -> tuple[int, int]:
    """First and one-past-last row of ``rows`` within ``info``, by Python's slicing rules, step 1."""
    if rows is None:
        return 0, info.n_rows
    start, stop, step = rows.indices(info.n_rows)
    if step != 1:
        raise ValueError(f"tensor {info.name!r}: rows are read with step 1 only, got step {step}")
    return start, max(start, stop)


def _read_bytes(info: TensorInfo, out: torch.Tensor, begin: int) -> None:
    """Fill ``out`` (uint8, contiguous) from byte ``begin`` of the tensor's data."""
    nbytes = out.numel()
    if nbytes == 0:
        return
    view = out.numpy().data
    position = info.offset_bytes + begin
    with open_data_file(info.file) as handle:
        fd = handle.fileno()
        done = 0
        while done < nbytes:
            piece = view[done : min(done + MAX_IO_BYTES, nbytes)]
            try:
                got = os.preadv(fd, [piece], position + done)
            except OSError as error:
                raise CheckpointError(
                    f"read failed: {error.strerror}",
                    file=info.file,
                    tensor=info.name,
                    found=f"{done} of {nbytes} bytes at offset {position}",
                    remedy="Check the disk and the file",
                ) from error
            if got == 0:
                raise CheckpointError(
                    "the file ends before the tensor does",
                    file=info.file,
                    tensor=info.name,
                    found=f"{done} bytes at offset {position}",
                    expected=f"{nbytes}",
                    remedy="The file was cut after it was opened; download it again",
                )
            done += got
