"""``flexrun profile``: measure this machine for the planner, or refit its constants from reports of runs."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexrun.cli.exits import EXIT_OK, UsageError
from flexrun.report import print_columns, print_table
from offload.host import format_bytes

if TYPE_CHECKING:
    from offload.device import Device
    from policy.audit import RunRecord
    from policy.calibrate import Calibration
    from policy.hardware import Hardware

DESCRIPTION = """\
Measures copies, disk, linear layers, unpacking and attention, then runs small models for some seconds to settle what
these measurements miss, and keeps the result for `flexrun plan` and for planned runs. Takes about a minute and a
half. The file is JSON and may be edited.

--refit takes reports of runs on this machine instead (what `flexrun bench --json` and `flexrun batch --json` print,
one object per file) and moves the constants so that the runs' lanes come out as they were measured."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "profile",
        help="measure this machine",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="also write the description here; with --refit, write it here only and leave the profile as it is",
    )
    parser.add_argument("--refit", nargs="+", metavar="REPORT", help="fit constants to these runs")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, ... (default: auto)")
    parser.add_argument("--disk-dir", metavar="FOLDER", help="a folder on the disk to measure")
    parser.add_argument("--json", action="store_true", help="print one JSON object on standard output")


def run(args: argparse.Namespace) -> int:
    """Measure or refit, keep, print."""
    from offload.device import make_device

    device = make_device(args.device)
    if args.refit:
        return _refit(args, device)
    from flexrun.probe import machine_profile

    hardware = machine_profile(
        device,
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


# -- refitting -----------------------------------------------------------------------------------------------


def _refit(args: argparse.Namespace, device: Device) -> int:
    """Fit the cached profile's constants to the reports; write, print."""
    from flexrun.audit import known_hardware, machine_id
    from offload.measure import cache_file
    from policy.calibrate import MAX_FACTOR, refit

    hardware = known_hardware(device)
    if hardware is None:
        raise UsageError("there is no profile of this machine to refit yet; run flexrun profile first")
    observations = []
    for name in args.refit:
        record = read_report(Path(name), machine_id(device))
        try:
            observations.append(record.observation(hardware, name))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    fitted = refit(hardware, observations)
    target = Path(args.output) if args.output else cache_file(device)
    try:
        fitted.hardware.save(target)
    except OSError as error:
        raise UsageError(f"cannot write {target}: {error.strerror}") from None
    rows = refit_rows(hardware, fitted)
    n = len(observations)
    title = f"{hardware.name}, refitted from {n} report{'s' if n > 1 else ''}"
    print_columns(("constant", "before", "after", "factor", "known"), rows, title=title)
    print(
        f"lanes' mean deviation {fitted.error_before:.1%} before, {fitted.error_after:.1%} after;"
        f" written to {target}",
        file=sys.stderr,
    )
    edge = 0.98 * math.log(MAX_FACTOR)
    for name in (n for n, f in fitted.factors.items() if abs(math.log(f)) > edge):
        print(
            f"warning: {name} went as far as a refit may ({MAX_FACTOR:g} times): the reports contradict each other,"
            " or something else kept the machine busy",
            file=sys.stderr,
        )
    if args.json:
        print(
            json.dumps(
                {
                    "factors": fitted.factors,
                    "seen": fitted.seen,
                    "error_before": fitted.error_before,
                    "error_after": fitted.error_after,
                    "output": str(target),
                    "hardware": fitted.hardware.to_dict(),
                }
            )
        )
    return EXIT_OK


def read_report(path: Path, machine: str) -> RunRecord:
    """The run that a report tells of. machine: the id that it must have been made on.

    Raises ValueError, naming the file, if it cannot be read, is no report, is another machine's, or holds no run.
    """
    from policy.audit import RunRecord

    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read the report {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not a report: not one JSON object ({error})") from None
    audit = data.get("audit") if isinstance(data, Mapping) else None
    if not isinstance(audit, Mapping):
        raise ValueError(
            f'{path} holds no prediction data (no "audit"); a report is what flexrun bench --json or'
            " flexrun batch --json prints"
        )
    if audit.get("run") is None:
        raise ValueError(f"{path} holds no prediction data: no request finished in that run")
    try:
        record = RunRecord.from_dict(audit["run"])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if record.machine_id != machine:
        raise ValueError(
            f"{path} is of another machine ({record.machine}, {record.machine_id}; this one is {machine});"
            " a profile is refitted from runs of its own machine"
        )
    return record


def refit_rows(before: Hardware, fitted: Calibration) -> list[tuple[str, str, str, str, str]]:
    """(constant, before, after, factor, what the reports say of it): what moved most first."""
    from policy.calibrate import UNSEEN, constant_value

    def order(name: str) -> tuple[bool, float]:
        factor = fitted.factors[name]
        return fitted.seen[name] == UNSEEN, -max(factor, 1 / factor)

    rows = []
    for name in sorted(fitted.factors, key=order):
        old, new = constant_value(before, name), constant_value(fitted.hardware, name)
        factor = fitted.factors[name]
        shown = f"{factor:.2f}"
        after = _figure(name, new)
        if fitted.seen[name] == UNSEEN and abs(factor - 1) < 0.01:
            shown = after = "-"
        rows.append((name.removesuffix("_per_s"), _figure(name, old), after, shown, fitted.seen[name]))
    return rows


def _figure(name: str, value: float) -> str:
    """A rate in 10^9 per second, a fixed cost in microseconds."""
    if name.startswith("overhead."):
        return f"{value * 1e6:,.1f} us"
    if value == float("inf"):
        return "-"
    unit = "FLOP/s" if name.startswith("gemm") or name.endswith(".prefill") else "elem/s"
    unit = "B/s" if name.endswith(("bytes_per_s", ".decode")) else unit
    return f"{value / 1e9:,.3g} G{unit}"
