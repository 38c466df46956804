"""How small the weights' ring can get: the sizes of the largest unit that is still streamed.

A ring slot holds the largest streamed unit, so a plan whose large units all rest on the first tier has a
smaller ring than one that streams them. The linear program knows fractions of bytes, not units; for every
size of the largest streamed unit it is told what that choice needs at least on the first tier (all larger
units) and what it saves (the ring's slots).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from policy.footprint import ModelFootprint
from policy.schedule import Depths

ALIKE = 0.98
"""Units at least this large relative to the largest of a group share one ring, which holds the smallest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsRing:
    """What every plan needs at least whose largest streamed unit belongs to one group of sizes.

    ring_bytes: all slots on the first tier. resident_bytes: larger units, all on the first tier.
    staging_frac: cpu memory for units on their way up from disk, per byte that rests on disk.
    """

    ring_bytes: int
    resident_bytes: int
    staging_frac: float


def weights_rings(footprint: ModelFootprint, weight_format: str, depths: Depths) -> tuple[WeightsRing, ...]:
    """Every ring worth telling apart, largest first; at least one, also for a model without units.

    A ring with a slot for each unit that may use it is left out: those units need no more room at home.
    """
    return _weights_rings(footprint, weight_format, depths.weights, depths.weights_staging)


@lru_cache(maxsize=256)
def _weights_rings(
    footprint: ModelFootprint, weight_format: str, n_slots: int, n_staging: int
) -> tuple[WeightsRing, ...]:
    sizes = sorted(footprint.units[i].nbytes[weight_format] for i in footprint.streamable)
    total = sum(sizes)
    # Units of at most this size are all that may be streamed: (size, how many, their bytes), ascending.
    steps: list[tuple[int, int, int]] = []
    seen = 0
    for i, size in enumerate(sizes):
        seen += size
        if i + 1 == len(sizes) or sizes[i + 1] > size:
            steps.append((size, i + 1, seen))
    steps = [step for step in steps if step[0] > 0]
    rings: list[WeightsRing] = []
    while steps:
        largest, n_units, nbytes = steps[-1]
        if rings and n_units <= n_slots:
            break
        smallest = min(size for size, _, _ in steps if size >= ALIKE * largest)
        # n slots of the largest unit on disk hold at least this share of any set of units up to its size.
        staging = min(1.0, min(n_staging * size / step_bytes for size, _, step_bytes in steps))
        rings.append(
            WeightsRing(
                ring_bytes=min(n_slots, n_units) * smallest,
                resident_bytes=total - nbytes,
                staging_frac=staging,
            )
        )
        steps = [step for step in steps if step[0] < smallest]
    return tuple(rings) or (WeightsRing(ring_bytes=0, resident_bytes=0, staging_frac=0.0),)
