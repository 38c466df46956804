"""Hidden states of gpu batches between units: at home on a tier, in a ring of slots while computed.

A gpu batch whose hidden states are at home on the first tier computes in place. Others travel through a ring:
device <-> cpu home, and on to disk through the same cpu buffers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from offload.device import Device
from offload.disk import DiskFile
from offload.memory import Arena, aligned_bytes
from policy.schedule import Depths
from policy.tiers import Tier


class HiddenStore:
    """homes: one tier per gpu batch. max_tokens: most tokens of a gpu batch in a pass."""

    def __init__(
        self,
        homes: Sequence[Tier],
        *,
        max_tokens: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: Device,
        arenas: Mapping[Tier, Arena],
        spill: DiskFile | None,
        depths: Depths | None = None,
    ) -> None:
        depths = depths or Depths()
        first = device.first_tier
        self._shape = (max_tokens, hidden_size)
        self._dtype = dtype
        self._spill = spill
        self._nbytes = self.batch_bytes(max_tokens, hidden_size, dtype)
        self._homes = tuple(homes)
        self._first = first
        self._at_home: dict[int, Tensor] = {}
        self._place: dict[int, int] = {}
        for j, home in enumerate(homes):
            if home is Tier.DISK:
                self._place[j] = len(self._place) * self._nbytes
            else:
                self._at_home[j] = arenas[home].take_tensor(self._shape, dtype, "hidden")
        moved = [home for home in homes if home > first]
        self._ring = [
            arenas[first].take_tensor(self._shape, dtype, "hidden ring")
            for _ in range(depths.hidden if moved else 0)
        ]
        through_cpu = first is Tier.GPU and Tier.DISK in moved
        self._staging = [
            arenas[Tier.CPU].take_tensor(self._shape, dtype, "hidden staging")
            for _ in range(depths.hidden if through_cpu else 0)
        ]

    @staticmethod
    def batch_bytes(max_tokens: int, hidden_size: int, dtype: torch.dtype) -> int:
        """Bytes that one gpu batch takes on any tier."""
        return aligned_bytes(max_tokens * hidden_size * dtype.itemsize)

    def enter(self, j: int, slot: int, n_tokens: int) -> Tensor:
        """Gpu batch j's hidden states (n_tokens, hidden_size) on the device, in ring slot `slot` if given."""
        if slot >= 0:
            return self._ring[slot][:n_tokens]
        if self._homes[j] is self._first:
            return self._at_home[j][:n_tokens]
        return self._ring[0][:n_tokens]  # a lone gpu batch never leaves the device

    def _file_bytes(self, n_tokens: int) -> int:
        return aligned_bytes(n_tokens * self._shape[1] * self._dtype.itemsize)

    def _cpu_buffer(self, slot: int) -> Tensor:
        return (self._staging or self._ring)[slot].view(-1).view(torch.uint8)

    def read(self, j: int, slot: int, n_tokens: int) -> int:
        """Disk -> cpu staging slot (three tiers) or ring slot (two tiers)."""
        assert self._spill is not None
        return self._spill.read_into(self._cpu_buffer(slot), self._place[j], self._bytes(n_tokens))

    def write(self, j: int, slot: int, n_tokens: int) -> int:
        assert self._spill is not None
        return self._spill.write_from(self._cpu_buffer(slot), self._place[j], self._bytes(n_tokens))

    def _bytes(self, n_tokens: int) -> int:
        # Whole blocks where the buffer has them, so that the transfer is direct.
        return min(self._file_bytes(n_tokens), self._shape[0] * self._shape[1] * self._dtype.itemsize)

    def upload(self, j: int, slot: int, n_tokens: int) -> int:
        """Cpu home or staging slot -> ring slot."""
        src = self._at_home[j] if j in self._at_home else self._staging[slot]
        self._ring[slot][:n_tokens].copy_(src[:n_tokens], non_blocking=True)
        return src[:n_tokens].nbytes

    def download(self, j: int, slot: int, n_tokens: int) -> int:
        """Ring slot -> cpu home or staging slot."""
        dest = self._at_home[j] if j in self._at_home else self._staging[slot]
        dest[:n_tokens].copy_(self._ring[slot][:n_tokens], non_blocking=True)
        return dest[:n_tokens].nbytes
