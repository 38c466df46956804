"""What happens when the disk fails, the process is killed, or there is too little room: one clear error each."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from runtime_helpers import (
    MemorySource,
    greedy_jobs,
    make_policy,
    open_runtime,
    run_jobs,
    tiny_model,
    tokens_of,
)

from flexrun.engine import Engine
from flexrun.request import RequestOutput
from offload.disk import DiskPool
from offload.disk_io import DiskError, DiskFullError
from offload.lanes import LaneError
from offload.memory import MemoryBudgetError, TierBudgets

SIZES = [(5, 2), (40, 30), (33, 25)]
ON_DISK = make_policy(weights="d", cache="d", activations="d", shape=(2, 2))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> MemorySource:
    return MemorySource(tiny_model(), folder=tmp_path_factory.mktemp("weights"))


def spill_folders(base: Path) -> list[Path]:
    return sorted(base.glob("flexrun-spill-*"))


def failing(transfer: Callable[..., int], code: int, fails: Callable[[str], bool]) -> Callable[..., int]:
    """The transfer, but OSError(code) for files that `fails` names."""

    def run(fd: int, *args: Any) -> int:
        if fails(str(Path(f"/proc/self/fd/{fd}").readlink())):
            raise OSError(code, os.strerror(code))
        return transfer(fd, *args)

    return run


def run_until_error(engine: Engine) -> tuple[list[RequestOutput], BaseException]:
    for i, (prompt, params) in enumerate(greedy_jobs(SIZES)):
        engine.add_request(str(i), prompt, params)
    finished: list[RequestOutput] = []
    try:
        for _ in range(200):
            finished += engine.step()
    except Exception as error:
        return finished, error
    raise AssertionError("no failure")


# -- errors of the disk --------------------------------------------------------------------------------


@pytest.mark.parametrize("gpu_bytes", [None, 64 << 20])
@pytest.mark.parametrize("file", ["kv", "hidden", "weights-f32.bin"])
def test_a_read_error_names_file_and_place_and_ends_the_engine(
    file: str, gpu_bytes: int | None, source: MemorySource, tmp_path: Path
) -> None:
    broken = threading.Event()
    reads = failing(os.preadv, errno.EIO, lambda path: broken.is_set() and path.endswith(f"/{file}"))
    with (
        DiskPool(preadv=reads) as pool,
        open_runtime(source, ON_DISK, tmp_path, gpu_bytes=gpu_bytes, pool=pool) as runtime,
    ):
        engine = Engine(runtime, tokenizer=None)
        for i, (prompt, params) in enumerate(greedy_jobs(SIZES)):
            engine.add_request(str(i), prompt, params)
        finished: list[RequestOutput] = []
        while not finished:
            finished += engine.step()
        broken.set()
        with pytest.raises(LaneError, match=rf"disk_read lane.*cannot read \S*/{file} at byte \d+.*EIO") as e:
            for _ in range(200):
                finished += engine.step()
        assert isinstance(e.value.cause, DiskError)
        # What was done stays done; the engine itself is of no use any more.
        assert [output.request_id for output in finished] == ["0"]
        assert len(finished[0].outputs[0].token_ids) == 2
        broken.clear()
        with pytest.raises(RuntimeError, match=r"failed in an earlier step .*make a new one"):
            engine.step()
        with pytest.raises(RuntimeError, match="make a new one"):
            engine.add_request("late", [1], greedy_jobs([(1, 1)])[0][1])
    assert spill_folders(tmp_path) == []


def test_a_full_disk_while_spilling_is_one_clear_error(source: MemorySource, tmp_path: Path) -> None:
    """Space is reserved before the run; where a file system still runs out, it is said so."""
    writes = failing(os.pwritev, errno.ENOSPC, lambda path: path.endswith("/kv"))
    with (
        DiskPool(pwritev=writes) as pool,
        open_runtime(source, ON_DISK, tmp_path, pool=pool) as runtime,
    ):
        finished, error = run_until_error(Engine(runtime, tokenizer=None))
        assert isinstance(error, LaneError) and isinstance(error.cause, DiskFullError)
        assert "/kv needs" in str(error) and "--disk-dir" in str(error)
        assert all(output.request_id == "0" for output in finished)
    assert spill_folders(tmp_path) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB, where one may be mounted."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1M", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("may not mount a file system here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_too_small_is_refused_before_anything_is_computed(
    source: MemorySource, small_disk: Path
) -> None:
    with (
        pytest.raises(DiskFullError, match=r"small/\S+ needs .*free.*; free some space"),
        open_runtime(source, ON_DISK, small_disk, limits={"mean_pages": 37.0, "max_tokens": 600}),
    ):
        pass
    assert spill_folders(small_disk) == []
    assert shutil.disk_usage(small_disk).used < 64 << 10


def test_a_removed_spill_folder_does_not_stop_a_run_that_holds_its_files(
    source: MemorySource, tmp_path: Path
) -> None:
    with open_runtime(source, ON_DISK, tmp_path) as runtime:
        expected = tokens_of(run_jobs(Engine(runtime, tokenizer=None), greedy_jobs(SIZES)))
        (folder,) = spill_folders(tmp_path)
        shutil.rmtree(folder)
        again = tokens_of(run_jobs(Engine(runtime, tokenizer=None), greedy_jobs(SIZES)))
    assert again == expected


# -- too little memory ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tier", "gpu_bytes"), [("cpu", None), ("disk", None), ("gpu", 64 << 20), ("cpu", 64 << 20)]
)
def test_budgets_too_small_say_the_least_that_would_do(
    tier: str, gpu_bytes: int | None, source: MemorySource, tmp_path: Path
) -> None:
    budgets = {"gpu_bytes": 1 << 30, "cpu_bytes": 1 << 30, "disk_bytes": 1 << 30}
    small = TierBudgets(**(budgets | {f"{tier}_bytes": 4096}))
    with (
        pytest.raises(MemoryBudgetError, match=rf"most is .* of {tier}") as caught,
        open_runtime(source, ON_DISK, tmp_path, gpu_bytes=gpu_bytes, budgets=small),
    ):
        pass
    # Exactly what was named is enough, one byte less is not.
    named = re.search(rf"least that would do is --{tier}-mem (\d+)", str(caught.value))
    assert named is not None
    least = int(named[1])
    fits = TierBudgets(**(budgets | {f"{tier}_bytes": least}))
    with open_runtime(source, ON_DISK, tmp_path, gpu_bytes=gpu_bytes, budgets=fits) as runtime:
        assert runtime.plan.planned_bytes[tier] == least
    with (
        pytest.raises(MemoryBudgetError),
        open_runtime(
            source,
            ON_DISK,
            tmp_path,
            gpu_bytes=gpu_bytes,
            budgets=TierBudgets(**(budgets | {f"{tier}_bytes": least - 1})),
        ),
    ):
        pass


# -- processes -----------------------------------------------------------------------------------------

CHILD = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import torch
torch.set_num_threads(1)
from runtime_helpers import *
from test_faults import ON_DISK
folder, n = Path(sys.argv[2]), int(sys.argv[3])
source = MemorySource(tiny_model(), folder=folder)
try:
    with open_runtime(source, ON_DISK, folder) as runtime:
        engine = Engine(runtime, tokenizer=None)
        for i, (prompt, params) in enumerate(greedy_jobs([(40, 1), (40, n)])):
            engine.add_request(str(i), prompt, params)
        while engine.has_unfinished():
            for output in engine.step():
                print(output.request_id, flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@contextlib.contextmanager
def child(folder: Path, n_tokens: int) -> Iterator[subprocess.Popen[str]]:
    """A run in a process of its own, past its first result."""
    command = [sys.executable, "-c", CHILD, str(Path(__file__).parent), str(folder), str(n_tokens)]
    root = Path(__file__).parent.parent
    with subprocess.Popen(
        command, cwd=root, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(root)}
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "0\n"
            yield process
        finally:
            process.kill()


def test_killed_runs_leave_nothing_that_the_next_run_does_not_remove(
    source: MemorySource, tmp_path: Path
) -> None:
    with child(tmp_path, 500) as process:
        (left,) = spill_folders(tmp_path)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert left.exists()
        with open_runtime(source, ON_DISK, tmp_path) as runtime:
            (own,) = spill_folders(tmp_path)
            assert own != left
            assert runtime.spill is not None and runtime.spill.removed_stale == (left,)
            assert tokens_of(run_jobs(Engine(runtime, tokenizer=None), greedy_jobs([(5, 3)])))
    assert spill_folders(tmp_path) == []


def test_two_runs_share_a_folder_and_leave_each_other_alone(source: MemorySource, tmp_path: Path) -> None:
    with child(tmp_path, 40) as process:
        (other,) = spill_folders(tmp_path)
        with open_runtime(source, ON_DISK, tmp_path) as runtime:
            assert len(spill_folders(tmp_path)) == 2 and other.exists()
            mine = tokens_of(run_jobs(Engine(runtime, tokenizer=None), greedy_jobs(SIZES)))
        assert process.stdout is not None
        assert process.stdout.read() == "1\n" and process.wait() == 0
    with open_runtime(source, make_policy(), tmp_path) as runtime:
        assert tokens_of(run_jobs(Engine(runtime, tokenizer=None), greedy_jobs(SIZES))) == mine
    assert spill_folders(tmp_path) == []


def test_ctrl_c_ends_at_once_and_leaves_no_spill_files(tmp_path: Path) -> None:
    with child(tmp_path, 500) as process:
        assert spill_folders(tmp_path)
        time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        assert process.stdout.read() == "interrupted\n" and process.wait(60) == 0
    assert spill_folders(tmp_path) == []
