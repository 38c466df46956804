"""What `-m` means: a path, a preset's name, or a model in the local Hugging Face cache.

A path always wins, whatever its name looks like; the architecture comes from the configuration inside.
Nothing here touches the network: a model that is not on this machine gives an error with the command
that downloads it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flexrun import presets
from flexrun.checkpoint.base import (
    MAX_CONFIG_BYTES,
    Checkpoint,
    CheckpointError,
    open_data_file,
    read_json_object,
)
from flexrun.checkpoint.gguf import GGUF_PART, open_gguf
from flexrun.checkpoint.safetensors import has_weights, open_safetensors_folder, refuse_pickle

PACKED_MANIFEST = "manifest.json"
PACKED_KEY = "flexrun_packed"

_REPO_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_-])?"
_REPO_NAME = re.compile(rf"({_REPO_PART})/({_REPO_PART})(?:/(.+))?")
_BARE_NAME = re.compile(_REPO_PART)
_COMMIT = re.compile(r"[A-Za-z0-9._-]{1,128}")

ModelKind = Literal["hf", "gguf", "packed", "preset"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    """Where a model is. ``path`` is absolute: a folder ("hf", "packed"), a file ("gguf"), None ("preset")."""

    name: str
    kind: ModelKind
    path: Path | None

    def __post_init__(self) -> None:
        if (self.path is None) != (self.kind == "preset"):
            raise ValueError(f"kind {self.kind!r} with path {self.path!r}: exactly presets have no path")

    def preset_config(self) -> dict[str, Any]:
        """The configuration of a preset. ValueError for a model that has files."""
        if self.kind != "preset":
            raise ValueError(f"{self.name!r} is not a preset but {self.kind} at {self.path}")
        return presets.load(self.name)


def resolve_model(model: str | os.PathLike[str], *, env: Mapping[str, str] | None = None) -> ResolvedModel:
    """Find the model that ``model`` names; CheckpointError with the remedy if it is not here.

    In this order: an existing path (a .gguf file, a folder of safetensors, a folder with exactly one
    GGUF, a packed folder), a name in the local Hugging Face cache (``org/name``, or
    ``org/name/file.gguf`` where a repository holds several), a preset. ``env`` replaces os.environ in
    finding the cache.
    """
    name = os.fspath(model)
    if not name.strip() or "\0" in name:
        raise CheckpointError("the model's name is empty or holds a NUL character", found=repr(name))
    try:
        path = Path(name).expanduser().absolute()
        if os.path.lexists(path):
            return _resolve_path(name, path)
        cached = _resolve_cached(name, os.environ if env is None else env)
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder for "~"
        raise CheckpointError(f"cannot look for the model {name!r}: {error}") from None
    if cached is not None:
        return cached
    if name in presets.names():
        return ResolvedModel(name=name, kind="preset", path=None)
    raise _not_here(name)


def open_checkpoint(model: str | os.PathLike[str]) -> Checkpoint:
    """Open a Hugging Face folder or GGUF file, headers fully checked, no weight read.

    Accepts what `resolve_model` accepts. A preset has no weights and a packed folder has its own reader:
    both are a CheckpointError here.
    """
    found = resolve_model(model)
    if found.kind == "hf" and found.path is not None:
        return open_safetensors_folder(found.path)
    if found.kind == "gguf" and found.path is not None:
        return open_gguf(found.path)
    if found.kind == "packed":
        raise CheckpointError(
            "this is a packed model, not a checkpoint",
            file=found.path,
            remedy="It can be run as it is; to convert it, start from the checkpoint that it was made of",
        )
    raise CheckpointError(
        f"{found.name!r} is a preset: a configuration without weights",
        remedy="Use it for planning or with --dummy-weights, or give the folder of a real model",
    )


def is_packed_folder(path: str | os.PathLike[str]) -> bool:
    """True if ``path`` is a finished packed-model folder (manifest.json with "flexrun_packed")."""
    manifest = Path(path) / PACKED_MANIFEST
    if not manifest.is_file():
        return False
    try:
        return PACKED_KEY in read_json_object(manifest)
    except CheckpointError:
        # A damaged manifest is the packed reader's to report, not a reason to take it for a checkpoint.
        return _contains(manifest, PACKED_KEY.encode())


def huggingface_cache_folder(env: Mapping[str, str]) -> Path:
    """The hub's cache folder by the same variables that the hub's own client reads."""
    for key in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if env.get(key):
            return Path(env[key]).expanduser().absolute()
    if env.get("HF_HOME"):
        return Path(env["HF_HOME"]).expanduser().absolute() / "hub"
    base = env.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "huggingface" / "hub"


def _resolve_path(name: str, path: Path) -> ResolvedModel:
    if path.is_dir():
        return _resolve_folder(name, path)
    if not path.exists():
        raise CheckpointError("a link to something that does not exist", file=path)
    if not path.is_file():
        raise CheckpointError("neither a folder nor a regular file", file=path)
    if path.suffix == ".gguf" or _starts_with_gguf_magic(path):
        return ResolvedModel(name=name, kind="gguf", path=path)
    if path.suffix == ".safetensors" or path.name == "config.json":
        raise CheckpointError(
            "a model of this kind is named by its folder",
            file=path,
            remedy=f"Use -m {_quoted(path.parent)}",
        )
    refuse_pickle(path.parent, [path])
    raise CheckpointError(
        "not a model file",
        file=path,
        expected="a .gguf file or a folder with config.json and .safetensors files",
    )


def _resolve_folder(name: str, folder: Path) -> ResolvedModel:
    if is_packed_folder(folder):
        return ResolvedModel(name=name, kind="packed", path=folder)
    if has_weights(folder):
        for file in folder.glob("*.safetensors"):
            if not file.exists():  # an interrupted download into the cache
                raise CheckpointError("a link to something that does not exist", file=file)
        return ResolvedModel(name=name, kind="hf", path=folder)
    gguf = _single_gguf(folder)
    if gguf is not None:
        return ResolvedModel(name=name, kind="gguf", path=gguf)
    refuse_pickle(folder, sorted(folder.iterdir()))
    if any(folder.glob("adapter_*.safetensors")):
        raise CheckpointError(
            "this is an adapter, not a model",
            file=folder,
            found="adapter_*.safetensors",
            remedy="Merge it into its base model with peft's merge_and_unload and save the result",
        )
    if (folder / "config.json").is_file():
        raise CheckpointError(
            "there is a config.json but no weights",
            file=folder,
            expected="*.safetensors files",
            remedy="Download the model completely",
        )
    inside = ", ".join(sorted(entry.name for entry in folder.iterdir())[:8]) or "nothing"
    raise CheckpointError(
        "not a model folder",
        file=folder,
        found=inside,
        expected="config.json and *.safetensors, or one .gguf",
    )


def _single_gguf(folder: Path) -> Path | None:
    """The one GGUF model of a folder: a file, or the first of one set of parts. None if there is none."""
    models: dict[str, Path] = {}
    for file in sorted(folder.glob("*.gguf")):
        if file.name.startswith("mmproj"):  # an image projector that lies beside a language model
            continue
        part = GGUF_PART.fullmatch(file.name)
        models.setdefault(f"{part['stem']} of {part['count']}" if part else file.name, file)
    if len(models) > 1:
        raise CheckpointError(
            f"the folder holds {len(models)} GGUF models",
            file=folder,
            found=", ".join(file.name for file in models.values()),
            expected="exactly one",
            remedy=f"Name the file, for example -m {_quoted(next(iter(models.values())))}",
        )
    return next(iter(models.values()), None)


def _resolve_cached(name: str, env: Mapping[str, str]) -> ResolvedModel | None:
    match = _REPO_NAME.fullmatch(name)
    if match is not None:
        repo, inner = f"{match[1]}/{match[2]}", match[3]
    elif _BARE_NAME.fullmatch(name):  # old repositories without an organisation, such as "gpt2"
        repo, inner = name, None
    else:
        return None
    root = huggingface_cache_folder(env) / f"models--{repo.replace('/', '--')}"
    snapshot = _snapshot(root)
    if snapshot is None:
        return None
    target = snapshot
    if inner is not None:
        if ".." in Path(inner).parts:
            return None
        target = snapshot / inner
    try:
        if not target.exists():
            raise CheckpointError("not in the cached copy of the repository", file=target)
        return _resolve_path(name, target)
    except CheckpointError as error:
        if error.remedy is not None and error.remedy.startswith(("Name the file", "Convert it")):
            raise
        raise CheckpointError(
            f"{repo} is in the local Hugging Face cache, but not usable: {error}",
            remedy=f"Complete it with: hf download {repo}{'' if inner is None else f' {inner}'}",
        ) from None


def _snapshot(root: Path) -> Path | None:
    """The snapshot that refs/main names, else the newest one; None if the repository is not cached."""
    snapshots = root / "snapshots"
    if not snapshots.is_dir():
        return None
    try:
        commit = (root / "refs" / "main").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        commit = ""
    if _COMMIT.fullmatch(commit) and commit.strip(".") and (snapshots / commit).is_dir():
        return snapshots / commit
    present = [entry for entry in snapshots.iterdir() if entry.is_dir()]
    return max(present, key=lambda entry: (entry.stat().st_mtime_ns, entry.name), default=None)


def _not_here(name: str) -> CheckpointError:
    match = _REPO_NAME.fullmatch(name)
    if match is not None:
        repo, inner = f"{match[1]}/{match[2]}", match[3]
        remedy = f"Download it with: hf download {repo}{'' if inner is None else f' {inner}'}"
        if match[2].lower() in presets.names():
            remedy += f" (for planning and --dummy-weights the preset {match[2].lower()!r} needs no download)"
        return CheckpointError(
            f"model {name!r} is neither a local path nor in the local Hugging Face cache", remedy=remedy
        )
    near = presets.nearest(name)
    hint = f"; similar presets: {', '.join(near)}" if near else ""
    return CheckpointError(
        f"model {name!r} is not a local path, a preset or a model in the local Hugging Face cache{hint}",
        remedy="Give a folder, a .gguf file, a preset's name, or org/name after: hf download org/name",
    )


def _starts_with_gguf_magic(path: Path) -> bool:
    with open_data_file(path) as handle:
        return handle.read(4) == b"GGUF"


def _contains(path: Path, needle: bytes) -> bool:
    with open_data_file(path) as handle:
        return needle in handle.read(min(MAX_CONFIG_BYTES, os.fstat(handle.fileno()).st_size))


def _quoted(path: Path) -> str:
    text = str(path)
    return f'"{text}"' if " " in text else text
