"""Formats of the KV cache: exact page sizes and the layout of one page. Needs neither torch nor numba.

A page holds `page_tokens` consecutive tokens of one sequence's K and V in one layer, in one contiguous run of
bytes. Plain formats store K then V, each (n_kv_heads, page_tokens, head_dim). Packed formats store unsigned
codes of 8, 4 or 2 bits and rebuild value = unit * (minimum + code * scale): K has one (scale, minimum) per
channel of the page, V one per token and head, because K's outliers sit in fixed channels and V's do not
(KIVI, arXiv:2402.02750). Scales and minima are fp16 in multiples of `unit`, a power of two per KV head, so
that no finite cache value overflows or is flushed to zero.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import prod

PART_ALIGN_BYTES = 16
PAGE_ALIGN_BYTES = 64
DEFAULT_PAGE_TOKENS = 64
MIN_PAGE_TOKENS = 16
MAX_PAGE_TOKENS = 256

_PLAIN = {"f32": (32, "float32"), "bf16": (16, "bfloat16"), "f16": (16, "float16")}
_PACKED = {"int8": 8, "int4": 4, "int2": 2}
_ITEM_BYTES = {"uint8": 1, "float16": 2, "bfloat16": 2, "float32": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class PagePart:
    """One array inside a page: where it starts, its shape and its element type (a torch dtype's name)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * _ITEM_BYTES[self.dtype]

    @property
    def end_bytes(self) -> int:
        return self.offset_bytes + self.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFormat:
    """How the K and V of a full page are stored. Get one from `parse_cache_format`."""

    name: str
    bits: int
    dtype: str

    def __post_init__(self) -> None:
        known = _PLAIN.get(self.name) or (_PACKED.get(self.name), "uint8")
        if known != (self.bits, self.dtype):
            raise ValueError(
                f"cache format {self.name!r} with bits={self.bits}, dtype={self.dtype!r} does not exist; "
                f"use parse_cache_format with one of {', '.join(CACHE_FORMAT_NAMES)}"
            )

    @property
    def is_packed(self) -> bool:
        """True where pages hold codes with scales, False where they hold plain floating-point values."""
        return self.name in _PACKED

    @property
    def levels(self) -> int:
        """Largest code of a packed format; 0 for plain formats."""
        return (1 << self.bits) - 1 if self.is_packed else 0

    @property
    def codes_per_byte(self) -> int:
        """Codes that share a byte in a packed format; 1 for int8 and for plain formats."""
        return 8 // self.bits if self.is_packed else 1

    def row_nbytes(self, head_dim: int) -> int:
        """Bytes of one token's K (or V) of one head, without parameters.

        In a packed row of R bytes, byte j holds the codes of channels j, j + R, j + 2R, ... from its low bits
        upwards, so that every bit plane unpacks to consecutive channels. Channels past head_dim hold code 0.
        """
        if self.is_packed:
            return -(-head_dim // self.codes_per_byte)
        return head_dim * self.bits // 8

    def page_parts(self, *, page_tokens: int, n_kv_heads: int, head_dim: int) -> tuple[PagePart, ...]:
        """The arrays of one page, in order of their offset, each aligned to PART_ALIGN_BYTES.

        Plain: kv (2, n_kv_heads, page_tokens, head_dim). Packed: k_codes (n_kv_heads, page_tokens,
        row_nbytes), k_scale and k_min (n_kv_heads, head_dim), v_codes like k_codes, v_scale and v_min
        (n_kv_heads, page_tokens), units (2, n_kv_heads) for K and V. Raises ValueError for sizes that no
        page can have.
        """
        return _page_parts(self, page_tokens, n_kv_heads, head_dim)

    def page_nbytes(self, *, page_tokens: int, n_kv_heads: int, head_dim: int) -> int:
        """Exact bytes of one page (one layer, one sequence), a multiple of PAGE_ALIGN_BYTES."""
        return _align(_page_parts(self, page_tokens, n_kv_heads, head_dim)[-1].end_bytes, PAGE_ALIGN_BYTES)

    def gather_nbytes(self, *, page_tokens: int, n_kv_heads: int, head_dim: int, plain: str) -> int:
        """Most bytes held for one page while `quant.kv.decode_pages` rebuilds a copy of it in the plain format.

        The copy and what it is rebuilt to are included: for a packed format K in its final type, V's codes
        apart and joined, and V in fp32.
        """
        page = self.page_nbytes(page_tokens=page_tokens, n_kv_heads=n_kv_heads, head_dim=head_dim)
        side = n_kv_heads * page_tokens * head_dim  # elements of K or V
        item = _PLAIN[plain][0] // 8
        if not self.is_packed:
            return page + (0 if self.name == plain else 2 * side * item)
        codes = n_kv_heads * page_tokens * self.row_nbytes(head_dim) * self.codes_per_byte
        return page + side * item + 2 * codes + 4 * side


CACHE_FORMAT_NAMES = (*_PLAIN, *_PACKED)


def parse_cache_format(name: str) -> CacheFormat:
    """The cache format of that name: f32, bf16, f16, int8, int4 or int2; ValueError for any other."""
    if name in _PLAIN:
        bits, dtype = _PLAIN[name]
        return CacheFormat(name=name, bits=bits, dtype=dtype)
    if name in _PACKED:
        return CacheFormat(name=name, bits=_PACKED[name], dtype="uint8")
    raise ValueError(f"unknown cache format {name!r}; use one of {', '.join(CACHE_FORMAT_NAMES)}")


def check_page_tokens(page_tokens: int) -> int:
    """Return page_tokens, or raise ValueError if it is outside MIN_PAGE_TOKENS..MAX_PAGE_TOKENS."""
    if not MIN_PAGE_TOKENS <= page_tokens <= MAX_PAGE_TOKENS:
        raise ValueError(
            f"page_tokens={page_tokens} is outside {MIN_PAGE_TOKENS}..{MAX_PAGE_TOKENS}; "
            f"{DEFAULT_PAGE_TOKENS} suits every format"
        )
    return page_tokens


def _align(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple


@lru_cache(maxsize=256)
def _page_parts(fmt: CacheFormat, page_tokens: int, n_kv_heads: int, head_dim: int) -> tuple[PagePart, ...]:
    check_page_tokens(page_tokens)
    if n_kv_heads < 1 or head_dim < 1:
        raise ValueError(f"a page needs n_kv_heads >= 1 and head_dim >= 1, got {n_kv_heads} and {head_dim}")
    rows = (n_kv_heads, page_tokens)
    arrays: list[tuple[str, str, tuple[int, ...]]]
    if fmt.is_packed:
        codes = (*rows, fmt.row_nbytes(head_dim))
        arrays = [
            ("k_codes", "uint8", codes),
            ("k_scale", "float16", (n_kv_heads, head_dim)),
            ("k_min", "float16", (n_kv_heads, head_dim)),
            ("v_codes", "uint8", codes),
            ("v_scale", "float16", rows),
            ("v_min", "float16", rows),
            ("units", "float32", (2, n_kv_heads)),
        ]
    else:
        # Without padding between K and V, so that a page is also one (2, n_kv_heads, page_tokens, head_dim).
        arrays = [("kv", fmt.dtype, (2, *rows, head_dim))]
    parts: list[PagePart] = []
    for name, dtype, shape in arrays:
        start = _align(parts[-1].end_bytes, PART_ALIGN_BYTES) if parts else 0
        parts.append(PagePart(name=name, dtype=dtype, shape=shape, offset_bytes=start))
    return tuple(parts)
