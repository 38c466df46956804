"""Products by AMX against products in fp64, and against themselves: what must not change a result, bit for bit."""

from __future__ import annotations

import threading

import pytest
import torch

from quant import amx
from quant.formats import format_names, parse_format
from quant.kernel_choice import has_amx
from quant.pack import quantize
from quant.packed import PackedTensor, empty_packed

pytestmark = pytest.mark.skipif(not has_amx(), reason="this CPU has no AMX")

# Rows and columns of whole tiles, of parts of them, of several panels; fewer than a thread takes; rows long enough
# that a panel holds the fewest it may.
SHAPES = [(1, 1), (16, 32), (45, 200), (64, 96), (130, 576), (300, 1000), (200, 6000)]
TOKENS = [1, 2, 16, 17, 33, 48, 64, 100, 256]


def bf16(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def assert_product(
    found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """Sums are fp32, so only the last rounding shows."""
    wanted = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    size = x.double().abs() @ weight.double().abs().t() + 1
    error = (found.double() - wanted).abs()
    assert bool((error <= 2**-8 * wanted.abs() + 1e-5 * size).all()), float(error.max())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("n_tokens", TOKENS)
def test_products_of_plain_weights(shape: tuple[int, int], n_tokens: int) -> None:
    rows, cols = shape
    x, bias = bf16(n_tokens, cols, seed=1), bf16(rows, seed=2)
    wide = bf16(rows, cols + 9, seed=3)
    aligned = wide[:, :cols].contiguous()
    for weight in (aligned, wide[:, 5 : 5 + cols]):
        assert amx.can_multiply(x, weight)
        around = torch.full((n_tokens, rows + 10), 7.0).bfloat16()
        assert_product(amx.multiply(x, weight, bias, around[:, 3 : 3 + rows]), x, weight, bias)
        assert bool((around[:, :3] == 7).all()) and bool((around[:, 3 + rows :] == 7).all())
        assert_product(amx.multiply(x, weight, None, None), x, weight, None)


@pytest.mark.parametrize("name", format_names(all_forms=True)[3:])
@pytest.mark.parametrize("n_tokens", [1, 40, 700])
def test_packed_weights_multiply_as_their_values_do(name: str, n_tokens: int) -> None:
    fmt = parse_format(name)
    for rows, cols in [(70, 768)] if fmt.kind == "block" else [(70, 768), (45, 200), (33, 72)]:
        packed = packed_weight(name, rows, cols)
        x = bf16(n_tokens, cols, seed=4)
        values = packed.dequantize(torch.bfloat16)
        assert torch.equal(amx.multiply(x, packed, None, None), amx.multiply(x, values, None, None))


def packed_weight(name: str, rows: int, cols: int) -> PackedTensor:
    fmt = parse_format(name)
    if fmt.kind != "block":
        return quantize(bf16(rows, cols).float(), fmt)
    packed = empty_packed(fmt, (rows, cols))
    raw = packed.part("blocks")
    generator = torch.Generator().manual_seed(5)
    raw.copy_(torch.randint(0, 256, tuple(raw.shape), generator=generator, dtype=torch.uint8))
    nbytes, halves = {"q4_k": (144, (0, 2)), "q5_k": (176, (0, 2)), "q6_k": (210, (208,))}[name]
    for at in halves:  # random bytes are no good fp16 numbers
        scale = torch.tensor([0.01], dtype=torch.float16).view(torch.uint8)
        raw.view(rows, -1, nbytes)[..., at : at + 2] = scale
    return packed


def test_a_token_does_not_depend_on_the_others() -> None:
    x, weight = bf16(200, 500, seed=6), bf16(150, 500, seed=7)
    packed = quantize(weight.float(), "int4-g64")
    for matrix in (weight, packed):
        whole = amx.multiply(x, matrix, None, None)
        for begin, end in ((0, 1), (7, 24), (100, 133), (3, 200)):
            assert torch.equal(amx.multiply(x[begin:end], matrix, None, None), whole[begin:end])


def test_the_number_of_threads_does_not_matter() -> None:
    x, weight = bf16(50, 320, seed=8), bf16(1000, 320, seed=9)
    n_threads = torch.get_num_threads()
    try:
        found = []
        for n in (1, 2, n_threads):
            torch.set_num_threads(n)
            found.append(amx.multiply(x, weight, None, None))
    finally:
        torch.set_num_threads(n_threads)
    assert all(torch.equal(found[0], other) for other in found)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_token_and_row(value: float) -> None:
    x, weight = bf16(40, 100, seed=10), bf16(70, 100, seed=11)
    x[17, 99] = value
    weight[33, 5] = value
    found = amx.multiply(x, weight, None, None)
    wrong = ~found.isfinite()
    assert bool(wrong[17].all()) and bool(wrong[:, 33].all())
    wrong[17] = False
    wrong[:, 33] = False
    assert not bool(wrong.any())
    # Neither do the zeros that fill a tile up meet what lies beyond the tokens.
    alone = amx.multiply(x[:17], weight, None, None)
    assert torch.equal(alone.view(torch.int16), found[:17].view(torch.int16))


def test_from_several_threads_at_once() -> None:
    """Each has working memory and tile registers of its own."""
    x, weight = bf16(64, 256, seed=12), bf16(512, 256, seed=13)
    wanted = amx.multiply(x, weight, None, None)
    wrong: list[int] = []

    def work(which: int) -> None:
        for _ in range(50):
            if not torch.equal(amx.multiply(x, weight, None, None), wanted):
                wrong.append(which)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_what_it_does_not_take() -> None:
    x, weight = bf16(4, 64), bf16(32, 64)
    assert not amx.can_multiply(x.float(), weight)
    assert not amx.can_multiply(x, weight.float())
    assert not amx.can_multiply(x, weight.t().contiguous().t())
    assert not amx.can_multiply(x[:0], weight)
    assert not amx.can_multiply(x, weight[:0])
    for matrix in (weight, quantize(weight.float(), "int4-g64")):
        assert amx.can_multiply(x, matrix)
        assert not amx.can_multiply(bf16(400, 64), matrix)  # torch is faster
    assert amx.can_multiply(bf16(400, 1024), bf16(32, 1024))


ACTIVATED = {
    "silu": torch.nn.functional.silu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("activation", list(ACTIVATED))
@pytest.mark.parametrize("ffn, cols", [(1, 32), (16, 64), (20, 70), (100, 200), (300, 576)])
@pytest.mark.parametrize("n_tokens", [1, 17, 40, 200])
def test_gates(ffn: int, cols: int, n_tokens: int, activation: str, packed: bool) -> None:
    """Gates that end within a tile, and squares of them; large ones of both signs."""
    x, bias = bf16(n_tokens, cols, seed=14), bf16(2 * ffn, seed=15)
    values = bf16(2 * ffn, cols, seed=16)
    weight: torch.Tensor | PackedTensor = values
    if packed:
        weight = quantize(values.float(), "int4-g64")
        values = weight.dequantize(torch.bfloat16)
    product = x.double() @ values.double().t() + bias.double()
    wanted = ACTIVATED[activation](product[:, :ffn]) * product[:, ffn:]
    found = amx.multiply(x, weight, bias, None, mode=activation)
    assert found.shape == (n_tokens, ffn)
    error = (found.double() - wanted).abs()
    assert bool((error <= 2**-8 * wanted.abs() + 1e-3).all()), float(error.max())


def test_gates_that_are_not_finite() -> None:
    x = torch.ones(3, 32).bfloat16()
    x[1] = float("nan")
    x[2] = 1e38
    weight = torch.zeros(64, 32).bfloat16()
    weight[0], weight[1], weight[32:] = 1.0, -1.0, 0.5
    found = amx.multiply(x, weight, None, None, mode="silu")
    assert bool(found[1].isnan().all()) and bool(found[0].isfinite().all())
    assert not bool(found[2, 0].isfinite())


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("n_tokens", [1, 33, 300])
def test_adds_to_what_is_there(n_tokens: int, packed: bool) -> None:
    x, bias, values = bf16(n_tokens, 130, seed=17), bf16(75, seed=18), bf16(75, 130, seed=19)
    weight: torch.Tensor | PackedTensor = values
    if packed:
        weight = quantize(values.float(), "int4-g64")
        values = weight.dequantize(torch.bfloat16)
    before = bf16(n_tokens, 75, seed=20)
    total = before.clone()
    assert amx.multiply(x, weight, bias, total, mode="add") is total
    wanted = before.double() + x.double() @ values.double().t() + bias.double()
    error = (total.double() - wanted).abs()
    assert bool((error <= 2**-8 * wanted.abs() + 1e-3).all()), float(error.max())
