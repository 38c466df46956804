"""The linear program: its rows, its optimum, its duals, and the rounding to whole things."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any

import numpy as np
import planner_cases as cases
import pulp
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from policy import lp
from policy.hardware import Hardware
from policy.lp import Problem, Variant
from policy.memory_plan import pages_by_tier
from policy.rounding import evaluate, excess_bytes, plan_memory, round_solution
from policy.tiers import Placement, Policy, Tier
from policy.workload import Workload

MIB = cases.MIB
SHAPES: list[dict[str, Any]] = [
    {},
    {"num_gpu_batches": 4, "n_cpu_attention": 2},
    {"num_gpu_batches": 1, "schedule": "refill", "cache_format": "int4"},
    {"num_gpu_batches": 3, "weight_format": "int4-g64", "schedule": "refill"},
    {"num_gpu_batches": 2, "overlap": False},
    {"hardware": cases.cpu_machine()},
    {"hardware": cases.cpu_machine(), "num_gpu_batches": 3, "schedule": "refill"},
    {"workload": Workload(prompt_len=100, gen_len=0), "hardware": cases.machine(gpu_mem_bytes=12 * MIB)},
]


def solved(shape: dict[str, Any]) -> tuple[Problem, lp.LpSolution, Any]:
    problem = cases.problem(**shape)
    solution = lp.solve(problem)
    assert solution is not None
    program = lp.build(problem, solution.variant)
    return problem, solution, program.lp


@pytest.mark.parametrize("shape", SHAPES)
def test_every_row_holds_at_the_solution(shape: dict[str, Any]) -> None:
    """Rows recomputed from the variables' values, with pulp out of the game; every row has a name."""
    _, solution, program = solved(shape)
    assert len(program.constraints) > 8
    for name, row in program.constraints.items():
        assert not name.startswith("_C")
        value = sum(factor * solution.values[var.name] for var, factor in row.items()) + row.constant
        tolerance = 1e-5 * max(1.0, abs(row.constant))
        if row.sense == pulp.LpConstraintEQ:
            assert value == pytest.approx(0, abs=tolerance), name
        elif row.sense == pulp.LpConstraintLE:
            assert value <= tolerance, name
        else:
            assert value >= -tolerance, name


def to_arrays(program: Any) -> tuple[Any, ...]:
    names = [v.name for v in program.variables()]
    index = {n: i for i, n in enumerate(names)}
    objective = np.zeros(len(names))
    for var, factor in program.objective.items():
        objective[index[var.name]] = factor
    upper, upper_rhs, equal, equal_rhs = [], [], [], []
    for row in program.constraints.values():
        line = np.zeros(len(names))
        for var, factor in row.items():
            line[index[var.name]] = factor
        if row.sense == pulp.LpConstraintEQ:
            equal.append(line)
            equal_rhs.append(-row.constant)
        else:
            sign = 1.0 if row.sense == pulp.LpConstraintLE else -1.0
            upper.append(sign * line)
            upper_rhs.append(-sign * row.constant)
    bounds = [(v.lowBound, v.upBound) for v in program.variables()]
    return objective, upper, upper_rhs, equal, equal_rhs, bounds


@pytest.mark.parametrize("shape", SHAPES)
def test_scipy_finds_the_same_optimum(shape: dict[str, Any]) -> None:
    _, solution, program = solved(shape)
    objective, upper, upper_rhs, equal, equal_rhs, bounds = to_arrays(program)
    found = linprog(objective, upper, upper_rhs, equal, equal_rhs, bounds, method="highs-ipm")
    assert found.status == 0
    ours = sum(factor * solution.values[var.name] for var, factor in program.objective.items())
    assert ours == pytest.approx(found.fun, rel=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_lane_rows_are_the_cost_model(shape: dict[str, Any]) -> None:
    """Milliseconds of a pass are the slowest of what CostModel gives for the solution's own flow."""
    problem, solution, _ = solved(shape)
    cost, slots = problem.cost, max(problem.cost.sizes.slots, 1)

    def by_tier(prefix: str, factor: float) -> list[float]:
        return [solution.values.get(f"{prefix}_{t.label}", 0.0) * factor for t in Tier]

    for p, (state, _) in enumerate(problem.passes):
        read = by_tier(f"read_{p}", slots)
        new = by_tier(f"new_{p}", slots)
        if not problem.ordered and state.filled:
            new = [r * state.new_pages / state.filled for r in read]
        flow = lp.Flow(
            weights=tuple(by_tier("weights", 1.0)),  # type: ignore[arg-type]
            hidden=tuple(by_tier("activations", 1.0)),  # type: ignore[arg-type]
            read=lp.Pages(*read),
            new=lp.Pages(*new),
            tails_on_gpu=solution.variant.tails_on_gpu,
        )
        seconds = cost.pass_seconds(cost.lane_seconds(state, flow), state, flow) - cost.fixed_seconds(state)
        assert solution.values[f"pass_{p}_ms"] == pytest.approx(seconds * 1e3, rel=1e-4)


def grid_policies(problem: Problem, steps: int = 4) -> list[Policy]:
    cost = problem.cost
    tiers = [t for t in Tier if t >= cost.first_tier]
    points = [p for p in itertools.product(range(steps + 1), repeat=3) if sum(p) == steps]
    points = [p for p in points if all(p[t] == 0 or t in tiers for t in Tier)]
    places = [Placement(gpu_frac=a / steps, cpu_frac=b / steps, disk_frac=c / steps) for a, b, c in points]
    hidden = [Placement.all_on(t) for t in tiers]
    return [
        Policy(
            weights=w,
            cache=c,
            activations=a,
            gpu_batch_size=cost.gpu_batch_size,
            num_gpu_batches=cost.n_batches,
            weight_format=cost.weight_format,
            cache_format=cost.cache_format,
            cpu_attention_frac=cost.n_cpu_attention / cost.n_batches,
            overlap=cost.overlap,
            schedule=cost.schedule,  # type: ignore[arg-type]
        )
        for w in places
        for c in places
        for a in hidden
    ]


@pytest.mark.parametrize("shape", SHAPES[:7])
def test_no_point_of_a_grid_beats_the_optimum(shape: dict[str, Any]) -> None:
    problem, solution, _ = solved(shape)
    n_fitting = 0
    best = float("inf")
    for policy in grid_policies(problem):
        memory = plan_memory(policy, problem)
        if excess_bytes(memory, problem):
            continue
        n_fitting += 1
        best = min(best, evaluate(policy, memory, problem))
    assert n_fitting > 3
    assert best >= solution.seconds_per_token * (1 - 2e-3)
    rounded = round_solution(solution, problem)
    assert rounded is not None
    assert rounded.seconds_per_token <= best * 1.02


def tight_machine(
    gpu: int, cpu: int, disk: int, up: float, down: float, read: float, write: float
) -> Hardware:
    return cases.machine(
        gpu_mem_bytes=gpu * MIB,
        cpu_mem_bytes=cpu * MIB,
        disk_mem_bytes=disk * MIB,
        upload_bytes_per_s=up,
        download_bytes_per_s=down,
        download_cache_bytes_per_s=down,
        disk_read_bytes_per_s=read,
        disk_write_bytes_per_s=write,
        disk_write_small_bytes_per_s=write,
    )


machines = st.builds(
    tight_machine,
    st.sampled_from([0, 5, 8, 12, 20, 40]),
    st.sampled_from([4, 8, 14, 50]),
    st.sampled_from([0, 20, 200]),
    st.floats(1e7, 1e10),
    st.floats(1e7, 1e10),
    st.floats(1e6, 1e10),
    st.floats(1e6, 1e10),
)


# Only small units are streamed, through a ring smaller than the largest unit.
SMALL_RING = tight_machine(12, 4, 20, 1e7, 1e7, 1e6, 1e6)


@settings(
    max_examples=40,
    deadline=None,
    database=None,
    phases=(Phase.explicit, Phase.generate),  # cases are small as they are; shrinking them takes minutes
    suppress_health_check=[HealthCheck.too_slow],
)
@example(SMALL_RING, 4, 2, "static", 2, "f16", "f16")
@given(
    machines,
    st.integers(1, 12),
    st.integers(1, 4),
    st.sampled_from(["static", "refill"]),
    st.integers(0, 4),
    st.sampled_from(["f16", "int4"]),
    st.sampled_from(["f16", "int4-g64"]),
)
def test_rounded_plans_never_exceed_a_capacity(
    hardware: Hardware, gbs: int, n: int, schedule: str, attends: int, cache_format: str, weight_format: str
) -> None:
    problem = cases.problem(
        hardware=hardware,
        gpu_batch_size=gbs,
        num_gpu_batches=n,
        schedule=schedule,
        n_cpu_attention=min(attends, n) if hardware.gpu_mem_bytes else 0,
        cache_format=cache_format,
        weight_format=weight_format,
    )
    solution = lp.solve(problem)
    if solution is None:
        assert any(v > 0 for v in lp.shortage(problem).values())
        return
    rounded = round_solution(solution, problem)
    if rounded is None:
        return
    for tier in Tier:
        assert rounded.memory.tier_bytes(tier) <= hardware.capacity(tier)
    assert not excess_bytes(plan_memory(rounded.policy, problem), problem)
    assert rounded.gap_frac >= -2e-3
    assert rounded.seconds_per_token == pytest.approx(
        evaluate(rounded.policy, plan_memory(rounded.policy, problem), problem)
    )


IMPROVEMENTS = [
    {"gpu_mem_bytes": 1.3},
    {"cpu_mem_bytes": 1.4},
    {"disk_mem_bytes": 2.0},
    {"upload_bytes_per_s": 1.5},
    {"disk_read_bytes_per_s": 2.0},
    {"download_cache_bytes_per_s": 2.0, "download_bytes_per_s": 2.0},
    {"disk_write_bytes_per_s": 2.0, "disk_write_small_bytes_per_s": 2.0},
]


@pytest.mark.parametrize("better", IMPROVEMENTS)
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[1], SHAPES[3], SHAPES[6]])
def test_better_machines_are_never_worse(shape: dict[str, Any], better: dict[str, float]) -> None:
    base = shape.get("hardware") or cases.machine()
    improved = base.replace(**{name: getattr(base, name) * factor for name, factor in better.items()})
    found = []
    for hardware in (base, improved):
        problem = cases.problem(**(shape | {"hardware": hardware}))
        solution = lp.solve(problem)
        assert solution is not None
        rounded = round_solution(solution, problem)
        assert rounded is not None
        found.append((solution.seconds_per_token, rounded.seconds_per_token))
    assert found[1][0] <= found[0][0] * (1 + 1e-3)
    assert found[1][1] <= found[0][1] * 1.02


def test_duals_name_what_binds() -> None:
    slow_disk = cases.problem(hardware=cases.machine(disk_read_bytes_per_s=1e5, cpu_mem_bytes=6 * MIB))
    solution = lp.solve(slow_disk)
    assert solution is not None
    assert max(solution.lane_shares, key=solution.lane_shares.__getitem__).startswith("disk_read")
    assert solution.duals["capacity_cpu"] < 0
    roomy = cases.problem(hardware=cases.machine(gpu_mem_bytes=4000 * MIB))
    solution = lp.solve(roomy)
    assert solution is not None
    assert max(solution.lane_shares, key=solution.lane_shares.__getitem__) == "compute"
    assert solution.weights.gpu_frac == 1.0 and solution.variant.weights_resident
    assert sum(solution.lane_shares.values()) == pytest.approx(1.0, abs=0.02)


def test_dual_of_a_capacity_predicts_the_gain() -> None:
    hardware = cases.machine(cpu_mem_bytes=6 * MIB, disk_read_bytes_per_s=1e6)
    problem = cases.problem(hardware=hardware)
    solution = lp.solve_variant(problem, Variant(activations_resident=True))
    more = cases.problem(hardware=hardware.replace(cpu_mem_bytes=6 * MIB + 1e5))
    better = lp.solve_variant(more, Variant(activations_resident=True))
    assert solution is not None and better is not None
    gain_ms = (solution.seconds_per_token - better.seconds_per_token) * 1e3
    assert gain_ms > 0
    assert -solution.duals["capacity_cpu"] * 1e5 / 1e9 == pytest.approx(gain_ms, rel=0.05)


def test_shortage_is_the_least_that_would_do() -> None:
    hardware = cases.machine(disk_mem_bytes=0, cpu_mem_bytes=2 * MIB)
    problem = cases.problem(hardware=hardware)
    assert lp.solve(problem) is None
    missing = lp.shortage(problem)
    assert missing["cpu"] > 0 and missing["gpu"] == 0

    def with_more(share: float) -> Problem:
        return cases.problem(
            hardware=hardware.replace(
                cpu_mem_bytes=hardware.cpu_mem_bytes + share * missing["cpu"],
                disk_mem_bytes=share * missing["disk"],
            )
        )

    assert lp.solve(with_more(1.001)) is not None
    assert lp.solve(with_more(0.98)) is None


@pytest.mark.parametrize("p", [0.0, 0.4, 1.0])
def test_cascade_is_what_the_rows_relax(p: float) -> None:
    assert sum(pages_by_tier(p * 10, (2, 3, 5))) == pytest.approx(p * 10)


def test_nothing_is_printed() -> None:
    """The solver greets on standard output; results live there, so it must stay empty."""
    code = (
        "import planner_cases as c; from policy import lp; "
        "assert lp.solve(c.problem()) is not None; assert lp.solve(c.problem()) is not None"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd="tests", check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
