"""A tokenizer from GGUF metadata.

A GGUF file holds no tokenizer.json but the vocabulary, its scores or merges, and a word that names how text
is split (`tokenizer.ggml.pre`). Two kinds cover the supported families:

- "gpt2": byte-level BPE; the file lists the merges, the split is looked up by name;
- "llama": sentencepiece BPE; merges are recovered from the vocabulary: a token can be made from every pair
  of tokens that concatenate to it, and better-scored tokens are made first.

Recovering merges can take seconds for a large vocabulary, so that result is kept as a tokenizer.json in the
user's cache folder under a hash of what it was built from.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flexrun.tokenizer import SPACE_MARK, Tokenizer, TokenizerError, byte_alphabet, load_tokenizer

logger = logging.getLogger(__name__)

_CACHE_VERSION = "1"  # part of the cache key: raise it when the same metadata gives another tokenizer

# Token types of the GGUF specification.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _letters_split(digits: str, letters: str = r"\p{L}", not_symbol: str = r"\s\p{L}\p{N}") -> str:
    """The family of splits that began with cl100k: contractions, words, digits, symbols, white space."""
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[{letters}]+|{digits}| ?[^{not_symbol}]+[\r\n]*|{_TAIL}"


def _cased_split(digits: str, suffix: str) -> str:
    """The family that began with o200k: words also split where lower case turns to upper."""
    head = r"[^\r\n\p{L}\p{N}]?"
    words = f"{head}{_UPPER}*{_LOWER}+{suffix}|{head}{_UPPER}+{_LOWER}*{suffix}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"


_LLAMA3 = _letters_split(r"\p{N}{1,3}")
_QWEN2 = _letters_split(r"\p{N}")
_QWEN35 = _letters_split(r"\p{N}", r"\p{L}\p{M}", r"\s\p{L}\p{M}\p{N}")
_TEKKEN = _cased_split(r"\p{N}", "")
_GPT4O = _cased_split(r"\p{N}{1,3}", f"{_CONTRACTIONS}?")
_BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_TAIL}",
)

_REGEX_SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2", "dbrx", "smaug-bpe"),
        (_LLAMA3,),
    ),
    **dict.fromkeys(("glm4", "chatglm-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "hunyuan", "stablelm2"), (_QWEN2,)),
    "qwen35": (_QWEN35,),
    "tekken": (_TEKKEN,),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), (_GPT4O,)),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), (_BLOOM,)),
    "deepseek-v3": _DEEPSEEK3,
}
_GPT2_SPLITS = frozenset({"gpt-2", "gpt2", "phi-2", "mpt", "olmo", "jais", "exaone4", "trillion", "default"})
_SINGLE_DIGIT_SPLITS = frozenset(
    {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
)
_IGNORE_MERGES = frozenset(
    {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2", "tekken"}
)
"""Splits whose vocabularies hold whole words that no chain of merges reaches; BOS is their default too."""

_END_NAMES = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
)
"""Control tokens that end a turn or a text wherever they appear; files name only one of them as EOS."""

_BESIDE = "put the model's tokenizer.json beside the file to use that instead"


def known_splits() -> tuple[str, ...]:
    """Values of `tokenizer.ggml.pre` that are understood."""
    return tuple(sorted({*_REGEX_SPLITS, *_GPT2_SPLITS, *_SINGLE_DIGIT_SPLITS, "falcon"}))


def byte_level_bpe(
    vocab: Mapping[str, int],
    merges: Iterable[tuple[str, str]],
    split: str,
    *,
    add_prefix_space: bool = False,
) -> Any:
    """A byte-level BPE `tokenizers.Tokenizer`; ``split`` is a name of :func:`known_splits`."""
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    model = models.BPE(vocab=dict(vocab), merges=list(merges), ignore_merges=split in _IGNORE_MERGES)
    backend = Backend(model)
    words = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=False)
    if split in _GPT2_SPLITS:
        steps: list[Any] = [words]
    elif split in _SINGLE_DIGIT_SPLITS:
        steps = [pre_tokenizers.Digits(individual_digits=True), words]
    elif split == "falcon":
        steps = [
            pre_tokenizers.Punctuation(behavior="contiguous"),
            words,
            pre_tokenizers.Digits(individual_digits=False),
            pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), behavior="isolated"),
        ]
    elif split in _REGEX_SPLITS:
        regexes = [pre_tokenizers.Split(Regex(text), behavior="isolated") for text in _REGEX_SPLITS[split]]
        steps = [*regexes, bytes_only]
    else:
        raise TokenizerError(
            f"tokenizer.ggml.pre is {split!r}, a way to split text that is not supported (supported:"
            f" {', '.join(known_splits())}); {_BESIDE}"
        )
    if split in ("qwen2", "deepseek-r1-qwen"):
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    backend.decoder = decoders.ByteLevel()
    return backend


def recover_merges(tokens: Sequence[str], scores: Sequence[float] | None) -> list[tuple[str, str]]:
    """Merges of a sentencepiece BPE vocabulary, first to be applied first.

    ``scores`` ranks the merged tokens, higher first; None ranks them by position (Gemma, whose scores do
    not follow the order of merging). Pairs that make the same token keep the order of their parts' ids.
    """
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    ranked: list[tuple[float, int, int, int]] = []
    for token_id, token in enumerate(tokens):
        rank = float(token_id) if scores is None else -float(scores[token_id])
        for cut in range(1, len(token)):
            left = ids.get(token[:cut])
            right = ids.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((rank, token_id, left, right))
    ranked.sort()
    return [(tokens[left], tokens[right]) for _, _, left, right in ranked]


def sentencepiece_bpe(
    tokens: Sequence[str],
    types: Sequence[int],
    scores: Sequence[float] | None,
    merges: list[tuple[str, str]] | None,
    *,
    add_prefix_space: bool,
    unk_token: str | None,
) -> Any:
    """A sentencepiece BPE `tokenizers.Tokenizer` with byte fallback."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers

    if merges is None:
        # Control and byte tokens are spelled like text ("<0x0A>", "<s>") but never made from it.
        mergeable = [
            token if kind in (_NORMAL, _USER_DEFINED, _UNUSED) else "" for token, kind in zip(tokens, types)
        ]
        merges = recover_merges(mergeable, scores)
    model = models.BPE(
        vocab={token: token_id for token_id, token in enumerate(tokens)},
        merges=merges,
        byte_fallback=True,
        fuse_unk=True,
        unk_token=unk_token,
    )
    backend = Backend(model)
    spaces = normalizers.Replace(" ", SPACE_MARK)
    prefix = [normalizers.Prepend(SPACE_MARK)] if add_prefix_space else []
    backend.normalizer = normalizers.Sequence([*prefix, spaces])
    strip = [decoders.Strip(" ", 1, 0)] if add_prefix_space else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


class _Metadata:
    """Typed access to the `tokenizer.ggml.*` keys; a wrong type is an error that names the key."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata

    def get(self, name: str) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{name}")

    def strings(self, name: str) -> list[str] | None:
        value = self.get(name)
        if value is None:
            return None
        items = [item.decode("utf-8", "replace") if isinstance(item, bytes) else item for item in value]
        if not all(isinstance(item, str) for item in items):
            raise TokenizerError(f"tokenizer.ggml.{name} must be a list of strings")
        return items

    def numbers(self, name: str, count: int) -> list[Any] | None:
        value = self.get(name)
        if value is None:
            return None
        items = value.tolist() if hasattr(value, "tolist") else list(value)
        if len(items) != count:
            raise TokenizerError(
                f"tokenizer.ggml.{name} has {len(items)} entries for {count} tokens; the file is broken"
            )
        return items

    def token_id(self, name: str, count: int, default: int | None = None) -> int | None:
        value = self.get(f"{name}_token_id")
        if value is None:
            return default if default is not None and default < count else None
        if not 0 <= int(value) < count:  # converters write 2**32 - 1 for "none"
            logger.warning(
                "tokenizer.ggml.%s_token_id is %s, outside the %d tokens: ignored", name, value, count
            )
            return None
        return int(value)


def gguf_tokenizer(
    metadata: Mapping[str, Any], *, cache_folder: str | Path | None = None
) -> Tokenizer | None:
    """The tokenizer that a GGUF file's metadata describes; None if it has none.

    Args:
        metadata: key -> value, arrays as sequences (lists or numpy).
        cache_folder: where built tokenizers are kept; the user's cache folder by default.

    Raises:
        TokenizerError: the kind or split is not supported, or the metadata contradicts itself.
    """
    keys = _Metadata(metadata)
    kind = keys.get("model")
    tokens = keys.strings("tokens")
    if kind in (None, "none", "no_vocab") or not tokens:
        return None
    if kind not in ("gpt2", "llama"):
        raise TokenizerError(f"tokenizer.ggml.model is {kind!r}; gpt2 and llama are supported; {_BESIDE}")
    tokens = [token or f"[EMPTY_{token_id}]" for token_id, token in enumerate(tokens)]
    if len(set(tokens)) != len(tokens):
        raise TokenizerError("tokenizer.ggml.tokens holds the same token twice; the file is broken")
    count = len(tokens)
    types = keys.numbers("token_type", count) or [_NORMAL] * count
    split = str(keys.get("pre") or "")
    sentencepiece = kind == "llama"
    recipe = {
        "kind": kind,
        "split": split,
        "tokens": tokens,
        "types": types,
        "scores": keys.numbers("scores", count) if sentencepiece else None,
        "merges": keys.strings("merges"),
        "prefix": bool(keys.get("add_space_prefix")) if keys.get("add_space_prefix") is not None else True,
        "gemma": str(metadata.get("general.architecture", "")).startswith("gemma"),
        "unk": keys.token_id("unknown", count, default=0 if sentencepiece else None),
    }
    if sentencepiece and recipe["merges"] is None:
        backend = _cached(recipe, Path(cache_folder) if cache_folder is not None else default_cache_folder())
    else:  # with merges at hand, building is as fast as reading a tokenizer.json
        backend = _build(recipe)

    bos = keys.token_id("bos", count, default=1 if sentencepiece else None)
    eos = keys.token_id("eos", count, default=2 if sentencepiece else None)
    ends = [eos, keys.token_id("eot", count), keys.token_id("eom", count)]
    position = {token: token_id for token_id, token in enumerate(tokens) if types[token_id] == _CONTROL}
    ends += [position.get(name) for name in _END_NAMES]
    add_bos = keys.get("add_bos_token")
    roles = {"bos_token": bos, "eos_token": eos, "unk_token": recipe["unk"]}
    roles["pad_token"] = keys.token_id("padding", count)
    return Tokenizer(
        backend,
        bos_token_id=bos,
        eos_token_ids=[token_id for token_id in ends if token_id is not None],
        add_bos=bool(add_bos) if add_bos is not None else sentencepiece or split in _IGNORE_MERGES,
        add_eos=bool(keys.get("add_eos_token")),
        named_tokens={role: tokens[token_id] for role, token_id in roles.items() if token_id is not None},
    )


def load_gguf_tokenizer(path: str | Path, metadata: Mapping[str, Any]) -> Tokenizer | None:
    """The tokenizer of a GGUF file, from its metadata or else from a tokenizer.json beside it.

    The file's own metadata comes first: one folder may hold GGUF files of several models.

    Raises:
        TokenizerError: the metadata cannot be used and there is no tokenizer.json beside the file.
    """
    try:
        tokenizer = gguf_tokenizer(metadata)
    except TokenizerError:
        if (Path(path).parent / "tokenizer.json").is_file():
            return load_tokenizer(Path(path).parent)
        raise
    return tokenizer


def _build(recipe: Mapping[str, Any]) -> Any:
    from tokenizers import AddedToken

    tokens, types = recipe["tokens"], recipe["types"]
    merges = None
    if recipe["merges"] is not None:
        # A space separates the parts; the first part may itself begin with one in sentencepiece files.
        merges = []
        for number, text in enumerate(recipe["merges"]):
            left, _, right = text[1:].partition(" ")
            if not right:
                raise TokenizerError(f"tokenizer.ggml.merges[{number}] is {text!r}; need two symbols")
            merges.append((text[0] + left, right))
    try:
        if recipe["kind"] == "gpt2":
            if merges is None:
                raise TokenizerError(
                    "tokenizer.ggml.merges is missing; a gpt2 tokenizer cannot be built without"
                )
            if not recipe["split"]:
                logger.warning(
                    "the GGUF file does not say how text is split (tokenizer.ggml.pre); using gpt-2's way"
                )
            spelled = _byte_spelled(tokens, types)
            backend = byte_level_bpe(spelled, merges, recipe["split"] or "gpt-2")
        else:
            if recipe["gemma"]:  # its runs of spaces are stored as real spaces
                tokens = [SPACE_MARK * len(token) if not token.strip(" ") else token for token in tokens]
            backend = sentencepiece_bpe(
                tokens,
                types,
                None if recipe["gemma"] else recipe["scores"],
                merges,
                add_prefix_space=recipe["prefix"],
                unk_token=None if recipe["unk"] is None else tokens[recipe["unk"]],
            )
    except TokenizerError:
        raise
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"the GGUF file's vocabulary and merges do not fit together: {error}") from None
    special = {token_id for token_id, kind in enumerate(types) if kind == _CONTROL}
    if recipe["unk"] is not None and types[recipe["unk"]] == _UNKNOWN:
        special.add(recipe["unk"])
    backend.add_special_tokens(
        [AddedToken(tokens[i], normalized=False, special=True) for i in sorted(special)]
    )
    # A respelled token must not match marks that stand in a text.
    plain = [
        token
        for token, written, kind in zip(tokens, recipe["tokens"], types)
        if kind == _USER_DEFINED and token == written
    ]
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in plain])
    return backend


def _byte_spelled(tokens: Sequence[str], types: Sequence[int]) -> dict[str, int]:
    """Vocabulary in the byte alphabet; only added tokens may hold other characters."""
    alphabet = byte_alphabet()
    letters = set(alphabet.values())
    added = (_CONTROL, _USER_DEFINED)
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if not set("".join(tokens)) <= letters:
        for token_id, (token, kind) in enumerate(zip(tokens, types)):
            if kind not in added and not letters.issuperset(token):
                del vocab[token]
                vocab["".join(alphabet[byte] for byte in token.encode())] = token_id
    return vocab


def default_cache_folder() -> Path:
    """Where built tokenizers are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flexrun" / "tokenizers"


def _cached(recipe: Mapping[str, Any], folder: Path) -> Any:
    """Build a backend, or read it from the cache; a cache that cannot be used is only slower."""
    from tokenizers import Tokenizer as Backend

    digest = hashlib.sha256(json.dumps([_CACHE_VERSION, recipe], sort_keys=True).encode()).hexdigest()
    path = folder / f"{digest[:40]}.json"
    if path.is_file():
        try:
            return Backend.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            logger.warning("rebuilding the cached tokenizer %s: %s", path, error)
    backend = _build(recipe)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=folder, suffix=".tmp", delete=False
        ) as handle:
            handle.write(backend.to_str())
        Path(handle.name).replace(path)
    except OSError as error:
        logger.info("the built tokenizer is not cached: %s", error)
    return backend
