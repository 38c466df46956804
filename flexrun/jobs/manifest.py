"""The sidecar of an output file: what its results were made with, so that they are never mixed.

OUTPUT.manifest.json holds the job's kind and every setting that can change a result: the model's fingerprint,
default sampling options, seed, dtype and formats. Budgets, placement, batch sizes and the device's memory may
change between runs. Results are matched to input lines by id: the input may have grown, shrunk or been
reordered, only lines without an id of their own must keep their place.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flexrun.jobs.output import JobOutput, fsync_folder

MANIFEST_VERSION = 1


class SettingsError(ValueError):
    """An output's results were made with other settings."""


def manifest_path(output: Path) -> Path:
    """The sidecar of an output file."""
    return output.with_name(output.name + ".manifest.json")


def earlier_settings(output: Path) -> dict[str, Any]:
    """Settings of the results that an output file holds already; empty without results or a readable manifest."""
    if not output.is_file() or output.stat().st_size == 0:
        return {}
    try:
        manifest = _read(manifest_path(output))
    except SettingsError:
        return {}
    return {} if manifest is None else dict(manifest["settings"])


def check_settings(output: JobOutput, kind: str, settings: Mapping[str, Any]) -> None:
    """Refuse to go on if the output holds results of another kind or of other settings.

    Only the settings given are compared, so that what is known before a model is loaded can be checked
    before. An empty output fits everything.

    Raises:
        SettingsError: names what differs, or that the file was not written by a job.
    """
    if output.size_bytes == 0:
        return
    path = manifest_path(output.path)
    manifest = _read(path)
    if manifest is None:
        raise SettingsError(
            f"{output.path} exists, but not its manifest {path.name}, so what its results were made with is"
            " unknown; use another output file, or --overwrite to replace it"
        )
    if manifest["kind"] != kind:
        raise SettingsError(
            f"{output.path} holds results of 'flexrun {manifest['kind']}', not of 'flexrun {kind}'; use"
            " another output file, or --overwrite to replace it"
        )
    before = manifest["settings"]
    missing = object()
    changes = [
        f"{name} was {_shown(before[name]) if name in before else 'not set'}, now {_shown(value)}"
        for name, value in sorted(_plain(settings).items())
        if before.get(name, missing) != value
    ]
    if changes:
        raise SettingsError(
            f"{output.path} was begun with other settings: {'; '.join(changes)}. Run with the earlier"
            " settings to go on, use another output file, or --overwrite to start again"
        )


def write_manifest(output: JobOutput, kind: str, settings: Mapping[str, Any]) -> None:
    """Write the sidecar, whole or not at all.

    Called after `check_settings`; an output of some results with a fitting manifest keeps it.
    """
    path = manifest_path(output.path)
    manifest = {"version": MANIFEST_VERSION, "kind": kind, "settings": _plain(settings)}
    with contextlib.suppress(SettingsError):
        if _read(path) == manifest:
            return
    draft = path.with_name(path.name + ".tmp")
    with open(draft, "w", encoding="utf-8") as stream:
        json.dump(manifest, stream, indent=2, sort_keys=True)
        stream.write("\n")
        stream.flush()
        os.fsync(stream.fileno())
    draft.replace(path)
    fsync_folder(path)


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as JSON gives them back (tuples as lists, keys as strings)."""
    return json.loads(json.dumps(dict(settings), sort_keys=True))


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"{path} cannot be read: {error}; use another output file, or --overwrite"
        ) from None
    valid = (
        isinstance(value, dict)
        and isinstance(value.get("kind"), str)
        and isinstance(value.get("settings"), dict)
    )
    if not valid:
        raise SettingsError(f"{path} is not the manifest of a job; use another output file, or --overwrite")
    if value.get("version") != MANIFEST_VERSION:
        raise SettingsError(
            f"{path} has version {value.get('version')!r}, this release reads {MANIFEST_VERSION}; use another"
            " output file, or --overwrite"
        )
    return value
