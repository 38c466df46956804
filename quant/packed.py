"""PackedTensor: one weight matrix in one buffer of bytes, viewed in place on whatever device the bytes lie.

A matrix whose row ranges are stored differently is a StackedTensor of these and of plain tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quant.formats import PartSpec, WeightFormat
from quant.kernel_choice import has_numba, has_triton

_OUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, eq=False)
class PackedTensor:
    """A weight matrix (rows = output features, cols = input features) in a WeightFormat.

    format: how it is stored; shape: (rows, cols), any rank for plain formats; buffer: contiguous uint8 of
    exactly format.nbytes(shape), never copied, so that it may be a piece of a ring slot or of a mapped file.
    Raises ValueError if the buffer does not fit.
    """

    format: WeightFormat
    shape: tuple[int, ...]
    buffer: Tensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(n) for n in self.shape))
        needed = self.format.nbytes(self.shape)
        if self.buffer.dtype != torch.uint8 or self.buffer.dim() != 1 or not self.buffer.is_contiguous():
            raise ValueError(
                f"a packed tensor needs a contiguous 1-D uint8 buffer, got {self.buffer.dtype} of shape "
                f"{tuple(self.buffer.shape)}"
            )
        if self.buffer.numel() != needed:
            raise ValueError(
                f"{self.format} of shape {self.shape} takes {needed} bytes, the buffer has "
                f"{self.buffer.numel()}; cut the buffer to format.nbytes(shape)"
            )
        unit = 2 if self.format.kind == "block" else 4
        if needed and self.buffer.data_ptr() % unit:
            raise ValueError(
                f"the buffer of a {self.format} tensor must start at a multiple of {unit} bytes, it starts at "
                f"{self.buffer.data_ptr() % unit} past one; copy it to an aligned place"
            )

    @property
    def nbytes(self) -> int:
        return self.buffer.numel()

    @property
    def device(self) -> torch.device:
        return self.buffer.device

    @property
    def permutation(self) -> Tensor | None:
        """int32 (cols,): packed column j is column permutation[j] of the matrix; None where columns are in order."""
        return self.part("permutation") if self.format.permuted else None

    def part(self, name: str) -> Tensor:
        """The view of one part of the buffer; KeyError if the format has no such part."""
        for spec in self.format.parts(self.shape):
            if spec.name == name:
                return self._view(spec)
        raise KeyError(f"{self.format} has no part {name!r}")

    def to_parts(self) -> dict[str, Tensor]:
        """Views of all parts by name, in the order in which they lie; see WeightFormat.parts."""
        return {spec.name: self._view(spec) for spec in self.format.parts(self.shape)}

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> PackedTensor:
        """This tensor on another device; itself if it is there already."""
        return PackedTensor(self.format, self.shape, self.buffer.to(device, non_blocking=non_blocking))

    def dequantize(self, dtype: torch.dtype = torch.float32, out: Tensor | None = None) -> Tensor:
        """All values, shape (rows, cols), in dtype: fp32 arithmetic, rounded once to dtype.

        out, if given, is a contiguous tensor of that dtype, device and number of elements, whatever its shape; it
        is filled and returned as (rows, cols). Raises ValueError for an out that does not fit.
        """
        out = _check_out(self.shape, dtype, self.device, out)
        if self.format.is_plain:
            return out.copy_(self.part("data"))
        write_rows(self, out)
        return out

    def gather_rows(
        self, ids: Tensor, dtype: torch.dtype = torch.float32, out: Tensor | None = None
    ) -> Tensor:
        """Rows ids (any shape, integers in 0..rows-1) in dtype: shape (*ids.shape, cols), as for an embedding.

        Raises ValueError for an id outside the matrix when it lies on the CPU.
        """
        if len(self.shape) != 2:
            raise ValueError(f"rows are gathered from matrices, this tensor has shape {self.shape}")
        rows, cols = self.shape
        flat = ids.reshape(-1).to(self.device, torch.int64)  # (n,)
        if flat.device.type == "cpu" and flat.numel() and (int(flat.min()) < 0 or int(flat.max()) >= rows):
            raise ValueError(
                f"row ids must be in 0..{rows - 1}, got {int(flat.min())}..{int(flat.max())}; is the vocabulary "
                "of the tokenizer larger than the model's?"
            )
        out = _check_out((flat.numel(), cols), dtype, self.device, out)
        if self.format.is_plain:
            out.copy_(self.part("data").index_select(0, flat))
        else:
            write_rows(self, out, row_ids=flat)
        return out.view(*ids.shape, cols)

    def slice_rows(self, start: int, stop: int) -> PackedTensor:
        """A copy of rows start..stop as a tensor of its own, parameters unchanged."""
        rows = self.shape[0]
        if not 0 <= start <= stop <= rows:
            raise ValueError(f"rows {start}..{stop} are not within 0..{rows}")
        cut = empty_packed(self.format, (stop - start, *self.shape[1:]), device=self.device)
        for name, part in cut.to_parts().items():
            whole = self.part(name)
            part.copy_(whole if name == "permutation" else whole[start:stop])
        return cut

    def _view(self, spec: PartSpec) -> Tensor:
        raw = self.buffer[spec.offset_bytes : spec.offset_bytes + spec.nbytes]
        return raw.view(getattr(torch, spec.dtype)).view(spec.shape)


@dataclass(frozen=True, slots=True, eq=False)
class StackedTensor:
    """A weight matrix whose rows are stored in several formats: plain or packed matrices, one below the other.

    parts: matrices (rows of the part, cols) of one width on one device. Raises ValueError if they are not.
    """

    parts: tuple[Tensor | PackedTensor, ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("a stacked tensor needs at least one part")
        first = self.parts[0]
        for part in self.parts:
            if len(part.shape) != 2 or part.shape[1] != first.shape[1] or part.device != first.device:
                raise ValueError(
                    "parts of a stacked tensor are matrices of one width on one device; got "
                    f"{tuple(first.shape)} on {first.device} and {tuple(part.shape)} on {part.device}"
                )

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    def ranges(self) -> Iterator[tuple[int, int, Tensor | PackedTensor]]:
        """(first row, one past the last row, part) of each part."""
        start = 0
        for part in self.parts:
            stop = start + part.shape[0]
            yield start, stop, part
            start = stop

    def dequantize(self, dtype: torch.dtype = torch.float32, out: Tensor | None = None) -> Tensor:
        """All values, (rows, cols), in dtype; out as for `PackedTensor.dequantize`."""
        out = _check_out(self.shape, dtype, self.device, out)
        for start, stop, part in self.ranges():
            if isinstance(part, PackedTensor):
                part.dequantize(dtype, out[start:stop])
            else:
                out[start:stop].copy_(part)
        return out


def empty_packed(
    fmt: WeightFormat,
    shape: Sequence[int],
    *,
    device: torch.device | str = "cpu",
    buffer: Tensor | None = None,
) -> PackedTensor:
    """A PackedTensor of zero bytes (gaps between parts must be the same in every copy), or over buffer."""
    size = tuple(int(n) for n in shape)
    if buffer is None:
        buffer = torch.zeros(fmt.nbytes(size), dtype=torch.uint8, device=device)
    return PackedTensor(fmt, size, buffer)


def concat_rows(tensors: Sequence[PackedTensor]) -> PackedTensor:
    """Matrices of one format and width joined along rows (fused q, k, v), parameters unchanged.

    Raises ValueError if formats, widths or column permutations differ.
    """
    if not tensors:
        raise ValueError("concat_rows needs at least one tensor")
    first = tensors[0]
    for other in tensors[1:]:
        if other.format != first.format or other.shape[1:] != first.shape[1:]:
            raise ValueError(
                f"only tensors of one format and width can be joined: {first.format} {first.shape} and "
                f"{other.format} {other.shape}"
            )
        if first.format.permuted and not torch.equal(first.part("permutation"), other.part("permutation")):
            raise ValueError("tensors with different column permutations cannot be joined; keep them apart")
    rows = sum(tensor.shape[0] for tensor in tensors)
    joined = empty_packed(first.format, (rows, *first.shape[1:]), device=first.device)
    for name, part in joined.to_parts().items():
        if name == "permutation":
            part.copy_(first.part(name))
        else:
            torch.cat([tensor.part(name) for tensor in tensors], out=part)
    return joined


def numpy_views(packed: PackedTensor) -> tuple[Any, Any, Any]:
    """The buffer of a CPU tensor as numpy uint8, uint16 and float32 (empty where no part is fp32)."""
    raw = packed.buffer.numpy()
    needs_f32 = packed.format.kind == "affine" and packed.format.param_dtype == "float32"
    return raw, raw.view("uint16"), raw.view("float32") if needs_f32 else raw[:0].view("float32")


def write_rows(
    packed: PackedTensor,
    out: Tensor,
    *,
    row_ids: Tensor | None = None,
    row_start: int = 0,
    in_order: bool = True,
) -> None:
    """Values of rows row_ids (int64), or of rows row_start.. if None, of a packed matrix -> out (n, cols).

    out: fp32, bf16 or fp16, on the tensor's device, all rows within range. in_order: put permuted columns in
    the matrix's order, else leave them in packed order.
    """
    if out.numel() == 0:
        return
    if packed.device.type != "cpu":
        _write_rows_on_device(packed, out, row_ids, row_start, in_order)
        return
    if not has_numba():
        from quant.kernels_torch import unpack_rows

        unpack_rows(packed, out, row_ids, row_start, in_order)
        return
    from quant.kernels_decode import layout_of
    from quant.kernels_numba import dequantize

    permutation = packed.permutation if in_order else None
    target = torch.empty_like(out, dtype=torch.float32) if out.dtype == torch.float16 else out
    dequantize(
        layout_of(packed.format, packed.shape),
        packed.buffer.data_ptr(),
        _EMPTY_I32.numpy() if permutation is None else permutation.numpy(),
        _EMPTY_I64.numpy() if row_ids is None else row_ids.numpy(),
        row_start,
        target.view(torch.uint16).numpy() if target.dtype == torch.bfloat16 else target.numpy(),
    )
    if target is not out:
        out.copy_(target)


def _write_rows_on_device(
    packed: PackedTensor, out: Tensor, row_ids: Tensor | None, row_start: int, in_order: bool
) -> None:
    """Affine formats by Triton's kernel where there is one for the device, all others by torch's operations."""
    if packed.format.kind == "affine" and out.is_contiguous() and has_triton(packed.device.type):
        from quant import kernels_triton

        kernels_triton.dequantize_rows(packed, out, row_ids=row_ids, row_start=row_start, in_order=in_order)
        return
    from quant.kernels_torch import unpack_rows

    unpack_rows(packed, out, row_ids, row_start, in_order)


def _check_out(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, out: Tensor | None
) -> Tensor:
    if dtype not in _OUT_DTYPES:
        raise ValueError(f"weights are unpacked to float32, bfloat16 or float16, not to {dtype}")
    if out is None:
        return torch.empty(shape, dtype=dtype, device=device)
    needed = 1
    for n in shape:
        needed *= n
    fits = out.dtype == dtype and out.device == device and out.is_contiguous() and out.numel() == needed
    if not fits:
        raise ValueError(
            f"out must be contiguous, {dtype}, on {device}, with {needed} elements; got {out.dtype} on "
            f"{out.device} of shape {tuple(out.shape)}, contiguous: {out.is_contiguous()}"
        )
    return out.view(shape)


_EMPTY_I32 = torch.empty(0, dtype=torch.int32)
_EMPTY_I64 = torch.empty(0, dtype=torch.int64)
