"""This machine as a `policy.hardware.Hardware`: measured in about a minute, cached per machine.

What each field means and how it is measured is said in policy/hardware.py. Rates are taken with the code that a
run uses: quant.linear for linear layers and unpacking, offload.attention and the paged kernels for attention,
DiskFile for the disk, lanes running together for what they share. All are medians over alternating rounds: a
plan predicts minutes of work, not the best moment of a second.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from offload.attention import attend_dense, attend_segments
from offload.budgets import choose_budgets
from offload.device import Device, make_device
from offload.disk import DiskFile, DiskPool, Extent, read_extents
from offload.kv import CacheShape, LayerCache, PageAllocator, plan_chunk
from offload.lanes import Lanes
from offload.memory import Arena
from offload.profile import copy_bytes_per_s, random_weight, typical_seconds, write_bytes_per_s
from offload.units import AttentionParams
from policy.hardware import AttentionRates, Curve, Hardware
from policy.tiers import Tier
from quant import pointwise
from quant.formats import parse_format
from quant.kv import decode_pages, encode_pages
from quant.kv_formats import parse_cache_format
from quant.linear import add_linear, crossover_tokens, gated_linear, linear, packed_row_len
from quant.linear import unpack as unpack_weight

GEMM_SHAPE = (5632, 2048)
GEMM_TOKENS = (1, 4, 16, 32, 64, 128, 256, 512, 1024)
WEIGHT_FORMATS = ("int8-g64", "int4-g64", "int3-g64", "int2-g64")
CACHE_FORMATS = ("int8", "int4", "int2")
DISK_TEST_BYTES = 512 << 20
DTYPE_NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}

Say = Callable[[str], None]


def measure_hardware(
    device: Device, *, folder: Path, dtype: str = "auto", say: Say = lambda text: None
) -> Hardware:
    """Measure everything a plan needs. folder: on the disk that the disk tier will use; needs 512 MiB there.

    say: told what is being measured. Raises DiskFullError or DiskError if the folder cannot be used.
    """
    compute_dtype = device.compute_dtype(dtype)
    name = DTYPE_NAMES[compute_dtype]
    budgets, _ = choose_budgets(device, disk_dir=folder)
    say("linear layers")
    gemm, unpack = _linear_rates(compute_dtype, device)
    say("attention")
    device_attention = _attention(device, compute_dtype)
    cpu = make_device("cpu")
    cpu_attention = _attention(cpu, cpu.compute_dtype("auto")) if device.is_accelerator else device_attention
    unpack_cache, pack_cache = _cache_rates(device, compute_dtype)
    say("copies")
    upload = copy_bytes_per_s(device, upload=True)
    download = copy_bytes_per_s(device, upload=False)
    say("disk")
    read, write, small, sharing = _disk(device, folder, compute_dtype)
    say("fixed costs")
    overheads = _overheads(device, compute_dtype)
    return Hardware(
        name=machine_name(device),
        source="measured",
        gpu_mem_bytes=float(budgets.gpu_bytes),
        cpu_mem_bytes=float(budgets.cpu_bytes),
        disk_mem_bytes=float(budgets.disk_bytes),
        upload_bytes_per_s=upload,
        download_bytes_per_s=download,
        download_cache_bytes_per_s=download,
        disk_read_bytes_per_s=read,
        disk_write_bytes_per_s=write,
        disk_write_small_bytes_per_s=small,
        compute_dtype=name,
        gemm=gemm,
        unpack_elements_per_s=unpack,
        cache_unpack_elements_per_s=unpack_cache,
        cache_pack_elements_per_s=pack_cache,
        device_attention=device_attention,
        cpu_attention=cpu_attention,
        elementwise_bytes_per_s=_elementwise(device, compute_dtype),
        overhead_seconds=overheads,
        sharing=sharing,
        packed_row_len=packed_row_len(compute_dtype, device.torch_device.type),
        cpu_gemm_flops_per_s=0.0 if not device.is_accelerator else _cpu_gemm(),
    )


def machine_name(device: Device) -> str:
    """What the machine is called in reports: processor, cores, accelerator."""
    cores = os.cpu_count() or 1
    accelerator = f", {device.kind}" if device.is_accelerator else ""
    return f"{platform.machine()} with {cores} cores{accelerator}"


def _linear_rates(dtype: torch.dtype, device: Device) -> tuple[dict[str, Curve], dict[str, float]]:
    """GEMM curves of the compute dtype and of kernels that multiply packed weights; elements/s of unpacking."""
    name = DTYPE_NAMES[dtype]
    works: dict[tuple[str, str, int], Callable[[], object]] = {}
    shape, n_elements = GEMM_SHAPE, GEMM_SHAPE[0] * GEMM_SHAPE[1]
    out = torch.empty(shape, dtype=dtype, device=device.torch_device)
    for fmt in (name, *WEIGHT_FORMATS, *(f for f in ("f32", "bf16", "f16") if f != name)):
        parsed = parse_format(fmt)
        weight = random_weight(shape, parsed, device)
        if fmt != name:
            works["unpack", fmt, 0] = partial(unpack_weight, weight, dtype, out)
        multiplied = fmt == name or (
            fmt in WEIGHT_FORMATS and crossover_tokens(parsed, dtype) and not device.is_accelerator
        )
        most = min(crossover_tokens(parsed, dtype), GEMM_TOKENS[-1])
        few = [*(n for n in GEMM_TOKENS if n < most), most]
        for n in (GEMM_TOKENS if fmt == name else few) if multiplied else ():
            x = torch.randn((n, shape[1]), dtype=torch.float32).to(dtype).to(device.torch_device)
            works["gemm", fmt, n] = partial(linear, x, weight)
    seconds = typical_seconds(works, device, rounds=5)
    gemm: dict[str, Curve] = {}
    for fmt in dict.fromkeys(f for kind, f, _ in works if kind == "gemm"):
        tokens = [n for kind, f, n in works if kind == "gemm" and f == fmt]
        gemm[fmt] = Curve(
            tokens=tuple(float(n) for n in tokens),
            flops_per_s=tuple(2 * n * n_elements / seconds["gemm", fmt, n] for n in tokens),
        )
    rates = {fmt: n_elements / seconds[kind, fmt, n] for kind, fmt, n in works if kind == "unpack"}
    rates["default"] = min(rates.values())
    return gemm, rates


def _cpu_gemm() -> float:
    cpu = make_device("cpu")
    dtype = cpu.compute_dtype("auto")
    weight = torch.randn(GEMM_SHAPE).to(dtype)
    x = torch.randn((512, GEMM_SHAPE[1])).to(dtype)
    seconds = typical_seconds({"gemm": lambda: linear(x, weight)}, cpu)["gemm"]
    return 2 * 512 * GEMM_SHAPE[0] * GEMM_SHAPE[1] / seconds


# -- attention ---------------------------------------------------------------------------------------------


def _attention(device: Device, dtype: torch.dtype) -> AttentionRates:
    """Prefill of 512 tokens; decode of 32 sequences of 1,024 tokens with 1 and with 8 heads per KV head."""
    n, n_heads, head_dim = 512, 16, 64
    q = torch.randn((2, n, n_heads, head_dim)).to(dtype).to(device.torch_device)
    params = AttentionParams(scale=head_dim**-0.5)
    seconds = typical_seconds(
        {
            "prefill": lambda: attend_segments(q, q, q, params),
            "many": _decode_work(device, dtype, 16, 16),
            "few": _decode_work(device, dtype, 16, 2),
        },
        device,
    )
    prefill = 2 * n_heads * 4 * head_dim * n * (n + 1) / 2 / seconds["prefill"]
    batch, length = 32, 1024
    element = dtype.itemsize
    # seconds = bytes / a + flops / b, for two shapes of equal FLOPs: their difference is bytes alone.
    bytes_many, bytes_few = (2 * batch * length * n_kv * head_dim * element for n_kv in (16, 2))
    flops = 4 * batch * length * 16 * head_dim
    per_byte = max((seconds["many"] - seconds["few"]) / (bytes_many - bytes_few), 1e-13)
    per_flop = max((seconds["few"] - bytes_few * per_byte) / flops, 1e-14)
    return AttentionRates(
        prefill_flops_per_s=prefill, decode_bytes_per_s=1 / per_byte, decode_flops_per_s=1 / per_flop
    )


def _decode_work(device: Device, dtype: torch.dtype, n_heads: int, n_kv_heads: int) -> Callable[[], object]:
    """Attention of one query per sequence over pages, as a decode pass runs it."""
    batch, length, head_dim = 32, 1024, 64
    query = torch.randn((batch, n_heads, head_dim)).to(dtype).to(device.torch_device)
    params = AttentionParams(scale=head_dim**-0.5)
    if device.is_accelerator:
        key = torch.randn((batch, n_kv_heads, length, head_dim)).to(dtype).to(device.torch_device)
        lens = torch.full((batch,), length)
        return lambda: attend_dense(query, key, key, lens, params)
    pages = length // 64
    shape = CacheShape(
        n_layers=1,
        num_gpu_batches=1,
        gpu_batch_size=batch,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        page_counts=(0, batch * pages, 0),
        fmt=parse_cache_format(DTYPE_NAMES[dtype]),
        tail_dtype=dtype,
    )
    allocator = PageAllocator(shape)
    sequences = [allocator.admit(0, length + 1) for _ in range(batch)]
    resident = torch.zeros((batch * pages, shape.page_bytes), dtype=torch.uint8)
    tails = torch.zeros((batch, *shape.tail_shape), dtype=dtype)
    for sequence in sequences:
        assert sequence is not None
        for _ in range(pages):
            allocator.take_page(sequence)
        sequence.length = length
    chunk = plan_chunk(allocator, [(s, 1) for s in sequences if s is not None], [True] * batch)
    cache = LayerCache(shape=shape, resident=resident, staged=None, tails=tails)
    return lambda: cache.decode(chunk, query, params)


def _cache_rates(device: Device, dtype: torch.dtype) -> tuple[dict[str, float], dict[str, float]]:
    """Elements per second of unpacking and packing pages, by cache format."""
    n_pages, heads, tokens, width = 256, 4, 64, 64
    values = torch.randn((n_pages, heads, tokens, width)).to(dtype).to(device.torch_device)
    elements = 2 * values.numel()
    works: dict[tuple[str, str], Callable[[], object]] = {}
    names = (DTYPE_NAMES[dtype], *CACHE_FORMATS)
    for name in names:
        fmt = parse_cache_format(name)
        size = fmt.page_nbytes(page_tokens=tokens, n_kv_heads=heads, head_dim=width)
        pages = torch.empty((n_pages, size), dtype=torch.uint8, device=device.torch_device)
        works["pack", name] = partial(encode_pages, values, values, fmt, pages)
        works["unpack", name] = partial(
            decode_pages, pages, fmt, n_kv_heads=heads, page_tokens=tokens, head_dim=width, dtype=dtype
        )
    seconds = typical_seconds(works, device, rounds=9)
    unpack = {name: elements / seconds["unpack", name] for name in names}
    pack = {name: elements / seconds["pack", name] for name in names}
    unpack["default"], pack["default"] = min(unpack.values()), min(pack.values())
    return unpack, pack


def _normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """RMS norm as units compute it: by a kernel where there is one. weight: fp32 (size,)."""
    if pointwise.fits(x):
        return pointwise.norm(x, weight, None, eps=1e-5, centered=False)
    return torch.nn.functional.rms_norm(x.float(), x.shape[-1:], weight, 1e-5).to(x.dtype)


def _elementwise(device: Device, dtype: torch.dtype) -> float:
    """Bytes per second of a gated MLP's norm, activation and residual, counted at its linear layers' ends."""
    tokens, hidden, ffn = 256, 2048, 5632
    x = torch.randn((tokens, hidden)).to(dtype).to(device.torch_device)
    gate_up = torch.randn((tokens, 2 * ffn)).to(dtype).to(device.torch_device)
    weight = torch.ones(hidden, device=device.torch_device)

    def work() -> torch.Tensor:
        return _normed(x, weight).add_(pointwise.gate(gate_up, "silu")[:, :hidden])

    counted = tokens * (hidden + 2 * ffn + ffn + hidden) * dtype.itemsize
    return counted / typical_seconds({"work": work}, device, rounds=15)["work"]


# -- disk, and lanes together ----------------------------------------------------------------------------------


def _disk(
    device: Device, folder: Path, dtype: torch.dtype
) -> tuple[float, float, float, dict[str, dict[str, float]]]:
    """(read, write, small writes) bytes per second, and how much disk reads and copies slow compute down."""
    folder.mkdir(parents=True, exist_ok=True)
    pool = DiskPool()
    host = Arena("disk test", Tier.CPU, 64 << 20, device, pinned=True)
    buffer = host.take(64 << 20, "disk test")
    buffer.copy_(torch.randint(0, 255, (1 << 20,), dtype=torch.uint8).repeat(64))
    with tempfile.NamedTemporaryFile(dir=folder, prefix="flexrun-profile-") as handle:
        os.posix_fallocate(handle.fileno(), 0, DISK_TEST_BYTES)
        with DiskFile(Path(handle.name), pool, writable=True) as file:
            write = write_bytes_per_s(file, DISK_TEST_BYTES, buffer)
            began = time.perf_counter()
            for i in range(64):
                file.write_from(buffer, i * (1 << 20), 64 << 10)
            small = 64 * (64 << 10) / (time.perf_counter() - began)
            extents = [
                Extent(file, i * buffer.numel(), buffer.numel(), 0) for i in range(DISK_TEST_BYTES >> 26)
            ]

            def read_all() -> None:
                for extent in extents:
                    read_extents([extent], buffer)

            read = DISK_TEST_BYTES / typical_seconds({"read": read_all}, seconds=0.2)["read"]
            sharing = _sharing(device, dtype, read_all) if not device.is_accelerator else {}
    host.close()
    return read, write, min(small, write), sharing


def _sharing(device: Device, dtype: torch.dtype, read_all: Callable[[], None]) -> dict[str, dict[str, float]]:
    """How much of the cores disk reads and copies take away from compute that runs beside them.

    Compute is what a decode pass does with a streamed unit: convert or unpack it, then multiply it with few tokens.
    """
    weight = random_weight(GEMM_SHAPE, parse_format("int8-g64"), device)
    scratch = torch.empty(GEMM_SHAPE, dtype=dtype)
    few, many = (torch.randn((n, GEMM_SHAPE[1])).to(dtype) for n in (32, 256))

    def compute() -> None:
        for x in (few, many, few):
            unpack_weight(weight, dtype, scratch)
            linear(x, scratch)

    source = torch.ones(64 << 20, dtype=torch.uint8)
    target = torch.empty_like(source)
    besides: dict[str, Callable[[], object]] = {
        "disk_read": read_all,
        "upload": lambda: target.copy_(source),
    }
    alone: list[float] = []
    slowed: dict[str, list[float]] = {lane: [] for lane in besides}
    for _ in range(4):
        alone.append(_mean_seconds(compute))
        for lane, beside in besides.items():
            slowed[lane].append(_beside(device, lane, compute, beside))
    shares: dict[str, float] = {"compute": 1.0}
    for lane, seconds in slowed.items():
        # Ratios of neighbours in time: what slows the whole machine down for a while falls on both.
        ratio = statistics.median(s / a for s, a in zip(seconds, alone, strict=True))
        shares[lane] = min(1.0, max(0.0, ratio - 1.0))
    shares["disk_write"] = shares["disk_read"]
    shares["download"] = shares["upload"]
    shares["cpu_attention"] = 1.0
    return {"cores": shares}


def _mean_seconds(work: Callable[[], object], seconds: float = 0.3) -> float:
    n, began = 0, time.perf_counter()
    while n < 2 or time.perf_counter() - began < seconds:
        work()
        n += 1
    return (time.perf_counter() - began) / n


def _beside(device: Device, lane: str, compute: Callable[[], None], beside: Callable[[], object]) -> float:
    """Seconds of `compute` while a lane does `beside` over and over."""
    stop = threading.Event()

    def keep_busy() -> int:
        while not stop.is_set():
            beside()
        return 0

    with Lanes(device) as lanes:
        handle = lanes.submit(lane, keep_busy)
        try:
            return _mean_seconds(compute)
        finally:
            stop.set()
            handle.wait()


def _overheads(device: Device, dtype: torch.dtype) -> dict[str, float]:
    """Fixed costs in seconds: of a chunk of a unit, a copy, a disk operation, CPU attention, a pass, a row."""
    x = torch.ones((1, 64), dtype=dtype, device=device.torch_device)
    weight = torch.ones((64, 64), dtype=dtype, device=device.torch_device)

    scale, wide = torch.ones(64, device=device.torch_device), torch.ones_like(weight).repeat(2, 1)

    def small_unit() -> torch.Tensor:
        return add_linear(x.clone(), gated_linear(_normed(x, scale), wide, None, "silu"), weight, None)

    packed = random_weight((64, 64), parse_format("int4-g64"), device)

    with Lanes(device) as lanes:

        def round_trip() -> None:
            lanes.submit("upload", lambda: 0).wait()

        works: dict[str, Callable[[], object]] = {
            "transfer": round_trip,
            "unit": small_unit,
            "packed": lambda: linear(x, packed),
        }
        seconds = typical_seconds(works, device, rounds=15)
    transfer = seconds["transfer"]
    compute = 2 * seconds["unit"] + transfer
    return {
        "compute": compute,
        "transfer": transfer,
        "disk": transfer + 1e-4,
        "cpu_attention": transfer + 2 * compute,
        "attention": 2 * compute,
        "packed": seconds["packed"],
        "pass": 1e-3,
        "row": 2e-5,
    }


# -- cache -------------------------------------------------------------------------------------------------


def cache_file(device: Device) -> Path:
    """Where this machine's profile is kept: one file per host, processor, memory size and device."""
    identity = json.dumps(
        [
            platform.node(),
            platform.processor(),
            platform.machine(),
            os.cpu_count(),
            device.kind,
            torch.__version__,
        ]
    )
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "flexrun" / "hardware" / f"{hashlib.sha256(identity.encode()).hexdigest()[:16]}.json"


def cached_hardware(
    device: Device | None = None,
    *,
    folder: Path | None = None,
    fresh: bool = False,
    say: Say = lambda text: None,
    refine: Callable[[Hardware], Hardware] = lambda hardware: hardware,
) -> Hardware:
    """This machine's profile from the cache, measured first if it is not there (or `fresh`), refined, and kept."""
    device = device or make_device("auto")
    file = cache_file(device)
    if file.is_file() and not fresh:
        try:
            return Hardware.load(file)
        except ValueError:
            say(f"{file} is of another release or damaged; measuring again")
    hardware = refine(measure_hardware(device, folder=folder or file.parent, say=say))
    file.parent.mkdir(parents=True, exist_ok=True)
    hardware.save(file)
    return hardware
