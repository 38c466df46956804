"""Vector building blocks of the weight kernels, as LLVM operations that numba can call.

numba widens every byte operation to 64 bits and LLVM unrolls short loops before it looks for vectors, so plain
loops over packed codes run three to six times slower than these. The vectors are legal LLVM on every target:
32 bytes are one register with AVX2, two with NEON. Memory is addressed by integers; callers own it, and nothing
here checks bounds.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_i8, _i16, _i32 = ir.IntType(8), ir.IntType(16), ir.IntType(32)
_f32 = ir.FloatType()
_codes = ir.VectorType(_i8, 16)
_bytes = ir.VectorType(_i8, 32)
_shorts = ir.VectorType(_i16, 16)
_ints = ir.VectorType(_i32, 16)
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


def _values(builder: Any, args: Any) -> Any:
    """scale * (code - zero) + min of 16 codes, each operation rounded."""
    _, codes, s, z, m, _ = args
    value = builder.sitofp(builder.zext(_load(builder, codes, _codes), _ints), _floats)
    value = builder.fmul(_splat(builder, s, _floats), builder.fsub(value, _splat(builder, z, _floats)))
    return builder.fadd(value, _splat(builder, m, _floats))


@intrinsic
def expand16(typingctx: Any, out: Any, codes: Any, s: Any, z: Any, m: Any, tag: Any) -> Any:
    """16 codes at address codes -> s * (code - z) + m at address out.

    tag, by its type: float32 writes fp32, uint16 writes bf16 with ties rounded to even; its value is unused.
    """
    if tag not in (types.float32, types.uint16):
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values = _values(builder, args)
        if tag == types.uint16:
            bits = builder.bitcast(values, _ints)
            odd = builder.and_(builder.lshr(bits, _constant(_ints, 16)), _constant(_ints, 1))
            rounded = builder.add(bits, builder.add(odd, _constant(_ints, 0x7FFF)))
            values = builder.trunc(builder.lshr(rounded, _constant(_ints, 16)), _shorts)
        _store(builder, values, args[0])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, types.float32, types.float32, tag), codegen
