"""The weights' rings that the linear program is told of bound those of every plan."""

from __future__ import annotations

import itertools

import planner_cases as cases
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from policy.footprint import ModelFootprint
from policy.memory_plan import memory_plan
from policy.rings import ALIKE, weights_rings
from policy.schedule import Depths
from policy.tiers import Placement, Policy, Tier
from policy.workload import Workload, limits_for

LIMITS = limits_for(
    Workload(prompt_len=20, gen_len=4), gpu_batch_size=2, schedule="static", page_tokens=16, chunk_tokens=64
)
MODELS = [cases.model(), cases.deep_model(), cases.model(n_layers=1), cases.model(vocab_size=40_000)]


def unit_bytes(footprint: ModelFootprint, fmt: str) -> list[int]:
    return [footprint.units[i].nbytes[fmt] for i in footprint.streamable]


@settings(
    max_examples=60,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    st.sampled_from(MODELS),
    st.sampled_from(["f16", "int4-g64"]),
    st.integers(0, 40),
    st.integers(0, 40),
    st.integers(1, 3),
)
def test_every_plan_is_covered_by_a_ring(
    footprint: ModelFootprint, fmt: str, away: int, on_disk: int, n_slots: int
) -> None:
    """Some ring needs no more, on every tier, than the plan does; or everything could rest at home."""
    depths = Depths(weights=n_slots, weights_staging=n_slots)
    disk_frac = min(on_disk, away) / 40
    weights = Placement(gpu_frac=1 - away / 40, cpu_frac=away / 40 - disk_frac, disk_frac=disk_frac)
    home = Placement.all_on(Tier.GPU)
    policy = Policy(
        weights=weights, cache=home, activations=home, gpu_batch_size=2, weight_format=fmt, cache_format="f16"
    )
    memory = memory_plan(footprint, policy, LIMITS, first_tier=Tier.GPU, compute_dtype="f16", depths=depths)
    at_home = memory.items[Tier.GPU, "weights"]
    ring, staging = memory.items[Tier.GPU, "weights_ring"], memory.items[Tier.CPU, "weights_staging"]
    disk = memory.items[Tier.DISK, "weights"]
    if at_home + ring >= memory.sizes.weights_bytes:
        return
    assert any(
        r.ring_bytes <= ring and r.resident_bytes <= at_home and r.staging_frac * disk <= staging + 1e-6
        for r in weights_rings(footprint, fmt, depths)
    )


@pytest.mark.parametrize("footprint", MODELS)
def test_rings_shrink_as_more_rests_at_home(footprint: ModelFootprint) -> None:
    rings = weights_rings(footprint, "f16", Depths())
    sizes = unit_bytes(footprint, "f16")
    assert rings[0].resident_bytes == 0
    slots = min(Depths().weights, len(sizes))
    assert ALIKE * slots * max(sizes) <= rings[0].ring_bytes <= slots * max(sizes)
    for larger, smaller in itertools.pairwise(rings):
        assert smaller.ring_bytes < larger.ring_bytes
        assert smaller.resident_bytes > larger.resident_bytes
        streamed = [n for n in sizes if slots * n <= smaller.ring_bytes / ALIKE]
        assert smaller.resident_bytes == sum(sizes) - sum(streamed)


def test_with_a_slot_for_every_unit_there_is_one_ring() -> None:
    footprint = cases.model(vocab_size=64, n_layers=8)
    assert len(weights_rings(footprint, "f16", Depths())) >= 2
    assert len(weights_rings(footprint, "f16", Depths(weights=100))) == 1
