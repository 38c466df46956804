"""linear and unpack over tensors and packed tensors of every kind."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import quant.linear
from quant.formats import parse_format
from quant.linear import add_linear, crossover_tokens, gated_linear, linear, unpack
from quant.pack import quantize
from quant.packed import PackedTensor, StackedTensor, empty_packed
from quant.pointwise import ACTIVATIONS


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(45, 200, generator=torch.Generator().manual_seed(0))


def tokens(n: int) -> torch.Tensor:
    return torch.randn(n, 200, generator=torch.Generator().manual_seed(1))


def test_importing_it_does_not_import_numba() -> None:
    code = "import sys, quant.linear, quant.pack, quant.native; print('numba' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


@pytest.mark.parametrize("name", ["int4-g64", "int8-g128-sym", "int3.5-g64", "bf16", "f16", "f32"])
@pytest.mark.parametrize("n_tokens", [1, 5, 300])
@pytest.mark.parametrize("with_bias", [False, True])
def test_product_equals_that_of_the_unpacked_weight(
    weight: torch.Tensor, name: str, n_tokens: int, with_bias: bool
) -> None:
    packed = quantize(weight, name)
    bias = torch.randn(45) if with_bias else None
    x = tokens(n_tokens)
    expected = F.linear(x.double(), packed.dequantize().double(), None if bias is None else bias.double())
    found = linear(x, packed, bias)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("n_tokens", [2, 300])
def test_bf16_inputs_give_bf16(weight: torch.Tensor, n_tokens: int) -> None:
    packed = quantize(weight, "int4-g64")
    x, bias = tokens(n_tokens).bfloat16(), torch.randn(45).bfloat16()
    expected = F.linear(x.float(), packed.dequantize(), bias.float())
    found = linear(x, packed, bias)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=0.2)


@pytest.mark.parametrize("scratch_elements", [200, 1000, 45 * 200, 20000])
def test_scratch_of_any_size_gives_the_same(
    weight: torch.Tensor, scratch_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quant.linear, "crossover_tokens", lambda *_: 0)
    packed = quantize(weight, "int4-g64")
    x, bias = tokens(9), torch.randn(45, generator=torch.Generator().manual_seed(2))
    scratch = torch.full((scratch_elements,), float("nan"))
    found = linear(x, packed, bias, scratch=scratch)
    # Sums of 200 products, in another order where the scratch is short.
    torch.testing.assert_close(found, F.linear(x, packed.dequantize(), bias), rtol=1e-5, atol=1e-4)
    assert not bool(scratch[:200].isnan().any())  # it was used


def test_plain_bf16_weight_with_fp32_inputs_goes_through_the_scratch(weight: torch.Tensor) -> None:
    scratch = torch.empty(45 * 200)
    found = linear(tokens(3), weight.bfloat16(), scratch=scratch)
    torch.testing.assert_close(found, tokens(3) @ weight.bfloat16().float().t(), rtol=1e-5, atol=1e-5)
    assert torch.equal(scratch.view(45, 200), weight.bfloat16().float())


def test_both_paths_agree_on_either_side_of_the_crossover(weight: torch.Tensor) -> None:
    packed = quantize(weight, "int4-g64")
    limit = crossover_tokens(packed.format)
    x = tokens(limit + 1)
    torch.testing.assert_close(linear(x[:limit], packed), linear(x, packed)[:limit], rtol=1e-4, atol=1e-4)


def test_crossover_is_a_positive_number_for_packed_formats_only() -> None:
    assert crossover_tokens(parse_format("bf16")) == 0
    assert crossover_tokens(parse_format("int4-g64")) >= 1
    assert crossover_tokens(parse_format("q6_k"), torch.bfloat16) >= 1


def test_empty_inputs(weight: torch.Tensor) -> None:
    packed = quantize(weight, "int4-g64")
    assert linear(torch.empty(0, 200), packed).shape == (0, 45)
    assert linear(tokens(2), quantize(weight[:0], "int4-g64")).shape == (2, 0)


def test_strided_inputs(weight: torch.Tensor) -> None:
    packed = quantize(weight, "int4-g64")
    x = tokens(10)[::2]
    assert torch.equal(linear(x, packed), linear(x.contiguous(), packed))


def test_unpack(weight: torch.Tensor) -> None:
    packed = quantize(weight, "int4-g64")
    out = torch.empty(45 * 200, dtype=torch.bfloat16)
    found = unpack(packed, torch.bfloat16, out)
    assert found.shape == (45, 200)
    assert found.data_ptr() == out.data_ptr()
    assert torch.equal(found, packed.dequantize(torch.bfloat16))
    assert unpack(weight, torch.float32) is weight
    assert torch.equal(unpack(quantize(weight, "bf16"), torch.float32), weight.bfloat16().float())
    with pytest.raises(ValueError, match="out must be contiguous"):
        unpack(weight, torch.float32, out)


def test_what_does_not_fit_is_refused(weight: torch.Tensor) -> None:
    packed = quantize(weight, "int4-g64")
    with pytest.raises(ValueError, match=r"of one width, got \(2, 199\) and \(45, 200\)"):
        linear(torch.zeros(2, 199), packed)
    with pytest.raises(ValueError, match="one device"):
        linear(torch.zeros(2, 200, device="meta"), packed)
    with pytest.raises(ValueError, match="scratch must be flat"):
        linear(torch.zeros(300, 200), packed, scratch=torch.empty(199))
    with pytest.raises(ValueError, match="scratch must be flat"):
        linear(torch.zeros(300, 200), packed, scratch=torch.empty(20000, dtype=torch.bfloat16))


# -- matrices in several formats -------------------------------------------------------------------------


def stacked(
    weight: torch.Tensor, names: tuple[str, ...], dtype: torch.dtype = torch.float32
) -> StackedTensor:
    """The matrix in as many runs of rows, each in its format; f32, bf16 and f16 as plain tensors."""
    parts: list[torch.Tensor | PackedTensor] = []
    for piece, name in zip(weight.tensor_split(len(names)), names, strict=True):
        fmt = parse_format(name)
        parts.append(piece.to(getattr(torch, fmt.plain_dtype)) if fmt.is_plain else quantize(piece, name))
    return StackedTensor(tuple(parts))


MIXES = [("int4-g64", "int8-g32"), ("f32", "int5-g32-sym", "bf16"), ("int8-g128", "f32")]


@pytest.mark.parametrize("names", MIXES)
@pytest.mark.parametrize("n_tokens", [0, 1, 5, 300])
@pytest.mark.parametrize("with_bias", [False, True])
def test_each_part_is_multiplied_into_its_own_columns(
    weight: torch.Tensor, names: tuple[str, ...], n_tokens: int, with_bias: bool
) -> None:
    mixed = stacked(weight, names)
    values = torch.cat([unpack(part, torch.float32) for part in mixed.parts])
    assert mixed.shape == (45, 200) and torch.equal(mixed.dequantize(), values)
    assert torch.equal(unpack(mixed, torch.float32, torch.empty(45 * 200)), values)
    bias = torch.randn(45, generator=torch.Generator().manual_seed(2)) if with_bias else None
    x = tokens(n_tokens)
    found = linear(x, mixed, bias)
    assert found.shape == (n_tokens, 45) and found.is_contiguous()
    torch.testing.assert_close(found, F.linear(x, values, bias), rtol=1e-4, atol=1e-4)
    # Each column is what its part alone gives.
    for start, stop, part in mixed.ranges():
        alone = linear(x, part, None if bias is None else bias[start:stop])
        torch.testing.assert_close(found[:, start:stop], alone, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("n_tokens", [2, 300])
def test_mixed_parts_in_bf16(weight: torch.Tensor, n_tokens: int) -> None:
    mixed = stacked(weight, ("int4-g64", "bf16", "int8-g32"))
    x, bias = tokens(n_tokens).bfloat16(), torch.randn(45).bfloat16()
    found = linear(x, mixed, bias)
    assert found.dtype == torch.bfloat16
    expected = F.linear(x.float(), mixed.dequantize(), bias.float())
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=0.2)


@pytest.mark.parametrize("name", ["int4-g64", "bf16", "f32"])
@pytest.mark.parametrize("scratch_elements", [500, 20000])
def test_a_product_goes_to_columns_of_a_wider_tensor(
    weight: torch.Tensor, name: str, scratch_elements: int
) -> None:
    part = stacked(weight, (name,)).parts[0]
    for n_tokens in (3, 300):
        wide = torch.full((n_tokens, 60), 7.0)
        out = wide[:, 10:55]
        got = linear(tokens(n_tokens), part, scratch=torch.empty(scratch_elements), out=out)
        assert got.data_ptr() == out.data_ptr()
        torch.testing.assert_close(out, linear(tokens(n_tokens), part), rtol=1e-4, atol=1e-4)
        assert bool((wide[:, :10] == 7).all()) and bool((wide[:, 55:] == 7).all())


def test_no_copy_of_the_products_is_made(weight: torch.Tensor) -> None:
    """The BLAS writes to the columns: what is allocated beside the result is less than a part's product."""
    mixed = stacked(weight, ("f32", "f32"))
    x = tokens(4000)
    with torch.profiler.profile(profile_memory=True) as profile:
        linear(x, mixed)
    allocated = sum(max(0, event.self_cpu_memory_usage) for event in profile.events())
    assert 4000 * 45 * 4 <= allocated < 1.3 * 4000 * 45 * 4


def test_parts_that_do_not_fit_are_refused(weight: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="at least one part"):
        StackedTensor(())
    with pytest.raises(ValueError, match="matrices of one width on one device"):
        StackedTensor((weight, weight[:, :100]))
    with pytest.raises(ValueError, match="one width"):
        linear(torch.zeros(2, 100), stacked(weight, MIXES[0]))
    with pytest.raises(ValueError, match=r"out must be \(2, 45\)"):
        linear(torch.zeros(2, 200), stacked(weight, MIXES[0]), out=torch.empty(2, 44))


@pytest.mark.parametrize("n_tokens", [1, 2, 33, 64, 200, 300])
@pytest.mark.parametrize("with_bias", [False, True])
def test_bf16_products(n_tokens: int, with_bias: bool) -> None:
    """By whatever multiplies bf16 here, whole or into the columns of a wider result."""
    torch.manual_seed(0)
    x, weight = torch.randn(n_tokens, 96).bfloat16(), torch.randn(70, 96).bfloat16()
    bias = torch.randn(70).bfloat16() if with_bias else None
    wanted = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    wide = torch.full((n_tokens, 100), 7.0).bfloat16()
    for found in (linear(x, weight, bias), linear(x, weight, bias, out=wide[:, 20:90])):
        assert found.shape == wanted.shape and found.dtype == torch.bfloat16
        assert float((found.double() - wanted).abs().max()) <= 2**-7 * float(wanted.abs().max())
    assert (wide[:, :20] == 7).all() and (wide[:, 90:] == 7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu", "relu", "quick_gelu"])
@pytest.mark.parametrize("kind", ["plain", "packed", "permuted", "stacked"])
def test_gated_products_and_residuals(dtype: torch.dtype, activation: str, kind: str) -> None:
    """Fused or not, they are what the product, the activation and the sum give one after the other."""
    torch.manual_seed(0)
    matrix = torch.randn(44, 192) / 12
    weight = {
        "plain": lambda: matrix.to(dtype),
        "packed": lambda: quantize(matrix, "int4-g64"),
        "permuted": lambda: permuted(matrix),
        "stacked": lambda: StackedTensor(
            (quantize(matrix[:20], "int4-g64"), quantize(matrix[20:], "int8-g64"))
        ),
    }[kind]()
    values = unpack(weight, torch.float32).double()
    x, bias = torch.randn(9, 192).to(dtype), torch.randn(44).to(dtype)
    product = x.double() @ values.t() + bias.double()
    tolerance = 1e-4 if dtype == torch.float32 else 0.06
    gated = gated_linear(x, weight, bias, activation)
    wanted = ACTIVATIONS[activation](product[:, :22]) * product[:, 22:]
    assert gated.shape == (9, 22)
    torch.testing.assert_close(gated.double(), wanted, atol=tolerance, rtol=tolerance)
    total = torch.randn(9, 44).to(dtype)
    wanted = total.double() + product
    assert add_linear(total, x, weight, bias) is total
    torch.testing.assert_close(total.double(), wanted, atol=tolerance, rtol=tolerance)


def permuted(matrix: torch.Tensor) -> PackedTensor:
    """Columns packed in another order, as act-order checkpoints are."""
    order = torch.randperm(matrix.shape[1])
    packed = quantize(matrix[:, order], "int4-g64-zp")
    made = empty_packed(parse_format("int4-g64-zp-perm"), tuple(matrix.shape))
    for name, part in made.to_parts().items():
        part.copy_(order if name == "permutation" else packed.part(name))
    return made


@pytest.mark.parametrize("shape", [(1, 1), (7, 13), (45, 200), (300, 1000)])
def test_fp16_weights_become_bf16_as_torch_makes_them(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator) ** 8
    weight = weight.half()  # subnormals among them
    weight[0, 0] = float("inf")
    around = torch.full((weight.numel() + 32,), 7.0).bfloat16()
    found = unpack(weight, torch.bfloat16, around[16:-16])
    assert torch.equal(found, weight.bfloat16())
    assert bool((around[:16] == 7).all()) and bool((around[-16:] == 7).all())
    weight[-1, -1] = float("nan")
    assert bool(unpack(weight, torch.bfloat16, around[16:-16])[-1, -1].isnan())
