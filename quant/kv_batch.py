"""Where a batch of sequences' KV pages rest, and their addresses for the CPU kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quant.kv_formats import PAGE_ALIGN_BYTES, CacheFormat, check_page_tokens, parse_cache_format

PLAIN_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedBatch:
    """Where the K and V of a batch of sequences rest in one layer: full pages in arenas, tails apart.

    A sequence of seq_lens[i] tokens is (seq_lens[i] - tail_lens[i]) / page_tokens full pages followed by its
    uncompressed tail of tail_lens[i] <= page_tokens tokens. A sequence may appear in several rows with
    different lengths: that is how several query tokens of one sequence are attended at once.

    arenas: uint8 (n_slots, >= page_nbytes) each, rows contiguous; page_slots: int32 (batch, max_pages),
    entries past a sequence's pages are ignored; page_arenas: int32 (batch, max_pages), the arena of each
    page, or None when all are in arenas[0]; seq_lens, tail_lens, tail_slots: int32 (batch,); tails:
    (n_tail_slots, 2, n_kv_heads, page_tokens, head_dim) in fp32, bf16 or fp16, each slot contiguous, K
    first. Lengths and tables are on the CPU, arenas and tails on one device. Raises ValueError on anything
    that does not fit together. tables_checked: the same lengths and tables were checked before, with arenas and tails
    of the same shapes: those of the layers of one pass are.
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
    tables_checked: bool = False

    def __post_init__(self) -> None:
        check_page_tokens(self.page_tokens)
        self._check_storage()
        if not self.tables_checked:
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

    def rows(self, rows: slice) -> PagedBatch:
        """The same storage for some of the rows."""
        return replace(
            self,
            page_slots=self.page_slots[rows],
            page_arenas=None if self.page_arenas is None else self.page_arenas[rows],
            seq_lens=self.seq_lens[rows],
            tail_lens=self.tail_lens[rows],
            tail_slots=self.tail_slots[rows],
        )

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
                    f"page arena rows must be contiguous, multiples of {PAGE_ALIGN_BYTES} bytes apart and start "
                    f"on 16 bytes, got strides {arena.stride()} at address {arena.data_ptr():#x}"
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
            wrong = self.tail_slots[has_tail & ~in_range].tolist()
            raise ValueError(f"tail_slots must be 0..{self.tails.shape[0] - 1}, got {wrong}")


def page_addresses(batch: PagedBatch) -> npt.NDArray[np.int64]:
    """Address of every full page, int64 (batch, max_pages), 0 past a sequence's pages.

    Raises ValueError for a slot or arena number that does not exist, unless the tables were checked before.
    """
    slots = batch.page_slots.numpy().astype(np.int64)
    used = np.arange(slots.shape[1]) < batch.full_pages().numpy()[:, None]  # (batch, max_pages)
    if not batch.arenas:
        if used.any():
            raise ValueError("the batch has full pages but no arena that holds them")
        return np.zeros_like(slots)
    base = np.array([arena.data_ptr() for arena in batch.arenas], dtype=np.int64)
    stride = np.array([arena.stride(0) for arena in batch.arenas], dtype=np.int64)
    n_slots = np.array([arena.shape[0] for arena in batch.arenas], dtype=np.int64)
    if batch.page_arenas is None:
        number = np.zeros((1, 1), dtype=np.int64)
    else:
        number = np.where(used, batch.page_arenas.numpy(), 0)
        if not batch.tables_checked and number.size and (number.min() < 0 or number.max() >= len(base)):
            raise ValueError(f"page_arenas must be 0..{len(base) - 1}, got {number.min()}..{number.max()}")
    wrong = used & ((slots < 0) | (slots >= n_slots[number])) if not batch.tables_checked else None
    if wrong is not None and wrong.any():
        row, page = (int(index) for index in np.argwhere(wrong)[0])
        raise ValueError(
            f"page {page} of sequence {row} is in slot {slots[row, page]}, "
            f"its arena has slots 0..{int((n_slots[number] + 0 * slots)[row, page]) - 1}"
        )
    return np.where(used, base[number] + slots * stride[number], 0)


def tail_addresses(batch: PagedBatch) -> npt.NDArray[np.int64]:
    """Address of every tail, int64 (batch,), 0 where a sequence has none."""
    slot_nbytes = batch.tails.stride(0) * batch.tails.element_size()
    addresses = batch.tails.data_ptr() + batch.tail_slots.numpy().astype(np.int64) * slot_nbytes
    return np.where(batch.tail_lens.numpy() > 0, addresses, 0)


def plain_format(dtype: torch.dtype) -> CacheFormat:
    """The plain cache format that stores values of this dtype."""
    return parse_cache_format({torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}[dtype])


@lru_cache(maxsize=64)
def part_offsets(fmt: CacheFormat, page_tokens: int, n_kv_heads: int, head_dim: int) -> npt.NDArray[np.int64]:
    """Where k_codes, k_scale, k_min, v_codes, v_scale, v_min and units start in a page, int64 (7,).

    In plain pages K takes the place of k_codes and V of v_codes; the others are 0.
    """
    parts = fmt.page_parts(page_tokens=page_tokens, n_kv_heads=n_kv_heads, head_dim=head_dim)
    if fmt.is_packed:
        return np.array([part.offset_bytes for part in parts], dtype=np.int64)
    return np.array([0, 0, 0, parts[0].nbytes // 2, 0, 0, 0], dtype=np.int64)
