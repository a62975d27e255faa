"""The make-believe model is a pure function of history, seed, position and parameters."""

from __future__ import annotations

import pytest

from hotbatch.core import FinishReason, Request, SamplingParams
from hotbatch.simulator import TokenModel

GREEDY = SamplingParams(temperature=0.0)
RANDOM = SamplingParams()
KNOWN_CONTINUATION = [530, 406, 800, 716, 522]


def test_known_values_do_not_change() -> None:
    model = TokenModel(vocab_size=1000)
    request = Request("a", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=5), seed=0)
    assert model.continuation(request, 100) == (KNOWN_CONTINUATION, FinishReason.LENGTH)


def test_the_context_depends_on_every_token_and_its_place() -> None:
    model = TokenModel()
    contexts = {model.context(tokens) for tokens in ([1, 2, 3], [2, 1, 3], [1, 2], [0, 1, 2, 3])}
    assert len(contexts) == 4
    assert model.context([3], start=model.context([1, 2])) == model.context([1, 2, 3])


def test_seed_and_position_matter_unless_greedy() -> None:
    model = TokenModel(vocab_size=10**6)
    context = model.context([1, 2])

    def sampled(params: SamplingParams) -> set[int]:
        return {
            model.sample(context, params, seed=seed, position=position)
            for seed in (0, 1)
            for position in (2, 3)
        }

    assert len(sampled(GREEDY)) == 1
    assert len(sampled(RANDOM)) == 4


def test_end_of_text_comes_as_often_as_asked_and_never_when_banned() -> None:
    model = TokenModel(vocab_size=50, eos_token_id=2, eos_probability=0.3)
    contexts = [model.context([index]) for index in range(1000)]
    often = [model.sample(context, GREEDY, seed=0, position=1) for context in contexts]
    assert 200 < often.count(2) < 400
    banned = [model.sample(c, GREEDY, seed=0, position=1, banned=(2, 7)) for c in contexts]
    assert not {2, 7} & set(banned)
    never = TokenModel(vocab_size=50, eos_token_id=2)
    assert 2 not in {never.sample(context, GREEDY, seed=0, position=1) for context in contexts}


def test_banning_everything_is_an_error() -> None:
    with pytest.raises(ValueError, match="banned"):
        TokenModel(vocab_size=3).sample(0, GREEDY, seed=0, position=0, banned=(0, 1, 2))


def test_logprobs_are_ordered_and_agree_with_their_alternatives() -> None:
    model = TokenModel(vocab_size=100)
    for token_id in range(100):
        entry = model.logprob(model.context([5]), token_id, 5)
        values = [value for _, value in entry.top]
        assert len(values) == 5 and values == sorted(values, reverse=True)
        assert entry.logprob < 0
        if entry.rank <= 5:
            assert entry.top[entry.rank - 1] == (token_id, entry.logprob)
        else:
            assert entry.logprob < values[-1]


def test_a_continuation_stops_where_a_request_would() -> None:
    model = TokenModel(vocab_size=20, eos_token_id=2, eos_probability=0.2)
    for seed in range(20):
        params = SamplingParams(max_tokens=12, min_tokens=3, stop_token_ids=(5,))
        request = Request("a", [1], params, seed=seed, eos_token_ids=frozenset({2}))
        output, reason = model.continuation(request, 100)
        ends = [index for index, token in enumerate(output) if token in (2, 5)]
        if reason is FinishReason.STOP:
            assert ends == [len(output) - 1] and len(output) > 3
        else:
            assert ends == [] and len(output) == 12
