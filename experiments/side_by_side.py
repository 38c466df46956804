"""flexrun beside transformers' generate on the demo model: load time and generated tokens per second.

    python -m experiments.side_by_side [--dtype bfloat16|float32] [--requests 64] [--prompt-len 128] [--gen-len 32]

Each engine runs in a process of its own, in turn, on the same random prompts, greedy, without early end. Both
hold everything in memory. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ENGINES = ("transformers", "flexrun")


def prompts(n: int, length: int, vocab: int = 49152) -> list[list[int]]:
    import random

    rng = random.Random(7)
    return [[rng.randrange(100, vocab) for _ in range(length)] for _ in range(n)]


def run_transformers(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM

    path = Path(args.model)
    began = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=getattr(torch, args.dtype)
    ).eval()
    load_seconds = time.perf_counter() - began
    ids = torch.tensor(prompts(args.requests, args.prompt_len))
    kwargs: dict[str, Any] = {
        "do_sample": False,
        "max_new_tokens": args.gen_len,
        "min_new_tokens": args.gen_len,
        "attention_mask": torch.ones_like(ids),
        "pad_token_id": 2,
    }
    with torch.inference_mode():
        model.generate(ids[:1, :8], **{**kwargs, "attention_mask": torch.ones_like(ids[:1, :8])})
        began = time.perf_counter()
        out = model.generate(ids, **kwargs)
        seconds = time.perf_counter() - began
    tokens = (out.shape[1] - args.prompt_len) * args.requests
    return {"load_seconds": load_seconds, "seconds": seconds, "generated_tokens": tokens}


def run_flexrun(args: argparse.Namespace) -> dict[str, Any]:
    from flexrun import LLM, SamplingParams

    began = time.perf_counter()
    llm = LLM(
        args.model,
        dtype=args.compute_dtype,
        weight_format=args.weight_format,
        cache_format=args.cache_format,
        gpu_batch_size=args.requests,
        prompt_len=args.prompt_len,
        gen_len=args.gen_len,
    )
    load_seconds = time.perf_counter() - began
    params = SamplingParams(temperature=0.0, max_tokens=args.gen_len, ignore_eos=True)
    given = prompts(args.requests, args.prompt_len)
    llm.generate([given[0][:8]], SamplingParams(temperature=0.0, max_tokens=3))
    began = time.perf_counter()
    outputs = llm.generate(given, params)
    seconds = time.perf_counter() - began
    tokens = sum(len(o.outputs[0].token_ids) for o in outputs)
    stats = llm.engine.stats
    llm.close()
    return {
        "load_seconds": load_seconds,
        "seconds": seconds,
        "generated_tokens": tokens,
        "prefill_seconds": stats.prefill_seconds,
        "decode_seconds": stats.decode_seconds,
    }


def child(engine: str, argv: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "experiments.side_by_side", "--engine", engine, *argv]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{engine} failed:\n{done.stderr[-3000:]}")
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    home = Path.home() / ".cache" / "flexrun" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    parser.add_argument("--model", default=str(home))
    parser.add_argument("--dtype", default="bfloat16", help="transformers' dtype")
    parser.add_argument("--compute-dtype", default="auto", help="flexrun's --dtype")
    parser.add_argument("--weight-format", default="bf16")
    parser.add_argument("--cache-format", default="bf16")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--gen-len", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        print(json.dumps(run_transformers(args) if args.engine == "transformers" else run_flexrun(args)))
        return
    argv = sys.argv[1:]
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in ENGINES}
    for _ in range(args.repeats):
        for name in ENGINES:
            runs[name].append(child(name, argv))
    result: dict[str, Any] = {"dtype": args.dtype, "weight_format": args.weight_format}
    print(f"{'engine':14} {'load s':>8} {'run s':>8} {'generated tok/s':>16}")
    for name in ENGINES:
        load = statistics.median(r["load_seconds"] for r in runs[name])
        seconds = statistics.median(r["seconds"] for r in runs[name])
        rate = statistics.median(r["generated_tokens"] / r["seconds"] for r in runs[name])
        result[name] = {"load_seconds": load, "seconds": seconds, "generated_tokens_per_s": rate}
        print(f"{name:14} {load:8.2f} {seconds:8.2f} {rate:16.1f}")
    ours, theirs = result["flexrun"], result["transformers"]
    result["speedup"] = ours["generated_tokens_per_s"] / theirs["generated_tokens_per_s"]
    result["load_ratio"] = ours["load_seconds"] / theirs["load_seconds"]
    print(f"speedup {result['speedup']:.2f}, load time ratio {result['load_ratio']:.3f}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
