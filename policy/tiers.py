"""The vocabulary of placement: Tier, Placement, Policy, Plan; one schema for Python, JSON and flags."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal, Self, get_args

SCHEMA_VERSION = 1

ScheduleName = Literal["static", "refill"]


class Tier(IntEnum):
    """A memory a tensor can be at home in, ordered fast to slow."""

    GPU = 0
    CPU = 1
    DISK = 2

    @property
    def label(self) -> str:
        return self.name.lower()


def _check_fraction(what: str, value: float) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0.0 <= value <= 1.0:
        raise ValueError(f"{what} must be a fraction from 0 to 1, got {value!r}")


def _check_positive(what: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{what} must be a whole number of at least 1, got {value!r}")


def _refuse_unknown(what: str, given: dict[str, Any], known: set[str]) -> None:
    unknown = sorted(set(given) - known)
    if unknown:
        raise ValueError(f"{what} has unknown fields {unknown}; known fields are {sorted(known)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Fractions of one kind of tensor (weights, cache or activations) at home on each tier; they sum to 1."""

    gpu_frac: float = 0.0
    cpu_frac: float = 0.0
    disk_frac: float = 0.0

    def __post_init__(self) -> None:
        for name in ("gpu_frac", "cpu_frac", "disk_frac"):
            _check_fraction(name, getattr(self, name))
        total = self.gpu_frac + self.cpu_frac + self.disk_frac
        if abs(total - 1.0) > 1e-6:
            raise ValueError(
                f"placement fractions must sum to 1, got {self.gpu_frac} + {self.cpu_frac} + {self.disk_frac}"
                f" = {total:.6g}"
            )

    @classmethod
    def all_on(cls, tier: Tier) -> Self:
        return cls(**{f"{tier.label}_frac": 1.0})

    @classmethod
    def parse(cls, text: str, *, what: str = "placement") -> Self:
        """Read ``gpu,cpu,disk`` fractions such as ``0.2,0.8,0``. Raises ValueError naming `what`."""
        pieces = text.split(",")
        try:
            gpu, cpu, disk = (float(piece) for piece in pieces)
        except ValueError:
            raise ValueError(
                f"{what} must be three fractions gpu,cpu,disk such as 0.2,0.8,0; got {text!r}"
            ) from None
        try:
            return cls(gpu_frac=gpu, cpu_frac=cpu, disk_frac=disk)
        except ValueError as error:
            raise ValueError(f"{what}: {error}") from None

    def fraction(self, tier: Tier) -> float:
        return (self.gpu_frac, self.cpu_frac, self.disk_frac)[tier]

    def counts(self, total: int) -> tuple[int, int, int]:
        """Split `total` whole things over the tiers by largest remainder; ties go to the faster tier."""
        exact = [total * self.fraction(tier) for tier in Tier]
        floors = [int(x + 1e-9) for x in exact]
        order = sorted(Tier, key=lambda t: (floors[t] - exact[t], t))
        for tier in order[: total - sum(floors)]:
            floors[tier] += 1
        return floors[0], floors[1], floors[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How a block runs: where everything rests, the block's shape, formats and overlap."""

    weights: Placement
    cache: Placement
    activations: Placement
    gpu_batch_size: int
    num_gpu_batches: int = 1
    weight_format: str = "auto"
    cache_format: str = "auto"
    cpu_attention_frac: float = 0.0
    overlap: bool = True
    schedule: ScheduleName = "refill"

    def __post_init__(self) -> None:
        _check_positive("gpu_batch_size", self.gpu_batch_size)
        _check_positive("num_gpu_batches", self.num_gpu_batches)
        _check_fraction("cpu_attention_frac", self.cpu_attention_frac)
        if not isinstance(self.overlap, bool):
            raise ValueError(f"overlap must be true or false, got {self.overlap!r}")
        if self.schedule not in get_args(ScheduleName):
            raise ValueError(f"schedule must be one of {get_args(ScheduleName)}, got {self.schedule!r}")

    @property
    def block_size(self) -> int:
        """Sequences that share one read of the weights."""
        return self.gpu_batch_size * self.num_gpu_batches

    @property
    def num_cpu_attention_batches(self) -> int:
        """CPU attention serves whole gpu batches: the last ones of the block."""
        return round(self.cpu_attention_frac * self.num_gpu_batches)

    def to_dict(self) -> dict[str, Any]:
        return {"version": SCHEMA_VERSION, **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Inverse of to_dict. Raises ValueError on unknown fields, versions and values."""
        if not isinstance(data, dict):
            raise ValueError(f"a policy must be a JSON object, got {type(data).__name__}")
        data = dict(data)
        version = data.pop("version", SCHEMA_VERSION)
        if version != SCHEMA_VERSION:
            raise ValueError(
                f"policy version {version!r} is not supported; this release reads {SCHEMA_VERSION}"
            )
        names = {f.name for f in dataclasses.fields(cls)}
        _refuse_unknown("policy", data, names)
        missing = [n for n in ("weights", "cache", "activations", "gpu_batch_size") if n not in data]
        if missing:
            raise ValueError(f"policy lacks {missing}")
        for name in ("weights", "cache", "activations"):
            value = data[name]
            if not isinstance(value, dict):
                raise ValueError(f"policy.{name} must be an object of gpu_frac, cpu_frac, disk_frac")
            _refuse_unknown(f"policy.{name}", value, {"gpu_frac", "cpu_frac", "disk_frac"})
            try:
                data[name] = Placement(**value)
            except ValueError as error:
                raise ValueError(f"policy.{name}: {error}") from None
        return cls(**data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A policy plus what it is predicted to cost and the integer homes it rounds to.

    unit_homes: one tier per streamable unit, in model order. page_counts: KV page slots per
    (layer, gpu batch) on each tier. predicted, bound and notes are plain JSON values.
    """

    policy: Policy
    unit_homes: tuple[Tier, ...]
    page_counts: tuple[int, int, int]
    planned_bytes: dict[str, int] = field(default_factory=dict)
    predicted: dict[str, Any] = field(default_factory=dict)
    bound: dict[str, Any] = field(default_factory=dict)
    binding_resource: str = ""
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "version": SCHEMA_VERSION,
            "policy": self.policy.to_dict(),
            "unit_homes": [home.label for home in self.unit_homes],
            "page_counts": list(self.page_counts),
            "planned_bytes": self.planned_bytes,
            "predicted": self.predicted,
            "bound": self.bound,
            "binding_resource": self.binding_resource,
            "notes": list(self.notes),
        }


def load_policy(path: Path) -> Policy:
    """Read a policy or a plan file (a plan's policy is used). Raises ValueError naming the file."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read policy file {path}: {error}") from None
    if isinstance(data, dict) and isinstance(data.get("policy"), dict):
        data = data["policy"]
    try:
        return Policy.from_dict(data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def spread_homes(sizes: list[int], placement: Placement) -> tuple[Tier, ...]:
    """Give each unit one home so that bytes per tier follow `placement` and streamed units are spread evenly.

    Walks the units once and gives each to the tier that is furthest behind its share of the bytes
    seen so far (the error diffusion that draws evenly spaced dots), so loads alternate with
    resident units instead of bunching at one end of the pass.
    """
    homes: list[Tier] = []
    given = [0.0, 0.0, 0.0]
    seen = 0
    for size in sizes:
        seen += size
        behind = [placement.fraction(t) * seen - given[t] for t in Tier]
        best = max(Tier, key=lambda t: (behind[t], -t) if placement.fraction(t) > 0 else (float("-inf"), -t))
        homes.append(best)
        given[best] += size
    return tuple(homes)
