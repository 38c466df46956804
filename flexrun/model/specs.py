"""The units of a model and the tensors of each, made from a ModelConfig. Needs no torch.

Order: embed; then per layer `layers.N.attn` and `layers.N.mlp`, or one `layers.N` where attention and MLP
read the same input; final; and the head in vocabulary slices no larger than the largest layer unit.
Linear weights of one input are stacked: "qkv" is q rows, k rows, v rows, and "gate_up" gate rows, up rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from flexrun.model.schema import LayerConfig, ModelConfig, ModelConfigError
from offload.units import TensorPart, TensorSpec

UnitKind = Literal["embed", "attention", "mlp", "layer", "final", "head"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSpec:
    """A unit without its mathematics. Fields as in offload.units.Unit; head_start: its first vocabulary
    entry, for slices of the head."""

    name: str
    kind: UnitKind
    layer: int
    tensors: tuple[TensorSpec, ...]
    pinned: bool = False
    rows_only: bool = False
    head_start: int = 0

    @property
    def n_elements(self) -> int:
        return sum(spec.n_elements for spec in self.tensors)


def unit_specs(config: ModelConfig) -> tuple[UnitSpec, ...]:
    """All units in the order in which a pass visits them."""
    layers = [unit for index in range(config.n_layers) for unit in _layer_units(config, index)]
    largest = max(unit.n_elements for unit in layers)
    return (
        UnitSpec(name="embed", kind="embed", layer=-1, tensors=tuple(_embed(config)), pinned=True),
        *layers,
        UnitSpec(
            name="final", kind="final", layer=-1, tensors=tuple(_final(config)), pinned=True, rows_only=True
        ),
        *_head_units(config, largest),
    )


def _layer_units(config: ModelConfig, index: int) -> list[UnitSpec]:
    prefix = config.names.layer.format(index)
    attention, mlp = list(_attention(config, prefix)), list(_mlp(config, config.layers[index], prefix))
    attn_norm = list(_norm(config, "attn_norm", prefix + config.names.attn_norm))
    mlp_norm = list(_norm(config, "mlp_norm", prefix + config.names.mlp_norm))
    if config.residual == "serial":
        return [
            UnitSpec(
                name=f"layers.{index}.attn",
                kind="attention",
                layer=index,
                tensors=tuple(attn_norm + attention),
            ),
            UnitSpec(name=f"layers.{index}.mlp", kind="mlp", layer=index, tensors=tuple(mlp_norm + mlp)),
        ]
    norms = attn_norm + (mlp_norm if config.residual == "parallel" else [])
    return [
        UnitSpec(name=f"layers.{index}", kind="layer", layer=index, tensors=tuple(norms + attention + mlp))
    ]


def _embed(config: ModelConfig) -> Iterator[TensorSpec]:
    names = config.names
    yield _whole("tokens", "rows", (config.vocab_size, config.embed_size), names.embed + ".weight")
    if config.n_learned_positions:
        shape = (config.n_learned_positions, config.hidden_size)
        yield _whole("positions", "rows", shape, f"{names.positions}.weight")
    if config.embed_norm:
        yield from _norm(config, "norm", str(names.embed_norm))
    if config.embed_size != config.hidden_size:
        shape = (config.hidden_size, config.embed_size)
        yield _whole("project_in", "linear", shape, f"{names.project_in}.weight")


def _final(config: ModelConfig) -> Iterator[TensorSpec]:
    if config.final_norm:
        yield from _norm(config, "norm", config.names.final_norm)
    if config.embed_size != config.hidden_size:
        shape = (config.embed_size, config.hidden_size)
        yield _whole("project_out", "linear", shape, f"{config.names.project_out}.weight")


def _head_units(config: ModelConfig, largest: int) -> Iterator[UnitSpec]:
    source = (config.names.embed if config.tied else config.names.head) + ".weight"
    n_slices = -(-config.vocab_size * config.embed_size // largest)
    rows_per_slice = -(-config.vocab_size // n_slices)
    for number, start in enumerate(range(0, config.vocab_size, rows_per_slice)):
        stop = min(start + rows_per_slice, config.vocab_size)
        rows = ((start, stop),)
        tensors = [
            TensorSpec(
                name="weight",
                shape=(stop - start, config.embed_size),
                kind="linear",
                parts=(TensorPart(source=source, rows=rows),),
            )
        ]
        if config.head_bias:
            part = TensorPart(source=config.names.head + ".bias", rows=rows)
            tensors.append(TensorSpec(name="bias", shape=(stop - start,), kind="vector", parts=(part,)))
        yield UnitSpec(
            name=f"head.{number}",
            kind="head",
            layer=-1,
            tensors=tuple(tensors),
            rows_only=True,
            head_start=start,
        )


def _attention(config: ModelConfig, prefix: str) -> Iterator[TensorSpec]:
    names, head_dim = config.names, config.head_dim
    q_size, kv_size = config.n_heads * head_dim, config.n_kv_heads * head_dim
    yield TensorSpec(
        name="qkv",
        shape=(q_size + 2 * kv_size, config.hidden_size),
        kind="linear",
        parts=_qkv_parts(config, prefix, ".weight"),
        transposed=names.transposed,
    )
    if config.qkv_bias:
        parts = _qkv_parts(config, prefix, ".bias")
        yield TensorSpec(name="qkv.bias", shape=(q_size + 2 * kv_size,), kind="vector", parts=parts)
    if config.qk_norm:
        yield _whole("q_norm", "vector", (head_dim,), f"{prefix}{names.q_norm}.weight")
        yield _whole("k_norm", "vector", (head_dim,), f"{prefix}{names.k_norm}.weight")
    yield _whole(
        "out",
        "linear",
        (config.hidden_size, q_size),
        f"{prefix}{names.attn_out}.weight",
        transposed=names.transposed,
    )
    if config.attn_out_bias:
        yield _whole("out.bias", "vector", (config.hidden_size,), f"{prefix}{names.attn_out}.bias")
    if config.norm_placement == "sandwich":
        yield from _norm(config, "attn_post_norm", f"{prefix}{names.attn_post_norm}")


def _qkv_parts(config: ModelConfig, prefix: str, suffix: str) -> tuple[TensorPart, ...]:
    names = config.names
    if names.qkv_layout == "split":
        heads = (config.n_heads, config.n_kv_heads, 0) if names.permuted_qk else (0, 0, 0)
        return tuple(
            TensorPart(source=f"{prefix}{name}{suffix}", unpermute_heads=n)
            for name, n in zip((names.q, names.k, names.v), heads, strict=True)
        )
    if names.permuted_qk:
        raise ModelConfigError("a fused qkv tensor with interleaved rotary rows is not supported")
    source = f"{prefix}{names.qkv}{suffix}"
    if names.qkv_layout == "stacked":
        return (TensorPart(source=source),)
    # Rows lie as (n_kv_heads, query heads per group + 2, head_dim).
    group = config.n_heads // config.n_kv_heads
    width = (group + 2) * config.head_dim
    starts = [index * width for index in range(config.n_kv_heads)]
    spans = ((0, group), (group, group + 1), (group + 1, group + 2))
    rows = [
        (start + first * config.head_dim, start + last * config.head_dim)
        for first, last in spans
        for start in starts
    ]
    return (TensorPart(source=source, rows=tuple(rows)),)


def _mlp(config: ModelConfig, layer: LayerConfig, prefix: str) -> Iterator[TensorSpec]:
    if layer.moe is not None:
        yield from _experts(config, layer, prefix)
    else:
        yield from _dense_mlp(config, layer.ffn_size, prefix)
    if config.norm_placement == "sandwich":
        yield from _norm(config, "mlp_post_norm", f"{prefix}{config.names.mlp_post_norm}")


def _dense_mlp(config: ModelConfig, ffn_size: int, prefix: str) -> Iterator[TensorSpec]:
    names, width = config.names, config.hidden_size
    name, n_rows = ("gate_up", 2 * ffn_size) if config.gated else ("up", ffn_size)
    stems: tuple[str | None, ...]
    if not config.gated:
        stems = (names.up,)
    elif names.gate_up is not None:
        stems = (names.gate_up,)
    else:
        stems = (names.gate, names.up)

    def stacked(suffix: str) -> tuple[TensorPart, ...]:
        return tuple(TensorPart(source=f"{prefix}{stem}{suffix}") for stem in stems)

    yield TensorSpec(
        name=name,
        shape=(n_rows, width),
        kind="linear",
        parts=stacked(".weight"),
        transposed=names.transposed,
    )
    if config.mlp_bias:
        yield TensorSpec(name=name + ".bias", shape=(n_rows,), kind="vector", parts=stacked(".bias"))
    source = f"{prefix}{names.down}"
    yield _whole("down", "linear", (width, ffn_size), source + ".weight", transposed=names.transposed)
    if config.mlp_bias:
        yield _whole("down.bias", "vector", (width,), source + ".bias")


def _experts(config: ModelConfig, layer: LayerConfig, prefix: str) -> Iterator[TensorSpec]:
    names, moe, width = config.names, layer.moe, config.hidden_size
    assert moe is not None
    yield _whole("router", "linear", (moe.n_experts, width), f"{prefix}{names.router}.weight")

    def part(stem: str | None, expert: int) -> TensorPart:
        source = f"{prefix}{stem}.weight".format(expert)
        # In a three-dimensional source, a row is the whole matrix of one expert.
        rows = ((expert, expert + 1),) if names.stacked_experts else None
        return TensorPart(source=source, rows=rows)

    for expert in range(moe.n_experts):
        yield TensorSpec(
            name=f"experts.{expert}.gate_up",
            shape=(2 * moe.ffn_size, width),
            kind="linear",
            parts=(part(names.expert_gate, expert), part(names.expert_up, expert)),
        )
        yield TensorSpec(
            name=f"experts.{expert}.down",
            shape=(width, moe.ffn_size),
            kind="linear",
            parts=(part(names.expert_down, expert),),
        )


def _norm(config: ModelConfig, name: str, stem: str) -> Iterator[TensorSpec]:
    if not config.norm.affine:
        return
    yield _whole(name + ".weight", "vector", (config.hidden_size,), stem + ".weight")
    if config.norm.kind == "layer":
        yield _whole(name + ".bias", "vector", (config.hidden_size,), stem + ".bias")


def _whole(
    name: str,
    kind: Literal["linear", "vector", "rows"],
    shape: tuple[int, ...],
    source: str,
    *,
    transposed: bool = False,
) -> TensorSpec:
    return TensorSpec(
        name=name, shape=shape, kind=kind, parts=(TensorPart(source=source),), transposed=transposed
    )
