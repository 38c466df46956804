"""The weight store: every unit the same from every home, pieces, tables, scratch, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_helpers import MemorySource, tiny_model

from offload.device import make_device
from offload.disk import DiskPool
from offload.memory import Arena
from offload.units import Weights
from offload.weights import WeightStore, unit_layout
from policy.tiers import Tier
from quant.formats import parse_format
from quant.packed import PackedTensor

FORMATS = ("f32", "bf16", "int4-g64")


def store_of(
    source: MemorySource, home: Tier, *, gpu: bool = False, dtype: torch.dtype = torch.float32, **more: Any
) -> tuple[WeightStore, dict[Tier, Arena]]:
    device = make_device("cpu", 1 << 26 if gpu else None)
    arenas = {
        tier: Arena(tier.label, tier, 1 << 24, device)
        for tier in (Tier.GPU, Tier.CPU)
        if tier >= device.first_tier
    }
    homes = [device.first_tier if unit.pinned else home for unit in source.model.units]
    store = WeightStore(
        source.model.units,
        source,
        homes,
        device=device,
        compute_dtype=dtype,
        arenas=arenas,
        pool=DiskPool(n_in_flight=2),
        **more,
    )
    return store, arenas


def bring(store: WeightStore, index: int, slot: int, tokens: int, n_pieces: int = 1) -> Weights:
    """What the lanes do for one unit, then what compute gets."""
    home, first = store.homes[index], store.device.first_tier
    uploaded_bytes = 0
    for piece in range(n_pieces):
        if home is Tier.DISK:
            store.read(index, slot, piece, n_pieces)
        # Whatever is not read yet must not be needed.
        if home > first and first is Tier.GPU:
            staging = slot if home is Tier.DISK else -1
            uploaded_bytes += store.upload(index, slot, staging, piece, n_pieces)
    assert uploaded_bytes == (store.layouts[index].nbytes if home > first and first is Tier.GPU else 0)
    store.forget()
    return store.weights(index, slot if home > first else -1, tokens)


def dense(value: Any) -> torch.Tensor:
    return value.dequantize(torch.float32) if isinstance(value, PackedTensor) else value.float()


@pytest.fixture(scope="module", params=FORMATS)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MemorySource:
    return MemorySource(tiny_model("tied"), request.param, folder=tmp_path_factory.mktemp("weights"))


@pytest.mark.parametrize("n_pieces", [1, 3, 100])
@pytest.mark.parametrize(
    ("home", "gpu"),
    [(Tier.CPU, False), (Tier.DISK, False), (Tier.GPU, True), (Tier.CPU, True), (Tier.DISK, True)],
)
def test_units_are_the_same_from_every_home(
    home: Tier, gpu: bool, n_pieces: int, source: MemorySource
) -> None:
    store, _ = store_of(source, home, gpu=gpu)
    expected = source.reference().weights
    for index, unit in enumerate(source.model.units):
        for tokens in (1, 1000):  # multiplied packed, or unpacked first
            weights = bring(
                store, index, index % 2 if store.homes[index] is not Tier.GPU else 0, tokens, n_pieces
            )
            for spec in unit.tensors:
                if spec.kind != "rows":
                    torch.testing.assert_close(dense(weights[spec.name]), expected[unit.name][spec.name])
    store.close()


@pytest.mark.parametrize("n_pieces", [1, 2, 3, 7, 100])
def test_pieces_are_aligned_neighbours_that_make_up_the_unit(n_pieces: int, source: MemorySource) -> None:
    store, _ = store_of(source, Tier.CPU, gpu=True)
    for index, layout in enumerate(store.layouts):
        end = 0
        for piece in range(n_pieces):
            begin, stop = store.piece(index, piece, n_pieces)
            assert begin == end and begin % 4096 == 0 and stop - begin <= layout.nbytes / n_pieces + 4096
            end = stop
        assert end == layout.nbytes
    store.close()


@pytest.mark.parametrize("home", [Tier.CPU, Tier.DISK])
def test_an_upload_touches_its_piece_alone(home: Tier, source: MemorySource) -> None:
    store, _ = store_of(source, home, gpu=True)
    index = 1
    store._ring[0].fill_(0xFF)
    if home is Tier.DISK:
        store.read(index, 0, 1, 2)
    store.upload(index, 0, 0 if home is Tier.DISK else -1, 1, 2)
    begin, end = store.piece(index, 1, 2)
    run = store._staging[0] if home is Tier.DISK else store._at_home[index]
    assert 0 < begin < end
    assert torch.equal(store._ring[0][begin:end], run[begin:end])
    assert bool((store._ring[0][:begin] == 0xFF).all()) and bool((store._ring[0][end:] == 0xFF).all())
    store.close()


@pytest.mark.parametrize("home", [Tier.CPU, Tier.DISK])
def test_rows_of_a_tied_table_are_gathered_from_the_heads_slices(home: Tier, source: MemorySource) -> None:
    store, _ = store_of(source, home)
    ids = torch.tensor([0, 95, 5, 5, 60, 0])
    expected = source.reference().weights["embed"]["tokens"].rows[ids]
    rows = store.weights(0, -1, 6)["tokens"].gather(ids, torch.float32)
    torch.testing.assert_close(rows, expected)
    store.close()


def test_few_tokens_keep_packed_tensors_packed(tmp_path: Path) -> None:
    source = MemorySource(tiny_model(), "int4-g64", folder=tmp_path)
    store, _ = store_of(source, Tier.DISK)
    assert isinstance(bring(store, 1, 0, 1)["qkv"], PackedTensor)
    unpacked = bring(store, 1, 0, 1000)["qkv"]
    assert isinstance(unpacked, torch.Tensor) and unpacked.dtype == torch.float32
    # Asked again within the pass, the unpacked tensor is the same memory, not unpacked anew.
    assert store.weights(1, 0, 1000)["qkv"].data_ptr() == unpacked.data_ptr()
    store.close()


def test_memory_taken_is_homes_rings_scratch_and_tables(tmp_path: Path) -> None:
    source = MemorySource(tiny_model(), "int4-g64", folder=tmp_path)
    store, arenas = store_of(source, Tier.DISK, gpu=True, ring_slots=3, staging_slots=2)
    streamed = [
        layout.nbytes for layout, home in zip(store.layouts, store.homes, strict=True) if home is Tier.DISK
    ]
    gpu, cpu = arenas[Tier.GPU].report(), arenas[Tier.CPU].report()
    assert gpu["weights ring"] == 3 * max(streamed) and cpu["weights staging"] == 2 * max(streamed)
    largest = max(sum(s.shape[0] * s.shape[1] for s in x.slots if s.is_linear) for x in store.layouts)
    assert gpu["unpack scratch"] == -(-largest * 4 // 4096) * 4096
    assert store.disk_bytes == sum(streamed)
    store.close()


def test_rows_that_are_never_unpacked_need_no_scratch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offload.weights.packed_row_len", lambda *_: 1)
    store, arenas = store_of(MemorySource(tiny_model(), "int4-g64", folder=tmp_path), Tier.DISK)
    assert "unpack scratch" not in arenas[Tier.CPU].report()
    assert isinstance(bring(store, 1, 0, 1000)["qkv"], PackedTensor)
    store.close()
    # Plain weights of another type are copied into the compute type, whatever their length.
    store, arenas = store_of(MemorySource(tiny_model(), "f16", folder=tmp_path), Tier.DISK)
    assert arenas[Tier.CPU].report()["unpack scratch"] > 0
    store.close()


def test_a_unit_that_lies_nowhere_on_disk_cannot_stay_there() -> None:
    with pytest.raises(ValueError, match=r"unit layers.0.attn cannot stay on disk.*pack the model first"):
        store_of(MemorySource(tiny_model()), Tier.DISK)


def test_transposed_tensors_are_views_or_unpacked_the_right_way_round() -> None:
    spec = next(s for s in tiny_model().units[1].tensors if s.name == "out")
    for stored in ("f32", "bf16"):
        fmt = parse_format(stored)
        layout = unit_layout([spec], {"out": fmt}, frozenset({"out"}))
        run = torch.zeros(layout.nbytes, dtype=torch.uint8)
        values = torch.randn(spec.shape).to(getattr(torch, fmt.plain_dtype))
        view = layout.slots[0].view(run)
        assert isinstance(view, torch.Tensor)
        view.copy_(values)
        assert view.shape == spec.shape and view.stride() == (1, spec.shape[0])
        torch.testing.assert_close(layout.slots[0].view(run), values)


def test_tensors_start_at_64_bytes_and_units_fill_pages() -> None:
    for fmt in FORMATS:
        source = MemorySource(tiny_model("softcap"), fmt)
        for unit in source.model.units:
            layout = source.layout(unit)
            assert layout.nbytes % 4096 == 0
            end = 0
            for slot in layout.slots:
                assert slot.offset_bytes % 64 == 0 and slot.offset_bytes >= end
                end = slot.offset_bytes + slot.nbytes
            assert end <= layout.nbytes
