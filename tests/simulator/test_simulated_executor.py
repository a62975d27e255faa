"""The strict machine: right plans give right tokens, and each kind of wrong plan is noticed."""

from __future__ import annotations

from typing import Any

import pytest

from hotbatch.core import PlannedRequest, SampleSpec, SamplingParams, StepPlan
from hotbatch.engine.protocol import Executor
from hotbatch.simulator import RooflineStepTime, SimulatedExecutor, SimulatedFailure, TokenModel

GREEDY = SamplingParams(temperature=0.0)


def make_executor(**overrides: Any) -> SimulatedExecutor:
    return SimulatedExecutor(**({"num_blocks": 8, "block_size": 4} | overrides))


def spec(position: int, params: SamplingParams = GREEDY, **fields: Any) -> SampleSpec:
    return SampleSpec(params, 0, position, num_prompt=1, **fields)


def plan(*requests: PlannedRequest, step_id: int = 0, **fields: Any) -> StepPlan:
    return StepPlan(step_id, tuple(requests), **fields)


def prompt(name: str = "a", blocks: tuple[int, ...] = (0, 1)) -> PlannedRequest:
    return PlannedRequest(name, 0, (1, 2, 3, 4, 5), blocks, spec(5))


def following(name: str = "a", blocks: tuple[int, ...] = (0, 1), **fields: Any) -> PlannedRequest:
    return PlannedRequest(name, 5, (6,), blocks, spec(6), **fields)


def test_it_fits_the_protocol_and_reports_the_machine() -> None:
    executor: Executor = make_executor(model=TokenModel(vocab_size=77))
    assert (executor.info.num_blocks, executor.info.block_size) == (8, 4)
    assert executor.info.vocab_size == 77
    executor.close()
    with pytest.raises(AssertionError, match="close"):
        executor.run(plan(prompt()))


def test_chunks_give_the_tokens_of_a_whole_prompt() -> None:
    whole = make_executor().run(plan(prompt())).requests[0].token_ids
    chunked = make_executor()
    first = PlannedRequest("a", 0, (1, 2, 3), (0, 1))
    assert chunked.run(plan(first)).requests[0].token_ids == ()
    second = PlannedRequest("a", 3, (4, 5), (0, 1), spec(5))
    assert chunked.run(plan(second)).requests[0].token_ids == whole


def test_each_step_advances_the_clock_and_may_really_take_its_time() -> None:
    slept: list[float] = []
    executor = make_executor(step_time=lambda plan: 0.25, sleep=slept.append)
    result = executor.run(plan(prompt()))
    assert (result.seconds, executor.clock.now(), slept) == (0.25, 0.25, [0.25])


def test_a_scripted_failure_hits_one_step_or_one_request() -> None:
    executor = make_executor(fail_steps={3: "no memory"}, fail_requests={"b": "NaN"})
    with pytest.raises(SimulatedFailure, match="no memory"):
        executor.run(plan(prompt(), step_id=3))
    good, bad = executor.run(plan(prompt("a"), prompt("b", (2, 3)))).requests
    assert good.error is None and good.token_ids
    assert bad.error == "NaN" and not bad.token_ids


def test_drafts_are_accepted_up_to_the_first_wrong_one() -> None:
    model = TokenModel()
    tokens = [1, 2, 3, 4, 5]
    for _ in range(3):
        tokens.append(model.sample(model.context(tokens), GREEDY, seed=0, position=len(tokens)))
    right = tuple(tokens[5:])
    for drafts, expected in ((right[:2], right), ((right[0], 999), right[:2])):
        planned = PlannedRequest("a", 0, (1, 2, 3, 4, 5, *drafts), (0, 1), spec(5), num_drafts=2)
        assert make_executor().run(plan(planned)).requests[0].token_ids == expected


def test_prompt_logprobs_have_one_entry_a_following_token() -> None:
    planned = PlannedRequest(
        "a", 0, (1, 2, 3), (0,), spec(3), prompt_logprobs=1, next_tokens=(2, 3)
    )
    entries = make_executor().run(plan(planned)).requests[0].prompt_logprobs
    assert [entry.token_id for entry in entries] == [2, 3]


def test_a_copied_block_serves_as_its_source() -> None:
    executor = make_executor()
    executor.run(plan(prompt()))
    expected = executor.run(plan(following())).requests[0].token_ids
    copied = plan(following("b", (0, 5)), copies=((1, 5),))
    assert executor.run(copied).requests[0].token_ids == expected


SPOILED = SamplingParams(presence_penalty=1.0)


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (plan(), "empty"),
        (plan(following(blocks=(0, 7))), "never computed"),
        (plan(following(blocks=(1, 0))), "holds that of"),
        (plan(following(blocks=(2, 1))), "after other tokens"),
        (plan(following(blocks=(0,))), "no block"),
        (plan(following(blocks=(0, 0))), "block twice"),
        (plan(following(), following()), "planned twice"),
        (plan(following(), following("b")), "write block 1"),
        (plan(following(), prompt("b", (0, 5))), "reads block 0"),
        (plan(following("b", (0, 5)), copies=((1, 6),)), "for nobody"),
        (plan(PlannedRequest("a", 5, (6,), (0, 1), spec(7))), "wrong position"),
        (plan(PlannedRequest("a", 5, (6,), (0, 1), spec(6, history=(1,)))), "nobody needs"),
        (
            plan(PlannedRequest("a", 5, (6,), (0, 1), spec(6, SPOILED, history=(9,) * 6))),
            "wrong history",
        ),
    ],
)
def test_a_wrong_plan_is_noticed(bad: StepPlan, complaint: str) -> None:
    executor = make_executor()
    executor.run(plan(prompt()))
    executor.run(plan(PlannedRequest("other", 0, (9, 9, 9, 9), (2,))))
    with pytest.raises(AssertionError, match=complaint):
        executor.run(bad)


def test_the_lax_machine_gives_the_same_tokens() -> None:
    strict, lax = make_executor(), make_executor(strict=False)
    for step in (plan(prompt()), plan(following())):
        assert strict.run(step) == lax.run(step)


def test_the_roofline_is_flat_up_to_its_knee() -> None:
    model = RooflineStepTime(overhead=0.001, weights=0.010, per_token=0.001, per_context_token=0.0)

    def seconds(num_tokens: int) -> float:
        return model(plan(PlannedRequest("a", 0, (1,) * num_tokens, tuple(range(20)))))

    assert seconds(1) == seconds(10) == pytest.approx(0.011)
    assert seconds(30) == pytest.approx(0.031)
