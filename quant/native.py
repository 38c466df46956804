"""Checkpoints that are quantised already -> PackedTensor, without a second quantisation.

GGUF    Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0 are affine groups of 32; their codes and fp16 parameters are kept bit
        for bit, only laid out anew. Q4_K, Q5_K and Q6_K are block formats: their bytes are taken as they are.
        Other types (Q2_K, Q3_K, ...) have no packed form here: `gguf_format` returns None.
GPTQ    value[o, i] = scale[g, o] * (code[i, o] - (zero[g, o] + 1)), g = g_idx[i], or i // group_size without
        g_idx. The zero points of the first version are stored less one; `zero_offset=0` reads the second.
        qweight int32 (in * bits / 32, out) and qzeros int32 (groups, out * bits / 32) are little-endian bit
        streams along their packed dimension; scales (groups, out). With act-order (g_idx not ascending)
        columns are sorted by group, and the sorting order is kept as the tensor's `permutation`.
AWQ     value[o, i] = scale[i // group_size, o] * (code[i, o] - zero[g, o]), 4 bits. qweight int32 (in, out/8) and
        qzeros int32 (groups, out/8): nibble k of a word belongs to column AWQ_ORDER[k] of its eight.

Scales in fp16 are kept in fp16, others in fp32. A checkpoint's groups that are multiples of ours are cut, with
their parameters repeated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quant.formats import GROUP_SIZES, WeightFormat, parse_format
from quant.packed import PackedTensor, empty_packed, numpy_views

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
GPTQ_BITS = (2, 3, 4, 8)
# Codes unpacked at a time, one byte each.
_BLOCK_CODES = 8 * 2**20

_GGUF_FORMATS = {
    "Q4_0": "int4-g32-sym",
    "Q4_1": "int4-g32",
    "Q5_0": "int5-g32-sym",
    "Q5_1": "int5-g32",
    "Q8_0": "int8-g32-sym",
    "Q4_K": "q4_k",
    "Q5_K": "q5_k",
    "Q6_K": "q6_k",
}
_GGUF_BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34}


def gguf_format(ggml_type: str) -> WeightFormat | None:
    """The format that keeps a GGUF tensor type (`Q4_0`, ...) as it is; None if it has to be dequantised."""
    name = _GGUF_FORMATS.get(ggml_type.upper())
    return None if name is None else parse_format(name)


def pack_gguf(raw: Tensor, ggml_type: str, *, name: str = "") -> PackedTensor:
    """A GGUF matrix, raw uint8 (rows, bytes per row) as in the file, as a PackedTensor of `gguf_format`.

    Block formats take raw's own memory if it is contiguous. Raises ValueError for a type without a packed form,
    for rows that are not whole blocks and for infinite or NaN scales.
    """
    fmt = gguf_format(ggml_type)
    label = _label(name)
    if fmt is None:
        raise ValueError(
            f"{label}: {ggml_type} has no packed form; dequantise it (kept: {', '.join(_GGUF_FORMATS)})"
        )
    if raw.dtype != torch.uint8 or raw.dim() != 2:
        raise ValueError(
            f"{label}: {ggml_type} rows are uint8 (rows, bytes), got {raw.dtype} {tuple(raw.shape)}"
        )
    if fmt.kind == "block":
        block_bytes = fmt.parts((1, 256))[0].nbytes
        _check_row_bytes(raw, block_bytes, ggml_type, label)
        return PackedTensor(fmt, (raw.shape[0], raw.shape[1] // block_bytes * 256), raw.contiguous().view(-1))
    block_bytes = _GGUF_BLOCK_BYTES[ggml_type.upper()]
    _check_row_bytes(raw, block_bytes, ggml_type, label)
    packed = empty_packed(fmt, (raw.shape[0], raw.shape[1] // block_bytes * 32))
    pack_gguf_rows_into(packed, 0, raw, ggml_type, name=name)
    return packed


def pack_gguf_rows_into(
    packed: PackedTensor, row_start: int, raw: Tensor, ggml_type: str, *, name: str = ""
) -> None:
    """Lay out raw rows uint8 (n, bytes per row) of a GGUF tensor as rows row_start.. of packed.

    packed has the format `gguf_format(ggml_type)`. Raises ValueError as `pack_gguf` does.
    """
    label = _label(name)
    if packed.format != gguf_format(ggml_type):
        raise ValueError(f"{label}: {ggml_type} rows do not go into a {packed.format} tensor")
    if packed.format.kind == "block":
        packed.part("blocks")[row_start : row_start + raw.shape[0]].copy_(raw)
        return
    _check_row_bytes(raw, _GGUF_BLOCK_BYTES[ggml_type.upper()], ggml_type, label)
    if raw.shape[1] * 32 != packed.shape[1] * _GGUF_BLOCK_BYTES[ggml_type.upper()]:
        raise ValueError(
            f"{label}: rows of {raw.shape[1]} bytes do not fit a {packed.format} tensor of shape {packed.shape}"
        )
    if not 0 <= row_start <= packed.shape[0] - raw.shape[0]:
        raise ValueError(
            f"{label}: rows {row_start}..{row_start + raw.shape[0]} are not within 0..{packed.shape[0]}"
        )
    if not raw.numel():
        return
    from quant.kernels_decode import layout_of
    from quant.kernels_repack import repack_gguf

    layout = layout_of(packed.format, (packed.shape[0], packed.shape[1]))
    if repack_gguf(layout, numpy_views(packed), raw.contiguous().numpy(), ggml_type.upper(), row_start):
        raise ValueError(f"{label}: {ggml_type} holds an infinite or NaN value among its scales or minima")


def gptq_format(
    bits: int,
    group_size: int,
    in_features: int,
    *,
    act_order: bool = False,
    scales_dtype: torch.dtype = torch.float16,
    name: str = "",
) -> WeightFormat:
    """The format that keeps a GPTQ or AWQ tensor (`quantize_config`'s bits and group_size, -1 = whole rows).

    Raises ValueError for bits or groups that no packed format holds.
    """
    label = _label(name)
    if bits not in GPTQ_BITS:
        raise ValueError(f"{label}: {bits}-bit codes cannot be kept packed; known are {GPTQ_BITS}")
    whole_rows = group_size == -1 or group_size >= in_features
    fitting = [group for group in GROUP_SIZES if whole_rows or (group_size > 0 and group_size % group == 0)]
    if not fitting:
        raise ValueError(
            f"{label}: groups of {group_size} are not made of whole groups of {', '.join(map(str, GROUP_SIZES))}; "
            "dequantise the checkpoint first"
        )
    params = "" if scales_dtype == torch.float16 else "-f32"
    return parse_format(f"int{bits}-g{fitting[-1]}-zp{params}{'-perm' if act_order else ''}")


def pack_gptq(
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    g_idx: Tensor | None = None,
    *,
    bits: int,
    group_size: int,
    zero_offset: int = 1,
    act_order: bool | None = None,
    name: str = "",
) -> PackedTensor:
    """A GPTQ matrix as a PackedTensor (out, in) of `gptq_format`; shapes and formula in the module's docstring.

    zero_offset: 1 for checkpoints whose zero points are stored less one (checkpoint_format `gptq`), 0 for
    `gptq_v2`. act_order: whether to store a permutation; None: only if g_idx needs one. Raises ValueError for
    shapes that do not fit together, groups of uneven size, NaN scales, and zero points beyond a byte.
    """
    label = _label(name)
    if bits not in GPTQ_BITS:
        raise ValueError(f"{label}: {bits}-bit codes cannot be kept packed; known are {GPTQ_BITS}")
    in_features, out_features = qweight.shape[0] * 32 // bits, qweight.shape[1]
    group_size = in_features if group_size == -1 else group_size
    _check_shapes(label, qweight, qzeros, scales, in_features, out_features, group_size, bits)
    order = None if g_idx is None else _group_order(g_idx, in_features, group_size, label)
    if act_order is None:
        act_order = order is not None
    elif not act_order and order is not None:
        raise ValueError(f"{label}: g_idx is not ascending although act-order is off; set desc_act")
    fmt = gptq_format(
        bits, group_size, in_features, act_order=act_order, scales_dtype=scales.dtype, name=name
    )
    packed = empty_packed(fmt, (out_features, in_features))
    if act_order:
        packed.part("permutation").copy_(torch.arange(in_features) if order is None else order)
    zeros = _unpack_stream(qzeros.t(), bits, out_features).int() + zero_offset  # (out, groups)
    step = max(_BLOCK_CODES // in_features, 1)
    for first in range(0, out_features, step):
        rows = slice(first, min(first + step, out_features))
        codes = _unpack_stream(qweight[:, rows], bits, in_features)  # (in, rows)
        codes = (codes if order is None else codes.index_select(0, order)).t()
        _store_groups(packed, rows, codes, scales[:, rows].t(), zeros[rows], group_size, label)
    return packed


def pack_awq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, *, group_size: int, name: str = ""
) -> PackedTensor:
    """An AWQ matrix (4 bits, `gemm` layout) as a PackedTensor (out, in); formula in the module's docstring.

    Raises ValueError for shapes that do not fit together and NaN scales.
    """
    label = _label(name)
    in_features, out_features = qweight.shape[0], qweight.shape[1] * 8
    group_size = in_features if group_size == -1 else group_size
    _check_shapes(label, qweight, qzeros, scales, in_features, out_features, group_size, 4)
    fmt = gptq_format(4, group_size, in_features, scales_dtype=scales.dtype, name=name)
    packed = empty_packed(fmt, (out_features, in_features))
    zeros = _unpack_awq(qzeros).t().int()  # (out, groups)
    step = max(_BLOCK_CODES // in_features // 8, 1) * 8
    for first in range(0, out_features, step):
        rows = slice(first, min(first + step, out_features))
        codes = _unpack_awq(qweight[:, rows.start // 8 : rows.stop // 8]).t()  # (rows, in)
        _store_groups(packed, rows, codes, scales[:, rows].t(), zeros[rows], group_size, label)
    return packed


def _store_rows(packed: PackedTensor, row_start: int, codes: Tensor, params: dict[str, Tensor]) -> None:
    """Write codes uint8 (n, padded_cols) and parameters (n, groups) as rows row_start.. of packed."""
    rows = slice(row_start, row_start + codes.shape[0])
    shift = 0
    for width in packed.format.planes:
        plane = packed.part(f"codes{width}")[rows]
        size = plane.shape[1]
        plane.zero_()
        for part in range(8 // width):
            bits = (codes[:, part * size : (part + 1) * size] >> shift) & ((1 << width) - 1)
            plane |= bits << (part * width)
        shift += width
    for name, values in params.items():
        packed.part(name)[rows].copy_(values)


def _store_groups(
    packed: PackedTensor,
    rows: slice,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor,
    group_size: int,
    label: str,
) -> None:
    """Write codes (n, in), scales and zeros (n, the checkpoint's groups) as `rows` of packed."""
    if not bool(torch.isfinite(scales).all()):
        raise ValueError(f"{label}: its scales hold infinite or NaN values; the checkpoint is damaged")
    if int(zeros.max()) > 255:
        raise ValueError(
            f"{label}: a zero point of {int(zeros.max())} does not fit a byte; dequantise the checkpoint"
        )
    cols = packed.shape[1]
    source = torch.arange(packed.format.n_groups(cols)) * packed.format.group // group_size
    params = {"scales": scales.index_select(1, source), "zeros": zeros.index_select(1, source)}
    padding = packed.format.padded_cols(cols) - cols
    _store_rows(packed, rows.start, torch.nn.functional.pad(codes, (0, padding)), params)


def _unpack_stream(words: Tensor, bits: int, count: int) -> Tensor:
    """int32 words, a little-endian bit stream of `count` codes along dimension 0 -> uint8 (count, ...)."""
    per_run = 32 // bits if 32 % bits == 0 else 32  # codes after which codes and words are flush again
    runs = words.reshape(-1, per_run * bits // 32, *words.shape[1:])  # (runs, words per run, ...)
    codes = torch.empty((runs.shape[0], per_run, *words.shape[1:]), dtype=torch.uint8)
    mask = (1 << bits) - 1
    for i in range(per_run):
        word, shift = divmod(i * bits, 32)
        low = (runs[:, word] >> shift) & min(mask, (1 << (32 - shift)) - 1)
        if shift + bits > 32:
            low = low | ((runs[:, word + 1] << (32 - shift)) & mask)
        codes[:, i] = low
    return codes.flatten(0, 1)[:count]


def _unpack_awq(words: Tensor) -> Tensor:
    """int32 (n, out/8) -> uint8 (n, out)."""
    codes = torch.empty((*words.shape, 8), dtype=torch.uint8)
    for position, column in enumerate(AWQ_ORDER):
        codes[..., column] = (words >> (4 * position)) & 15
    return codes.flatten(1)


def _group_order(g_idx: Tensor, in_features: int, group_size: int, label: str) -> Tensor | None:
    """The order that sorts columns by group; None if they are sorted already."""
    if tuple(g_idx.shape) != (in_features,):
        raise ValueError(f"{label}: g_idx has shape {tuple(g_idx.shape)}, expected ({in_features},)")
    groups = g_idx.to(torch.int64)
    expected = torch.arange(in_features) // group_size
    order = torch.argsort(groups, stable=True)
    if not torch.equal(groups.index_select(0, order), expected):
        raise ValueError(
            f"{label}: g_idx does not name each group {group_size} times; dequantise the checkpoint first"
        )
    return None if torch.equal(groups, expected) else order


def _check_row_bytes(raw: Tensor, block_bytes: int, ggml_type: str, label: str) -> None:
    if raw.shape[1] % block_bytes:
        raise ValueError(
            f"{label}: rows of {raw.shape[1]} bytes are not whole {ggml_type} blocks of {block_bytes}"
        )


def _check_shapes(
    label: str,
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    in_features: int,
    out_features: int,
    group_size: int,
    bits: int,
) -> None:
    groups = -(-in_features // group_size) if group_size > 0 else 0
    expected = {"qzeros": (groups, out_features * bits // 32), "scales": (groups, out_features)}
    found = {"qzeros": tuple(qzeros.shape), "scales": tuple(scales.shape)}
    if found != expected or qweight.dtype != torch.int32 or qzeros.dtype != torch.int32:
        raise ValueError(
            f"{label}: qweight {qweight.dtype} {tuple(qweight.shape)} of {bits} bits in groups of {group_size} needs "
            f"int32 and {expected}, found {qzeros.dtype} and {found}"
        )
    if not scales.is_floating_point():
        raise ValueError(f"{label}: scales must be floating-point, found {scales.dtype}")


def _label(name: str) -> str:
    return f"tensor {name!r}" if name else "the tensor"
