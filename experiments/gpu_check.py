"""Proof of the accelerator path on a machine that has one; says so and exits 0 where there is none.

    make gpu-check            (PYTHON=... names the interpreter; nothing is installed, no network)
    python experiments/gpu_check.py --device cpu      the same checks on the emulated gpu tier, at toy sizes

Needs torch >= 2.9, numpy and safetensors; uses numba and triton if they are there. Checks: kernels against plain
torch, order across streams, upload and download against plain pinned copies, the same tokens as the CPU at every
placement, peak device memory against the plan, throughput of a dummy model at several placements, overlap.

Every check is one row, whatever happens to it: checks run in a worker process that is replaced when one fails or
takes too long, and all together take at most --seconds. The last line is JSON. Exit status 1 if a check failed.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

MARK = "@row "
TOTAL_SECONDS = 450.0


# -- the worker --------------------------------------------------------------------------------------------


def work(names: list[str], device: str, root: Path) -> int:
    """Run checks in order, a marked JSON line for each, and stop after one that fails."""
    from experiments.gpu_check_cases import CHECKS, Setting

    setting = Setting(device=device, root=root)
    for name in names:
        print(MARK + json.dumps({"begins": name}), flush=True)
        began = time.perf_counter()
        try:
            status, text, data = CHECKS[name].run(setting)
        except Exception as error:
            traceback.print_exc()
            first = (str(error).strip().splitlines() or [""])[0]
            status, text, data = "fail", f"{type(error).__name__}: {first}", {}
        row = {
            "check": name,
            "status": status,
            "result": text,
            "seconds": time.perf_counter() - began,
            **data,
        }
        print(MARK + json.dumps(row, default=str), flush=True)
        if status == "fail":
            # The device may be unusable from here on; even tidying up could hang.
            sys.stderr.flush()
            os._exit(3)
    return 0


# -- the parent --------------------------------------------------------------------------------------------


class Worker:
    """A process that runs checks; its marked lines arrive in a queue, None at its end."""

    def __init__(self, names: list[str], device: str, root: Path, off: list[str]) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), "--device", device, "--root", str(root)]
        environment = dict(os.environ)
        environment.setdefault("GOMP_SPINCOUNT", "10000")  # as flexrun sets it
        if off:
            given = environment.get("FLEXRUN_KERNELS", "")
            environment["FLEXRUN_KERNELS"] = ",".join([given, *off] if given else off)
        self._process = subprocess.Popen(
            [*command, "--work", json.dumps(names)], stdout=subprocess.PIPE, text=True, env=environment
        )
        self.rows: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                self.rows.put(json.loads(line.removeprefix(MARK)))
            else:
                print(line, end="", file=sys.stderr)
        self.rows.put(None)

    def end(self) -> int:
        """Its exit status; killed if it has not ended by itself."""
        try:
            return self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class Run:
    """Runs all checks and keeps their rows."""

    def __init__(self, names: list[str], device: str, root: Path, seconds: float) -> None:
        from experiments.gpu_check_cases import CHECKS

        self._checks = CHECKS
        self._left = list(names)
        self._device = device
        self._root = root
        self._deadline = time.monotonic() + seconds
        self._off: list[str] = []
        self.rows: list[dict[str, Any]] = []

    def note(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        name, status = row["check"], row["status"]
        print(f"{status.ljust(4)}  {name:34} {row['seconds']:6.1f} s  {row['result']}", flush=True)
        off = self._checks[name].off
        if status == "fail" and off:
            self._off.append(off)

    def all(self) -> None:
        while self._left:
            if time.monotonic() > self._deadline - 5:
                for name in self._left:
                    self.note({"check": name, "status": "skip", "result": "no time left", "seconds": 0.0})
                return
            self._one_worker()

    def _one_worker(self) -> None:
        worker = Worker(self._left, self._device, self._root, self._off)
        try:
            self._follow(worker)
        finally:
            worker.kill()

    def _follow(self, worker: Worker) -> None:
        """Take rows until the worker ends or a check takes too long."""
        name, began = "", time.monotonic()
        while True:
            limit = self._checks[name].limit_seconds if name else 60.0
            until = min(began + limit, self._deadline)
            try:
                row = worker.rows.get(timeout=max(0.1, until - time.monotonic()))
            except queue.Empty:
                late = "the whole run's time was over" if until == self._deadline else f"over {limit:.0f} s"
                self._lost(name, began, f"given up: {late}")
                return
            if row is None:
                if self._left:
                    status = worker.end()
                    if status != 3 or name:
                        self._lost(name, began, f"the process ended with status {status}")
                return
            if "begins" in row:
                name, began = row["begins"], time.monotonic()
                continue
            self._left.remove(row["check"])
            self.note(row)
            name, began = "", time.monotonic()

    def _lost(self, name: str, began: float, why: str) -> None:
        """A check that left no row; before the first one began, the next in line is to blame."""
        name = name or self._left[0]
        self._left.remove(name)
        self.note({"check": name, "status": "fail", "result": why, "seconds": time.monotonic() - began})


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto", help="auto, an accelerator such as cuda, or cpu")
    parser.add_argument("--seconds", type=float, default=TOTAL_SECONDS, help="for all checks together")
    parser.add_argument(
        "--only", default="", help="run the checks whose names contain one of these, comma-separated"
    )
    parser.add_argument("--root", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.work is not None:
        return work(json.loads(options.work), options.device, options.root)
    try:
        import torch
    except ImportError:
        return nothing(f"{sys.executable} has no torch: nothing to check; name another with PYTHON=...")
    device = options.device
    if device == "auto":
        found_device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if found_device is None:
            return nothing("no accelerator on this machine: nothing to check")
        device = found_device.type
    from experiments.gpu_check_cases import CHECKS

    wanted = options.only.split(",")
    names = [name for name in CHECKS if any(word in name for word in wanted)]
    with tempfile.TemporaryDirectory(prefix="flexrun-gpu-check-", ignore_cleanup_errors=True) as folder:
        run = Run(names, device, Path(folder), options.seconds)
        try:
            run.all()
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)
    found = {status: sum(row["status"] == status for row in run.rows) for status in ("ok", "fail", "skip")}
    print(", ".join(f"{n} {status}" for status, n in found.items()))
    accelerator = next((row["accelerator"] for row in run.rows if "accelerator" in row), device)
    print(json.dumps({"accelerator": accelerator, "torch": torch.__version__, "checks": run.rows}))
    return 0 if run.rows and not found["fail"] else 1


def nothing(reason: str) -> int:
    print(reason)
    print(json.dumps({"accelerator": None, "checks": []}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
