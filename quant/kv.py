"""KV cache pages as tensors: encode full pages, decode them, gather a batch of sequences into staging buffers.

Formats and page layout are in `quant.kv_formats`. Everything here works on any torch device; on the CPU the
heavy loops run in numba (`quant.kv_jit`), which is imported on first use.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quant.kv_formats import PAGE_ALIGN_BYTES, CacheFormat, check_page_tokens

# Cache values beyond this are refused: differences of two of them must stay finite in fp32.
MAX_ABS_VALUE = 2.0**126
PLAIN_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedBatch:
    """Where the K and V of a batch of sequences rest in one layer: full pages in arenas, tails apart.

    A sequence of seq_lens[i] tokens is (seq_lens[i] - tail_lens[i]) / page_tokens full pages followed by its
    uncompressed tail of tail_lens[i] <= page_tokens tokens. A sequence may appear in several rows with
    different lengths: that is how several query tokens of one sequence are attended at once.

    arenas: uint8 (n_slots, >= page_nbytes) each, rows contiguous; page_slots: int32 (batch, max_pages), entries
    past a sequence's pages are ignored; page_arenas: int32 (batch, max_pages), the arena of each page, or None
    when all are in arenas[0]; seq_lens, tail_lens, tail_slots: int32 (batch,); tails: (n_tail_slots, 2,
    n_kv_heads, page_tokens, head_dim) in fp32, bf16 or fp16, each slot contiguous, K first. Lengths and tables
    are on the CPU, arenas and tails on one device. Raises ValueError on anything that does not fit together.
    """

    fmt: CacheFormat
    page_tokens: int
    n_kv_heads: int
    head_dim: int
    arenas: tuple[Tensor, ...]
    page_slots: Tensor
    seq_lens: Tensor
    tail_lens: Tensor
    tails: Tensor
    tail_slots: Tensor
    page_arenas: Tensor | None = None

    def __post_init__(self) -> None:
        check_page_tokens(self.page_tokens)
        self._check_storage()
        self._check_tables()

    @property
    def batch(self) -> int:
        return self.seq_lens.shape[0]

    @property
    def page_nbytes(self) -> int:
        return self.fmt.page_nbytes(
            page_tokens=self.page_tokens, n_kv_heads=self.n_kv_heads, head_dim=self.head_dim
        )

    @property
    def device(self) -> torch.device:
        return self.tails.device

    def full_pages(self) -> Tensor:
        """Number of full pages of each sequence, int32 (batch,)."""
        return torch.div(self.seq_lens - self.tail_lens, self.page_tokens, rounding_mode="floor")

    def _check_storage(self) -> None:
        slot_shape = (2, self.n_kv_heads, self.page_tokens, self.head_dim)
        if (
            self.tails.dtype not in PLAIN_DTYPES
            or self.tails.dim() != 5
            or self.tails.shape[1:] != slot_shape
        ):
            raise ValueError(
                f"tails must be float (n_tail_slots, {', '.join(map(str, slot_shape))}), "
                f"got {self.tails.dtype} {tuple(self.tails.shape)}"
            )
        if self.tails.shape[0] and not self.tails[0].is_contiguous():
            raise ValueError(f"each slot of tails must be contiguous, got strides {self.tails.stride()}")
        for arena in self.arenas:
            if arena.dtype != torch.uint8 or arena.dim() != 2 or arena.shape[1] < self.page_nbytes:
                raise ValueError(
                    f"a {self.fmt.name} page arena must be uint8 (n_slots, >= {self.page_nbytes}), "
                    f"got {arena.dtype} {tuple(arena.shape)}"
                )
            if arena.stride(1) != 1 or arena.stride(0) % PAGE_ALIGN_BYTES or arena.data_ptr() % 16:
                raise ValueError(
                    f"page arena rows must be contiguous, {PAGE_ALIGN_BYTES}-byte multiples apart and start on "
                    f"16 bytes, got strides {arena.stride()} at address {arena.data_ptr():#x}"
                )
            if arena.device != self.tails.device:
                raise ValueError(
                    f"arenas are on {arena.device}, tails on {self.tails.device}; use one device"
                )

    def _check_tables(self) -> None:
        for name in ("seq_lens", "tail_lens", "tail_slots"):
            table = getattr(self, name)
            if table.dtype != torch.int32 or table.shape != (self.batch,) or table.device.type != "cpu":
                raise ValueError(
                    f"{name} must be int32 ({self.batch},) on the CPU, got {table.dtype} {tuple(table.shape)}"
                )
        if self.page_slots.dtype != torch.int32 or self.page_slots.shape[:1] != (self.batch,):
            raise ValueError(
                f"page_slots must be int32 ({self.batch}, max_pages), "
                f"got {self.page_slots.dtype} {tuple(self.page_slots.shape)}"
            )
        if self.page_arenas is not None and (
            self.page_arenas.dtype != torch.int32 or self.page_arenas.shape != self.page_slots.shape
        ):
            raise ValueError(
                f"page_arenas must be int32 {tuple(self.page_slots.shape)} like page_slots, "
                f"got {self.page_arenas.dtype} {tuple(self.page_arenas.shape)}"
            )
        if not self.batch:
            return
        paged = self.seq_lens - self.tail_lens
        if bool((paged % self.page_tokens != 0).any()) or int(paged.min()) < 0:
            raise ValueError(
                f"seq_lens - tail_lens must be whole pages of {self.page_tokens} tokens, got {paged.tolist()}"
            )
        tail_min, tail_max = (int(bound) for bound in self.tail_lens.aminmax())
        if tail_min < 0 or tail_max > self.page_tokens:
            raise ValueError(f"tail_lens must be 0..{self.page_tokens}, got {tail_min}..{tail_max}")
        if int(paged.max()) > self.page_slots.shape[1] * self.page_tokens:
            raise ValueError(
                f"a sequence has {int(paged.max()) // self.page_tokens} full pages, "
                f"page_slots has room for {self.page_slots.shape[1]}"
            )
        has_tail = self.tail_lens > 0
        in_range = (self.tail_slots >= 0) & (self.tail_slots < self.tails.shape[0])
        if bool((has_tail & ~in_range).any()):
            raise ValueError(
                f"tail_slots must be 0..{self.tails.shape[0] - 1}, got {self.tail_slots[has_tail & ~in_range].tolist()}"
            )


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
        views[part.name] = raw.view(getattr(torch, part.dtype)).unflatten(1, part.shape)
    return views


def encode_pages(k: Tensor, v: Tensor, fmt: CacheFormat, out: Tensor) -> None:
    """Store full pages: k, v (n_pages, n_kv_heads, page_tokens, head_dim) -> out uint8 (n_pages, >= page_nbytes).

    k, v: fp32, bf16 or fp16. Every rebuilt value is within half a step of the original plus the rounding of the
    stored fp16 parameters (2^-11 of minimum and range). Raises ValueError for shapes that do not fit, and
    for values that are not finite or exceed MAX_ABS_VALUE, naming the page.
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
    """Fill codes, scale and minimum of K (axis 2: over tokens) or V (axis 3: over channels); return the units."""
    low, high = x.float().aminmax(dim=axis)
    # Both comparisons are false for NaN.
    bad = ~((low >= -MAX_ABS_VALUE) & (high <= MAX_ABS_VALUE)).flatten(1).all(1)
    if bool(bad.any()):
        raise ValueError(
            f"{what} of page {int(bad.nonzero()[0])} (of {x.shape[0]}) holds NaN, infinity or a magnitude above "
            f"2^126; the cache cannot store it: check the model's weights and attention inputs"
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
    _encode_codes(x, axis, fmt, codes, inverse_unit, minimum.float(), inverse_step)
    return unit


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
    planes = torch.nn.functional.pad(code, (0, pad)).unflatten(-1, (fmt.codes_per_byte, row_nbytes))
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
    """Rebuild K and V of pages uint8 (n_pages, >= page_nbytes): two (n_pages, n_kv_heads, page_tokens, head_dim)."""
    parts = page_views(pages, fmt, page_tokens=page_tokens, n_kv_heads=n_kv_heads, head_dim=head_dim)
    if not fmt.is_packed:
        kv = parts["kv"].to(dtype)
        return kv[:, 0], kv[:, 1]
    units = parts["units"][..., None]  # (n_pages, 2, n_kv_heads, 1)
    k = _decode_codes(parts["k_codes"], fmt, head_dim)
    k.mul_((parts["k_scale"].float() * units[:, 0]).unsqueeze(2))
    k.add_((parts["k_min"].float() * units[:, 0]).unsqueeze(2))
    v = _decode_codes(parts["v_codes"], fmt, head_dim)
    v.mul_((parts["v_scale"].float() * units[:, 1]).unsqueeze(3))
    v.add_((parts["v_min"].float() * units[:, 1]).unsqueeze(3))
    return k.to(dtype), v.to(dtype)


def _decode_codes(codes: Tensor, fmt: CacheFormat, head_dim: int) -> Tensor:
    """uint8 (..., row_nbytes) -> fp32 codes (..., head_dim)."""
    planes = [(codes >> (plane * fmt.bits)) & fmt.levels for plane in range(fmt.codes_per_byte)]
    return torch.cat(planes, dim=-1)[..., :head_dim].float()
