"""A model in memory against running each prompt alone; footprints, budgets, closing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_helpers import (
    FAMILIES,
    MemorySource,
    greedy_jobs,
    make_policy,
    open_runtime,
    prompts,
    reference_greedy,
    reference_logprobs,
    run_jobs,
    tiny_model,
    tokens_of,
)

from flexrun.engine import Engine
from flexrun.request import SamplingParams
from flexrun.runtime import layout_footprint
from policy.footprint import packed_unit_nbytes

SIZES = [(5, 20), (300, 6), (33, 9), (1, 20), (64, 3)]


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_are_those_of_each_prompt_alone(family: str, tmp_path: Path) -> None:
    """Prefill in segments and decoding through pages, with windows, softcaps and alibi."""
    source = MemorySource(tiny_model(family))
    with open_runtime(source, make_policy(shape=(3, 2)), tmp_path) as runtime:
        outputs = run_jobs(Engine(runtime, tokenizer=None), greedy_jobs(SIZES, logprobs=3, prompt_logprobs=0))
    seen = set()
    for output, (prompt_len, n) in zip(outputs, SIZES, strict=True):
        answer = output.outputs[0]
        assert answer.token_ids == reference_greedy(source, output.prompt_token_ids, n)
        table = reference_logprobs(source, output.prompt_token_ids + answer.token_ids)
        assert answer.logprobs is not None and output.prompt_logprobs is not None
        for position, entries in enumerate(answer.logprobs):
            row = table[prompt_len + position - 1]
            for token, entry in entries.items():
                assert entry.logprob == pytest.approx(float(row[token]), abs=2e-3)
        for position, entries in enumerate(output.prompt_logprobs[1:]):
            assert entries is not None
            token = output.prompt_token_ids[position + 1]
            assert entries[token].logprob == pytest.approx(float(table[position, token]), abs=2e-3)
        seen.add(tuple(answer.token_ids))
    assert len(seen) == len(SIZES)


@pytest.mark.parametrize(
    ("compute", "stored", "tolerance"), [("float32", "bfloat16", 2e-3), ("bfloat16", "bfloat16", 0.25)]
)
def test_other_types_of_weights_and_arithmetic(
    compute: str, stored: str, tolerance: float, tmp_path: Path
) -> None:
    """bf16 weights with bf16 biases and norms, computed in fp32 and in bf16."""
    changes: dict[str, Any] = {"attention_bias": True, "mlp_bias": True}
    source = MemorySource(
        tiny_model("llama", **changes), "bf16", folder=tmp_path, dtype=getattr(torch, stored)
    )
    policy = make_policy(weights="d", cache="d", shape=(2, 2))
    with open_runtime(source, policy, tmp_path, dtype=getattr(torch, compute)) as runtime:
        params = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=0)
        outputs = run_jobs(
            Engine(runtime, tokenizer=None), [(prompt, params) for prompt in prompts([20, 300])]
        )
    for output in outputs:
        table = reference_logprobs(source, output.prompt_token_ids)
        assert output.prompt_logprobs is not None
        errors = [
            abs(entries[token].logprob - float(table[position, token]))
            for position, (token, entries) in enumerate(
                zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
            )
            if entries is not None
        ]
        assert len(errors) == len(output.prompt_token_ids) - 1
        assert sum(errors) / len(errors) < tolerance


@pytest.mark.parametrize("fmt", ["f32", "int4-g64"])
@pytest.mark.parametrize("family", ["llama", "tied", "parallel"])
def test_the_footprint_is_that_of_the_layouts(family: str, fmt: str) -> None:
    source = MemorySource(tiny_model(family), fmt)
    footprint = layout_footprint(source.model, source, "tiny")
    assert footprint.native_format == fmt
    for unit, sized in zip(source.model.units, footprint.units, strict=True):
        layout = source.layout(unit)
        assert sized.nbytes[fmt] == layout.nbytes == packed_unit_nbytes(s.nbytes for s in layout.slots)
        assert sized.pinned == unit.pinned and sized.rows_only == unit.rows_only
    assert len(footprint.kv_units) == 2
    tables = sum(unit.table_nbytes[fmt] for unit in footprint.units)
    assert (tables == 0) == (family == "tied")


def test_two_engines_may_follow_each_other_on_one_runtime(tmp_path: Path) -> None:
    source = MemorySource(tiny_model(), folder=tmp_path)
    policy = make_policy(weights="d", cache="cd", activations="d", shape=(2, 2))
    with open_runtime(source, policy, tmp_path) as runtime:
        first = tokens_of(run_jobs(Engine(runtime, tokenizer=None), greedy_jobs(SIZES)))
        assert tokens_of(run_jobs(Engine(runtime, tokenizer=None), greedy_jobs(SIZES))) == first


def test_an_embedded_table_stays_in_cpu_memory_and_closing_twice_is_fine(tmp_path: Path) -> None:
    source = MemorySource(tiny_model(), folder=tmp_path)
    with open_runtime(source, make_policy(weights="d", cache="g"), tmp_path, gpu_bytes=1 << 26) as runtime:
        assert "tables" in runtime.plan.by_purpose()["cpu"]
        assert "tables" not in runtime.plan.by_purpose()["gpu"]
        runtime.close()
        runtime.close()


def test_a_tier_that_the_machine_lacks_is_named(tmp_path: Path) -> None:
    source = MemorySource(tiny_model())
    for field in ("weights", "cache", "activations"):
        policy = make_policy(**{field: "g"})
        with (
            pytest.raises(ValueError, match=rf"{field}.gpu_frac is 1.0, but this machine has no gpu tier"),
            open_runtime(source, policy, tmp_path),
        ):
            pass
