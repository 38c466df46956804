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
from policy.workload import DEFAULT_ATTENTION_STAGING_BYTES
from quant.kernel_choice import has_triton
from quant.kv import decode_pages


class PageMoves(NamedTuple):
    """Pages of one arena: slot slots[i] becomes page number numbers[i] of row rows[i] (int64, on the device)."""

    slots: Tensor
    rows: Tensor
    numbers: Tensor


class DensePiece(NamedTuple):
    """Rows first .. first + n of a chunk's decode rows, n_pages pages of room each.

    moves: one per arena. tail_rows: the rows' tails; tail_numbers: the page that each becomes; tail_inside: bool
    (n, page_tokens); seq_lens int32 (n,). All tensors are on the device.
    """

    first: int
    n: int
    n_pages: int
    moves: tuple[PageMoves, ...]
    tail_rows: Tensor
    tail_numbers: Tensor
    tail_inside: Tensor
    seq_lens: Tensor


def plan_dense(
    page_slots: Tensor,
    page_arenas: Tensor | None,
    seq_lens: Tensor,
    tail_lens: Tensor,
    tail_rows: Tensor,
    *,
    shape: CacheShape,
    itemsize: int,
    device: torch.device,
    staging_bytes: int = DEFAULT_ATTENTION_STAGING_BYTES,
) -> list[DensePiece]:
    """Cut decode rows into pieces whose K and V of `itemsize` bytes fit the staging.

    page_slots, page_arenas (0 or 1; None: all 0): (rows, max pages); seq_lens, tail_lens, tail_rows: (rows,); all
    int32 on the CPU.
    """
    page = shape.page_tokens
    full = torch.div(seq_lens - tail_lens, page, rounding_mode="floor")  # (rows,)
    # Half of the staging: the pages in their stored form or between formats take as much again.
    page_bytes = 2 * shape.n_kv_heads * page * shape.head_dim * itemsize
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
                moves=tuple(moves),
                tail_rows=tail_rows[rows].long().to(device),
                tail_numbers=full[rows].long().to(device),
                tail_inside=(torch.arange(page) < tail_lens[rows, None]).to(device),
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
        k, v = decode_pages(
            arena[move.slots, : shape.page_bytes],
            shape.fmt,
            n_kv_heads=shape.n_kv_heads,
            page_tokens=page,
            head_dim=shape.head_dim,
            dtype=dtype,
        )
        key_pages[move.rows, :, move.numbers] = k
        value_pages[move.rows, :, move.numbers] = v
    # What lies behind a tail's end is left over from others; even masked, a NaN there would spread.
    tail = tails[piece.tail_rows].to(dtype)  # (n, 2, n_kv_heads, page_tokens, head_dim)
    tail = tail.masked_fill(~piece.tail_inside[:, None, None, :, None], 0.0)
    each = torch.arange(piece.n, device=device)
    key_pages[each, :, piece.tail_numbers] = tail[:, 0]
    value_pages[each, :, piece.tail_numbers] = tail[:, 1]
    return key, value
