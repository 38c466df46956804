"""Speed of the weight kernels on this CPU: unpacking, packing, and where few-token products stop paying.

    python -m experiments.kernel_speed [--rows 5632] [--cols 2048] [--seconds 0.5] [--quick]

Prints one table per kind of kernel, the largest number of tokens at which the few-token product is the faster
(the figures of quant.linear), then one JSON line. Rates are G elements/s, best of the runs that fit into
--seconds per figure: on a shared machine the best run is the one that was least disturbed.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from quant import amx
from quant import linear as quant_linear
from quant.native import pack_gguf
from quant.pack import METHODS, quantize
from quant.packed import PackedTensor

FORMATS = (
    "int8-g128",
    "int6-g64",
    "int5-g64",
    "int4-g64",
    "int4-g64-f32",
    "int4-g32",
    "int4-g32-sym",
    "int4-g128-zp",
    "int3.5-g64",
    "int3-g64",
    "int2-g64",
    "q4_k",
    "q5_k",
    "q6_k",
)
PACK_FORMATS = ("int8-g128", "int4-g64", "int4-g64-sym", "int4-g64-zp", "int3.5-g64", "int2-g64")
TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
# bytes of a super-block and where its fp16 numbers lie
_SUPER_BLOCKS = {"q4_k": (144, (0, 2)), "q5_k": (176, (0, 2)), "q6_k": (210, (208,))}


def best_seconds(run: Callable[[], object], budget_seconds: float) -> float:
    """The fastest of the runs that fit into the budget, at least three, after one to warm up."""
    run()
    best = float("inf")
    end = time.perf_counter() + budget_seconds
    n = 0
    while n < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
        n += 1
    return best


def make_packed(name: str, rows: int, cols: int) -> PackedTensor:
    """A matrix of Gaussian weights in an affine format, or of random codes in a block format."""
    generator = torch.Generator().manual_seed(0)
    if name not in _SUPER_BLOCKS:
        return quantize(torch.randn(rows, cols, generator=generator), name, method="minmax")
    block_bytes, halves = _SUPER_BLOCKS[name]
    raw = torch.randint(0, 256, (rows, cols // 256, block_bytes), generator=generator, dtype=torch.uint8)
    for at in halves:
        raw[..., at : at + 2] = torch.tensor([0.01], dtype=torch.float16).view(torch.uint8)
    return pack_gguf(raw.view(rows, -1), name)


def measure_unpack(rows: int, cols: int, seconds: float) -> dict[str, dict[str, float]]:
    """G elements/s into a reused buffer, by format and output type."""
    table: dict[str, dict[str, float]] = {}
    print(f"\nunpack {rows}x{cols}, G elements/s      fp32    bf16")
    for name in FORMATS:
        packed = make_packed(name, rows, cols)
        row = {}
        for label, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16)):
            out = torch.empty(rows, cols, dtype=dtype)
            row[label] = round(
                rows * cols / best_seconds(partial(packed.dequantize, dtype, out), seconds) / 1e9, 2
            )
        table[name] = row
        print(f"  {name:30s} {row['f32']:7.2f} {row['bf16']:7.2f}", flush=True)
    return table


def measure_pack(rows: int, cols: int, seconds: float) -> dict[str, dict[str, float]]:
    """G elements/s of both quantisers, by format."""
    table: dict[str, dict[str, float]] = {}
    weight = torch.randn(rows, cols, generator=torch.Generator().manual_seed(0))
    print(f"\npack {rows}x{cols}, G elements/s      minmax  search")
    for name in PACK_FORMATS:
        row = {}
        for method in METHODS:
            took = best_seconds(partial(quantize, weight, name, method=method), seconds)
            row[method] = round(rows * cols / took / 1e9, 3)
        table[name] = row
        print(f"  {name:30s} {row['minmax']:7.3f} {row['search']:7.3f}", flush=True)
    return table


def measure_crossover(
    name: str, rows: int, cols: int, seconds: float, dtype: torch.dtype = torch.float32
) -> tuple[int, list[tuple[int, float, float, float, float]]]:
    """The largest of TOKENS at which the few-token product is the faster, and the milliseconds of all ways.

    Columns: tokens, few-token product, product by AMX (NaN without), unpacking and multiplying, multiplying alone.
    """
    packed = make_packed(name, rows, cols)
    scratch = torch.empty(rows * cols, dtype=dtype)
    unpacked = packed.dequantize(dtype)
    crossover = 0
    lines = []
    for n in TOKENS:
        x = torch.randn(n, cols, generator=torch.Generator().manual_seed(n)).to(dtype)
        few = best_seconds(partial(quant_linear._few_tokens, x, packed, None, None), seconds)
        tiles = math.nan
        if amx.can_multiply(x, packed):
            tiles = best_seconds(partial(amx.multiply, x, packed, None, None), seconds)
        many = best_seconds(
            partial(quant_linear._unpack_and_multiply, x, packed, None, scratch, None), seconds
        )
        alone = best_seconds(partial(F.linear, x, unpacked), seconds)
        lines.append((n, few * 1e3, tiles * 1e3, many * 1e3, alone * 1e3))
        crossover = n if few <= many else crossover
    return crossover, lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=5632)
    parser.add_argument("--cols", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=0.5, help="time spent on each figure")
    parser.add_argument("--quick", action="store_true", help="crossover of int4-g64 only")
    args = parser.parse_args()
    report: dict[str, object] = {"threads": torch.get_num_threads(), "rows": args.rows, "cols": args.cols}
    report["unpack_g_per_s"] = measure_unpack(args.rows, args.cols, args.seconds)
    report["pack_g_per_s"] = measure_pack(min(args.rows, 256), args.cols, args.seconds)
    crossovers = {}
    for name in ("int4-g64",) if args.quick else ("int8-g128", "int4-g64", "int3.5-g64", "q4_k", "q6_k"):
        for dtype in (torch.float32, torch.bfloat16):
            label = f"{name} {str(dtype).removeprefix('torch.')}"
            crossovers[label], lines = measure_crossover(name, args.rows, args.cols, args.seconds / 2, dtype)
            print(f"\n{label}: few-token product up to {crossovers[label]} tokens")
            print("  tokens   few ms   AMX ms  unpack+multiply ms  multiply ms")
            for n, few, tiles, many, alone in lines:
                print(f"  {n:6d} {few:8.2f} {tiles:8.2f} {many:19.2f} {alone:12.2f}", flush=True)
    report["crossover_tokens"] = crossovers
    print(json.dumps(report))


if __name__ == "__main__":
    main()
