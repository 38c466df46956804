"""One rule for threads of numba kernels: as many as torch uses, on a layer that may share its process."""

import numba
import torch
from numba.core import config

# `threadsafe` admits OpenMP and TBB and never `workqueue`, which aborts when two lanes compute at once.
# OpenMP first: its workers are those of torch's own pool where torch was loaded first.
if config.THREADING_LAYER in ("default", "workqueue"):
    config.THREADING_LAYER = "threadsafe"
    config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]


def use_torch_threads() -> int:
    """Make numba kernels started by this thread use torch.get_num_threads() threads; return that number.

    numba keeps the setting per calling thread, so every kernel's caller sets it; that costs about a
    microsecond.
    """
    n_threads = max(1, min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))
    numba.set_num_threads(n_threads)
    return n_threads
