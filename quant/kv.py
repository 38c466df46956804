"""KV cache pages as tensors: encode full pages, decode them, gather a batch of sequences for attention.

Formats and page layout are in `quant.kv_formats`. Everything here works on any torch device; on the CPU the
heavy loops run in numba (`quant.kv_jit`), which is imported on first use, or in torch where there is none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quant.kernel_choice import has_numba, has_triton
from quant.kv_batch import PLAIN_DTYPES, PagedBatch, page_addresses, tail_addresses
from quant.kv_formats import CacheFormat

# Cache values beyond this are refused: differences of two of them must stay finite in fp32.
MAX_ABS_VALUE = 2.0**126
# The CPU kernels read vectors of eight channels; narrower heads (toy models) go through torch.
MIN_VECTOR_DIM = 8


def page_views(
    pages: Tensor, fmt: CacheFormat, *, page_tokens: int, n_kv_heads: int, head_dim: int
) -> dict[str, Tensor]:
    """The arrays inside pages, viewed in place: name -> (n_pages, *shape of the part).

    pages: uint8 (n_pages, >= page_nbytes) with contiguous rows. Names and shapes: CacheFormat.page_parts.
    """
    views: dict[str, Tensor] = {}
    for part in fmt.page_parts(page_tokens=page_tokens, n_kv_heads=n_kv_heads, head_dim=head_dim):
        raw = pages[:, part.offset_bytes : part.end_bytes]
        # (n_pages, bytes of the part) -> (n_pages, *part.shape)
        views[part.name] = raw.view(getattr(torch, part.dtype)).view(pages.shape[0], *part.shape)
    return views


def encode_pages(k: Tensor, v: Tensor, fmt: CacheFormat, out: Tensor) -> None:
    """Store full pages k, v (n_pages, n_kv_heads, page_tokens, head_dim) in out, uint8 (n_pages, >= page_nbytes).

    k, v: fp32, bf16 or fp16. Every rebuilt value is within half a step of the original plus the rounding of
    the stored fp16 parameters (2^-11 of minimum and range). Raises ValueError for shapes that do not fit,
    and for values that are not finite or exceed MAX_ABS_VALUE, naming the page.
    """
    if k.dim() != 4 or k.shape != v.shape or k.dtype != v.dtype or k.dtype not in PLAIN_DTYPES:
        raise ValueError(
            f"k and v must be float (n_pages, n_kv_heads, page_tokens, head_dim) of one shape and dtype, "
            f"got {k.dtype} {tuple(k.shape)} and {v.dtype} {tuple(v.shape)}"
        )
    n_pages, n_kv_heads, page_tokens, head_dim = k.shape
    page_nbytes = fmt.page_nbytes(page_tokens=page_tokens, n_kv_heads=n_kv_heads, head_dim=head_dim)
    if out.dtype != torch.uint8 or out.dim() != 2 or out.shape[0] != n_pages or out.shape[1] < page_nbytes:
        raise ValueError(
            f"out must be uint8 ({n_pages}, >= {page_nbytes}) for {fmt.name} pages, "
            f"got {out.dtype} {tuple(out.shape)}"
        )
    parts = page_views(out, fmt, page_tokens=page_tokens, n_kv_heads=n_kv_heads, head_dim=head_dim)
    if not fmt.is_packed:
        parts["kv"][:, 0] = k
        parts["kv"][:, 1] = v
        return
    parts["units"][:, 0] = _encode_side("K", k, 2, fmt, parts["k_codes"], parts["k_scale"], parts["k_min"])
    parts["units"][:, 1] = _encode_side("V", v, 3, fmt, parts["v_codes"], parts["v_scale"], parts["v_min"])


def _encode_side(
    what: str, x: Tensor, axis: int, fmt: CacheFormat, codes: Tensor, scale: Tensor, minimum: Tensor
) -> Tensor:
    """Fill codes, scale and minimum of K (axis 2: over tokens) or V (axis 3: channels); return units."""
    low, high = _extremes(x, axis)
    # Both comparisons are false for NaN.
    bad = ~((low >= -MAX_ABS_VALUE) & (high <= MAX_ABS_VALUE)).flatten(1).all(1)
    if bool(bad.any()):
        raise ValueError(
            f"{what} of page {int(bad.nonzero()[0])} (of {x.shape[0]}) holds NaN, infinity or a magnitude "
            f"above 2^126; the cache cannot store it: check the model's weights and attention inputs"
        )
    # The largest magnitude of a head becomes 2^14..2^15 units, inside fp16's range: an exponent shift.
    peak = torch.maximum(low.abs(), high.abs()).amax(dim=2)  # (n_pages, n_kv_heads)
    unit_exponent = ((peak.view(torch.int32) >> 23) - 14).clamp_min(1)
    unit = (unit_exponent << 23).view(torch.float32)
    inverse_unit = ((254 - unit_exponent) << 23).view(torch.float32)
    minimum.copy_(low * inverse_unit[..., None])
    scale.copy_((high - low) / fmt.levels * inverse_unit[..., None])
    # Codes are computed from the stored, rounded parameters: their rounding is corrected as far as it can be.
    step = scale.float()
    inverse_step = torch.where(step > 0, 1.0 / step, torch.zeros_like(step))
    base = minimum.float()
    if _runs_in_numba(x):
        from quant import kv_jit

        kv_jit.encode_codes(x, axis, fmt, codes, inverse_unit, base, inverse_step)
    else:
        _encode_codes(x, axis, fmt, codes, inverse_unit, base, inverse_step)
    return unit


def _runs_in_numba(x: Tensor) -> bool:
    """Whether the CPU kernels take this tensor: rows of whole vectors and contiguous pages."""
    fits = x.device.type == "cpu" and x.shape[-1] >= MIN_VECTOR_DIM and x.is_contiguous()
    return fits and has_numba()


def _extremes(x: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Least and greatest value over an axis, fp32; NaN where any value is NaN."""
    if _runs_in_numba(x):
        from quant import kv_jit

        return kv_jit.extremes(x, axis)
    low, high = x.float().aminmax(dim=axis)
    return low, high


def _encode_codes(
    x: Tensor,
    axis: int,
    fmt: CacheFormat,
    codes: Tensor,
    inverse_unit: Tensor,
    base: Tensor,
    inverse_step: Tensor,
) -> None:
    units = x.float() * inverse_unit[..., None, None]
    code = ((units - base.unsqueeze(axis)) * inverse_step.unsqueeze(axis)).round_().clamp_(0, fmt.levels)
    code = code.to(torch.uint8)
    row_nbytes = codes.shape[-1]
    pad = row_nbytes * fmt.codes_per_byte - x.shape[-1]
    padded = torch.nn.functional.pad(code, (0, pad))
    planes = padded.view(*code.shape[:-1], fmt.codes_per_byte, row_nbytes)
    packed = planes[..., 0, :].clone()
    for plane in range(1, fmt.codes_per_byte):
        packed |= planes[..., plane, :] << (plane * fmt.bits)
    codes.copy_(packed)


def decode_pages(
    pages: Tensor,
    fmt: CacheFormat,
    *,
    n_kv_heads: int,
    page_tokens: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Rebuild pages uint8 (n_pages, >= page_nbytes): K, V (n_pages, n_kv_heads, page_tokens, head_dim)."""
    parts = page_views(pages, fmt, page_tokens=page_tokens, n_kv_heads=n_kv_heads, head_dim=head_dim)
    if not fmt.is_packed:
        kv = parts["kv"].to(dtype)
        return kv[:, 0], kv[:, 1]
    units = parts["units"][..., None]  # (n_pages, 2, n_kv_heads, 1)
    k = _decode_codes(parts["k_codes"], fmt, head_dim)
    k.mul_((parts["k_scale"].float() * units[:, 0]).unsqueeze(2))
    k.add_((parts["k_min"].float() * units[:, 0]).unsqueeze(2))
    k = k.to(dtype)  # before V is rebuilt: CacheFormat.gather_nbytes counts one side in fp32
    v = _decode_codes(parts["v_codes"], fmt, head_dim)
    v.mul_((parts["v_scale"].float() * units[:, 1]).unsqueeze(3))
    v.add_((parts["v_min"].float() * units[:, 1]).unsqueeze(3))
    return k, v.to(dtype)


def _decode_codes(codes: Tensor, fmt: CacheFormat, head_dim: int) -> Tensor:
    """uint8 (..., row_nbytes) -> fp32 codes (..., head_dim)."""
    planes = [(codes >> (plane * fmt.bits)) & fmt.levels for plane in range(fmt.codes_per_byte)]
    return torch.cat(planes, dim=-1)[..., :head_dim].float()


def gather_pages(
    batch: PagedBatch,
    k_out: Tensor | None = None,
    v_out: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Unpack pages and tails of a batch into two staging buffers (batch, n_kv_heads, max_len, head_dim).

    k_out, v_out: contiguous buffers to fill, of one float dtype, any max_len >= the longest sequence; made with
    `dtype` if None. Positions past a sequence's length become 0. Returns (k_out, v_out).
    Raises ValueError for buffers or page slots that do not fit.
    """
    longest = int(batch.seq_lens.max()) if batch.batch else 0
    if k_out is None or v_out is None:
        shape = (batch.batch, batch.n_kv_heads, longest, batch.head_dim)
        k_out = torch.empty(shape, dtype=dtype, device=batch.device)
        v_out = torch.empty(shape, dtype=dtype, device=batch.device)
    wanted = (
        batch.batch,
        batch.n_kv_heads,
        max(longest, k_out.shape[2] if k_out.dim() == 4 else 0),
        batch.head_dim,
    )
    for buffer in (k_out, v_out):
        if (
            not buffer.is_contiguous()
            or buffer.shape != wanted
            or buffer.dtype not in PLAIN_DTYPES
            or buffer.dtype != k_out.dtype
        ):
            raise ValueError(
                f"staging buffers must both be contiguous float ({batch.batch}, {batch.n_kv_heads}, >= {longest}, "
                f"{batch.head_dim}), got {buffer.dtype} {tuple(buffer.shape)}"
            )
    if batch.device.type == "cpu" and batch.head_dim >= MIN_VECTOR_DIM and has_numba():
        from quant import kv_jit

        kv_jit.gather(batch, page_addresses(batch), tail_addresses(batch), k_out, v_out)
    else:
        _gather_torch(batch, k_out, v_out)
    return k_out, v_out


def _gather_torch(batch: PagedBatch, k_out: Tensor, v_out: Tensor) -> None:
    """Gather with torch's operations and, on an accelerator that has Triton, its kernel for packed pages."""
    page_addresses(batch)  # for its checks of slots and arenas
    page_tokens, device = batch.page_tokens, batch.device
    used = torch.arange(batch.page_slots.shape[1]) < batch.full_pages()[:, None]  # (batch, max_pages)
    for number, arena in enumerate(batch.arenas):
        here = used if batch.page_arenas is None else used & (batch.page_arenas == number)
        rows, pages = here.nonzero(as_tuple=True)
        slots = batch.page_slots[rows, pages].long().to(device)
        rows, first = rows.to(device), (pages * page_tokens).to(device)
        if batch.fmt.is_packed and has_triton(device.type):
            from quant.kernels_triton import unpack_pages

            unpack_pages(
                arena,
                batch.fmt,
                page_tokens=page_tokens,
                slots=slots,
                rows=rows,
                first_positions=first,
                k_out=k_out,
                v_out=v_out,
            )
            continue
        k, v = decode_pages(
            arena.index_select(0, slots),
            batch.fmt,
            n_kv_heads=batch.n_kv_heads,
            page_tokens=page_tokens,
            head_dim=batch.head_dim,
            dtype=k_out.dtype,
        )
        positions = first[:, None] + torch.arange(page_tokens, device=device)  # (n_pages, page_tokens)
        # Both sides as (n_pages, page_tokens, n_kv_heads, head_dim).
        k_out.transpose(1, 2)[rows[:, None], positions] = k.transpose(1, 2)
        v_out.transpose(1, 2)[rows[:, None], positions] = v.transpose(1, 2)
        if batch.page_arenas is None:
            break
    rows, tokens = (torch.arange(page_tokens) < batch.tail_lens[:, None]).nonzero(as_tuple=True)
    positions = ((batch.seq_lens - batch.tail_lens)[rows] + tokens).to(device)
    slots, rows, tokens = batch.tail_slots[rows].long().to(device), rows.to(device), tokens.to(device)
    # Both sides as (n_tail_tokens, n_kv_heads, head_dim).
    k_out.transpose(1, 2)[rows, positions] = batch.tails[slots, 0, :, tokens].to(k_out.dtype)
    v_out.transpose(1, 2)[rows, positions] = batch.tails[slots, 1, :, tokens].to(v_out.dtype)
    past_end = torch.arange(k_out.shape[2], device=device) >= batch.seq_lens.to(device)[:, None]
    k_out.masked_fill_(past_end[:, None, :, None], 0)
    v_out.masked_fill_(past_end[:, None, :, None], 0)
