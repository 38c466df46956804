"""AMX's tiles, and the vectors around them, as LLVM operations that numba can call.

A tile register holds 16 rows of 64 bytes. `multiply_tiles` adds to 16 x 16 fp32 sums the products of 16 rows of 32
bf16 weights with 32 bf16 numbers of each of 16 tokens; the latter lie in pairs, row p of their tile holds numbers 2p
and 2p + 1 of all tokens. Tile registers belong to a thread, which configures them first. Memory is addressed by
integers, and nothing here checks bounds; tiles want addresses on 64 bytes, at others they load at a third of the speed.

Sources: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18, "Programming with Intel
Advanced Matrix Extensions".
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from quant.kernels_simd import declare, load_vector, splat, store_vector
from quant.kernels_simd16 import call_lanes, clamp, float32x16, narrow_lanes, number, reciprocal_lanes

TILE = 1024  # bytes: 16 rows of 64

_i8, _i16, _i32, _i64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_pointer = _i8.as_pointer()
_void = ir.VoidType()
_words = ir.VectorType(_i32, 16)
_floats = ir.VectorType(ir.FloatType(), 16)
_shorts = ir.VectorType(_i16, 32)
_half_shorts = ir.VectorType(_i16, 16)
_places = ir.VectorType(_i32, 32)  # where the numbers of a shuffle of shorts come from
_HALVES = [ir.Constant(_words, list(range(k, k + 16))) for k in (0, 16)]  # of 32 numbers


def configuration() -> Any:
    """The 64 bytes that `configure_tiles` takes: palette 1, eight tiles of 16 rows of 64 bytes."""
    bytes64 = np.zeros(64, np.uint8)
    bytes64[0] = 1
    bytes64[16:32].view(np.uint16)[:] = 64
    bytes64[48:56] = 16
    return bytes64


@intrinsic
def configure_tiles(typingctx: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        configure = declare(builder, "llvm.x86.ldtilecfg", _void, [_pointer])
        builder.call(configure, [builder.inttoptr(args[0], _pointer)])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def release_tiles(typingctx: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.call(declare(builder, "llvm.x86.tilerelease", _void, []), [])
        return context.get_dummy_value()

    return types.void(), codegen


def _tiles(numbers: tuple[Any, ...]) -> list[Any] | None:
    """Numbers of tile registers, which instructions hold as constants; None if they are not known."""
    if not all(isinstance(number, types.IntegerLiteral) for number in numbers):
        return None
    return [ir.Constant(_i8, number.literal_value) for number in numbers]


@intrinsic(prefer_literal=True)
def zero_tile(typingctx: Any, tile: Any) -> Any:
    tiles = _tiles((tile,))
    if tiles is None:
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.call(declare(builder, "llvm.x86.tilezero", _void, [_i8]), tiles)
        return context.get_dummy_value()

    return types.void(tile), codegen


def _tile_access(name: str) -> Any:
    @intrinsic(prefer_literal=True)
    def access(typingctx: Any, tile: Any, address: Any, stride: Any) -> Any:
        tiles = _tiles((tile,))
        if tiles is None:
            return None

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            instruction = declare(builder, name, _void, [_i8, _pointer, _i64])
            builder.call(instruction, [*tiles, builder.inttoptr(args[1], _pointer), args[2]])
            return context.get_dummy_value()

        return types.void(tile, types.int64, types.int64), codegen

    return access


# (tile, address, bytes from row to row)
load_tile = _tile_access("llvm.x86.tileloadd64")
store_tile = _tile_access("llvm.x86.tilestored64")


@intrinsic(prefer_literal=True)
def multiply_tiles(typingctx: Any, sums: Any, weights: Any, tokens: Any) -> Any:
    """Tile sums += tile weights times tile tokens."""
    tiles = _tiles((sums, weights, tokens))
    if tiles is None:
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.call(declare(builder, "llvm.x86.tdpbf16ps", _void, [_i8, _i8, _i8]), tiles)
        return context.get_dummy_value()

    return types.void(sums, weights, tokens), codegen


def _lanes_below(builder: Any, count: Any, n_lanes: int) -> Any:
    """Mask of the first `count` (int64) of n lanes."""
    kind = ir.VectorType(_i32, n_lanes)
    lanes = ir.Constant(kind, list(range(n_lanes)))
    return builder.icmp_signed("<", lanes, splat(builder, builder.trunc(count, _i32), kind))


def _load_first(builder: Any, address: Any, count: Any, kind: Any, name: str) -> Any:
    """The first `count` lanes, others zero; memory beyond is not read."""
    mask = _lanes_below(builder, count, kind.count)
    load = declare(builder, f"llvm.masked.load.{name}.p0", kind, [kind.as_pointer(), _i32, mask.type, kind])
    pointer = builder.inttoptr(address, kind.as_pointer())
    return builder.call(load, [pointer, ir.Constant(_i32, 1), mask, ir.Constant(kind, None)])


def _turn(builder: Any, rows: list[Any]) -> list[Any]:
    """16 vectors of 16 lanes -> the same square turned: for each bit of their numbers, rows and lanes are exchanged."""
    for bit in (1, 2, 4, 8):
        turned = list(rows)
        lanes = range(16)
        kept = [lane if not lane & bit else 16 + lane - bit for lane in lanes]
        moved = [lane + bit if not lane & bit else 16 + lane for lane in lanes]
        for i in lanes:
            if not i & bit:
                pair = rows[i], rows[i + bit]
                turned[i] = builder.shuffle_vector(*pair, ir.Constant(_words, kept))
                turned[i + bit] = builder.shuffle_vector(*pair, ir.Constant(_words, moved))
        rows = turned
    return rows


def _store_turned(builder: Any, rows: list[Any], tile: Any) -> None:
    for i, row in enumerate(_turn(builder, rows)):
        store_vector(builder, row, builder.add(tile, ir.Constant(_i64, 64 * i)))


@intrinsic
def turn_tokens(typingctx: Any, source: Any, stride: Any, n_tokens: Any, n_numbers: Any, tile: Any) -> Any:
    """Up to 32 bf16 numbers of up to 16 tokens, stride bytes apart -> the tile at address tile; zeros beyond."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, stride, n_tokens, n_numbers, tile = args
        rows = []
        for i in range(16):
            at = builder.add(source, builder.mul(stride, ir.Constant(_i64, i)))
            here = builder.select(
                builder.icmp_signed("<", ir.Constant(_i64, i), n_tokens), n_numbers, ir.Constant(_i64, 0)
            )
            rows.append(builder.bitcast(_load_first(builder, at, here, _shorts, "v32i16"), _words))
        _store_turned(builder, rows, tile)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


def _address_at(builder: Any, list_address: Any, i: int) -> Any:
    at = builder.add(list_address, ir.Constant(_i64, 8 * i))
    return builder.load(builder.inttoptr(at, _i64.as_pointer()), align=8)


@intrinsic
def turn_listed(typingctx: Any, addresses: Any, offset: Any, n_rows: Any, tile: Any) -> Any:
    """32 bf16 numbers of up to 16 rows, offset bytes after the listed addresses -> the tile; zeros beyond n_rows."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        addresses, offset, n_rows, tile = args
        rows = []
        for i in range(16):
            at = builder.add(_address_at(builder, addresses, i), offset)
            here = builder.icmp_signed("<", ir.Constant(_i64, i), n_rows)
            count = builder.select(here, ir.Constant(_i64, 32), ir.Constant(_i64, 0))
            rows.append(builder.bitcast(_load_first(builder, at, count, _shorts, "v32i16"), _words))
        _store_turned(builder, rows, tile)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


@intrinsic
def copy32(typingctx: Any, source: Any, n: Any, target: Any) -> Any:
    """The first n of 32 elements of 16 bits at address source, then zeros, to address target."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        store_vector(builder, _load_first(builder, args[0], args[1], _shorts, "v32i16"), args[2])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


def _sums_with_bias(builder: Any, tile: Any, bias: Any, n_rows: Any) -> list[Any]:
    """16 weight rows by 16 tokens of fp32 sums -> one vector for each token, the rows' biases added.

    bias: address of fp32 numbers, n_rows of which may be read, or 0.
    """
    rows = [builder.bitcast(row, _words) for row in _rows_of(builder, tile)]
    none = builder.icmp_signed("==", bias, ir.Constant(_i64, 0))
    biases = _load_first(builder, bias, builder.select(none, ir.Constant(_i64, 0), n_rows), _floats, "v16f32")
    return [builder.fadd(builder.bitcast(row, _floats), biases) for row in _turn(builder, rows)]


def _store_first(builder: Any, value: Any, address: Any, mask: Any) -> None:
    kind = value.type
    name = f"llvm.masked.store.v{kind.count}i16.p0"
    store = declare(builder, name, _void, [kind, kind.as_pointer(), _i32, mask.type])
    pointer = builder.inttoptr(address, kind.as_pointer())
    builder.call(store, [value, pointer, ir.Constant(_i32, 1), mask])


@intrinsic
def turn_added(
    typingctx: Any, tile: Any, bias: Any, n_rows: Any, out: Any, stride: Any, n_tokens: Any
) -> Any:
    """As `turn_biased`, and what is there is added before anything is rounded."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        tile, bias, n_rows, out, stride, n_tokens = args
        sums = _sums_with_bias(builder, tile, bias, n_rows)
        mask = _lanes_below(builder, n_rows, 16)
        for i in range(0, 16, 2):
            places, totals = [], []
            for token in (i, i + 1):
                at = builder.add(out, builder.mul(stride, ir.Constant(_i64, token)))
                is_one = builder.icmp_signed("<", ir.Constant(_i64, token), n_tokens)
                count = builder.select(is_one, n_rows, ir.Constant(_i64, 0))
                there = builder.zext(_load_first(builder, at, count, _half_shorts, "v16i16"), _words)
                there = builder.bitcast(builder.shl(there, ir.Constant(_words, [16] * 16)), _floats)
                totals.append(builder.fadd(sums[token], there))
                places.append((at, is_one))
            both = narrow_lanes(builder, *totals)
            for half, (at, is_one) in zip(_HALVES, places, strict=True):
                with builder.if_then(is_one):
                    _store_first(builder, builder.shuffle_vector(both, both, half), at, mask)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), codegen


@intrinsic
def turn_divided(
    typingctx: Any, first: Any, second: Any, divisors: Any, addresses: Any, offset: Any, n_lanes: Any
) -> Any:
    """Sums of two tiles, 16 numbers by 16 lanes each, divided by the lanes' divisors -> 32 bf16 numbers of each lane.

    They go offset bytes after the listed addresses of the first n_lanes lanes. divisors: address of 16 fp32.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first, second, divisors, addresses, offset, n_lanes = args
        factor = builder.fdiv(number(1.0), load_vector(builder, divisors, _floats))
        turned = []
        for tile in (first, second):
            rows = []
            for i in range(16):
                row = load_vector(builder, builder.add(tile, ir.Constant(_i64, 64 * i)), _floats)
                rows.append(builder.bitcast(builder.fmul(row, factor), _words))
            turned.append([builder.bitcast(row, _floats) for row in _turn(builder, rows)])
        for i, (low, high) in enumerate(zip(*turned, strict=True)):
            with builder.if_then(builder.icmp_signed("<", ir.Constant(_i64, i), n_lanes)):
                at = builder.add(_address_at(builder, addresses, i), offset)
                store_vector(builder, narrow_lanes(builder, low, high), at)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), codegen


_LOG2_E = 1.4426950408889634
_TO_INTEGER = 1.5 * 2**23  # added to a small fp32, leaves the nearest integer in its lowest bits


def _gated(builder: Any, gate: Any, up: Any, is_gelu: bool) -> Any:
    """activation(gate) * up: SiLU, or tanh-GELU; both are gate / (1 + e^-z). As `kernels_pointwise.gate_rows`.

    e^-z is within 3e-6 of itself, which bf16 does not see: a least squares fit of 2^r on -1/2..1/2, moved by the
    exponent.
    """
    z = gate
    if is_gelu:
        cubic = builder.fmul(builder.fmul(gate, gate), builder.fmul(gate, number(0.044715)))
        z = builder.fmul(builder.fadd(gate, cubic), number(1.5957691216057308))
    z = clamp(builder, z, -87.0, 87.0)
    shifted = call_lanes(builder, "fma", z, number(-_LOG2_E), number(_TO_INTEGER))
    n = builder.fsub(shifted, number(_TO_INTEGER))
    r = call_lanes(builder, "fma", z, number(-_LOG2_E), builder.fneg(n))
    p = number(9.5605102064e-03)
    for factor in (5.5917039175e-02, 2.4024981110e-01, 6.9312196770e-01, 9.9999919086e-01):
        p = call_lanes(builder, "fma", p, r, number(factor))
    exponent = builder.shl(builder.bitcast(shifted, _words), ir.Constant(_words, [23] * 16))
    power = builder.bitcast(builder.add(builder.bitcast(p, _words), exponent), _floats)
    # Far below zero the quotient is zero, for the largest numbers too; NaN stays what it is.
    low = builder.fcmp_ordered("<", gate, number(-1e4))
    gate = builder.select(low, number(-1e4), gate)
    quotient = builder.fmul(gate, reciprocal_lanes(builder, builder.fadd(power, number(1.0))))
    return builder.fmul(quotient, up)


def _gater(is_gelu: bool) -> Any:
    @intrinsic  # type: ignore[untyped-decorator,unused-ignore]
    def gate(typingctx: Any, gates: Any, ups: Any, bias: Any, up_bias: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            gate, up = (
                builder.fadd(load_vector(builder, at, _floats), splat(builder, add, _floats))
                for at, add in zip(args[:2], args[2:], strict=True)
            )
            store_vector(builder, _gated(builder, gate, up, is_gelu), args[0])
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.float32, types.float32), codegen

    return gate


# 16 gates and ups, fp32 sums at two addresses, a bias added to either -> activation(gate) * up where the gates were.
gate_silu = _gater(is_gelu=False)
gate_gelu = _gater(is_gelu=True)


@intrinsic
def turn_tile(typingctx: Any, tile: Any, n_rows: Any, out: Any, stride: Any, n_tokens: Any) -> Any:
    """A tile of fp32, 16 rows by 16 tokens -> 16 bf16 numbers of every token, stride bytes apart.

    Only the first n_rows numbers of the first n_tokens are written.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _store_narrowed(builder, _rows_of(builder, args[0]), *args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


@intrinsic
def turn_biased(
    typingctx: Any, tile: Any, bias: Any, n_rows: Any, out: Any, stride: Any, n_tokens: Any
) -> Any:
    """As `turn_tile`, the rows' biases added: n_rows fp32 at address bias, or none if that is 0."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pairs = zip(_rows_of(builder, args[0]), _biases(builder, args[1], args[2]), strict=True)
        _store_narrowed(builder, [builder.fadd(row, bias) for row, bias in pairs], *args[2:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), codegen


def _rows_of(builder: Any, tile: Any) -> list[Any]:
    return [load_vector(builder, builder.add(tile, ir.Constant(_i64, 64 * i)), _floats) for i in range(16)]


def _store_narrowed(builder: Any, rows: list[Any], n_rows: Any, out: Any, stride: Any, n_tokens: Any) -> None:
    mask = _lanes_below(builder, n_rows, 16)
    for i, both in enumerate(_turn_narrowed(builder, rows)):
        for token, half in zip((i, i + 8), _HALVES, strict=True):
            at = builder.add(out, builder.mul(stride, ir.Constant(_i64, token)))
            with builder.if_then(builder.icmp_signed("<", ir.Constant(_i64, token), n_tokens)):
                _store_first(builder, builder.shuffle_vector(both, both, half), at, mask)


def _biases(builder: Any, bias: Any, n_rows: Any) -> list[Any]:
    """For each of 16 rows its bias in all lanes."""
    zero = cgutils.alloca_once_value(builder, ir.Constant(ir.FloatType(), 0.0))
    none = builder.icmp_signed("==", bias, ir.Constant(_i64, 0))
    first = builder.select(none, builder.ptrtoint(zero, _i64), bias)
    last = builder.select(none, ir.Constant(_i64, 0), builder.sub(n_rows, ir.Constant(_i64, 1)))
    biases = []
    for i in range(16):
        row = ir.Constant(_i64, i)
        row = builder.select(builder.icmp_signed("<", row, last), row, last)
        at = builder.add(first, builder.mul(row, ir.Constant(_i64, 4)))
        biases.append(splat(builder, load_vector(builder, at, ir.FloatType()), _floats))
    return biases


def _turn_narrowed(builder: Any, rows: list[Any]) -> list[Any]:
    """16 rows of fp32 of 16 tokens -> for each i below 8 the rows' bf16 of token i, then those of token i + 8.

    Rows i and i + 8 are narrowed into one register, whose four lanes are eight tokens of a row each. A round puts the
    numbers of registers i and i + 4 alternately into registers 2 i and 2 i + 1, which turns the six bits of (register,
    place in the lane) round by one; so three rounds exchange them. Then the lanes are put in order.
    """
    lanes = [narrow_lanes(builder, rows[i], rows[i + 8]) for i in range(8)]
    rounds = [
        ir.Constant(_places, [8 * lane + k + of for lane in range(4) for k in half for of in (0, 32)])
        for half in (range(4), range(4, 8))
    ]
    for _ in range(3):
        lanes = [builder.shuffle_vector(lanes[i // 2], lanes[i // 2 + 4], rounds[i % 2]) for i in range(8)]
    order = ir.Constant(_places, [8 * lane + k for lane in (0, 2, 1, 3) for k in range(8)])
    return [builder.shuffle_vector(both, both, order) for both in lanes]


@intrinsic
def turn_pairs(typingctx: Any, source: Any, stride: Any, n_rows: Any, tile: Any) -> Any:
    """16 bf16 numbers of up to 32 rows, stride bytes apart -> a tile of 16 rows of 32, zeros for rows beyond."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, stride, n_rows, tile = args
        pairs = []
        for i in range(16):
            words = []
            for row in (2 * i, 2 * i + 1):
                at = builder.add(source, builder.mul(stride, ir.Constant(_i64, row)))
                there = builder.icmp_signed("<", ir.Constant(_i64, row), n_rows)
                count = builder.select(there, ir.Constant(_i64, 16), ir.Constant(_i64, 0))
                words.append(builder.zext(_load_first(builder, at, count, _half_shorts, "v16i16"), _words))
            pairs.append(builder.or_(words[0], builder.shl(words[1], ir.Constant(_words, [16] * 16))))
        _store_turned(builder, pairs, tile)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


@intrinsic
def store_pairs16(typingctx: Any, address: Any, even: Any, odd: Any) -> Any:
    """Two vectors of 16 fp32 -> 16 pairs of bf16, one of each, to address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        both = narrow_lanes(builder, args[1], args[2])
        lanes = [lane for i in range(16) for lane in (i, 16 + i)]
        pairs = builder.shuffle_vector(both, both, ir.Constant(ir.VectorType(_i32, 32), lanes))
        store_vector(builder, pairs, args[0])
        return context.get_dummy_value()

    return types.void(types.int64, float32x16, float32x16), codegen


# Where `_interleave` puts 32 numbers: the first vector holds those of the lower halves of four lanes of 8, the second
# those of the upper halves.
_LOW = [lane * 8 + k for lane in range(4) for k in range(4)]
_HIGH = [lane * 8 + 4 + k for lane in range(4) for k in range(4)]


@intrinsic
def pair_rows(
    typingctx: Any, first: Any, second: Any, keeps_first: Any, keeps_second: Any, low: Any, high: Any
) -> Any:
    """32 bf16 numbers of two rows -> pairs, one number of each: those of _LOW to address low, of _HIGH to high.

    Zeros stand for a row that is not kept, whatever it holds.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first, second, keeps_first, keeps_second, low, high = args
        rows = []
        for address, keeps in ((first, keeps_first), (second, keeps_second)):
            row = builder.bitcast(load_vector(builder, address, _shorts), _words)
            row = builder.and_(row, splat(builder, builder.sext(keeps, _i32), _words))
            rows.append(builder.bitcast(row, _shorts))
        for places, target in ((_LOW, low), (_HIGH, high)):
            lanes = [n for place in places for n in (place, 32 + place)]
            pairs = builder.shuffle_vector(*rows, ir.Constant(ir.VectorType(_i32, 32), lanes))
            store_vector(builder, pairs, target)
        return context.get_dummy_value()

    kinds = [types.int64, types.int64, types.boolean, types.boolean, types.int64, types.int64]
    return types.void(*kinds), codegen


@intrinsic
def add_in_order(typingctx: Any, total: Any, factor: Any, low: Any, high: Any) -> Any:
    """32 fp32 at address total = total * factor + what lies at low (for the numbers of _LOW) and high (_HIGH)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        total, factor, low, high = args
        parts = load_vector(builder, low, _floats), load_vector(builder, high, _floats)
        where = {place: i for i, place in enumerate([*_LOW, *_HIGH])}
        scale = splat(builder, factor, _floats)
        for half in range(2):
            lanes = [where[16 * half + i] for i in range(16)]
            part = builder.shuffle_vector(*parts, ir.Constant(ir.VectorType(_i32, 16), lanes))
            at = builder.add(total, ir.Constant(_i64, 64 * half))
            old = load_vector(builder, at, _floats)
            store_vector(builder, builder.fadd(builder.fmul(old, scale), part), at)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, types.int64, types.int64), codegen
