"""``flexrun profile``: measure this machine for the planner, or refit its constants from reports."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from flexrun.cli.exits import EXIT_OK
from flexrun.report import print_table
from offload.host import format_bytes


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "profile",
        help="measure this machine",
        description="Measures copies, disk, linear layers, unpacking and attention in about a minute and keeps the"
        " result for `flexrun plan`. The file is JSON and may be edited.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    parser.add_argument("-o", "--output", metavar="FILE", help="also write the description here")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, ... (default: auto)")
    parser.add_argument("--disk-dir", metavar="FOLDER", help="a folder on the disk to measure")
    parser.add_argument("--json", action="store_true", help="print one JSON object on standard output")


def run(args: argparse.Namespace) -> int:
    """Measure, keep, print."""
    from offload.device import make_device
    from offload.measure import cached_hardware

    hardware = cached_hardware(
        make_device(args.device),
        folder=Path(args.disk_dir) if args.disk_dir else None,
        fresh=True,
        say=lambda text: print(f"measuring {text} ...", file=sys.stderr),
    )
    if args.output:
        hardware.save(Path(args.output))
    curve = hardware.gemm[hardware.compute_dtype]
    rows = [
        ("computes in", hardware.compute_dtype),
        (
            "linear layers",
            ", ".join(f"{n:g}: {f / 1e9:.0f}" for n, f in zip(curve.tokens, curve.flops_per_s)),
        ),
        ("", "tokens: GFLOP/s"),
        ("disk read, write", _rates(hardware.disk_read_bytes_per_s, hardware.disk_write_bytes_per_s)),
        ("upload, download", _rates(hardware.upload_bytes_per_s, hardware.download_bytes_per_s)),
        ("unpacking", ", ".join(f"{k} {v / 1e9:.1f}" for k, v in hardware.unpack_elements_per_s.items())),
        ("", "10^9 elements/s"),
        ("cpu memory", format_bytes(int(hardware.cpu_mem_bytes))),
        ("disk space", format_bytes(int(hardware.disk_mem_bytes))),
    ]
    print_table(rows, title=hardware.name)
    if args.json:
        print(json.dumps(hardware.to_dict()))
    return EXIT_OK


def _rates(*bytes_per_s: float) -> str:
    return ", ".join(f"{rate / 1e9:.2f}" for rate in bytes_per_s) + " GB/s"
