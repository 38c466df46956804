"""Who owns which KV page slot: the shape of a block's cache and the bookkeeping of its slots and tail rows.

A page is `page_tokens` consecutive tokens of one sequence's K and V in one layer. All layers advance together,
so a sequence's page slots are the same numbers in every layer. Slots of one gpu batch are numbered fast tier
first and handed out lowest first: a half-filled cache stays in fast memory, and the filled slots of a slower
tier form few runs, each one transfer.

A sequence's last, unfinished page is its *tail*: uncompressed, in a slot of its own. When a page is full it is
encoded and moves to its home once.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from policy.tiers import Tier
from quant.kv_formats import CacheFormat, check_page_tokens

SEGMENT_TOKENS = 256
"""Prompts are cut into segments at multiples of this position; page_tokens divides it."""

DISK_ALIGN_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """Sizes of a KV cache: layers with a cache, gpu batches of a block, and one page.

    page_counts: page slots per (layer, gpu batch) at home on (gpu, cpu, disk).
    """

    n_layers: int
    num_gpu_batches: int
    gpu_batch_size: int
    n_kv_heads: int
    head_dim: int
    page_counts: tuple[int, int, int]
    fmt: CacheFormat
    tail_dtype: torch.dtype
    page_tokens: int = 64

    def __post_init__(self) -> None:
        check_page_tokens(self.page_tokens)
        if SEGMENT_TOKENS % self.page_tokens:
            raise ValueError(f"page_tokens must divide {SEGMENT_TOKENS}, got {self.page_tokens}")

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in memory."""
        return self.fmt.page_nbytes(
            page_tokens=self.page_tokens, n_kv_heads=self.n_kv_heads, head_dim=self.head_dim
        )

    @property
    def stride_bytes(self) -> int:
        """Bytes from page to page wherever pages may travel to or from disk."""
        if self.page_counts[Tier.DISK] == 0:
            return self.page_bytes
        return -(-self.page_bytes // DISK_ALIGN_BYTES) * DISK_ALIGN_BYTES

    @property
    def tail_shape(self) -> tuple[int, int, int, int]:
        return (2, self.n_kv_heads, self.page_tokens, self.head_dim)

    @property
    def tail_bytes(self) -> int:
        """Bytes of one sequence's tail in one layer."""
        return 2 * self.n_kv_heads * self.page_tokens * self.head_dim * self.tail_dtype.itemsize

    def counts(self, cpu_attention: bool) -> tuple[int, int, int]:
        """Page slots by tier of one gpu batch; CPU attention needs its pages where the CPU can read them."""
        gpu, cpu, disk = self.page_counts
        return (0, gpu + cpu, disk) if cpu_attention else (gpu, cpu, disk)


@dataclass(slots=True, kw_only=True, eq=False)
class CacheSequence:
    """A sequence's place in the cache: gpu batch, tail row, page slots in order, tokens stored so far."""

    batch: int
    row: int
    reserved_pages: int
    pages: list[int] = field(default_factory=list)
    length: int = 0


class PageAllocator:
    """Bookkeeping of the page slots and tail rows of every gpu batch. Pages are promised when a sequence is
    admitted and handed out when they fill, so an admitted sequence never runs out."""

    def __init__(self, shape: CacheShape) -> None:
        self.shape = shape
        n_slots = sum(shape.page_counts)
        self._free_slots = [list(range(n_slots)) for _ in range(shape.num_gpu_batches)]
        self._promised = [0] * shape.num_gpu_batches
        self._free_rows = [list(range(shape.gpu_batch_size)) for _ in range(shape.num_gpu_batches)]

    def pages_needed(self, total_tokens: int) -> int:
        """Full pages of a sequence that will have at most total_tokens tokens stored."""
        return total_tokens // self.shape.page_tokens

    def fits(self, total_tokens: int) -> bool:
        """Whether a sequence of that length could be admitted to an empty gpu batch."""
        return self.pages_needed(total_tokens) <= sum(self.shape.page_counts)

    def admit(self, batch: int, total_tokens: int) -> CacheSequence | None:
        """A place for a sequence in that gpu batch, or None while rows or pages are short."""
        need = self.pages_needed(total_tokens)
        if not self._free_rows[batch] or not self.has_pages(batch, total_tokens):
            return None
        self._promised[batch] += need
        return CacheSequence(batch=batch, row=heapq.heappop(self._free_rows[batch]), reserved_pages=need)

    def has_pages(self, batch: int, total_tokens: int) -> bool:
        """Whether that gpu batch has pages, not promised to others, for a sequence of so many tokens."""
        return len(self._free_slots[batch]) - self._promised[batch] >= self.pages_needed(total_tokens)

    def take_page(self, sequence: CacheSequence) -> int:
        """The lowest free slot, for a page of `sequence` that fills in this pass."""
        slot = heapq.heappop(self._free_slots[sequence.batch])
        self._promised[sequence.batch] -= 1
        sequence.reserved_pages -= 1
        sequence.pages.append(slot)
        return slot

    def release(self, sequence: CacheSequence) -> None:
        """Give back everything a finished or aborted sequence holds."""
        for slot in sequence.pages:
            heapq.heappush(self._free_slots[sequence.batch], slot)
        self._promised[sequence.batch] -= sequence.reserved_pages
        heapq.heappush(self._free_rows[sequence.batch], sequence.row)
        sequence.pages, sequence.reserved_pages = [], 0

    def rewind(self, sequence: CacheSequence) -> None:
        """Forget what a sequence has stored; it keeps its row and the promise of all its pages."""
        for slot in sequence.pages:
            heapq.heappush(self._free_slots[sequence.batch], slot)
        self._promised[sequence.batch] += len(sequence.pages)
        sequence.reserved_pages += len(sequence.pages)
        sequence.pages, sequence.length = [], 0


def runs(slots: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending slots as [start, stop) runs."""
    found: list[tuple[int, int]] = []
    for slot in slots:
        if found and found[-1][1] == slot:
            found[-1] = (found[-1][0], slot + 1)
        else:
            found.append((slot, slot + 1))
    return found
