import json

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from flexrun.chat import (
    ChatError,
    ChatTemplate,
    check_messages,
    encode_chat,
    folder_chat_template,
    gguf_chat_template,
)
from flexrun.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set system_message = messages[0]['content'] %}"
    "{% set messages = messages[1:] %}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + message['content'].strip() + ' [/INST]' }}"
    "{% else %}{% generation %}{{ ' ' + message['content'] + ' ' + eos_token }}{% endgeneration %}{% endif %}"
    "{% endfor %}"
)
TOOLS = (
    "{%- if tools %}\n{{- tools | tojson(indent=2) }}\n{%- endif %}\n"
    "{%- for message in messages %}\n    {%- if loop.index0 > 3 %}{% break %}{% endif %}\n"
    "    {{- '<|' ~ message.role ~ '|>' ~ message.content | trim }}\n{%- endfor %}\n"
    "{{- namespace(x=1).x }} {{ strftime_now('%Y')|length }} {{ documents is none }}"
)
TALK = [
    {"role": "user", "content": "Is 1 < 2 & 'x' \"y\"?"},
    {"role": "assistant", "content": "Yes é 日"},
    {"role": "user", "content": " And 3 > 2? "},
]


def special_tokenizer():
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    from tokenizers import trainers

    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["hello there"], trainer)
    return Tokenizer(
        backend,
        bos_token_id=0,
        eos_token_ids=[1],
        add_bos=True,
        named_tokens={"bos_token": "<s>", "eos_token": "</s>"},
    )


@pytest.mark.parametrize("source", [CHATML, LLAMA2, TOOLS])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_renders_as_transformers_does(source, add_generation_prompt):
    from transformers import PreTrainedTokenizerFast

    ours = special_tokenizer()
    theirs = PreTrainedTokenizerFast(tokenizer_object=ours.backend, bos_token="<s>", eos_token="</s>")
    theirs.chat_template = source
    template = ChatTemplate(source, ours.named_tokens)
    tools = [{"type": "function", "function": {"name": "f", "description": "<é> & 'q'", "parameters": {}}}]
    expected = theirs.apply_chat_template(
        TALK, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    assert template.render(TALK, tools=tools, add_generation_prompt=add_generation_prompt) == expected


def test_prompt_ids_have_the_templates_own_bos_only():
    tokenizer = special_tokenizer()
    text, ids = encode_chat(tokenizer, ChatTemplate(LLAMA2, tokenizer.named_tokens), TALK[:1])
    assert text.startswith("<s>[INST]") and ids[0] == 0 and ids.count(0) == 1
    text, ids = encode_chat(tokenizer, ChatTemplate(CHATML), [{"role": "user", "content": "hi"}])
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert ids[0] == 2 and ids.count(2) == 2 and ids.count(3) == 1 and 0 not in ids


def test_text_parts_become_one_string():
    parts = [{"type": "text", "text": "a"}, "b", {"type": "text", "text": "c"}]
    assert check_messages([{"role": "user", "content": parts}])[0]["content"] == "a\nb\nc"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ("hi", "must be a list"),
        ({"role": "user"}, "must be a list"),
        (None, "must be a list"),
        ([], "empty"),
        (["hi"], r"messages\[0\] must be an object"),
        ([{"content": "x"}], r"messages\[0\]\.role"),
        ([{"role": 3, "content": "x"}], r"messages\[0\]\.role"),
        ([{"role": "user", "content": "x"}, {"role": "asistant", "content": ""}], r"\[1\].*'assistant'"),
        ([{"role": "zebra", "content": "x"}], "valid roles are system"),
        ([{"role": "user"}], r"messages\[0\]\.content.*nothing"),
        ([{"role": "user", "content": None}], r"messages\[0\]\.content.*None"),
        ([{"role": "assistant", "content": None}], "content"),
        ([{"role": "user", "content": 5}], "content"),
        ([{"role": "user", "content": [5]}], r"content\[0\]"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "'image_url'.*only text"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\]\.text"),
    ],
)
def test_bad_messages_are_named(messages, words):
    with pytest.raises(ChatError, match=words):
        check_messages(messages)


def test_roles_and_fields_that_a_template_knows_are_passed_on():
    source = "{% set m = messages[0] %}{% if m.role == 'critic' %}{{ m.name }}:{{ m.content }}{% endif %}"
    assert ChatTemplate(source).render([{"role": "critic", "name": "Ann", "content": "x"}]) == "Ann:x"
    calls = [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]
    assert ChatTemplate("{{ messages[0].tool_calls[0].id }}{{ messages[0].content }}").render(calls) == "1"
    message = {"role": "user", "content": ["x"]}
    ChatTemplate("{{ messages }}").render([message])
    assert message["content"] == ["x"], "the caller's messages stay as they are"


def test_switches_reach_the_template():
    template = ChatTemplate("{{ 'on' if enable_thinking else 'off' }}{{ missing }}")
    assert template.render(TALK, enable_thinking=True) == "on"
    assert template.render(TALK) == "off"


def test_template_errors_are_clear():
    with pytest.raises(ChatError, match="not valid Jinja: line 2"):
        ChatTemplate("x\n{% for %}")
    with pytest.raises(ChatError, match="refused the messages: Conversation roles must alternate"):
        ChatTemplate(LLAMA2).render([{"role": "assistant", "content": "x"}])
    with pytest.raises(ChatError, match="nothing_here"):
        ChatTemplate("{{ messages[0].nothing_here.x }}").render(TALK)
    with pytest.raises(ChatError, match="TypeError"):
        ChatTemplate("{{ 1 + 'a' }}").render(TALK)
    with pytest.raises(ChatError, match="ZeroDivisionError"):
        ChatTemplate("{{ 1 / 0 }}").render(TALK)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ raise_exception.__globals__.os }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ 'a' * 10 ** 9 }}",
        "{{ [1] * 1000000000 }}",
        "{{ 10 ** 100000000 }}",
        "{% for i in range(1000000000) %}{% endfor %}",
        "{% for i in range(60000) %}{{ 'abcdefghij' * 1000 }}{% endfor %}",
    ],
)
def test_hostile_templates_are_stopped(source):
    with pytest.raises(ChatError):
        ChatTemplate(source).render(TALK)


def test_ordinary_arithmetic_is_allowed():
    assert ChatTemplate("{{ '-' * 3 }}{{ 2 * 4 }}{{ 2 ** 10 }}").render(TALK) == "---81024"


def test_template_sources_in_a_folder(tmp_path):
    assert folder_chat_template(tmp_path) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "config {{ bos_token }}"}))
    assert folder_chat_template(tmp_path, special_tokenizer()).render(TALK) == "config <s>"
    config.write_text(
        json.dumps(
            {
                "chat_template": [
                    {"name": "default", "template": "one"},
                    {"name": "tool_use", "template": "two"},
                ]
            }
        )
    )
    assert folder_chat_template(tmp_path).render(TALK) == "one"
    assert folder_chat_template(tmp_path, name="tool_use").render(TALK) == "two"
    with pytest.raises(ChatError, match=r"'rag'.*default, tool_use"):
        folder_chat_template(tmp_path, name="rag")
    (tmp_path / "chat_template.jinja").write_text("file é", encoding="utf-8")
    assert folder_chat_template(tmp_path).render(TALK) == "file é"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("three")
    assert folder_chat_template(tmp_path, name="rag").render(TALK) == "three"
    (tmp_path / "chat_template.jinja").unlink()
    config.write_text('{"chat_template": 5}')
    with pytest.raises(ChatError, match="string or a list"):
        folder_chat_template(tmp_path)
    config.write_text("{")
    with pytest.raises(ChatError, match=r"tokenizer_config\.json"):
        folder_chat_template(tmp_path)


def test_template_from_gguf_metadata():
    assert gguf_chat_template({"general.name": "x"}) is None
    metadata = {"tokenizer.chat_template": "{{ eos_token }}", "tokenizer.chat_template.tool_use": "tools"}
    assert gguf_chat_template(metadata, special_tokenizer()).render(TALK) == "</s>"
    assert gguf_chat_template(metadata, name="tool_use").render(TALK) == "tools"


def test_missing_template_or_tokenizer_says_what_to_do():
    with pytest.raises(ChatError, match=r"chat_template\.jinja"):
        encode_chat(special_tokenizer(), None, TALK)
    with pytest.raises(ChatError, match="no tokenizer"):
        encode_chat(None, ChatTemplate("x"), TALK)
