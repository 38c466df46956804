"""Packed model folders: exact contents, damage, interruption, disk space, the cache."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from source_helpers import CONFIGS, filled_runs, random_tensors, tiny_model, write_folder

from flexrun.checkpoint import CheckpointError, is_packed_folder, open_checkpoint, packing
from flexrun.checkpoint.dummy import DummySource
from flexrun.checkpoint.packed import PackedSource, verify
from flexrun.checkpoint.packing import cache_key, cached_pack, pack_model, packed_nbytes
from flexrun.checkpoint.source import CheckpointSource
from offload.disk import DiskFile, DiskPool
from offload.weights import UNIT_ALIGN_BYTES, WeightSource


def checkpoint_source(folder: Path, family: str, weight_format: str = "auto") -> CheckpointSource:
    model = tiny_model(family)
    if not folder.exists():
        write_folder(folder, family, random_tensors(model, torch.bfloat16))
    return CheckpointSource(open_checkpoint(folder), model, weight_format)


def assert_equal_sources(got: WeightSource, expected: WeightSource, model: Any) -> None:
    found, wanted = filled_runs(got, model), filled_runs(expected, model)
    assert found.keys() == wanted.keys()
    for name, run in wanted.items():
        assert torch.equal(found[name], run), name
    for unit in model.units:
        assert got.layout(unit) == expected.layout(unit)


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    model = tiny_model("llama")
    return pack_model(DummySource(model, "int4-g32"), model, tmp_path / "packed", name="dummy").path


@pytest.mark.parametrize("weight_format", ["auto", "int4-g32", "int5-g64-sym", "f32"])
@pytest.mark.parametrize("family", ["llama", "llama-tied", "gpt2", "opt-350m"])
def test_what_was_packed_is_what_the_source_gives(family: str, weight_format: str, tmp_path: Path) -> None:
    source = checkpoint_source(tmp_path / "m", family, weight_format)
    model = tiny_model(family)
    calls: list[tuple[int, int, str]] = []
    made = pack_model(
        source, model, tmp_path / "out" / "p", name="me", progress=lambda *args: calls.append(args)
    )
    reader = PackedSource(made.path)
    assert_equal_sources(reader, source, model)
    assert reader.config == model.config
    assert reader.manifest.weight_format == weight_format and reader.manifest.source_name == "me"
    assert reader.fingerprint() == source.fingerprint()
    for unit in model.units:
        assert reader.formats_of(unit) == source.formats_of(unit)
    assert calls[-1][0] == calls[-1][1] == reader.manifest.weight_bytes
    assert [done for done, _, _ in calls] == sorted(done for done, _, _ in calls)
    assert made.nbytes == sum(file.stat().st_size for file in made.path.rglob("*"))
    assert packed_nbytes(source, model) == (made.path / "model.safetensors").stat().st_size
    report = verify(made.path)
    assert report.ok and report.nbytes == reader.manifest.weight_bytes


@pytest.mark.parametrize("family", CONFIGS)
def test_extents_read_back_equal_a_fill(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    pack_model(DummySource(model, "int4-g32"), model, tmp_path / "p")
    source = PackedSource(tmp_path / "p")
    with DiskPool() as pool:
        for unit in model.units:
            run = torch.zeros(source.unit_nbytes(unit), dtype=torch.uint8)
            for extent in source.extents(unit):
                assert extent.offset_bytes % UNIT_ALIGN_BYTES == 0 == extent.nbytes % UNIT_ALIGN_BYTES
                with DiskFile(extent.file, pool) as file:
                    file.read_into(run[extent.dest_offset :], extent.offset_bytes, extent.nbytes)
            expected = torch.zeros_like(run)
            source.fill(unit, expected)
            assert torch.equal(run, expected)


def test_the_safetensors_library_reads_it(packed: Path) -> None:
    source = PackedSource(packed)
    with safe_open(packed / "model.safetensors", "pt") as file:
        names = set(file.keys())
        for unit in source.model.units:
            if source.unit_nbytes(unit):
                run = torch.empty(source.unit_nbytes(unit), dtype=torch.uint8)
                source.fill(unit, run)
                assert torch.equal(file.get_tensor(unit.name), run)
    assert any(name.endswith("/padding") for name in names)


def test_a_tied_table_is_stored_once(tmp_path: Path) -> None:
    tied = tiny_model("llama-tied", vocab_size=1000)
    untied = tiny_model("llama-tied", vocab_size=1000, tie_word_embeddings=False)
    sizes = [
        pack_model(DummySource(model, "bf16"), model, tmp_path / name).nbytes
        for name, model in (("tied", tied), ("untied", untied))
    ]
    assert sizes[1] - sizes[0] > 0.9 * 1000 * 48 * 2


def test_companion_files_are_taken_along(tmp_path: Path) -> None:
    source = checkpoint_source(tmp_path / "m", "llama")
    for name in (
        "tokenizer.json",
        "generation_config.json",
        "chat_template.jinja",
        "LICENSE.txt",
        "other.bin",
    ):
        (tmp_path / "m" / name).write_text(f'{{"of": "{name}"}}')
    (tmp_path / "m" / "additional_chat_templates").mkdir()
    (tmp_path / "m" / "additional_chat_templates" / "tool.jinja").write_text("x")
    pack_model(source, tiny_model("llama"), tmp_path / "p")
    inside = {file.relative_to(tmp_path / "p").as_posix() for file in (tmp_path / "p").rglob("*.*")}
    assert inside == {
        "manifest.json",
        "model.safetensors",
        "config.json",
        "tokenizer.json",
        "generation_config.json",
        "chat_template.jinja",
        "LICENSE.txt",
        "additional_chat_templates/tool.jinja",
    }
    assert (tmp_path / "p" / "tokenizer.json").read_text() == '{"of": "tokenizer.json"}'


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "manifest.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(flexrun_packed=2), r"another version \(found version 2, expected 1\)"),
        (lambda m: m.pop("units"), "damaged: 'units' is missing"),
        (lambda m: m["units"].pop(2), "unit layers.0.mlp is missing"),
        (lambda m: m["units"][1]["slots"].pop(), "layers.0.attn has other tensors"),
        (lambda m: m["units"][1]["slots"][1].update(format="int9-g1"), "unknown weight format 'int9-g1'"),
        (lambda m: m["units"][1]["slots"][1].update(nbytes=5), "does not fit its place"),
        (lambda m: m["units"][1].update(offset_bytes=4096 * 10**6), "ends beyond the file"),
        (lambda m: m["units"][2].update(offset_bytes=m["units"][1]["offset_bytes"]), "overlaps"),
        (lambda m: m["units"][1].update(offset_bytes=-1), "-1 is no size"),
        (lambda m: m["tables"].clear(), "table embed/tokens is missing"),
        (lambda m: m.update(model={}), "not a saved model configuration"),
        (lambda m: m.update(file_bytes=m["file_bytes"] + 1), "cut off"),
    ],
)
def test_a_wrong_manifest_is_one_clear_error(
    packed: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    edit_manifest(packed, change)
    with pytest.raises(CheckpointError, match=message) as error:
        PackedSource(packed)
    assert str(packed) in str(error.value)


def test_broken_files_are_clear_errors(packed: Path) -> None:
    weights, manifest = packed / "model.safetensors", packed / "manifest.json"
    size = weights.stat().st_size
    os.truncate(weights, size - 1)
    with pytest.raises(CheckpointError, match=rf"cut off \(found {size - 1} bytes, expected {size}\)"):
        PackedSource(packed)
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: the file does not exist"):
        PackedSource(packed)
    manifest.write_text(manifest.read_text()[:-10])
    assert is_packed_folder(packed)
    with pytest.raises(CheckpointError, match=r"manifest.json: the file is damaged"):
        PackedSource(packed)


def test_verify_names_each_damaged_unit(packed: Path) -> None:
    manifest = PackedSource(packed).manifest
    victims = [manifest.units["layers.1.mlp"], manifest.tables["embed/tokens"]]
    with (packed / "model.safetensors").open("r+b") as file:
        for run in victims:
            file.seek(run.offset_bytes + run.nbytes // 2)
            byte = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte[0] ^ 1]))
    report = verify(packed)
    assert not report.ok
    assert [problem.split(":")[0] for problem in report.problems] == ["layers.1.mlp", "embed/tokens"]
    assert f"expected {victims[0].checksum}" in report.problems[0]


def test_verify_checks_the_header_of_the_file(packed: Path) -> None:
    with (packed / "model.safetensors").open("r+b") as file:
        text = file.read(4096).replace(b'"layers.0.mlp"', b'"layers.0.xxx"')
        file.seek(0)
        file.write(text)
    assert any(problem.startswith("layers.0.mlp: the file's header") for problem in verify(packed).problems)


def test_nothing_is_replaced_unasked(tmp_path: Path) -> None:
    model = tiny_model("llama")
    first, second = DummySource(model, "int4-g32", seed=1), DummySource(model, "int4-g32", seed=2)
    pack_model(first, model, tmp_path / "p")
    with pytest.raises(CheckpointError, match=r"there already.*--overwrite"):
        pack_model(second, model, tmp_path / "p")
    pack_model(second, model, tmp_path / "p", overwrite=True)
    assert PackedSource(tmp_path / "p").fingerprint() == second.fingerprint()
    assert [entry.name for entry in tmp_path.iterdir()] == ["p"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(CheckpointError, match="not a packed model"):
        pack_model(first, model, tmp_path / "mine", overwrite=True)
    (tmp_path / "empty").mkdir()
    pack_model(first, model, tmp_path / "empty")


def test_too_little_disk_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    source = DummySource(model, "int4-g32")
    needed = packed_nbytes(source, model)
    monkeypatch.setattr(packing, "free_disk_bytes", lambda folder: needed - 1)
    with pytest.raises(CheckpointError, match=r"not enough disk space.*found .* free, expected"):
        pack_model(source, model, tmp_path / "p")
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_up_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    model = tiny_model("llama")
    with pytest.raises(CheckpointError, match="not enough disk space"):
        pack_model(DummySource(model), model, tmp_path / "p")
    assert not list(tmp_path.iterdir())


def test_a_file_system_without_reservation_works_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    model = tiny_model("llama")
    source = DummySource(model, "int4-g32")
    assert_equal_sources(PackedSource(pack_model(source, model, tmp_path / "p").path), source, model)


class FailingSource(DummySource):
    """Fails in the middle, or stops there until it is killed."""

    stop_at = "layers.1.attn"
    wait = False

    def fill(self, unit: Any, run: torch.Tensor) -> None:
        if unit.name == self.stop_at:
            if not self.wait:
                raise RuntimeError("the disk is on fire")
            time.sleep(600)
        super().fill(unit, run)


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with pytest.raises(RuntimeError, match="on fire"):
        pack_model(FailingSource(model), model, tmp_path / "p")
    assert not list(tmp_path.iterdir())


def _pack_and_hang(folder: Path) -> None:
    torch.set_num_threads(1)  # the parent's pool of threads does not live on after a fork
    model = tiny_model("llama")
    source = FailingSource(model)
    source.wait = True
    pack_model(source, model, folder)


def test_kill_during_packing(tmp_path: Path) -> None:
    """A killed process leaves no model, live ones are left alone, and the next packing cleans up."""
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_pack_and_hang, args=(tmp_path / "p",)) for _ in range(2)]
    for worker in workers:
        worker.start()
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob(".p.packing-*/model.safetensors"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert workers[0].pid is not None
    os.kill(workers[0].pid, signal.SIGKILL)
    workers[0].join()
    try:
        left = {entry.name for entry in tmp_path.iterdir()}
        assert len(left) == 2 and all(name.startswith(".p.packing-") for name in left)
        assert not any(is_packed_folder(entry) for entry in tmp_path.iterdir())
        model = tiny_model("llama")
        pack_model(DummySource(model), model, tmp_path / "p")
        names = {entry.name for entry in tmp_path.iterdir()}
        live = f".p.packing-{workers[1].pid}-"
        assert "p" in names and len(names) == 2 and any(name.startswith(live) for name in names)
    finally:
        workers[1].kill()
        workers[1].join()


def test_the_cache_packs_once(tmp_path: Path) -> None:
    model = tiny_model("llama")
    source = DummySource(model, "int4-g32")
    first = cached_pack(source, model, tmp_path / "cache")
    second = cached_pack(source, model, tmp_path / "cache")
    assert (first.reused, second.reused) == (False, True)
    assert first.path == second.path and first.nbytes == second.nbytes
    assert first.path.name == cache_key(source)
    assert_equal_sources(PackedSource(first.path), source, model)
    other = cached_pack(DummySource(model, "int4-g64"), model, tmp_path / "cache")
    assert other.path != first.path and not other.reused


def test_a_damaged_cache_entry_is_made_anew(tmp_path: Path) -> None:
    model = tiny_model("llama")
    source = DummySource(model, "int4-g32")
    path = cached_pack(source, model, tmp_path).path
    os.truncate(path / "model.safetensors", 5000)
    assert not cached_pack(source, model, tmp_path).reused
    edit_manifest(path, lambda manifest: manifest["source"].update(fingerprint="another"))
    assert not cached_pack(source, model, tmp_path).reused
    assert cached_pack(source, model, tmp_path).reused


def test_many_ask_the_cache_at_once(tmp_path: Path) -> None:
    model = tiny_model("llama")
    results = []

    def work() -> None:
        results.append(cached_pack(DummySource(model, "int4-g32"), model, tmp_path))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(result.reused for result in results) == [False, True, True, True]


def test_a_key_that_leaves_the_cache_is_refused(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="folder's name"):
        cached_pack(DummySource(model), model, tmp_path, "../x")
