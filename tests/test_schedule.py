"""The schedule's promises, checked on every small combination of homes, batches, depths and overlap."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy.schedule import LANE_OF, BatchPlan, Depths, Lane, Op, OpKind, UnitPlan, ZigZag, schedule
from policy.tiers import Tier

STEP_KINDS = {OpKind.COMPUTE, OpKind.FINISH}
Passes = Sequence[Sequence[BatchPlan]]


def happens_before(ops: Sequence[Op]) -> list[int]:
    """For each operation a bit set of those that are over when it starts: its waits, and its lane's order.

    Disk reads run two at a time: there the order proves nothing.
    """
    before: list[int] = []
    last_in_lane: dict[Lane, int] = {}
    for op in ops:
        bits = 0
        previous = last_in_lane.get(op.lane)
        for other in (*op.waits, *(() if previous is None else (previous,))):
            bits |= before[other] | (1 << other)
        before.append(bits)
        if op.lane is not Lane.DISK_READ:
            last_in_lane[op.lane] = op.id
    return before


class Ring:
    """Fills and uses of one ring, in order; `check` proves that no slot is overwritten or read too early.

    part: which share of the content a fill writes or a use reads, None: all of it.
    """

    def __init__(self, name: str, depth: int) -> None:
        self.name, self.depth = name, depth
        # slot -> list of (content, fills, uses), each by operation with its part
        self.history: dict[int, list[tuple[object, dict[int, object], dict[int, object]]]] = defaultdict(list)

    def fill(self, slot: int, content: object, op: Op, part: object = None) -> None:
        assert 0 <= slot < self.depth, f"{self.name}: slot {slot} of {self.depth}"
        history = self.history[slot]
        if not history or history[-1][0] != content:
            history.append((content, {}, {}))
        history[-1][1][op.id] = part

    def use(self, slot: int, content: object, op: Op, part: object = None) -> None:
        history = self.history[slot]
        assert history and history[-1][0] == content, f"{self.name}: op {op} finds {history[-1:]}"
        history[-1][2][op.id] = part

    def check(self, before: Sequence[int]) -> None:
        for history in self.history.values():
            for index, (content, fills, uses) in enumerate(history):
                assert uses, f"{self.name}: {content} was loaded but never used"
                for use, part in uses.items():
                    needed = [f for f, p in fills.items() if part is None or p is None or p == part]
                    assert needed, (self.name, content, part)
                    assert all(before[use] >> f & 1 for f in needed if f != use), (self.name, content, part)
                if index:
                    for use in (*history[index - 1][2], *history[index - 1][1]):
                        assert all(before[f] >> use & 1 for f in fills if f != use), (self.name, content)


def check_schedule(
    units: Sequence[UnitPlan], passes: Passes, first_tier: Tier, depths: Depths, overlap: bool
) -> list[Op]:
    ops = list(schedule(units, passes, first_tier=first_tier, depths=depths, overlap=overlap))
    three = first_tier is Tier.GPU
    assert [op.id for op in ops] == list(range(len(ops)))
    for op in ops:
        assert all(w < op.id for w in op.waits), op
        assert op.lane is LANE_OF[op.kind]
        assert overlap or op.id == 0 or op.id - 1 in op.waits
    before = happens_before(ops)
    weights, staging = Ring("weights", depths.weights), Ring("weights_staging", depths.weights_staging)
    cache, cache_staging = Ring("cache", depths.cache), Ring("cache_staging", depths.cache_staging)
    hidden, hidden_staging = Ring("hidden", depths.hidden), Ring("hidden_staging", depths.hidden)
    out = Ring("cache_out", depths.cache_out)
    loads: dict[int, int] = defaultdict(int)  # unit -> how many times it was loaded
    read_pieces: dict[int, list[tuple[int, int]]] = defaultdict(list)
    pieces: dict[int, list[tuple[int, int]]] = defaultdict(list)
    computed: dict[tuple[int, int, int], int] = {}
    projected: list[int] = []
    finished: list[int] = []
    last_store: dict[tuple[int, int], int] = {}
    hidden_store: dict[int, int] = {}
    stores: dict[tuple[OpKind, int, int, int], int] = defaultdict(int)
    loaded_cache: set[tuple[int, int, int]] = set()
    # Weights may be loaded a pass early, so their content is (unit, how often it was loaded before).
    passes_of_unit: dict[int, int] = defaultdict(int)
    for op in ops:
        step = (op.pass_index, op.unit, op.batch)
        batch = passes[op.pass_index][op.batch] if op.batch >= 0 else None
        content: object = step
        if op.kind is OpKind.READ_WEIGHTS:
            assert units[op.unit].home is Tier.DISK
            (staging if three else weights).fill(op.slot, (op.unit, loads[op.unit]), op, op.piece)
            (read_pieces if three else pieces)[op.unit].append((op.piece, op.n_pieces))
        elif op.kind is OpKind.UPLOAD_WEIGHTS:
            assert three and units[op.unit].home > Tier.GPU
            assert (op.staging_slot >= 0) == (units[op.unit].home is Tier.DISK)
            pieces[op.unit].append((op.piece, op.n_pieces))
            if op.staging_slot >= 0:
                # The same bytes, read before; no other read has to be over.
                assert read_pieces[op.unit][op.piece] == (op.piece, op.n_pieces)
                staging.use(op.staging_slot, (op.unit, loads[op.unit]), op, op.piece)
            weights.fill(op.slot, (op.unit, loads[op.unit]), op, op.piece)
        elif op.kind in (OpKind.READ_CACHE, OpKind.UPLOAD_CACHE):
            assert batch is not None and units[op.unit].has_cache
            stored = last_store.get((op.unit, op.batch))
            assert stored is None or before[op.id] >> stored & 1, "pages are loaded before they were stored"
            loaded_cache.add(step)
            if op.kind is OpKind.READ_CACHE:
                assert batch.reads_disk
                (cache_staging if three else cache).fill(op.slot, step, op)
            else:
                assert three and not batch.cpu_attention
                if op.staging_slot >= 0:
                    cache_staging.use(op.staging_slot, step, op)
                cache.fill(op.slot, step, op)
        elif op.kind in (OpKind.READ_HIDDEN, OpKind.UPLOAD_HIDDEN):
            assert units[op.unit].loads_hidden
            assert before[op.id] >> hidden_store[op.batch] & 1, "hidden states are loaded before stored"
            if op.kind is OpKind.UPLOAD_HIDDEN:
                if batch is not None and batch.hidden_home is Tier.DISK:
                    hidden_staging.use(op.slot, ("load", step), op)
                hidden.fill(op.slot, step, op)
            elif three:
                hidden_staging.fill(op.slot, ("load", step), op)
            else:
                hidden.fill(op.slot, step, op)
        elif op.kind in (OpKind.COMPUTE, OpKind.PROJECT, OpKind.FINISH):
            assert batch is not None
            unit = units[op.unit]
            if unit.home > first_tier:
                weights.use(op.slot, (op.unit, passes_of_unit[op.unit]), op)
            else:
                assert op.slot == -1
            if op.hidden_slot >= 0:
                # Without a load the computation itself is the first to write the slot.
                if op.kind is not OpKind.FINISH and hidden.history[op.hidden_slot]:
                    known = hidden.history[op.hidden_slot][-1][0] == step
                else:
                    known = op.kind is OpKind.FINISH
                if not known:
                    assert not (unit.loads_hidden and batch.hidden_home > first_tier)
                    hidden.fill(op.hidden_slot, step, op)
                hidden.use(op.hidden_slot, step, op)
            if op.cache_slot >= 0 and op.kind is OpKind.COMPUTE:
                cache.use(op.cache_slot, step, op)
            if op.kind is OpKind.COMPUTE and unit.has_cache:
                assert not batch.cpu_attention
                if batch.reads_disk or (three and batch.reads_cpu):
                    assert op.cache_slot >= 0
            if op.out_slot >= 0:
                out.fill(op.out_slot, step, op)
                out.use(op.out_slot, step, op)
            if op.kind is OpKind.PROJECT:
                assert unit.has_cache and batch.cpu_attention
                # Two sets of attention buffers serve in turn.
                if len(projected) >= 2:
                    assert before[op.id] >> finished[len(projected) - 2] & 1
                projected.append(op.id)
            if op.kind is OpKind.FINISH:
                finished.append(op.id)
            if op.kind in STEP_KINDS:
                assert step not in computed
                computed[step] = op.id
                if op.unit > 0:
                    assert before[op.id] >> computed[op.pass_index, op.unit - 1, op.batch] & 1
                n_batches = len(passes[op.pass_index])
                if all((op.pass_index, op.unit, j) in computed for j in range(n_batches)):
                    passes_of_unit[op.unit] += 1
        elif op.kind is OpKind.CPU_ATTENTION:
            assert batch is not None
            stored = last_store.get((op.unit, op.batch))
            assert stored is None or before[op.id] >> stored & 1, "pages are attended to before stored"
            assert before[op.id] >> projected[-1] & 1
            if op.cache_slot >= 0:
                (cache_staging if three else cache).use(op.cache_slot, step, op)
            else:
                assert not batch.reads_disk
            if op.out_slot >= 0:
                out.fill(op.out_slot, step, op)
                out.use(op.out_slot, step, op)
            last_store[op.unit, op.batch] = op.id
        if (
            op.kind is (OpKind.UPLOAD_WEIGHTS if three else OpKind.READ_WEIGHTS)
            and op.piece == op.n_pieces - 1
        ):
            whole = [(k, op.n_pieces) for k in range(op.n_pieces)]
            assert pieces.pop(op.unit) == whole
            assert read_pieces.pop(op.unit, whole) == whole
            loads[op.unit] += 1
        if op.kind in (OpKind.DOWNLOAD_CACHE, OpKind.WRITE_CACHE):
            out.use(op.out_slot, content, op)
            stores[op.kind, *step] += 1
            last_store[op.unit, op.batch] = op.id
        elif op.kind in (OpKind.DOWNLOAD_HIDDEN, OpKind.WRITE_HIDDEN):
            hidden.use(op.hidden_slot, step, op)
            if three and batch is not None and batch.hidden_home is Tier.DISK:
                target = ("store", step)
                if op.kind is OpKind.DOWNLOAD_HIDDEN:
                    hidden_staging.fill(op.hidden_slot, target, op)
                else:
                    hidden_staging.use(op.hidden_slot, target, op)
            stores[op.kind, *step] += 1
            hidden_store[op.batch] = op.id
    assert not pieces and not read_pieces, "a unit was not loaded to its end"
    for ring in (weights, staging, cache, cache_staging, hidden, hidden_staging, out):
        ring.check(before)
    for p, batches in enumerate(passes):
        for u, unit in enumerate(units):
            for j, plan in enumerate(batches):
                step = (p, u, j)
                assert step in computed
                moves = len(batches) > 1 and plan.hidden_home > first_tier and unit.stores_hidden
                expected = {
                    OpKind.DOWNLOAD_CACHE: unit.has_cache
                    and three
                    and plan.stores_cpu
                    and not plan.cpu_attention,
                    OpKind.WRITE_CACHE: unit.has_cache and plan.writes_disk,
                    OpKind.DOWNLOAD_HIDDEN: moves and three,
                    OpKind.WRITE_HIDDEN: moves and plan.hidden_home is Tier.DISK,
                }
                for kind, wanted in expected.items():
                    assert stores[kind, *step] == int(wanted), (kind, step)
    # Each pass reads every streamed unit once, and nothing is fetched for a pass that never comes.
    for u, unit in enumerate(units):
        assert loads[u] == (len(passes) if unit.home > first_tier else 0)
    order = [step for step, _ in sorted(computed.items(), key=lambda item: (item[0][:2], item[1]))]
    assert [s[:2] for s in order] == sorted(s[:2] for s in order)
    run_ahead(ops)
    return ops


def run_ahead(ops: Sequence[Op]) -> None:
    """FIFO lanes that start an operation as soon as its waits are over always come to the end."""
    lanes: dict[Lane, deque[Op]] = defaultdict(deque)
    for op in ops:
        lanes[op.lane].append(op)
    done: set[int] = set()
    while any(lanes.values()):
        ready = [lane for lane, queue in lanes.items() if queue and done.issuperset(queue[0].waits)]
        assert ready, "every lane waits for another"
        for lane in ready:
            done.add(lanes[lane].popleft().id)


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[UnitPlan], list[list[BatchPlan]], Tier, Depths, bool]:
    first_tier = draw(st.sampled_from([Tier.GPU, Tier.CPU]))
    three = first_tier is Tier.GPU
    tiers = [t for t in Tier if t >= first_tier]
    n_layers = draw(st.integers(1, 3))
    units = [UnitPlan(home=first_tier, loads_hidden=False)]
    for _ in range(n_layers):
        if draw(st.booleans()):
            units.append(UnitPlan(home=draw(st.sampled_from(tiers)), has_cache=True))
            units.append(UnitPlan(home=draw(st.sampled_from(tiers))))
        else:
            units.append(UnitPlan(home=draw(st.sampled_from(tiers)), has_cache=True))
    units.append(UnitPlan(home=first_tier, stores_hidden=False))
    for _ in range(draw(st.integers(1, 2))):
        units.append(UnitPlan(home=draw(st.sampled_from(tiers)), loads_hidden=False, stores_hidden=False))
    n_batches = draw(st.integers(1, 4))
    homes = [draw(st.sampled_from(tiers)) for _ in range(n_batches)]
    on_disk = [draw(st.booleans()) for _ in range(n_batches)]
    on_cpu = [three and draw(st.booleans()) for _ in range(n_batches)]
    attends = [draw(st.booleans()) for _ in range(n_batches)]
    device_prefill = draw(st.booleans())
    passes = []
    for p in range(draw(st.integers(1, 3))):
        batches = []
        for j in range(n_batches):
            batches.append(
                BatchPlan(
                    reads_disk=p > 0 and on_disk[j],
                    reads_cpu=p > 0 and on_cpu[j],
                    stores_cpu=on_cpu[j],
                    writes_disk=on_disk[j] and draw(st.booleans()),
                    cpu_attention=attends[j] and not (p == 0 and device_prefill),
                    hidden_home=homes[j],
                )
            )
        passes.append(batches)
    depths = Depths(
        weights=draw(st.integers(1, 4)),
        weights_staging=draw(st.integers(1, 3)),
        cache=draw(st.integers(1, 3)),
        cache_staging=draw(st.integers(1, 3)),
        cache_out=draw(st.integers(1, 3)),
        hidden=draw(st.integers(3, 4)),
    )
    return units, passes, first_tier, depths, draw(st.booleans())


@settings(max_examples=200, deadline=None)
@given(runs())
def test_every_promise_of_random_runs(
    run: tuple[list[UnitPlan], list[list[BatchPlan]], Tier, Depths, bool],
) -> None:
    check_schedule(*run)


@pytest.mark.parametrize("first_tier", [Tier.GPU, Tier.CPU])
@pytest.mark.parametrize("n_batches", [1, 2, 3, 4])
@pytest.mark.parametrize("overlap", [True, False])
def test_everything_streamed(first_tier: Tier, n_batches: int, overlap: bool) -> None:
    units = [
        UnitPlan(home=first_tier, loads_hidden=False),
        *[UnitPlan(home=Tier.DISK, has_cache=u % 2 == 0) for u in range(6)],
        UnitPlan(home=first_tier, stores_hidden=False),
        UnitPlan(home=Tier.DISK, loads_hidden=False, stores_hidden=False),
    ]
    first = BatchPlan(stores_cpu=True, writes_disk=True, hidden_home=Tier.DISK)
    later = BatchPlan(
        reads_disk=True, reads_cpu=True, stores_cpu=True, writes_disk=True, hidden_home=Tier.DISK
    )
    passes = [[first] * n_batches, *[[later] * n_batches] * 3]
    check_schedule(units, passes, first_tier, Depths(), overlap)


def test_cpu_attention_waits_for_what_the_device_stored() -> None:
    """Prompts that attended on the device leave pages behind which CPU attention must not miss."""
    units = [UnitPlan(home=Tier.GPU, has_cache=True)]
    passes = [[BatchPlan(stores_cpu=True)], [BatchPlan(stores_cpu=True, cpu_attention=True)]]
    ops = check_schedule(units, passes, Tier.GPU, Depths(), True)
    download = next(op for op in ops if op.kind is OpKind.DOWNLOAD_CACHE)
    attend = next(op for op in ops if op.kind is OpKind.CPU_ATTENTION)
    assert happens_before(ops)[attend.id] >> download.id & 1


def test_cpu_attention_overlaps_with_the_next_batch() -> None:
    """The output projection is emitted behind the next batch's projections, so the device is not idle."""
    units = [
        UnitPlan(home=Tier.GPU, loads_hidden=False),
        UnitPlan(home=Tier.GPU, has_cache=True),
        UnitPlan(home=Tier.GPU),
    ]
    passes = [[BatchPlan(stores_cpu=True, cpu_attention=True)] * 3]
    ops = check_schedule(units, passes, Tier.GPU, Depths(), True)
    kinds = [(op.kind, op.batch) for op in ops if op.kind in (OpKind.PROJECT, OpKind.FINISH)]
    assert kinds.index((OpKind.PROJECT, 1)) < kinds.index((OpKind.FINISH, 0))


def test_resident_model_is_pure_compute() -> None:
    units = [UnitPlan(home=Tier.CPU, has_cache=True)] * 3
    ops = check_schedule(units, [[BatchPlan()] * 2] * 2, Tier.CPU, Depths(), True)
    assert {op.kind for op in ops} == {OpKind.COMPUTE}
    assert [(op.unit, op.batch) for op in ops[:6]] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]


def test_weights_run_ahead_over_the_end_of_a_pass() -> None:
    units = [UnitPlan(home=Tier.CPU), *[UnitPlan(home=Tier.DISK)] * 3]
    ops = check_schedule(units, [[BatchPlan()]] * 2, Tier.CPU, Depths(), True)
    last_compute = max(op.id for op in ops if op.kind is OpKind.COMPUTE and op.pass_index == 0)
    early = [op for op in ops if op.kind is OpKind.READ_WEIGHTS and op.id < last_compute]
    assert len(early) > 3


def test_a_unit_is_read_in_pieces_when_the_lane_is_shared() -> None:
    units = [UnitPlan(home=Tier.DISK, has_cache=True)] * 3
    passes = [[BatchPlan(reads_disk=True, hidden_home=Tier.CPU)] * 4] * 2
    ops = check_schedule(units, passes, Tier.CPU, Depths(), True)
    assert any(op.n_pieces == 4 for op in ops if op.kind is OpKind.READ_WEIGHTS)


def test_units_move_whole_where_that_is_asked_for() -> None:
    units = [UnitPlan(home=Tier.DISK, has_cache=True) for _ in range(3)]
    batches = [BatchPlan(reads_cpu=True) for _ in range(4)]
    kinds = (OpKind.READ_WEIGHTS, OpKind.UPLOAD_WEIGHTS)
    for whole in (False, True):
        zigzag = ZigZag(units, first_tier=Tier.GPU, whole_units=whole)
        ops = [op for last in (False, True) for op in zigzag.pass_ops(batches, last=last)]
        pieces = {op.n_pieces for op in ops if op.kind in kinds}
        assert pieces == ({1} if whole else {4})


def loads_between(ops: Sequence[Op], kind: OpKind, lane: Lane) -> list[int]:
    """How many operations of `kind` a lane has in front of each other one, since the one before."""
    counts, n = [], 0
    for op in ops:
        if op.lane is lane and op.kind is kind:
            n += 1
        elif op.lane is lane:
            counts.append(n)
            n = 0
    return counts


@pytest.mark.parametrize("home", [Tier.CPU, Tier.DISK])
@pytest.mark.parametrize("n_batches", [2, 4, 7])
def test_an_upload_of_cache_queues_behind_one_piece_of_weights(home: Tier, n_batches: int) -> None:
    units = [UnitPlan(home=home, has_cache=True)] * 4
    passes = [[BatchPlan(reads_cpu=True, stores_cpu=True, hidden_home=Tier.GPU)] * n_batches] * 3
    ops = check_schedule(units, passes, Tier.GPU, Depths(), True)
    uploads = [op for op in ops if op.kind is OpKind.UPLOAD_WEIGHTS]
    assert len(uploads) == 3 * 4 * n_batches and {op.n_pieces for op in uploads} == {n_batches}
    for p in range(3):
        of_pass = [op for op in ops if op.pass_index == p]
        # Before the first computation of all, the first unit comes as a whole.
        first = next(i for i, op in enumerate(of_pass) if op.kind is OpKind.COMPUTE)
        ahead = loads_between(of_pass[first:], OpKind.UPLOAD_WEIGHTS, Lane.UPLOAD)
        assert max(ahead) == 1 and ahead.count(1) >= 2 * n_batches


def test_weights_go_up_whole_where_some_batches_attend_on_the_cpu() -> None:
    """An upload of attended tokens holds the lane until the CPU is done: no piece may queue behind it."""
    units = [UnitPlan(home=Tier.CPU, has_cache=True)] * 3
    one = BatchPlan(reads_cpu=True, stores_cpu=True, hidden_home=Tier.GPU)
    other = BatchPlan(stores_cpu=True, cpu_attention=True, hidden_home=Tier.GPU)
    ops = check_schedule(units, [[one, other, one]] * 2, Tier.GPU, Depths(), True)
    assert {op.n_pieces for op in ops if op.kind is OpKind.UPLOAD_WEIGHTS} == {1}


def test_a_staged_piece_goes_up_while_the_next_is_read() -> None:
    units = [UnitPlan(home=Tier.DISK, has_cache=True)] * 3
    passes = [[BatchPlan(reads_cpu=True, stores_cpu=True, hidden_home=Tier.GPU)] * 4]
    ops = check_schedule(units, passes, Tier.GPU, Depths(), True)
    before = happens_before(ops)
    moves = {(op.kind, op.unit, op.piece): op.id for op in ops if op.n_pieces > 1}
    for u in range(3):
        for k in range(3):
            up, later = moves[OpKind.UPLOAD_WEIGHTS, u, k], moves[OpKind.READ_WEIGHTS, u, k + 1]
            assert not before[up] >> later & 1 and not before[later] >> up & 1


@pytest.mark.parametrize(
    ("n_batches", "overlap", "reads"), [(1, True, True), (3, False, True), (3, True, False)]
)
def test_a_unit_goes_up_whole_where_nothing_can_queue_behind_it(
    n_batches: int, overlap: bool, reads: bool
) -> None:
    units = [UnitPlan(home=Tier.CPU, has_cache=True), UnitPlan(home=Tier.DISK)] * 2
    passes = [[BatchPlan(reads_cpu=reads, hidden_home=Tier.GPU)] * n_batches] * 2
    ops = check_schedule(units, passes, Tier.GPU, Depths(), overlap)
    loads = [op for op in ops if op.kind in (OpKind.READ_WEIGHTS, OpKind.UPLOAD_WEIGHTS)]
    assert {op.n_pieces for op in loads} == {1}


@pytest.mark.parametrize(
    ("units", "first_tier", "text"),
    [([UnitPlan(home=Tier.GPU)], Tier.CPU, "gpu"), ([UnitPlan(home=Tier.DISK)], Tier.DISK, "first tier")],
)
def test_bad_homes_are_refused(units: list[UnitPlan], first_tier: Tier, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        list(schedule(units, [[BatchPlan()]], first_tier=first_tier))


def test_bad_depths_are_refused() -> None:
    with pytest.raises(ValueError, match="cache_staging"):
        Depths(cache_staging=0)
