"""One entry for every kind of model: a Hugging Face folder, a GGUF file, a packed folder, a preset.

Headers and configurations are read and checked, weights are not.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flexrun.chat import ChatTemplate, folder_chat_template, gguf_chat_template
from flexrun.checkpoint.base import Checkpoint, CheckpointError, read_json_object
from flexrun.checkpoint.dummy import DummySource
from flexrun.checkpoint.manifest import read_large_json
from flexrun.checkpoint.packed import PackedSource
from flexrun.checkpoint.packing import GGUF_METADATA_FILE
from flexrun.checkpoint.resolve import (
    ModelKind,
    ResolvedModel,
    is_packed_folder,
    open_checkpoint,
    resolve_model,
)
from flexrun.checkpoint.source import AUTO, CheckpointSource
from flexrun.model.assemble import DecoderModel, build_model
from flexrun.model.config import ModelConfig, config_from_checkpoint, config_from_hf
from flexrun.tokenizer import Tokenizer, load_tokenizer
from flexrun.tokenizer_gguf import load_gguf_tokenizer

Source = CheckpointSource | DummySource | PackedSource


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedModel:
    """A model whose weights can be asked for.

    name: as it was given; path: its folder or GGUF file, None for a preset; source: where weights come from.
    tokenizer_folder, gguf_metadata: where a tokenizer and a chat template may be, by kind (see
    `load_tokenizer`). fingerprint: identity of configuration and weights. notes: for the user.
    """

    name: str
    kind: ModelKind
    path: Path | None
    config: ModelConfig
    model: DecoderModel
    source: Source
    tokenizer_folder: Path | None = None
    gguf_metadata: Mapping[str, Any] | None = None
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: str
    notes: tuple[str, ...] = ()

    def load_tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, None if it has none. Raises TokenizerError."""
        if self.gguf_metadata is not None and self.path is not None:
            inside = self.path / GGUF_METADATA_FILE if self.kind == "packed" else self.path
            return load_gguf_tokenizer(inside, self.gguf_metadata)
        return None if self.tokenizer_folder is None else load_tokenizer(self.tokenizer_folder)

    def load_chat_template(self, tokenizer: Tokenizer | None) -> ChatTemplate | None:
        """The model's chat template, None if it has none. Raises ChatError."""
        if self.gguf_metadata is not None:
            return gguf_chat_template(self.gguf_metadata, tokenizer)
        return (
            None if self.tokenizer_folder is None else folder_chat_template(self.tokenizer_folder, tokenizer)
        )


def open_model(
    name: str | os.PathLike[str],
    *,
    weight_format: str = AUTO,
    dummy_weights: bool = False,
    seed: int = 0,
    unpacked_format: str = "f32",
    method: str = "search",
) -> OpenedModel:
    """Open what `-m` names. weight_format, unpacked_format, method: as for CheckpointSource.

    dummy_weights: random weights from `seed` for any model's configuration; a preset has no others, and a folder
        needs no more than its config.json then.
    Raises CheckpointError or ModelConfigError (both ValueError) if the model is not here, is damaged, not
    supported, or a packed folder of another format than asked for.
    """
    text = os.fspath(name)
    bare = Path(text).expanduser().absolute()
    if dummy_weights and (bare / "config.json").is_file() and not is_packed_folder(bare):
        return _bare_folder(text, bare, weight_format, seed)
    found = resolve_model(name)
    if found.path is None:
        if not dummy_weights:
            raise CheckpointError(
                f"{text!r} is a preset: a configuration without weights",
                remedy="Add --dummy-weights to measure with random ones, or give a real model: download it with "
                "'hf download ORG/NAME' and use -m ORG/NAME, or name its folder or .gguf file",
            )
        return _with_dummy_weights(found, config_from_hf(found.preset_config()), weight_format, seed)
    if found.kind == "packed":
        return _open_packed(found, found.path, weight_format, dummy_weights, seed)
    checkpoint = open_checkpoint(found.path)
    config = config_from_checkpoint(checkpoint)
    gguf = found.kind == "gguf"
    places: dict[str, Any] = {
        "tokenizer_folder": None if gguf else found.path,
        "gguf_metadata": checkpoint.config if gguf else None,
        "generation_config": checkpoint.generation_config,
    }
    if dummy_weights:
        return _with_dummy_weights(found, config, weight_format, seed, **places)
    model = build_model(config)
    source = CheckpointSource(
        checkpoint, model, weight_format, unpacked_format=unpacked_format, method=method
    )
    return _opened(found, model, source, **places)


def _bare_folder(name: str, folder: Path, weight_format: str, seed: int) -> OpenedModel:
    generation = folder / "generation_config.json"
    described = Checkpoint(
        path=folder,
        kind="hf",
        tensors={},
        config=read_json_object(folder / "config.json"),
        generation_config=read_json_object(generation) if generation.is_file() else {},
    )
    return _with_dummy_weights(
        ResolvedModel(name=name, kind="hf", path=folder),
        config_from_checkpoint(described),
        weight_format,
        seed,
        tokenizer_folder=folder,
        generation_config=described.generation_config,
    )


def _open_packed(
    found: ResolvedModel, folder: Path, weight_format: str, dummy_weights: bool, seed: int
) -> OpenedModel:
    source = PackedSource(folder)
    metadata, generation = folder / GGUF_METADATA_FILE, folder / "generation_config.json"
    places: dict[str, Any] = {
        "tokenizer_folder": folder,
        "gguf_metadata": read_large_json(metadata) if metadata.is_file() else None,
        "generation_config": read_json_object(generation) if generation.is_file() else {},
    }
    if dummy_weights:
        return _with_dummy_weights(found, source.config, weight_format, seed, **places)
    if weight_format not in (AUTO, source.weight_format):
        raise CheckpointError(
            "a packed model keeps the format that it was packed in",
            file=folder,
            found=source.weight_format,
            expected=weight_format,
            remedy=f"Leave --weight-format out, or pack {source.manifest.source_name or 'the checkpoint'} again",
        )
    return _opened(found, source.model, source, **places)


def _with_dummy_weights(
    found: ResolvedModel, config: ModelConfig, weight_format: str, seed: int, **places: Any
) -> OpenedModel:
    model = build_model(config)
    return _opened(found, model, DummySource(model, weight_format, seed), **places)


def _opened(found: ResolvedModel, model: DecoderModel, source: Source, **places: Any) -> OpenedModel:
    return OpenedModel(
        name=found.name,
        kind=found.kind,
        path=found.path,
        config=model.config,
        model=model,
        source=source,
        fingerprint=source.fingerprint(),
        notes=source.notes,
        **places,
    )
