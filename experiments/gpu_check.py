"""Proof of the accelerator path on a machine that has one; says so and exits 0 where there is none.

    make gpu-check            (PYTHON=... names the interpreter; nothing is installed, no network)

Needs torch >= 2.9, numpy and safetensors; uses numba, triton and pulp if they are there. Checks, in a few
minutes: parity of the accelerator with the CPU over several placements, copies beside compute (weights and
cache), upload and download against plain pinned copies, peak device memory against the budget, throughput of a
dummy model at several placements. Prints one table; the last line is JSON. Exit status 1 if a check failed.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

MIB = 1 << 20

TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LARGE = {
    **TINY,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}


def model_folder(root: Path, name: str, config: dict[str, Any]) -> str:
    folder = root / name
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


class Report:
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def check(self, name: str, work: Callable[[], tuple[bool, str, dict[str, Any]]]) -> None:
        began = time.perf_counter()
        try:
            good, text, data = work()
        except Exception as error:
            good, text, data = False, f"{type(error).__name__}: {error}", {}
            traceback.print_exc()
        row = {"check": name, "passed": good, "result": text, "seconds": time.perf_counter() - began, **data}
        self.rows.append(row)
        print(f"{'ok  ' if good else 'FAIL'} {name:34} {text}", flush=True)


def placement(gpu: float, cpu: float, disk: float) -> Any:
    from policy.tiers import Placement

    return Placement(gpu_frac=gpu, cpu_frac=cpu, disk_frac=disk)


POLICIES: dict[str, dict[str, Any]] = {
    "all on the device": {"weights": (1, 0, 0), "cache": (1, 0, 0)},
    "weights streamed from cpu": {"weights": (0, 1, 0), "cache": (1, 0, 0)},
    "cache in cpu memory": {"weights": (1, 0, 0), "cache": (0, 1, 0)},
    "CPU attention": {"weights": (0.5, 0.5, 0), "cache": (0, 1, 0), "cpu_attention_frac": 0.5},
    "all in cpu memory, 4 bits": {
        "weights": (0, 1, 0),
        "cache": (0, 1, 0),
        "weight_format": "int4-g64",
        "cache_format": "int4",
    },
    "weights on disk": {"weights": (0, 0, 1), "cache": (1, 0, 0), "weight_format": "int4-g64"},
}


def llm_options(spec: dict[str, Any]) -> dict[str, Any]:
    options = dict(spec)
    for name in ("weights", "cache"):
        options[name] = placement(*options[name])
    return options


def greedy(model: str, root: Path, device: str, dtype: str, **options: Any) -> list[list[int]]:
    from flexrun import LLM, SamplingParams

    with LLM(
        model,
        device=device,
        dtype=dtype,
        dummy_weights=True,
        disk_dir=root / "spill",
        gpu_batch_size=4,
        num_gpu_batches=2,
        prompt_len=96,
        gen_len=8,
        page_tokens=16,
        **options,
    ) as llm:
        prompts = [[(7 * i + j * 13) % 1000 + 3 for j in range(8 + 11 * i)] for i in range(8)]
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        return [o.outputs[0].token_ids for o in llm.generate(prompts, params)]


def parity(root: Path, device: str) -> tuple[bool, str, dict[str, Any]]:
    """fp32 tokens of every placement equal the CPU's (same weights, same formats)."""
    model = model_folder(root, "tiny", TINY)
    bad: list[str] = []
    for name, spec in POLICIES.items():
        options = llm_options(spec)
        formats = {k: options[k] for k in ("weight_format", "cache_format") if k in options}
        reference = greedy(model, root, "cpu", "float32", **formats)
        found = greedy(model, root, device, "float32", **options)
        if found != reference:
            bad.append(name)
    text = "equal tokens" if not bad else f"differ: {', '.join(bad)}"
    return not bad, f"{len(POLICIES) - len(bad)}/{len(POLICIES)} placements, {text}", {}


def bandwidth(upload: bool, device_name: str) -> tuple[bool, str, dict[str, Any]]:
    """Our arena copies beside a plain pinned torch copy of the same size."""
    import torch

    from offload.device import make_device
    from offload.profile import best_seconds, copy_bytes_per_s

    device = make_device(device_name)
    n = 256 * MIB
    host = torch.empty(n, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(n, dtype=torch.uint8, device=device.torch_device)
    source, dest = (host, there) if upload else (there, host)
    plain = n / best_seconds(lambda: dest.copy_(source, non_blocking=True), device)
    ours = copy_bytes_per_s(device, upload=upload, n_bytes=n)
    good = ours > 0.8 * plain
    return good, f"{ours / 1e9:.1f} GB/s, plain {plain / 1e9:.1f} GB/s", {"bytes_per_s": ours, "plain": plain}


def run_large(root: Path, device: str, name: str, *, overlap: bool = True) -> dict[str, Any]:
    """A dummy model of 3 billion parameters at one placement, through `flexrun.bench`."""
    import torch

    from flexrun import LLM
    from flexrun.bench import run_bench

    options = llm_options(POLICIES[name])
    torch.get_device_module(device).reset_peak_memory_stats()
    with LLM(
        model_folder(root, "large", LARGE),
        device=device,
        dummy_weights=True,
        disk_dir=root / "spill",
        gpu_batch_size=64,
        num_gpu_batches=2,
        prompt_len=256,
        gen_len=16,
        overlap=overlap,
        **{"weight_format": "bf16", **options},
    ) as llm:
        result = run_bench(llm, prompt_len=256, gen_len=16, num_requests=128).to_dict()
        budget = sum(n for (tier, _), n in llm.runtime.plan.items.items() if tier == 0)
    result["peak_device_bytes"] = torch.get_device_module(device).max_memory_allocated()
    result["planned_device_bytes"] = budget
    return result


def throughput(root: Path, device: str, name: str) -> tuple[bool, str, dict[str, Any]]:
    result = run_large(root, device, name)
    peak, planned = result["peak_device_bytes"], result["planned_device_bytes"]
    text = (
        f"{result['generated_tokens_per_s']:.0f} tok/s, efficiency {result['efficiency_frac']:.2f}, "
        f"device {peak / MIB:.0f} of {planned / MIB:.0f} MiB planned"
    )
    keep = (
        "generated_tokens_per_s",
        "total_tokens_per_s",
        "efficiency_frac",
        "prefill_seconds",
        "decode_seconds",
    )
    data = {key: result[key] for key in keep}
    return peak <= planned * 1.05, text, {**data, "peak_device_bytes": peak, "planned_device_bytes": planned}


def overlap(root: Path, device: str, name: str) -> tuple[bool, str, dict[str, Any]]:
    """The same run with and without overlap; with it, wall time is near the busiest lane's."""
    on, off = run_large(root, device, name), run_large(root, device, name, overlap=False)
    busiest = max(lane["busy_seconds"] for lane in on["lanes"].values())
    ratio, gain = on["wall_seconds"] / busiest, off["wall_seconds"] / on["wall_seconds"]
    text = f"wall {ratio:.2f}x the busiest lane, {gain:.2f}x faster than without overlap"
    return ratio < 1.25 and gain > 1.02, text, {"wall_over_busiest": ratio, "gain": gain}


def main() -> int:
    try:
        import torch
    except ImportError:
        print(f"{sys.executable} has no torch: nothing to check; name another interpreter with PYTHON=...")
        print(json.dumps({"accelerator": None, "checks": []}))
        return 0
    if not torch.accelerator.is_available():
        print("no accelerator on this machine: nothing to check")
        print(json.dumps({"accelerator": None, "checks": []}))
        return 0
    device = torch.accelerator.current_accelerator().type
    name = torch.get_device_module(device).get_device_name(0)
    print(f"{name}, torch {torch.__version__}, {sys.executable}")
    report = Report()
    with tempfile.TemporaryDirectory(prefix="flexrun-gpu-check-") as folder:
        root = Path(folder)
        report.check("parity with the CPU", lambda: parity(root, device))
        report.check("upload bandwidth", lambda: bandwidth(True, device))
        report.check("download bandwidth", lambda: bandwidth(False, device))
        for policy in (
            "all on the device",
            "weights streamed from cpu",
            "cache in cpu memory",
            "CPU attention",
        ):
            report.check(f"throughput: {policy}", lambda p=policy: throughput(root, device, p))
        report.check("throughput: 4 bits", lambda: throughput(root, device, "all in cpu memory, 4 bits"))
        report.check("overlap: weights", lambda: overlap(root, device, "weights streamed from cpu"))
        report.check("overlap: cache", lambda: overlap(root, device, "cache in cpu memory"))
    print(json.dumps({"accelerator": name, "torch": torch.__version__, "checks": report.rows}))
    return 0 if all(row["passed"] for row in report.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
