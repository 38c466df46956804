"""Names, exact sizes and layouts of weight formats."""

import math
import subprocess
import sys

import pytest

from quant.formats import (
    PART_ALIGN_BYTES,
    WeightFormat,
    format_names,
    parse_format,
    row_exponent,
)

ALL_NAMES = format_names(all_forms=True)


def test_needs_neither_torch_nor_numba() -> None:
    code = "import sys, quant.formats; print([m for m in ('torch', 'numba', 'numpy') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ALL_NAMES)
def test_names_round_trip(name: str) -> None:
    assert parse_format(name).name == name
    assert str(parse_format(name)) == name


@pytest.mark.parametrize(
    ("name", "nbytes"),
    [
        ("bf16", 3 * 130 * 2),
        ("f32", 3 * 130 * 4),
        # 192 padded columns: codes, then scales and minima of 3 x 3 groups, then 3 exponents, each from 64 on.
        ("int4-g64", 320 + 64 + 64 + 64),
        ("int4-g64-f32", 320 + 64 + 64),
        ("int4-g64-sym", 320 + 64 + 64),
        ("int4-g64-zp", 320 + 64 + 64 + 64),
        ("int8-g128", 768 + 64 + 64 + 64),
        ("int3-g32", 128 + 64 + 64 + 64 + 64),
        ("int3.5-g64", 192 + 128 + 64 + 64 + 64 + 64),
    ],
)
def test_nbytes_of_an_odd_shape(name: str, nbytes: int) -> None:
    assert parse_format(name).nbytes((3, 130)) == nbytes


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("int4-g64", 4.5),
        ("int4-g64-sym", 4.25),
        ("int4-g128-zp", 4.1875),
        ("int3.5-g64", 4.0),
        ("int4-g32-f32", 6.0),
    ],
)
def test_bits_per_weight(name: str, bits: float) -> None:
    fmt = parse_format(name)
    assert fmt.bits_per_weight() == bits
    exact = fmt.bits_per_weight((4096, 4096))
    assert bits <= exact <= bits + 0.003
    assert exact == fmt.nbytes((4096, 4096)) * 8 / 4096**2


def test_block_formats_are_the_bytes_of_the_file() -> None:
    assert [parse_format(name).nbytes((2, 512)) for name in ("q4_k", "q5_k", "q6_k")] == [576, 704, 840]
    with pytest.raises(ValueError, match="multiple of 256"):
        parse_format("q4_k").nbytes((2, 320))


@pytest.mark.parametrize("name", [*ALL_NAMES, "int4-g128-zp-perm"])
def test_parts_are_aligned_and_disjoint(name: str) -> None:
    fmt = parse_format(name)
    shape = (5, 256) if fmt.kind == "block" else (5, 77)
    end = 0
    for part in fmt.parts(shape):
        assert part.offset_bytes % PART_ALIGN_BYTES == 0
        assert end <= part.offset_bytes < end + PART_ALIGN_BYTES
        assert part.shape[0] == (77 if part.name == "permutation" else 5)
        end = part.offset_bytes + part.nbytes
    assert end <= fmt.nbytes(shape) < end + PART_ALIGN_BYTES


@pytest.mark.parametrize(
    "bad", ["int4-64", "int7-g64", "int4-g48", "int4-g064", "int4-g64-f32-zp", "q4_k_m", ""]
)
def test_unknown_names_list_near_ones(bad: str) -> None:
    with pytest.raises(ValueError, match=r"unknown weight format.*nearest") as caught:
        parse_format(bad)
    if bad.startswith("int4"):
        assert "int4-g64" in str(caught.value)


def test_impossible_combinations_are_refused() -> None:
    with pytest.raises(ValueError, match="7 bits"):
        WeightFormat(kind="affine", bits=7.0)
    with pytest.raises(ValueError, match="groups of 16"):
        WeightFormat(kind="affine", group=16)
    with pytest.raises(ValueError, match="zero"):
        WeightFormat(kind="affine", zero="none")
    with pytest.raises(ValueError, match="plain"):
        WeightFormat(kind="plain", base="f8")


def test_only_plain_formats_hold_vectors() -> None:
    assert parse_format("bf16").nbytes((7,)) == 14
    with pytest.raises(ValueError, match="matrices"):
        parse_format("int4-g64").nbytes((64,))


@pytest.mark.parametrize("absmax", [1e-45, 1e-30, 0.02, 1.0, 6e4, 3.4e38])
def test_row_exponent_leaves_room_in_fp16(absmax: float) -> None:
    scaled = math.ldexp(absmax, -row_exponent(absmax))
    assert scaled < 2**16 / 8 or (row_exponent(absmax) == 112 and scaled < 65504)
    assert scaled >= 2**12 or absmax < 2**-112
