"""Is the memory of a batch job flat? A tiny model, a file of 100,000 requests, resident memory over time.

    python experiments/flat_memory.py [--requests 100000] [flags of flexrun batch]

The model is a random llama of about 0.2 million parameters without a tokenizer; each request is two token ids
in, one token out, so that the job is bookkeeping and little else. Memory is sampled twice a second from /proc.
Reported: the resident memory after a tenth of the requests, at the end, and the growth per request in between.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

HIDDEN, FFN, HEADS, LAYERS, VOCAB = 64, 128, 4, 2, 512


def make_model(folder: Path) -> None:
    """A random llama checkpoint in the Hugging Face form."""
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)

    def matrix(rows: int, cols: int) -> np.ndarray:
        return (rng.standard_normal((rows, cols)) / np.sqrt(cols)).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": matrix(VOCAB, HIDDEN),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
        "lm_head.weight": matrix(VOCAB, HIDDEN),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name in ("q", "k", "v", "o"):
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = matrix(HIDDEN, HIDDEN)
        for name in ("gate", "up"):
            tensors[f"{prefix}mlp.{name}_proj.weight"] = matrix(FFN, HIDDEN)
        tensors[prefix + "mlp.down_proj.weight"] = matrix(HIDDEN, FFN)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = np.ones(HIDDEN, np.float32)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": VOCAB - 1,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))


def resident_bytes(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    except FileNotFoundError:
        pass
    return 0


def count_new_lines(path: Path, state: list[int]) -> int:
    """Lines of a growing file, reading only what is new. state: [bytes read, lines]."""
    if path.exists():
        with path.open("rb") as stream:
            stream.seek(state[0])
            while chunk := stream.read(1 << 20):
                state[0] += len(chunk)
                state[1] += chunk.count(b"\n")
    return state[1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=100_000)
    args, extra = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "tiny")
        source, target = folder / "in.jsonl", folder / "out.jsonl"
        with source.open("w") as stream:
            for i in range(args.requests):
                ids = [i % (VOCAB - 1), i // VOCAB % (VOCAB - 1)]
                stream.write(
                    json.dumps({"id": f"r{i}", "prompt": ids, "max_tokens": 1, "temperature": 0}) + "\n"
                )
        words = [sys.executable, "-m", "flexrun", "batch", "-m", str(folder / "tiny"), "-i", str(source),
                 "-o", str(target), "--json", *extra]  # fmt: skip
        samples: list[tuple[int, int]] = []
        state = [0, 0]
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
            while child.poll() is None:
                n_done, resident = count_new_lines(target, state), resident_bytes(child.pid)
                if n_done and resident:
                    samples.append((n_done, resident))
                time.sleep(0.5)
            assert child.stdout is not None and child.stderr is not None
            out, err = child.stdout.read(), child.stderr.read()
        if child.returncode != 0:
            raise SystemExit(f"the job ended with {child.returncode}:\n{err}")
    summary = json.loads(out.splitlines()[-1])
    # The last samples are of a process that has let go of its model.
    late = [sample for sample in samples if args.requests / 10 <= sample[0] < args.requests]
    if len(late) < 4:
        raise SystemExit(f"only {len(late)} samples after a tenth of the requests; give more --requests")
    print("  requests done   resident MiB")
    for n_done, resident in late[:: max(1, len(late) // 10)]:
        print(f"  {n_done:13,}   {resident / 2**20:12.1f}")
    n, resident = np.array(late, dtype=float).T
    slope = float(np.polyfit(n, resident, 1)[0])
    print(
        f"growth {slope:.1f} bytes per request, {summary['requests'] / summary['wall_seconds']:,.0f} requests/s"
    )
    print(
        json.dumps(
            {
                "experiment": "flat_memory",
                "requests": summary["requests"],
                "succeeded": summary["succeeded"],
                "resident_bytes_at_a_tenth": late[0][1],
                "resident_bytes_at_the_end": late[-1][1],
                "growth_bytes_per_request": round(slope, 2),
                "peak_rss_bytes": summary["peak_rss_bytes"],
                "wall_seconds": round(summary["wall_seconds"], 1),
            }
        )
    )


if __name__ == "__main__":
    main()
