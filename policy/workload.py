"""What there is to do: how many sequences, how long their prompts, how much they generate.

A workload is two lengths, or a distribution of (prompt_len, gen_len) pairs with counts. gen_len 0 is
scoring: one prefill, no generation. `Limits` are the sizes a run is built for; `limits_for` derives them
from a workload and a block's shape, so that planner and runtime agree on them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from policy.tiers import ScheduleName
from quant.kv_formats import DEFAULT_PAGE_TOKENS, check_page_tokens

DEFAULT_CHUNK_TOKENS = 1024
MAX_PASS_TOKENS = 65536
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The largest things a run must hold.

    max_tokens: of one sequence. mean_pages: full KV pages reserved per sequence on average (None: as many as
    the longest). pass_tokens: most tokens one gpu batch brings to a pass. chunk_tokens: tokens computed at
    once. logit_rows: most rows of logits of one gpu batch in a pass (None: one per sequence).
    attention_staging_bytes: aimed size of the buffer that gathers K and V for attention (one sequence always
    fits); also that of explicit attention scores.
    """

    max_tokens: int
    pass_tokens: int
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS
    page_tokens: int = DEFAULT_PAGE_TOKENS
    mean_pages: float | None = None
    logit_rows: int | None = None
    attention_staging_bytes: int = DEFAULT_ATTENTION_STAGING_BYTES

    def __post_init__(self) -> None:
        for name in ("max_tokens", "pass_tokens", "chunk_tokens", "attention_staging_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.logit_rows is not None and self.logit_rows < 1:
            raise ValueError(f"logit_rows must be at least 1, got {self.logit_rows}")
        if self.mean_pages is not None and self.mean_pages < 0:
            raise ValueError(f"mean_pages must not be negative, got {self.mean_pages}")
        check_page_tokens(self.page_tokens)


def limits_for(
    workload: Workload,
    *,
    gpu_batch_size: int,
    schedule: ScheduleName,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    page_tokens: int = DEFAULT_PAGE_TOKENS,
    max_pass_tokens: int = MAX_PASS_TOKENS,
    attention_staging_bytes: int = DEFAULT_ATTENTION_STAGING_BYTES,
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
    )
