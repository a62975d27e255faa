"""Templates render as transformers renders them; what is wrong is said with the field's name."""

from __future__ import annotations

from typing import Any

import pytest

from hotbatch.core.errors import InvalidRequestError, ModelLoadError
from hotbatch.text import ChatTemplate, Tokenizer

CHATML = (
    "{% for message in messages %}\n"
    "    {% if message.role == 'nobody' %}{{ raise_exception('nobody speaks') }}{% endif %}\n"
    "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
USER = {"role": "user", "content": "Chào <bạn> & 👋"}


@pytest.fixture
def chatml() -> ChatTemplate:
    return ChatTemplate(CHATML, {"eos_token": "</s>"})


CONVERSATIONS: list[list[dict[str, Any]]] = [
    [USER],
    [{"role": "system", "content": "Be brief."}, USER],
    [USER, {"role": "assistant", "content": "Hi."}, {"role": "user", "content": ""}],
]


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("open_turn", [True, False])
def test_equals_transformers(
    smollm: Tokenizer, messages: list[dict[str, Any]], open_turn: bool
) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    assert smollm.chat_template is not None
    for source in (smollm.chat_template, CHATML):
        expected, _ = render_jinja_template(
            [messages],
            chat_template=source,
            add_generation_prompt=open_turn,
            **smollm.special_tokens,
        )
        template = ChatTemplate(source, smollm.special_tokens)
        assert template.render(messages, add_generation_prompt=open_turn) == expected[0]


def test_text_parts_are_joined(chatml: ChatTemplate) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert chatml.render([{"role": "user", "content": parts}]) == (
        "<|user|>one\ntwo</s>\n<|assistant|>"
    )


@pytest.mark.parametrize(
    ("messages", "param", "says"),
    [
        ([], "messages", "at least one"),
        (["hello"], "messages[0]", "object"),
        ([USER, {"content": "x"}], "messages[1].role", "role"),
        ([{"role": 3, "content": "x"}], "messages[0].role", "role"),
        ([{"role": "user"}], "messages[0].content", "required"),
        ([{"role": "user", "content": 3}], "messages[0].content", "string"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "messages[0].content[0]",
            "image_url",
        ),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            "messages[0].content[0].text",
            "string",
        ),
        ([{"role": "assistant", "tool_calls": "x"}], "messages[0].tool_calls", "list"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}],
            "messages[0].tool_calls",
            "JSON",
        ),
        ([{"role": "nobody", "content": "x"}], "messages", "nobody speaks"),
    ],
)
def test_bad_messages_name_the_field(
    chatml: ChatTemplate, messages: list[Any], param: str, says: str
) -> None:
    with pytest.raises(InvalidRequestError, match=says) as caught:
        chatml.render(messages)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'a': 1}) }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ 1 / 0 }}",
        "{{ missing.attribute }}",
    ],
)
def test_the_sandbox_holds_and_faults_become_errors(source: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ChatTemplate(source).render([USER])
    assert caught.value.param == "messages"


def test_invalid_jinja_is_refused_at_load() -> None:
    with pytest.raises(ModelLoadError, match="line 2"):
        ChatTemplate("\n{% if %}")


def test_tools_need_a_template_that_looks_at_them(chatml: ChatTemplate) -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "<é>"}}]
    with pytest.raises(InvalidRequestError) as caught:
        chatml.render([USER], tools=tools)
    assert caught.value.param == "tools"
    handy = ChatTemplate("{% if tools %}{{ tools | tojson }}{% endif %}")
    assert handy.handles_tools
    assert '"description": "<é>"' in handy.render([USER], tools=tools)
    assert handy.render([USER]) == ""


def test_tool_call_arguments_reach_the_template_as_an_object() -> None:
    template = ChatTemplate("{{ messages[0].tool_calls[0].function.arguments.city }}")
    call = {"function": {"name": "f", "arguments": '{"city": "Huế"}'}}
    assert template.render([{"role": "assistant", "tool_calls": [call]}]) == "Huế"


def test_extensions_and_variables() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}"
        "{% endfor %}{{ mood }}{{ strftime_now('%Y') | length }}"
    )
    assert template.render([USER, USER], mood="!") == USER["content"] + "!4"


def test_variables_may_have_the_names_of_our_own_arguments() -> None:
    assert ChatTemplate("{{ text }}{{ variables }}").render([USER], text=1, variables=2) == "12"
    ChatTemplate("x").render([USER], **{"self": 1})


def test_arguments_of_a_tool_call_that_cannot_be_read() -> None:
    for arguments in ("{", "[" * 10**5):
        call = {"function": {"name": "f", "arguments": arguments}}
        with pytest.raises(InvalidRequestError, match="arguments"):
            ChatTemplate("x").render([{"role": "assistant", "tool_calls": [call]}])


def test_final_message_can_be_left_open(chatml: ChatTemplate) -> None:
    messages = [USER, {"role": "assistant", "content": "Sure, "}]
    text = chatml.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|assistant|>Sure,")
    with pytest.raises(InvalidRequestError, match="continue_final_message"):
        ChatTemplate("x").render(messages, continue_final_message=True)
