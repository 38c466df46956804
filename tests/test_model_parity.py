"""Logits of every family against transformers, on tiny random models of odd shapes made here.

Three prompts of different lengths run in one flat batch and are then decoded together; transformers runs
each alone. Scaled ropes have an original context of 16, windows are shorter than the prompts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_helpers import ReferenceRun, build_weights, load_folder

from flexrun.model.assemble import DecoderModel, build_model
from flexrun.model.config import config_from_hf
from offload.units import AttentionUnit

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

VOCAB = 397  # more than the largest layer unit holds: the head has several slices
PROMPT_LENS = (1, 9, 23)  # rising, as dynamic rope in transformers remembers the longest
DECODE_STEPS = 5

MODERN = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA = {**MODERN, "model_type": "llama"}
SCALED = {"rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 16}
FACTORS = {"short_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 2.5], "long_factor": [1.0, 1.5, 3.0, 4.0, 6.0, 8.0]}
GEMMA = {**MODERN, "head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window": 6}
NEOX = {
    "model_type": "gpt_neox",
    **{k: v for k, v in MODERN.items() if k != "num_key_value_heads"},
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
}
OPT = {
    "model_type": "opt",
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "ffn_dim": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
    "pad_token_id": 1,
}
FALCON = {
    "model_type": "falcon",
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

CASES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama-tied-biases": {**LLAMA, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "llama-odd-head-dim": {**LLAMA, "head_dim": 20, "num_key_value_heads": 1},
    "llama-linear": {**LLAMA, "rope_parameters": {"rope_type": "linear", **SCALED}},
    "llama-dynamic": {
        **LLAMA,
        "max_position_embeddings": 16,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0},
    },
    "llama-llama3": {
        **LLAMA,
        "rope_parameters": {
            "rope_type": "llama3",
            **SCALED,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    },
    "llama-yarn": {**LLAMA, "rope_parameters": {"rope_type": "yarn", **SCALED}},
    "llama-yarn-mscale": {
        **LLAMA,
        "rope_parameters": {
            "rope_type": "yarn",
            **SCALED,
            "beta_fast": 8.0,
            "beta_slow": 0.5,
            "mscale": 0.7,
            "mscale_all_dim": 1.0,
            "truncate": False,
        },
    },
    "llama-longrope": {**LLAMA, "rope_parameters": {"rope_type": "longrope", **SCALED, **FACTORS}},
    "mistral-window": {**MODERN, "model_type": "mistral", "sliding_window": 6},
    "mistral-no-window": {**MODERN, "model_type": "mistral", "sliding_window": None, "head_dim": 8},
    "qwen2": {**MODERN, "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2-window": {
        **MODERN,
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 1,
    },
    "qwen3": {**MODERN, "model_type": "qwen3", "head_dim": 20},
    "qwen3-bias-window": {
        **MODERN,
        "model_type": "qwen3",
        "head_dim": 8,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 1,
    },
    "gemma2": {
        **GEMMA,
        "model_type": "gemma2",
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma2-no-caps": {
        **GEMMA,
        "model_type": "gemma2",
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
    "gemma3": {
        **GEMMA,
        "model_type": "gemma3_text",
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "phi3": {**MODERN, "model_type": "phi3", "sliding_window": 6},
    "phi3-longrope": {
        **MODERN,
        "model_type": "phi3",
        "original_max_position_embeddings": 16,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.5,
            "short_factor": [1.0, 1.2, 1.5],
            "long_factor": [1.0, 2.0, 4.0],
        },
    },
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": VOCAB,
        "n_embd": 48,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 40,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "gpt2-odd": {
        "model_type": "gpt2",
        "vocab_size": VOCAB,
        "n_embd": 48,
        "n_layer": 3,
        "n_head": 3,
        "n_inner": 40,
        "n_positions": 40,
        "scale_attn_by_inverse_layer_idx": True,
        "activation_function": "relu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "gpt_neox": NEOX,
    "gpt_neox-serial": {**NEOX, "use_parallel_residual": False, "attention_bias": False},
    "opt": OPT,
    "opt-350m": {**OPT, "word_embed_proj_dim": 24, "do_layer_norm_before": False},
    "opt-bare": {**OPT, "enable_bias": False, "layer_norm_elementwise_affine": False},
    "falcon-7b": {**FALCON, "multi_query": True},
    "falcon-40b": {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
    "falcon-11b": {
        **FALCON,
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
        "num_ln_in_parallel_attn": 1,
    },
    "falcon-alibi": {
        **FALCON,
        "alibi": True,
        "multi_query": False,
        "parallel_attn": False,
        "bias": True,
    },
    "bloom": {"model_type": "bloom", "vocab_size": VOCAB, "hidden_size": 48, "n_layer": 2, "n_head": 6},
    "mixtral": {**MODERN, "model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen3_moe": {
        **MODERN,
        "model_type": "qwen3_moe",
        "head_dim": 20,
        "moe_intermediate_size": 24,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "qwen3_moe-raw-weights": {
        **MODERN,
        "model_type": "qwen3_moe",
        "head_dim": 8,
        "moe_intermediate_size": 24,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "norm_topk_prob": False,
    },
}


def make_reference(values: dict[str, Any]) -> Any:
    """A transformers model in fp32 whose every parameter is random: norms and biases too."""
    values = dict(values)
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    torch.manual_seed(0)
    # Falcon's eager attention adds alibi twice, once of it through the mask; sdpa adds it once.
    attention = "sdpa" if values.get("alibi") else "eager"
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation=attention
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            else:
                scale = 1.0 if "embed" in name or "wte" in name else 1.5 / parameter.shape[-1] ** 0.5
                parameter.copy_(torch.randn_like(parameter) * scale)
    return model.eval()


def load(folder: Path) -> tuple[DecoderModel, dict[str, dict[str, Any]]]:
    model = build_model(config_from_hf(json.loads((folder / "config.json").read_text())))
    return model, build_weights(model, load_folder(folder))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in PROMPT_LENS]


def reference_logits(model: Any, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Logits of the prompt, logits of each decoding step, and the greedy tokens."""
    out = model(torch.tensor([ids]), use_cache=True)
    prefill, steps, tokens = out.logits[0], [], []
    for _ in range(DECODE_STEPS):
        tokens.append(int(out.logits[0, -1].argmax()))
        out = model(torch.tensor([[tokens[-1]]]), past_key_values=out.past_key_values, use_cache=True)
        steps.append(out.logits[0, -1])
    return prefill, torch.stack(steps), tokens


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    reference = make_reference(CASES[case])
    reference.save_pretrained(tmp_path)
    model, weights = load(tmp_path)
    expected = [reference_logits(reference, ids) for ids in prompts()]

    run = ReferenceRun(model, weights)
    prefill = run.step(dict(enumerate(prompts())))
    for number, (logits, _, _) in enumerate(expected):
        assert logits.std() > 0.3  # the comparison would mean little for flat logits
        torch.testing.assert_close(prefill[number], logits, atol=1e-4, rtol=0)
    for step in range(DECODE_STEPS):
        logits = run.step({number: [item[2][step]] for number, item in enumerate(expected)})
        for number, item in enumerate(expected):
            torch.testing.assert_close(logits[number][0], item[1][step], atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", ["llama", "gemma3", "gpt_neox", "opt-350m", "bloom", "mixtral"])
def test_chunks_of_a_prompt_equal_the_whole(case: str, tmp_path: Path) -> None:
    make_reference(CASES[case]).save_pretrained(tmp_path)
    model, weights = load(tmp_path)
    ids = prompts()[2]
    whole = ReferenceRun(model, weights).step({0: ids})[0]
    run = ReferenceRun(model, weights)
    chunks = [run.step({0: ids[begin : begin + 7]})[0] for begin in range(0, len(ids), 7)]
    torch.testing.assert_close(torch.cat(chunks), whole, atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", ["llama", "gemma3", "gpt_neox", "opt-350m", "bloom", "mixtral"])
def test_bfloat16_stays_near_float32(case: str, tmp_path: Path) -> None:
    make_reference(CASES[case]).save_pretrained(tmp_path)
    model, weights = load(tmp_path)
    rounded = build_weights(model, load_folder(tmp_path), torch.bfloat16)
    batch = dict(enumerate(prompts()))
    exact = ReferenceRun(model, weights).step(batch)
    coarse = ReferenceRun(model, rounded, torch.bfloat16).step(batch)
    for number in batch:
        error = (coarse[number] - exact[number]).norm() / exact[number].norm()
        assert error < 0.08


def test_embedding_scale_is_rounded_to_the_compute_type(tmp_path: Path) -> None:
    reference = make_reference(CASES["gemma2"])
    reference.save_pretrained(tmp_path)
    model, _ = load(tmp_path)
    weights = build_weights(model, load_folder(tmp_path), torch.bfloat16)
    run = ReferenceRun(model, weights, torch.bfloat16)
    run.token_ids, run.positions = torch.arange(3, 20), torch.arange(17)
    embedded = model.units[0].forward(weights["embed"], torch.empty(0), run)
    expected = reference.to(torch.bfloat16).model.embed_tokens(run.token_ids)
    assert torch.equal(embedded, expected)
    exact = reference.model.embed_tokens.weight[3:20].float() * 48**0.5
    assert not torch.equal(embedded, exact.to(torch.bfloat16))


def test_units_are_what_the_runtime_expects() -> None:
    for case in ("llama", "gpt_neox"):
        model = build_model(config_from_hf(CASES[case]))
        with_cache = [unit.name for unit in model.units if isinstance(unit, AttentionUnit)]
        suffix = ".attn" if case == "llama" else ""
        assert with_cache == [f"layers.{index}{suffix}" for index in range(2)]
        assert [unit.pinned for unit in model.units if unit.name in ("embed", "final")] == [True, True]
        assert sum(unit.name.startswith("head.") for unit in model.units) > 1


@pytest.mark.parametrize("case", ["llama-dynamic", "llama-longrope"])
def test_scaling_follows_each_sequence_not_the_batch(case: str, tmp_path: Path) -> None:
    make_reference(CASES[case]).save_pretrained(tmp_path)
    model, weights = load(tmp_path)
    short, long = prompts()[1], prompts()[2]
    alone = ReferenceRun(model, weights).step({0: short})[0]
    together = ReferenceRun(model, weights).step({0: short, 1: long})[0]
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)
