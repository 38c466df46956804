"""The runtime: a model with everything at its home, ready to run passes. Built from a policy, within budgets.

    footprint (from the real layouts) -> memory plan -> arenas, spill files, stores, lanes -> executor

All tensors of the plan are taken from one arena per tier, whose size is the plan's. What the arenas have
handed out and what the files occupy is the measured side of the audit.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from offload.cache_store import CacheStore
from offload.device import Device
from offload.disk import DiskFile, DiskPool
from offload.executor import Executor
from offload.hidden import HiddenStore
from offload.host import format_bytes
from offload.kv import SEGMENT_TOKENS, CacheShape
from offload.lanes import Lanes
from offload.memory import Arena, MemoryBudgetError, TierBudgets, aligned_bytes
from offload.spill import SpillFolder
from offload.trace import Trace
from offload.units import AttentionUnit, Model
from offload.weights import WeightSource, WeightStore
from policy.footprint import MIXED_FORMAT, KvShape, ModelFootprint, UnitFootprint, UnitKind
from policy.memory_plan import ROW_CHUNK, MemoryPlan, cpu_attention_flags, memory_plan
from policy.schedule import Depths
from policy.tiers import Policy, Tier
from policy.workload import Limits
from quant.kv_formats import parse_cache_format
from quant.linear import packed_row_len

DTYPE_NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}

# Purposes of the plan that torch allocates while it computes: an allowance within the budget, not an arena.
ALLOWANCES = ("work", "logits", "cpu_attention")


def layout_footprint(model: Model, source: WeightSource, name: str) -> ModelFootprint:
    """The footprint of a model as its weights are really laid out, under one format name.

    That is the format of all linear tensors, or "mixed" where a checkpoint has several.
    """
    stored = {s.format.name for unit in model.units for s in source.layout(unit).slots if s.is_linear}
    weight_format = stored.pop() if len(stored) == 1 else MIXED_FORMAT
    tied = {
        part.source
        for unit in model.units
        if unit.rows_only
        for spec in unit.tensors
        if spec.kind == "linear"
        for part in spec.parts
    }
    units: list[UnitFootprint] = []
    for unit in model.units:
        layout = source.layout(unit)
        shapes = layout.linear_shapes
        vector_bytes = sum(s.nbytes for s in layout.slots if not s.is_linear)
        tables = sum(
            aligned_bytes(source.table_format(spec).nbytes(spec.shape))
            for spec in unit.tensors
            if spec.kind == "rows" and spec.parts[0].source not in tied
        )
        kv = None
        if isinstance(unit, AttentionUnit):
            kv = KvShape(
                n_heads=unit.n_heads,
                n_kv_heads=unit.n_kv_heads,
                head_dim=unit.head_dim,
                window=unit.attention.window,
            )
        units.append(
            UnitFootprint(
                name=unit.name,
                layer=unit.layer,
                kind=_kind(unit.name, kv is not None),
                linear_shapes=shapes,
                vector_bytes=vector_bytes,
                nbytes={weight_format: layout.nbytes},
                table_nbytes={weight_format: tables},
                flops_per_token=float(getattr(unit, "flops_per_token", 2 * sum(a * b for a, b in shapes))),
                kv=kv,
                pinned=unit.pinned,
                rows_only=unit.rows_only,
            )
        )
    return ModelFootprint(
        name=name,
        units=tuple(units),
        hidden_size=model.hidden_size,
        vocab_size=model.vocab_size,
        n_layers=model.n_layers,
        max_positions=model.max_positions,
        native_format=weight_format,
    )


def _kind(name: str, has_cache: bool) -> UnitKind:
    if name in ("embed", "final"):
        return "embed" if name == "embed" else "final"
    if name.startswith("head"):
        return "head"
    if has_cache:
        return "attention" if name.endswith(".attn") else "layer"
    return "mlp"


@dataclass(frozen=True, slots=True, kw_only=True)
class TierAudit:
    """Planned against measured bytes of one tier; allowance: what torch may take on top while it computes."""

    planned_bytes: int
    measured_bytes: int
    allowance_bytes: int


class Runtime:
    """A model placed by a policy. Close it, or use it as a context manager.

    Raises MemoryBudgetError if the plan does not fit the budgets, DiskFullError if disk space is short.
    """

    def __init__(
        self,
        model: Model,
        source: WeightSource,
        *,
        name: str,
        policy: Policy,
        limits: Limits,
        device: Device,
        compute_dtype: torch.dtype,
        budgets: TierBudgets,
        disk_dir: Path | None = None,
        len_limit_reason: str = "of the model",
        trace: Trace | None = None,
        depths: Depths | None = None,
        pool: DiskPool | None = None,
    ) -> None:
        self.model = model
        self.device = device
        self.policy = policy
        self.len_limit_reason = len_limit_reason
        self.max_model_len = limits.max_tokens
        self._stack = contextlib.ExitStack()
        depths = depths or limits.depths
        compute = DTYPE_NAMES[compute_dtype]
        self.footprint = layout_footprint(model, source, name)
        # This machine may be another than the one that the limits were planned for.
        limits = replace(limits, packed_row_len=packed_row_len(compute_dtype, device.torch_device.type))
        self.limits = limits
        self.plan: MemoryPlan = memory_plan(
            self.footprint,
            replace(policy, weight_format="auto"),  # the layouts are what they are
            limits,
            first_tier=device.first_tier,
            compute_dtype=compute,
            depths=depths,
        )
        check_budgets(self.plan, budgets)
        try:
            self._build(source, compute_dtype, disk_dir, trace, depths, pool)
        except BaseException:
            self._stack.close()
            raise

    def _build(
        self,
        source: WeightSource,
        compute_dtype: torch.dtype,
        disk_dir: Path | None,
        trace: Trace | None,
        depths: Depths,
        pool: DiskPool | None,
    ) -> None:
        policy, plan, device = self.policy, self.plan, self.device
        if pool is None:
            pool = self._stack.enter_context(DiskPool())
        shape = self._cache_shape(compute_dtype)
        n_batches = policy.num_gpu_batches
        n_cpu = policy.num_cpu_attention_batches
        # CPU-attention batches are spread among the others, so that the device has work in between.
        cpu_attention = cpu_attention_flags(n_batches, n_cpu)
        hidden_homes = plan.hidden_homes if n_batches > 1 else (device.first_tier,)
        spill = self._spill_files(shape, hidden_homes, compute_dtype, cpu_attention, disk_dir, pool)
        self.spill_files = tuple(file for file in spill if file is not None)
        self.arenas = {
            tier: Arena(
                tier.label,
                tier,
                self._arena_bytes(tier),
                device,
                pinned=tier is Tier.CPU,
            )
            for tier in (Tier.GPU, Tier.CPU)
            if tier >= device.first_tier
        }
        for arena in self.arenas.values():
            self._stack.callback(arena.close)
        homes = self._unit_homes()
        weights = WeightStore(
            self.model.units,
            source,
            homes,
            device=device,
            compute_dtype=compute_dtype,
            arenas=self.arenas,
            pool=pool,
            ring_slots=depths.weights,
            staging_slots=depths.weights_staging,
            scratch_bytes=plan.sizes.scratch_bytes,
        )
        self._stack.callback(weights.close)
        cache = CacheStore(
            shape,
            device=device,
            arenas=self.arenas,
            spill=spill[0],
            cpu_attention=cpu_attention,
            tails_tier=plan.tails_tier,
            new_pages=plan.sizes.new_pages,
            new_tail_tokens=min(self.limits.pass_tokens, policy.gpu_batch_size * self.limits.page_tokens),
            attention_staging_bytes=self.limits.attention_staging_bytes,
            depths=depths,
        )
        hidden = HiddenStore(
            hidden_homes,
            max_tokens=self.limits.pass_tokens,
            hidden_size=self.model.hidden_size,
            dtype=compute_dtype,
            device=device,
            arenas=self.arenas,
            spill=spill[1],
            depths=depths,
        )
        self.lanes = Lanes(device, trace=trace)
        # Closed first, so that no lane still moves what the others let go of.
        self._stack.callback(lambda: self.lanes.close(cancel=True))
        self.logits = torch.empty(
            (policy.block_size, self.model.vocab_size),  # rows to sample, one per sequence
            dtype=torch.float32,
            device=device.torch_device,
        )
        self.executor = Executor(
            self.model,
            device=device,
            compute_dtype=compute_dtype,
            weights=weights,
            cache=cache,
            hidden=hidden,
            lanes=self.lanes,
            hidden_homes=hidden_homes,
            chunk_tokens=max(self.limits.chunk_tokens, SEGMENT_TOKENS),
            row_chunk=ROW_CHUNK,
            depths=depths,
            overlap=policy.overlap,
        )
        self.weights = weights

    def _cache_shape(self, compute_dtype: torch.dtype) -> CacheShape:
        units = [unit for unit in self.model.units if isinstance(unit, AttentionUnit)]
        sizes = {(unit.n_kv_heads, unit.head_dim) for unit in units}
        if len(sizes) != 1:
            raise ValueError(f"all layers must have KV heads of one shape, found {sorted(sizes)}")
        n_kv_heads, head_dim = sizes.pop()
        name = self.policy.cache_format
        fmt = parse_cache_format(DTYPE_NAMES[compute_dtype] if name == "auto" else name)
        plain = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
        return CacheShape(
            n_layers=len(units),
            num_gpu_batches=self.policy.num_gpu_batches,
            gpu_batch_size=self.policy.gpu_batch_size,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            page_counts=self.plan.page_counts,
            fmt=fmt,
            tail_dtype=plain.get(fmt.name, compute_dtype),
            page_tokens=self.limits.page_tokens,
        )

    def _unit_homes(self) -> list[Tier]:
        homes = [self.device.first_tier] * len(self.model.units)
        for index, home in zip(self.footprint.streamable, self.plan.unit_homes, strict=True):
            homes[index] = home
        return homes

    def _arena_bytes(self, tier: Tier) -> int:
        """The tier's planned bytes without allowances; each piece starts on a page of its own."""
        planned = sum(
            n for (t, purpose), n in self.plan.items.items() if t is tier and purpose not in ALLOWANCES
        )
        n_pieces = 2 * len(self.model.units) + 8 * self.policy.num_gpu_batches + 64
        return planned + n_pieces * 4096

    def _spill_files(
        self,
        shape: CacheShape,
        hidden_homes: Sequence[Tier],
        compute_dtype: torch.dtype,
        cpu_attention: Sequence[bool],
        disk_dir: Path | None,
        pool: DiskPool,
    ) -> tuple[DiskFile | None, DiskFile | None]:
        cache_bytes = CacheStore.spill_bytes(shape)
        n_hidden = sum(home is Tier.DISK for home in hidden_homes)
        hidden_bytes = n_hidden * HiddenStore.batch_bytes(
            self.limits.pass_tokens, self.model.hidden_size, compute_dtype
        )
        self.spill: SpillFolder | None = None
        if cache_bytes + hidden_bytes == 0:
            return None, None
        base = disk_dir or Path(tempfile.gettempdir()) / "flexrun"
        self.spill = SpillFolder(base, aligned_bytes(cache_bytes) + aligned_bytes(hidden_bytes), pool)
        self._stack.callback(self.spill.close)
        cache = self.spill.create("kv", cache_bytes) if cache_bytes else None
        hidden = self.spill.create("hidden", hidden_bytes) if hidden_bytes else None
        return cache, hidden

    # -- the audit -----------------------------------------------------------------------------------------

    def audit(self) -> dict[str, TierAudit]:
        """Planned and measured bytes by tier label. Measured: what arenas handed out, blocks of files."""
        found: dict[str, TierAudit] = {}
        for tier in Tier:
            if tier < self.device.first_tier:
                continue
            items = {p: n for (t, p), n in self.plan.items.items() if t is tier}
            allowance = sum(n for purpose, n in items.items() if purpose in ALLOWANCES)
            if tier is Tier.DISK:
                measured = self.weights.disk_bytes + (self.spill.measured_bytes if self.spill else 0)
            else:
                measured = self.arenas[tier].used_bytes
            found[tier.label] = TierAudit(
                planned_bytes=sum(items.values()) - allowance,
                measured_bytes=measured,
                allowance_bytes=allowance,
            )
        return found

    def notes(self) -> tuple[str, ...]:
        return tuple(note for arena in self.arenas.values() for note in arena.notes)

    def close(self) -> None:
        """Stop the lanes, remove spill files, free memory. May be called again."""
        self._stack.close()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()


def check_budgets(plan: MemoryPlan, budgets: TierBudgets) -> None:
    """Raise MemoryBudgetError, naming the largest part, if the plan asks more of a tier than its budget."""
    for tier in Tier:
        total, budget = plan.tier_bytes(tier), budgets.of(tier)
        if total <= budget:
            continue
        parts = {purpose: n for (t, purpose), n in plan.items.items() if t is tier and n}
        largest = max(parts, key=lambda purpose: parts[purpose])
        raise MemoryBudgetError(
            what=(
                f"the plan ({', '.join(f'{p} {format_bytes(n)}' for p, n in parts.items())}; most is {largest}; "
                f"the least that would do is --{tier.label}-mem {total})"
            ),
            where=f"{tier.label} memory" if tier is not Tier.DISK else "disk",
            asked_bytes=total,
            left_bytes=budget,
            capacity_bytes=budget,
        )
