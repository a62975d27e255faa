"""The whole server on the real model, asked by the official client."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest
from served_model import MODEL, ServedModel

NUM_CLIENTS = 64
COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
TOPICS = ("rivers", "bread", "the moon", "a lost umbrella", "số nguyên tố", "trains", "🐙", "salt")


def chat_body(number: int, **fields: Any) -> dict[str, Any]:
    """Half of the clients are greedy, half sample with a seed; prompts differ in length."""
    topic = TOPICS[number % len(TOPICS)]
    content = f"Client {number} asks about {topic}. " + "Think well. " * (number % 7)
    sampling = {"temperature": 0.0} if number % 2 else {"temperature": 0.9, "seed": number}
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 12,
        **sampling,
        **fields,
    }


async def stream_text(
    client: openai.AsyncOpenAI, body: dict[str, Any], leaves_after: int | None = None
) -> tuple[str, str | None]:
    """Text and finish reason of one stream; the reason is None if the client left before."""
    stream = await client.chat.completions.create(**body, stream=True)
    text, reason, chunks = "", None, 0
    async for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        reason = chunk.choices[0].finish_reason or reason
        chunks += 1
        if chunks == leaves_after:
            await stream.close()
            break
    return text, reason


@pytest.mark.slow
def test_64_streams_have_the_text_of_their_solo_runs(server: ServedModel) -> None:
    async def at_once() -> list[tuple[str, str | None]]:
        async with server.async_client() as client:
            return await asyncio.gather(
                *[stream_text(client, chat_body(number)) for number in range(NUM_CLIENTS)]
            )

    together = asyncio.run(at_once())
    with server.client() as client:
        for number, (text, reason) in enumerate(together):
            # The salt keeps the solo run from reading what the crowd has left in the cache.
            body = chat_body(number, extra_body={"cache_salt": f"solo {number}"})
            alone = client.chat.completions.create(**body).choices[0]
            assert (text, reason) == (alone.message.content, alone.finish_reason)
    assert len({text for text, _ in together}) > NUM_CLIENTS // 2


def test_half_of_64_clients_leave_midway(server: ServedModel) -> None:
    before = server.metric("generation_tokens_total")

    async def at_once() -> list[tuple[str, str | None]]:
        async with server.async_client() as client:
            return await asyncio.gather(
                *[
                    stream_text(
                        client,
                        # Whoever leaves had asked for far more than the others.
                        chat_body(
                            number,
                            max_tokens=1000 if number % 2 else 24,
                            extra_body={"ignore_eos": True},
                        ),
                        leaves_after=4 if number % 2 else None,
                    )
                    for number in range(NUM_CLIENTS)
                ]
            )

    for number, (text, reason) in enumerate(asyncio.run(at_once())):
        assert reason == (None if number % 2 else "length")
        assert text
    server.wait_idle()
    generated = server.metric("generation_tokens_total") - before
    assert generated < NUM_CLIENTS // 2 * 1000 / 2, "the server went on for clients that had left"


@pytest.mark.parametrize("path", [COMPLETION, CHAT])
@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 11},
        {"temperature": 1.0, "seed": -4, "n": 3},
    ],
    ids=["greedy", "seeded", "n=3"],
)
def test_the_same_again(server: ServedModel, path: str, sampling: dict[str, Any]) -> None:
    def ask(**changes: Any) -> list[str]:
        body = {"model": MODEL, "max_tokens": 12, **sampling, **changes}
        if path == COMPLETION:
            body["prompt"] = "The three laws of the kitchen:"
        else:
            body["messages"] = [{"role": "user", "content": "Name a colour and why."}]
        with server.http() as http:
            choices = http.post(path, json=body).raise_for_status().json()["choices"]
        return [
            choice["text"] if path == COMPLETION else choice["message"]["content"]
            for choice in sorted(choices, key=lambda choice: choice["index"])
        ]

    first = ask()
    assert first == ask()
    assert first == ask(cache_salt="computed anew")
    assert len(set(first)) == sampling.get("n", 1)
    if "n" in sampling:
        assert ask(n=1) == first[:1]
    if "seed" in sampling:
        assert ask(seed=12345) != first


@pytest.mark.parametrize(
    "prompt",
    [
        "Xin chào các bạn! Xin chào các bạn! Xin chào các bạn! Xin chào",
        "👩‍🚀🌏 👩‍🚀🌏 👩‍🚀🌏 👩‍🚀🌏 👩‍🚀🌏 👩‍🚀",
        "Thủ đô của Việt Nam là Hà Nội. Thủ đô của Việt Nam là",
    ],
)
def test_streamed_text_is_that_of_all_tokens_decoded_at_once(
    server: ServedModel, prompt: str
) -> None:
    body: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": 30, "temperature": 0.0}
    with server.client() as client, server.http() as http:
        choice = client.completions.create(**body, extra_body={"return_token_ids": True}).choices[0]
        tokens = choice.model_dump()["token_ids"]
        decoded = http.post("/detokenize", json={"tokens": tokens}).raise_for_status().json()
        pieces = [
            chunk.choices[0].text
            # Not the answer that was kept of the first: that comes in one piece.
            for chunk in client.completions.create(
                **body, stream=True, extra_body={"speculate": False}
            )
            if chunk.choices
        ]
    assert not choice.text.isascii(), "the model said nothing that is hard to stream"
    assert "".join(pieces) == choice.text == decoded["prompt"]
    assert sum(bool(piece) for piece in pieces) > 3


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        (
            CHAT,
            {"messages": [{"role": "user", "content": "x"}], "temperature": -1},
            400,
            "temperature",
        ),
        (CHAT, {"messages": []}, 400, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "model": "gpt-9"}, 404, "model"),
        (COMPLETION, {"prompt": "x", "suffix": "y"}, 400, "suffix"),
        (COMPLETION, {"prompt": [1, 2, 49152]}, 400, "prompt"),
        (COMPLETION, {"prompt": "x", "max_tokens": 8192}, 400, "max_tokens"),
        (COMPLETION, {"prompt": "word " * 9000}, 400, "prompt"),
        (COMPLETION, {"prompt": "x", "logit_bias": {"49152": 1}}, 400, "logit_bias"),
    ],
)
def test_bad_fields(
    server: ServedModel, path: str, body: dict[str, Any], status: int, param: str
) -> None:
    with server.http() as http:
        answer = http.post(path, json={"model": MODEL, **body})
    check_error(answer, status)
    assert answer.json()["error"]["param"] == param


def test_bad_bodies(server: ServedModel) -> None:
    with server.http() as http:
        check_error(http.post(CHAT, content=b'{"model": '), 400)
        check_error(http.post(COMPLETION, content=b"[1, 2]"), 400)
        check_error(http.post("/v1/embeddings", json={}), 404)
        check_error(http.get(COMPLETION), 405)


def check_error(answer: httpx.Response, status: int) -> None:
    assert answer.status_code == status, answer.text
    assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
    assert len(answer.json()["error"]["message"]) > 10


def test_the_client_raises_its_own_errors(server: ServedModel) -> None:
    with server.client() as client:
        with pytest.raises(openai.BadRequestError) as bad:
            client.completions.create(model=MODEL, prompt="x", max_tokens=100_000)
        assert bad.value.code == "context_length_exceeded"
        with pytest.raises(openai.NotFoundError) as unknown:
            client.completions.create(model="another", prompt="x")
        assert unknown.value.code == "model_not_found"
