"""What there is to do: how many sequences, how long their prompts, how much they generate.

A workload is two lengths, or a distribution of (prompt_len, gen_len) pairs with counts. gen_len 0 is
scoring: one prefill, no generation. `Limits` are the sizes a run is built for; `limits_for` derives them
from a workload and a block's shape, so that planner and runtime agree on them.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

from policy.schedule import Depths
from policy.tiers import ScheduleName
from quant.kv_formats import DEFAULT_PAGE_TOKENS, check_page_tokens

DEFAULT_CHUNK_TOKENS = 1024
MAX_PASS_TOKENS = 65536
WEIGHTS_SLOTS = (3, 2)
"""Units of streamed weights held at once, the better choice first. Attention and MLP units alternate, and the latter
are two to three times as large: with two slots the next MLP cannot be read while one computes, so reading and
computing, where they take about as long, wait for each other for up to half of the time. A third slot ends that."""
DEFAULT_ATTENTION_STAGING_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests to plan for.

    prompt_len, gen_len: the length of all sequences, or the rounded means where `lengths` is given.
    num_requests: None for "many", planned as one block (static) or as the steady state (refill).
    lengths: (prompt_len, gen_len, count) of every distinct pair; empty if all are alike.
    """

    prompt_len: int
    gen_len: int
    num_requests: int | None = None
    lengths: tuple[tuple[int, int, int], ...] = ()

    def __post_init__(self) -> None:
        if self.prompt_len < 1:
            raise ValueError(f"prompt_len must be at least 1, got {self.prompt_len}")
        if self.gen_len < 0:
            raise ValueError(f"gen_len must be at least 0 (0 = scoring only), got {self.gen_len}")
        if self.num_requests is not None and self.num_requests < 1:
            raise ValueError(f"num_requests must be at least 1, got {self.num_requests}")
        for prompt_len, gen_len, count in self.lengths:
            if prompt_len < 1 or gen_len < 0 or count < 1:
                raise ValueError(
                    "lengths must be (prompt_len >= 1, gen_len >= 0, count >= 1),"
                    f" got {(prompt_len, gen_len, count)}"
                )

    @classmethod
    def from_lengths(cls, pairs: Iterable[tuple[int, int]]) -> Self:
        """A workload of the given (prompt_len, gen_len) pairs. ValueError if there are none."""
        counts = Counter((int(p), int(g)) for p, g in pairs)
        total = sum(counts.values())
        if not total:
            raise ValueError("a workload needs at least one request")
        return cls(
            prompt_len=max(1, round(sum(p * n for (p, _), n in counts.items()) / total)),
            gen_len=round(sum(g * n for (_, g), n in counts.items()) / total),
            num_requests=total,
            lengths=tuple((p, g, n) for (p, g), n in sorted(counts.items())),
        )

    def to_dict(self) -> dict[str, Any]:
        data = dataclasses.asdict(self)
        return {**data, "lengths": [list(entry) for entry in self.lengths]}

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """Inverse of to_dict. ValueError for anything else."""
        try:
            lengths = tuple((int(p), int(g), int(n)) for p, g, n in data["lengths"])
            return cls(
                prompt_len=int(data["prompt_len"]),
                gen_len=int(data["gen_len"]),
                num_requests=None if data["num_requests"] is None else int(data["num_requests"]),
                lengths=lengths,
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a workload: {type(error).__name__} {error}") from None

    def describe(self) -> str:
        """In words: how many requests of which mean lengths, and how far lengths reach."""
        n = "many" if self.num_requests is None else f"{self.num_requests:,}"
        text = f"{n} x ({self.prompt_len:,} + {self.gen_len:,} tokens)"
        if self.lengths:
            text += f", up to {self.max_prompt_len:,} + {self.max_gen_len:,}"
        return text

    @property
    def max_prompt_len(self) -> int:
        return max((p for p, _, _ in self.lengths), default=self.prompt_len)

    @property
    def max_gen_len(self) -> int:
        return max((g for _, g, _ in self.lengths), default=self.gen_len)

    @property
    def max_tokens(self) -> int:
        """Most tokens of one sequence, prompt and answer together."""
        return max((p + g for p, g, _ in self.lengths), default=self.prompt_len + self.gen_len)

    @property
    def scoring(self) -> bool:
        return self.max_gen_len == 0

    def mean_full_pages(self, page_tokens: int) -> float:
        """Full KV pages that one sequence reserves, on average."""
        lengths = self.lengths or ((self.prompt_len, self.gen_len, 1),)
        total = sum(n for _, _, n in lengths)
        return sum(((p + g) // page_tokens) * n for p, g, n in lengths) / total


class LengthCounts:
    """Counts of (prompt_len, gen_len) pairs in bounded memory.

    Exact up to `max_pairs` distinct pairs; beyond, lengths that are near each other share a cell, whose means stand
    for them, so that totals stay right. The longest lengths stay visible as far as their cell's mean allows.
    """

    def __init__(self, max_pairs: int = 1024) -> None:
        if max_pairs < 4:
            raise ValueError(f"max_pairs must be at least 4, got {max_pairs}")
        self._max_pairs = max_pairs
        self._width = 1
        self._cells: dict[tuple[int, int], list[int]] = {}

    def __len__(self) -> int:
        """Pairs added so far."""
        return sum(cell[0] for cell in self._cells.values())

    def add(self, prompt_len: int, gen_len: int, count: int = 1) -> None:
        """Count a pair. prompt_len at least 1, gen_len at least 0."""
        if prompt_len < 1 or gen_len < 0 or count < 1:
            raise ValueError(f"cannot count {(prompt_len, gen_len, count)}")
        self._put([count, prompt_len * count, gen_len * count])
        while len(self._cells) > self._max_pairs:
            self._width *= 2
            cells, self._cells = self._cells, {}
            for cell in cells.values():
                self._put(cell)

    def _put(self, cell: list[int]) -> None:
        n, prompts, gens = cell
        # What generates nothing never shares a cell with what does: it is another kind of pass.
        key = (prompts // n // self._width, (gens // n // self._width + 1) if gens else 0)
        old = self._cells.get(key)
        self._cells[key] = cell if old is None else [a + b for a, b in zip(old, cell, strict=True)]

    def workload(self, num_requests: int | None = None) -> Workload | None:
        """What was counted, None if nothing was. num_requests: how many there really are, if this is a sample.

        Equal lengths make a workload of two numbers, which is planned exactly.
        """
        total = len(self)
        if not total:
            return None
        counts: Counter[tuple[int, int]] = Counter()
        for n, prompts, gens in self._cells.values():
            counts[max(1, round(prompts / n)), max(1, round(gens / n)) if gens else 0] += n
        n_prompt = sum(cell[1] for cell in self._cells.values())
        n_gen = sum(cell[2] for cell in self._cells.values())
        lengths = tuple((p, g, n) for (p, g), n in sorted(counts.items()))
        return Workload(
            prompt_len=max(1, round(n_prompt / total)),
            gen_len=max(1, round(n_gen / total)) if n_gen else 0,
            num_requests=num_requests or total,
            lengths=lengths if len(lengths) > 1 else (),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The largest things a run must hold.

    max_tokens: of one sequence. mean_pages: full KV pages reserved per sequence on average (None: as many as
    the longest). pass_tokens: most tokens one gpu batch brings to a pass. chunk_tokens: tokens computed at
    once. logit_rows: most rows of logits of one gpu batch in a pass (None: one per sequence).
    attention_staging_bytes: aimed size of the buffer that gathers K and V for attention (one sequence always
    fits); also that of explicit attention scores. weights_slots: units of streamed weights that are held at once.
    packed_row_len: the device multiplies packed weights with rows of at least this length as they are, so that no
    memory is set aside for unpacking them (None: all are unpacked where tokens are many).
    """

    max_tokens: int
    pass_tokens: int
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS
    page_tokens: int = DEFAULT_PAGE_TOKENS
    mean_pages: float | None = None
    logit_rows: int | None = None
    attention_staging_bytes: int = DEFAULT_ATTENTION_STAGING_BYTES
    weights_slots: int = 2
    packed_row_len: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_tokens", "pass_tokens", "chunk_tokens", "attention_staging_bytes", "weights_slots"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.packed_row_len is not None and self.packed_row_len < 1:
            raise ValueError(f"packed_row_len must be at least 1, got {self.packed_row_len}")
        if self.logit_rows is not None and self.logit_rows < 1:
            raise ValueError(f"logit_rows must be at least 1, got {self.logit_rows}")
        if self.mean_pages is not None and self.mean_pages < 0:
            raise ValueError(f"mean_pages must not be negative, got {self.mean_pages}")
        check_page_tokens(self.page_tokens)

    @property
    def depths(self) -> Depths:
        """Slots of all rings of a run."""
        return Depths(weights=self.weights_slots, weights_staging=self.weights_slots)


def limits_for(
    workload: Workload,
    *,
    gpu_batch_size: int,
    schedule: ScheduleName,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    page_tokens: int = DEFAULT_PAGE_TOKENS,
    max_pass_tokens: int = MAX_PASS_TOKENS,
    attention_staging_bytes: int = DEFAULT_ATTENTION_STAGING_BYTES,
    weights_slots: int = 2,
    packed_row_len: int | None = None,
) -> Limits:
    """The limits of a block of this shape; the one rule for planner and runtime.

    static: one pass takes in all prompts, up to `max_pass_tokens` per gpu batch.
    refill: a pass takes in as many new prompts as end on average, gpu_batch_size / gen_len, besides one
    token per running sequence; twice that gives room for uneven arrivals, and is never below one chunk.
    """
    whole = gpu_batch_size * workload.max_prompt_len
    if schedule == "static" or workload.scoring:
        pass_tokens = min(whole, max(max_pass_tokens, gpu_batch_size))
    else:
        steady = gpu_batch_size * (1 + workload.prompt_len / max(1, workload.gen_len))
        wanted = max(int(2 * steady) + 1, chunk_tokens, gpu_batch_size)
        pass_tokens = min(max(whole, gpu_batch_size), wanted, max(max_pass_tokens, gpu_batch_size))
    return Limits(
        max_tokens=workload.max_tokens,
        pass_tokens=pass_tokens,
        chunk_tokens=min(chunk_tokens, pass_tokens),
        page_tokens=page_tokens,
        mean_pages=workload.mean_full_pages(page_tokens),
        logit_rows=min(pass_tokens, chunk_tokens) if workload.scoring else gpu_batch_size,
        attention_staging_bytes=attention_staging_bytes,
        weights_slots=weights_slots,
        packed_row_len=packed_row_len,
    )
