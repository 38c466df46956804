"""Vector building blocks of the weight kernels, as LLVM operations that numba can call.

numba widens every byte operation to 64 bits and LLVM unrolls short loops before it looks for vectors, so plain
loops over packed codes run three to six times slower than these. The vectors are legal LLVM on every target:
32 bytes are one register with AVX2, two with NEON. Memory is addressed by integers; callers own it, and nothing
here checks bounds.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_i8, _i16, _i32, _i64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_f32 = ir.FloatType()
_codes = ir.VectorType(_i8, 16)
_bytes = ir.VectorType(_i8, 32)
_shorts = ir.VectorType(_i16, 16)
_floats = ir.VectorType(_f32, 16)


def _splat(builder: Any, scalar: Any, vector: Any) -> Any:
    undefined = ir.Constant(vector, ir.Undefined)
    one = builder.insert_element(undefined, scalar, ir.Constant(_i32, 0))
    return builder.shuffle_vector(one, undefined, ir.Constant(ir.VectorType(_i32, vector.count), None))


def _constant(vector: Any, value: int) -> Any:
    return ir.Constant(vector, [value] * vector.count)


def _load(builder: Any, address: Any, vector: Any) -> Any:
    return builder.load(builder.inttoptr(address, vector.as_pointer()), align=1)


def _store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=1)


@intrinsic
def merge_bits32(typingctx: Any, target: Any, source: Any, down: Any, mask: Any, up: Any, keep: Any) -> Any:
    """32 bytes: target = (target & keep) | ((source >> down) & mask) << up. All but the addresses are small ints."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        target, source, down, mask, up, keep = args
        # There are no byte shifts: shift pairs of bytes, then mask off what crossed over.
        shorts = builder.lshr(
            _load(builder, source, _shorts), _splat(builder, builder.trunc(down, _i16), _shorts)
        )
        bits = builder.and_(
            builder.bitcast(shorts, _bytes), _splat(builder, builder.trunc(mask, _i8), _bytes)
        )
        bits = builder.shl(builder.bitcast(bits, _shorts), _splat(builder, builder.trunc(up, _i16), _shorts))
        kept = builder.and_(_load(builder, target, _bytes), _splat(builder, builder.trunc(keep, _i8), _bytes))
        _store(builder, builder.or_(kept, builder.bitcast(bits, _bytes)), target)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), codegen


@intrinsic
def split_pairs16(typingctx: Any, first: Any, second: Any) -> Any:
    """16 bytes 11 * a + b at address first -> a at first, b at second."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pairs = builder.zext(_load(builder, args[0], _codes), _shorts)
        # 187 / 2^11 is 1/11 closely enough for every pair below 228.
        a = builder.lshr(builder.mul(pairs, _constant(_shorts, 187)), _constant(_shorts, 11))
        b = builder.sub(pairs, builder.mul(a, _constant(_shorts, 11)))
        _store(builder, builder.trunc(a, _codes), args[0])
        _store(builder, builder.trunc(b, _codes), args[1])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def _values(builder: Any, codes: Any, s: Any, z: Any, m: Any) -> Any:
    """scale * (code - zero) + min of codes given as fp32 lanes, each operation rounded."""
    kind = codes.type
    value = builder.fmul(_splat(builder, s, kind), builder.fsub(codes, _splat(builder, z, kind)))
    return builder.fadd(value, _splat(builder, m, kind))


def _to_bf16(builder: Any, values: Any) -> Any:
    """fp32 lanes -> bf16 lanes as i16, ties rounded to even. Values are finite."""
    wide = ir.VectorType(_i32, values.type.count)
    bits = builder.bitcast(values, wide)
    odd = builder.and_(builder.lshr(bits, _constant(wide, 16)), _constant(wide, 1))
    rounded = builder.add(bits, builder.add(odd, _constant(wide, 0x7FFF)))
    return builder.trunc(builder.lshr(rounded, _constant(wide, 16)), ir.VectorType(_i16, wide.count))


def _expand(lanes: int) -> Any:
    @intrinsic  # type: ignore[untyped-decorator,unused-ignore]
    def expand(typingctx: Any, out: Any, codes: Any, s: Any, z: Any, m: Any, tag: Any) -> Any:
        if tag not in (types.float32, types.uint16):
            return None

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            stored = _load(builder, args[1], ir.VectorType(_i8, lanes))
            numbers = builder.zext(stored, ir.VectorType(_i32, lanes))
            values = _values(builder, builder.sitofp(numbers, ir.VectorType(_f32, lanes)), *args[2:5])
            if tag == types.uint16:
                values = _to_bf16(builder, values)
            _store(builder, values, args[0])
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.float32, types.float32, types.float32, tag), codegen

    return expand


# 16 or 32 codes at address codes -> s * (code - z) + m at address out. tag, by its type: float32 writes fp32,
# uint16 writes bf16; its value is unused.
expand16 = _expand(16)
expand32 = _expand(32)


@intrinsic
def can_look_up(typingctx: Any, tag: Any) -> Any:
    """Whether `look_up32` works for this tag on this processor. A constant."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(ir.IntType(1), int(tag == types.uint16 and _has_avx2(context)))

    return types.boolean(tag), codegen


@intrinsic
def look_up32(typingctx: Any, out: Any, codes: Any, n: Any, s: Any, z: Any, m: Any) -> Any:
    """n times 32 codes below 16 at address codes -> s * (code - z) + m, as bf16 at address out.

    The 16 possible values are computed once, then looked up by AVX2's byte shuffle, low and high bytes apart:
    a third of the instructions of computing and rounding each. Does nothing where `can_look_up` is false.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if not _has_avx2(context):
            return context.get_dummy_value()
        out, codes, n, *params = args
        levels = ir.Constant(_floats, [float(code) for code in range(16)])
        table = builder.bitcast(_to_bf16(builder, _values(builder, levels, *params)), _bytes)
        low = _shuffle(builder, table, table, [2 * i for i in range(16)] * 2)
        high = _shuffle(builder, table, table, [2 * i + 1 for i in range(16)] * 2)
        kind = ir.FunctionType(_bytes, [_bytes, _bytes])
        name = "llvm.x86.avx2.pshuf.b"
        pick = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        with cgutils.for_range(builder, n) as loop:
            chunk = _load(builder, builder.add(codes, builder.mul(loop.index, ir.Constant(_i64, 32))), _bytes)
            pairs = [byte for i in range(32) for byte in (i, 32 + i)]
            values = _shuffle(
                builder, builder.call(pick, [low, chunk]), builder.call(pick, [high, chunk]), pairs
            )
            _store(builder, values, builder.add(out, builder.mul(loop.index, ir.Constant(_i64, 64))))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3, *[types.float32] * 3), codegen


def _shuffle(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_i32, len(lanes)), lanes))


def _has_avx2(context: Any) -> bool:
    """Whether numba compiles for AVX2: told by the key of its cache, which names the processor's features."""
    triple, _, features = context.codegen().magic_tuple()
    return "x86_64" in triple and "+avx2" in features.split(",")
