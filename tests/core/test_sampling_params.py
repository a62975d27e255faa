"""What SamplingParams takes, in which forms, and what it refuses before a step could see it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from hotbatch.core.errors import InvalidRequestError
from hotbatch.core.sampling_params import MAX_TOP_K, MIN_REPETITION_PENALTY, SamplingParams


@pytest.mark.parametrize(
    ("given", "kept"),
    [("END", ("END",)), (["a", "b"], ("a", "b")), (None, ()), ((), ()), (iter(["a"]), ("a",))],
)
def test_stop_may_be_one_string_or_several(given: Any, kept: tuple[str, ...]) -> None:
    assert SamplingParams(stop=given).stop == kept


@pytest.mark.parametrize("given", [{5: 1.0, 7: -2}, [(5, 1.0), [7, -2]], ((5, 1.0), (7, -2))])
def test_logit_bias_may_be_a_mapping_or_pairs(given: Any) -> None:
    assert SamplingParams(logit_bias=given).logit_bias == ((5, 1.0), (7, -2))


def test_none_means_not_given() -> None:
    none: Any = None
    given = SamplingParams(stop=none, stop_token_ids=none, logit_bias=none)
    assert given == SamplingParams()


def test_lists_become_tuples_so_that_parameters_can_be_hashed() -> None:
    lists: dict[str, Any] = {"stop": ["a"], "stop_token_ids": [3, 4], "logit_bias": {5: 1.0}}
    params = SamplingParams(**lists)
    assert params.stop_token_id_set == {3, 4}
    assert hash(params) == hash(dataclasses.replace(params))


def test_numbers_of_numpy_are_numbers() -> None:
    numbers: dict[str, Any] = {
        "seed": np.int64(3),
        "temperature": np.float32(0.5),
        "stop_token_ids": np.array([3, 4]),
    }
    params = SamplingParams(**numbers)
    assert (params.seed, params.temperature, params.stop_token_ids) == (3, 0.5, (3, 4))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[(name, value) for name in ("n", "top_k", "min_tokens") for value in (None, 1.5, "2")],
        *[
            (name, value)
            for name in ("max_tokens", "seed", "logprobs", "prompt_logprobs")
            for value in (1.5, "2", True, [1])
        ],
        *[
            (name, value)
            for name in ("temperature", "top_p", "min_p", "presence_penalty")
            for value in (None, "0.5", True, float("nan"), 1j)
        ],
        *[(name, value) for name in ("ignore_eos", "skip_special_tokens") for value in (1, "x")],
        *[("stop", value) for value in (5, [1], b"a", [b"a"], [["a"]])],
        *[("stop_token_ids", value) for value in (5, ["a"], "12", [1.5], [True])],
        *[("logit_bias", value) for value in (5, [5], {"a": 1.0}, {5: "b"}, [(1, 2, 3)], "ab")],
        # Beyond what an executor's 32 bits hold: it would fail the whole step.
        ("top_k", MAX_TOP_K + 1),
        ("repetition_penalty", MIN_REPETITION_PENALTY / 2),
        ("repetition_penalty", 1e-320),
    ],
)
def test_what_could_fail_a_step_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
