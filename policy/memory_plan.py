"""Exact bytes of a run, by tier and purpose: the one place of these formulas.

`block_sizes` gives the sizes that a block's shape, formats and limits lead to; `memory_plan` multiplies them
with the integer homes that a policy rounds to. The runtime allocates the result as it stands, the linear
program uses the same sizes with fractions instead of whole homes.

Pages of one (layer, gpu batch) rest in the fastest tier that has a free slot (`pages_by_tier`). With three
tiers a gpu batch whose attention runs on the CPU keeps in cpu memory what others keep on the gpu.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from policy.footprint import MIXED_FORMAT, PLAIN_BYTES, ModelFootprint, UnitFootprint, align_up
from policy.schedule import Depths
from policy.tiers import Placement, Policy, Tier, spread_homes
from policy.workload import Limits
from quant.kv_formats import parse_cache_format

DISK_ALIGN_BYTES = 4096
ATTEND_DEPTH = 2
"""Gpu batches around CPU attention at once: one attending, one being projected or finished."""


def tier_labels(first_tier: Tier) -> tuple[Tier, ...]:
    """The tiers a machine has: three with a gpu (real or emulated), else two."""
    return tuple(t for t in Tier if t >= first_tier)


ROW_CHUNK = 512
"""Most rows of logits that are computed at once, for one slice of the vocabulary."""


def cache_element_bytes(cache_format: str, compute_dtype: str) -> int:
    """Bytes of one K or V element in a tail: the cache's plain type, or the compute dtype if it is packed."""
    return PLAIN_BYTES.get(cache_format, PLAIN_BYTES[compute_dtype])


def resolve_cache_format(cache_format: str, compute_dtype: str) -> str:
    """ "auto" stores the cache in the compute dtype; any other name is checked and returned."""
    return compute_dtype if cache_format == "auto" else parse_cache_format(cache_format).name


def pages_by_tier(filled: float, slots: tuple[float, float, float]) -> tuple[float, float, float]:
    """How many of `filled` pages are at home on each tier: the fastest tier is filled first."""
    gpu = min(filled, slots[0])
    cpu = min(filled - gpu, slots[1])
    return gpu, cpu, filled - gpu - cpu


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkBuffer:
    """Scratch for one chunk on the first tier, by part; parts live at the same time.

    activations: inputs and outputs of one unit's linear tensors, plus two hidden states in compute dtype
        (norm output, residual) and one in fp32 (norms): chunk * (A * b + hidden * (2 * b + 4)); or a slab of logits,
        rows * (hidden + slice) * (b + 8), if that is larger.
    rotary: queries and keys in fp32: chunk * (n_heads + n_kv_heads) * head_dim * 4.
    attention_staging: K and V of as many sequences as half of the limit allows, at least one, in compute dtype, and
        pages on their way into them in the rest; next to a longer sequence an eighth of the limit, or one page.
    attention_scores: explicit scores of a tile of queries, at least one query of all heads, in fp32.
    """

    activations_bytes: int
    rotary_bytes: int
    attention_staging_bytes: int
    attention_scores_bytes: int

    @property
    def nbytes(self) -> int:
        return sum(
            align_up(n, DISK_ALIGN_BYTES)
            for n in (
                self.activations_bytes,
                self.rotary_bytes,
                self.attention_staging_bytes,
                self.attention_scores_bytes,
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSizes:
    """Sizes that do not depend on placement. A pair is one (layer, gpu batch).

    slots: page slots per pair. page_bytes, page_disk_bytes: the largest layer's page in memory and on disk;
    layers_page_bytes, layers_page_disk_bytes: one page of every layer together. tail_bytes: the tails of the
    largest pair; layers_tail_bytes: of one gpu batch in all layers. new_pages: most pages that one pair
    fills in a pass. new_tail_bytes: most bytes of a pair's tails that one pass changes.
    attend_bytes: q, k, v, attended output and hidden state of one gpu batch around CPU attention.
    """

    weights_bytes: int
    largest_unit_bytes: int
    scratch_bytes: int
    pinned_bytes: int
    tables_bytes: int
    slots: int
    page_bytes: int
    page_disk_bytes: int
    layers_page_bytes: int
    layers_page_disk_bytes: int
    tail_bytes: int
    layers_tail_bytes: int
    new_pages: int
    new_tail_bytes: int
    hidden_bytes: int
    attend_bytes: int
    logits_bytes: int
    work: WorkBuffer


# -- one function per purpose ----------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _weight_sizes(
    footprint: ModelFootprint, fmt: str, compute_dtype: str, packed_row_len: int | None
) -> tuple[int, int, int, int, int]:
    """(all streamable units, the largest of them, unpack scratch, pinned units, tables) in bytes."""
    streamable = [footprint.units[i] for i in footprint.streamable]
    # The scratch holds one unit in compute dtype, unpacked once and used by all gpu batches; but no rows that are
    # multiplied packed. Of a checkpoint of several formats, some may be plain.
    is_packed = fmt not in PLAIN_BYTES and fmt != MIXED_FORMAT
    least = packed_row_len if is_packed and packed_row_len is not None else math.inf
    elements = 0
    if fmt != compute_dtype:
        elements = max(sum(out * inp for out, inp in u.linear_shapes if inp < least) for u in footprint.units)
    return (
        sum(u.nbytes[fmt] for u in streamable),
        max((u.nbytes[fmt] for u in streamable), default=0),
        align_up(elements * PLAIN_BYTES[compute_dtype], DISK_ALIGN_BYTES),
        sum(u.nbytes[fmt] for u in footprint.units if u.pinned),
        sum(align_up(u.table_nbytes.get(fmt, 0), DISK_ALIGN_BYTES) for u in footprint.units),
    )


@lru_cache(maxsize=256)
def _cache_sizes(
    footprint: ModelFootprint, cache_format: str, compute_dtype: str, page_tokens: int
) -> tuple[int, int, int, int, int, int]:
    """(largest page, on disk, all layers' pages, on disk, largest tail token, all layers' tail tokens)."""
    fmt = parse_cache_format(cache_format)
    element = cache_element_bytes(cache_format, compute_dtype)
    shapes = [u.kv for u in footprint.units if u.kv is not None]
    pages = [
        fmt.page_nbytes(page_tokens=page_tokens, n_kv_heads=kv.n_kv_heads, head_dim=kv.head_dim)
        for kv in shapes
    ]
    disk = [align_up(n, DISK_ALIGN_BYTES) for n in pages]
    tails = [kv.elements_per_token * element for kv in shapes]
    return (
        max(pages, default=0),
        max(disk, default=0),
        sum(pages),
        sum(disk),
        max(tails, default=0),
        sum(tails),
    )


@lru_cache(maxsize=256)
def _activation_elements(footprint: ModelFootprint) -> tuple[float, int, int, int]:
    """Over units that see all tokens, the largest (linear inputs and outputs, rotary, qkv + attended, KV)."""
    units = [u for u in footprint.units if not u.rows_only]
    kvs = [u.kv for u in units if u.kv is not None]
    return (
        max((u.activation_elements_per_token for u in units), default=0.0),
        max(((kv.n_heads + kv.n_kv_heads) * kv.head_dim for kv in kvs), default=0),
        max((kv.qkv_elements + kv.query_elements for kv in kvs), default=0),
        max((kv.elements_per_token for kv in kvs), default=0),
    )


def work_buffer(
    footprint: ModelFootprint,
    limits: Limits,
    gpu_batch_size: int,
    compute_dtype: str,
    cache_format: str = "auto",
) -> WorkBuffer:
    """Scratch for one chunk of tokens of one unit (see WorkBuffer for the formula of each part)."""
    active, rotary, _, kv_elements = _activation_elements(footprint)
    element = PLAIN_BYTES[compute_dtype]
    chunk = limits.chunk_tokens
    hidden = footprint.hidden_size
    n_heads = max((u.kv.n_heads for u in footprint.units if u.kv is not None), default=0)
    one_sequence = align_up(limits.max_tokens, limits.page_tokens) * kv_elements * element
    one_query = n_heads * limits.max_tokens * 4
    cap = limits.attention_staging_bytes
    fmt = parse_cache_format(resolve_cache_format(cache_format, compute_dtype))
    one_page = max(
        (
            fmt.gather_nbytes(
                page_tokens=limits.page_tokens,
                n_kv_heads=kv.n_kv_heads,
                head_dim=kv.head_dim,
                plain=compute_dtype,
            )
            for kv in {u.kv for u in footprint.units if u.kv is not None}
        ),
        default=0,
    )
    # What `offload.dense_decode` holds: see plan_dense and decode_block there.
    dense = min(gpu_batch_size * one_sequence, cap // 2)
    long_sequence = one_sequence + max(one_page, min(one_sequence, cap // 8))
    # Rows of one slice of the vocabulary at once, in compute type, in fp32 and as exponentials.
    rows = min(ROW_CHUNK, limits.logit_rows or gpu_batch_size)
    slices = (u.activation_elements_per_token for u in footprint.units if u.rows_only)
    slab = math.ceil(rows * max(slices, default=0.0)) * (element + 8)
    return WorkBuffer(
        activations_bytes=max(slab, math.ceil(chunk * active) * element + chunk * hidden * (2 * element + 4)),
        rotary_bytes=chunk * rotary * 4,
        attention_staging_bytes=max(long_sequence, dense + max(dense, one_page)),
        attention_scores_bytes=max(one_query, min(chunk * one_query, cap)),
    )


def page_slots(limits: Limits, gpu_batch_size: int) -> int:
    """Page slots of one (layer, gpu batch): the full pages that its sequences reserve on average."""
    longest = limits.max_tokens // limits.page_tokens
    mean = longest if limits.mean_pages is None else limits.mean_pages
    return max(longest, math.ceil(gpu_batch_size * mean - 1e-9))


def new_page_limit(limits: Limits, gpu_batch_size: int) -> int:
    """Most pages one (layer, gpu batch) fills in a pass: its tokens on top of nearly full tails."""
    pages = (limits.pass_tokens + gpu_batch_size * (limits.page_tokens - 1)) // limits.page_tokens
    return min(page_slots(limits, gpu_batch_size), pages)


def block_sizes(
    footprint: ModelFootprint,
    limits: Limits,
    *,
    gpu_batch_size: int,
    num_gpu_batches: int,
    weight_format: str,
    cache_format: str,
    compute_dtype: str,
    schedule: str = "refill",
) -> BlockSizes:
    """The sizes a block of this shape leads to, before anything is placed."""
    element = PLAIN_BYTES[compute_dtype]
    weights = _weight_sizes(
        footprint, footprint.resolve_format(weight_format), compute_dtype, limits.packed_row_len
    )
    cache_name = resolve_cache_format(cache_format, compute_dtype)
    page, page_disk, pages, pages_disk, tail, tails = _cache_sizes(
        footprint, cache_name, compute_dtype, limits.page_tokens
    )
    tail_tokens = gpu_batch_size * limits.page_tokens
    # A static block's prompts attend on the device, so CPU attention sees one token per sequence.
    whole_prompts = limits.pass_tokens >= gpu_batch_size * limits.max_tokens // 2
    attend_tokens = gpu_batch_size if schedule == "static" and whole_prompts else limits.pass_tokens
    attend = attend_tokens * (_activation_elements(footprint)[2] + footprint.hidden_size) * element
    # A sampled row is kept in fp32 until the pass ends; of a scored one only sums are (see work_buffer).
    rows = limits.logit_rows if limits.logit_rows is not None else gpu_batch_size
    sampled = gpu_batch_size * footprint.vocab_size * 4
    logits = num_gpu_batches * (sampled + rows * footprint.hidden_size * element)
    return BlockSizes(
        weights_bytes=weights[0],
        largest_unit_bytes=weights[1],
        scratch_bytes=weights[2],
        pinned_bytes=weights[3],
        tables_bytes=weights[4],
        slots=page_slots(limits, gpu_batch_size),
        page_bytes=page,
        page_disk_bytes=page_disk,
        layers_page_bytes=pages,
        layers_page_disk_bytes=pages_disk,
        tail_bytes=tail_tokens * tail,
        layers_tail_bytes=tail_tokens * tails,
        new_pages=new_page_limit(limits, gpu_batch_size),
        new_tail_bytes=min(limits.pass_tokens, tail_tokens) * tail,
        hidden_bytes=align_up(limits.pass_tokens * footprint.hidden_size * element, DISK_ALIGN_BYTES),
        attend_bytes=align_up(attend, DISK_ALIGN_BYTES),
        logits_bytes=align_up(logits, DISK_ALIGN_BYTES),
        work=work_buffer(footprint, limits, gpu_batch_size, compute_dtype, cache_name),
    )


def unit_homes(footprint: ModelFootprint, policy: Policy) -> tuple[Tier, ...]:
    """Homes of the streamable units, in model order: `spread_homes` over their bytes."""
    fmt = footprint.resolve_format(policy.weight_format)
    sizes = [footprint.units[i].nbytes[fmt] for i in footprint.streamable]
    return spread_homes(sizes, policy.weights)


def hidden_homes(policy: Policy) -> tuple[Tier, ...]:
    """Home of each gpu batch's hidden states between units: the first batches on the fastest tier."""
    counts = policy.activations.counts(policy.num_gpu_batches)
    return tuple(tier for tier in Tier for _ in range(counts[tier]))


def cpu_attention_flags(num_gpu_batches: int, n_cpu_attention: int) -> tuple[bool, ...]:
    """Which gpu batches attend on the CPU: evenly spread, each followed by those that do not, so that the
    device has their work to do while the CPU attends."""
    n = num_gpu_batches
    return tuple(i * n_cpu_attention % n < n_cpu_attention for i in range(n))


def pair_slots(
    placement: Placement, slots: int, *, first_tier: Tier, cpu_attention: bool
) -> tuple[int, int, int]:
    """Page slots of one (layer, gpu batch) on each tier. Raises ValueError for a tier the machine lacks."""
    gpu, cpu, disk = placement.counts(slots)
    if cpu_attention and first_tier is Tier.GPU:
        return 0, gpu + cpu, disk
    if gpu and first_tier is not Tier.GPU:
        raise ValueError(
            f"cache.gpu_frac is {placement.gpu_frac}, but this machine has no gpu tier; use cpu and disk"
            " fractions or give a gpu memory budget"
        )
    return gpu, cpu, disk


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What the runtime allocates.

    items: (tier, purpose) -> bytes. unit_homes: of the streamable units. page_counts: page slots per pair on
    each tier; cpu_attention_page_counts: the same for a gpu batch whose attention runs on the CPU.
    *_slot_bytes: one slot of each ring; a ring that is not needed has slot bytes 0.
    cache_out ring (`store`): with three tiers, the new K and V of one gpu batch on the gpu, until they are in
    cpu memory, and (store_staging) pages on their way to disk; with two tiers only the latter.
    """

    items: Mapping[tuple[Tier, str], int]
    sizes: BlockSizes
    unit_homes: tuple[Tier, ...]
    hidden_homes: tuple[Tier, ...]
    page_counts: tuple[int, int, int]
    cpu_attention_page_counts: tuple[int, int, int]
    n_weights_slots: int
    weights_slot_bytes: int
    n_weights_staging_slots: int
    weights_staging_slot_bytes: int
    cache_slot_bytes: int
    cache_staging_slot_bytes: int
    store_slot_bytes: int
    store_staging_slot_bytes: int
    tails_tier: Tier

    def tier_bytes(self, tier: Tier) -> int:
        return sum(n for (t, _), n in self.items.items() if t is tier)

    @property
    def planned_bytes(self) -> dict[str, int]:
        """Bytes by tier label, for the tiers in use."""
        return {t.label: self.tier_bytes(t) for t in Tier if any(key is t for key, _ in self.items)}

    def by_purpose(self) -> dict[str, dict[str, int]]:
        """Tier label -> purpose -> bytes, zero entries left out."""
        table: dict[str, dict[str, int]] = {}
        for (tier, purpose), n in self.items.items():
            if n:
                table.setdefault(tier.label, {})[purpose] = n
        return table


def _weights_rings(
    footprint: ModelFootprint, fmt: str, homes: tuple[Tier, ...], first_tier: Tier, depths: Depths
) -> tuple[int, int, int, int]:
    """(ring slots, slot bytes, cpu staging slots, their bytes); staging for disk units on their way up."""

    def largest(units: list[UnitFootprint]) -> int:
        return align_up(max((u.nbytes[fmt] for u in units), default=0), DISK_ALIGN_BYTES)

    placed = [(footprint.units[i], home) for i, home in zip(footprint.streamable, homes, strict=True)]
    streamed = [unit for unit, home in placed if home > first_tier]
    through_cpu = [u for u, home in placed if home is Tier.DISK] if first_tier is Tier.GPU else []
    return (
        min(depths.weights, len(streamed)),
        largest(streamed),
        min(depths.weights_staging, len(through_cpu)),
        largest(through_cpu),
    )


def check_tiers(policy: Policy, first_tier: Tier) -> None:
    """ValueError if the policy places anything on a tier that the machine lacks."""
    if first_tier is Tier.GPU:
        return
    for name in ("weights", "cache", "activations"):
        frac = getattr(policy, name).gpu_frac
        if frac > 0:
            raise ValueError(
                f"{name}.gpu_frac is {frac}, but this machine has no gpu tier; use cpu and disk fractions"
                " or give a gpu memory budget"
            )


def memory_plan(
    footprint: ModelFootprint,
    policy: Policy,
    limits: Limits,
    *,
    first_tier: Tier,
    compute_dtype: str,
    depths: Depths | None = None,
) -> MemoryPlan:
    """Exact bytes by tier and purpose of a run of `policy` within `limits`.

    compute_dtype: f32, bf16 or f16. Raises ValueError for a placement on a tier the machine lacks or for an
    unknown format.
    """
    check_tiers(policy, first_tier)
    depths = depths or limits.depths
    fmt = footprint.resolve_format(policy.weight_format)
    three = first_tier is Tier.GPU
    n_batches = policy.num_gpu_batches
    sizes = block_sizes(
        footprint,
        limits,
        gpu_batch_size=policy.gpu_batch_size,
        num_gpu_batches=n_batches,
        weight_format=fmt,
        cache_format=policy.cache_format,
        compute_dtype=compute_dtype,
        schedule=policy.schedule,
    )
    items: dict[tuple[Tier, str], int] = {(t, "weights"): 0 for t in tier_labels(first_tier)}

    def add(tier: Tier, purpose: str, nbytes: int) -> None:
        items[tier, purpose] = items.get((tier, purpose), 0) + nbytes

    # Weights.
    homes = unit_homes(footprint, policy)
    for index, home in zip(footprint.streamable, homes, strict=True):
        add(home, "weights", footprint.units[index].nbytes[fmt])
    ring = _weights_rings(footprint, fmt, homes, first_tier, depths)
    add(first_tier, "pinned", sizes.pinned_bytes)
    add(Tier.CPU, "tables", sizes.tables_bytes)
    add(first_tier, "weights_ring", ring[0] * ring[1])
    add(Tier.CPU, "weights_staging", ring[2] * ring[3])
    add(first_tier, "unpack_scratch", sizes.scratch_bytes)

    # KV cache: arenas, tails, rings.
    n_cpu = policy.num_cpu_attention_batches
    n_device = n_batches - n_cpu
    plain = pair_slots(policy.cache, sizes.slots, first_tier=first_tier, cpu_attention=False)
    on_cpu = pair_slots(policy.cache, sizes.slots, first_tier=first_tier, cpu_attention=True)
    for tier in tier_labels(first_tier):
        layers = sizes.layers_page_disk_bytes if tier is Tier.DISK else sizes.layers_page_bytes
        slots = n_device * plain[tier] + n_cpu * on_cpu[tier]
        add(tier, "kv_pages", align_up(slots * layers, DISK_ALIGN_BYTES))
    tails_tier = Tier.GPU if three and policy.cache.gpu_frac >= 0.5 else Tier.CPU
    for tier in tier_labels(first_tier)[:-1]:
        n = (n_device if tier is tails_tier else 0) + (n_cpu if tier is Tier.CPU else 0)
        add(tier, "kv_tails", align_up(n * sizes.layers_tail_bytes, DISK_ALIGN_BYTES))
    rings = cache_rings(
        sizes, plain, on_cpu, n_device=n_device, n_cpu=n_cpu, first_tier=first_tier, tails_tier=tails_tier
    )
    add(first_tier, "cache_ring", depths.cache * rings[0])
    add(Tier.CPU, "cache_staging", depths.cache_staging * rings[1])
    add(first_tier, "store_ring", depths.cache_out * rings[2])
    add(Tier.CPU, "store_staging", depths.cache_out * rings[3])

    # Hidden states. A lone gpu batch never leaves the first tier.
    moved = hidden_homes(policy) if n_batches > 1 else (first_tier,)
    for home in moved:
        add(home, "hidden", sizes.hidden_bytes)
    if any(home > first_tier for home in moved):
        add(first_tier, "hidden_ring", depths.hidden * sizes.hidden_bytes)
    if three and Tier.DISK in moved:
        add(Tier.CPU, "hidden_staging", depths.hidden * sizes.hidden_bytes)

    # Scratch.
    add(first_tier, "work", sizes.work.nbytes)
    add(first_tier, "logits", sizes.logits_bytes)
    if n_cpu:
        add(first_tier, "cpu_attention", ATTEND_DEPTH * sizes.attend_bytes)
        if three:
            staging = align_up(sizes.work.attention_staging_bytes, DISK_ALIGN_BYTES)
            add(Tier.CPU, "cpu_attention", ATTEND_DEPTH * sizes.attend_bytes + staging)
    return MemoryPlan(
        items=items,
        sizes=sizes,
        unit_homes=homes,
        hidden_homes=moved,
        page_counts=plain,
        cpu_attention_page_counts=on_cpu,
        n_weights_slots=ring[0],
        weights_slot_bytes=ring[1],
        n_weights_staging_slots=ring[2],
        weights_staging_slot_bytes=ring[3],
        cache_slot_bytes=rings[0],
        cache_staging_slot_bytes=rings[1],
        store_slot_bytes=rings[2],
        store_staging_slot_bytes=rings[3],
        tails_tier=tails_tier,
    )


def cache_rings(
    sizes: BlockSizes,
    plain: tuple[int, int, int],
    on_cpu: tuple[int, int, int],
    *,
    n_device: int,
    n_cpu: int,
    first_tier: Tier,
    tails_tier: Tier,
) -> tuple[int, int, int, int]:
    """Slot bytes of (cache ring, cache staging, store ring, store staging).

    Three tiers: a cache slot holds the pages of one pair that are not on the gpu, and its tails if they
    rest in cpu memory; staging holds the disk pages as they lie on disk; a store slot holds the pages and
    tails that one pass makes and that leave the gpu, its staging those bound for disk.
    Two tiers: a cache slot holds the disk pages; store staging those bound for disk.
    """
    disk = max(plain[2] if n_device else 0, on_cpu[2] if n_cpu else 0)
    disk_bytes = disk * sizes.page_disk_bytes
    staged = min(disk, sizes.new_pages) * sizes.page_disk_bytes
    if first_tier is not Tier.GPU:
        return disk_bytes, 0, 0, staged
    if not n_device:
        # Prompts may still attend on the device; their pages then leave through the store ring.
        away = on_cpu[1] + on_cpu[2]
        new = min(away, sizes.new_pages) * sizes.page_bytes + sizes.new_tail_bytes
        return 0, disk_bytes, align_up(new, DISK_ALIGN_BYTES), staged
    away = plain[1] + plain[2]
    tails_away = tails_tier is not Tier.GPU
    slot = away * sizes.page_bytes + (sizes.tail_bytes if tails_away else 0)
    leaving = max(away, (on_cpu[1] + on_cpu[2]) if n_cpu else 0)
    new = min(leaving, sizes.new_pages) * sizes.page_bytes
    new += sizes.new_tail_bytes if tails_away or n_cpu else 0
    return (
        align_up(slot, DISK_ALIGN_BYTES),
        disk_bytes,
        align_up(new, DISK_ALIGN_BYTES),
        staged,
    )
