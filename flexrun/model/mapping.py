"""Which tensor of a checkpoint serves which source named by the units, checked before anything is read.

Sources carry a family's canonical names; files put "model.", "transformer.", "decoder." or nothing in front
of them. Needs no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flexrun.model.schema import ModelConfig, ModelConfigError
from offload.units import TensorPart, TensorSpec, Unit

# Buffers that older files saved beside the weights.
_NON_WEIGHTS = (
    r"(^|\.)rotary_emb\.inv_freq$",
    r"(^|\.)rotary_emb\.(cos|sin)_cached$",
    r"(^|\.)(attn|attention|self_attention)\.(bias|masked_bias)$",
    r"(^|\.)rotary_pos_emb\.inv_freq$",
)
_GGUF_NON_WEIGHTS = (
    r"^rope_freqs\.weight$",
    r"^rope_factors_(long|short)\.weight$",
    r"^blk\.\d+\.attn_rot_embd\.weight$",
)
_SHOWN = 8

Shapes = Mapping[str, Any]  # name -> shape, or something that has one


def match_tensors(config: ModelConfig, specs: Iterable[Unit | TensorSpec], tensors: Shapes) -> dict[str, str]:
    """source -> name in the file, for every source that the units name.

    specs: the units of a model (or of `unit_specs`), or single TensorSpecs.
    tensors: name -> shape (row-major), or anything with such a `.shape`, for all tensors of the checkpoint.
    Raises ModelConfigError naming tensors that are missing, that nothing uses, or whose shape is not the
    one that the configuration asks for.
    """
    shapes = shapes_of(tensors)
    flat = [spec for item in specs for spec in (item.tensors if hasattr(item, "tensors") else [item])]
    sources = dict.fromkeys(part.source for spec in flat for part in spec.parts)
    prefixes = [""] if config.source == "gguf" else _prefixes(config.names.embed + ".weight", shapes)
    found: dict[str, str] = {}
    missing = []
    for source in sources:
        # The head may stand outside of the part that the prefix names, other tensors may not.
        outside = source.startswith(config.names.head + ".")
        names = [prefix + source for prefix in (prefixes if outside else prefixes[:1])]
        actual = next((name for name in names if name in shapes), None)
        if actual is None:
            missing.append(names[0])
        else:
            found[source] = actual
    if missing:
        raise ModelConfigError(_missing_message(config, missing, shapes))
    _check_shapes(flat, found, shapes)
    _check_unused(config, found, prefixes, shapes)
    return found


def shapes_of(tensors: Shapes) -> dict[str, tuple[int, ...]]:
    """name -> shape, from shapes or from things that have one."""

    def shape(item: Any) -> tuple[int, ...]:
        return tuple(item.shape if hasattr(item, "shape") else item)

    return {name: shape(item) for name, item in tensors.items()}


def _prefixes(embed: str, shapes: Shapes) -> list[str]:
    """What stands before the canonical names, and every shorter form of it: "a.b." gives "a.b.", "a.", ""."""
    hits = [name for name in shapes if name == embed or name.endswith("." + embed)]
    if not hits:
        raise ModelConfigError(
            f"the checkpoint has no tensor {embed} (with any prefix); it holds {_some(sorted(shapes))}. "
            "Does config.json belong to these weights?"
        )
    prefix = min(hits, key=len).removesuffix(embed)
    parts = prefix.split(".")[:-1]
    return ["".join(part + "." for part in parts[:n]) for n in range(len(parts), -1, -1)]


def _missing_message(config: ModelConfig, missing: list[str], shapes: Shapes) -> str:
    message = f"the checkpoint lacks {len(missing)} tensors that {config.family} needs: {_some(missing)}"
    if missing == [_first_head_name(config, missing)]:
        message += ". If the model ties its head to its embedding, set tie_word_embeddings in config.json"
    elif any(name.endswith(".qweight") for name in shapes):
        message += ". It holds GPTQ or AWQ tensors, which its configuration does not announce"
    return message


def _first_head_name(config: ModelConfig, missing: list[str]) -> str:
    head = config.names.head + ".weight"
    return next((name for name in missing if name == head or name.endswith("." + head)), head)


def _check_shapes(specs: Sequence[TensorSpec], found: Mapping[str, str], shapes: Shapes) -> None:
    problems = []
    for spec in specs:
        rows = 0
        for part in spec.parts:
            name = found[part.source]
            shape = shapes[name]
            rows += _part_rows(spec, part, shape)
            if not _fits(spec, part, shape):
                problems.append(f"{name} is {_shape(shape)}, {spec.name} takes {_wanted(spec, part)}")
        if not problems and rows != spec.shape[0]:
            names = " + ".join(found[part.source] for part in spec.parts)
            problems.append(f"{names} give {rows} rows, {spec.name} has {spec.shape[0]}")
    if problems:
        raise ModelConfigError(
            f"tensors of another shape than the configuration asks for: {_some(problems, '; ')}"
        )


def _width(spec: TensorSpec, shape: Sequence[int]) -> int:
    return shape[0] if spec.transposed else shape[-1]


def _n_rows(spec: TensorSpec, shape: Sequence[int]) -> int:
    return shape[-1] if spec.transposed else shape[0]


def _part_rows(spec: TensorSpec, part: TensorPart, shape: Sequence[int]) -> int:
    n = _n_rows(spec, shape) if part.rows is None else sum(stop - start for start, stop in part.rows)
    return n * shape[1] if len(shape) == 3 else n


def _fits(spec: TensorSpec, part: TensorPart, shape: Sequence[int]) -> bool:
    stacked = len(shape) == 3 and part.rows is not None and len(spec.shape) == 2
    if not stacked and len(shape) != len(spec.shape):
        return False
    if len(spec.shape) == 2 and _width(spec, shape) != spec.shape[1]:
        return False
    if part.rows is not None and max(stop for _, stop in part.rows) > _n_rows(spec, shape):
        return False
    heads = part.unpermute_heads
    if heads and _n_rows(spec, shape) % (2 * heads):
        return False
    rows = _part_rows(spec, part, shape)
    return rows == spec.shape[0] if len(spec.parts) == 1 else rows < spec.shape[0]


def _wanted(spec: TensorSpec, part: TensorPart) -> str:
    if len(spec.parts) == 1 and part.rows is None:
        return _shape(spec.shape[::-1] if spec.transposed else spec.shape)
    if part.rows is not None:
        last = max(stop for _, stop in part.rows)
        return f"at least {last} rows of width {spec.shape[-1]}" if len(spec.shape) > 1 else f"{last} rows"
    width = f" of width {spec.shape[1]}" if len(spec.shape) > 1 else ""
    return f"a share of {spec.shape[0]} rows{width}"


def _check_unused(
    config: ModelConfig, found: Mapping[str, str], prefixes: Sequence[str], shapes: Shapes
) -> None:
    patterns = [*config.names.ignored, *(_GGUF_NON_WEIGHTS if config.source == "gguf" else _NON_WEIGHTS)]
    ignored = re.compile("|".join(f"(?:{pattern})" for pattern in patterns))
    # A tied file may carry the head as well: it is the embedding again.
    heads = {f"{prefix}{config.names.head}.weight" for prefix in prefixes} if config.tied else set()
    used = set(found.values())
    unused = [name for name in shapes if name not in used and name not in heads and not ignored.search(name)]
    if unused:
        raise ModelConfigError(
            f"the checkpoint holds {len(unused)} tensors that {config.family} does not use: "
            f"{_some(sorted(unused))}. Running without them would give wrong results"
        )


def _shape(shape: Sequence[int]) -> str:
    return "(" + ", ".join(str(n) for n in shape) + ")"


def _some(items: Sequence[str], separator: str = ", ") -> str:
    rest = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return separator.join(items[:_SHOWN]) + rest
