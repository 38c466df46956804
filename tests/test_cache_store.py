"""Pages travel to their homes and back: every layer and gpu batch has its own place on every tier."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from offload.cache_store import CacheStore
from offload.device import make_device
from offload.disk import DiskPool
from offload.kv import LayerCache
from offload.memory import Arena
from offload.pages import CacheShape
from offload.spill import SpillFolder
from policy.tiers import Tier
from quant.kv_formats import parse_cache_format

N_LAYERS, N_BATCHES, ROWS = 2, 3, 2
SPLITS = [(0, 6, 0), (0, 0, 6), (0, 2, 4), (6, 0, 0), (2, 2, 2), (0, 3, 3)]


def open_store(
    counts: tuple[int, int, int], folder: Path, flags: tuple[bool, ...], tails_tier: Tier
) -> tuple[CacheStore, SpillFolder]:
    three = tails_tier is Tier.GPU or counts[0] > 0 or any(flags)
    device = make_device("cpu", 1 << 26 if three else None)
    shape = CacheShape(
        n_layers=N_LAYERS,
        num_gpu_batches=N_BATCHES,
        gpu_batch_size=ROWS,
        n_kv_heads=1,
        head_dim=8,
        page_counts=counts,
        fmt=parse_cache_format("f32"),
        tail_dtype=torch.float32,
        page_tokens=16,
    )
    arenas = {
        tier: Arena(tier.label, tier, 1 << 24, device)
        for tier in (Tier.GPU, Tier.CPU)
        if tier >= device.first_tier
    }
    spill = SpillFolder(folder, 1 << 24, DiskPool(n_in_flight=2))
    nbytes = CacheStore.spill_bytes(shape)
    store = CacheStore(
        shape,
        device=device,
        arenas=arenas,
        spill=spill.create("kv", nbytes) if nbytes else None,
        cpu_attention=flags,
        tails_tier=tails_tier,
        new_pages=6,
        new_tail_tokens=32,
        attention_staging_bytes=1 << 20,
    )
    return store, spill


def pages_of(store: CacheStore, layer: int, j: int, slots: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of these pages, another value for every layer, batch and slot."""
    values = torch.tensor([float(100 * layer + 10 * j + slot) for slot in slots])
    key = values[:, None, None, None].expand(len(slots), 1, 16, 8)
    return key, -key


def fill(store: CacheStore, j: int, slots: list[int], *, on_cpu: bool) -> None:
    """One pass in which gpu batch j fills these slots, as the lanes would carry it out."""
    plan = store.begin_batch(
        j,
        used=[],
        filled=slots,
        tail_rows=0,
        writes_tails=False,
        attends_stored=on_cpu,
        hidden_home=Tier.CPU,
    )
    for layer in range(N_LAYERS):
        out_slot = layer % 2 if plan.writes_disk or plan.stores_cpu else -1
        view = store.cpu_layer(layer, j, -1, out_slot) if on_cpu else store.layer(layer, j, -1, out_slot)
        view._store_pages(*pages_of(store, layer, j, slots), slots)
        if plan.stores_cpu and not plan.cpu_attention:
            store.download(layer, j, out_slot)
        if plan.writes_disk:
            store.write(layer, j, out_slot)


def seen(store: CacheStore, layer: int, j: int, slots: list[int], *, on_cpu: bool) -> torch.Tensor:
    """The keys of these slots, as attention would find them: (slots, page_tokens)."""
    plan = store.begin_batch(
        j,
        used=slots,
        filled=[],
        tail_rows=0,
        writes_tails=False,
        attends_stored=on_cpu,
        hidden_home=Tier.CPU,
    )
    slot = -1
    if plan.reads_disk:
        slot = 1
        store.read(layer, j, slot)
    if (plan.reads_cpu and not plan.cpu_attention) or (plan.reads_disk and store._three and not on_cpu):
        store.upload(layer, j, 1, slot)
        slot = 1
    view: LayerCache = store.cpu_layer(layer, j, slot, -1) if on_cpu else store.layer(layer, j, slot, -1)
    key, value = view._gather(torch.tensor(slots), torch.float32, torch.device("cpu"))
    torch.testing.assert_close(key, -value)
    return key[:, 0, 0].view(len(slots), 16)


# A gpu share needs a gpu tier; with two tiers, CPU attention sees what the device sees.
CASES = [(counts, False, False) for counts in SPLITS if not counts[0]]
CASES += [(counts, True, on_cpu) for counts in SPLITS for on_cpu in (False, True)]


@pytest.mark.parametrize(("counts", "three", "on_cpu"), CASES)
def test_pages_come_back_as_they_were(
    counts: tuple[int, int, int], three: bool, on_cpu: bool, tmp_path: Path
) -> None:
    flags = (on_cpu,) * N_BATCHES
    store, spill = open_store(counts, tmp_path, flags, Tier.GPU if three else Tier.CPU)
    with spill:
        for j in range(N_BATCHES):
            fill(store, j, [0, 1, 2], on_cpu=on_cpu)
            fill(store, j, [5, 4, 3], on_cpu=on_cpu)
        for layer in range(N_LAYERS):
            for j in range(N_BATCHES):
                for slots in ([0, 1, 2, 3, 4, 5], [5, 0, 3], [4]):
                    expected = torch.tensor([[float(100 * layer + 10 * j + s)] * 16 for s in slots])
                    torch.testing.assert_close(seen(store, layer, j, slots, on_cpu=on_cpu), expected)


def test_the_plan_of_a_pass_names_only_what_moves(tmp_path: Path) -> None:
    store, spill = open_store((2, 2, 2), tmp_path, (False, True, False), Tier.GPU)

    def plan(j: int, used: list[int], filled: list[int], tail_rows: int = 0, stored: bool = True) -> str:
        made = store.begin_batch(
            j,
            used=used,
            filled=filled,
            tail_rows=tail_rows,
            writes_tails=tail_rows > 0,
            attends_stored=stored,
            hidden_home=Tier.GPU,
        )
        names = ("reads_disk", "reads_cpu", "stores_cpu", "writes_disk", "cpu_attention")
        return " ".join(name for name in names if getattr(made, name))

    with spill:
        assert plan(0, [0, 1], [], tail_rows=1) == ""
        assert plan(0, [0, 2], []) == "reads_cpu"
        assert plan(0, [4], [1]) == "reads_disk"
        assert plan(0, [], [3]) == "stores_cpu"
        assert plan(0, [], [5]) == "stores_cpu writes_disk"
        # Batch 1 attends on the CPU: its gpu share is in cpu memory, and so are its tails.
        assert plan(1, [0], [], tail_rows=1) == "reads_cpu stores_cpu cpu_attention"
        assert plan(1, [], [4], stored=False) == "stores_cpu writes_disk"
