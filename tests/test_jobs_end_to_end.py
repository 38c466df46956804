"""``flexrun batch`` on a real (tiny, random) model, from the command line to the output file."""

import json
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from jobs_fake import read_results
from safetensors.numpy import save_file

from flexrun.cli import main

HIDDEN, FFN, HEADS, VOCAB = 32, 48, 4, 96
CONFIG = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": VOCAB - 1,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder without a tokenizer: prompts are token ids."""
    folder = tmp_path_factory.mktemp("model")
    rng = np.random.default_rng(3)
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(2):
        at = f"model.layers.{layer}."
        for name, rows in (("q", HIDDEN), ("k", HIDDEN // 2), ("v", HIDDEN // 2), ("o", HIDDEN)):
            shapes[f"{at}self_attn.{name}_proj.weight"] = (rows, HIDDEN)
        shapes |= {f"{at}mlp.{name}_proj.weight": (FFN, HIDDEN) for name in ("gate", "up")}
        shapes[at + "mlp.down_proj.weight"] = (HIDDEN, FFN)
        shapes |= {
            f"{at}{name}.weight": (HIDDEN,) for name in ("input_layernorm", "post_attention_layernorm")
        }
    tensors = {
        name: rng.standard_normal(shape, np.float32) * (0.3 if len(shape) > 1 else 1.0)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def write_input(path, n):
    rng = np.random.default_rng(0)
    with path.open("w") as stream:
        for i in range(n):
            prompt = rng.integers(1, VOCAB - 1, rng.integers(1, 30)).tolist()
            options = {"max_tokens": int(rng.integers(1, 12)), "temperature": float(i % 2)}
            body = {"prompt": prompt, **options}
            line = {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": body}
            stream.write(json.dumps(line) + "\n")
            if i % 10 == 5:
                stream.write(json.dumps({"id": f"bad{i}", "prompt": [1] * 200}) + "\n")


def token_ids(results):
    return {
        name: None if record["error"] else record["response"]["body"]["choices"][0]["token_ids"]
        for name, record in results.items()
    }


def flags(model, source, target):
    return ["batch", "-m", str(model), "-i", str(source), "-o", str(target), "--json", "--dtype", "float32"]


def test_batch_gives_what_each_prompt_gives_alone_and_resumes(model, tmp_path, capsys):
    from flexrun import LLM, SamplingParams

    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_input(source, 12)
    assert main(flags(model, source, target)) == 1  # the long ones are refused
    summary = json.loads(capsys.readouterr().out)
    assert (summary["requests"], summary["succeeded"], summary["failed"]) == (13, 12, 1)
    results = read_results(target)
    assert "the limit is 128" in results["bad5"]["error"]["message"]

    with LLM(model, dtype="float32") as llm:
        for line in map(json.loads, source.read_text().splitlines()):
            if line.get("body", {}).get("temperature") == 0:
                params = SamplingParams(max_tokens=line["body"]["max_tokens"], temperature=0)
                alone = llm.generate([line["body"]["prompt"]], params)[0]
                assert token_ids(results)[line["custom_id"]] == alone.outputs[0].token_ids

    whole = target.read_bytes()
    cut = whole.index(b"\n", len(whole) // 3) + 25  # a third of the results and a torn line
    target.write_bytes(whole[:cut])
    small = ["--gpu-batch-size", "2", "--num-gpu-batches", "2"]  # another block may finish the job
    assert main([*flags(model, source, target), *small]) == 1
    summary = json.loads(capsys.readouterr().out)
    assert summary["requests"] == 13 and 0 < summary["resumed"] < 13
    assert token_ids(read_results(target)) == token_ids(results)


def test_killed_and_started_again(model, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_input(source, 40)
    words = [sys.executable, "-m", "flexrun", *flags(model, source, target), "--gpu-batch-size", "8"]
    child = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while child.poll() is None and not (target.exists() and target.read_bytes().count(b"\n") > 8):
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    n_killed = target.read_bytes().count(b"\n")
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    summary = json.loads(done.stdout)
    assert summary["resumed"] == n_killed and summary["requests"] == 44
    assert len(read_results(target)) == 44
