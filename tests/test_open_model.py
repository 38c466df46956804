"""One entry for folders, GGUF files, packed folders and presets."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from quantized_helpers import VOCAB, write_llama_gguf
from source_helpers import filled_runs, random_tensors, tiny_model, write_folder

from flexrun.checkpoint import CheckpointError
from flexrun.checkpoint.dummy import DummySource
from flexrun.checkpoint.open_model import open_model
from flexrun.checkpoint.packed import PackedSource
from flexrun.checkpoint.packing import pack_model
from flexrun.checkpoint.source import CheckpointSource


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = write_folder(tmp_path / "m", "llama", random_tensors(tiny_model("llama"), torch.bfloat16))
    (made / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6], "temperature": 0.5}))
    return made


def test_a_folder(folder: Path) -> None:
    opened = open_model(folder)
    assert opened.kind == "hf" and opened.path == folder and opened.tokenizer_folder == folder
    assert isinstance(opened.source, CheckpointSource)
    assert opened.config.family == "llama" and {5, 6} <= set(opened.config.eos_token_ids)
    assert opened.generation_config["temperature"] == 0.5
    assert opened.load_tokenizer() is None and opened.load_chat_template(None) is None
    moved = folder.with_name("renamed")
    shutil.copytree(folder, moved)
    assert open_model(moved).fingerprint == opened.fingerprint


def test_a_packed_folder_is_the_same_model(folder: Path, tmp_path: Path) -> None:
    opened = open_model(folder, weight_format="int8-g32")
    pack_model(opened.source, opened.model, tmp_path / "p", name=opened.name)
    packed = open_model(tmp_path / "p")
    assert packed.kind == "packed" and isinstance(packed.source, PackedSource)
    assert packed.config == opened.config and packed.generation_config == opened.generation_config
    assert packed.fingerprint == opened.fingerprint
    runs = filled_runs(opened.source, opened.model)
    assert all(torch.equal(run, runs[name]) for name, run in filled_runs(packed.source, packed.model).items())
    assert open_model(tmp_path / "p", weight_format="int8-g32").fingerprint == opened.fingerprint
    with pytest.raises(CheckpointError, match=r"found int8-g32, expected int4-g64.*pack .*m again"):
        open_model(tmp_path / "p", weight_format="int4-g64")


def test_a_gguf_file_and_its_packed_form(tmp_path: Path) -> None:
    write_llama_gguf(tmp_path / "m.gguf", {"": "Q4_0"})
    opened = open_model(tmp_path / "m.gguf")
    assert opened.kind == "gguf" and opened.tokenizer_folder is None
    assert opened.gguf_metadata is not None
    assert len(opened.gguf_metadata["tokenizer.ggml.tokens"]) == VOCAB
    pack_model(opened.source, opened.model, tmp_path / "p")
    packed = open_model(tmp_path / "p")
    assert packed.config == opened.config
    assert packed.gguf_metadata == opened.gguf_metadata
    runs = filled_runs(opened.source, opened.model)
    assert all(torch.equal(run, runs[name]) for name, run in filled_runs(packed.source, packed.model).items())


def test_a_preset_has_no_weights_but_random_ones() -> None:
    with pytest.raises(CheckpointError, match=r"preset.*--dummy-weights.*hf download"):
        open_model("opt-125m")
    opened = open_model("opt-125m", dummy_weights=True, seed=3, weight_format="int4-g64")
    assert opened.kind == "preset" and opened.path is None
    assert isinstance(opened.source, DummySource) and opened.source.seed == 3
    assert opened.source.formats_of(opened.model.units[1])["qkv"].name == "int4-g64"
    assert opened.load_tokenizer() is None


def test_random_weights_need_no_more_than_a_config(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no weights"):
        open_model(folder)
    opened = open_model(folder, dummy_weights=True)
    assert isinstance(opened.source, DummySource) and opened.tokenizer_folder == folder
    assert {5, 6} <= set(opened.config.eos_token_ids)


def test_random_weights_of_a_packed_model_and_a_gguf(folder: Path, tmp_path: Path) -> None:
    opened = open_model(folder)
    pack_model(opened.source, opened.model, tmp_path / "p")
    write_llama_gguf(tmp_path / "m.gguf", {"": "Q4_0"})
    for path in (tmp_path / "p", tmp_path / "m.gguf"):
        assert isinstance(open_model(path, dummy_weights=True).source, DummySource)
