"""Presets describe the published models: their configurations build models of the published sizes."""

from __future__ import annotations

import pytest

from flexrun import presets

# Parameters of the published checkpoints, tied tensors counted once.
PUBLISHED_PARAMETERS = {
    "opt-125m": 125_239_296,
    "opt-350m": 331_196_416,
    "opt-1.3b": 1_315_758_080,
    "opt-2.7b": 2_651_596_800,
    "opt-6.7b": 6_658_473_984,
    "opt-13b": 12_853_473_280,
    "opt-30b": 29_974_540_288,
    "opt-66b": 65_719_701_504,
    "opt-175b": 174_604_468_224,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "tinyllama-1.1b": 1_100_048_384,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "phi-3-mini": 3_821_079_552,
    "falcon-7b": 6_921_720_704,
    "falcon-40b": 41_303_293_952,
    "bloom-560m": 559_214_592,
    "bloom-7b1": 7_069_016_064,
    "bloom-176b": 176_247_271_424,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
}


def test_every_preset_is_listed_with_its_published_size() -> None:
    assert set(presets.names()) == set(PUBLISHED_PARAMETERS)


def test_sizes_equal_the_published_ones() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    wrong = {}
    for name, published in PUBLISHED_PARAMETERS.items():
        config = presets.load(name)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(
                transformers.AutoConfig.for_model(config.pop("model_type"), **config)
            )
        counted = sum(parameter.numel() for parameter in model.parameters())
        if counted != published:
            wrong[name] = (counted, published)
    assert wrong == {}


@pytest.mark.parametrize("name", presets.names())
def test_fields_that_every_preset_states(name: str) -> None:
    config = presets.load(name)
    assert config["dtype"] in {"float32", "float16", "bfloat16"}
    assert config["model_type"] and config["architectures"]
    assert isinstance(config["tie_word_embeddings"], bool)
    assert config["vocab_size"] > config["eos_token_id"] >= 0
    assert not {"source", "_name_or_path", "transformers_version"} & set(config)


def test_load_gives_a_copy_that_may_be_changed() -> None:
    presets.load("llama-3.1-8b")["rope_scaling"]["factor"] = 99.0
    assert presets.load("llama-3.1-8b")["rope_scaling"]["factor"] == 8.0


def test_own_fields_override_the_familys_defaults() -> None:
    assert presets.load("opt-350m")["do_layer_norm_before"] is False
    assert presets.load("opt-125m")["do_layer_norm_before"] is True


def test_unknown_name_gives_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown preset 'opt-30'; nearest: opt-30b"):
        presets.load("opt-30")
    with pytest.raises(ValueError, match=r"known: .*opt-175b"):
        presets.load("zzzzzzzz")
