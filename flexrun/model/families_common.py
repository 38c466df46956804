"""What all families read from a config.json in the same way, and the fields that never matter."""

from __future__ import annotations

from typing import Any

from flexrun.model.fields import Fields
from flexrun.model.schema import LayerConfig, ModelConfig

# Names of activations in config.json -> ours. The tanh forms differ in nothing but rounding.
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "relu": "relu",
    "quick_gelu": "quick_gelu",
}

# Fields without influence on the logits of a given prompt: training, bookkeeping, defaults of generation,
# heads for other tasks. Sampling defaults and special tokens are read elsewhere.
_HARMLESS_NAMES = """
    model_type architectures auto_map transformers_version name_or_path torchscript use_bfloat16
    torch_dtype dtype use_cache cache_implementation attn_implementation quantization_config
    compression_config tokenizer_class prefix finetuning_task task_specific_params problem_type
    label2id id2label num_labels return_dict return_dict_in_generate output_attentions
    output_hidden_states output_scores output_past pruned_heads chunk_size_feed_forward
    initializer_range initializer_factor init_std init_device attention_dropout hidden_dropout
    attn_pdrop embd_pdrop resid_pdrop classifier_dropout dropout activation_dropout layerdrop
    dropout_rate embedding_dropout gradient_checkpointing pretraining_tp tp_parallel unsloth_version
    unsloth_fixed max_length min_length do_sample early_stopping num_beams num_beam_groups
    diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty
    no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences
    forced_bos_token_id forced_eos_token_id remove_invalid_values suppress_tokens begin_suppress_tokens
    exponential_decay_length_penalty sep_token_id decoder_start_token_id tf_legacy_loss is_decoder
    is_encoder_decoder output_router_logits router_aux_loss_coef router_jitter_noise
    summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout
    n_ctx n_special predict_special_tokens reorder_and_upcast_attn masked_softmax_fusion
    bias_dropout_fusion offset_alibi seq_length skip_bias_add skip_bias_add_qkv unk_token_id
    attention_softmax_in_fp32 scale_attention_softmax_in_fp32 slow_but_exact
    language special_tokens_map max_seq_len model_max_length
    pad_token eos_token bos_token is_llama_config transformers.js_config max_sequence_length
    attention_probs_dropout_prob hidden_dropout_prob
"""
HARMLESS = frozenset(_HARMLESS_NAMES.split())


def common(fields: Fields, family: str) -> dict[str, Any]:
    """Arguments of ModelConfig that all files hold, plus "n_layers", which the family takes out again."""
    eos = fields.raw("eos_token_id")
    eos_ids = [item for item in (eos if isinstance(eos, list) else [eos]) if item is not None]
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in eos_ids):
        raise fields.error("eos_token_id", "must be a token id or a list of them", eos)
    return {
        "family": family,
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": fields.integer("hidden_size", "n_embd", "n_embed"),
        "n_layers": fields.integer("num_hidden_layers", "n_layer"),
        "n_heads": fields.integer("num_attention_heads", "n_head"),
        # A negative id says "no such token" (old padding ids of -1).
        "eos_token_ids": tuple(item for item in eos_ids if item >= 0),
        "bos_token_id": _token(fields, "bos_token_id"),
        "pad_token_id": _token(fields, "pad_token_id"),
        "dtype": _dtype(fields),
        "tied": fields.flag("tie_word_embeddings", default=False),
    }


def _token(fields: Fields, name: str) -> int | None:
    value = fields.raw(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise fields.error(name, "must be a token id", value)
    return value if value is not None and value >= 0 else None


def _dtype(fields: Fields) -> str | None:
    value = fields.text("dtype", "torch_dtype", default=None)
    return None if value is None else value.removeprefix("torch.")


def activation(fields: Fields, *names: str, default: str) -> str:
    """Our name of the activation."""
    name = fields.text(*names, default=default)
    if name not in _ACTIVATIONS:
        raise fields.error(names[0], f"must be one of {', '.join(_ACTIVATIONS)}", name)
    return _ACTIVATIONS[name]


def sliding_window(fields: Fields, default: int) -> int:
    """The window; null and 0 switch it off, a file without the field means the default."""
    if not fields.mentions("sliding_window"):
        return default
    return fields.integer("sliding_window", default=0, minimum=0)


def layer_windows(fields: Fields, n_layers: int, window: int, default: list[str]) -> list[int]:
    """One window per layer, from `layer_types` or, where the file has none, the default types."""
    types = fields.raw("layer_types", default=default)
    known = {"full_attention": 0, "sliding_attention": window}
    if not isinstance(types, list) or len(types) < n_layers or not all(kind in known for kind in types):
        raise fields.error(
            "layer_types", f"must list full_attention or sliding_attention for {n_layers} layers", types
        )
    return [known[kind] for kind in types[:n_layers]]


def finish(
    fields: Fields, shared: dict[str, Any], layers: tuple[LayerConfig, ...], ignored: tuple[str, ...]
) -> ModelConfig:
    """Refuse what was not understood, then make the ModelConfig."""
    fields.refuse_unknown(HARMLESS, shared["family"])
    names = shared["names"]
    if ignored:
        import dataclasses

        names = dataclasses.replace(names, ignored=(*names.ignored, *ignored))
    return ModelConfig(**{**shared, "names": names, "layers": layers})
