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
from numba.core.registry import cpu_target
from numba.extending import intrinsic

_i8, _i16, _i32, _i64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_f32 = ir.FloatType()
_codes = ir.VectorType(_i8, 16)
_bytes = ir.VectorType(_i8, 32)
_shorts = ir.VectorType(_i16, 16)
_floats = ir.VectorType(_f32, 16)


def splat(builder: Any, scalar: Any, vector: Any) -> Any:
    undefined = ir.Constant(vector, ir.Undefined)
    one = builder.insert_element(undefined, scalar, ir.Constant(_i32, 0))
    return builder.shuffle_vector(one, undefined, ir.Constant(ir.VectorType(_i32, vector.count), None))


def _constant(vector: Any, value: int) -> Any:
    return ir.Constant(vector, [value] * vector.count)


def load_vector(builder: Any, address: Any, vector: Any) -> Any:
    return builder.load(builder.inttoptr(address, vector.as_pointer()), align=1)


def store_vector(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=1)


def _reader(kind: Any, element: Any) -> Any:
    @intrinsic  # type: ignore[untyped-decorator,unused-ignore]
    def read(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return load_vector(builder, args[0], element)

        return kind(types.int64), codegen

    return read


# One element at an address.
byte_at = _reader(types.uint8, _i8)
half_at = _reader(types.uint16, _i16)
float_at = _reader(types.float32, _f32)


def _writer(kind: Any) -> Any:
    @intrinsic  # type: ignore[untyped-decorator,unused-ignore]
    def write(typingctx: Any, address: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            store_vector(builder, args[1], args[0])
            return context.get_dummy_value()

        return types.void(types.int64, kind), codegen

    return write


put_byte = _writer(types.uint8)
put_float = _writer(types.float32)
put_word = _writer(types.int64)


@intrinsic
def copy_bytes(typingctx: Any, target: Any, source: Any, n: Any) -> Any:
    """n bytes from address source to address target, which do not overlap."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        target, source = (builder.inttoptr(address, _i8.as_pointer()) for address in args[:2])
        cgutils.raw_memcpy(builder, target, source, args[2], 1)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@intrinsic
def fill16(typingctx: Any, address: Any, value: Any) -> Any:
    """16 fp32 at address = value."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        store_vector(builder, splat(builder, args[1], _floats), args[0])
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), codegen


@intrinsic
def merge_bits32(typingctx: Any, target: Any, source: Any, down: Any, mask: Any, up: Any, keep: Any) -> Any:
    """32 bytes: target = (target & keep) | ((source >> down) & mask) << up. All but the addresses are small ints."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        target, source, down, mask, up, keep = args
        # There are no byte shifts: shift pairs of bytes, then mask off what crossed over.
        shorts = builder.lshr(
            load_vector(builder, source, _shorts), splat(builder, builder.trunc(down, _i16), _shorts)
        )
        bits = builder.and_(builder.bitcast(shorts, _bytes), splat(builder, builder.trunc(mask, _i8), _bytes))
        bits = builder.shl(builder.bitcast(bits, _shorts), splat(builder, builder.trunc(up, _i16), _shorts))
        kept = builder.and_(
            load_vector(builder, target, _bytes), splat(builder, builder.trunc(keep, _i8), _bytes)
        )
        store_vector(builder, builder.or_(kept, builder.bitcast(bits, _bytes)), target)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), codegen


@intrinsic
def split_nibbles32(typingctx: Any, source: Any, low: Any, high: Any) -> Any:
    """32 bytes at address source -> their low nibbles at low, their high nibbles at high, one a byte."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        stored = load_vector(builder, args[0], _bytes)
        shorts = builder.lshr(builder.bitcast(stored, _shorts), _constant(_shorts, 4))
        mask = _constant(_bytes, 15)
        store_vector(builder, builder.and_(stored, mask), args[1])
        store_vector(builder, builder.and_(builder.bitcast(shorts, _bytes), mask), args[2])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@intrinsic
def converts_halves(typingctx: Any) -> Any:
    """Whether the processor converts fp16 itself; LLVM would call a function that is not there. A constant."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        features = compiled_features()
        return ir.Constant(ir.IntType(1), int(not features or "f16c" in features))

    return types.boolean(), codegen


@intrinsic
def scale_halves16(typingctx: Any, source: Any, unit: Any, out: Any) -> Any:
    """16 fp16 numbers at address source, times unit, as fp32 at address out."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        stored = load_vector(builder, args[0], ir.VectorType(ir.HalfType(), 16))
        wide = builder.fpext(stored, _floats)
        store_vector(builder, builder.fmul(wide, splat(builder, args[1], _floats)), args[2])
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, types.int64), codegen


@intrinsic
def split_pairs16(typingctx: Any, first: Any, second: Any) -> Any:
    """16 bytes 11 * a + b at address first -> a at first, b at second."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pairs = builder.zext(load_vector(builder, args[0], _codes), _shorts)
        # 187 / 2^11 is 1/11 closely enough for every pair below 228.
        a = builder.lshr(builder.mul(pairs, _constant(_shorts, 187)), _constant(_shorts, 11))
        b = builder.sub(pairs, builder.mul(a, _constant(_shorts, 11)))
        store_vector(builder, builder.trunc(a, _codes), args[0])
        store_vector(builder, builder.trunc(b, _codes), args[1])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def _prefetcher(for_writing: bool) -> Any:
    @intrinsic  # type: ignore[untyped-decorator,unused-ignore]
    def prefetch(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = _i8.as_pointer()
            ask = declare(builder, "llvm.prefetch.p0", ir.VoidType(), [pointer, _i32, _i32, _i32])
            # For reading or writing; how long it will be of use, 0 to 3; data, not instructions.
            how = [ir.Constant(_i32, number) for number in (int(for_writing), 3 if for_writing else 2, 1)]
            builder.call(ask, [builder.inttoptr(args[0], pointer), *how])
            return context.get_dummy_value()

        return types.void(types.int64), codegen

    return prefetch


# Ask for the cache line at an address, which may be any number.
prefetch = _prefetcher(for_writing=False)
prefetch_for_writing = _prefetcher(for_writing=True)


def _values(builder: Any, codes: Any, s: Any, z: Any, m: Any) -> Any:
    """scale * (code - zero) + min of codes given as fp32 lanes, each operation rounded."""
    kind = codes.type
    value = builder.fmul(splat(builder, s, kind), builder.fsub(codes, splat(builder, z, kind)))
    return builder.fadd(value, splat(builder, m, kind))


def to_bf16(builder: Any, values: Any) -> Any:
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
            stored = load_vector(builder, args[1], ir.VectorType(_i8, lanes))
            numbers = builder.zext(stored, ir.VectorType(_i32, lanes))
            values = _values(builder, builder.sitofp(numbers, ir.VectorType(_f32, lanes)), *args[2:5])
            if tag == types.uint16:
                values = to_bf16(builder, values)
            store_vector(builder, values, args[0])
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
        return ir.Constant(ir.IntType(1), int(tag == types.uint16 and "avx2" in compiled_features()))

    return types.boolean(tag), codegen


@intrinsic
def look_up32(typingctx: Any, out: Any, step: Any, codes: Any, n: Any, s: Any, z: Any, m: Any) -> Any:
    """n times 32 codes below 16 at address codes -> s * (code - z) + m, as bf16 at address out.

    step: bytes from one 32 values to the next. The 16 possible values are computed once, then looked up: by AVX512's
    word permutation, or by AVX2's byte shuffle, low and high bytes apart, a third of the instructions of computing
    and rounding each. Does nothing where `can_look_up` is false.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if "avx2" not in compiled_features():
            return context.get_dummy_value()
        out, step, codes, n, *params = args
        levels = ir.Constant(_floats, [float(code) for code in range(16)])
        table = to_bf16(builder, _values(builder, levels, *params))
        pick = _pick_words if "avx512bw" in compiled_features() else _pick_bytes
        values_of = pick(builder, table)
        with cgutils.for_range(builder, n) as loop:
            chunk = load_vector(
                builder, builder.add(codes, builder.mul(loop.index, ir.Constant(_i64, 32))), _bytes
            )
            store_vector(builder, values_of(chunk), builder.add(out, builder.mul(loop.index, step)))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4, *[types.float32] * 3), codegen


def _pick_words(builder: Any, table: Any) -> Any:
    """A function of 32 codes that looks them up among 16 values of 16 bits, with AVX512."""
    words = ir.VectorType(_i16, 32)
    permute = declare(builder, "llvm.x86.avx512.permvar.hi.512", words, [words, words])
    twice = _shuffle(builder, table, table, [*range(16), *range(16)])
    return lambda codes: builder.call(permute, [twice, builder.zext(codes, words)])


def _pick_bytes(builder: Any, table: Any) -> Any:
    """The same with AVX2."""
    table = builder.bitcast(table, _bytes)
    low = _shuffle(builder, table, table, [2 * i for i in range(16)] * 2)
    high = _shuffle(builder, table, table, [2 * i + 1 for i in range(16)] * 2)
    shuffle = declare(builder, "llvm.x86.avx2.pshuf.b", _bytes, [_bytes, _bytes])
    pairs = [byte for i in range(32) for byte in (i, 32 + i)]
    return lambda codes: _shuffle(
        builder, builder.call(shuffle, [low, codes]), builder.call(shuffle, [high, codes]), pairs
    )


def declare(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    """One of LLVM's own functions."""
    kind = ir.FunctionType(result, arguments)
    return builder.module.globals.get(name) or ir.Function(builder.module, kind, name)


def _shuffle(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_i32, len(lanes)), lanes))


def compiled_features() -> set[str]:
    """The processor's features for which numba compiles, by LLVM's names, from the key of its cache; x86 only."""
    triple, _, features = cpu_target.target_context.codegen().magic_tuple()
    return {name[1:] for name in features.split(",") if name[:1] == "+"} if "x86_64" in triple else set()
