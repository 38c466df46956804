"""The search: it finds the best of all shapes, says why, and explains what does not fit."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import subprocess
import sys
import time
from typing import Any

import planner_cases as cases
import pytest

from policy import search as search_module
from policy.audit import placed_run, series_of
from policy.hardware import Curve, Hardware
from policy.memory_plan import memory_plan
from policy.passes import pass_series
from policy.prediction import make_plan, simulate_whole
from policy.search import SearchResult, pareto, physical_bound, search
from policy.simulate import PlacedRun, simulate
from policy.tiers import Placement, Policy, Tier
from policy.workload import Workload

WORK = Workload(prompt_len=100, gen_len=12)
# One schedule, to save time; tests of both ask for BOTH.
BOTH = ("refill", "static")
OPTIONS: dict[str, Any] = {"page_tokens": 16, "chunk_tokens": 256, "schedules": ("static",)}


def found(
    footprint: Any = None, hardware: Hardware | None = None, work: Workload = WORK, **more: Any
) -> SearchResult:
    return search(footprint or cases.deep_model(), hardware or cases.machine(), work, **(OPTIONS | more))


@functools.cache
def plain() -> SearchResult:
    """The search that several tests look at."""
    return found()


def test_the_plan_fits_and_is_what_memory_plan_says() -> None:
    result = found(schedules=BOTH, num_gpu_batches=2)
    assert result.best is not None and result.limits is not None and result.memory is not None
    again = memory_plan(
        cases.deep_model(), result.best.policy, result.limits, first_tier=Tier.GPU, compute_dtype="f16"
    )
    assert again.planned_bytes == result.best.planned_bytes == result.memory.planned_bytes
    assert again.unit_homes == result.best.unit_homes and again.page_counts == result.best.page_counts
    for tier in Tier:
        assert again.tier_bytes(tier) <= cases.machine().capacity(tier)


def test_the_result_is_json_with_the_promised_fields() -> None:
    result = found(hardware=cases.machine(price_per_hour=2.0), num_gpu_batches=2)
    assert result.best is not None
    data = json.loads(json.dumps(result.best.to_dict()))
    predicted = data["predicted"]
    for name in ("generated_tokens_per_s", "total_tokens_per_s", "prefill_seconds", "decode_seconds", "mfu"):
        assert predicted[name] > 0, name
    assert predicted["lanes"]["compute"] > 0
    assert data["bound"]["generated_tokens_per_s"] >= predicted["generated_tokens_per_s"]
    assert 0 < predicted["mfu"] <= 1
    seconds = predicted["prefill_seconds"] + predicted["decode_seconds"]
    assert predicted["total_seconds"] == pytest.approx(seconds)
    cost = 2.0 / 3600 / predicted["generated_tokens_per_s"] * 1e6
    assert predicted["cost_per_million_tokens"] == pytest.approx(cost)
    assert data["binding_resource"] and result.search_seconds > 0
    assert Policy.from_dict(data["policy"]) == result.best.policy


@pytest.mark.parametrize("hardware", [cases.machine(), cases.cpu_machine()])
def test_no_shape_of_an_exhaustive_search_is_much_better(hardware: Hardware) -> None:
    """Every shape of a small grid, placed and simulated in full: none beats the search by more than 3%."""
    result = found(hardware=hardware)
    assert result.best is not None
    best = 0.0
    for gbs, n in itertools.product((8, 16), (2, 4)):
        one = found(hardware=hardware, gpu_batch_size=gbs, num_gpu_batches=n)
        if one.best is not None:
            best = max(best, one.best.predicted["generated_tokens_per_s"])
    assert best > 0
    assert result.best.predicted["generated_tokens_per_s"] >= best * 0.97


def test_prediction_is_the_full_simulation() -> None:
    result = plain()
    assert result.best is not None and result.limits is not None and result.memory is not None
    policy = result.best.policy
    from policy.cost import CostModel

    shape = {"gpu_batch_size": policy.gpu_batch_size, "num_gpu_batches": policy.num_gpu_batches}
    cost = CostModel(
        cases.deep_model(),
        cases.machine(),
        result.limits,
        weight_format=policy.weight_format,
        cache_format=policy.cache_format,
        n_cpu_attention=policy.num_cpu_attention_batches,
        schedule="static",
        **shape,
    )
    series = pass_series(WORK, result.limits, schedule="static", **shape)
    full = simulate(PlacedRun(cost, result.memory), series, full=True)
    assert result.best.predicted["total_seconds"] == pytest.approx(full.total_seconds, rel=0.02)


def test_any_placed_run_is_predicted_like_the_best_of_a_search() -> None:
    """The same policy handed in from outside has the figures that the search gave it, all of them."""
    machine = cases.machine(price_per_hour=2.0)
    result = found(hardware=machine, schedules=("refill",), num_gpu_batches=2)
    assert result.best is not None and result.limits is not None
    policy = result.best.policy
    run = placed_run(
        cases.deep_model(), machine, policy, result.limits, compute_dtype="f16", gpu_mem_bytes=9.0 * cases.MIB
    )
    series = series_of(policy, result.limits, WORK)
    plan, warnings = make_plan(run, series, simulate_whole(run, series), WORK, policy)
    assert plan.predicted == result.best.predicted and "cost_per_million_tokens" in plan.predicted
    assert plan.bound == result.best.bound and warnings == result.warnings
    assert plan.planned_bytes == result.best.planned_bytes and plan.unit_homes == result.best.unit_homes
    latency = plan.predicted["latency_seconds"]
    assert any(p.policy == policy and p.latency_seconds == latency for p in result.front)


def test_memory_is_set_aside_for_the_longest_sequence_to_be_admitted() -> None:
    result = found(max_tokens=1000, schedules=BOTH)
    assert result.best is not None and result.limits is not None and result.memory is not None
    assert result.limits.max_tokens == 1000 and result.memory.sizes.slots >= 1000 // 16
    assert result.limits.pass_tokens >= 256, "a piece of a long prompt fits into a pass"
    for tier in Tier:
        assert result.memory.tier_bytes(tier) <= cases.machine().capacity(tier)
    shorter = found(max_tokens=5)
    assert shorter.limits is not None and shorter.limits.max_tokens == WORK.max_tokens
    with pytest.raises(ValueError, match="4096 positions"):
        found(max_tokens=5000)
    small = found(max_tokens=4096, cpu_mem_bytes=2.0 * cases.MIB, disk_mem_bytes=0.0)
    assert small.best is None and "one sequence of 4096 tokens" in small.infeasible


def test_a_named_policy_competes() -> None:
    """A named policy that fits is found even where the shapes asked for leave it out."""
    on_cpu = Placement.all_on(Tier.CPU)
    named = Policy(
        weights=on_cpu,
        cache=on_cpu,
        activations=on_cpu,
        gpu_batch_size=7,
        num_gpu_batches=3,
        schedule="static",
    )
    roomy = cases.machine(cpu_mem_bytes=40 * cases.MIB)
    alone = found(hardware=roomy, gpu_batch_size=1, num_gpu_batches=1)
    both = found(hardware=roomy, gpu_batch_size=1, num_gpu_batches=1, also=(named,))
    assert alone.best is not None and both.best is not None
    speed = [r.best.predicted["generated_tokens_per_s"] for r in (alone, both) if r.best]
    assert speed[1] > speed[0]
    assert (both.best.policy.gpu_batch_size, both.best.policy.num_gpu_batches) == (7, 3)


def test_a_slot_less_for_weights_is_taken_where_memory_is_short() -> None:
    """The whole space of blocks stays open, not the smallest alone."""
    footprint, work = cases.model(ffn_size=4096), Workload(prompt_len=32, gen_len=8)
    roomy = cases.cpu_machine(cpu_mem_bytes=200 * cases.MIB, sharing={})
    forced: dict[str, Any] = {"gpu_batch_size": 8, "num_gpu_batches": 2}
    streamed = Placement(disk_frac=1.0)
    home = Placement(cpu_frac=1.0)
    policy = Policy(weights=streamed, cache=home, activations=home, gpu_batch_size=8, num_gpu_batches=2)
    plenty = found(footprint, roomy, work, **forced)
    assert plenty.limits is not None
    limits = {n: dataclasses.replace(plenty.limits, weights_slots=n) for n in (2, 3)}
    needs = {
        n: memory_plan(footprint, policy, x, first_tier=Tier.CPU, compute_dtype="f16").tier_bytes(Tier.CPU)
        for n, x in limits.items()
    }
    between = dataclasses.replace(roomy, cpu_mem_bytes=(needs[2] + needs[3]) / 2)
    assert needs[3] > needs[2]
    tight = found(footprint, between, work)
    assert tight.best is not None and tight.limits is not None
    assert tight.limits.weights_slots == 2
    assert tight.best.policy.gpu_batch_size * tight.best.policy.num_gpu_batches >= 8
    assert found(footprint, roomy, work, overlap=False, **forced).limits.weights_slots == 2  # type: ignore[union-attr]


def test_a_larger_block_that_gains_nothing_is_not_taken() -> None:
    """Everything in memory, products at their full rate from few sequences on: more of them only wait longer."""
    flat = {"f16": Curve(tokens=(1, 8, 512), flops_per_s=(2e9, 2e11, 2e11))}
    hardware = cases.cpu_machine(cpu_mem_bytes=2000 * cases.MIB, sharing={}, gemm=flat)
    result = found(cases.model(), hardware, WORK, schedules=("refill",))
    assert result.best is not None
    fastest = max(point.generated_tokens_per_s for point in result.front)
    mine = result.best.predicted["generated_tokens_per_s"]
    assert mine >= 0.99 * fastest
    policy = result.best.policy
    smaller = [
        point
        for point in result.front
        if point.policy.gpu_batch_size * point.policy.num_gpu_batches
        < policy.gpu_batch_size * policy.num_gpu_batches
    ]
    assert all(point.generated_tokens_per_s < 0.996 * fastest for point in smaller)
    assert policy.gpu_batch_size * policy.num_gpu_batches < 2048


def test_front_is_pareto_optimal_and_ordered() -> None:
    front = plain().front
    assert len(front) >= 3
    for a, b in itertools.pairwise(front):
        assert a.generated_tokens_per_s > b.generated_tokens_per_s
        assert a.latency_seconds > b.latency_seconds
    assert pareto([*front, dataclasses.replace(front[-1], generated_tokens_per_s=1e-9)]) == front


def test_formats_change_only_when_asked() -> None:
    shape = {"gpu_batch_size": 16, "num_gpu_batches": 2}
    kept = found(**shape)
    free = found(weight_format="auto", cache_format="auto", **shape)
    forced = found(weight_format="int8-g64", cache_format="int4", **shape)
    assert kept.best is not None and free.best is not None and forced.best is not None
    assert (kept.best.policy.weight_format, kept.best.policy.cache_format) == ("f16", "f16")
    assert (forced.best.policy.weight_format, forced.best.policy.cache_format) == ("int8-g64", "int4")
    assert any("int8-g64" in r for r in forced.reasons) and any("int4" in r for r in forced.reasons)
    speeds = [r.best.predicted["generated_tokens_per_s"] for r in (kept, free, forced) if r.best]
    assert speeds[1] >= 0.98 * max(speeds)
    with pytest.raises(ValueError, match="int3"):
        found(weight_format="int3")
    with pytest.raises(ValueError, match="cache format"):
        found(cache_format="int3")


def test_impossible_budgets_say_what_is_short_and_what_would_do() -> None:
    result = found(cpu_mem_bytes=1 * cases.MIB, disk_mem_bytes=0)
    assert result.best is None and "does not fit" in result.infeasible
    assert "memory is short by" in result.infeasible and "What would do" in result.infeasible
    missing = {t: result.shortage_bytes.get(t, 0.0) for t in ("gpu", "cpu", "disk")}
    assert sum(missing.values()) > 0
    for tier, n in missing.items():
        assert (f"{tier} memory is short by" in result.infeasible) == (n > 0)
    base = {"gpu": 9.0 * cases.MIB, "cpu": 1.0 * cases.MIB, "disk": 0.0}
    enough = found(
        **{f"{t}_mem_bytes": base[t] + 1.02 * n + 0.5 * cases.MIB * (n > 0) for t, n in missing.items()}
    )
    assert enough.best is not None


def test_a_smaller_format_is_suggested_where_it_would_do() -> None:
    fp = cases.deep_model(n_layers=60, n_kv_heads=1)
    result = found(fp, gpu_mem_bytes=9 * cases.MIB, cpu_mem_bytes=10 * cases.MIB, disk_mem_bytes=0)
    assert result.best is None
    assert "weight format int" in result.infeasible


def test_too_long_sequences_are_refused() -> None:
    with pytest.raises(ValueError, match="4096 positions"):
        found(work=Workload(prompt_len=4096, gen_len=1))


def test_warns_when_offloading_is_not_needed_or_slower() -> None:
    roomy = found(
        hardware=cases.machine(gpu_mem_bytes=4000 * cases.MIB),
        work=dataclasses.replace(WORK, num_requests=32),
        num_gpu_batches=1,
    )
    assert any("does not offload" in w for w in roomy.warnings)
    slow = cases.machine(
        upload_bytes_per_s=1e5,
        cpu_gemm_flops_per_s=1e12,
        gpu_mem_bytes=6 * cases.MIB,
        cpu_mem_bytes=20 * cases.MIB,
    )
    assert any("CPU alone" in w for w in found(hardware=slow, num_gpu_batches=2).warnings)
    assert not any("CPU alone" in w for w in plain().warnings)


def test_scoring_is_planned_as_prefill() -> None:
    result = found(work=Workload(prompt_len=100, gen_len=0))
    assert result.best is not None
    predicted = result.best.predicted
    assert predicted["generated_tokens_per_s"] == 0 and predicted["total_tokens_per_s"] > 0
    assert predicted["decode_seconds"] == pytest.approx(0)


def test_few_requests_do_not_make_large_blocks() -> None:
    result = found(work=Workload(prompt_len=100, gen_len=12, num_requests=5))
    assert result.best is not None
    assert result.best.policy.block_size <= 10


def test_a_distribution_of_lengths_is_planned() -> None:
    work = Workload.from_lengths([(100, 12)] * 50 + [(20, 30)] * 50)
    result = found(work=work, schedules=("refill",), num_gpu_batches=2)
    assert result.best is not None and result.limits is not None
    assert result.limits.max_tokens == 112
    seconds = result.best.predicted["total_seconds"]
    assert result.best.predicted["generated_tokens_per_s"] == pytest.approx(50 * 42 / seconds)


@pytest.mark.parametrize("kind", ["gpu", "cpu"])
def test_no_plan_exceeds_the_physical_bound(kind: str) -> None:
    for factor in (4.0,) if kind == "gpu" else (1.0,):
        base = cases.machine() if kind == "gpu" else cases.cpu_machine()
        hardware = base.replace(upload_bytes_per_s=base.upload_bytes_per_s * factor)
        result = found(hardware=hardware, weight_format="auto", cache_format="auto", num_gpu_batches=4)
        assert result.best is not None
        limit = physical_bound(cases.deep_model(), hardware, WORK, result.best.policy.weight_format)
        assert result.best.predicted["generated_tokens_per_s"] <= limit


def test_without_a_gpu_nothing_is_placed_there() -> None:
    result = found(gpu_mem_bytes=0.0, cpu_mem_bytes=12.0 * cases.MIB)
    assert result.best is not None
    policy = result.best.policy
    assert policy.weights.gpu_frac == policy.cache.gpu_frac == policy.activations.gpu_frac == 0
    assert policy.cpu_attention_frac == 0


def test_large_models_are_searched_with_few_placements() -> None:
    """OPT-175B on a T4: bounds prune all but a few dozen of the candidates, in seconds of CPU time."""
    from policy.footprint import decoder_footprint

    fp = decoder_footprint(
        name="opt-175b",
        hidden_size=12288,
        n_layers=96,
        n_heads=96,
        ffn_size=49152,
        vocab_size=50272,
        tied=True,
        learned_positions=True,
    )
    began = time.process_time()
    result = search(fp, Hardware.preset("t4-gcp"), Workload(prompt_len=512, gen_len=32))
    used = time.process_time() - began
    assert result.best is not None
    assert result.best.predicted["generated_tokens_per_s"] > 0.55
    assert result.n_candidates > 400
    assert result.n_placed <= search_module.MAX_PLACED + search_module.MAX_PLACED_NEAR + 10
    print(f"{used:.2f} s of CPU time, {result.n_placed} of {result.n_candidates} placed")


@pytest.mark.parametrize("first", ["", "import policy.search; "])
def test_the_package_offers_search_by_name(first: str) -> None:
    code = first + (
        "from policy import Hardware, Workload, search; import planner_cases as c; "
        "assert Hardware is type(c.machine()); "
        "r = search(c.deep_model(), c.machine(), Workload(prompt_len=20, gen_len=2), gpu_batch_size=2, "
        "num_gpu_batches=1); assert r.best"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd="tests", check=False
    )
    assert done.returncode == 0, done.stderr


def test_planning_needs_no_torch() -> None:
    code = "import sys, policy.search, policy.calibrate; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("requests", [5, 13, 20])
def test_a_block_has_no_slots_that_no_request_fills(requests: int) -> None:
    workload = Workload(prompt_len=30, gen_len=12, num_requests=requests)
    result = search(cases.model(), cases.cpu_machine(), workload, page_tokens=16)
    assert result.best is not None
    policy = result.best.policy
    assert policy.block_size < requests + policy.num_gpu_batches
