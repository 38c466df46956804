"""Rotary position settings of a config.json, in every spelling that is found in the wild. Needs no torch.

Old files: `rope_theta` + `rope_scaling` {type or rope_type, factor, ...}; GPT-NeoX `rotary_emb_base` and
`rotary_pct`. New files: one `rope_parameters` dictionary, or one per layer type.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from flexrun.model.fields import Fields
from flexrun.model.schema import ModelConfigError, RopeConfig

LAYER_TYPES = ("full_attention", "sliding_attention")
_ALIASES = {"su": "longrope"}


def rope_from_hf(
    fields: Fields,
    head_dim: int,
    max_positions: int,
    *,
    base: float = 10_000.0,
    partial: float = 1.0,
    original_max_positions: int | None = None,
    yarn_is_longrope: bool = False,
) -> RopeConfig:
    """The one rope setting of a model.

    base, partial, original_max_positions: the family's defaults. `partial` is the share of each head that
    is rotated; families that always rotate whole heads pass 1.0 and files that say otherwise are refused.
    """
    params = rope_parameters(fields)
    if any(isinstance(params.get(kind), Mapping) for kind in LAYER_TYPES):
        raise ModelConfigError(
            "config.json: rope_parameters differ by layer type, which this family does not use"
        )
    return parse_rope(
        params,
        head_dim,
        max_positions,
        base=fields.number("rope_theta", "rotary_emb_base", default=base),
        partial=fields.number("partial_rotary_factor", "rotary_pct", default=partial),
        original_max_positions=fields.integer(
            "original_max_position_embeddings", default=original_max_positions
        ),
        partial_allowed=partial != 1.0 or yarn_is_longrope,
        yarn_is_longrope=yarn_is_longrope,
    )


def rope_parameters(fields: Fields) -> dict[str, Any]:
    """The dictionary of rope settings, {} if there is none."""
    values = fields.raw("rope_parameters", "rope_scaling", default={})
    if not isinstance(values, Mapping):
        raise fields.error("rope_scaling", "must be an object", values)
    return dict(values)


def parse_rope(
    values: Mapping[str, Any],
    head_dim: int,
    max_positions: int,
    *,
    base: float,
    partial: float = 1.0,
    original_max_positions: int | None = None,
    partial_allowed: bool = False,
    yarn_is_longrope: bool = False,
) -> RopeConfig:
    """One dictionary of rope settings. Formulas of defaults as in the YaRN and LongRoPE papers."""
    rope = Fields(values, where="config.json, rope settings")
    kind = rope.text("rope_type", "type", default="default")
    kind = _ALIASES.get(kind, kind)
    if kind == "yarn" and yarn_is_longrope:
        kind = "longrope"
    share = rope.number("partial_rotary_factor", default=partial)
    if share != 1.0 and not partial_allowed:
        raise ModelConfigError(f"config.json: partial_rotary_factor {share} is not supported for this family")
    dim = int(head_dim * share)
    settings: dict[str, Any] = {
        "kind": kind,
        "dim": dim,
        "base": rope.number("rope_theta", default=base),
    }
    inner = rope.integer("original_max_position_embeddings", default=None)
    original = original_max_positions or inner or max_positions
    if kind == "default":
        rope.raw("factor")
    elif kind == "linear":
        settings["factor"] = rope.number("factor")
    elif kind == "dynamic":
        # The reference implementation scales from max_position_embeddings, whatever the original length.
        settings |= {"factor": rope.number("factor"), "original_max_positions": max_positions}
    elif kind == "llama3":
        settings |= {
            "factor": rope.number("factor"),
            "low_freq_factor": rope.number("low_freq_factor"),
            "high_freq_factor": rope.number("high_freq_factor"),
            "original_max_positions": original,
        }
    elif kind == "yarn":
        settings |= _yarn(rope, max_positions, original)
    elif kind == "longrope":
        settings |= _longrope(rope, max_positions, original)
    else:
        raise ModelConfigError(
            f"config.json: rope type {kind!r} is not supported; supported are default, linear, dynamic, "
            "llama3, yarn and longrope"
        )
    rope.refuse_unknown(("finetuned",), f"rope type {kind}")
    return RopeConfig(**settings)


def _yarn(rope: Fields, max_positions: int, original: int) -> dict[str, Any]:
    factor = rope.number("factor", default=None)
    if factor is None:
        factor = max_positions / original
    mscale = rope.number("mscale", default=0.0)
    mscale_all_dim = rope.number("mscale_all_dim", default=0.0)
    if mscale and mscale_all_dim:
        inferred = yarn_attention_factor(factor, mscale) / yarn_attention_factor(factor, mscale_all_dim)
    else:
        inferred = yarn_attention_factor(factor)
    return {
        "factor": factor,
        "original_max_positions": original,
        "attention_factor": rope.number("attention_factor", default=inferred),
        "beta_fast": rope.number("beta_fast", default=32.0) or 32.0,
        "beta_slow": rope.number("beta_slow", default=1.0) or 1.0,
        "truncate": rope.flag("truncate", default=True),
    }


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """What cos and sin are multiplied with when the context grows by `factor` (YaRN, equation 22)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(rope: Fields, max_positions: int, original: int) -> dict[str, Any]:
    factor = rope.number("factor", default=None)
    if factor is None:
        factor = max_positions / original
    return {
        "factor": factor,
        "original_max_positions": original,
        "attention_factor": rope.number(
            "attention_factor", default=longrope_attention_factor(factor, original)
        ),
        "short_factors": rope.numbers("short_factor"),
        "long_factors": rope.numbers("long_factor"),
    }


def longrope_attention_factor(factor: float, original_max_positions: int) -> float:
    """What cos and sin are multiplied with when the context grows by `factor` (LongRoPE, section 3)."""
    if factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(original_max_positions))
