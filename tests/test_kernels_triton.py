"""Triton unpacking against torch, under Triton's interpreter on CPU tensors or on a GPU; torch's int4 product."""

import importlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kv_helpers import ragged_batch

from quant.formats import BITS, GROUP_SIZES, parse_format
from quant.kernels_int4 import int4_weight
from quant.kernels_torch import dequantize_rows
from quant.kv import decode_pages
from quant.packed import PackedTensor, empty_packed

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def kernels() -> Iterator[Any]:
    """The kernels' module, imported for the interpreter where there is no GPU; the setting is read at import."""
    before = os.environ.get("TRITON_INTERPRET")
    if DEVICE == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        # Other tests may have imported them for a device.
        sys.modules.pop("quant.kernels_triton", None)
        yield importlib.import_module("quant.kernels_triton")
    finally:
        sys.modules.pop("quant.kernels_triton", None)
        if before is None:
            os.environ.pop("TRITON_INTERPRET", None)
        else:
            os.environ["TRITON_INTERPRET"] = before


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal bits; for bf16 under the interpreter, which cuts the low bits off instead of rounding, one place off."""
    if got.dtype == torch.bfloat16 and DEVICE == "cpu":
        torch.testing.assert_close(got, want, rtol=2.0**-7, atol=0)
    else:
        assert torch.equal(got, want)


def random_packed(name: str, rows: int, cols: int) -> PackedTensor:
    """A tensor of arbitrary codes and parameters: every bit of the layout counts."""
    generator = torch.Generator().manual_seed(rows * cols)
    packed = empty_packed(parse_format(name), (rows, cols))
    for part_name, part in packed.to_parts().items():
        if part_name == "permutation":
            part.copy_(torch.randperm(cols, generator=generator))
        elif part_name == "exponents":
            part.copy_(torch.randint(-40, 20, part.shape, generator=generator))
        elif part.dtype == torch.uint8:
            high = packed.format.top_code + 1 if part_name == "zeros" else 256
            part.copy_(torch.randint(0, high, part.shape, generator=generator))
        else:
            part.copy_(torch.randn(part.shape, generator=generator))
    return packed.to(DEVICE)


FORMS = ("", "-zp", "-sym", "-f32", "-zp-f32", "-perm", "-sym-f32-perm")


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("form", FORMS)
def test_every_affine_format_unpacks_to_the_reference(kernels: Any, bits: float, form: str) -> None:
    group = GROUP_SIZES[FORMS.index(form) % 3]
    packed = random_packed(f"int{bits:g}-g{group}{form}", 3, 2 * group + 9)
    for in_order in (True, False):
        out = torch.full(packed.shape, float("nan"), device=DEVICE)
        kernels.dequantize_rows(packed, out, in_order=in_order)
        assert torch.equal(out, dequantize_rows(packed, in_order=in_order))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_by_number_and_from_a_start_in_narrow_types(kernels: Any, dtype: torch.dtype) -> None:
    packed = random_packed("int5-g32-f32", 6, 1100)
    ids = torch.tensor([5, 0, 5], device=DEVICE)
    out = torch.empty(3, 1100, dtype=dtype, device=DEVICE)
    kernels.dequantize_rows(packed, out, row_ids=ids)
    assert_same(out, dequantize_rows(packed, ids).to(dtype))
    kernels.dequantize_rows(packed, out, row_start=2)
    assert_same(out, dequantize_rows(packed)[2:5].to(dtype))


def test_other_formats_are_refused(kernels: Any) -> None:
    packed = empty_packed(parse_format("q4_k"), (1, 256))
    with pytest.raises(ValueError, match="q4_k"):
        kernels.dequantize_rows(packed, torch.empty(1, 256))


@pytest.mark.parametrize("name", ["int8", "int4", "int2"])
@pytest.mark.parametrize(("page_tokens", "head_dim"), [(16, 21), (17, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kv_pages_unpack_where_they_belong(
    kernels: Any, name: str, page_tokens: int, head_dim: int, dtype: torch.dtype
) -> None:
    batch, _ = ragged_batch(
        name, [4 * page_tokens], page_tokens=page_tokens, head_dim=head_dim, tail_dtype=torch.float32
    )
    arena = batch.arenas[0].to(DEVICE)
    slots = torch.tensor([2, 0], device=DEVICE)
    k_out = torch.full((3, 2, 2 * page_tokens + 5, head_dim), 7.0, dtype=dtype, device=DEVICE)
    v_out = k_out.clone()
    kernels.unpack_pages(
        arena,
        batch.fmt,
        page_tokens=page_tokens,
        slots=slots,
        rows=torch.tensor([2, 0], device=DEVICE),
        first_positions=torch.tensor([0, page_tokens], device=DEVICE),
        k_out=k_out,
        v_out=v_out,
    )
    k, v = decode_pages(
        arena[slots], batch.fmt, n_kv_heads=2, page_tokens=page_tokens, head_dim=head_dim, dtype=dtype
    )
    for out, want in ((k_out, k), (v_out, v)):
        assert_same(out[2, :, :page_tokens], want[0])
        assert_same(out[0, :, page_tokens : 2 * page_tokens], want[1])
        assert bool((out[1] == 7).all())
        assert bool((out[2, :, page_tokens:] == 7).all())
        assert bool((out[0, :, 2 * page_tokens :] == 7).all())


def bf16_parameters(packed: PackedTensor) -> PackedTensor:
    """Round scales to bf16 and put minima on multiples of them, so that the int4 kernel can hold both."""
    scales = packed.part("scales")
    scales.copy_(scales.bfloat16())
    if packed.format.zero == "min":
        packed.part("mins").copy_(-4 * scales)
    return packed


@pytest.mark.parametrize("name", ["int4-g64-sym-f32", "int4-g32", "int4-g128-zp-f32"])
def test_int4_product_uses_the_same_values(name: str) -> None:
    packed = random_packed(name, 128, 256)
    if packed.format.zero == "int":
        packed.part("zeros").fill_(6)
    if packed.format.param_dtype == "float16":
        packed.part("exponents").fill_(-3)
    weight = int4_weight(bf16_parameters(packed))
    if weight is None and DEVICE == "cuda":
        pytest.skip("this GPU has no int4 kernel")
    assert weight is not None
    # One token per column reads the weight back, exactly: a single product and sums of zeros.
    values = weight.matmul(torch.eye(256, dtype=torch.bfloat16, device=DEVICE)).T  # (rows, cols)
    assert torch.equal(values, dequantize_rows(packed).bfloat16())


def test_int4_product_declines_what_it_would_change() -> None:
    assert int4_weight(random_packed("int4-g64-f32", 128, 256)) is None  # scales that are no bf16 numbers
    assert int4_weight(random_packed("int8-g64-sym-f32", 128, 256)) is None
    assert int4_weight(bf16_parameters(random_packed("int4-g64-sym-f32-perm", 128, 256))) is None
    assert int4_weight(bf16_parameters(random_packed("int4-g64-sym-f32", 120, 256))) is None
    assert int4_weight(bf16_parameters(random_packed("int4-g64-sym-f32", 128, 250))) is None
    good = int4_weight(bf16_parameters(random_packed("int4-g64-sym-f32", 128, 256)))
    if good is not None:
        with pytest.raises(ValueError, match="bf16"):
            good.matmul(torch.zeros(1, 256, device=DEVICE))
