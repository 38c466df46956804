"""Workloads as JSON and in words, and lengths counted in bounded memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.workload import LengthCounts, Workload

PAIRS = st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 900)), min_size=1, max_size=200)


@given(PAIRS)
def test_counted_lengths_keep_their_totals_in_bounded_memory(pairs) -> None:
    counts = LengthCounts(max_pairs=8)
    for prompt_len, gen_len in pairs:
        counts.add(prompt_len, gen_len)
    workload = counts.workload()
    assert workload is not None and workload.num_requests == len(counts) == len(pairs)
    assert len(workload.lengths) <= 8
    lengths = workload.lengths or ((workload.prompt_len, workload.gen_len, len(pairs)),)
    assert sum(n for _, _, n in lengths) == len(pairs)
    assert sum(p * n for p, _, n in lengths) == pytest.approx(sum(p for p, _ in pairs), abs=len(pairs))
    assert sum(g * n for _, g, n in lengths) == pytest.approx(sum(g for _, g in pairs), abs=len(pairs))
    assert (min(g for _, g, _ in lengths) == 0) == any(g == 0 for _, g in pairs), "scoring stays scoring"


def test_few_lengths_are_exact_and_equal_ones_are_two_numbers() -> None:
    counts = LengthCounts()
    assert counts.workload() is None
    counts.add(7, 3, count=2)
    assert counts.workload() == Workload(prompt_len=7, gen_len=3, num_requests=2)
    counts.add(9, 0)
    assert counts.workload(30) == Workload(
        prompt_len=8, gen_len=2, num_requests=30, lengths=((7, 3, 2), (9, 0, 1))
    )
    with pytest.raises(ValueError, match="cannot count"):
        counts.add(0, 1)


def test_json_and_words() -> None:
    workload = Workload.from_lengths([(10, 2), (1200, 40)])
    assert Workload.from_dict(workload.to_dict()) == workload
    assert workload.describe() == "2 x (605 + 21 tokens), up to 1,200 + 40"
    assert Workload(prompt_len=5, gen_len=1).describe() == "many x (5 + 1 tokens)"
    for bad in ({}, None, {"prompt_len": 1, "gen_len": 1, "num_requests": 1, "lengths": [3]}):
        with pytest.raises(ValueError, match="not a workload"):
            Workload.from_dict(bad)
