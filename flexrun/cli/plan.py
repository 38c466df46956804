"""``flexrun plan``: the placement, block shape and formats with the highest throughput that fits, and why."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexrun.checkpoint import resolve_model
from flexrun.cli.exits import EXIT_OK, EXIT_REFUSED, UsageError
from flexrun.cli.flags import size_text, value_of, whole_number
from flexrun.report import format_seconds, print_table
from offload.host import format_bytes, parse_bytes

if TYPE_CHECKING:
    from flexrun.jobs.sample import InputSample
    from policy.footprint import ModelFootprint
    from policy.hardware import Hardware
    from policy.search import SearchResult
    from policy.tiers import Policy
    from policy.workload import Workload

DESCRIPTION = """\
Searches block shapes, formats and placements for the highest predicted throughput that fits the budgets.
Needs neither a GPU nor weights: a preset's name and a named machine are enough. --hardware takes a file of
`flexrun profile`, or one of the built-in machines; without it this machine's measured profile is used, and
measured first if there is none."""

FORMATS_CONSIDERED = (
    "f32",
    "bf16",
    "f16",
    "int8-g64",
    "int8-g128",
    "int4-g64",
    "int4-g128",
    "int3-g64",
    "int2-g64",
)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="find the best placement",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "-m", "--model", required=True, metavar="MODEL", help="a folder, .gguf file, or preset"
    )
    parser.add_argument("--prompt-len", type=whole_number(1), metavar="S", help="tokens of a prompt")
    parser.add_argument(
        "--gen-len", type=whole_number(0), metavar="N", help="tokens of an answer; 0 = scoring"
    )
    parser.add_argument("--num-requests", type=whole_number(1), metavar="R", help="default: very many")
    parser.add_argument(
        "--batch-file",
        metavar="FILE",
        help="take lengths and number of requests from an input file of flexrun batch, instead of the above",
    )
    parser.add_argument("--hardware", metavar="FILE_OR_NAME", help="default: this machine's profile")
    for tier in ("gpu", "cpu", "disk"):
        parser.add_argument(f"--{tier}-mem", type=value_of(size_text, "size"), metavar="SIZE", help="budget")
    parser.add_argument(
        "--weight-format", metavar="FORMAT", help="default: the checkpoint's; auto may quantise"
    )
    parser.add_argument(
        "--cache-format", metavar="FORMAT", help="default: the compute type; auto may quantise"
    )
    parser.add_argument("--schedule", choices=("static", "refill"), help="default: the faster one")
    parser.add_argument("--price-per-hour", type=float, metavar="X", help="for the cost per million tokens")
    parser.add_argument("--sweep", action="store_true", help="list the front of throughput and latency")
    parser.add_argument("--plot", metavar="FILE", help="draw that front (needs matplotlib)")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the plan; --policy FILE runs it")
    parser.add_argument("--json", action="store_true", help="print one JSON object on standard output")


def run(args: argparse.Namespace) -> int:
    """Search and print; EXIT_REFUSED if nothing fits."""
    from policy.search import search

    workload = find_workload(args)
    hardware = find_hardware(args.hardware, price_per_hour=args.price_per_hour)
    footprint = find_footprint(args.model, args.weight_format)
    budgets: dict[str, Any] = {
        f"{tier}_mem_bytes": float(parse_bytes(text, total_bytes=int(total), what=f"--{tier}-mem"))
        for tier, total in zip(
            ("gpu", "cpu", "disk"), (hardware.gpu_mem_bytes, hardware.cpu_mem_bytes, hardware.disk_mem_bytes)
        )
        if (text := getattr(args, f"{tier}_mem")) is not None
    }
    found = search(
        footprint,
        hardware,
        workload,
        weight_format=args.weight_format,
        cache_format=args.cache_format,
        schedules=(args.schedule,) if args.schedule else ("refill", "static"),
        **budgets,
    )
    if found.best is None:
        if args.json:
            print(
                json.dumps(
                    {"policy": None, "infeasible": found.infeasible, "short_bytes": found.shortage_bytes}
                )
            )
        print(f"flexrun plan: {found.infeasible}", file=sys.stderr)
        return EXIT_REFUSED
    chosen = found.best.policy.weight_format
    if args.weight_format in (None, "auto") and chosen == footprint.native_format and not _is_plain(chosen):
        # A packed checkpoint stays as it is: a format's name would ask for its conversion.
        policy = replace(found.best.policy, weight_format="auto")
        found = replace(found, best=replace(found.best, policy=policy))
    assert found.best is not None
    data = as_dict(found, hardware)
    if args.output:
        Path(args.output).write_text(
            json.dumps({**found.best.to_dict(), "hardware": hardware.name}, indent=1) + "\n"
        )
    if args.plot:
        plot_front(found, Path(args.plot), footprint.name, hardware.name)
    print_table(plan_rows(found), title=f"{footprint.name} on {hardware.name}")
    if args.sweep:
        print_table(
            [
                (
                    f"{p.generated_tokens_per_s:,.2f} tokens/s",
                    f"{format_seconds(p.latency_seconds)}, {_block(p.policy)}",
                )
                for p in found.front
            ],
            title="throughput against latency of one request",
        )
    if args.json:
        print(json.dumps(data))
    return EXIT_OK


def find_workload(args: argparse.Namespace) -> Workload:
    """Two lengths, or the distribution in a batch file. UsageError for neither, both, or a file of no use."""
    from policy.workload import Workload

    given = args.prompt_len is not None, args.gen_len is not None
    if args.batch_file is None:
        if not all(given):
            raise UsageError(
                "--prompt-len and --gen-len say what to plan for; give both (gen-len 0 is scoring), or a"
                " --batch-file"
            )
        return Workload(prompt_len=args.prompt_len, gen_len=args.gen_len, num_requests=args.num_requests)
    if any(given):
        raise UsageError("--batch-file says how long requests are; leave --prompt-len and --gen-len out")
    found = _batch_file(Path(args.batch_file), args.model)
    print(f"planning for {found.describe()}", file=sys.stderr)
    if args.num_requests is None:
        return found.workload
    return replace(found.workload, num_requests=args.num_requests)


def _batch_file(path: Path, model: str) -> InputSample:
    """Lengths in an input file, by the model's tokenizer, or by bytes where there is none."""
    from functools import partial

    from flexrun.chat import encode_chat
    from flexrun.checkpoint.open_model import open_model
    from flexrun.jobs.generation import GenerationJob
    from flexrun.jobs.sample import rough_encode, rough_encode_chat, sample_input

    opened = open_model(model, dummy_weights=resolve_model(model).kind == "preset")
    tokenizer = opened.load_tokenizer()
    template = opened.load_chat_template(tokenizer)
    if tokenizer is None:
        print(f"{model} has no tokenizer here: lengths are about a token per 4 bytes", file=sys.stderr)
    kind = GenerationJob(
        model_name=model,
        encode=rough_encode if tokenizer is None else tokenizer.encode,
        encode_chat=rough_encode_chat if template is None else partial(encode_chat, tokenizer, template),
    )
    try:
        found = sample_input(path, kind, max_tokens=opened.model.max_positions)
    except OSError as error:
        raise UsageError(f"cannot read the batch file {path}: {error.strerror}") from None
    if found is None:
        raise UsageError(
            f"{path} holds no request that {model} can run (of at most {opened.model.max_positions} tokens);"
            " flexrun batch -i FILE says what is wrong with each line"
        )
    return found


def find_hardware(name: str | None, *, price_per_hour: float | None = None) -> Hardware:
    """A named machine, a file, or this machine's profile."""
    from policy.hardware import load_hardware

    if name is None:
        from flexrun.probe import machine_profile
        from offload.device import make_device

        hardware = machine_profile(make_device("auto"))
    else:
        hardware = load_hardware(name)
    return hardware if price_per_hour is None else replace(hardware, price_per_hour=price_per_hour)


def find_footprint(model: str, weight_format: str | None) -> ModelFootprint:
    """A model's footprint in its own format and in those that a plan may choose; reads headers only."""
    from flexrun.checkpoint import open_checkpoint
    from flexrun.model.config import config_from_checkpoint, config_from_hf
    from flexrun.model.footprint import model_footprint
    from quant.formats import parse_format

    found = resolve_model(model)
    if found.kind == "preset":
        config = config_from_hf(found.preset_config())
    else:
        # As it is stored, tensor by tensor: packed folders and GGUF files of several formats too.
        stored = _stored_footprint(model)
        native = stored.native_format
        if weight_format in (None, native):
            return stored
        if not _is_plain(native) and weight_format == "auto":
            print(f"note: the checkpoint is packed already ({native}) and stays as it is", file=sys.stderr)
            return stored
        if found.path is None or found.kind == "packed":
            raise UsageError(
                f"{model} is packed already, as {native}; leave --weight-format out, or plan for the model that it"
                " was packed from"
            )
        config = config_from_checkpoint(open_checkpoint(found.path))
    formats = [f for f in FORMATS_CONSIDERED if _holds(f)]
    if weight_format not in (None, "auto"):
        formats.append(parse_format(str(weight_format)).name)
    return model_footprint(config, name=model, weight_formats=tuple(formats))


def _stored_footprint(model: str) -> ModelFootprint:
    from flexrun.checkpoint.open_model import open_model
    from flexrun.runtime import layout_footprint

    opened = open_model(model)
    return layout_footprint(opened.model, opened.source, opened.name)


def _holds(name: str) -> bool:
    from quant.formats import parse_format

    try:
        parse_format(name)
    except ValueError:
        return False
    return True


def _is_plain(name: str) -> bool:
    from quant.formats import parse_format

    return _holds(name) and parse_format(name).is_plain


def as_dict(found: SearchResult, hardware: Hardware) -> dict[str, Any]:
    """The object that --json prints."""
    assert found.best is not None
    return {
        **found.best.to_dict(),
        "hardware": hardware.name,
        "search_seconds": found.search_seconds,
        "helps": [{"change": change, "throughput_factor": factor} for change, factor in found.helps],
        "warnings": list(found.warnings),
        "front": [
            {
                "generated_tokens_per_s": p.generated_tokens_per_s,
                "latency_seconds": p.latency_seconds,
                "policy": p.policy.to_dict(),
            }
            for p in found.front
        ],
    }


def _block(policy: Policy) -> str:
    return f"block {policy.gpu_batch_size} x {policy.num_gpu_batches}"


def plan_rows(found: SearchResult) -> list[tuple[str, str]]:
    """The plan for people."""
    from policy.tiers import Tier

    plan = found.best
    assert plan is not None
    policy, predicted = plan.policy, plan.predicted
    rows = [
        ("block", f"{policy.gpu_batch_size} x {policy.num_gpu_batches} sequences, {policy.schedule}"),
        ("formats", f"weights {policy.weight_format}, cache {policy.cache_format}"),
    ]
    for name in ("weights", "cache", "activations"):
        placement = getattr(policy, name)
        parts = [
            f"{placement.fraction(tier):.0%} {tier.label}" for tier in Tier if placement.fraction(tier) > 0
        ]
        rows.append((name, ", ".join(parts)))
    if policy.cpu_attention_frac:
        rows.append(("attention on the CPU", f"{policy.cpu_attention_frac:.0%} of the gpu batches"))
    rows += [(f"{tier} memory", format_bytes(n)) for tier, n in plan.planned_bytes.items()]
    kind = "generated" if predicted["generated_tokens_per_s"] else "all"
    rows += [
        ("generated tokens/s", f"{predicted['generated_tokens_per_s']:,.2f}"),
        ("all tokens/s", f"{predicted['total_tokens_per_s']:,.2f}"),
        (f"bound, {kind} tokens/s", f"{plan.bound['generated_tokens_per_s']:,.2f}"),
        (
            "prefill, decode",
            f"{format_seconds(predicted['prefill_seconds'])}, {format_seconds(predicted['decode_seconds'])}",
        ),
        ("latency of a request", format_seconds(predicted["latency_seconds"])),
        ("MFU", f"{predicted['mfu']:.1%}"),
    ]
    moved = {k: n for k, n in predicted["bytes_per_token"].items() if n}
    rows += [(f"{lane} per token", format_bytes(int(n))) for lane, n in moved.items()]
    if "cost_per_million_tokens" in predicted:
        rows.append(("cost per million tokens", f"{predicted['cost_per_million_tokens']:,.2f}"))
    rows.append(("binding", plan.binding_resource))
    rows += [("would help", f"{change}: x{factor:.2f}") for change, factor in found.helps[:3]]
    rows += [("warning", text) for text in found.warnings]
    rows.append(("searched in", f"{found.search_seconds:.2f} s"))
    return rows


def plot_front(found: SearchResult, path: Path, model: str, machine: str) -> None:
    """Throughput against latency, to an image file."""
    try:
        import matplotlib
    except ImportError:
        raise UsageError("--plot needs matplotlib: pip install flexrun[plots]") from None
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    axes.plot(
        [p.latency_seconds for p in found.front], [p.generated_tokens_per_s for p in found.front], marker="o"
    )
    axes.set_xscale("log")
    axes.set_xlabel("seconds from a request's start to its end")
    axes.set_ylabel("generated tokens/s")
    axes.set_title(f"{model} on {machine}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
