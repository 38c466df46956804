"""Damaged and hostile files: one CheckpointError that names file, tensor and bytes; never anything else."""

from __future__ import annotations

import json
import os
import pickle
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from flexrun.checkpoint import CheckpointError, open_checkpoint
from flexrun.checkpoint.base import read_json_object
from flexrun.checkpoint.gguf import open_gguf
from flexrun.checkpoint.reading import read_dense, read_tensor
from flexrun.checkpoint.safetensors import read_header

A = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
B = {"dtype": "I32", "shape": [2], "data_offsets": [24, 32]}


def safetensors_bytes(header: Any, data: bytes = bytes(32), length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def refused(read: Callable[[], object], *parts: str, limit_bytes: int = 4 << 20) -> CheckpointError:
    """Run ``read``; it must raise CheckpointError holding ``parts``, without a large allocation."""
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as caught:
            read()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    for part in parts:
        assert part in str(caught.value)
    assert peak < limit_bytes
    assert len(str(caught.value)) < 2000
    return caught.value


@pytest.mark.parametrize(
    ("raw", "parts"),
    [
        (b"", ["0 bytes"]),
        (b"\x02\0\0\0\0\0\0\0", ["8 bytes"]),
        (safetensors_bytes({"a": A, "b": B}, length=2**63), ["impossible header length", str(2**63)]),
        (
            safetensors_bytes({"a": A, "b": B}, length=10_000),
            ["impossible header length", "found 10000 bytes"],
        ),
        (safetensors_bytes({"a": A, "b": B}, length=1), ["impossible header length", "found 1 bytes"]),
        (safetensors_bytes({"a": A, "b": B}, length=40), ["not a JSON object"]),
        (safetensors_bytes(b"[1, 2, 3]"), ["not a JSON object"]),
        (safetensors_bytes(b'{"a": }'), ["not valid JSON"]),
        (safetensors_bytes(b'{"a\xff": 1}'), ["not valid JSON"]),
        (safetensors_bytes(b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"), ["not valid JSON"]),
        (safetensors_bytes(b'{"a": ' + b"9" * 10_000 + b"}"), ["not valid JSON"]),
        (
            safetensors_bytes(b'{"a": %s, "a": %s}' % ((json.dumps(A).encode(),) * 2)),
            ["names 'a' twice"],
        ),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", ["Git LFS pointer"]),
        (safetensors_bytes({"a": 5}), ["tensor 'a'", "found int"]),
        (safetensors_bytes({"a": {}}), ["tensor 'a'", "unsupported dtype"]),
        (safetensors_bytes({"a": {**A, "dtype": "F4"}, "b": B}), ["tensor 'a'", "unsupported dtype", "F4"]),
        (safetensors_bytes({"a": {**A, "dtype": "Q4_1"}, "b": B}), ["tensor 'a'", "unsupported dtype"]),
        (safetensors_bytes({"a": {**A, "shape": "2,3"}, "b": B}), ["tensor 'a'", "not a list"]),
        (safetensors_bytes({"a": {**A, "shape": [2, -3]}, "b": B}), ["tensor 'a'", "bad dimension -3"]),
        (safetensors_bytes({"a": {**A, "shape": [2, 3.0]}, "b": B}), ["tensor 'a'", "bad dimension 3.0"]),
        (safetensors_bytes({"a": {**A, "shape": [True, 6]}, "b": B}), ["tensor 'a'", "bad dimension True"]),
        (safetensors_bytes({"a": {**A, "shape": [2**62] * 9}, "b": B}), ["tensor 'a'", "bad dimension"]),
        (safetensors_bytes({"a": {**A, "shape": [1] * 99}, "b": B}), ["tensor 'a'", "99 dimensions"]),
        (safetensors_bytes({"a": {**A, "shape": [2, 4]}, "b": B}), ["tensor 'a'", "24 bytes", "expected 32"]),
        (safetensors_bytes({"a": {**A, "data_offsets": [0]}}), ["tensor 'a'", "two integers"]),
        (safetensors_bytes({"a": {**A, "data_offsets": [0, 24.0]}}), ["tensor 'a'", "two integers"]),
        (safetensors_bytes({"a": {**A, "data_offsets": [24, 0]}}), ["tensor 'a'", "outside the file"]),
        (safetensors_bytes({"a": {**A, "data_offsets": [-24, 0]}}), ["tensor 'a'", "outside the file"]),
        (
            safetensors_bytes({"a": A, "b": {**B, "data_offsets": [32, 40]}}),
            ["tensor 'b'", "outside the file", "bytes 32 to 40"],
        ),
        (safetensors_bytes({"a": A, "b": {**B, "data_offsets": [20, 28]}}), ["tensor 'b'", "overlaps 'a'"]),
        (
            safetensors_bytes({"a": A, "b": {**B, "data_offsets": [28, 36]}}, bytes(36)),
            ["tensor 'b'", "leaves a hole after 'a'"],
        ),
        (safetensors_bytes({"a": {**A, "data_offsets": [8, 32]}}), ["tensor 'a'", "leaves a hole"]),
        (safetensors_bytes({"a": A, "b": B}, bytes(40)), ["belong to no tensor", "expected"]),
        (safetensors_bytes({"a": A, "b": B}, bytes(31)), ["tensor 'b'", "outside the file"]),
    ],
)
def test_safetensors_header(raw: bytes, parts: list[str], tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(raw)
    refused(lambda: read_header(path), str(path), *parts)


def test_the_good_header_of_the_cases_above(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(safetensors_bytes({"a": A, "b": B, "__metadata__": {"format": "pt"}}))
    assert {name: info.shape for name, info in read_header(path).items()} == {"a": (2, 3), "b": (2,)}


def test_a_wrong_header_length_in_a_large_file_reads_little(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(safetensors_bytes({"a": A, "b": B}, length=90_000_000))
    os.truncate(path, 1 << 30)  # sparse
    refused(lambda: read_header(path), "header of 90000000 bytes", limit_bytes=1 << 20)


def make_folder(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    save_file({"a": torch.ones(2)}, folder / "model-00001-of-00002.safetensors")
    save_file({"b": torch.ones(2)}, folder / "model-00002-of-00002.safetensors")
    return folder


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_missing_shards(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    write_index(folder, {"a": first, "b": second, "c": second})
    refused(lambda: open_checkpoint(folder), second, "tensor 'c'", "does not hold it")
    (folder / second).unlink()
    refused(lambda: open_checkpoint(folder), f"{folder / second}", "1 of 2 shards", "2 tensors lost")
    (folder / "model.safetensors.index.json").unlink()
    refused(lambda: open_checkpoint(folder), f"{folder / second}", "a shard is missing", "found 1 shards")


@pytest.mark.parametrize(
    "name",
    [
        "../model-00001-of-00002.safetensors",
        "x/../../y.safetensors",
        "/etc/x.safetensors",
        "C:\\x.safetensors",
        "a\\..\\x.safetensors",
        "model.bin",
        "",
        5,
        None,
        ["x.safetensors"],
    ],
)
def test_index_stays_inside_the_folder(name: Any, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m")
    save_file({"a": torch.ones(2)}, tmp_path / "model-00001-of-00002.safetensors")
    write_index(folder, {"a": name})
    refused(lambda: open_checkpoint(folder), "index.json", "tensor 'a'", "inside the model folder")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"weight_map": []}', '{"weight_map": {}}', "\xff", "[" * 99_999]
)
def test_damaged_index_and_config(text: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    (folder / "model.safetensors.index.json").write_text(text, encoding="latin-1")
    refused(lambda: open_checkpoint(folder), "model.safetensors.index.json")
    (folder / "model.safetensors.index.json").unlink()
    if "weight_map" not in text:
        (folder / "config.json").write_text(text, encoding="latin-1")
        refused(lambda: open_checkpoint(folder), "config.json")


def test_json_of_absurd_size_is_not_read(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    os.truncate(folder / "config.json", 1 << 32)
    refused(lambda: open_checkpoint(folder), "config.json", "too large", limit_bytes=1 << 20)


def test_missing_config(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    (folder / "config.json").unlink()
    refused(lambda: open_checkpoint(folder), "config.json is missing")


def test_a_folder_in_place_of_a_file(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m")
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    refused(lambda: open_checkpoint(folder), "config.json", "cannot be opened")


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (os.environ["FLEXRUN_TEST_BOMB"],))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickles_are_refused_and_never_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEXRUN_TEST_BOMB", str(tmp_path / "exploded"))
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / name).write_bytes(pickle.dumps(Bomb()))
    for given_name in (folder, folder / name):
        refused(
            lambda given_name=given_name: open_checkpoint(given_name),
            name,
            "never unpickles",
            "save_pretrained",
        )
    assert not (tmp_path / "exploded").exists()


def test_a_file_cut_after_it_was_opened(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"w": torch.ones(100)}, path)
    info = read_header(path)["w"]
    os.truncate(path, path.stat().st_size - 40)
    refused(lambda: read_tensor(info), str(path), "tensor 'w'", "found 360 bytes", "expected 400")
    path.unlink()
    refused(lambda: read_dense(info, torch.float64), str(path), "does not exist")


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def pair(key: bytes, type_id: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", type_id) + value


def tensor(name: bytes, dims: list[int], type_id: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type_id, offset)


ARCH = pair(b"general.architecture", 8, string(b"llama"))


def gguf_bytes(
    pairs: list[bytes],
    tensors: list[bytes],
    data: bytes = bytes(64),
    magic: bytes = b"GGUF",
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    n_tensors, n_pairs = (len(tensors), len(pairs)) if counts is None else counts
    header = magic + struct.pack("<IQQ", version, n_tensors, n_pairs) + b"".join(pairs) + b"".join(tensors)
    return header + bytes(-len(header) % 32) + data


GOOD = [tensor(b"a", [4]), tensor(b"b", [4, 2], offset=32)]


def array(type_id: int, length: int, body: bytes = b"") -> bytes:
    return struct.pack("<IQ", type_id, length) + body


@pytest.mark.parametrize(
    ("raw", "parts"),
    [
        (b"", ["too short", "0 bytes"]),
        (b"GGUF\3\0\0\0", ["too short", "8 bytes"]),
        (gguf_bytes([ARCH], GOOD, magic=b"GGML"), ["not a GGUF file", "GGML"]),
        (gguf_bytes([ARCH], GOOD, version=1), ["unsupported GGUF version", "found 1"]),
        (gguf_bytes([ARCH], GOOD, version=4), ["unsupported GGUF version", "found 4"]),
        (gguf_bytes([ARCH], GOOD, version=3 << 24), ["big-endian"]),
        (gguf_bytes([ARCH], GOOD, counts=(2**63, 1)), ["impossible tensor count", str(2**63)]),
        (gguf_bytes([ARCH], GOOD, counts=(2, 2**63)), ["impossible key-value count", str(2**63)]),
        (gguf_bytes([ARCH], GOOD, counts=(3, 1)), ["is empty"]),
        (gguf_bytes([ARCH], GOOD, counts=(1, 3)), ["metadata key '' is empty"]),
        (gguf_bytes([], GOOD), ["general.architecture"]),
        (gguf_bytes([pair(b"general.architecture", 4, bytes(4))], GOOD), ["general.architecture"]),
        (gguf_bytes([ARCH], []), ["no tensors"]),
        (gguf_bytes([ARCH, ARCH], GOOD), ["'general.architecture' is repeated"]),
        (gguf_bytes([ARCH, pair(b"", 7, b"\1")], GOOD), ["metadata key '' is empty"]),
        (gguf_bytes([ARCH, pair(b"\xff", 7, b"\1")], GOOD), ["a metadata key is not UTF-8"]),
        (gguf_bytes([ARCH, pair(b"k", 8, string(b"\xff"))], GOOD), ["value of 'k' is not UTF-8"]),
        (gguf_bytes([ARCH, pair(b"k", 8, struct.pack("<Q", 2**40))], GOOD), ["length of the value of 'k'"]),
        (gguf_bytes([ARCH, pair(b"k", 8, struct.pack("<Q", 5000))], GOOD), ["ends inside the value of 'k'"]),
        (gguf_bytes([ARCH, pair(b"k", 7, b"\2")], GOOD), ["'k' holds a boolean that is neither"]),
        (gguf_bytes([ARCH, pair(b"k", 13, b"")], GOOD), ["unknown value type", "'k'", "found 13"]),
        (gguf_bytes([ARCH, pair(b"k", 9, array(13, 1))], GOOD), ["unknown element type", "found 13"]),
        (gguf_bytes([ARCH, pair(b"k", 9, array(5, 2**62))], GOOD), ["length of metadata array 'k'"]),
        (gguf_bytes([ARCH, pair(b"k", 9, array(8, 2**40))], GOOD), ["length of metadata array 'k'"]),
        (
            gguf_bytes([ARCH, pair(b"k", 9, array(8, 2, string(b"x") + struct.pack("<Q", 2**64 - 9)))], GOOD),
            ["string of metadata array 'k'", "element 1 of 2"],
        ),
        (
            gguf_bytes([ARCH, pair(b"k", 9, array(8, 1, string(b"\xc3")))], GOOD),
            ["element 0 of metadata array 'k' is not UTF-8"],
        ),
        (gguf_bytes([ARCH, pair(b"k", 9, array(9, 1) * 50)], GOOD), ["'k' are nested too deeply"]),
        (gguf_bytes([ARCH, pair(b"general.alignment", 4, bytes(4))], GOOD), ["general.alignment", "found 0"]),
        (
            gguf_bytes([ARCH, pair(b"general.alignment", 4, struct.pack("<I", 33))], GOOD),
            ["general.alignment", "found 33"],
        ),
        (gguf_bytes([ARCH, pair(b"general.alignment", 8, string(b"32"))], GOOD), ["general.alignment"]),
        (
            gguf_bytes([ARCH, pair(b"general.alignment", 4, struct.pack("<I", 2**31))], GOOD),
            ["general.alignment", str(2**31)],
        ),
        (gguf_bytes([ARCH], [tensor(b"", [4])]), ["its name is empty"]),
        (gguf_bytes([ARCH], [tensor(b"a", [4])] * 2), ["tensor 'a'", "repeated"]),
        (gguf_bytes([ARCH], [tensor(b"a", [1] * 5)]), ["tensor 'a'", "too many dimensions", "found 5"]),
        (gguf_bytes([ARCH], [tensor(b"a", [2**63, 2])]), ["tensor 'a'", "absurd dimensions"]),
        (gguf_bytes([ARCH], [tensor(b"a", [2**40, 2**40])]), ["tensor 'a'", "ends beyond the file"]),
        (gguf_bytes([ARCH], [tensor(b"a", [33, 2], type_id=3)]), ["tensor 'a'", "multiple of 32"]),
        (gguf_bytes([ARCH], [tensor(b"a", [256], type_id=23)]), ["tensor 'a'", "IQ4_XS", "Q4_K_M"]),
        (gguf_bytes([ARCH], [tensor(b"a", [4], type_id=999)]), ["tensor 'a'", "type id 999"]),
        (gguf_bytes([ARCH], [tensor(b"a", [4], offset=16)]), ["tensor 'a'", "not aligned", "found 16"]),
        (gguf_bytes([ARCH], [tensor(b"a", [4], offset=2**63)]), ["tensor 'a'", "begins beyond the file"]),
        (gguf_bytes([ARCH], [*GOOD, tensor(b"c", [4], offset=64)]), ["tensor 'c'", "ends beyond the file"]),
        (gguf_bytes([ARCH], [*GOOD, tensor(b"c", [2], offset=32)]), ["overlaps"]),
        (gguf_bytes([ARCH], GOOD, data=bytes(63)), ["tensor 'b'", "ends beyond the file"]),
        (
            gguf_bytes([ARCH, pair(b"split.count", 4, struct.pack("<I", 10**6))], GOOD),
            ["split.count", "1000000"],
        ),
        (gguf_bytes([ARCH, pair(b"split.count", 8, string(b"2"))], GOOD), ["split.count"]),
        (
            gguf_bytes([ARCH, pair(b"tokenizer.ggml.eos_token_id", 5, b"\xff" * 4)], GOOD),
            ["tokenizer.ggml.eos_token_id", "found -1"],
        ),
    ],
)
def test_gguf_header(raw: bytes, parts: list[str], tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(raw)
    refused(lambda: open_gguf(path), str(path), *parts)


@pytest.mark.parametrize("version", [2, 3])
def test_the_good_gguf_of_the_cases_above(version: int, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    empty, scalar = tensor(b"none", [0, 4], offset=32), tensor(b"one", [], offset=64)
    path.write_bytes(gguf_bytes([ARCH], [*GOOD, empty, scalar], data=bytes(68), version=version))
    infos = open_gguf(path).tensors
    assert {name: info.shape for name, info in infos.items()} == {
        "a": (4,),
        "b": (2, 4),
        "none": (4, 0),
        "one": (),
    }
    assert read_tensor(infos["none"]).shape == (4, 0) and read_tensor(infos["one"]).item() == 0.0


@pytest.mark.parametrize(
    "value",
    [array(5, 2**26), array(7, 2**28), array(8, 2**26), array(9, 2**24), array(12, 2**25)],
)
def test_absurd_arrays_in_a_large_file_allocate_little(value: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes([ARCH, pair(b"k", 9, value)], GOOD))
    os.truncate(path, 1 << 30)  # sparse: the lengths fit the file
    refused(lambda: open_gguf(path), "length of metadata array 'k'", limit_bytes=1 << 20)


def good_gguf(folder: Path) -> bytes:
    path = folder / "good.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc", "é"])
    writer.add_array("tokenizer.ggml.scores", [0.5, 1.5, 2.5])
    writer.add_bool("flag", True)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 2)
    rng = np.random.default_rng(0)
    quantized = gguf.quantize(rng.standard_normal((2, 64)).astype(np.float32), gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("q", quantized, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("n", np.ones((3, 2), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


EDITS = st.lists(
    st.tuples(st.integers(0, 2**16), st.one_of(st.integers(0, 255), st.just(0), st.just(255))),
    min_size=1,
    max_size=6,
)


def edited(raw: bytes, edits: list[tuple[int, int]], cut: int | None) -> bytes:
    changed = bytearray(raw)
    for position, value in edits:
        changed[position % len(raw)] = value
    return bytes(changed if cut is None else changed[: cut % (len(raw) + 1)])


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("fuzz")
    save_file({"a": torch.ones(2, 3), "b": torch.zeros(5).bfloat16()}, folder / "good.safetensors")
    return {
        "folder": folder,
        "gguf": good_gguf(folder),
        "safetensors": (folder / "good.safetensors").read_bytes(),
    }


@settings(max_examples=300, deadline=None)
@given(edits=EDITS, cut=st.one_of(st.none(), st.integers(0, 2**16)))
def test_edited_gguf_opens_or_is_refused(
    workspace: dict[str, Any], edits: list[tuple[int, int]], cut: int | None
) -> None:
    path = workspace["folder"] / "edited.gguf"
    path.write_bytes(edited(workspace["gguf"], edits, cut))
    try:
        checkpoint = open_gguf(path)
    except CheckpointError as error:
        assert str(path) in str(error)
        return
    for info in checkpoint.tensors.values():
        assert info.offset_bytes + info.nbytes <= path.stat().st_size
        read_tensor(info)


@settings(max_examples=300, deadline=None)
@given(edits=EDITS, cut=st.one_of(st.none(), st.integers(0, 2**16)))
def test_edited_safetensors_opens_or_is_refused(
    workspace: dict[str, Any], edits: list[tuple[int, int]], cut: int | None
) -> None:
    path = workspace["folder"] / "edited.safetensors"
    path.write_bytes(edited(workspace["safetensors"], edits, cut))
    try:
        infos = read_header(path)
    except CheckpointError as error:
        assert str(path) in str(error)
        return
    for info in infos.values():
        assert info.offset_bytes + info.nbytes <= path.stat().st_size
        read_tensor(info)


@settings(max_examples=100, deadline=None)
@given(raw=st.one_of(st.binary(max_size=60), st.text(max_size=60).map(str.encode)))
def test_any_bytes_as_json(workspace: dict[str, Any], raw: bytes) -> None:
    path = workspace["folder"] / "any.json"
    path.write_bytes(raw)
    try:
        assert isinstance(read_json_object(path), dict)
    except CheckpointError as error:
        assert str(path) in str(error)
