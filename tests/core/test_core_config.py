"""The configuration is checked when made; requests are checked against it at the door."""

from __future__ import annotations

from typing import Any

import pytest
from core_factories import make_config, make_request, make_scheduler

from hotbatch.core import ContextLengthError, InvalidRequestError


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("num_blocks", 0),
        ("block_size", 0),
        ("max_model_len", 0),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 7),  # below max_num_seqs
        ("long_prefill_token_threshold", -1),
        ("max_draft_tokens", -1),
        ("batching", "sometimes"),
        ("static_timeout", -1.0),
        ("static_timeout", float("nan")),
        ("watermark", 1.0),
    ],
)
def test_an_option_out_of_range_is_named(option: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        make_config(**{option: value})
    assert caught.value.param == option
    assert option in caught.value.message


def test_a_static_batch_must_fit_the_seats() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        make_config(batching="static", static_batch_size=9)
    assert caught.value.param == "static_batch_size"
    make_config(batching="continuous", static_batch_size=9)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": 128}, "prompt"),
        ({"prompt": 127, "max_tokens": 2}, "max_tokens"),
        ({"prompt": 120, "max_tokens": None, "min_tokens": 9}, "min_tokens"),
    ],
)
def test_what_exceeds_the_context_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ContextLengthError, match="maximum context length is 128") as caught:
        make_scheduler().check(make_request(**fields))
    assert caught.value.param == param


def test_what_exceeds_the_whole_pool_is_refused() -> None:
    scheduler = make_scheduler(num_blocks=3)  # twelve tokens
    scheduler.check(make_request(prompt=4, max_tokens=8))
    with pytest.raises(ContextLengthError, match="holds 12 tokens") as caught:
        scheduler.check(make_request(prompt=5, max_tokens=8))
    assert caught.value.param == "max_tokens"


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        make_scheduler().check(make_request(prompt=[]))
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [1, 50, 3]}, "prompt"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": [1], "stop_token_ids": (50,)}, "stop_token_ids"),
        ({"prompt": [1], "logit_bias": ((50, 1.0),)}, "logit_bias"),
    ],
)
def test_token_ids_outside_the_vocabulary_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError, match="from 0 to 49") as caught:
        make_scheduler(vocab_size=50).check(make_request(**fields))
    assert caught.value.param == param
    make_scheduler().check(make_request(**fields) if param != "prompt" else make_request())


def test_adding_checks_too_and_refuses_an_id_in_use() -> None:
    scheduler = make_scheduler()
    with pytest.raises(ContextLengthError):
        scheduler.add(make_request(prompt=128))
    scheduler.add(make_request("a"))
    with pytest.raises(InvalidRequestError) as caught:
        scheduler.add(make_request("a"))
    assert caught.value.param == "request_id"
    scheduler.cancel("a")
    scheduler.add(make_request("a"))


@pytest.mark.parametrize(("num_blocks", "expected"), [(64, 122), (5, 14)])
def test_no_max_tokens_means_what_the_context_leaves(num_blocks: int, expected: int) -> None:
    request = make_request(prompt=6, max_tokens=None)
    make_scheduler(num_blocks=num_blocks).add(request)
    assert request.max_output == expected
