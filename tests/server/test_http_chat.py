"""/v1/chat/completions with the official clients, sync and async."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from server_parts import MODEL, Rig, make_rig, serving

MESSAGES: Any = [{"role": "user", "content": "xin chào 👋"}]


def create(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": MODEL, "messages": MESSAGES, **fields})


def expected(rig: Rig, index: int = 0, **params: Any) -> str:
    prompt = rig.chat_prompt(MESSAGES[0]["content"])
    return rig.text(rig.continuation(prompt, index, **params))


def test_message(rig: Rig, client: openai.OpenAI) -> None:
    answer = create(client, seed=1, max_tokens=30)
    choice = answer.choices[0]
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert choice.message.role == "assistant"
    assert choice.message.content == expected(rig, seed=1, max_tokens=30)
    assert choice.finish_reason == "length"
    assert answer.usage.prompt_tokens == len(rig.chat_prompt(MESSAGES[0]["content"]))
    assert answer.usage.completion_tokens == 30


def test_stream(rig: Rig, client: openai.OpenAI) -> None:
    chunks = list(
        create(client, seed=1, max_tokens=30, stream=True, stream_options={"include_usage": True})
    )
    assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)
    assert len({chunk.id for chunk in chunks}) == 1
    first = chunks[0].choices[0].delta
    assert (first.role, first.content) == ("assistant", "")
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == expected(rig, seed=1, max_tokens=30)
    ends = [chunk.choices[0].finish_reason for chunk in chunks[:-1]]
    assert ends[-1] == "length"
    assert set(ends[:-1]) == {None}
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 30


@pytest.mark.parametrize("stream", [False, True])
def test_several_choices(rig: Rig, client: openai.OpenAI, stream: bool) -> None:
    answer = create(client, seed=1, max_tokens=10, n=3, stream=stream)
    texts = [""] * 3
    if stream:
        for chunk in answer:
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    else:
        texts = [choice.message.content for choice in answer.choices]
        prompt = rig.chat_prompt(MESSAGES[0]["content"])
        assert answer.usage.prompt_tokens == len(prompt)
    assert texts == [expected(rig, k, seed=1, max_tokens=10) for k in range(3)]


def test_max_completion_tokens_comes_first(client: openai.OpenAI) -> None:
    assert create(client, max_completion_tokens=3, max_tokens=9).usage.completion_tokens == 3


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(rig: Rig, client: openai.OpenAI, stream: bool) -> None:
    fields = {"seed": 1, "max_tokens": 5, "logprobs": True, "top_logprobs": 2, "stream": stream}
    answer = create(client, **fields)
    choices = [chunk.choices[0] for chunk in answer] if stream else [answer.choices[0]]
    entries = [entry for c in choices if c.logprobs for entry in c.logprobs.content]
    prompt = rig.chat_prompt(MESSAGES[0]["content"])
    tokens = rig.continuation(prompt, seed=1, max_tokens=5)
    raw = [rig.tokenizer.token_text(token)[1] for token in tokens]
    assert [bytes(entry.bytes) for entry in entries] == raw
    model = rig.executor.model
    for at, entry in enumerate(entries):
        wanted = model.logprob(model.context([*prompt, *tokens[:at]]), tokens[at], 2)
        assert entry.logprob == pytest.approx(wanted.logprob)
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(
            [logprob for _, logprob in wanted.top]
        )
    plain = create(client, seed=1, max_tokens=1)
    assert plain.choices[0].logprobs is None
    bare = create(client, seed=1, max_tokens=1, logprobs=True).choices[0].logprobs.content[0]
    assert bare.top_logprobs == []


def test_tools_reach_a_template_that_takes_them(rig: Rig, client: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", "function": {"name": "weather"}}]
    with_tools = create(client, tools=tools, max_tokens=1).usage.prompt_tokens
    without = create(client, tools=tools, tool_choice="none", max_tokens=1).usage.prompt_tokens
    assert with_tools > without == create(client, max_tokens=1).usage.prompt_tokens


def test_final_message_is_continued(rig: Rig, client: openai.OpenAI) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "hello"}]
    extra = {
        "continue_final_message": True,
        "add_generation_prompt": False,
        "return_token_ids": True,
    }
    answer = create(client, messages=messages, max_tokens=1, extra_body=extra)
    assert rig.text(answer.prompt_token_ids).endswith("assistant: hello")


def test_end_of_text_and_ignoring_it() -> None:
    with (
        serving(make_rig(eos_probability=0.2)) as rig,
        openai.OpenAI(base_url=f"{rig.url}/v1", api_key="none") as client,
    ):
        answer = create(client, seed=2)
        choice = answer.choices[0]
        prompt = rig.chat_prompt(MESSAGES[0]["content"])
        tokens = rig.continuation(prompt, seed=2)
        assert choice.finish_reason == "stop"
        assert choice.stop_reason is None
        assert choice.message.content == rig.text(tokens[:-1])
        assert answer.usage.completion_tokens == len(tokens)
        # The end-of-text token is no text, also where special tokens are shown.
        shown = create(client, seed=2, extra_body={"skip_special_tokens": False})
        assert "<|end|>" not in shown.choices[0].message.content
        on = create(client, seed=2, max_tokens=60, extra_body={"ignore_eos": True})
        assert on.usage.completion_tokens == 60
        rig.wait_idle()


def test_without_max_tokens_it_fills_the_context(rig: Rig, client: openai.OpenAI) -> None:
    answer = create(client)
    assert answer.usage.total_tokens == rig.service.max_model_len
    assert answer.choices[0].finish_reason == "length"


def test_async_client_and_defaults_of_the_makers() -> None:
    async def ask(url: str) -> Any:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            stream = await client.chat.completions.create(
                model=MODEL, messages=MESSAGES, max_tokens=20, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    with serving(make_rig(generation_defaults={"temperature": 0.0})) as rig:
        assert asyncio.run(ask(rig.url)) == expected(rig, temperature=0.0, max_tokens=20)
        rig.wait_idle()


def test_models(rig: Rig, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL, "alias"]
    assert client.models.retrieve("alias").id == "alias"
    assert create(client, model="alias", max_tokens=1).model == "alias"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
