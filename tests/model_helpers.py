"""A plain reference runtime for units: dense caches, one sequence at a time in attention, no pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from flexrun.model.assemble import DecoderModel
from flexrun.model.mapping import match_tensors
from offload.units import AttentionParams, TensorSpec
from quant.pointwise import ACTIVATIONS


class Table:
    """A RowTable over a tensor in memory."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def gather(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self.rows[ids].to(dtype)


def build_tensor(spec: TensorSpec, sources: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """What TensorPart documents, in the plainest way."""
    pieces = []
    for part in spec.parts:
        source = sources[part.source]
        if spec.transposed:
            source = source.T
        if part.unpermute_heads:
            rows = source.shape[0]
            shape = (part.unpermute_heads, rows // part.unpermute_heads // 2, 2, *source.shape[1:])
            source = source.reshape(shape).transpose(1, 2).reshape(source.shape)
        if part.rows is not None:
            source = torch.cat([source[start:stop] for start, stop in part.rows])
        pieces.append(source.flatten(0, 1) if source.ndim > len(spec.shape) else source)
    tensor = torch.cat(pieces)
    assert tuple(tensor.shape) == spec.shape
    return tensor


def build_weights(
    model: DecoderModel, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype = torch.float32
) -> dict[str, dict[str, Any]]:
    """unit name -> tensor name -> weight, from the tensors of a checkpoint."""
    names = match_tensors(model.config, model.units, tensors)
    sources = {source: tensors[name] for source, name in names.items()}
    weights: dict[str, dict[str, Any]] = {}
    for unit in model.units:
        weights[unit.name] = {}
        for spec in unit.tensors:
            tensor = build_tensor(spec, sources).to(dtype)
            weights[unit.name][spec.name] = Table(tensor) if spec.kind == "rows" else tensor
    return weights


def load_folder(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


class ReferenceRun:
    """Runs passes over sequences named by numbers, and keeps their keys and values."""

    def __init__(
        self,
        model: DecoderModel,
        weights: Mapping[str, Mapping[str, Any]],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.model, self.weights, self.compute_dtype = model, weights, dtype
        self.cache: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self.lengths: dict[int, int] = {}

    def step(self, new_tokens: Mapping[int, Sequence[int]]) -> dict[int, torch.Tensor]:
        """Append tokens to sequences; logits (new tokens, vocab_size) of each."""
        self.spans = []
        positions: list[int] = []
        lens: list[int] = []
        for sequence, ids in new_tokens.items():
            start, begin = self.lengths.get(sequence, 0), len(positions)
            self.lengths[sequence] = start + len(ids)
            positions += range(start, start + len(ids))
            lens += [start + len(ids)] * len(ids)
            self.spans.append((sequence, begin, begin + len(ids)))
        self.token_ids = torch.tensor([token for ids in new_tokens.values() for token in ids])
        self.positions, self.rope_lens = torch.tensor(positions), torch.tensor(lens)
        self.memos: dict[object, Any] = {}
        self.logits = torch.full((len(positions), self.model.vocab_size), torch.nan)
        hidden = torch.empty(0)
        for unit in self.model.units:
            self.layer = unit.layer
            hidden = unit.forward(self.weights[unit.name], hidden, self)
        return {sequence: self.logits[begin:end] for sequence, begin, end in self.spans}

    def linear(self, x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    def gated(self, x: torch.Tensor, weight: Any, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
        gate, up = self.linear(x, weight, bias).chunk(2, dim=-1)
        return ACTIVATIONS[activation](gate) * up

    def add_linear(
        self, total: torch.Tensor, x: torch.Tensor, weight: Any, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return total.add_(self.linear(x, weight, bias))

    def memo(self, key: object, make: Callable[[], Any]) -> Any:
        if key not in self.memos:
            self.memos[key] = make()
        return self.memos[key]

    def put_logits(self, start: int, logits: torch.Tensor) -> None:
        self.logits[:, start : start + logits.shape[1]] = logits.float()

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        outs = []
        for sequence, begin, end in self.spans:
            keys, values = key[begin:end], value[begin:end]
            place = (sequence, self.layer)
            if place in self.cache:
                keys = torch.cat([self.cache[place][0], keys])
                values = torch.cat([self.cache[place][1], values])
            self.cache[place] = (keys, values)
            outs.append(attend_one(query[begin:end], keys, values, params))
        return torch.cat(outs)


def attend_one(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams
) -> torch.Tensor:
    """query (n, heads, dim) are the last n of the keys' positions (length, kv_heads, dim)."""
    n, length = query.shape[0], keys.shape[0]
    groups = query.shape[1] // keys.shape[1]
    keys, values = (t.repeat_interleave(groups, dim=1).float() for t in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * params.scale
    if params.softcap:
        scores = params.softcap * torch.tanh(scores / params.softcap)
    behind = torch.arange(length - n, length)[:, None] - torch.arange(length)  # (n, length)
    if params.alibi_slopes is not None:
        scores = scores - torch.tensor(params.alibi_slopes)[:, None, None] * behind
    hidden = behind < 0
    if params.window:
        hidden = hidden | (behind >= params.window)
    probabilities = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", probabilities, values).to(query.dtype)
