"""``flexrun pack``: a packed folder, its report, and one sentence for what cannot be done."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from quantized_helpers import write_llama_gguf
from source_helpers import filled_runs, random_tensors, tiny_model, write_folder

from flexrun.checkpoint.open_model import open_model
from flexrun.checkpoint.packed import PackedSource, verify
from flexrun.cli import main


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "m", "llama", random_tensors(tiny_model("llama"), torch.bfloat16))


def test_pack_and_open_again(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "packed"
    assert main(["pack", "-m", str(folder), "--weight-format", "int4-g32", "-o", str(out), "--json"]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert result["weight_format"] == "int4-g32" and result["folder"] == str(out)
    assert result["folder_bytes"] > result["weight_bytes"] > 0
    assert verify(out).ok
    opened = open_model(out)
    expected = filled_runs(open_model(folder, weight_format="int4-g32").source, opened.model)
    for name, run in filled_runs(opened.source, opened.model).items():
        assert torch.equal(run, expected[name]), name


def test_the_report_goes_to_standard_error(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pack", "-m", str(folder), "-o", str(tmp_path / "p"), "--method", "minmax"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "" and "peak memory" in captured.err
    assert PackedSource(tmp_path / "p").weight_format == "auto"


def test_overwrite(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["pack", "-m", str(folder), "-o", str(tmp_path / "p"), "--weight-format"]
    assert main([*command, "bf16"]) == 0
    assert main([*command, "f32"]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main([*command, "f32", "--overwrite"]) == 0
    assert PackedSource(tmp_path / "p").weight_format == "f32"
    assert main(["pack", "-m", str(folder), "-o", str(folder), "--overwrite"]) == 2
    assert "not a packed model" in capsys.readouterr().err
    assert (folder / "model.safetensors").is_file()


def test_notes_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_llama_gguf(tmp_path / "m.gguf", {"": "Q4_K", "attn_v": "Q3_K", "ffn_down": "Q6_K"})
    assert main(["pack", "-m", str(tmp_path / "m.gguf"), "-o", str(tmp_path / "p")]) == 0
    assert "note: Q3_K tensors are held as f32" in capsys.readouterr().err
    assert open_model(tmp_path / "p").notes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-m", "{here}", "-o", "{out}", "--weight-format", "q6_k"], "cannot be converted to q6_k"),
        (["-m", "opt-125m", "-o", "{out}"], "--dummy-weights"),
        (["-m", "{here}/nothing", "-o", "{out}"], "nothing"),
    ],
)
def test_what_cannot_be_packed_is_one_sentence(
    arguments: list[str], message: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "p"
    assert main(["pack", *(word.format(here=folder, out=out) for word in arguments)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("flexrun: ") and message in error and error.count("\n") == 1
    assert not out.exists() and not list(tmp_path.glob(".p*"))


def test_packing_what_is_packed_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pack", "-m", str(folder), "-o", str(tmp_path / "p")]) == 0
    assert main(["pack", "-m", str(tmp_path / "p"), "-o", str(tmp_path / "q")]) == 2
    assert "packed already" in capsys.readouterr().err


def test_an_unknown_format_is_a_usage_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(["pack", "-m", str(folder), "-o", "x", "--weight-format", "int4"])
    assert error.value.code == 2
    assert "unknown weight format 'int4'" in capsys.readouterr().err


def test_a_folder_of_mixed_formats_is_described_and_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = {"": "Q4_K", "attn_v": "Q6_K", "ffn_gate": "Q4_0", "ffn_up": "Q8_0"}
    write_llama_gguf(tmp_path / "m.gguf", kinds)
    out = tmp_path / "p"
    assert main(["pack", "-m", str(tmp_path / "m.gguf"), "-o", str(out), "--json"]) == 0
    captured = capsys.readouterr()
    # 4.5, 6.6, 4.6 and 8.6 bits: far from the four bytes that one fp32 part would bring along.
    matrices = 2 * (640 * 256 * 144 // 256 + 128 * 256 * 210 // 256 + 512 * 256 * (18 + 34) // 32)
    matrices += 2 * 256 * 512 * 144 // 256 + 70 * 256 * 34 // 32
    assert matrices < json.loads(captured.out)["weight_bytes"] < matrices + 7 * 4096 + 4 * 2048
    assert "note:" not in captured.err
    assert main(["info", str(out), "--verify", "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert info["stored_types"]["q6_k"] == 2 and info["stored_types"]["int8-g32-sym"] == 2 + 1
    slot = PackedSource(out).manifest.units["layers.1.attn"].slots[2]
    place = PackedSource(out).manifest.units["layers.1.attn"].offset_bytes + slot.offset_bytes
    assert slot.name == "qkv" and slot.row_start == 384
    with (out / "model.safetensors").open("r+b") as file:
        file.seek(place)
        byte = file.read(1)
        file.seek(place)
        file.write(bytes([byte[0] ^ 1]))
    assert main(["info", str(out), "--verify"]) != 0
    assert "layers.1.attn: wrong checksum" in capsys.readouterr().err
