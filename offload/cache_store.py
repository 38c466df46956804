"""Where KV pages rest and how they travel: arenas per tier, rings to and from the device, a spill file.

Pages of one (layer, gpu batch) lie together, so that a pass moves its filled slots in few large transfers.
Slots are numbered fast tier first. On the way to the device they keep their numbers: a ring slot's rows are
the slots behind the resident ones, in order.

    three tiers   disk file -> cpu staging -> gpu ring <- cpu arena          (reads)
                  gpu store ring -> cpu arena, or -> cpu store staging -> disk file   (new pages)
    two tiers     disk file -> cpu ring;  cpu store ring -> disk file
"""

from __future__ import annotations

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
    new_pages: most pages that one (layer, gpu batch) fills in a pass. spill: file for disk pages, of
    `spill_bytes`, or None.
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
        compute_dtype: torch.dtype,
        depths: Depths | None = None,
    ) -> None:
        depths = depths or Depths()
        self.shape = shape
        self.device = device
        self._spill = spill
        self._three = device.first_tier is Tier.GPU
        self._flagged = tuple(cpu_attention)
        self._compute_dtype = compute_dtype
        n = shape.n_layers
        self._counts = [shape.counts(flag and self._three) for flag in self._flagged]
        first = device.first_tier
        self._first: list[Tensor] = []  # (n_layers, resident slots, page_bytes) per gpu batch
        self._cpu: list[Tensor] = []  # with three tiers: (n_layers, cpu slots, page_bytes)
        self._tails: list[Tensor] = []
        self._tail_tiers: list[Tier] = []
        for counts, flag in zip(self._counts, self._flagged, strict=True):
            size = (n, counts[first], shape.page_bytes)
            self._first.append(arenas[first].take_tensor(size, torch.uint8, "kv pages"))
            if self._three:
                size = (n, counts[Tier.CPU], shape.page_bytes)
                self._cpu.append(arenas[Tier.CPU].take_tensor(size, torch.uint8, "kv pages"))
            tier = Tier.CPU if flag or not self._three else tails_tier
            self._tail_tiers.append(tier)
            tail_size = (n, shape.gpu_batch_size, *shape.tail_shape)
            self._tails.append(arenas[tier].take_tensor(tail_size, shape.tail_dtype, "kv tails"))
        self._make_rings(arenas, depths, new_pages)
        self._states: dict[int, _BatchState] = {}
        self._outboxes: dict[int, Outbox] = {}

    def _make_rings(self, arenas: Mapping[Tier, Arena], depths: Depths, new_pages: int) -> None:
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
        if not self._three:
            self._ring = ring(first, depths.cache, disk, stride, "cache ring")
            self._out = ring(first, depths.cache_out, min(disk, new_pages), stride, "store ring")
            self._out_staging: list[Tensor] = []
            return
        away = max((c[Tier.CPU] + c[Tier.DISK] for c in plain), default=0)
        self._ring = ring(Tier.GPU, depths.cache, away, shape.page_bytes, "cache ring")
        if any(tier is Tier.CPU and not f for tier, f in zip(self._tail_tiers, self._flagged, strict=True)):
            size = (shape.gpu_batch_size, *shape.tail_shape)
            self._ring_tails = [
                arenas[Tier.GPU].take_tensor(size, shape.tail_dtype, "cache ring")
                for _ in range(depths.cache)
            ]
        self._staging = ring(Tier.CPU, depths.cache_staging, disk, stride, "cache staging")
        leaving = max(sum(c) - c[Tier.GPU] for c in self._counts)
        self._out = ring(Tier.GPU, depths.cache_out, min(leaving, new_pages), shape.page_bytes, "store ring")
        self._out_staging = ring(Tier.CPU, depths.cache_out, min(disk, new_pages), stride, "store staging")

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
        for rows, offsets, k, v in box.tail_kv:
            tails = self._tails[j][layer]
            tails[rows, 0, :, offsets] = k.cpu()
            tails[rows, 1, :, offsets] = v.cpu()
            moved += k.nbytes + v.nbytes
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
            tails = self._ring_tails[cache_slot] if cache_slot >= 0 and self._ring_tails else None
        return LayerCache(
            shape=self.shape,
            resident=self._first[j][layer],
            staged=self._ring[cache_slot] if cache_slot >= 0 and self._ring else None,
            tails=tails,
            outbox=self._outbox(out_slot, self._out),
            tails_leave=not tails_here,
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
            outbox=self._outbox(out_slot, self._out_staging),
            tails_leave=False,
        )

    def _outbox(self, out_slot: int, ring: list[Tensor]) -> Outbox | None:
        if out_slot < 0:
            return None
        box = Outbox(pages=ring[out_slot] if ring else None)
        self._outboxes[out_slot] = box
        return box


def disk_stride(shape: CacheShape) -> int:
    """Bytes from page to page on disk and in the buffers that disk transfers use."""
    return shape.stride_bytes
