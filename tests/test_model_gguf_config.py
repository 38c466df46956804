"""GGUF metadata and tensor layouts: the same logits as from the Hugging Face form of the same weights.

Tensors are converted here as GGUF files have them: names from gguf-py's own table, rotary rows of llama
interleaved, fused projections stacked, 1 added to the norms of Gemma, experts in one tensor.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from model_helpers import ReferenceRun, build_weights, load_folder
from test_model_parity import CASES, load, make_reference, prompts

from flexrun.model.assemble import build_model
from flexrun.model.config import ModelConfig, ModelConfigError, config_from_gguf
from flexrun.model.mapping import match_tensors
from flexrun.model.rope import inverse_frequencies
from flexrun.model.schema import RopeConfig

Tensors = dict[str, torch.Tensor]

# case of test_model_parity -> GGUF architecture
ARCHITECTURES = {
    "llama": "llama",
    "llama-tied-biases": "llama",
    "llama-odd-head-dim": "llama",
    "llama-linear": "llama",
    "llama-llama3": "llama",
    "llama-yarn": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "phi3": "phi3",
    "phi3-longrope": "phi3",
    "gpt2": "gpt2",
    "gpt_neox": "gptneox",
    "gpt_neox-serial": "gptneox",
    "falcon-7b": "falcon",
    "falcon-40b": "falcon",
    "bloom": "bloom",
    "mixtral": "llama",
    "qwen3_moe-raw-weights": "qwen3moe",
}


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)


def interleave(rows: torch.Tensor, n_heads: int) -> torch.Tensor:
    """(n, 2, half) -> (n, half, 2), as the converter of llama models has it."""
    half = rows.shape[0] // n_heads // 2
    return rows.reshape(n_heads, 2, half, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def stack_qkv(fused: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Per-group q, k, v rows -> all q, all k, all v."""
    group = config.n_heads // config.n_kv_heads
    parts = fused.reshape(config.n_kv_heads, group + 2, config.head_dim, *fused.shape[1:])
    pieces = (parts[:, :group], parts[:, group], parts[:, group + 1])
    return torch.cat([piece.reshape(-1, *fused.shape[1:]) for piece in pieces])


def to_gguf_tensors(arch: str, tensors: Tensors, config: ModelConfig) -> Tensors:
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, config.n_layers)
    out: Tensors = {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        found = re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", name)
        if found:
            experts.setdefault(f"{found[1]}.{found[3]}", {})[int(found[2])] = tensor
            continue
        if arch == "llama" and re.search(r"self_attn\.q_proj", name):
            tensor = interleave(tensor, config.n_heads)
        elif arch == "llama" and re.search(r"self_attn\.k_proj", name):
            tensor = interleave(tensor, config.n_kv_heads)
        elif "query_key_value" in name and config.names.qkv_layout == "per_group":
            tensor = stack_qkv(tensor, config)
        elif arch == "gpt2" and tensor.ndim == 2 and ".h." in name:
            tensor = tensor.T
        elif arch in ("gemma2", "gemma3") and name.endswith("norm.weight"):
            tensor = tensor + 1
        if arch == "bloom":  # the published files carry no prefix
            name = name.removeprefix("transformer.")
        out[names.get_name(name, try_suffixes=(".weight", ".bias")) or name] = tensor
    for name, by_number in experts.items():
        stacked = torch.stack([by_number[i] for i in range(len(by_number))])
        out[names.get_name(name, try_suffixes=(".weight",)) or name] = stacked
    return out


def to_gguf_metadata(arch: str, config: ModelConfig) -> dict[str, Any]:
    layer = config.layers[0]
    eps = "layer_norm_rms_epsilon" if config.norm.kind == "rms" else "layer_norm_epsilon"
    values: dict[str, Any] = {
        "block_count": config.n_layers,
        "context_length": config.max_positions,
        "embedding_length": config.hidden_size,
        "attention.head_count": config.n_heads,
        "attention.head_count_kv": config.n_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        f"attention.{eps}": config.norm.eps,
        "feed_forward_length": layer.ffn_size or (layer.moe.ffn_size if layer.moe else 0),
        "attention.sliding_window": max(item.window for item in config.layers),
        "vocab_size": config.vocab_size,
    }
    if layer.moe is not None:
        values |= {"expert_count": layer.moe.n_experts, "expert_used_count": layer.moe.n_experts_per_token}
        values["expert_feed_forward_length"] = layer.moe.ffn_size
    rope = config.layers[-1 if arch != "gemma3" else 1].rope
    if rope is not None:
        values |= {"rope.freq_base": rope.base, "rope.dimension_count": rope.dim}
        if rope.kind in ("linear", "yarn", "longrope"):
            values |= {"rope.scaling.type": rope.kind, "rope.scaling.factor": rope.factor}
            values["rope.scaling.original_context_length"] = rope.original_max_positions
        if rope.kind == "longrope":
            values["rope.scaling.attn_factor"] = rope.attention_factor
    if arch.startswith("gemma"):
        values |= {"attention.scale": layer.scale}
        values["attention.sliding_window_pattern"] = 2
    if config.attn_softcap:
        values["attn_logit_softcapping"] = config.attn_softcap
        values["final_logit_softcapping"] = config.logit_softcap
    if arch == "gptneox":
        values["use_parallel_residual"] = config.residual == "parallel"
    tokens = {"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.bos_token_id": 1}
    return {"general.architecture": arch, **{f"{arch}.{key}": v for key, v in values.items()}, **tokens}


def rope_tensors(config: ModelConfig) -> Tensors:
    rope = config.layers[0].rope
    if rope is not None and rope.kind == "llama3":
        plain = inverse_frequencies(RopeConfig(dim=rope.dim, base=rope.base))
        return {"rope_freqs.weight": plain / inverse_frequencies(rope)}
    if rope is not None and rope.kind == "longrope":
        return {
            "rope_factors_short.weight": torch.tensor(rope.short_factors),
            "rope_factors_long.weight": torch.tensor(rope.long_factors),
        }
    return {}


@pytest.mark.parametrize("case", ARCHITECTURES)
def test_logits_equal_those_of_the_hugging_face_form(case: str, tmp_path: Path) -> None:
    make_reference(CASES[case]).save_pretrained(tmp_path)
    model, weights = load(tmp_path)
    arch = ARCHITECTURES[case]
    if case.startswith("qwen3_moe"):  # GGUF files of this architecture always renormalise
        model, weights = renormalized(model.config, tmp_path)
    tensors = to_gguf_tensors(arch, load_folder(tmp_path), model.config) | rope_tensors(model.config)
    metadata = to_gguf_metadata(arch, model.config)
    config = config_from_gguf(metadata, tensors, lambda name: tensors[name].tolist())
    assert config.source == "gguf" and config.eos_token_ids == (2,)
    assert config.family == model.config.family
    converted = build_model(config)
    batch = dict(enumerate(prompts()))
    expected = ReferenceRun(model, weights).step(batch)
    logits = ReferenceRun(converted, build_weights(converted, tensors)).step(batch)
    for number in batch:
        torch.testing.assert_close(logits[number], expected[number], atol=1e-4, rtol=0)


def renormalized(config: ModelConfig, folder: Path) -> Any:
    import dataclasses

    layers = tuple(
        dataclasses.replace(layer, moe=dataclasses.replace(layer.moe, normalize_weights=True))
        for layer in config.layers
        if layer.moe is not None
    )
    model = build_model(dataclasses.replace(config, layers=layers))
    return model, build_weights(model, load_folder(folder))


METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 24,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.eot_token_id": 7,
}
SHAPES = {
    "token_embd.weight": (40, 32),
    "output_norm.weight": (32,),
    "blk.0.attn_norm.weight": (32,),
    "blk.0.attn_q.weight": (32, 32),
    "blk.0.attn_k.weight": (16, 32),
    "blk.0.attn_v.weight": (16, 32),
    "blk.0.attn_output.weight": (32, 32),
    "blk.0.ffn_norm.weight": (32,),
    "blk.0.ffn_gate.weight": (24, 32),
    "blk.0.ffn_up.weight": (24, 32),
    "blk.0.ffn_down.weight": (32, 24),
}


def test_sizes_come_from_metadata_and_tensors() -> None:
    config = config_from_gguf(METADATA, SHAPES)
    assert (config.vocab_size, config.head_dim, config.tied) == (40, 8, True)
    assert config.eos_token_ids == (2, 7)
    assert not config_from_gguf(METADATA, {**SHAPES, "output.weight": (40, 32)}).tied
    found = match_tensors(config, build_model(config).units, SHAPES)
    assert set(found.values()) == set(SHAPES)


def test_values_per_layer_must_agree() -> None:
    same = {**METADATA, "llama.attention.head_count_kv": [2]}
    assert config_from_gguf(same, SHAPES).n_kv_heads == 2
    with pytest.raises(ModelConfigError, match="the same for all layers"):
        config_from_gguf({**METADATA, "llama.attention.head_count_kv": [2, 4]}, SHAPES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "mamba"}, "'mamba' is not supported; supported are bloom"),
        ({"llama.block_count": None}, "block_count is missing"),
        ({"llama.embedding_length": 0}, "embedding_length"),
        ({"llama.attention.clamp_kqv": 8.0}, "clamp_kqv"),
        ({"llama.attention.value_length": 4}, "value_length must equal key_length"),
        ({"llama.rope.scaling.type": "spiral"}, "spiral"),
        ({"llama.residual_scale": 0.22}, "residual_scale"),
    ],
)
def test_bad_metadata_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        config_from_gguf({**METADATA, **changes}, SHAPES)


def test_missing_embedding_and_unread_rope_factors() -> None:
    without = {name: shape for name, shape in SHAPES.items() if name != "token_embd.weight"}
    with pytest.raises(ModelConfigError, match="token_embd"):
        config_from_gguf(METADATA, without)
    with pytest.raises(ModelConfigError, match="values of rope_freqs"):
        config_from_gguf(METADATA, {**SHAPES, "rope_freqs.weight": (4,)})


def test_gemma_27b_scales_queries_by_hidden_size() -> None:
    metadata = {key.replace("llama", "gemma2"): value for key, value in METADATA.items()}
    metadata |= {"general.architecture": "gemma2", "gemma2.attention.key_length": 16}
    assert config_from_gguf(metadata, SHAPES).layers[0].scale == pytest.approx(16**-0.5)
    config = config_from_gguf({**metadata, "gemma2.block_count": 46}, SHAPES)
    assert config.layers[0].scale == pytest.approx(8**-0.5)
    assert (config.attn_softcap, config.logit_softcap) == (50.0, 30.0)
    assert [layer.window for layer in config.layers[:3]] == [4096, 0, 4096]
