"""Whole requests guessed ahead, over HTTP: what clients see is what they would have seen."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from server_parts import Rig, make_rig, serving

from hotbatch.core.speculation import AheadBook


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with serving(make_rig(ahead=AheadBook())) as rig:
        yield rig


def loop(http: httpx.Client, task: str, **fields: Any) -> list[dict[str, Any]]:
    """Three steps of an agent; all answers."""
    answers = []
    messages = [{"role": "user", "content": f"Task: {task}"}]
    for step in range(3):
        body = {"messages": messages, "temperature": 0, "max_tokens": 12, **fields}
        answer = http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        answers.append(answer.json())
        messages = [
            *messages,
            {"role": "assistant", "content": answers[-1]["choices"][0]["message"]["content"]},
            {"role": "user", "content": f"Go on with step {step}."},
        ]
    return answers


def accepted(rig: Rig, distance: str = "request") -> int:
    return rig.engine.stats().guesses[distance].accepted


def test_a_loop_is_foreseen_and_nothing_else_changes(http: httpx.Client, rig: Rig) -> None:
    before = accepted(rig)
    told = []
    for number in range(4):
        told.append(loop(http, f"task {number}"))
        rig.wait_until(lambda: rig.scheduler.stats().num_guesses == 0 or not busy(rig))
    assert accepted(rig) > before
    for number, answers in enumerate(told):
        plain = loop(http, f"task {number}", speculate=False)
        for one, other in zip(answers, plain, strict=True):
            assert one["choices"] == other["choices"]
            for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
                assert one["usage"][count] == other["usage"][count]


def busy(rig: Rig) -> bool:
    """Is any guess being computed?"""
    return (
        rig.scheduler.idle_work._ahead is not None and rig.scheduler.idle_work._ahead.book.has_live
    )


def test_a_repeat_streams_at_once_with_all_that_belongs_to_it(http: httpx.Client, rig: Rig) -> None:
    body = {
        "prompt": "the quick brown fox",
        "temperature": 0,
        "max_tokens": 20,
        "stream": True,
        "stream_options": {"include_usage": True},
    }

    def chunks() -> list[dict[str, Any]]:
        lines = http.post("/v1/completions", json=body).text.split("\n\n")
        return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]

    def told(chunks: list[dict[str, Any]]) -> tuple[str, list[str], int]:
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        reasons = [c["finish_reason"] for c in choices if c["finish_reason"] is not None]
        text = "".join(choice["text"] for choice in choices)
        return text, reasons, chunks[-1]["usage"]["completion_tokens"]

    first = told(chunks())
    before = accepted(rig, "repeat")
    assert told(chunks()) == first
    assert accepted(rig, "repeat") == before + 20
    body["max_tokens"] = 7
    shorter = told(chunks())
    assert shorter[1:] == (["length"], 7)
    assert first[0].startswith(shorter[0].rstrip("\N{REPLACEMENT CHARACTER}"))


def test_a_stop_string_ends_a_stored_answer(http: httpx.Client) -> None:
    body: dict[str, Any] = {"prompt": [9, 8, 7, 6], "temperature": 0, "max_tokens": 30}
    text = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    stop = text[8:10]
    body["stop"] = stop
    ways = [
        http.post("/v1/completions", json={**body, "speculate": speculate}).json()
        for speculate in (True, False)
    ]
    assert ways[0]["choices"] == ways[1]["choices"]
    assert ways[0]["choices"][0]["stop_reason"] == stop
    assert ways[0]["usage"]["completion_tokens"] == ways[1]["usage"]["completion_tokens"]


def test_logprobs_are_never_left_out(http: httpx.Client) -> None:
    body: dict[str, Any] = {"prompt": [5, 5, 5], "temperature": 0, "max_tokens": 6}
    http.post("/v1/completions", json=body)
    for _ in range(2):
        answer = http.post("/v1/completions", json={**body, "logprobs": 2}).json()
        assert len(answer["choices"][0]["logprobs"]["tokens"]) == 6


@pytest.mark.parametrize("other", [{"cache_salt": "s"}, {"user": "u"}, {"speculate": False}])
def test_others_are_not_answered_from_it(
    http: httpx.Client, rig: Rig, other: dict[str, Any]
) -> None:
    body = {"prompt": [3, 1, 4, 1, 5], "temperature": 0, "max_tokens": 5}
    http.post("/v1/completions", json=body)
    before = accepted(rig, "repeat")
    http.post("/v1/completions", json={**body, **other})
    assert accepted(rig, "repeat") == before


def test_prompts_as_token_ids_are_foreseen(http: httpx.Client, rig: Rig) -> None:
    before = accepted(rig)
    for number in range(4):
        prompt = [40 + number, 41, 42, 43, 44]
        for _ in range(3):
            body = {"prompt": prompt, "temperature": 0, "max_tokens": 9, "return_token_ids": True}
            answer = http.post("/v1/completions", json=body).json()
            prompt = [*prompt, *answer["choices"][0]["token_ids"], 50, 51]
        rig.wait_until(lambda: not busy(rig))
    assert accepted(rig) > before


def test_metrics_tell_of_both_distances(http: httpx.Client) -> None:
    text = http.get("/metrics").text
    for distance in ("request", "repeat"):
        assert f'hotbatch:draft_tokens_total{{distance="{distance}"' in text
