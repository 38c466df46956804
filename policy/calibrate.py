"""Refit a machine's constants from runs: predicted against measured seconds per lane.

Every lane's busy seconds are sums of bytes, FLOPs or elements over rates, plus counts times fixed costs, so a
factor on each rate explains the deviations. `scipy.optimize.least_squares` finds the factors that bring all
observations' lanes closest in relative terms; a weak pull towards 1 keeps constants where the reports say
nothing about them, and a soft loss keeps one odd run from deciding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from policy.hardware import AttentionRates, Curve, Hardware

Scale = Callable[[Hardware, float], Hardware]

PULL = 0.02
"""Residual of a factor e: small beside any deviation that a report shows."""
MAX_FACTOR = 20.0
KNOWN, SHARED, UNSEEN = "yes", "jointly", "no"
"""Whether observations determine a constant: by itself, only together with others, or not at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One run: predict(hardware) gives the seconds of each lane, measured holds what they took.

    Lanes that took less than min_seconds, or that only one side knows, are left out.
    """

    name: str
    predict: Callable[[Hardware], Mapping[str, float]]
    measured: Mapping[str, float]
    min_seconds: float = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """factors: constant -> new rate / old rate (of a fixed cost: new / old seconds). seen: constant -> whether
    the observations determine it: KNOWN, SHARED (its effect cannot be told from that of others, which move with it)
    or UNSEEN. errors: mean absolute relative deviation before and after."""

    hardware: Hardware
    factors: dict[str, float]
    seen: dict[str, str]
    error_before: float
    error_after: float

    def lines(self) -> list[str]:
        moved = [
            f"{name}: {'x' if f >= 1 else '/'}{max(f, 1 / f):.2f}"
            for name, f in sorted(self.factors.items(), key=lambda item: -abs(math.log(item[1])))
            if abs(f - 1) > 0.01
        ]
        summary = f"mean deviation {self.error_before:.1%} before, {self.error_after:.1%} after"
        return [*(moved or ["no constant moved by more than 1%"]), summary]


def _rate(name: str) -> Scale:
    return lambda hw, f: hw.replace(**{name: getattr(hw, name) * f})


def _table(name: str) -> Scale:
    def scale(hw: Hardware, f: float) -> Hardware:
        return hw.replace(**{name: {key: value * f for key, value in getattr(hw, name).items()}})

    return scale


def _gemm(hw: Hardware, f: float) -> Hardware:
    curves: dict[str, Curve] = {name: curve.scaled(f) for name, curve in hw.gemm.items()}
    return hw.replace(gemm=curves)


def _gemm_small(hw: Hardware, f: float) -> Hardware:
    """The first half of each curve's points, where memory bandwidth or launches bind."""
    curves = {}
    for name, curve in hw.gemm.items():
        n = len(curve.tokens) // 2
        rates = [y * f if i < n else y for i, y in enumerate(curve.flops_per_s)]
        curves[name] = Curve(tokens=curve.tokens, flops_per_s=tuple(rates))
    return hw.replace(gemm=curves)


def _attention(name: str, part: str) -> Scale:
    def scale(hw: Hardware, f: float) -> Hardware:
        old: AttentionRates = getattr(hw, name)
        rates = {k: getattr(old, k) * (f if k.startswith(part) else 1.0) for k in AttentionRates.__slots__}
        return hw.replace(**{name: AttentionRates(**rates)})

    return scale


def _overhead(key: str) -> Scale:
    return lambda hw, f: hw.replace(
        overhead_seconds={k: v * (f if k == key else 1.0) for k, v in hw.overhead_seconds.items()}
    )


CONSTANTS: dict[str, Scale] = {
    "gemm": _gemm,
    "gemm_small": _gemm_small,
    "upload_bytes_per_s": _rate("upload_bytes_per_s"),
    "download_bytes_per_s": _rate("download_bytes_per_s"),
    "download_cache_bytes_per_s": _rate("download_cache_bytes_per_s"),
    "disk_read_bytes_per_s": _rate("disk_read_bytes_per_s"),
    "disk_write_bytes_per_s": _rate("disk_write_bytes_per_s"),
    "disk_write_small_bytes_per_s": _rate("disk_write_small_bytes_per_s"),
    "unpack_elements_per_s": _table("unpack_elements_per_s"),
    "cache_unpack_elements_per_s": _table("cache_unpack_elements_per_s"),
    "cache_pack_elements_per_s": _table("cache_pack_elements_per_s"),
    "cpu_cache_unpack_elements_per_s": _table("cpu_cache_unpack_elements_per_s"),
    "elementwise_bytes_per_s": _rate("elementwise_bytes_per_s"),
    "device_attention.prefill": _attention("device_attention", "prefill"),
    "device_attention.decode": _attention("device_attention", "decode"),
    "cpu_attention.prefill": _attention("cpu_attention", "prefill"),
    "cpu_attention.decode": _attention("cpu_attention", "decode"),
    "overhead.compute": _overhead("compute"),
    "overhead.attention": _overhead("attention"),
    "overhead.packed": _overhead("packed"),
    "overhead.transfer": _overhead("transfer"),
    "overhead.disk": _overhead("disk"),
    "overhead.cpu_attention": _overhead("cpu_attention"),
    "overhead.pass": _overhead("pass"),
    "overhead.row": _overhead("row"),
}
"""Everything that can be refitted, and how a factor is applied."""


def constant_value(hardware: Hardware, name: str) -> float:
    """The constant as one figure for people: a rate or seconds; of a curve its last point, of a table its "default".

    Raises ValueError for an unknown name.
    """
    if name not in CONSTANTS:
        raise ValueError(f"unknown constant {name!r}; known: {', '.join(CONSTANTS)}")
    curve = hardware.gemm[hardware.compute_dtype]
    if name == "gemm":
        return curve.flops_per_s[-1]
    if name == "gemm_small":
        return curve.flops_per_s[0]
    group, _, key = name.partition(".")
    if group == "overhead":
        return float(hardware.overhead_seconds.get(key, 0.0))
    value: Any = getattr(hardware, group)
    if key:
        return float(getattr(value, f"{key}_{'flops' if key == 'prefill' else 'bytes'}_per_s"))
    if isinstance(value, Mapping):
        return float(value.get("default", next(iter(value.values()), math.inf)))
    return float(value)


def apply_factors(hardware: Hardware, factors: Mapping[str, float]) -> Hardware:
    """The machine with each named constant multiplied. ValueError for an unknown name."""
    for name, factor in factors.items():
        if name not in CONSTANTS:
            raise ValueError(f"unknown constant {name!r}; known: {', '.join(CONSTANTS)}")
        hardware = CONSTANTS[name](hardware, factor)
    return hardware


def _relative(observations: Sequence[Observation], hardware: Hardware) -> list[float]:
    """Logarithms of predicted over measured seconds, for all lanes of all runs."""
    logs = []
    for seen in observations:
        predicted = seen.predict(hardware)
        for lane, seconds in seen.measured.items():
            expected = predicted.get(lane, 0.0)
            if seconds >= seen.min_seconds and expected > 0:
                logs.append(math.log(expected / seconds))
    return logs


def _seen(jacobian: Any, names: Sequence[str], pull: float) -> dict[str, str]:
    """What the data say of each constant that moves them, from the deviations' derivatives at the solution.

    The pull is a prior of width 1 in each logarithm. Data that narrow it to less than half determine a constant;
    one whose width stays trades against others.
    """
    spread = np.sqrt(np.diag(np.linalg.inv(jacobian.T @ jacobian / pull**2 + np.eye(len(names)))))
    return {name: KNOWN if width < 0.5 else SHARED for name, width in zip(names, spread, strict=True)}


def refit(
    hardware: Hardware,
    observations: Sequence[Observation],
    *,
    constants: Sequence[str] | None = None,
    pull: float = PULL,
) -> Calibration:
    """Constants that explain the observations best; `constants` limits which may move.

    pull: how much the constants are trusted as they are, as the residual of a factor e.
    Raises ValueError without any lane to compare, or for an unknown constant.
    """
    names = list(CONSTANTS) if constants is None else list(constants)
    apply_factors(hardware, dict.fromkeys(names, 1.0))
    before = _relative(observations, hardware)
    if not before:
        raise ValueError("nothing to refit from: no report has a lane with measured and predicted seconds")

    def deviations(free: Sequence[str], logs: Any) -> Any:
        factors = {name: math.exp(x) for name, x in zip(free, logs, strict=True)}
        return np.array(_relative(observations, apply_factors(hardware, factors)))

    def derivatives(free: Sequence[str], logs: Any) -> Any:
        """Of the deviations alone; the solver's own are weighted by the loss."""
        here = deviations(free, logs)
        rows = [(deviations(free, logs + 1e-4 * row) - here) / 1e-4 for row in np.eye(len(free))]
        return np.array(rows).reshape(len(free), len(here)).T

    start = derivatives(names, np.zeros(len(names)))
    free = [name for name, n in zip(names, np.linalg.norm(start, axis=0), strict=True) if n > pull / 2]
    seen = dict.fromkeys(names, UNSEEN)
    factors = dict.fromkeys(names, 1.0)
    if free:
        limit = math.log(MAX_FACTOR)
        solution = least_squares(
            lambda logs: np.array([*deviations(free, logs), *(pull * x for x in logs)]),
            np.zeros(len(free)),
            bounds=(-limit, limit),
            loss="soft_l1",
            f_scale=0.3,
        )
        factors |= {name: math.exp(float(x)) for name, x in zip(free, solution.x, strict=True)}
        seen |= _seen(derivatives(free, solution.x), free, pull)
    fitted = apply_factors(hardware, factors).replace(source="edited")
    after = _relative(observations, fitted)
    return Calibration(
        hardware=fitted,
        factors=factors,
        seen=seen,
        error_before=float(np.mean([abs(math.expm1(x)) for x in before])),
        error_after=float(np.mean([abs(math.expm1(x)) for x in after])),
    )
