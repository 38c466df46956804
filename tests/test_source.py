"""Checkpoints as sources of weights: formats, layouts, bit-exact filling, extents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_helpers import build_tensor
from source_helpers import CONFIGS, random_tensors, tiny_model, write_folder

from flexrun.checkpoint import open_checkpoint
from flexrun.checkpoint import filling as filling_module
from flexrun.checkpoint.source import CheckpointSource
from flexrun.model.assemble import DecoderModel
from offload.weights import UnitLayout, WeightSource
from quant.packed import PackedTensor


def filled(source: WeightSource, unit: Any) -> dict[str, Any]:
    """Tensor name -> view of the unit's run, filled over bytes that must all be overwritten."""
    layout = source.layout(unit)
    run = torch.full((layout.nbytes,), 0xA5, dtype=torch.uint8)
    source.fill(unit, run)
    assert_gaps_are_zero(layout, run)
    return {slot.name: slot.view(run) for slot in layout.slots}


def assert_gaps_are_zero(layout: UnitLayout, run: torch.Tensor) -> None:
    inside = torch.zeros(layout.nbytes, dtype=torch.bool)
    for slot in layout.slots:
        inside[slot.offset_bytes : slot.offset_bytes + slot.nbytes] = True
    assert not run[~inside].any()


def filled_table(source: WeightSource, spec: Any) -> Any:
    fmt = source.table_format(spec)
    run = torch.full((fmt.nbytes(spec.shape),), 0xA5, dtype=torch.uint8)
    source.fill_table(spec, run)
    if fmt.is_plain:
        return run.view(getattr(torch, fmt.plain_dtype)).view(spec.shape)
    return PackedTensor(fmt, spec.shape, run)


def assert_same_weights(source: WeightSource, model: DecoderModel, tensors: dict[str, torch.Tensor]) -> None:
    """Every tensor of every unit equals the plain statement of what its parts mean, bit for bit."""
    for unit in model.units:
        views = filled(source, unit)
        for spec in unit.tensors:
            expected = build_tensor(spec, tensors)
            got = filled_table(source, spec) if spec.kind == "rows" else views[spec.name]
            assert got.dtype == expected.dtype and got.shape == expected.shape, spec.name
            assert torch.equal(got, expected), f"{unit.name}: {spec.name}"


@pytest.fixture(params=[None, 7], ids=["whole", "blocks of few rows"])
def block_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param is not None:
        monkeypatch.setattr(filling_module, "BLOCK_BYTES", request.param * 4 * 48)


@pytest.mark.parametrize("family", CONFIGS)
def test_every_family_is_filled_bit_for_bit(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    tensors = random_tensors(model, torch.bfloat16)
    source = CheckpointSource(open_checkpoint(write_folder(tmp_path / "m", family, tensors)), model)
    assert_same_weights(source, model, tensors)
