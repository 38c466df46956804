"""Parameters, bytes and FLOPs counted from configurations, against published and hand-made figures."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
from test_presets import PUBLISHED_PARAMETERS

from flexrun import presets
from flexrun.model.config import ModelConfig, config_from_hf
from flexrun.model.footprint import (
    attention_flops,
    count_parameters,
    kv_elements_per_token,
    linear_flops_per_token,
    model_footprint,
)
from flexrun.model.specs import UnitSpec, unit_specs
from offload.units import TensorSpec
from quant.formats import parse_format

LLAMA_2_7B = {
    "model_type": "llama",
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
    "torch_dtype": "float16",
}
OPT_30B = {
    "model_type": "opt",
    "vocab_size": 50_272,
    "hidden_size": 7168,
    "ffn_dim": 28_672,
    "num_hidden_layers": 48,
    "num_attention_heads": 56,
    "word_embed_proj_dim": 7168,
    "max_position_embeddings": 2048,
    "torch_dtype": "float16",
}
MIXTRAL = {
    "model_type": "mixtral",
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32_768,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("values", "n_parameters"),
    [(LLAMA_2_7B, 6_738_415_616), (OPT_30B, 29_974_540_288), (MIXTRAL, 46_702_792_704)],
)
def test_parameters_of_published_models(values: dict[str, object], n_parameters: int) -> None:
    assert count_parameters(config_from_hf(values)) == n_parameters


@pytest.mark.parametrize("name", sorted(PUBLISHED_PARAMETERS))
def test_every_preset_has_its_published_parameters(name: str) -> None:
    assert count_parameters(config_from_hf(presets.load(name))) == PUBLISHED_PARAMETERS[name]


def test_figures_of_llama_2_7b() -> None:
    config = config_from_hf(LLAMA_2_7B)
    assert kv_elements_per_token(config) == 2 * 32 * 4096
    layers = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11_008)
    assert linear_flops_per_token(config) == 2 * layers
    assert linear_flops_per_token(config, head=True) == 2 * (layers + 32_000 * 4096)
    assert attention_flops(config, 100) == 4 * 32 * 4096 * 100


def test_windows_bound_attention_flops() -> None:
    values = {**LLAMA_2_7B, "model_type": "mistral", "num_key_value_heads": 8, "sliding_window": 64}
    config = config_from_hf(values)
    assert attention_flops(config, 1000) == attention_flops(config, 64) == 4 * 32 * 4096 * 64


def test_only_the_experts_of_a_token_are_computed() -> None:
    config = config_from_hf(MIXTRAL)
    attention = 4096 * (4096 + 2 * 1024) + 4096 * 4096
    mlp = 8 * 4096 + 2 * 3 * 4096 * 14_336
    assert linear_flops_per_token(config) == 2 * 32 * (attention + mlp)


def test_footprint_bytes_are_those_of_the_weight_store() -> None:
    config = config_from_hf(LLAMA_2_7B)
    footprint = model_footprint(config, name="llama-2-7b", weight_formats=("int4-g64",))
    assert footprint.native_format == "f16"
    by_name = {unit.name: unit for unit in footprint.units}
    attn = by_name["layers.3.attn"]
    shapes = [(3 * 4096, 4096), (4096, 4096)]
    assert attn.linear_shapes == tuple(shapes)
    assert attn.vector_bytes == 2 * 4096
    expected = sum(parse_format("int4-g64").nbytes(shape) for shape in shapes) + 2 * 4096
    assert 0 <= attn.nbytes["int4-g64"] - expected < 4096
    assert attn.nbytes["int4-g64"] % 4096 == 0
    assert attn.nbytes["f16"] == 2 * 4 * 4096 * 4096 + 2 * 4096
    assert by_name["embed"].table_nbytes["int4-g64"] == 2 * 32_000 * 4096
    assert footprint.weight_nbytes("f16") > 3 * footprint.weight_nbytes("int4-g64")


def test_a_tied_embedding_is_weighed_once() -> None:
    tied = config_from_hf({**LLAMA_2_7B, "tie_word_embeddings": True})
    embed = model_footprint(tied, name="tied").units[0]
    assert embed.table_nbytes["f16"] == 0
    assert count_parameters(tied) == count_parameters(config_from_hf(LLAMA_2_7B)) - 32_000 * 4096


def test_head_slices_cover_the_vocabulary_and_none_exceeds_the_largest_layer_unit() -> None:
    for name in ("gemma-2-2b", "opt-125m", "qwen2.5-0.5b", "bloom-560m"):
        config: ModelConfig = config_from_hf(presets.load(name))
        units = unit_specs(config)
        largest = max(unit.n_elements for unit in units if unit.layer >= 0)
        heads = [unit for unit in units if unit.kind == "head"]
        assert len(heads) > 1
        assert all(unit.n_elements <= largest for unit in heads)
        rows = [(unit.head_start, unit.head_start + unit.tensors[0].shape[0]) for unit in heads]
        assert rows[0][0] == 0 and rows[-1][1] == config.vocab_size
        assert all(first[1] == second[0] for first, second in itertools.pairwise(rows))
        assert [unit.tensors[0].parts[0].rows for unit in heads] == [(row,) for row in rows]


def test_counting_needs_no_torch() -> None:
    code = (
        "import sys; import flexrun.model.footprint, flexrun.model.config, flexrun.model.mapping;"
        "sys.exit('torch' in sys.modules or 'numba' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_rows_in_several_formats_are_counted_each_by_itself() -> None:
    config = config_from_hf(LLAMA_2_7B)

    def format_of(unit: UnitSpec, spec: TensorSpec, asked: str) -> str | list[tuple[int, str]]:
        if spec.name == "qkv":
            return [(8192, "q4_k"), (4096, "q6_k")]
        return "f32" if spec.kind == "vector" else "q4_k"

    unit = model_footprint(config, name="mixed", native="mixed", format_of=format_of).units[1]
    rows, width = 4096, 4096 // 256
    expected = 4 * 4096 + (2 * rows * 144 + rows * 210 + rows * 144) * width
    assert unit.nbytes == {"mixed": -(-expected // 4096) * 4096}
    assert unit.linear_shapes == ((12_288, 4096), (4096, 4096))
    with pytest.raises(ValueError, match=r"layers\.0\.attn: qkv has 12288 rows"):
        model_footprint(
            config,
            name="short",
            format_of=lambda unit, spec, asked: [(5, "f32")] if spec.name == "qkv" else "f32",
        )
