"""Whether lanes work at the same time: wall time beside the busiest lane, with overlap and without.

    python -m experiments.overlap [--repeats 2] [--folder FOLDER]

The Llama-shaped 1.1-billion-parameter bf16 checkpoint of small_ram streams from disk in two settings: few sequences, so
that the disk binds, and many, so that compute binds. Each runs alternately with overlap and without, in one
process; medians count. Per phase: wall seconds over those of the busiest lane. Table, then JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from experiments.small_ram import make_checkpoint
from flexrun.audit import MeteredEngine
from flexrun.llm import LLM
from flexrun.request import SamplingParams
from policy.tiers import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    name: str
    block: tuple[int, int]
    requests: int
    prompt_len: int
    gen_len: int


SETTINGS = (
    Setting(name="disk binds", block=(2, 1), requests=2, prompt_len=16, gen_len=9),
    Setting(name="compute binds", block=(16, 2), requests=32, prompt_len=24, gen_len=7),
)


def run(setting: Setting, model: Path, *, overlap: bool) -> dict[str, Any]:
    with LLM(
        model,
        weights=Placement(disk_frac=1.0),
        cache=Placement(cpu_frac=1.0),
        gpu_batch_size=setting.block[0],
        num_gpu_batches=setting.block[1],
        prompt_len=setting.prompt_len,
        gen_len=setting.gen_len,
        schedule="static",
        overlap=overlap,
    ) as llm:
        generator = torch.Generator().manual_seed(0)
        prompts = torch.randint(3, 32000, (setting.requests, setting.prompt_len), generator=generator)
        params = SamplingParams(temperature=0.0, max_tokens=setting.gen_len, ignore_eos=True)
        meter = MeteredEngine(llm)
        for i, prompt in enumerate(prompts.tolist()):
            meter.add_request(str(i), prompt, params)
        while meter.has_unfinished():
            meter.step()
        times = meter.times()
    return {
        name: {"wall": phase.wall_seconds, "lanes": dict(phase.busy_seconds)}
        for name, phase in times.phases.items()
    }


def middle(runs: list[dict[str, Any]], phase: str) -> dict[str, Any]:
    """The run of this phase with the median wall time."""
    wall = statistics.median_low([r[phase]["wall"] for r in runs])
    return next(r[phase] for r in runs if r[phase]["wall"] == wall)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache" / "flexrun" / "experiments")
    args = parser.parse_args()
    model = args.folder / "llama-1.1b-bf16"
    make_checkpoint(model)
    results = []
    for setting in SETTINGS:
        runs: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
        for _ in range(args.repeats):
            for overlap in (True, False):
                runs[overlap].append(run(setting, model, overlap=overlap))
        row: dict[str, Any] = {"setting": setting.name, "block": setting.block, "phases": {}}
        for phase in ("prefill", "decode"):
            found, apart = middle(runs[True], phase), middle(runs[False], phase)
            lane = max(found["lanes"], key=lambda name: found["lanes"][name])
            row["phases"][phase] = {
                "wall_seconds": found["wall"],
                "lanes": found["lanes"],
                "wall_over_busiest": found["wall"] / found["lanes"][lane],
                "no_overlap_wall_seconds": apart["wall"],
                "no_overlap_slowdown": apart["wall"] / found["wall"],
            }
            lanes = ", ".join(f"{name} {s:.1f}" for name, s in found["lanes"].items() if s > 0.05)
            print(
                f"{setting.name:14} {phase:8} wall {found['wall']:6.2f} s = "
                f"{found['wall'] / found['lanes'][lane]:.2f} x {lane} ({lanes}); "
                f"without overlap {apart['wall']:6.2f} s, {apart['wall'] / found['wall']:.2f} x",
                flush=True,
            )
        results.append(row)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
