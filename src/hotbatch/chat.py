"""A conversation in the terminal with any OpenAI-compatible server.

A client like any other: it speaks HTTP, streams, and ends an answer by hanging up. So
`hotbatch chat` without an address starts a server of its own on a free port and talks to that,
and both ways show exactly what a client of the server would get.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
from rich.console import Console
from rich.markup import escape

from hotbatch.core.errors import HotbatchError

_HELP = (
    "/reset forgets the conversation, /system TEXT sets the system prompt, /exit leaves; "
    "Ctrl-C stops an answer"
)


@dataclass
class Conversation:
    """The messages so far and how the next answer is to be sampled.

    `sampling` holds fields of the chat completion request, such as temperature; those that
    are None are left to the server.
    """

    model: str
    system: str | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)

    def request(self) -> dict[str, Any]:
        """The JSON body that asks for the next answer."""
        opening = [{"role": "system", "content": self.system}] if self.system else []
        body = {
            "model": self.model,
            "messages": opening + self.messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return body | {name: value for name, value in self.sampling.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Piece:
    """A bit of an answer, or its end with the count of tokens in it."""

    text: str = ""
    num_tokens: int | None = None


class ChatClient:
    """Speaks to one server. `url` may or may not end in /v1.

    Raises:
        HotbatchError: from every method: the server cannot be reached or refuses; the message
            has its words.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        base = url.rstrip("/").removesuffix("/v1") + "/v1"
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(10.0, read=None)  # an answer may wait long in the queue
        try:
            self._http = httpx.Client(base_url=base, headers=headers, timeout=timeout)
        except httpx.InvalidURL as error:
            raise HotbatchError(f"--url {url}: {error}.", param="--url") from error
        self._url = url

    def close(self) -> None:
        self._http.close()

    def first_model(self) -> str:
        """The id of the first model that the server lists."""
        try:
            response = self._http.get("/models")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from error
        _raise_for(response)
        try:
            return str(response.json()["data"][0]["id"])
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise HotbatchError(
                f"{self._url} answers, but not as an OpenAI-compatible server does."
            ) from error

    def stream(self, body: dict[str, Any]) -> Iterator[Piece]:
        """Yield the answer as it comes; closing the generator hangs up."""
        try:
            with self._http.stream("POST", "/chat/completions", json=body) as response:
                if response.status_code != httpx.codes.OK:
                    response.read()
                    _raise_for(response)
                for line in response.iter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        yield _piece(json.loads(line[len("data: ") :]))
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> HotbatchError:
        return HotbatchError(f"No answer from {self._url}: {error}. Does a server run there?")


def _piece(chunk: dict[str, Any]) -> Piece:
    if "error" in chunk:
        raise HotbatchError(str(chunk["error"].get("message", chunk["error"])))
    usage = chunk.get("usage") or {}
    choices = chunk.get("choices") or []
    text = (choices[0].get("delta") or {}).get("content") if choices else None
    return Piece(text or "", usage.get("completion_tokens"))


def _raise_for(response: httpx.Response) -> None:
    if response.status_code == httpx.codes.OK:
        return
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = response.text.strip()[:200] or response.reason_phrase
    raise HotbatchError(f"The server refuses (HTTP {response.status_code}): {message}")


def run_chat(client: ChatClient, conversation: Conversation, console: Console) -> None:
    """Ask, answer, until the person leaves with /exit or Ctrl-D."""
    console.print(f"[dim]{escape(conversation.model)}. {_HELP}.[/dim]")
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
            _take_turn(line, client, conversation, console)


def _obey(line: str, conversation: Conversation, console: Console) -> None:
    command, _, rest = line.partition(" ")
    if command == "/reset":
        conversation.messages.clear()
        console.print("[dim]The conversation starts anew.[/dim]")
    elif command == "/system":
        conversation.system = rest.strip() or None
        console.print(
            "[dim]The system prompt is set.[/dim]" if rest else "[dim]No system prompt.[/dim]"
        )
    else:
        console.print(f"[dim]{_HELP}.[/dim]")


def _take_turn(line: str, client: ChatClient, conversation: Conversation, console: Console) -> None:
    conversation.messages.append({"role": "user", "content": line})
    try:
        answer = _show_answer(client.stream(conversation.request()), console)
    except HotbatchError as error:
        conversation.messages.pop()
        console.print(f"[red]{escape(error.message)}[/red]")
        return
    conversation.messages.append({"role": "assistant", "content": answer})


def _show_answer(pieces: Iterator[Piece], console: Console) -> str:
    """Print the answer while it comes and, after it, its speed. Ctrl-C ends it early."""
    asked = time.perf_counter()
    first: float | None = None
    answer, num_tokens = "", None
    try:
        for piece in pieces:
            if piece.text and first is None:
                first = time.perf_counter()
            answer += piece.text
            num_tokens = num_tokens if piece.num_tokens is None else piece.num_tokens
            console.print(piece.text, end="", markup=False, highlight=False, soft_wrap=True)
    except KeyboardInterrupt:
        console.print(" [dim](stopped)[/dim]", end="")
    finally:
        close = getattr(pieces, "close", None)
        if close is not None:
            close()
    console.print()
    if first is not None and num_tokens is not None and num_tokens > 1:
        rate = (num_tokens - 1) / max(time.perf_counter() - first, 1e-9)
        console.print(
            f"[dim]{num_tokens} tokens, the first after {1000 * (first - asked):.0f} ms, "
            f"then {rate:.0f} a second[/dim]"
        )
    return answer
