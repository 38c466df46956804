"""Chat messages to a prompt, by the model's own Jinja template.

Templates come with downloaded models, so they run in Jinja's immutable sandbox, with bounds on what they
may compute and print. The rendered prompt holds its special tokens already: encode it with
``add_special_tokens=False`` (:func:`encode_chat` does).
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from flexrun.tokenizer import Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_MAX_PROMPT_CHARS = 16 * 2**20
_MAX_REPEAT_CHARS = 2**20


class ChatError(ValueError):
    """Messages or template cannot be made into a prompt."""


def check_messages(messages: Any, template: str = "") -> list[dict[str, Any]]:
    """Validated copy of a conversation; content given as a list of text parts becomes one string.

    Args:
        messages: list of {"role": ..., "content": ...}; other fields are passed on to the template.
        template: roles that it names in quotes are accepted besides :data:`ROLES`.

    Raises:
        ChatError: names the message by its index.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise ChatError(f"messages must be a list of objects with role and content, got {_short(messages)}")
    if not messages:
        raise ChatError("messages is empty; at least one message is needed")
    return [_check_message(i, message, template) for i, message in enumerate(messages)]


def _check_message(index: int, message: Any, template: str) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise ChatError(f"{where} must be an object with role and content, got {_short(message)}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ChatError(f"{where}.role must be one of {', '.join(ROLES)}, got {_short(role)}")
    if role not in ROLES and f"'{role}'" not in template and f'"{role}"' not in template:
        near = difflib.get_close_matches(role, ROLES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"valid roles are {', '.join(ROLES)}"
        raise ChatError(f"{where}.role is {role!r}, which the model's chat template does not know: {hint}")
    result = {str(key): value for key, value in message.items()}
    content = message.get("content")
    if isinstance(content, list | tuple):
        content = "\n".join(_part_text(f"{where}.content[{i}]", part) for i, part in enumerate(content))
    elif (
        content is None and role == "assistant" and (message.get("tool_calls") or "function_call" in message)
    ):
        content = ""
    elif not isinstance(content, str):
        found = "nothing" if "content" not in message else _short(content)
        raise ChatError(f"{where}.content must be a string or a list of text parts, got {found}")
    result["content"] = content
    return result


def _part_text(where: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise ChatError(f'{where} must be {{"type": "text", "text": ...}}, got {_short(part)}')
    if part.get("type") not in ("text", "input_text"):
        raise ChatError(f"{where} has type {part.get('type')!r}; only text parts are supported")
    if not isinstance(part.get("text"), str):
        raise ChatError(f"{where}.text must be a string, got {_short(part.get('text'))}")
    return part["text"]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: Jinja text.
        named_tokens: variables such as bos_token that the template may print.

    Raises:
        ChatError: the text is not a valid template.
    """

    def __init__(self, source: str, named_tokens: Mapping[str, str] | None = None) -> None:
        import jinja2

        self.source = source
        self.named_tokens: dict[str, str] = dict(named_tokens or {})
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ChatError(f"the chat template is not valid Jinja: line {error.lineno}: {error}") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt text of a conversation; ``variables`` are the template's own switches.

        Raises:
            ChatError: the messages are invalid, or the template refuses them or fails.
        """
        import jinja2

        context: dict[str, Any] = {
            **self.named_tokens,
            "tools": tools,
            "documents": documents,
            **variables,
            "messages": check_messages(messages, self.source),
            "add_generation_prompt": add_generation_prompt,
        }
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(context):
                pieces.append(piece)
                size += len(piece)
                if size > _MAX_PROMPT_CHARS:
                    raise ChatError(f"the chat template printed more than {_MAX_PROMPT_CHARS} characters")
        except ChatError:
            raise
        except jinja2.exceptions.SecurityError as error:
            raise ChatError(f"the chat template tried something that is not allowed: {error}") from None
        except jinja2.TemplateError as error:
            raise ChatError(f"the chat template refused the messages: {error.message or error}") from None
        except Exception as error:  # a template can raise anything: it indexes, adds and calls
            raise ChatError(f"the chat template failed: {type(error).__name__}: {error}") from None
        return "".join(pieces)


@lru_cache(maxsize=1)
def _environment() -> Any:
    """The sandbox that all templates share, set up as model authors expect it."""
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """{% generation %} marks the model's own words for training; here it prints its body."""

        tags = {"generation"}  # noqa: RUF012  (jinja2 declares it as a plain attribute)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body).set_lineno(line)

    class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
        """Refuses powers and repetitions that would fill memory."""

        intercepted_binops = frozenset({"*", "**"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "**" and not (abs(left) <= 2**32 and abs(right) <= 64):
                raise jinja2.exceptions.SecurityError(f"{left!r} ** {right!r} is too large")
            for sequence, factor in ((left, right), (right, left)):
                repeats = isinstance(sequence, str | list | tuple) and isinstance(factor, int)
                if repeats and len(sequence) * factor > _MAX_REPEAT_CHARS:
                    raise jinja2.exceptions.SecurityError(f"repeating a sequence {factor} times")
            return super().call_binop(context, operator, left, right)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # Jinja's own filter escapes <, > and & for HTML, which a model has never seen.
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def _choose(templates: Mapping[str, str], name: str | None, where: str) -> str:
    """One of several named templates."""
    wanted = name or "default"
    if wanted in templates:
        return templates[wanted]
    if name is None and len(templates) == 1:
        return next(iter(templates.values()))
    raise ChatError(f"{where} has no chat template named {wanted!r}; it has {', '.join(sorted(templates))}")


def folder_chat_template(
    folder: str | Path, tokenizer: Tokenizer | None = None, *, name: str | None = None
) -> ChatTemplate | None:
    """The chat template of a Hugging Face folder, None if it has none.

    chat_template.jinja comes before chat_template.json and tokenizer_config.json, whose field is a string or
    a list of {name, template}.
    """
    root = Path(folder)
    named = tokenizer.named_tokens if tokenizer is not None else {}
    templates: dict[str, str] = {}
    for path in [root / "chat_template.jinja", *sorted((root / "additional_chat_templates").glob("*.jinja"))]:
        if path.is_file():
            key = "default" if path.parent == root else path.stem
            try:
                templates[key] = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ChatError(f"{path} cannot be read: {error}") from None
    for file in ("chat_template.json", "tokenizer_config.json"):
        if "default" in templates or not (root / file).is_file():
            continue
        try:
            value = json.loads((root / file).read_text(encoding="utf-8")).get("chat_template")
        except (OSError, ValueError, AttributeError) as error:
            raise ChatError(f"{root / file} cannot be read: {error}") from None
        templates = _named_templates(value, str(root / file)) | templates
    if not templates:
        return None
    return ChatTemplate(_choose(templates, name, str(root)), named)


def gguf_chat_template(
    metadata: Mapping[str, Any], tokenizer: Tokenizer | None = None, *, name: str | None = None
) -> ChatTemplate | None:
    """The chat template in a GGUF file's metadata, None if it has none."""
    key = "tokenizer.chat_template"
    templates: dict[str, str] = {}
    for field, value in metadata.items():
        if isinstance(value, str) and field == key:
            templates["default"] = value
        elif isinstance(value, str) and field.startswith(key + "."):
            templates[field.removeprefix(key + ".")] = value
    if not templates:
        return None
    named = tokenizer.named_tokens if tokenizer is not None else {}
    return ChatTemplate(_choose(templates, name, "the GGUF file"), named)


def _named_templates(value: Any, where: str) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list) and all(
        isinstance(item, Mapping)
        and isinstance(item.get("name"), str)
        and isinstance(item.get("template"), str)
        for item in value
    ):
        return {item["name"]: item["template"] for item in value}
    raise ChatError(f"{where}: chat_template must be a string or a list of {{name, template}}")


def encode_chat(
    tokenizer: Tokenizer | None,
    template: ChatTemplate | None,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    **variables: Any,
) -> tuple[str, list[int]]:
    """Prompt text and token ids of a conversation.

    Raises:
        ChatError: the model has no tokenizer or chat template, or the messages do not suit it.
    """
    if tokenizer is None:
        raise ChatError("the model has no tokenizer, so it cannot chat; give token ids as a prompt")
    if template is None:
        raise ChatError(
            "the model has no chat template (chat_template.jinja, tokenizer_config.json or GGUF metadata);"
            " give a plain prompt, or put a chat_template.jinja into its folder"
        )
    text = template.render(messages, add_generation_prompt=add_generation_prompt, **variables)
    return text, tokenizer.encode(text, add_special_tokens=False)
