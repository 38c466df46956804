"""Compiled kernels are found again by the next process, and never after their sources changed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import quant.kernel_cache

RUN = """
import torch
from quant.formats import parse_format
from quant.packed import empty_packed
empty_packed(parse_format("int4-g64"), (2, 128)).dequantize()
from quant import kernels_numba
stats = kernels_numba._dequantize.stats
print(sum(stats.cache_hits.values()), sum(stats.cache_misses.values()))
"""


def run(cache_dir: Path) -> str:
    env = os.environ | {"NUMBA_CACHE_DIR": str(cache_dir)}
    return subprocess.run(
        [sys.executable, "-c", RUN], env=env, capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.mark.slow
def test_the_next_process_compiles_nothing(tmp_path: Path) -> None:
    assert run(tmp_path) == "0 1"
    assert run(tmp_path) == "1 0"
    assert [path.name for path in tmp_path.iterdir()] == [
        f"flexrun-kernels-{quant.kernel_cache.fingerprint()}"
    ]


def test_fingerprint_covers_every_helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("kernels_a.py", "kernels_b.py", "formats.py"):
        (tmp_path / name).write_text("x = 1\n")
    monkeypatch.setattr(quant.kernel_cache, "_SOURCES", tmp_path)
    seen = set()
    for name in (None, "kernels_a.py", "kernels_b.py", "formats.py"):
        if name:
            (tmp_path / name).write_text("x = 2\n")
        quant.kernel_cache.fingerprint.cache_clear()
        seen.add(quant.kernel_cache.fingerprint())
    quant.kernel_cache.fingerprint.cache_clear()
    assert len(seen) == 4
