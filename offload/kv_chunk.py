"""What one chunk of a gpu batch's tokens does to the cache: decided once per pass, the same in all layers.

Attention sees the query's own page exactly and earlier pages as stored; prompts are cut into segments at fixed
positions (SEGMENT_TOKENS) and a segment sees itself exactly. What a token sees is thus a function of its
position alone: results do not depend on block shapes, passes or homes, even with a compressed cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offload.dense_decode import DensePiece, plan_dense
from offload.pages import SEGMENT_TOKENS, CacheSequence, CacheShape, PageAllocator
from quant.prefill_attention import MOST_BYTES, PrefillPlan, PrefillSegment, plan_prefill


class Segment(NamedTuple):
    """A piece of a prompt: n tokens of the chunk from `token` on, at position `start` of its sequence.

    pages: the slots of the pages before it, int64, on the CPU.
    """

    token: int
    n: int
    start: int
    pages: Tensor

    @property
    def tokens(self) -> slice:
        return slice(self.token, self.token + self.n)

    def seen_pages(self, window: int, page_tokens: int) -> Tensor:
        """The pages that its queries see: all, or with a window whole pages from the first query's first position."""
        if window == 0 or self.start == 0:
            return self.pages
        return self.pages[max(0, self.start - window + 1) // page_tokens :]


class Indices(NamedTuple):
    """Index tensors (int64) of a chunk on one device.

    page_tokens (n_pages * page_tokens,): tokens of prompt pages that are full at once. tail_tokens go to
    (tail_rows, tail_offsets). full_tail_rows: tails that this chunk fills. decode_tokens: tokens with one query
    per sequence. stored_tokens: those that look at stored pages or tails (decode_tokens and later segments).
    """

    page_tokens: Tensor
    tail_tokens: Tensor
    tail_rows: Tensor
    tail_offsets: Tensor
    full_tail_rows: Tensor
    decode_tokens: Tensor
    stored_tokens: Tensor


@dataclass(slots=True, kw_only=True, eq=False)
class ChunkAttention:
    """The cache's part in one chunk of n_tokens.

    page_slots: slots of prompt pages that fill at once, in the order of indices.page_tokens;
    full_tail_slots: those of tails that fill. Decode rows, int32 on the CPU: seq_lens and tail_lens with the
    new token, decode_rows (tail rows), page_table (rows, max pages). segments are sorted so that equal ones
    lie side by side; every layer reads them in this order.
    """

    n_tokens: int
    indices: Indices
    page_slots: list[int]
    full_tail_slots: list[int]
    seq_lens: Tensor
    tail_lens: Tensor
    decode_rows: Tensor
    page_table: Tensor
    segments: list[Segment]
    # Made on first use, then shared by all layers.
    _indices_on: dict[torch.device, Indices] = field(default_factory=dict)
    _memo: dict[object, Any] = field(default_factory=dict)

    @property
    def decode_all(self) -> bool:
        """Whether every token is the one new token of a running sequence."""
        return len(self.seq_lens) == self.n_tokens

    @property
    def self_contained(self) -> bool:
        """Whether no query looks at stored pages or tails."""
        return self.indices.stored_tokens.numel() == 0

    @property
    def filled(self) -> list[int]:
        """Slots of all pages that fill with this chunk."""
        return self.page_slots + self.full_tail_slots

    def on(self, device: torch.device) -> Indices:
        """The index tensors on a device."""
        if device.type == "cpu":
            return self.indices
        if device not in self._indices_on:
            self._indices_on[device] = Indices(*(t.to(device) for t in self.indices))
        return self._indices_on[device]

    def seen_with(self, shapes: tuple[torch.Size, ...]) -> bool:
        """Whether a layer before used these lengths and tables on memory of these shapes; true from then on."""
        key = ("seen with", shapes)
        seen = key in self._memo
        self._memo[key] = True
        return seen

    def tables(self, n_resident: int) -> tuple[Tensor, Tensor]:
        """The page table for two arenas, the first holding n_resident slots: slots within their arena, and
        which arena (0 or 1); int32 (rows, max pages) each."""
        key = ("tables", n_resident)
        if key not in self._memo:
            away = self.page_table >= n_resident
            table = torch.where(away, self.page_table - n_resident, self.page_table)
            self._memo[key] = (table, away.to(torch.int32))
        return self._memo[key]

    def dense_plan(
        self,
        shape: CacheShape,
        *,
        n_resident: int | None,
        dtype: torch.dtype,
        device: torch.device,
        staging_bytes: int,
    ) -> list[DensePiece]:
        """How an accelerator gathers the decode rows' pages. n_resident: slots of the first of two arenas."""
        key = ("dense", n_resident, dtype, device, staging_bytes)
        if key not in self._memo:
            table, arenas = (self.page_table, None) if n_resident is None else self.tables(n_resident)
            self._memo[key] = plan_dense(
                table,
                arenas,
                self.seq_lens,
                self.tail_lens,
                self.decode_rows,
                shape=shape,
                dtype=dtype,
                device=device,
                staging_bytes=staging_bytes,
            )
        return self._memo[key]

    def decode_plan(self, *, window: int, page_tokens: int, n_kv_heads: int) -> Any:
        """How the CPU kernel cuts the decode rows' work (quant.kernels_attention.DecodePlan)."""
        key = ("plan", window, n_kv_heads)
        if key not in self._memo:
            from quant.kernels_attention import (
                plan_decode,
            )  # imports numba, which planning and help do without

            self._memo[key] = plan_decode(
                self.seq_lens, self.tail_lens, page_tokens=page_tokens, n_kv_heads=n_kv_heads, window=window
            )
        return self._memo[key]

    def prefill_plan(
        self,
        query: Tensor,
        key: Tensor,
        *,
        window: int,
        stored: bool,
        page_tokens: int = 0,
        most_bytes: int = MOST_BYTES,
    ) -> tuple[PrefillPlan, npt.NDArray[np.int64]]:
        """How the CPU's tiles attend the segments that look at stored pages, or those that do not.

        Also the slots of the pages that they look at, int64 (n_pages,), in the plan's order. query and key:
        (tokens, heads, head_dim), as in every layer of the pass.
        """
        n_heads, n_kv_heads, head_dim = query.shape[1], key.shape[1], key.shape[2]
        name = ("prefill", stored, n_heads, window)
        if name not in self._memo:
            segments, slots = [], [np.empty(0, np.int64)]
            for s in self.segments:
                if bool(s.start) != stored:
                    continue
                pages = s.seen_pages(window, page_tokens).numpy()
                segments.append(PrefillSegment(s.token, s.n, s.token, s.n, len(pages)))
                slots.append(pages)
            plan = plan_prefill(
                segments,
                n_heads=n_heads,
                n_kv_heads=n_kv_heads,
                head_dim=head_dim,
                window=window,
                page_tokens=page_tokens,
                most_bytes=most_bytes,
            )
            self._memo[name] = plan, np.concatenate(slots)
        return self._memo[name]


def plan_chunk(
    allocator: PageAllocator, pieces: Sequence[tuple[CacheSequence, int]], decode: Sequence[bool]
) -> ChunkAttention:
    """Assign pages for the next tokens of each (sequence, number of new tokens) and advance the sequences.

    Pieces marked decode bring one token that attends through the paged kernel; the others are prompt
    segments, which begin at a multiple of SEGMENT_TOKENS and do not cross one.
    """
    page = allocator.shape.page_tokens
    page_tokens: list[int] = []
    page_slots: list[int] = []
    tail: list[tuple[int, int, int]] = []  # token, row, offset
    full_rows: list[int] = []
    full_slots: list[int] = []
    rows: list[tuple[int, int, int, int]] = []  # token, length, tail length, row
    tables: list[list[int]] = []
    segments: list[Segment] = []
    stored: list[int] = []
    token = 0
    for (sequence, n_new), is_decode in zip(pieces, decode, strict=True):
        start, end = sequence.length, sequence.length + n_new
        before = list(sequence.pages)
        if is_decode:
            assert n_new == 1
            tail.append((token, sequence.row, start % page))
            rows.append((token, end, start % page + 1, sequence.row))
            tables.append(before)
            stored.append(token)
            if end % page == 0:
                full_rows.append(sequence.row)
                full_slots.append(allocator.take_page(sequence))
        else:
            assert start % SEGMENT_TOKENS == 0 and n_new <= SEGMENT_TOKENS, (start, n_new)
            n_full = n_new // page
            page_tokens.extend(range(token, token + n_full * page))
            page_slots.extend(allocator.take_page(sequence) for _ in range(n_full))
            rest = range(n_new - n_full * page)
            tail.extend((token + n_full * page + i, sequence.row, i) for i in rest)
            segments.append(Segment(token, n_new, start, torch.tensor(before, dtype=torch.int64)))
            if start:
                stored.extend(range(token, token + n_new))
        sequence.length = end
        token += n_new
    segments.sort(key=lambda s: (s.n, s.start, s.token))
    table = torch.zeros((len(rows), max((len(t) for t in tables), default=0) or 1), dtype=torch.int32)
    for i, pages in enumerate(tables):
        table[i, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
    tail_index = torch.tensor(tail, dtype=torch.int64).view(-1, 3)
    decode_index = torch.tensor(rows, dtype=torch.int32).view(-1, 4)
    return ChunkAttention(
        n_tokens=token,
        indices=Indices(
            page_tokens=torch.tensor(page_tokens, dtype=torch.int64),
            tail_tokens=tail_index[:, 0].contiguous(),
            tail_rows=tail_index[:, 1].contiguous(),
            tail_offsets=tail_index[:, 2].contiguous(),
            full_tail_rows=torch.tensor(full_rows, dtype=torch.int64),
            decode_tokens=decode_index[:, 0].long(),
            stored_tokens=torch.tensor(stored, dtype=torch.int64),
        ),
        page_slots=page_slots,
        full_tail_slots=full_slots,
        seq_lens=decode_index[:, 1].contiguous(),
        tail_lens=decode_index[:, 2].contiguous(),
        decode_rows=decode_index[:, 3].contiguous(),
        page_table=table,
        segments=segments,
    )
