"""A model's chat template: messages in, prompt text out.

Templates are Jinja programs that come with model files, so they run in a sandbox that can
neither reach Python's internals nor change what it is given. The environment is the one
Hugging Face renders with (transformers, utils/chat_template_utils.py), because templates are
written against it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from hotbatch.core.errors import InvalidRequestError, ModelLoadError

# What `ChatTemplate.render` gives to templates itself; variables of a caller may not replace it.
RESERVED_VARIABLES = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message"}
)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012 (the name and type are Jinja's)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which would put \u003c into prompts.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment


class ChatTemplate:
    """A compiled template; rendering is safe from many threads at once.

    `special_tokens` are variables every rendering sees (`bos_token`, `eos_token`, ...).
    `handles_tools` says whether the template looks at `tools` at all.

    Raises:
        ModelLoadError: the source is not valid Jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            names = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateSyntaxError as error:
            raise ModelLoadError(
                f"The model's chat template is not valid Jinja (line {error.lineno}): "
                f"{error.message}",
                param="chat_template",
            ) from error
        self.source = source
        self.handles_tools = "tools" in names
        self._special_tokens = dict(special_tokens or {})

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt for a conversation.

        `continue_final_message` leaves the last message open, for the model to go on with.
        `variables` reach the template as they are.

        Raises:
            InvalidRequestError: bad messages, or the template refused them; `param` is
                "messages" (or "tools").
        """
        messages = normalize_messages(messages)
        if tools and not self.handles_tools:
            raise InvalidRequestError(
                "This model's chat template does not support tools; leave them out.",
                param="tools",
            )
        try:
            # As one argument: a variable may be called anything, `self` too.
            text = self._template.render(
                {
                    **self._special_tokens,
                    **variables,
                    "messages": messages,
                    "tools": list(tools) if tools else None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except jinja2.TemplateError as error:
            raise InvalidRequestError(
                f"The model's chat template refused the messages: {error.message or error}",
                param="messages",
            ) from error
        except Exception as error:  # templates are programs: any Python error may come out
            raise InvalidRequestError(
                f"The model's chat template failed on the messages: {error}", param="messages"
            ) from error
        return _cut_after_final(text, messages) if continue_final_message else text


def check_variables(variables: Mapping[str, Any]) -> None:
    """Raises InvalidRequestError for template variables that are not the caller's to give."""
    reserved = RESERVED_VARIABLES & variables.keys()
    if reserved:
        raise InvalidRequestError(
            f"chat_template_kwargs must not hold {', '.join(sorted(reserved))}.",
            param="chat_template_kwargs",
        )


def normalize_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages with their content as text: parts of type `text` are joined by newlines.

    Raises:
        InvalidRequestError: no messages, one that is not an object with a role, or content
            other than text.
    """
    if not messages:
        raise InvalidRequestError("messages must hold at least one message.", param="messages")
    return [_normalize(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _normalize(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"{where} must be an object.", param=where)
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise InvalidRequestError(
            f"{where}.role must be a string such as 'user'.", param=f"{where}.role"
        )
    normalized = dict(message)
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        normalized["content"] = "\n".join(
            _part_text(part, f"{where}.content[{i}]") for i, part in enumerate(content)
        )
    elif content is None:
        if message["role"] in ("user", "system", "developer", "tool"):
            raise InvalidRequestError(
                f"{where}.content is required for a {message['role']} message.",
                param=f"{where}.content",
            )
        # An assistant's tool call has no text; templates test for it as falsy.
        normalized["content"] = "" if not message.get("tool_calls") else None
    elif not isinstance(content, str):
        raise InvalidRequestError(
            f"{where}.content must be a string or a list of text parts.",
            param=f"{where}.content",
        )
    if message.get("tool_calls") is not None:
        normalized["tool_calls"] = _with_parsed_arguments(message["tool_calls"], where)
    return normalized


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise InvalidRequestError(f"{where} must be an object with a type.", param=where)
    if part.get("type") != "text":
        raise InvalidRequestError(
            f"{where} has type {part.get('type')!r:.60}; this server takes text only.", param=where
        )
    if not isinstance(part.get("text"), str):
        raise InvalidRequestError(f"{where}.text must be a string.", param=f"{where}.text")
    text: str = part["text"]
    return text


def _with_parsed_arguments(calls: Any, where: str) -> list[dict[str, Any]]:
    """OpenAI sends a call's arguments as a JSON string, templates expect an object."""
    where = f"{where}.tool_calls"
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise InvalidRequestError(f"{where} must be a list of objects.", param=where)
    parsed: list[dict[str, Any]] = []
    for call in calls:
        call = dict(call)
        function = call.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
            try:
                arguments = json.loads(function["arguments"] or "{}")
            except (ValueError, RecursionError) as error:
                raise InvalidRequestError(
                    f"{where}: function.arguments is not valid JSON ({error}).", param=where
                ) from error
            call["function"] = {**function, "arguments": arguments}
        parsed.append(call)
    return parsed


def _cut_after_final(text: str, messages: Sequence[Mapping[str, Any]]) -> str:
    final = str(messages[-1].get("content") or "").strip()
    at = text.rfind(final) if final else -1
    if at < 0:
        raise InvalidRequestError(
            "continue_final_message needs a last message with text that the chat template "
            "keeps as it is.",
            param="continue_final_message",
        )
    return text[: at + len(final)]
