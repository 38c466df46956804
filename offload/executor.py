"""The executor: the only loop over units x gpu batches. It runs the schedule's operations on lanes.

A pass takes one `BatchInput` per gpu batch, plans its cache (which pages fill, what attention reads), then
submits the operations of `policy.schedule` in their order, each with the waits the schedule gives it. The
executor adds no order of its own. Running in memory is the same loop with everything at home on the first
tier: then only compute operations remain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from offload.cache_store import CacheStore
from offload.device import Device
from offload.hidden import HiddenStore
from offload.kv import LayerCache, attend_first_segments
from offload.kv_chunk import ChunkAttention, plan_chunk
from offload.lanes import Handle, Lanes
from offload.pages import SEGMENT_TOKENS, CacheSequence, PageAllocator
from offload.units import AttentionParams, AttentionUnit, Model, Unit
from offload.weights import WeightStore
from policy.schedule import BatchPlan, Depths, Op, OpKind, UnitPlan, ZigZag
from policy.tiers import Tier
from quant.linear import add_linear, gated_linear, linear


class LogitSink(Protocol):
    """Takes the logits of a gpu batch's selected rows, slice by slice of the vocabulary."""

    def put(self, first_row: int, first_id: int, logits: Tensor) -> None:
        """logits (rows, width): rows first_row .. of the selected rows, vocabulary entries first_id .. ."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceInput:
    """The next tokens of one sequence: one running token (decode) or a part of its prompt.

    total_len: the prompt's length during prefill, the length with the new token during decode; rotary
    scalings that depend on a sequence's length use it. rows: which of the new tokens need logits.
    """

    sequence: CacheSequence
    token_ids: Sequence[int]
    total_len: int
    decode: bool
    rows: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchInput:
    """One gpu batch of a pass: its sequences in order, and who takes their logits (rows in that order)."""

    sequences: Sequence[SequenceInput]
    sink: LogitSink | None = None

    @property
    def n_tokens(self) -> int:
        return sum(len(s.token_ids) for s in self.sequences)


class _Piece(NamedTuple):
    """Tokens first .. first + n_tokens of what a sequence brings to the pass; position of the first."""

    given: SequenceInput
    first: int
    position: int
    n_tokens: int


class _Products:
    """The products that a unit may ask its context for. Vectors keep the checkpoint's type until they are used."""

    def linear(self, x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
        """x (tokens, in_features) @ weight.T + bias."""
        return linear(x, weight, _as(x, bias))

    def gated(self, x: Tensor, weight: Any, bias: Tensor | None, activation: str) -> Tensor:
        """activation(gate) * up of that, whose first half are the gates."""
        return gated_linear(x, weight, _as(x, bias), activation)

    def add_linear(self, total: Tensor, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        """total += that, in place."""
        return add_linear(total, x, weight, _as(x, bias))


def _as(x: Tensor, bias: Tensor | None) -> Tensor | None:
    return bias if bias is None or bias.dtype == x.dtype else bias.to(x.dtype)


class _Chunk(_Products):
    """The context of one chunk of tokens of one gpu batch: what a unit's forward may ask for."""

    def __init__(
        self,
        *,
        begin: int,
        token_ids: Tensor,
        positions: Tensor,
        rope_lens: Tensor,
        attention: ChunkAttention,
        compute_dtype: torch.dtype,
    ) -> None:
        self.begin = begin
        self.token_ids = token_ids
        self.positions = positions
        self.rope_lens = rope_lens
        self.compute_dtype = compute_dtype
        self.attention = attention
        self.layer_cache: LayerCache | None = None
        self._memo: dict[object, Any] = {}

    @property
    def end(self) -> int:
        return self.begin + self.attention.n_tokens

    def attend(self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        """Append to the current layer's pages, then attend: query (tokens, n_heads, head_dim) -> same."""
        assert self.layer_cache is not None, "attention outside a unit with a cache"
        self.layer_cache.append(self.attention, key, value)
        return self.layer_cache.attend(self.attention, query, key, value, params)

    def memo(self, key: object, make: Callable[[], Any]) -> Any:
        if key not in self._memo:
            self._memo[key] = make()
        return self._memo[key]

    def put_logits(self, start: int, logits: Tensor) -> None:
        raise RuntimeError("logits are made from selected rows only")


class _Rows(_Products):
    """The context of units that work on the selected logit rows (final norm, head slices)."""

    def __init__(self, first_row: int, sink: LogitSink | None, compute_dtype: torch.dtype) -> None:
        nothing = torch.zeros(0, dtype=torch.int64)
        self.token_ids = self.positions = self.rope_lens = nothing
        self.compute_dtype = compute_dtype
        self._first_row = first_row
        self._sink = sink

    def attend(self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        raise RuntimeError("units after the layers have no attention")

    def memo(self, key: object, make: Callable[[], Any]) -> Any:
        return make()

    def put_logits(self, start: int, logits: Tensor) -> None:
        if self._sink is not None:
            self._sink.put(self._first_row, start, logits)


@dataclass(slots=True)
class _Projected:
    """One chunk of a unit between its projection and its output projection, attention being elsewhere.

    query, key, value and out (what is attended so far) are on the device, carry is the unit's own; moved: the
    first three in cpu memory; attended: the CPU's part, (tokens, n_heads, head_dim) like out.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    carry: Any
    out: Tensor
    moved: tuple[Tensor, Tensor, Tensor] | None = None
    attended: Tensor | None = None


@dataclass(slots=True)
class _Batch:
    """A gpu batch while its pass runs."""

    index: int
    chunks: list[_Chunk]
    rows: Tensor
    sink: LogitSink | None
    plan: BatchPlan
    n_tokens: int
    selected: Tensor | None = None
    resized: list[Tensor] = field(default_factory=list)
    projected: list[_Projected] = field(default_factory=list)


class Executor:
    """Runs passes of a model over a block, by a policy that is already rounded to homes.

    chunk_tokens: most tokens of one forward call (at least SEGMENT_TOKENS); bounds the work memory.
    hidden_homes: where each gpu batch's hidden states rest between units.
    """

    def __init__(
        self,
        model: Model,
        *,
        device: Device,
        compute_dtype: torch.dtype,
        weights: WeightStore,
        cache: CacheStore,
        hidden: HiddenStore,
        lanes: Lanes,
        hidden_homes: Sequence[Tier],
        chunk_tokens: int = 1024,
        row_chunk: int = 512,
        depths: Depths | None = None,
        overlap: bool = True,
    ) -> None:
        if chunk_tokens < SEGMENT_TOKENS:
            raise ValueError(f"chunk_tokens must be at least {SEGMENT_TOKENS}, got {chunk_tokens}")
        self.model = model
        self.device = device
        self.compute_dtype = compute_dtype
        self.weights = weights
        self.cache = cache
        self.hidden = hidden
        self.lanes = lanes
        self.chunk_tokens = chunk_tokens
        self.row_chunk = row_chunk
        self.allocator = PageAllocator(cache.shape)
        self._hidden_homes = tuple(hidden_homes)
        self._units: tuple[Unit, ...] = tuple(model.units)
        self._layer_of_unit = _cache_layers(self._units)
        rows_only = [unit.rows_only for unit in self._units]
        # The first unit makes the hidden states; the last one before the final norm leaves its selected rows.
        plans = [
            UnitPlan(
                home=weights.homes[i],
                has_cache=i in self._layer_of_unit,
                loads_hidden=i > 0 and not rows_only[i],
                stores_hidden=not rows_only[i] and not rows_only[i + 1],
            )
            for i in range(len(self._units))
        ]
        self._zigzag = ZigZag(plans, first_tier=device.first_tier, depths=depths, overlap=overlap)
        self._handles: dict[int, Handle] = {}

    # -- a pass ----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def run_pass(self, inputs: Sequence[BatchInput], *, last: bool = False) -> None:
        """Run one pass; when it returns, every sink has all its logits. last: no further pass is expected.

        Raises LaneError if an operation failed; the block is then unusable.
        """
        batches = [self._begin_batch(j, batch) for j, batch in enumerate(inputs) if batch.sequences]
        if not batches:
            return
        self.weights.forget()
        pass_tokens = sum(b.n_tokens for b in batches)
        pass_rows = sum(b.rows.numel() for b in batches)
        for op in self._zigzag.pass_ops([b.plan for b in batches], last=last):
            batch = batches[op.batch] if op.batch >= 0 else None
            tokens = pass_rows if self._units[op.unit].rows_only else pass_tokens
            work = self._work(op, batch, tokens)
            waits = [self._handles[i] for i in op.waits if i in self._handles]
            label = f"{op.kind.value} {self._units[op.unit].name}" + (
                f" [{batch.index}]" if batch is not None else ""
            )
            self._handles[op.id] = self.lanes.submit(op.lane, work, waits, label)
        self._prune()

    def _prune(self) -> None:
        """Forget handles that ended well: what waited for them may run. Failures surface here."""
        for key in [k for k, handle in self._handles.items() if handle.done()]:
            self._handles.pop(key).wait()

    def drain(self) -> None:
        """Wait for all stores and loads under way."""
        self.lanes.drain()
        self._prune()

    def _work(self, op: Op, batch: _Batch | None, tokens: int) -> Callable[[], int | None]:
        """The function that carries out one operation."""
        u, kind = op.unit, op.kind
        if kind is OpKind.READ_WEIGHTS:
            return lambda: self.weights.read(u, op.slot, op.piece, op.n_pieces)
        if kind is OpKind.UPLOAD_WEIGHTS:
            return lambda: self.weights.upload(u, op.slot, op.staging_slot, op.piece, op.n_pieces)
        assert batch is not None
        j = batch.index
        if kind is OpKind.COMPUTE:
            return lambda: self._compute(op, batch, tokens)
        if kind is OpKind.PROJECT:
            return lambda: self._project(op, batch, tokens)
        if kind is OpKind.CPU_ATTENTION:
            return lambda: self._attend_on_cpu(op, batch)
        if kind is OpKind.FINISH:
            return lambda: self._finish(op, batch, tokens)
        if kind is OpKind.DOWNLOAD_QKV:
            return lambda: self._move_projected(batch)
        if kind is OpKind.UPLOAD_ATTENDED:
            return lambda: self._move_attended(batch)
        layer = self._layer_of_unit.get(u, -1)
        if kind is OpKind.READ_CACHE:
            return lambda: self.cache.read(layer, j, op.slot)
        if kind is OpKind.UPLOAD_CACHE:
            return lambda: self.cache.upload(layer, j, op.slot, op.staging_slot)
        if kind is OpKind.DOWNLOAD_CACHE:
            return lambda: self.cache.download(layer, j, op.out_slot)
        if kind is OpKind.WRITE_CACHE:
            return lambda: self.cache.write(layer, j, op.out_slot)
        n_tokens = batch.n_tokens
        if kind is OpKind.READ_HIDDEN:
            return lambda: self.hidden.read(j, op.slot, n_tokens)
        if kind is OpKind.UPLOAD_HIDDEN:
            return lambda: self.hidden.upload(j, op.slot, n_tokens)
        if kind is OpKind.DOWNLOAD_HIDDEN:
            return lambda: self.hidden.download(j, op.hidden_slot, n_tokens)
        assert kind is OpKind.WRITE_HIDDEN
        return lambda: self.hidden.write(j, op.hidden_slot, n_tokens)

    # -- planning a gpu batch --------------------------------------------------------------------------

    def _begin_batch(self, j: int, given: BatchInput) -> _Batch:
        device = self.device.torch_device
        used = [page for s in given.sequences for page in s.sequence.pages]
        rows: list[int] = []
        n_tokens = 0
        for s in given.sequences:
            rows.extend(n_tokens + r for r in s.rows)
            n_tokens += len(s.token_ids)
        # Cut first: planning a chunk's pages advances its sequences.
        cut = list(self._cut(given.sequences))
        chunks: list[_Chunk] = []
        begin = 0
        for pieces in cut:
            attention = plan_chunk(
                self.allocator,
                [(p.given.sequence, p.n_tokens) for p in pieces],
                [p.given.decode for p in pieces],
            )
            ids = [t for p in pieces for t in p.given.token_ids[p.first : p.first + p.n_tokens]]
            positions = torch.cat([torch.arange(p.position, p.position + p.n_tokens) for p in pieces])
            lens = torch.cat([torch.full((p.n_tokens,), p.given.total_len) for p in pieces])
            chunks.append(
                _Chunk(
                    begin=begin,
                    token_ids=torch.tensor(ids, dtype=torch.int64).to(device),
                    positions=positions.to(device),
                    rope_lens=lens.to(device),
                    attention=attention,
                    compute_dtype=self.compute_dtype,
                )
            )
            begin += len(ids)
        decode_rows = [row for c in chunks for row in c.attention.decode_rows.tolist()]
        plan = self.cache.begin_batch(
            j,
            used=used,
            filled=[slot for c in chunks for slot in c.attention.filled],
            tail_rows=max(decode_rows, default=-1) + 1,
            writes_tails=any(c.attention.indices.tail_tokens.numel() for c in chunks),
            attends_stored=not all(c.attention.self_contained for c in chunks),
            hidden_home=self._hidden_homes[j],
        )
        return _Batch(
            index=j,
            chunks=chunks,
            rows=torch.tensor(rows, dtype=torch.int64).to(device),
            sink=given.sink,
            plan=replace(plan, key=j),
            n_tokens=n_tokens,
        )

    def _cut(self, sequences: Sequence[SequenceInput]) -> Iterator[list[_Piece]]:
        """Cut a batch's tokens into chunks of at most chunk_tokens, prompts at multiples of SEGMENT_TOKENS."""
        chunk: list[_Piece] = []
        room = self.chunk_tokens
        for s in sequences:
            first, start = 0, s.sequence.length
            while first < len(s.token_ids):
                n = len(s.token_ids) - first
                if not s.decode:
                    n = min(n, SEGMENT_TOKENS - (start + first) % SEGMENT_TOKENS)
                if n > room:
                    yield chunk
                    chunk, room = [], self.chunk_tokens
                chunk.append(_Piece(s, first, start + first, n))
                first += n
                room -= n
        if chunk:
            yield chunk

    # -- computing -------------------------------------------------------------------------------------

    def _compute(self, op: Op, batch: _Batch, tokens: int) -> None:
        unit = self._units[op.unit]
        weights = self.weights.weights(op.unit, op.slot, tokens)
        if unit.rows_only:
            self._compute_rows(op.unit, weights, batch)
            return
        hidden = self.hidden.enter(batch.index, op.hidden_slot, batch.n_tokens)
        layer = self._layer_of_unit.get(op.unit)
        view = self.cache.layer(layer, batch.index, op.cache_slot, op.out_slot) if layer is not None else None
        for chunk in batch.chunks:
            chunk.layer_cache = view
            part = hidden[chunk.begin : chunk.end]
            made = unit.forward(weights, part, chunk)
            if made is not part:
                part.copy_(made)
            chunk.layer_cache = None
        self._leave(op.unit, batch, hidden)

    def _leave(self, index: int, batch: _Batch, hidden: Tensor) -> None:
        """After the last layer only the rows that need logits live on; a ring slot may be reused at once."""
        if self._units[index + 1].rows_only:
            batch.selected = hidden[batch.rows]

    def _compute_rows(self, index: int, weights: Any, batch: _Batch) -> None:
        assert batch.selected is not None
        unit, n_rows = self._units[index], batch.selected.shape[0]
        for first in range(0, n_rows, self.row_chunk):
            rows = batch.selected[first : first + self.row_chunk]
            made = unit.forward(weights, rows, _Rows(first, batch.sink, self.compute_dtype))
            if index + 1 < len(self._units) and made.shape == rows.shape:
                rows.copy_(made)
            elif made.shape[0] and index + 1 < len(self._units):
                batch.resized.append(made)
        if batch.resized:
            batch.selected, batch.resized = torch.cat(batch.resized), []

    def _project(self, op: Op, batch: _Batch, tokens: int) -> None:
        unit = self._units[op.unit]
        assert isinstance(unit, AttentionUnit)
        weights = self.weights.weights(op.unit, op.slot, tokens)
        hidden = self.hidden.enter(batch.index, op.hidden_slot, batch.n_tokens)
        batch.projected = []
        for chunk in batch.chunks:
            q, k, v, carry = unit.project(weights, hidden[chunk.begin : chunk.end], chunk)
            item = _Projected(q, k, v, carry, torch.empty_like(q, memory_format=torch.contiguous_format))
            # Segments that begin their sequence need no stored page: the device attends them itself.
            attend_first_segments(chunk.attention, q, k, v, unit.attention, item.out)
            batch.projected.append(item)

    def _move_projected(self, batch: _Batch) -> int:
        moved = 0
        for item in batch.projected:
            # Copies to pageable memory wait for the stream; a CPU thread uses the result next.
            item.moved = (item.query.cpu(), item.key.cpu(), item.value.cpu())
            moved += sum(t.nbytes for t in item.moved)
        return moved

    def _attend_on_cpu(self, op: Op, batch: _Batch) -> None:
        unit = self._units[op.unit]
        assert isinstance(unit, AttentionUnit)
        layer = self._layer_of_unit[op.unit]
        view = self.cache.cpu_layer(layer, batch.index, op.cache_slot, op.out_slot)
        for chunk, item in zip(batch.chunks, batch.projected, strict=True):
            q, k, v = item.moved or (item.query, item.key, item.value)
            view.append(chunk.attention, k, v)
            # In place where the device is the CPU itself: the rows of `out` that nobody else touches.
            item.attended = torch.empty_like(q) if item.out.device != q.device else item.out
            view.attend_stored(chunk.attention, q, k, v, unit.attention, item.attended)
            item.moved = None

    def _move_attended(self, batch: _Batch) -> int:
        moved = 0
        for item in batch.projected:
            assert item.attended is not None
            moved += item.attended.nbytes
            if item.attended is not item.out:
                # Into the queries' memory, which nobody needs any more: memory taken on this lane's stream
                # could be given away while the compute stream still reads it.
                item.query.copy_(item.attended, non_blocking=True)
        return moved

    def _finish(self, op: Op, batch: _Batch, tokens: int) -> None:
        unit = self._units[op.unit]
        assert isinstance(unit, AttentionUnit)
        weights = self.weights.weights(op.unit, op.slot, tokens)
        hidden = self.hidden.enter(batch.index, op.hidden_slot, batch.n_tokens)
        for chunk, item in zip(batch.chunks, batch.projected, strict=True):
            if item.attended is not item.out:
                rows = chunk.attention.on(item.out.device).stored_tokens
                item.out[rows] = item.query[rows]
            part = hidden[chunk.begin : chunk.end]
            made = unit.finish(weights, part, item.out, item.carry, chunk)
            if made is not part:
                part.copy_(made)
        batch.projected = []
        self._leave(op.unit, batch, hidden)


def _cache_layers(units: Sequence[Unit]) -> dict[int, int]:
    """Unit index -> number of its cache, counted over the units that have one."""
    found: dict[int, int] = {}
    for index, unit in enumerate(units):
        if isinstance(unit, AttentionUnit):
            found[index] = len(found)
    return found
