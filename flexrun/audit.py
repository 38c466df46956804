"""The run audits the plan: predicted beside measured seconds per phase and lane, planned beside used bytes.

`MeteredEngine` stands between a job and its engine and notes what every pass took and how long finished requests
were; `audit_run` then predicts exactly that run (its policy, its limits, the lengths that really ran) on this
machine's profile. The report holds the whole record, so that `flexrun profile --refit` needs nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flexrun.request import NumericsError, RequestOutput, SamplingParams
from flexrun.runtime import DTYPE_NAMES, TierAudit
from offload.device import Device
from offload.measure import cache_file, machine_name
from policy.audit import PHASES, PhaseTimes, RunRecord, RunTimes, placed_run, predict_times, series_of
from policy.hardware import Hardware
from policy.tiers import Tier
from policy.workload import LengthCounts, Workload

if TYPE_CHECKING:
    from flexrun.llm import LLM

NO_PROFILE = (
    "no prediction: this machine has not been measured yet (`flexrun profile`, about a minute and a half)"
)


def known_hardware(device: Device) -> Hardware | None:
    """This machine's profile if it has been measured and can be read; nothing is measured here."""
    file = cache_file(device)
    if not file.is_file():
        return None
    try:
        return Hardware.load(file)
    except ValueError:
        return None


def machine_id(device: Device) -> str:
    """What tells this machine, with this device, from others in reports."""
    return cache_file(device).stem


def warm_up(llm: LLM, prompt: Sequence[int], *, max_tokens: int) -> None:
    """Run one request with so many new tokens (0: a scored text; 2 decode once).

    Kernels are compiled or loaded and memory is touched: once, however long a job is, and no part of what a pass takes.
    A virtual machine may get fresh memory from its host at a third of a disk's rate.
    """
    for arena in llm.runtime.arenas.values():
        arena.touch()
    params = SamplingParams(temperature=0.0, max_tokens=max(1, max_tokens), ignore_eos=True)
    llm.engine.add_request("warm-up", prompt, params, score_from=None if max_tokens else len(prompt) - 1)
    while llm.engine.has_unfinished():
        llm.engine.step()
    llm.runtime.executor.drain()


class MeteredEngine:
    """An LLM's engine that keeps count of itself; for jobs it is a `JobEngine`.

    lengths: of the finished requests, tokens computed as a prompt and tokens generated, one pair per answer.
    Memory does not grow with the number of requests.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._engine = llm.engine
        self._lanes = llm.runtime.lanes
        self._scoring: set[str] = set()
        self.lengths = LengthCounts()
        self.sampling_seconds = 0.0
        self.n_passes = 0
        self._walls = dict.fromkeys(PHASES, 0.0)
        self._busy: dict[str, dict[str, float]] = {name: {} for name in PHASES}
        self._bytes: dict[str, dict[str, float]] = {name: {} for name in PHASES}
        self._last_lanes = self._lanes.stats()

    # -- the engine's face -------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return self._engine.num_waiting

    def has_unfinished(self) -> bool:
        return self._engine.has_unfinished()

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        prompt_text: str | None = None,
        *,
        score_from: int | None = None,
    ) -> None:
        self._engine.add_request(request_id, prompt_token_ids, params, prompt_text, score_from=score_from)
        if score_from is not None:
            self._scoring.add(request_id)

    def abort(self, request_id: str) -> None:
        self._scoring.discard(request_id)
        self._engine.abort(request_id)

    def step(self) -> list[RequestOutput]:
        stats = self._engine.stats
        before = (stats.prefill_seconds, stats.decode_seconds, stats.sampling_seconds, stats.passes)
        try:
            finished = self._engine.step()
        except NumericsError as error:
            self._scoring -= set(error.request_ids)
            self._note(before)  # the pass ran, and for the other requests it counts
            raise
        self._note(before)
        for output in finished:
            self._count(output)
        return finished

    def _count(self, output: RequestOutput) -> None:
        n_prompt = len(output.prompt_token_ids)
        if output.request_id in self._scoring:
            self._scoring.discard(output.request_id)
            # The last token is scored, not fed.
            self.lengths.add(max(1, n_prompt - 1), 0)
            return
        for answer in output.outputs:
            self.lengths.add(n_prompt, max(1, len(answer.token_ids)))

    def _note(self, before: tuple[float, float, float, int]) -> None:
        """Add what a pass took to its phases, by the share of its tokens that belong to prompts."""
        stats = self._engine.stats
        prefill, decode = stats.prefill_seconds - before[0], stats.decode_seconds - before[1]
        self.sampling_seconds += stats.sampling_seconds - before[2]
        self.n_passes += stats.passes - before[3]
        if prefill + decode <= 0:
            return
        self._walls["prefill"] += prefill
        self._walls["decode"] += decode
        self._note_lanes(prefill / (prefill + decode))

    def _note_lanes(self, prefill_frac: float) -> None:
        lanes, old = self._lanes.stats(), self._last_lanes
        self._last_lanes = lanes
        for lane, now in lanes.items():
            seconds, moved = now.busy_seconds, float(now.bytes)
            if lane in old:
                seconds, moved = seconds - old[lane].busy_seconds, moved - old[lane].bytes
            for name, share in (("prefill", prefill_frac), ("decode", 1 - prefill_frac)):
                if share > 0 and (seconds > 0 or moved > 0):
                    self._busy[name][lane] = self._busy[name].get(lane, 0.0) + share * seconds
                    self._bytes[name][lane] = self._bytes[name].get(lane, 0.0) + share * moved

    # -- what it saw ---------------------------------------------------------------------------------------

    def times(self) -> RunTimes:
        """Seconds and bytes so far, by phase and lane."""
        return RunTimes(
            phases={
                name: PhaseTimes(
                    wall_seconds=self._walls[name],
                    busy_seconds=dict(self._busy[name]),
                    bytes={lane: round(n) for lane, n in self._bytes[name].items()},
                )
                for name in PHASES
            },
            sampling_seconds=self.sampling_seconds,
        )


def run_record(llm: LLM, meter: MeteredEngine) -> RunRecord | None:
    """The run so far, in a form that can be predicted; None where no request has finished."""
    runtime = llm.runtime
    ran = meter.lengths.workload()
    if ran is None:
        return None
    first = llm.device.first_tier
    gpu_bytes = float(llm.device.gpu_mem_bytes or 0) if first is Tier.GPU else 0.0
    if first is Tier.GPU and not gpu_bytes:
        memory = llm.device.gpu_memory()
        gpu_bytes = float(memory[1]) if memory else 1.0
    return RunRecord(
        machine=machine_name(llm.device),
        machine_id=machine_id(llm.device),
        footprint=runtime.footprint,
        policy=runtime.policy,
        limits=runtime.limits,
        compute_dtype=DTYPE_NAMES[runtime.executor.compute_dtype],
        gpu_mem_bytes=gpu_bytes,
        workload=ran,
        measured=meter.times(),
    )


def audit_run(llm: LLM, meter: MeteredEngine, planned: Workload | None = None) -> dict[str, Any]:
    """The report's audit: `tiers`, `measured`, `predicted` and `run` (None where nothing finished), `notes`.

    planned: the workload that the plan was made for, to be told where another one ran.
    """
    runtime = llm.runtime
    measured = meter.times()
    notes: list[str] = []
    found: dict[str, Any] = {
        "machine": machine_name(llm.device),
        "tiers": {tier: _tier(entry) for tier, entry in runtime.audit().items()},
        "measured": measured.to_dict(),
        "predicted": None,
        "planned_workload": None if planned is None else planned.to_dict(),
        "run": None,
        "notes": notes,
    }
    record = run_record(llm, meter)
    if record is None:
        notes.append("no prediction: no request finished")
        return found
    ran = record.workload
    found["run"] = record.to_dict()
    if llm.engine.has_unfinished():
        notes.append(
            "the run was interrupted: the prediction is for its finished requests, measured is all of it"
        )
    if planned is not None and _differs(planned, ran):
        notes.append(f"planned for {planned.describe()}; ran {ran.describe()}: predicted again for what ran")
    hardware = known_hardware(llm.device)
    if hardware is None:
        notes.append(NO_PROFILE)
        return found
    try:
        run = placed_run(
            record.footprint,
            hardware,
            record.policy,
            record.limits,
            compute_dtype=record.compute_dtype,
            gpu_mem_bytes=record.gpu_mem_bytes,
            memory=runtime.plan,
        )
        found["predicted"] = predict_times(run, series_of(record.policy, record.limits, ran)).to_dict()
    except (ValueError, ArithmeticError, LookupError) as error:
        # The run is over and its results are written: an edited profile must not turn that into a failure.
        notes.append(f"no prediction: this machine's profile cannot be used ({error}); flexrun profile")
    return found


def _tier(entry: TierAudit) -> dict[str, int]:
    return {
        "planned_bytes": entry.planned_bytes,
        "measured_bytes": entry.measured_bytes,
        "allowance_bytes": entry.allowance_bytes,
    }


def _differs(planned: Workload, ran: Workload) -> bool:
    """Whether lengths or counts are more than 5% from what was planned."""

    def off(a: float, b: float) -> bool:
        return abs(a - b) > 0.05 * max(a, b)

    counted = planned.num_requests is not None and off(planned.num_requests, ran.num_requests or 0)
    return counted or off(planned.prompt_len, ran.prompt_len) or off(planned.gen_len, ran.gen_len)
