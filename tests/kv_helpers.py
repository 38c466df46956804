"""KV pages for tests: encode and decode in one call, and ragged batches whose pages lie shuffled in arenas."""

from typing import Any

import torch
from torch import Tensor

from quant.kv import decode_pages, encode_pages
from quant.kv_batch import PagedBatch
from quant.kv_formats import CacheFormat, parse_cache_format


def encoded(k: Tensor, v: Tensor, fmt: CacheFormat) -> Tensor:
    n_pages, n_kv_heads, page_tokens, head_dim = k.shape
    nbytes = fmt.page_nbytes(page_tokens=page_tokens, n_kv_heads=n_kv_heads, head_dim=head_dim)
    pages = torch.full((n_pages, nbytes), 0xA5, dtype=torch.uint8)
    encode_pages(k, v, fmt, pages)
    return pages


def decoded(pages: Tensor, like: Tensor, fmt: CacheFormat, dtype: torch.dtype = torch.float32) -> Any:
    _, n_kv_heads, page_tokens, head_dim = like.shape
    return decode_pages(
        pages, fmt, n_kv_heads=n_kv_heads, page_tokens=page_tokens, head_dim=head_dim, dtype=dtype
    )


def ragged_batch(
    name: str,
    lengths: list[int],
    *,
    page_tokens: int,
    head_dim: int,
    tail_dtype: torch.dtype,
    n_kv_heads: int = 2,
) -> tuple[PagedBatch, list[tuple[Tensor, Tensor]]]:
    """A batch whose pages lie shuffled in two arenas, and each sequence's K and V as they should come back."""
    fmt = parse_cache_format(name)
    generator = torch.Generator().manual_seed(len(lengths) + head_dim)
    nbytes = fmt.page_nbytes(page_tokens=page_tokens, n_kv_heads=n_kv_heads, head_dim=head_dim)
    tail_lens = [(length - 1) % page_tokens + 1 if length else 0 for length in lengths]
    n_full = [(length - tail) // page_tokens for length, tail in zip(lengths, tail_lens, strict=True)]
    arenas = tuple(torch.zeros(sum(n_full) + 1, nbytes + 64, dtype=torch.uint8) for _ in range(2))
    slots = torch.full((len(lengths), max(n_full) + 1), -7, dtype=torch.int32)
    numbers = torch.full_like(slots, 99)
    tails = torch.full((len(lengths) + 1, 2, n_kv_heads, page_tokens, head_dim), float("nan"))
    tails = tails.to(tail_dtype)
    order = torch.randperm(sum(n_full) + 1, generator=generator).tolist()
    expected = []
    for i, (pages, tail_len) in enumerate(zip(n_full, tail_lens, strict=True)):
        ks, vs = [], []
        for page in range(pages):
            k = torch.randn(1, n_kv_heads, page_tokens, head_dim, generator=generator)
            v = torch.randn(1, n_kv_heads, page_tokens, head_dim, generator=generator)
            slot, number = order.pop(), page % 2
            encode_pages(k, v, fmt, arenas[number][slot : slot + 1])
            slots[i, page], numbers[i, page] = slot, number
            k_back, v_back = decoded(arenas[number][slot : slot + 1], k, fmt)
            ks.append(k_back[0])
            vs.append(v_back[0])
        if tail_len:
            tail = torch.randn(2, n_kv_heads, tail_len, head_dim, generator=generator)
            tails[i + 1, :, :, :tail_len] = tail.to(tail_dtype)
            ks.append(tails[i + 1, 0, :, :tail_len].float())
            vs.append(tails[i + 1, 1, :, :tail_len].float())
        empty = torch.zeros(n_kv_heads, 0, head_dim)
        expected.append((torch.cat([empty, *ks], dim=1), torch.cat([empty, *vs], dim=1)))
    batch = PagedBatch(
        fmt=fmt,
        page_tokens=page_tokens,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        arenas=arenas,
        page_slots=slots,
        page_arenas=numbers,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        tail_lens=torch.tensor(tail_lens, dtype=torch.int32),
        tails=tails,
        tail_slots=torch.arange(1, len(lengths) + 1, dtype=torch.int32),
    )
    return batch, expected
