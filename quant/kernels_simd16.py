"""Sixteen-lane fp32 vectors for numba, one register with AVX512: what attention and gates beside AMX are
written in.

The eight-lane ones of `quant.kernels_kv_simd` serve every processor. Memory is addressed by integers; callers own it.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from quant.kernels_simd import compiled_features, declare, load_vector, splat, store_vector

_i32 = ir.IntType(32)
_i64 = ir.IntType(64)
_words = ir.VectorType(_i32, 16)
_floats = ir.VectorType(ir.FloatType(), 16)
_bytes = ir.VectorType(ir.IntType(8), 32)
_shorts = ir.VectorType(ir.IntType(16), 32)


class _BFloats(ir.Type):  # type: ignore[misc]
    """32 of LLVM's bfloat, which llvmlite does not know; values of it are only cast to integers here."""

    def _to_string(self) -> str:
        return "<32 x bfloat>"


class _Float32x16(types.Type):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(name="Float32x16")


float32x16 = _Float32x16()


@register_model(_Float32x16)
class _Float32x16Model(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, _floats)


@intrinsic
def load16(typingctx: Any, address: Any) -> Any:
    """16 fp32 at address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return load_vector(builder, args[0], _floats)

    return float32x16(types.int64), codegen


@intrinsic
def store16(typingctx: Any, address: Any, value: Any) -> Any:
    """Write 16 fp32 to address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        store_vector(builder, args[1], args[0])
        return context.get_dummy_value()

    return types.void(types.int64, float32x16), codegen


@intrinsic
def splat16(typingctx: Any, value: Any) -> Any:
    """One fp32 in all lanes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return splat(builder, args[0], _floats)

    return float32x16(types.float32), codegen


def _binary(compute: Any) -> Any:
    @intrinsic  # type: ignore[untyped-decorator,unused-ignore]
    def operation(typingctx: Any, a: Any, b: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return compute(builder, *args)

        return float32x16(float32x16, float32x16), codegen

    return operation


add16 = _binary(lambda builder, a, b: builder.fadd(a, b))
sub16 = _binary(lambda builder, a, b: builder.fsub(a, b))
mul16 = _binary(lambda builder, a, b: builder.fmul(a, b))
div16 = _binary(lambda builder, a, b: builder.fdiv(a, b))
max16 = _binary(lambda builder, a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))
min16 = _binary(lambda builder, a, b: builder.select(builder.fcmp_ordered("<", a, b), a, b))


@intrinsic
def fma16(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return call_lanes(builder, "fma", *args)

    return float32x16(float32x16, float32x16, float32x16), codegen


@intrinsic
def exp16(typingctx: Any, x: Any) -> Any:
    """e^x for x up to 88 within 2 units in the last place; below -87 it stays at e^-87, about 1e-38."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return exp_lanes(builder, clamp(builder, args[0], -87.0))

    return float32x16(float32x16), codegen


@intrinsic
def exp2_16(typingctx: Any, x: Any) -> Any:
    """2^x within 8e-5 of itself, which bf16 does not see; 0 far below, infinity far above."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        n = call_lanes(builder, "rint", args[0])
        r = builder.fsub(args[0], n)
        p = number(5.5088683808e-2)  # least squares of the relative error at Chebyshev's nodes of -1/2..1/2
        for factor in (2.4260405146e-1, 6.9327624168e-1, 9.9992894037e-1):
            p = call_lanes(builder, "fma", p, r, number(factor))
        mask = ir.Constant(ir.IntType(16), -1)
        kinds = [_floats, _floats, _floats, mask.type, _i32]
        scale = declare(builder, "llvm.x86.avx512.mask.scalef.ps.512", _floats, kinds)
        return builder.call(scale, [p, n, p, mask, ir.Constant(_i32, 4)])

    return float32x16(float32x16), codegen


@intrinsic
def visible16(typingctx: Any, x: Any, key: Any, first: Any, last: Any, otherwise: Any) -> Any:
    """x in the lanes whose key is in first..last, both included."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, key, first, last, otherwise = args
        from_first = builder.fcmp_ordered(">=", key, first)
        to_last = builder.fcmp_ordered("<=", key, last)
        return builder.select(builder.and_(from_first, to_last), x, otherwise)

    return float32x16(*[float32x16] * 5), codegen


@intrinsic
def can_look_up_nibbles(typingctx: Any, tag: Any) -> Any:
    """Whether `look_up_nibbles` works for this tag on this processor. A constant."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(ir.IntType(1), int(tag == types.uint16 and _has_words()))

    return types.boolean(tag), codegen


def _has_words() -> bool:
    return {"avx512bw", "avx512bf16"} <= compiled_features()


@intrinsic
def look_up_nibbles(
    typingctx: Any,
    nibbles: Any,
    n: Any,
    low: Any,
    high: Any,
    step: Any,
    low_s: Any,
    low_m: Any,
    high_s: Any,
    high_m: Any,
) -> Any:
    """n times 32 bytes at address nibbles -> s * nibble + m, rounded once to fp32 and to bf16.

    Low nibbles with low_s and low_m go to address low, the others with theirs to high. step: bytes from one 32 values
    to the next. The 16 possible values of either are computed once, then looked up. Values must not be subnormal.
    Does nothing where `can_look_up_nibbles` is false.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if not _has_words():
            return context.get_dummy_value()
        nibbles, n, low, high, step, *params = args
        levels = number(*range(16))
        of_low, of_high = (
            call_lanes(builder, "fma", splat(builder, s, _floats), levels, splat(builder, m, _floats))
            for s, m in (params[:2], params[2:])
        )
        # An index is five bits: the fifth of a high nibble, moved down, is 0, and that of a low one is set.
        table = narrow_lanes(builder, of_high, of_low)
        permute = declare(builder, "llvm.x86.avx512.permvar.hi.512", _shorts, [_shorts, _shorts])
        with cgutils.for_range(builder, n) as loop:
            at = builder.add(nibbles, builder.mul(loop.index, ir.Constant(_i64, 32)))
            codes = builder.zext(load_vector(builder, at, _bytes), _shorts)
            below = builder.or_(codes, ir.Constant(_shorts, [16] * 32))
            above = builder.lshr(codes, ir.Constant(_shorts, [4] * 32))
            offset = builder.mul(loop.index, step)
            for index, target in ((below, low), (above, high)):
                store_vector(builder, builder.call(permute, [table, index]), builder.add(target, offset))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5, *[types.float32] * 4), codegen


# -- for code that builds LLVM operations itself ----------------------------------------------------------------


def number(*values: float) -> Any:
    """16 fp32, or one for all lanes."""
    return ir.Constant(_floats, [float(value) for value in values] * (16 // len(values)))


def narrow_lanes(builder: Any, low: Any, high: Any) -> Any:
    """Two vectors of 16 fp32 -> 32 bf16 as integers, those of low first; AVX512's conversion, subnormals become 0."""
    name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
    narrow = declare(builder, name, _BFloats(), [_floats, _floats])
    return builder.bitcast(builder.call(narrow, [high, low]), _shorts)


def call_lanes(builder: Any, name: str, *args: Any) -> Any:
    """LLVM's function of that name for 16 fp32."""
    return builder.call(declare(builder, f"llvm.{name}.v16f32", _floats, [_floats] * len(args)), args)


def clamp(builder: Any, x: Any, least: float, most: float | None = None) -> Any:
    """Bounds for x; NaN becomes a bound."""
    x = builder.select(builder.fcmp_ordered(">", x, number(least)), x, number(least))
    if most is not None:
        x = builder.select(builder.fcmp_ordered("<", x, number(most)), x, number(most))
    return x


def exp_lanes(builder: Any, x: Any) -> Any:
    """e^x for x in -87..87 within 2 units in the last place, as `kernels_kv_simd.exp8` computes it."""
    n = call_lanes(builder, "rint", builder.fmul(x, number(1.44269504088896341)))
    r = call_lanes(builder, "fma", n, number(-0.693359375), x)
    r = call_lanes(builder, "fma", n, number(2.12194440e-4), r)
    p = number(1.9875691500e-4)
    for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = call_lanes(builder, "fma", p, r, number(factor))
    p = builder.fadd(call_lanes(builder, "fma", p, builder.fmul(r, r), r), number(1.0))
    exponent = builder.add(builder.fptosi(n, _words), ir.Constant(_words, [127] * 16))
    power = builder.bitcast(builder.shl(exponent, ir.Constant(_words, [23] * 16)), _floats)
    return builder.fmul(p, power)


def reciprocal_lanes(builder: Any, x: Any) -> Any:
    """1 / x for x in 1..e^87, to about the last place: AVX512's estimate of 14 bits, improved once by Newton."""
    mask = ir.Constant(ir.IntType(16), -1)
    estimate = declare(builder, "llvm.x86.avx512.rcp14.ps.512", _floats, [_floats, _floats, mask.type])
    first = builder.call(estimate, [x, ir.Constant(_floats, None), mask])
    error = call_lanes(builder, "fma", builder.fmul(x, number(-1.0)), first, number(2.0))
    return builder.fmul(first, error)
