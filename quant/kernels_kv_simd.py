"""Eight-lane fp32 vectors for numba: the few operations that attention and the page codec are written in.

LLVM does not vectorise numba's array loops over packed codes (index wrap-around turns every load into a
gather), so these kernels name their vectors. Memory is addressed by plain integers, which lets one kernel
read pages of any number of arenas. <8 x float> is legal LLVM on every target: one register with AVX, two
with NEON.

A `tag` argument selects, by its numba type, how an element is stored; its value is never looked at:

    float32  fp32           uint16  bf16            int16  fp16
    uint8    8-bit codes    uint32  4-bit codes     uint64 2-bit codes

Nothing here checks addresses: callers own the memory and its bounds.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, models, register_model

LANES = 8

TAGS: dict[str, Any] = {
    "f32": np.float32(0),
    "bf16": np.uint16(0),
    "f16": np.int16(0),
    "int8": np.uint8(0),
    "int4": np.uint32(0),
    "int2": np.uint64(0),
}
_CODE_BITS = {types.uint8: 8, types.uint32: 4, types.uint64: 2}
_ITEM_BYTES = {
    types.float32: 4,
    types.uint16: 2,
    types.int16: 2,
    types.uint8: 1,
    types.uint32: 1,
    types.uint64: 1,
}

_SUFFIXES = {"float": "f32", "half": "f16", "i16": "i16", "i8": "i8"}  # in names of LLVM functions

_f32 = ir.FloatType()
_i32 = ir.IntType(32)
_vec_f32 = ir.VectorType(_f32, LANES)
_vec_i32 = ir.VectorType(_i32, LANES)


class _Float32x8(types.Type):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(name="Float32x8")


float32x8 = _Float32x8()


@register_model(_Float32x8)
class _Float32x8Model(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, _vec_f32)


def _splat(builder: Any, scalar: Any, vector: Any) -> Any:
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(_i32, 0))
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), ir.Constant(_vec_i32, [0] * LANES))


def _constant(vector: Any, value: float) -> Any:
    return ir.Constant(vector, [value] * vector.count)


def _call_vector(builder: Any, name: str, args: Any) -> Any:
    """Call LLVM's own function `name` on fp32 vectors."""
    full_name = f"llvm.{name}.v{LANES}f32"
    kind = ir.FunctionType(_vec_f32, [_vec_f32] * len(args))
    function = builder.module.globals.get(full_name) or ir.Function(builder.module, kind, full_name)
    return builder.call(function, args)


def _first_lanes(builder: Any, count: Any) -> Any:
    """Mask of the lanes below an int64 count."""
    lanes = ir.Constant(_vec_i32, list(range(LANES)))
    return builder.icmp_signed("<", lanes, _splat(builder, builder.trunc(count, _i32), _vec_i32))


def _narrow(builder: Any, value: Any, tag: Any) -> Any:
    """fp32 lanes -> stored elements; for 8-bit codes the lanes are whole numbers of 0..255."""
    if tag == types.float32:
        return value
    if tag == types.int16:
        return builder.fptrunc(value, ir.VectorType(ir.HalfType(), LANES))
    if tag == types.uint8:
        return builder.trunc(builder.fptosi(value, _vec_i32), ir.VectorType(ir.IntType(8), LANES))
    bits = builder.bitcast(value, _vec_i32)
    odd = builder.and_(builder.lshr(bits, _constant(_vec_i32, 16)), _constant(_vec_i32, 1))
    rounded = builder.add(bits, builder.add(odd, _constant(_vec_i32, 0x7FFF)))
    return builder.trunc(builder.lshr(rounded, _constant(_vec_i32, 16)), ir.VectorType(ir.IntType(16), LANES))


def _stored_element(tag: Any) -> Any:
    """The LLVM type in which an element of this tag is loaded."""
    if tag == types.float32:
        return _f32
    if tag == types.int16:
        return ir.HalfType()
    return ir.IntType(16 if tag == types.uint16 else 8)


def _widen(builder: Any, stored: Any, tag: Any, plane: Any) -> Any:
    """Stored elements -> fp32 lanes; for codes those of bit plane `plane`."""
    if tag == types.float32:
        return stored
    if tag == types.int16:
        return builder.fpext(stored, _vec_f32)
    if tag == types.uint16:  # bf16 is the upper half of fp32
        wide = builder.shl(builder.zext(stored, _vec_i32), _constant(_vec_i32, 16))
        return builder.bitcast(wide, _vec_f32)
    bits = _CODE_BITS[tag]
    wide = builder.zext(stored, _vec_i32)
    if bits < 8:
        shift = builder.mul(builder.trunc(plane, _i32), ir.Constant(_i32, bits))
        wide = builder.and_(
            builder.lshr(wide, _splat(builder, shift, _vec_i32)), _constant(_vec_i32, (1 << bits) - 1)
        )
    return builder.sitofp(wide, _vec_f32)  # codes are small: signed conversion is one instruction


@intrinsic
def item_nbytes(typingctx: Any, tag: Any) -> Any:
    """Bytes of one stored element; for codes, of one byte of codes. A constant."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(ir.IntType(64), _ITEM_BYTES[tag])

    return types.int64(tag), codegen


@intrinsic
def n_planes(typingctx: Any, tag: Any) -> Any:
    """Codes per byte, 1 for plain formats. A constant, so that loops over it unroll."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(ir.IntType(64), 8 // _CODE_BITS[tag] if tag in _CODE_BITS else 1)

    return types.int64(tag), codegen


@intrinsic
def is_packed(typingctx: Any, tag: Any) -> Any:
    """Whether the tag is one of codes. A constant."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(ir.IntType(1), int(tag in _CODE_BITS))

    return types.boolean(tag), codegen


@intrinsic
def load8(typingctx: Any, address: Any, plane: Any, tag: Any) -> Any:
    """Lanes = the 8 elements that start at address (for codes: bit plane `plane` of 8 bytes)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        element = _stored_element(tag)
        pointer = builder.inttoptr(args[0], ir.VectorType(element, LANES).as_pointer())
        return _widen(builder, builder.load(pointer, align=1), tag, args[1])

    return float32x8(types.int64, types.int64, tag), codegen


@intrinsic
def load_first(typingctx: Any, address: Any, count: Any, plane: Any, tag: Any) -> Any:
    """Like load8, but reads only the first `count` elements; the other lanes are zero."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = ir.VectorType(_stored_element(tag), LANES)
        pointer = builder.inttoptr(args[0], vector.as_pointer())
        mask = _first_lanes(builder, args[1])
        kind = ir.FunctionType(vector, [vector.as_pointer(), _i32, mask.type, vector])
        name = f"llvm.masked.load.v{LANES}{_SUFFIXES[str(vector.element)]}.p0"
        masked_load = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        zero = ir.Constant(vector, None)
        stored = builder.call(masked_load, [pointer, ir.Constant(_i32, 1), mask, zero])
        return _widen(builder, stored, tag, args[2])

    return float32x8(types.int64, types.int64, types.int64, tag), codegen


@intrinsic
def store8(typingctx: Any, address: Any, value: Any) -> Any:
    """Write 8 fp32 to address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[1], builder.inttoptr(args[0], _vec_f32.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, float32x8), codegen


@intrinsic
def store_as(typingctx: Any, address: Any, value: Any, tag: Any) -> Any:
    """Write 8 elements of a plain tag, rounded to nearest even. NaN must not occur."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        stored = _narrow(builder, args[1], tag)
        builder.store(stored, builder.inttoptr(args[0], stored.type.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, float32x8, tag), codegen


@intrinsic
def store_first_as(typingctx: Any, address: Any, value: Any, count: Any, tag: Any) -> Any:
    """Like store_as for the first `count` lanes only; slow, for the ends of rows."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        stored = _narrow(builder, args[1], tag)
        mask = _first_lanes(builder, args[2])
        name = f"llvm.masked.store.v{LANES}{_SUFFIXES[str(stored.type.element)]}.p0"
        kind = ir.FunctionType(ir.VoidType(), [stored.type, stored.type.as_pointer(), _i32, mask.type])
        function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        pointer = builder.inttoptr(args[0], stored.type.as_pointer())
        builder.call(function, [stored, pointer, ir.Constant(_i32, 1), mask])
        return context.get_dummy_value()

    return types.void(types.int64, float32x8, types.int64, tag), codegen


@intrinsic
def splat8(typingctx: Any, value: Any) -> Any:
    """All lanes = the fp32 value."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _splat(builder, args[0], _vec_f32)

    return float32x8(types.float32), codegen


@intrinsic
def broadcast8(typingctx: Any, address: Any) -> Any:
    """All lanes = the fp32 at address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _splat(builder, builder.load(builder.inttoptr(args[0], _f32.as_pointer()), align=4), _vec_f32)

    return float32x8(types.int64), codegen


@intrinsic
def fma8(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, in one instruction where the processor has one."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _call_vector(builder, "fmuladd", args)

    return float32x8(float32x8, float32x8, float32x8), codegen


def _binary(method: str) -> Any:
    @intrinsic  # type: ignore[untyped-decorator,unused-ignore]
    def operation(typingctx: Any, a: Any, b: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return getattr(builder, method)(*args)

        return float32x8(float32x8, float32x8), codegen

    return operation


add8 = _binary("fadd")
sub8 = _binary("fsub")
mul8 = _binary("fmul")
div8 = _binary("fdiv")


@intrinsic
def max8(typingctx: Any, a: Any, b: Any) -> Any:
    """Lane-wise maximum; inputs are never NaN."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return float32x8(float32x8, float32x8), codegen


@intrinsic
def min8(typingctx: Any, a: Any, b: Any) -> Any:
    """Lane-wise minimum; inputs are never NaN."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered("<", *args), *args)

    return float32x8(float32x8, float32x8), codegen


@intrinsic
def quiet8(typingctx: Any, a: Any) -> Any:
    """The same with every NaN made one that stays a NaN when it is narrowed to bf16."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        nan = builder.bitcast(_constant(_vec_i32, 0x7FC00000), _vec_f32)
        return builder.select(builder.fcmp_unordered("uno", args[0], args[0]), nan, args[0])

    return float32x8(float32x8), codegen


@intrinsic
def first_lanes8(typingctx: Any, count: Any, a: Any, b: Any) -> Any:
    """Lanes below count from a, the others from b."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(_first_lanes(builder, args[0]), args[1], args[2])

    return float32x8(types.int64, float32x8, float32x8), codegen


@intrinsic
def iota8(typingctx: Any) -> Any:
    """Lanes = 0, 1, ... 7."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(_vec_f32, [float(lane) for lane in range(LANES)])

    return float32x8(), codegen


def _halve(builder: Any, vector: Any, combine: Any) -> Any:
    """Reduce all lanes with `combine`, in the same order on every target."""
    width = LANES
    while width > 1:
        width //= 2
        index = ir.VectorType(_i32, width)
        undefined = ir.Constant(vector.type, ir.Undefined)
        low = builder.shuffle_vector(vector, undefined, ir.Constant(index, list(range(width))))
        high = builder.shuffle_vector(vector, undefined, ir.Constant(index, list(range(width, 2 * width))))
        vector = combine(low, high)
    return builder.extract_element(vector, ir.Constant(_i32, 0))


@intrinsic
def sum_lanes(typingctx: Any, a: Any) -> Any:
    """Sum of the 8 lanes, fp32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _halve(builder, args[0], builder.fadd)

    return types.float32(float32x8), codegen


@intrinsic
def max_lanes(typingctx: Any, a: Any) -> Any:
    """Largest of the 8 lanes, fp32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def larger(x: Any, y: Any) -> Any:
            return builder.select(builder.fcmp_ordered(">", x, y), x, y)

        return _halve(builder, args[0], larger)

    return types.float32(float32x8), codegen


@intrinsic
def store_sums4(typingctx: Any, address: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Write the lane sums of a, b, c, d as 4 consecutive fp32: one transposed reduction instead of four."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def fold(x: Any, y: Any, even: list[int], odd: list[int]) -> Any:
            kind = ir.VectorType(_i32, len(even))
            return builder.fadd(
                builder.shuffle_vector(x, y, ir.Constant(kind, even)),
                builder.shuffle_vector(x, y, ir.Constant(kind, odd)),
            )

        # Pairs of lanes within each half, the pattern of x86's horizontal add.
        even, odd = [0, 2, 8, 10, 4, 6, 12, 14], [1, 3, 9, 11, 5, 7, 13, 15]
        quads = fold(fold(args[1], args[2], even, odd), fold(args[3], args[4], even, odd), even, odd)
        sums = fold(quads, quads, [0, 1, 2, 3], [4, 5, 6, 7])
        builder.store(sums, builder.inttoptr(args[0], sums.type.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, float32x8, float32x8, float32x8, float32x8), codegen


@intrinsic
def round8(typingctx: Any, a: Any) -> Any:
    """Nearest whole numbers, ties to even."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _call_vector(builder, "rint", args)

    return float32x8(float32x8), codegen


@intrinsic
def _power_of_two8(typingctx: Any, a: Any) -> Any:
    """2^a for whole a in -126..127, by writing the exponent field."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        exponent = builder.add(builder.fptosi(args[0], _vec_i32), _constant(_vec_i32, 127))
        return builder.bitcast(builder.shl(exponent, _constant(_vec_i32, 23)), _vec_f32)

    return float32x8(float32x8), codegen


@njit
def exp8(x: Any) -> Any:
    """e^x for x in -87..88 within 2 units in the last place; below -87 it stays at e^-87, about 1e-38.

    Cephes' scheme: x = n ln 2 + r with ln 2 in two parts, then a degree-5 polynomial in r.
    """
    x = max8(x, splat8(np.float32(-87.0)))
    n = round8(mul8(x, splat8(np.float32(1.44269504088896341))))
    r = fma8(n, splat8(np.float32(-0.693359375)), x)
    r = fma8(n, splat8(np.float32(2.12194440e-4)), r)
    p = splat8(np.float32(1.9875691500e-4))
    p = fma8(p, r, splat8(np.float32(1.3981999507e-3)))
    p = fma8(p, r, splat8(np.float32(8.3334519073e-3)))
    p = fma8(p, r, splat8(np.float32(4.1665795894e-2)))
    p = fma8(p, r, splat8(np.float32(1.6666665459e-1)))
    p = fma8(p, r, splat8(np.float32(5.0000001201e-1)))
    p = fma8(p, mul8(r, r), r)
    return mul8(add8(p, splat8(np.float32(1.0))), _power_of_two8(n))
