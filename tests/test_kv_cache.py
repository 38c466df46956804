"""Pages and tails of one layer: bookkeeping of slots, and attention over them against the dense reference."""

from __future__ import annotations

import dataclasses
import random

import planner_cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_helpers import attend_one
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from offload.dense_decode import attend_pieces, plan_dense
from offload.kv import LayerCache, Outbox
from offload.kv_chunk import plan_chunk
from offload.pages import SEGMENT_TOKENS, CacheSequence, CacheShape, PageAllocator, runs
from offload.units import AttentionParams
from policy.memory_plan import work_buffer
from policy.workload import Limits
from quant.kv_formats import parse_cache_format

N_HEADS, N_KV_HEADS, HEAD_DIM, PAGE = 4, 2, 16, 16
VARIANTS = [
    AttentionParams(scale=0.25),
    AttentionParams(scale=0.25, window=20),
    AttentionParams(scale=0.25, softcap=0.7),
    AttentionParams(scale=0.25, alibi_slopes=(0.5, 0.25, 0.1, 0.05)),
]


def shape_of(
    n_slots: int,
    rows: int = 3,
    fmt: str = "f32",
    batches: int = 1,
    tail_dtype: torch.dtype = torch.float32,
    scale: int = 1,
) -> CacheShape:
    return CacheShape(
        n_layers=1,
        num_gpu_batches=batches,
        gpu_batch_size=rows,
        n_kv_heads=N_KV_HEADS,
        head_dim=HEAD_DIM * scale,
        page_counts=(0, n_slots, 0),
        fmt=parse_cache_format(fmt),
        tail_dtype=tail_dtype,
        page_tokens=PAGE * scale,
    )


def aligned(*shape: int) -> torch.Tensor:
    """uint8 of garbage, starting on a page."""
    n = 1
    for size in shape:
        n *= size
    flat = torch.full((n + 4096,), 0xFF, dtype=torch.uint8)
    skip = -flat.data_ptr() % 4096
    return flat[skip : skip + n].view(shape)


class Layer:
    """One layer's cache: the first n_resident slots here, those after them in another tier."""

    def __init__(self, shape: CacheShape, n_resident: int) -> None:
        self.shape, self.n_resident = shape, n_resident
        n_slots = sum(shape.page_counts)
        self.resident = aligned(n_resident, shape.page_bytes)
        self.elsewhere = aligned(n_slots - n_resident, shape.page_bytes)
        size = (shape.gpu_batch_size, *shape.tail_shape)
        tails = aligned(shape.tail_dtype.itemsize * torch.Size(size).numel())
        self.tails = tails.view(shape.tail_dtype).view(size)
        self.allocator = PageAllocator(shape)

    def step(
        self,
        pieces: list[tuple[CacheSequence, int]],
        decode: list[bool],
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        params: AttentionParams,
    ) -> torch.Tensor:
        """One pass: what is elsewhere is brought here first, new pages go there afterwards."""
        chunk = plan_chunk(self.allocator, pieces, decode)
        staged = None
        if len(self.elsewhere):
            staged = aligned(*self.elsewhere.shape)
            staged.copy_(self.elsewhere)
        box = Outbox(pages=aligned(64, self.shape.page_bytes))
        view = LayerCache(
            shape=self.shape,
            resident=self.resident,
            staged=staged,
            tails=self.tails,
            outbox=box,
        )
        query, key, value = qkv
        view.append(chunk, key, value)
        out = view.attend(chunk, query, key, value, params)
        assert box.pages is not None
        for row, slot in enumerate(box.slots):
            self.elsewhere[slot - self.n_resident] = box.pages[row]
        return out


def random_qkv(
    n: int, generator: torch.Generator, head_dim: int = HEAD_DIM, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Parts of one tensor, as a stacked projection makes them."""
    heads = (N_HEADS, N_KV_HEADS, N_KV_HEADS)
    made = torch.randn((n, sum(heads), head_dim), generator=generator).to(dtype)
    query, key, value = made.split(heads, dim=1)
    return query, key, value


@pytest.mark.parametrize("params", VARIANTS)
@pytest.mark.parametrize("n_resident", [0, 5, 60])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
def test_passes_of_mixed_pieces_equal_dense_attention(
    params: AttentionParams, n_resident: int, dtype: torch.dtype, tolerance: float
) -> None:
    """Prompts of several segments, one-token steps, sequences that end and begin, in random mixes.

    In bf16 pages and heads are of sizes that AMX's kernels take.
    """
    rng = random.Random(n_resident)
    generator = torch.Generator().manual_seed(n_resident)
    is_bf16 = dtype == torch.bfloat16
    shape = shape_of(60, fmt="bf16" if is_bf16 else "f32", tail_dtype=dtype, scale=2 if is_bf16 else 1)
    layer = Layer(shape, n_resident)
    history: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    running: list[tuple[CacheSequence, int]] = []  # with the prompt's length
    for _ in range(30):
        while len(running) < 3:
            prompt_len = rng.choice([1, 3, 15, 16, 17, 40, 256, 290])
            place = layer.allocator.admit(0, prompt_len + 20)
            if place is None:
                break
            running.append((place, prompt_len))
            empty = torch.zeros((0, N_KV_HEADS, shape.head_dim), dtype=dtype)
            history[id(place)] = (empty, empty)
        pieces: list[tuple[CacheSequence, int]] = []
        decode: list[bool] = []
        for place, prompt_len in running:
            in_prompt = place.length < prompt_len
            left = min(prompt_len - place.length, SEGMENT_TOKENS) if in_prompt else 1
            pieces.append((place, left))
            decode.append(not in_prompt)
        qkv = random_qkv(sum(n for _, n in pieces), generator, shape.head_dim, dtype)
        out = layer.step(pieces, decode, qkv, params)
        begin = 0
        for place, n in pieces:
            here = slice(begin, begin + n)
            keys, values = (
                torch.cat([old, new[here]]) for old, new in zip(history[id(place)], qkv[1:], strict=True)
            )
            history[id(place)] = (keys, values)
            expected = attend_one(qkv[0][here].float(), keys, values, params)
            torch.testing.assert_close(out[here].float(), expected, atol=tolerance, rtol=5 * tolerance)
            begin += n
        for place, prompt_len in [r for r in running if rng.random() < 0.1 or r[0].length >= r[1] + 20]:
            layer.allocator.release(place)
            running.remove((place, prompt_len))


@pytest.mark.parametrize("params", VARIANTS)
@pytest.mark.parametrize("fmt", ["f32", "int4"])
def test_gathering_equals_reading_in_place_and_no_garbage_gets_in(params: AttentionParams, fmt: str) -> None:
    """What accelerators do (gather, pad, attend) against the CPU's kernel; unused memory holds NaN."""
    generator = torch.Generator().manual_seed(1)
    layer = Layer(shape_of(20, fmt=fmt), 20)
    lengths = [40, 16, 3]
    places = [layer.allocator.admit(0, n + 4) for n in lengths]
    pieces = [(place, n) for place, n in zip(places, lengths, strict=True) if place is not None]
    layer.step(pieces, [False] * 3, random_qkv(sum(lengths), generator), params)
    chunk = plan_chunk(layer.allocator, [(place, 1) for place, _ in pieces], [True] * 3)
    view = LayerCache(shape=layer.shape, resident=layer.resident, staged=None, tails=layer.tails)
    query, key, value = random_qkv(3, generator)
    view.append(chunk, key, value)
    gathered = view._decode_on_device(chunk, query, params)
    assert bool(gathered.isfinite().all())
    torch.testing.assert_close(view.decode(chunk, query, params), gathered, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("fmt", ["f32", "bf16", "int4"])
@pytest.mark.parametrize("n_resident", [0, 4, 60])
def test_an_accelerator_gathers_the_same_in_pieces(fmt: str, n_resident: int) -> None:
    """Rows of uneven lengths, pages here and staged, with room for one to all of them."""
    shape = shape_of(60, rows=6, fmt=fmt)
    layer = Layer(shape, n_resident)
    generator = torch.Generator().manual_seed(n_resident)
    lengths = [1, 15, 16, 40, 3, 100]
    places = [layer.allocator.admit(0, n + 4) for n in lengths]
    pieces = [(place, n) for place, n in zip(places, lengths, strict=True) if place is not None]
    params = VARIANTS[0]
    layer.step(pieces, [False] * 6, random_qkv(sum(lengths), generator), params)
    chunk = plan_chunk(layer.allocator, [(place, 1) for place, _ in pieces], [True] * 6)
    view = LayerCache(
        shape=shape,
        resident=layer.resident,
        staged=layer.elsewhere,
        tails=layer.tails,
        outbox=Outbox(pages=aligned(6, shape.page_bytes)),
    )
    query, key, value = random_qkv(6, generator)
    view.append(chunk, key, value)
    wanted = view.decode(chunk, query, params)
    table, arenas = chunk.tables(n_resident)
    page_bytes = 2 * N_KV_HEADS * PAGE * HEAD_DIM * 4
    for room, n_pieces in ((1, 6), (2 * 2 * 6 * page_bytes, 3), (1 << 30, 1)):
        plan = plan_dense(
            table,
            arenas,
            chunk.seq_lens,
            chunk.tail_lens,
            chunk.decode_rows,
            shape=shape,
            dtype=torch.float32,
            device=query.device,
            staging_bytes=room,
        )
        assert sum(piece.n for piece in plan) == 6 and len(plan) == n_pieces
        stored = (layer.resident, layer.elsewhere)
        found = attend_pieces(plan, query, stored, layer.tails, shape, params)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


class LiveBytes(TorchDispatchMode):
    """The most bytes that the storages made while it is on held together between operations."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def know(self, *tensors: torch.Tensor | None) -> None:
        """These do not count."""
        for tensor in tensors:
            if tensor is not None:
                storage = tensor.untyped_storage()
                self._seen[storage._cdata] = (StorageWeakRef(storage), 0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        made = func(*args, **(kwargs or {}))
        self._seen = {key: found for key, found in self._seen.items() if not found[0].expired()}
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor) and leaf.dtype not in (torch.int64, torch.bool):
                storage = leaf.untyped_storage()
                # Indices, masks and scales of a few bytes a page are not what staging is planned for.
                if storage._cdata not in self._seen and storage.nbytes() >= 512:
                    self._seen[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, sum(n for _, n in self._seen.values()))
        return made


@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("lengths", [[600] * 6, [600], [3, 600, 40, 1, 2, 7], [15] * 6])
@pytest.mark.parametrize(("dtype", "compute"), [(torch.float32, "f32"), (torch.bfloat16, "bf16")])
@pytest.mark.parametrize("fmt", ["f32", "bf16", "int8", "int4"])
def test_gathering_stays_within_the_staging_that_is_planned(
    fmt: str,
    dtype: torch.dtype,
    compute: str,
    lengths: list[int],
    segments: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Decode rows and later segments of prompts without compiled kernels, by the bytes that are alive at a time."""
    shape = shape_of(300, rows=6, fmt=fmt)
    tail_dtype = {"f32": torch.float32, "bf16": torch.bfloat16}.get(fmt, dtype)
    shape = dataclasses.replace(shape, tail_dtype=tail_dtype)
    allocator = PageAllocator(shape)
    places = [place for n in lengths if (place := allocator.admit(0, n + 1)) is not None]
    assert len(places) == len(lengths)
    n_first = SEGMENT_TOKENS if segments else 1
    if segments:
        lengths = [SEGMENT_TOKENS] * len(lengths)
    for place, n in zip(places, lengths, strict=True):
        for _ in range(n // PAGE):
            allocator.take_page(place)
        place.length = n
    resident = torch.zeros((300, shape.page_bytes), dtype=torch.uint8)
    tails = torch.zeros((6, *shape.tail_shape), dtype=tail_dtype)
    pieces = [(place, min(n_first, 40)) for place in places]
    chunk = plan_chunk(allocator, pieces, [not segments] * len(places))
    n_tokens = chunk.n_tokens
    query = torch.zeros((n_tokens, N_HEADS, HEAD_DIM), dtype=dtype)
    key = torch.zeros((n_tokens, N_KV_HEADS, HEAD_DIM), dtype=dtype)
    monkeypatch.setattr("offload.dense_decode.attend_dense", lambda query, *rest: query)
    monkeypatch.setattr("offload.kv.attend_segments", lambda query, *rest: query)
    model = planner_cases.model(
        n_layers=1, hidden_size=N_HEADS * HEAD_DIM, n_heads=N_HEADS, n_kv_heads=N_KV_HEADS
    )
    for staging_bytes in (1, 100_000, 200_000, 1 << 20):
        limits = Limits(
            max_tokens=max(place.length for place in places),
            pass_tokens=300,
            page_tokens=PAGE,
            attention_staging_bytes=staging_bytes,
        )
        planned = work_buffer(model, limits, 6, compute, fmt).attention_staging_bytes
        view = LayerCache(
            shape=shape, resident=resident, staged=None, tails=tails, staging_bytes=staging_bytes
        )
        live, out = LiveBytes(), torch.empty_like(query)
        live.know(resident, tails, query, key, out)
        view._decode_on_device(chunk, query, VARIANTS[0])  # the plan, once for all layers
        with live:
            if segments:
                view.attend_stored(chunk, query, key, key, VARIANTS[0], out)
            else:
                view._decode_on_device(chunk, query, VARIANTS[0])
        assert 0 < live.peak <= planned + query.nbytes


def test_tail_tokens_that_leave_are_all_in_the_outbox() -> None:
    shape = shape_of(8)
    allocator = PageAllocator(shape)
    a, b = allocator.admit(0, 40), allocator.admit(0, 40)
    assert a is not None and b is not None
    outbox = Outbox(
        pages=aligned(8, shape.page_bytes), tails=torch.full((48, 2, N_KV_HEADS, HEAD_DIM), torch.nan)
    )
    cache = LayerCache(
        shape=shape,
        resident=aligned(0, shape.page_bytes),
        staged=None,
        tails=None,
        outbox=outbox,
        tails_leave=True,
    )
    chunk = plan_chunk(allocator, [(a, 20), (b, 3)], [False, False])
    _, key, value = random_qkv(23, torch.Generator().manual_seed(0))
    cache.append(chunk, key, value)
    assert outbox.slots == [0] and outbox.n_tail_tokens == 7 and outbox.tails is not None
    rows, offsets = (torch.cat(x).tolist() for x in zip(*outbox.tail_places, strict=True))
    assert list(zip(rows, offsets, strict=True)) == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2)]
    torch.testing.assert_close(outbox.tails[:7, 0], key[16:])
    torch.testing.assert_close(outbox.tails[:7, 1], value[16:])


# -- bookkeeping ---------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_slots_have_one_owner_and_promises_are_kept(data: st.DataObject) -> None:
    shape = shape_of(data.draw(st.integers(1, 12)), rows=data.draw(st.integers(1, 4)), batches=2)
    allocator = PageAllocator(shape)
    owned: list[CacheSequence] = []
    for _ in range(40):
        action = data.draw(st.sampled_from(["admit", "take", "release", "rewind"]))
        if action == "admit":
            batch, tokens = data.draw(st.integers(0, 1)), data.draw(st.integers(1, 100))
            before = sum(s.reserved_pages + len(s.pages) for s in owned if s.batch == batch)
            rows = sum(s.batch == batch for s in owned)
            place = allocator.admit(batch, tokens)
            fits = before + tokens // PAGE <= sum(shape.page_counts) and rows < shape.gpu_batch_size
            assert (place is not None) == fits
            if place is not None:
                owned.append(place)
        elif owned:
            place = data.draw(st.sampled_from(owned))
            if action == "take" and place.reserved_pages:
                free = set(range(sum(shape.page_counts)))
                free -= {p for s in owned if s.batch == place.batch for p in s.pages}
                assert allocator.take_page(place) == min(free)
            elif action == "release":
                allocator.release(place)
                owned.remove(place)
            elif action == "rewind":
                pages = len(place.pages) + place.reserved_pages
                allocator.rewind(place)
                assert (place.pages, place.length, place.reserved_pages) == ([], 0, pages)
        for batch in range(2):
            mine = [s for s in owned if s.batch == batch]
            slots = [p for s in mine for p in s.pages]
            assert len(set(slots)) == len(slots)
            assert len({s.row for s in mine}) == len(mine)


def test_runs_join_neighbours() -> None:
    assert runs([]) == []
    assert runs([3]) == [(3, 4)]
    assert runs([0, 1, 2, 5, 7, 8]) == [(0, 3), (5, 6), (7, 9)]


def test_pages_must_divide_a_segment() -> None:
    assert shape_of(1).stride_bytes == shape_of(1).page_bytes
    with pytest.raises(ValueError, match="page_tokens"):
        CacheShape(
            n_layers=1,
            num_gpu_batches=1,
            gpu_batch_size=1,
            n_kv_heads=1,
            head_dim=8,
            page_counts=(0, 1, 0),
            fmt=parse_cache_format("f32"),
            tail_dtype=torch.float32,
            page_tokens=48,
        )


@pytest.mark.parametrize("n_resident", [0, 3, 60])
@pytest.mark.parametrize("tails_leave", [False, True])
def test_placing_tokens_equals_putting_them(
    n_resident: int, tails_leave: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiled copy and torch's operations write the same bytes to pages, tails and outbox, and no others."""
    lengths, found = [1, 16, 40, 100, 33], []
    for can_place in (True, False):
        if not can_place:
            monkeypatch.setattr(LayerCache, "_can_place", lambda *_: False)
        layer = Layer(shape_of(60, rows=5), n_resident)
        places = [layer.allocator.admit(0, n) for n in lengths]
        pieces = [(place, n) for place, n in zip(places, lengths, strict=True) if place is not None]
        chunk = plan_chunk(layer.allocator, pieces, [False] * 5)
        box = Outbox(pages=aligned(64, layer.shape.page_bytes))
        box.tails = torch.zeros(sum(lengths), 2, N_KV_HEADS, HEAD_DIM)
        view = LayerCache(
            shape=layer.shape,
            resident=layer.resident,
            staged=None,
            tails=layer.tails,
            outbox=box,
            tails_leave=tails_leave,
        )
        _, key, value = random_qkv(sum(lengths), torch.Generator().manual_seed(1))
        assert view._can_place(key) == can_place
        # Values are columns of a wider product.
        value = torch.cat([value, value], dim=1)[:, :N_KV_HEADS]
        view.append(chunk, key, value)
        memory = (layer.resident, layer.tails.view(torch.uint8), box.pages, box.tails.view(torch.uint8))
        found.append((*(t.clone() for t in memory if t is not None), torch.tensor(box.slots)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
