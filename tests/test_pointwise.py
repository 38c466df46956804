"""Fused norms, rotations and gates against torch's own in float64, for all sizes of row ends, strides and types."""

import pytest
import torch
import torch.nn.functional as F

from quant import pointwise

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def close(found, wanted, dtype):
    assert found.dtype == dtype and found.is_contiguous()
    scale = wanted.abs().amax(dim=-1, keepdim=True).clamp(min=1e-3)
    assert float(((found.double() - wanted) / scale).abs().max()) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [1, 7, 8, 31, 40, 64, 576])
@pytest.mark.parametrize("centered", [False, True])
def test_norm(dtype, size, centered):
    wide = torch.randn(5, 3, size + 9).mul_(3).to(dtype)
    scale, bias = torch.randn(size), torch.randn(size)
    for x in (wide[:, 1, :size], wide[:, 1:, 4 : size + 4]):
        y = x.double()
        if centered:
            y = y - y.mean(-1, keepdim=True)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)
        close(pointwise.norm(x, None, None, eps=1e-5, centered=centered), y, dtype)
        close(pointwise.norm(x, scale, bias, eps=1e-5, centered=centered), y * scale + bias, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("head_dim", "half"), [(64, 32), (20, 10), (80, 13), (8, 1)])
def test_rotate(dtype, head_dim, half):
    qkv = torch.randn(6, 5, head_dim).to(dtype)
    angles = torch.randn(6, 1, half) * 10
    cos, sin = angles.cos(), angles.sin()
    x = qkv[:, 1:4]
    a, b = x[..., :half].double(), x[..., half : 2 * half].double()
    wanted = x.double()
    wanted[..., :half], wanted[..., half : 2 * half] = a * cos - b * sin, b * cos + a * sin
    found = pointwise.rotate(x, cos, sin)
    close(found, wanted, dtype)
    assert torch.equal(found[..., 2 * half :], x[..., 2 * half :])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [3, 8, 29, 256])
@pytest.mark.parametrize("name", pointwise.GATES)
def test_gate(dtype, size, name):
    gate_up = (torch.randn(7, 2 * size) * 4).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    act = F.silu(gate) if name == "silu" else F.gelu(gate, approximate="tanh")
    close(pointwise.gate(gate_up, name), act * up, dtype)


@pytest.mark.parametrize("name", pointwise.GATES)
def test_a_gate_takes_numbers_of_any_size(name):
    gate = torch.tensor([[-3e38, -1e4, -90.0, -0.0, 90.0, 1e4, 3e37]])
    out = pointwise.gate(torch.cat([gate, torch.ones_like(gate)], dim=-1), name)
    assert torch.allclose(out, gate.clamp(min=0))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so_in_its_own_row(dtype, wrong):
    """The engine finds broken sequences by their logits; nothing on the way may hide them."""
    x = torch.randn(4, 2, 24).to(dtype)
    x[1, 0, 3] = wrong
    normed = pointwise.norm(x, None, None, eps=1e-5, centered=False)
    turned = pointwise.rotate(x, torch.ones(4, 1, 12), torch.ones(4, 1, 12))
    gated = pointwise.gate(x.flatten(1), "silu")
    assert not normed[1, 0].isfinite().all() and not turned[1, 0].isfinite().all()
    assert not gated[1].isfinite().all()
    for out in (normed, turned, gated):
        assert out[torch.arange(4) != 1].isfinite().all()


def test_a_damaged_norm_shows():
    """All bits set is a NaN whose narrowing to bf16 would carry over to zero."""
    x, scale = torch.randn(2, 16).bfloat16(), torch.ones(16)
    scale.view(torch.int32)[5] = -1
    out = pointwise.norm(x, scale, None, eps=1e-5, centered=False)
    assert out[:, 5].isnan().all() and out.isnan().sum() == 2


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_row_does_not_depend_on_the_others(dtype):
    x = torch.randn(33, 2, 48).to(dtype)
    angles = torch.randn(33, 1, 24)
    cos, sin = angles.cos(), angles.sin()
    for at in (0, 7, 32):
        one = slice(at, at + 1)
        for f in (
            lambda rows: pointwise.norm(x[rows], None, None, eps=1e-5, centered=True),
            lambda rows: pointwise.rotate(x[rows], cos[rows].contiguous(), sin[rows].contiguous()),
            lambda rows: pointwise.gate(x[rows].flatten(1), "gelu_tanh"),
        ):
            assert torch.equal(f(slice(None))[one], f(one))


def test_only_rows_on_the_cpu_of_these_types_fit():
    x = torch.randn(4, 16)
    assert pointwise.fits(x) and pointwise.fits(x.bfloat16()) and pointwise.fits(x.view(4, 2, 8))
    assert not pointwise.fits(x.half()) and not pointwise.fits(x.t()) and not pointwise.fits(x[0])
    assert pointwise.norm(x[:0], None, None, eps=1e-5, centered=False).shape == (0, 16)
