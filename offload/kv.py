"""The KV pages and tails of one (layer, gpu batch), as attention sees them on one device.

Who owns which slot is in `offload.pages`, what a chunk of tokens does to the cache in `offload.kv_chunk`, where
pages are at home and how they travel in `offload.cache_store`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offload.attention import attend_segments, kernel_params
from offload.dense_decode import attend_pieces, decode_block
from offload.kv_chunk import ChunkAttention, plan_chunk
from offload.pages import SEGMENT_TOKENS, CacheSequence, CacheShape, PageAllocator, runs
from offload.units import AttentionParams
from policy.workload import DEFAULT_ATTENTION_STAGING_BYTES
from quant import pointwise
from quant import prefill_attention as tiles
from quant.kv import decode_pages, encode_pages
from quant.kv_batch import PagedBatch

__all__ = [
    "SEGMENT_TOKENS",
    "CacheSequence",
    "CacheShape",
    "ChunkAttention",
    "LayerCache",
    "Outbox",
    "PageAllocator",
    "attend_first_segments",
    "plan_chunk",
    "runs",
]


@dataclass(slots=True, kw_only=True)
class Outbox:
    """Pages and tail tokens of one (layer, gpu batch) that leave the device in this pass.

    pages: uint8 (rows, stride_bytes), filled from the front; slots[i] is the home of row i.
    tails: the new tokens' K and V where tails are at home elsewhere, (tokens, 2, n_kv_heads, head_dim), filled
    from the front; tail_places: (tail rows, offsets) of the tokens so far, in pieces.
    """

    pages: Tensor | None
    tails: Tensor | None = None
    slots: list[int] = field(default_factory=list)
    tail_places: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    n_tail_tokens: int = 0

    def take(self, slots: Sequence[int]) -> Tensor:
        """Rows for pages of these slots."""
        begin = len(self.slots)
        assert self.pages is not None and begin + len(slots) <= self.pages.shape[0], "outbox too small"
        self.slots.extend(slots)
        return self.pages[begin : begin + len(slots)]

    def add_tails(self, rows: Tensor, offsets: Tensor, key: Tensor, value: Tensor) -> None:
        """Keep key and value (n, n_kv_heads, head_dim) for these places in the tails."""
        begin, end = self.n_tail_tokens, self.n_tail_tokens + len(rows)
        assert self.tails is not None and end <= self.tails.shape[0], "outbox too small for tails"
        self.tails[begin:end, 0] = key
        self.tails[begin:end, 1] = value
        self.n_tail_tokens = end
        self.tail_places.append((rows, offsets))


@dataclass(slots=True, kw_only=True)
class LayerCache:
    """The pages and tails of one (layer, gpu batch) as attention sees them, all on one device.

    resident: uint8 (n_resident, stride): slots 0 .. n_resident. staged: the slots after them, or None.
    tails: (gpu_batch_size, 2, n_kv_heads, page_tokens, head_dim), or None where nothing reads them and new
    tokens only leave (tails_leave) through the outbox. Pages that fill in this pass and have another home are
    read back from the outbox. staging_bytes: the plan's Limits.attention_staging_bytes.
    """

    shape: CacheShape
    resident: Tensor
    staged: Tensor | None
    tails: Tensor | None
    outbox: Outbox | None = None
    tails_leave: bool = False
    staging_bytes: int = DEFAULT_ATTENTION_STAGING_BYTES

    @property
    def n_resident(self) -> int:
        return self.resident.shape[0]

    # -- writing ---------------------------------------------------------------------------------------

    def append(self, chunk: ChunkAttention, key: Tensor, value: Tensor) -> None:
        """Store key and value (tokens, n_kv_heads, head_dim) of a chunk: whole pages encoded, the rest in tails."""
        if self._can_place(key) and self._can_place(value):
            self._place(chunk, key, value)
        else:
            self._put(chunk, key, value)
        if chunk.full_tail_slots:
            assert self.tails is not None
            full = self.tails[chunk.on(key.device).full_tail_rows]
            self._store_pages(full[:, 0], full[:, 1], chunk.full_tail_slots)

    def _can_place(self, x: Tensor) -> bool:
        """Whether tokens are kept as they are and a compiled kernel can copy them to where they belong."""
        fmt = self.shape.fmt
        is_kept = not fmt.is_packed and x.dtype == self.shape.tail_dtype == getattr(torch, fmt.dtype)
        return is_kept and x.shape[1:] == (self.shape.n_kv_heads, self.shape.head_dim) and pointwise.fits(x)

    def _place(self, chunk: ChunkAttention, key: Tensor, value: Tensor) -> None:
        """Copy each token's heads straight into its page or tail."""
        page, width = self.shape.page_tokens, self.shape.head_dim * key.element_size()
        if chunk.page_slots:
            pages = np.repeat(self._page_addresses(chunk.page_slots), page)
            pages += np.tile(np.arange(page) * width, len(chunk.page_slots))
            tokens, side = chunk.indices.page_tokens.numpy(), self.shape.n_kv_heads * page * width
            pointwise.place(key, tokens, pages, page * width)
            pointwise.place(value, tokens, pages + side, page * width)
        index = chunk.indices
        if not index.tail_tokens.numel():
            return
        if self.tails is not None:
            row, side, head, step = (n * key.element_size() for n in self.tails.stride()[:4])
            places = index.tail_rows.numpy() * row + index.tail_offsets.numpy() * step + self.tails.data_ptr()
            pointwise.place(key, index.tail_tokens.numpy(), places, head)
            pointwise.place(value, index.tail_tokens.numpy(), places + side, head)
        if self.tails_leave:
            assert self.outbox is not None
            k, v = key[index.tail_tokens], value[index.tail_tokens]
            self.outbox.add_tails(index.tail_rows, index.tail_offsets, k, v)

    def _page_addresses(self, slots: list[int]) -> Any:
        """Where these pages are written, int64 (n,): at home if that is here, else in the outbox."""
        away = [slot for slot in slots if slot >= self.n_resident]
        begin, stride = self.resident.data_ptr(), self.resident.stride(0)
        places = {slot: begin + slot * stride for slot in slots if slot < self.n_resident}
        if away:
            assert self.outbox is not None
            rows = self.outbox.take(away)
            begin, stride = rows.data_ptr(), rows.stride(0)
            places.update((slot, begin + i * stride) for i, slot in enumerate(away))
        return np.array([places[slot] for slot in slots], dtype=np.int64)

    def _put(self, chunk: ChunkAttention, key: Tensor, value: Tensor) -> None:
        """The same by torch's operations, on any device, and for packed pages."""
        page, index = self.shape.page_tokens, chunk.on(key.device)
        if chunk.page_slots:
            # (n_pages * page_tokens, n_kv_heads, head_dim) -> (n_pages, n_kv_heads, page_tokens, head_dim)
            k = key[index.page_tokens].unflatten(0, (-1, page)).transpose(1, 2)
            v = value[index.page_tokens].unflatten(0, (-1, page)).transpose(1, 2)
            self._store_pages(k, v, chunk.page_slots)
        if index.tail_tokens.numel():
            k = key[index.tail_tokens].to(self.shape.tail_dtype)
            v = value[index.tail_tokens].to(self.shape.tail_dtype)
            if self.tails is not None:
                self.tails[index.tail_rows, 0, :, index.tail_offsets] = k
                self.tails[index.tail_rows, 1, :, index.tail_offsets] = v
            if self.tails_leave:
                assert self.outbox is not None
                self.outbox.add_tails(chunk.indices.tail_rows, chunk.indices.tail_offsets, k, v)

    def _store_pages(self, k: Tensor, v: Tensor, slots: list[int]) -> None:
        """Encode pages k, v (n_pages, n_kv_heads, page_tokens, head_dim) into their slots or the outbox."""
        here = [i for i, slot in enumerate(slots) if slot < self.n_resident]
        away = [i for i, slot in enumerate(slots) if slot >= self.n_resident]
        # Rounding to the stored type first makes a page equal to the tail it was.
        k, v = k.to(self.shape.tail_dtype), v.to(self.shape.tail_dtype)
        if self.shape.fmt.is_packed:  # its kernels take contiguous pages
            k, v = k.contiguous(), v.contiguous()
        if here:
            homes = [slots[i] for i in here]
            ks, vs = (k, v) if not away else (k[here], v[here])
            if homes == list(range(homes[0], homes[0] + len(homes))):
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
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        attend_first_segments(chunk, query, key, value, params, out)
        self.attend_stored(chunk, query, key, value, params, out)
        return out

    def attend_stored(
        self,
        chunk: ChunkAttention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        params: AttentionParams,
        out: Tensor,
    ) -> None:
        """Attend the tokens that look at stored pages or tails, into `out` (tokens, n_heads, head_dim)."""
        if len(chunk.seq_lens):
            tokens = chunk.on(query.device).decode_tokens
            out[tokens] = self.decode(chunk, query[tokens], params)
        segments = [segment for segment in chunk.segments if segment.start]
        if segments and self._reads_by_tiles(query, key, value):
            self._attend_by_tiles(chunk, query, key, value, params, out)
            return
        for segment in segments:
            here = segment.tokens
            pages = segment.seen_pages(params.window, self.shape.page_tokens)
            k, v = self._gather(pages, query.dtype, query.device, more_tokens=segment.n)
            k[-segment.n :], v[-segment.n :] = key[here], value[here]
            out[here] = attend_segments(query[here].unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), params)[0]
            del k, v  # before the next segment's are made

    def _reads_by_tiles(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Whether prompts attend stored pages where they lie."""
        fits = self.shape.fmt.name == "bf16" and self.shape.page_tokens % 32 == 0
        return fits and tiles.can_prefill(query, key, value)

    def _attend_by_tiles(
        self,
        chunk: ChunkAttention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        params: AttentionParams,
        out: Tensor,
    ) -> None:
        """Attend the segments that look at stored pages, into their tokens of `out`."""
        shape = self.shape
        plan, slots = chunk.prefill_plan(
            query,
            key,
            window=params.window,
            page_tokens=shape.page_tokens,
            stored=True,
            most_bytes=self.staging_bytes,
        )
        addresses = self.resident.data_ptr() + slots * self.resident.stride(0)
        away = np.flatnonzero(slots >= self.n_resident)
        if len(away):
            fresh = self._fresh_rows()
            for i, slot in zip(away, slots[away].tolist(), strict=True):
                is_fresh = slot in fresh
                store = self.outbox.pages if is_fresh and self.outbox is not None else self.staged
                row = fresh[slot] if is_fresh else slot - self.n_resident
                assert store is not None and row < store.shape[0], f"page {slot} is not here"
                addresses[i] = store.data_ptr() + row * store.stride(0)
        v_offset = shape.n_kv_heads * shape.page_tokens * shape.head_dim * query.element_size()
        pages = tiles.Pages(addresses, v_offset)
        tiles.prefill_attention(query, key, value, kernel_params(params), plan, out, pages)

    def decode(self, chunk: ChunkAttention, query: Tensor, params: AttentionParams) -> Tensor:
        """Attend the chunk's one-token rows: query (decode rows, n_heads, head_dim) -> same."""
        if query.device.type == "cpu":
            return self._decode_on_cpu(chunk, query, params)
        return self._decode_on_device(chunk, query, params)

    def _decode_on_device(self, chunk: ChunkAttention, query: Tensor, params: AttentionParams) -> Tensor:
        assert self.tails is not None
        arenas = (self.resident,) if self.staged is None else (self.resident, self.staged)
        pieces = chunk.dense_plan(
            self.shape,
            n_resident=None if self.staged is None else self.n_resident,
            dtype=query.dtype,
            device=query.device,
            staging_bytes=self.staging_bytes,
        )
        return attend_pieces(pieces, query, arenas, self.tails, self.shape, params)

    def _decode_on_cpu(self, chunk: ChunkAttention, query: Tensor, params: AttentionParams) -> Tensor:
        from quant.kernels_attention import decode_attention  # imports numba

        plan = chunk.decode_plan(
            window=params.window, page_tokens=self.shape.page_tokens, n_kv_heads=self.shape.n_kv_heads
        )
        out = decode_attention(query, self._paged(chunk), kernel_params(params), plan=plan)
        return out.to(query.dtype)

    def _paged(self, chunk: ChunkAttention) -> PagedBatch:
        table, page_arenas, arenas = chunk.page_table, None, (self.resident,)
        if self.staged is not None:
            table, page_arenas = chunk.tables(self.n_resident)
            arenas = (self.resident, self.staged)  # type: ignore[assignment]
        assert self.tails is not None
        shapes = tuple(arena.shape for arena in (*arenas, self.tails))
        return PagedBatch(
            tables_checked=chunk.seen_with(shapes),
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

    # -- gathering -------------------------------------------------------------------------------------

    def _gather(
        self, slots: Tensor, dtype: torch.dtype, device: torch.device, *, more_tokens: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Stored keys and values of these pages in order, and room for more: two (tokens, n_kv_heads, head_dim)."""
        page, n_stored = self.shape.page_tokens, len(slots) * self.shape.page_tokens
        size = (n_stored + more_tokens, self.shape.n_kv_heads, self.shape.head_dim)
        k, v = (torch.empty(size, dtype=dtype, device=device) for _ in range(2))
        # Raw pages from several places are held twice for a moment.
        step = max(1, decode_block(self.shape, dtype, k.nbytes + v.nbytes, self.staging_bytes) // 2)
        for first in range(0, len(slots), step):
            block = slots[first : first + step]
            tokens = slice(first * page, (first + len(block)) * page)
            for out, pages in zip((k, v), self._decoded(block, dtype, device), strict=True):
                # (tokens, n_kv_heads, head_dim) as (n_pages, n_kv_heads, page_tokens, head_dim)
                out[tokens].unflatten(0, (-1, page)).transpose(1, 2).copy_(pages)
                del pages
        return k, v

    def _decoded(self, slots: Tensor, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Keys and values of pages: two (n_pages, n_kv_heads, page_tokens, head_dim)."""
        return decode_pages(
            self._rows(slots, device),
            self.shape.fmt,
            n_kv_heads=self.shape.n_kv_heads,
            page_tokens=self.shape.page_tokens,
            head_dim=self.shape.head_dim,
            dtype=dtype,
        )

    def _fresh_rows(self) -> dict[int, int]:
        """Slots of pages that were filled earlier in this pass and leave -> their rows in the outbox."""
        return {slot: row for row, slot in enumerate(self.outbox.slots)} if self.outbox is not None else {}

    def _rows(self, slots: Tensor, device: torch.device) -> Tensor:
        """Raw pages (n, page_bytes) of these slots: resident, staged, or filled earlier in this pass."""
        width = self.shape.page_bytes
        if bool((slots < self.n_resident).all()):
            return self.resident[slots.to(device), :width]
        fresh = self._fresh_rows()
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
        out: Tensor | None = None
        for name, pairs in places.items():
            store = stores[name]
            if len(pairs) == len(slots):
                assert store is not None, f"{name} pages are not here"
                return store[torch.tensor([row for _, row in pairs], device=device), :width]
            if pairs:
                assert store is not None, f"{name} pages are not here"
                if out is None:
                    out = torch.empty((len(slots), width), dtype=torch.uint8, device=device)
                where = torch.tensor(pairs, device=device)
                out[where[:, 0]] = store[where[:, 1], :width]
        assert out is not None, "no page to read"
        return out


def attend_first_segments(
    chunk: ChunkAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    params: AttentionParams,
    out: Tensor,
) -> None:
    """Attend the prompt segments that begin their sequences; they need no stored page. Those of equal length that lie
    side by side are one call, with tiles all are. query, out (tokens, n_heads, head_dim), key, value (tokens,
    n_kv_heads, head_dim)."""
    i, segments = 0, [s for s in chunk.segments if s.start == 0]
    if segments and tiles.can_prefill(query, key, value):
        plan, _ = chunk.prefill_plan(query, key, window=params.window, stored=False)
        tiles.prefill_attention(query, key, value, kernel_params(params), plan, out)
        return
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
