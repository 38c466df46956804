"""GGUF, GPTQ and AWQ tensors keep their values exactly."""

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from quant.formats import WeightFormat
from quant.linear import linear
from quant.native import (
    AWQ_ORDER,
    gguf_format,
    gptq_format,
    pack_awq,
    pack_gguf,
    pack_gguf_rows_into,
    pack_gptq,
)
from quant.packed import empty_packed

AFFINE_TYPES = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
SUPER_BLOCK_BYTES = {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210}


def gguf_rows(ggml_type: str, rows: int, cols: int) -> np.ndarray:
    weight = np.random.default_rng(1).standard_t(3, size=(rows, cols)).astype(np.float32)
    weight[0, :32] = 0
    return gguf.quantize(weight, gguf.GGMLQuantizationType[ggml_type])


@pytest.mark.parametrize("ggml_type", AFFINE_TYPES)
def test_gguf_affine_types_keep_their_values(ggml_type: str) -> None:
    raw = gguf_rows(ggml_type, 7, 288)
    packed = pack_gguf(torch.from_numpy(raw), ggml_type)
    expected = gguf.dequantize(raw, gguf.GGMLQuantizationType[ggml_type])
    np.testing.assert_array_equal(packed.dequantize().numpy(), expected)
    assert packed.shape == (7, 288)
    assert packed.format == gguf_format(ggml_type.lower())
    # Every fp16 scale is there with its bits, subnormals and signs included.
    d = raw.reshape(7, 9, -1)[..., :2].copy().view(np.uint16)[..., 0]
    np.testing.assert_array_equal(packed.part("scales").view(torch.uint16).numpy(), d)


@pytest.mark.parametrize("ggml_type", AFFINE_TYPES)
def test_gguf_rows_may_come_in_pieces(ggml_type: str) -> None:
    raw = torch.from_numpy(gguf_rows(ggml_type, 7, 64))
    whole = pack_gguf(raw, ggml_type)
    pieces = empty_packed(whole.format, whole.shape)
    pack_gguf_rows_into(pieces, 3, raw[3:], ggml_type)
    pack_gguf_rows_into(pieces, 0, raw[:3], ggml_type)
    assert torch.equal(pieces.buffer, whole.buffer)


@pytest.mark.parametrize("ggml_type", sorted(SUPER_BLOCK_BYTES))
def test_gguf_k_quants_are_taken_in_place(ggml_type: str) -> None:
    rng = np.random.default_rng(2)
    raw = rng.integers(0, 256, (3, 2 * SUPER_BLOCK_BYTES[ggml_type]), dtype=np.uint8)
    blocks = raw.reshape(3, 2, -1)
    for at in (208,) if ggml_type == "Q6_K" else (0, 2):
        blocks[..., at : at + 2] = rng.normal(size=(3, 2, 1)).astype(np.float16).view(np.uint8)
    source = torch.from_numpy(raw)
    packed = pack_gguf(source, ggml_type)
    assert packed.buffer.data_ptr() == source.data_ptr()
    expected = gguf.dequantize(raw, gguf.GGMLQuantizationType[ggml_type])
    np.testing.assert_array_equal(packed.dequantize().numpy(), expected)


def test_gguf_tensors_that_cannot_be_kept_are_refused() -> None:
    assert gguf_format("Q2_K") is None
    with pytest.raises(ValueError, match=r"tensor 'blk\.0': Q3_K has no packed form"):
        pack_gguf(torch.zeros(2, 110, dtype=torch.uint8), "Q3_K", name="blk.0")
    with pytest.raises(ValueError, match="whole Q4_0 blocks of 18"):
        pack_gguf(torch.zeros(2, 19, dtype=torch.uint8), "Q4_0")
    bad = torch.zeros(2, 18, dtype=torch.uint8)
    bad[1, 1] = 0x7C
    with pytest.raises(ValueError, match=r"tensor 'w': Q4_0 holds an infinite"):
        pack_gguf(bad, "Q4_0", name="w")


def pack_stream(codes: Tensor, bits: int) -> Tensor:
    """Codes (n, ...) -> int32 little-endian bit stream along dimension 0, bit by bit."""
    shifted = (codes[:, None] >> torch.arange(bits).view(-1, *[1] * (codes.dim() - 1))) & 1
    stream = shifted.flatten(0, 1)  # (n * bits, ...)
    words = stream.reshape(-1, 32, *codes.shape[1:]).to(torch.int64)
    powers = 2 ** torch.arange(32, dtype=torch.int64).view(-1, *[1] * (codes.dim() - 1))
    return (words * powers).sum(1).to(torch.int32) if codes.numel() else words.sum(1).to(torch.int32)


class Gptq:
    """A random GPTQ matrix and its values by the formula, element by element."""

    def __init__(
        self, bits: int, group_size: int, in_features: int, out_features: int, *, act_order: bool
    ) -> None:
        generator = torch.Generator().manual_seed(bits)
        groups = -(-in_features // group_size)
        codes = torch.randint(0, 2**bits, (in_features, out_features), generator=generator)
        zeros = torch.randint(0, 2**bits - 1, (groups, out_features), generator=generator)
        self.scales = (torch.rand(groups, out_features, generator=generator) * 0.01).half()
        self.g_idx = torch.arange(in_features, dtype=torch.int32) // group_size
        if act_order:
            self.g_idx = self.g_idx[torch.randperm(in_features, generator=generator)]
        self.qweight = pack_stream(codes, bits)
        self.qzeros = pack_stream(zeros.t(), bits).t()
        index = self.g_idx.long()
        self.values_v1 = (self.scales[index].float() * (codes - (zeros[index] + 1)).float()).t()
        self.values_v2 = (self.scales[index].float() * (codes - zeros[index]).float()).t()


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize(("bits", "group_size"), [(4, 128), (4, 32), (8, 64), (3, 128), (2, 64), (4, 256)])
def test_gptq_keeps_its_values(bits: int, group_size: int, act_order: bool) -> None:
    source = Gptq(bits, group_size, 512, 64, act_order=act_order)
    for offset, expected in ((1, source.values_v1), (0, source.values_v2)):
        packed = pack_gptq(
            source.qweight,
            source.qzeros,
            source.scales,
            source.g_idx,
            bits=bits,
            group_size=group_size,
            zero_offset=offset,
        )
        assert torch.equal(packed.dequantize(), expected)
        assert packed.format == gptq_format(bits, group_size, 512, act_order=act_order)
        assert (packed.permutation is not None) == act_order


def test_act_order_products_take_the_permutation_into_account() -> None:
    source = Gptq(4, 128, 512, 64, act_order=True)
    packed = pack_gptq(source.qweight, source.qzeros, source.scales, source.g_idx, bits=4, group_size=128)
    for n_tokens in (3, 300):
        x = torch.randn(n_tokens, 512, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(linear(x, packed), x @ source.values_v1.t(), rtol=1e-4, atol=1e-4)
    ids = torch.tensor([5, 0])
    assert torch.equal(packed.gather_rows(ids), source.values_v1[ids])


def test_gptq_with_whole_rows_and_odd_widths() -> None:
    source = Gptq(4, 200, 200, 32, act_order=False)
    packed = pack_gptq(source.qweight, source.qzeros, source.scales, bits=4, group_size=-1)
    assert torch.equal(packed.dequantize(), source.values_v1)
    assert packed.format.group == 128


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scales_of_other_types_are_kept_in_fp32(dtype: torch.dtype) -> None:
    source = Gptq(4, 64, 128, 32, act_order=False)
    scales = (source.scales.float() * 1.1).to(dtype)
    packed = pack_gptq(source.qweight, source.qzeros, scales, bits=4, group_size=64)
    assert packed.format.name == "int4-g64-zp-f32"
    expected = source.values_v1 / source.scales.float().repeat_interleave(64, 0).t()
    codes = expected.round()
    assert torch.equal(packed.dequantize(), codes * scales.float().repeat_interleave(64, 0).t())


def test_act_order_can_be_fixed_by_the_configuration() -> None:
    source = Gptq(4, 64, 128, 32, act_order=False)
    arguments = (source.qweight, source.qzeros, source.scales, source.g_idx)
    packed = pack_gptq(*arguments, bits=4, group_size=64, act_order=True)
    assert packed.format.permuted
    assert torch.equal(packed.dequantize(), source.values_v1)
    shuffled = Gptq(4, 64, 128, 32, act_order=True)
    with pytest.raises(ValueError, match="set desc_act"):
        pack_gptq(*arguments[:3], shuffled.g_idx, bits=4, group_size=64, act_order=False)


def test_awq_keeps_its_values() -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (256, 48), generator=generator)
    zeros = torch.randint(0, 16, (2, 48), generator=generator)
    scales = (torch.rand(2, 48, generator=generator) * 0.01).half()

    def pack_words(values: Tensor) -> Tensor:
        lanes = values.view(values.shape[0], -1, 8)[..., list(AWQ_ORDER)].to(torch.int64)
        return (lanes << (4 * torch.arange(8))).sum(-1).to(torch.int32)

    packed = pack_awq(pack_words(codes), pack_words(zeros), scales, group_size=128)
    index = torch.arange(256) // 128
    assert torch.equal(packed.dequantize(), (scales[index].float() * (codes - zeros[index]).float()).t())
    assert packed.format == gptq_format(4, 128, 256)


def test_damaged_gptq_tensors_are_refused() -> None:
    source = Gptq(4, 64, 128, 32, act_order=False)
    good: dict[str, Tensor] = {"qweight": source.qweight, "qzeros": source.qzeros, "scales": source.scales}
    with pytest.raises(ValueError, match=r"tensor 'q': .*scales"):
        pack_gptq(**(good | {"scales": source.scales[:1]}), bits=4, group_size=64, name="q")
    with pytest.raises(ValueError, match="infinite or NaN"):
        pack_gptq(**(good | {"scales": source.scales / 0}), bits=4, group_size=64)
    with pytest.raises(ValueError, match="does not name each group 64 times"):
        pack_gptq(**good, g_idx=torch.zeros(128, dtype=torch.int32), bits=4, group_size=64)
    with pytest.raises(ValueError, match="5-bit codes"):
        gptq_format(5, 64, 128)
    with pytest.raises(ValueError, match="groups of 48"):
        gptq_format(4, 48, 192)


def test_formats_are_known_from_the_header_alone() -> None:
    assert isinstance(gguf_format("Q4_K"), WeightFormat)
    assert gptq_format(4, 128, 4096).name == "int4-g128-zp"
    assert gptq_format(4, -1, 4096, act_order=True).name == "int4-g128-zp-perm"
