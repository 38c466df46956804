"""Where compiled kernels are cached on disk, so that a new process does not compile and an old cache is not used.

numba looks only at the file that defines a kernel to tell whether a cached copy is current. Ours call helpers in
other files, and a stale copy would misread layouts without a word: so the cache folder's name holds a
fingerprint of all kernel sources.
"""

import hashlib
import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from numba import njit
from numba.core import config

_SOURCES = Path(__file__).parent


def cached_kernel(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """numba.njit with these options and a cache on disk; without one where no folder can be written.

    The folder is within NUMBA_CACHE_DIR if that is set, else beside the sources, else in the user's cache.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        folder = _folder()
        if folder is None:
            return njit(**options)(function)
        before = config.CACHE_DIR
        config.CACHE_DIR = str(folder)  # read once, while the decorator runs
        try:
            return njit(cache=True, **options)(function)
        finally:
            config.CACHE_DIR = before

    return decorate


@lru_cache(maxsize=1)
def fingerprint() -> str:
    """Sixteen hex digits that change whenever a kernel or the formats' layout may have changed."""
    digest = hashlib.sha256()
    for path in sorted(
        [*_SOURCES.glob("kernels*.py"), *_SOURCES.glob("*_jit.py"), *_SOURCES.glob("*formats.py")]
    ):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@lru_cache(maxsize=1)
def _folder() -> Path | None:
    name = f"flexrun-kernels-{fingerprint()}"
    if config.CACHE_DIR:
        candidates = [Path(config.CACHE_DIR)]
    else:
        user = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        candidates = [_SOURCES / "__pycache__", Path(user).expanduser() / "flexrun"]
    for parent in candidates:
        folder = parent / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (OSError, RuntimeError):
            continue
        if os.access(folder, os.W_OK):
            return folder
    return None
