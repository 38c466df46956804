"""What compression costs: weight error, perplexity and next-token agreement, for every weight and cache format.

    python -m experiments.accuracy [--model GGUF] [--texts 6] [--tokens 1000] [--weights LIST] [--cache LIST]

Perplexity and agreement are those of the model on English text of Python's standard library (pydoc topics),
beside its own values dequantised to fp32. Weight error is the relative RMSE on seeded Gaussian, Laplace and
Student-t (5 degrees of freedom) matrices and on the matrices of a small language model that is trained here for a
minute, for the default quantiser, for min-max, and at group 32 for GGUF's own Q4_1. Prints tables, then JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch

from flexrun import LLM
from quant.formats import parse_format
from quant.pack import quantize
from quant.packed import PackedTensor

WEIGHT_FORMATS = (
    "f32",
    "bf16",
    "int8-g64",
    "int6-g64",
    "int5-g64",
    "int4-g32",
    "int4-g64",
    "int4-g128",
    "int4-g64-sym",
    "int4-g64-zp",
    "int3.5-g64",
    "int3-g64",
    "int2-g64",
)
CACHE_FORMATS = ("f32", "bf16", "int8", "int4", "int2")


def pydoc_texts(n: int) -> list[str]:
    """The n longest topics of pydoc: English about Python, with little code."""
    from pydoc_data.topics import topics

    return sorted(topics.values(), key=len, reverse=True)[:n]


def token_texts(llm: LLM, n: int, length: int) -> list[list[int]]:
    assert llm.tokenizer is not None
    found = []
    for text in pydoc_texts(3 * n):
        ids = llm.tokenizer.encode(text)
        if len(ids) >= length and len(found) < n:
            found.append(ids[:length])
    return found


def measure(model: str, texts: int, tokens: int, **options: Any) -> dict[str, Any]:
    """Log-probabilities and likeliest tokens at every position of every text."""
    from flexrun.request import SamplingParams

    with LLM(model, dtype="float32", gpu_batch_size=texts, prompt_len=tokens, gen_len=1, **options) as llm:
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
        given = token_texts(llm, texts, tokens)
        began = time.perf_counter()
        outputs = llm.generate(given, params)
        seconds = time.perf_counter() - began
    logprobs: list[list[float]] = []
    best: list[int] = []
    for output in outputs:
        assert output.prompt_logprobs is not None
        own = []
        for token, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
            assert entry is not None
            own.append(entry[token].logprob)
            best.append(min(entry, key=lambda t: (entry[t].rank or 9, t)))
        logprobs.append(own)
    ppl = [math.exp(-sum(own) / len(own)) for own in logprobs]
    return {"perplexities": ppl, "best": best, "tokens_per_s": texts * tokens / seconds}


def compare(found: dict[str, Any], reference: dict[str, Any]) -> dict[str, float]:
    worse = [a / b - 1 for a, b in zip(found["perplexities"], reference["perplexities"], strict=True)]
    same = [a == b for a, b in zip(found["best"], reference["best"], strict=True)]
    return {
        "perplexity": sum(found["perplexities"]) / len(found["perplexities"]),
        "perplexity_change": sum(worse) / len(worse),
        "agreement": sum(same) / len(same),
        "tokens_per_s": found["tokens_per_s"],
    }


def tensors(rows: int = 512, cols: int = 2048) -> dict[str, torch.Tensor]:
    torch.manual_seed(11)
    laplace = torch.distributions.Laplace(0.0, 1.0).sample((rows, cols))
    student = torch.distributions.StudentT(5.0).sample((rows, cols))
    gaussian = torch.randn(rows, cols)
    return {"gaussian": gaussian, "laplace": laplace, "student_t": student, "trained": trained_matrices()}


def trained_matrices(steps: int = 250) -> torch.Tensor:
    """All matrices of a two-layer transformer trained on the bytes of pydoc topics, side by side in rows of 256."""
    torch.manual_seed(3)
    data = torch.tensor(list("".join(pydoc_texts(60)).encode()))
    width, length = 256, 96

    class Bytes(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(256, width)
            self.places = torch.nn.Embedding(length, width)
            layer = torch.nn.TransformerEncoderLayer(
                width, 4, 1024, dropout=0.0, batch_first=True, norm_first=True
            )
            self.layers = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = torch.nn.Linear(width, 256)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            mask = torch.nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
            hidden = self.embed(ids) + self.places(torch.arange(ids.shape[1]))
            return self.head(self.layers(hidden, mask=mask, is_causal=True))

    model = Bytes()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first = last = 0.0
    for _ in range(steps):
        starts = torch.randint(0, len(data) - length - 1, (16,))
        ids = torch.stack([data[s : s + length + 1] for s in starts])
        loss = torch.nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        last = float(loss.detach())
        first = first or last
    print(f"small model: loss {first:.2f} -> {last:.2f} nats per byte in {steps} steps")
    found = [p.detach() for name, p in model.layers.named_parameters() if p.dim() == 2]
    return torch.cat([matrix.reshape(-1, width) for matrix in found])


def q4_1_error(weight: torch.Tensor) -> float:
    """Relative RMSE of GGUF's own Q4_1 quantiser (groups of 32)."""
    import gguf

    kind = gguf.GGMLQuantizationType.Q4_1
    values = torch.from_numpy(gguf.dequantize(gguf.quantize(weight.numpy(), kind), kind))
    return float((values.view_as(weight) - weight).norm() / weight.norm())


def relative_rmse(weight: torch.Tensor, fmt: str, method: str) -> float:
    packed = quantize(weight, parse_format(fmt), method=method)  # type: ignore[arg-type]
    values = packed.dequantize(torch.float32) if isinstance(packed, PackedTensor) else packed
    return float((values - weight).norm() / weight.norm())


def weight_errors(given: dict[str, torch.Tensor]) -> dict[str, dict[str, dict[str, float]]]:
    return {
        fmt: {
            name: {"search": relative_rmse(w, fmt, "search"), "minmax": relative_rmse(w, fmt, "minmax")}
            for name, w in given.items()
        }
        for fmt in WEIGHT_FORMATS
        if not parse_format(fmt).is_plain
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    home = Path.home() / ".cache" / "flexrun" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    parser.add_argument("--model", default=str(home))
    parser.add_argument("--texts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--weights", default=",".join(WEIGHT_FORMATS), help="weight formats, with commas")
    parser.add_argument("--cache", default=",".join(CACHE_FORMATS), help="cache formats, with commas")
    args = parser.parse_args()
    given = tensors()
    errors = weight_errors(given)
    print(f"{'weight error':14} " + " ".join(f"{name:>20}" for name in given) + "   search/min-max, gain")
    for fmt, row in errors.items():
        cells = [
            f"{e['search']:.4f}/{e['minmax']:.4f} {1 - e['search'] / e['minmax']:5.1%}" for e in row.values()
        ]
        print(f"{fmt:14} " + " ".join(f"{cell:>20}" for cell in cells))
    q4_1 = {name: q4_1_error(weight) for name, weight in given.items()}
    print(f"{'GGUF Q4_1':14} " + " ".join(f"{error:20.4f}" for error in q4_1.values()), flush=True)
    reference = measure(args.model, args.texts, args.tokens, weight_format="f32", cache_format="f32")
    result: dict[str, Any] = {"weight_errors": errors, "q4_1_errors": q4_1, "weights": {}, "cache": {}}
    print(f"{'format':14} {'bits':>6} {'perplexity':>11} {'change':>8} {'agreement':>10} {'tokens/s':>9}")
    for fmt in filter(None, args.weights.split(",")):
        found = measure(args.model, args.texts, args.tokens, weight_format=fmt, cache_format="f32")
        row = compare(found, reference) | {"bits_per_weight": parse_format(fmt).bits_per_weight()}
        result["weights"][fmt] = row
        show(fmt, row["bits_per_weight"], row)
    for fmt in filter(None, args.cache.split(",")):
        found = measure(args.model, args.texts, args.tokens, weight_format="f32", cache_format=fmt)
        result["cache"][fmt] = compare(found, reference)
        show(f"cache {fmt}", 0.0, result["cache"][fmt])
    print(json.dumps(result))


def show(name: str, bits: float, row: dict[str, float]) -> None:
    print(
        f"{name:14} {bits:6.2f} {row['perplexity']:11.4f} {row['perplexity_change']:8.2%} "
        f"{row['agreement']:10.2%} {row['tokens_per_s']:9.0f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
