"""Runs under a real RAM limit: models that are larger than the memory.

    python -m experiments.small_ram [--limit 1.5GB] [--case bf16|int4|int4-disk-cache|opt-6.7b|all]

A Llama-shaped model of 1.1 billion parameters as a random bf16 checkpoint (2.2 GB), the same in 4 bits, and OPT-6.7B's
shape in 4 bits (3.8 GB); made once, in --folder. Each case is a `flexrun bench` in a process of its own inside a
memory cgroup whose limit counts the page cache too (root, cgroup v1 or v2; says so and runs without a limit
elsewhere), after a short one outside of it that compiles the kernels. Reports efficiency against the bound, planned and
measured bytes, peak RSS. Table, then JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.host import parse_bytes

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _shape(gpu_batch_size: int, num_gpu_batches: int) -> list[str]:
    return ["--gpu-batch-size", str(gpu_batch_size), "--num-gpu-batches", str(num_gpu_batches)]


# Budgets (--cpu-mem) are what flexrun may use; interpreter and libraries are on top, within the limit.
MANY = ["--prompt-len", "64", "--gen-len", "32", "--num-requests", "128"]
FEW = ["--prompt-len", "16", "--gen-len", "4", "--num-requests", "8"]
ON_DISK = ["--weights", "0,0,1", "--cache-format", "bf16", "--schedule", "static"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """limit: of the cgroup. model: a folder's name. flags: of flexrun bench."""

    limit: str
    model: str
    flags: list[str]


CASES = {
    "bf16": Case(
        limit="1500MB",
        model="llama-1.1b-bf16",
        flags=[*MANY, *ON_DISK, "--cache", "0,1,0", "--cpu-mem", "1010MB", *_shape(64, 2)],
    ),
    "int4": Case(  # one gpu batch: what is unpacked serves all sequences
        limit="1500MB",
        model="llama-1.1b-int4-g64",
        flags=[*MANY, *ON_DISK, "--cache", "0,1,0", "--cpu-mem", "1010MB", *_shape(128, 1)],
    ),
    "int4-disk-cache": Case(
        limit="700MB",
        model="llama-1.1b-int4-g64",
        flags=[*MANY, *ON_DISK, "--cache", "0,0,1", "--cpu-mem", "400MB", *_shape(64, 1)],
    ),
    "opt-6.7b": Case(
        limit="3GB",
        model="opt-6.7b-int4-g64",
        flags=[*FEW, *ON_DISK, "--cache", "0,1,0", "--cpu-mem", "2400MB", *_shape(8, 1)],
    ),
}


def make_checkpoint(folder: Path) -> None:
    """Random weights, layer by layer, in safetensors shards of one layer each."""
    import torch
    from safetensors.torch import save_file

    if (folder / "model.safetensors.index.json").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    h, ffn, kv, vocab = 2048, 5632, 256, 32000

    def rand(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape) * shape[-1] ** -0.5).to(torch.bfloat16)

    weight_map: dict[str, str] = {}

    def save(name: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, folder / name)
        weight_map.update(dict.fromkeys(tensors, name))

    ones = torch.ones(h, dtype=torch.bfloat16)
    save("model-embed.safetensors", {"model.embed_tokens.weight": rand(vocab, h)})
    for i in range(CONFIG["num_hidden_layers"]):  # type: ignore[call-overload]
        p = f"model.layers.{i}."
        save(
            f"model-{i:02}.safetensors",
            {
                p + "input_layernorm.weight": ones.clone(),
                p + "post_attention_layernorm.weight": ones.clone(),
                p + "self_attn.q_proj.weight": rand(h, h),
                p + "self_attn.k_proj.weight": rand(kv, h),
                p + "self_attn.v_proj.weight": rand(kv, h),
                p + "self_attn.o_proj.weight": rand(h, h),
                p + "mlp.gate_proj.weight": rand(ffn, h),
                p + "mlp.up_proj.weight": rand(ffn, h),
                p + "mlp.down_proj.weight": rand(h, ffn),
            },
        )
    save("model-head.safetensors", {"model.norm.weight": ones.clone(), "lm_head.weight": rand(vocab, h)})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )


class MemoryLimit:
    """A memory cgroup for a child process, v1 or v2; `available` is False where none can be made."""

    def __init__(self, name: str, limit_bytes: int) -> None:
        self.path: Path | None = None
        v1, v2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
        for base, limit_file in ((v1, "memory.limit_in_bytes"), (v2, "memory.max")):
            path = base / name
            try:
                path.mkdir(exist_ok=True)
                (path / limit_file).write_text(str(limit_bytes))
            except OSError:
                continue
            self.path = path
            return

    @property
    def available(self) -> bool:
        return self.path is not None

    def enter(self) -> Callable[[], None] | None:
        """For subprocess's preexec_fn: put the child into the group before it starts."""
        if self.path is None:
            return None
        procs = self.path / "cgroup.procs"
        return lambda: procs.write_text(str(os.getpid())) and None

    def remove(self) -> None:
        if self.path is not None:
            try:
                self.path.rmdir()
            except OSError:
                pass


def make_model(name: str, folder: Path) -> Path:
    """The case's model, made if it is not there. Packing happens outside of the limit: it is a job of its own."""
    path = folder / name
    if name == "llama-1.1b-bf16":
        make_checkpoint(path)
    elif not path.is_dir():
        if name.startswith("llama"):
            source = ["-m", str(make_model("llama-1.1b-bf16", folder))]
        else:
            source = ["-m", name.removesuffix("-int4-g64"), "--dummy-weights"]
        pack = ["pack", *source, "--weight-format", "int4-g64", "-o", str(path)]
        subprocess.run([sys.executable, "-m", "flexrun", *pack], check=True)
    return path


def run_case(name: str, *, limit: str | None, extra: list[str], folder: Path) -> dict[str, Any]:
    case = CASES[name]
    limit_bytes = parse_bytes(limit or case.limit)
    group = MemoryLimit(f"flexrun-small-ram-{os.getpid()}", limit_bytes)
    command = [
        *(sys.executable, "-m", "flexrun", "bench", "-m", str(make_model(case.model, folder)), "--json"),
        *("--disk-dir", str(folder / "spill")),
        *case.flags,
        *extra,
    ]
    # The first run on a machine compiles kernels, which takes more memory than the smallest limit: once, outside of it.
    short = [*command, "--num-requests", "4", "--gen-len", "2"]
    subprocess.run(short, capture_output=True, check=False)
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=group.enter())
    finally:
        group.remove()
    if done.returncode:
        return {
            "case": name,
            "failed": done.returncode,
            "stderr": done.stderr[-2000:],
            "limited": group.available,
        }
    result = json.loads(done.stdout.strip().splitlines()[-1])
    return {"case": name, "limit_bytes": limit_bytes, "limited": group.available, **result}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", default="all", choices=("all", *CASES))
    parser.add_argument("--limit", help="instead of the case's own limit")
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache" / "flexrun" / "experiments")
    args, extra = parser.parse_known_args()
    results = []
    for name in CASES if args.case == "all" else (args.case,):
        result = run_case(name, limit=args.limit, extra=extra, folder=args.folder)
        results.append(result)
        if "failed" in result:
            print(f"{name}: failed ({result['failed']})\n{result['stderr']}")
            continue
        print(
            f"{name:16} limit {result['limit_bytes'] / 1e6:.0f} MB{'' if result['limited'] else ' (NOT enforced)'}, "
            f"wall {result['wall_seconds']:.1f} s, {result['generated_tokens_per_s']:.1f} tok/s, "
            f"efficiency {result['efficiency_frac']:.2f}, peak RSS {result['peak_rss_bytes'] / 1e6:.0f} MB, "
            f"planned {sum(result['planned_bytes'].values()) / 1e6:.0f}, "
            f"measured {sum(result['measured_bytes'].values()) / 1e6:.0f} MB",
            flush=True,
        )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
