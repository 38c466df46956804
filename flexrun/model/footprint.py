"""What a model weighs, counted from its ModelConfig alone: parameters, bytes, FLOPs, KV. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from flexrun.model.schema import LayerConfig, ModelConfig
from flexrun.model.specs import UnitSpec, unit_specs
from offload.units import TensorSpec
from policy.footprint import KvShape, ModelFootprint, UnitFootprint, packed_unit_nbytes
from quant.formats import parse_format

PLAIN_FORMATS = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}

StoredAs: TypeAlias = str | Sequence[tuple[int, str]]
"""The format that a tensor is stored in, or (rows, format) of each run of its rows."""

FormatOf = Callable[[UnitSpec, TensorSpec, str], StoredAs]
"""(unit, tensor, the weight format asked for) -> how the tensor is stored."""


def native_format(config: ModelConfig) -> str:
    """Name of the plain format that the configuration states, f32 if it states none that we know."""
    return PLAIN_FORMATS.get(config.dtype or "", "f32")


def count_parameters(config: ModelConfig) -> int:
    """Elements of all tensors; a tensor that serves two units (tied embeddings) counts once."""
    units = unit_specs(config)
    return sum(
        spec.n_elements
        for unit in units
        for spec in unit.tensors
        if not (unit.kind == "head" and config.tied)
    )


def kv_elements_per_token(config: ModelConfig) -> int:
    """Elements of K and V that one token adds, all layers together."""
    return 2 * config.n_layers * config.n_kv_heads * config.head_dim


def linear_flops_per_token(config: ModelConfig, *, head: bool = False) -> int:
    """2 x multiply-adds of the linear tensors that one token uses; with `head`, also of one row of logits."""
    units = unit_specs(config)
    return sum(unit_flops_per_token(config, unit) for unit in units if head or not unit.rows_only)


def attention_flops(config: ModelConfig, context_len: int) -> int:
    """FLOPs of q.k and of weighting v for one token that sees `context_len` positions, its own included."""
    seen = [min(context_len, layer.window or context_len) for layer in config.layers]
    return 4 * config.n_heads * config.head_dim * sum(seen)


def unit_flops_per_token(config: ModelConfig, unit: UnitSpec) -> int:
    """2 x multiply-adds of a unit's linear tensors for one token; of experts, the ones it goes through."""
    dense = sum(
        spec.n_elements
        for spec in unit.tensors
        if spec.kind == "linear" and not spec.name.startswith("experts.")
    )
    return 2 * (dense + _active_expert_elements(config.layers[unit.layer], config.hidden_size, unit))


def _active_expert_elements(layer: LayerConfig, hidden_size: int, unit: UnitSpec) -> int:
    if layer.moe is None or unit.kind != "mlp":
        return 0
    return layer.moe.n_experts_per_token * 3 * layer.moe.ffn_size * hidden_size


def model_footprint(
    config: ModelConfig,
    *,
    name: str,
    weight_formats: Sequence[str] = (),
    native: str | None = None,
    format_of: FormatOf | None = None,
) -> ModelFootprint:
    """The planner's view of the model.

    weight_formats: formats to weigh besides the native one. native: the checkpoint's own format, by default
        the plain one that its configuration states; any name, such as "mixed", where format_of knows what it
        means. format_of: how each tensor is stored when a format is asked for, each run of rows in a format of
        its own if it has several; by default linear tensors take that format, vectors and tables stay in the
        native plain type (f32 where the native format is not plain).
    Raises ValueError for a format that does not exist or cannot hold a tensor.
    """
    native = native or native_format(config)
    plain = native if format_of is None and parse_format(native).is_plain else "f32"
    formats = tuple(dict.fromkeys((native, *weight_formats)))

    def default_format_of(unit: UnitSpec, spec: TensorSpec, asked: str) -> str:
        return asked if spec.kind == "linear" else plain

    choose = format_of or default_format_of
    units = tuple(_unit_footprint(config, unit, formats, choose) for unit in unit_specs(config))
    return ModelFootprint(
        name=name,
        units=units,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        n_layers=config.n_layers,
        max_positions=config.max_positions,
        native_format=native,
        n_parameters=count_parameters(config),
    )


def _unit_footprint(
    config: ModelConfig, unit: UnitSpec, formats: Sequence[str], format_of: FormatOf
) -> UnitFootprint:
    def sizes(spec: TensorSpec, asked: str) -> list[int]:
        """Bytes of each run of rows: in the store, each is aligned by itself."""
        stored = format_of(unit, spec, asked)
        runs = [(spec.shape[0], stored)] if isinstance(stored, str) else stored
        if sum(n for n, _ in runs) != spec.shape[0]:
            raise ValueError(f"{unit.name}: {spec.name} has {spec.shape[0]} rows, its formats are for {runs}")
        return [parse_format(fmt).nbytes((n, *spec.shape[1:])) for n, fmt in runs]

    streamed = [spec for spec in unit.tensors if spec.kind != "rows"]
    # Rows of a tied embedding are gathered from the head's slices.
    tables = [
        spec for spec in unit.tensors if spec.kind == "rows" and not (config.tied and spec.name == "tokens")
    ]
    vectors = [spec for spec in streamed if spec.kind == "vector"]
    kv = None
    if unit.kind in ("attention", "layer"):
        kv = KvShape(
            n_heads=config.n_heads,
            n_kv_heads=config.n_kv_heads,
            head_dim=config.head_dim,
            window=config.layers[unit.layer].window,
        )
    return UnitFootprint(
        name=unit.name,
        layer=unit.layer,
        kind=unit.kind,
        linear_shapes=tuple((spec.shape[0], spec.shape[1]) for spec in streamed if spec.kind == "linear"),
        vector_bytes=sum(n for spec in vectors for n in sizes(spec, formats[0])),
        nbytes={
            asked: packed_unit_nbytes(n for spec in streamed for n in sizes(spec, asked)) for asked in formats
        },
        table_nbytes={asked: sum(n for spec in tables for n in sizes(spec, asked)) for asked in formats},
        flops_per_token=float(unit_flops_per_token(config, unit)),
        kv=kv,
        pinned=unit.pinned,
        rows_only=unit.rows_only,
    )
