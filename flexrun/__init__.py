"""flexrun: large-batch generation with language models that do not fit the GPU.

The names below are loaded on first use, so that ``import flexrun`` is quick and needs no torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Idle OpenMP workers spin for many milliseconds by default. Our disk and copy lanes need those cores meanwhile, and
# on a machine that does anything else besides, that made small passes five times slower; sleeping at once costs a
# wake-up per product, a third of a pass where products are short. A fraction of a millisecond of spinning has
# neither fault (experiments/LOG.md). Read when torch is first imported; a setting of the user's own stays.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

# What users need -> the module that has it.
_EXPORTS = {
    "LLM": "flexrun.llm",
    "SamplingParams": "flexrun.request",
    "RequestOutput": "flexrun.request",
    "CompletionOutput": "flexrun.request",
    "Logprob": "flexrun.request",
    "Placement": "policy.tiers",
    "Plan": "policy.tiers",
    "Policy": "policy.tiers",
    "Tier": "policy.tiers",
    "load_policy": "policy.tiers",
    "Hardware": "policy.hardware",
    "SearchResult": "policy.search",
    "Workload": "policy.workload",
    "search": "policy.search",
}

__all__ = ["__version__", *_EXPORTS]

# Our other top-level packages, each with a module that tells it from a stranger of the same name.
_SIBLINGS = {"policy": "tiers.py", "offload": "units.py", "quant": "kv_formats.py"}


def _check_siblings() -> None:
    """Refuse to start where a user's own policy.py, offload.py or quant.py hides one of our packages."""
    for name, marker in _SIBLINGS.items():
        try:
            spec = importlib.util.find_spec(name)
        except ValueError:  # a module without a spec: made by hand, so not ours
            spec = None
        places = list(spec.submodule_search_locations or ()) if spec is not None else []
        if any((Path(place) / marker).is_file() for place in places):
            continue
        found = "nothing" if spec is None else spec.origin or ", ".join(places)
        raise ImportError(
            f"flexrun needs its own package {name!r}, but Python finds {found} under that name. If that is"
            " yours, rename it or keep its folder off the path (python -P); if not, install flexrun again",
            name=name,
        )


_check_siblings()

if TYPE_CHECKING:
    from flexrun.request import CompletionOutput as CompletionOutput
    from flexrun.request import Logprob as Logprob
    from flexrun.request import RequestOutput as RequestOutput
    from flexrun.request import SamplingParams as SamplingParams
    from policy.hardware import Hardware as Hardware
    from policy.search import SearchResult as SearchResult
    from policy.search import search as search
    from policy.tiers import Placement as Placement
    from policy.tiers import Plan as Plan
    from policy.tiers import Policy as Policy
    from policy.tiers import Tier as Tier
    from policy.tiers import load_policy as load_policy
    from policy.workload import Workload as Workload


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'flexrun' has no attribute {name!r}")
    value = getattr(importlib.import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
