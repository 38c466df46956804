"""Where logits go: into one buffer for sampling, or, for scoring, into running sums that keep no row of them.

The head computes one slice of the vocabulary at a time for all rows, so scoring accumulates over slices: the
log-sum-exp, the target's logit, the likeliest entries. A vocabulary-sized row never exists.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class ScoreRows:
    """Log-probabilities of given target tokens at n positions, accumulated slice by slice.

    targets: one token id per row. num_top: how many of the likeliest tokens to keep per row.
    """

    def __init__(self, targets: Sequence[int], num_top: int, vocab_size: int, device: torch.device) -> None:
        n = len(targets)
        self._targets = torch.tensor(targets, dtype=torch.int64, device=device)
        self._num_top = num_top
        self._vocab_size = vocab_size
        self._log_sum = torch.full((n,), float("-inf"), device=device)
        self._target = torch.full((n,), float("nan"), device=device)
        self._best = torch.full((n,), float("-inf"), device=device)
        self._best_ids = torch.zeros(n, dtype=torch.int64, device=device)
        self._top = torch.full((n, num_top), float("-inf"), device=device)
        self._top_ids = torch.zeros((n, num_top), dtype=torch.int64, device=device)

    def put(self, rows: slice, first_id: int, logits: Tensor) -> None:
        """Take logits (rows, width) of vocabulary entries first_id .. for these rows."""
        logits = logits.float()
        width = logits.shape[1]
        self._log_sum[rows] = torch.logaddexp(self._log_sum[rows], torch.logsumexp(logits, dim=1))
        inside = self._targets[rows] - first_id
        here = (inside >= 0) & (inside < width)
        own = logits.gather(1, inside.clamp(0, width - 1)[:, None])[:, 0]
        self._target[rows] = torch.where(here, own, self._target[rows])
        listed = max(0, min(width, self._vocab_size - first_id))
        if listed == 0:
            return
        logits = logits[:, :listed]
        best, ids = logits.max(dim=1)
        # Strictly greater, so that of equal logits the smallest id is the best, as in greedy sampling.
        better = best > self._best[rows]
        self._best[rows] = torch.where(better, best, self._best[rows])
        self._best_ids[rows] = torch.where(better, ids + first_id, self._best_ids[rows])
        if self._num_top:
            values, ids = logits.topk(min(self._num_top, listed), dim=1)
            values = torch.cat([self._top[rows], values], dim=1)
            ids = torch.cat([self._top_ids[rows], ids + first_id], dim=1)
            values, order = values.topk(self._num_top, dim=1)
            self._top[rows] = values
            self._top_ids[rows] = ids.gather(1, order)

    def logprobs(self) -> list[float]:
        """Natural log-probability of each target."""
        return (self._target - self._log_sum).tolist()

    def greedy(self) -> list[bool]:
        """Whether each target is the likeliest token."""
        return (self._best_ids == self._targets).tolist()

    def top(self) -> list[tuple[list[int], list[float]]]:
        """The likeliest tokens of each row and their log-probabilities, best first."""
        values = (self._top - self._log_sum[:, None]).tolist()
        return list(zip(self._top_ids.tolist(), values, strict=True))


class BatchSink:
    """Splits the rows of one gpu batch: rows to sample go to `buffer`, rows to score to `scores`.

    buffer: fp32 (rows to sample, vocab_size) of this batch; score_rows[i] says whether row i is scored.
    """

    def __init__(self, buffer: Tensor, score_rows: Sequence[bool], scores: ScoreRows | None) -> None:
        self._buffer = buffer
        self._scores = scores
        # (first row, past the last, scored, first place) of each run of rows of one kind
        self._runs: list[tuple[int, int, bool, int]] = []
        places = [0, 0]
        for row, scored in enumerate(score_rows):
            if self._runs and self._runs[-1][2] is scored:
                first, _, _, place = self._runs[-1]
                self._runs[-1] = (first, row + 1, scored, place)
            else:
                self._runs.append((row, row + 1, scored, places[scored]))
            places[scored] += 1

    def put(self, first_row: int, first_id: int, logits: Tensor) -> None:
        """logits (rows, width) of the batch's selected rows first_row .. (offload.executor.LogitSink)."""
        n_rows, width = logits.shape
        for first, stop, scored, place in self._runs:
            low, high = max(first, first_row), min(stop, first_row + n_rows)
            if low >= high:
                continue
            part = logits[low - first_row : high - first_row]
            begin = place + low - first
            if scored:
                assert self._scores is not None
                self._scores.put(slice(begin, begin + high - low), first_id, part)
            else:
                self._buffer[begin : begin + high - low, first_id : first_id + width] = part
