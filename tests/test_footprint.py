"""Footprints, workloads, limits and the exact memory plan."""

from __future__ import annotations

import dataclasses

import planner_cases as cases
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy.footprint import KvShape, ModelFootprint, UnitFootprint, decoder_footprint, packed_unit_nbytes
from policy.memory_plan import cpu_attention_flags, memory_plan, pages_by_tier, unit_homes
from policy.passes import pass_series
from policy.tiers import Placement, Policy, Tier
from policy.workload import Limits, Workload, limits_for
from quant.kv_formats import parse_cache_format


def test_unit_bytes_follow_the_stores_alignment() -> None:
    assert packed_unit_nbytes([1]) == 4096
    assert packed_unit_nbytes([4000, 33]) == 4096
    assert packed_unit_nbytes([4096, 1]) == 8192


def test_opt_30b_has_its_parameters_and_bytes() -> None:
    fp = decoder_footprint(
        name="opt-30b",
        hidden_size=7168,
        n_layers=48,
        n_heads=56,
        ffn_size=28672,
        vocab_size=50272,
        tied=True,
        learned_positions=True,
        biases=True,
    )
    assert fp.n_parameters == pytest.approx(29.97e9, rel=1e-3)
    layers = 48 * (4 * 7168**2 + 8 * 7168**2) * 2
    assert fp.weight_nbytes("f16") == pytest.approx(layers + 50272 * 7168 * 2, rel=2e-3)
    assert fp.kv_elements_per_token() == 2 * 48 * 7168
    head = [u for u in fp.units if u.kind == "head"]
    assert sum(u.linear_shapes[0][0] for u in head) == 50272


def test_grouped_queries_shrink_the_cache_but_not_the_attention() -> None:
    mha, gqa = cases.model(n_kv_heads=8), cases.model(n_kv_heads=2)
    assert mha.kv_elements_per_token() == 4 * gqa.kv_elements_per_token()
    assert mha.units[1].kv is not None and gqa.units[1].kv is not None
    assert mha.units[1].kv.query_elements == gqa.units[1].kv.query_elements


def test_large_vocabulary_is_cut_into_slices_no_larger_than_a_layer() -> None:
    fp = cases.model(vocab_size=50_000)
    largest = max(u.n_elements for u in fp.units if u.layer >= 0)
    slices = [u for u in fp.units if u.kind == "head"]
    assert len(slices) > 1 and max(u.n_elements for u in slices) <= largest + 256


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: KvShape(n_heads=6, n_kv_heads=4, head_dim=8), "multiple"),
        (lambda: KvShape(n_heads=0, n_kv_heads=1, head_dim=8), "n_heads"),
        (lambda: UnitFootprint(name="x", kind="mlp"), "at least one weight format"),
        (lambda: cases.model().resolve_format("int9"), "known: f16"),
        (lambda: Workload(prompt_len=0, gen_len=1), "prompt_len"),
        (lambda: Workload(prompt_len=1, gen_len=-1), "gen_len"),
        (lambda: Workload.from_lengths([]), "at least one request"),
        (lambda: Limits(max_tokens=8, pass_tokens=0), "pass_tokens"),
        (lambda: Limits(max_tokens=8, pass_tokens=8, page_tokens=7), "page_tokens"),
    ],
)
def test_nonsense_is_refused(make: object, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()  # type: ignore[operator]


def test_workload_of_a_distribution() -> None:
    w = Workload.from_lengths([(10, 4), (30, 4), (10, 4), (50, 100)])
    assert (w.prompt_len, w.num_requests, w.max_tokens, w.max_gen_len) == (25, 4, 150, 100)
    assert w.mean_full_pages(16) == pytest.approx((0 + 2 + 0 + 9) / 4)


@given(st.floats(0, 100), st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(0, 100)))
def test_pages_fill_the_fastest_tier_first(filled: float, slots: tuple[int, int, int]) -> None:
    gpu, cpu, disk = pages_by_tier(filled, slots)
    assert gpu + cpu + disk == pytest.approx(filled)
    assert gpu <= slots[0] and cpu <= slots[1]
    assert disk == pytest.approx(0) or (gpu, cpu) == (slots[0], slots[1])


def test_cpu_attention_batches_come_first_and_evenly() -> None:
    assert cpu_attention_flags(4, 2) == (True, False, True, False)
    assert cpu_attention_flags(1, 1) == (True,)
    for n in range(1, 9):
        for k in range(n + 1):
            flags = cpu_attention_flags(n, k)
            assert sum(flags) == k and (k == 0 or flags[0])


def plan_of(policy: Policy, *, workload: Workload | None = None, first_tier: Tier = Tier.GPU):  # type: ignore[no-untyped-def]
    workload = workload or Workload(prompt_len=100, gen_len=30)
    limits = limits_for(
        workload, gpu_batch_size=policy.gpu_batch_size, schedule=policy.schedule, page_tokens=16
    )
    return memory_plan(cases.model(), policy, limits, first_tier=first_tier, compute_dtype="f16"), limits


def all_on(tier: Tier, **more: object) -> Policy:
    on = Placement.all_on(tier)
    values: dict[str, object] = {"gpu_batch_size": 4, "num_gpu_batches": 3, "schedule": "static"}
    return Policy(weights=on, cache=on, activations=on, **(values | more))  # type: ignore[arg-type]


def test_resident_plan_has_no_rings() -> None:
    plan, _ = plan_of(all_on(Tier.GPU))
    purposes = {p for (_, p), n in plan.items.items() if n}
    assert not {p for p in purposes if "ring" in p or "staging" in p}
    assert plan.tier_bytes(Tier.DISK) == 0
    assert set(plan.by_purpose()["cpu"]) == {"tables"}


def test_everything_on_disk_passes_through_cpu() -> None:
    plan, limits = plan_of(all_on(Tier.DISK))
    gpu, cpu, disk = (plan.by_purpose()[t] for t in ("gpu", "cpu", "disk"))
    fp = cases.model()
    largest = max(fp.units[i].nbytes["f16"] for i in fp.streamable)
    assert gpu["weights_ring"] == 2 * largest and cpu["weights_staging"] == 2 * largest
    assert disk["weights"] == fp.weight_nbytes("f16")
    page = parse_cache_format("f16").page_nbytes(page_tokens=16, n_kv_heads=2, head_dim=32)
    slots = 4 * (130 // 16)
    assert disk["kv_pages"] == 3 * 6 * slots * -(-page // 4096) * 4096
    assert cpu["kv_tails"] == 3 * 6 * 4 * 16 * 2 * 2 * 32 * 2
    assert gpu["cache_ring"] == 2 * (slots * page + 4 * 16 * 2 * 2 * 32 * 2)
    assert disk["hidden"] == 3 * 4 * 100 * 256 * 2
    assert gpu["hidden_ring"] == 3 * 4 * 100 * 256 * 2
    assert limits.pass_tokens == 400


def test_two_tiers_read_disk_straight_into_the_ring() -> None:
    plan, _ = plan_of(all_on(Tier.DISK), first_tier=Tier.CPU)
    cpu = plan.by_purpose()["cpu"]
    assert "weights_ring" in cpu and "weights_staging" not in cpu and "cache_staging" not in cpu
    assert "gpu" not in plan.planned_bytes


def test_gpu_fractions_need_a_gpu() -> None:
    with pytest.raises(ValueError, match=r"weights\.gpu_frac"):
        plan_of(all_on(Tier.GPU), first_tier=Tier.CPU)


def test_unpack_scratch_only_where_storage_differs() -> None:
    plain, _ = plan_of(all_on(Tier.CPU))
    packed, _ = plan_of(all_on(Tier.CPU, weight_format="int4-g64"))
    assert plain.items[Tier.GPU, "unpack_scratch"] == 0
    assert packed.items[Tier.GPU, "unpack_scratch"] >= max(u.n_elements for u in cases.model().units) * 2


def test_rows_that_are_multiplied_packed_need_no_unpack_scratch() -> None:
    """Shorter rows are still unpacked, and plain ones of another type copied."""

    def scratch(footprint: ModelFootprint, row_len: int | None, weight_format: str) -> int:
        limits = Limits(max_tokens=64, pass_tokens=64, packed_row_len=row_len)
        policy = all_on(Tier.CPU, weight_format=weight_format)
        plan = memory_plan(footprint, policy, limits, first_tier=Tier.CPU, compute_dtype="bf16")
        return plan.items[Tier.CPU, "unpack_scratch"]

    model = decoder_footprint(
        name="m",
        hidden_size=256,
        n_layers=2,
        n_heads=4,
        ffn_size=1024,
        vocab_size=128,
        weight_formats=("int4-g64", "f16", "bf16", "int8-g64"),
    )
    whole = scratch(model, None, "int4-g64")
    assert whole == 2 * 2 * 256 * 1024
    assert scratch(model, 512, "int4-g64") == 2 * 3 * 256 * 256 + 2 * 256 * 256  # attention's rows are short
    assert scratch(model, 256, "int4-g64") == scratch(model, 1, "int8-g64") == 0
    assert scratch(model, 257, "int4-g64") == max(2 * 4 * 256 * 256, 2 * 256 * 1024)
    assert scratch(model, 1, "f16") == whole and scratch(model, 1, "bf16") == 0


def test_packed_pages_keep_plain_tails() -> None:
    plain, _ = plan_of(all_on(Tier.CPU))
    packed, _ = plan_of(all_on(Tier.CPU, cache_format="int4"))
    assert packed.items[Tier.CPU, "kv_pages"] < 0.4 * plain.items[Tier.CPU, "kv_pages"]
    assert packed.items[Tier.CPU, "kv_tails"] == plain.items[Tier.CPU, "kv_tails"]


def test_cpu_attention_keeps_the_gpus_share_in_cpu_memory() -> None:
    policy = dataclasses.replace(all_on(Tier.GPU), cpu_attention_frac=1.0)
    plan, _ = plan_of(policy)
    assert plan.items[Tier.GPU, "kv_pages"] == 0 and plan.items[Tier.GPU, "kv_tails"] == 0
    assert plan.items[Tier.CPU, "kv_pages"] > 0
    assert plan.page_counts[0] > 0 and plan.cpu_attention_page_counts[0] == 0


fraction3 = st.tuples(st.integers(0, 10), st.integers(0, 10), st.integers(0, 10)).filter(lambda t: sum(t) > 0)


def to_placement(parts: tuple[int, int, int]) -> Placement:
    total = sum(parts)
    return Placement(gpu_frac=parts[0] / total, cpu_frac=parts[1] / total, disk_frac=parts[2] / total)


@settings(max_examples=60, deadline=None)
@given(fraction3, fraction3, fraction3, st.integers(1, 5), st.integers(1, 4), st.integers(0, 4))
def test_every_byte_is_at_home_somewhere(
    w: tuple[int, int, int],
    c: tuple[int, int, int],
    a: tuple[int, int, int],
    gbs: int,
    n: int,
    attends: int,
) -> None:
    """Homes of weights, pages, tails and hidden states add up to the whole, whatever the fractions."""
    policy = Policy(
        weights=to_placement(w),
        cache=to_placement(c),
        activations=to_placement(a),
        gpu_batch_size=gbs,
        num_gpu_batches=n,
        cpu_attention_frac=min(attends, n) / n,
        schedule="static",
    )
    plan, limits = plan_of(policy)
    fp = cases.model()

    def total(purpose: str) -> int:
        return sum(b for (_, p), b in plan.items.items() if p == purpose)

    assert total("weights") == fp.weight_nbytes("f16")
    assert total("kv_tails") == n * plan.sizes.layers_tail_bytes
    assert total("hidden") == n * plan.sizes.hidden_bytes
    assert sum(plan.page_counts) == sum(plan.cpu_attention_page_counts) == plan.sizes.slots
    assert plan.sizes.slots >= gbs * (limits.max_tokens // 16)
    assert all(b >= 0 for b in plan.items.values())
    streamed = [h for h in plan.unit_homes if h > Tier.GPU]
    assert (plan.n_weights_slots == 0) == (not streamed)
    assert unit_homes(fp, policy) == plan.unit_homes
    assert plan.planned_bytes.keys() <= {"gpu", "cpu", "disk"}
    assert limits.depths.weights >= plan.n_weights_slots


def test_static_series_counts_every_token_once() -> None:
    w = Workload(prompt_len=40, gen_len=9, num_requests=20)
    limits = limits_for(w, gpu_batch_size=4, schedule="static", page_tokens=16)
    series = pass_series(w, limits, gpu_batch_size=4, num_gpu_batches=2, schedule="static")
    assert series.blocks == 3 and series.generated_tokens == 180
    assert sum(s.prefill_tokens for s in series.states) == 160
    assert sum(s.decode_tokens for s in series.states) == 4 * 8
    made = sum(s.new_pages for s in series.states)
    assert made == 4 * (48 // 16)
    assert series.states[-1].filled == 4 * (47 // 16)


def test_long_prompts_enter_in_several_passes() -> None:
    w = Workload(prompt_len=1000, gen_len=2)
    limits = limits_for(w, gpu_batch_size=8, schedule="static", max_pass_tokens=2000)
    series = pass_series(w, limits, gpu_batch_size=8, num_gpu_batches=1, schedule="static")
    assert series.n_prefill_passes == 4
    assert sum(s.prefill_tokens for s in series.states) == 8000
    assert max(s.tokens for s in series.states) <= 2000


@pytest.mark.parametrize("lengths", [[(40, 9)] * 100, [(40, 9), (60, 3), (10, 20)] * 30])
def test_refilled_series_serves_every_request(lengths: list[tuple[int, int]]) -> None:
    w = Workload.from_lengths(lengths)
    limits = limits_for(w, gpu_batch_size=8, schedule="refill", page_tokens=16)
    series = pass_series(w, limits, gpu_batch_size=8, num_gpu_batches=2, schedule="refill")
    served = sum(s.prefill_tokens for s in series.states) * 2
    turns = len(lengths) / 16
    share = min(turns, 4.0) / turns
    assert served == pytest.approx(sum(p for p, _ in lengths) * share, rel=1e-3)
    rows = sum(s.rows for s in series.states) * 2
    assert rows == pytest.approx(sum(g for _, g in lengths) * share, rel=1e-2)
    assert max(s.tokens for s in series.states) <= limits.pass_tokens + 1e-6


def test_steady_state_balances_arrivals_and_ends() -> None:
    w = Workload(prompt_len=64, gen_len=16)
    limits = limits_for(w, gpu_batch_size=32, schedule="refill", page_tokens=16)
    (state,) = pass_series(w, limits, gpu_batch_size=32, num_gpu_batches=1, schedule="refill").states
    assert state.prefill_tokens == pytest.approx(2 * 64)
    assert state.decode_tokens == pytest.approx(30)
    assert state.rows == pytest.approx(32)
    assert 64 < state.context < 80


def test_scoring_is_one_prefill() -> None:
    w = Workload(prompt_len=64, gen_len=0)
    limits = limits_for(w, gpu_batch_size=4, schedule="refill")
    series = pass_series(w, limits, gpu_batch_size=4, num_gpu_batches=2, schedule="refill")
    assert len(series.states) == 1 and series.states[0].decode_tokens == 0
