"""Tiny models with random weights, in memory and in a file, and engines over them with any policy."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from model_helpers import ReferenceRun, Table, build_tensor
from source_helpers import source_shapes
from tokenizers import decoders, models

from flexrun.engine import Engine
from flexrun.model.assemble import DecoderModel, build_model
from flexrun.model.config import config_from_hf
from flexrun.request import RequestOutput, SamplingParams
from flexrun.runtime import Runtime
from flexrun.tokenizer import Tokenizer
from offload.device import make_device
from offload.memory import TierBudgets
from offload.units import TensorSpec, Unit
from offload.weights import Extent, UnitLayout, unit_layout
from policy.tiers import Placement, Policy
from policy.workload import Limits
from quant.formats import WeightFormat, parse_format
from quant.pack import quantize
from quant.packed import PackedTensor

VOCAB = 96
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "tied": LLAMA | {"tie_word_embeddings": True},
    "window": LLAMA | {"model_type": "mistral", "sliding_window": 40},
    "softcap": LLAMA
    | {
        "model_type": "gemma2",
        "head_dim": 16,
        "sliding_window": 40,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 5.0,
    },
    "alibi": {"model_type": "bloom", "vocab_size": VOCAB, "hidden_size": 64, "n_layer": 2, "n_head": 4},
    "parallel": {
        "model_type": "gpt_neox",
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 1024,
        "rotary_pct": 0.5,
    },
}


def tiny_model(family: str = "llama", **changes: Any) -> DecoderModel:
    return build_model(config_from_hf(FAMILIES[family] | changes))


def random_sources(model: DecoderModel, dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    """Checkpoint tensors large enough that attention is sharp and answers vary."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in sorted(source_shapes(model).items()):
        values = torch.randn(shape, generator=generator)
        if len(shape) == 1:
            values = (1.0 if name.endswith("weight") else 0.0) + 0.1 * values
        else:
            values = 0.25 * values
        tensors[name] = values.to(dtype)
    return tensors


class MemorySource:
    """A WeightSource of random weights; with `folder` the units also lie in a file, one after the other."""

    def __init__(
        self,
        model: DecoderModel,
        weight_format: str = "f32",
        *,
        folder: Path | None = None,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        sources: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """sources: a checkpoint's tensors by canonical name, random ones if None."""
        self.model = model
        self._format = parse_format(weight_format)
        self._plain = parse_format({torch.float32: "f32", torch.bfloat16: "bf16"}[dtype])
        sources = sources or random_sources(model, dtype, seed)
        self._values: dict[tuple[str, str], torch.Tensor | PackedTensor] = {}
        self._tables: dict[tuple[Any, ...], torch.Tensor] = {}
        for unit in model.units:
            for spec in unit.tensors:
                values = build_tensor(spec, sources)
                if spec.kind == "rows":
                    self._tables[spec.parts] = values
                elif spec.kind == "linear" and not self._format.is_plain:
                    self._values[unit.name, spec.name] = quantize(values, self._format, method="minmax")
                else:
                    plain = self._format if spec.kind == "linear" else self._plain
                    self._values[unit.name, spec.name] = values.to(getattr(torch, plain.plain_dtype))
        self.path = folder / f"weights-{weight_format}.bin" if folder is not None else None
        self._places: dict[str, int] = {}
        if self.path is not None:
            self._write(self.path)

    def _write(self, path: Path) -> None:
        with path.open("wb") as file:
            for unit in self.model.units:
                run = torch.zeros(self.layout(unit).nbytes, dtype=torch.uint8)
                self.fill(unit, run)
                self._places[unit.name] = file.tell()
                file.write(run.numpy().tobytes())

    def layout(self, unit: Unit) -> UnitLayout:
        formats = {t.name: self._format if t.kind == "linear" else self._plain for t in unit.tensors}
        return unit_layout(unit.tensors, formats)

    def fill(self, unit: Unit, run: torch.Tensor) -> None:
        for slot in self.layout(unit).slots:
            view, value = slot.view(run), self._values[unit.name, slot.name]
            if isinstance(view, PackedTensor):
                assert isinstance(value, PackedTensor)
                view.buffer.copy_(value.buffer)
            else:
                view.copy_(value)

    def extents(self, unit: Unit) -> list[Extent] | None:
        if self.path is None:
            return None
        return [
            Extent(
                file=self.path,
                offset_bytes=self._places[unit.name],
                nbytes=self.layout(unit).nbytes,
                dest_offset=0,
            )
        ]

    def table_format(self, spec: TensorSpec) -> WeightFormat:
        return self._plain

    def fill_table(self, spec: TensorSpec, run: torch.Tensor) -> None:
        values = self._tables[spec.parts]
        run.view(values.dtype).view(values.shape).copy_(values)

    def reference(self) -> ReferenceRun:
        """The dense reference runtime over the same values."""
        weights: dict[str, dict[str, Any]] = {}
        head = [(s.parts[0].rows or ((0, 0),), u.name, s.name) for u in self.model.units for s in u.tensors]
        for unit in self.model.units:
            weights[unit.name] = {}
            for spec in unit.tensors:
                if spec.kind == "rows":
                    weights[unit.name][spec.name] = Table(self._tables[spec.parts].float())
                else:
                    value = self._values[unit.name, spec.name]
                    dense = value.dequantize(torch.float32) if isinstance(value, PackedTensor) else value
                    weights[unit.name][spec.name] = dense.float()
        if self.model.config.tied:  # the table is the head's slices
            rows = sorted((r[0][0], u, n) for r, u, n in head if u.startswith("head") and n == "weight")
            table = torch.cat([weights[u][n] for _, u, n in rows])
            weights["embed"]["tokens"] = Table(table)
        return ReferenceRun(self.model, weights)


def placement(text: str) -> Placement:
    """ "g", "c", "d" for one tier, "cd", "gcd" and the like for equal parts."""
    share = 1.0 / len(text)
    names = {"g": "gpu_frac", "c": "cpu_frac", "d": "disk_frac"}
    return Placement(**{names[letter]: share for letter in text})


def make_policy(
    *,
    weights: str = "c",
    cache: str = "c",
    activations: str = "c",
    shape: tuple[int, int] = (1, 1),
    **more: Any,
) -> Policy:
    return Policy(
        weights=placement(weights),
        cache=placement(cache),
        activations=placement(activations),
        gpu_batch_size=shape[0],
        num_gpu_batches=shape[1],
        **more,
    )


def make_limits(policy: Policy, **changes: Any) -> Limits:
    sizes: dict[str, Any] = {
        "max_tokens": 600,
        "pass_tokens": 512,
        "chunk_tokens": 256,
        "page_tokens": 16,
        "logit_rows": policy.gpu_batch_size,
    }
    return Limits(**(sizes | changes))


@contextmanager
def open_runtime(
    source: MemorySource,
    policy: Policy,
    folder: Path,
    *,
    gpu_bytes: int | None = None,
    limits: Mapping[str, Any] | None = None,
    budgets: TierBudgets | None = None,
    dtype: torch.dtype = torch.float32,
    **more: Any,
) -> Iterator[Runtime]:
    """A runtime with large budgets; gpu_bytes turns on the emulated third tier."""
    runtime = Runtime(
        source.model,
        source,
        name="tiny",
        policy=policy,
        limits=make_limits(policy, **(limits or {})),
        device=make_device("cpu", gpu_bytes),
        compute_dtype=dtype,
        budgets=budgets or TierBudgets(gpu_bytes=1 << 30, cpu_bytes=1 << 30, disk_bytes=1 << 30),
        disk_dir=folder,
        **more,
    )
    with runtime:
        yield runtime


def prompts(lengths: Sequence[int], seed: int = 1) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, n).tolist() for n in lengths]


def letters(n: int = 90) -> Tokenizer:
    """A tokenizer of n single characters, "!" upwards."""
    backend = tokenizers.Tokenizer(models.BPE(vocab={chr(33 + i): i for i in range(n)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


Job = tuple[list[int], SamplingParams]


def greedy_jobs(sizes: Sequence[tuple[int, int]], **params: Any) -> list[Job]:
    """(prompt length, tokens to generate) pairs as greedy requests."""
    ids = prompts([n for n, _ in sizes])
    return [
        (prompt, SamplingParams(temperature=0, max_tokens=n, **params))
        for prompt, (_, n) in zip(ids, sizes, strict=True)
    ]


def run_jobs(engine: Engine, jobs: Sequence[Job]) -> list[RequestOutput]:
    """Outputs in the order of the jobs."""
    for i, (prompt, params) in enumerate(jobs):
        engine.add_request(str(i), prompt, params)
    done = drain(engine)
    return [done[str(i)] for i in range(len(jobs))]


def drain(engine: Engine, max_passes: int = 2000) -> dict[str, RequestOutput]:
    done: dict[str, RequestOutput] = {}
    for _ in range(max_passes):
        if not engine.has_unfinished():
            return done
        done |= {output.request_id: output for output in engine.step()}
    raise AssertionError(f"not finished after {max_passes} passes")


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[list[int]]]:
    return [[c.token_ids for c in output.outputs] for output in outputs]


def reference_greedy(
    source: MemorySource, prompt: Sequence[int], n: int, vocab_size: int | None = None
) -> list[int]:
    """Greedy tokens of the dense reference, the prompt alone."""
    run = source.reference()
    limit = vocab_size or source.model.vocab_size
    tokens = [int(run.step({0: prompt})[0][-1, :limit].argmax())]
    while len(tokens) < n:
        tokens.append(int(run.step({0: tokens[-1:]})[0][-1, :limit].argmax()))
    return tokens


def reference_logprobs(source: MemorySource, tokens: Sequence[int]) -> torch.Tensor:
    """Row p: log-probabilities (vocab_size,) of the token at p + 1."""
    return source.reference().step({0: tokens})[0].log_softmax(-1)


def covering_rows(factors: Mapping[str, Sequence[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Few combinations in which every pair of values of every two factors occurs."""
    rng, names = random.Random(seed), list(factors)
    left = {
        (a, x, b, y)
        for a, b in combinations(range(len(names)), 2)
        for x, y in product(range(len(factors[names[a]])), range(len(factors[names[b]])))
    }

    def gain(row: Sequence[int]) -> int:
        return sum((a, row[a], b, row[b]) in left for a, b in combinations(range(len(names)), 2))

    rows = []
    while left:
        a, x, b, y = min(left)
        best: list[int] = []
        for _ in range(30):
            row = [rng.randrange(len(factors[name])) for name in names]
            row[a], row[b] = x, y
            for i in rng.sample(range(len(names)), len(names)):
                if i not in (a, b):
                    row[i] = max(
                        range(len(factors[names[i]])), key=lambda v: gain([*row[:i], v, *row[i + 1 :]])
                    )
            best = max(best, row, key=lambda r: gain(r) if r else -1)
        left -= {(i, best[i], k, best[k]) for i, k in combinations(range(len(names)), 2)}
        rows.append({name: factors[name][v] for name, v in zip(names, best, strict=True)})
    return rows
