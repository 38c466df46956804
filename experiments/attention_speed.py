"""Decode attention on the CPU: pages read in place against unpacking them and torch's grouped attention.

One query per sequence. The reference unpacks with numba into a reused buffer and multiplies in fp32 and bf16,
whichever is faster here. Seconds are medians of alternating rounds in one process, so that noise meets both
alike; on a machine that is busy with other work, --cpu-time counts the processor seconds of one thread. The
last line, the largest number of query heads per KV head at which reading in place wins, is what
quant.kernels_attention.IN_PLACE_MAX_HEADS holds.

    python experiments/attention_speed.py [--tokens 2000] [--formats int4 bf16] [--heads 1 3 8] [--rounds 9]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from quant.kernels_attention import AttentionParams, attend_gathered, decode_attention, plan_decode
from quant.kv import encode_pages, gather_pages
from quant.kv_batch import PagedBatch
from quant.kv_formats import CACHE_FORMAT_NAMES, parse_cache_format

PAGE_TOKENS = 64


def random_batch(
    name: str, *, n_sequences: int, tokens: int, n_kv_heads: int, head_dim: int, tail_dtype: torch.dtype
) -> PagedBatch:
    """Sequences of one length, pages in arena order."""
    fmt = parse_cache_format(name)
    tail_len = (tokens - 1) % PAGE_TOKENS + 1
    n_full = (tokens - tail_len) // PAGE_TOKENS
    nbytes = fmt.page_nbytes(page_tokens=PAGE_TOKENS, n_kv_heads=n_kv_heads, head_dim=head_dim)
    arena = torch.empty(n_sequences * n_full, nbytes, dtype=torch.uint8)
    for first in range(0, len(arena), n_full or 1):
        k, v = torch.randn(2, n_full, n_kv_heads, PAGE_TOKENS, head_dim)
        encode_pages(k, v, fmt, arena[first : first + n_full])
    return PagedBatch(
        fmt=fmt,
        page_tokens=PAGE_TOKENS,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        arenas=(arena,),
        page_slots=torch.arange(n_sequences * n_full, dtype=torch.int32).view(n_sequences, n_full),
        seq_lens=torch.full((n_sequences,), tokens, dtype=torch.int32),
        tail_lens=torch.full((n_sequences,), tail_len, dtype=torch.int32),
        tails=torch.randn(n_sequences, 2, n_kv_heads, PAGE_TOKENS, head_dim).to(tail_dtype),
        tail_slots=torch.arange(n_sequences, dtype=torch.int32),
    )


def medians(
    rounds: int, candidates: dict[str, Callable[[], object]], clock: Callable[[], float]
) -> dict[str, float]:
    """Median seconds of each candidate; they take turns, after one round that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds + 1):
        for name, run in candidates.items():
            start = clock()
            run()
            seconds[name].append(clock() - start)
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}


def compare(
    name: str,
    *,
    n_sequences: int,
    tokens: int,
    n_kv_heads: int,
    group: int,
    head_dim: int,
    rounds: int,
    clock: Callable[[], float],
) -> dict[str, float]:
    """Seconds in place, of unpacking, and of attention over the unpacked buffer, per dtype; and the ratio."""
    tail_dtype = torch.bfloat16 if name == "bf16" else torch.float32
    batch = random_batch(
        name,
        n_sequences=n_sequences,
        tokens=tokens,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        tail_dtype=tail_dtype,
    )
    params = AttentionParams(scale=head_dim**-0.5)
    plan = plan_decode(batch.seq_lens, batch.tail_lens, page_tokens=PAGE_TOKENS, n_kv_heads=n_kv_heads)
    q = torch.randn(n_sequences, n_kv_heads * group, head_dim)
    out = torch.empty_like(q)
    candidates: dict[str, Callable[[], object]] = {
        "in_place": partial(decode_attention, q, batch, params, plan=plan, out=out)
    }
    for label, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16)):
        buffers = [torch.empty(n_sequences, n_kv_heads, tokens, head_dim, dtype=dtype) for _ in range(2)]
        candidates[f"unpack_{label}"] = partial(gather_pages, batch, *buffers)
        candidates[f"attend_{label}"] = partial(attend_gathered, q, *buffers, batch.seq_lens, params)
    seconds = medians(rounds, candidates, clock)
    unpacked = min(seconds[f"unpack_{label}"] + seconds[f"attend_{label}"] for label in ("f32", "bf16"))
    kv_bytes = n_sequences * tokens * batch.page_nbytes / PAGE_TOKENS
    return seconds | {"ratio": unpacked / seconds["in_place"], "bytes_per_s": kv_bytes / seconds["in_place"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--formats", nargs="+", default=list(CACHE_FORMAT_NAMES), choices=CACHE_FORMAT_NAMES)
    parser.add_argument("--heads", type=int, nargs="+", default=[1, 3, 4, 8, 16, 32])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cpu-time", action="store_true", help="one thread, processor seconds")
    args = parser.parse_args()
    clock: Callable[[], float] = time.perf_counter
    if args.cpu_time:
        torch.set_num_threads(1)
        clock = time.thread_time
    shapes = [
        ("demo model, 64 x 160", {"n_sequences": 64, "tokens": 160, "n_kv_heads": 3}, [3]),
        ("demo model, 64 x 1000", {"n_sequences": 64, "tokens": 1000, "n_kv_heads": 3}, [3]),
        (f"8 x {args.tokens}", {"n_sequences": 8, "tokens": args.tokens, "n_kv_heads": 4}, args.heads),
    ]
    rows = []
    print(
        f"{'shape':>22} {'format':>6} {'heads/KV':>8} {'in place ms':>11} {'unpack+torch ms':>15} {'ratio':>6} GB/s"
    )
    for label, shape, heads in shapes:
        for name in args.formats:
            for group in heads:
                row = compare(name, group=group, head_dim=64, rounds=args.rounds, clock=clock, **shape)
                rows.append({"shape": label, "format": name, "heads_per_kv": group} | row)
                in_place_ms = row["in_place"] * 1e3
                print(
                    f"{label:>22} {name:>6} {group:>8} {in_place_ms:>11.2f} {row['ratio'] * in_place_ms:>15.2f} "
                    f"{row['ratio']:>6.2f} {row['bytes_per_s'] / 1e9:.1f}",
                    flush=True,
                )
    limits = {}
    for name in args.formats:
        long_rows = [row for row in rows if row["format"] == name and row["shape"] == shapes[-1][0]]
        winning = [row["heads_per_kv"] for row in long_rows if row["ratio"] > 1]
        limits[name] = max(winning, default=0)
    print("largest heads per KV head at which reading in place wins:", limits)
    print(json.dumps({"experiment": "attention_speed", "threads": torch.get_num_threads(), "rows": rows}))


if __name__ == "__main__":
    main()
