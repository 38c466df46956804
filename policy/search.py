"""Find the plan with the highest throughput that fits, with its prediction, its reasons and its proof.

Candidates (policy.candidates) are taken in the order of their bounds, placed and measured (policy.explore) until
none that is left can be better. Shapes around the best are tried next. The best few are ranked by simulated time,
the winner is simulated in full length (policy.prediction) and described (policy.result).
"""

from __future__ import annotations

import sys
import time
import types
from collections.abc import Sequence
from typing import Any

from policy.candidates import (
    AUTO_CACHE_FORMATS,
    AUTO_WEIGHT_FORMATS,
    COARSE_GPU_BATCH_SIZES,
    GPU_BATCH_SIZES,
    NUM_GPU_BATCHES,
    Candidates,
    Shape,
)
from policy.explore import Found, Searcher
from policy.footprint import ModelFootprint
from policy.hardware import Hardware
from policy.prediction import FrontPoint, bytes_moved, latency_seconds, pareto, physical_bound
from policy.result import SearchResult, describe, infeasible
from policy.tiers import Policy, ScheduleName, Tier
from policy.workload import DEFAULT_CHUNK_TOKENS, WEIGHTS_SLOTS, Workload
from quant.kv_formats import DEFAULT_PAGE_TOKENS

__all__ = [
    "AUTO_CACHE_FORMATS",
    "AUTO_WEIGHT_FORMATS",
    "FrontPoint",
    "SearchResult",
    "bytes_moved",
    "pareto",
    "physical_bound",
    "search",
]

MAX_PLACED = 36
MAX_PLACED_NEAR = 16
RANKED = 4
LEAN_LOSS = 0.005


def search(
    footprint: ModelFootprint,
    hardware: Hardware,
    workload: Workload,
    *,
    gpu_mem_bytes: float | None = None,
    cpu_mem_bytes: float | None = None,
    disk_mem_bytes: float | None = None,
    weight_format: str | None = None,
    cache_format: str | None = None,
    schedules: Sequence[ScheduleName] = ("refill", "static"),
    gpu_batch_size: int | None = None,
    num_gpu_batches: int | None = None,
    max_tokens: int | None = None,
    cpu_attention: bool = True,
    overlap: bool = True,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    page_tokens: int = DEFAULT_PAGE_TOKENS,
    unpack_per_batch: bool = False,
    weights_slots: Sequence[int] = WEIGHTS_SLOTS,
    also: Sequence[Policy] = (),
    full_simulation: bool = False,
) -> SearchResult:
    """The plan with the highest throughput for this model, machine and workload.

    Budgets replace the hardware's capacities. weight_format and cache_format: None keeps the checkpoint's
    and the compute dtype, "auto" also tries int8 and int4, any other name is used as it is. gpu_batch_size,
    num_gpu_batches: fix the block's shape. max_tokens: longest sequence to have memory for, one in each gpu batch,
    where that is more than the workload's longest. weights_slots: units of streamed weights to be held at once,
    the numbers to choose from. also: policies that compete too, if they fit.
    Raises ValueError for unknown formats or nonsense; memory that does not suffice is no exception but
    `SearchResult.infeasible`.
    """
    began = time.perf_counter()
    hardware = hardware.with_budgets(
        gpu_mem_bytes=gpu_mem_bytes, cpu_mem_bytes=cpu_mem_bytes, disk_mem_bytes=disk_mem_bytes
    )
    longest = max(workload.max_tokens, max_tokens or 0)
    if longest > footprint.max_positions:
        raise ValueError(
            f"prompt and answer have {longest} tokens together, {footprint.name} has"
            f" {footprint.max_positions} positions; shorten one of them"
        )
    if workload.scoring:
        schedules = ("static",)
    known = [f for f in AUTO_WEIGHT_FORMATS if f in footprint.weight_formats]
    weights = [
        footprint.resolve_format(f) for f in _format_choices(weight_format, footprint.native_format, known)
    ]
    caches = _format_choices(cache_format, hardware.compute_dtype, AUTO_CACHE_FORMATS)
    space = Candidates(
        footprint,
        hardware,
        workload,
        max_tokens=longest,
        schedules=tuple(schedules),
        overlap=overlap,
        chunk_tokens=chunk_tokens,
        page_tokens=page_tokens,
        unpack_per_batch=unpack_per_batch,
        weights_slots=weights_slots,
    )
    searcher = Searcher(space)
    three = hardware.first_tier is Tier.GPU
    fractions = (0.0, 0.5, 1.0) if three and cpu_attention and not workload.scoring else (0.0,)
    grid = GPU_BATCH_SIZES if len(weights) * len(caches) <= 2 else COARSE_GPU_BATCH_SIZES
    sizes = (gpu_batch_size,) if gpu_batch_size else grid
    counts = (num_gpu_batches,) if num_gpu_batches else NUM_GPU_BATCHES
    found: dict[Shape, Found | None] = {}
    candidates = space.shapes(sizes, counts, weights, caches, fractions)
    if workload.num_requests is not None and not gpu_batch_size:
        # A block that takes in all requests at once.
        exact = [-(-workload.num_requests // n) for n in counts if workload.num_requests >= n]
        candidates += space.shapes(
            [b for b in exact if b <= 2 * GPU_BATCH_SIZES[-1]], counts, weights, caches, fractions
        )
    for policy in also:
        named = searcher.given(policy)
        if named is not None:
            searcher.settle(named)
            found[named.shape] = named
    searcher.explore(candidates, found, MAX_PLACED)
    placed = [f for f in found.values() if f is not None]
    if not placed:
        # Bounds order candidates by speed; where memory is short only the smallest block may fit.
        least = space.shapes(sizes[:1], counts[:1], weights, caches, fractions[:1])
        searcher.explore(least, found, len(least))
        placed = [f for f in found.values() if f is not None]
    if not placed:
        return infeasible(searcher, weights, caches, began)
    best = _rank(searcher, placed)
    if not (gpu_batch_size and num_gpu_batches):
        near = [
            s
            for s in space.around(best.shape)
            if (not gpu_batch_size or s.gpu_batch_size == gpu_batch_size)
            and (not num_gpu_batches or s.num_gpu_batches == num_gpu_batches)
            and (workload.num_requests is None or s.block < workload.num_requests + s.num_gpu_batches)
        ]
        tried: dict[Shape, Found | None] = {best.shape: best}
        searcher.explore(near, tried, MAX_PLACED_NEAR)
        found |= tried
        best = _rank(searcher, [f for f in tried.values() if f is not None])
    simulated = searcher.simulate(best, full=full_simulation)
    best.latency_seconds = latency_seconds(simulated[2], workload, schedule=best.shape.schedule)
    front = _front(searcher, candidates, found, best)
    lean = _leanest(searcher, found, best)
    if lean is not best:
        best, simulated = lean, searcher.simulate(lean, full=full_simulation)
        best.latency_seconds = latency_seconds(simulated[2], workload, schedule=best.shape.schedule)
    return describe(searcher, best, simulated, front, began)


def _rank(searcher: Searcher, placed: Sequence[Found]) -> Found:
    """The best by simulated throughput: candidates are simulated until none that is left looks better."""
    best: Found | None = None
    for n, found in enumerate(sorted(placed, key=lambda f: -f.tokens_per_s)):
        if best is not None and (found.tokens_per_s <= best.tokens_per_s or n >= RANKED):
            break
        if not found.simulated:
            searcher.settle(found)
        if best is None or found.tokens_per_s > best.tokens_per_s:
            best = found
    assert best is not None
    return best


def _leanest(searcher: Searcher, found: dict[Shape, Found | None], best: Found) -> Found:
    """The smallest block that is as fast as the best but for LEAN_LOSS: memory and latency for nothing help nobody."""
    near = [
        f
        for f in found.values()
        if f is not None
        and f.shape.block < best.shape.block
        and f.tokens_per_s >= (1 - LEAN_LOSS) * best.tokens_per_s
    ]
    for candidate in sorted(near, key=lambda f: (f.shape.block, -f.tokens_per_s))[:RANKED]:
        if not candidate.simulated:
            searcher.settle(candidate)
        if candidate.tokens_per_s >= (1 - LEAN_LOSS) * best.tokens_per_s:
            return candidate
    return best


def _front(
    searcher: Searcher, candidates: Sequence[Shape], found: dict[Shape, Found | None], best: Found
) -> tuple[FrontPoint, ...]:
    """Pareto front: the placed candidates, and one more for each smaller block size."""
    blocks = {f.shape.block for f in found.values() if f is not None}
    sizes = sorted({s.block for s in candidates if s.block < best.shape.block})
    step = max(1, len(sizes) // 6)
    for block in sizes[::step]:
        if any(block / 2 < b <= block for b in blocks):
            continue
        options = [s for s in candidates if s.block == block and s not in found]
        bounded = [item for s in options for item in searcher.space.options(s)]
        if bounded:
            _, shape, problem = max(bounded, key=lambda item: item[0])
            placed = found[shape] = searcher.place(shape, problem, best.tokens_per_s)
            if placed is not None:
                placed.slow_down(max(1.0, min(searcher.ratios.get(shape.kind, [best.ratio]))))
            blocks.add(block)
    return pareto(
        FrontPoint(
            generated_tokens_per_s=f.tokens_per_s,
            latency_seconds=f.latency_seconds,
            policy=f.rounded.policy,
        )
        for f in found.values()
        if f is not None
    )


def _format_choices(asked: str | None, native: str, auto: Sequence[str]) -> list[str]:
    if asked is None:
        return [native]
    if asked == "auto":
        return list(dict.fromkeys([native, *auto]))
    return [asked]


class _CallableModule(types.ModuleType):
    """`from policy import search` gives this module; calling it is calling its function of the same name."""

    def __call__(self, *args: Any, **options: Any) -> SearchResult:
        return search(*args, **options)


sys.modules[__name__].__class__ = _CallableModule
