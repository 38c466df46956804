"""What a user asks for and gets back: sampling options, requests' outputs, log-probabilities.

Field names, defaults and meanings are those of vLLM's offline API, so that programs written for it run
unchanged. The module imports neither torch nor a tokenizer: reading and checking a batch file needs neither.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_LOGPROBS = 100
"""Most alternatives kept per position; it bounds the memory of one result."""

FINISH_STOP = "stop"
FINISH_LENGTH = "length"


def _integer(name: str, value: Any, low: int | None = None, high: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    number = int(value)
    if low is not None and number < low:
        raise ValueError(f"{name} must be at least {low}, got {number}")
    if high is not None and number > high:
        raise ValueError(f"{name} must be at most {high}, got {number}")
    return number


def _real(name: str, value: Any, low: float, high: float, *, above_low: bool = False) -> float:
    """A finite float in [low, high], or in (low, high] with ``above_low``."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name} must be a number, got {value!r}")
    try:
        number = float(value)
    except OverflowError:  # an integer too large for a float
        number = math.inf
    inside = math.isfinite(number) and (low < number if above_low else low <= number) and number <= high
    if not inside:
        left = "(" if above_low or math.isinf(low) else "["
        right = ")" if math.isinf(high) else "]"
        raise ValueError(f"{name} must be a finite number in {left}{low:g}, {high:g}{right}, got {value!r}")
    return number


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}")
    return value


def _stop_strings(value: str | Iterable[str] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, Iterable) or isinstance(strings, bytes | Mapping):
        raise ValueError(f"stop must be a string or a list of strings, got {value!r}")
    result = tuple(strings)
    for text in result:
        if not isinstance(text, str):
            raise ValueError(f"stop must hold strings only, got {text!r}; token ids go into stop_token_ids")
        if not text:
            raise ValueError("stop must not hold an empty string: it would stop every answer at once")
    return tuple(dict.fromkeys(result))


def _token_ids(name: str, value: Iterable[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise ValueError(f"{name} must be a list of token ids, got {value!r}")
    return tuple(dict.fromkeys(_integer(f"{name}[{i}]", token, low=0) for i, token in enumerate(value)))


def _logit_bias(value: Mapping[Any, Any] | None) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ValueError(f"logit_bias must map token ids to numbers, got {value!r}")
    result: dict[int, float] = {}
    for key, bias in value.items():
        if isinstance(key, str):  # JSON objects have string keys only
            if not (key.isascii() and key.isdigit()):
                raise ValueError(f"logit_bias keys must be token ids, got {key!r}")
            key = int(key)
        token = _integer("a logit_bias key", key, low=0)
        result[token] = _real(f"logit_bias[{token}]", bias, -100.0, 100.0)
    return result or None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends (vLLM's names and defaults).

    Attributes:
        n: completions per prompt.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_p: keep the smallest set of tokens whose probability reaches this, in (0, 1].
        top_k: keep the k likeliest tokens; 0 or -1 keeps all (stored as 0).
        min_p: drop tokens less likely than min_p times the likeliest, in [0, 1].
        typical_p: locally typical sampling (Meister et al. 2022), in (0, 1]; 1 is off.
        presence_penalty: subtracted once from each token generated so far, in [-2, 2].
        frequency_penalty: subtracted per occurrence in the generated tokens, in [-2, 2].
        repetition_penalty: CTRL's penalty on tokens of prompt and answer, > 0; 1 is off.
        seed: makes this request reproducible whatever runs beside it; None (or -1) draws from entropy.
        stop: strings that end the answer, cut off before them; given as one string or several.
        stop_token_ids: tokens that end the answer, besides the model's own end tokens.
        ignore_eos: go on after the model's end token.
        max_tokens: most tokens to generate; None means up to the model's limit.
        min_tokens: no end token, stop token or stop string counts before this many tokens.
        logprobs: None for no log-probabilities, else how many alternatives per generated token (0: only the
            token itself).
        prompt_logprobs: the same for the prompt's tokens.
        logit_bias: added to the logits of these token ids, in [-100, 100].
        include_stop_str_in_output: keep the stop string at the end of the text.
        skip_special_tokens: leave special tokens out of the text.

    Raises:
        ValueError: names the option, what was found and the limit.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        infinite = math.inf
        checked: dict[str, Any] = {
            "n": _integer("n", self.n, low=1, high=1024),
            "temperature": _real("temperature", self.temperature, 0.0, infinite),
            "top_p": _real("top_p", self.top_p, 0.0, 1.0, above_low=True),
            "top_k": max(_integer("top_k", self.top_k, low=-1), 0),
            "min_p": _real("min_p", self.min_p, 0.0, 1.0),
            "typical_p": _real("typical_p", self.typical_p, 0.0, 1.0, above_low=True),
            "presence_penalty": _real("presence_penalty", self.presence_penalty, -2.0, 2.0),
            "frequency_penalty": _real("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
            "repetition_penalty": _real(
                "repetition_penalty", self.repetition_penalty, 0.0, infinite, above_low=True
            ),
            "stop": _stop_strings(self.stop),
            "stop_token_ids": _token_ids("stop_token_ids", self.stop_token_ids),
            "ignore_eos": _flag("ignore_eos", self.ignore_eos),
            "min_tokens": _integer("min_tokens", self.min_tokens, low=0),
            "logit_bias": _logit_bias(self.logit_bias),
            "include_stop_str_in_output": _flag(
                "include_stop_str_in_output", self.include_stop_str_in_output
            ),
            "skip_special_tokens": _flag("skip_special_tokens", self.skip_special_tokens),
        }
        if self.seed is not None:
            seed = _integer("seed", self.seed, low=-(2**63), high=2**64 - 1)
            checked["seed"] = None if seed == -1 else seed
        if self.max_tokens is not None:
            checked["max_tokens"] = _integer("max_tokens", self.max_tokens, low=1)
            if checked["min_tokens"] > checked["max_tokens"]:
                raise ValueError(
                    f"min_tokens must be at most max_tokens ({checked['max_tokens']}),"
                    f" got {checked['min_tokens']}"
                )
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                checked[name] = _integer(name, value, low=0, high=MAX_LOGPROBS)
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        """True if the likeliest token is taken, without any draw."""
        return self.temperature == 0.0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` in its checked form."""
        return _stop_strings(self.stop)

    @property
    def uses_penalties(self) -> bool:
        """True if the sampler must know which tokens came before."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        """Names that :meth:`from_dict` takes, in order."""
        return tuple(f.name for f in dataclasses.fields(cls))

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> SamplingParams:
        """Build from a JSON object; null means "not given".

        Raises:
            ValueError: an unknown option (the nearest valid names are given) or an invalid value.
        """
        names = cls.option_names()
        unknown = [name for name in options if name not in names]
        if unknown:
            raise ValueError(unknown_option(unknown[0], names))
        return cls(**{name: value for name, value in options.items() if value is not None})

    def to_dict(self) -> dict[str, Any]:
        """Options as JSON-ready values; ``from_dict`` of it equals self (max_tokens None aside)."""
        result: dict[str, Any] = {}
        for name in self.option_names():
            value = getattr(self, name)
            if isinstance(value, tuple):
                value = list(value)
            elif isinstance(value, Mapping):
                value = {str(token): bias for token, bias in sorted(value.items())}
            result[name] = value
        return result


def unknown_option(name: str, valid: Sequence[str], what: str = "sampling option") -> str:
    """The sentence that refuses an option, with the nearest valid names."""
    near = difflib.get_close_matches(str(name), valid, n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(near)}?" if near else f"valid ones are {', '.join(valid)}"
    return f"unknown {what} {name!r}: {hint}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """Natural log-probability of one token, from the model's raw logits.

    ``rank`` is 1 for the likeliest token of the vocabulary.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One answer. ``logprobs`` has one dict (token id -> Logprob) per generated token, if asked for.

    ``finish_reason`` is "stop" or "length" (None while running); ``stop_reason`` is the stop string or the
    stop token id that ended the answer, None for the model's own end token or for "length".
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """A prompt and its answers. ``prompt`` is None if the request gave token ids.

    ``prompt_logprobs`` has one entry per prompt token, the first being None (nothing precedes it).
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    outputs: list[CompletionOutput]
    finished: bool = True


class RequestError(ValueError):
    """A request that can never run, whatever else happens. The message says what to change."""


class NumericsError(RuntimeError):
    """The model gave NaN or infinity for some requests. They are dropped; the others go on with the next step.

    request_ids: the requests concerned.
    """

    def __init__(self, message: str, request_ids: Sequence[str]) -> None:
        super().__init__(message)
        self.request_ids = tuple(request_ids)
