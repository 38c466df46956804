"""`ModelConfig` and how to get one: from a config.json or from GGUF metadata. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flexrun.model.families import FAMILIES, text_config
from flexrun.model.fields import Fields
from flexrun.model.gguf_families import GGUF_ARCHITECTURES, gguf_config
from flexrun.model.mapping import shapes_of
from flexrun.model.schema import (
    LayerConfig,
    ModelConfig,
    ModelConfigError,
    MoeConfig,
    NormConfig,
    RopeConfig,
    TensorNames,
)

if TYPE_CHECKING:
    from flexrun.checkpoint.base import Checkpoint

__all__ = [
    "LayerConfig",
    "ModelConfig",
    "ModelConfigError",
    "MoeConfig",
    "NormConfig",
    "RopeConfig",
    "TensorNames",
    "config_from_checkpoint",
    "config_from_gguf",
    "config_from_hf",
    "supported_architectures",
]


def supported_architectures() -> tuple[str, ...]:
    """The values of `model_type` in config.json that can be run."""
    return tuple(sorted(FAMILIES))


def config_from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """A ModelConfig from a parsed config.json.

    Raises ModelConfigError: unknown architecture (the message lists the supported ones), a missing or bad
    field, or a field that flexrun does not know and that may change the mathematics.
    """
    inner, ignored = text_config(values)
    model_type = inner.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise ModelConfigError(
            f"config.json: model_type {model_type!r} is not supported; supported are "
            f"{', '.join(supported_architectures())}"
        )
    fields = Fields(inner)
    return family(fields, ignored)


def config_from_gguf(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Any],
    read_vector: Callable[[str], Sequence[float]] | None = None,
) -> ModelConfig:
    """A ModelConfig from the key-value pairs of a GGUF file.

    tensors: name -> shape, row-major, or anything with such a `.shape`; which of them exist decides about
        biases, fused projections and tied embeddings.
    read_vector: reads a one-dimensional tensor; needed for files with their own rope factors (Llama 3,
        Phi 3), whose values are in tensors only.
    Raises ModelConfigError as `config_from_hf` does.
    """
    arch = metadata.get("general.architecture")
    if arch not in GGUF_ARCHITECTURES:
        raise ModelConfigError(
            f"GGUF metadata: architecture {arch!r} is not supported; supported are "
            f"{', '.join(sorted(GGUF_ARCHITECTURES))}"
        )
    return gguf_config(metadata, shapes_of(tensors), read_vector)


def config_from_checkpoint(checkpoint: Checkpoint) -> ModelConfig:
    """The ModelConfig of an opened checkpoint of either kind. generation_config's eos ids are added."""
    import dataclasses

    if checkpoint.kind == "gguf":

        def read_vector(name: str) -> list[float]:
            from flexrun.checkpoint.reading import read_tensor

            return read_tensor(checkpoint.tensors[name]).float().tolist()

        config = config_from_gguf(checkpoint.config, checkpoint.tensors, read_vector)
    else:
        config = config_from_hf(checkpoint.config)
    eos = checkpoint.generation_config.get("eos_token_id")
    extra = [eos] if isinstance(eos, int) else eos if isinstance(eos, list) else []
    ids = dict.fromkeys((*config.eos_token_ids, *(item for item in extra if isinstance(item, int))))
    return dataclasses.replace(config, eos_token_ids=tuple(ids))
