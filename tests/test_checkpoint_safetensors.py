"""Hugging Face folders: what is read equals what was saved, in every layout that is in the wild."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from flexrun.checkpoint import CheckpointError, TensorInfo, open_checkpoint
from flexrun.checkpoint import reading as reading_module
from flexrun.checkpoint.base import stored_nbytes
from flexrun.checkpoint.reading import read_dense, read_into, read_tensor
from flexrun.checkpoint.safetensors import read_header


def mixed_tensors() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(5)
    return {
        "model.embed.weight": torch.randn(11, 6, generator=g).bfloat16(),
        "half": torch.randn(4, 3, 2, generator=g).half(),
        "single": torch.randn(7, generator=g),
        "double": torch.randn(2, 2, generator=g).double(),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "qweight": torch.randint(-(2**31), 2**31 - 1, (8, 5), generator=g, dtype=torch.int32),
        "g_idx": torch.arange(9, dtype=torch.int64),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "flags": torch.tensor([True, False, True]),
        "fp8": torch.randn(3, 4, generator=g).to(torch.float8_e4m3fn),
    }


def make_folder(folder: Path, shards: dict[str, dict[str, torch.Tensor]], index: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for file_name, tensors in shards.items():
        save_file(tensors, folder / file_name)
    if index:
        write_index(folder, {name: file for file, tensors in shards.items() for name in tensors})
    return folder


def write_index(folder: Path, weight_map: dict[str, object]) -> None:
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map})
    )


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.float(), b.float())


def two_shards() -> dict[str, dict[str, torch.Tensor]]:
    return {
        "model-00001-of-00002.safetensors": {"a": torch.ones(2, 3), "b": torch.zeros(4)},
        "model-00002-of-00002.safetensors": {"c": torch.full((5,), 2.0).bfloat16()},
    }


def test_mixed_types_zero_dimensional_and_empty(tmp_path: Path) -> None:
    tensors = mixed_tensors()
    checkpoint = open_checkpoint(make_folder(tmp_path / "a model", {"model.safetensors": tensors}))
    assert checkpoint.kind == "hf" and set(checkpoint.tensors) == set(tensors)
    for name, expected in tensors.items():
        info = checkpoint.tensors[name]
        assert info.shape == tuple(expected.shape)
        assert info.nbytes == expected.numel() * expected.element_size()
        assert same(read_tensor(info), expected), name
    assert checkpoint.nbytes == sum(t.numel() * t.element_size() for t in tensors.values())


def test_rows(tmp_path: Path) -> None:
    tensors = mixed_tensors()
    infos = open_checkpoint(make_folder(tmp_path, {"model.safetensors": tensors})).tensors
    for name in ("model.embed.weight", "half", "g_idx", "empty"):
        for rows in (slice(1, 3), slice(None), slice(2, 2), slice(-2, None), slice(3, 1), slice(0, 99)):
            expected = tensors[name][rows] if rows != slice(3, 1) else tensors[name][:0]
            assert same(read_tensor(infos[name], rows), expected), (name, rows)
    assert same(read_tensor(infos["scalar"], slice(0, 1)), tensors["scalar"])
    with pytest.raises(ValueError, match="step 1 only"):
        read_tensor(infos["half"], slice(0, 4, 2))


def test_read_into_checks_its_target(tmp_path: Path) -> None:
    tensors = mixed_tensors()
    info = open_checkpoint(make_folder(tmp_path, {"model.safetensors": tensors})).tensors["half"]
    out = torch.zeros(2, 12, dtype=torch.uint8)
    read_into(info, out, slice(1, 3))
    assert torch.equal(out.view(-1).view(torch.float16).view(2, 3, 2), tensors["half"][1:3])
    with pytest.raises(ValueError, match="24 bytes to read, but out holds 23"):
        read_into(info, torch.zeros(23, dtype=torch.uint8), slice(1, 3))
    with pytest.raises(ValueError, match="contiguous uint8"):
        read_into(info, torch.zeros(12, 2, dtype=torch.uint8).t(), slice(1, 3))
    with pytest.raises(ValueError, match="contiguous uint8"):
        read_into(info, torch.zeros(24), slice(1, 3))


def test_a_tensor_larger_than_the_io_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_module, "MAX_IO_BYTES", 1000)
    weight = torch.randn(37, 101, generator=torch.Generator().manual_seed(1))
    tensors = {"w": weight, "b": weight.bfloat16()}
    infos = open_checkpoint(make_folder(tmp_path, {"model.safetensors": tensors})).tensors
    assert torch.equal(read_tensor(infos["w"]), weight)
    assert torch.equal(read_dense(infos["w"], torch.bfloat16, slice(3, 36)), weight[3:36].bfloat16())
    assert torch.equal(read_dense(infos["b"], torch.float32), weight.bfloat16().float())


def test_read_dense_converts_and_refuses_integers(tmp_path: Path) -> None:
    tensors = mixed_tensors()
    infos = open_checkpoint(make_folder(tmp_path, {"model.safetensors": tensors})).tensors
    for name in ("model.embed.weight", "half", "single", "scalar", "empty", "fp8"):
        assert same(read_dense(infos[name], torch.float32), tensors[name].float()), name
    with pytest.raises(ValueError, match="'qweight': I32 holds no weights"):
        read_dense(infos["qweight"], torch.float32)


@pytest.mark.parametrize("index", [True, False])
def test_shards_with_and_without_an_index(tmp_path: Path, index: bool) -> None:
    shards = two_shards()
    checkpoint = open_checkpoint(make_folder(tmp_path, shards, index=index))
    assert [file.name for file in checkpoint.files] == list(shards)
    for tensors in shards.values():
        for name, expected in tensors.items():
            assert same(read_tensor(checkpoint.tensors[name]), expected)


def test_shards_of_any_names_without_an_index(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(
        make_folder(
            tmp_path, {"first.safetensors": {"a": torch.ones(1)}, "x.safetensors": {"b": torch.ones(1)}}
        )
    )
    assert set(checkpoint.tensors) == {"a", "b"}


def test_a_copy_in_the_authors_own_naming_is_left_alone(tmp_path: Path) -> None:
    shards = {**two_shards(), "consolidated.safetensors": {"layers.0.wq": torch.ones(1)}}
    assert set(open_checkpoint(make_folder(tmp_path, shards)).tensors) == {"a", "b", "c"}


def test_one_whole_file_beside_an_index_counts(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, two_shards(), index=True)
    save_file({"whole": torch.ones(2)}, folder / "model.safetensors")
    assert set(open_checkpoint(folder).tensors) == {"whole"}


def test_index_decides_between_two_copies(tmp_path: Path) -> None:
    shards = two_shards()
    shards["model-00002-of-00002.safetensors"]["a"] = torch.full((2, 3), 7.0)
    folder = make_folder(tmp_path, shards)
    with pytest.raises(
        CheckpointError, match=r"tensor 'a': stored in two files.*model-00001.*and model-00002"
    ):
        open_checkpoint(folder)
    first, second = shards
    write_index(folder, {"a": second, "b": first, "c": second})
    assert torch.equal(read_tensor(open_checkpoint(folder).tensors["a"]), torch.full((2, 3), 7.0))


def test_relative_paths_and_links_into_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = make_folder(tmp_path / "blobs", {"0123abc": {"a": torch.ones(2)}})
    snapshot = tmp_path / "snap shot"
    snapshot.mkdir()
    (snapshot / "model.safetensors").symlink_to("../blobs/0123abc")
    (snapshot / "config.json").symlink_to(blobs / "config.json")
    monkeypatch.chdir(tmp_path)
    checkpoint = open_checkpoint("snap shot")
    monkeypatch.chdir("/")
    assert torch.equal(read_tensor(checkpoint.tensors["a"]), torch.ones(2))


def test_configuration_files(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, {"model.safetensors": {"a": torch.ones(1)}})
    assert open_checkpoint(folder).generation_config == {}
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    checkpoint = open_checkpoint(folder)
    assert checkpoint.generation_config == {"eos_token_id": [2, 7]}
    assert checkpoint.config == {"model_type": "llama"} and checkpoint.quantization_config is None


def test_quantization_config_in_its_three_places(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, {"model.safetensors": {"a": torch.ones(1)}})
    (folder / "quant_config.json").write_text('{"w_bit": 4, "q_group_size": 128}')
    assert open_checkpoint(folder).quantization_config == {
        "quant_method": "awq",
        "w_bit": 4,
        "q_group_size": 128,
    }
    (folder / "quantize_config.json").write_text('{"bits": 4, "desc_act": true}')
    assert open_checkpoint(folder).quantization_config == {
        "quant_method": "gptq",
        "bits": 4,
        "desc_act": True,
    }
    (folder / "config.json").write_text('{"quantization_config": {"quant_method": "awq", "bits": 4}}')
    assert open_checkpoint(folder).quantization_config == {"quant_method": "awq", "bits": 4}


def test_fingerprint_is_of_content_not_of_place(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(1000.0), "b": torch.ones(3)}
    one = open_checkpoint(make_folder(tmp_path / "one", {"model.safetensors": tensors}))
    two = open_checkpoint(make_folder(tmp_path / "two", {"other.safetensors": tensors}))
    assert one.fingerprint() == two.fingerprint() == one.fingerprint()
    tuned = open_checkpoint(
        make_folder(tmp_path / "tuned", {"model.safetensors": {**tensors, "a": torch.arange(1000.0) + 0.5}})
    )
    assert tuned.fingerprint() != one.fingerprint()
    (tmp_path / "two" / "config.json").write_text('{"model_type": "mistral"}')
    assert open_checkpoint(tmp_path / "two").fingerprint() != one.fingerprint()


def test_read_header_needs_no_configuration(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2, 2)}, tmp_path / "x.safetensors", metadata={"format": "pt"})
    assert set(read_header(tmp_path / "x.safetensors")) == {"a"}


def test_tensor_info_holds_only_true_sizes(tmp_path: Path) -> None:
    assert stored_nbytes("Q4_1", (3, 64)) == 120 and stored_nbytes("F32", ()) == 4
    with pytest.raises(ValueError, match=r"F32 of shape \[2, 2\] takes 16 bytes, got nbytes=15"):
        TensorInfo(name="x", dtype="F32", shape=(2, 2), file=tmp_path, offset_bytes=0, nbytes=15)
    with pytest.raises(ValueError, match="multiple of 32 elements"):
        TensorInfo(name="x", dtype="Q8_0", shape=(2, 33), file=tmp_path, offset_bytes=0, nbytes=70)
    with pytest.raises(ValueError, match="unknown dtype 'Q9'"):
        stored_nbytes("Q9", (1,))


def test_opening_needs_no_torch(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, {"model.safetensors": {"a": torch.ones(1)}})
    code = (
        "import sys; from flexrun.checkpoint import open_checkpoint; "
        f"open_checkpoint({str(folder)!r}).fingerprint(); "
        "sys.exit('torch' in sys.modules)"
    )
    root = Path(__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
