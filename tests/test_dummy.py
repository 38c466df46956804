"""Random weights: reproducible, varied, of sensible size, in any format."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from source_helpers import CONFIGS, tiny_model

from flexrun.checkpoint.dummy import DummySource
from offload.units import Unit
from quant.packed import PackedTensor


def run_of(source: DummySource, unit: Unit) -> torch.Tensor:
    run = torch.full((source.unit_nbytes(unit),), 0xA5, dtype=torch.uint8)
    source.fill(unit, run)
    return run


def values_of(source: DummySource, unit: Unit) -> dict[str, torch.Tensor]:
    run = run_of(source, unit)
    views: dict[str, Any] = {slot.name: slot.view(run) for slot in source.layout(unit).slots}
    return {
        name: view.dequantize() if isinstance(view, PackedTensor) else view.float()
        for name, view in views.items()
    }


@pytest.mark.parametrize("family", CONFIGS)
def test_values_look_like_an_initialisation(family: str) -> None:
    model = tiny_model(family)
    source = DummySource(model, seed=1)
    for unit in model.units:
        for spec in unit.tensors:
            if spec.kind == "rows":
                continue
            value = values_of(source, unit)[spec.name]
            assert value.std() > 0, f"{unit.name}: {spec.name}"
            if spec.kind == "linear":
                expected = spec.shape[1] ** -0.5
                assert value.std() < 1.3 * expected
                assert len(torch.unique(value, dim=0)) == spec.shape[0], "two rows are alike"
            elif "norm" in spec.name and not spec.name.endswith("bias"):
                assert abs(value.mean() + model.config.norm.offset - 1) < 0.1


@pytest.mark.parametrize(
    "name", ["f32", "int4-g64", "int3.5-g32", "int5-g32-sym", "int8-g128-zp-f32", "int2-g32"]
)
def test_formats_have_the_same_spread(name: str) -> None:
    model = tiny_model("llama", hidden_size=128, intermediate_size=256)
    source = DummySource(model, name)
    unit = model.units[1]
    assert source.formats_of(unit)["qkv"].name == name
    value = values_of(source, unit)["qkv"]
    assert torch.isfinite(value).all()
    assert 0.7 * 128**-0.5 < value.std() < 1.3 * 128**-0.5
    assert abs(value.mean()) < 0.1 * 128**-0.5


def test_codes_of_pairs_are_valid() -> None:
    """At 3.5 bits not every bit pattern is a pair of levels 0..10."""
    model = tiny_model("llama")
    source = DummySource(model, "int3.5-g32")
    unit = model.units[1]
    layout = source.layout(unit)
    run = run_of(source, unit)
    packed = next(slot.view(run) for slot in layout.slots if slot.name == "qkv")
    assert isinstance(packed, PackedTensor)
    parts = packed.to_parts()
    four, two, one = (parts[f"codes{width}"] for width in (4, 2, 1))
    low = torch.cat([four & 15, four >> 4], dim=1)
    mid = torch.cat([(two >> shift) & 3 for shift in range(0, 8, 2)], dim=1)
    top = torch.cat([(one >> shift) & 1 for shift in range(8)], dim=1)
    assert int((low.int() + 16 * mid.int() + 64 * top.int()).max()) < 121


def test_seed_and_nothing_else_decides() -> None:
    model = tiny_model("qwen3_moe")
    unit = model.units[2]
    first = run_of(DummySource(model, "int4-g32", seed=3), unit)
    other_order = DummySource(model, "int4-g32", seed=3)
    run_of(other_order, model.units[4])
    assert torch.equal(first, run_of(other_order, unit))
    assert not torch.equal(first, run_of(DummySource(model, "int4-g32", seed=4), unit))
    assert DummySource(model, seed=3).fingerprint() != DummySource(model, seed=4).fingerprint()


def test_experts_and_layers_differ() -> None:
    model = tiny_model("qwen3_moe")
    source = DummySource(model, "f32")
    mlp = values_of(source, model.units[2])
    names = [f"experts.{n}.{kind}" for n in range(4) for kind in ("gate_up", "down")]
    for i, name in enumerate(names):
        for other in names[i + 1 :]:
            a, b = mlp[name], mlp[other]
            assert a.shape != b.shape or not torch.isclose(a, b).any(dim=1).all()
    assert not torch.equal(mlp[names[0]], values_of(source, model.units[4])[names[0]])


@pytest.mark.parametrize("name", ["bf16", "int4-g32", "int5-g64"])
def test_slices_of_a_tied_head_make_up_the_table(name: str) -> None:
    model = tiny_model("llama-tied", vocab_size=1000)
    source = DummySource(model, name, seed=5)
    table = model.units[0].tensors[0]
    fmt = source.table_format(table)
    run = torch.empty(fmt.nbytes(table.shape), dtype=torch.uint8)
    source.fill_table(table, run)
    whole = (
        run.view(torch.bfloat16).view(table.shape).float()
        if fmt.is_plain
        else PackedTensor(fmt, table.shape, run).dequantize()
    )
    heads = [unit for unit in model.units if unit.name.startswith("head.")]
    assert len(heads) > 1
    assert torch.equal(torch.cat([values_of(source, unit)["weight"] for unit in heads]), whole)


def test_formats_that_cannot_be_written_are_refused() -> None:
    with pytest.raises(ValueError, match="q4_k"):
        DummySource(tiny_model("llama"), "q4_k")
    with pytest.raises(ValueError, match="int9"):
        DummySource(tiny_model("llama"), "int9-g64")
