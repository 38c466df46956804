"""Quantisers: documented bounds, accuracy, streaming, and refusal of values that cannot be packed."""

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quant.formats import WeightFormat, format_names, parse_format
from quant.kernels_torch import dequantize_rows
from quant.pack import quantize, quantize_rows_into
from quant.packed import empty_packed

AFFINE_NAMES = [name for name in format_names(all_forms=True) if name.startswith("int")]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]

# What a group may look like; each makes `n` values from a generator of random numbers.
GROUP_KINDS = {
    "gaussian": lambda rng, n: rng.normal(size=n) * 0.02,
    "zero": lambda rng, n: np.zeros(n),
    "constant": lambda rng, n: np.full(n, rng.normal()),
    "tiny range near 5": lambda rng, n: 5 + rng.uniform(-1e-4, 1e-4, n),
    "tiny range near -5": lambda rng, n: -5 + rng.uniform(0, 2e-4, n),
    "subnormal": lambda rng, n: rng.normal(size=n) * 1e-41,
    "1e-30": lambda rng, n: rng.normal(size=n) * 1e-30,
    "6e4": lambda rng, n: rng.uniform(-6e4, 6e4, n),
    "positive": lambda rng, n: rng.uniform(0.5, 1, n),
    "negative": lambda rng, n: -rng.exponential(size=n),
    "one outlier": lambda rng, n: np.where(np.arange(n) == n // 2, 100.0, rng.normal(size=n)),
}


def group_bounds(fmt: WeightFormat, weight: torch.Tensor) -> torch.Tensor:
    """The documented error bound of every element's group after min-max packing."""
    bounds = torch.empty(weight.shape, dtype=torch.float64)
    for row, values in enumerate(weight.double()):
        absmax = float(values.abs().max())
        for start in range(0, len(values), fmt.group):
            part = values[start : start + fmt.group]
            bounds[row, start : start + fmt.group] = fmt.max_error(
                low=float(part.min()), high=float(part.max()), row_absmax=absmax
            )
    return bounds


def group_sums(fmt: WeightFormat, values: torch.Tensor) -> torch.Tensor:
    """Sums over groups, (rows, groups)."""
    padding = fmt.padded_cols(values.shape[1]) - values.shape[1]
    return torch.nn.functional.pad(values, (0, padding)).view(len(values), -1, fmt.group).sum(-1)


@settings(max_examples=200, deadline=None)
@given(
    name=st.sampled_from(AFFINE_NAMES),
    rows=st.integers(1, 3),
    cols=st.integers(1, 300),
    kinds=st.lists(st.sampled_from(sorted(GROUP_KINDS)), min_size=1, max_size=4),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(["contiguous", "transposed", "every other column"]),
    seed=st.integers(0, 2**31),
)
def test_round_trip_keeps_the_documented_bound(
    name: str, rows: int, cols: int, kinds: list[str], dtype: torch.dtype, layout: str, seed: int
) -> None:
    fmt = parse_format(name)
    rng = np.random.default_rng(seed)
    values = np.empty((rows, cols))
    for row in range(rows):
        for g, start in enumerate(range(0, cols, fmt.group)):
            n = min(fmt.group, cols - start)
            values[row, start : start + n] = GROUP_KINDS[kinds[(row + g) % len(kinds)]](rng, n)
    weight = torch.from_numpy(values).to(dtype)
    if layout == "transposed":
        weight = weight.t().contiguous().t()
    elif layout == "every other column":
        weight = weight.repeat_interleave(2, dim=1)[:, ::2]
    exact = weight.float().double()

    packed = quantize(weight, fmt, method="minmax")
    found = packed.dequantize()
    assert torch.equal(found, dequantize_rows(packed))
    bounds = group_bounds(fmt, exact)
    assert bool(torch.isfinite(found).all())
    assert bool(((found.double() - exact).abs() <= bounds).all())

    searched = quantize(weight, fmt).dequantize()
    assert bool(torch.isfinite(searched).all())
    error = group_sums(fmt, (searched.double() - exact) ** 2)
    baseline = group_sums(fmt, (found.double() - exact) ** 2)
    # Errors are compared before the fp32 rounding of the values themselves.
    rounding = group_sums(fmt, (exact.abs() * 2.0**-21) ** 2) + 1e-80
    assert bool((error <= baseline * 1.0001 + 2 * (baseline * rounding).sqrt() + rounding).all())


@pytest.mark.parametrize("name", AFFINE_NAMES)
@pytest.mark.parametrize("method", ["minmax", "search"])
def test_values_on_the_levels_are_kept(name: str, method: str) -> None:
    fmt = parse_format(name)
    codes = torch.arange(2 * fmt.group).remainder(fmt.top_code + 1).float()
    if fmt.group <= fmt.top_code:
        codes[fmt.group - 1 :: fmt.group] = fmt.top_code
        codes[:: fmt.group] = 0
    zero = fmt.middle_code if fmt.zero != "min" else 0
    weight = ((codes - zero) * 0.25)[None]
    assert torch.equal(quantize(weight, fmt, method=method).dequantize(), weight)


@pytest.mark.parametrize("name", ["int4-g64", "int4-g64-f32", "int3-g32", "int8-g128"])
def test_tiny_ranges_are_not_flushed(name: str) -> None:
    weight = 5 + torch.rand(4, 128, generator=torch.Generator().manual_seed(0)) * 2e-4
    fmt = parse_format(name)
    found = quantize(weight, fmt).dequantize()
    ulp = 2.0**-8 if fmt.param_dtype == "float16" else 2.0**-21  # of fp16 and fp32 at 5
    assert float((found - weight).abs().max()) <= (2e-4 + ulp) / fmt.top_code
    assert len(found.unique()) > 1 or ulp > 2e-4


def test_padding_does_not_widen_the_last_group() -> None:
    weight = 5 + torch.rand(3, 70, generator=torch.Generator().manual_seed(0))
    found = quantize(weight, "int4-g64", method="minmax").dequantize()
    assert found.shape == weight.shape
    assert float((found - weight)[:, 64:].abs().max()) < 0.5 / 15  # half a step of range 1, not of range 6


@pytest.mark.parametrize("kind", ["gaussian", "laplace", "student"])
def test_search_beats_min_max_by_seven_percent(kind: str) -> None:
    rng = np.random.default_rng(5)
    draw = {
        "gaussian": lambda: rng.normal(size=(96, 1024)),
        "laplace": lambda: rng.laplace(size=(96, 1024)),
        "student": lambda: rng.standard_t(4, size=(96, 1024)),
    }[kind]
    weight = torch.from_numpy(draw()).float()

    def rmse(values: torch.Tensor) -> float:
        return float((values - weight).square().mean().sqrt())

    searched = rmse(quantize(weight, "int4-g64").dequantize())
    assert searched < 0.93 * rmse(quantize(weight, "int4-g64", method="minmax").dequantize())
    kind_q4_1 = gguf.GGMLQuantizationType.Q4_1
    theirs = torch.from_numpy(gguf.dequantize(gguf.quantize(weight.numpy(), kind_q4_1), kind_q4_1))
    assert rmse(quantize(weight, "int4-g32").dequantize()) < 0.93 * rmse(theirs)


@pytest.mark.parametrize("name", ["int4-g64", "int4-g64-sym", "int3-g64-zp"])
def test_importance_lowers_the_weighted_error(name: str) -> None:
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(32, 256, generator=generator)
    moments = torch.rand(256, generator=generator) ** 4 + 1e-3

    def error(importance: torch.Tensor | None) -> float:
        found = quantize(weight, name, importance=importance).dequantize()
        return float(((found - weight) ** 2 * moments).sum())

    assert error(moments) < 0.9 * error(None)
    assert error(1e30 * moments) == pytest.approx(error(moments), rel=1e-3)


@pytest.mark.parametrize("name", ["int4-g64", "int3.5-g32-sym", "int6-g64-zp-f32", "bf16"])
def test_rows_packed_in_pieces_are_the_same_bytes(name: str) -> None:
    weight = torch.randn(11, 150, generator=torch.Generator().manual_seed(1))
    whole = quantize(weight, name)
    pieces = empty_packed(parse_format(name), (11, 150))
    for start, end in ((4, 9), (0, 4), (9, 11)):
        quantize_rows_into(pieces, start, weight[start:end])
    assert torch.equal(whole.buffer, pieces.buffer)


def test_row_blocks_bound_the_fp32_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    import quant.pack

    weight = torch.randn(10, 64)
    whole = quantize(weight, "int4-g64")
    seen: list[int] = []
    pack_block = quant.pack._pack_block

    def spy(packed: object, row: int, block: torch.Tensor, weights: torch.Tensor, method: str) -> None:
        seen.append(block.numel() * 4)
        pack_block(packed, row, block, weights, method)  # type: ignore[arg-type]

    monkeypatch.setattr(quant.pack, "ROW_BLOCK_BYTES", 3 * 64 * 4)
    monkeypatch.setattr(quant.pack, "_pack_block", spy)
    assert torch.equal(quantize(weight, "int4-g64").buffer, whole.buffer)
    assert seen == [768, 768, 768, 256]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["int4-g64", "int8-g128-sym-f32", "f16"])
def test_values_that_are_not_finite_are_refused_by_name(bad: float, name: str) -> None:
    weight = torch.zeros(6, 70)
    weight[4, 69] = bad
    with pytest.raises(ValueError, match=r"tensor 'layers\.3\.w' holds -?(nan|inf) at \(4, 69\)"):
        quantize(weight, name, name="layers.3.w")


def test_values_too_large_for_the_format_are_refused() -> None:
    with pytest.raises(ValueError, match="holds inf at"):
        quantize(torch.full((1, 4), 7e4), "f16")
    with pytest.raises(ValueError, match="holds inf at"):
        quantize(torch.full((1, 4), 1e300, dtype=torch.float64), "int4-g64")
    with pytest.raises(ValueError, match=r"up to 8\.507e"):
        quantize(torch.full((1, 4), 1e38), "int4-g64")


def test_bad_arguments_are_refused() -> None:
    weight = torch.zeros(2, 64)
    with pytest.raises(ValueError, match="unknown quantiser 'best'"):
        quantize(weight, "int4-g64", method="best")
    with pytest.raises(ValueError, match="unknown weight format"):
        quantize(weight, "int4-g63")
    with pytest.raises(ValueError, match="q4_k only holds weights that come in it"):
        quantize(torch.zeros(2, 256), "q4_k")
    with pytest.raises(ValueError, match="floating-point"):
        quantize(torch.zeros(2, 64, dtype=torch.int32), "int4-g64")
    with pytest.raises(ValueError, match="one number per column"):
        quantize(weight, "int4-g64", importance=torch.ones(63))
    with pytest.raises(ValueError, match="not negative"):
        quantize(weight, "int4-g64", importance=-torch.ones(64))
    with pytest.raises(ValueError, match=r"rows 1\.\.3 are not within 0\.\.2"):
        quantize_rows_into(empty_packed(parse_format("int4-g64"), (2, 64)), 1, weight)
    with pytest.raises(ValueError, match="do not fit"):
        quantize_rows_into(empty_packed(parse_format("int4-g64"), (2, 65)), 0, weight)
