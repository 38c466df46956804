"""The KV cache in pages: who owns which page slot, where slots are at home, and attention over them.

A page is `page_tokens` consecutive tokens of one sequence's K and V in one layer. All layers advance together,
so a sequence's page slots are the same numbers in every layer. Slots of one gpu batch are numbered fast tier
first and handed out lowest first: a half-filled cache stays in fast memory, and the filled slots of a slower
tier form few runs, each one transfer.

A sequence's last, unfinished page is its *tail*: uncompressed, in a slot of its own. When a page is full it is
encoded and moves to its home once. Attention sees the query's own page exactly and earlier pages as stored;
prompts are cut into segments at fixed positions (SEGMENT_TOKENS) and a segment sees itself exactly. What a
token sees is thus a function of its position alone: results do not depend on block shapes, passes or homes,
even with a compressed cache.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from offload.attention import attend_dense, attend_segments
from offload.units import AttentionParams
from policy.tiers import Tier
from quant.kv import PagedBatch, decode_pages, encode_pages
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
        if not self._free_rows[batch] or len(self._free_slots[batch]) - self._promised[batch] < need:
            return None
        self._promised[batch] += need
        return CacheSequence(batch=batch, row=heapq.heappop(self._free_rows[batch]), reserved_pages=need)

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

    def free_rows(self, batch: int) -> int:
        return len(self._free_rows[batch])


def runs(slots: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending slots as [start, stop) runs."""
    found: list[tuple[int, int]] = []
    for slot in slots:
        if found and found[-1][1] == slot:
            found[-1] = (found[-1][0], slot + 1)
        else:
            found.append((slot, slot + 1))
    return found


@dataclass(slots=True, kw_only=True)
class ChunkAttention:
    """What one chunk of a gpu batch's tokens does to the cache and reads from it; the same in all layers.

    Indices called *_tokens count the chunk's flat tokens. Appending: page_tokens_idx (n_pages * page_tokens,)
    are the tokens of prompt pages that are full at once, page_slots their slots; tail_tokens go to
    (tail_rows, tail_offsets); full_tail_rows are tails filled by this chunk, to be encoded into
    full_tail_slots. Attending: decode_tokens have one query per sequence (tables in `paged`); segments are
    (first token, n, position of the first, row, pages before it), sorted so that equal ones are neighbours.
    """

    n_tokens: int
    page_tokens_idx: Tensor
    page_slots: list[int]
    tail_tokens: Tensor
    tail_rows: Tensor
    tail_offsets: Tensor
    full_tail_rows: list[int]
    full_tail_slots: list[int]
    decode_tokens: Tensor
    decode_all: bool
    seq_lens: Tensor
    tail_lens: Tensor
    decode_rows: Tensor
    page_table: Tensor
    segments: list[tuple[int, int, int, int, tuple[int, ...]]]
    decode_plans: dict[int, Any] = field(default_factory=dict)  # by window, shared by all layers

    @property
    def self_contained(self) -> bool:
        """True if no query looks at stored pages or tails."""
        return self.decode_tokens.numel() == 0 and all(start == 0 for _, _, start, _, _ in self.segments)

    @property
    def filled(self) -> list[int]:
        """Slots of all pages that fill with this chunk."""
        return self.page_slots + self.full_tail_slots


def plan_chunk(
    allocator: PageAllocator, pieces: Sequence[tuple[CacheSequence, int]], decode: Sequence[bool]
) -> ChunkAttention:
    """Assign pages for the next tokens of each (sequence, number of new tokens) and advance the sequences.

    Pieces marked decode bring one token that attends through the paged kernel; the others are prompt
    segments, which begin at a multiple of SEGMENT_TOKENS and do not cross one.
    """
    page = allocator.shape.page_tokens
    page_idx: list[Tensor] = []
    page_slots: list[int] = []
    tail_tokens: list[Tensor] = []
    tail_rows: list[Tensor] = []
    tail_offsets: list[Tensor] = []
    full_rows: list[int] = []
    full_slots: list[int] = []
    rows: list[tuple[int, int, int, int, list[int]]] = []  # token, length, tail length, row, pages
    segments: list[tuple[int, int, int, int, tuple[int, ...]]] = []
    token = 0
    for (sequence, n_new), is_decode in zip(pieces, decode, strict=True):
        start, end = sequence.length, sequence.length + n_new
        before = tuple(sequence.pages)
        if is_decode:
            assert n_new == 1
            tail_tokens.append(torch.tensor([token]))
            tail_rows.append(torch.tensor([sequence.row]))
            tail_offsets.append(torch.tensor([start % page]))
            rows.append((token, end, start % page + 1, sequence.row, list(before)))
            if end % page == 0:
                full_rows.append(sequence.row)
                full_slots.append(allocator.take_page(sequence))
        else:
            assert start % SEGMENT_TOKENS == 0 and n_new <= SEGMENT_TOKENS, (start, n_new)
            n_full = n_new // page
            if n_full:
                page_idx.append(torch.arange(token, token + n_full * page))
                page_slots.extend(allocator.take_page(sequence) for _ in range(n_full))
            rest = n_new - n_full * page
            if rest:
                tail_tokens.append(torch.arange(token + n_full * page, token + n_new))
                tail_rows.append(torch.full((rest,), sequence.row))
                tail_offsets.append(torch.arange(rest))
            segments.append((token, n_new, start, sequence.row, before))
        sequence.length = end
        token += n_new
    segments.sort(key=lambda s: (s[1], s[2], s[0]))
    n_pages = max((len(r[4]) for r in rows), default=0)
    table = torch.zeros((len(rows), max(n_pages, 1)), dtype=torch.int32)
    for i, (*_, pages) in enumerate(rows):
        table[i, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
    int32 = torch.int32
    return ChunkAttention(
        n_tokens=token,
        page_tokens_idx=_cat(page_idx),
        page_slots=page_slots,
        tail_tokens=_cat(tail_tokens),
        tail_rows=_cat(tail_rows),
        tail_offsets=_cat(tail_offsets),
        full_tail_rows=full_rows,
        full_tail_slots=full_slots,
        decode_tokens=torch.tensor([r[0] for r in rows], dtype=torch.int64),
        decode_all=len(rows) == token,
        seq_lens=torch.tensor([r[1] for r in rows], dtype=int32),
        tail_lens=torch.tensor([r[2] for r in rows], dtype=int32),
        decode_rows=torch.tensor([r[3] for r in rows], dtype=int32),
        page_table=table,
        segments=segments,
    )


def _cat(pieces: list[Tensor]) -> Tensor:
    return torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.int64)


@dataclass(slots=True, kw_only=True)
class Outbox:
    """Pages and tail tokens of one (layer, gpu batch) that leave the device in this pass.

    pages: uint8 (rows, stride_bytes), filled from the front; slots[i] is the home of row i.
    tail_kv: the new tokens' K and V where tails are at home elsewhere, as (rows, offsets, k, v) pieces.
    """

    pages: Tensor | None
    slots: list[int] = field(default_factory=list)
    tail_kv: list[tuple[Tensor, Tensor, Tensor, Tensor]] = field(default_factory=list)

    def take(self, slots: Sequence[int]) -> Tensor:
        """Rows for pages of these slots."""
        begin = len(self.slots)
        assert self.pages is not None and begin + len(slots) <= self.pages.shape[0], "outbox too small"
        self.slots.extend(slots)
        return self.pages[begin : begin + len(slots)]


@dataclass(slots=True, kw_only=True)
class LayerCache:
    """The pages and tails of one (layer, gpu batch) as attention sees them, all on one device.

    resident: uint8 (n_resident, stride): slots 0 .. n_resident. staged: the slots after them, or None.
    tails: (gpu_batch_size, 2, n_kv_heads, page_tokens, head_dim), or None where nothing reads them and new
    tokens only leave (tails_leave) through the outbox. Pages that fill in this pass and have another home are
    read back from the outbox.
    """

    shape: CacheShape
    resident: Tensor
    staged: Tensor | None
    tails: Tensor | None
    outbox: Outbox | None = None
    tails_leave: bool = False

    @property
    def n_resident(self) -> int:
        return self.resident.shape[0]

    def append(self, chunk: ChunkAttention, key: Tensor, value: Tensor) -> None:
        """Store key and value (tokens, n_kv_heads, head_dim) of a chunk: whole pages encoded, the rest in tails."""
        page = self.shape.page_tokens
        if chunk.page_slots:
            index = chunk.page_tokens_idx.to(key.device)
            # (n_pages * page_tokens, n_kv_heads, head_dim) -> (n_pages, n_kv_heads, page_tokens, head_dim)
            k = key[index].unflatten(0, (-1, page)).transpose(1, 2)
            v = value[index].unflatten(0, (-1, page)).transpose(1, 2)
            self._store_pages(k, v, chunk.page_slots)
        if chunk.tail_tokens.numel():
            device = key.device
            tokens = chunk.tail_tokens.to(device)
            rows, offsets = chunk.tail_rows.to(device), chunk.tail_offsets.to(device)
            k = key[tokens].to(self.shape.tail_dtype)
            v = value[tokens].to(self.shape.tail_dtype)
            if self.tails is not None:
                self.tails[rows, 0, :, offsets] = k
                self.tails[rows, 1, :, offsets] = v
            if self.tails_leave:
                assert self.outbox is not None
                self.outbox.tail_kv.append((chunk.tail_rows, chunk.tail_offsets, k, v))
        if chunk.full_tail_rows:
            assert self.tails is not None
            full = self.tails[torch.tensor(chunk.full_tail_rows, device=key.device)]
            self._store_pages(full[:, 0], full[:, 1], chunk.full_tail_slots)

    def _store_pages(self, k: Tensor, v: Tensor, slots: list[int]) -> None:
        here = [i for i, slot in enumerate(slots) if slot < self.n_resident]
        away = [i for i, slot in enumerate(slots) if slot >= self.n_resident]
        # Rounding to the stored type first makes a page equal to the tail it was.
        k, v = k.to(self.shape.tail_dtype), v.to(self.shape.tail_dtype)
        if here:
            homes = [slots[i] for i in here]
            ascending = runs(homes)
            ks, vs = (k, v) if not away else (k[here], v[here])
            if len(ascending) == 1 and ascending[0] == (homes[0], homes[-1] + 1):
                encode_pages(ks, vs, self.shape.fmt, self.resident[homes[0] : homes[-1] + 1])
            else:
                pages = torch.empty((len(here), self.resident.shape[1]), dtype=torch.uint8, device=k.device)
                encode_pages(ks, vs, self.shape.fmt, pages)
                self.resident[torch.tensor(homes, device=k.device)] = pages
        if away:
            assert self.outbox is not None
            rows = self.outbox.take([slots[i] for i in away])
            encode_pages(k if not here else k[away], v if not here else v[away], self.shape.fmt, rows)

    # -- reading ---------------------------------------------------------------------------------------

    def attend(
        self, chunk: ChunkAttention, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams
    ) -> Tensor:
        """Attend a chunk whose keys and values were appended: query (tokens, n_heads, head_dim) -> same."""
        if chunk.decode_all:
            return self.decode(chunk, query, params)
        out = torch.empty_like(query)
        if chunk.decode_tokens.numel():
            tokens = chunk.decode_tokens.to(query.device)
            out[tokens] = self.decode(chunk, query[tokens], params)
        attend_first_segments(chunk, query, key, value, params, out)
        self.attend_later_segments(chunk, query, key, value, params, out)
        return out

    def attend_later_segments(
        self,
        chunk: ChunkAttention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        params: AttentionParams,
        out: Tensor,
    ) -> None:
        """Attend prompt segments that have stored pages before them, into `out` (tokens, n_heads, head_dim)."""
        for token, n, start, _, pages in chunk.segments:
            if start == 0:
                continue
            here = slice(token, token + n)
            past_k, past_v = self._gather(pages, query.dtype, query.device)
            k = torch.cat([past_k, key[here]]).unsqueeze(0)
            v = torch.cat([past_v, value[here]]).unsqueeze(0)
            out[here] = attend_segments(query[here].unsqueeze(0), k, v, params)[0]

    def _gather(
        self, pages: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Stored keys and values of these pages in order: two (tokens, n_kv_heads, head_dim)."""
        slots = torch.tensor(pages)
        raw = self._rows(slots, device)
        k, v = decode_pages(
            raw,
            self.shape.fmt,
            n_kv_heads=self.shape.n_kv_heads,
            page_tokens=self.shape.page_tokens,
            head_dim=self.shape.head_dim,
            dtype=dtype,
        )
        # (n_pages, n_kv_heads, page_tokens, head_dim) -> (tokens, n_kv_heads, head_dim)
        return k.transpose(1, 2).flatten(0, 1), v.transpose(1, 2).flatten(0, 1)

    def _rows(self, slots: Tensor, device: torch.device) -> Tensor:
        """Raw pages (n, page_bytes) of these slots: resident, staged, or filled earlier in this pass."""
        width = self.shape.page_bytes
        if bool((slots < self.n_resident).all()):
            return self.resident[slots.to(device), :width]
        fresh = {slot: row for row, slot in enumerate(self.outbox.slots)} if self.outbox is not None else {}
        out = torch.empty((len(slots), width), dtype=torch.uint8, device=device)
        places: dict[str, list[tuple[int, int]]] = {"resident": [], "staged": [], "fresh": []}
        for i, slot in enumerate(slots.tolist()):
            if slot < self.n_resident:
                places["resident"].append((i, slot))
            elif slot in fresh:
                places["fresh"].append((i, fresh[slot]))
            else:
                places["staged"].append((i, slot - self.n_resident))
        stores = {
            "resident": self.resident,
            "staged": self.staged,
            "fresh": self.outbox.pages if self.outbox is not None else None,
        }
        for name, pairs in places.items():
            store = stores[name]
            if pairs:
                assert store is not None, f"{name} pages are not here"
                where = torch.tensor(pairs, device=device)
                out[where[:, 0]] = store[where[:, 1], :width]
        return out

    def decode(self, chunk: ChunkAttention, query: Tensor, params: AttentionParams) -> Tensor:
        """Attend the chunk's one-token rows: query (decode tokens, n_heads, head_dim) -> same."""
        if query.device.type == "cpu":
            return self._decode_on_cpu(chunk, query, params)
        key, value = self._dense(chunk, query.dtype)
        return attend_dense(query, key, value, chunk.seq_lens, params)

    def _decode_on_cpu(self, chunk: ChunkAttention, query: Tensor, params: AttentionParams) -> Tensor:
        from quant import kernels_attention as kernels  # imports numba, which planning and help do without

        kernel_params = kernels.AttentionParams(
            scale=params.scale,
            softcap=params.softcap,
            window=params.window,
            alibi_slopes=params.alibi_slopes,
        )
        plan = chunk.decode_plans.get(params.window)
        if plan is None:
            plan = chunk.decode_plans[params.window] = kernels.plan_decode(
                chunk.seq_lens,
                chunk.tail_lens,
                page_tokens=self.shape.page_tokens,
                n_kv_heads=self.shape.n_kv_heads,
                window=params.window,
            )
        out = kernels.decode_attention(query.float(), self._paged(chunk), kernel_params, plan=plan)
        return out.to(query.dtype)

    def _paged(self, chunk: ChunkAttention) -> PagedBatch:
        table, arenas, page_arenas = chunk.page_table, (self.resident,), None
        if self.staged is not None:
            away = table >= self.n_resident
            page_arenas = away.to(torch.int32)
            table = torch.where(away, table - self.n_resident, table)
            arenas = (self.resident, self.staged)  # type: ignore[assignment]
        assert self.tails is not None
        return PagedBatch(
            fmt=self.shape.fmt,
            page_tokens=self.shape.page_tokens,
            n_kv_heads=self.shape.n_kv_heads,
            head_dim=self.shape.head_dim,
            arenas=arenas,
            page_slots=table,
            page_arenas=page_arenas,
            seq_lens=chunk.seq_lens,
            tail_lens=chunk.tail_lens,
            tails=self.tails,
            tail_slots=chunk.decode_rows,
        )

    def _dense(self, chunk: ChunkAttention, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Padded keys and values of the decode rows: two (batch, n_kv_heads, max_len, head_dim)."""
        assert self.tails is not None
        shape, page, device = self.shape, self.shape.page_tokens, self.tails.device
        batch, n_pages = chunk.page_table.shape
        full = (chunk.seq_lens - chunk.tail_lens) // page  # (batch,)
        size = (batch, shape.n_kv_heads, (n_pages + 1) * page, shape.head_dim)
        key = torch.zeros(size, dtype=dtype, device=device)
        value = torch.zeros(size, dtype=dtype, device=device)
        wanted = torch.arange(n_pages) < full[:, None]
        where = wanted.nonzero()  # (n, 2): row, page number
        if len(where):
            raw = self._rows(chunk.page_table[wanted].long(), device)
            k, v = decode_pages(
                raw,
                shape.fmt,
                n_kv_heads=shape.n_kv_heads,
                page_tokens=page,
                head_dim=shape.head_dim,
                dtype=dtype,
            )
            row, number = where[:, 0].to(device), where[:, 1].to(device)
            # (batch, n_kv_heads, pages * page_tokens, head_dim) viewed by pages
            key.unflatten(2, (n_pages + 1, page))[row, :, number] = k
            value.unflatten(2, (n_pages + 1, page))[row, :, number] = v
        rows, number = torch.arange(batch, device=device), full.long().to(device)
        tails = self.tails[chunk.decode_rows.long().to(device)].to(dtype)
        key.unflatten(2, (n_pages + 1, page))[rows, :, number] = tails[:, 0]
        value.unflatten(2, (n_pages + 1, page))[rows, :, number] = tails[:, 1]
        return key, value


def attend_first_segments(
    chunk: ChunkAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    params: AttentionParams,
    out: Tensor,
) -> None:
    """Attend the prompt segments that begin their sequences; they need no stored page. Equal ones that lie
    side by side are one call. query, out (tokens, n_heads, head_dim), key, value (tokens, n_kv_heads, head_dim)."""
    i, segments = 0, [s for s in chunk.segments if s[2] == 0]
    while i < len(segments):
        token, n = segments[i][:2]
        j = i + 1
        while j < len(segments) and segments[j][:2] == (token + (j - i) * n, n):
            j += 1
        here = slice(token, token + (j - i) * n)
        # (batch * n, heads, head_dim) -> (batch, n, heads, head_dim)
        q, k, v = (x[here].unflatten(0, (j - i, n)) for x in (query, key, value))
        out[here] = attend_segments(q, k, v, params).flatten(0, 1)
        i = j
