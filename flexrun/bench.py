"""A measured run beside its plan and beside what the hardware allows.

The bound is the sum over the phases (prefill, decode) of the largest resource time in that phase, for the work
that the policy cannot avoid: FLOPs of the linear layers at the GEMM rate that a short calibration reaches at
the run's shapes, unpacking once per pass included; bytes at the bandwidth that short calibrations before and after
reach, or the run itself where that was more.
Attention, norms and sampling are left out of the bound, so a real run cannot reach an efficiency of 1.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from flexrun.audit import MeteredEngine, audit_run, warm_up
from flexrun.llm import LLM
from flexrun.report import peak_rss_bytes
from flexrun.request import SamplingParams
from offload.profile import (
    copy_bytes_per_s,
    gemm_seconds,
    packed_linear_seconds,
    read_bytes_per_s,
    unpack_seconds,
)
from offload.weights import DTYPE_FORMATS, TensorSlot
from policy.tiers import Tier
from policy.workload import Workload
from quant.linear import crossover_tokens

_CALIBRATION_BYTES = 512 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Work of one phase: passes, tokens and the lanes' bytes."""

    name: str
    passes: int
    tokens: int
    rows: int
    seconds: float
    lanes: dict[str, tuple[float, int]]


@dataclass(slots=True, kw_only=True)
class BenchResult:
    """What `flexrun bench` reports; see `to_dict` for the JSON object."""

    model: str
    prompt_len: int
    gen_len: int
    num_requests: int
    phases: list[Phase]
    wall_seconds: float
    resources: dict[str, dict[str, float]]
    bound_seconds: float
    whole_run_bound_seconds: float
    peak_rss: int  # of the run, before the calibration allocates anything
    audit: dict[str, Any]
    llm: LLM
    notes: list[str] = field(default_factory=list)

    @property
    def efficiency_frac(self) -> float:
        return self.bound_seconds / self.wall_seconds

    def to_dict(self) -> dict[str, Any]:
        audit = self.llm.runtime.audit()
        generated = self.num_requests * self.gen_len
        lanes: dict[str, dict[str, float]] = {}
        for phase in self.phases:
            for lane, (busy, moved) in phase.lanes.items():
                entry = lanes.setdefault(lane, {"busy_seconds": 0.0, "bytes": 0})
                entry["busy_seconds"] += busy
                entry["bytes"] += moved
        return {
            "model": self.model,
            "prompt_len": self.prompt_len,
            "gen_len": self.gen_len,
            "num_requests": self.num_requests,
            "prefill_seconds": sum(p.seconds for p in self.phases if p.name == "prefill"),
            "decode_seconds": sum(p.seconds for p in self.phases if p.name == "decode"),
            "wall_seconds": self.wall_seconds,
            "generated_tokens_per_s": generated / self.wall_seconds,
            "total_tokens_per_s": self.num_requests * (self.prompt_len + self.gen_len) / self.wall_seconds,
            "lanes": lanes,
            "phases": {
                p.name: {
                    "passes": p.passes,
                    "tokens": p.tokens,
                    "seconds": p.seconds,
                    "lanes": {k: {"busy_seconds": b, "bytes": n} for k, (b, n) in p.lanes.items()},
                    "bound_seconds": self.resources[p.name],
                    "overlap": _overlap(p),
                }
                for p in self.phases
            },
            "planned_bytes": {tier: a.planned_bytes for tier, a in audit.items()},
            "measured_bytes": {tier: a.measured_bytes for tier, a in audit.items()},
            "allowance_bytes": {tier: a.allowance_bytes for tier, a in audit.items()},
            "peak_rss_bytes": self.peak_rss,
            "bound_seconds": self.bound_seconds,
            "whole_run_bound_seconds": self.whole_run_bound_seconds,
            "efficiency_frac": self.efficiency_frac,
            "policy": self.llm.policy.to_dict(),
            "audit": self.audit,
            "notes": [*self.llm.notes, *self.notes],
        }


def _overlap(phase: Phase) -> float:
    """Busy seconds of all lanes over wall seconds: above 1 only if lanes worked at the same time."""
    return sum(busy for busy, _ in phase.lanes.values()) / phase.seconds if phase.seconds else 0.0


def run_bench(llm: LLM, *, prompt_len: int, gen_len: int, num_requests: int, seed: int = 0) -> BenchResult:
    """Run num_requests random prompts of prompt_len tokens and gen_len new tokens each (greedy, no early end).

    One request goes before and is not counted. Then, and again afterwards, the disk is calibrated.
    """
    generator = torch.Generator().manual_seed(seed)
    vocab = min(llm.engine.vocab_size, llm.config.vocab_size)
    prompts = torch.randint(0, vocab, (num_requests, prompt_len), generator=generator).tolist()
    scoring = gen_len == 0
    params = SamplingParams(temperature=0.0, max_tokens=max(gen_len, 1), ignore_eos=True)
    warm_up(llm, prompts[0], max_tokens=min(gen_len, 2))
    # The warm-up's last pass loads nothing ahead, so the ring is free to be read into.
    llm.runtime.executor.drain()
    disk_rates = [disk_read_rate(llm)] if llm.runtime.weights.disk_extents() else []
    engine, lanes = MeteredEngine(llm), llm.runtime.lanes
    stats = llm.engine.stats
    for i, prompt in enumerate(prompts):
        engine.add_request(f"bench-{i}", prompt, params, score_from=prompt_len - 1 if scoring else None)
    totals: dict[str, list[Any]] = {name: [0, 0, 0, 0.0, {}] for name in ("prefill", "decode")}
    began = time.perf_counter()
    seen = lanes.stats()
    while engine.has_unfinished():
        before = (stats.prompt_tokens, stats.generated_tokens)
        step_began = time.perf_counter()
        engine.step()
        seconds = time.perf_counter() - step_began
        prompt_tokens = stats.prompt_tokens - before[0]
        new = stats.generated_tokens - before[1]
        phase = totals["prefill" if prompt_tokens else "decode"]
        phase[0] += 1
        phase[1] += prompt_tokens + (new if not prompt_tokens else 0)
        phase[2] += new
        phase[3] += seconds
        now = lanes.stats()
        for lane, total in now.items():
            busy, moved = phase[4].get(lane, (0.0, 0))
            old = seen[lane]
            phase[4][lane] = (
                busy + total.busy_seconds - old.busy_seconds,
                moved + total.bytes - old.bytes,
            )
        seen = now
    llm.runtime.device.synchronize()
    wall = time.perf_counter() - began
    llm.runtime.executor.drain()
    peak = peak_rss_bytes()
    planned = Workload(prompt_len=prompt_len, gen_len=gen_len, num_requests=num_requests)
    audit = audit_run(llm, engine, planned)
    phases = [
        Phase(name=name, passes=p[0], tokens=p[1], rows=p[2], seconds=p[3], lanes=p[4])
        for name, p in totals.items()
        if p[0]
    ]
    if any(phase.lanes.get("disk_read", (0.0, 0))[1] for phase in phases):
        disk_rates.append(disk_read_rate(llm))
    resources = {phase.name: resource_seconds(llm, phase, disk_rates) for phase in phases}
    bound = sum(max(times.values()) for times in resources.values())
    whole = max(
        (sum(times.get(name, 0.0) for times in resources.values()) for name in _names(resources)), default=0.0
    )
    return BenchResult(
        model=llm.opened.name,
        prompt_len=prompt_len,
        gen_len=gen_len,
        num_requests=num_requests,
        phases=phases,
        wall_seconds=wall,
        resources=resources,
        bound_seconds=bound,
        whole_run_bound_seconds=whole,
        peak_rss=peak,
        audit=audit,
        llm=llm,
    )


def _names(resources: dict[str, dict[str, float]]) -> set[str]:
    return {name for times in resources.values() for name in times}


# -- the bound ---------------------------------------------------------------------------------------------


def resource_seconds(llm: LLM, phase: Phase, disk_rates: Sequence[float]) -> dict[str, float]:
    """Seconds that each resource needs for the phase's unavoidable work, at calibrated rates.

    disk_rates: from before and after the run; a byte takes the mean of their times, because a shared disk drifts.
    Where a lane moved its bytes faster than the calibration, which a disk of changing speed does, its own time is
    the bound.
    """
    times = {"compute": _compute_seconds(llm, phase)}
    runtime = llm.runtime
    busy, read = phase.lanes.get("disk_read", (0.0, 0))
    if read:
        times["disk_read"] = min(busy, read * statistics.mean(1 / rate for rate in disk_rates))
    if runtime.device.first_tier is Tier.GPU:
        for lane, upload in (("upload", True), ("download", False)):
            busy, moved = phase.lanes.get(lane, (0.0, 0))
            if moved:
                times[lane] = min(busy, moved / copy_bytes_per_s(runtime.device, upload=upload))
    return times


def _compute_seconds(llm: LLM, phase: Phase) -> float:
    """Linear layers of all passes: unpacking once per pass, GEMMs at the chunk size that the phase ran with."""
    runtime = llm.runtime
    dtype = runtime.executor.compute_dtype
    per_pass = phase.tokens / phase.passes
    chunk = min(
        runtime.executor.chunk_tokens, runtime.policy.gpu_batch_size if phase.name == "decode" else 1 << 30
    )
    tokens = max(1, min(int(per_pass), chunk))
    rows = max(1, min(runtime.executor.row_chunk, int(phase.rows / phase.passes)))
    known: dict[tuple[Any, ...], float] = {}
    total = 0.0
    for index, unit in enumerate(llm.opened.model.units):
        n, at_once = (phase.rows, rows) if unit.rows_only else (phase.tokens, tokens)
        for slot in runtime.weights.layouts[index].slots:
            if slot.is_linear and n:
                key = (slot.shape, slot.format.name, at_once)
                if key not in known:
                    known[key] = _linear_seconds(llm, slot, n, at_once, phase.passes, dtype)
                total += known[key]
    return total


def _linear_seconds(
    llm: LLM, slot: TensorSlot, n: int, at_once: int, passes: int, dtype: torch.dtype
) -> float:
    """All passes of one linear tensor: the faster of unpack-then-GEMM and multiplying it packed."""
    shape, device = (slot.shape[0], slot.shape[1]), llm.runtime.device
    seconds = gemm_seconds(shape, at_once, dtype, device) * n / at_once
    if slot.format.name != DTYPE_FORMATS[dtype]:
        seconds += passes * unpack_seconds(shape, slot.format, dtype, device)
        if not slot.format.is_plain and at_once <= crossover_tokens(slot.format, dtype, shape[1]):
            packed = packed_linear_seconds(shape, slot.format, at_once, dtype, device) * n / at_once
            seconds = min(seconds, packed)
    return seconds


def disk_read_rate(llm: LLM) -> float:
    """Read rate over the files that the run streams from, now. Uses the weights' ring: no pass may be under way."""
    weights = llm.runtime.weights
    pieces = []
    total = 0
    for extents in weights.disk_extents():
        for extent in extents:
            if total < _CALIBRATION_BYTES:
                pieces.append((extent.file, extent.offset_bytes, extent.n_bytes))
                total += extent.n_bytes
    if not pieces and llm.runtime.spill_files:
        file = llm.runtime.spill_files[0]
        step = 32 << 20
        pieces = [
            (file, offset, min(step, file.size_bytes - offset))
            for offset in range(0, min(file.size_bytes, _CALIBRATION_BYTES), step)
        ]
    # The ring's own memory, slot by slot as in the run: aligned, and nothing beyond the budget.
    slots = weights.read_slots()
    if slots is None:
        slots = torch.empty(1, 8 << 20, dtype=torch.uint8)
    step = slots.shape[1]
    pieces = [(f, o + d, min(step, n - d)) for f, o, n in pieces for d in range(0, n, step)]
    return read_bytes_per_s(pieces, slots)


__all__ = ["BenchResult", "Phase", "disk_read_rate", "resource_seconds", "run_bench"]
