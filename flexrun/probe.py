"""Short real runs that settle what isolated measurements miss.

A linear layer alone is not a layer in a run: the weights are cold, norms and position encodings come in between,
every unit costs Python time, attention looks up pages. Small models with random weights run for a few seconds
through the engine itself; `policy.calibrate.refit` then finds the factors on the measured rates and fixed costs
that explain what every phase took.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flexrun.audit import MeteredEngine, run_record, warm_up
from flexrun.llm import LLM
from flexrun.request import SamplingParams
from offload.device import Device
from offload.measure import cache_file, cached_hardware
from policy.audit import RunRecord
from policy.calibrate import Calibration, refit
from policy.hardware import Hardware
from policy.tiers import Placement, Policy

CONSTANTS = (
    "gemm",
    "gemm_small",
    "unpack_elements_per_s",
    "elementwise_bytes_per_s",
    "device_attention.prefill",
    "device_attention.decode",
    "overhead.compute",
    "overhead.attention",
    "overhead.packed",
    "overhead.transfer",
    "overhead.cpu_attention",
    "cpu_attention.decode",
    "overhead.pass",
    "overhead.row",
)
"""What the runs tell about. Rates of disk and copies are measured on their own."""

ROUNDS = 2
PULL = 0.1
"""The rates were measured by themselves: runs that deviate by a tenth may move them, noise should not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One short run: a model's sizes, a block's shape, what there is to do, how and where weights are stored.

    three_tiers: weights and cache rest in cpu memory, below the device or a gpu tier that is emulated.
    """

    hidden_size: int
    ffn: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    block: tuple[int, int]
    prompt_len: int
    gen_len: int
    weight_format: str = "auto"
    on_disk: bool = False
    three_tiers: bool = False
    cpu_attention_frac: float = 0.0

    def config(self) -> dict[str, Any]:
        return {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": self.hidden_size,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.n_layers,
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_kv_heads,
            "vocab_size": 8192,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "bos_token_id": 0,
            "eos_token_id": 0,
        }

    def policy(self, first: str) -> Policy:
        place = Placement(**{f"{first}_frac": 1.0})
        below = Placement(cpu_frac=1.0) if self.three_tiers else place
        return Policy(
            weights=Placement(disk_frac=1.0) if self.on_disk else below,
            cache=below,
            activations=place,
            gpu_batch_size=self.block[0],
            num_gpu_batches=self.block[1],
            weight_format=self.weight_format,
            cpu_attention_frac=self.cpu_attention_frac,
            schedule="static",
        )


PROBES = (
    # Large matrices, many tokens: GEMM and unpacking rates within a run.
    Probe(hidden_size=1536, ffn=4096, n_layers=3, n_heads=24, n_kv_heads=6, block=(24, 1), prompt_len=64, gen_len=8),
    # Few tokens: the lower end of the GEMM curve, four gpu batches share what is unpacked.
    Probe(hidden_size=1536, ffn=4096, n_layers=3, n_heads=24, n_kv_heads=6, block=(4, 4), prompt_len=16, gen_len=8),
    # Small matrices, many units: fixed costs.
    Probe(hidden_size=256, ffn=512, n_layers=16, n_heads=4, n_kv_heads=2, block=(8, 2), prompt_len=32, gen_len=24),
    # Long contexts of one head per KV head: attention.
    Probe(hidden_size=512, ffn=1024, n_layers=6, n_heads=8, n_kv_heads=8, block=(8, 1), prompt_len=448, gen_len=24),
    # Weights in 4 bits, in large and in small matrices.
    Probe(
        hidden_size=1536, ffn=4096, n_layers=3, n_heads=24, n_kv_heads=24, block=(16, 2), prompt_len=32, gen_len=8,
        weight_format="int4-g64",
    ),
    Probe(
        hidden_size=512, ffn=1536, n_layers=8, n_heads=8, n_kv_heads=4, block=(16, 1), prompt_len=16, gen_len=24,
        weight_format="int4-g64",
    ),
    # Copies between tiers, small ones most of all, without and with CPU attention.
    Probe(
        hidden_size=512, ffn=1536, n_layers=6, n_heads=8, n_kv_heads=4, block=(8, 4), prompt_len=48, gen_len=16,
        three_tiers=True,
    ),
    Probe(
        hidden_size=512, ffn=1536, n_layers=6, n_heads=8, n_kv_heads=4, block=(8, 4), prompt_len=48, gen_len=16,
        three_tiers=True, cpu_attention_frac=0.5,
    ),
)  # fmt: skip


SHARED = (PROBES[0], PROBES[2])
"""Run once more with weights on disk: what reads cost the computation that runs beside them."""


def machine_profile(
    device: Device,
    *,
    folder: Path | None = None,
    fresh: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Hardware:
    """This machine's profile: from the cache, or measured and probed now (about a minute and a half), and kept."""
    return cached_hardware(
        device,
        folder=folder,
        fresh=fresh,
        say=say,
        refine=lambda hardware: probe_hardware(hardware, device, folder=folder, say=say).hardware,
    )


def probe_hardware(
    hardware: Hardware,
    device: Device,
    *,
    folder: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Calibration:
    """The measured machine with its constants brought to what short runs took. Takes about half a minute.

    folder: on the disk that the disk tier will use; that of the profile's cache if not given.
    """
    say("short runs")
    folder = folder or cache_file(device).parent
    folder.mkdir(parents=True, exist_ok=True)
    records: list[tuple[str, RunRecord]] = []
    shares: list[float] = []
    with tempfile.TemporaryDirectory(prefix="flexrun-probe-", dir=folder) as place:
        for _ in range(ROUNDS):
            for i, probe in enumerate(PROBES):
                record = _run(probe, Path(place), device)
                records.append((f"probe {i}", record))
                # On an accelerator the processor that reads does not compute.
                if probe in SHARED and not device.is_accelerator:
                    beside = _run(dataclasses.replace(probe, on_disk=True), Path(place), device)
                    shares += _shares(record, beside)
    found = refit(
        hardware,
        [record.observation(hardware, name) for name, record in records],
        constants=CONSTANTS,
        pull=PULL,
    )
    settled = found.hardware.replace(source=hardware.source)
    if shares:
        share = min(1.0, max(0.0, statistics.median(shares)))
        cores = {**settled.sharing.get("cores", {}), "disk_read": share, "disk_write": share}
        settled = settled.replace(sharing={**settled.sharing, "cores": {"compute": 1.0, **cores}})
    return dataclasses.replace(found, hardware=settled)


def _shares(alone: RunRecord, beside: RunRecord) -> list[float]:
    """How much longer decoding computes for every second of reads beside it, as a share of the cores.

    Reads are few and large; what they cost is mostly that interrupted cores keep the other ones waiting.
    """
    a, b = (r.measured.phases["decode"].busy_seconds for r in (alone, beside))
    read = b.get("disk_read", 0.0)
    return [(b["compute"] - a["compute"]) / read] if read > 0.01 else []


def _run(probe: Probe, folder: Path, device: Device) -> RunRecord:
    """Run a probe; folder holds its model and what it keeps on disk."""
    emulated = probe.three_tiers and not device.is_accelerator
    first = "gpu" if emulated else device.first_tier.label
    config = json.dumps(probe.config())
    model = folder / hashlib.sha256(config.encode()).hexdigest()[:8]
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(config, encoding="utf-8")
    n = probe.block[0] * probe.block[1]
    with LLM(
        model,
        device=device.kind,
        dummy_weights=True,
        gpu_mem="1GiB" if emulated else None,
        policy=probe.policy(first),
        prompt_len=probe.prompt_len,
        gen_len=probe.gen_len,
        num_requests=n,
        disk_dir=folder / "spill",
    ) as llm:
        generator = torch.Generator().manual_seed(0)
        prompts = torch.randint(1, 8192, (n, probe.prompt_len), generator=generator).tolist()
        warm_up(llm, prompts[0], max_tokens=2)
        meter = MeteredEngine(llm)
        params = SamplingParams(temperature=0.0, max_tokens=probe.gen_len, ignore_eos=True)
        for i, prompt in enumerate(prompts):
            meter.add_request(f"probe-{i}", prompt, params)
        while meter.has_unfinished():
            meter.step()
        record = run_record(llm, meter)
    assert record is not None
    return record
