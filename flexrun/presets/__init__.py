"""Configurations of well-known models, so that planning and dummy-weight runs need no download.

FAMILY.json beside this module holds {"defaults": {...}, "models": {name: {...}}}: a model's configuration
is the defaults updated by its own fields, in the spelling of config.json. ``dtype`` is the type in
which the published weights are stored.
"""

from __future__ import annotations

import difflib
import json
from functools import cache
from importlib import resources
from typing import Any


@cache
def _all() -> dict[str, str]:
    """Name -> configuration as JSON text (text, so that no caller can change another's copy)."""
    models: dict[str, str] = {}
    folder = resources.files(__name__)
    for file in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if not file.name.endswith(".json"):
            continue
        family = json.loads(file.read_text(encoding="utf-8"))
        for name, own in family["models"].items():
            if name in models:
                raise ValueError(f"preset {name!r} is defined twice, again in {file.name}")
            models[name] = json.dumps({**family["defaults"], **own})
    return models


def names() -> tuple[str, ...]:
    """Names of all presets, by family and in the files' order."""
    return tuple(_all())


def load(name: str) -> dict[str, Any]:
    """The configuration of preset ``name`` (a fresh copy); ValueError with the nearest names if unknown."""
    text = _all().get(name)
    if text is None:
        near = nearest(name)
        hint = f"nearest: {', '.join(near)}" if near else f"known: {', '.join(names())}"
        raise ValueError(f"unknown preset {name!r}; {hint}")
    return json.loads(text)


def nearest(name: str, limit: int = 3) -> list[str]:
    """Up to ``limit`` preset names that resemble ``name``, best first."""
    return difflib.get_close_matches(name.lower(), names(), n=limit, cutoff=0.6)
