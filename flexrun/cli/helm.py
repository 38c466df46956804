"""``flexrun helm``: a HELM run on this engine, in one command."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from flexrun.cli.exits import EXIT_OK, UsageError
from flexrun.cli.flags import add_model_flags, add_policy_flags, whole_number
from flexrun.cli.session import resolve

DESCRIPTION = """\
Runs HELM's scenarios (install flexrun[helm], best in an environment of its own: make helm-venv) with
this engine as the model. The deployment files go into a private folder, whose cache also keeps every
result as it lands; each run spec is one engine job. Flags that are not listed here go to helm-run as
they are: --suite, --output-path, --num-train-trials and so on, in their long forms.

example: flexrun helm -m MODEL --run-entries simple_mcqa dyck_language:num_parenthesis_pairs=3
         --suite first --max-eval-instances 10"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "helm",
        help="run HELM scenarios",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run, takes_rest=True)
    group = parser.add_argument_group("scenarios")
    group.add_argument(
        "--run-entries",
        nargs="+",
        required=True,
        metavar="ENTRY",
        help="as of helm-run; model=... is added where it is missing",
    )
    group.add_argument("--max-eval-instances", type=whole_number(1), default=1000, metavar="N")
    group.add_argument(
        "--local-path",
        metavar="FOLDER",
        help="deployment files and HELM's cache (default: in the user's cache folder)",
    )
    group.add_argument(
        "--no-exit-on-error", action="store_true", help="go on with the next entry after a failure"
    )
    add_model_flags(parser)
    add_policy_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Write the deployment, hand over to helm-run."""
    resolve(args)
    try:
        from helm.benchmark.run import main as helm_run
    except ImportError as error:
        raise UsageError(
            f"HELM is not installed here ({error}): pip install 'flexrun[helm]', best in an environment of its own"
            " (make helm-venv)"
        ) from None
    from flexrun.evaluate.helm_engine import close_all, deployment_files, deployment_name

    flags = model_flags(args)
    name = deployment_name(args.model)
    folder = Path(args.local_path) if args.local_path else _private_folder(flags)
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in deployment_files(flags).items():  # JSON is YAML
        (folder / file).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    words = ["--run-entries", *(with_model(entry, name) for entry in args.run_entries)]
    words += ["--max-eval-instances", str(args.max_eval_instances), "--local-path", str(folder)]
    words += ["--runner-class-name", "flexrun.evaluate.helm_runner.BatchedRunner"]
    if not args.no_exit_on_error:
        words.append("--exit-on-error")
    before, sys.argv = sys.argv, ["helm-run", *words, *args.rest]
    try:
        helm_run()
    finally:
        sys.argv = before
        close_all()
    return EXIT_OK


def with_model(entry: str, name: str) -> str:
    """A run entry with our model, unless it names one."""
    scenario, _, options = entry.partition(":")
    if any(option.startswith("model=") for option in options.split(",")):
        return entry
    return f"{scenario}:{options},model={name}" if options else f"{scenario}:model={name}"


_MODEL_FIELDS = (
    "device", "dtype", "seed", "policy", "gpu_batch_size", "num_gpu_batches", "weights", "cache", "activations",
    "weight_format", "cache_format", "cpu_attention_frac", "schedule", "gpu_mem", "cpu_mem", "disk_mem", "disk_dir",
    "max_model_len",
)  # fmt: skip


def model_flags(args: argparse.Namespace) -> list[str]:
    """The model's and the policy's flags that were given, as words again."""
    model = Path(args.model).expanduser()
    flags = ["-m", str(model.absolute()) if model.exists() else args.model]
    for name in _MODEL_FIELDS:
        value = getattr(args, name)
        if value is None:
            continue
        if name in ("weights", "cache", "activations"):
            value = f"{value.gpu_frac},{value.cpu_frac},{value.disk_frac}"
        flags += [f"--{name.replace('_', '-')}", str(value)]
    flags += [
        f"--{name.replace('_', '-')}" for name in ("dummy_weights", "no_overlap") if getattr(args, name)
    ]
    return flags


def _private_folder(flags: list[str]) -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flexrun" / "helm"
    return base / hashlib.blake2b(flags[1].encode(), digest_size=8).hexdigest()
