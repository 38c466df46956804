"""The planner's predictions beside real runs: two model shapes, two and three tiers, many policies.

    python -m experiments.plan_vs_run [--hardware hardware.json] [--repeats 2] [--plot FILE] [--only NAME]

Every policy is predicted by the simulator from this machine's profile, then run (random weights in the presets'
real shapes, a static or refilled schedule, all in one process) in shuffled rounds, of which the median counts.
For each scenario (model, budgets, formats) the planner's own choice runs among the others. Reports the deviation
of every run and how the automatic plan compares with the best policy of its scenario. Table, then JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flexrun.audit import MeteredEngine
from flexrun.llm import LLM, default_disk_dir
from flexrun.planning import plan_run
from flexrun.probe import probe_hardware
from flexrun.request import SamplingParams
from offload.budgets import choose_budgets
from offload.device import make_device
from offload.measure import measure_hardware
from policy.audit import placed_run, series_of
from policy.hardware import Hardware
from policy.simulate import Simulation, simulate
from policy.tiers import Placement, Policy, Tier
from policy.workload import Workload


def _place(text: str) -> Placement:
    return Placement.parse(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A model, what there is to do, and the memory to do it in; policies compete within it."""

    name: str
    model: str
    workload: Workload
    cpu_mem: str
    gpu_mem: str | None = None
    weight_format: str = "auto"
    cache_format: str = "auto"
    policies: dict[str, dict[str, Any]] = field(default_factory=dict)


SMALL = Workload(prompt_len=64, gen_len=12, num_requests=32)
LONG = Workload(prompt_len=320, gen_len=8, num_requests=8)
MHA = Workload(prompt_len=32, gen_len=8, num_requests=24)
CPU, GPU, DISK = "0,1,0", "1,0,0", "0,0,1"

SCENARIOS = (
    Scenario(
        name="gqa, 2 tiers",
        model="smollm2-135m",
        workload=SMALL,
        cpu_mem="1200MiB",
        policies={
            "in memory, 32 x 1": {"weights": CPU, "cache": CPU, "shape": (32, 1)},
            "in memory, 8 x 4": {"weights": CPU, "cache": CPU, "shape": (8, 4)},
            "weights on disk, 32 x 1": {"weights": DISK, "cache": CPU, "shape": (32, 1)},
            "weights on disk, 4 x 2": {"weights": DISK, "cache": CPU, "shape": (4, 2)},
            "half the weights on disk, 16 x 1, refilled": {
                "weights": "0,0.5,0.5",
                "cache": CPU,
                "shape": (16, 1),
                "schedule": "refill",
            },
        },
    ),
    Scenario(
        name="gqa, long prompts, 2 tiers",
        model="smollm2-135m",
        workload=LONG,
        cpu_mem="800MiB",
        policies={
            "weights and cache on disk, 4 x 2": {"weights": DISK, "cache": DISK, "shape": (4, 2)},
            "cache on disk, 2 x 4": {"weights": CPU, "cache": DISK, "shape": (2, 4)},
            "cache half on disk, 8 x 1": {"weights": DISK, "cache": "0,0.5,0.5", "shape": (8, 1)},
        },
    ),
    Scenario(
        name="gqa, 4-bit weights, 3 tiers",
        model="smollm2-135m",
        workload=SMALL,
        gpu_mem="400MiB",
        cpu_mem="800MiB",
        weight_format="int4-g64",
        policies={
            "weights uploaded, 16 x 2": {"weights": CPU, "cache": GPU, "shape": (16, 2)},
            "half on gpu, cache on cpu, 8 x 4": {"weights": "0.5,0.5,0", "cache": CPU, "shape": (8, 4)},
            "half attends on the CPU, 8 x 4": {
                "weights": "0.5,0.5,0",
                "cache": CPU,
                "shape": (8, 4),
                "cpu_attention": 0.5,
            },
        },
    ),
    Scenario(
        name="mha, 2 tiers",
        model="pythia-410m",
        workload=MHA,
        cpu_mem="2GiB",
        policies={
            "in memory, 24 x 1": {"weights": CPU, "cache": CPU, "shape": (24, 1)},
            "weights on disk, 12 x 2": {"weights": DISK, "cache": CPU, "shape": (12, 2)},
            "weights on disk, 2 x 2": {"weights": DISK, "cache": CPU, "shape": (2, 2), "requests": 8},
            "no overlap, 12 x 2": {"weights": DISK, "cache": CPU, "shape": (12, 2), "overlap": False},
        },
    ),
    Scenario(
        name="mha, 4-bit weights and cache, 2 tiers",
        model="pythia-410m",
        workload=MHA,
        cpu_mem="700MiB",
        weight_format="int4-g64",
        cache_format="int4",
        policies={
            "weights on disk, 12 x 2": {"weights": DISK, "cache": CPU, "shape": (12, 2)},
            "in memory, 24 x 1": {"weights": CPU, "cache": CPU, "shape": (24, 1)},
        },
    ),
    Scenario(
        name="mha, 3 tiers",
        model="pythia-410m",
        workload=MHA,
        gpu_mem="1200MiB",
        cpu_mem="1200MiB",
        policies={
            "weights over three tiers, 12 x 2": {
                "weights": "0.3,0.3,0.4",
                "cache": CPU,
                "activations": CPU,
                "shape": (12, 2),
            },
            "all attends on the CPU, 6 x 4": {
                "weights": CPU,
                "cache": CPU,
                "shape": (6, 4),
                "cpu_attention": 1.0,
            },
            "weights on disk, hidden states on disk, 6 x 4": {
                "weights": DISK,
                "cache": GPU,
                "activations": DISK,
                "shape": (6, 4),
            },
        },
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One policy of a scenario, ready to be built again for every round."""

    scenario: Scenario
    name: str
    policy: Policy
    workload: Workload
    planned: bool = False

    def load(self) -> LLM:
        s = self.scenario
        return LLM(
            s.model,
            device="cpu",
            dummy_weights=True,
            gpu_mem=s.gpu_mem,
            cpu_mem=s.cpu_mem,
            weight_format=s.weight_format,
            cache_format=s.cache_format,
            policy=self.policy,
            prompt_len=self.workload.prompt_len,
            gen_len=self.workload.gen_len,
            num_requests=self.workload.num_requests,
        )


def given_cases(scenario: Scenario) -> list[Case]:
    cases = []
    first = GPU if scenario.gpu_mem else CPU
    for name, p in scenario.policies.items():
        requests = p.get("requests", scenario.workload.num_requests)
        workload = Workload(
            prompt_len=scenario.workload.prompt_len, gen_len=scenario.workload.gen_len, num_requests=requests
        )
        policy = Policy(
            weights=_place(p["weights"]),
            cache=_place(p["cache"]),
            activations=_place(p.get("activations", first)),
            gpu_batch_size=p["shape"][0],
            num_gpu_batches=p["shape"][1],
            weight_format=scenario.weight_format,
            cache_format=scenario.cache_format,
            cpu_attention_frac=p.get("cpu_attention", 0.0),
            overlap=p.get("overlap", True),
            schedule=p.get("schedule", "static"),
        )
        cases.append(Case(scenario=scenario, name=name, policy=policy, workload=workload))
    return cases


def planned_case(scenario: Scenario, hardware: Hardware, like: LLM) -> Case:
    """The planner's choice for the scenario. like: any run of it, for the layout and the device."""
    device = like.device
    budgets, _ = choose_budgets(device, cpu_mem=scenario.cpu_mem, disk_dir=default_disk_dir())
    policy, _, _ = plan_run(
        like.runtime.footprint,
        hardware,
        scenario.workload,
        budgets=budgets,
        first_tier=device.first_tier,
        compute_dtype=hardware.compute_dtype,
        cache_format=scenario.cache_format,
    )
    return Case(
        scenario=scenario,
        name="the planner's choice",
        policy=policy,
        workload=scenario.workload,
        planned=True,
    )


def predict(llm: LLM, hardware: Hardware, workload: Workload) -> Simulation:
    """What the planner expects of exactly this runtime."""
    runtime = llm.runtime
    gpu_bytes = llm.device.gpu_mem_bytes if llm.device.first_tier is Tier.GPU else 0
    run = placed_run(
        runtime.footprint,
        hardware,
        runtime.policy,
        runtime.limits,
        compute_dtype=hardware.compute_dtype,
        gpu_mem_bytes=float(gpu_bytes or 0),
        memory=runtime.plan,
    )
    return simulate(run, series_of(runtime.policy, runtime.limits, workload), full=True)


def run_once(llm: LLM, workload: Workload) -> dict[str, Any]:
    """Seconds of the whole run, of each phase and of each lane."""
    generator = torch.Generator().manual_seed(0)
    n = workload.num_requests or 1
    prompts = torch.randint(0, llm.config.vocab_size, (n, workload.prompt_len), generator=generator).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=workload.gen_len, ignore_eos=True)
    meter = MeteredEngine(llm)
    for i, prompt in enumerate(prompts):
        meter.add_request(f"r{i}", prompt, params)
    began = time.perf_counter()
    while meter.has_unfinished():
        meter.step()
    seconds = time.perf_counter() - began
    times = meter.times()
    return {
        "seconds": seconds,
        **{name: phase.wall_seconds for name, phase in times.phases.items()},
        "lanes": times.by_lane(),
    }


def measure(cases: list[Case], hardware: Hardware, repeats: int) -> list[dict[str, Any]]:
    """Median seconds of every case over shuffled rounds, beside its prediction."""
    order = random.Random(0)
    runs: dict[int, list[dict[str, Any]]] = {i: [] for i in range(len(cases))}
    predicted: dict[int, Simulation] = {}
    for round_index in range(repeats):
        for i in order.sample(range(len(cases)), len(cases)):
            case = cases[i]
            llm = case.load()
            try:
                if i not in predicted:
                    predicted[i] = predict(llm, hardware, case.workload)
                # Kernels are compiled or loaded on first use: no part of what is predicted.
                run_once(llm, dataclasses.replace(case.workload, num_requests=1, gen_len=2))
                runs[i].append(run_once(llm, case.workload))
            finally:
                llm.close()
            print(
                f"  round {round_index + 1}: {case.scenario.name}: {case.name}: {runs[i][-1]['seconds']:.2f} s, "
                f"predicted {predicted[i].total_seconds:.2f}",
                file=sys.stderr,
                flush=True,
            )
    rows = []
    for i, case in enumerate(cases):
        seconds = statistics.median(r["seconds"] for r in runs[i])
        nearest = min(runs[i], key=lambda r: abs(r["seconds"] - seconds))
        tokens = (case.workload.num_requests or 1) * case.workload.gen_len
        p = predicted[i]
        rows.append(
            {
                "scenario": case.scenario.name,
                "policy": case.name,
                "planned": case.planned,
                "block": [case.policy.gpu_batch_size, case.policy.num_gpu_batches],
                "schedule": case.policy.schedule,
                "measured_seconds": seconds,
                "predicted_seconds": p.total_seconds,
                "deviation": p.total_seconds / seconds - 1,
                "measured_tokens_per_s": tokens / seconds,
                "all_measured_seconds": [r["seconds"] for r in runs[i]],
                "predicted": {"prefill": p.prefill_seconds, "decode": p.decode_seconds, "lanes": p.lanes},
                "measured": {k: nearest[k] for k in ("prefill", "decode", "lanes")},
                "policy_fields": case.policy.to_dict(),
            }
        )
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Deviations of the given policies, and the planner's choices against the best of their scenarios."""
    deviations = [abs(r["deviation"]) for r in rows]
    choices = {}
    for name in dict.fromkeys(r["scenario"] for r in rows):
        # Runs of other sizes do not compete: their tokens per second mean something else.
        here = [r for r in rows if r["scenario"] == name]
        planned = [r for r in here if r["planned"]]
        others = [r["measured_tokens_per_s"] for r in here if not r["planned"]]
        if planned and others:
            choices[name] = planned[0]["measured_tokens_per_s"] / max(others)
    return {
        "n_policies": len(rows),
        "median_deviation": statistics.median(deviations),
        "worst_deviation": max(deviations),
        "planned_over_best": choices,
    }


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 6))
    for name in dict.fromkeys(r["scenario"] for r in rows):
        here = [r for r in rows if r["scenario"] == name]
        axes.scatter(
            [r["measured_seconds"] for r in here], [r["predicted_seconds"] for r in here], label=name, s=24
        )
    low = 0.8 * min(r["measured_seconds"] for r in rows)
    high = 1.25 * max(r["measured_seconds"] for r in rows)
    axes.plot([low, high], [low, high], color="black", linewidth=0.8)
    axes.fill_between(
        [low, high], [0.9 * low, 0.9 * high], [1.1 * low, 1.1 * high], color="black", alpha=0.08, linewidth=0
    )
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    axes.set(xlabel="measured seconds", ylabel="predicted seconds", title="Plan and run (band: 10%)")
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hardware", type=Path, help="a profile of this machine (default: measured now)")
    parser.add_argument("--repeats", type=int, default=2, help="rounds over all policies (default: 2)")
    parser.add_argument("--only", default="", help="scenarios whose name contains this")
    parser.add_argument("--plot", type=Path, help="write a picture: predicted against measured")
    args = parser.parse_args()
    if args.hardware:
        hardware = Hardware.load(args.hardware)
    else:
        device = make_device("cpu")
        hardware = probe_hardware(
            measure_hardware(device, folder=default_disk_dir()), device, folder=default_disk_dir()
        ).hardware
    cases: list[Case] = []
    for scenario in SCENARIOS:
        if args.only not in scenario.name:
            continue
        given = given_cases(scenario)
        with given[0].load() as llm:
            given.append(planned_case(scenario, hardware, llm))
        cases += given
    rows = measure(cases, hardware, args.repeats)
    for r in rows:
        block = "x".join(map(str, r["block"]))
        print(
            f"{r['scenario']:40} {r['policy']:46} {block:>6} {r['schedule']:6} "
            f"measured {r['measured_seconds']:6.2f} s  predicted {r['predicted_seconds']:6.2f} s  "
            f"{r['deviation']:+6.1%}"
        )
    found = summary(rows)
    print(
        f"{found['n_policies']} policies: median deviation {found['median_deviation']:.1%}, "
        f"worst {found['worst_deviation']:.1%}"
    )
    for name, share in found["planned_over_best"].items():
        print(f"{name}: the planner's choice reaches {share:.0%} of the best given policy")
    if args.plot:
        plot(rows, args.plot)
    print(json.dumps({**found, "rows": rows, "hardware": hardware.to_dict()}))


if __name__ == "__main__":
    main()
