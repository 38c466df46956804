"""Refitting constants from runs whose machine is known."""

from __future__ import annotations

import planner_cases as cases
import pytest
from test_cost import run_of

from policy.calibrate import (
    CONSTANTS,
    KNOWN,
    SHARED,
    UNSEEN,
    Observation,
    apply_factors,
    constant_value,
    refit,
)
from policy.hardware import Hardware
from policy.simulate import PlacedRun

PLACES = [
    ((0.2, 0.5, 0.3), (0.0, 0.5, 0.5), (0.0, 1.0, 0.0)),
    ((0.0, 0.0, 1.0), (0.0, 1.0, 0.0), (0.0, 0.5, 0.5)),
    ((0.5, 0.5, 0.0), (0.3, 0.4, 0.3), (0.0, 1.0, 0.0)),
]


def observations(truth: Hardware) -> list[Observation]:
    found = []
    for i, place in enumerate(PLACES):
        for state, _ in cases.problem().passes:

            def predict(hw: Hardware, i: int = i, state: object = state) -> dict[str, float]:
                run: PlacedRun = run_of(cases.problem(hardware=hw), *PLACES[i])
                return {k.value: v for k, v in run.analytic(state)[1].items()}  # type: ignore[arg-type]

            found.append(Observation(name=str(place), predict=predict, measured=predict(truth)))
    return found


def test_wrong_constants_are_found_again() -> None:
    truth = cases.machine()
    wrong = {"upload_bytes_per_s": 2.0, "disk_read_bytes_per_s": 0.4, "gemm": 1.5}
    start = apply_factors(truth, wrong)
    fitted = refit(start, observations(truth), constants=[*wrong, "disk_write_bytes_per_s"])
    assert fitted.error_before > 0.3 and fitted.error_after < 0.02
    for name, factor in wrong.items():
        assert fitted.factors[name] == pytest.approx(1 / factor, rel=0.05)
    assert fitted.factors["disk_write_bytes_per_s"] == pytest.approx(1.0, rel=0.05)
    assert fitted.hardware.upload_bytes_per_s == pytest.approx(truth.upload_bytes_per_s, rel=0.05)
    text = "\n".join(fitted.lines())
    assert "disk_read_bytes_per_s: x2.5" in text and "upload_bytes_per_s: /2.0" in text
    assert "before" in text and "disk_write" not in text


def test_what_no_report_shows_stays() -> None:
    truth = cases.machine()
    fitted = refit(truth, observations(truth), constants=["overhead.row", "upload_bytes_per_s"])
    assert fitted.factors == pytest.approx({"overhead.row": 1.0, "upload_bytes_per_s": 1.0}, rel=1e-3)
    assert fitted.lines()[0] == "no constant moved by more than 1%"


def test_every_constant_changes_the_hardware() -> None:
    hw = cases.machine()
    hw = hw.replace(overhead_seconds={**hw.overhead_seconds, "attention": 1e-4, "packed": 1e-4})
    for name in CONSTANTS:
        assert apply_factors(hw, {name: 2.0}) != hw, name
        assert apply_factors(hw, {name: 1.0}) == hw, name


def test_nothing_to_learn_from_is_an_error() -> None:
    hw = cases.machine()
    with pytest.raises(ValueError, match="nothing to refit from"):
        refit(hw, [Observation(name="x", predict=lambda _: {}, measured={"upload": 1.0})])
    with pytest.raises(ValueError, match="unknown constant"):
        refit(hw, observations(hw), constants=["luck"])


def test_what_cannot_be_told_apart_is_said_and_what_is_not_seen_stays() -> None:
    truth = cases.machine()

    def predict(hw: Hardware) -> dict[str, float]:
        up, down = 1e8 / hw.upload_bytes_per_s, 1e8 / hw.download_bytes_per_s
        return {"upload": 1e8 / hw.disk_read_bytes_per_s, "both": up + down}

    start = apply_factors(truth, {"upload_bytes_per_s": 2.0, "disk_read_bytes_per_s": 2.0})
    fitted = refit(start, [Observation(name="x", predict=predict, measured=predict(truth))])
    assert fitted.seen["disk_read_bytes_per_s"] == KNOWN
    assert SHARED in {fitted.seen["upload_bytes_per_s"], fitted.seen["download_bytes_per_s"]}
    assert fitted.factors["disk_read_bytes_per_s"] == pytest.approx(0.5, rel=0.02)
    assert fitted.error_after < 0.01
    rest = {n: f for n, f in fitted.factors.items() if fitted.seen[n] == UNSEEN}
    assert len(rest) == len(CONSTANTS) - 3 and set(rest.values()) == {1.0}


def test_constants_are_shown_as_one_figure() -> None:
    hw = cases.machine()
    for name in CONSTANTS:
        moved = constant_value(apply_factors(hw, {name: 2.0}), name)
        assert moved == pytest.approx(2 * constant_value(hw, name)), name
    with pytest.raises(ValueError, match="unknown constant"):
        constant_value(hw, "luck")


def test_the_pull_that_is_given_says_which_constants_the_reports_show() -> None:
    truth = cases.machine()

    def predict(hw: Hardware) -> dict[str, float]:
        return {"disk": 0.995e8 / hw.disk_read_bytes_per_s + 0.005e8 / hw.upload_bytes_per_s * 4}

    seen = [Observation(name="x", predict=predict, measured=predict(truth))]
    names = ["upload_bytes_per_s"]
    assert refit(truth, seen, constants=names).seen == {names[0]: UNSEEN}
    assert refit(truth, seen, constants=names, pull=1e-3).seen == {names[0]: KNOWN}
    assert refit(truth, seen, constants=["disk_read_bytes_per_s"], pull=4.0).factors == pytest.approx(
        {"disk_read_bytes_per_s": 1.0}
    )
