"""KV page formats, the page codec and gathering: exact sizes, error bounds, refusals, CPU kernels against torch."""

import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_helpers import decoded, encoded, ragged_batch
from torch import Tensor

from quant import kv
from quant.kv import gather_pages, page_views
from quant.kv_batch import PagedBatch
from quant.kv_formats import (
    CACHE_FORMAT_NAMES,
    PAGE_ALIGN_BYTES,
    PART_ALIGN_BYTES,
    CacheFormat,
    parse_cache_format,
)

PACKED = ("int8", "int4", "int2")


def assert_within_half_a_step(x: Tensor, rebuilt: Tensor, axis: int, fmt: CacheFormat) -> None:
    """Half a step, plus the rounding of the fp16 minimum and scale, plus a few fp32 roundings."""
    low, high = x.double().aminmax(dim=axis, keepdim=True)
    peak = torch.maximum(low.abs(), high.abs()).amax(dim=(2, 3), keepdim=True)
    smallest = peak * 2.0**-38 + 2.0**-140  # fp16's smallest step, in units of 2^-14 of the peak
    half_step = (high - low) / fmt.levels / 2
    rounding = 2.0**-11 * (low.abs() + (high - low)) + (1 + fmt.levels) * smallest
    bound = half_step * (1 + 2.0**-10) + rounding + 2.0**-21 * peak
    excess = ((x.double() - rebuilt.double()).abs() - bound).max()
    assert excess <= 0, f"error exceeds the bound by {excess}"


@pytest.mark.parametrize("name", CACHE_FORMAT_NAMES)
@pytest.mark.parametrize(("page_tokens", "head_dim"), [(16, 20), (17, 21), (64, 64), (100, 80), (256, 96)])
def test_parts_are_aligned_and_disjoint_and_fill_the_page(name: str, page_tokens: int, head_dim: int) -> None:
    fmt = parse_cache_format(name)
    geometry = {"page_tokens": page_tokens, "n_kv_heads": 3, "head_dim": head_dim}
    parts = fmt.page_parts(**geometry)
    total = fmt.page_nbytes(**geometry)
    end = 0
    for part in parts:
        assert part.offset_bytes % PART_ALIGN_BYTES == 0
        assert end <= part.offset_bytes < end + PART_ALIGN_BYTES
        end = part.end_bytes
    assert total % PAGE_ALIGN_BYTES == 0
    assert end <= total < end + PAGE_ALIGN_BYTES


def test_page_sizes_by_hand() -> None:
    geometry = {"page_tokens": 64, "n_kv_heads": 3, "head_dim": 64}
    assert parse_cache_format("f32").page_nbytes(**geometry) == 2 * 3 * 64 * 64 * 4
    assert parse_cache_format("bf16").page_nbytes(**geometry) == 2 * 3 * 64 * 64 * 2
    # codes of K and V, (scale, minimum) per channel and per token in fp16, six fp32 units; up to 64 bytes
    assert parse_cache_format("int4").page_nbytes(**geometry) == 2 * 3 * 64 * 32 + 4 * 3 * 64 * 2 + 64
    assert parse_cache_format("int2").page_nbytes(**geometry) == 2 * 3 * 64 * 16 + 4 * 3 * 64 * 2 + 64


def test_unknown_formats_and_geometry_are_refused() -> None:
    with pytest.raises(ValueError, match=r"int3.*f32, bf16, f16, int8, int4, int2"):
        parse_cache_format("int3")
    with pytest.raises(ValueError, match="does not exist"):
        CacheFormat(name="int4", bits=5, dtype="uint8")
    for bad in ({"page_tokens": 15}, {"page_tokens": 257}, {"head_dim": 0}, {"n_kv_heads": 0}):
        geometry = {"page_tokens": 64, "n_kv_heads": 3, "head_dim": 64} | bad
        with pytest.raises(ValueError, match=next(iter(bad))):
            parse_cache_format("int4").page_nbytes(**geometry)


def test_formats_import_neither_torch_nor_numba_and_the_codec_no_numba() -> None:
    code = (
        "import sys, quant.kv_formats; assert not {'torch', 'numba'} & set(sys.modules);"
        "import quant.kv, quant.kernels_attention; assert 'numba' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_layout_of_an_int4_page() -> None:
    """A second reading of the bytes, written from the description of the format."""
    fmt = parse_cache_format("int4")
    generator = torch.Generator().manual_seed(1)
    k = torch.randn(1, 2, 16, 11, generator=generator)
    v = torch.randn(1, 2, 16, 11, generator=generator)
    page = encoded(k, v, fmt)[0].numpy()
    parts = {part.name: part for part in fmt.page_parts(page_tokens=16, n_kv_heads=2, head_dim=11)}

    def array(name: str) -> Any:
        part = parts[name]
        return (
            page[part.offset_bytes : part.end_bytes].view(part.dtype).reshape(part.shape).astype(np.float64)
        )

    for head, token, channel in [(0, 0, 0), (1, 3, 5), (1, 15, 10), (0, 9, 6)]:
        row = page[parts["k_codes"].offset_bytes :][: 2 * 16 * 6].reshape(2, 16, 6)[head, token]
        code = row[channel % 6] >> 4 if channel >= 6 else row[channel % 6] & 15
        value = array("units")[0, head] * (
            array("k_min")[head, channel] + code * array("k_scale")[head, channel]
        )
        assert abs(value - k[0, head, token, channel].item()) < 0.2
        row = page[parts["v_codes"].offset_bytes :][: 2 * 16 * 6].reshape(2, 16, 6)[head, token]
        code = row[channel % 6] >> 4 if channel >= 6 else row[channel % 6] & 15
        value = array("units")[1, head] * (array("v_min")[head, token] + code * array("v_scale")[head, token])
        assert abs(value - v[0, head, token, channel].item()) < 0.2


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(PACKED),
    page_tokens=st.integers(16, 70),
    n_kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([4, 8, 20, 21, 64, 80]),
    exponent=st.integers(-120, 120),
    offset=st.sampled_from([0.0, 5.0, -1e4]),
    seed=st.integers(0, 2**16),
)
def test_error_is_within_half_a_step(
    name: str, page_tokens: int, n_kv_heads: int, head_dim: int, exponent: int, offset: float, seed: int
) -> None:
    fmt = parse_cache_format(name)
    generator = torch.Generator().manual_seed(seed)
    shape = (2, n_kv_heads, page_tokens, head_dim)
    k = torch.randn(shape, generator=generator) + offset
    v = torch.randn(shape, generator=generator) + offset
    k *= torch.randint(0, 2, (2, n_kv_heads, 1, head_dim), generator=generator) * 9.0 + 1  # outlier channels
    k, v = k * 2.0 ** (exponent - 17), v * 2.0 ** (exponent - 17)
    k_back, v_back = decoded(encoded(k, v, fmt), k, fmt)
    assert_within_half_a_step(k, k_back, 2, fmt)
    assert_within_half_a_step(v, v_back, 3, fmt)


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("head_dim", [4, 20, 64])
def test_zero_constant_and_tiny_ranges_survive(name: str, head_dim: int) -> None:
    fmt = parse_cache_format(name)
    generator = torch.Generator().manual_seed(0)
    shape = (1, 1, 32, head_dim)
    tiny = 5 + 1e-4 * (2 * torch.rand(shape, generator=generator) - 1)
    for x in (torch.zeros(shape), torch.full(shape, 5.0), torch.full(shape, -1e-38), tiny, tiny * 1e-41):
        k_back, v_back = decoded(encoded(x, x, fmt), x, fmt)
        for rebuilt, axis in ((k_back, 2), (v_back, 3)):
            assert bool(torch.isfinite(rebuilt).all())
            assert_within_half_a_step(x, rebuilt, axis, fmt)
    k_back, v_back = decoded(encoded(torch.zeros(shape), torch.zeros(shape), fmt), tiny, fmt)
    assert k_back.abs().max() == 0
    assert v_back.abs().max() == 0


def test_one_head_does_not_coarsen_another() -> None:
    fmt = parse_cache_format("int8")
    k = torch.randn(1, 2, 16, 16, generator=torch.Generator().manual_seed(0))
    k[:, 0] *= 1e30
    k[:, 1] *= 1e-30
    k_back, _ = decoded(encoded(k, k, fmt), k, fmt)
    assert (k_back[:, 1] - k[:, 1]).abs().max() < 2e-2 * 1e-30


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e38])
@pytest.mark.parametrize("head_dim", [4, 24])
def test_values_that_cannot_be_stored_are_refused(bad: float, head_dim: int) -> None:
    fmt = parse_cache_format("int4")
    good = torch.randn(3, 2, 16, head_dim)
    wrong = good.clone()
    wrong[1, 1, 7, head_dim - 1] = bad
    with pytest.raises(ValueError, match="K of page 1"):
        encoded(wrong, good, fmt)
    with pytest.raises(ValueError, match="V of page 1"):
        encoded(good, wrong, fmt)


@pytest.mark.parametrize("name", ["f32", "bf16", "f16"])
def test_plain_pages_keep_values(name: str) -> None:
    fmt = parse_cache_format(name)
    k, v = torch.randn(2, 3, 16, 20), torch.randn(2, 3, 16, 20)
    k_back, v_back = decoded(encoded(k, v, fmt), k, fmt)
    dtype = getattr(torch, fmt.dtype)
    assert torch.equal(k_back, k.to(dtype).float())
    assert torch.equal(v_back, v.to(dtype).float())


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [20, 21, 64])
def test_cpu_kernels_write_the_bytes_that_torch_writes(
    name: str, dtype: torch.dtype, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fmt = parse_cache_format(name)
    generator = torch.Generator().manual_seed(head_dim)
    k = (3 * torch.randn(3, 2, 17, head_dim, generator=generator)).to(dtype)
    v = torch.randn(3, 2, 17, head_dim, generator=generator).to(dtype)
    fast = encoded(k, v, fmt)
    monkeypatch.setattr(kv, "_runs_in_numba", lambda x: False)
    assert torch.equal(fast, encoded(k, v, fmt))


@pytest.mark.parametrize("name", ["f32", "bf16", "int8", "int4", "int2"])
@pytest.mark.parametrize("head_dim", [6, 21, 64])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_gather_unpacks_ragged_sequences_and_clears_the_rest(
    name: str, head_dim: int, out_dtype: torch.dtype
) -> None:
    batch, expected = ragged_batch(
        name, [1, 16, 17, 48, 0, 61], page_tokens=16, head_dim=head_dim, tail_dtype=torch.float32
    )
    k_out = torch.full((6, 2, 70, head_dim), float("nan"), dtype=out_dtype)
    v_out = k_out.clone()
    gather_pages(batch, k_out, v_out)
    for i, (k, v) in enumerate(expected):
        length = k.shape[1]
        for out, want in ((k_out, k), (v_out, v)):
            got = out[i, :, :length].float()
            torch.testing.assert_close(got, want.to(out_dtype).float(), rtol=2e-7, atol=1e-30)
            assert bool((out[i, :, length:] == 0).all())


@pytest.mark.parametrize("name", ["f32", "int4"])
@pytest.mark.parametrize("one_arena", [False, True])
def test_torch_gathers_what_the_cpu_kernels_gather(name: str, one_arena: bool) -> None:
    batch, _ = ragged_batch(
        name, [1, 16, 17, 48, 0, 61], page_tokens=16, head_dim=21, tail_dtype=torch.float32
    )
    if one_arena:
        batch = replace(batch, page_arenas=None, page_slots=batch.page_slots.clamp_min(0))
    k_fast, v_fast = gather_pages(batch)
    k_out, v_out = torch.full_like(k_fast, float("nan")), torch.full_like(v_fast, float("nan"))
    kv._gather_torch(batch, k_out, v_out)
    assert torch.equal(k_fast, k_out)
    assert torch.equal(v_fast, v_out)


def test_bad_batches_are_refused() -> None:
    batch, _ = ragged_batch("int4", [40, 20], page_tokens=16, head_dim=8, tail_dtype=torch.float32)
    fields = {name: getattr(batch, name) for name in PagedBatch.__dataclass_fields__}
    wrong_slots = batch.page_slots.clone()
    wrong_slots[0, 1] = 1000
    for change, message in (
        ({"page_tokens": 32}, "tails must be"),
        ({"tail_lens": batch.tail_lens + 1}, "whole pages"),
        ({"tail_lens": batch.tail_lens.long()}, "tail_lens must be int32"),
        ({"tail_slots": batch.tail_slots + 5}, "tail_slots must be"),
        ({"page_slots": batch.page_slots[:, :1], "page_arenas": None}, "full pages"),
        ({"arenas": tuple(arena[:, :64] for arena in batch.arenas)}, "arena must be uint8"),
        ({"page_slots": wrong_slots}, "page 1 of sequence 0 is in slot 1000"),
        ({"page_arenas": batch.page_arenas + 1}, "page_arenas must be"),
        ({"arenas": ()}, "no arena"),
    ):
        with pytest.raises(ValueError, match=message):
            gather_pages(PagedBatch(**(fields | change)))


def test_views_are_in_place() -> None:
    fmt = parse_cache_format("int8")
    k = torch.randn(2, 1, 16, 8)
    pages = encoded(k, k, fmt)
    views = page_views(pages, fmt, page_tokens=16, n_kv_heads=1, head_dim=8)
    views["k_codes"].zero_()
    k_back, _ = decoded(pages, k, fmt)
    assert torch.allclose(k_back.amax(dim=2), k.amin(dim=2), rtol=1e-3, atol=1e-3)
