"""Checkpoints as sources of weights: formats, layouts, bit-exact filling, extents."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from model_helpers import build_tensor
from quantized_helpers import awq_layer, gptq_layer, write_llama_gguf
from source_helpers import CONFIGS, random_tensors, tiny_model, write_folder

from flexrun.checkpoint import CheckpointError, open_checkpoint
from flexrun.checkpoint import filling as filling_module
from flexrun.checkpoint import gptq as gptq_module
from flexrun.checkpoint import reading as reading_module
from flexrun.checkpoint.base import TensorInfo
from flexrun.checkpoint.rows import read_columns
from flexrun.checkpoint.source import CheckpointSource
from flexrun.model.assemble import DecoderModel, build_model
from flexrun.model.config import config_from_checkpoint
from offload.weights import UnitLayout, WeightSource
from quant.linear import linear
from quant.pack import quantize
from quant.packed import PackedTensor, StackedTensor


def filled(source: WeightSource, unit: Any) -> dict[str, Any]:
    """Tensor name -> view of the unit's run, filled over bytes that must all be overwritten."""
    layout = source.layout(unit)
    run = torch.full((layout.nbytes,), 0xA5, dtype=torch.uint8)
    source.fill(unit, run)
    assert_gaps_are_zero(layout, run)
    return layout.views(run)


def named(stored: Any) -> Any:
    """The name of a tensor's format, or (rows, name) of each run of rows."""
    return tuple((n, fmt.name) for n, fmt in stored) if isinstance(stored, tuple) else stored.name


def assert_gaps_are_zero(layout: UnitLayout, run: torch.Tensor) -> None:
    inside = torch.zeros(layout.nbytes, dtype=torch.bool)
    for slot in layout.slots:
        inside[slot.offset_bytes : slot.offset_bytes + slot.nbytes] = True
    assert not run[~inside].any()


def filled_table(source: WeightSource, spec: Any) -> Any:
    fmt = source.table_format(spec)
    run = torch.full((fmt.nbytes(spec.shape),), 0xA5, dtype=torch.uint8)
    source.fill_table(spec, run)
    if fmt.is_plain:
        return run.view(getattr(torch, fmt.plain_dtype)).view(spec.shape)
    return PackedTensor(fmt, spec.shape, run)


def assert_same_weights(source: WeightSource, model: DecoderModel, tensors: dict[str, torch.Tensor]) -> None:
    """Every tensor of every unit equals the plain statement of what its parts mean, bit for bit."""
    for unit in model.units:
        views = filled(source, unit)
        for spec in unit.tensors:
            expected = build_tensor(spec, tensors)
            got = filled_table(source, spec) if spec.kind == "rows" else views[spec.name]
            assert got.dtype == expected.dtype and got.shape == expected.shape, spec.name
            assert torch.equal(got, expected), f"{unit.name}: {spec.name}"


@pytest.fixture(params=[None, 5000], ids=["whole", "small blocks"])
def block_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param is not None:
        monkeypatch.setattr(filling_module, "BLOCK_BYTES", request.param)


@pytest.mark.parametrize("family", CONFIGS)
def test_every_family_is_filled_bit_for_bit(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    tensors = random_tensors(model, torch.bfloat16)
    source = CheckpointSource(open_checkpoint(write_folder(tmp_path / "m", family, tensors)), model)
    assert_same_weights(source, model, tensors)


def as_values(view: Any) -> torch.Tensor:
    return view.dequantize() if isinstance(view, PackedTensor | StackedTensor) else view.float()


@pytest.mark.usefixtures("block_rows")
@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "qwen3_moe"])
def test_plain_conversion_is_exact_in_blocks_too(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    tensors = random_tensors(model, torch.float16)
    folder = write_folder(tmp_path / "m", family, tensors)
    source = CheckpointSource(open_checkpoint(folder), model, "f32")
    for unit in model.units:
        for name, view in filled(source, unit).items():
            spec = next(spec for spec in unit.tensors if spec.name == name)
            expected = build_tensor(spec, tensors)
            assert view.dtype == (torch.float16 if spec.kind == "vector" else torch.float32)
            assert torch.equal(view.float(), expected.float()), name


@pytest.mark.usefixtures("block_rows")
@pytest.mark.parametrize("family", ["llama-tied", "gpt2", "bloom", "phi3"])
@pytest.mark.parametrize("weight_format", ["int4-g32", "int8-g64-sym-f32"])
def test_quantised_while_filling_as_if_at_once(family: str, weight_format: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    tensors = random_tensors(model, torch.bfloat16)
    folder = write_folder(tmp_path / "m", family, tensors)
    source = CheckpointSource(open_checkpoint(folder), model, weight_format, method="minmax")
    for unit in model.units:
        views = filled(source, unit)
        for spec in unit.tensors:
            expected: Any = build_tensor(spec, tensors)
            got = filled_table(source, spec) if spec.kind == "rows" else views[spec.name]
            if spec.kind == "vector":
                assert torch.equal(got, expected)
                continue
            expected = quantize(expected, weight_format, method="minmax")
            assert got.format.name == weight_format
            assert torch.equal(got.buffer, expected.buffer), spec.name
    assert all(source.extents(unit) is None for unit in model.units if unit.name.startswith("layers"))


@pytest.mark.parametrize("prefix", ["", "model.", "language_model.model."])
def test_names_with_any_prefix(prefix: str, tmp_path: Path) -> None:
    model = tiny_model("llama")
    tensors = random_tensors(model)
    folder = write_folder(tmp_path / "m", "llama", tensors, prefix=prefix)
    assert_same_weights(CheckpointSource(open_checkpoint(folder), model), model, tensors)


def test_each_part_of_a_matrix_keeps_its_type_and_vectors_take_the_wider(tmp_path: Path) -> None:
    model = tiny_model("llama")
    tensors = random_tensors(model, torch.bfloat16)
    layer = "layers.0.self_attn."
    tensors[layer + "q_proj.weight"] = tensors[layer + "q_proj.weight"].half()
    tensors["layers.0.mlp.up_proj.weight"] = tensors["layers.0.mlp.up_proj.weight"].float()
    tensors["norm.weight"] = tensors["norm.weight"].double()
    tensors["layers.1.mlp.down_proj.weight"] = tensors["layers.1.mlp.down_proj.weight"].to(
        torch.float8_e4m3fn
    )
    folder = write_folder(tmp_path / "m", "llama", tensors)
    source = CheckpointSource(open_checkpoint(folder), model)
    formats = {f"{u.name}/{n}": named(f) for u in model.units for n, f in source.formats_of(u).items()}
    changed = {name: fmt for name, fmt in formats.items() if fmt != "bf16"}
    assert changed == {
        "layers.0.attn/qkv": ((48, "f16"), (48, "bf16")),
        "layers.0.mlp/gate_up": ((56, "bf16"), (56, "f32")),
        "final/norm.weight": "f32",
    }
    assert not source.notes
    wide = {name: tensor.double() for name, tensor in tensors.items()}
    for unit in model.units:
        for name, view in filled(source, unit).items():
            spec = next(spec for spec in unit.tensors if spec.name == name)
            assert torch.equal(as_values(view).double(), build_tensor(spec, wide)), name
        assert (source.extents(unit) is None) == (unit.name in ("final", "layers.1.mlp"))


def test_biases_of_different_types_are_one_vector(tmp_path: Path) -> None:
    model = tiny_model("llama-tied")
    tensors = random_tensors(model, torch.bfloat16)
    name = "layers.0.self_attn.k_proj.bias"
    tensors[name] = tensors[name].half()
    source = CheckpointSource(open_checkpoint(write_folder(tmp_path / "m", "llama-tied", tensors)), model)
    assert named(source.formats_of(model.units[1])["qkv.bias"]) == "f32"
    spec = next(spec for spec in model.units[1].tensors if spec.name == "qkv.bias")
    wide = {name: tensor.float() for name, tensor in tensors.items()}
    assert torch.equal(filled(source, model.units[1])["qkv.bias"], build_tensor(spec, wide))


@pytest.mark.parametrize("family", CONFIGS)
def test_extents_read_back_equal_a_fill(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    folder = write_folder(tmp_path / "m", family, random_tensors(model, torch.float16))
    source = CheckpointSource(open_checkpoint(folder), model)
    for unit in model.units:
        extents = source.extents(unit)
        assert extents is not None
        run = torch.zeros(source.unit_nbytes(unit), dtype=torch.uint8)
        for extent in extents:
            data = extent.file.read_bytes()[extent.offset_bytes : extent.offset_bytes + extent.nbytes]
            run[extent.dest_offset : extent.dest_offset + extent.nbytes] = torch.frombuffer(
                bytearray(data), dtype=torch.uint8
            )
        filled_run = torch.zeros_like(run)
        source.fill(unit, filled_run)
        assert torch.equal(run, filled_run), unit.name


def test_layouts_come_from_headers_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("gpt2")
    folder = write_folder(tmp_path / "m", "gpt2", random_tensors(model))
    checkpoint = open_checkpoint(folder)

    def no_reading(*args: Any) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(reading_module, "_read_bytes", no_reading)
    source = CheckpointSource(checkpoint, model)
    for unit in model.units:
        slots = source.layout(unit).slots
        assert all(slot.nbytes == slot.format.nbytes(slot.shape) for slot in slots)
        assert all(slot.transposed == slot.is_linear for slot in slots if unit.name.startswith("layers"))
        assert source.extents(unit) is not None
    with pytest.raises(AssertionError, match="a weight was read"):
        filled(source, model.units[1])


def test_bad_arguments_are_clear(tmp_path: Path) -> None:
    model = tiny_model("llama")
    checkpoint = open_checkpoint(write_folder(tmp_path / "m", "llama", random_tensors(model)))
    with pytest.raises(ValueError, match="unknown weight format 'int4'"):
        CheckpointSource(checkpoint, model, "int4")
    with pytest.raises(ValueError, match="cannot be converted to q6_k"):
        CheckpointSource(checkpoint, model, "q6_k")
    with pytest.raises(ValueError, match="unknown quantiser 'best'"):
        CheckpointSource(checkpoint, model, "int4-g64", method="best")
    with pytest.raises(ValueError, match="unpacked_format must be"):
        CheckpointSource(checkpoint, model, unpacked_format="int4-g64")
    source = CheckpointSource(checkpoint, model)
    with pytest.raises(ValueError, match=r"unit layers\.0\.attn takes"):
        source.fill(model.units[1], torch.empty(64, dtype=torch.uint8))


def test_values_that_cannot_be_quantised_name_their_tensor(tmp_path: Path) -> None:
    model = tiny_model("llama")
    tensors = random_tensors(model)
    tensors["layers.0.self_attn.k_proj.weight"][3, 5] = float("nan")
    checkpoint = open_checkpoint(write_folder(tmp_path / "m", "llama", tensors))
    source = CheckpointSource(checkpoint, model, "int4-g32")
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.k_proj\.weight.*nan"):
        filled(source, model.units[1])


def test_integers_are_no_weights(tmp_path: Path) -> None:
    model = tiny_model("llama")
    tensors = random_tensors(model)
    tensors["norm.weight"] = tensors["norm.weight"].to(torch.int32)
    checkpoint = open_checkpoint(write_folder(tmp_path / "m", "llama", tensors))
    with pytest.raises(CheckpointError, match=r"norm\.weight.*holds no weights \(found I32"):
        CheckpointSource(checkpoint, model)


# -- GGUF --------------------------------------------------------------------------------------------

GGUF_FORMATS = {
    "Q4_0": "int4-g32-sym",
    "Q4_1": "int4-g32",
    "Q5_0": "int5-g32-sym",
    "Q5_1": "int5-g32",
    "Q8_0": "int8-g32-sym",
    "Q4_K": "q4_k",
    "Q5_K": "q5_k",
    "Q6_K": "q6_k",
    "Q2_K": "f32",
    "Q3_K": "f32",
    "F16": "f16",
    "F32": "f32",
}


def gguf_source(path: Path, *args: Any, **options: Any) -> tuple[CheckpointSource, DecoderModel]:
    checkpoint = open_checkpoint(path)
    model = build_model(config_from_checkpoint(checkpoint))
    return CheckpointSource(checkpoint, model, *args, **options), model


def assert_same_values(source: WeightSource, model: DecoderModel, values: dict[str, torch.Tensor]) -> None:
    for unit in model.units:
        views = filled(source, unit)
        for spec in unit.tensors:
            got = filled_table(source, spec) if spec.kind == "rows" else views[spec.name]
            expected = build_tensor(spec, values).float()
            assert torch.equal(as_values(got), expected), f"{unit.name}: {spec.name}"


@pytest.mark.usefixtures("block_rows")
@pytest.mark.parametrize("kind", GGUF_FORMATS)
def test_gguf_types_are_kept_bit_for_bit(kind: str, tmp_path: Path) -> None:
    values = write_llama_gguf(tmp_path / "m.gguf", {"": kind}, tied=kind != "Q4_K")
    source, model = gguf_source(tmp_path / "m.gguf")
    assert_same_values(source, model, values)
    formats = source.formats_of(model.units[1])
    assert formats["qkv"].name == formats["out"].name == GGUF_FORMATS[kind]
    assert formats["attn_norm.weight"].name == "f32"
    assert source.formats_of(model.units[0])["tokens"].name == "int8-g32-sym"
    assert bool(source.notes) == (kind in ("Q2_K", "Q3_K"))
    # Rows of q and k are put back in order, so only the other units lie in the file as they are wanted.
    as_stored = kind in ("F16", "F32", "Q4_K", "Q5_K", "Q6_K")
    assert source.extents(model.units[1]) is None
    assert (source.extents(model.units[2]) is not None) == as_stored


@pytest.mark.usefixtures("block_rows")
def test_parts_quantised_differently_stay_as_they_are(tmp_path: Path) -> None:
    kinds = {"": "Q4_K", "attn_v": "Q6_K", "ffn_down": "Q6_K", "ffn_gate": "Q4_0", "ffn_up": "Q8_0"}
    values = write_llama_gguf(tmp_path / "m.gguf", kinds)
    source, model = gguf_source(tmp_path / "m.gguf")
    assert_same_values(source, model, values)
    assert {n: named(f) for n, f in source.formats_of(model.units[1]).items()} == {
        "attn_norm.weight": "f32",
        "qkv": ((256 + 128, "q4_k"), (128, "q6_k")),
        "out": "q4_k",
    }
    assert named(source.formats_of(model.units[2])["gate_up"]) == (
        (512, "int4-g32-sym"),
        (512, "int8-g32-sym"),
    )
    assert named(source.formats_of(model.units[2])["down"]) == "q6_k"
    assert not source.notes
    for unit in model.units[1:3]:
        for slot in source.layout(unit).slots:
            assert slot.nbytes == slot.format.nbytes(slot.shape)


def test_a_type_without_a_format_leaves_its_neighbours_alone(tmp_path: Path) -> None:
    values = write_llama_gguf(tmp_path / "m.gguf", {"": "Q4_K", "attn_q": "Q2_K", "attn_v": "Q3_K"})
    source, model = gguf_source(tmp_path / "m.gguf")
    assert_same_values(source, model, values)
    assert named(source.formats_of(model.units[1])["qkv"]) == ((256, "f32"), (128, "q4_k"), (128, "f32"))
    assert len(source.notes) == 2 and all("no packed form" in note for note in source.notes)
    narrow, _ = gguf_source(tmp_path / "m.gguf", unpacked_format="bf16")
    assert named(narrow.formats_of(model.units[1])["qkv"]) == ((256, "bf16"), (128, "q4_k"), (128, "bf16"))
    qkv = next(spec for spec in model.units[1].tensors if spec.name == "qkv")
    got, expected = as_values(filled(narrow, model.units[1])["qkv"]), build_tensor(qkv, values)
    assert torch.equal(got[:256], expected[:256].bfloat16().float())
    assert torch.equal(got[256:384], expected[256:384])


def test_parts_of_a_block_format_are_read_where_they_lie(tmp_path: Path) -> None:
    """A disk read of an MLP of Q4_K and Q5_K parts fills the unit as `fill` does."""
    write_llama_gguf(tmp_path / "m.gguf", {"": "Q4_K", "ffn_up": "Q5_K"})
    source, model = gguf_source(tmp_path / "m.gguf")
    extents = source.extents(model.units[2])
    assert extents is not None
    run = torch.zeros(source.unit_nbytes(model.units[2]), dtype=torch.uint8)
    for extent in extents:
        data = extent.file.read_bytes()[extent.offset_bytes : extent.offset_bytes + extent.nbytes]
        run[extent.dest_offset :][: extent.nbytes] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    expected = torch.zeros_like(run)
    source.fill(model.units[2], expected)
    assert torch.equal(run, expected)


def test_gguf_converted_to_another_format(tmp_path: Path) -> None:
    values = write_llama_gguf(tmp_path / "m.gguf", {"": "Q6_K", "ffn_down": "Q4_1"})
    source, model = gguf_source(tmp_path / "m.gguf", "int4-g32", method="minmax")
    mlp = filled(source, model.units[2])
    specs = {spec.name: spec for spec in model.units[2].tensors}
    expected = quantize(build_tensor(specs["gate_up"], values), "int4-g32", method="minmax")
    assert torch.equal(mlp["gate_up"].buffer, expected.buffer)
    # What is in that format already is not quantised a second time.
    assert torch.equal(mlp["down"].dequantize(), build_tensor(specs["down"], values))


# -- GPTQ and AWQ --------------------------------------------------------------------------------------


def write_quantized(
    folder: Path, method: str, *, bits: int = 4, orders: dict[str, int] | None = None, **settings: Any
) -> tuple[CheckpointSource, DecoderModel, dict[str, torch.Tensor]]:
    """A llama of width 64 whose layers are quantised; orders: stem -> seed of its column order."""
    changes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "quantization_config": {"quant_method": method, "bits": bits, "group_size": 32} | settings,
    }
    model = tiny_model("llama", **changes)
    values, stored = random_tensors(model, torch.float16), {}
    for number, (name, tensor) in enumerate(sorted(values.items())):
        stem = name.removesuffix(".weight")
        if not name.startswith("layers") or tensor.ndim < 2:
            stored[name] = tensor
            continue
        if method == "gptq":
            order = None if orders is None else orders.get(stem.rpartition(".")[2], 0)
            parts, values[name] = gptq_layer(
                *tensor.shape, bits=bits, group=32, seed=number, order_seed=order
            )
            stored[f"{stem}.bias"] = torch.zeros(tensor.shape[0], dtype=torch.float16)
        else:
            parts, values[name] = awq_layer(*tensor.shape, group=32, seed=number)
        stored |= {f"{stem}.{suffix}": part for suffix, part in parts.items()}
    write_folder(folder, "llama", stored, prefix="model.", **changes)
    return CheckpointSource(open_checkpoint(folder), model), model, values


@pytest.mark.usefixtures("block_rows")
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq_is_kept_as_it_is(bits: int, tmp_path: Path) -> None:
    source, model, values = write_quantized(tmp_path / "m", "gptq", bits=bits)
    assert_same_values(source, model, values)
    assert source.formats_of(model.units[1])["qkv"].name == f"int{bits}-g32-zp"
    assert not source.notes


@pytest.mark.parametrize(("method", "settings"), [("gptq", {"desc_act": True, "orders": {}}), ("awq", {})])
def test_a_quantised_matrix_is_read_once_while_it_is_converted(
    method: str, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of it are columns of the file: every block of them costs a reading of the whole matrix."""
    source, model, values = write_quantized(tmp_path / "m", method, **settings)
    source = CheckpointSource(source.checkpoint, model, "f32")
    read: list[str] = []

    def counted(info: TensorInfo, start: int, stop: int) -> torch.Tensor:
        read.append(info.name)
        return read_columns(info, start, stop)

    monkeypatch.setattr(gptq_module, "read_columns", counted)
    monkeypatch.setattr(filling_module, "BLOCK_BYTES", 9 * 4 * 64)  # nine rows of a width of 64
    assert_same_values(source, model, values)
    matrices = [name for name in read if name.endswith(".qweight")]
    assert len(matrices) == len(set(matrices)) == 14
    held = {id(reader._held): reader._held for reader in source._readers.values() if reader.quantized}
    assert [block.rows for block in held.values()] == [None]
    # Blocks that do not hold all rows are read where they are needed, and give the same.
    monkeypatch.setattr(gptq_module, "BLOCK_BYTES", 40 * 64)
    read.clear()
    assert_same_values(source, model, values)
    assert len([name for name in read if name.endswith(".qweight")]) > 14


def test_a_block_is_let_go_when_another_matrix_is_read(tmp_path: Path) -> None:
    """Also where the rest of its rows is never asked for: all matrices of a checkpoint hold one block at most."""
    source, _, values = write_quantized(tmp_path / "m", "gptq")
    one, other = [r for (_, flipped), r in source._readers.items() if r.quantized and not flipped][:2]
    one.values(0, 3, torch.float32)
    first = weakref.ref(one._held.rows.buffer)
    other.values(0, 3, torch.float32)
    assert first() is None and other._held is one._held and one._held.owner == other.name
    wanted = values[one.name.removeprefix("model.")].float()
    torch.testing.assert_close(one.values(0, 3, torch.float32), wanted[:3])


@pytest.mark.usefixtures("block_rows")
def test_awq_is_kept_as_it_is(tmp_path: Path) -> None:
    source, model, values = write_quantized(tmp_path / "m", "awq", version="gemm")
    assert_same_values(source, model, values)
    assert source.formats_of(model.units[2])["gate_up"].name == "int4-g32-zp"


def test_gptq_act_order(tmp_path: Path) -> None:
    """q, k and v share a column order and are one matrix; gate and up do not here, and each keeps its own."""
    source, model, values = write_quantized(tmp_path / "m", "gptq", desc_act=True, orders={"up_proj": 9})
    assert_same_values(source, model, values)
    assert named(source.formats_of(model.units[1])["qkv"]) == "int4-g32-zp-perm"
    assert named(source.formats_of(model.units[2])["gate_up"]) == ((96, "int4-g32-zp-perm"),) * 2
    assert named(source.formats_of(model.units[2])["down"]) == "int4-g32-zp-perm"
    assert not source.notes
    gate_up = filled(source, model.units[2])["gate_up"]
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(linear(x, gate_up), x @ gate_up.dequantize().t(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("gptq", {"quant_method": "fp8"}, "method that is not supported.*'fp8'"),
        ("gptq", {"checkpoint_format": "marlin"}, "layout that is not supported.*'marlin'"),
        ("awq", {"version": "gemv"}, "layout that is not supported.*gemv"),
        ("gptq", {"group_size": "all"}, "bad bits or group_size"),
        ("gptq", {"group_size": 48}, "groups of 48"),
    ],
)
def test_other_quantised_checkpoints_are_refused(
    method: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        write_quantized(tmp_path / "m", method, **settings)
