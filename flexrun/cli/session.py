"""From flags to a loaded model, and to what names it in a manifest."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexrun.checkpoint import ResolvedModel, is_packed_folder, open_checkpoint, resolve_model
from flexrun.cli.exits import UsageError
from flexrun.cli.flags import policy_options, wants_plan
from flexrun.jobs.manifest import earlier_settings
from flexrun.report import format_seconds, print_table
from policy.footprint import MIXED_FORMAT

if TYPE_CHECKING:
    from flexrun.chat import ChatTemplate
    from flexrun.jobs.kinds import JobKind
    from flexrun.llm import LLM
    from flexrun.model.config import ModelConfig
    from flexrun.tokenizer import Tokenizer
    from policy.workload import Workload

NOT_MEASURED = (
    "this machine has not been measured, so the built-in placement is used; `flexrun profile` (about a minute and a"
    " half, once) lets the planner choose"
)
AUTO_PLAIN = ("f32", "bf16", "f16")

# Files of a model's folder that change prompts or texts without touching a weight.
_TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


def resolve(args: argparse.Namespace) -> ResolvedModel:
    """Find the model before anything is loaded. UsageError for a preset without --dummy-weights.

    For dummy weights a folder needs no more than its config.json.
    """
    folder = Path(args.model).expanduser().absolute()
    if args.dummy_weights and (folder / "config.json").is_file() and not is_packed_folder(folder):
        return ResolvedModel(name=args.model, kind="hf", path=folder)
    model = resolve_model(args.model)
    if model.kind == "preset" and not args.dummy_weights:
        raise UsageError(
            f"{args.model!r} is a preset, a configuration without weights: add --dummy-weights to measure speed,"
            " or give the folder of a real model"
        )
    return model


def model_fingerprint(model: ResolvedModel, *, dummy_weights: bool = False) -> str:
    """Identity of weights, configuration, tokenizer and chat template; the same after a move or a copy.

    Weights are sampled, not read whole, so this takes milliseconds; with `dummy_weights` they do not count.
    """
    digest = hashlib.sha256()
    if model.path is None:
        digest.update(json.dumps(model.preset_config(), sort_keys=True).encode())
    elif model.kind == "hf" and dummy_weights:
        digest.update((model.path / "config.json").read_bytes())
    elif model.kind == "packed":
        digest.update((model.path / "manifest.json").read_bytes())
    else:
        digest.update(open_checkpoint(model.path).fingerprint().encode())
    if model.path is not None and model.path.is_dir():
        for name in _TEXT_FILES:
            file = model.path / name
            if file.is_file():
                content = hashlib.sha256(file.read_bytes()).hexdigest()
                digest.update(f"\0{name}\0{content}".encode())
    return digest.hexdigest()[:32]


def requested_settings(args: argparse.Namespace, model: ResolvedModel) -> dict[str, Any]:
    """Settings that can change a result, as far as they are known before the model is loaded."""
    settings: dict[str, Any] = {
        "model_fingerprint": model_fingerprint(model, dummy_weights=args.dummy_weights),
        "dummy_weights": bool(args.dummy_weights),
        "seed": args.seed,
    }
    options = policy_options(args)
    policy = options.get("policy")
    for name in ("weight_format", "cache_format"):
        given = options.get(name, "auto")
        settings[name] = given if policy in (None, "default") else getattr(policy, name)
    return settings


def resolved_dtype(args: argparse.Namespace) -> str:
    """What "auto" means on this machine, since results of two dtypes must not be mixed. Imports torch."""
    from offload.device import make_device

    device = make_device(args.device)
    return str(device.compute_dtype(args.dtype)).removeprefix("torch.")


def load_llm(args: argparse.Namespace, *, briefly: bool = False, **more: Any) -> LLM:
    """The model that the flags describe, ready to run; `more` goes to LLM as it is.

    Says on standard error what was planned, or why nothing was; briefly: in one line.
    """
    from flexrun.llm import LLM

    started = time.monotonic()
    llm = LLM(
        args.model,
        device=args.device,
        dtype=args.dtype,
        gpu_mem=args.gpu_mem,
        cpu_mem=args.cpu_mem,
        disk_dir=args.disk_dir,
        disk_mem=args.disk_mem,
        max_model_len=args.max_model_len,
        dummy_weights=args.dummy_weights,
        seed=args.seed,
        **policy_options(args),
        **more,
    )
    for note in llm.notes:
        print(f"note: {note}", file=sys.stderr)
    tell_plan(llm, args, known_work=bool(more), briefly=briefly)
    if args.verbose:
        print(f"model ready after {format_seconds(time.monotonic() - started)}", file=sys.stderr)
    return llm


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """What cuts texts into tokens before the model is loaded, and what the plan needs of the model."""

    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    config: ModelConfig
    max_positions: int
    native_format: str


def open_texts(args: argparse.Namespace) -> Texts:
    """Tokenizer, template and headers of the model that the flags name. Raises as LLM does."""
    from flexrun.checkpoint.open_model import open_model

    opened = open_model(args.model, dummy_weights=args.dummy_weights, seed=args.seed)
    stored = {
        slot.format.name
        for unit in opened.model.units
        for slot in opened.source.layout(unit).slots
        if slot.is_linear
    }
    tokenizer = opened.load_tokenizer()
    return Texts(
        tokenizer=tokenizer,
        chat_template=opened.load_chat_template(tokenizer),
        config=opened.config,
        max_positions=min(opened.model.max_positions, args.max_model_len or opened.model.max_positions),
        native_format=stored.pop() if len(stored) == 1 else MIXED_FORMAT,
    )


def prepare_job(args: argparse.Namespace, make_kind: Callable[[Texts], JobKind[Any]]) -> dict[str, Any]:
    """The workload of a job's input file, for a planned run; settles formats that are auto.

    Empty where nothing is to be planned, or the input is no file; the input's errors are the job's to tell.
    """
    auto = "auto" in (args.weight_format, args.cache_format)
    source = Path(args.input)
    readable = args.input != "-" and source.is_file() and args.limit != 0
    planned = readable and wants_plan(args) and measured(args)
    if not planned and not auto:
        return {}
    texts = open_texts(args)
    more: dict[str, Any] = {}
    workload = None
    if planned:
        from flexrun.jobs.sample import sample_input

        found = sample_input(
            source,
            make_kind(texts),
            limit=args.limit,
            n_done=0 if args.overwrite else _count_lines(Path(args.output)),
            max_tokens=texts.max_positions,
        )
        if found is not None:
            print(f"planning for {found.describe()}", file=sys.stderr)
            workload = found.workload
            more = {"workload": workload, "tokenizer": texts.tokenizer}
    if auto:
        earlier = {} if args.overwrite else earlier_settings(Path(args.output))
        choose_formats(
            args,
            workload,
            config=texts.config,
            native=texts.native_format,
            max_model_len=texts.max_positions,
            earlier=earlier,
        )
    return more


def measured(args: argparse.Namespace) -> bool:
    """Whether there is a profile of the machine that the flags name."""
    from flexrun.audit import known_hardware
    from offload.device import make_device

    return known_hardware(make_device(args.device)) is not None


def _count_lines(path: Path) -> int:
    """Lines of an output file: results of earlier runs."""
    if not path.is_file():
        return 0
    with path.open("rb") as stream:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: stream.read(1 << 20), b""))


def tell_plan(llm: LLM, args: argparse.Namespace, *, known_work: bool, briefly: bool = False) -> None:
    """Print the plan with its prediction and reasons; where there is none although one was wanted, why."""
    found = llm.search
    if found is not None and found.best is not None:
        from flexrun.cli.plan import plan_rows

        predicted, policy = found.best.predicted, found.best.policy
        if briefly and not args.verbose:
            print(
                f"planned: block {policy.gpu_batch_size} x {policy.num_gpu_batches}, predicted"
                f" {format_seconds(predicted['total_seconds'])} ({found.best.binding_resource} binds)",
                file=sys.stderr,
            )
            return
        rows = plan_rows(found)
        print_table([*rows, *(("reason", text) for text in found.reasons)], title="plan")
    elif wants_plan(args) and not (briefly and not args.verbose):
        from flexrun.audit import known_hardware

        if known_hardware(llm.device) is None:
            print(f"note: {NOT_MEASURED}", file=sys.stderr)
        elif not known_work:
            print("note: the work's lengths are not known: the built-in placement is used", file=sys.stderr)


def choose_formats(
    args: argparse.Namespace,
    workload: Workload | None,
    *,
    config: ModelConfig,
    native: str,
    max_model_len: int | None = None,
    earlier: Mapping[str, Any] | None = None,
) -> None:
    """Settle `--weight-format auto` and `--cache-format auto` in args, and state the choice.

    native: the format of the checkpoint's linear tensors; one that is packed already stays. max_model_len: longest
    sequence to have memory for, where the workload is an estimate. earlier: settings of results to go on from, whose
    formats are kept. Without a profile or known work nothing is quantised.
    """
    asked = [name for name in ("weight_format", "cache_format") if getattr(args, name) == "auto"]
    if not asked:
        return
    if earlier:
        for name in asked:
            kept = earlier.get(name, "auto")
            setattr(args, name, kept)
            print(
                f"note: --{name.replace('_', '-')} auto: {kept}, as in the earlier results", file=sys.stderr
            )
        return
    chosen: dict[str, str | None] = dict.fromkeys(asked)
    why = "the checkpoint's own, since only the planner chooses another"
    if workload is not None and wants_plan(args):
        found, why = _formats_by_plan(args, workload, config, native, max_model_len)
        chosen |= {name: found[name] for name in asked}
    for name in asked:
        setattr(
            args, name, chosen[name] or "auto"
        )  # which is what it says below, whatever a policy's file holds
        shown = chosen[name] or {"weight_format": native, "cache_format": "the compute type"}[name]
        print(f"note: --{name.replace('_', '-')} auto: {shown} ({why})", file=sys.stderr)


def _formats_by_plan(
    args: argparse.Namespace,
    workload: Workload,
    config: ModelConfig,
    native: str,
    max_model_len: int | None,
) -> tuple[dict[str, str | None], str]:
    """The formats of the best plan (None: as they are), and why."""
    from flexrun.audit import known_hardware
    from flexrun.llm import default_disk_dir
    from flexrun.model.footprint import model_footprint, native_format
    from flexrun.planning import search_admitting
    from flexrun.runtime import DTYPE_NAMES
    from offload.budgets import choose_budgets
    from offload.device import make_device
    from offload.host import host_memory, parse_bytes
    from policy.audit import for_run
    from policy.search import AUTO_WEIGHT_FORMATS
    from policy.tiers import Tier
    from quant.formats import parse_format

    nothing: dict[str, str | None] = {"weight_format": None, "cache_format": None}
    gpu = None
    if args.gpu_mem is not None:
        gpu = parse_bytes(args.gpu_mem, total_bytes=host_memory().total_bytes, what="--gpu-mem")
    device = make_device(args.device, gpu)
    hardware = known_hardware(device)
    if hardware is None:
        return nothing, "unchanged, since this machine has not been measured: flexrun profile"
    folder = Path(args.disk_dir) if args.disk_dir else default_disk_dir()
    while not folder.exists():
        folder = folder.parent
    budgets, _ = choose_budgets(device, cpu_mem=args.cpu_mem, disk_mem=args.disk_mem, disk_dir=folder)
    plain = native in AUTO_PLAIN
    if not plain and args.weight_format == "auto":
        print(f"note: the checkpoint is packed already ({native}) and stays as it is", file=sys.stderr)
    stored = [native] if plain else [native_format(config)]
    try:
        asked = parse_format(args.weight_format).name if args.weight_format not in (None, "auto") else None
        footprint = model_footprint(
            config,
            name=str(args.model),
            native=stored[0],
            weight_formats=[*AUTO_WEIGHT_FORMATS, *([asked] if asked else [])],
        )
    except ValueError as error:
        return nothing, f"unchanged: {error}"
    compute = DTYPE_NAMES[device.compute_dtype(args.dtype)]
    gpu_bytes = float(budgets.gpu_bytes) if device.first_tier is Tier.GPU else 0.0
    found, _ = search_admitting(
        footprint,
        for_run(hardware, compute, gpu_bytes),
        workload,
        max_model_len=max_model_len,
        gpu_mem_bytes=gpu_bytes,
        cpu_mem_bytes=float(budgets.cpu_bytes),
        disk_mem_bytes=float(budgets.disk_bytes),
        weight_format="auto" if plain and args.weight_format == "auto" else asked,
        cache_format=args.cache_format,
        schedules=(args.schedule,) if args.schedule else ("refill", "static"),
        gpu_batch_size=args.gpu_batch_size,
        num_gpu_batches=args.num_gpu_batches,
        overlap=not args.no_overlap,
    )
    if found.best is None:
        return nothing, f"unchanged: {found.infeasible}"
    best, predicted = found.best.policy, found.best.predicted
    kind = "total" if workload.scoring else "generated"
    return {
        "weight_format": None if best.weight_format == footprint.native_format else best.weight_format,
        "cache_format": None if best.cache_format in ("auto", compute) else best.cache_format,
    }, f"predicted to be fastest, {predicted[f'{kind}_tokens_per_s']:,.1f} {kind} tokens/s"
