"""Weight formats: names, exact sizes and byte layouts. Needs neither torch nor numba.

Three kinds of format exist.

plain   `f32`, `f16`, `bf16`: the values themselves, any rank.
affine  `int4-g64`, `int3.5-g64`, `int8-g128-sym-f32`, ...: matrices, rows = output features, cols = input
        features. Each row is cut into groups of 32, 64 or 128 consecutive columns that share parameters:

            value = scale * code + min              (default)
            value = scale * (code - zero)           (`-zp`, an integer zero point per group)
            value = scale * (code - middle)         (`-sym`, middle = 2^(bits-1), or 5 at 3.5 bits)

        evaluated in fp32, one rounding per operation. Scales and minima are fp16 numbers times one power of
        two per row (default), or fp32 (`-f32`). The power of two belongs to a row, not to the whole tensor:
        for one byte per row, rows can be packed as they stream past, and tensors be cut and joined along
        rows without touching a parameter. `-perm` adds a column permutation (GPTQ act-order): packed column
        j is column permutation[j] of the matrix.
block   `q4_k`, `q5_k`, `q6_k`: GGUF super-blocks of 256 weights, their bytes as in the file.

Codes are stored in bit planes that span a row, so that unpacking is a few long loops over bytes. The codes of
a row, padded to whole groups, are n = padded_cols numbers; a plane of width w has n * w / 8 bytes, and its
byte j holds, from its low bits upwards, codes j, j + n*w/8, j + 2*n*w/8, ... A 6-bit code is its low 4 bits
in plane `codes4` and its high 2 bits in plane `codes2`; 5 bits are 4 + 1, 3 bits are 2 + 1. At 3.5 bits two
codes a (column j) and b (column j + n/2) of 11 levels make one 7-bit number 11 * a + b; the n/2 numbers of a
row are stored in planes of 4, 2 and 1 bits.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from functools import lru_cache
from math import prod

PART_ALIGN_BYTES = 64
GROUP_SIZES = (32, 64, 128)
BITS = (8.0, 6.0, 5.0, 4.0, 3.5, 3.0, 2.0)
SUPER_BLOCK = 256
MIN_ROW_EXPONENT = -125
MAX_ROW_EXPONENT = 112

_PLAIN_DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
_ITEM_BYTES = {"uint8": 1, "int8": 1, "float16": 2, "bfloat16": 2, "int32": 4, "float32": 4}
_SUPER_BLOCK_BYTES = {"q4_k": 144, "q5_k": 176, "q6_k": 210}
_PLANES = {8.0: (8,), 6.0: (4, 2), 5.0: (4, 1), 4.0: (4,), 3.5: (4, 2, 1), 3.0: (2, 1), 2.0: (2,)}
_ZERO_SUFFIX = {"min": "", "int": "-zp", "sym": "-sym"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSpec:
    """One array inside a packed tensor's buffer; dtype is the name of a torch dtype."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """How a weight tensor is stored. Get one from `parse_format`; equal formats have equal names.

    kind: 'plain', 'affine' or 'block'; base: the name of a plain or block format, 'int' for affine ones.
    The other fields matter for affine formats only: bits, group, zero ('min', 'int' or 'sym': the parameter
    forms of the module's docstring), param_dtype ('float16' or 'float32') and permuted.
    Raises ValueError for combinations that do not exist.
    """

    kind: str
    base: str = "int"
    bits: float = 4.0
    group: int = 64
    zero: str = "min"
    param_dtype: str = "float16"
    permuted: bool = False

    def __post_init__(self) -> None:
        if self.kind == "plain" and self.base in _PLAIN_DTYPES:
            return
        if self.kind == "block" and self.base in _SUPER_BLOCK_BYTES:
            return
        if self.kind != "affine" or self.base != "int":
            raise ValueError(f"no weight format of kind {self.kind!r} is called {self.base!r}")
        if self.bits not in BITS:
            raise ValueError(f"weights of {self.bits:g} bits are not supported; choose from {_names(BITS)}")
        if self.group not in GROUP_SIZES:
            raise ValueError(f"groups of {self.group} are not supported; choose from {_names(GROUP_SIZES)}")
        if self.zero not in _ZERO_SUFFIX or self.param_dtype not in ("float16", "float32"):
            raise ValueError(
                f"parameters of form zero={self.zero!r}, param_dtype={self.param_dtype!r} do not exist; zero "
                "is 'min', 'int' or 'sym', param_dtype 'float16' or 'float32'"
            )

    @property
    def name(self) -> str:
        if self.kind != "affine":
            return self.base
        params = "-f32" if self.param_dtype == "float32" else ""
        perm = "-perm" if self.permuted else ""
        return f"int{self.bits:g}-g{self.group}{_ZERO_SUFFIX[self.zero]}{params}{perm}"

    def __str__(self) -> str:
        return self.name

    @property
    def is_plain(self) -> bool:
        return self.kind == "plain"

    @property
    def top_code(self) -> int:
        """Largest code of an affine format: 2^bits - 1, or 10 for the 11 levels of 3.5 bits."""
        return 10 if self.bits == 3.5 else (1 << int(self.bits)) - 1

    @property
    def middle_code(self) -> int:
        """The code that stands for zero in a symmetric affine format."""
        return (self.top_code + 1) // 2

    @property
    def planes(self) -> tuple[int, ...]:
        """Bit widths of an affine format's code planes, low bits first."""
        return _PLANES[self.bits]

    @property
    def plain_dtype(self) -> str:
        """Torch dtype name of a plain format's values."""
        return _PLAIN_DTYPES[self.base]

    def padded_cols(self, cols: int) -> int:
        """Columns stored per row: cols rounded up to whole groups."""
        return _round_up(cols, self.group) if self.kind == "affine" else cols

    def n_groups(self, cols: int) -> int:
        """Groups per row of an affine format."""
        return -(-cols // self.group)

    def parts(self, shape: tuple[int, ...]) -> tuple[PartSpec, ...]:
        """Layout of the arrays of a tensor of this shape inside one buffer, by rising offset.

        plain: `data`, of the tensor's shape. block: `blocks`, uint8 (rows, bytes per row). affine: planes
        `codes8|4|2|1` uint8 (rows, n * width / 8); `scales` and, by form, `mins` (rows, groups) in
        param_dtype or `zeros` uint8 (rows, groups); `exponents` int8 (rows,) with fp16 parameters;
        `permutation` int32 (cols,) if permuted. Every part starts at a multiple of PART_ALIGN_BYTES and is
        row-major, so that joining or cutting tensors along rows is doing so to each part but the permutation.
        Raises ValueError for a shape that the format cannot hold.
        """
        return _parts(self, tuple(int(n) for n in shape))

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Exact bytes of the buffer: affine sizes are rounded up to PART_ALIGN_BYTES, others are the data."""
        end_bytes = self.parts(shape)[-1].offset_bytes + self.parts(shape)[-1].nbytes
        return _round_up(end_bytes, PART_ALIGN_BYTES) if self.kind == "affine" else end_bytes

    def bits_per_weight(self, shape: tuple[int, ...] | None = None) -> float:
        """Stored bits per weight: exact for a shape, else for long rows whose width is whole groups."""
        if shape is not None:
            return self.nbytes(shape) * 8 / max(prod(shape), 1)
        if self.kind == "plain":
            return float(_ITEM_BYTES[self.plain_dtype] * 8)
        if self.kind == "block":
            return _SUPER_BLOCK_BYTES[self.base] * 8 / SUPER_BLOCK
        param_bits = _ITEM_BYTES[self.param_dtype] * 8
        return self.bits + (param_bits + {"min": param_bits, "int": 8, "sym": 0}[self.zero]) / self.group

    def max_error(self, *, low: float, high: float, row_absmax: float) -> float:
        """Bound on |value - stored value| after min-max packing of a group whose values span [low, high].

        Half a stored step plus the rounding of the parameters and of the fp32 arithmetic. With (scale, min)
        the minimum is rounded down and the scale up to what can be stored, so that the levels still span the
        group: the step is at most (high - low + ulp(low)) / top_code + ulp(scale). With a zero point z the
        levels span 0 too: the step is the least over z of max(-low / z, high / (top_code - z)) + ulp(scale).
        Symmetric: the same with z = middle_code, for the better of the two signs of the scale. ulp is the
        spacing of the stored parameters, given the row's largest magnitude. Padding takes no part.
        """
        if self.kind == "block":
            raise ValueError(f"{self.name} is read, never written: it has no packing error")
        if self.kind == "plain":
            spacing = {"f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}[self.base]
            return max(abs(low), abs(high)) * spacing + (2.0**-25 if self.base == "f16" else 2.0**-133)
        exponent = row_exponent(row_absmax)
        if self.zero == "min":
            step = (high - low + self.param_ulp(low, exponent)) / self.top_code
        elif self.zero == "int":
            step = min(self._span_step(low, high, zero) for zero in range(self.top_code + 1))
        else:
            step = min(
                self._span_step(low, high, self.middle_code), self._span_step(-high, -low, self.middle_code)
            )
        step += self.param_ulp(step, exponent)
        magnitude = max(abs(low), abs(high)) + step * (self.top_code + 1)
        return step / 2 + magnitude * 2.0**-22 + 2.0**-148

    def _span_step(self, low: float, high: float, zero: int) -> float:
        below = 0.0 if low >= 0 else -low / zero if zero else math.inf
        above = 0.0 if high <= 0 else high / (self.top_code - zero) if zero < self.top_code else math.inf
        return max(below, above)

    def param_ulp(self, value: float, exponent: int) -> float:
        """Spacing of storable parameters around value, for a row of that exponent."""
        if self.param_dtype == "float32":
            return _ulp(value, mantissa_bits=24, least_exponent=-149)
        return _ulp(value, mantissa_bits=11, least_exponent=-24 + exponent)


def row_exponent(row_absmax: float) -> int:
    """Exponent e of a row with fp16 parameters: row_absmax * 2^-e is in [2^12, 2^13) unless e is at a limit.

    That leaves a factor of eight below fp16's largest number for scales and minima beyond the extremes.
    """
    if row_absmax == 0.0:
        return 0
    return min(max(math.frexp(row_absmax)[1] - 13, MIN_ROW_EXPONENT), MAX_ROW_EXPONENT)


def format_names(*, all_forms: bool = False) -> tuple[str, ...]:
    """Names of the weight formats: those in default form, or every parameter form too."""
    zeros = ("min", "int", "sym") if all_forms else ("min", "sym")
    dtypes = ("float16", "float32") if all_forms else ("float16",)
    affine = tuple(
        WeightFormat(kind="affine", bits=bits, group=group, zero=zero, param_dtype=dtype).name
        for bits in BITS
        for group in GROUP_SIZES
        for zero in zeros
        for dtype in dtypes
    )
    return (*_PLAIN_DTYPES, *affine, *_SUPER_BLOCK_BYTES)


@lru_cache(maxsize=1024)
def parse_format(name: str) -> WeightFormat:
    """The weight format of that name; ValueError with the nearest names for an unknown one.

    Affine names are int<bits>-g<group>, then in this order -zp or -sym, -f32, -perm.
    """
    if name in _PLAIN_DTYPES:
        return WeightFormat(kind="plain", base=name)
    if name in _SUPER_BLOCK_BYTES:
        return WeightFormat(kind="block", base=name)
    head, _, rest = name.partition("-g")
    group, *suffixes = rest.split("-")
    try:
        found = WeightFormat(
            kind="affine",
            bits=float(head.removeprefix("int")),
            group=int(group),
            zero="int" if "zp" in suffixes else "sym" if "sym" in suffixes else "min",
            param_dtype="float32" if "f32" in suffixes else "float16",
            permuted="perm" in suffixes,
        )
    except ValueError:
        found = None
    # Only the canonical spelling is a name, so that names can serve as keys in files.
    if found is None or found.name != name:
        near = difflib.get_close_matches(name, format_names(all_forms=True), n=4, cutoff=0.3)
        raise ValueError(
            f"unknown weight format {name!r}; nearest: {', '.join(near) or 'none'}. A name is "
            f"{', '.join((*_PLAIN_DTYPES, *_SUPER_BLOCK_BYTES))} or int<bits>-g<group>[-zp|-sym][-f32] with "
            f"bits {_names(BITS)} and group {_names(GROUP_SIZES)}"
        )
    return found


@lru_cache(maxsize=4096)
def _parts(fmt: WeightFormat, shape: tuple[int, ...]) -> tuple[PartSpec, ...]:
    if any(n < 0 for n in shape):
        raise ValueError(f"shape {shape} has a negative dimension")
    if fmt.kind == "plain":
        return _lay_out([("data", fmt.plain_dtype, shape)])
    if len(shape) != 2:
        raise ValueError(
            f"{fmt.name} holds matrices (rows, cols); got shape {shape}. Keep it in f32, f16 or bf16"
        )
    rows, cols = shape
    if fmt.kind == "block":
        if cols % SUPER_BLOCK:
            raise ValueError(
                f"{fmt.name} needs a width that is a multiple of {SUPER_BLOCK}; got shape {shape}"
            )
        return _lay_out([("blocks", "uint8", (rows, cols // SUPER_BLOCK * _SUPER_BLOCK_BYTES[fmt.base]))])
    groups = fmt.n_groups(cols)
    n_codes = groups * fmt.group // (2 if fmt.bits == 3.5 else 1)
    arrays: list[tuple[str, str, tuple[int, ...]]] = [
        (f"codes{width}", "uint8", (rows, n_codes * width // 8)) for width in fmt.planes
    ]
    arrays.append(("scales", fmt.param_dtype, (rows, groups)))
    if fmt.zero == "min":
        arrays.append(("mins", fmt.param_dtype, (rows, groups)))
    elif fmt.zero == "int":
        arrays.append(("zeros", "uint8", (rows, groups)))
    if fmt.param_dtype == "float16":
        arrays.append(("exponents", "int8", (rows,)))
    if fmt.permuted:
        arrays.append(("permutation", "int32", (cols,)))
    return _lay_out(arrays)


def _lay_out(arrays: list[tuple[str, str, tuple[int, ...]]]) -> tuple[PartSpec, ...]:
    parts: list[PartSpec] = []
    end_bytes = 0
    for name, dtype, shape in arrays:
        start = _round_up(end_bytes, PART_ALIGN_BYTES)
        nbytes = prod(shape) * _ITEM_BYTES[dtype]
        parts.append(PartSpec(name=name, dtype=dtype, shape=shape, offset_bytes=start, nbytes=nbytes))
        end_bytes = start + nbytes
    return tuple(parts)


def _ulp(value: float, *, mantissa_bits: int, least_exponent: int) -> float:
    if value == 0.0:
        return 2.0**least_exponent
    return 2.0 ** max(math.frexp(value)[1] - mantissa_bits, least_exponent)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _names(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:g}" for value in values)
