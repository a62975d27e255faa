"""From events to deltas, however the engine groups its tokens."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server_parts import EOS, small_tokenizer

from hotbatch.core.plan import FinishReason, TokenEvent, TokenLogprob
from hotbatch.core.sampling_params import SamplingParams
from hotbatch.server.output import ChoiceOutput, Delta

TOKENIZER = small_tokenizer()


def deltas_of(events: list[TokenEvent], **params: Any) -> tuple[list[Delta], ChoiceOutput]:
    output = ChoiceOutput(TOKENIZER, SamplingParams(**params), [5])
    deltas = []
    for event in events:
        deltas.append(output.feed(event))
        if deltas[-1].finish_reason is not None:
            break
    return deltas, output


def events_of(
    tokens: list[int], cuts: list[int], reason: FinishReason, **last: Any
) -> list[TokenEvent]:
    """The tokens in events that end at the given places; the last one brings the end."""
    ends = sorted({min(cut, len(tokens)) for cut in cuts} | {len(tokens)})
    starts = [0, *ends[:-1]]
    events = [
        TokenEvent(
            "r",
            tuple(tokens[start:end]),
            tuple(TokenLogprob(token, -1.0, 1) for token in tokens[start:end]),
        )
        for start, end in zip(starts, ends, strict=True)
    ]
    final = events[-1]
    events[-1] = TokenEvent("r", final.token_ids, final.logprobs, finish_reason=reason, **last)
    return events


@settings(max_examples=200, deadline=None)
@given(
    tokens=st.lists(st.integers(2, TOKENIZER.vocab_size - 1), min_size=1, max_size=30),
    cuts=st.lists(st.integers(1, 30), max_size=6),
    stops=st.lists(st.text("aeb ;\ufffd", min_size=1, max_size=2), max_size=3),
    min_tokens=st.integers(0, 6),
)
def test_the_answer_does_not_depend_on_the_grouping(
    tokens: list[int], cuts: list[int], stops: list[str], min_tokens: int
) -> None:
    def answer(cuts: list[int]) -> tuple[Any, ...]:
        events = events_of(tokens, cuts, FinishReason.LENGTH)
        deltas, output = deltas_of(events, stop=tuple(stops), min_tokens=min_tokens)
        ids = [token for delta in deltas for token in delta.token_ids]
        assert output.num_output == len(ids)
        assert [entry.token_id for delta in deltas for entry in delta.logprobs] == ids
        text = "".join(delta.text for delta in deltas)
        return text, ids, deltas[-1].finish_reason, deltas[-1].stop_reason

    whole = answer([])
    assert answer(cuts) == answer(list(range(1, 31))) == whole
    if not stops:
        assert whole == (TOKENIZER.decode(tokens), tokens, "length", None)


@pytest.mark.parametrize(
    ("params", "text", "stop_reason"),
    [
        ({}, "he", None),
        ({"skip_special_tokens": False}, "he", None),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "he<|end|>", None),
        ({"stop_token_ids": (EOS,)}, "he", EOS),
        ({"stop": ("zz",)}, "he", None),
    ],
)
def test_the_token_that_ends_it(params: Any, text: str, stop_reason: int | None) -> None:
    he = TOKENIZER.token_to_id("he")
    assert he is not None
    events = events_of([he, EOS], [1], FinishReason.STOP, stop_token_id=EOS)
    deltas, output = deltas_of(events, **params)
    assert "".join(delta.text for delta in deltas) == text
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", stop_reason)
    assert output.num_output == 2


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
def test_other_ends(reason: FinishReason) -> None:
    events = events_of([], [], reason, error="why" if reason is FinishReason.ERROR else None)
    deltas, _ = deltas_of(events)
    assert deltas[-1].finish_reason == reason.value
    assert deltas[-1].error == ("why" if reason is FinishReason.ERROR else None)


def test_an_unfinished_character_is_shown_at_the_end() -> None:
    lead = TOKENIZER.token_to_id("ð")
    assert lead is not None
    deltas, _ = deltas_of(events_of([lead, lead], [1], FinishReason.LENGTH))
    assert [delta.text for delta in deltas] == ["", "\ufffd\ufffd"]
    deltas, _ = deltas_of(events_of([lead], [], FinishReason.LENGTH), stop=("\ufffd",))
    assert (deltas[-1].text, deltas[-1].finish_reason) == ("", "stop")
