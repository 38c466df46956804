"""Compiled weight kernels against the plain torch unpacking and against gguf."""

import gguf
import numpy as np
import pytest
import torch

from quant.formats import WeightFormat, format_names, parse_format
from quant.kernels_torch import dequantize_rows
from quant.linear import linear
from quant.packed import PackedTensor, concat_rows, empty_packed

PACKED_NAMES = [*format_names(all_forms=True)[3:], "int4-g128-zp-perm", "int3-g32-zp-f32-perm"]
SUPER_BLOCK_BYTES = {"q4_k": 144, "q5_k": 176, "q6_k": 210}


def random_packed(name: str, shape: tuple[int, int], seed: int = 0) -> PackedTensor:
    """Random bytes in every part, parameters of very different sizes, fp16 subnormals among them."""
    rng = np.random.default_rng(seed)
    packed = empty_packed(parse_format(name), shape)
    for part_name, part in packed.to_parts().items():
        if part_name == "permutation":
            part.copy_(torch.from_numpy(rng.permutation(shape[1])))
        elif part.dtype in (torch.uint8, torch.int8):
            low, high = (0, 256) if part.dtype == torch.uint8 else (-60, 60)
            part.copy_(torch.from_numpy(rng.integers(low, high, tuple(part.shape))))
        else:
            sizes = rng.choice([1.0, 1e-3, 1e-6, 3e-7], tuple(part.shape))
            part.copy_(torch.from_numpy(rng.normal(size=tuple(part.shape)) * sizes))
    if packed.format.kind == "block":
        blocks = packed.part("blocks").view(shape[0], -1, SUPER_BLOCK_BYTES[name])
        for at in (208,) if name == "q6_k" else (0, 2):
            halves = rng.normal(size=(*blocks.shape[:2], 1)).astype(np.float16)
            blocks[..., at : at + 2] = torch.from_numpy(halves).view(torch.uint8)
    return packed


def shapes_for(fmt: WeightFormat) -> list[tuple[int, int]]:
    return [(1, 256), (5, 768)] if fmt.kind == "block" else [(1, 3), (5, 200), (3, 256), (2, 33)]


@pytest.mark.parametrize("name", PACKED_NAMES)
def test_unpacking_equals_plain_torch(name: str) -> None:
    for shape in shapes_for(parse_format(name)):
        packed = random_packed(name, shape)
        expected = dequantize_rows(packed)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            found = packed.dequantize(dtype)
            assert torch.equal(found, expected.to(dtype)), (shape, dtype)


@pytest.mark.parametrize("name", ["int4-g32", "int4-g64-zp", "int4-g128-sym"])
def test_subnormal_values_are_kept(name: str) -> None:
    """Conversions by the processor make zeros of them."""
    packed = random_packed(name, (28, 512), seed=4)
    packed.part("exponents").copy_(torch.arange(-125, -97).view(packed.part("exponents").shape))
    expected = dequantize_rows(packed).bfloat16()
    tiny = (expected != 0) & (expected.abs() < 2**-126)
    assert int(tiny.sum()) > 100
    assert torch.equal(packed.dequantize(torch.bfloat16), expected)


@pytest.mark.parametrize("name", ["q4_k", "q5_k", "q6_k"])
def test_block_formats_equal_gguf(name: str) -> None:
    packed = random_packed(name, (6, 1024), seed=3)
    kind = getattr(gguf.GGMLQuantizationType, name.upper())
    expected = gguf.dequantize(packed.part("blocks").numpy(), kind)
    np.testing.assert_array_equal(packed.dequantize().numpy(), expected)
    np.testing.assert_array_equal(dequantize_rows(packed).numpy(), expected)


def test_bf16_ties_go_to_even() -> None:
    packed = empty_packed(parse_format("int8-g32-f32"), (1, 256))
    packed.part("codes8").copy_(torch.arange(256)[None])
    packed.part("scales").fill_(2.0**-10)
    packed.part("mins").fill_(1.0)
    values = packed.dequantize()
    assert torch.equal(
        values[0], 1 + torch.arange(256) / 1024
    )  # every eighth is halfway between bf16 numbers
    assert torch.equal(packed.dequantize(torch.bfloat16), values.bfloat16())


@pytest.mark.parametrize("name", ["int4-g64", "int3.5-g32-sym", "q6_k", "int4-g128-zp-perm", "bf16"])
def test_gather_rows(name: str) -> None:
    packed = empty_packed(parse_format(name), (9, 256)) if name == "bf16" else random_packed(name, (9, 256))
    if name == "bf16":
        packed.part("data").copy_(torch.randn(9, 256))
    ids = torch.tensor([[8, 0], [3, 3], [0, 5]])
    whole = packed.dequantize(torch.bfloat16)
    assert torch.equal(packed.gather_rows(ids, torch.bfloat16), whole[ids])
    assert packed.gather_rows(ids[:0]).shape == (0, 2, 256)
    with pytest.raises(ValueError, match=r"row ids must be in 0\.\.8"):
        packed.gather_rows(torch.tensor([9]))
    with pytest.raises(ValueError, match="row ids"):
        packed.gather_rows(torch.tensor([-1]))


@pytest.mark.parametrize("name", PACKED_NAMES)
def test_few_token_product_equals_unpacked_product(name: str) -> None:
    shape = (5, 1280) if parse_format(name).kind == "block" else (5, 1283)
    packed = random_packed(name, shape)
    x = torch.randn(6, shape[1], generator=torch.Generator().manual_seed(1))
    expected = x.double() @ dequantize_rows(packed).double().t()
    torch.testing.assert_close(
        linear(x, packed).double(), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max())
    )


@pytest.mark.parametrize("n_tokens", [1, 2, 3, 4, 5, 7, 8, 13])
def test_few_token_product_does_not_depend_on_the_other_tokens(n_tokens: int) -> None:
    packed = random_packed("int4-g64", (7, 200))
    x = torch.randn(13, 200, generator=torch.Generator().manual_seed(2))
    whole = linear(x, packed)
    assert torch.equal(linear(x[:n_tokens], packed), whole[:n_tokens])
    assert torch.equal(linear(x[13 - n_tokens :], packed), whole[13 - n_tokens :])


def test_number_of_threads_changes_nothing() -> None:
    packed = random_packed("int4-g64", (37, 200))
    x = torch.randn(3, 200)
    threads = torch.get_num_threads()
    values, product = packed.dequantize(), linear(x, packed)
    try:
        torch.set_num_threads(1)
        assert torch.equal(packed.dequantize(), values)
        assert torch.equal(linear(x, packed), product)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", ["int4-g64", "int3.5-g64-zp", "int5-g32-sym-f32", "q5_k", "bf16"])
def test_rows_cut_and_join_without_change(name: str) -> None:
    packed = random_packed(name, (9, 256)) if name != "bf16" else empty_packed(parse_format(name), (9, 256))
    pieces = [packed.slice_rows(0, 4), packed.slice_rows(4, 5), packed.slice_rows(5, 9)]
    assert torch.equal(pieces[2].dequantize(), packed.dequantize()[5:])
    assert torch.equal(concat_rows(pieces).buffer, packed.buffer) or packed.format.kind == "affine"
    assert torch.equal(concat_rows(pieces).dequantize(), packed.dequantize())


def test_joining_what_does_not_match_is_refused() -> None:
    a = random_packed("int4-g64", (2, 128))
    with pytest.raises(ValueError, match="one format and width"):
        concat_rows([a, random_packed("int4-g32", (2, 128))])
    with pytest.raises(ValueError, match="permutation"):
        concat_rows([random_packed("int4-g64-zp-perm", (2, 128), seed) for seed in (0, 1)])
    with pytest.raises(ValueError, match="at least one"):
        concat_rows([])
    with pytest.raises(ValueError, match=r"not within 0\.\.2"):
        a.slice_rows(1, 3)


def test_views_share_the_buffer() -> None:
    fmt = parse_format("int4-g64")
    ring = torch.zeros(4096, dtype=torch.uint8)
    packed = PackedTensor(fmt, (4, 128), ring[1024 : 1024 + fmt.nbytes((4, 128))])
    packed.part("scales").fill_(1.0)
    packed.part("codes4").fill_(0x21)
    assert ring[1024] == 0x21
    assert torch.equal(packed.dequantize()[0], torch.cat([torch.ones(64), torch.full((64,), 2.0)]))


def test_buffers_that_do_not_fit_are_refused() -> None:
    fmt = parse_format("int4-g64")
    nbytes = fmt.nbytes((4, 128))
    with pytest.raises(ValueError, match=f"takes {nbytes} bytes"):
        PackedTensor(fmt, (4, 128), torch.zeros(nbytes + 64, dtype=torch.uint8))
    with pytest.raises(ValueError, match="1-D uint8"):
        PackedTensor(fmt, (4, 128), torch.zeros(nbytes // 4))
    with pytest.raises(ValueError, match="must start at a multiple of 4"):
        PackedTensor(fmt, (4, 128), torch.zeros(nbytes + 1, dtype=torch.uint8)[1:])
    packed = empty_packed(fmt, (4, 128))
    with pytest.raises(ValueError, match="out must be contiguous"):
        packed.dequantize(torch.float32, torch.empty(4, 127))
    with pytest.raises(ValueError, match="float32, bfloat16 or float16"):
        packed.dequantize(torch.int32)
    with pytest.raises(KeyError, match="no part 'zeros'"):
        packed.part("zeros")


def test_out_of_another_shape_is_filled() -> None:
    packed = random_packed("int4-g64", (4, 128))
    flat = torch.empty(512)
    found = packed.dequantize(torch.float32, flat)
    assert found.data_ptr() == flat.data_ptr()
    assert torch.equal(flat.view(4, 128), packed.dequantize())
