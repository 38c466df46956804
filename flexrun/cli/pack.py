"""``flexrun pack``: convert a model once into a folder from which it streams as it is."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from flexrun.cli.exits import EXIT_OK, UsageError
from flexrun.cli.flags import value_of, whole_number
from flexrun.report import format_seconds, peak_rss_bytes, print_table
from offload.host import format_bytes
from quant.formats import parse_format

QUANTISERS = ("search", "minmax")
_PLAIN_INTERVAL_SECONDS = 5.0


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "pack",
        help="convert a model's weights once",
        description="Writes a packed model folder: weights in a chosen format, laid out for streaming, with"
        " configuration, tokenizer and checksums. Works in row blocks, so memory stays small; the folder appears"
        " whole or not at all. 'flexrun info --verify' checks it.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "-m",
        "--model",
        required=True,
        metavar="MODEL",
        help="a folder, a .gguf file, org/name in the local Hugging Face cache, or a preset's name",
    )
    parser.add_argument("-o", "--output", required=True, metavar="DIR", help="the folder to make")
    parser.add_argument(
        "--weight-format",
        type=value_of(_format_name, "format"),
        default="auto",
        metavar="FORMAT",
        help="auto (the checkpoint's own), bf16, int8-g64, int4-g64, ... (default: auto)",
    )
    parser.add_argument(
        "--method",
        choices=QUANTISERS,
        default="search",
        help="how scales are chosen: searched for least error, or from the extremes, faster (default: search)",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a packed model that is there already"
    )
    parser.add_argument(
        "--dummy-weights", action="store_true", help="random weights from --seed, for measuring speed"
    )
    parser.add_argument("--seed", type=whole_number(0), default=0, help="of --dummy-weights (default: 0)")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.add_argument("-v", "--verbose", action="store_true", help="say more on standard error")


def run(args: argparse.Namespace) -> int:
    """Pack one model. Raises CheckpointError, ModelConfigError or DiskError; nothing is left behind then."""
    from flexrun.checkpoint.open_model import open_model
    from flexrun.checkpoint.packed import PackedSource
    from flexrun.checkpoint.packing import pack_model

    started = time.monotonic()
    opened = open_model(
        args.model,
        weight_format=args.weight_format,
        dummy_weights=args.dummy_weights,
        seed=args.seed,
        method=args.method,
    )
    if isinstance(opened.source, PackedSource):
        raise UsageError(
            f"{args.model} is packed already, as {opened.source.weight_format}; to pack it in another format,"
            " start from the checkpoint that it was made of"
        )
    for note in opened.notes:
        print(f"note: {note}", file=sys.stderr)
    with _Progress() as progress:
        made = pack_model(
            opened.source,
            opened.model,
            Path(args.output),
            name=opened.name,
            overwrite=args.overwrite,
            progress=progress.update,
        )
    packed = PackedSource(made.path)
    result = {
        "model": opened.name,
        "folder": str(made.path),
        "weight_format": opened.source.weight_format,
        "method": args.method,
        "weight_bytes": packed.manifest.weight_bytes,
        "folder_bytes": made.nbytes,
        "seconds": time.monotonic() - started,
        "peak_rss_bytes": peak_rss_bytes(),
    }
    if args.json:
        print(json.dumps(result))
    else:
        rows = [
            ("folder", str(made.path)),
            ("weights", f"{format_bytes(packed.manifest.weight_bytes)} ({opened.source.weight_format})"),
            ("on disk", format_bytes(made.nbytes)),
            ("time", format_seconds(time.monotonic() - started)),
            ("peak memory", format_bytes(peak_rss_bytes())),
        ]
        print_table(rows, title=f"packed {opened.name}")
    return EXIT_OK


def _format_name(text: str) -> str:
    if text != "auto":
        parse_format(text)
    return text


class _Progress:
    """A bar on a terminal, else a line every few seconds, on standard error."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None
        self._started = self._printed = time.monotonic()

    def __enter__(self) -> _Progress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(binary_units=True),
                TimeRemainingColumn(),
                console=Console(file=sys.stderr),
                transient=True,
            )
            self._task = self._bar.add_task("packing", total=None)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done_bytes: int, total_bytes: int, name: str) -> None:
        """Take note of a unit that was written."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done_bytes, total=total_bytes, description=name)
            return
        now = time.monotonic()
        if now - self._printed >= _PLAIN_INTERVAL_SECONDS:
            self._printed = now
            left = (now - self._started) * (total_bytes - done_bytes) / max(done_bytes, 1)
            print(
                f"{name}: {format_bytes(done_bytes)} of {format_bytes(total_bytes)} written, "
                f"about {format_seconds(left)} left",
                file=sys.stderr,
                flush=True,
            )
