"""What a model weighs, as plain numbers: bytes, FLOPs and KV shape of every unit.

The planner reads nothing else of a model. `flexrun.model.footprint` makes a footprint from a configuration;
`decoder_footprint` makes one from the sizes of a plain decoder alone.

A unit's stored bytes are those of its run in the weight store: every tensor starts at a multiple of
TENSOR_ALIGN_BYTES, every unit at a multiple of UNIT_ALIGN_BYTES (`packed_unit_nbytes` is that rule).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

UNIT_ALIGN_BYTES = 4096
TENSOR_ALIGN_BYTES = 64

PLAIN_BYTES: dict[str, int] = {"f32": 4, "bf16": 2, "f16": 2}
MIXED_FORMAT = "mixed"
"""Name of the weight format of a checkpoint that stores its linear tensors in several."""
"""Element bytes of the plain formats, which are also the compute dtypes."""

UnitKind = Literal["embed", "attention", "mlp", "layer", "final", "head"]


def align_up(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple


def packed_unit_nbytes(tensor_nbytes: Iterable[int]) -> int:
    """Bytes of a unit whose tensors take `tensor_nbytes`: each aligned, the whole rounded up to 4 KiB."""
    total = sum(align_up(n, TENSOR_ALIGN_BYTES) for n in tensor_nbytes)
    return align_up(total, UNIT_ALIGN_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """One layer's attention: n_heads queries share n_kv_heads keys and values (MHA, GQA, MQA alike).

    window: most recent positions seen, 0 = all.
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int
    window: int = 0

    def __post_init__(self) -> None:
        for name in ("n_heads", "n_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_heads must be a multiple of n_kv_heads, got {self.n_heads} and {self.n_kv_heads}"
            )
        if self.window < 0:
            raise ValueError(f"window must be at least 0 (0 = all positions), got {self.window}")

    @property
    def elements_per_token(self) -> int:
        """K and V elements that one token adds to this layer's cache."""
        return 2 * self.n_kv_heads * self.head_dim

    @property
    def query_elements(self) -> int:
        """Elements of one token's query, and of its attended output."""
        return self.n_heads * self.head_dim

    @property
    def qkv_elements(self) -> int:
        return self.query_elements + self.elements_per_token


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UnitFootprint:
    """Sizes of one unit.

    linear_shapes: (out_features, in_features) of every linear tensor, all experts of a MoE included.
    nbytes: weight format -> bytes of the unit in the weight store (linear and vector tensors).
    table_nbytes: weight format -> bytes of tables gathered by rows (embedding, learned positions), without
        what a tied head's slices already hold. Tables rest in cpu memory and never move.
    flops_per_token: 2 x multiply-adds of the linear tensors that one token uses (active experts only),
        attention itself not included.
    pinned: always at home on the first tier. rows_only: computed for the selected logit rows only.
    """

    name: str
    layer: int = -1
    kind: UnitKind
    linear_shapes: tuple[tuple[int, int], ...] = ()
    vector_bytes: int = 0
    nbytes: Mapping[str, int] = field(default_factory=dict)
    table_nbytes: Mapping[str, int] = field(default_factory=dict)
    flops_per_token: float = 0.0
    kv: KvShape | None = None
    pinned: bool = False
    rows_only: bool = False

    def __post_init__(self) -> None:
        if self.flops_per_token < 0 or self.vector_bytes < 0:
            raise ValueError(f"unit {self.name}: flops_per_token and vector_bytes must not be negative")
        if not self.nbytes:
            raise ValueError(f"unit {self.name}: nbytes must give the bytes of at least one weight format")
        for fmt, n in (*self.nbytes.items(), *self.table_nbytes.items()):
            if n < 0:
                raise ValueError(f"unit {self.name}: bytes in format {fmt} must not be negative, got {n}")

    @property
    def n_elements(self) -> int:
        """Elements of all linear tensors."""
        return sum(out * inp for out, inp in self.linear_shapes)

    @property
    def active_frac(self) -> float:
        """Share of the linear elements that one token uses: 1 unless experts are chosen per token."""
        n = self.n_elements
        return min(1.0, self.flops_per_token / (2 * n)) if n else 1.0

    @property
    def activation_elements_per_token(self) -> float:
        """Inputs and outputs of the linear tensors that one token uses: what norms, activations and
        residuals read and write, and what a chunk's work buffer holds."""
        return sum(out + inp for out, inp in self.linear_shapes) * self.active_frac

    @property
    def project_frac(self) -> float:
        """Share of the unit's FLOPs spent on queries, keys and values (before attention), 0 without cache."""
        if self.kv is None or not self.flops_per_token:
            return 0.0
        hidden = self.linear_shapes[0][1] if self.linear_shapes else 0
        return min(1.0, 2.0 * self.kv.qkv_elements * hidden / self.flops_per_token)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelFootprint:
    """A model in the planner's eyes: its units in order and the few sizes beside them.

    native_format: the checkpoint's own weight format (what "auto" means where nothing else was asked for).
    """

    name: str
    units: tuple[UnitFootprint, ...]
    hidden_size: int
    vocab_size: int
    n_layers: int
    max_positions: int
    native_format: str
    n_parameters: int = 0

    def __post_init__(self) -> None:
        if not self.units:
            raise ValueError(f"model {self.name}: a footprint needs at least one unit")
        for name in ("hidden_size", "vocab_size", "n_layers", "max_positions"):
            if getattr(self, name) < 1:
                raise ValueError(f"model {self.name}: {name} must be at least 1, got {getattr(self, name)}")
        if self.native_format not in self.weight_formats:
            raise ValueError(
                f"model {self.name}: native format {self.native_format!r} has no bytes in every unit;"
                f" formats that have: {', '.join(self.weight_formats)}"
            )

    @property
    def weight_formats(self) -> tuple[str, ...]:
        """Formats for which every unit's bytes are known, in the first unit's order."""
        return tuple(f for f in self.units[0].nbytes if all(f in unit.nbytes for unit in self.units))

    def resolve_format(self, name: str) -> str:
        """The weight format of that name; "auto" is the checkpoint's own. ValueError for an unknown one."""
        if name == "auto":
            return self.native_format
        if name not in self.weight_formats:
            raise ValueError(
                f"weight format {name!r} is not known for {self.name};"
                f" known: {', '.join(self.weight_formats)}"
            )
        return name

    @property
    def streamable(self) -> tuple[int, ...]:
        """Indices of the units that have a choice of home, in model order."""
        return tuple(i for i, unit in enumerate(self.units) if not unit.pinned)

    @property
    def kv_units(self) -> tuple[int, ...]:
        return tuple(i for i, unit in enumerate(self.units) if unit.kv is not None)

    def weight_nbytes(self, weight_format: str) -> int:
        """Bytes of all streamable units."""
        fmt = self.resolve_format(weight_format)
        return sum(unit.nbytes[fmt] for unit in self.units if not unit.pinned)

    def kv_elements_per_token(self) -> int:
        return sum(unit.kv.elements_per_token for unit in self.units if unit.kv is not None)

    def flops_per_token(self) -> float:
        """Linear FLOPs of one token through the layers, the head not included."""
        return sum(unit.flops_per_token for unit in self.units if not unit.rows_only)

    def flops_per_row(self) -> float:
        """Linear FLOPs of one row of logits."""
        return sum(unit.flops_per_token for unit in self.units if unit.rows_only)


def linear_nbytes(shapes: Sequence[tuple[int, int]], vector_bytes: int, weight_format: str) -> int:
    """Bytes of a unit of these linear tensors in `weight_format`, its vectors counted as one more tensor."""
    if weight_format in PLAIN_BYTES:
        sizes = [out * inp * PLAIN_BYTES[weight_format] for out, inp in shapes]
    else:
        from quant.formats import parse_format

        fmt = parse_format(weight_format)
        sizes = [int(fmt.nbytes(shape)) for shape in shapes]
    return packed_unit_nbytes([*sizes, vector_bytes])


def decoder_footprint(
    *,
    name: str,
    hidden_size: int,
    n_layers: int,
    n_heads: int,
    ffn_size: int,
    vocab_size: int,
    n_kv_heads: int | None = None,
    head_dim: int | None = None,
    max_positions: int = 2048,
    gated: bool = False,
    tied: bool = False,
    learned_positions: bool = False,
    weight_formats: Sequence[str] = ("f16",),
    biases: bool = False,
    window: int = 0,
) -> ModelFootprint:
    """Footprint of a plain decoder from its sizes; the first of `weight_formats` is the checkpoint's own.

    gated: the MLP has gate, up and down tensors instead of two; tied: embedding and head share one table.
    """
    kv_heads = n_kv_heads or n_heads
    kv = KvShape(
        n_heads=n_heads,
        n_kv_heads=kv_heads,
        head_dim=head_dim or hidden_size // n_heads,
        window=window,
    )
    native = weight_formats[0]
    # Vectors stay in a plain type whatever the linear tensors become.
    vector_element = PLAIN_BYTES.get(native, 4)
    attention = ((kv.qkv_elements, hidden_size), (hidden_size, kv.query_elements))
    mlp = ((ffn_size * (2 if gated else 1), hidden_size), (hidden_size, ffn_size))

    def unit(
        unit_name: str, kind: UnitKind, shapes: tuple[tuple[int, int], ...], n_vector: int, **more: object
    ) -> UnitFootprint:
        vector_bytes = n_vector * vector_element
        return UnitFootprint(
            name=unit_name,
            kind=kind,
            linear_shapes=shapes,
            vector_bytes=vector_bytes,
            nbytes={f: linear_nbytes(shapes, vector_bytes, f) for f in weight_formats},
            flops_per_token=float(2 * sum(o * i for o, i in shapes)),
            **more,  # type: ignore[arg-type]
        )

    norm = hidden_size * (2 if biases else 1)
    table_rows = (0 if tied else vocab_size) + (max_positions if learned_positions else 0)
    tables = dict.fromkeys(weight_formats, table_rows * hidden_size * vector_element)
    units = [unit("embed", "embed", (), 0, pinned=True, table_nbytes=tables)]
    bias = (kv.qkv_elements + hidden_size) if biases else 0
    mlp_bias = (mlp[0][0] + hidden_size) if biases else 0
    for layer in range(n_layers):
        prefix = f"layers.{layer}"
        units.append(unit(f"{prefix}.attn", "attention", attention, norm + bias, layer=layer, kv=kv))
        units.append(unit(f"{prefix}.mlp", "mlp", mlp, norm + mlp_bias, layer=layer))
    units.append(unit("final", "final", (), norm, pinned=True, rows_only=True))
    largest = max(sum(o * i for o, i in attention), sum(o * i for o, i in mlp))
    n_slices = -(-vocab_size * hidden_size // largest)
    bounds = [vocab_size * i // n_slices for i in range(n_slices + 1)]
    for i in range(n_slices):
        shape = ((bounds[i + 1] - bounds[i], hidden_size),)
        units.append(unit(f"head.{i}", "head", shape, 0, rows_only=True))
    n_parameters = sum(u.n_elements + u.vector_bytes // vector_element for u in units)
    return ModelFootprint(
        name=name,
        units=tuple(units),
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        n_layers=n_layers,
        max_positions=max_positions,
        native_format=native,
        n_parameters=n_parameters + table_rows * hidden_size,
    )
