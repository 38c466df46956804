"""Multiple-choice questions by log-likelihood with weights on a slow disk: one job beside one request at a time.

    python -m experiments.eval_speed MODEL [--questions 1000] [--alone 50] [--ram 900MiB] [--read-mb-per-s 200]
        [flags of flexrun score, such as --weights 0,0,1 --weight-format bf16]

Every question has 4 choices, about 60 tokens per scoring. As root with cgroup v1 the measured process runs in a
group of its own whose memory, page cache included, and reads of the model's disk are limited; otherwise a note
says that the machine is as it is. Each mode runs in a process of its own: `batched` takes all questions, `alone`
the first few, one scoring after the other, whose rate stands for all. Prints a table, then one JSON line. The bound
is that of flexrun bench: per resource, the work that cannot be avoided at calibrated rates.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.texts import random_words
from flexrun.cli.flags import add_model_flags, add_policy_flags
from flexrun.report import print_table
from offload.host import parse_bytes

N_CHOICES = 4
CONTEXT_WORDS = 48
CHOICE_WORDS = 4
CGROUPS = Path("/sys/fs/cgroup")


def questions(n: int) -> list[list[tuple[str, str]]]:
    """n questions of N_CHOICES (context, continuation) pairs; the same every time."""
    rng = random.Random(11)
    result = []
    for _ in range(n):
        context = f"Question: {random_words(rng, CONTEXT_WORDS)}\nAnswer:"
        result.append([(context, f" {random_words(rng, CHOICE_WORDS)}") for _ in range(N_CHOICES)])
    return result


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """One mode in this process."""
    from flexrun.bench import Phase, disk_read_rate, resource_seconds
    from flexrun.cli.session import load_llm
    from flexrun.report import peak_rss_bytes
    from policy.workload import Workload

    batched = args.mode == "batched"
    pairs = [pair for question in questions(args.questions if batched else args.alone) for pair in question]
    workload = Workload(prompt_len=60, gen_len=0, num_requests=len(pairs) if batched else 1)
    with load_llm(args, workload=workload) as llm:
        llm.score(pairs[:1])  # compiled kernels and first reads are not what is measured
        llm.runtime.executor.drain()
        disk_rates = [disk_read_rate(llm)] if llm.runtime.weights.disk_extents() else []
        engine, lanes = llm.engine, llm.runtime.lanes
        passes, tokens = engine.stats.passes, engine.stats.prompt_tokens
        lanes.reset_stats()
        began = time.perf_counter()
        if batched:
            scores = llm.score(pairs)
        else:
            scores = [score for pair in pairs for score in llm.score([pair])]
        seconds = time.perf_counter() - began
        phase = Phase(
            name="prefill",
            passes=engine.stats.passes - passes,
            tokens=engine.stats.prompt_tokens - tokens,
            rows=sum(len(score.token_ids) for score in scores),
            seconds=seconds,
            lanes={lane: (s.busy_seconds, s.bytes) for lane, s in lanes.stats().items()},
        )
        llm.runtime.executor.drain()
        if phase.lanes.get("disk_read", (0.0, 0))[1]:
            disk_rates.append(disk_read_rate(llm))
        resources = resource_seconds(llm, phase, disk_rates)
        return {
            "scorings": len(scores),
            "seconds": seconds,
            "scorings_per_s": len(scores) / seconds,
            "tokens_per_s": phase.tokens / seconds,
            "passes": phase.passes,
            "block_size": llm.policy.block_size,
            "disk_read_bytes": phase.lanes.get("disk_read", (0.0, 0))[1],
            "resources": resources,
            "bound_seconds": max(resources.values()),
            "efficiency_frac": max(resources.values()) / seconds,
            "peak_rss_bytes": peak_rss_bytes(),
            "first_logprobs": [score.logprob for score in scores[:8]],
        }


@contextlib.contextmanager
def limited(args: argparse.Namespace) -> Iterator[list[Path]]:
    """cgroup.procs files of groups with the limits; none where groups cannot be made."""
    name = f"flexrun-eval-speed-{os.getpid()}"
    device = Path(args.model).expanduser().stat().st_dev
    limits = {
        "memory": ("memory.limit_in_bytes", str(parse_bytes(args.ram, total_bytes=1 << 50))),
        "blkio": (
            "blkio.throttle.read_bps_device",
            f"{os.major(device)}:{os.minor(device)} {int(args.read_mb_per_s * 1e6)}",
        ),
    }
    groups: list[Path] = []
    try:
        try:
            for controller, (file, value) in limits.items():
                group = CGROUPS / controller / name
                group.mkdir()
                groups.append(group)
                (group / file).write_text(value)
        except OSError as error:
            print(f"note: no limits on memory and reads: {error}", file=sys.stderr)
        yield [group / "cgroup.procs" for group in groups]
    finally:
        for group in groups:
            with contextlib.suppress(OSError):
                group.rmdir()


def run_mode(mode: str, words: list[str], groups: list[Path]) -> dict[str, Any]:
    """Measure a mode in a process that joins the groups before it runs anything."""

    def join() -> None:
        for procs in groups:
            procs.write_text(str(os.getpid()))

    command = [sys.executable, "-m", "experiments.eval_speed", *words, "--mode", mode]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, preexec_fn=join)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model_path", metavar="MODEL")
    parser.add_argument("--questions", type=int, default=1000)
    parser.add_argument("--alone", type=int, default=50)
    parser.add_argument("--ram", default="900MiB")
    parser.add_argument("--read-mb-per-s", type=float, default=200.0)
    parser.add_argument("--mode", choices=("batched", "alone"), help=argparse.SUPPRESS)
    add_model_flags(parser)
    add_policy_flags(parser)
    words = sys.argv[1:]
    args = parser.parse_args([*words, "-m", next((w for w in words if not w.startswith("-")), "")])
    args.model = args.model_path
    if args.mode:
        print(json.dumps(measure(args)))
        return
    with limited(args) as groups:
        results = {mode: run_mode(mode, words, groups) for mode in ("batched", "alone")}
    batched, alone = results["batched"], results["alone"]
    results["times_faster"] = batched["scorings_per_s"] / alone["scorings_per_s"]
    differences = [
        abs(a - b) for a, b in zip(batched["first_logprobs"], alone["first_logprobs"], strict=True)
    ]
    results["largest_difference"] = max(differences)
    rows = [
        (f"{mode}: {name.replace('_', ' ')}", f"{results[mode][name]:,.3f}")
        for mode in ("batched", "alone")
        for name in ("scorings", "seconds", "scorings_per_s", "tokens_per_s", "passes", "efficiency_frac")
    ]
    rows.append(("times faster", f"{results['times_faster']:.1f}"))
    print_table(rows, stream=sys.stdout)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
