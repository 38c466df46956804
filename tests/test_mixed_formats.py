"""Checkpoints whose stacked matrices mix formats: bytes, placements, packing, and tokens of the same values."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from quantized_helpers import LLAMA_SHAPES, VOCAB, write_llama_gguf
from runtime_helpers import MemorySource, make_limits, make_policy, reference_greedy, run_jobs, tokens_of

from flexrun.checkpoint import CheckpointError, open_checkpoint
from flexrun.checkpoint.packed import PackedSource, verify
from flexrun.checkpoint.packing import cached_pack, pack_model, packed_nbytes
from flexrun.checkpoint.source import CheckpointSource
from flexrun.engine import Engine
from flexrun.model.assemble import DecoderModel, build_model
from flexrun.model.config import config_from_checkpoint
from flexrun.model.footprint import model_footprint
from flexrun.model.specs import UnitSpec
from flexrun.request import SamplingParams
from flexrun.runtime import Runtime, layout_footprint
from offload import weights as weights_module
from offload.device import make_device
from offload.memory import TierBudgets
from offload.units import TensorSpec
from offload.weights import UnitLayout, WeightSource, unit_layout
from policy.tiers import Tier
from quant.packed import PackedTensor

# As llama.cpp mixes them: "medium" K types with more bits for half of the values, differing by layer.
MIXES: dict[str, dict[str, Any]] = {
    "q4_k_m": {"kinds": {"": "Q4_K", "0.attn_v": "Q6_K", "0.ffn_down": "Q6_K"}, "table": "Q6_K"},
    "q5_k_m": {"kinds": {"": "Q5_K", "attn_v": "Q6_K", "1.ffn_down": "Q6_K"}, "table": "Q8_0", "tied": False},
    "simple": {"kinds": {"": "Q4_0", "ffn_up": "Q8_0", "attn_k": "Q4_1", "1.attn_q": "Q6_K"}},
    "unkept": {"kinds": {"": "Q4_K", "attn_k": "F16", "ffn_gate": "F32"}},
}
JOBS = [(5, 8), (33, 6), (1, 10), (17, 4)]


class Mixed:
    """A GGUF file of mixed types: its source, its packed folder, and the values it stands for."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.path = folder / f"{name}.gguf"
        self.values = write_llama_gguf(self.path, spread=0.1, **MIXES[name])
        self.model, self.source = open_source(self.path)
        self.packed = PackedSource(pack_model(self.source, self.model, folder / name).path)
        dense = MemorySource(self.model, "f32", sources=self.values)
        ids = torch.Generator().manual_seed(3)
        self.jobs = [
            (
                torch.randint(0, VOCAB, (n,), generator=ids).tolist(),
                SamplingParams(temperature=0, max_tokens=m, ignore_eos=True),
            )
            for n, m in JOBS
        ]
        self.expected = [[reference_greedy(dense, prompt, params.max_tokens)] for prompt, params in self.jobs]


def open_source(path: Path, *args: Any) -> tuple[DecoderModel, CheckpointSource]:
    checkpoint = open_checkpoint(path)
    model = build_model(config_from_checkpoint(checkpoint))
    return model, CheckpointSource(checkpoint, model, *args)


@pytest.fixture(scope="module", params=MIXES)
def mixed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Mixed:
    return Mixed(request.param, tmp_path_factory.mktemp("mixed"))


@contextmanager
def opened(
    mixed: Mixed, source: WeightSource, folder: Path, *, weights: str, dtype: torch.dtype = torch.float32
) -> Iterator[Runtime]:
    """A runtime; the letters say where the weights are, and g turns on the emulated third tier."""
    policy = make_policy(weights=weights.lower(), shape=(2, 2))
    runtime = Runtime(
        mixed.model,
        source,
        name="mixed",
        policy=policy,
        limits=make_limits(policy, max_tokens=64, pass_tokens=128),
        device=make_device("cpu", 1 << 30 if weights.isupper() else None),
        compute_dtype=dtype,
        budgets=TierBudgets(gpu_bytes=1 << 30, cpu_bytes=1 << 30, disk_bytes=1 << 30),
        disk_dir=folder,
    )
    with runtime:
        yield runtime


def part_nbytes(kinds: dict[str, str], layer: int, stem: str) -> int:
    """Bytes of a part in the file."""
    kind = kinds.get(f"{layer}.{stem}", kinds.get(stem, kinds[""]))
    if kind in ("F32", "F16"):
        return LLAMA_SHAPES[stem][0] * LLAMA_SHAPES[stem][1] * (4 if kind == "F32" else 2)
    block, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return LLAMA_SHAPES[stem][0] * LLAMA_SHAPES[stem][1] // block * nbytes


def test_units_take_the_bytes_of_their_parts(mixed: Mixed) -> None:
    """In the ring and on disk: as many as the file's own, plus alignment and one exponent per affine row."""
    kinds = MIXES[mixed.name]["kinds"]
    stems = {
        "attn": ("attn_q", "attn_k", "attn_v", "attn_output"),
        "mlp": ("ffn_gate", "ffn_up", "ffn_down"),
    }
    for unit in mixed.model.units[1:5]:
        layer, kind = unit.layer, unit.name.rpartition(".")[2]
        stored = sum(part_nbytes(kinds, layer, stem) for stem in stems[kind]) + 4 * 256  # and the norm
        exponents = sum(
            slot.shape[0] for slot in mixed.source.layout(unit).slots if slot.format.kind == "affine"
        )
        # Parts of a slot and slots start at multiples of 64, the unit fills whole pages.
        n_parts = sum(len(slot.format.parts(slot.shape)) for slot in mixed.source.layout(unit).slots)
        least = stored + exponents
        assert least <= mixed.source.unit_nbytes(unit) < least + 64 * n_parts + 4096
        assert mixed.packed.unit_nbytes(unit) == mixed.source.unit_nbytes(unit)
        assert sum(e.nbytes for e in mixed.packed.extents(unit)) == mixed.source.unit_nbytes(unit)


def test_named_parts_keep_their_formats(tmp_path: Path) -> None:
    write_llama_gguf(tmp_path / "m.gguf", MIXES["q4_k_m"]["kinds"], table="Q6_K")
    model, source = open_source(tmp_path / "m.gguf")
    slots = {s.row_start: s for s in source.layout(model.units[1]).slots if s.name == "qkv"}
    assert {row: (s.shape, s.format.name) for row, s in slots.items()} == {
        0: ((384, 256), "q4_k"),
        384: ((128, 256), "q6_k"),
    }
    assert slots[384].nbytes == 128 * 210 and slots[384].offset_bytes == slots[0].offset_bytes + 384 * 144
    # The next layer mixes otherwise.
    assert [s.format.name for s in source.layout(model.units[3]).slots if s.name == "qkv"] == ["q4_k"]


@pytest.mark.parametrize("weights", ["c", "d", "cd", "G", "C", "D", "GCD"])
def test_greedy_tokens_are_those_of_the_same_values_in_memory(
    weights: str, mixed: Mixed, tmp_path: Path
) -> None:
    """From the packed folder on every tier, planned bytes being those that were taken."""
    with opened(mixed, mixed.packed, tmp_path, weights=weights) as runtime:
        assert tokens_of(run_jobs(Engine(runtime, tokenizer=None), mixed.jobs)) == mixed.expected
        homes = set(runtime.weights.homes[1:5])
        wanted = {"g": Tier.GPU, "c": Tier.CPU, "d": Tier.DISK}
        assert homes == {wanted[letter] for letter in weights.lower()}
        for tier, audit in runtime.audit().items():
            assert audit.planned_bytes == audit.measured_bytes, tier


@pytest.mark.parametrize("weights", ["c", "C", "G"])
def test_the_file_itself_gives_the_same_tokens(weights: str, mixed: Mixed, tmp_path: Path) -> None:
    with opened(mixed, mixed.source, tmp_path, weights=weights) as runtime:
        assert tokens_of(run_jobs(Engine(runtime, tokenizer=None), mixed.jobs)) == mixed.expected
        assert all(a.planned_bytes == a.measured_bytes for a in runtime.audit().values())


def test_unpacking_gives_one_matrix_and_few_tokens_leave_the_parts_packed(
    mixed: Mixed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_module, "crossover_tokens", lambda fmt, dtype, width: 80)
    with opened(mixed, mixed.packed, tmp_path, weights="c") as runtime:
        qkv = runtime.weights.weights(1, -1, 10_000)["qkv"]
        if "F32" not in MIXES[mixed.name]["kinds"].values():
            assert isinstance(qkv, torch.Tensor) and qkv.shape == (512, 256) and qkv.is_contiguous()
        runtime.weights.forget()
        parts = runtime.weights.weights(1, -1, 1)["qkv"].parts
        assert [part.shape[0] for part in parts] == [
            s.shape[0] for s in mixed.packed.layout(mixed.model.units[1]).slots if s.name == "qkv"
        ]


def test_each_part_is_unpacked_where_that_pays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a crossover of its own for each format, q and k stay packed while v is unpacked, in its share of scratch."""
    mixed = Mixed("q4_k_m", tmp_path)
    monkeypatch.setattr(
        weights_module, "crossover_tokens", lambda fmt, dtype, width: 100 if fmt.base == "q4_k" else 0
    )
    with opened(mixed, mixed.packed, tmp_path, weights="c") as runtime:
        made = runtime.weights.weights(1, -1, 50)
        qk, v = made["qkv"].parts
        assert isinstance(qk, PackedTensor) and qk.format.name == "q4_k"
        assert isinstance(v, torch.Tensor) and torch.equal(v, mixed.values["blk.0.attn_v.weight"])
        assert isinstance(made["out"], PackedTensor)
        assert tokens_of(run_jobs(Engine(runtime, tokenizer=None), mixed.jobs)) == mixed.expected


def test_bf16_arithmetic_runs_too(mixed: Mixed, tmp_path: Path) -> None:
    """Answers may differ by rounding: first tokens agree with fp32 where two candidates are not close."""
    with opened(mixed, mixed.packed, tmp_path, weights="D", dtype=torch.bfloat16) as runtime:
        outputs = run_jobs(Engine(runtime, tokenizer=None), mixed.jobs)
    assert all(len(o.outputs[0].token_ids) == p.max_tokens for o, (_, p) in zip(outputs, mixed.jobs))
    firsts = [(o.outputs[0].token_ids[0], e[0][0]) for o, e in zip(outputs, mixed.expected)]
    assert sum(found == expected for found, expected in firsts) >= 3


def test_packing_keeps_every_byte_and_verifies(mixed: Mixed) -> None:
    for unit in mixed.model.units:
        assert mixed.packed.layout(unit) == mixed.source.layout(unit)
        assert mixed.packed.formats_of(unit) == mixed.source.formats_of(unit)
        runs = [torch.full((mixed.source.unit_nbytes(unit),), fill, dtype=torch.uint8) for fill in (1, 2)]
        mixed.source.fill(unit, runs[0])
        mixed.packed.fill(unit, runs[1])
        assert torch.equal(*runs)
    assert verify(mixed.packed.folder).ok
    assert packed_nbytes(mixed.source, mixed.model) == mixed.packed.file.stat().st_size


def test_the_footprint_without_torch_counts_the_same_bytes(mixed: Mixed) -> None:
    """From the configuration and the parts' formats alone."""
    units = {unit.name: unit for unit in mixed.model.units}

    def format_of(unit: UnitSpec, spec: TensorSpec, asked: str) -> Any:
        stored = mixed.source.formats_of(units[unit.name])[spec.name]
        return [(n, f.name) for n, f in stored] if isinstance(stored, tuple) else stored.name

    counted = model_footprint(mixed.model.config, name="mixed", native="mixed", format_of=format_of)
    real = layout_footprint(mixed.model, mixed.source, "mixed")
    assert counted.native_format == real.native_format == "mixed"
    for a, b in zip(counted.units, real.units, strict=True):
        assert a.name == b.name and a.nbytes == b.nbytes and a.linear_shapes == b.linear_shapes
        assert a.vector_bytes == b.vector_bytes


def edited(folder: Path, change: Callable[[list[dict[str, Any]]], object]) -> Path:
    """The folder after a change to the slots of layers.0.attn."""
    values = json.loads((folder / "manifest.json").read_text())
    change(next(unit["slots"] for unit in values["units"] if unit["name"] == "layers.0.attn"))
    (folder / "manifest.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda slots: slots[2].update(row_start=0), "tensor qkv is in pieces that do not make up a matrix"),
        (lambda slots: slots[2].pop("row_start"), "tensor qkv is in pieces that do not make up a matrix"),
        (lambda slots: slots[2].update(row_start=-1), "-1 is no size"),
        (lambda slots: slots.pop(2), "unit layers.0.attn has other tensors"),
    ],
)
def test_a_manifest_with_wrong_pieces_is_one_clear_error(
    change: Callable[[list[dict[str, Any]]], object], message: str, tmp_path: Path
) -> None:
    write_llama_gguf(tmp_path / "m.gguf", MIXES["q4_k_m"]["kinds"])
    model, source = open_source(tmp_path / "m.gguf")
    folder = edited(pack_model(source, model, tmp_path / "p").path, change)
    with pytest.raises(CheckpointError, match=message) as error:
        PackedSource(folder)
    assert "Pack the model again" in str(error.value)


def test_folders_of_before_still_load_and_the_cache_replaces_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed when a mixed matrix was fp32, without a word on row ranges: read as it is; in the cache, made anew."""
    values = write_llama_gguf(tmp_path / "m.gguf", MIXES["q4_k_m"]["kinds"], spread=0.1)
    model, source = open_source(tmp_path / "m.gguf")
    _, old = open_source(tmp_path / "m.gguf", "f32")
    path = pack_model(old, model, tmp_path / "cache" / "key").path
    manifest = json.loads((path / "manifest.json").read_text())
    for run in manifest["units"] + manifest["tables"]:
        for slot in run["slots"]:
            del slot["row_start"]
    (path / "manifest.json").write_text(json.dumps(manifest))
    loaded = PackedSource(path)
    run = torch.empty(loaded.unit_nbytes(model.units[1]), dtype=torch.uint8)
    loaded.fill(model.units[1], run)
    qkv = loaded.layout(model.units[1]).views(run)["qkv"]
    assert torch.equal(qkv[384:], values["blk.0.attn_v.weight"])
    again = cached_pack(source, model, tmp_path / "cache", "key")
    assert not again.reused and PackedSource(again.path).layout(model.units[1]) == source.layout(
        model.units[1]
    )
    assert cached_pack(source, model, tmp_path / "cache", "key").reused


def test_layouts_refuse_pieces_that_are_no_matrix(tmp_path: Path) -> None:
    write_llama_gguf(tmp_path / "m.gguf", MIXES["q4_k_m"]["kinds"])
    model, source = open_source(tmp_path / "m.gguf")
    layout = source.layout(model.units[1])
    with pytest.raises(ValueError, match="tensor qkv is in pieces"):
        UnitLayout(slots=(*layout.slots[:1], *layout.slots[2:]), nbytes=layout.nbytes)
    specs = model.units[1].tensors
    formats = source.formats_of(model.units[1])
    with pytest.raises(ValueError, match="qkv has 512 rows, its formats are given for 384"):
        unit_layout(specs, formats | {"qkv": formats["qkv"][:1]})
