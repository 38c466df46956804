"""Dense attention against the plainest statement of it: windows, softcaps, alibi, grouped heads, memory bounds."""

from __future__ import annotations

import pytest
import torch
from model_helpers import attend_one

from offload import attention
from offload.attention import attend_dense, attend_segments, causal_mask
from offload.units import AttentionParams

N_HEADS, N_KV_HEADS, HEAD_DIM = 4, 2, 8
SLOPES = (0.5, 0.25, 0.125, 0.0625)
VARIANTS = {
    "plain": AttentionParams(scale=0.35),
    "window": AttentionParams(scale=0.35, window=5),
    "window-of-one": AttentionParams(scale=0.35, window=1),
    "softcap": AttentionParams(scale=0.35, softcap=0.8),
    "softcap-window": AttentionParams(scale=0.35, softcap=0.8, window=7),
    "alibi": AttentionParams(scale=0.35, alibi_slopes=SLOPES),
    "alibi-window": AttentionParams(scale=0.35, alibi_slopes=SLOPES, window=3),
}


def inputs(batch: int, n: int, total: int, n_kv_heads: int = N_KV_HEADS) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(n * total)
    return (
        torch.randn((batch, n, N_HEADS, HEAD_DIM), generator=generator),
        torch.randn((batch, total, n_kv_heads, HEAD_DIM), generator=generator),
        torch.randn((batch, total, n_kv_heads, HEAD_DIM), generator=generator),
    )


@pytest.mark.parametrize("params", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize(("n", "total"), [(1, 1), (9, 9), (1, 12), (5, 17)])
@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
def test_segments_equal_the_plain_form(params: AttentionParams, n: int, total: int, n_kv_heads: int) -> None:
    query, key, value = inputs(3, n, total, n_kv_heads)
    out = attend_segments(query, key, value, params)
    for b in range(3):
        torch.testing.assert_close(
            out[b], attend_one(query[b], key[b], value[b], params), atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize("params", VARIANTS.values(), ids=VARIANTS)
def test_one_query_per_sequence_ignores_padding(params: AttentionParams) -> None:
    lens = torch.tensor([1, 4, 13], dtype=torch.int32)
    query, key, value = inputs(3, 1, 13)
    padded_key, padded_value = (x.transpose(1, 2).clone() for x in (key, value))
    for b, n in enumerate(lens.tolist()):
        padded_key[b, :, n:] = 1e4
        padded_value[b, :, n:] = 1e4
    out = attend_dense(query[:, 0], padded_key, padded_value, lens, params)
    for b, n in enumerate(lens.tolist()):
        expected = attend_one(query[b], key[b, :n], value[b, :n], params)[0]
        torch.testing.assert_close(out[b], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["softcap-window", "alibi"])
def test_blocks_of_queries_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = inputs(2, 11, 19)
    whole = attend_segments(query, key, value, VARIANTS[name])
    monkeypatch.setattr(attention, "_MAX_SCORES", 2 * N_HEADS * 19 * 3)  # three queries at a time
    torch.testing.assert_close(attend_segments(query, key, value, VARIANTS[name]), whole)


def test_the_mask_counts_the_querys_own_position_in_the_window() -> None:
    mask = causal_mask(2, 5, 2, torch.device("cpu"))
    assert mask.tolist() == [[False, False, True, True, False], [False, False, False, True, True]]


@pytest.mark.parametrize("params", [VARIANTS["plain"], VARIANTS["alibi"]])
def test_bf16_keeps_its_type_and_stays_close(params: AttentionParams) -> None:
    query, key, value = (x.bfloat16() for x in inputs(1, 6, 10))
    out = attend_segments(query, key, value, params)
    assert out.dtype == torch.bfloat16
    expected = attend_one(query[0].float(), key[0].float(), value[0].float(), params)
    torch.testing.assert_close(out[0].float(), expected, atol=3e-2, rtol=3e-2)
