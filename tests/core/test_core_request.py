"""The table of states, and the rules by which a request ends."""

from __future__ import annotations

import itertools

import pytest
from core_factories import EOS, make_request

from hotbatch.core import FinishReason, RequestState
from hotbatch.core.request import TRANSITIONS, RequestEvent

PAIRS = list(itertools.product(RequestState, RequestEvent))


@pytest.mark.parametrize(("state", "event"), PAIRS)
def test_a_request_moves_by_the_table_and_no_other_way(
    state: RequestState, event: RequestEvent
) -> None:
    request = make_request()
    request.state = state
    if (state, event) in TRANSITIONS:
        request.apply(event)
        assert request.state is TRANSITIONS[state, event]
    else:
        with pytest.raises(AssertionError):
            request.apply(event)
        assert request.state is state


def test_nothing_leaves_finished_and_everything_reaches_it() -> None:
    assert not [pair for pair in TRANSITIONS if pair[0] is RequestState.FINISHED]
    for state in set(RequestState) - {RequestState.FINISHED}:
        assert TRANSITIONS[state, RequestEvent.FINISH] is RequestState.FINISHED


def test_end_of_text_stops_and_belongs_to_the_output() -> None:
    request = make_request(max_tokens=5)
    request.max_output = 5
    assert request.append(7) is None
    assert request.append(EOS) is FinishReason.STOP
    assert request.tokens[-1] == EOS
    assert request.stop_token_id == EOS


def test_ignore_eos_goes_on_but_stop_token_ids_still_stop() -> None:
    request = make_request(ignore_eos=True, stop_token_ids=(9,))
    request.max_output = 8
    assert request.append(EOS) is None
    assert request.append(9) is FinishReason.STOP
    assert request.stop_token_id == 9


def test_max_tokens_ends_with_length_and_a_stop_token_wins_over_it() -> None:
    request = make_request()
    request.max_output = 1
    assert request.append(7) is FinishReason.LENGTH
    assert request.stop_token_id is None
    other = make_request()
    other.max_output = 1
    assert other.append(EOS) is FinishReason.STOP


def test_min_tokens_bans_every_end_until_reached() -> None:
    request = make_request(min_tokens=2, stop_token_ids=(9,))
    request.max_output = 8
    assert request.banned() == (EOS, 9)
    assert request.append(EOS) is None
    assert request.banned() == (EOS, 9)
    request.append(7)
    assert request.banned() == ()
    assert request.append(9) is FinishReason.STOP
