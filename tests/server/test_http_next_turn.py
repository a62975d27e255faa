"""What a chat's next turn needs is made ready when a turn ends, over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_parts import Rig, make_rig, serving

# Of answers only the beginning is repeated, as by templates that strip reasoning: what a next
# prompt begins with was never computed as it stands.
STRIPPING = (
    "{% for m in messages %}<|begin|>{{ m.role }}: "
    "{{ m.content[:4] if m.role == 'assistant' else m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant: {% endif %}"
)
LONG = "the quick brown fox " * 6


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    options = {"prefill_ahead": True}
    with serving(make_rig(chat_template=STRIPPING, scheduler=options, splice_answers=True)) as rig:
        yield rig


def turn(http: httpx.Client, messages: list[dict[str, str]], **fields: Any) -> dict[str, Any]:
    body = {"messages": messages, "temperature": 0, "max_tokens": 24, **fields}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def went_on(messages: list[dict[str, str]], answer: dict[str, Any]) -> list[dict[str, str]]:
    said = answer["choices"][0]["message"]["content"]
    return [
        *messages,
        {"role": "assistant", "content": said},
        {"role": "user", "content": "hello, and then?"},
    ]


def attempted(rig: Rig) -> int:
    return rig.engine.stats().guesses["turn"].attempted


def accepted(rig: Rig) -> int:
    return rig.engine.stats().guesses["turn"].accepted


def test_the_known_beginning_is_computed_before_it_is_asked_for(
    http: httpx.Client, rig: Rig
) -> None:
    messages = [{"role": "user", "content": "hello " + LONG}]
    before = attempted(rig)
    first = turn(http, messages)
    rig.wait_until(lambda: attempted(rig) > before)
    rig.wait_until(lambda: not list(rig.scheduler.idle_work.holders))
    rig.wait_idle()
    earned = accepted(rig)
    second = turn(http, went_on(messages, first))
    assert accepted(rig) > earned
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > first["usage"]["prompt_tokens"] // 16 * 16


def test_what_is_computed_ahead_is_no_request(http: httpx.Client, rig: Rig) -> None:
    messages = [{"role": "user", "content": "user: " + LONG}]
    before, steps = attempted(rig), []
    rig.engine.step_observers.append(steps.append)
    turn(http, messages)
    rig.wait_until(lambda: attempted(rig) > before)
    rig.wait_idle()
    rig.engine.step_observers.remove(steps.append)
    assert sum(step.num_ahead_tokens for step in steps) >= 16
    assert all(step.num_requests == (0 if step.num_ahead_tokens else 1) for step in steps)
    assert sum(step.num_prompt_tokens for step in steps if step.num_ahead_tokens) == 0


def test_who_opts_out_leaves_nothing_behind(http: httpx.Client, rig: Rig) -> None:
    messages = [{"role": "user", "content": "assistant: " + LONG}]
    before, answers = attempted(rig), rig.service.turns.answers
    assert answers is not None
    known = answers.num_tokens
    turn(http, messages, speculate=False)
    rig.wait_idle()
    turn(http, [{"role": "user", "content": "hi"}], speculate=False)  # a turn of the engine later
    rig.wait_idle()
    assert (attempted(rig), answers.num_tokens) == (before, known)


def test_answers_are_spliced_and_counted(http: httpx.Client, rig: Rig) -> None:
    def spliced() -> float:
        return next(
            sample.value
            for family in text_string_to_metric_families(http.get("/metrics").text)
            for sample in family.samples
            if "spliced_prompts" in sample.name and sample.name.endswith("_total")
        )

    messages = [{"role": "user", "content": "Xin chào"}]
    first = turn(http, messages)
    before = spliced()
    turn(http, went_on(messages, first), user="somebody else")
    assert spliced() == before
    turn(http, went_on(messages, first))
    assert spliced() > before
