"""What a machine can do, as numbers: capacities, rates, fixed costs, and what its lanes share.

Every field says how it is measured; `flexrun profile` fills them in for this machine, presets hold known
ones. Rates are sustained rates at the block sizes we use (4 MiB for disk, whole units for copies).

Sharing: lanes that run together may compete for a resource. `sharing[resource][lane]` is the share of the
resource that the lane takes while it runs alone at its full rate. Lanes whose shares add up to more than 1
slow each other down in proportion. On a CPU the compute lane takes all "cores"; a disk lane takes a little
of them and of the "memory_bus". Measured by running two lanes together: if compute takes a fraction f
longer while the disk lane reads all the time, the disk lane's share of what compute fills is f.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Self

from policy.footprint import PLAIN_BYTES
from policy.schedule import Lane
from policy.tiers import Tier

SOURCES = ("measured", "published", "datasheet", "edited")
HARDWARE_VERSION = 1


def _positive(what: str, value: Any, *, zero: bool = False) -> float:
    """`value` as a float if it is a finite number above 0 (or 0, if allowed); ValueError naming `what`."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or value < 0 or (value == 0 and not zero):
        least = "at least 0" if zero else "above 0"
        raise ValueError(f"{what} must be a finite number {least}, got {value!r}")
    return float(value)


def _object(what: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{what} must be an object, got {type(value).__name__}")
    return dict(value)


def _refuse_keys(what: str, given: Mapping[str, Any], known: list[str], required: list[str]) -> None:
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known fields are {', '.join(known)}"
            raise ValueError(f"{what} has an unknown field {key!r}: {hint}")
    missing = [key for key in required if key not in given]
    if missing:
        raise ValueError(f"{what} lacks {', '.join(missing)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A rate that depends on how many tokens are computed at once.

    Between its points the rate is interpolated on logarithmic axes; below the first it falls in proportion
    to the tokens (the time of one launch is constant), above the last it stays.
    """

    tokens: tuple[float, ...]
    flops_per_s: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.tokens or len(self.tokens) != len(self.flops_per_s):
            raise ValueError(
                "a curve needs as many tokens as flops_per_s, at least one; got"
                f" {len(self.tokens)} and {len(self.flops_per_s)}"
            )
        for n, rate in zip(self.tokens, self.flops_per_s, strict=True):
            _positive("curve tokens", n)
            _positive("curve flops_per_s", rate)
        if any(b <= a for a, b in zip(self.tokens, self.tokens[1:])):
            raise ValueError(f"curve tokens must increase, got {list(self.tokens)}")

    def rate(self, tokens: float) -> float:
        """FLOP/s at `tokens` tokens per launch."""
        xs, ys = self.tokens, self.flops_per_s
        if tokens <= xs[0]:
            return ys[0] * max(tokens, 1e-9) / xs[0]
        for i in range(1, len(xs)):
            if tokens <= xs[i]:
                t = math.log(tokens / xs[i - 1]) / math.log(xs[i] / xs[i - 1])
                return math.exp((1 - t) * math.log(ys[i - 1]) + t * math.log(ys[i]))
        return ys[-1]

    @property
    def peak(self) -> float:
        return max(self.flops_per_s)

    def scaled(self, factor: float) -> Curve:
        return Curve(tokens=self.tokens, flops_per_s=tuple(y * factor for y in self.flops_per_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRates:
    """Attention on one processor, projections not included.

    prefill_flops_per_s: causal attention of 512-token prompts, counting 4 * head elements per query-key
        pair that the mask lets through. decode: one query per sequence takes
        K and V bytes / decode_bytes_per_s + FLOPs / decode_flops_per_s, the bytes in compute dtype; fit both
        to a multi-head and a grouped-query shape of 1k tokens.
    """

    prefill_flops_per_s: float
    decode_bytes_per_s: float
    decode_flops_per_s: float

    def __post_init__(self) -> None:
        for name in self.__slots__:
            _positive(name, getattr(self, name))


OVERHEADS = ("compute", "transfer", "disk", "cpu_attention", "pass", "row", "attention", "packed")
OPTIONAL_OVERHEADS = ("attention", "packed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One machine.

    name, source: what it is, and whether its numbers are measured, published, datasheet or edited.
    gpu_mem_bytes, cpu_mem_bytes, disk_mem_bytes: capacities that a plan may use; gpu_mem_bytes 0 = no gpu.
    upload_bytes_per_s, download_bytes_per_s: pinned copies of 64 MiB between cpu memory and the device (on a
        CPU with an emulated gpu tier: memory copies).
    download_cache_bytes_per_s: new K and V of a gpu batch, scattered to their pages, device to cpu memory.
    disk_read_bytes_per_s: 4 MiB O_DIRECT reads, several in flight, of data that is not in any cache.
    disk_write_bytes_per_s: the same for sustained writes; disk_write_small_bytes_per_s: for the few pages a
        decode pass fills.
    compute_dtype: f32, bf16 or f16, what linear layers compute in.
    gemm: linear layers' rate by tokens per launch; under the compute dtype's name for plain weights, under
        a weight format's name for kernels that multiply packed weights as they are, if there are any.
    unpack_elements_per_s: packed weights to compute dtype, by weight format; "default" for all others.
    cache_unpack_elements_per_s, cache_pack_elements_per_s: pages to and from the device's staging buffer, by
        cache format; a plain format counts as a copy; "default" for all others.
    cpu_cache_unpack_elements_per_s: the same for CPU attention (infinite speed if not given).
    device_attention, cpu_attention: attention where the linear layers run, and in cpu memory.
    elementwise_bytes_per_s: inputs and outputs of linear layers, in compute dtype, through norms,
        activations and residuals: time of a layer's pass without its GEMMs and attention.
    overhead_seconds: fixed costs: "compute" per chunk of one unit, "attention" per chunk with attention on the
        device on top of it, "packed" per product with or unpacking of a packed tensor (these two 0 if not
        given), "transfer" per copy, "disk" per read or write operation, "cpu_attention" per launch, "pass" per
        pass, "row" per sampled token.
    sharing: see the module's text. cpu_gemm_flops_per_s: large-batch GEMM rate of the CPU, for the
        comparison with CPU-only inference (0 = unknown). packed_row_len: as in `policy.workload.Limits`.
    price_per_hour: in any currency, 0 = unknown.
    """

    name: str
    source: str
    gpu_mem_bytes: float
    cpu_mem_bytes: float
    disk_mem_bytes: float
    upload_bytes_per_s: float
    download_bytes_per_s: float
    download_cache_bytes_per_s: float
    disk_read_bytes_per_s: float
    disk_write_bytes_per_s: float
    disk_write_small_bytes_per_s: float
    compute_dtype: str
    gemm: Mapping[str, Curve]
    unpack_elements_per_s: Mapping[str, float]
    cache_unpack_elements_per_s: Mapping[str, float]
    cache_pack_elements_per_s: Mapping[str, float]
    device_attention: AttentionRates
    cpu_attention: AttentionRates
    elementwise_bytes_per_s: float
    overhead_seconds: Mapping[str, float]
    sharing: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    cpu_cache_unpack_elements_per_s: Mapping[str, float] = field(default_factory=dict)
    cpu_gemm_flops_per_s: float = 0.0
    packed_row_len: int | None = None
    price_per_hour: float = 0.0
    notes: str = ""

    def __post_init__(self) -> None:
        for name in ("name", "source", "notes"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} must be text, got {getattr(self, name)!r}")
        if self.source not in SOURCES:
            raise ValueError(f"source must be one of {', '.join(SOURCES)}, got {self.source!r}")
        if self.compute_dtype not in PLAIN_BYTES:
            raise ValueError(
                f"compute_dtype must be one of {', '.join(PLAIN_BYTES)}, got {self.compute_dtype!r}"
            )
        for f in dataclasses.fields(self):
            if f.name.endswith("_bytes_per_s") or f.name == "cpu_mem_bytes":
                _positive(f.name, getattr(self, f.name))
        for name in ("gpu_mem_bytes", "disk_mem_bytes", "cpu_gemm_flops_per_s", "price_per_hour"):
            _positive(name, getattr(self, name), zero=True)
        if self.packed_row_len is not None:
            _positive("packed_row_len", self.packed_row_len)
        if self.compute_dtype not in self.gemm:
            raise ValueError(f"gemm lacks the curve of the compute dtype {self.compute_dtype!r}")
        for name in ("unpack", "cache_unpack", "cache_pack", "cpu_cache_unpack"):
            table: Mapping[str, float] = getattr(self, f"{name}_elements_per_s")
            for key, value in table.items():
                _positive(f"{name}_elements_per_s.{key}", value)
            if "default" not in table and name != "cpu_cache_unpack":
                raise ValueError(f'{name}_elements_per_s lacks "default"')
        required = [key for key in OVERHEADS if key not in OPTIONAL_OVERHEADS]
        _refuse_keys("overhead_seconds", self.overhead_seconds, list(OVERHEADS), required)
        for key, value in self.overhead_seconds.items():
            _positive(f"overhead_seconds.{key}", value, zero=True)
        lanes = [lane.value for lane in Lane]
        for resource, shares in self.sharing.items():
            _refuse_keys(f"sharing.{resource}", shares, lanes, [])
            for lane, share in shares.items():
                if _positive(f"sharing.{resource}.{lane}", share, zero=True) > 1:
                    raise ValueError(f"sharing.{resource}.{lane} must be at most 1, got {share}")

    # -- what the planner asks ---------------------------------------------------------------------------

    @property
    def first_tier(self) -> Tier:
        return Tier.GPU if self.gpu_mem_bytes > 0 else Tier.CPU

    def capacity(self, tier: Tier) -> float:
        return (self.gpu_mem_bytes, self.cpu_mem_bytes, self.disk_mem_bytes)[tier]

    def unpack_rate(self, table: str, fmt: str) -> float:
        """Elements per second of `table` (unpack, cache_unpack, cache_pack, cpu_cache_unpack)."""
        rates: Mapping[str, float] = getattr(self, f"{table}_elements_per_s")
        return rates.get(fmt, rates.get("default", math.inf))

    def with_budgets(
        self,
        *,
        gpu_mem_bytes: float | None = None,
        cpu_mem_bytes: float | None = None,
        disk_mem_bytes: float | None = None,
    ) -> Hardware:
        """The same machine with other capacities; a budget above the capacity is an error only at run time,
        since a preset's capacities may be those of another copy of the machine."""
        given = {
            "gpu_mem_bytes": gpu_mem_bytes,
            "cpu_mem_bytes": cpu_mem_bytes,
            "disk_mem_bytes": disk_mem_bytes,
        }
        return dataclasses.replace(self, **{k: v for k, v in given.items() if v is not None})  # type: ignore[arg-type]

    def replace(self, **changes: Any) -> Hardware:
        return dataclasses.replace(self, **changes)

    # -- files -------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        data = dataclasses.asdict(self)
        # dataclasses.asdict leaves tuples; JSON has lists.
        data["gemm"] = {
            name: {"tokens": list(c.tokens), "flops_per_s": list(c.flops_per_s)}
            for name, c in self.gemm.items()
        }
        return {"version": HARDWARE_VERSION, **data}

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """Inverse of to_dict. ValueError for missing or unknown fields and for nonsense values."""
        data = _object("hardware", data)
        version = data.pop("version", HARDWARE_VERSION)
        if version != HARDWARE_VERSION:
            raise ValueError(f"hardware version {version!r} is not supported; this release reads 1")
        fields = dataclasses.fields(cls)
        required = [
            f.name
            for f in fields
            if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        ]
        _refuse_keys("hardware", data, [f.name for f in fields], required)
        curves = {}
        for name, curve in _object("gemm", data["gemm"]).items():
            curve = _object(f"gemm.{name}", curve)
            _refuse_keys(f"gemm.{name}", curve, ["tokens", "flops_per_s"], ["tokens", "flops_per_s"])
            if not all(isinstance(v, list) for v in curve.values()):
                raise ValueError(f"gemm.{name}: tokens and flops_per_s must be lists")
            try:
                curves[name] = Curve(tokens=tuple(curve["tokens"]), flops_per_s=tuple(curve["flops_per_s"]))
            except ValueError as error:
                raise ValueError(f"gemm.{name}: {error}") from None
        data["gemm"] = curves
        for name in ("device_attention", "cpu_attention"):
            rates = _object(name, data[name])
            keys = list(AttentionRates.__slots__)
            _refuse_keys(name, rates, keys, keys)
            try:
                data[name] = AttentionRates(**rates)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        for name in (
            "unpack_elements_per_s",
            "cache_unpack_elements_per_s",
            "cache_pack_elements_per_s",
            "cpu_cache_unpack_elements_per_s",
            "overhead_seconds",
            "sharing",
        ):
            if name in data:
                data[name] = _object(name, data[name])
        for resource, shares in data.get("sharing", {}).items():
            data["sharing"][resource] = _object(f"sharing.{resource}", shares)
        return cls(**data)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a hardware file. ValueError naming the file, the field, what was found and the limit."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot read hardware file {path}: {error}") from None
        try:
            return cls.from_dict(data)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    @classmethod
    def preset(cls, name: str) -> Self:
        """A known machine. ValueError with the nearest names for an unknown one."""
        file = resources.files("policy") / "presets" / f"{name}.json"
        known = preset_names()
        if name not in known:
            near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.4)
            hint = f"nearest: {', '.join(near)}" if near else f"known: {', '.join(known)}"
            raise ValueError(f"unknown hardware preset {name!r}; {hint}")
        return cls.from_dict(json.loads(file.read_text(encoding="utf-8")))


def preset_names() -> list[str]:
    folder = resources.files("policy") / "presets"
    return sorted(f.name.removesuffix(".json") for f in folder.iterdir() if f.name.endswith(".json"))


def load_hardware(name_or_path: str) -> Hardware:
    """A preset by name, or a file if `name_or_path` is one (has a slash, ends in .json, or exists)."""
    path = Path(name_or_path)
    if name_or_path.endswith(".json") or "/" in name_or_path or path.is_file():
        return Hardware.load(path)
    return Hardware.preset(name_or_path)
