"""The level of the moment: followed by predictions, kept from the coefficients."""

from __future__ import annotations

import random

import pytest

from hotbatch.core.cost_model import CostModel, StepFeatures
from hotbatch.core.pace import Pace


def step_of(rows: int) -> StepFeatures:
    return StepFeatures(rows, rows, 100 * rows, 100 * rows, rows)


def seconds_of(step: StepFeatures) -> float:
    return 0.004 + 0.0003 * step.num_tokens


def trained(is_live: bool = True) -> CostModel:
    rng = random.Random(1)
    model = CostModel()
    for index in range(400):
        step = step_of(rng.randint(1, 60))
        if index % 5 == 0:
            step = step.plus_chunk(0, rng.randint(2, 200))
        model.observe(step, seconds_of(step), is_live=is_live)
    return model


def test_a_slow_moment_is_followed_within_a_dozen_steps_also_by_steps_of_other_kinds() -> None:
    model = trained()
    for rows in range(10, 22):
        model.observe(step_of(rows), 1.25 * seconds_of(step_of(rows)))
    other = step_of(3).plus_chunk(0, 150)
    assert model.predict(other) == pytest.approx(1.2 * seconds_of(other), rel=0.07)


def test_the_coefficients_are_as_before_when_the_moment_has_passed() -> None:
    model = trained()
    rng = random.Random(2)
    for _ in range(60):
        step = step_of(rng.randint(1, 60))
        model.observe(step, 1.25 * seconds_of(step))
    for _ in range(20):
        step = step_of(8)
        model.observe(step, seconds_of(step))
    for rows in (2, 20, 50):
        assert model.predict(step_of(rows)) == pytest.approx(seconds_of(step_of(rows)), rel=0.06)


def test_one_step_that_was_interrupted_moves_it_by_three_percent() -> None:
    pace = Pace()
    pace.note(50.0)
    assert 1.0 < pace.factor < 1.031
    pace.note(1.0 / 50.0)
    assert pace.factor == pytest.approx(1.0, abs=0.001)


def test_what_was_measured_earlier_says_nothing_of_the_moment() -> None:
    model = trained(is_live=False)
    before = model.predict(step_of(5))
    model.observe(step_of(50), 1.25 * seconds_of(step_of(50)), is_live=False)
    assert model.predict(step_of(5)) == pytest.approx(before, rel=0.01)


def test_of_noise_to_one_side_the_usual_step_is_predicted() -> None:
    rng = random.Random(3)
    model = trained()
    ratios = []
    for index in range(600):
        step = step_of(rng.randint(1, 60))
        seconds = seconds_of(step) * (1.7 if rng.random() < 0.12 else 1.0)
        if index > 200:
            ratios.append(seconds / model.predict(step))
        model.observe(step, seconds)
    assert sorted(ratios)[len(ratios) // 2] == pytest.approx(1.0, abs=0.04)
