"""Small models and machines for the planner's tests."""

from __future__ import annotations

from typing import Any

from policy.cost import CostModel
from policy.footprint import ModelFootprint, decoder_footprint
from policy.hardware import AttentionRates, Curve, Hardware
from policy.lp import Problem, make_problem
from policy.workload import Workload, limits_for

MIB = 1 << 20


def model(**changes: Any) -> ModelFootprint:
    sizes: dict[str, Any] = {
        "name": "tiny",
        "hidden_size": 256,
        "n_layers": 6,
        "n_heads": 8,
        "n_kv_heads": 2,
        "ffn_size": 1024,
        "vocab_size": 2000,
        "max_positions": 4096,
        "weight_formats": ("f16", "int8-g64", "int4-g64"),
    }
    return decoder_footprint(**(sizes | changes))


def deep_model(**changes: Any) -> ModelFootprint:
    """About the same bytes in four times as many units, so that rounding to whole units costs little."""
    return model(**({"n_layers": 24, "hidden_size": 128, "n_heads": 4, "ffn_size": 512} | changes))


def machine(**changes: Any) -> Hardware:
    """A small gpu machine on which everything is close to binding."""
    values: dict[str, Any] = {
        "name": "test",
        "source": "measured",
        "gpu_mem_bytes": 9 * MIB,
        "cpu_mem_bytes": 8 * MIB,
        "disk_mem_bytes": 400 * MIB,
        "upload_bytes_per_s": 2e8,
        "download_bytes_per_s": 1.5e8,
        "download_cache_bytes_per_s": 1e8,
        "disk_read_bytes_per_s": 5e7,
        "disk_write_bytes_per_s": 3e7,
        "disk_write_small_bytes_per_s": 3e7,
        "compute_dtype": "f16",
        "gemm": {"f16": Curve(tokens=(1, 64, 512), flops_per_s=(2e9, 1e11, 2e11))},
        "unpack_elements_per_s": {"default": 1e10},
        "cache_unpack_elements_per_s": {"f16": 1e12, "default": 1e10},
        "cache_pack_elements_per_s": {"f16": 1e12, "default": 5e9},
        "device_attention": AttentionRates(
            prefill_flops_per_s=1e11, decode_bytes_per_s=1e10, decode_flops_per_s=1e11
        ),
        "cpu_attention": AttentionRates(
            prefill_flops_per_s=1e10, decode_bytes_per_s=1e9, decode_flops_per_s=2e10
        ),
        "cpu_cache_unpack_elements_per_s": {"default": 1e9},
        "elementwise_bytes_per_s": 1e11,
        "overhead_seconds": {
            "compute": 1e-5,
            "transfer": 5e-6,
            "disk": 2e-5,
            "cpu_attention": 1e-5,
            "pass": 1e-4,
            "row": 1e-7,
        },
    }
    return Hardware(**(values | changes))


def cpu_machine(**changes: Any) -> Hardware:
    """The same without a gpu; its lanes share cores and the memory bus."""
    values: dict[str, Any] = {
        "gpu_mem_bytes": 0,
        "cpu_mem_bytes": 12 * MIB,
        "sharing": {
            "cores": {"compute": 1.0, "disk_read": 0.1, "disk_write": 0.1, "cpu_attention": 1.0},
            "memory_bus": {"compute": 0.6, "disk_read": 0.5},
        },
    }
    return machine(**(values | changes))


def problem(
    footprint: ModelFootprint | None = None,
    hardware: Hardware | None = None,
    workload: Workload | None = None,
    *,
    gpu_batch_size: int = 8,
    num_gpu_batches: int = 2,
    schedule: str = "static",
    n_cpu_attention: int = 0,
    overlap: bool = True,
    weight_format: str = "f16",
    cache_format: str = "f16",
    n_buckets: int = 3,
    weights_slots: int = 2,
) -> Problem:
    workload = workload or Workload(prompt_len=100, gen_len=12)
    limits = limits_for(
        workload,
        gpu_batch_size=gpu_batch_size,
        schedule=schedule,  # type: ignore[arg-type]
        page_tokens=16,
        chunk_tokens=256,
        attention_staging_bytes=1 << 18,
        weights_slots=weights_slots,
    )
    cost = CostModel(
        footprint or model(),
        hardware or machine(),
        limits,
        gpu_batch_size=gpu_batch_size,
        num_gpu_batches=num_gpu_batches,
        weight_format=weight_format,
        cache_format=cache_format,
        n_cpu_attention=n_cpu_attention,
        schedule=schedule,
        overlap=overlap,
    )
    return make_problem(cost, workload, n_buckets=n_buckets)
