"""Seconds of every operation, and of every lane in a pass: one set of formulas for three readers.

`CostModel.op_seconds` gives one operation its time (the simulator's reader). `CostModel.lane_seconds` adds
up what all operations of a pass take on each lane, as an expression that is linear in the placement: with
numbers it evaluates a policy, with LP variables it makes the rows of the linear program. Both call the same
functions for bytes and seconds; a test compares their sums.

Time of a linear layer: FLOPs / rate(tokens per launch), plus unpacking once per unit and pass (the scratch
holds the whole unit, all gpu batches use it), or the rate of a kernel that multiplies packed weights, if that
is known and faster. Attention counts K and V bytes exactly for MHA, GQA and MQA, and the window.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from policy.footprint import PLAIN_BYTES, KvShape, ModelFootprint, UnitFootprint, align_up
from policy.hardware import AttentionRates, Hardware
from policy.memory_plan import (
    DISK_ALIGN_BYTES,
    BlockSizes,
    block_sizes,
    cache_element_bytes,
    cpu_attention_flags,
    resolve_cache_format,
)
from policy.passes import BatchState
from policy.schedule import Depths, Lane, Op, OpKind
from policy.tiers import Tier
from policy.workload import Limits
from quant.kv_formats import parse_cache_format


class Pages(NamedTuple):
    """Pages of one pair by tier: numbers, or linear expressions in the LP's variables."""

    gpu: Any
    cpu: Any
    disk: Any

    def for_cpu_attention(self, first_tier: Tier) -> Pages:
        """A gpu batch whose attention runs on the CPU keeps in cpu memory what others keep on the gpu."""
        return Pages(0.0, self.gpu + self.cpu, self.disk) if first_tier is Tier.GPU else self


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Placement as one pass sees it. weights, hidden: shares of the bytes by tier. read: filled pages of a
    pair where they rest; new: pages it fills, by their home. tails_on_gpu: tails of device batches rest there."""

    weights: tuple[Any, Any, Any]
    hidden: tuple[Any, Any, Any]
    read: Pages
    new: Pages
    tails_on_gpu: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """Cache sizes of one kind of attention layer: how many there are, bytes of a page and of a tail token."""

    kv: KvShape
    unit: int
    count: int
    page_bytes: int
    page_disk_bytes: int
    token_bytes: int


@lru_cache(maxsize=64)
def _static_parts(
    footprint: ModelFootprint, weight_format: str, cache_format: str, compute_dtype: str, page_tokens: int
) -> tuple[list[int], dict[int, int], list[_Layer], list[int], list[int]]:
    """What does not depend on the block: for each unit the first that costs the same, how many there are of
    each such class, kinds of attention layers, units that load and that store hidden states."""
    seen: dict[tuple[Any, ...], int] = {}
    classes, counts = [], dict[int, int]()
    kinds: dict[KvShape, tuple[int, int]] = {}
    for i, u in enumerate(footprint.units):
        key = (u.kind, u.linear_shapes, u.nbytes[weight_format], u.kv, u.flops_per_token, u.rows_only)
        first = seen.setdefault(key, i)
        classes.append(first)
        counts[first] = counts.get(first, 0) + 1
        if u.kv is not None:
            unit, n = kinds.get(u.kv, (i, 0))
            kinds[u.kv] = (unit, n + 1)
    fmt = parse_cache_format(cache_format)
    element = cache_element_bytes(cache_format, compute_dtype)
    layers = []
    for kv, (unit, n) in kinds.items():
        page = fmt.page_nbytes(page_tokens=page_tokens, n_kv_heads=kv.n_kv_heads, head_dim=kv.head_dim)
        layers.append(
            _Layer(
                kv=kv,
                unit=unit,
                count=n,
                page_bytes=page,
                page_disk_bytes=align_up(page, DISK_ALIGN_BYTES),
                token_bytes=kv.elements_per_token * element,
            )
        )
    all_tokens = [i for i, u in enumerate(footprint.units) if not u.rows_only]
    return classes, counts, layers, [i for i in all_tokens if i > 0], all_tokens[:-1]


class CostModel:
    """Costs of one block shape on one machine.

    n_cpu_attention: gpu batches whose attention runs on the CPU in passes without whole new prompts.
    unpack_per_batch: packed weights are unpacked again for each gpu batch (as FlexGen does).
    whole_units: weights are never moved in pieces (as FlexGen does).
    overlap: lanes run at the same time.
    """

    def __init__(
        self,
        footprint: ModelFootprint,
        hardware: Hardware,
        limits: Limits,
        *,
        gpu_batch_size: int,
        num_gpu_batches: int,
        weight_format: str,
        cache_format: str,
        n_cpu_attention: int = 0,
        schedule: str = "refill",
        overlap: bool = True,
        unpack_per_batch: bool = False,
        whole_units: bool = False,
        depths: Depths | None = None,
    ) -> None:
        self.footprint, self.hardware, self.limits = footprint, hardware, limits
        self.gpu_batch_size, self.n_batches = gpu_batch_size, num_gpu_batches
        self.n_cpu_attention = n_cpu_attention
        self.cpu_flags = cpu_attention_flags(num_gpu_batches, n_cpu_attention)
        self.first_tier = hardware.first_tier
        self.three = self.first_tier is Tier.GPU
        self.overlap = overlap
        self.schedule = schedule
        self.unpack_per_batch = unpack_per_batch
        self.whole_units = whole_units
        self.depths = depths or limits.depths
        self.weight_format = footprint.resolve_format(weight_format)
        self.cache_format = resolve_cache_format(cache_format, hardware.compute_dtype)
        self.element_bytes = PLAIN_BYTES[hardware.compute_dtype]
        self.sizes: BlockSizes = block_sizes(
            footprint,
            limits,
            gpu_batch_size=gpu_batch_size,
            num_gpu_batches=num_gpu_batches,
            weight_format=self.weight_format,
            cache_format=self.cache_format,
            compute_dtype=hardware.compute_dtype,
            schedule=schedule,
        )
        static = _static_parts(
            footprint, self.weight_format, self.cache_format, hardware.compute_dtype, limits.page_tokens
        )
        self.unit_class, self._class_counts, self._layers, self.hidden_loads, self.hidden_stores = static
        self.n_streamable = len(footprint.streamable)
        self._compute_cache: dict[tuple[Any, ...], float] = {}

    def forget(self) -> None:
        """Drop remembered seconds, after the hardware was replaced."""
        self._compute_cache = {}

    def for_footprint(self, footprint: ModelFootprint) -> CostModel:
        """The same block shape on the same machine for another model."""
        return CostModel(
            footprint,
            self.hardware,
            self.limits,
            gpu_batch_size=self.gpu_batch_size,
            num_gpu_batches=self.n_batches,
            weight_format=self.weight_format,
            cache_format=self.cache_format,
            n_cpu_attention=self.n_cpu_attention,
            schedule=self.schedule,
            overlap=self.overlap,
            unpack_per_batch=self.unpack_per_batch,
            whole_units=self.whole_units,
            depths=self.depths,
        )

    # -- bytes ---------------------------------------------------------------------------------------------

    def _seen_frac(self, state: BatchState, kv: KvShape) -> float:
        """Share of the filled pages that the window lets attention see."""
        if not kv.window or not state.filled:
            return 1.0
        per_sequence = kv.window / self.limits.page_tokens + 1
        return min(1.0, per_sequence * max(state.decode_tokens, 1.0) / state.filled)

    def upload_cache_bytes(self, state: BatchState, layer: _Layer, read: Pages, tails_on_gpu: bool) -> Any:
        tails = 0.0 if tails_on_gpu else state.tail_tokens * layer.token_bytes
        return (read.cpu + read.disk) * (layer.page_bytes * self._seen_frac(state, layer.kv)) + tails

    def read_cache_bytes(self, state: BatchState, layer: _Layer, read: Pages) -> Any:
        return read.disk * (layer.page_disk_bytes * self._seen_frac(state, layer.kv))

    def download_cache_bytes(self, state: BatchState, layer: _Layer, new: Pages, tails_on_gpu: bool) -> Any:
        tails = 0.0 if tails_on_gpu else state.new_tail_tokens * layer.token_bytes
        return (new.cpu + new.disk) * layer.page_bytes + tails

    def hidden_bytes(self, state: BatchState) -> float:
        return state.tokens * self.footprint.hidden_size * self.element_bytes

    # -- seconds on the compute device and the CPU ------------------------------------------------------------

    def _attention_seconds(
        self, state: BatchState, kv: KvShape, rates: AttentionRates, unpack_table: str
    ) -> float:
        window = kv.window or math.inf
        seconds = 0.0
        if state.prefill_tokens:
            pairs = state.prefill_tokens * min(state.prefill_span, window)
            seconds += 4.0 * kv.query_elements * pairs / rates.prefill_flops_per_s
        if state.decode_tokens:
            keys = state.decode_tokens * min(state.context, window)
            seconds += keys * kv.elements_per_token * self.element_bytes / rates.decode_bytes_per_s
            seconds += 4.0 * kv.query_elements * keys / rates.decode_flops_per_s
        unpacked = state.filled * self._seen_frac(state, kv) * self.limits.page_tokens
        rate = self.hardware.unpack_rate(unpack_table, self.cache_format)
        seconds += unpacked * kv.elements_per_token / rate
        made = state.new_pages * self.limits.page_tokens * kv.elements_per_token
        return seconds + made / self.hardware.unpack_rate("cache_pack", self.cache_format)

    def _linear_seconds(self, unit: UnitFootprint, state: BatchState, first_batch: bool) -> float:
        tokens = state.rows if unit.rows_only else state.tokens
        if not tokens:
            return 0.0
        hw = self.hardware
        launch = min(tokens, float(self.limits.chunk_tokens))
        flops = unit.flops_per_token * tokens
        gemm = flops / hw.gemm[hw.compute_dtype].rate(launch) if flops else 0.0
        seconds = gemm
        if self.weight_format != hw.compute_dtype and unit.n_elements:
            launches = 0.0
            if self.weight_format not in PLAIN_BYTES:
                launches = hw.overhead_seconds.get("packed", 0.0) * len(unit.linear_shapes)
            unpack = unit.n_elements / hw.unpack_rate("unpack", self.weight_format) + launches
            if self.unpack_per_batch:
                seconds += unpack
            else:
                fused = hw.gemm.get(self.weight_format)
                packed = math.inf
                if fused is not None:
                    packed = flops / fused.rate(launch) + launches * math.ceil(tokens / launch - 1e-9)
                # The choice is made for the unit, whose scratch serves all gpu batches.
                if packed * self.n_batches < unpack + gemm * self.n_batches:
                    seconds = packed
                elif first_batch:
                    seconds += unpack
        elements = max(unit.activation_elements_per_token, float(self.footprint.hidden_size))
        return seconds + tokens * elements * self.element_bytes / hw.elementwise_bytes_per_s

    def _chunks(self, unit: UnitFootprint, state: BatchState) -> int:
        tokens = state.rows if unit.rows_only else state.tokens
        return max(1, math.ceil(tokens / self.limits.chunk_tokens - 1e-9))

    def compute_seconds(self, kind: OpKind, unit_class: int, state: BatchState, first_batch: bool) -> float:
        """COMPUTE, PROJECT, FINISH or CPU_ATTENTION of one (unit, batch)."""
        key = (kind, unit_class, state, first_batch)
        found = self._compute_cache.get(key)
        if found is None:
            found = self._compute_cache[key] = self._compute_seconds(kind, unit_class, state, first_batch)
        return found

    def _compute_seconds(self, kind: OpKind, unit_class: int, state: BatchState, first_batch: bool) -> float:
        unit = self.footprint.units[unit_class]
        hw = self.hardware
        if kind is OpKind.CPU_ATTENTION:
            assert unit.kv is not None
            rates = hw.cpu_attention if self.three else hw.device_attention
            table = "cpu_cache_unpack" if self.three else "cache_unpack"
            return (
                self._attention_seconds(state, unit.kv, rates, table) + hw.overhead_seconds["cpu_attention"]
            )
        overhead = hw.overhead_seconds["compute"] * self._chunks(unit, state)
        linear = self._linear_seconds(unit, state, first_batch)
        if kind is OpKind.PROJECT:
            return linear * unit.project_frac + overhead
        if kind is OpKind.FINISH:
            return linear * (1 - unit.project_frac) + overhead
        if unit.kv is not None:
            linear += self._attention_seconds(state, unit.kv, hw.device_attention, "cache_unpack")
            overhead += hw.overhead_seconds.get("attention", 0.0) * self._chunks(unit, state)
        return linear + overhead

    # -- seconds of copies --------------------------------------------------------------------------------------

    def _transfer(self, nbytes: Any, rate: float) -> Any:
        return nbytes * (1.0 / rate)

    def attends_on_cpu(self, state: BatchState, batch: int) -> bool:
        """Whether gpu batch `batch` attends on the CPU in this pass: never where it brings only new prompts,
        which need no stored page."""
        return self.cpu_flags[batch] and state.decode_tokens > 0

    def n_attending_on_cpu(self, state: BatchState) -> int:
        return self.n_cpu_attention if state.decode_tokens > 0 else 0

    def write_rate(self, state: BatchState) -> float:
        hw = self.hardware
        return hw.disk_write_bytes_per_s if state.prefill_tokens else hw.disk_write_small_bytes_per_s

    def op_seconds(self, op: Op, state: BatchState, flow: Flow) -> float:
        """Seconds of one operation of the schedule when its lane is alone."""
        hw = self.hardware
        over = hw.overhead_seconds
        kind = op.kind
        unit_class = self.unit_class[op.unit]
        unit = self.footprint.units[unit_class]
        if kind in (OpKind.COMPUTE, OpKind.PROJECT, OpKind.FINISH, OpKind.CPU_ATTENTION):
            return self.compute_seconds(kind, unit_class, state, op.batch == 0)
        if kind is OpKind.READ_WEIGHTS:
            nbytes: float = unit.nbytes[self.weight_format] / op.n_pieces
            return nbytes / hw.disk_read_bytes_per_s + over["disk"]
        if kind is OpKind.UPLOAD_WEIGHTS:
            nbytes = unit.nbytes[self.weight_format] / op.n_pieces
            return nbytes / hw.upload_bytes_per_s + over["transfer"]
        if kind in (OpKind.READ_HIDDEN, OpKind.WRITE_HIDDEN):
            rate = hw.disk_read_bytes_per_s if kind is OpKind.READ_HIDDEN else self.write_rate(state)
            return self.hidden_bytes(state) / rate + over["disk"]
        if kind in (OpKind.UPLOAD_HIDDEN, OpKind.DOWNLOAD_HIDDEN):
            rate = hw.upload_bytes_per_s if kind is OpKind.UPLOAD_HIDDEN else hw.download_bytes_per_s
            return self.hidden_bytes(state) / rate + over["transfer"]
        assert unit.kv is not None
        if kind in (OpKind.DOWNLOAD_QKV, OpKind.UPLOAD_ATTENDED):
            down = kind is OpKind.DOWNLOAD_QKV
            elements = unit.kv.qkv_elements if down else unit.kv.query_elements
            rate = hw.download_bytes_per_s if down else hw.upload_bytes_per_s
            return state.tokens * elements * self.element_bytes / rate + over["transfer"]
        layer = next(x for x in self._layers if x.kv == unit.kv)
        on_cpu = self.attends_on_cpu(state, op.batch)
        stays = self.cpu_flags[op.batch]
        read = flow.read.for_cpu_attention(self.first_tier) if stays else flow.read
        new = flow.new.for_cpu_attention(self.first_tier) if stays else flow.new
        on_gpu = flow.tails_on_gpu and not stays
        if kind is OpKind.READ_CACHE:
            return float(self.read_cache_bytes(state, layer, read)) / hw.disk_read_bytes_per_s + over["disk"]
        if kind is OpKind.UPLOAD_CACHE:
            assert not on_cpu
            nbytes = float(self.upload_cache_bytes(state, layer, read, on_gpu))
            return nbytes / hw.upload_bytes_per_s + over["transfer"]
        if kind is OpKind.DOWNLOAD_CACHE:
            nbytes = float(self.download_cache_bytes(state, layer, new, on_gpu))
            return nbytes / hw.download_cache_bytes_per_s + over["transfer"]
        assert kind is OpKind.WRITE_CACHE
        return float(new.disk * layer.page_disk_bytes) / self.write_rate(state) + over["disk"]

    # -- lanes of a pass ------------------------------------------------------------------------------------------

    def weight_pieces(self, state: BatchState, flow: Flow) -> int:
        """In how many pieces a streamed unit comes at least, whatever the fractions are: one per gpu batch where
        tails go up with every pair, else 1. The schedule also cuts units where pages or hidden states travel,
        but a count that depends on fractions would not be linear; never more than the schedule's keeps the
        linear program a bound."""
        if not (self.three and self.overlap) or self.whole_units or self.n_attending_on_cpu(state):
            return 1
        tails_away = not flow.tails_on_gpu or self.n_cpu_attention > 0
        return self.n_batches if tails_away and state.tail_tokens > 1e-9 else 1

    def lane_seconds(self, state: BatchState, flow: Flow) -> dict[Lane, Any]:
        """Seconds of each lane in a pass of num_gpu_batches such batches, linear in `flow`.

        Fixed costs of copies are counted in proportion to what is copied, those of weights for each of
        `weight_pieces`; `op_seconds` counts them whole.
        """
        hw = self.hardware
        over = hw.overhead_seconds
        lanes: dict[Lane, Any] = {}

        def add(lane: Lane, seconds: Any) -> None:
            lanes[lane] = lanes[lane] + seconds if lane in lanes else seconds

        n_cpu = self.n_attending_on_cpu(state)
        self._add_compute(state, n_cpu, add)
        # Weights.
        _, w_cpu, w_disk = flow.weights
        weights = float(self.sizes.weights_bytes)
        n_loads = float(self.n_streamable * self.weight_pieces(state, flow))
        add(Lane.DISK_READ, w_disk * (weights / hw.disk_read_bytes_per_s + n_loads * over["disk"]))
        if self.three:
            upload = weights / hw.upload_bytes_per_s + n_loads * over["transfer"]
            add(Lane.UPLOAD, (w_cpu + w_disk) * upload)
        # Cache: pairs of every kind of layer, on the device and on the CPU.
        n_stay = self.n_cpu_attention
        groups = [(self.n_batches - n_stay, False), (n_stay, True)]
        for count, stays in groups:
            if not count:
                continue
            read = flow.read.for_cpu_attention(self.first_tier) if stays else flow.read
            new = flow.new.for_cpu_attention(self.first_tier) if stays else flow.new
            on_gpu = flow.tails_on_gpu and not stays
            on_cpu = stays and n_cpu > 0
            for layer in self._layers:
                pairs = float(count * layer.count)
                add(
                    Lane.DISK_READ,
                    pairs
                    * self._transfer(self.read_cache_bytes(state, layer, read), hw.disk_read_bytes_per_s),
                )
                add(
                    Lane.DISK_WRITE,
                    pairs * self._transfer(new.disk * layer.page_disk_bytes, self.write_rate(state)),
                )
                if self.three and not on_cpu:
                    up = self.upload_cache_bytes(state, layer, read, on_gpu)
                    add(Lane.UPLOAD, pairs * self._transfer(up, hw.upload_bytes_per_s))
                    down = self.download_cache_bytes(state, layer, new, on_gpu)
                    add(Lane.DOWNLOAD, pairs * self._transfer(down, hw.download_cache_bytes_per_s))
        if self.three and n_cpu:
            for layer in self._layers:
                pairs = n_cpu * layer.count
                tokens = pairs * state.tokens * self.element_bytes
                fixed = pairs * over["transfer"]
                add(Lane.DOWNLOAD, tokens * layer.kv.qkv_elements / hw.download_bytes_per_s + fixed)
                add(Lane.UPLOAD, tokens * layer.kv.query_elements / hw.upload_bytes_per_s + fixed)
        # Hidden states of a block of several gpu batches.
        if self.n_batches > 1:
            _, h_cpu, h_disk = flow.hidden
            nbytes = self.hidden_bytes(state) * self.n_batches
            n_load, n_store = len(self.hidden_loads), len(self.hidden_stores)
            fixed = self.n_batches * over["disk"]
            add(Lane.DISK_READ, h_disk * (n_load * (nbytes / hw.disk_read_bytes_per_s + fixed)))
            add(Lane.DISK_WRITE, h_disk * (n_store * (nbytes / self.write_rate(state) + fixed)))
            if self.three:
                fixed = self.n_batches * over["transfer"]
                add(Lane.UPLOAD, (h_cpu + h_disk) * (n_load * (nbytes / hw.upload_bytes_per_s + fixed)))
                add(Lane.DOWNLOAD, (h_cpu + h_disk) * (n_store * (nbytes / hw.download_bytes_per_s + fixed)))
        return lanes

    def compute_lane_seconds(self, state: BatchState) -> float:
        """Busy seconds of the compute lane in a pass, which no placement changes."""
        found = {Lane.COMPUTE: 0.0}

        def add(lane: Lane, seconds: float) -> None:
            found[lane] = found.get(lane, 0.0) + seconds

        self._add_compute(state, self.n_attending_on_cpu(state), add)
        return found[Lane.COMPUTE]

    def _add_compute(self, state: BatchState, n_cpu: int, add: Any) -> None:
        compute = attend = 0.0
        for unit_class, count in self._class_counts.items():
            unit = self.footprint.units[unit_class]
            if unit.kv is None or not n_cpu:
                one = self.compute_seconds(OpKind.COMPUTE, unit_class, state, True)
                rest = self.compute_seconds(OpKind.COMPUTE, unit_class, state, False)
                compute += count * (one + (self.n_batches - 1) * rest)
                continue
            for j in range(self.n_batches):
                kinds = (OpKind.PROJECT, OpKind.FINISH) if self.cpu_flags[j] else (OpKind.COMPUTE,)
                compute += count * sum(self.compute_seconds(k, unit_class, state, j == 0) for k in kinds)
            attend += count * n_cpu * self.compute_seconds(OpKind.CPU_ATTENTION, unit_class, state, False)
        add(Lane.COMPUTE, compute)
        if attend:
            add(Lane.CPU_ATTENTION, attend)

    def phase_seconds(self, state: BatchState, flow: Flow) -> dict[str, Any]:
        """Seconds of a pass in which the cache's rings bind, by the lane that fills them, linear in `flow`.

        While units without a cache are computed, pages can be fetched only as far as the ring reaches. The
        other gpu batches' pages of a layer arrive during its own unit, so a pass takes at least the
        computation of all other units plus the loads beyond the ring of every layer.
        """
        if not self.overlap or not state.filled:
            return {}
        other = 0.0
        for unit_class, count in self._class_counts.items():
            if self.footprint.units[unit_class].kv is None:
                one = self.compute_seconds(OpKind.COMPUTE, unit_class, state, True)
                rest = self.compute_seconds(OpKind.COMPUTE, unit_class, state, False)
                other += count * (one + (self.n_batches - 1) * rest)
        hw = self.hardware
        rows: dict[str, Any] = {}
        beyond = self.n_batches - min(self.depths.cache, self.depths.cache_staging)
        if beyond > 0:
            read: Any = other
            for layer in self._layers:
                nbytes = self.read_cache_bytes(state, layer, flow.read)
                read = read + float(beyond * layer.count) * self._transfer(nbytes, hw.disk_read_bytes_per_s)
            rows["disk_read_of_cache"] = read
        n_cpu = self.n_attending_on_cpu(state)
        beyond = self.n_batches - n_cpu - self.depths.cache
        if self.three and beyond > 0:
            upload: Any = other
            for layer in self._layers:
                nbytes = self.upload_cache_bytes(state, layer, flow.read, flow.tails_on_gpu)
                upload = upload + float(beyond * layer.count) * self._transfer(nbytes, hw.upload_bytes_per_s)
            rows["upload_of_cache"] = upload
        return rows

    def device_seconds(self, state: BatchState) -> float:
        """Seconds of the compute lane with its waits for CPU attention, which no placement shortens.

        Follows the schedule: a batch's output projection comes behind the next CPU-attention batch's
        projections, and no later than the end of the unit. 0 without CPU attention.
        """
        if not self.n_attending_on_cpu(state):
            return 0.0
        key = ("device", -1, state, False)
        found = self._compute_cache.get(key)
        if found is not None:
            return found
        total = 0.0
        for unit_class, count in self._class_counts.items():
            unit = self.footprint.units[unit_class]
            if unit.kv is None:
                one = self.compute_seconds(OpKind.COMPUTE, unit_class, state, True)
                rest = self.compute_seconds(OpKind.COMPUTE, unit_class, state, False)
                total += count * (one + (self.n_batches - 1) * rest)
            else:
                total += count * self._unit_span(unit_class, unit.kv, state)
        self._compute_cache[key] = total
        return total

    def _unit_span(self, unit_class: int, kv: KvShape, state: BatchState) -> float:
        """Seconds from a unit's first computation to its last, where some batches attend on the CPU."""
        hw = self.hardware
        down = up = 0.0
        if self.three:
            nbytes = state.tokens * self.element_bytes
            down = nbytes * kv.qkv_elements / hw.download_bytes_per_s + hw.overhead_seconds["transfer"]
            up = nbytes * kv.query_elements / hw.upload_bytes_per_s + hw.overhead_seconds["transfer"]
        attend = self.compute_seconds(OpKind.CPU_ATTENTION, unit_class, state, False)
        now = cpu_free = 0.0
        waiting: list[float] = []
        for j, on_cpu in enumerate(self.cpu_flags):
            kind = OpKind.PROJECT if on_cpu else OpKind.COMPUTE
            now += self.compute_seconds(kind, unit_class, state, j == 0)
            if on_cpu:
                cpu_free = max(cpu_free, now + down) + attend
                waiting.append(cpu_free + up)
            while len(waiting) > (0 if j == self.n_batches - 1 else 1):
                ready = waiting.pop(0)
                now = max(now, ready) + self.compute_seconds(OpKind.FINISH, unit_class, state, False)
        return now

    def fixed_seconds(self, state: BatchState) -> float:
        """What a pass takes besides its lanes: bookkeeping and sampling."""
        over = self.hardware.overhead_seconds
        return over["pass"] + over["row"] * state.rows * self.n_batches

    def pass_seconds(self, lanes: Mapping[Lane, float], state: BatchState, flow: Flow | None = None) -> float:
        """The slowest lane, shared resource or phase with overlap, the sum of all lanes without.

        flow: the pass's placement; without it phases are left out.
        """
        fixed = self.fixed_seconds(state)
        if not self.overlap:
            return sum(lanes.values()) + fixed
        shared = [
            sum(share * lanes.get(Lane(lane), 0.0) for lane, share in shares.items())
            for shares in self.hardware.sharing.values()
        ]
        phases = self.phase_seconds(state, flow).values() if flow is not None else ()
        return max([*lanes.values(), *shared, *phases, self.device_seconds(state)]) + fixed
