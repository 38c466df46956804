"""Where KV pages rest and how they travel: arenas per tier, rings to and from the device, a spill file.

Pages of one (layer, gpu batch) lie together, so that a pass moves its filled slots in few large transfers.
Slots are numbered fast tier first. On the way to the device they keep their numbers: a ring slot's rows are
the slots behind the resident ones, in order.

    three tiers   disk file -> cpu staging -> gpu ring <- cpu arena          (reads)
                  gpu store ring -> cpu arena, or -> cpu store staging -> disk file   (new pages)
    two tiers     disk file -> cpu ring;  cpu store ring -> disk file
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.device import Device
from offload.disk import DiskFile, Extent, read_extents, write_extents
from offload.kv import LayerCache, Outbox
from offload.memory import Arena
from offload.pages import CacheShape, runs
from policy.schedule import BatchPlan, Depths
from policy.tiers import Tier


@dataclass(slots=True)
class _BatchState:
    """What one gpu batch reads in the pass that runs: [start, stop) runs of slots, by tier."""

    cpu_runs: list[tuple[int, int]]
    disk_runs: list[tuple[int, int]]
    tail_rows: int  # rows 0 .. tail_rows of the tails are read


class CacheStore:
    """The KV cache of a block on its tiers.

    cpu_attention: which gpu batches attend on the CPU; their gpu share of pages is in cpu memory.
    new_pages: most pages that one (layer, gpu batch) fills in a pass; new_tail_tokens: most tokens that it adds
    to tails. spill: file for disk pages, of `spill_bytes`, or None. attention_staging_bytes: as in the plan's limits.
    """

    def __init__(
        self,
        shape: CacheShape,
        *,
        device: Device,
        arenas: Mapping[Tier, Arena],
        spill: DiskFile | None,
        cpu_attention: Sequence[bool],
        tails_tier: Tier,
        new_pages: int,
        new_tail_tokens: int,
        attention_staging_bytes: int,
        depths: Depths | None = None,
    ) -> None:
        depths = depths or Depths()
        self.shape = shape
        self.device = device
        self._spill = spill
        self._attention_staging_bytes = attention_staging_bytes
        self._three = device.first_tier is Tier.GPU
        self._flagged = tuple(cpu_attention)
        self._counts = [shape.counts(flag and self._three) for flag in self._flagged]
        self._first = self._take_pages(arenas, device.first_tier)
        self._cpu = self._take_pages(arenas, Tier.CPU) if self._three else []
        self._tail_tiers = [Tier.CPU if flag or not self._three else tails_tier for flag in self._flagged]
        self._tails = self._take_tails(arenas)
        self._make_rings(arenas, depths, new_pages, new_tail_tokens)
        self._states: dict[int, _BatchState] = {}
        self._outboxes: dict[int, Outbox] = {}

    def _take_pages(self, arenas: Mapping[Tier, Arena], tier: Tier) -> list[Tensor]:
        """Page slots on a tier, uint8 (n_layers, slots, page_bytes) per gpu batch."""
        shape = self.shape
        sizes = [shape.n_layers * counts[tier] * shape.page_bytes for counts in self._counts]
        pieces = arenas[tier].take(sum(sizes), "kv pages").split(sizes)
        return [
            piece.view(shape.n_layers, counts[tier], shape.page_bytes)
            for piece, counts in zip(pieces, self._counts, strict=True)
        ]

    def _take_tails(self, arenas: Mapping[Tier, Arena]) -> list[Tensor]:
        """Tails, (n_layers, gpu_batch_size, 2, n_kv_heads, page_tokens, head_dim) per gpu batch."""
        shape = self.shape
        size = (shape.n_layers, shape.gpu_batch_size, *shape.tail_shape)
        rows = {
            tier: iter(
                arenas[tier].take_tensor((self._tail_tiers.count(tier), *size), shape.tail_dtype, "kv tails")
            )
            for tier in set(self._tail_tiers)
        }
        return [next(rows[tier]) for tier in self._tail_tiers]

    def _make_rings(
        self, arenas: Mapping[Tier, Arena], depths: Depths, new_pages: int, new_tail_tokens: int
    ) -> None:
        shape, first = self.shape, self.device.first_tier
        plain = [c for c, flag in zip(self._counts, self._flagged, strict=True) if not flag]
        disk = max(c[Tier.DISK] for c in self._counts)
        stride = disk_stride(shape)

        def ring(tier: Tier, depth: int, rows: int, width: int, what: str) -> list[Tensor]:
            if rows == 0:
                return []
            return [arenas[tier].take_tensor((rows, width), torch.uint8, what) for _ in range(depth)]

        self._staging: list[Tensor] = []
        self._ring_tails: list[Tensor] = []
        self._out_tails: list[Tensor] = []
        self._out_staging: list[Tensor] = []
        if not self._three:
            self._ring = ring(first, depths.cache, disk, stride, "cache ring")
            self._out = ring(first, depths.cache_out, min(disk, new_pages), stride, "store staging")
            return
        away = max((c[Tier.CPU] + c[Tier.DISK] for c in plain), default=0)
        tails_away = any(
            tier is Tier.CPU and not f for tier, f in zip(self._tail_tiers, self._flagged, strict=True)
        )
        tails = (shape.gpu_batch_size, *shape.tail_shape) if tails_away else (0, *shape.tail_shape)
        self._ring, self._ring_tails = self._pages_and_tails(
            arenas[Tier.GPU], depths.cache, away, tails, "cache ring"
        )
        self._staging = ring(Tier.CPU, depths.cache_staging, disk, stride, "cache staging")
        leaving = max(sum(c) - c[Tier.GPU] for c in self._counts)
        n_tokens = new_tail_tokens if tails_away or any(self._flagged) else 0
        self._out, self._out_tails = self._pages_and_tails(
            arenas[Tier.GPU],
            depths.cache_out,
            min(leaving, new_pages),
            (n_tokens, 2, shape.n_kv_heads, shape.head_dim),
            "store ring",
        )
        self._out_staging = ring(Tier.CPU, depths.cache_out, min(disk, new_pages), stride, "store staging")

    def _pages_and_tails(
        self, arena: Arena, depth: int, rows: int, tails: tuple[int, ...], what: str
    ) -> tuple[list[Tensor], list[Tensor]]:
        """A ring of slots that each hold `rows` pages, uint8 (rows, page_bytes), and tails of that shape."""
        shape = self.shape
        page_bytes, tail_bytes = rows * shape.page_bytes, math.prod(tails) * shape.tail_dtype.itemsize
        slots = [arena.take(page_bytes + tail_bytes, what) for _ in range(depth)]
        return (
            [slot[:page_bytes].view(rows, shape.page_bytes) for slot in slots],
            [slot[page_bytes:].view(shape.tail_dtype).view(tails) for slot in slots],
        )

    @staticmethod
    def spill_bytes(shape: CacheShape) -> int:
        """Size of the file that holds all disk pages."""
        return shape.n_layers * shape.num_gpu_batches * shape.page_counts[Tier.DISK] * disk_stride(shape)

    # -- a pass ----------------------------------------------------------------------------------------

    def begin_batch(
        self,
        j: int,
        *,
        used: Sequence[int],
        filled: Sequence[int],
        tail_rows: int,
        writes_tails: bool,
        attends_stored: bool,
        hidden_home: Tier,
    ) -> BatchPlan:
        """Note what gpu batch j reads and fills in this pass, and tell the schedule.

        used: page slots that its sequences hold; filled: slots that fill now; tail_rows: tails below this
        row are read; attends_stored: some query looks at stored pages or tails.
        """
        counts = self._counts[j]
        n_first = counts[self.device.first_tier]
        n_memory = counts[Tier.GPU] + counts[Tier.CPU]
        away = sorted(slot for slot in used if slot >= n_first)
        cpu = [slot for slot in away if slot < n_memory] if self._three else []
        disk = [slot for slot in away if slot >= n_memory]
        self._states[j] = _BatchState(runs(cpu), runs(disk), tail_rows)
        tails_on_cpu = self._three and self._tail_tiers[j] is Tier.CPU
        cpu_attention = self._flagged[j] and attends_stored
        return BatchPlan(
            reads_disk=bool(disk),
            reads_cpu=bool(cpu) or (tails_on_cpu and tail_rows > 0),
            stores_cpu=self._three
            and (any(slot >= n_first for slot in filled) or (tails_on_cpu and writes_tails)),
            writes_disk=any(slot >= n_memory for slot in filled),
            cpu_attention=cpu_attention,
            hidden_home=hidden_home,
        )

    # -- movement, on the lanes ------------------------------------------------------------------------

    def _place(self, layer: int, j: int, slot: int) -> int:
        """Offset of a disk page in the spill file."""
        counts = self._counts[j]
        n_disk = counts[Tier.DISK]
        row = (layer * self.shape.num_gpu_batches + j) * n_disk + slot - counts[Tier.GPU] - counts[Tier.CPU]
        return row * disk_stride(self.shape)

    def read(self, layer: int, j: int, slot: int) -> int:
        """Disk pages of (layer, gpu batch) -> ring slot (two tiers) or staging slot (three tiers)."""
        assert self._spill is not None
        dest = self._staging[slot] if self._three else self._ring[slot]
        stride = dest.shape[1]
        n_memory = self._counts[j][Tier.GPU] + self._counts[j][Tier.CPU]
        extents = [
            Extent(
                self._spill,
                self._place(layer, j, start),
                (stop - start) * stride,
                (start - n_memory) * stride,
            )
            for start, stop in self._states[j].disk_runs
        ]
        return read_extents(extents, dest.view(-1))

    def upload(self, layer: int, j: int, slot: int, staging_slot: int) -> int:
        """Pages and tails in cpu memory -> ring slot on the device."""
        state, counts = self._states[j], self._counts[j]
        n_gpu, moved = counts[Tier.GPU], 0
        for start, stop in state.cpu_runs:
            rows = self._cpu[j][layer, start - n_gpu : stop - n_gpu]
            self._ring[slot][start - n_gpu : stop - n_gpu].copy_(rows, non_blocking=True)
            moved += rows.numel()
        n_memory = n_gpu + counts[Tier.CPU]
        for start, stop in state.disk_runs:
            rows = self._staging[staging_slot][start - n_memory : stop - n_memory, : self.shape.page_bytes]
            self._ring[slot][start - n_gpu : stop - n_gpu].copy_(rows, non_blocking=True)
            moved += rows.numel()
        if state.tail_rows and self._tail_tiers[j] is Tier.CPU:
            tails = self._tails[j][layer, : state.tail_rows]
            self._ring_tails[slot][: state.tail_rows].copy_(tails, non_blocking=True)
            moved += tails.nbytes
        return moved

    def download(self, layer: int, j: int, out_slot: int) -> int:
        """New pages and tail tokens on the device -> cpu homes, or staging for those bound for disk."""
        box = self._outboxes.pop(out_slot)
        counts = self._counts[j]
        n_gpu, n_memory, moved = counts[Tier.GPU], counts[Tier.GPU] + counts[Tier.CPU], 0
        staged = self._out_staging[out_slot] if self._out_staging else None
        onward = Outbox(pages=staged)
        for row, slot in enumerate(box.slots):
            assert box.pages is not None
            if slot < n_memory:
                dest = self._cpu[j][layer, slot - n_gpu]
            else:
                dest = onward.take([slot])[0, : self.shape.page_bytes]
            dest.copy_(box.pages[row], non_blocking=True)
            moved += dest.numel()
        if box.tail_places:
            assert box.tails is not None
            new = box.tails[: box.n_tail_tokens].cpu()  # (tokens, 2, n_kv_heads, head_dim)
            rows, offsets = (torch.cat(x) for x in zip(*box.tail_places, strict=True))
            tails = self._tails[j][layer]
            tails[rows, 0, :, offsets] = new[:, 0]
            tails[rows, 1, :, offsets] = new[:, 1]
            moved += new.nbytes
        self._outboxes[out_slot] = onward
        return moved

    def write(self, layer: int, j: int, out_slot: int) -> int:
        """Pages bound for disk -> spill file; neighbours in one transfer."""
        assert self._spill is not None
        box = self._outboxes.pop(out_slot)
        assert box.pages is not None
        stride = box.pages.shape[1]
        extents = [
            Extent(self._spill, self._place(layer, j, slot), stride, row * stride)
            for row, slot in enumerate(box.slots)
        ]
        return write_extents(extents, box.pages.view(-1))

    # -- views for attention -----------------------------------------------------------------------------

    def layer(self, layer: int, j: int, cache_slot: int, out_slot: int) -> LayerCache:
        """(layer, gpu batch) as the device sees it while its cache is in ring slot `cache_slot`."""
        tails_here = self._tail_tiers[j] is self.device.first_tier
        if tails_here:
            tails: Tensor | None = self._tails[j][layer]
        else:
            tails = self._ring_tails[cache_slot] if cache_slot >= 0 else None
        return LayerCache(
            shape=self.shape,
            resident=self._first[j][layer],
            staged=self._ring[cache_slot] if cache_slot >= 0 and self._ring else None,
            tails=tails,
            outbox=self._outbox(out_slot, self._out, self._out_tails),
            tails_leave=not tails_here,
            staging_bytes=self._attention_staging_bytes,
        )

    def cpu_layer(self, layer: int, j: int, cache_slot: int, out_slot: int) -> LayerCache:
        """(layer, gpu batch) as CPU attention sees it, where its pages are."""
        if not self._three:
            return self.layer(layer, j, cache_slot, out_slot)
        return LayerCache(
            shape=self.shape,
            resident=self._cpu[j][layer],
            staged=self._staging[cache_slot] if cache_slot >= 0 else None,
            tails=self._tails[j][layer],
            outbox=self._outbox(out_slot, self._out_staging, []),
            tails_leave=False,
            staging_bytes=self._attention_staging_bytes,
        )

    def _outbox(self, out_slot: int, ring: list[Tensor], tails: list[Tensor]) -> Outbox | None:
        if out_slot < 0:
            return None
        box = Outbox(pages=ring[out_slot] if ring else None, tails=tails[out_slot] if tails else None)
        self._outboxes[out_slot] = box
        return box


def disk_stride(shape: CacheShape) -> int:
    """Bytes from page to page on disk and in the buffers that disk transfers use."""
    return shape.stride_bytes
