"""The one statement of the order of work: a pure generator of operations for passes over a block.

Zig-zag order (FlexGen, section 3.2): all gpu batches of a unit before the next unit, so that one read of
the weights serves the whole block. The executor runs these operations, the simulator times them; neither
adds a dependency of its own.

Each operation names its lane (a resource that works on its own and takes operations up in submission order),
the ring slot it fills or uses, and the ids of the earlier operations that it waits for. A slot is filled only
after the last operation that used its former content; that operation is always among `waits`, so no buffer is
overwritten too early, whatever the lanes' speeds.

Prefetch: the load of a streamed unit is emitted as soon as the ring slot it needs has been released by an
operation already emitted, so the slowest lane is never idle while there is room in the rings. A unit's
weights are read and uploaded in as many pieces as the pass has gpu batches when cache or hidden states
travel too, one piece per step: what a batch needs then queues behind one piece, never behind a whole unit.
Weights run on across passes: the first units of the next pass are loaded while this one ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from policy.tiers import Tier


class Lane(StrEnum):
    """Resources that work at the same time."""

    DISK_READ = "disk_read"
    DISK_WRITE = "disk_write"
    UPLOAD = "upload"
    DOWNLOAD = "download"
    COMPUTE = "compute"
    CPU_ATTENTION = "cpu_attention"


class OpKind(StrEnum):
    READ_WEIGHTS = "read_weights"  # disk -> weights_staging (three tiers) or weights ring (two tiers)
    UPLOAD_WEIGHTS = "upload_weights"  # cpu home or weights_staging -> weights ring
    READ_CACHE = "read_cache"  # disk pages of (unit, batch) -> cache_staging or cache ring
    UPLOAD_CACHE = "upload_cache"  # cpu pages, staged pages and cpu tails -> cache ring
    READ_HIDDEN = "read_hidden"
    UPLOAD_HIDDEN = "upload_hidden"
    COMPUTE = "compute"
    PROJECT = "project"  # CPU attention: queries, keys and values on the device ...
    DOWNLOAD_QKV = "download_qkv"
    CPU_ATTENTION = "cpu_attention"  # ... attention where the pages are ...
    UPLOAD_ATTENDED = "upload_attended"
    FINISH = "finish"  # ... output projection on the device
    DOWNLOAD_CACHE = "download_cache"  # new K and V, full pages already packed -> cpu
    WRITE_CACHE = "write_cache"  # full pages whose home is disk
    DOWNLOAD_HIDDEN = "download_hidden"
    WRITE_HIDDEN = "write_hidden"


LANE_OF: dict[OpKind, Lane] = {
    OpKind.READ_WEIGHTS: Lane.DISK_READ,
    OpKind.READ_CACHE: Lane.DISK_READ,
    OpKind.READ_HIDDEN: Lane.DISK_READ,
    OpKind.UPLOAD_WEIGHTS: Lane.UPLOAD,
    OpKind.UPLOAD_CACHE: Lane.UPLOAD,
    OpKind.UPLOAD_HIDDEN: Lane.UPLOAD,
    OpKind.UPLOAD_ATTENDED: Lane.UPLOAD,
    OpKind.COMPUTE: Lane.COMPUTE,
    OpKind.PROJECT: Lane.COMPUTE,
    OpKind.FINISH: Lane.COMPUTE,
    OpKind.CPU_ATTENTION: Lane.CPU_ATTENTION,
    OpKind.DOWNLOAD_QKV: Lane.DOWNLOAD,
    OpKind.DOWNLOAD_CACHE: Lane.DOWNLOAD,
    OpKind.DOWNLOAD_HIDDEN: Lane.DOWNLOAD,
    OpKind.WRITE_CACHE: Lane.DISK_WRITE,
    OpKind.WRITE_HIDDEN: Lane.DISK_WRITE,
}


@dataclass(frozen=True, slots=True)
class Op:
    """One operation. slot: index in the ring the operation fills (loads) or reads (computes), -1 if none.

    cache_slot, hidden_slot: ring slots holding the batch's KV pages and hidden states, out_slot: the one that
    takes new KV pages which leave the device; -1 if none.
    staging_slot: the cpu staging slot that an upload or CPU attention reads, -1 if none.
    piece of n_pieces: which equal share of the unit's bytes a READ_WEIGHTS or UPLOAD_WEIGHTS moves.
    """

    id: int
    kind: OpKind
    lane: Lane
    unit: int
    batch: int
    slot: int
    waits: tuple[int, ...]
    pass_index: int
    staging_slot: int = -1
    cache_slot: int = -1
    out_slot: int = -1
    hidden_slot: int = -1
    piece: int = 0
    n_pieces: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPlan:
    """What the schedule must know of a unit: its home, and whether it has a KV cache.

    local: the unit is computed on the device before or after hidden states exist there as a whole
    (embedding, final norm, head slices): it neither loads nor stores hidden states from their home.
    """

    home: Tier
    has_cache: bool = False
    loads_hidden: bool = True
    stores_hidden: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """What one gpu batch brings to one pass.

    key: which of the block's gpu batches it is, where some have nothing to do in a pass; -1: its position in
    the pass. What an earlier pass stored for it is waited for by this key.
    reads_disk: some of its filled pages are on disk; reads_cpu: with three tiers, some pages or its tails
    are in cpu memory; stores_cpu: with three tiers, it has new K/V whose home is cpu or disk;
    writes_disk: it fills pages whose home is disk; hidden_home: where its hidden states rest between units.
    """

    key: int = -1
    reads_disk: bool = False
    reads_cpu: bool = False
    stores_cpu: bool = False
    writes_disk: bool = False
    cpu_attention: bool = False
    hidden_home: Tier = Tier.CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Depths:
    """Slots per ring. Two is double buffering; more lets a lane run further ahead."""

    weights: int = 2
    weights_staging: int = 2
    cache: int = 2
    cache_staging: int = 2
    cache_out: int = 2
    hidden: int = 3

    def __post_init__(self) -> None:
        for name in self.__slots__:
            # Hidden states: one slot computing, one loading, one held by a deferred output projection.
            least = 3 if name == "hidden" else 1
            if getattr(self, name) < least:
                raise ValueError(f"ring depth {name} must be at least {least}, got {getattr(self, name)}")


class _Ring:
    """Hands out slots in turn and remembers which operations last used each one."""

    def __init__(self, depth: int) -> None:
        self._users: list[tuple[int, ...]] = [() for _ in range(depth)]
        self._held: set[int] = set()
        self._next = 0

    def take(self, *, hold: bool = False) -> tuple[int, tuple[int, ...]]:
        """The next slot and the operations that must finish before it is filled.

        hold: its last use is not yet emitted; the slot is passed over until `used` names that use.
        """
        slot = self._next
        while slot in self._held:
            slot = (slot + 1) % len(self._users)
            assert slot != self._next, "every slot of the ring is held"
        self._next = (slot + 1) % len(self._users)
        if hold:
            self._held.add(slot)
        return slot, self._users[slot]

    def users(self, slot: int) -> tuple[int, ...]:
        return self._users[slot]

    def used(self, slot: int, *ids: int) -> None:
        self._held.discard(slot)
        self._users[slot] = ids


@dataclass(slots=True)
class _WeightLoad:
    """A streamed unit on its way: pieces not yet emitted, and what its first compute will wait for."""

    unit: int
    slot: int
    slot_waits: tuple[int, ...]
    staging_slot: int
    staging_waits: tuple[int, ...] = ()
    n_pieces: int = 1
    next_piece: int = 0
    moves: tuple[int, ...] = ()
    ready: tuple[int, ...] = ()


class ZigZag:
    """Generates the operations of successive passes; ids, rings and prefetch run on from pass to pass.

    first_tier is the tier the compute device works on: Tier.GPU with three tiers, Tier.CPU with two.
    whole_units: never move weights in pieces (as FlexGen).
    """

    def __init__(
        self,
        units: Sequence[UnitPlan],
        *,
        first_tier: Tier,
        depths: Depths | None = None,
        overlap: bool = True,
        whole_units: bool = False,
    ) -> None:
        if first_tier is Tier.DISK:
            raise ValueError("the first tier must be gpu or cpu, got disk")
        for index, unit in enumerate(units):
            if unit.home < first_tier:
                raise ValueError(f"unit {index} is at home on {unit.home.label}, which this device lacks")
        self.units = tuple(units)
        self.first_tier = first_tier
        self.overlap = overlap
        self._pieces = overlap and not whole_units
        depths = depths or Depths()
        self._streamed = [i for i, unit in enumerate(self.units) if unit.home > first_tier]
        # More slots than streamed units would only hold the same unit twice.
        n_slots = max(1, min(depths.weights, len(self._streamed)))
        n_disk = sum(unit.home is Tier.DISK for unit in self.units)
        self._weights = _Ring(n_slots)
        self._staging = _Ring(max(1, min(depths.weights_staging, n_disk)))
        self._cache = _Ring(depths.cache)
        self._cache_staging = _Ring(depths.cache_staging)
        self._cache_out = _Ring(depths.cache_out)
        self._hidden = _Ring(depths.hidden)
        # A staging slot read by CPU attention stays in use as long as a cache slot, so both bound the loads.
        staged = depths.cache_staging if first_tier is Tier.GPU else depths.cache
        self._cache_ahead = min(depths.cache, staged)
        self._free_weight_slots = n_slots
        self._coming: deque[_WeightLoad] = deque()
        self._next_streamed = 0  # position in the endless cycle of streamed units
        self._next_id = 0
        self._last_id = -1
        self._pass_index = -1
        self._computes: list[int] = []
        self._unfinished: deque[tuple[int, int, int, Op]] = deque()
        # (unit, batch) -> its last store on each lane: a pass that stores nothing must not hide an earlier one.
        self._cache_stores: dict[tuple[int, int], dict[Lane, int]] = {}
        self._last_hidden_store: dict[int, tuple[int, ...]] = {}

    # -- emission ------------------------------------------------------------------------------------

    def _op(self, kind: OpKind, unit: int, batch: int, slot: int, waits: Iterable[int], **more: int) -> Op:
        wanted = set(waits)
        if not self.overlap and self._last_id >= 0:
            wanted.add(self._last_id)
        op = Op(
            self._next_id,
            kind,
            LANE_OF[kind],
            unit,
            batch,
            slot,
            tuple(sorted(wanted)),
            self._pass_index,
            **more,
        )
        self._last_id = op.id
        self._next_id += 1
        return op

    def _start_loads(self) -> None:
        """Assign free weight slots to the next streamed units of the endless cycle."""
        while self._streamed and self._free_weight_slots:
            unit = self._streamed[self._next_streamed % len(self._streamed)]
            self._next_streamed += 1
            self._free_weight_slots -= 1
            slot, waits = self._weights.take()
            staging_slot = -1
            if self.first_tier is Tier.GPU and self.units[unit].home is Tier.DISK:
                staging_slot = self._staging.take()[0]
            self._coming.append(_WeightLoad(unit, slot, waits, staging_slot))

    def _emit_piece(self, load: _WeightLoad, n_pieces: int) -> Iterator[Op]:
        """Emit the next piece of a unit's load: its read, its upload, or both; the last makes the unit ready.

        Piece k is the same bytes of the unit for both, so the upload of a piece waits for the read of that
        piece alone, and reads go on into the staging slot while what has arrived is on its way up: they
        touch other bytes. No slot is reused early: every piece of a load waits for all uses of what the slot
        held: a ring slot for all computations of its former unit, a staging slot for all uploads of its former
        unit. That those are known is owed to the order of emission: loads advance one after the other, so the
        former unit's last upload is emitted before the next unit's first read. Computations wait for all
        pieces, so a piece that failed stops them.
        """
        if load.next_piece == 0:
            load.n_pieces = n_pieces  # a load that runs on into the next pass keeps its own count
        share = {"piece": load.next_piece, "n_pieces": load.n_pieces}
        read: tuple[int, ...] = ()
        if self.units[load.unit].home is Tier.DISK:
            staged = load.staging_slot >= 0
            op = self._op(
                OpKind.READ_WEIGHTS,
                load.unit,
                -1,
                load.staging_slot if staged else load.slot,
                load.staging_waits if staged else load.slot_waits,
                **share,
            )
            yield op
            read = (op.id,)
        if self.first_tier is Tier.GPU:
            op = self._op(
                OpKind.UPLOAD_WEIGHTS,
                load.unit,
                -1,
                load.slot,
                (*load.slot_waits, *read),
                staging_slot=load.staging_slot,
                **share,
            )
            yield op
        load.moves += (op.id,)
        load.next_piece += 1
        if load.next_piece < load.n_pieces:
            return
        load.ready = load.moves
        if load.staging_slot >= 0:
            self._staging.used(load.staging_slot, *load.moves)

    def _advance_loads(self, n_pieces: int, *, until: int | None = None) -> Iterator[Op]:
        """Emit one piece of the first unfinished load, or all pieces up to the load of unit `until`."""
        for load in self._coming:
            while not load.ready:
                # Another load may share the staging slot; its users are known only once it was emitted.
                if load.staging_slot >= 0 and load.next_piece == 0:
                    load.staging_waits = self._staging.users(load.staging_slot)
                yield from self._emit_piece(load, n_pieces)
                if until is None:
                    return
            if load.unit == until:
                return

    # -- one pass ------------------------------------------------------------------------------------

    def pass_ops(self, batches: Sequence[BatchPlan], *, last: bool = False) -> Iterator[Op]:
        """Operations of one pass over `batches`. With last=True nothing is prefetched for a further pass.

        The iterator must be exhausted before the next pass is asked for.
        """
        self._pass_index += 1
        n_batches = len(batches)
        steps = [(u, j) for u in range(len(self.units)) for j in range(n_batches)]
        cache_steps = [(u, j) for u, j in steps if self.units[u].has_cache and self._loads_cache(batches[j])]
        hidden_steps = [
            (u, j) for u, j in steps if self.units[u].loads_hidden and self._moves_hidden(batches, j)
        ]
        shared = bool(cache_steps or hidden_steps)
        # An upload of what the CPU attended to holds the lane until then: weights must not queue behind it.
        n_attending = sum(batch.cpu_attention for batch in batches)
        mixed = self.first_tier is Tier.GPU and 0 < n_attending < n_batches
        n_pieces = n_batches if shared and self._pieces and not mixed else 1
        streamed_left = len(self._streamed)
        cache_ready: dict[tuple[int, int], Op] = {}
        hidden_ready: dict[tuple[int, int], Op] = {}
        cache_queue, hidden_queue = deque(cache_steps), deque(hidden_steps)
        unit_load: _WeightLoad | None = None

        self._start_loads()
        for _ in range(self._cache_ahead):
            yield from self._next_cache_load(cache_queue, batches, cache_ready)
        for u, j in steps:
            unit = self.units[u]
            if j == 0:
                self._computes = []
                unit_load = None
                if unit.home > self.first_tier:
                    yield from self._advance_loads(n_pieces, until=u)
                    unit_load = self._coming.popleft()
                    streamed_left -= 1
            if self._coming:
                yield from self._advance_loads(n_pieces)
            if not shared:
                # Nothing else uses the loading lanes: all loads that have a slot may be queued at once.
                for _ in range(len(self._coming)):
                    yield from self._advance_loads(1)
            # Hidden states of the steps just ahead; a state is stored one unit before it is loaded again.
            while hidden_queue and self._is_near(hidden_queue[0], (u, j), n_batches):
                yield from self._hidden_load(hidden_queue.popleft(), batches, hidden_ready)
            waits: list[int] = list(unit_load.ready) if unit_load else []
            slot = unit_load.slot if unit_load else -1
            cache_op = cache_ready.pop((u, j), None)
            hidden_op = hidden_ready.pop((u, j), None)
            yield from self._compute(u, j, batches, slot, waits, cache_op, hidden_op)
            last_batch = j == n_batches - 1
            yield from self._finish(u, batches, keep=0 if last_batch else 1)
            if cache_op is not None:
                yield from self._next_cache_load(cache_queue, batches, cache_ready)
            if last_batch and unit_load is not None:
                self._weights.used(unit_load.slot, *self._computes)
                self._free_weight_slots += 1
                if not last or streamed_left > len(self._coming):
                    self._start_loads()

    def _loads_cache(self, batch: BatchPlan) -> bool:
        return batch.reads_disk or (
            self.first_tier is Tier.GPU and batch.reads_cpu and not batch.cpu_attention
        )

    def _moves_hidden(self, batches: Sequence[BatchPlan], j: int) -> bool:
        # A lone gpu batch never leaves the device: nothing else needs the memory in between.
        return len(batches) > 1 and batches[j].hidden_home > self.first_tier

    def _is_near(self, step: tuple[int, int], now: tuple[int, int], n_batches: int) -> bool:
        """Whether `step` is at most one step ahead of `now` and its hidden states have been stored."""
        ahead = (step[0] - now[0]) * n_batches + step[1] - now[1]
        return ahead <= 0 or (ahead == 1 and all(step[1] != j for j, *_ in self._unfinished))

    def _next_cache_load(
        self, queue: deque[tuple[int, int]], batches: Sequence[BatchPlan], ready: dict[tuple[int, int], Op]
    ) -> Iterator[Op]:
        if not queue:
            return
        u, j = queue.popleft()
        batch = batches[j]
        stored = self._cache_stores.get((u, _key(batches, j)), {}).values()
        three = self.first_tier is Tier.GPU
        staging_slot, op = -1, None
        if batch.reads_disk:
            ring = self._cache_staging if three else self._cache
            slot, waits = ring.take()
            op = self._op(OpKind.READ_CACHE, u, j, slot, (*waits, *stored))
            yield op
            staging_slot = slot if three else -1
            if three:
                self._cache_staging.used(slot, op.id)
        if three and not batch.cpu_attention:
            slot, waits = self._cache.take()
            op = self._op(
                OpKind.UPLOAD_CACHE,
                u,
                j,
                slot,
                (*waits, *stored, *((op.id,) if op else ())),
                staging_slot=staging_slot,
            )
            yield op
            if staging_slot >= 0:
                self._cache_staging.used(staging_slot, op.id)
        assert op is not None
        ready[u, j] = op

    def _hidden_load(
        self, step: tuple[int, int], batches: Sequence[BatchPlan], ready: dict[tuple[int, int], Op]
    ) -> Iterator[Op]:
        u, j = step
        slot, waits = self._hidden.take(hold=True)
        stored = self._last_hidden_store.get(_key(batches, j), ())
        before: tuple[int, ...] = ()
        if batches[j].hidden_home is Tier.DISK:
            read = self._op(OpKind.READ_HIDDEN, u, j, slot, (*waits, *stored))
            yield read
            before = (read.id,)
            ready[step] = read
        if self.first_tier is Tier.GPU:
            upload = self._op(OpKind.UPLOAD_HIDDEN, u, j, slot, (*waits, *stored, *before))
            yield upload
            ready[step] = upload

    def _compute(
        self,
        u: int,
        j: int,
        batches: Sequence[BatchPlan],
        slot: int,
        waits: Sequence[int],
        cache_op: Op | None,
        hidden_op: Op | None,
    ) -> Iterator[Op]:
        """The computation of one (unit, batch) and the stores behind it.

        A CPU-attention batch is projected here and left in self._unfinished: its output projection is
        emitted one step later, so that the device has other work while the CPU attends.
        """
        unit, batch = self.units[u], batches[j]
        three = self.first_tier is Tier.GPU
        cache_slot = cache_op.slot if cache_op else -1
        cache_waits = (cache_op.id,) if cache_op else ()
        stores_hidden = unit.stores_hidden and self._moves_hidden(batches, j)
        hidden_slot = -1
        hidden_waits: tuple[int, ...] = ()
        if hidden_op is not None:
            hidden_slot, hidden_waits = hidden_op.slot, (hidden_op.id,)
        elif stores_hidden:
            hidden_slot, hidden_waits = self._hidden.take(hold=True)
        # New pages that leave the device wait in a ring: slow stores hold the compute back, not memory.
        out_slot = -1
        out_waits: tuple[int, ...] = ()
        if unit.has_cache and (batch.writes_disk or (three and batch.stores_cpu)):
            out_slot, out_waits = self._cache_out.take()
        if unit.has_cache and batch.cpu_attention:
            op = self._op(OpKind.PROJECT, u, j, slot, (*waits, *hidden_waits), hidden_slot=hidden_slot)
            yield op
            if three:
                op = self._op(OpKind.DOWNLOAD_QKV, u, j, -1, (op.id,))
                yield op
            # Pages of a CPU-attention batch are appended in cpu memory by the attention itself; those that an
            # earlier pass made on the device must have arrived.
            op = self._op(
                OpKind.CPU_ATTENTION,
                u,
                j,
                -1,
                (
                    op.id,
                    *cache_waits,
                    *out_waits,
                    *self._cache_stores.get((u, _key(batches, j)), {}).values(),
                ),
                cache_slot=cache_slot,
                out_slot=out_slot,
            )
            yield op
            if cache_op is not None:
                (self._cache_staging if three else self._cache).used(cache_slot, op.id)
            yield from self._store_cache(u, j, batches, op, out_slot)
            if three:
                op = self._op(OpKind.UPLOAD_ATTENDED, u, j, -1, (op.id,))
                yield op
            self._unfinished.append((j, slot, hidden_slot, op))
            return
        op = self._op(
            OpKind.COMPUTE,
            u,
            j,
            slot,
            (*waits, *cache_waits, *hidden_waits, *out_waits),
            cache_slot=cache_slot,
            out_slot=out_slot,
            hidden_slot=hidden_slot,
        )
        yield op
        if cache_op is not None:
            self._cache.used(cache_slot, op.id)
        yield from self._computed(u, j, batches, op, hidden_slot)
        if unit.has_cache:
            yield from self._store_cache(u, j, batches, op, out_slot)

    def _finish(self, u: int, batches: Sequence[BatchPlan], keep: int) -> Iterator[Op]:
        """Emit the deferred output projections of CPU-attention batches, all but the last `keep`."""
        while len(self._unfinished) > keep:
            j, slot, hidden_slot, attended = self._unfinished.popleft()
            op = self._op(OpKind.FINISH, u, j, slot, (attended.id,), hidden_slot=hidden_slot)
            yield op
            yield from self._computed(u, j, batches, op, hidden_slot)

    def _computed(
        self, u: int, j: int, batches: Sequence[BatchPlan], op: Op, hidden_slot: int
    ) -> Iterator[Op]:
        """Store the hidden states that `op` left on the device, if their home is elsewhere."""
        self._computes.append(op.id)
        if self.units[u].stores_hidden and self._moves_hidden(batches, j):
            if self.first_tier is Tier.GPU:
                op = self._op(OpKind.DOWNLOAD_HIDDEN, u, j, -1, (op.id,), hidden_slot=hidden_slot)
                yield op
            if batches[j].hidden_home is Tier.DISK:
                op = self._op(OpKind.WRITE_HIDDEN, u, j, -1, (op.id,), hidden_slot=hidden_slot)
                yield op
            self._last_hidden_store[_key(batches, j)] = (op.id,)
        if hidden_slot >= 0:
            self._hidden.used(hidden_slot, op.id)

    def _store_cache(
        self, u: int, j: int, batches: Sequence[BatchPlan], op: Op, out_slot: int
    ) -> Iterator[Op]:
        """Move new K and V from the device, or from CPU attention, to their homes."""
        batch = batches[j]
        stores = self._cache_stores.setdefault((u, _key(batches, j)), {})
        if op.kind is OpKind.CPU_ATTENTION:  # appends to the pages in cpu memory
            stores[op.lane] = op.id
        if self.first_tier is Tier.GPU and batch.stores_cpu and not batch.cpu_attention:
            op = self._op(OpKind.DOWNLOAD_CACHE, u, j, -1, (op.id,), out_slot=out_slot)
            yield op
            stores[op.lane] = op.id
        if batch.writes_disk:
            op = self._op(OpKind.WRITE_CACHE, u, j, -1, (op.id,), out_slot=out_slot)
            yield op
            stores[op.lane] = op.id
        if out_slot >= 0:
            self._cache_out.used(out_slot, op.id)


def _key(batches: Sequence[BatchPlan], j: int) -> int:
    return batches[j].key if batches[j].key >= 0 else j


def schedule(
    units: Sequence[UnitPlan],
    passes: Sequence[Sequence[BatchPlan]],
    *,
    first_tier: Tier,
    depths: Depths | None = None,
    overlap: bool = True,
) -> Iterator[Op]:
    """Operations of a whole run of passes, in submission order."""
    zigzag = ZigZag(units, first_tier=first_tier, depths=depths, overlap=overlap)
    for batches, following in pairwise([*passes, None]):
        if batches is not None:
            yield from zigzag.pass_ops(batches, last=following is None)
