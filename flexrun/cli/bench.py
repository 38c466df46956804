"""``flexrun bench``: a synthetic run, its throughput beside the physical bound, planned beside measured bytes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from flexrun.cli.exits import EXIT_OK, UsageError
from flexrun.cli.flags import add_model_flags, add_policy_flags, whole_number
from flexrun.cli.session import choose_formats, load_llm, open_texts
from flexrun.report import print_audit, print_table
from offload.host import format_bytes

DESCRIPTION = """\
Runs prompts of random tokens through the model and reports prefill, decode and total throughput, each
lane's busy seconds and bytes, how near the run came to what the hardware allows (the sum over the phases of the
largest resource time, at rates that a short calibration reaches), and the run beside its plan: predicted against
measured seconds per phase and lane, planned against measured bytes per tier. --gen-len 0 measures scoring."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="measure a run beside its bound",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    parser.add_argument("--prompt-len", type=whole_number(1), default=128, metavar="S", help="default: 128")
    parser.add_argument("--gen-len", type=whole_number(0), default=32, metavar="N", help="default: 32")
    parser.add_argument("--num-requests", type=whole_number(1), default=64, metavar="R", help="default: 64")
    parser.add_argument("--trace", metavar="FILE", help="write a Chrome trace: one row per lane")
    parser.add_argument("--json", action="store_true", help="print one JSON object on standard output")
    add_model_flags(parser)
    add_policy_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Load, run, report."""
    from flexrun.bench import run_bench
    from offload.trace import Trace
    from policy.workload import Workload

    trace = Trace() if args.trace else None
    if args.trace and not Path(args.trace).absolute().parent.is_dir():
        raise UsageError(f"--trace {args.trace}: its folder does not exist")
    if "auto" in (args.weight_format, args.cache_format):
        texts = open_texts(args)
        workload = Workload(prompt_len=args.prompt_len, gen_len=args.gen_len, num_requests=args.num_requests)
        choose_formats(args, workload, config=texts.config, native=texts.native_format)
    llm = load_llm(
        args, prompt_len=args.prompt_len, gen_len=args.gen_len, num_requests=args.num_requests, trace=trace
    )
    try:
        result = run_bench(
            llm,
            prompt_len=args.prompt_len,
            gen_len=args.gen_len,
            num_requests=args.num_requests,
            seed=args.seed,
        ).to_dict()
    finally:
        llm.close()
    if trace is not None:
        trace.write(Path(args.trace))
    _show(result)
    if args.json:
        print(json.dumps(result))
    return EXIT_OK


def _show(result: dict[str, Any]) -> None:
    rows = [
        ("requests", f"{result['num_requests']} x ({result['prompt_len']} + {result['gen_len']} tokens)"),
        ("generated tokens/s", f"{result['generated_tokens_per_s']:,.1f}"),
        ("all tokens/s", f"{result['total_tokens_per_s']:,.1f}"),
        ("prefill, decode", f"{result['prefill_seconds']:.2f} s, {result['decode_seconds']:.2f} s"),
        ("wall", f"{result['wall_seconds']:.2f} s"),
        ("bound", f"{result['bound_seconds']:.2f} s"),
        ("efficiency", f"{result['efficiency_frac']:.2f}"),
        ("peak memory", format_bytes(result["peak_rss_bytes"])),
    ]
    for name, phase in result["phases"].items():
        for resource, seconds in phase["bound_seconds"].items():
            rows.append((f"{name}: {resource} bound", f"{seconds:.2f} s of {phase['seconds']:.2f} s"))
        for lane, entry in phase["lanes"].items():
            if entry["busy_seconds"] > 0:
                moved = f", {format_bytes(entry['bytes'])}" if entry["bytes"] else ""
                rows.append((f"{name}: {lane} lane busy", f"{entry['busy_seconds']:.2f} s{moved}"))
    print_table(rows)
    print_audit(result["audit"])
