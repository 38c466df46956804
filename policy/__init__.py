"""Planning on paper: hardware, footprints, schedule, cost model, LP, search, simulator. No torch.

from policy import Hardware, Workload, search
result = search(footprint, Hardware.preset("t4-gcp"), Workload(prompt_len=512, gen_len=32))
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from policy.footprint import ModelFootprint as ModelFootprint
    from policy.hardware import Hardware as Hardware
    from policy.search import SearchResult as SearchResult
    from policy.tiers import Placement as Placement
    from policy.tiers import Plan as Plan
    from policy.tiers import Policy as Policy
    from policy.tiers import Tier as Tier
    from policy.workload import Workload as Workload

_HOMES = {
    "Hardware": "policy.hardware",
    "ModelFootprint": "policy.footprint",
    "Placement": "policy.tiers",
    "Plan": "policy.tiers",
    "Policy": "policy.tiers",
    "SearchResult": "policy.search",
    "Tier": "policy.tiers",
    "Workload": "policy.workload",
}

__all__ = [
    "Hardware",
    "ModelFootprint",
    "Placement",
    "Plan",
    "Policy",
    "SearchResult",
    "Tier",
    "Workload",
    "search",
]


def __getattr__(name: str) -> Any:
    # On first use only: the linear program's libraries take a while to load, and most imports need none.
    if name == "search":
        return importlib.import_module("policy.search")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'policy' has no attribute {name!r}")
