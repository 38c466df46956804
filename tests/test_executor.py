"""The executor under every kind of placement, block and schedule: same tokens, exact bytes, no early reuse."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_helpers import (
    MemorySource,
    covering_rows,
    greedy_jobs,
    make_policy,
    open_runtime,
    prompts,
    reference_greedy,
    run_jobs,
    tiny_model,
    tokens_of,
)
from slow_lanes import SlowLanes, poison_buffers, slow_pool

from flexrun.engine import Engine
from policy.schedule import Depths, Lane

# Prompt and answer lengths: within a page, across pages, across segments, over several passes.
SIZES = [(5, 6), (300, 4), (33, 9), (1, 18), (48, 7), (530, 3)]
COMMON: dict[str, tuple[Any, ...]] = {
    "shape": ((3, 1), (2, 2), (1, 3)),
    "cpu_attention_frac": (0.0, 0.5, 1.0),
    "cache_format": ("auto", "int4"),
    "weight_format": ("f32", "int4-g64"),
    "schedule": ("refill", "static"),
    "overlap": (True, False),
    "pass_tokens": (256, 600),
}
TWO_TIERS = covering_rows(dict.fromkeys(("weights", "cache", "activations"), ("c", "d", "cd")) | COMMON)
THREE_TIERS = covering_rows(
    dict.fromkeys(("weights", "cache", "activations"), ("g", "c", "d", "gcd")) | COMMON
)
GPU_BYTES = 64 << 20


def _name(row: dict[str, Any]) -> str:
    return "-".join(str(value).replace(" ", "") for value in row.values())


@cache
def _source(weight_format: str, folder: Path) -> MemorySource:
    return MemorySource(tiny_model(), weight_format, folder=folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("executor")


@cache
def _in_memory(weight_format: str, cache_format: str, folder: Path) -> list[list[list[int]]]:
    """Each prompt alone, everything in the first tier's memory."""
    policy = make_policy(cache_format=cache_format)
    with open_runtime(_source(weight_format, folder), policy, folder) as runtime:
        return tokens_of(run_jobs(Engine(runtime, tokenizer=None), greedy_jobs(SIZES)))


def _check(row: dict[str, Any], folder: Path, gpu_bytes: int | None) -> None:
    options = dict(row)
    weight_format, pass_tokens = options.pop("weight_format"), options.pop("pass_tokens")
    policy = make_policy(**options)
    source = _source(weight_format, folder)
    limits = {"pass_tokens": pass_tokens}
    with open_runtime(source, policy, folder, gpu_bytes=gpu_bytes, limits=limits) as runtime:
        tokens = tokens_of(run_jobs(Engine(runtime, tokenizer=None), greedy_jobs(SIZES)))
        runtime.executor.drain()
        audit = runtime.audit()
    assert tokens == _in_memory(weight_format, policy.cache_format, folder)
    for tier, bytes_of in audit.items():
        # A file's blocks may include some of the file system's own.
        slack = 8192 if tier == "disk" else 0
        assert 0 <= bytes_of.measured_bytes - bytes_of.planned_bytes <= slack, (tier, bytes_of)
    assert not list(folder.glob("flexrun-spill-*"))


@pytest.mark.parametrize("row", TWO_TIERS, ids=_name)
def test_same_tokens_and_planned_bytes_with_two_tiers(row: dict[str, Any], folder: Path) -> None:
    _check(row, folder, None)


@pytest.mark.parametrize("row", THREE_TIERS, ids=_name)
def test_same_tokens_and_planned_bytes_with_three_tiers(row: dict[str, Any], folder: Path) -> None:
    _check(row, folder, GPU_BYTES)


def test_in_memory_tokens_are_those_of_the_dense_reference(folder: Path) -> None:
    expected = [
        reference_greedy(_source("f32", folder), prompt, n)
        for prompt, (_, n) in zip(prompts([n for n, _ in SIZES]), SIZES, strict=True)
    ]
    assert [t[0] for t in _in_memory("f32", "auto", folder)] == expected
    assert len({tuple(t) for t in expected}) == len(expected)


EVERY_LANE = {lane: 0.002 for lane in Lane if lane is not Lane.COMPUTE}
SLOW_POLICIES: list[tuple[int | None, dict[str, Any]]] = [
    (None, {"weights": "d", "cache": "d", "activations": "d", "shape": (2, 2)}),
    (
        None,
        {"weights": "cd", "cache": "cd", "activations": "cd", "shape": (1, 3), "cpu_attention_frac": 0.34},
    ),
    (GPU_BYTES, {"weights": "d", "cache": "d", "activations": "d", "shape": (1, 3)}),
    (GPU_BYTES, {"weights": "c", "cache": "gcd", "activations": "c", "shape": (2, 2)}),
    (
        GPU_BYTES,
        {"weights": "gcd", "cache": "cd", "activations": "gcd", "shape": (1, 3), "cpu_attention_frac": 0.67},
    ),
]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(("gpu_bytes", "options"), SLOW_POLICIES)
def test_slow_lanes_and_poisoned_buffers_change_nothing(
    gpu_bytes: int | None, options: dict[str, Any], depth: int, folder: Path
) -> None:
    depths = Depths(
        weights=depth, weights_staging=depth, cache=depth, cache_staging=depth, cache_out=depth, hidden=3
    )
    with (
        slow_pool(depth, 0.002) as pool,
        open_runtime(
            _source("f32", folder),
            make_policy(**options),
            folder,
            gpu_bytes=gpu_bytes,
            pool=pool,
            depths=depths,
        ) as runtime,
    ):
        poison_buffers(runtime)
        runtime.executor.lanes = SlowLanes(runtime.lanes, EVERY_LANE)  # type: ignore[assignment]
        tokens = tokens_of(run_jobs(Engine(runtime, tokenizer=None), greedy_jobs(SIZES)[:4]))
    assert tokens == _in_memory("f32", "auto", folder)[:4]


@pytest.mark.parametrize("gpu_bytes", [None, GPU_BYTES])
def test_late_stores_are_waited_for_when_gpu_batches_fall_idle(gpu_bytes: int | None, folder: Path) -> None:
    """The first batch ends early; the second's pages must not be read before they were written."""
    sizes = [(20, 2), (31, 40)]
    options = make_policy(cache="d", shape=(1, 2))
    source = _source("f32", folder)
    with open_runtime(source, options, folder, gpu_bytes=gpu_bytes) as runtime:
        spill = runtime.executor.cache._spill
        assert spill is not None
        spill.write_from(torch.full((spill.size_bytes,), 0xFF, dtype=torch.uint8))
        late = {Lane.DISK_WRITE: 0.03, Lane.DOWNLOAD: 0.01}
        runtime.executor.lanes = SlowLanes(runtime.lanes, late)  # type: ignore[assignment]
        tokens = tokens_of(run_jobs(Engine(runtime, tokenizer=None), greedy_jobs(sizes)))
    assert [t[0] for t in tokens] == [
        reference_greedy(source, prompt, n) for prompt, (_, n) in zip(prompts([20, 31]), sizes, strict=True)
    ]
