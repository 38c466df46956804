"""Decode attention that reads pages in place, against plain fp64 attention over the decoded values."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_helpers import ragged_batch
from torch import Tensor

from quant.kernel_choice import has_amx
from quant.kernels_attention import (
    AttentionParams,
    _suits_tiles,
    attend_gathered,
    decode_attention,
    packed_is_faster,
    plan_decode,
)
from quant.kv import gather_pages
from quant.kv_formats import CACHE_FORMAT_NAMES, parse_cache_format

# Each page format with one tail dtype: a kernel is compiled per pair.
TAIL_DTYPES = {
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "int8": torch.float32,
    "int4": torch.float32,
    "int2": torch.float32,
}


def plain_attention(q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
    """q (n_heads, head_dim), k and v (n_kv_heads, length, head_dim), the query at the last position; fp64."""
    n_heads, length = q.shape[0], k.shape[1]
    out = torch.zeros(n_heads, q.shape[1], dtype=torch.float64)
    for head in range(n_heads):
        kv_head = head * k.shape[0] // n_heads
        first = max(0, length - params.window) if params.window else 0
        scores = (k[kv_head, first:].double() @ q[head].double()) * params.scale
        if params.softcap:
            scores = params.softcap * torch.tanh(scores / params.softcap)
        if params.alibi_slopes is not None:
            scores += params.alibi_slopes[head] * torch.arange(first - length + 1, 1)
        if length:
            out[head] = torch.softmax(scores, dim=0) @ v[kv_head, first:].double()
    return out


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(CACHE_FORMAT_NAMES),
    lengths=st.lists(st.sampled_from([0, 1, 2, 15, 16, 17, 32, 33, 50, 96]), min_size=1, max_size=5),
    page_tokens=st.sampled_from([16, 17, 30]),
    n_kv_heads=st.integers(1, 3),
    group=st.integers(1, 5),
    head_dim=st.sampled_from([6, 8, 20, 21, 64, 80]),
    softcap=st.sampled_from([0.0, 3.0]),
    window=st.sampled_from([0, 0, 1, 7, 16, 40]),
    alibi=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_equals_plain_attention(
    name: str,
    lengths: list[int],
    page_tokens: int,
    n_kv_heads: int,
    group: int,
    head_dim: int,
    softcap: float,
    window: int,
    alibi: bool,
    seed: int,
) -> None:
    batch, expected = ragged_batch(
        name,
        lengths,
        page_tokens=page_tokens,
        head_dim=head_dim,
        tail_dtype=TAIL_DTYPES[name],
        n_kv_heads=n_kv_heads,
    )
    n_heads = n_kv_heads * group
    q = 2 * torch.randn(len(lengths), n_heads, head_dim, generator=torch.Generator().manual_seed(seed))
    params = AttentionParams(
        scale=1 / math.sqrt(head_dim),
        softcap=softcap,
        window=window,
        alibi_slopes=tuple(0.5 ** (head + 1) for head in range(n_heads)) if alibi else None,
    )
    out = decode_attention(q, batch, params)
    gathered = attend_gathered(q, *gather_pages(batch), batch.seq_lens, params)
    for i, (k, v) in enumerate(expected):
        reference = plain_attention(q[i], k, v, params)
        torch.testing.assert_close(out[i].double(), reference, rtol=1e-5, atol=1e-5)
        if lengths[i]:
            torch.testing.assert_close(gathered[i].double(), reference, rtol=1e-5, atol=1e-5)


def test_scores_far_apart_and_large_stay_exact() -> None:
    batch, expected = ragged_batch("f32", [80], page_tokens=16, head_dim=64, tail_dtype=torch.float32)
    q = 300 * torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(0))
    for scale in (1.0, -1.0, 1e-6):
        params = AttentionParams(scale=scale)
        reference = plain_attention(q[0], *expected[0], params)
        out = decode_attention(q, batch, params)[0]
        torch.testing.assert_close(out.double(), reference, rtol=2e-3, atol=2e-3)
    capped = AttentionParams(scale=1.0, softcap=50.0)
    reference = plain_attention(q[0], *expected[0], capped)
    torch.testing.assert_close(
        decode_attention(q, batch, capped)[0].double(), reference, rtol=1e-4, atol=1e-4
    )


def test_result_does_not_depend_on_threads_or_neighbours() -> None:
    lengths = [1, 700, 16, 33]
    batch, _ = ragged_batch("f32", lengths, page_tokens=16, head_dim=64, tail_dtype=torch.float32)
    params = AttentionParams(scale=0.125)
    q = torch.randn(4, 6, 64, generator=torch.Generator().manual_seed(3))
    out = decode_attention(q, batch, params)
    alone = replace(
        batch,
        page_slots=batch.page_slots[1:2],
        page_arenas=batch.page_arenas[1:2],
        seq_lens=batch.seq_lens[1:2],
        tail_lens=batch.tail_lens[1:2],
        tail_slots=batch.tail_slots[1:2],
    )
    torch.testing.assert_close(decode_attention(q[1:2], alone, params), out[1:2], rtol=1e-5, atol=1e-6)
    many = plan_decode(batch.seq_lens, batch.tail_lens, page_tokens=16, n_kv_heads=2, n_threads=7)
    torch.testing.assert_close(decode_attention(q, batch, params, plan=many), out, rtol=1e-5, atol=1e-6)


def test_several_query_tokens_are_rows_that_grow() -> None:
    batch, expected = ragged_batch("int4", [41, 41], page_tokens=16, head_dim=20, tail_dtype=torch.float32)
    shorter = replace(
        batch,
        page_slots=batch.page_slots[[0, 0]],
        page_arenas=batch.page_arenas[[0, 0]],
        tail_slots=batch.tail_slots[[0, 0]],
        seq_lens=batch.seq_lens - torch.tensor([1, 0], dtype=torch.int32),
        tail_lens=batch.tail_lens - torch.tensor([1, 0], dtype=torch.int32),
    )
    q = torch.randn(2, 4, 20, generator=torch.Generator().manual_seed(5))
    params = AttentionParams(scale=0.2)
    out = decode_attention(q, shorter, params)
    k, v = expected[0]
    for row, length in enumerate((40, 41)):
        reference = plain_attention(q[row], k[:, :length], v[:, :length], params)
        torch.testing.assert_close(out[row].double(), reference, rtol=1e-5, atol=1e-5)


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 3000), min_size=1, max_size=20),
    n_kv_heads=st.integers(1, 4),
    n_threads=st.integers(1, 5),
    window=st.sampled_from([0, 1, 100, 1000]),
)
def test_plan_covers_every_visible_token_once_in_even_shares(
    lengths: list[int], n_kv_heads: int, n_threads: int, window: int
) -> None:
    page_tokens = 16
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    tail_lens = torch.where(seq_lens > 0, (seq_lens - 1) % page_tokens + 1, 0).to(torch.int32)
    plan = plan_decode(
        seq_lens,
        tail_lens,
        page_tokens=page_tokens,
        n_kv_heads=n_kv_heads,
        window=window,
        n_threads=n_threads,
    )
    assert plan.share_bounds[0] == 0
    assert plan.share_bounds[-1] == len(plan.segments)
    covered = np.zeros((len(lengths), n_kv_heads, 3100), dtype=np.int64)
    cost = []
    for index, (sequence, head, first, end) in enumerate(plan.segments):
        position = sequence * n_kv_heads + head
        assert plan.head_bounds[position] <= index < plan.head_bounds[position + 1]
        stop = lengths[sequence] if first == end else end * page_tokens
        covered[sequence, head, first * page_tokens : stop] += 1
        cost.append(stop - first * page_tokens)
    for sequence, length in enumerate(lengths):
        visible_from = max(0, length - window) if window else 0
        assert (covered[sequence, :, visible_from:length] == 1).all()
        assert (covered[sequence, :, length:] == 0).all()
        assert (covered[sequence, :, : max(0, visible_from - page_tokens)] == 0).all()
    shares = [sum(cost[a:b]) for a, b in zip(plan.share_bounds, plan.share_bounds[1:], strict=False)]
    if cost:
        assert max(shares) <= sum(cost) / n_threads + max(cost)


def test_arguments_that_do_not_fit_are_refused() -> None:
    batch, _ = ragged_batch("f32", [20, 5], page_tokens=16, head_dim=8, tail_dtype=torch.float32)
    q = torch.zeros(2, 4, 8)
    params = AttentionParams(scale=1.0)
    with pytest.raises(ValueError, match="q must be"):
        decode_attention(q[:, :, :7], batch, params)
    with pytest.raises(ValueError, match="multiple of n_kv_heads=2"):
        decode_attention(q[:, :3], batch, params)
    with pytest.raises(ValueError, match="alibi_slopes has 3 entries for 4"):
        decode_attention(q, batch, AttentionParams(scale=1.0, alibi_slopes=(1.0, 1.0, 1.0)))
    with pytest.raises(ValueError, match="out must be"):
        decode_attention(q, batch, params, out=torch.empty(2, 4, 7))
    plan = plan_decode(batch.seq_lens, batch.tail_lens, page_tokens=16, n_kv_heads=2, window=9)
    with pytest.raises(ValueError, match="decode plan"):
        decode_attention(q, batch, params, plan=plan)
    for bad in ({"softcap": -1.0}, {"window": -1}, {"scale": float("nan")}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            AttentionParams(**({"scale": 1.0} | bad))


def test_faster_path_is_known_for_every_format() -> None:
    for name in CACHE_FORMAT_NAMES:
        fmt = parse_cache_format(name)
        assert packed_is_faster(fmt, 1)
        answers = [packed_is_faster(fmt, heads) for heads in range(1, 65)]
        assert answers == sorted(answers, reverse=True), (
            "more heads per KV head never favour reading in place"
        )


@pytest.mark.skipif(not has_amx(), reason="this CPU has no AMX")
@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 2, 31, 32, 33, 64, 65, 96, 150, 700]), min_size=1, max_size=5),
    page_tokens=st.sampled_from([32, 64, 96]),
    n_kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 8, 16, 17, 33]),
    head_dim=st.sampled_from([32, 64, 96, 128]),
    softcap=st.sampled_from([0.0, 3.0]),
    window=st.sampled_from([0, 0, 1, 7, 32, 40, 100]),
    alibi=st.booleans(),
    n_threads=st.sampled_from([1, 2, 5]),
)
def test_by_tiles_equals_plain_attention(
    lengths: list[int],
    page_tokens: int,
    n_kv_heads: int,
    group: int,
    head_dim: int,
    softcap: float,
    window: int,
    alibi: bool,
    n_threads: int,
) -> None:
    """bf16 pages and queries: only the probabilities are rounded besides. Tails end in NaN."""
    batch, expected = ragged_batch(
        "bf16",
        lengths,
        page_tokens=page_tokens,
        head_dim=head_dim,
        tail_dtype=torch.bfloat16,
        n_kv_heads=n_kv_heads,
    )
    generator = torch.Generator().manual_seed(group)
    q = torch.randn(len(lengths), n_kv_heads * group, head_dim, generator=generator).bfloat16()
    slopes = tuple((0.05 * torch.rand(n_kv_heads * group, generator=generator)).tolist()) if alibi else None
    params = AttentionParams(scale=head_dim**-0.5, softcap=softcap, window=window, alibi_slopes=slopes)
    assert _suits_tiles(q, batch)
    plan = plan_decode(
        batch.seq_lens,
        batch.tail_lens,
        page_tokens=page_tokens,
        n_kv_heads=n_kv_heads,
        window=window,
        n_threads=n_threads,
    )
    found = decode_attention(q, batch, params, plan=plan)
    for i, (k, v) in enumerate(expected):
        wanted = plain_attention(q[i], k, v, params)
        torch.testing.assert_close(found[i].double(), wanted, atol=0.02, rtol=0.01)


@pytest.mark.skipif(not has_amx(), reason="this CPU has no AMX")
def test_by_tiles_a_sequence_does_not_depend_on_the_others() -> None:
    lengths = [5, 64, 100, 33, 200]
    batch, _ = ragged_batch("bf16", lengths, page_tokens=32, head_dim=64, tail_dtype=torch.bfloat16)
    q = torch.randn(5, 8, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    params = AttentionParams(scale=0.125)
    together = decode_attention(q, batch, params)
    for i in range(5):
        alone = decode_attention(q[i : i + 1], batch.rows(slice(i, i + 1)), params)
        assert torch.equal(alone[0], together[i])
