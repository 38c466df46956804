"""Which compiled kernels can be used here: numba's on the CPU, Triton's on an accelerator; else plain torch.

Being installed is not enough: numba refuses versions of numpy that it does not know, and Triton needs a compiler
for its launcher. So numba is imported, and Triton's kernels unpack a few numbers that plain torch unpacks too, before
either is relied on. The variable FLEXRUN_KERNELS turns them off: no-numba, no-triton, no-amx, or all as torch.
"""

from __future__ import annotations

import logging
import os
from functools import lru_cache

import torch

logger = logging.getLogger(__name__)

_TRITON_DEVICES = ("cuda", "xpu")


def _turned_off(name: str) -> bool:
    words = os.environ.get("FLEXRUN_KERNELS", "").split(",")
    return "torch" in words or f"no-{name}" in words


def has_native_bf16() -> bool:
    """Whether this x86 CPU multiplies bf16 itself."""
    probes = (
        getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    )
    return any(probe is not None and bool(probe()) for probe in probes)


@lru_cache(maxsize=1)
def has_numba() -> bool:
    """Whether the CPU kernels can be compiled; imports numba on the first call."""
    if _turned_off("numba"):
        return False
    try:
        import numba  # noqa: F401
    except Exception as error:  # a version that does not fit fails in many ways
        logger.warning("no compiled CPU kernels, plain torch is slower: %s", error)
        return False
    return True


@lru_cache(maxsize=1)
def has_amx() -> bool:
    """Whether this CPU multiplies tiles of bf16 matrices, the system lets us, and kernels are compiled for it."""
    supported = getattr(torch.cpu, "_is_amx_tile_supported", None)
    permitted = getattr(torch.cpu, "_init_amx", None)  # asks the system for the tiles' large registers
    if _turned_off("amx") or supported is None or permitted is None or not has_numba():
        return False
    if not supported() or not permitted():
        return False
    from quant.kernels_simd import compiled_features

    return {"amx-tile", "amx-bf16", "avx512bf16", "avx512bw"} <= compiled_features()


@lru_cache(maxsize=8)
def has_triton(device_type: str) -> bool:
    """Whether the Triton kernels compile on that kind of device and unpack what plain torch unpacks."""
    if _turned_off("triton") or device_type not in _TRITON_DEVICES:
        return False
    try:
        from quant.kernels_triton import self_test

        self_test(device_type)
    except Exception as error:  # compilers and drivers fail in many ways; torch does the same work
        logger.warning("no Triton kernels on %s, plain torch is slower: %s", device_type, error)
        return False
    return True
