"""Without compiled kernels plain torch does the same work."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kv_helpers import ragged_batch

from offload.host import _machine_memory
from quant import amx, kernel_choice, kernels_torch
from quant.formats import parse_format
from quant.kernel_choice import has_amx, has_numba, has_triton
from quant.kernels_attention import AttentionParams, decode_attention
from quant.kv import encode_pages, gather_pages
from quant.kv_formats import parse_cache_format
from quant.linear import crossover_tokens, linear
from quant.pack import quantize


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Calls of the context switch the kernels off."""
    yield monkeypatch
    for cached in (has_amx, has_numba, has_triton):
        cached.cache_clear()


def switch_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXRUN_KERNELS", "torch")
    has_amx.cache_clear()
    has_numba.cache_clear()
    assert not has_numba() and not has_amx()


@pytest.mark.parametrize("name", ["int8-g64", "int4-g64", "int3.5-g64", "int4-g32-zp"])
def test_weights_unpack_and_multiply_alike(
    without: pytest.MonkeyPatch, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    generator = torch.Generator().manual_seed(0)
    packed = quantize(torch.randn((70, 200), generator=generator), name)
    x = torch.randn((3, 200), generator=generator)
    ids = torch.tensor([69, 0, 3, 3])
    wanted = packed.dequantize(), packed.gather_rows(ids, torch.bfloat16), linear(x, packed)
    assert crossover_tokens(parse_format(name)) > 0
    switch_off(without)
    monkeypatch.setattr(kernels_torch, "_BLOCK_ELEMENTS", 2000)  # ten rows at a time
    assert torch.equal(packed.dequantize(), wanted[0])
    assert torch.equal(packed.gather_rows(ids, torch.bfloat16), wanted[1])
    torch.testing.assert_close(linear(x, packed), wanted[2], rtol=1e-4, atol=1e-4)
    assert crossover_tokens(parse_format(name)) == 0


@pytest.mark.parametrize("name", ["f32", "bf16", "int8", "int4"])
def test_pages_and_attention_alike(
    without: pytest.MonkeyPatch, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    batch, _ = ragged_batch(name, [1, 0, 16, 40, 100], page_tokens=16, head_dim=32, tail_dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    query = torch.randn((5, 4, 32), generator=generator)
    params = AttentionParams(scale=0.2, window=50)
    fmt = parse_cache_format(name)
    k, v = torch.randn((2, 3, 2, 16, 32), generator=generator)
    nbytes = fmt.page_nbytes(page_tokens=16, n_kv_heads=2, head_dim=32)
    pages = torch.zeros((2, 3, nbytes), dtype=torch.uint8)
    encode_pages(k, v, fmt, pages[0])
    wanted = decode_attention(query, batch, params), *gather_pages(batch)
    switch_off(without)
    monkeypatch.setattr("quant.kernels_attention._GATHER_BYTES", 120_000)  # two rows at a time
    encode_pages(k, v, fmt, pages[1])
    assert torch.equal(pages[0], pages[1])
    found = decode_attention(query, batch, params), *gather_pages(batch)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_numba_that_cannot_be_imported_is_none(
    without: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    without.setitem(__import__("sys").modules, "numba", None)
    has_numba.cache_clear()
    assert not has_numba() and "no compiled CPU kernels" in caplog.text


def test_triton_is_for_accelerators_and_may_fail(
    without: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    has_triton.cache_clear()
    assert not has_triton("cpu")
    if not torch.cuda.is_available():
        assert not has_triton("cuda") and "no Triton kernels on cuda" in caplog.text
    without.setenv("FLEXRUN_KERNELS", "no-triton")
    assert kernel_choice._turned_off("triton") and not kernel_choice._turned_off("numba")


def test_memory_without_psutil(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "psutil", None)
    info = tmp_path / "meminfo"
    info.write_text("MemTotal:  2048 kB\nMemFree: 512 kB\nMemAvailable:  1024 kB\nHugePages_Total: 0\n")
    assert _machine_memory(info) == (2048 << 10, 1024 << 10)
    total, available = _machine_memory(tmp_path / "absent")
    assert 0 < available <= total


def test_products_by_amx_can_be_left_out(without: pytest.MonkeyPatch) -> None:
    without.setenv("FLEXRUN_KERNELS", "no-amx")
    has_amx.cache_clear()
    assert not has_amx() and has_numba()
    x, weight = torch.randn(3, 64).bfloat16(), quantize(torch.randn(32, 64), "int4-g64")
    assert not amx.can_multiply(x, weight)
    wanted = x.double() @ weight.dequantize().double().t()
    torch.testing.assert_close(linear(x, weight).double(), wanted, atol=0.05, rtol=0.02)
