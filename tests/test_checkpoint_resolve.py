"""What `-m` may name, and what is said when it names nothing usable."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from flexrun.checkpoint import CheckpointError, is_packed_folder, open_checkpoint, resolve_model
from flexrun.checkpoint.resolve import huggingface_cache_folder


@pytest.fixture(autouse=True)
def no_network_no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("resolving a model must not touch the network")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "no-cache"))


def make_hf(folder: Path, model_type: str = "llama") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    save_file({"a": torch.ones(2)}, folder / "model.safetensors")
    return folder


def make_gguf(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("a", np.ones(2, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def make_cached(cache: Path, repo: str, commit: str = "a1b2c3", ref: str | None = "a1b2c3") -> Path:
    root = cache / f"models--{repo.replace('/', '--')}"
    snapshot = root / "snapshots" / commit
    snapshot.mkdir(parents=True)
    if ref is not None:
        (root / "refs").mkdir(exist_ok=True)
        (root / "refs" / "main").write_text(ref)
    return snapshot


def test_a_folder_and_a_file(tmp_path: Path) -> None:
    folder = make_hf(tmp_path / "my model")
    found = resolve_model(folder)
    assert (found.kind, found.path) == ("hf", folder)
    file = make_gguf(tmp_path / "x y.gguf")
    assert (resolve_model(str(file)).kind, resolve_model(file).path) == ("gguf", file)
    unnamed = file.rename(tmp_path / "0123456789abcdef")  # as the hub's cache names its blobs
    assert resolve_model(unnamed).kind == "gguf"


def test_relative_and_home_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_hf(tmp_path / "models" / "m")
    monkeypatch.chdir(tmp_path / "models")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("m").path == tmp_path / "models" / "m"
    assert resolve_model("~/models/m").path == tmp_path / "models" / "m"


@pytest.mark.parametrize("name", ["gpt2", "opt-125m", "meta-llama/Llama-2-7b-hf"])
def test_a_local_folder_wins_and_only_its_config_counts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_hf(tmp_path / name, model_type="bloom")
    monkeypatch.chdir(tmp_path)
    assert resolve_model(name).kind == "hf"
    assert open_checkpoint(name).config == {"model_type": "bloom"}


def test_folder_with_one_gguf(tmp_path: Path) -> None:
    file = make_gguf(tmp_path / "m" / "model-Q4.gguf")
    make_gguf(tmp_path / "m" / "mmproj-model-f16.gguf")
    (tmp_path / "m" / "config.json").write_text('{"model_type": "llama"}')
    assert resolve_model(tmp_path / "m").path == file
    make_gguf(tmp_path / "m" / "model-Q8.gguf")
    with pytest.raises(
        CheckpointError, match=r"holds 2 GGUF models .*model-Q4.gguf, model-Q8.gguf.*-m .*Q4.gguf"
    ):
        resolve_model(tmp_path / "m")


def test_preset(tmp_path: Path) -> None:
    found = resolve_model("opt-30b")
    assert found.kind == "preset" and found.path is None
    assert found.preset_config()["hidden_size"] == 7168
    with pytest.raises(CheckpointError, match=r"a configuration without weights.*--dummy-weights"):
        open_checkpoint("opt-30b")
    with pytest.raises(ValueError, match="not a preset but hf"):
        resolve_model(make_hf(tmp_path / "m")).preset_config()


def test_packed_folder(tmp_path: Path) -> None:
    folder = make_hf(tmp_path / "packed")
    assert not is_packed_folder(folder) and not is_packed_folder(tmp_path / "nowhere")
    (folder / "manifest.json").write_text('{"something": "else"}')
    assert resolve_model(folder).kind == "hf"
    (folder / "manifest.json").write_text('{"flexrun_packed": 1}')
    assert is_packed_folder(folder) and resolve_model(folder).kind == "packed"
    with pytest.raises(CheckpointError, match="packed model, not a checkpoint"):
        open_checkpoint(folder)
    (folder / "manifest.json").write_text('{"flexrun_packed": 1')  # damaged: still no checkpoint
    assert is_packed_folder(folder)


def test_cache_follows_refs_main(tmp_path: Path) -> None:
    env = {"HF_HUB_CACHE": str(tmp_path)}
    snapshot = make_hf(make_cached(tmp_path, "org/name"))
    make_hf(make_cached(tmp_path, "org/name", commit="ffff", ref=None))
    found = resolve_model("org/name", env=env)
    assert (found.kind, found.path, found.name) == ("hf", snapshot, "org/name")


@pytest.mark.parametrize("ref", [None, "gone", "../../../etc", ""])
def test_cache_without_a_usable_ref_takes_the_snapshot(ref: str | None, tmp_path: Path) -> None:
    snapshot = make_hf(make_cached(tmp_path, "org/name", ref=ref))
    assert resolve_model("org/name", env={"HF_HUB_CACHE": str(tmp_path)}).path == snapshot


def test_cache_holds_a_gguf(tmp_path: Path) -> None:
    env = {"HF_HUB_CACHE": str(tmp_path)}
    snapshot = make_cached(tmp_path, "org/name-GGUF")
    make_gguf(tmp_path / "blob").rename(tmp_path / "models--org--name-GGUF" / "blob")
    (snapshot / "m-Q4_K_M.gguf").symlink_to("../../blob")
    assert resolve_model("org/name-GGUF", env=env).path == snapshot / "m-Q4_K_M.gguf"
    make_gguf(snapshot / "m-Q8_0.gguf")
    with pytest.raises(CheckpointError, match="holds 2 GGUF models"):
        resolve_model("org/name-GGUF", env=env)
    assert resolve_model("org/name-GGUF/m-Q8_0.gguf", env=env).path == snapshot / "m-Q8_0.gguf"
    with pytest.raises(CheckpointError, match=r"hf download org/name-GGUF m-Q2_K.gguf"):
        resolve_model("org/name-GGUF/m-Q2_K.gguf", env=env)


def test_old_repository_without_organisation(tmp_path: Path) -> None:
    snapshot = make_hf(make_cached(tmp_path, "gpt2"))
    assert resolve_model("gpt2", env={"HF_HUB_CACHE": str(tmp_path)}).path == snapshot


def test_cache_folder_follows_the_hubs_variables(tmp_path: Path) -> None:
    assert huggingface_cache_folder({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}) == Path("/a")
    assert huggingface_cache_folder({"HF_HOME": "/b", "XDG_CACHE_HOME": "/c"}) == Path("/b/hub")
    assert huggingface_cache_folder({"XDG_CACHE_HOME": "/c"}) == Path("/c/huggingface/hub")
    assert huggingface_cache_folder({}) == Path.home() / ".cache" / "huggingface" / "hub"


def test_incomplete_download_says_how_to_complete_it(tmp_path: Path) -> None:
    snapshot = make_cached(tmp_path, "org/name")
    (snapshot / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"in the local Hugging Face cache, but.*hf download org/name$"):
        resolve_model("org/name", env={"HF_HUB_CACHE": str(tmp_path)})
    (snapshot / "model.safetensors").symlink_to("../../blobs/gone")
    with pytest.raises(CheckpointError, match=r"hf download org/name$"):
        resolve_model("org/name", env={"HF_HUB_CACHE": str(tmp_path)})


def test_cached_pickles_are_refused_with_the_conversion(tmp_path: Path) -> None:
    snapshot = make_cached(tmp_path, "org/name")
    (snapshot / "config.json").write_text("{}")
    (snapshot / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(CheckpointError, match=r"never unpickles.*save_pretrained"):
        resolve_model("org/name", env={"HF_HUB_CACHE": str(tmp_path)})


def test_not_here_gives_the_download_command() -> None:
    with pytest.raises(CheckpointError, match=r"hf download facebook/opt-30b \(.*preset 'opt-30b'"):
        resolve_model("facebook/opt-30b")
    with pytest.raises(CheckpointError, match=r"hf download org/some-model$"):
        resolve_model("org/some-model")
    with pytest.raises(CheckpointError, match="similar presets: opt-30b"):
        resolve_model("opt-30")
    for odd in ("", "  ", "a\0b", "../..x/y", "org/name/../../x", "x" * 5000, "./nothing/here", "~nobody0/x"):
        with pytest.raises(CheckpointError):
            resolve_model(odd)


def test_things_that_are_no_models(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"not a model folder \(found nothing"):
        resolve_model(tmp_path)
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(CheckpointError, match=r"not a model folder .found notes.txt"):
        resolve_model(tmp_path)
    with pytest.raises(CheckpointError, match="not a model file"):
        resolve_model(tmp_path / "notes.txt")
    folder = make_hf(tmp_path / "m m")
    with pytest.raises(CheckpointError, match=r'named by its folder. Use -m ".*m m"'):
        resolve_model(folder / "model.safetensors")
    (tmp_path / "link").symlink_to("gone")
    with pytest.raises(CheckpointError, match="a link to something that does not exist"):
        resolve_model(tmp_path / "link")
    (tmp_path / "adapter").mkdir()
    save_file({"a": torch.ones(1)}, tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="an adapter, not a model"):
        resolve_model(tmp_path / "adapter")
