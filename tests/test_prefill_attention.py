"""Prompt attention by AMX against attention in fp64, and against itself: what must not change a result, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quant.kernel_choice import has_amx
from quant.kernels_attention import AttentionParams
from quant.prefill_attention import (
    Pages,
    PrefillSegment,
    can_prefill,
    plan_prefill,
    prefill_attention,
)

pytestmark = pytest.mark.skipif(not has_amx(), reason="this CPU has no AMX")

SLOPES = (0.5, 0.25, 0.125, 0.0625, 0.03, 0.02)
VARIANTS = {
    "plain": AttentionParams(scale=0.15),
    "window": AttentionParams(scale=0.15, window=70),
    "window-of-one": AttentionParams(scale=0.15, window=1),
    "softcap": AttentionParams(scale=0.9, softcap=2.0),
    "alibi": AttentionParams(scale=0.15, alibi_slopes=SLOPES),
    "all": AttentionParams(scale=0.9, softcap=2.0, alibi_slopes=SLOPES, window=33),
    "negative-scale": AttentionParams(scale=-0.15),
}
# Tokens and keys of segments: one token, parts of blocks, whole ones, several, and long pasts.
SEGMENTS = [[(1, 1)], [(5, 5), (1, 40), (64, 64)], [(33, 100), (200, 200)], [(70, 500)]]


def bf16(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def segments_of(sizes: list[tuple[int, int]]) -> list[PrefillSegment]:
    """One after the other, in queries and in keys."""
    made, query, key = [], 0, 0
    for n, n_keys in sizes:
        made.append(PrefillSegment(query, n, key, n_keys))
        query, key = query + n, key + n_keys
    return made


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: list[PrefillSegment],
    params: AttentionParams,
    out: Tensor | None = None,
    *,
    most_bytes: int = 1 << 26,
    n_threads: int | None = None,
    pages: Pages | None = None,
    page_tokens: int = 0,
) -> Tensor:
    plan = plan_prefill(
        segments,
        n_heads=query.shape[1],
        n_kv_heads=key.shape[1],
        head_dim=key.shape[2],
        window=params.window,
        page_tokens=page_tokens,
        n_threads=n_threads,
        most_bytes=most_bytes,
    )
    out = torch.full(query.shape, 7.0).bfloat16() if out is None else out
    return prefill_attention(query, key, value, params, plan, out, pages)


def exactly(query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> tuple[Tensor, Tensor]:
    """The last n of the keys' positions in fp64, and how large the terms of each sum are."""
    n, length = len(query), len(key)
    group = query.shape[1] // key.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), k) * params.scale
    if params.softcap:
        scores = params.softcap * torch.tanh(scores / params.softcap)
    behind = torch.arange(length - n, length)[:, None] - torch.arange(length)
    if params.alibi_slopes is not None:
        slopes = torch.tensor(params.alibi_slopes[: query.shape[1]], dtype=torch.float64)
        scores = scores - slopes[:, None, None] * behind
    hidden = (behind < 0) | (behind >= (params.window or length + 1))
    weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v), torch.einsum("hqk,khd->qhd", weights, v.abs())


@pytest.mark.parametrize("params", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("sizes", SEGMENTS)
@pytest.mark.parametrize(("n_heads", "n_kv_heads", "head_dim"), [(6, 2, 64), (6, 6, 32), (6, 1, 128)])
def test_segments_equal_exact_attention(
    params: AttentionParams, sizes: list[tuple[int, int]], n_heads: int, n_kv_heads: int, head_dim: int
) -> None:
    segments = segments_of(sizes)
    query = bf16(sum(s.n for s in segments), n_heads, head_dim, seed=1)
    key, value = (bf16(sum(s.n_keys for s in segments), n_kv_heads, head_dim, seed=s) for s in (2, 3))
    assert can_prefill(query, key, value)
    found = attend(query, key, value, segments, params)
    for s in segments:
        here, keys = slice(s.first, s.first + s.n), slice(s.first_key, s.first_key + s.n_keys)
        wanted, size = exactly(query[here], key[keys], value[keys], params)
        error = (found[here].double() - wanted).abs()
        # Probabilities are rounded to bf16, and the result.
        assert bool((error <= 2**-8 * (wanted.abs() + size) + 1e-5).all()), float(error.max())


@pytest.mark.parametrize("name", ["plain", "all"])
def test_a_segment_does_not_depend_on_the_others_nor_on_what_lies_around(name: str) -> None:
    params, segments = VARIANTS[name], segments_of([(50, 50), (256, 256), (3, 80), (100, 300)])
    # Parts of a stacked projection, between numbers that nobody may read.
    wide = torch.full((700, 6 + 2 + 2, 64), float("nan")).bfloat16()
    query, key, value = wide.split((6, 2, 2), dim=1)
    for s in segments:
        query[s.first : s.first + s.n] = bf16(s.n, 6, 64, seed=s.n)
        for i, x in enumerate((key, value)):
            x[s.first_key : s.first_key + s.n_keys] = bf16(s.n_keys, 2, 64, seed=i)
    together = attend(query, key, value, segments, params)
    assert bool((together[segments[-1].first + segments[-1].n :] == 7).all())
    for s in segments:
        here = slice(s.first, s.first + s.n)
        alone = attend(query, key, value, [s], params, n_threads=1)
        assert bool(alone[here].isfinite().all()) and torch.equal(alone[here], together[here])
        assert bool((alone[: s.first] == 7).all()) and bool((alone[s.first + s.n :] == 7).all())
    assert torch.equal(attend(query, key, value, segments, params, most_bytes=1), together)
    for n_threads in (1, 3, 8):
        assert torch.equal(attend(query, key, value, segments, params, n_threads=n_threads), together)
    ordered = query.transpose(0, 1).contiguous().transpose(0, 1)  # heads far apart
    assert torch.equal(attend(ordered, key, value, segments, params), together)


@pytest.mark.parametrize("name", ["plain", "window", "all"])
def test_a_token_does_not_depend_on_those_after_it(name: str) -> None:
    """Prompts are cut at fixed positions, so a longer prompt's tokens are lanes of the same blocks."""
    query, key, value = (bf16(256, heads, 64, seed=heads) for heads in (6, 2, 3))
    value = value[:, :2]
    whole = attend(query, key, value, segments_of([(256, 256)]), VARIANTS[name])
    for n in (1, 31, 64, 200):
        part = attend(query[:n], key[:n], value[:n], segments_of([(n, n)]), VARIANTS[name])
        assert torch.equal(part, whole[:n])


@pytest.mark.parametrize("name", ["plain", "window", "all"])
def test_pages_are_read_where_they_lie(name: str) -> None:
    params, n_pages, page_tokens, n_kv_heads, head_dim = VARIANTS[name], 5, 32, 2, 64
    past = n_pages * page_tokens
    key, value = (bf16(past + 40, n_kv_heads, head_dim, seed=s) for s in (1, 2))
    query = bf16(40, 6, head_dim, seed=3)
    wanted = attend(query, key, value, [PrefillSegment(0, 40, 0, past + 40)], params)
    pages = torch.stack((key[:past], value[:past])).view(2, n_pages, page_tokens, n_kv_heads, head_dim)
    # (K or V, page, token, head, dim) -> (page, K or V, head, token, dim), in another order, one number off 64 bytes
    order = [3, 0, 4, 1, 2]
    for skip in (0, 1):
        flat = torch.empty(2 * past * n_kv_heads * head_dim + 64).bfloat16()
        begin = (-flat.data_ptr() % 64) // 2 + skip
        arena = flat[begin : begin + pages.numel()].view(n_pages, 2, n_kv_heads, page_tokens, head_dim)
        arena[order] = pages.permute(1, 0, 3, 2, 4)
        addresses = torch.tensor([arena[slot].data_ptr() for slot in order]).numpy()
        found = attend(
            query,
            key[past:],
            value[past:],
            [PrefillSegment(0, 40, 0, 40, n_pages)],
            params,
            pages=Pages(addresses, arena[0, 0].numel() * 2),
            page_tokens=page_tokens,
        )
        assert torch.equal(found, wanted)


def test_large_and_strange_scores() -> None:
    """Maxima far apart from block to block; infinities and NaN reach those who see them, and no others."""
    query, key, value = bf16(200, 2, 64, seed=1), bf16(200, 1, 64, seed=2), bf16(200, 1, 64, seed=3)
    key[150] *= 300
    key[20] *= -300
    params = AttentionParams(scale=1.0)
    wanted, size = exactly(query, key, value, params)
    found = attend(query, key, value, segments_of([(200, 200)]), params).double()
    assert bool(((found - wanted).abs() <= 2**-7 * (wanted.abs() + size) + 1e-3).all())
    value[100] = float("nan")
    key[120] = float("inf")
    spoilt = attend(query, key, value, segments_of([(200, 200)]), params)
    assert bool(spoilt[:64].isfinite().all()) and torch.equal(spoilt[:64].double(), found[:64])
    assert bool(spoilt[120:].isnan().all())


def test_what_does_not_fit_is_refused() -> None:
    query, key = bf16(10, 4, 64), bf16(10, 2, 64)
    params = AttentionParams(scale=1.0)
    segments = segments_of([(10, 10)])
    heads = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 64}
    plan = plan_prefill(segments, **heads)
    out = torch.zeros_like(query)
    with pytest.raises(ValueError, match="the plan needs 10 queries"):
        prefill_attention(query[:9], key, key, params, plan, out[:9])
    with pytest.raises(ValueError, match="10 keys"):
        prefill_attention(query, key, key[:9], params, plan, out)
    with pytest.raises(ValueError, match="4 query and 2 KV heads of 64"):
        prefill_attention(query, bf16(10, 4, 64), bf16(10, 4, 64), params, plan, out)
    with pytest.raises(ValueError, match="must be bf16"):
        prefill_attention(query, key.float(), key, params, plan, out)
    with pytest.raises(ValueError, match="side by side"):
        prefill_attention(query, key, key, params, plan, out.transpose(0, 1).contiguous().transpose(0, 1))
    with pytest.raises(ValueError, match="a window of 0"):
        prefill_attention(query, key, key, AttentionParams(scale=1.0, window=3), plan, out)
    with pytest.raises(ValueError, match="alibi_slopes has 1"):
        prefill_attention(query, key, key, AttentionParams(scale=1.0, alibi_slopes=(1.0,)), plan, out)
    stored = plan_prefill([PrefillSegment(0, 10, 0, 10, 2)], **heads, page_tokens=32)
    with pytest.raises(ValueError, match="2 pages, got"):
        prefill_attention(query, key, key, params, stored, out)
    for wrong in ([PrefillSegment(0, 0, 0, 0)], [PrefillSegment(0, 5, 0, 4)], [PrefillSegment(-1, 5, 0, 5)]):
        with pytest.raises(ValueError, match="no queries, or fewer keys"):
            plan_prefill(wrong, **heads)
    with pytest.raises(ValueError, match="multiple of 32"):
        plan_prefill([PrefillSegment(0, 5, 0, 5, 1)], **heads, page_tokens=16)
    with pytest.raises(ValueError, match="more than"):
        plan_prefill([PrefillSegment(0, 5, 0, 1 << 25)], **heads)
    with pytest.raises(ValueError, match="multiple of 32"):
        plan_prefill(segments, n_heads=4, n_kv_heads=2, head_dim=40)
    assert not can_prefill(bf16(1, 4, 40), bf16(1, 2, 40), bf16(1, 2, 40))
    empty = plan_prefill([], **heads)
    assert prefill_attention(query, key, key, params, empty, out) is out and not bool(out.any())
