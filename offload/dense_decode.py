"""Decode attention on an accelerator: stored pages gathered into dense staging, several sequences at a time.

What is gathered from where is the same in all layers of a pass, so the index tensors are made once per chunk and
device: a copy of indices from pageable memory makes the host wait for the whole stream, once per layer that would
leave the device without work.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from offload.attention import attend_dense
from offload.pages import CacheShape
from offload.units import AttentionParams
from quant.kernel_choice import has_triton
from quant.kv import decode_pages
from quant.kv_batch import plain_format


class PageMoves(NamedTuple):
    """Pages of one arena: slot slots[i] becomes page number numbers[i] of row rows[i] (int64, on the device)."""

    slots: Tensor
    rows: Tensor
    numbers: Tensor


class DensePiece(NamedTuple):
    """Rows first .. first + n of a chunk's decode rows, n_pages pages of room each.

    block_pages: pages that are decoded at a time. moves: one per arena. tail_rows: the rows' tails; tail_numbers:
    the page that each becomes; tail_outside: bool (n, page_tokens), past a tail's end; seq_lens int32 (n,). All
    tensors are on the device.
    """

    first: int
    n: int
    n_pages: int
    block_pages: int
    moves: tuple[PageMoves, ...]
    tail_rows: Tensor
    tail_numbers: Tensor
    tail_outside: Tensor
    seq_lens: Tensor


def decode_block(shape: CacheShape, dtype: torch.dtype, dense_bytes: int, staging_bytes: int) -> int:
    """How many pages to decode at a time into K and V of dense_bytes, at least one.

    What is on the way takes what K and V leave of the staging, at least an eighth of it, and never more than
    they do: `policy.memory_plan.work_buffer` charges that.
    """
    each = shape.fmt.gather_nbytes(
        page_tokens=shape.page_tokens,
        n_kv_heads=shape.n_kv_heads,
        head_dim=shape.head_dim,
        plain=plain_format(dtype).name,
    )
    return max(1, min(dense_bytes, max(staging_bytes - dense_bytes, staging_bytes // 8)) // each)


def plan_dense(
    page_slots: Tensor,
    page_arenas: Tensor | None,
    seq_lens: Tensor,
    tail_lens: Tensor,
    tail_rows: Tensor,
    *,
    shape: CacheShape,
    dtype: torch.dtype,
    device: torch.device,
    staging_bytes: int,
) -> list[DensePiece]:
    """Cut decode rows into pieces whose K and V of `dtype` fit half of the staging, or of one row.

    page_slots, page_arenas (0 or 1; None: all 0): (rows, max pages); seq_lens, tail_lens, tail_rows: (rows,); all
    int32 on the CPU.
    """
    page = shape.page_tokens
    full = torch.div(seq_lens - tail_lens, page, rounding_mode="floor")  # (rows,)
    page_bytes = 2 * shape.n_kv_heads * page * shape.head_dim * dtype.itemsize
    # The other half is for pages in their stored form and between formats.
    most_pages = max(1, staging_bytes // (2 * page_bytes))
    pieces: list[DensePiece] = []
    first = 0
    while first < len(seq_lens):
        n = 1
        room = int(full[first]) + 1
        while first + n < len(seq_lens):
            wider = max(room, int(full[first + n]) + 1)
            if wider * (n + 1) > most_pages:
                break
            n, room = n + 1, wider
        rows = slice(first, first + n)
        used = torch.arange(page_slots.shape[1]) < full[rows, None]
        moves = []
        for arena in range(1 if page_arenas is None else 2):
            here = used if page_arenas is None else used & (page_arenas[rows] == arena)
            row, number = here.nonzero(as_tuple=True)
            slots = page_slots[rows][row, number].long()
            moves.append(PageMoves(*(t.to(device) for t in (slots, row, number))))
        pieces.append(
            DensePiece(
                first=first,
                n=n,
                n_pages=room,
                block_pages=decode_block(shape, dtype, n * room * page_bytes, staging_bytes),
                moves=tuple(moves),
                tail_rows=tail_rows[rows].long().to(device),
                tail_numbers=full[rows].long().to(device),
                tail_outside=(torch.arange(page) >= tail_lens[rows, None]).to(device),
                seq_lens=seq_lens[rows].to(device),
            )
        )
        first += n
    return pieces


def attend_pieces(
    pieces: list[DensePiece],
    query: Tensor,
    arenas: tuple[Tensor, ...],
    tails: Tensor,
    shape: CacheShape,
    params: AttentionParams,
) -> Tensor:
    """One query per row against its pages and tail: query (rows, n_heads, head_dim) -> same.

    arenas: uint8 (slots, >= page_bytes) each, as the plan numbered them; tails (tail rows, 2, n_kv_heads,
    page_tokens, head_dim); all on the query's device.
    """
    out = torch.empty_like(query)
    for piece in pieces:
        rows = slice(piece.first, piece.first + piece.n)
        key, value = gather_piece(piece, query.dtype, arenas, tails, shape)
        out[rows] = attend_dense(query[rows], key, value, piece.seq_lens, params)
        del key, value  # before the next piece's are made
    return out


def gather_piece(
    piece: DensePiece, dtype: torch.dtype, arenas: tuple[Tensor, ...], tails: Tensor, shape: CacheShape
) -> tuple[Tensor, Tensor]:
    """Keys and values of a piece, padded with zeros: two (n, n_kv_heads, n_pages * page_tokens, head_dim)."""
    page, device = shape.page_tokens, tails.device
    size = (piece.n, shape.n_kv_heads, piece.n_pages * page, shape.head_dim)
    key = torch.zeros(size, dtype=dtype, device=device)
    value = torch.zeros(size, dtype=dtype, device=device)
    # (n, n_kv_heads, n_pages, page_tokens, head_dim)
    key_pages, value_pages = (x.unflatten(2, (piece.n_pages, page)) for x in (key, value))
    for arena, move in zip(arenas, piece.moves, strict=True):
        if not move.slots.numel():
            continue
        if shape.fmt.is_packed and has_triton(device.type):
            from quant.kernels_triton import unpack_pages

            unpack_pages(
                arena,
                shape.fmt,
                page_tokens=page,
                slots=move.slots,
                rows=move.rows,
                first_positions=move.numbers * page,
                k_out=key,
                v_out=value,
            )
            continue
        for first in range(0, move.slots.numel(), piece.block_pages):
            slots, rows, numbers = (t[first : first + piece.block_pages] for t in move)
            k, v = decode_pages(
                arena[slots, : shape.page_bytes],
                shape.fmt,
                n_kv_heads=shape.n_kv_heads,
                page_tokens=page,
                head_dim=shape.head_dim,
                dtype=dtype,
            )
            key_pages[rows, :, numbers] = k
            value_pages[rows, :, numbers] = v
            del k, v
    for first in range(0, piece.n, piece.block_pages):
        tail_rows, outside, numbers = (
            t[first : first + piece.block_pages]
            for t in (piece.tail_rows, piece.tail_outside, piece.tail_numbers)
        )
        rows = torch.arange(first, first + len(numbers), device=device)
        tail = tails[tail_rows].to(dtype)  # (rows, 2, n_kv_heads, page_tokens, head_dim), a copy
        # What lies behind a tail's end is left over from others; even masked, a NaN there would spread.
        tail.masked_fill_(outside[:, None, None, :, None], 0.0)
        key_pages[rows, :, numbers] = tail[:, 0]
        value_pages[rows, :, numbers] = tail[:, 1]
        del tail
    return key, value
