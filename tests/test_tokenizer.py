import json
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from flexrun.tokenizer import TokenizerError, folder_eos_token_ids, load_tokenizer
from flexrun.tokenizer_gguf import (
    _REGEX_SPLITS,
    byte_level_bpe,
    gguf_tokenizer,
    known_splits,
    load_gguf_tokenizer,
)

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Numbers 12 345 6789 and 3.14, don't they'll WE'VE.",
    "def add(first, second):\n    return first + second  # comment\n\n\nclass Thing:\n\tpass\n",
    "日本語のテキストです。中文文本,测试。 Ünïcödé naïve café 👩‍👩‍👧‍👦 emoji 🇫🇷",
    "  leading spaces   and    runs of     them \n\n new paragraph\r\n windows line",
    "the the the there then these those this that and and banana bandana",
] * 3

TRICKY = [
    "Hello world",
    "  two leading spaces",
    " one",
    "trailing ",
    "",
    " ",
    "\n",
    "a\n\n\n b\t\tc    d",
    "日本語 中文 한국어",
    "👩‍👩‍👧‍👦 e\u0301 n\u0303 🇫🇷",
    "def f(x):\n    return x**2  # 12345 1,000.50\r\n",
    "I'll don't WE'VE it'S",
    "zero\u200bwidth nbsp\u00a0x",
    "مرحبا हिन्दी ไทย",
    "x" * 300,
    "<|im_start|>user\nHi<|im_end|>\n",
    "a<|im_end|>b <|im_end|> c",
    "١٢٣ Ⅷ ½ 1234567",
    "\x00\x01\x7f",
    "\ufffd\ue000\U0010ffff",
]


def train_byte_level(steps=None, vocab_size=500):
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        steps or [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def train_sentencepiece(vocab_size=420):
    """Llama-like: a dummy prefix, byte fallback, BOS by the post-processor."""
    backend = tokenizers.Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    # Words are split while training only, to get a usual vocabulary.
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=specials, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    state = json.loads(backend.to_str())
    state["pre_tokenizer"] = None
    state["added_tokens"] = state["added_tokens"][:3]
    state["model"]["byte_fallback"] = True
    backend = tokenizers.Tokenizer.from_str(json.dumps(state))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def save_folder(folder: Path, backend, **config):
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config})
    )
    return folder


def gguf_metadata(backend, kind, **extra):
    vocab = backend.get_vocab(with_added_tokens=True)
    tokens = [token for token, _ in sorted(vocab.items(), key=lambda item: item[1])]
    added = backend.get_added_tokens_decoder()
    state = json.loads(backend.to_str())["model"]
    types = [
        3 if i in added and added[i].special else 4 if i in added else 6 if token.startswith("<0x") else 1
        for i, token in enumerate(tokens)
    ]
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": kind,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
    }
    if kind == "gpt2":
        metadata["tokenizer.ggml.merges"] = [" ".join(pair) for pair in state["merges"]]
    else:
        types[0] = 2
        metadata["tokenizer.ggml.scores"] = [0.0 if kind != 1 else -float(i) for i, kind in enumerate(types)]
    return metadata | {f"tokenizer.ggml.{name}": value for name, value in extra.items()}


@pytest.fixture(scope="module")
def byte_level():
    return train_byte_level()


@pytest.fixture(scope="module")
def sentencepiece():
    return train_sentencepiece()


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_folder_gives_the_ids_and_text_of_transformers(kind, tmp_path, request):
    from transformers import AutoTokenizer

    backend = request.getfixturevalue(kind)
    named = (
        {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        if kind == "sentencepiece"
        else {"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>"}
    )
    folder = save_folder(tmp_path, backend, **named)
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for text in TRICKY:
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"], text
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
    assert ours.vocab_size == len(theirs)
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.named_tokens["eos_token"] == theirs.eos_token


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_token_bytes_concatenate_to_the_text(kind, tmp_path, request):
    tokenizer = load_tokenizer(save_folder(tmp_path, request.getfixturevalue(kind)))
    assert tokenizer.byte_exact
    assert tokenizer.strips_leading_space == (kind == "sentencepiece")
    for text in TRICKY:
        data = b"".join(tokenizer.token_bytes(i) for i in tokenizer.encode(text, add_special_tokens=False))
        assert data.removeprefix(b" " if kind == "sentencepiece" else b"") == text.encode(), text
    assert tokenizer.token_bytes(10**6) == b""


def test_partial_characters_show_as_replacement(byte_level, tmp_path):
    tokenizer = load_tokenizer(save_folder(tmp_path, byte_level))
    first = tokenizer.encode("\U0010ffff")[0]
    assert tokenizer.token_text(first) == "\ufffd"
    assert tokenizer.token_text(tokenizer.encode(" the")[0]).startswith(" ")


def test_exactly_one_bos(sentencepiece, tmp_path):
    tokenizer = load_tokenizer(save_folder(tmp_path, sentencepiece, bos_token="<s>"))
    assert tokenizer.adds_bos
    assert tokenizer.encode("the dog")[:2].count(1) == 1
    assert tokenizer.encode("<s>the dog").count(1) == 1
    assert tokenizer.encode("<s>") == [1] == tokenizer.encode("")
    assert 1 not in tokenizer.encode("the dog", add_special_tokens=False)


@pytest.mark.parametrize("wanted", [True, False])
def test_add_bos_token_counts_only_without_a_post_processor(wanted, byte_level, sentencepiece, tmp_path):
    from transformers import AutoTokenizer

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    folder = save_folder(tmp_path / "a", byte_level, bos_token="<|endoftext|>", add_bos_token=wanted)
    assert load_tokenizer(folder).adds_bos is wanted
    folder = save_folder(tmp_path / "b", sentencepiece, bos_token="<s>", add_bos_token=wanted)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.adds_bos
    assert tokenizer.encode("the dog") == AutoTokenizer.from_pretrained(folder)("the dog")["input_ids"]


def test_end_tokens_are_gathered_from_every_file(byte_level, tmp_path):
    save_folder(tmp_path, byte_level, eos_token={"content": "<|endoftext|>"})
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 9, "text_config": {"eos_token_id": [7, 11]}}')
    assert load_tokenizer(tmp_path).eos_token_ids == (0, 2, 7, 9, 11)
    assert folder_eos_token_ids(tmp_path) == (2, 7, 9, 11)
    (tmp_path / "config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(TokenizerError, match=r"config.json.*'x'"):
        load_tokenizer(tmp_path)


def test_vocab_size_is_the_largest_id_plus_one(tmp_path):
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 9}, unk_token="a"))
    assert load_tokenizer(save_folder(tmp_path, backend)).vocab_size == 10


def test_special_tokens_known_only_to_the_config(byte_level, tmp_path):
    state = json.loads(byte_level.to_str())
    state["added_tokens"] = []
    bare = tokenizers.Tokenizer.from_str(json.dumps(state))
    size = bare.get_vocab_size()
    folder = save_folder(
        tmp_path,
        bare,
        eos_token="<|im_end|>",
        pad_token="[PAD]",
        additional_special_tokens=["<|im_start|>"],
        added_tokens_decoder={
            str(size): {"content": "<think>", "special": False},
            str(size + 50): {"content": "<far>", "special": True},
        },
    )
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("<|im_start|>a<|im_end|>")[0::2] == [1, 2]
    assert tokenizer.special_ids == {1, 2}
    assert tokenizer.encode("<think>") == [size]
    assert tokenizer.vocab_size == size + 1, "made-up tokens must not grow the vocabulary"


def test_vocab_and_merges_without_tokenizer_json(byte_level, tmp_path):
    state = json.loads(byte_level.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(state["vocab"]))
    merges = "\n".join(" ".join(pair) for pair in state["merges"])
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + merges + "\n")
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "<|endoftext|>"}')
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, "eos_token": "<|im_end|>"})
    )
    tokenizer = load_tokenizer(tmp_path)
    for text in TRICKY:
        # <|im_start|> is not declared as special here: compare texts without it.
        if "<|" not in text:
            assert tokenizer.encode(text) == [0, *byte_level.encode(text).ids]
    assert tokenizer.encode("a<|im_end|>")[-1] == 2
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b c\n")
    with pytest.raises(TokenizerError, match="line 2"):
        load_tokenizer(tmp_path)
    (tmp_path / "merges.txt").write_text("never there\n")
    with pytest.raises(TokenizerError, match="do not fit together"):
        load_tokenizer(tmp_path)


def test_folders_without_a_usable_tokenizer(tmp_path):
    assert load_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json.*save_pretrained"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(TokenizerError, match="not valid JSON"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(TokenizerError, match="JSON object"):
        load_tokenizer(tmp_path)


def test_truncation_and_padding_settings_do_not_touch_prompts(byte_level, tmp_path):
    backend = tokenizers.Tokenizer.from_str(byte_level.to_str())
    backend.enable_truncation(4)
    backend.enable_padding(length=9)
    tokenizer = load_tokenizer(save_folder(tmp_path, backend))
    assert tokenizer.encode("x" * 50) == byte_level.encode("x" * 50).ids


def test_text_that_is_not_unicode_is_an_error(byte_level, tmp_path):
    tokenizer = load_tokenizer(save_folder(tmp_path, byte_level))
    with pytest.raises(ValueError, match="cannot be tokenized"):
        tokenizer.encode("\ud800")


# -- GGUF -------------------------------------------------------------------------------------------------


def reference_steps(split):
    """The splits written out once more, as model authors publish them in tokenizer.json."""
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    regexes = {
        "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        "stablelm2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        "tekken": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        "gpt-4o": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    }
    if split == "gpt-2":
        return [words]
    if split == "smollm":
        return [pre_tokenizers.Digits(individual_digits=True), words]
    return [
        pre_tokenizers.Split(Regex(regexes[split]), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


@pytest.mark.parametrize("split", ["gpt-2", "smollm", "llama-bpe", "stablelm2", "tekken", "gpt-4o"])
def test_gguf_byte_level_gives_the_ids_of_the_original(split):
    backend = train_byte_level(reference_steps(split))
    tokenizer = gguf_tokenizer(
        gguf_metadata(backend, "gpt2", pre=split, bos_token_id=0, eos_token_id=2, add_bos_token=False)
    )
    if split in ("llama-bpe", "tekken"):
        assert json.loads(tokenizer.backend.to_str())["model"]["ignore_merges"]
    for text in TRICKY:
        assert tokenizer.encode(text) == backend.encode(text).ids, text
    assert tokenizer.vocab_size == backend.get_vocab_size()
    assert tokenizer.eos_token_ids == (2, 0), "<|im_end|> and <|endoftext|> both end an answer"
    assert tokenizer.special_ids == {0, 1, 2}


def test_every_known_split_compiles(byte_level):
    state = json.loads(byte_level.to_str())["model"]
    merges = [tuple(pair) for pair in state["merges"]]
    assert {"qwen2", "llama-bpe", "tekken", "gpt-4o", "falcon", "bloom", "smollm"} <= set(known_splits())
    assert set(_REGEX_SPLITS) < set(known_splits())
    for split in known_splits():
        backend = byte_level_bpe(state["vocab"], merges, split)
        for text in TRICKY:
            decoded = backend.decode(backend.encode(text).ids, skip_special_tokens=False)
            assert decoded == (normalizers.NFC().normalize_str(text) if backend.normalizer else text)


@pytest.mark.parametrize("prefix", [True, False])
def test_gguf_sentencepiece_gives_the_ids_of_the_original(prefix, sentencepiece):
    backend = tokenizers.Tokenizer.from_str(sentencepiece.to_str())
    if not prefix:
        backend.normalizer = normalizers.Replace(" ", "▁")
    tokenizer = gguf_tokenizer(gguf_metadata(backend, "llama", add_space_prefix=prefix))
    assert tokenizer.adds_bos and tokenizer.bos_token_id == 1 and tokenizer.eos_token_ids == (2,)
    assert tokenizer.strips_leading_space is prefix
    for text in TRICKY:
        assert tokenizer.encode(text) == backend.encode(text).ids, text
    assert tokenizer.special_ids == {0, 1, 2}


def test_gemma_merges_follow_positions_and_spaces_are_respelled(sentencepiece):
    metadata = gguf_metadata(sentencepiece, "llama", add_space_prefix=False)
    metadata["general.architecture"] = "gemma2"
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    assert "▁▁" not in tokens
    tokens.append("  ")
    types.append(4)
    scores = metadata["tokenizer.ggml.scores"]
    metadata["tokenizer.ggml.scores"] = [-1000.0 - i for i, _ in enumerate(reversed([*scores, 0.0]))][::-1]
    tokenizer = gguf_tokenizer(metadata)
    reference = tokenizers.Tokenizer.from_str(sentencepiece.to_str())
    reference.normalizer = normalizers.Replace(" ", "▁")
    for text in TRICKY:
        if "  " not in text:
            assert tokenizer.encode(text) == reference.encode(text).ids, text
    assert tokenizer.encode("  ", add_special_tokens=False) == [len(tokens) - 1]
    assert tokenizer.decode([len(tokens) - 1]) == "  "


def test_gguf_user_defined_tokens_stay_whole(byte_level):
    backend = tokenizers.Tokenizer.from_str(byte_level.to_str())
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    tokenizer = gguf_tokenizer(gguf_metadata(backend, "gpt2", pre="gpt-2"))
    think = tokenizer.token_id("<think>")
    assert tokenizer.encode("a<think>b")[1] == think
    assert think not in tokenizer.special_ids
    assert tokenizer.decode([think]) == "<think>"


def test_gguf_bos_rules(byte_level, sentencepiece):
    gpt2 = gguf_metadata(byte_level, "gpt2", bos_token_id=0)
    assert not gguf_tokenizer(gpt2 | {"tokenizer.ggml.pre": "gpt-2"}).adds_bos
    assert gguf_tokenizer(gpt2 | {"tokenizer.ggml.pre": "llama-bpe"}).adds_bos
    assert gguf_tokenizer(
        gpt2 | {"tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.add_bos_token": True}
    ).adds_bos
    llama = gguf_metadata(sentencepiece, "llama")
    assert gguf_tokenizer(llama).encode("<s> the").count(1) == 1
    assert not gguf_tokenizer(llama | {"tokenizer.ggml.add_bos_token": False}).adds_bos
    assert gguf_tokenizer(llama | {"tokenizer.ggml.bos_token_id": 2**32 - 1}).bos_token_id is None


def test_gguf_cache_is_used_and_repaired(sentencepiece, byte_level, tmp_path, monkeypatch):
    import flexrun.tokenizer_gguf as module

    metadata = gguf_metadata(sentencepiece, "llama")
    ids = gguf_tokenizer(metadata, cache_folder=tmp_path).encode("the banana")
    (path,) = tmp_path.iterdir()
    assert path.suffix == ".json"
    path.write_text("torn")
    assert gguf_tokenizer(metadata, cache_folder=tmp_path).encode("the banana") == ids
    build = module._build
    monkeypatch.setattr(module, "_build", lambda recipe: pytest.fail("the cache was not used"))
    assert gguf_tokenizer(metadata, cache_folder=tmp_path).encode("the banana") == ids
    monkeypatch.setattr(module, "_build", build)
    gguf_tokenizer(metadata | {"tokenizer.ggml.add_space_prefix": False}, cache_folder=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2, "another recipe, another entry"
    gguf_tokenizer(gguf_metadata(byte_level, "gpt2", pre="gpt-2"), cache_folder=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2, "nothing to gain where the file lists its merges"
    assert gguf_tokenizer(metadata, cache_folder=path).encode("the banana") == ids, "a file, not a folder"


def test_plain_text_in_a_byte_level_vocabulary_is_respelled(byte_level):
    metadata = gguf_metadata(byte_level, "gpt2", pre="gpt-2")
    metadata["tokenizer.ggml.tokens"].append("日本")
    metadata["tokenizer.ggml.token_type"].append(1)
    tokenizer = gguf_tokenizer(metadata)
    assert tokenizer.decode([tokenizer.vocab_size - 1]) == "日本"
    assert tokenizer.token_bytes(tokenizer.vocab_size - 1) == "日本".encode()


def test_broken_gguf_metadata_is_refused(byte_level, sentencepiece, tmp_path):
    good = gguf_metadata(byte_level, "gpt2", pre="gpt-2")
    for change, words in [
        ({"model": "rwkv"}, r"'rwkv'.*tokenizer\.json"),
        ({"pre": "made-up"}, r"'made-up'.*smollm"),
        ({"merges": None}, "merges is missing"),
        ({"merges": ["abc"]}, r"merges\[0\]"),
        ({"merges": ["never there"]}, "do not fit together"),
        ({"token_type": [1]}, "1 entries"),
        ({"tokens": ["a", "a"]}, "twice"),
        ({"tokens": [1, 2]}, "list of strings"),
    ]:
        metadata = good | {f"tokenizer.ggml.{key}": value for key, value in change.items()}
        with pytest.raises(TokenizerError, match=words):
            gguf_tokenizer(metadata)
    assert gguf_tokenizer({}) is None
    assert gguf_tokenizer({"tokenizer.ggml.model": "none"}) is None
    unknown = good | {"tokenizer.ggml.pre": "made-up"}
    with pytest.raises(TokenizerError):
        load_gguf_tokenizer(tmp_path / "m.gguf", unknown)
    save_folder(tmp_path, sentencepiece, bos_token="<s>")
    assert load_gguf_tokenizer(tmp_path / "m.gguf", unknown).bos_token_id == 1
    assert load_gguf_tokenizer(tmp_path / "m.gguf", good).bos_token_id is None


def test_importing_needs_no_tokenizers_package():
    code = "import sys, flexrun.tokenizer_gguf, flexrun.chat, flexrun.detokenize;"
    code += "assert not {'tokenizers', 'jinja2', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
