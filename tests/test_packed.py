"""Which kernel unpacks a packed tensor that is not on the CPU: Triton's where it fits, plain torch otherwise."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import quant.packed
from quant.formats import parse_format
from quant.kernels_torch import dequantize_rows
from quant.pack import quantize
from quant.packed import PackedTensor, empty_packed

CALLS: list[dict[str, Any]] = []


def fake_kernel(packed: PackedTensor, out: torch.Tensor, **options: Any) -> None:
    CALLS.append(options)
    out.fill_(5.0)


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """An accelerator that has Triton, its kernel replaced by one that only says that it was called."""
    CALLS.clear()
    fake = SimpleNamespace(dequantize_rows=fake_kernel)
    monkeypatch.setitem(sys.modules, "quant.kernels_triton", fake)
    monkeypatch.setattr(sys.modules["quant"], "kernels_triton", fake, raising=False)
    monkeypatch.setattr(quant.packed, "has_triton", lambda device_type: True)


@pytest.fixture
def affine() -> PackedTensor:
    return quantize(
        torch.randn(6, 64, generator=torch.Generator().manual_seed(0)), "int4-g32", method="minmax"
    )


@pytest.mark.usefixtures("triton")
def test_affine_formats_go_to_the_kernel_with_all_that_was_asked_for(affine: PackedTensor) -> None:
    out, ids = torch.empty(2, 64), torch.tensor([4, 1])
    quant.packed._write_rows_on_device(affine, out, ids, 0, False)
    quant.packed._write_rows_on_device(affine, out, None, 3, True)
    assert CALLS[0]["row_ids"] is ids and CALLS[0]["in_order"] is False
    assert CALLS[1] == {"row_ids": None, "row_start": 3, "in_order": True}
    assert bool((out == 5).all())


@pytest.mark.usefixtures("triton")
def test_block_formats_and_targets_with_gaps_go_to_torch(affine: PackedTensor) -> None:
    wide = torch.empty(3, 80)
    quant.packed._write_rows_on_device(affine, wide[:, :64], None, 2, True)
    assert torch.equal(wide[:, :64], dequantize_rows(affine)[2:5])
    block = empty_packed(parse_format("q6_k"), (2, 256))
    block.buffer.copy_(torch.arange(block.nbytes) % 60)
    out = torch.empty(2, 256)
    quant.packed._write_rows_on_device(block, out, torch.tensor([1, 0]), 0, True)
    assert torch.equal(out, dequantize_rows(block)[[1, 0]]) and not CALLS


def test_without_triton_torch_gives_the_rows(affine: PackedTensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quant.packed, "has_triton", lambda device_type: False)
    out = torch.empty(2, 64, dtype=torch.bfloat16)
    quant.packed._write_rows_on_device(affine, out, None, 4, True)
    assert torch.equal(out, dequantize_rows(affine)[4:].bfloat16())
