"""What a run was and what it took, in a form from which it can be predicted again on any hardware.

A `RunRecord` holds the model's footprint, the policy, limits and lengths of the requests that really ran, and the
measured seconds of each phase and lane. `predict` costs exactly that run; `observation` hands it to
`policy.calibrate.refit`. Both sides count a pass that mixes prompts with running sequences towards prefill
and decode by their tokens, as the engine does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from policy.cost import CostModel
from policy.footprint import KvShape, ModelFootprint, UnitFootprint
from policy.hardware import Hardware
from policy.memory_plan import MemoryPlan, memory_plan
from policy.passes import BatchState, PassSeries, mean_state, pass_series
from policy.simulate import PlacedRun, simulate
from policy.tiers import Policy, Tier
from policy.workload import Limits, Workload

if TYPE_CHECKING:
    from policy.calibrate import Observation

RECORD_VERSION = 1
PHASES = ("prefill", "decode")
FIT_PASSES = 12
SIMULATED_LAYERS = 12
SIMULATED_OPS = 24_000
"""Operations of a pass up to which all layers are simulated."""
SAMPLING = "sampling"
"""In observations, what passes take outside of the lanes: sampling and bookkeeping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTimes:
    """Seconds of a phase: wall, and busy by lane name. bytes: moved by lane name (measured side only)."""

    wall_seconds: float
    busy_seconds: Mapping[str, float]
    bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {
            "wall_seconds": self.wall_seconds,
            "busy_seconds": dict(self.busy_seconds),
            "bytes": dict(self.bytes),
        }

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        return cls(
            wall_seconds=float(data["wall_seconds"]),
            busy_seconds={str(k): float(v) for k, v in data["busy_seconds"].items()},
            bytes={str(k): int(v) for k, v in data["bytes"].items()},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTimes:
    """Seconds of a run by phase (prefill, decode); sampling_seconds are part of the phases' wall seconds."""

    phases: Mapping[str, PhaseTimes]
    sampling_seconds: float

    @property
    def wall_seconds(self) -> float:
        return sum(phase.wall_seconds for phase in self.phases.values())

    def by_lane(self) -> dict[str, float]:
        """Busy seconds under "phase/lane", and what is outside of the lanes under "sampling"."""
        found = {
            f"{name}/{lane}": seconds
            for name, phase in self.phases.items()
            for lane, seconds in phase.busy_seconds.items()
        }
        return {**found, SAMPLING: self.sampling_seconds}

    def to_dict(self) -> dict[str, Any]:
        return {
            "wall_seconds": self.wall_seconds,
            "phases": {name: phase.to_dict() for name, phase in self.phases.items()},
            "sampling_seconds": self.sampling_seconds,
        }

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        phases = {str(k): PhaseTimes.from_dict(v) for k, v in data["phases"].items()}
        return cls(phases=phases, sampling_seconds=float(data["sampling_seconds"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One finished run.

    machine, machine_id: what the machine is called, and what tells it from others. footprint: as the weights were
    laid out, in one format. gpu_mem_bytes: of the gpu tier, 0 without one. workload: what really ran.
    """

    machine: str
    machine_id: str
    footprint: ModelFootprint
    policy: Policy
    limits: Limits
    compute_dtype: str
    gpu_mem_bytes: float
    workload: Workload
    measured: RunTimes

    @property
    def first_tier(self) -> Tier:
        return Tier.GPU if self.gpu_mem_bytes > 0 else Tier.CPU

    def placed(self, hardware: Hardware) -> PlacedRun:
        """The run's cost model and homes on a machine."""
        return placed_run(
            self.footprint,
            hardware,
            self.policy,
            self.limits,
            compute_dtype=self.compute_dtype,
            gpu_mem_bytes=self.gpu_mem_bytes,
        )

    def series(self) -> PassSeries:
        return series_of(self.policy, self.limits, self.workload)

    def predict(self, hardware: Hardware) -> RunTimes:
        """What this run would take there, simulated."""
        return predict_times(self.placed(hardware), self.series())

    def observation(self, hardware: Hardware, name: str) -> Observation:
        """The run as `refit` takes it; hardware: any description of its machine, for the fixed sizes.

        Prediction here is the lanes' alone, which needs no simulation. A fit asks hundreds of times: a few mean
        passes stand for all, brought to the same totals on `hardware`.
        """
        from policy.calibrate import Observation  # needs scipy, which a run itself does not

        placed = self.placed(hardware)
        passes = weighted_passes(self.series())
        few = thinned(passes, FIT_PASSES)

        def totals(run: PlacedRun, passes: Sequence[tuple[BatchState, float]]) -> dict[str, float]:
            busy, sampling = lane_seconds(run, passes)
            phases = {n: PhaseTimes(wall_seconds=0.0, busy_seconds=lanes) for n, lanes in busy.items()}
            return RunTimes(phases=phases, sampling_seconds=sampling).by_lane()

        whole, rough = totals(placed, passes), totals(placed, few)
        scale = {lane: whole.get(lane, 0.0) / seconds for lane, seconds in rough.items() if seconds > 0}

        def predict(there: Hardware) -> Mapping[str, float]:
            machine = for_run(there, self.compute_dtype, self.gpu_mem_bytes)
            found = totals(placed.with_hardware(machine), few)
            return {lane: seconds * scale.get(lane, 1.0) for lane, seconds in found.items()}

        return Observation(name=name, predict=predict, measured=self.measured.by_lane())

    def to_dict(self) -> dict[str, Any]:
        return {
            "version": RECORD_VERSION,
            "machine": self.machine,
            "machine_id": self.machine_id,
            "footprint": footprint_to_dict(self.footprint),
            "policy": self.policy.to_dict(),
            "limits": dataclasses.asdict(self.limits),
            "compute_dtype": self.compute_dtype,
            "gpu_mem_bytes": self.gpu_mem_bytes,
            "workload": self.workload.to_dict(),
            "measured": self.measured.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """Inverse of to_dict. ValueError says what is missing or wrong."""
        if not isinstance(data, Mapping):
            raise ValueError(f"a run's record must be an object, got {type(data).__name__}")
        if data.get("version") != RECORD_VERSION:
            raise ValueError(
                f"record version {data.get('version')!r} is not supported; this release reads"
                f" {RECORD_VERSION}"
            )
        try:
            return cls(
                machine=str(data["machine"]),
                machine_id=str(data["machine_id"]),
                footprint=footprint_from_dict(data["footprint"]),
                policy=Policy.from_dict(data["policy"]),
                limits=Limits(**data["limits"]),
                compute_dtype=str(data["compute_dtype"]),
                gpu_mem_bytes=float(data["gpu_mem_bytes"]),
                workload=Workload.from_dict(data["workload"]),
                measured=RunTimes.from_dict(data["measured"]),
            )
        except KeyError as error:
            raise ValueError(f"the run's record lacks {error}") from None
        except (TypeError, AttributeError, IndexError, OverflowError) as error:
            raise ValueError(f"the run's record is damaged: {error}") from None


# -- prediction --------------------------------------------------------------------------------------------


def for_run(hardware: Hardware, compute_dtype: str, gpu_mem_bytes: float) -> Hardware:
    """The machine's description for a run that computes in another type, or with another gpu tier."""
    gemm = dict(hardware.gemm)
    gemm.setdefault(compute_dtype, gemm[hardware.compute_dtype])
    same = compute_dtype == hardware.compute_dtype
    return replace(
        hardware,
        compute_dtype=compute_dtype,
        gemm=gemm,
        gpu_mem_bytes=gpu_mem_bytes,
        packed_row_len=hardware.packed_row_len if same else None,
    )


def placed_run(
    footprint: ModelFootprint,
    hardware: Hardware,
    policy: Policy,
    limits: Limits,
    *,
    compute_dtype: str,
    gpu_mem_bytes: float,
    memory: MemoryPlan | None = None,
) -> PlacedRun:
    """A policy at its integer homes, costed on a machine. memory: the plan that the run took, if at hand."""
    machine = for_run(hardware, compute_dtype, gpu_mem_bytes)
    if memory is None:
        memory = memory_plan(
            footprint,
            replace(policy, weight_format="auto"),  # the layouts are what they are
            limits,
            first_tier=machine.first_tier,
            compute_dtype=compute_dtype,
        )
    cost = CostModel(
        footprint,
        machine,
        limits,
        gpu_batch_size=policy.gpu_batch_size,
        num_gpu_batches=policy.num_gpu_batches,
        weight_format=footprint.native_format,
        cache_format=policy.cache_format,
        n_cpu_attention=policy.num_cpu_attention_batches,
        schedule=policy.schedule,
        overlap=policy.overlap,
    )
    return PlacedRun(cost, memory)


def series_of(policy: Policy, limits: Limits, workload: Workload) -> PassSeries:
    """The passes of a run."""
    return pass_series(
        workload,
        limits,
        gpu_batch_size=policy.gpu_batch_size,
        num_gpu_batches=policy.num_gpu_batches,
        schedule=policy.schedule,
    )


def weighted_passes(series: PassSeries) -> list[tuple[BatchState, float]]:
    """The different passes of all blocks, and how many there are of each."""
    passes: dict[BatchState, float] = {}
    for state in series.states:
        passes[state] = passes.get(state, 0.0) + series.blocks
    if series.extra_passes and series.steady is not None:
        passes[series.steady] = passes.get(series.steady, 0.0) + series.extra_passes
    return list(passes.items())


def thinned(passes: Sequence[tuple[BatchState, float]], n: int) -> list[tuple[BatchState, float]]:
    """About n mean passes for many: neighbours stand together, those with prompts and those without apart."""
    few: list[tuple[BatchState, float]] = []
    for prompts in (True, False):
        kind = [p for p in passes if bool(p[0].prefill_tokens) is prompts]
        step = max(1, -(-2 * len(kind) // n))
        for i in range(0, len(kind), step):
            states, counts = zip(*kind[i : i + step], strict=True)
            few.append((states[0] if len(states) == 1 else mean_state(states), sum(counts)))
    return few


def lane_seconds(
    run: PlacedRun, passes: Sequence[tuple[BatchState, float]]
) -> tuple[dict[str, dict[str, float]], float]:
    """(busy seconds by phase and lane, seconds outside of the lanes) of so many such passes."""
    busy: dict[str, dict[str, float]] = {name: {} for name in PHASES}
    outside = 0.0
    for state, count in passes:
        prefill_frac = state.prefill_tokens / state.tokens if state.tokens else 0.0
        outside += count * run.cost.fixed_seconds(state)
        for lane, seconds in run.analytic(state)[1].items():
            for name, share in zip(PHASES, (prefill_frac, 1 - prefill_frac), strict=True):
                if seconds * share > 0:
                    before = busy[name].get(lane.value, 0.0)
                    busy[name][lane.value] = before + count * share * seconds
    return busy, outside


def predict_times(run: PlacedRun, series: PassSeries) -> RunTimes:
    """Simulated wall seconds and busy seconds of each phase; of a large model the first layers stand for all."""
    footprint = run.cost.footprint
    n_ops = 12 * len(footprint.units) * run.cost.n_batches
    n_layers = max(SIMULATED_LAYERS, footprint.n_layers * SIMULATED_OPS // n_ops)
    simulation = simulate(run, series, n_layers=min(n_layers, footprint.n_layers))
    busy, outside = lane_seconds(run, weighted_passes(series))
    walls = (simulation.prefill_seconds, simulation.decode_seconds)
    return RunTimes(
        phases={
            name: PhaseTimes(wall_seconds=wall, busy_seconds=busy[name])
            for name, wall in zip(PHASES, walls, strict=True)
        },
        sampling_seconds=outside,
    )


# -- a footprint in JSON -------------------------------------------------------------------------------------


def footprint_to_dict(footprint: ModelFootprint) -> dict[str, Any]:
    """Units that are alike are written once: `units` names each unit, its layer and which of `kinds` it is."""
    kinds: list[dict[str, Any]] = []
    known: dict[str, int] = {}
    units = []
    for unit in footprint.units:
        body = {f.name: getattr(unit, f.name) for f in dataclasses.fields(unit)}
        name, layer = body.pop("name"), body.pop("layer")
        body["nbytes"], body["table_nbytes"] = dict(unit.nbytes), dict(unit.table_nbytes)
        body["linear_shapes"] = [list(shape) for shape in unit.linear_shapes]
        body["kv"] = None if unit.kv is None else dataclasses.asdict(unit.kv)
        key = repr(body)
        if key not in known:
            known[key] = len(kinds)
            kinds.append(body)
        units.append([name, layer, known[key]])
    rest = {f.name: getattr(footprint, f.name) for f in dataclasses.fields(footprint) if f.name != "units"}
    return {**rest, "kinds": kinds, "units": units}


def footprint_from_dict(data: Any) -> ModelFootprint:
    """Inverse of footprint_to_dict."""
    data = dict(data)
    kinds = []
    for kind in data.pop("kinds"):
        kv = kind["kv"]
        kinds.append(
            {
                **kind,
                "linear_shapes": tuple((int(a), int(b)) for a, b in kind["linear_shapes"]),
                "kv": None if kv is None else KvShape(**kv),
            }
        )
    units = tuple(
        UnitFootprint(name=name, layer=layer, **kinds[index]) for name, layer, index in data.pop("units")
    )
    return ModelFootprint(units=units, **data)
