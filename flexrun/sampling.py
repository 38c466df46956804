"""From logits to tokens, for many sequences at once.

Order of operations on one row of logits (float32), each step only where it is asked for:

 1. ids at and above the tokenizer's vocabulary do not exist (padding rows of the head);
 2. ``logit_bias`` is added;
 3. ``min_tokens``: end tokens are impossible until enough tokens are there;
 4. ``repetition_penalty`` (tokens of prompt and answer), then ``frequency_penalty`` and
    ``presence_penalty`` (tokens of the answer);
 5. greedy (``temperature`` 0): the first of the largest logits, done; otherwise divide by the temperature;
 6. ``min_p``: drop tokens less likely than min_p times the likeliest;
 7. ``top_k``: drop tokens below the k-th largest logit (ties with it stay);
 8. ``top_p``: of what is left, keep the smallest set of likeliest tokens whose share reaches top_p (ties
    with its last member stay);
 9. ``typical_p``: of what is left, keep the tokens whose surprise is closest to the entropy until their
    share reaches typical_p (ties stay);
10. draw one token from what is left.

Steps 2 to 8 are vLLM's. Reported log-probabilities are those of the model: log-softmax of the logits before
all steps.

A draw gives every token an exponential number made by hashing (seed, index of the completion, position of the
token, token id) and takes the token of the largest quotient of probability and number, which draws in proportion
to the probabilities (the Gumbel-max trick). So a request with a seed gives the same tokens whatever runs beside
it, on any device, also after a restart; a request without one hashes a seed of its own from the system's entropy.
Like a greedy choice, a draw changes with the last bits of the logits only where the two largest quotients are
almost tied; walking the cumulative distribution would move with every token before it.
"""

from __future__ import annotations

import hashlib
import math
import secrets
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from flexrun.request import Logprob, SamplingParams

_WORK_ELEMENTS = 1 << 21  # logits handled at once outside plain greedy: bounds scratch memory
_CANDIDATES = 1024  # likeliest tokens looked at before a whole row is sorted
_MIN_TEMPERATURE = 1e-30  # below this float32 quotients lose their meaning; it is greedy up to exact ties


class SamplingState:
    """What one sequence's sampling depends on besides logits: options, its random numbers, past tokens.

    Args:
        params: the request's options.
        vocab_size: number of token ids that may be sampled.
        prompt_token_ids: for the repetition penalty.
        eos_token_ids: the model's end tokens, impossible before ``min_tokens``.
        index: which of the request's ``n`` completions this is.

    Raises:
        ValueError: ``logit_bias`` or ``stop_token_ids`` name a token outside the vocabulary.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        vocab_size: int,
        prompt_token_ids: Sequence[int] = (),
        eos_token_ids: Iterable[int] = (),
        index: int = 0,
    ) -> None:
        self.params = params
        self.n_generated = 0
        bias = params.logit_bias or {}
        for name, ids in (("logit_bias", bias), ("stop_token_ids", params.stop_token_ids or ())):
            for token in ids:
                if token >= vocab_size:
                    raise ValueError(f"{name} names token {token}; the vocabulary ends at {vocab_size - 1}")
        self.bias_ids = np.fromiter(bias.keys(), np.int64, len(bias))
        self.bias_values = np.fromiter(bias.values(), np.float32, len(bias))
        ends = set(params.stop_token_ids or ())
        if not params.ignore_eos:
            ends.update(token for token in eos_token_ids if token < vocab_size)
        self.end_ids = np.fromiter(sorted(ends), np.int64, len(ends))
        seed = params.seed if params.seed is not None else secrets.randbits(64)
        self._key = struct.pack("<Qq", seed % 2**64, index)
        self._slot_of: dict[int, int] = {}
        self._ids = np.empty(0, np.int64)
        self._counts = np.empty(0, np.float32)
        if params.uses_penalties:
            prompt = np.unique(np.asarray(prompt_token_ids, np.int64)) if len(prompt_token_ids) else self._ids
            prompt = prompt[prompt < vocab_size] if params.repetition_penalty != 1.0 else prompt[:0]
            self._slot_of = {int(token): slot for slot, token in enumerate(prompt)}
            self._ids = np.concatenate([prompt, np.zeros(64, np.int64)])
            self._counts = np.zeros(len(self._ids), np.float32)

    def observe(self, token_id: int) -> None:
        """Record the token that the sequence got; call it once per token, before the next sample."""
        self.n_generated += 1
        if not self.params.uses_penalties:
            return
        slot = self._slot_of.get(token_id)
        if slot is None:
            slot = len(self._slot_of)
            if slot == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._slot_of[token_id] = slot
            self._ids[slot] = token_id
        self._counts[slot] += 1.0

    @property
    def seen(self) -> tuple[np.ndarray, np.ndarray]:
        """Distinct past token ids and how often each was generated (0: in the prompt only)."""
        n = len(self._slot_of)
        return self._ids[:n], self._counts[:n]

    @property
    def masks_ends(self) -> bool:
        return self.n_generated < self.params.min_tokens and len(self.end_ids) > 0

    @property
    def plain_greedy(self) -> bool:
        """True if the next token is the likeliest of the untouched logits."""
        params = self.params
        return params.greedy and not (params.uses_penalties or len(self.bias_ids) or self.masks_ends)

    def draw_key(self) -> tuple[int, int]:
        """Two 32-bit numbers for the next draw: a function of seed, completion and position alone."""
        digest = hashlib.blake2b(self._key + struct.pack("<q", self.n_generated), digest_size=8).digest()
        return struct.unpack("<II", digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities at one position: of the token that stands there and of the likeliest tokens."""

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]

    def as_dict(self, token_text: Callable[[int], str] | None = None) -> dict[int, Logprob]:
        """Token id -> :class:`~flexrun.request.Logprob`, the token itself first."""

        def entry(token_id: int, logprob: float, rank: int) -> Logprob:
            text = token_text(token_id) if token_text is not None else None
            return Logprob(logprob=logprob, rank=rank, decoded_token=text)

        result = {self.token_id: entry(self.token_id, self.logprob, self.rank)}
        for rank, (token_id, logprob) in enumerate(zip(self.top_ids, self.top_logprobs), 1):
            if token_id not in result:
                result[token_id] = entry(token_id, logprob, rank)
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """Result of :func:`sample`, one entry per row.

    ``valid[i]`` is False if row i holds NaN or infinity, or if no token is possible; its token id is then 0
    and means nothing. ``logprobs[i]`` is None where the request asks for none.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    valid: list[bool]


@torch.no_grad()
def sample(logits: torch.Tensor, states: Sequence[SamplingState], *, vocab_size: int) -> Sampled:
    """Choose the next token of every row.

    Args:
        logits: (rows, width) float32, width >= vocab_size, on any device; left as they are.
        states: one per row. They are not changed: call ``observe`` with the tokens that are kept.
        vocab_size: the tokenizer's largest id + 1; ids above it are never sampled.
    """
    if logits.ndim != 2 or logits.shape[0] != len(states):
        raise ValueError(f"logits must be ({len(states)}, width), got {tuple(logits.shape)}")
    if not 0 < vocab_size <= logits.shape[1]:
        raise ValueError(f"vocab_size must be in 1..{logits.shape[1]} (the logits' width), got {vocab_size}")
    if not states:
        return Sampled(token_ids=[], logprobs=[], valid=[])
    allowed = logits[:, :vocab_size]
    best, token_ids = allowed.max(dim=-1)
    valid = torch.isfinite(best)
    others = [row for row, state in enumerate(states) if not state.plain_greedy]
    step = max(1, _WORK_ELEMENTS // vocab_size)
    for start in range(0, len(others), step):
        rows = others[start : start + step]
        index = torch.tensor(rows, device=logits.device)
        work = allowed[index].float()  # a copy, (len(rows), vocab_size)
        chosen, possible = _choose(work, [states[row] for row in rows])
        token_ids[index] = chosen
        valid[index] &= possible
    token_ids.masked_fill_(~valid, 0)
    logprobs: list[TokenLogprobs | None] = [None] * len(states)
    ids = token_ids.tolist()
    wanted = [row for row, state in enumerate(states) if state.params.logprobs is not None]
    if wanted:
        index = torch.tensor(wanted, device=logits.device)
        counts = [states[row].params.logprobs or 0 for row in wanted]
        for row, entry in zip(
            wanted, token_logprobs(logits, [ids[row] for row in wanted], counts, vocab_size, rows=index)
        ):
            logprobs[row] = entry
    return Sampled(token_ids=ids, logprobs=logprobs, valid=valid.tolist())


@torch.no_grad()
def token_logprobs(
    logits: torch.Tensor,
    token_ids: Sequence[int],
    num_top: int | Sequence[int],
    vocab_size: int,
    *,
    rows: torch.Tensor | None = None,
) -> list[TokenLogprobs]:
    """Log-probabilities of given tokens, from raw logits; also for prompts.

    Args:
        logits: (n, width) float32.
        token_ids: the token at each position.
        num_top: how many of the likeliest tokens to list, for all or per position.
        vocab_size: ids above are not listed; they do count in the softmax, as in any other program.
        rows: which rows of the logits the positions are, all by default.
    """
    counts = [num_top] * len(token_ids) if isinstance(num_top, int) else list(num_top)
    index = torch.arange(len(token_ids), device=logits.device) if rows is None else rows
    result: list[TokenLogprobs] = []
    step = max(1, _WORK_ELEMENTS // logits.shape[1])
    for start in range(0, len(token_ids), step):
        part = logits[index[start : start + step]].float()  # (part, width)
        total = torch.logsumexp(part, dim=-1, keepdim=True)
        ids = torch.tensor(token_ids[start : start + step], device=logits.device)[:, None]
        own = part.gather(1, ids)
        part = part[:, :vocab_size]
        ranks = (part > own).sum(dim=-1) + 1
        n_top = min(max(counts[start : start + step]), vocab_size)
        top_values, top_ids = part.topk(n_top, dim=-1)
        columns = zip(
            ids[:, 0].tolist(),
            (own - total)[:, 0].tolist(),
            ranks.tolist(),
            top_ids.tolist(),
            (top_values - total).tolist(),
            counts[start : start + step],
        )
        result += [
            TokenLogprobs(
                token_id=token_id, logprob=logprob, rank=rank, top_ids=top[:n], top_logprobs=values[:n]
            )
            for token_id, logprob, rank, top, values, n in columns
        ]
    return result


def _choose(work: torch.Tensor, states: list[SamplingState]) -> tuple[torch.Tensor, torch.Tensor]:
    """Steps 2 to 10. ``work`` (rows, vocab_size) is overwritten; returns ids and whether one was possible."""
    _apply_bias(work, states)
    _mask_ends(work, states)
    _apply_penalties(work, states)
    best, token_ids = work.max(dim=-1)
    possible = torch.isfinite(best)
    random = [row for row, state in enumerate(states) if not state.params.greedy]
    if random:
        index = torch.tensor(random, device=work.device)
        drawing = work if len(random) == len(states) else work[index]
        params = [states[row].params for row in random]
        temperatures = _column(drawing, [max(p.temperature, _MIN_TEMPERATURE) for p in params])
        # Relative to the largest, so that a tiny temperature gives 0 and -inf, never inf or NaN.
        top = torch.where(possible, best, 0.0)[index, None]
        weights = drawing.sub_(top).div_(temperatures)
        weights = _weights(weights, params)
        token_ids[index] = _draw(weights, [states[row].draw_key() for row in random])
    return token_ids, possible


def _column(like: torch.Tensor, values: list[float], dtype: torch.dtype | None = None) -> torch.Tensor:
    """(rows, 1) on the device of ``like``."""
    return torch.tensor(values, dtype=dtype or like.dtype, device=like.device)[:, None]


def _flat(work: torch.Tensor, parts: list[tuple[int, np.ndarray]]) -> tuple[torch.Tensor, torch.Tensor]:
    """(row, ids) pairs as two flat index tensors."""
    rows = np.repeat([row for row, _ in parts], [len(ids) for _, ids in parts])
    ids = np.concatenate([ids for _, ids in parts])
    return torch.from_numpy(rows).to(work.device), torch.from_numpy(ids).to(work.device)


def _apply_bias(work: torch.Tensor, states: list[SamplingState]) -> None:
    parts = [(row, state.bias_ids) for row, state in enumerate(states) if len(state.bias_ids)]
    if parts:
        values = np.concatenate([states[row].bias_values for row, _ in parts])
        work[_flat(work, parts)] += torch.from_numpy(values).to(work.device)


def _mask_ends(work: torch.Tensor, states: list[SamplingState]) -> None:
    parts = [(row, state.end_ids) for row, state in enumerate(states) if state.masks_ends]
    if parts:
        work[_flat(work, parts)] = -math.inf


def _apply_penalties(work: torch.Tensor, states: list[SamplingState]) -> None:
    """Change the logits of past tokens only: entries are (row, token) pairs, not whole rows."""
    seen = [(row, *state.seen) for row, state in enumerate(states) if state.params.uses_penalties]
    seen = [(row, ids, counts) for row, ids, counts in seen if len(ids)]
    if not seen:
        return
    where = _flat(work, [(row, ids) for row, ids, _ in seen])
    counts = torch.from_numpy(np.concatenate([counts for _, _, counts in seen])).to(work.device)
    lengths = torch.tensor([len(ids) for _, ids, _ in seen], device=work.device)

    def per_entry(values: list[float]) -> torch.Tensor:
        tensor = torch.tensor(values, dtype=work.dtype, device=work.device)
        return torch.repeat_interleave(tensor, lengths)

    params = [states[row].params for row, _, _ in seen]
    repetition = per_entry([p.repetition_penalty for p in params])
    values = work[where]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values = values - per_entry([p.frequency_penalty for p in params]) * counts
    values = values - per_entry([p.presence_penalty for p in params]) * (counts > 0)
    work[where] = values


def _weights(scaled: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """Unnormalised probabilities after steps 6 to 9.

    ``scaled`` (rows, vocab_size) are logits over temperature, the largest of each row being 0.
    """
    vocab_size = scaled.shape[1]
    floors = [math.log(p.min_p) if p.min_p > 0.0 else -math.inf for p in params]
    floor = _column(scaled, floors)  # (rows, 1): the smallest value that stays
    cut_rows = [row for row, p in enumerate(params) if 0 < p.top_k < vocab_size or p.top_p < 1.0]
    if cut_rows:
        index = torch.tensor(cut_rows, device=scaled.device)
        floor[index] = _top_floor(scaled[index], floor[index], [params[row] for row in cut_rows])
    weights = torch.where(scaled >= floor, scaled, -math.inf).exp_()
    typical_rows = [row for row, p in enumerate(params) if p.typical_p < 1.0]
    if typical_rows:
        index = torch.tensor(typical_rows, device=scaled.device)
        shares = _column(scaled, [params[row].typical_p for row in typical_rows], torch.float64)
        weights[index] = _typical(weights[index], shares)
    return weights


def _largest(values: torch.Tensor, n: int) -> torch.Tensor:
    """The n largest of each row, falling, (rows, n)."""
    if values.device.type != "cpu":
        return values.topk(n, dim=-1).values
    # numpy's vectorised selection takes an eighth of the time of torch's on a CPU, its sort a fifteenth.
    array = values.numpy()
    if n < array.shape[1]:
        array = np.partition(array, array.shape[1] - n, axis=-1)[:, -n:]
    return torch.from_numpy(np.sort(array, axis=-1)[:, ::-1].copy())


def _top_floor(scaled: torch.Tensor, floor: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """The smallest value that top_k and then top_p keep, (rows, 1)."""
    vocab_size = scaled.shape[1]
    ks = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
    n = min(vocab_size, max(_CANDIDATES, *(k for k in ks if k < vocab_size), 1))
    best = _largest(scaled, n)
    # A row without top_k looks up its n-th value in vain: only its top_p counts.
    kth = best.gather(1, torch.tensor([[min(k, n) - 1] for k in ks], device=scaled.device))
    limited = torch.tensor([[k < vocab_size] for k in ks], device=scaled.device)
    floor = torch.where(limited, torch.maximum(floor, kth), floor)
    nucleus = [row for row, p in enumerate(params) if p.top_p < 1.0]
    if not nucleus:
        return floor
    index = torch.tensor(nucleus, device=scaled.device)
    top_p = _column(scaled, [params[row].top_p for row in nucleus], torch.float64)
    kept = torch.where(scaled[index] >= floor[index], scaled[index], -math.inf).exp_()
    target = top_p * kept.sum(dim=-1, keepdim=True, dtype=torch.float64)
    last, reached = _nucleus_floor(best[index], floor[index], target)
    if not bool(reached.all()):  # so flat that the candidates do not suffice: sort these rows whole
        flat = (~reached).nonzero()[:, 0]
        ordered = _largest(scaled[index[flat]], vocab_size)
        last[flat], _ = _nucleus_floor(ordered, floor[index[flat]], target[flat])
    floor[index] = torch.maximum(floor[index], last)
    return floor


def _nucleus_floor(
    ordered: torch.Tensor, floor: torch.Tensor, target: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Value at which the running sum of exp(ordered) reaches ``target``, and whether it does.

    ordered (rows, n) falls along each row; floor and target are (rows, 1). Returns (rows, 1), (rows,).
    """
    mass = torch.where(ordered >= floor, ordered, -math.inf).exp().double().cumsum(dim=-1)
    position = torch.searchsorted(mass, target)  # first index with mass >= target
    reached = position[:, 0] < ordered.shape[1]
    # Rounding may leave a full row's sum just under the target: then everything stays.
    return ordered.gather(1, position.clamp(max=ordered.shape[1] - 1)), reached


def _typical(weights: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Locally typical sampling (Meister et al. 2022) of rows of weights (rows, vocab_size).

    ``shares`` (rows, 1) is each row's typical_p.
    """
    probs = weights / weights.sum(dim=-1, keepdim=True)
    surprise = -torch.where(probs > 0, probs, 1.0).log()
    entropy = (probs * surprise).sum(dim=-1, keepdim=True)
    distance = torch.where(probs > 0, (surprise - entropy).abs(), math.inf)
    n = min(_CANDIDATES, probs.shape[1])
    nearest, ids = distance.topk(n, dim=-1, largest=False)
    limit, reached = _typical_limit(nearest, probs.gather(1, ids), shares)
    if not bool(reached.all()):
        flat = (~reached).nonzero()[:, 0]
        nearest, ids = distance[flat].sort(dim=-1)
        limit[flat], _ = _typical_limit(nearest, probs[flat].gather(1, ids), shares[flat])
    return torch.where(distance <= limit, weights, 0.0)


def _typical_limit(
    nearest: torch.Tensor, probs: torch.Tensor, shares: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Distance at which the running sum of probs (rows, n) reaches ``shares`` (rows, 1), and whether."""
    position = torch.searchsorted(probs.double().cumsum(dim=-1), shares)
    limit = nearest.gather(1, position.clamp(max=nearest.shape[1] - 1))
    return limit, position[:, 0] < nearest.shape[1]


def _draw(weights: torch.Tensor, keys: list[tuple[int, int]]) -> torch.Tensor:
    """Ids (rows,) drawn in proportion to weights (rows, vocab_size), of which some are above zero."""
    return (weights / _exponentials(keys, weights.shape[1], weights.device)).argmax(dim=-1)


def _exponentials(keys: list[tuple[int, int]], vocab_size: int, device: torch.device) -> torch.Tensor:
    """Exponential numbers of mean 1, float32 (rows, vocab_size), above zero and finite."""
    if device.type == "cpu":
        bits = torch.from_numpy(_hash_numpy(np.array(keys, np.uint32), vocab_size).astype(np.float32))
    else:
        bits = _hash_torch(torch.tensor(keys, dtype=torch.int64, device=device), vocab_size).float()
    # Small numbers decide, so they keep all 32 bits: uniform in (0, 1), the logarithm of what is left of 1.
    uniform = bits.add_(0.5).mul_(2.0**-32).clamp_(max=1.0 - 2.0**-24)
    return uniform.neg_().log1p_().neg_()


# The hash: a token's number, multiplied by the golden ratio, goes through murmur3's finisher twice, each time with
# one half of the key. uint32 arithmetic, the same on every device.
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35


def _hash_numpy(keys: np.ndarray, vocab_size: int) -> np.ndarray:
    """uint32 keys (rows, 2) -> uint32 (rows, vocab_size)."""
    x = np.arange(vocab_size, dtype=np.uint32) * np.uint32(_GOLDEN) ^ keys[:, :1]
    shifted = np.empty_like(x)
    for second in (None, keys[:, 1:]):
        if second is not None:
            x += second
        for shift, factor in ((16, _MIX_1), (13, _MIX_2), (16, None)):
            np.right_shift(x, np.uint32(shift), out=shifted)
            x ^= shifted
            if factor is not None:
                x *= np.uint32(factor)
    return x


def _hash_torch(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """int64 keys (rows, 2) below 2^32 -> int64 (rows, vocab_size), the same numbers as `_hash_numpy`."""
    low = 0xFFFFFFFF
    x = ((torch.arange(vocab_size, device=keys.device) * _GOLDEN) & low) ^ keys[:, :1]
    for second in (None, keys[:, 1:]):
        if second is not None:
            x = (x + second) & low
        for shift, factor in ((16, _MIX_1), (13, _MIX_2), (16, None)):
            x = x ^ (x >> shift)
            if factor is not None:
                x = (x * factor) & low
    return x
