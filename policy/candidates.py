"""What a search may choose from: block shapes, their limits and costs, and what none of their placements exceeds.

A candidate is a block shape x formats x share of CPU attention x schedule. Its bound is optimistic and costs
microseconds: all memory is used for what saves most traffic.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from policy import lp
from policy.cost import CostModel, Flow, Pages
from policy.footprint import ModelFootprint
from policy.hardware import Hardware
from policy.schedule import Lane
from policy.tiers import ScheduleName, Tier
from policy.workload import WEIGHTS_SLOTS, Limits, Workload, limits_for

GPU_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
COARSE_GPU_BATCH_SIZES = GPU_BATCH_SIZES[::2]
"""Where many formats are to be compared; shapes around the best are tried in any case."""
NUM_GPU_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
AUTO_WEIGHT_FORMATS = ("int8-g64", "int4-g64")
AUTO_CACHE_FORMATS = ("int8", "int4")
WORTH_A_SLOT = 1.001
"""How much faster a shape's bound must become by a slot less for weights, for that to be tried."""
LONG_PROMPT_PASS_TOKENS = 256
"""Tokens that a pass holds at the least where longer prompts than the known ones may come: they are computed in
pieces of so many (offload.pages.SEGMENT_TOKENS)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A block's shape, formats and schedule, before anything is placed."""

    gpu_batch_size: int
    num_gpu_batches: int
    weight_format: str
    cache_format: str
    n_cpu_attention: int
    schedule: ScheduleName
    weights_slots: int = WEIGHTS_SLOTS[0]

    @property
    def block(self) -> int:
        return self.gpu_batch_size * self.num_gpu_batches

    @property
    def kind(self) -> tuple[object, ...]:
        """Candidates of one kind are alike in how far their lanes overlap."""
        share = round(2 * self.n_cpu_attention / self.num_gpu_batches)
        few = self.num_gpu_batches.bit_length()
        return self.schedule, self.weight_format, self.cache_format, share, few, self.weights_slots


class Candidates:
    """All candidates of one search; see `policy.search.search` for the arguments."""

    def __init__(
        self,
        footprint: ModelFootprint,
        hardware: Hardware,
        workload: Workload,
        *,
        max_tokens: int,
        schedules: Sequence[ScheduleName],
        overlap: bool,
        chunk_tokens: int,
        page_tokens: int,
        unpack_per_batch: bool,
        weights_slots: Sequence[int],
    ) -> None:
        self.footprint, self.hardware, self.workload = footprint, hardware, workload
        self.max_tokens = max_tokens
        self.schedules, self.overlap = schedules, overlap
        self.chunk_tokens, self.page_tokens = chunk_tokens, page_tokens
        self.unpack_per_batch = unpack_per_batch
        # Without overlap every operation waits for the one before.
        self.weights_slots = sorted(weights_slots, reverse=True) if overlap else [min(weights_slots)]

    def limits(self, shape: Shape) -> Limits:
        """The limits of a block: of the workload, and room for one sequence of `max_tokens` in each gpu batch."""
        limits = limits_for(
            self.workload,
            gpu_batch_size=shape.gpu_batch_size,
            schedule=shape.schedule,
            weights_slots=shape.weights_slots,
            chunk_tokens=self.chunk_tokens,
            page_tokens=self.page_tokens,
            packed_row_len=self.hardware.packed_row_len,
        )
        if self.max_tokens <= limits.max_tokens:
            return limits
        pass_tokens = max(limits.pass_tokens, min(self.max_tokens, LONG_PROMPT_PASS_TOKENS))
        chunk_tokens = min(self.chunk_tokens, pass_tokens)
        return dataclasses.replace(
            limits,
            max_tokens=self.max_tokens,
            pass_tokens=pass_tokens,
            chunk_tokens=chunk_tokens,
            logit_rows=chunk_tokens if self.workload.scoring else limits.logit_rows,
        )

    def problem(self, shape: Shape) -> lp.Problem:
        cost = CostModel(
            self.footprint,
            self.hardware,
            self.limits(shape),
            gpu_batch_size=shape.gpu_batch_size,
            num_gpu_batches=shape.num_gpu_batches,
            weight_format=shape.weight_format,
            cache_format=shape.cache_format,
            n_cpu_attention=shape.n_cpu_attention,
            schedule=shape.schedule,
            overlap=self.overlap,
            unpack_per_batch=self.unpack_per_batch,
        )
        return lp.make_problem(cost, self.workload)

    def shapes(
        self,
        gpu_batch_sizes: Iterable[int],
        num_gpu_batches: Iterable[int],
        weight_formats: Sequence[str],
        cache_formats: Sequence[str],
        cpu_fractions: Sequence[float],
    ) -> list[Shape]:
        requests = self.workload.num_requests
        batches = sorted(set(num_gpu_batches))
        found: dict[Shape, None] = {}
        for gbs in sorted(set(gpu_batch_sizes)):
            for n in batches:
                if gbs < 1 or n < 1 or (requests is not None and gbs * (n - 1) >= requests > 1):
                    continue
                for fraction in cpu_fractions:
                    for wf in weight_formats:
                        for cf in cache_formats:
                            for schedule in self.schedules:
                                shape = Shape(
                                    gpu_batch_size=gbs,
                                    num_gpu_batches=n,
                                    weight_format=wf,
                                    cache_format=cf,
                                    n_cpu_attention=round(fraction * n),
                                    schedule=schedule,
                                    weights_slots=self.weights_slots[0],
                                )
                                found[shape] = None
        return list(found)

    def options(self, shape: Shape) -> list[tuple[float, Shape, lp.Problem]]:
        """(bound, shape, problem) of a shape that may fit, and of the same with fewer slots for weights where the
        memory that this leaves may be worth more than a slot."""
        found: list[tuple[float, Shape, lp.Problem]] = []
        for slots in [n for n in self.weights_slots if n <= shape.weights_slots]:
            slim = dataclasses.replace(shape, weights_slots=slots)
            problem = self.problem(slim)
            bound = self.bound(problem, slim)
            if bound > max((WORTH_A_SLOT * other for other, _, _ in found), default=0.0):
                found.append((bound, slim, problem))
        return found

    def around(self, shape: Shape) -> list[Shape]:
        """Shapes between the grid's points next to a good one."""
        sizes = {max(1, round(shape.gpu_batch_size * f)) for f in (0.75, 0.85, 1.0, 1.15, 1.3)}
        counts = {max(1, shape.num_gpu_batches + d) for d in (-2, -1, 0, 1, 2)}
        return [
            dataclasses.replace(
                shape,
                gpu_batch_size=gbs,
                num_gpu_batches=n,
                n_cpu_attention=min(n, round(shape.n_cpu_attention / shape.num_gpu_batches * n)),
                weights_slots=self.weights_slots[0],
            )
            for gbs in sorted(sizes)
            for n in sorted(counts)
        ]

    def throughput(self, problem: lp.Problem, seconds_per_token: float, shape: Shape) -> float:
        """Tokens per second of the whole workload: a finite one ends with a block that is not full, or
        with slots that fill and drain."""
        return self._filled_frac(shape) / seconds_per_token

    def _filled_frac(self, shape: Shape) -> float:
        requests = self.workload.num_requests
        if requests is None:
            return 1.0
        turns = requests / shape.block
        if shape.schedule == "static" or self.workload.scoring:
            return turns / -(-requests // shape.block)
        # Slots fill within half a turn and drain within another; those passes are about half as long.
        return turns / (turns + 0.5)

    def latency(self, problem: lp.Problem, seconds_per_token: float, shape: Shape) -> float:
        """Seconds that one request takes: its whole block (static), or its prompt's pass and all others."""
        seconds = seconds_per_token * problem.tokens
        if shape.schedule == "refill" and not self.workload.scoring:
            return seconds * max(1, self.workload.gen_len)
        return seconds

    def bound(self, problem: lp.Problem, shape: Shape) -> float:
        """Tokens per second that no placement of this shape exceeds, 0 if nothing can fit.

        Traffic: what is not on the gpu is uploaded in each pass, what is neither there nor in cpu memory is
        read from disk; fixed sizes, tails and the weights' ring are subtracted first, other rings are not.
        """
        cost, sizes, hw = problem.cost, problem.cost.sizes, self.hardware
        n_device = cost.n_batches - cost.n_cpu_attention
        caps = {t: hw.capacity(t) for t in problem.tiers}
        first = cost.first_tier
        caps[first] -= sizes.pinned_bytes + sizes.scratch_bytes + sizes.work.nbytes + sizes.logits_bytes
        caps[first] -= sizes.hidden_bytes
        caps[Tier.CPU] -= sizes.tables_bytes
        arena = cost.n_batches * sizes.slots * sizes.layers_page_bytes
        tails = cost.n_batches * sizes.layers_tail_bytes
        if any(c < 0 for c in caps.values()) or sizes.weights_bytes + arena + tails > sum(caps.values()):
            return 0.0
        if sizes.weights_bytes > caps[first]:
            rings = [r.ring_bytes for r in problem.rings if r.resident_bytes + r.ring_bytes <= caps[first]]
            if not rings:
                return 0.0
            caps[first] -= min(rings)
        gpu = caps.get(Tier.GPU, 0.0)
        memory = gpu + caps[Tier.CPU] - tails
        if memory < 0:
            return 0.0
        nothing = Flow(
            weights=(1.0, 0.0, 0.0),
            hidden=(1.0, 0.0, 0.0),
            read=Pages(0.0, 0.0, 0.0),
            new=Pages(0.0, 0.0, 0.0),
            tails_on_gpu=True,
        )
        total = 0.0
        for state, repeats in problem.passes:
            lanes = cost.lane_seconds(state, nothing)
            cached = min(state.filled, float(sizes.slots)) * sizes.layers_page_bytes
            if not any(u.window for u in (x.kv for x in self.footprint.units) if u is not None):
                n_up = n_device if not (cost.schedule == "static" and not state.filled) else 0
                up = sizes.weights_bytes + n_up * cached - gpu
                down = sizes.weights_bytes + cost.n_batches * cached - memory
            else:
                up = sizes.weights_bytes - gpu
                down = sizes.weights_bytes - memory
            if cost.three:
                lanes[Lane.UPLOAD] = lanes.get(Lane.UPLOAD, 0.0) + max(0.0, up) / hw.upload_bytes_per_s
            lanes[Lane.DISK_READ] = max(0.0, down) / hw.disk_read_bytes_per_s
            total += repeats * cost.pass_seconds(lanes, state)
        return self.throughput(problem, total / problem.tokens, shape)
