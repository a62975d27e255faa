"""The rules of sampling, by example: these pin down which token every sampler must pick."""

from __future__ import annotations

import math

import pytest
import torch

from hotbatch.kernels.sampling.reference import (
    NO_TOKEN,
    Controls,
    adjusted,
    kept,
    logprobs_of,
    philox,
    philox_uniform,
    sample,
)

# Probabilities 0.5, 0.2, 0.2, 0.1 for ids 2, 0, 3, 1.
LOGITS = torch.log(torch.tensor([0.2, 0.1, 0.5, 0.2]))


def kept_ids(**controls: float) -> list[int]:
    return kept(LOGITS, Controls(**controls))[0].tolist()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # known answers of the Random123 library
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter, key, words) -> None:  # type: ignore[no-untyped-def]
    assert philox(counter, key) == words


def test_uniform_depends_on_seed_and_position_alone() -> None:
    assert philox_uniform(0, 0) == (0x6627E8D5 + 0.5) / 2**32
    drawn = {philox_uniform(seed, position) for seed in (0, 1, -1, 2**40) for position in range(9)}
    assert len(drawn) == 36 and all(0.0 < u < 1.0 for u in drawn)
    assert philox_uniform(-1, 3) == philox_uniform(2**64 - 1, 3)


def test_order_is_likeliest_first_then_by_id() -> None:
    assert kept_ids() == [2, 0, 3, 1]


@pytest.mark.parametrize(
    ("controls", "ids"),
    [
        ({"top_k": 1}, [2]),
        ({"top_k": 2}, [2, 0]),  # 0 and 3 are equally likely: the lower id stays
        ({"top_k": -1}, [2, 0, 3, 1]),
        ({"top_k": 99}, [2, 0, 3, 1]),
        ({"top_p": 0.01}, [2]),
        ({"top_p": 0.6}, [2, 0]),
        ({"top_p": 0.75}, [2, 0, 3]),
        ({"top_p": 0.95}, [2, 0, 3, 1]),
        ({"min_p": 0.3}, [2, 0, 3]),
        ({"min_p": 0.5}, [2]),
        ({"min_p": 1.0}, [2]),
        # top_p counts within what top_k left: 0.5 / 0.7 < 0.8 <= 1
        ({"top_k": 2, "top_p": 0.8}, [2, 0]),
        ({"top_k": 2, "top_p": 0.7}, [2]),
        ({"top_p": 0.75, "min_p": 0.45}, [2]),
    ],
)
def test_what_stays(controls: dict[str, float], ids: list[int]) -> None:
    assert kept_ids(**controls) == ids


def test_inverse_of_the_running_sum() -> None:
    """The draw walks the kept tokens, likeliest first, to u of their sum."""
    bounds = [(2, 0.5), (0, 0.7), (3, 0.9), (1, 1.0)]
    seen = set()
    for position in range(60):
        u = philox_uniform(17, position)
        expected = next(token for token, bound in bounds if u < bound)
        seen.add(expected)
        assert sample(LOGITS, Controls(seed=17, position=position)) == expected
    assert seen == {0, 1, 2, 3}


def test_frequencies_follow_the_probabilities() -> None:
    draws = [sample(LOGITS, Controls(seed=5, position=position)) for position in range(2000)]
    for token, probability in enumerate((0.2, 0.1, 0.5, 0.2)):
        assert draws.count(token) / 2000 == pytest.approx(probability, abs=0.035)


def test_temperature_sharpens() -> None:
    halved = [sample(LOGITS, Controls(temperature=0.5, seed=5, position=p)) for p in range(2000)]
    weights = torch.tensor([0.2, 0.1, 0.5, 0.2]) ** 2
    assert halved.count(2) / 2000 == pytest.approx(float(weights[2] / weights.sum()), abs=0.035)


def test_greedy_takes_the_lowest_of_equals() -> None:
    assert sample(torch.tensor([1.0, 4.0, 4.0]), Controls(temperature=0.0)) == 1


def test_bias_and_bans() -> None:
    greedy = Controls(temperature=0.0, logit_bias=((1, 5.0), (99, 3.0)))
    assert sample(LOGITS, greedy) == 1
    assert sample(LOGITS, Controls(temperature=0.0, banned=(2, 0, 77))) == 3
    for position in range(50):
        assert sample(LOGITS, Controls(banned=(2, 0), position=position)) in (1, 3)


def test_penalties() -> None:
    logits = torch.tensor([2.0, -1.0, 3.0, 0.5])
    controls = Controls(
        repetition_penalty=2.0,
        frequency_penalty=0.25,
        presence_penalty=0.5,
        prompt=(0, 1, 1),
        output=(2, 2, 1),
    )
    # 0: prompt only: 2 / 2. 1: -1 * 2 - 0.25 - 0.5. 2: 3 / 2 - 2 * 0.25 - 0.5. 3: untouched.
    expected = torch.tensor([1.0, -2.75, 0.5, 0.5])
    torch.testing.assert_close(adjusted(logits, controls), expected)
    assert logits.tolist() == [2.0, -1.0, 3.0, 0.5]  # the caller's stay as they are


@pytest.mark.parametrize(
    "logits", [[math.nan, 1.0], [math.inf, 1.0], [-math.inf, -math.inf]], ids=str
)
def test_rows_without_a_finite_best_give_no_token(logits: list[float]) -> None:
    for temperature in (0.0, 1.0):
        assert sample(torch.tensor(logits), Controls(temperature=temperature)) == NO_TOKEN
    assert sample(LOGITS, Controls(banned=(0, 1, 2, 3))) == NO_TOKEN


def test_tiny_temperatures_and_far_logits_do_not_overflow() -> None:
    logits = torch.tensor([-1e4, 300.0, 299.0])
    assert sample(logits, Controls(temperature=1e-3, seed=1)) == 1


def test_logprobs_ranks_and_alternatives() -> None:
    logits = torch.stack([LOGITS + 3.0, LOGITS.flip(0)])
    logprobs, ranks, top_ids, top = logprobs_of(logits, torch.tensor([3, 2]), 2)
    torch.testing.assert_close(logprobs, torch.log(torch.tensor([0.2, 0.1])))
    assert ranks.tolist() == [3, 4]  # 3 is as likely as 0, which has the lower id
    assert top_ids.tolist() == [[2, 0], [1, 0]]
    torch.testing.assert_close(top, torch.log(torch.tensor([[0.5, 0.2], [0.5, 0.2]])))
    assert logprobs_of(logits, torch.tensor([3, 2]), 0)[2].shape == (2, 0)
