"""Tiny quantised checkpoints, written by the plainest reading of their formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

SIMPLE_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
# Where the fp16 numbers of a super-block lie; all other bytes may be anything.
K_HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}

# Standard deviation of values in units of a super-block's scale, where all other bytes are random.
K_STEPS = {"Q4_K": 350, "Q5_K": 700, "Q6_K": 1350}

LLAMA: dict[str, Any] = {
    "block_count": 2,
    "embedding_length": 256,
    "feed_forward_length": 512,
    "attention.head_count": 8,
    "attention.head_count_kv": 4,
    "context_length": 64,
    "rope.freq_base": 10_000.0,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
LLAMA_SHAPES = {
    "attn_q": (256, 256),
    "attn_k": (128, 256),
    "attn_v": (128, 256),
    "attn_output": (256, 256),
    "ffn_gate": (512, 256),
    "ffn_up": (512, 256),
    "ffn_down": (256, 512),
}
VOCAB = 70


def quantized_blocks(
    kind: str, shape: tuple[int, int], rng: np.random.Generator, spread: float | None = None
) -> np.ndarray:
    """uint8 (rows, bytes per row) of finite values. spread: about their standard deviation."""
    if kind in SIMPLE_TYPES:
        values = rng.standard_normal(shape).astype(np.float32) * np.float32(spread or 1.0)
        return gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    blocks = rng.integers(0, 256, (shape[0] * shape[1] // 256, block_bytes), dtype=np.uint8)
    for begin in K_HALVES[kind]:
        scales = rng.standard_normal(len(blocks))
        scales = (scales if spread is None else scales * spread / K_STEPS[kind]).astype(np.float16)
        blocks[:, begin : begin + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(shape[0], -1)


def write_llama_gguf(
    path: Path,
    kinds: dict[str, str],
    *,
    table: str = "Q8_0",
    tied: bool = True,
    spread: float | None = None,
) -> dict[str, torch.Tensor]:
    """A GGUF llama with matrices of these types (stem -> type, "" for all others); returns the values.

    A stem may name its layer: "0.attn_v". spread: about the standard deviation of quantised values.
    """
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in LLAMA.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"llama.{key}", value)
    writer.add_array("tokenizer.ggml.tokens", [f"t{i}" for i in range(VOCAB)])
    values: dict[str, torch.Tensor] = {}

    def add_matrix(name: str, shape: tuple[int, int], kind: str) -> None:
        if kind in ("F32", "F16"):
            array = rng.standard_normal(shape).astype(np.float32 if kind == "F32" else np.float16)
            values[name] = torch.from_numpy(array)
            writer.add_tensor(name, array)
            return
        blocks = quantized_blocks(kind, shape, rng, spread)
        quant_type = gguf.GGMLQuantizationType[kind]
        values[name] = torch.from_numpy(gguf.quants.dequantize(blocks, quant_type).copy())
        writer.add_tensor(name, blocks, raw_dtype=quant_type)

    def add_norm(name: str) -> None:
        array = rng.standard_normal(256).astype(np.float32)
        values[name] = torch.from_numpy(array)
        writer.add_tensor(name, array)

    add_matrix("token_embd.weight", (VOCAB, 256), table)
    for layer in range(2):
        for stem, shape in LLAMA_SHAPES.items():
            kind = kinds.get(f"{layer}.{stem}", kinds.get(stem, kinds[""]))
            add_matrix(f"blk.{layer}.{stem}.weight", shape, kind)
        add_norm(f"blk.{layer}.attn_norm.weight")
        add_norm(f"blk.{layer}.ffn_norm.weight")
    add_norm("output_norm.weight")
    if not tied:
        add_matrix("output.weight", (VOCAB, 256), "Q6_K")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def _stream(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes (n, m) -> int32 (n * bits / 32, m): bit i * bits + b of a column's stream is bit b of code i."""
    flat = torch.stack([(codes.long() >> b) & 1 for b in range(bits)], dim=1).flatten(0, 1)  # (n * bits, m)
    words = flat.view(-1, 32, codes.shape[1])
    total = sum(words[:, b] << b for b in range(32))
    return torch.as_tensor(total).to(torch.int32)


def gptq_layer(
    out_features: int, in_features: int, *, bits: int, group: int, seed: int, order_seed: int | None = None
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Stored tensors by suffix and the values (out, in). order_seed: shuffles columns among groups."""
    generator = torch.Generator().manual_seed(seed)
    n_groups = in_features // group
    codes = torch.randint(0, 1 << bits, (in_features, out_features), generator=generator)
    zeros = torch.randint(0, (1 << bits) - 1, (n_groups, out_features), generator=generator)
    scales = (torch.rand((n_groups, out_features), generator=generator) + 0.5).half()
    g_idx = torch.arange(in_features) // group
    if order_seed is not None:
        g_idx = g_idx[torch.randperm(in_features, generator=torch.Generator().manual_seed(order_seed))]
    values = scales[g_idx].float() * (codes - (zeros[g_idx] + 1)).float()
    stored = {
        "qweight": _stream(codes, bits),
        "qzeros": _stream(zeros.t().contiguous(), bits).t().contiguous(),
        "scales": scales,
        "g_idx": g_idx.to(torch.int32),
    }
    return stored, values.t().contiguous()


def awq_layer(
    out_features: int, in_features: int, *, group: int, seed: int
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Stored tensors by suffix and the values (out, in)."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (in_features, out_features), generator=generator)
    zeros = torch.randint(0, 16, (in_features // group, out_features), generator=generator)
    scales = (torch.rand(zeros.shape, generator=generator) + 0.5).half()

    def packed(numbers: torch.Tensor) -> torch.Tensor:
        eights = numbers.view(numbers.shape[0], -1, 8)
        return sum(eights[..., c] << (4 * k) for k, c in enumerate((0, 2, 4, 6, 1, 3, 5, 7))).to(torch.int32)

    index = torch.arange(in_features) // group
    values = scales[index].float() * (codes - zeros[index]).float()
    return {"qweight": packed(codes), "qzeros": packed(zeros), "scales": scales}, values.t().contiguous()
