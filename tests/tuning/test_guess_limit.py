"""How many guesses a step may have is settled by what the same answers take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from hotbatch.core import Request
from hotbatch.core.cost_model import CostModel
from hotbatch.core.plan import StepPlan, StepResult
from hotbatch.core.speculation import Drafter, EachAlone
from hotbatch.simulator import RooflineStepTime, SimulatedExecutor, TokenModel
from hotbatch.tuning import Settings, best_limit, questions, time_limits
from hotbatch.tuning.guess_limit import LIMITS, NUM_OUTPUT
from hotbatch.tuning.report import guess_limits

MODEL = TokenModel(vocab_size=500)
PROMPTS = [[index + position for position in range(10)] for index in range(4)]


class Machine(SimulatedExecutor):
    """Keeps how many guesses each step had, and all that was answered."""

    def __init__(self, per_token: float) -> None:
        super().__init__(
            num_blocks=200,
            max_model_len=256,
            model=MODEL,
            step_time=RooflineStepTime(overhead=0.0, weights=0.004, per_token=per_token),
        )
        self.num_drafts: list[int] = []
        self.answers: list[int] = []

    def run(self, plan: StepPlan) -> StepResult:
        self.num_drafts.append(sum(planned.num_drafts for planned in plan.requests))
        result = super().run(plan)
        self.answers.append(sum(len(outcome.token_ids) for outcome in result.requests))
        return result


def right(request: Request, limit: int) -> Sequence[int]:
    tokens, _ = MODEL.continuation(request, 256)
    return tokens[request.num_output :][: min(limit, 7)]


def wrong(request: Request, limit: int) -> Sequence[int]:
    return [(token + 1) % 500 for token in right(request, limit)]


def times(per_token: float, guess: object) -> tuple[dict[int | None, float], Machine]:
    machine = Machine(per_token)

    def drafter(model: CostModel) -> Drafter:
        return EachAlone(guess)  # type: ignore[arg-type]

    config = Settings(8, 64).config(machine.info)
    seconds = time_limits(machine, config, PROMPTS, CostModel, drafter, clock=machine.clock.now)
    return seconds, machine


def test_right_guesses_that_cost_nothing_have_no_limit() -> None:
    seconds, machine = times(1e-6, right)
    assert set(seconds) == set(LIMITS)
    assert seconds[None] < seconds[8] < seconds[0]
    assert best_limit(seconds) is None
    assert max(machine.num_drafts) == 4 * 7
    assert sum(machine.answers) == 12 * 4 * NUM_OUTPUT, "the same answers each time"


def test_wrong_ones_that_cost_are_not_made() -> None:
    seconds, _ = times(0.002, wrong)
    assert seconds[0] < seconds[8] < seconds[None]
    assert best_limit(seconds) == 0


def test_a_limit_must_be_clearly_quicker() -> None:
    assert best_limit({None: 1.0, 8: 0.96, 0: 1.2}) is None
    assert best_limit({None: 1.0, 8: 0.9, 0: 1.2}) == 8
    words = guess_limits({None: 1.0, 8: 0.9, 0: 1.2})
    assert "as many as pay 1.00 s, at most 8 0.90 s, none 1.20 s; kept: at most 8" in words


def test_half_of_what_is_asked_is_to_be_copied() -> None:
    asked = questions()
    assert len(asked) == len(set(asked)) == 8
    assert sum("once more" in question for question in asked) == 4
    assert asked == questions()


@pytest.mark.parametrize("longest", [64, 256])
def test_questions_that_are_too_long_are_cut(longest: int) -> None:
    machine = Machine(1e-6)
    prompts = [list(range(300))]
    config = Settings(8, 64).config(machine.info)
    config = replace(config, max_model_len=longest)
    time_limits(
        machine, config, prompts, CostModel, lambda _: EachAlone(right), clock=machine.clock.now
    )
    assert sum(machine.answers) == 12 * min(NUM_OUTPUT, longest // 2)
