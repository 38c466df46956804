"""Scoring long texts over a large vocabulary, measured as the kernel counts memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
VOCAB, TEXT_TOKENS, N_TEXTS = 131072, 2000, 2
BUDGET_MIB = 512

# A process of its own: the peak of resident memory is the process's, and its libraries' share is measured first.
MEASURE = """
import json, random, re, sys
from pathlib import Path
from eval_helpers import make_tiny_model
from flexrun.llm import LLM

folder, budget_mib, vocab, text_tokens, n_texts = Path(sys.argv[1]), *map(int, sys.argv[2:])

def resident_bytes(name):
    return 1024 * int(re.search(name + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

def score(llm, n_texts, text_tokens, vocab):
    draw = random.Random(0).randrange
    texts = [[draw(vocab) for _ in range(text_tokens)] for _ in range(n_texts)]
    return llm.score_text(texts)

# Libraries and kernels first, with a model that is next to nothing.
with LLM(folder / "small", device="cpu", dtype="float32", cpu_mem="256MiB") as llm:
    score(llm, 2, 60, 400)
Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
before_bytes = resident_bytes("VmRSS")
with LLM(folder / "large", device="cpu", dtype="float32", cpu_mem=f"{budget_mib}MiB") as llm:
    scores = score(llm, n_texts, text_tokens, vocab)
    planned_bytes = llm.runtime.plan.tier_bytes(llm.device.first_tier)
    slabs = [unit for unit in llm.runtime.model.units if unit.name.startswith("head.")]
print(json.dumps({
    "used_bytes": resident_bytes("VmHWM") - before_bytes,
    "planned_bytes": planned_bytes,
    "n_slices": len(slabs),
    "n_scored": [len(s.logprobs) for s in scores],
    "mean": sum(s.logprob for s in scores) / sum(len(s.logprobs) for s in scores),
}))
"""


def make_large(folder: Path) -> None:
    """A llama of one layer whose vocabulary is all there is to it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=4096,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=TEXT_TOKENS + 48,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).float().save_pretrained(folder)


@pytest.mark.slow
@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="needs the peak that Linux counts"
)
def test_a_vocabulary_of_128k_and_long_contexts_stay_within_the_plan(tmp_path):
    from eval_helpers import make_tiny_model

    make_tiny_model(tmp_path / "small")
    make_large(tmp_path / "large")
    words = [tmp_path, BUDGET_MIB, VOCAB, TEXT_TOKENS, N_TEXTS]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *map(str, words)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "MALLOC_ARENA_MAX": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["n_scored"] == [TEXT_TOKENS] * N_TEXTS
    # A logit for every position of one text would be more than the whole budget.
    assert TEXT_TOKENS * VOCAB * 4 > BUDGET_MIB << 20
    assert found["used_bytes"] <= found["planned_bytes"] <= BUDGET_MIB << 20, found
