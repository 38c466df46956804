"""`flexrun bench`, `plan` and `info` as a user calls them, on a tiny model with random weights."""

import json

import pytest
from tiny_llama import TINY, tiny_folder

from flexrun.__main__ import main
from flexrun.defaults import Wish, default_policy
from flexrun.llm import LLM
from flexrun.model.config import config_from_hf
from flexrun.model.footprint import model_footprint
from flexrun.request import SamplingParams
from offload.memory import TierBudgets
from policy.memory_plan import memory_plan
from policy.tiers import Placement, Tier
from policy.workload import Workload


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tiny_folder(tmp_path)


def bench(folder, capsys, *flags):
    words = ["bench", "-m", str(folder), "--dummy-weights", "--device", "cpu", "--json"]
    sizes = [
        "--prompt-len",
        "40",
        "--gen-len",
        "5",
        "--num-requests",
        "6",
        "--disk-dir",
        str(folder / "disk"),
    ]
    assert main([*words, *sizes, *flags]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--weights", "0,0,1", "--cache", "0,0,1", "--activations", "0,0,1", "--num-gpu-batches", "2"),
        ("--gpu-mem", "64MiB", "--weights", "0.3,0.4,0.3", "--cache", "0,1,0", "--cpu-attention-frac", "1"),
    ],
    ids=["memory", "disk", "three tiers"],
)
def test_bench_reports_lanes_bytes_and_the_bound(folder, capsys, flags):
    trace = folder / "trace.json"
    result = bench(
        folder, capsys, "--gpu-batch-size", "3", "--schedule", "static", "--trace", str(trace), *flags
    )
    assert result["generated_tokens_per_s"] == pytest.approx(30 / result["wall_seconds"])
    assert result["prefill_seconds"] + result["decode_seconds"] == pytest.approx(
        result["wall_seconds"], rel=0.2
    )
    assert result["measured_bytes"] == pytest.approx(result["planned_bytes"], rel=0.01, abs=3 * 8192)
    assert result["efficiency_frac"] == pytest.approx(result["bound_seconds"] / result["wall_seconds"])
    assert result["bound_seconds"] >= result["whole_run_bound_seconds"] - 1e-9
    streamed = "0,0,1" in flags or "0.3,0.4,0.3" in flags
    assert (result["lanes"]["disk_read"]["bytes"] > 0) is streamed
    rows = {event.get("tid") for event in json.loads(trace.read_text())["traceEvents"]}
    assert len(rows) >= (2 if streamed else 1)
    assert not (folder / "disk").exists() or not list((folder / "disk").glob("flexrun-spill-*"))


def test_plan_names_what_rests_where_and_what_binds(capsys, tmp_path):
    plan = tmp_path / "plan.json"
    words = ["plan", "-m", "opt-30b", "--prompt-len", "512", "--gen-len", "32", "--hardware", "t4-gcp"]
    assert main([*words, "--json", "-o", str(plan)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["policy"]["weight_format"] == "f16", "nothing is quantised unless asked for"
    assert 0 < found["predicted"]["generated_tokens_per_s"] <= found["bound"]["generated_tokens_per_s"]
    assert found["planned_bytes"]["gpu"] <= 15 * 2**30 and found["planned_bytes"]["cpu"] <= 208 * 2**30
    assert found["binding_resource"] and found["search_seconds"] > 0
    assert json.loads(plan.read_text())["policy"] == found["policy"]


def test_plan_says_what_is_short(capsys):
    words = [
        "plan",
        "-m",
        "opt-175b",
        "--prompt-len",
        "512",
        "--gen-len",
        "32",
        "--hardware",
        "t4-gcp",
        "--json",
    ]
    assert main([*words, "--cpu-mem", "1GiB", "--disk-mem", "10GB"]) == 2
    out, err = capsys.readouterr()
    assert "disk memory is short by" in err and "What would do" in err
    assert json.loads(out)["policy"] is None


def test_plan_refuses_unknown_machines_with_the_nearest_names(capsys):
    words = ["plan", "-m", "opt-30b", "--prompt-len", "8", "--gen-len", "8", "--hardware", "t4-gpc"]
    assert main(words) == 2
    assert "t4-gcp" in capsys.readouterr().err


def footprint():
    return model_footprint(config_from_hf(TINY), name="tiny")


def test_the_built_in_choice_keeps_weights_in_the_fastest_memory_that_holds_them():
    roomy = TierBudgets(cpu_bytes=1 << 30, disk_bytes=1 << 30)
    policy, limits = default_policy(
        footprint(), Wish(), budgets=roomy, first_tier=Tier.CPU, compute_dtype="f32", max_model_len=512
    )
    assert policy.weights == Placement(cpu_frac=1.0) and limits.max_tokens == 512
    plan_bytes = footprint().weight_nbytes("auto")
    tight = TierBudgets(cpu_bytes=(1 << 22) + plan_bytes // 2, disk_bytes=1 << 30)
    policy, limits = default_policy(
        footprint(),
        Wish(),
        budgets=tight,
        first_tier=Tier.CPU,
        compute_dtype="f32",
        max_model_len=128,
        prompt_len=64,
        gen_len=8,
    )
    assert limits.max_tokens == 72


def test_memory_to_work_in_shrinks_before_weights_leave_memory():
    def choice(cpu_bytes):
        return default_policy(
            footprint(),
            Wish(gpu_batch_size=16),
            budgets=TierBudgets(cpu_bytes=cpu_bytes, disk_bytes=1 << 30),
            first_tier=Tier.CPU,
            compute_dtype="f32",
            max_model_len=128,
            prompt_len=64,
            gen_len=8,
        )

    def needed(policy, limits):
        plan = memory_plan(footprint(), policy, limits, first_tier=Tier.CPU, compute_dtype="f32")
        return plan.tier_bytes(Tier.CPU)

    policy, limits = choice(1 << 30)
    assert limits.chunk_tokens == 1024 and policy.weights == Placement(cpu_frac=1.0)
    tighter, fewer = choice(needed(policy, limits) - 1)
    assert fewer.chunk_tokens == 512 and tighter == policy
    tightest, fewest = choice(needed(policy, fewer) - 1)
    assert fewest.chunk_tokens == 256 and tightest == policy
    streamed, _ = choice(needed(policy, fewest) - 1)
    assert streamed.weights.disk_frac > 0


def test_four_units_of_streamed_weights_are_held_where_there_is_room():
    def choice(cpu_bytes):
        policy, limits = default_policy(
            footprint(),
            Wish(gpu_batch_size=4, weights=Placement(disk_frac=1.0)),
            budgets=TierBudgets(cpu_bytes=cpu_bytes, disk_bytes=1 << 30),
            first_tier=Tier.CPU,
            compute_dtype="f32",
            max_model_len=128,
            prompt_len=64,
            gen_len=8,
        )
        plan = memory_plan(footprint(), policy, limits, first_tier=Tier.CPU, compute_dtype="f32")
        return limits, plan

    limits, plan = choice(1 << 30)
    assert limits.weights_slots == plan.n_weights_slots == 4
    fewer, smaller = choice(plan.tier_bytes(Tier.CPU) - 1)
    assert fewer.weights_slots == smaller.n_weights_slots == 3 and fewer.chunk_tokens == limits.chunk_tokens
    assert plan.tier_bytes(Tier.CPU) - smaller.tier_bytes(Tier.CPU) == plan.weights_slot_bytes


def test_a_budget_too_small_for_anything_names_the_least_that_would_do():
    with pytest.raises(ValueError, match=r"short by .* the least that would do is --cpu-mem \d+"):
        default_policy(
            footprint(),
            Wish(),
            budgets=TierBudgets(cpu_bytes=100_000, disk_bytes=1 << 30),
            first_tier=Tier.CPU,
            compute_dtype="f32",
            max_model_len=512,
        )


def test_no_run_sets_a_model_of_128k_positions_aside_unasked(folder, monkeypatch):
    """The longest sequence is a matter of what is asked for and known, not of memory."""
    monkeypatch.setattr("flexrun.llm.MAX_MODEL_LEN", 200)
    given = {"device": "cpu", "dummy_weights": True, "cpu_mem": "256MiB", "gpu_batch_size": 2}
    with LLM(str(folder), **given) as llm:
        assert llm.max_model_len == 200 and any("200 of the model's 512" in note for note in llm.notes)
        with pytest.raises(ValueError, match="unless --max-model-len says more"):
            llm.generate([[5] * 200], SamplingParams(max_tokens=8))
    with LLM(str(folder), max_model_len=512, **given) as llm:
        assert llm.max_model_len == 512 and not any("positions" in note for note in llm.notes)
    with LLM(str(folder), workload=Workload(prompt_len=300, gen_len=20), policy="default", **given) as llm:
        assert llm.max_model_len == 320
