"""The accelerator check: it runs with torch, numpy and safetensors alone, and every check leaves a row."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from experiments import gpu_check
from experiments.gpu_check_cases import CHECKS

ROOT = Path(__file__).resolve().parent.parent
# What an interpreter with torch alone may lack.
MISSING = [
    "psutil",
    "scipy",
    "pulp",
    "highspy",
    "tokenizers",
    "jinja2",
    "rich",
    "numba",
    "llvmlite",
    "transformers",
    "triton",
]
HIDE = """
import sys
class Without:
    def __init__(self, finder): self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {names} else self.finder.find_spec(name, path, target)
    def __getattr__(self, name): return getattr(self.finder, name)
sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""


def bare_interpreter(folder: Path) -> dict[str, str]:
    """An environment in which the modules named above cannot be found."""
    (folder / "sitecustomize.py").write_text(HIDE.format(names=set(MISSING)))
    return {**os.environ, "PYTHONPATH": str(folder), "FLEXRUN_KERNELS": ""}


def test_it_runs_with_torch_numpy_and_safetensors_alone(tmp_path: Path) -> None:
    environment = bare_interpreter(tmp_path)
    probe = f"import importlib.util as u; print([n for n in {MISSING} if u.find_spec(n)])"
    found = subprocess.run(
        [sys.executable, "-c", probe], env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"
    only = "machine,kernels,streams,bandwidth,all on disk,tokens: CPU attention,speed: weights"
    run = subprocess.run(
        [sys.executable, str(ROOT / "experiments" / "gpu_check.py"), "--device", "cpu", "--only", only],
        env=environment,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    last = json.loads(run.stdout.splitlines()[-1])
    statuses = {row["check"]: row["status"] for row in last["checks"]}
    assert statuses == {
        "machine": "ok",
        "Triton kernels": "skip",
        "streams in order": "ok",
        "upload bandwidth": "ok",
        "download bandwidth": "ok",
        "CPU kernels": "skip",
        "tokens: CPU attention": "ok",
        "tokens: all on disk, 4 bits": "ok",
        "speed: weights streamed from cpu": "ok",
    }


@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without an accelerator")
def test_without_an_accelerator_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "no accelerator" in lines[0] and json.loads(lines[-1]) == {"accelerator": None, "checks": []}


class ScriptedWorker:
    """A worker that reports what a script says: rows, "hang" or "die"; each new one goes on where it should."""

    scripts: ClassVar[list[list[Any]]] = []
    started: ClassVar[list[tuple[list[str], list[str]]]] = []

    def __init__(self, names: list[str], device: str, root: Path, off: list[str]) -> None:
        ScriptedWorker.started.append((list(names), list(off)))
        self.rows: queue.Queue[Any] = queue.Queue()
        for item in ScriptedWorker.scripts.pop(0):
            if item == "die":
                self.rows.put(None)
            elif item != "hang":
                self.rows.put(item)

    def end(self) -> int:
        return -9

    def kill(self) -> None:
        pass


def row(name: str, status: str = "ok") -> dict[str, Any]:
    return {"check": name, "status": status, "result": "", "seconds": 0.0}


def test_every_check_leaves_a_row_whatever_happens_to_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = ["machine", "Triton kernels", "streams in order", "log-probabilities"]
    monkeypatch.setattr(gpu_check, "Worker", ScriptedWorker)
    monkeypatch.setitem(
        CHECKS, "streams in order", gpu_check_check(CHECKS["streams in order"].run, limit_seconds=0.2)
    )
    ScriptedWorker.started = []
    ScriptedWorker.scripts = [
        [{"begins": "machine"}, row("machine"), {"begins": "Triton kernels"}, "die"],
        [{"begins": "streams in order"}, "hang"],
        [{"begins": "log-probabilities"}, row("log-probabilities", "fail"), "die"],
    ]
    run = gpu_check.Run(names, "cpu", tmp_path, 60.0)
    run.all()
    assert [(r["check"], r["status"]) for r in run.rows] == [
        ("machine", "ok"),
        ("Triton kernels", "fail"),
        ("streams in order", "fail"),
        ("log-probabilities", "fail"),
    ]
    assert "ended with status -9" in run.rows[1]["result"] and "over 0 s" in run.rows[2]["result"]
    # What failed is not tried again, and Triton stays off.
    assert ScriptedWorker.started == [
        (names, []),
        (names[2:], ["no-triton"]),
        (names[3:], ["no-triton"]),
    ]


def gpu_check_check(run: Any, *, limit_seconds: float) -> Any:
    return type(CHECKS["machine"])(run=run, limit_seconds=limit_seconds)


def test_checks_beyond_the_time_are_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_check, "Worker", ScriptedWorker)
    run = gpu_check.Run(["machine", "streams in order"], "cpu", tmp_path, 1.0)
    run.all()
    assert [(r["status"], r["result"]) for r in run.rows] == [("skip", "no time left")] * 2


def test_a_failing_check_is_a_row_and_ends_the_real_worker(tmp_path: Path) -> None:
    """A root that cannot hold a model's folder: the check fails, the next one still has its row."""
    (tmp_path / "tiny").write_text("not a folder")
    run = gpu_check.Run(["log-probabilities", "upload bandwidth"], "cpu", tmp_path, 60.0)
    run.all()
    assert [(r["check"], r["status"]) for r in run.rows] == [
        ("log-probabilities", "fail"),
        ("upload bandwidth", "ok"),
    ]
    assert "FileExistsError" in run.rows[0]["result"]
