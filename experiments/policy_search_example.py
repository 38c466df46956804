"""How to search for a policy in Python: model, machine, workload in; plan, reasons, trade-offs out.

    python experiments/policy_search_example.py [MODEL_PRESET] [HARDWARE_PRESET_OR_FILE]

Needs neither torch nor a GPU nor weights: the model is a configuration, the machine a table of rates.
"""

from __future__ import annotations

import json
import sys

from flexrun import presets
from flexrun.model.config import config_from_hf
from flexrun.model.footprint import model_footprint
from policy import Workload, search
from policy.hardware import load_hardware


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "opt-30b"
    hardware = load_hardware(sys.argv[2] if len(sys.argv) > 2 else "t4-gcp")
    footprint = model_footprint(
        config_from_hf(presets.load(model)), name=model, weight_formats=("int8-g64", "int4-g64")
    )
    workload = Workload(prompt_len=512, gen_len=32)
    rows = []
    for label, formats in (("checkpoint's formats", None), ("int8 and int4 allowed", "auto")):
        result = search(footprint, hardware, workload, weight_format=formats, cache_format=formats)
        print(f"\n{model} on {hardware.name}, {label}")
        if result.best is None:
            print(" ", result.infeasible)
            continue
        plan, predicted = result.best, result.best.predicted
        policy = plan.policy
        print(f"  {predicted['generated_tokens_per_s']:.2f} generated tokens/s, at most", end=" ")
        print(
            f"{plan.bound['generated_tokens_per_s']:.2f} in these formats; found in {result.search_seconds:.1f} s"
        )
        print(f"  block {policy.gpu_batch_size} x {policy.num_gpu_batches}, {policy.schedule},", end=" ")
        print(f"weights {policy.weight_format}, cache {policy.cache_format}")
        for kind in ("weights", "cache", "activations"):
            place = getattr(policy, kind)
            print(
                f"  {kind:12} gpu {place.gpu_frac:4.0%}  cpu {place.cpu_frac:4.0%}  disk {place.disk_frac:4.0%}"
            )
        for tier, n in plan.planned_bytes.items():
            print(f"  {tier:12} {n / 2**30:8.1f} GiB planned")
        for reason in (*result.reasons, *result.warnings):
            print(f"  - {reason}")
        for change, factor in result.helps[:3]:
            print(f"  {change}: {factor - 1:+.1%}")
        print("  throughput against latency:", end=" ")
        print(
            ", ".join(f"{p.generated_tokens_per_s:.2f}/s in {p.latency_seconds:.0f} s" for p in result.front)
        )
        rows.append({"formats": label, **plan.to_dict()})
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
