"""Rotary position encoding: frequencies as the published formulas have them, tables, and the rotation.

Frequencies that depend on length (dynamic, longrope) follow the length of each token's own sequence, so
that a prompt is encoded alike whatever shares its batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch

from flexrun.model.schema import RopeConfig
from quant import pointwise


def _exponents(rope: RopeConfig) -> torch.Tensor:
    return torch.arange(0, rope.dim, 2, dtype=torch.int64).float() / rope.dim  # (dim / 2,)


@lru_cache(maxsize=64)
def inverse_frequencies(rope: RopeConfig, *, long: bool = False) -> torch.Tensor:
    """Radians per position of each pair of entries, (dim / 2,) fp32 on the CPU.

    long: of a sequence longer than the original context (matters for longrope only). For dynamic scaling
    these are the frequencies within the original context.
    """
    powers = rope.base ** _exponents(rope)
    if rope.kind == "longrope":
        return 1.0 / (_tensor(rope.long_factors if long else rope.short_factors) * powers)
    if rope.kind == "factors":
        return 1.0 / powers / _tensor(rope.short_factors)
    if rope.kind == "linear":
        return 1.0 / powers / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, 1.0 / powers)
    if rope.kind == "yarn":
        return _yarn(rope, powers)
    return 1.0 / powers


def _tensor(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def _llama3(rope: RopeConfig, inverse: torch.Tensor) -> torch.Tensor:
    """Llama 3.1: long wavelengths are slowed by `factor`, short ones kept, those between are blended."""
    wavelengths = 2 * math.pi / inverse
    longest = rope.original_max_positions / rope.low_freq_factor
    shortest = rope.original_max_positions / rope.high_freq_factor
    span = rope.high_freq_factor - rope.low_freq_factor
    share = (rope.original_max_positions / wavelengths - rope.low_freq_factor) / span
    blended = (1 - share) * inverse / rope.factor + share * inverse
    slowed = torch.where(wavelengths > longest, inverse / rope.factor, blended)
    return torch.where(wavelengths < shortest, inverse, slowed)


def _yarn(rope: RopeConfig, powers: torch.Tensor) -> torch.Tensor:
    """YaRN (Peng et al. 2023): interpolate pairs that turn seldom, keep those that turn often."""

    def pair_that_turns(times: float) -> float:
        turns = rope.original_max_positions / (times * 2 * math.pi)
        return rope.dim * math.log(turns) / (2 * math.log(rope.base))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp
    pairs = torch.arange(rope.dim // 2, dtype=torch.float32)
    kept = 1 - torch.clamp((pairs - low) / (high - low), 0, 1)
    return (1.0 / (rope.factor * powers)) * (1 - kept) + (1.0 / powers) * kept


def rope_tables(
    rope: RopeConfig, positions: torch.Tensor, rope_lens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin for tokens, each (tokens, 1, dim / 2) fp32, times the attention factor.

    positions, rope_lens: (tokens,) int64, the token's position in its sequence and that sequence's length.
    """
    device = positions.device
    inverse = inverse_frequencies(rope).to(device)  # (dim / 2,)
    if rope.kind == "longrope":
        is_long = (rope_lens > rope.original_max_positions)[:, None]
        inverse = torch.where(is_long, inverse_frequencies(rope, long=True).to(device), inverse)
    elif rope.kind == "dynamic":
        inverse = _dynamic(rope, rope_lens, inverse)
    angles = positions[:, None].float() * inverse  # (tokens, dim / 2)
    cos, sin = angles.cos(), angles.sin()
    if rope.attention_factor != 1.0:
        cos, sin = cos * rope.attention_factor, sin * rope.attention_factor
    return cos[:, None], sin[:, None]


def _dynamic(rope: RopeConfig, rope_lens: torch.Tensor, within: torch.Tensor) -> torch.Tensor:
    """NTK-aware scaling: beyond the original context the base grows with the sequence. (tokens, dim / 2)."""
    growth = rope.factor * rope_lens / rope.original_max_positions - (rope.factor - 1)
    bases = rope.base * growth.clamp(min=1.0) ** (rope.dim / (rope.dim - 2))  # (tokens,)
    beyond = 1.0 / bases[:, None] ** _exponents(rope).to(rope_lens.device)
    return torch.where((rope_lens > rope.original_max_positions)[:, None], beyond, within)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + dim / 2) of the first `dim` entries of each head; the rest is passed through.

    x (tokens, heads, head_dim); cos, sin (tokens, 1, dim / 2) fp32. Computed in fp32, returned contiguous
    in x's type.
    """
    if pointwise.fits(x):
        return pointwise.rotate(x, cos, sin)
    half = cos.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    out[..., :half] = torch.addcmul(first * cos, second, sin, value=-1)
    out[..., half : 2 * half] = torch.addcmul(second * cos, first, sin)
    if 2 * half < x.shape[-1]:
        out[..., 2 * half :] = x[..., 2 * half :]
    return out
