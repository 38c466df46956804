"""The checks of gpu_check: each returns (status, text, data) and relies on no other.

A check runs in a worker process of `experiments.gpu_check`, which ends after a failure: an error of the device may
leave it unusable for the rest of the process. With device "cpu" everything runs on the emulated gpu tier, at toy
sizes, and figures are not judged.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MIB = 1 << 20
Outcome = tuple[str, str, dict[str, Any]]  # "ok", "fail" or "skip"; a line; figures

TINY: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MEDIUM = {
    **TINY,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
}
LARGE = {
    **MEDIUM,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
LARGE_NEEDS_BYTES = 12 << 30

POLICIES: dict[str, dict[str, Any]] = {
    "all on the device": {"weights": (1, 0, 0), "cache": (1, 0, 0)},
    "weights streamed from cpu": {"weights": (0, 1, 0), "cache": (1, 0, 0)},
    "cache in cpu memory": {"weights": (1, 0, 0), "cache": (0, 1, 0)},
    "hidden states in cpu memory": {
        "weights": (0.5, 0.5, 0),
        "cache": (0.5, 0.5, 0),
        "activations": (0, 1, 0),
    },
    "CPU attention": {"weights": (0.5, 0.5, 0), "cache": (0, 1, 0), "cpu_attention_frac": 0.5},
    "all in cpu memory, 4 bits": {
        "weights": (0, 1, 0),
        "cache": (0, 1, 0),
        "weight_format": "int4-g64",
        "cache_format": "int4",
    },
    "all on disk, 4 bits": {
        "weights": (0, 0, 1),
        "cache": (0, 0, 1),
        "weight_format": "int4-g64",
        "cache_format": "int4",
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """device: the accelerator's type, or "cpu" for the emulated tier; root: a folder for models and spill files."""

    device: str
    root: Path

    @property
    def emulated(self) -> bool:
        return self.device == "cpu"

    def llm_options(self, spec: dict[str, Any]) -> dict[str, Any]:
        from policy.tiers import Placement

        options: dict[str, Any] = {
            "device": self.device,
            "dummy_weights": True,
            "disk_dir": self.root / "spill",
            # Said outright: the memory of a virtual machine may grow only as it is used.
            "cpu_mem": "1GiB" if self.emulated else "24GiB",
            **spec,
        }
        for name in ("weights", "cache", "activations"):
            if name in options:
                gpu, cpu, disk = options[name]
                options[name] = Placement(gpu_frac=gpu, cpu_frac=cpu, disk_frac=disk)
        if self.emulated:
            options["gpu_mem"] = "512MiB"
        return options

    def model(self, name: str, config: dict[str, Any]) -> str:
        folder = self.root / name
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        return str(folder)

    def make_device(self) -> Any:
        from offload.device import make_device

        return make_device(self.device, 512 * MIB if self.emulated else None)

    def module(self) -> Any:
        """torch.cuda and its like; None on the emulated tier."""
        import torch

        return None if self.emulated else torch.get_device_module(self.device)

    def free_memory(self) -> None:
        """Let go of what earlier checks left to the garbage collector."""
        gc.collect()
        module = self.module()
        if module is not None:
            module.empty_cache()
            module.reset_peak_memory_stats()


# -- the machine and the kernels ---------------------------------------------------------------------------


def machine(setting: Setting) -> Outcome:
    import torch

    from offload.host import format_bytes, host_memory

    module = setting.module()
    name = module.get_device_name(0) if module is not None else "emulated tier on the CPU"
    device = setting.make_device()
    free, total = device.gpu_memory()
    host = host_memory()
    text = (
        f"{name}, {format_bytes(free)} of {format_bytes(total)} free; {os.cpu_count()} cores, "
        f"{format_bytes(host.available_bytes)} available; torch {torch.__version__}, "
        f"Python {platform.python_version()}, {str(device.compute_dtype()).removeprefix('torch.')}"
    )
    return "ok", text, {"accelerator": name, "torch": torch.__version__}


def numba_kernels(setting: Setting) -> Outcome:
    """The CPU kernels that CPU attention and few-token products use, against plain torch."""
    import torch

    from quant.kernel_choice import has_numba

    if not has_numba():
        return "skip", "no usable numba: the CPU side runs in plain torch", {}
    from quant.kernels_attention import AttentionParams, attend_gathered, decode_attention
    from quant.kernels_torch import dequantize_rows
    from quant.kv import decode_pages, encode_pages
    from quant.kv_batch import PagedBatch
    from quant.kv_formats import parse_cache_format
    from quant.pack import quantize

    generator = torch.Generator().manual_seed(0)
    packed = quantize(torch.randn((64, 256), generator=generator), "int4-g64", method="minmax")
    torch.testing.assert_close(packed.dequantize(), dequantize_rows(packed))
    for name in ("f32", "bf16", "int4"):
        fmt = parse_cache_format(name)
        k, v = torch.randn((2, 3, 2, 16, 64), generator=generator)
        pages = torch.zeros(
            (3, fmt.page_nbytes(page_tokens=16, n_kv_heads=2, head_dim=64)), dtype=torch.uint8
        )
        encode_pages(k, v, fmt, pages)
        tails = torch.randn((1, 2, 2, 16, 64), generator=generator)
        batch = PagedBatch(
            fmt=fmt,
            page_tokens=16,
            n_kv_heads=2,
            head_dim=64,
            arenas=(pages,),
            page_slots=torch.tensor([[0, 1, 2]], dtype=torch.int32),
            seq_lens=torch.tensor([53], dtype=torch.int32),
            tail_lens=torch.tensor([5], dtype=torch.int32),
            tails=tails,
            tail_slots=torch.tensor([0], dtype=torch.int32),
        )
        query = torch.randn((1, 8, 64), generator=generator)
        params = AttentionParams(scale=0.125)
        stored = decode_pages(pages, fmt, n_kv_heads=2, page_tokens=16, head_dim=64)
        # (3 pages, 2 heads, 16 tokens, 64) -> (1, 2 heads, 53 tokens, 64)
        dense = [
            torch.cat([x.transpose(0, 1).flatten(1, 2), tails[0, i, :, :5]], dim=1)[None]
            for i, x in enumerate(stored)
        ]
        wanted = attend_gathered(query, dense[0], dense[1], batch.seq_lens, params)
        torch.testing.assert_close(decode_attention(query, batch, params), wanted, rtol=1e-4, atol=1e-4)
    import numba

    return "ok", f"numba {numba.__version__}: unpacking and attention equal plain torch", {}


def triton_kernels(setting: Setting) -> Outcome:
    if setting.emulated:
        return "skip", "Triton compiles for accelerators only", {}
    try:
        import triton
    except ImportError:
        return "skip", "no Triton: the device unpacks in plain torch", {}
    from quant.kernels_triton import self_test

    self_test(setting.device)
    return "ok", f"Triton {triton.__version__}: weights and pages equal plain torch", {}


def streams(setting: Setting) -> Outcome:
    """Slots of a ring are filled, computed on and fetched by three lanes; a missing wait shows as a wrong number."""
    import torch

    from offload.lanes import Handle, Lanes
    from offload.memory import Arena
    from policy.tiers import Tier

    device = setting.make_device()
    n, rounds, depth = (1 if setting.emulated else 8) * MIB, 40, 2
    host = Arena("stream check", Tier.CPU, 4 * n * (depth + 1), device, pinned=True)
    source = (
        host.take_tensor((depth, n), torch.float32, "source") if depth * n * 4 <= host.left_bytes else None
    )
    assert source is not None
    fetched = host.take_tensor((n,), torch.float32, "fetched")
    ring = torch.zeros((depth, n), device=device.torch_device)
    results = torch.zeros((depth, n), device=device.torch_device)
    wrong: list[int] = []
    with torch.inference_mode(), Lanes(device) as lanes:
        used: list[Handle | None] = [None] * depth
        for i in range(rounds):
            slot = i % depth
            before = used[slot]

            def fill(slot: int = slot, i: int = i) -> int:
                source[slot].fill_(float(i))
                return 0

            def up(slot: int = slot) -> int:
                ring[slot].copy_(source[slot], non_blocking=True)
                return 4 * n

            def compute(slot: int = slot) -> None:
                results[slot] = ring[slot]
                for _ in range(20):
                    results[slot].add_(1.0)

            def down(slot: int = slot) -> int:
                fetched.copy_(results[slot], non_blocking=True)
                return 4 * n

            def look(i: int = i) -> None:
                low, high = (float(x) for x in torch.aminmax(fetched))
                if not low == high == i + 20:
                    wrong.append(i)

            filled = lanes.submit("disk_read", fill, [before] if before else [])
            uploaded = lanes.submit("upload", up, [filled])
            computed = lanes.submit("compute", compute, [uploaded])
            last = [h for h in used if h is not None]  # `fetched` is shared by all rounds
            downloaded = lanes.submit("download", down, [computed, *last])
            used[slot] = lanes.submit("disk_write", look, [downloaded])
        lanes.drain()
        stats = lanes.stats()
    pinned = host.pinned
    notes = host.notes
    host.close()
    moved = {name: s.bytes for name, s in stats.items() if s.bytes}
    text = f"{rounds} rounds, {len(wrong)} wrong; host memory {'pinned' if pinned else 'pageable'}"
    if notes and not setting.emulated:
        text += f" ({notes[0]})"
    good = not wrong and moved == {"upload": 4 * n * rounds, "download": 4 * n * rounds}
    return (
        "ok" if good else "fail",
        text,
        {"pinned": pinned, "busy": {k: s.busy_seconds for k, s in stats.items()}},
    )


def bandwidth(setting: Setting, *, upload: bool) -> Outcome:
    """Our arenas' copies beside a plain pinned torch copy of the same size."""
    import torch

    from offload.memory import Arena
    from offload.profile import best_seconds
    from policy.tiers import Tier

    device = setting.make_device()
    n = (16 if setting.emulated else 256) * MIB
    arena = Arena("copy check", Tier.CPU, n, device, pinned=True)
    there = torch.empty(n, dtype=torch.uint8, device=device.torch_device)

    def rate(host: torch.Tensor) -> float:
        host.fill_(1)
        source, dest = (host, there) if upload else (there, host)
        return n / best_seconds(lambda: dest.copy_(source, non_blocking=True), device)

    ours = rate(arena.take(n, "copy"))
    try:
        plain = rate(torch.empty(n, dtype=torch.uint8, pin_memory=not setting.emulated))
    except RuntimeError as error:  # the limit on locked memory
        arena.close()
        return "skip", f"{ours / 1e9:.1f} GB/s; torch cannot pin memory here: {error}", {"bytes_per_s": ours}
    arena.close()
    good = ours > 0.8 * plain or setting.emulated
    text = f"{ours / 1e9:.1f} GB/s, plain pinned copy {plain / 1e9:.1f} GB/s"
    return "ok" if good else "fail", text, {"bytes_per_s": ours, "plain_bytes_per_s": plain}


# -- the same tokens ---------------------------------------------------------------------------------------


def _prompts() -> list[list[int]]:
    lengths = [8 + 11 * i for i in range(7)] + [300]  # the last one is two segments
    return [[(7 * i + j * 13) % 1000 + 3 for j in range(n)] for i, n in enumerate(lengths)]


def _greedy(setting: Setting, *, gen_len: int = 8, **options: Any) -> list[list[dict[int, float]]]:
    """Per prompt and step: token -> log-probability, the chosen token first, then the likeliest."""
    from flexrun import LLM, SamplingParams

    with LLM(
        setting.model("tiny", TINY),
        gpu_batch_size=4,
        num_gpu_batches=2,
        prompt_len=304,
        gen_len=gen_len,
        page_tokens=16,
        **options,
    ) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=gen_len, ignore_eos=True, logprobs=5)
        outputs = llm.generate(_prompts(), params)
    return [[{t: e.logprob for t, e in step.items()} for step in o.outputs[0].logprobs] for o in outputs]


def _reference(setting: Setting, formats: dict[str, str]) -> list[list[dict[int, float]]]:
    """The CPU's fp32 answers, kept in a file for the checks to come."""
    file = setting.root / f"reference-{'-'.join(formats.values()) or 'plain'}.json"
    if not file.exists():
        spec = {"device": "cpu", "dtype": "float32", "weights": (0, 1, 0), "cache": (0, 1, 0), **formats}
        options = setting.llm_options(spec)
        options.pop("gpu_mem", None)
        steps = _greedy(setting, **options)
        file.write_text(json.dumps([[list(step.items()) for step in steps_of] for steps_of in steps]))
    return [[dict(map(tuple, step)) for step in steps] for steps in json.loads(file.read_text())]


def parity(setting: Setting, *, policy: str) -> Outcome:
    """fp32 greedy tokens equal the CPU's, up to steps where the CPU's two likeliest tokens are almost tied."""
    spec = POLICIES[policy]
    formats: dict[str, str] = {k: spec[k] for k in spec if k.endswith("_format")}
    reference = _reference(setting, formats)
    found = _greedy(setting, **setting.llm_options({"dtype": "float32", **spec}))
    # A last-bit difference may move a 4-bit code of the cache by one step.
    tolerance = 0.1 if "cache_format" in formats else 2e-3
    equal = total = 0
    ties: list[float] = []
    for wanted_steps, found_steps in zip(reference, found, strict=True):
        for wanted, step in zip(wanted_steps, found_steps, strict=True):
            total += 1
            token, other = next(iter(wanted)), next(iter(step))
            if token != other:
                ties.append(wanted[token] - wanted.get(other, float("-inf")))
                break  # what follows has another history
            equal += 1
    good = all(gap <= tolerance for gap in ties)
    text = f"{equal} of {total} tokens compared are equal"
    if ties:
        text += f"; {len(ties)} answers part where the CPU's choice leads by up to {max(ties):.2g}"
    return "ok" if good else "fail", text, {"equal": equal, "compared": total, "gaps": ties}


def native_type(setting: Setting) -> Outcome:
    """Log-probabilities in the device's own type beside the CPU's fp32."""
    from flexrun import LLM

    ids = _prompts()
    pairs = [(prompt[: len(prompt) // 2], prompt[len(prompt) // 2 :]) for prompt in ids]
    values: list[list[float]] = []
    dtype = "bfloat16" if setting.emulated else "auto"
    first = {"weights": (1, 0, 0), "cache": (1, 0, 0), "dtype": dtype}
    plain = {"weights": (0, 1, 0), "cache": (0, 1, 0), "dtype": "float32", "device": "cpu"}
    for spec in (plain, first):
        options = setting.llm_options(spec)
        if spec is plain:
            options.pop("gpu_mem", None)
        with LLM(
            setting.model("tiny", TINY), gpu_batch_size=4, num_gpu_batches=2, page_tokens=16, **options
        ) as llm:
            name = str(llm.runtime.executor.compute_dtype).removeprefix("torch.")
            scores = llm.score(pairs)
        values.append([s.logprob / len(pair[1]) for s, pair in zip(scores, pairs, strict=True)])
    worst = max(abs(a - b) for a, b in zip(*values, strict=True))
    text = f"{name}: mean log-probabilities per token within {worst:.4f} of fp32"
    return "ok" if worst < 0.05 else "fail", text, {"dtype": name, "largest_difference": worst}


# -- speed and memory --------------------------------------------------------------------------------------


def _large_run(setting: Setting, policy: str, *, overlap: bool = True, warm: bool = True) -> dict[str, Any]:
    """A dummy model at one placement, through `flexrun.bench`; the device's peak is that of the warm-up."""
    from flexrun import LLM, SamplingParams
    from flexrun.bench import run_bench

    setting.free_memory()
    module = setting.module()
    if module is None:
        config, prompt_len, gen_len, size = TINY, 32, 4, 4
    else:
        fits = module.mem_get_info()[0] > LARGE_NEEDS_BYTES
        config, prompt_len, gen_len, size = (LARGE if fits else MEDIUM), 512, 16, 64
    began = time.perf_counter()
    with LLM(
        setting.model("large", config),
        gpu_batch_size=size,
        num_gpu_batches=2,
        prompt_len=prompt_len,
        gen_len=gen_len,
        overlap=overlap,
        **{"weight_format": "bf16", **setting.llm_options(POLICIES[policy])},
    ) as llm:
        ready_seconds = time.perf_counter() - began
        device_items = [n for (tier, _), n in llm.runtime.plan.items.items() if tier == 0]
        peak = None
        if warm:
            prompts = [[3 + (i * j) % 900 for j in range(prompt_len)] for i in range(2 * size)]
            llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
            peak = module.max_memory_allocated() if module is not None else None
        result = run_bench(llm, prompt_len=prompt_len, gen_len=gen_len, num_requests=2 * size).to_dict()
    del llm
    setting.free_memory()
    result["ready_seconds"] = ready_seconds
    result["peak_device_bytes"] = peak
    result["planned_device_bytes"] = sum(device_items)
    result["hidden_size"], result["n_layers"] = config["hidden_size"], config["num_hidden_layers"]
    return result


def throughput(setting: Setting, *, policy: str) -> Outcome:
    result = _large_run(setting, policy)
    peak, planned = result["peak_device_bytes"], result["planned_device_bytes"]
    keys = (
        "generated_tokens_per_s",
        "total_tokens_per_s",
        "efficiency_frac",
        "prefill_seconds",
        "decode_seconds",
        "ready_seconds",
        "lanes",
        "planned_bytes",
        "measured_bytes",
        "peak_device_bytes",
        "planned_device_bytes",
        "hidden_size",
        "n_layers",
    )
    text = (
        f"{result['generated_tokens_per_s']:.0f} generated, {result['total_tokens_per_s']:.0f} tokens/s in all, "
        f"efficiency {result['efficiency_frac']:.2f}"
    )
    good = result["planned_bytes"]["cpu"] >= 0.99 * result["measured_bytes"]["cpu"]
    if peak is not None:
        text += f", device {peak / MIB:.0f} of {planned / MIB:.0f} MiB planned"
        # The BLAS keeps a workspace of its own.
        good = good and peak <= 1.05 * planned + 96 * MIB
    return "ok" if good else "fail", text, {key: result[key] for key in keys}


def overlap(setting: Setting, *, policy: str) -> Outcome:
    """The same run with and without overlap; with it, wall time is near the busiest lane's."""
    on = _large_run(setting, policy)
    off = _large_run(setting, policy, overlap=False, warm=False)
    busy = {name: lane["busy_seconds"] for name, lane in on["lanes"].items() if lane["busy_seconds"]}
    busiest = max(busy, key=lambda name: busy[name])
    ratio, gain = on["wall_seconds"] / busy[busiest], off["wall_seconds"] / on["wall_seconds"]
    text = f"wall {ratio:.2f}x the busiest lane ({busiest}), {gain:.2f}x faster than without overlap"
    good = setting.emulated or (ratio < 1.25 and gain > 1.02)
    data = {
        "wall_over_busiest": ratio,
        "gain": gain,
        "busy_seconds": busy,
        "wall_seconds": on["wall_seconds"],
    }
    return "ok" if good else "fail", text, data


# -- the list ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """limit_seconds: when a check is given up. off: what FLEXRUN_KERNELS turns off for the rest if it fails."""

    run: Callable[[Setting], Outcome]
    limit_seconds: float = 60.0
    off: str = ""


def _bound(function: Callable[..., Outcome], **options: Any) -> Callable[[Setting], Outcome]:
    return lambda setting: function(setting, **options)


CHECKS: dict[str, Check] = {
    "machine": Check(run=machine),
    "Triton kernels": Check(run=triton_kernels, off="no-triton"),
    "streams in order": Check(run=streams),
    "upload bandwidth": Check(run=_bound(bandwidth, upload=True), limit_seconds=40.0),
    "download bandwidth": Check(run=_bound(bandwidth, upload=False), limit_seconds=40.0),
    "CPU kernels": Check(run=numba_kernels, limit_seconds=100.0, off="no-numba"),
    **{f"tokens: {name}": Check(run=_bound(parity, policy=name)) for name in POLICIES},
    "log-probabilities": Check(run=native_type),
    **{
        f"speed: {name}": Check(run=_bound(throughput, policy=name), limit_seconds=75.0)
        for name in (
            "all on the device",
            "weights streamed from cpu",
            "cache in cpu memory",
            "all in cpu memory, 4 bits",
            "CPU attention",
        )
    },
    "overlap: weights": Check(run=_bound(overlap, policy="weights streamed from cpu"), limit_seconds=90.0),
    "overlap: cache": Check(run=_bound(overlap, policy="cache in cpu memory"), limit_seconds=90.0),
}
