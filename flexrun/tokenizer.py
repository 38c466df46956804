"""Text to token ids and back, on the `tokenizers` package alone.

A :class:`Tokenizer` wraps a `tokenizers.Tokenizer` and settles what files leave open: whether a prompt gets
a BOS (exactly one, however many places ask for it), which ids end an answer, which ids exist at all, and
which bytes a token stands for. `tokenizers` is imported when a tokenizer is loaded, not before.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

SPACE_MARK = "▁"  # sentencepiece writes a space as U+2581
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenizerError(ValueError):
    """A tokenizer's files are missing, broken or of a kind that cannot be used."""


def byte_alphabet() -> dict[int, str]:
    """Byte -> the printable character that stands for it in byte-level BPE vocabularies (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


class Tokenizer:
    """Encoder and decoder of one model.

    Args:
        backend: a `tokenizers.Tokenizer`; its truncation and padding are switched off.
        bos_token_id: the begin-of-text token, if the model has one.
        eos_token_ids: every token that ends an answer.
        add_bos: True or False overrides what the backend's post-processor does; None leaves it.
        add_eos: the same for a trailing end token; None means no, once ``add_bos`` is given.
        named_tokens: text of special tokens by role ("bos_token", ...), for chat templates.
    """

    def __init__(
        self,
        backend: Any,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: Iterable[int] = (),
        add_bos: bool | None = None,
        add_eos: bool | None = None,
        named_tokens: Mapping[str, str] | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys(eos_token_ids))
        self.named_tokens: dict[str, str] = dict(named_tokens or {})
        prefix, suffix = _affixes(backend)
        if bos_token_id is None and len(prefix) == 1:
            bos_token_id = prefix[0]
        self.bos_token_id = bos_token_id
        if add_bos is not None or add_eos is not None:
            prefix = [bos_token_id] if add_bos and bos_token_id is not None else []
            suffix = list(self.eos_token_ids[:1]) if add_eos else []
        self._prefix: list[int] = prefix
        self._suffix: list[int] = suffix

    @property
    def adds_bos(self) -> bool:
        """True if :meth:`encode` begins a prompt with BOS."""
        return self.bos_token_id is not None and self._prefix[:1] == [self.bos_token_id]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Special tokens written in the text become their ids.

        With ``add_special_tokens`` the model's BOS is put first, unless the text already begins with it.
        """
        try:
            ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        except (TypeError, UnicodeEncodeError) as error:  # lone surrogates from JSON escapes
            raise ValueError(f"text cannot be tokenized: {error}") from None
        if not add_special_tokens:
            return ids
        prefix = self._prefix
        if prefix and ids[: len(prefix)] == prefix:
            prefix = []
        return [*prefix, *ids, *self._suffix]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids without a token are left out."""
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    @cached_property
    def vocab_size(self) -> int:
        """Largest token id + 1 (not the number of tokens: there may be holes)."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids left out of text by ``skip_special_tokens``."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @cached_property
    def _added_text(self) -> dict[int, str]:
        return {
            token_id: token.content for token_id, token in self.backend.get_added_tokens_decoder().items()
        }

    @cached_property
    def _decoder_kinds(self) -> list[dict[str, Any]]:
        """The decoder's steps as their JSON descriptions."""
        decoder = self.backend.decoder
        if decoder is None:
            return []
        state = json.loads(decoder.__getstate__())
        return list(state["decoders"]) if state.get("type") == "Sequence" else [state]

    @cached_property
    def byte_exact(self) -> bool:
        """True if text is the concatenation of the tokens' bytes, so that :meth:`token_bytes` is exact."""
        return self._byte_level or self._sentencepiece

    @cached_property
    def _byte_level(self) -> bool:
        return [step.get("type") for step in self._decoder_kinds] == ["ByteLevel"]

    @cached_property
    def _sentencepiece(self) -> bool:
        """Replace(mark, space) or Metaspace, with byte fallback, fusing and a leading strip at most."""
        marks = 0
        for step in self._decoder_kinds:
            kind = step.get("type")
            if kind == "Replace":
                if step.get("pattern") != {"String": SPACE_MARK} or step.get("content") != " ":
                    return False
                marks += 1
            elif kind == "Metaspace":
                if step.get("replacement") != SPACE_MARK:
                    return False
                marks += 1
            elif kind == "Strip":
                if step.get("content") != " " or step.get("start") not in (0, 1) or step.get("stop") != 0:
                    return False
            elif kind not in ("ByteFallback", "Fuse"):
                return False
        return marks == 1

    @cached_property
    def strips_leading_space(self) -> bool:
        """True if the decoder removes one space at the very start of a text (sentencepiece's dummy)."""
        return any(
            (step.get("type") == "Strip" and step.get("start") == 1)
            or (step.get("type") == "Metaspace" and step.get("prepend_scheme", "always") != "never")
            for step in self._decoder_kinds
        )

    @cached_property
    def _byte_fallback(self) -> bool:
        return any(step.get("type") == "ByteFallback" for step in self._decoder_kinds)

    @cached_property
    def _char_to_byte(self) -> dict[str, int]:
        return {char: byte for byte, char in byte_alphabet().items()}

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to a text that goes on (a sentencepiece mark is a space).

        Exact where :attr:`byte_exact`; otherwise the UTF-8 of the token decoded alone. Empty for ids
        without a token.
        """
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added_text and not self._byte_level:
            return self._added_text[token_id].encode()
        if self._byte_level:
            table = self._char_to_byte
            if all(char in table for char in token):
                return bytes(table[char] for char in token)
            return token.encode()
        if self._sentencepiece:
            if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
                return bytes([int(match[1], 16)])
            return token.replace(SPACE_MARK, " ").encode()
        return self.decode([token_id], skip_special_tokens=False).encode()

    def token_text(self, token_id: int) -> str:
        """A token for display (log-probabilities): its bytes as text, U+FFFD for parts of characters."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def token_id(self, token: str) -> int | None:
        """Id of a token spelled as in the vocabulary, None if there is none."""
        found: int | None = self.backend.token_to_id(token)
        return found


def _probes(backend: Any) -> Iterator[str]:
    """Short texts, one of which any vocabulary can encode."""
    yield from ("a", "A", "0", " ")
    yield from list(backend.get_vocab(with_added_tokens=False))[:64]


def _affixes(backend: Any) -> tuple[list[int], list[int]]:
    """What the post-processor puts before and after a text's ids, found by trying it on a short text."""
    if backend.post_processor is None:
        return [], []
    for probe in _probes(backend):
        plain: list[int] = backend.encode(probe, add_special_tokens=False).ids
        if plain:
            break
    else:
        return [], []
    full: list[int] = backend.encode(probe, add_special_tokens=True).ids
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return full[:start], full[start + len(plain) :]
    return [], []


# -- Hugging Face folders ---------------------------------------------------------------------------------


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, {} if there is no such file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from None
    try:
        value = json.loads(text)
    except ValueError as error:
        raise TokenizerError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} must hold a JSON object, found {type(value).__name__}")
    return value


def _content(value: Any) -> str | None:
    """A special token's text: plain, or an object with "content"."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _ids(value: Any, where: str) -> list[int]:
    """Token ids of a field that holds null, one id or a list."""
    if value is None:
        return []
    values = value if isinstance(value, list) else [value]
    for item in values:
        if isinstance(item, bool) or not isinstance(item, int) or item < 0:
            raise TokenizerError(f"{where}: token ids must be non-negative integers, got {item!r}")
    return list(values)


def folder_eos_token_ids(folder: str | Path) -> tuple[int, ...]:
    """End tokens named by a folder's generation_config.json and config.json, each an id or a list.

    For models without a tokenizer too; any of the ids ends an answer.
    """
    root = Path(folder)
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        config = _read_json(root / name)
        found += _ids(config.get("eos_token_id"), f"{name}, eos_token_id")
        if isinstance(inner := config.get("text_config"), dict):
            found += _ids(inner.get("eos_token_id"), f"{name}, text_config.eos_token_id")
    return tuple(dict.fromkeys(found))


def load_tokenizer(folder: str | Path) -> Tokenizer | None:
    """The tokenizer of a Hugging Face folder; None if it has none (the model then takes token ids).

    Reads tokenizer.json, or vocab.json with merges.txt; tokenizer_config.json, special_tokens_map.json,
    generation_config.json and config.json complete it.

    Raises:
        TokenizerError: a file is broken, or there is only a sentencepiece tokenizer.model.
    """
    root = Path(folder)
    config = _read_json(root / "special_tokens_map.json") | _read_json(root / "tokenizer_config.json")
    if (root / "tokenizer.json").is_file():
        backend = _read_backend(root / "tokenizer.json")
    elif (root / "vocab.json").is_file() and (root / "merges.txt").is_file():
        backend = _read_vocab_and_merges(root, config)
    elif any(
        (root / name).is_file() for name in ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
    ):
        raise TokenizerError(
            f"{root} has a sentencepiece model but no tokenizer.json, which is needed; make it once with"
            f" transformers: AutoTokenizer.from_pretrained({str(root)!r}).save_pretrained({str(root)!r})"
        )
    else:
        return None
    named = {
        role: text
        for role, value in config.items()
        if role.endswith("_token") and not role.startswith("add_") and (text := _content(value)) is not None
    }
    _add_declared_tokens(backend, config, named)
    eos = [] if (found := _token_of(backend, named, "eos_token")) is None else [found]
    return Tokenizer(
        backend,
        bos_token_id=_token_of(backend, named, "bos_token"),
        eos_token_ids=[*eos, *folder_eos_token_ids(root)],
        # A post-processor is what transformers goes by too: flags beside it are left-overs.
        add_bos=_optional_flag(config, "add_bos_token") if backend.post_processor is None else None,
        add_eos=_optional_flag(config, "add_eos_token") if backend.post_processor is None else None,
        named_tokens=named,
    )


def _read_backend(path: Path) -> Any:
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"{path} is not a tokenizer that this version can read: {error}") from None


def _read_vocab_and_merges(root: Path, config: Mapping[str, Any]) -> Any:
    """Byte-level BPE from GPT-2's two files (OPT, older GPT-2 and Qwen2 folders)."""
    from flexrun.tokenizer_gguf import byte_level_bpe

    vocab = _read_json(root / "vocab.json")
    for token, token_id in vocab.items():
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise TokenizerError(
                f"{root / 'vocab.json'}: token {token!r} has id {token_id!r}, not an integer"
            )
    merges: list[tuple[str, str]] = []
    lines = (root / "merges.txt").read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        pair = line.rstrip("\r").split(" ")
        if len(pair) != 2:
            raise TokenizerError(f"{root / 'merges.txt'}, line {number}: need two symbols, got {line!r}")
        merges.append((pair[0], pair[1]))
    split = "qwen2" if str(config.get("tokenizer_class", "")).startswith("Qwen2") else "gpt-2"
    try:
        backend = byte_level_bpe(vocab, merges, split, add_prefix_space=bool(config.get("add_prefix_space")))
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"{root}: vocab.json and merges.txt do not fit together: {error}") from None
    extra = _read_json(root / "added_tokens.json")
    backend.add_tokens([token for token, _ in sorted(extra.items(), key=lambda item: item[1])])
    return backend


def _add_declared_tokens(backend: Any, config: Mapping[str, Any], named: Mapping[str, str]) -> None:
    """Make tokens known whole that only tokenizer_config.json declares.

    A token that the vocabulary lacks is added only where its declared id is the next free one; others
    (a padding token made up for training, say) would get an id that the model has no row for.
    """
    from tokenizers import AddedToken

    known = backend.get_added_tokens_decoder()
    declared = config.get("added_tokens_decoder") or {}
    for token_id, entry in sorted(
        ((int(key), entry) for key, entry in declared.items() if key.isdigit()), key=lambda item: item[0]
    ):
        text = _content(entry)
        if text is None or token_id in known:
            continue
        present = backend.token_to_id(text)
        if present == token_id or (present is None and backend.get_vocab_size() == token_id):
            flags = {name: bool(entry.get(name)) for name in ("lstrip", "rstrip", "single_word", "special")}
            backend.add_tokens([AddedToken(text, normalized=bool(entry.get("normalized")), **flags)])
    special = list(named.values())
    for field in ("additional_special_tokens", "extra_special_tokens"):
        values = config.get(field) or []
        values = values.values() if isinstance(values, Mapping) else values
        special += [text for value in values if (text := _content(value)) is not None]
    known_text = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    missing = [text for text in special if text not in known_text and backend.token_to_id(text) is not None]
    if missing:
        backend.add_special_tokens(list(dict.fromkeys(missing)))


def _token_of(backend: Any, named: Mapping[str, str], role: str) -> int | None:
    text = named.get(role)
    return None if text is None else backend.token_to_id(text)


def _optional_flag(config: Mapping[str, Any], name: str) -> bool | None:
    value = config.get(name)
    return value if isinstance(value, bool) else None
