"""Runs beside their plans: bench, batch and score jobs on a tiny model, and what `profile --refit` makes of them."""

from __future__ import annotations

import json
from dataclasses import replace

import planner_cases as cases
import pytest
from tiny_llama import tiny_folder

from flexrun import engine as engine_module
from flexrun.__main__ import main
from flexrun.audit import NO_PROFILE, MeteredEngine, audit_run, known_hardware
from flexrun.llm import LLM
from flexrun.planning import better_of, plan_run
from flexrun.report import audit_rows
from flexrun.request import NumericsError, SamplingParams
from offload.device import make_device
from offload.measure import cache_file
from offload.memory import TierBudgets
from policy.hardware import Curve, Hardware
from policy.search import SearchResult
from policy.tiers import Placement, Plan, Policy, Tier, load_policy
from policy.workload import Limits, Workload


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tiny_folder(tmp_path, torch_dtype="bfloat16")


@pytest.fixture
def profile(folder):
    """A profile of "this machine" on which linear layers take nearly all the time."""
    hardware = cases.cpu_machine(
        name="slow",
        cpu_mem_bytes=1 << 30,
        disk_mem_bytes=1 << 30,
        compute_dtype="f32",
        gemm={"f32": Curve(tokens=(1, 64), flops_per_s=(2e7, 2e7))},
    )
    file = cache_file(make_device("cpu"))
    file.parent.mkdir(parents=True)
    hardware.save(file)
    return hardware


def model_flags(folder):
    return ["-m", str(folder), "--dummy-weights", "--device", "cpu", "--dtype", "float32"]


def bench(folder, capsys, *flags):
    sizes = ["--prompt-len", "40", "--gen-len", "6", "--num-requests", "6", "--disk-dir", str(folder)]
    assert main(["bench", *model_flags(folder), "--json", *sizes, *flags]) == 0
    captured = capsys.readouterr()
    return json.loads(captured.out), captured.err


def batch(folder, capsys, lines, *flags):
    source, target = folder / "in.jsonl", folder / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["batch", *model_flags(folder), "-i", str(source), "-o", str(target), "--json", "--ignore-eos"]
    assert main([*words, *flags]) == 0
    captured = capsys.readouterr()
    return json.loads(captured.out), captured.err


def prompts(n, length, **options):
    return [{"prompt": [3 + i % 7] * length, "temperature": 0, **options} for i in range(n)]


def test_the_audits_bytes_are_those_of_the_arenas(folder):
    llm = LLM(
        str(folder),
        device="cpu",
        dummy_weights=True,
        gpu_mem="32MiB",
        disk_dir=folder / "disk",
        weights=Placement(gpu_frac=0.4, cpu_frac=0.3, disk_frac=0.3),
        cache=Placement(cpu_frac=1.0),
        gpu_batch_size=4,
    )
    with llm:
        meter = MeteredEngine(llm)
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        meter.add_request("a", list(range(70)), params)
        meter.add_request("s", list(range(31)), params, score_from=5)
        while meter.has_unfinished():
            meter.step()
        audit = audit_run(llm, meter, Workload(prompt_len=70, gen_len=4, num_requests=9))
        for tier in (Tier.GPU, Tier.CPU):
            assert audit["tiers"][tier.label]["measured_bytes"] == llm.runtime.arenas[tier].used_bytes > 0
        for tier, entry in llm.runtime.audit().items():
            assert audit["tiers"][tier]["planned_bytes"] == entry.planned_bytes
    assert audit["predicted"] is None and NO_PROFILE in audit["notes"]
    assert audit["run"]["workload"]["lengths"] == [[30, 0, 1], [70, 4, 1]], "what was fed and generated"
    assert any("planned for 9 x (70 + 4 tokens); ran 2 x" in note for note in audit["notes"])
    phases = audit["measured"]["phases"]
    assert phases["prefill"]["busy_seconds"]["disk_read"] > 0 and phases["decode"]["bytes"]["upload"] > 0
    rows = {row[0]: row for row in audit_rows(audit)}
    assert rows["gpu memory, arenas"][3] == "1.000" and rows["all passes"][1] == "-"


def test_a_pass_with_unusable_logits_is_measured_like_others(folder, monkeypatch):
    with LLM(str(folder), device="cpu", dtype="float32", dummy_weights=True, gpu_batch_size=2) as llm:
        meter = MeteredEngine(llm)
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        meter.add_request("bad", [5, 6, 7], params)
        meter.add_request("good", [8, 9, 10, 11], params)
        real = engine_module.sample

        def fails(logits, states, **options):
            found = real(logits, states, **options)
            return replace(found, valid=[False, *found.valid[1:]])

        monkeypatch.setattr(engine_module, "sample", fails)
        with pytest.raises(NumericsError, match="bad"):
            meter.step()
        monkeypatch.setattr(engine_module, "sample", real)
        prefill = meter.times().phases["prefill"]
        assert prefill.wall_seconds > 0 and prefill.busy_seconds["compute"] > 0
        while meter.has_unfinished():
            meter.step()
        times, stats = meter.times(), llm.engine.stats
        assert times.phases["prefill"] == prefill, "what it took is not added to the next pass"
        assert times.wall_seconds == pytest.approx(stats.prefill_seconds + stats.decode_seconds)
        assert meter.n_passes == stats.passes == 3 and times.phases["decode"].wall_seconds > 0


def test_without_a_profile_one_line_says_how_to_get_one(folder, capsys):
    result, err = bench(folder, capsys)
    assert err.count("this machine has not been measured, so the built-in placement is used") == 1
    assert "flexrun profile" in err and "plan\n" not in err
    assert result["audit"]["predicted"] is None and result["audit"]["notes"] == [NO_PROFILE]
    assert result["audit"]["run"]["workload"] == Workload(prompt_len=40, gen_len=6, num_requests=6).to_dict()
    _, err = bench(folder, capsys, "--policy", "default")
    assert "built-in placement is used" not in err


def test_a_plan_is_made_printed_and_audited(folder, profile, capsys):
    result, err = bench(folder, capsys)
    assert err.index("reason") < err.index("the run beside its plan")
    audit = result["audit"]
    assert audit["notes"] == []
    predicted = audit["predicted"]
    assert predicted["wall_seconds"] == pytest.approx(
        sum(phase["wall_seconds"] for phase in predicted["phases"].values())
    )
    # Six prompts of 40 tokens, then five more tokens each, at 2e7 FLOP/s.
    footprint = known_hardware(make_device("cpu"))
    assert footprint == profile
    flops = 2 * 3 * (64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 128)
    busy = [predicted["phases"][name]["busy_seconds"]["compute"] for name in ("prefill", "decode")]
    assert sum(busy) == pytest.approx(flops * 6 * 45 / 2e7, rel=0.2)
    assert busy[0] > 3 * busy[1]
    for phase in audit["measured"]["phases"].values():
        assert phase["wall_seconds"] > 0 and phase["busy_seconds"]["compute"] > 0
    _, err = bench(folder, capsys, "--policy", "default")
    assert "reason" not in err and "the run beside its plan" in err


def test_a_schedule_that_was_asked_for_is_planned(folder, profile, capsys):
    for name in ("static", "refill"):
        result, err = bench(folder, capsys, "--schedule", name)
        assert result["policy"]["schedule"] == name and "reason" in err


def test_a_batch_is_planned_for_the_lengths_in_its_file(folder, profile, capsys):
    summary, err = batch(folder, capsys, prompts(5, 20, max_tokens=3), "--limit", "4")
    assert "planning for 4 x (20 + 3 tokens), from all lines" in err
    assert summary["audit"]["planned_workload"]["prompt_len"] == 20
    lines = [*prompts(5, 20, max_tokens=3), *prompts(6, 300, max_tokens=5)]
    summary, err = batch(folder, capsys, lines, "--overwrite")
    assert "planning for 11 x (173 + 4 tokens), up to 300 + 5, from all lines" in err
    run = summary["audit"]["run"]
    assert run["workload"]["lengths"] == [[20, 3, 5], [300, 5, 6]]
    assert run["limits"]["max_tokens"] >= 305 and run["limits"]["mean_pages"] > 1
    assert summary["audit"]["notes"] == [] and summary["audit"]["predicted"]["wall_seconds"] > 0


def test_a_job_that_ends_early_is_predicted_again_for_what_ran(folder, profile, capsys):
    lines = [{"prompt": [5, 6, 7], "max_tokens": 40, "temperature": 0, "stop_token_ids": list(range(320))}]
    summary, err = batch(folder, capsys, lines * 3)
    audit = summary["audit"]
    assert audit["planned_workload"]["gen_len"] == 40 and audit["run"]["workload"]["gen_len"] == 1
    assert "planned for 3 x (3 + 40 tokens); ran 3 x (3 + 1 tokens): predicted again" in err
    assert audit["predicted"]["phases"]["decode"]["wall_seconds"] == pytest.approx(0, abs=1e-9)


def test_scores_are_audited_too(folder, profile, capsys):
    source = folder / "pairs.jsonl"
    source.write_text(json.dumps({"context": [1, 2, 3], "continuation": [4, 5]}) + "\n")
    words = ["score", *model_flags(folder), "-i", str(source), "-o", str(folder / "s.jsonl"), "--json"]
    assert main(words) == 0
    run = json.loads(capsys.readouterr().out)["audit"]["run"]
    assert (run["workload"]["prompt_len"], run["workload"]["gen_len"]) == (4, 0)


def test_formats_are_chosen_only_where_asked_and_stay_when_a_job_goes_on(folder, profile, capsys):
    slow = replace(profile, disk_read_bytes_per_s=1e3, cpu_mem_bytes=1 << 30)
    slow.save(cache_file(make_device("cpu")))
    lines = prompts(4, 30, max_tokens=3)
    summary, err = batch(folder, capsys, lines[:2])
    assert "--weight-format auto" not in err and summary["audit"]["run"]["policy"]["cache_format"] != "int8"
    auto = ("--weight-format", "auto", "--cache-format", "auto")
    _, err = batch(folder, capsys, lines, *auto, "--overwrite", "--limit", "2")
    stated = [line for line in err.splitlines() if line.startswith("note: --")]
    assert len(stated) == 2 and all("predicted to be fastest" in line for line in stated)
    chosen = json.loads((folder / "out.jsonl.manifest.json").read_text())["settings"]
    _, err = batch(folder, capsys, lines, *auto)
    assert err.count("as in the earlier results") == 2
    assert json.loads((folder / "out.jsonl.manifest.json").read_text())["settings"] == chosen
    _, err = bench(folder, capsys, "--policy", "default", "--weight-format", "auto")
    assert "--weight-format auto: bf16 (the checkpoint's own" in err
    file = folder / "policy.json"
    policy = Policy.from_dict({**summary["audit"]["run"]["policy"], "weight_format": "int4-g32"})
    file.write_text(json.dumps(policy.to_dict()))
    result, err = bench(folder, capsys, "--policy", str(file), "--weight-format", "auto")
    assert "--weight-format auto: bf16 (the checkpoint's own" in err
    assert result["policy"]["weight_format"] == "auto", "what is said is what runs"
    source = folder / "pairs.jsonl"
    source.write_text(json.dumps({"context": [1, 2, 3], "continuation": [4, 5]}) + "\n")
    words = ["score", *model_flags(folder), "-i", str(source), "-o", str(folder / "s.jsonl"), *auto]
    assert main(words) == 0
    stated = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: --")]
    assert stated and all(line.endswith(" total tokens/s)") and ", 0.0 " not in line for line in stated)


def test_a_plan_that_shortens_sequences_says_so(folder, profile):
    work = Workload(prompt_len=20, gen_len=4, num_requests=64)
    model = {"device": "cpu", "dtype": "float32", "dummy_weights": True, "disk_dir": folder / "disk"}
    with LLM(str(folder), cpu_mem="2MiB", workload=work, **model) as llm:
        assert llm.max_model_len < 512
        assert any(f"end at {llm.max_model_len} tokens instead of 512" in note for note in llm.notes)
    with LLM(str(folder), cpu_mem="256MiB", workload=work, **model) as llm:
        assert llm.max_model_len == 512 and not any("instead of" in note for note in llm.notes)


def test_scores_and_admission_do_not_depend_on_the_memory_that_is_planned_with(folder, profile):
    """Blocks fill the memory; a sequence as long as the model allows, unknown to the plan, runs all the same."""
    work = Workload(prompt_len=20, gen_len=0, num_requests=5000)
    model = {"device": "cpu", "dtype": "float32", "dummy_weights": True, "disk_dir": folder / "disk"}
    scores = []
    for memory in ("12MiB", "256MiB"):
        with LLM(str(folder), cpu_mem=memory, workload=work, **model) as llm:
            assert llm.search.best is not None and llm.max_model_len == llm.scorer.max_len == 512
            scores.append(llm.score_text([[3 + i % 90 for i in range(700)]])[0].logprob)
            params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
            answer = llm.generate([list(range(3, 303)) + [5] * 207], params)[0].outputs[0]
            assert len(answer.token_ids) == 5, "512 tokens in all"
    assert scores[0] == pytest.approx(scores[1], abs=1e-2)


def test_a_plan_never_admits_more_than_was_asked_for(folder, profile):
    work = Workload(prompt_len=99, gen_len=0, num_requests=3)
    model = {"device": "cpu", "dtype": "float32", "dummy_weights": True, "disk_dir": folder / "disk"}
    for memory in ("4MiB", "256MiB"):
        with LLM(str(folder), cpu_mem=memory, workload=work, max_model_len=99, **model) as llm:
            assert llm.max_model_len == 99


# -- refitting -----------------------------------------------------------------------------------------------


def report(folder, capsys, **factors):
    """A bench report whose lanes took what was predicted, those named so much longer."""
    result, _ = bench(folder, capsys, "--num-requests", "30", "--prompt-len", "100")
    measured, predicted = result["audit"]["run"]["measured"], result["audit"]["predicted"]
    for name, phase in measured["phases"].items():
        seconds = predicted["phases"][name]["busy_seconds"]
        phase["busy_seconds"] = {lane: s * factors.get(lane, 1.0) for lane, s in seconds.items()}
    measured["sampling_seconds"] = predicted["sampling_seconds"]
    file = folder / "report.json"
    file.write_text(json.dumps(result))
    return file


def test_a_report_of_slower_compute_refits_its_rate(folder, profile, capsys):
    file, out = report(folder, capsys, compute=2.0), folder / "fitted.json"
    assert main(["profile", "--device", "cpu", "--refit", str(file), "-o", str(out), "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["factors"]["gemm"] * found["factors"]["gemm_small"] == pytest.approx(0.5, rel=0.1)
    assert found["error_after"] < 0.02 < found["error_before"]
    assert found["factors"]["disk_read_bytes_per_s"] == pytest.approx(1.0, abs=0.02)
    assert found["seen"]["upload_bytes_per_s"] == "no"
    fitted = Hardware.load(out)
    assert fitted.gemm["f32"].flops_per_s[-1] < 0.8 * profile.gemm["f32"].flops_per_s[-1]
    assert known_hardware(make_device("cpu")) == profile, "with -o the profile stays"
    assert "gemm" in captured.err and "known" in captured.err
    assert main(["profile", "--device", "cpu", "--refit", str(file)]) == 0
    assert known_hardware(make_device("cpu")) == fitted


def test_bad_reports_give_one_error_that_names_them(folder, profile, capsys):
    good = report(folder, capsys)
    result = json.loads(good.read_text())
    bad = folder / "bad.json"
    other = {**result["audit"]["run"], "machine_id": "f" * 16}
    short = {k: v for k, v in result["audit"]["run"].items() if k != "limits"}
    typed = {**result["audit"]["run"], "compute_dtype": "f17"}
    for content, message in (
        (None, "cannot read the report"),
        ("{broken", "is not a report"),
        ("[1]", "holds no prediction data"),
        ('{"wall_seconds": 3}', 'no "audit"'),
        (json.dumps({"audit": {"run": None}}), "no request finished"),
        (json.dumps({"audit": {"run": other}}), "of another machine"),
        (json.dumps({"audit": {"run": short}}), "lacks 'limits'"),
        (json.dumps({"audit": {"run": typed}}), "compute_dtype must be"),
    ):
        bad.unlink(missing_ok=True)
        if content is not None:
            bad.write_text(content)
        capsys.readouterr()
        assert main(["profile", "--device", "cpu", "--refit", str(good), str(bad)]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and str(bad) in err and message in err
    cache_file(make_device("cpu")).unlink()
    assert main(["profile", "--device", "cpu", "--refit", str(good)]) == 2
    assert "run flexrun profile first" in capsys.readouterr().err


# -- planning ------------------------------------------------------------------------------------------------


def plan_of(rate: float) -> Plan:
    policy = Policy(
        weights=Placement(cpu_frac=1.0),
        cache=Placement(cpu_frac=1.0),
        activations=Placement(cpu_frac=1.0),
        gpu_batch_size=4,
    )
    predicted = {"generated_tokens_per_s": rate, "total_tokens_per_s": 5 * rate}
    return Plan(policy=policy, unit_homes=(), page_counts=(0, 0, 0), predicted=predicted)


def test_the_built_in_choice_is_taken_where_it_is_predicted_to_be_faster():
    limits, other = Limits(max_tokens=8, pass_tokens=8), Limits(max_tokens=9, pass_tokens=9)
    found = SearchResult(
        best=plan_of(10.0), front=(), reasons=(), binding_resource="compute", search_seconds=0, limits=limits
    )
    kept, kept_limits = better_of(found, (plan_of(9.0), other))
    assert kept.best == found.best and kept_limits is limits and "90%" in kept.reasons[-1]
    taken, taken_limits = better_of(found, (plan_of(12.0), other))
    assert taken.best.predicted["generated_tokens_per_s"] == 12.0 and taken_limits is other
    assert "1.20 times as fast" in taken.reasons[0]
    nothing = replace(found, best=None, limits=None, infeasible="no room")
    assert better_of(nothing, None) == (nothing, None)
    assert better_of(nothing, (plan_of(1.0), other))[1] is other


@pytest.mark.parametrize("gen_len", [0, 12])
def test_a_plan_is_never_predicted_slower_than_the_built_in_choice(gen_len, monkeypatch):
    from flexrun import planning

    seen = []
    whole = planning.better_of
    monkeypatch.setattr(planning, "better_of", lambda *a: (seen.append(a), whole(*a))[1])
    workload = Workload(prompt_len=100, gen_len=gen_len, num_requests=40)
    _, limits, found = plan_run(
        cases.model(),
        cases.cpu_machine(),
        workload,
        budgets=TierBudgets(cpu_bytes=12 << 20, disk_bytes=400 << 20),
        first_tier=Tier.CPU,
        compute_dtype="f16",
        page_tokens=16,
        max_model_len=200,
    )
    built_in = seen[0][1]
    assert built_in is not None
    ours, theirs = found.best.predicted, built_in[0].predicted
    assert ours["total_tokens_per_s"] >= 0.99 * theirs["total_tokens_per_s"] > 0
    assert found.best.planned_bytes["cpu"] <= 12 << 20 and limits.max_tokens >= 100 + gen_len


@pytest.mark.parametrize("gen_len", [0, 12])
def test_the_longest_sequence_does_not_depend_on_the_plan(gen_len):
    """It is what was asked for wherever one such sequence fits, else as long as one can be, token for token."""
    longest = {}
    for mib in (6, 24, 48, 96):
        policy, limits, found = plan_run(
            cases.model(),
            cases.cpu_machine(),
            Workload(prompt_len=30, gen_len=gen_len),
            budgets=TierBudgets(cpu_bytes=mib << 20, disk_bytes=400 << 20),
            first_tier=Tier.CPU,
            compute_dtype="f16",
            page_tokens=16,
            max_model_len=1000,
        )
        assert found.best.policy == policy and found.limits == limits
        assert found.best.planned_bytes["cpu"] <= mib << 20
        longest[mib] = limits.max_tokens
    assert longest[24] == longest[48] == longest[96] == 1000 > longest[6] > 30 + gen_len


def test_the_built_in_choice_is_predicted_in_full(monkeypatch):
    from flexrun import planning

    nothing = SearchResult(best=None, front=(), reasons=(), binding_resource="", search_seconds=0.0)
    options = {
        "budgets": TierBudgets(cpu_bytes=96 << 20, disk_bytes=400 << 20),
        "first_tier": Tier.CPU,
        "compute_dtype": "f16",
        "page_tokens": 16,
    }
    work = Workload(prompt_len=30, gen_len=12, num_requests=40)
    machine = cases.cpu_machine(price_per_hour=2.0)
    _, _, ours = plan_run(cases.model(), machine, work, **options)
    monkeypatch.setattr(planning, "search", lambda *a, **k: nothing)
    policy, limits, theirs = plan_run(cases.model(), machine, work, max_model_len=1000, **options)
    assert theirs.best.predicted.keys() == ours.best.predicted.keys()
    speed = theirs.best.predicted["generated_tokens_per_s"]
    assert theirs.best.predicted["cost_per_million_tokens"] == pytest.approx(2.0 / 3600 / speed * 1e6)
    assert theirs.warnings == ("everything fits memory: this plan does not offload",)
    assert "the search found no plan" in theirs.best.notes[0] and limits.max_tokens == 1000


def test_plan_takes_lengths_from_a_batch_file(folder, tmp_path, capsys):
    file = tmp_path / "in.jsonl"
    lines = [{"prompt": [1] * n, "max_tokens": 7} for n in (50, 100)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["plan", "-m", "opt-125m", "--hardware", "rtx-3090", "--json", "--batch-file", str(file)]
    assert main(words) == 0
    captured = capsys.readouterr()
    assert "planning for 2 x (75 + 7 tokens), up to 100 + 7" in captured.err
    assert json.loads(captured.out)["predicted"]["limits"]["max_tokens"] == 107
    assert main([*words, "--gen-len", "3"]) == 2 and "leave --prompt-len" in capsys.readouterr().err
    file.write_text("{}\n")
    assert main(words) == 2 and "holds no request" in capsys.readouterr().err
    assert main([*words[:-1], "missing.jsonl"]) == 2
    assert "cannot read the batch file missing.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize("stored", ["mixed", "q6_k", "int4-g32-sym"])
def test_a_plan_for_a_packed_checkpoint_keeps_it_as_it_is(stored, tmp_path, monkeypatch, capsys):
    plain = cases.model()
    units = tuple(
        replace(u, nbytes={stored: u.nbytes["f16"]}, table_nbytes={stored: u.table_nbytes.get("f16", 0)})
        for u in plain.units
    )
    packed = replace(plain, units=units, native_format=stored)
    monkeypatch.setattr("flexrun.cli.plan.find_footprint", lambda *a: packed)
    words = ["plan", "-m", "x", "--prompt-len", "32", "--gen-len", "4", "--hardware", "rtx-3090"]
    assert main([*words, "-o", str(tmp_path / "plan.json")]) == 0
    assert load_policy(tmp_path / "plan.json").weight_format == "auto"


def test_a_profile_that_cannot_be_used_does_not_spoil_a_finished_run(folder, profile, capsys, monkeypatch):
    def fail(*args):
        raise ValueError("bent out of shape")

    monkeypatch.setattr("flexrun.audit.predict_times", fail)
    summary, err = batch(folder, capsys, prompts(2, 5, max_tokens=2))
    assert summary["succeeded"] == 2 and summary["audit"]["predicted"] is None
    assert "profile cannot be used (bent out of shape)" in err
