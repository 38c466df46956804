"""What the runtime knows of a model: an ordered list of units, each with tensor specs and a forward.

The runtime never imports a model; models implement these protocols. Importing this module needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    import torch

    from quant.packed import PackedTensor, StackedTensor

TensorKind = Literal["linear", "vector", "rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPart:
    """A piece of a unit's tensor: rows of one checkpoint tensor, in the order given.

    source: the canonical checkpoint name (without the file's own prefix).
    rows: ranges (start, stop) of the source's rows to take, in order; None takes all of them.
        For a vector, a row is an element. Rows of a `transposed` source are its output features.
    unpermute_heads: GGUF files of llama models store each head's rotary rows interleaved; with n heads the
        rows of the whole source are put back by (n, rows / n / 2, 2) -> (n, 2, rows / n / 2). 0 = as stored.
    """

    source: str
    rows: tuple[tuple[int, int], ...] | None = None
    unpermute_heads: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor of a unit. Its parts, stacked along the first dimension, make up `shape`. Parts of a linear
    tensor may be stored in different formats.

    kind: "linear" (out_features, in_features), may be packed, streamed with its unit;
        "vector": one-dimensional (norms, biases), kept in the checkpoint's floating type;
        "rows": a table (rows, width) of which single rows are gathered where it rests, never streamed.
    transposed: the checkpoint stores linear weights as (in_features, out_features).
    """

    name: str
    shape: tuple[int, ...]
    kind: TensorKind
    parts: tuple[TensorPart, ...]
    transposed: bool = False

    @property
    def n_elements(self) -> int:
        n = 1
        for size in self.shape:
            n *= size
        return n


class RowTable(Protocol):
    """A table whose rows are gathered where it rests."""

    def gather(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """ids (tokens,) int64 -> (tokens, width) of `dtype` on the compute device."""
        ...


Weight: TypeAlias = "torch.Tensor | PackedTensor | StackedTensor | RowTable"
Weights: TypeAlias = Mapping[
    str, Any
]  # name -> Weight; Any because a unit knows which kind each of its names is


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionParams:
    """The mathematics of one attention layer, apart from its projections.

    scale: factor on q.k; window: number of most recent positions seen (0 = all), the query's own included;
    softcap: logits become softcap * tanh(logits / softcap) (0 = none);
    alibi_slopes: one per query head, added as slope * (key position - query position).
    """

    scale: float
    window: int = 0
    softcap: float = 0.0
    alibi_slopes: tuple[float, ...] | None = None


class Context(Protocol):
    """What a unit may ask for while it computes one chunk of one gpu batch. All tensors are on the device."""

    token_ids: torch.Tensor  # (tokens,) int64
    positions: torch.Tensor  # (tokens,) int64, position of each token in its own sequence
    rope_lens: torch.Tensor  # (tokens,) int64, length of each token's sequence, for length-dependent rope
    compute_dtype: torch.dtype

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Append key and value (tokens, n_kv_heads, head_dim) to the sequences' KV pages of the current
        unit's layer and attend causally: query (tokens, n_heads, head_dim) -> (tokens, n_heads, head_dim)."""
        ...

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x (tokens, in_features) @ weight.T + bias, whatever the weight's storage."""
        ...

    def gated(
        self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, activation: str
    ) -> torch.Tensor:
        """activation(gate) * up of `linear`'s result, whose first half are the gates: half as wide."""
        ...

    def add_linear(
        self, total: torch.Tensor, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """total += `linear`'s result, in place."""
        ...

    def memo(self, key: object, make: Callable[[], Any]) -> Any:
        """A value shared by all units for this chunk in this pass (rope tables), made on first use."""
        ...

    def put_logits(self, start: int, logits: torch.Tensor) -> None:
        """Hand over logits (rows, width) of vocabulary entries start .. start + width."""
        ...


class Unit(Protocol):
    """The smallest piece of weights that is streamed and placed as a whole. It never keeps weights."""

    name: str
    layer: int  # index of the transformer layer, -1 outside the layers
    tensors: tuple[TensorSpec, ...]
    pinned: bool  # small or gathered: always at home on the fastest tier that gathers it, never streamed
    rows_only: bool  # works on the selected logit rows alone (final norm, head), not on all tokens

    def forward(self, weights: Weights, hidden: torch.Tensor, context: Context) -> torch.Tensor:
        """hidden (tokens, hidden_size) of one chunk -> the same shape (the embedding ignores its input).

        hidden's memory is free to be written to: the result may be hidden itself, changed in place.
        """
        ...


@runtime_checkable
class AttentionUnit(Protocol):
    """A unit with a KV cache. forward = finish(attend(project)); the runtime may run attend elsewhere."""

    name: str
    layer: int
    tensors: tuple[TensorSpec, ...]
    pinned: bool
    rows_only: bool
    n_heads: int
    n_kv_heads: int
    head_dim: int
    attention: AttentionParams

    def project(
        self, weights: Weights, hidden: torch.Tensor, context: Context
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any]:
        """query, key, value (tokens, heads, head_dim) and whatever finish needs."""
        ...

    def finish(
        self, weights: Weights, hidden: torch.Tensor, attended: torch.Tensor, carry: Any, context: Context
    ) -> torch.Tensor: ...

    def forward(self, weights: Weights, hidden: torch.Tensor, context: Context) -> torch.Tensor: ...


class Model(Protocol):
    """An ordered list of units and the few sizes that the runtime needs."""

    @property
    def units(self) -> Sequence[Unit]: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def n_layers(self) -> int: ...

    @property
    def max_positions(self) -> int: ...
