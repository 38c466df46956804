"""GGUF files: metadata, tensor table, parts, and exact values of every supported block type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from flexrun.checkpoint import CheckpointError, TensorInfo, open_checkpoint
from flexrun.checkpoint import dequantize as dequantize_module
from flexrun.checkpoint import reading as reading_module
from flexrun.checkpoint.base import DTYPE_BLOCKS
from flexrun.checkpoint.reading import dequantize_gguf, read_dense, read_tensor

BLOCK_TYPES = [name for name, (block_len, _) in DTYPE_BLOCKS.items() if block_len > 1]


def random_blocks(dtype: str, rows: int, row_len: int, seed: int = 0) -> np.ndarray:
    """Random bytes as (rows, bytes per row): every bit pattern of the packed fields occurs."""
    block_len, block_bytes = DTYPE_BLOCKS[dtype]
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (rows, row_len // block_len * block_bytes), dtype=np.uint8)


def write_gguf(path: Path, tensors: dict[str, tuple[np.ndarray, str | None]], **metadata: Any) -> Path:
    """A small GGUF file; a dtype of None means the array's own type."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        key = key.replace("__", ".")
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_string(key, value)
    for name, (array, dtype) in tensors.items():
        raw_dtype = None if dtype is None else gguf.GGMLQuantizationType[dtype]
        writer.add_tensor(name, array, raw_dtype=raw_dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_values_of_every_kind(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    numbers = {
        "uint8": 250,
        "int8": -5,
        "uint16": 65_000,
        "int16": -30_000,
        "uint32": 2**32 - 1,
        "int32": -(2**31),
        "uint64": 2**63,
        "int64": -(2**62),
        "float32": 0.5,
        "float64": 1e-300,
    }
    for kind, value in numbers.items():
        getattr(writer, f"add_{kind}")(f"k.{kind}", value)
    writer.add_bool("k.bool", True)
    writer.add_string("k.string", "naïve Ġ \U0001f600")
    arrays = {"strings": ["", "a b", "é"], "ints": [-1, 2, 3], "floats": [0.5, -2.0], "bools": [True, False]}
    for name, array in arrays.items():
        writer.add_array(f"k.{name}", array)
    writer.add_array("k.nested", [[1, 2], [3]])
    writer.add_tensor("t", np.ones(3, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config = open_checkpoint(tmp_path / "m.gguf").config
    assert {kind: config[f"k.{kind}"] for kind in numbers} == numbers
    assert config["k.bool"] is True and config["k.string"] == "naïve Ġ \U0001f600"
    assert {name: config[f"k.{name}"] for name in arrays} == arrays
    assert all(type(flag) is bool for flag in config["k.bools"])
    assert config["k.nested"] == [[1, 2], [3]]


def test_plain_tensors_shapes_and_order(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    matrix = rng.standard_normal((6, 4)).astype(np.float32)
    experts = rng.standard_normal((3, 5, 2)).astype(np.float16)
    path = write_gguf(
        tmp_path / "a file.gguf",
        {"m": (matrix, None), "e": (experts, None), "i": (np.arange(5, dtype=np.int32), None)},
    )
    checkpoint = open_checkpoint(path)
    assert checkpoint.kind == "gguf" and checkpoint.config["general.architecture"] == "llama"
    assert checkpoint.tensors["m"].shape == (6, 4)  # [out, in], though ggml states [in, out]
    assert torch.equal(read_tensor(checkpoint.tensors["m"], slice(2, 5)), torch.from_numpy(matrix[2:5]))
    assert torch.equal(read_tensor(checkpoint.tensors["e"]), torch.from_numpy(experts))
    assert torch.equal(read_tensor(checkpoint.tensors["i"]), torch.arange(5, dtype=torch.int32))


def test_bf16(tmp_path: Path) -> None:
    values = torch.randn(4, 8, generator=torch.Generator().manual_seed(2)).bfloat16()
    path = write_gguf(tmp_path / "b.gguf", {"w": (values.view(torch.uint8).numpy(), "BF16")})
    info = open_checkpoint(path).tensors["w"]
    assert info.dtype == "BF16" and info.shape == (4, 8)
    assert torch.equal(read_tensor(info), values)
    assert torch.equal(read_dense(info, torch.float32, slice(1, 3)), values[1:3].float())


@pytest.mark.parametrize("dtype", BLOCK_TYPES)
def test_values_equal_the_reference_exactly(dtype: str, tmp_path: Path) -> None:
    raw = random_blocks(dtype, rows=9, row_len=512)
    info = open_checkpoint(write_gguf(tmp_path / "q.gguf", {"w": (raw, dtype)})).tensors["w"]
    assert info.dtype == dtype and info.shape == (9, 512) and info.raw_shape == raw.shape
    stored = read_tensor(info)
    assert stored.dtype == torch.uint8 and np.array_equal(stored.numpy(), raw)
    with np.errstate(all="ignore"):  # random scales include NaN and infinity
        reference = gguf.dequantize(raw, gguf.GGMLQuantizationType[dtype])
    assert np.array_equal(dequantize_gguf(info, stored, torch.float32).numpy(), reference, equal_nan=True)
    rows = read_dense(info, torch.float32, slice(2, 7)).numpy()
    assert np.array_equal(rows, reference[2:7], equal_nan=True)
    half = read_dense(info, torch.bfloat16)
    assert torch.equal(half.nan_to_num(), torch.from_numpy(reference).bfloat16().nan_to_num())


@pytest.mark.parametrize("dtype", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_real_weights_survive(dtype: str, tmp_path: Path) -> None:
    weights = np.random.default_rng(1).standard_normal((4, 96)).astype(np.float32)
    raw = gguf.quantize(weights, gguf.GGMLQuantizationType[dtype])
    info = open_checkpoint(write_gguf(tmp_path / "q.gguf", {"w": (raw, dtype)})).tensors["w"]
    error = (read_dense(info, torch.float32).numpy() - weights).std()
    assert error < {"Q8_0": 0.01, "Q5_0": 0.06, "Q5_1": 0.06}.get(dtype, 0.12)


def test_pieces_smaller_than_the_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_module, "MAX_IO_BYTES", 250)
    monkeypatch.setattr(dequantize_module, "PIECE_ELEMENTS", 300)
    raw = random_blocks("Q4_K", rows=5, row_len=1024)
    info = open_checkpoint(write_gguf(tmp_path / "q.gguf", {"w": (raw, "Q4_K")})).tensors["w"]
    with np.errstate(all="ignore"):
        reference = gguf.dequantize(raw, gguf.GGMLQuantizationType.Q4_K)
    assert np.array_equal(read_dense(info, torch.float32).numpy(), reference, equal_nan=True)
    assert np.array_equal(read_tensor(info, slice(1, 4)).numpy(), raw[1:4])


def test_stacked_experts_and_block_vectors(tmp_path: Path) -> None:
    raw = random_blocks("Q8_0", rows=6, row_len=64).reshape(3, 2, -1)
    vector = random_blocks("Q8_0", rows=1, row_len=64)[0]
    path = write_gguf(tmp_path / "q.gguf", {"e": (raw, "Q8_0"), "v": (vector, "Q8_0")})
    infos = open_checkpoint(path).tensors
    assert infos["e"].shape == (3, 2, 64)
    assert np.array_equal(read_tensor(infos["e"], slice(1, 2)).numpy(), raw[1:2])
    assert read_dense(infos["e"], torch.float32, slice(0, 2)).shape == (2, 2, 64)
    assert np.array_equal(read_tensor(infos["v"]).numpy(), vector)
    assert read_dense(infos["v"], torch.float32).shape == (64,)


def test_dequantize_checks_what_it_is_given(tmp_path: Path) -> None:
    info = TensorInfo(name="w", dtype="Q4_0", shape=(2, 64), file=tmp_path, offset_bytes=0, nbytes=72)
    with pytest.raises(
        ValueError, match=r"expected uint8 rows of 36 bytes, got torch.uint8 of shape \[2, 35\]"
    ):
        dequantize_gguf(info, torch.zeros(2, 35, dtype=torch.uint8), torch.float32)
    with pytest.raises(ValueError, match="expected uint8"):
        dequantize_gguf(info, torch.zeros(2, 36), torch.float32)


def test_special_tokens_become_a_generation_config(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "t.gguf",
        {"w": (np.ones(2, np.float32), None)},
        tokenizer__ggml__eos_token_id=7,
        tokenizer__ggml__eot_token_id=9,
        tokenizer__ggml__bos_token_id=1,
        tokenizer__ggml__padding_token_id=7,
    )
    assert open_checkpoint(path).generation_config == {
        "eos_token_id": [7, 9],
        "bos_token_id": 1,
        "pad_token_id": 7,
    }


def test_other_alignment(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_custom_alignment(4096)
    for name in ("a", "b"):
        writer.add_tensor(name, np.full(3, ord(name), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    infos = open_checkpoint(tmp_path / "a.gguf").tensors
    assert all(info.offset_bytes % 4096 == 0 for info in infos.values())
    assert torch.equal(read_tensor(infos["b"]), torch.full((3,), float(ord("b"))))


def make_parts(folder: Path) -> list[Path]:
    writer = gguf.GGUFWriter(folder / "m.gguf", "llama", split_max_tensors=2)
    writer.add_string("general.name", "parts")
    for number in range(5):
        writer.add_tensor(f"t{number}", np.full(4, number, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob("*.gguf"))


@pytest.mark.parametrize("given", [0, 1, 2])
def test_parts_are_one_model_whichever_is_named(given: int, tmp_path: Path) -> None:
    parts = make_parts(tmp_path)
    assert len(parts) == 3
    checkpoint = open_checkpoint(parts[given])
    assert checkpoint.path == parts[0] and checkpoint.config["general.name"] == "parts"
    for number in range(5):
        assert read_tensor(checkpoint.tensors[f"t{number}"])[0] == number


def test_a_folder_of_parts(tmp_path: Path) -> None:
    make_parts(tmp_path)
    assert len(open_checkpoint(tmp_path).tensors) == 5


def test_missing_and_renamed_parts(tmp_path: Path) -> None:
    parts = make_parts(tmp_path)
    moved = parts[1].rename(tmp_path / "other.gguf")
    with pytest.raises(CheckpointError, match=r"m-00002-of-00003.gguf: 1 of 3 parts are missing"):
        open_checkpoint(parts[0])
    with pytest.raises(CheckpointError, match="one of 3 parts, and its name does not lead to the others"):
        open_checkpoint(moved)
    moved.write_bytes(parts[2].read_bytes())
    moved.rename(parts[1])
    with pytest.raises(CheckpointError, match=r"00002-of-00003.gguf: the part's metadata disagrees"):
        open_checkpoint(parts[0])


def test_fingerprint_follows_values(tmp_path: Path) -> None:
    one, two = (
        open_checkpoint(write_gguf(tmp_path / f"{v}.gguf", {"w": (np.full(9, v, np.float32), None)}))
        for v in (1, 2)
    )
    assert one.fingerprint() != two.fingerprint()
