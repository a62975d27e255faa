"""The terminal conversation: its commands, its two kinds of partner, and answers cut short."""

from __future__ import annotations

import io
import json
from collections.abc import Generator, Iterator
from typing import Any

import httpx
import pytest
from rich.console import Console

from hotbatch.assembly import Assembly, assemble
from hotbatch.chat import Conversation, LocalModel, Piece, RemoteModel, run_chat
from hotbatch.core.errors import HotbatchError
from hotbatch.core.sampling_params import SamplingParams
from hotbatch.options import EngineOptions

PARAMS = SamplingParams(max_tokens=6, temperature=0.0)


class Parrot:
    """Answers with what was said; notes the conversations and whether an answer was closed."""

    name = "parrot"

    def __init__(self, interrupt_after: int | None = None, fail: bool = False) -> None:
        self.heard: list[list[dict[str, str]]] = []
        self.closed = 0
        self._interrupt_after = interrupt_after
        self._fail = fail

    def answer(self, conversation: Conversation) -> Generator[Piece, None, None]:
        self.heard.append(conversation.messages)
        try:
            if self._fail:
                raise HotbatchError("No [bold] today.")
            words = conversation.messages[-1]["content"].split()
            for count, word in enumerate(words):
                if count == self._interrupt_after:
                    raise KeyboardInterrupt
                yield Piece(f"{word} ", count + 1)
        finally:
            self.closed += 1


def talk(partner: Any, lines: list[str], **fields: Any) -> tuple[Conversation, str]:
    """Runs a chat in which a person types `lines`; the conversation and what the screen shows."""
    conversation = Conversation(PARAMS, **fields)
    screen = io.StringIO()
    console = Console(file=screen, width=200)
    typed = iter(lines)

    def type_line(prompt: str = "", **_: Any) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    console.input = type_line  # type: ignore[method-assign,assignment]
    run_chat(partner, conversation, console)
    return conversation, screen.getvalue()


def test_the_conversation_grows_turn_by_turn() -> None:
    parrot = Parrot()
    conversation, screen = talk(parrot, ["one two", "", "three"], system="Be brief.")
    assert parrot.heard[1] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one two"},
        {"role": "assistant", "content": "one two "},
        {"role": "user", "content": "three"},
    ]
    assert conversation.turns[-1] == {"role": "assistant", "content": "three "}
    assert "2 tokens, the first after" in screen


def test_commands() -> None:
    parrot = Parrot()
    _, screen = talk(
        parrot, ["one", "/system Be kind.", "two", "/reset", "three", "/what", "/exit", "never"]
    )
    assert parrot.heard[1][0] == {"role": "system", "content": "Be kind."}
    assert [message["content"] for message in parrot.heard[2]] == ["Be kind.", "three"]
    assert len(parrot.heard) == 3
    assert "/reset forgets" in screen.split("starts anew")[1]
    assert talk(parrot, ["/system"], system="x")[0].system is None


def test_ctrl_c_ends_the_answer_and_not_the_chat() -> None:
    parrot = Parrot(interrupt_after=2)
    conversation, screen = talk(parrot, ["a b c d"])
    assert conversation.turns[-1]["content"] == "a b "
    assert "(stopped)" in screen
    assert parrot.closed == 1


def test_a_failed_question_is_forgotten_and_its_reason_shown_as_it_is() -> None:
    conversation, screen = talk(Parrot(fail=True), ["why?"])
    assert conversation.turns == []
    assert "No [bold] today." in screen


def test_answers_are_printed_as_they_are() -> None:
    _, screen = talk(Parrot(), ["[red]not markup[/red] :smile:"])
    assert "[red]not markup[/red] :smile:" in screen


# ---- a model in this process


@pytest.fixture
def tiny() -> Iterator[Assembly]:
    parts = assemble(
        EngineOptions(
            model="tiny",
            load_format="dummy",
            threads=1,
            max_num_seqs=2,
            kv_cache_memory_bytes=2**20,
        )
    )
    yield parts
    parts.close()


def test_a_local_model_answers_again_and_again(tiny: Assembly) -> None:
    partner = LocalModel(tiny)
    first = list(partner.answer(Conversation(PARAMS, turns=[{"role": "user", "content": "a"}])))
    again = list(partner.answer(Conversation(PARAMS, turns=[{"role": "user", "content": "a"}])))
    assert first[-1].num_tokens == 6
    assert "".join(piece.text for piece in first) == "".join(piece.text for piece in again)


def test_a_local_answer_that_is_closed_leaves_nothing_running(tiny: Assembly) -> None:
    partner = LocalModel(tiny)
    endless = SamplingParams(temperature=0.0)
    answer = partner.answer(Conversation(endless, turns=[{"role": "user", "content": "a"}]))
    next(answer)
    answer.close()
    # The next answer waits for the engine, so by its end the first is out of it.
    list(partner.answer(Conversation(PARAMS, turns=[{"role": "user", "content": "b"}])))
    assert tiny.engine.num_outstanding == 0


# ---- a server


def sse(*chunks: Any) -> bytes:
    lines = [chunk if isinstance(chunk, str) else json.dumps(chunk) for chunk in chunks]
    return "".join(f"data: {line}\n\n" for line in lines).encode()


class FakeServer:
    """Answers the client's requests from memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, reply: httpx.Response) -> None:
        self.requests: list[httpx.Request] = []
        self._reply = reply
        client = httpx.Client

        def connect(**options: Any) -> httpx.Client:
            return client(**options, transport=httpx.MockTransport(self._handle))

        monkeypatch.setattr(httpx, "Client", connect)

    def _handle(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "first"}, {"id": "second"}]})
        return self._reply


def ask(partner: RemoteModel) -> list[Piece]:
    turns = [{"role": "user", "content": "hi"}]
    return list(partner.answer(Conversation(PARAMS, turns=turns)))


def test_a_server_s_answer_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    reply = sse(
        {"choices": [{"delta": {"role": "assistant"}}]},
        {"choices": [{"delta": {"content": "Xin "}}]},
        {"choices": [{"delta": {"content": "chào"}, "finish_reason": "stop"}]},
        {"choices": [], "usage": {"completion_tokens": 2}},
        "[DONE]",
    )
    server = FakeServer(monkeypatch, httpx.Response(200, content=reply))
    partner = RemoteModel("http://server/v1/", api_key="sesame")
    pieces = ask(partner)
    assert partner.name == "first"
    assert "".join(piece.text for piece in pieces) == "Xin chào"
    assert pieces[-1].num_tokens == 2
    request = server.requests[-1]
    assert request.url == "http://server/v1/chat/completions"
    assert request.headers["authorization"] == "Bearer sesame"
    body = json.loads(request.content)
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("first", 6, 0.0)
    assert body["messages"] == [{"role": "user", "content": "hi"}]


def test_a_refusal_has_the_server_s_words(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = httpx.Response(401, json={"error": {"message": "Wrong key."}})
    FakeServer(monkeypatch, refusal)
    with pytest.raises(HotbatchError, match=r"HTTP 401\): Wrong key\."):
        ask(RemoteModel("http://server", "named"))


def test_an_error_in_the_stream_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeServer(monkeypatch, httpx.Response(200, content=sse({"error": {"message": "Broken."}})))
    with pytest.raises(HotbatchError, match=r"Broken\."):
        ask(RemoteModel("http://server", "named"))


@pytest.mark.parametrize("chunk", ["no JSON", "[]", '{"choices": [1]}', '{"error": "x"}'])
def test_a_server_that_answers_otherwise(monkeypatch: pytest.MonkeyPatch, chunk: str) -> None:
    FakeServer(monkeypatch, httpx.Response(200, content=sse(chunk)))
    with pytest.raises(HotbatchError, match="not as an OpenAI-compatible server"):
        ask(RemoteModel("http://server", "named"))


def test_a_refusal_in_another_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeServer(monkeypatch, httpx.Response(500, json=["out of", "order"]))
    with pytest.raises(HotbatchError, match=r"HTTP 500\).*out of"):
        ask(RemoteModel("http://server", "named"))


def test_what_is_no_text_cannot_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeServer(monkeypatch, httpx.Response(200, content=sse("[DONE]")))
    partner = RemoteModel("http://server", "named")
    turns = [{"role": "user", "content": "\udcff"}]
    with pytest.raises(HotbatchError, match="UTF-8"):
        list(partner.answer(Conversation(PARAMS, turns=turns)))


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "no address", "ftp://server"])
def test_an_address_where_nobody_answers(url: str) -> None:
    with pytest.raises(HotbatchError, match="No answer from"):
        RemoteModel(url)
