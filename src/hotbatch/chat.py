"""A conversation in the terminal, with a model in this process or with a server.

What answers is a `Partner`: a `LocalModel` puts the conversation straight into an engine, a
`RemoteModel` speaks HTTP to any OpenAI-compatible server. Both stream, and with both an answer
that is no longer wanted is ended by closing its stream.
"""

from __future__ import annotations

import itertools
import json
import queue
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import httpx
from rich.console import Console
from rich.markup import escape

from hotbatch.core.errors import HotbatchError
from hotbatch.core.plan import TokenEvent
from hotbatch.core.request import Request
from hotbatch.core.sampling_params import SamplingParams
from hotbatch.engine.seeds import child_seed
from hotbatch.server.output import ChoiceOutput

if TYPE_CHECKING:
    from hotbatch.assembly import Assembly

_HELP = (
    "/reset forgets the conversation, /system TEXT sets the system prompt, /exit leaves; "
    "Ctrl-C stops an answer"
)


@dataclass(slots=True)
class Conversation:
    """How answers are sampled, the system prompt, and what was said so far."""

    params: SamplingParams
    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)

    @property
    def messages(self) -> list[dict[str, str]]:
        opening = [{"role": "system", "content": self.system}] if self.system else []
        return opening + self.turns


@dataclass(frozen=True, slots=True)
class Piece:
    """A bit of an answer; `num_tokens` is how many the answer has so far, where known."""

    text: str = ""
    num_tokens: int | None = None


class Partner(Protocol):
    """Whoever answers."""

    @property
    def name(self) -> str: ...

    def answer(self, conversation: Conversation) -> Generator[Piece, None, None]:
        """Yield the answer as it comes; closing the generator ends it.

        Raises:
            HotbatchError: it cannot answer; the message says why.
        """
        ...


class LocalModel:
    """A model in this process. Takes the assembly's engine and starts it."""

    def __init__(self, assembly: Assembly) -> None:
        if assembly.chat_template is None:
            raise HotbatchError(
                f"The model {assembly.name} has no chat template; give one with --chat-template."
            )
        self.name = assembly.name
        self._assembly = assembly
        self._template = assembly.chat_template
        self._ids = itertools.count()
        self._events: queue.SimpleQueue[list[TokenEvent]] = queue.SimpleQueue()
        assembly.engine.connect(self._events.put)
        assembly.engine.start()

    def answer(self, conversation: Conversation) -> Generator[Piece, None, None]:
        assembly, params = self._assembly, conversation.params
        # The template has written the special tokens already.
        prompt = assembly.tokenizer.encode(
            self._template.render(conversation.messages), add_special_tokens=False
        )
        request = Request(
            f"chat-{next(self._ids)}",
            prompt,
            params,
            seed=child_seed(params.seed, 0),
            eos_token_ids=assembly.eos_token_ids,
        )
        output = ChoiceOutput(assembly.tokenizer, params, prompt)
        assembly.engine.submit(request)
        try:
            yield from self._pieces(request.request_id, output)
        finally:
            assembly.engine.cancel(request.request_id)

    def _pieces(self, request_id: str, output: ChoiceOutput) -> Generator[Piece, None, None]:
        while True:
            for event in self._events.get():
                if event.request_id != request_id:
                    continue  # the rest of an answer that was stopped
                delta = output.feed(event)
                if delta.error is not None:
                    raise HotbatchError(delta.error)
                yield Piece(delta.text, output.num_output)
                if delta.finish_reason is not None:
                    return


# What reading foreign JSON may raise.
_NOT_AS_EXPECTED = (ValueError, KeyError, IndexError, TypeError, AttributeError)


class RemoteModel:
    """A model behind an OpenAI-compatible server.

    Args:
        url: of the server, with or without /v1.
        name: the model to ask for; None for the first that the server lists.
        api_key: sent as a bearer token.

    Raises:
        HotbatchError: the server cannot be reached or refuses; the message has its words.
    """

    def __init__(self, url: str, name: str | None = None, api_key: str | None = None) -> None:
        self._url = url
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            self._http = httpx.Client(
                base_url=url.rstrip("/").removesuffix("/v1") + "/v1",
                headers=headers,
                timeout=httpx.Timeout(10.0, read=None),  # an answer may wait long in the queue
            )
            self.name = name or self._first_model()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from error

    def close(self) -> None:
        self._http.close()

    def answer(self, conversation: Conversation) -> Generator[Piece, None, None]:
        try:
            with self._http.stream(
                "POST", "/chat/completions", json=self._body(conversation)
            ) as response:
                if response.status_code != httpx.codes.OK:
                    response.read()
                    raise _refusal(response)
                for line in response.iter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        yield self._read_piece(line.removeprefix("data: "))
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        except UnicodeEncodeError as error:
            raise HotbatchError(
                "That cannot be sent: it holds bytes that are not UTF-8. Type it again."
            ) from error

    def _body(self, conversation: Conversation) -> dict[str, Any]:
        params = conversation.params
        body = {
            "model": self.name,
            "messages": conversation.messages,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return body | ({"stop": list(params.stop)} if params.stop else {})

    def _first_model(self) -> str:
        response = self._http.get("/models")
        if response.status_code != httpx.codes.OK:
            raise _refusal(response)
        try:
            return str(response.json()["data"][0]["id"])
        except _NOT_AS_EXPECTED as error:
            raise self._strange() from error

    def _read_piece(self, data: str) -> Piece:
        try:
            return _piece(json.loads(data))
        except _NOT_AS_EXPECTED as error:
            raise self._strange() from error

    def _strange(self) -> HotbatchError:
        return HotbatchError(f"{self._url} answers, but not as an OpenAI-compatible server does.")

    def _unreachable(self, error: Exception) -> HotbatchError:
        return HotbatchError(f"No answer from {self._url} ({error}). Does a server run there?")


def _piece(chunk: dict[str, Any]) -> Piece:
    if "error" in chunk:
        raise HotbatchError(str(chunk["error"].get("message", chunk["error"])))
    usage = chunk.get("usage") or {}
    choices = chunk.get("choices") or []
    text = (choices[0].get("delta") or {}).get("content") if choices else None
    return Piece(text or "", usage.get("completion_tokens"))


def _refusal(response: httpx.Response) -> HotbatchError:
    try:
        message = str(response.json()["error"]["message"])
    except _NOT_AS_EXPECTED:
        message = response.text.strip()[:200] or response.reason_phrase
    return HotbatchError(f"The server refuses (HTTP {response.status_code}): {message}")


def run_chat(partner: Partner, conversation: Conversation, console: Console) -> None:
    """Ask, answer, until the person leaves with /exit or Ctrl-D."""
    console.print(f"[dim]{escape(partner.name)}. {_HELP}.[/dim]")
    while True:
        try:
            line = console.input("[bold cyan]you>[/bold cyan] ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if line in ("/exit", "/quit"):
            return
        if line.startswith("/"):
            _obey(line, conversation, console)
        elif line:
            _take_turn(line, partner, conversation, console)


def _obey(line: str, conversation: Conversation, console: Console) -> None:
    command, _, rest = line.partition(" ")
    said = f"{_HELP}."
    if command == "/reset":
        conversation.turns.clear()
        said = "The conversation starts anew."
    elif command == "/system":
        conversation.system = rest.strip() or None
        said = "The system prompt is set." if conversation.system else "No system prompt."
    console.print(f"[dim]{said}[/dim]")


def _take_turn(line: str, partner: Partner, conversation: Conversation, console: Console) -> None:
    """One question and its answer. One that fails is forgotten, so that it can be asked again."""
    conversation.turns.append({"role": "user", "content": line})
    try:
        answer = _show(partner.answer(conversation), console)
    except HotbatchError as error:
        conversation.turns.pop()
        console.print(f"[red]{escape(error.message)}[/red]")
        return
    conversation.turns.append({"role": "assistant", "content": answer})


def _show(pieces: Generator[Piece, None, None], console: Console) -> str:
    """Print the answer while it comes and, after it, its speed. Ctrl-C ends it early."""
    asked = time.perf_counter()
    first: float | None = None
    answer, num_tokens = "", 0
    try:
        for piece in pieces:
            if piece.text and first is None:
                first = time.perf_counter()
            answer += piece.text
            num_tokens = piece.num_tokens or num_tokens
            console.print(
                piece.text, end="", markup=False, emoji=False, highlight=False, soft_wrap=True
            )
    except KeyboardInterrupt:
        console.print(" [dim](stopped)[/dim]", end="")
    finally:
        pieces.close()
    console.print()
    if first is not None and num_tokens > 1:
        rate = (num_tokens - 1) / max(time.perf_counter() - first, 1e-9)
        console.print(
            f"[dim]{num_tokens} tokens, the first after {1000 * (first - asked):.0f} ms, "
            f"then {rate:.0f} a second[/dim]"
        )
    return answer
