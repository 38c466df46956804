"""Random weights for a model of which only the configuration is here.

Values look like a fresh initialisation: matrices of variance 1 / width, those that add to the residual stream
smaller still, norms near one. They are cut out of pools of random numbers whose prime length no row divides,
so that filling costs little more than a copy, and no two rows are alike. A value depends on the seed and on
its place in its source tensor alone, not on the unit, the slice or the order in which it is asked for.
"""

from __future__ import annotations

import hashlib
import json

import torch
from torch import Tensor

from flexrun.checkpoint.filling import slots_between_zeros, table_slot, zero_gaps
from flexrun.model.assemble import DecoderModel
from offload.units import TensorSpec, Unit
from offload.weights import Extent, UnitLayout, unit_layout
from quant.formats import WeightFormat, parse_format, row_exponent
from quant.packed import PackedTensor

POOL_ELEMENTS = 4_194_301  # prime
_AUTO_FORMATS = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
_RESIDUAL_OUTPUTS = ("out", "down")


class DummySource:
    """Seeded random weights (offload.weights.WeightSource).

    weight_format: "auto" is the type that the configuration states (bf16 if it states none); a plain or affine
        format holds for all matrices and tables. Vectors are of the plain type that "auto" means.
    """

    notes: tuple[str, ...] = ()

    def __init__(self, model: DecoderModel, weight_format: str = "auto", seed: int = 0) -> None:
        self.weight_format = weight_format
        self.seed = seed
        config = model.config
        plain = parse_format(_AUTO_FORMATS.get(config.dtype or "", "bf16"))
        wanted = plain if weight_format == "auto" else parse_format(weight_format)
        if wanted.kind == "block" or wanted.permuted:
            raise ValueError(
                f"random weights cannot be made in {wanted.name}; choose f32, f16, bf16 or int4-g64"
            )
        self._matrix, self._vector = wanted, plain
        self._norm_mean = 1.0 - config.norm.offset
        self._residual_factor = (2 * config.n_layers) ** -0.5
        self._config = config
        self._pools: dict[torch.dtype, Tensor] = {}

    def fingerprint(self) -> str:
        """Identity of configuration, seed and generator, 32 hex digits."""
        text = json.dumps(["dummy", 1, self.seed, self._config.to_dict()], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def formats_of(self, unit: Unit) -> dict[str, WeightFormat]:
        """Tensor name -> format, tables included."""
        return {s.name: self._vector if s.kind == "vector" else self._matrix for s in unit.tensors}

    def unit_nbytes(self, unit: Unit) -> int:
        """Bytes of the unit's run (tables are apart)."""
        return self.layout(unit).nbytes

    def layout(self, unit: Unit) -> UnitLayout:
        return unit_layout(unit.tensors, self.formats_of(unit))

    def table_format(self, spec: TensorSpec) -> WeightFormat:
        return self._matrix

    def extents(self, unit: Unit) -> list[Extent] | None:
        return None

    def fill(self, unit: Unit, run: Tensor) -> None:
        specs = {spec.name: spec for spec in unit.tensors}
        for slot in slots_between_zeros(unit, self.layout(unit), run):
            self._fill(specs[slot.name], slot.view(run))

    def fill_table(self, spec: TensorSpec, run: Tensor) -> None:
        self._fill(spec, table_slot(spec, self._matrix, run).view(run))

    def _fill(self, spec: TensorSpec, out: Tensor | PackedTensor) -> None:
        part = spec.parts[0]
        key, first_row = part.source, 0
        if part.rows is not None:
            start, stop = part.rows[0]
            if len(spec.parts) == len(part.rows) == 1 and stop - start == spec.shape[0]:
                first_row = start  # slices of one table (a tied head) continue where the one before ended
            else:
                key += f" {start}"  # an expert out of a stack of them
        if spec.kind == "vector":
            assert isinstance(out, Tensor)
            is_norm = spec.name.endswith(("norm", "norm.weight"))
            mean, std = (self._norm_mean, 0.05) if is_norm else (0.0, 0.02)
            self._normal(key, first_row, 1, out)
            out.mul_(std).add_(mean)
            return
        std = spec.shape[1] ** -0.5
        if spec.name.rpartition(".")[2] in _RESIDUAL_OUTPUTS:
            std *= self._residual_factor
        if isinstance(out, PackedTensor):
            self._fill_packed(key, first_row, std, out)
        else:
            self._normal(key, first_row, std, out)

    def _normal(self, key: str, first_row: int, std: float, out: Tensor) -> None:
        per_row = out.shape[1] if out.dim() == 2 else 1
        _from_pool(self._pool(out.dtype), self._place(key, first_row * per_row), std, out)

    def _fill_packed(self, key: str, first_row: int, std: float, out: PackedTensor) -> None:
        fmt = out.format
        # Uniform codes 0..top have a standard deviation of (top + 1) / sqrt(12) steps.
        scale = std * 12**0.5 / (fmt.top_code + 1)
        exponent = row_exponent(scale * fmt.top_code) if fmt.param_dtype == "float16" else 0
        unit = scale * 2.0**-exponent
        zero_gaps(out)
        for name, part in out.to_parts().items():
            if name.startswith("codes"):
                start = self._place(f"{key} {name}", first_row * part.shape[1])
                _from_pool(self._pool(torch.uint8), start, 1, part)
                if fmt.bits == 3.5 and name == "codes2":
                    part ^= part & (part >> 1) & 0x55  # keeps pairs of codes below 11 * 11
            elif name == "scales":
                start = self._place(f"{key} {name}", first_row * part.shape[1])
                _from_pool(self._pool(part.dtype), start, 0.1 * unit, part)
                part.clamp_(-0.3 * unit, 0.3 * unit).add_(unit)
            elif name == "mins":
                torch.mul(out.part("scales"), -fmt.top_code / 2, out=part)
            elif name == "zeros":
                part.fill_(fmt.middle_code)
            else:
                part.fill_(exponent)

    def _place(self, key: str, offset: int) -> int:
        digest = hashlib.blake2b(f"{self.seed} {key}".encode(), digest_size=8).digest()
        return (int.from_bytes(digest, "little") + offset) % POOL_ELEMENTS

    def _pool(self, dtype: torch.dtype) -> Tensor:
        """POOL_ELEMENTS random bytes, or normal numbers of variance 1."""
        if dtype not in self._pools:
            generator = torch.Generator().manual_seed(self.seed)
            if dtype == torch.uint8:
                pool = torch.randint(0, 256, (POOL_ELEMENTS,), dtype=dtype, generator=generator)
            else:
                pool = torch.randn(POOL_ELEMENTS, generator=generator).to(dtype)
            self._pools[dtype] = pool
        return self._pools[dtype]


def _from_pool(pool: Tensor, start: int, factor: float, out: Tensor) -> None:
    """out, flattened = factor times the pool from `start` on, round and round."""
    flat = out.view(-1)
    done = 0
    while done < flat.numel():
        n = min(flat.numel() - done, pool.numel() - start)
        if factor == 1:
            flat[done : done + n] = pool[start : start + n]
        else:
            torch.mul(pool[start : start + n], factor, out=flat[done : done + n])
        done += n
        start = 0
