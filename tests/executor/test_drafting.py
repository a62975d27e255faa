"""A draft model beside a model, both real: no token changes, and a twin guesses everything."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cpu_runs import EOS, SHAPES, VOCABULARY, executor, prompt

from hotbatch.core.config import SchedulerConfig
from hotbatch.core.cost_model import CostModel, StepFeatures
from hotbatch.core.request import Request
from hotbatch.core.sampling_params import SamplingParams
from hotbatch.core.scheduler import Scheduler
from hotbatch.core.speculation import DraftModel, DraftModelShape, Speculator
from hotbatch.executor.cpu_executor import CpuExecutor
from hotbatch.executor.drafting import DraftingExecutor
from hotbatch.models.loader import load_model

BLOCKS = 120


def drafting(shape: str, seed: int) -> CpuExecutor:
    """A draft model; `plain` with seed 0 is the twin of the model that is served."""
    return CpuExecutor(
        load_model(shape, "dummy", config=SHAPES[shape], seed=seed),
        num_blocks=BLOCKS,
        precision="f32",
        threads=1,
    )


def curve(fixed: float, per_token: float) -> CostModel:
    """Made-up times: what is decided must not depend on this machine's."""
    model = CostModel()
    for step in range(120):
        tokens = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)[step % 12]
        features = StepFeatures(tokens, tokens, 20 * tokens, 20 * tokens, tokens)
        model.observe(features, fixed + per_token * tokens)
        if step % 10 == 0:
            model.observe(StepFeatures(200, 1, 200, 20000, 0), fixed + per_token * 200)
    return model


def requests(temperature: float) -> list[Request]:
    params = SamplingParams(
        temperature=temperature,
        max_tokens=60,
        ignore_eos=True,
        presence_penalty=0.4,
        logprobs=2,
        min_tokens=3,
    )
    return [
        Request(
            f"r{index}",
            prompt(9 + 30 * index, seed=index),
            params,
            seed=index,
            eos_token_ids=frozenset({EOS}),
        )
        for index in range(3)
    ]


def answers(
    served: list[Request], draft: CpuExecutor | None = None
) -> tuple[dict[str, tuple[object, ...]], int, int]:
    """What was heard, and how many guesses the draft model made, and how many were right."""
    model = curve(0.01, 1e-4)
    run = executor()
    speculator, joined, draft_model = None, None, None
    if draft is not None:
        shape = DraftModelShape(BLOCKS, 16, 512, VOCABULARY)
        draft_model = DraftModel(curve(1e-4, 1e-6), shape)
        speculator = Speculator(model, draft_model=draft_model)
        joined = DraftingExecutor(run, draft)
    config = SchedulerConfig(
        num_blocks=640, block_size=16, max_model_len=512, max_num_seqs=8, max_num_batched_tokens=64
    )
    scheduler = Scheduler(config, cost_model=model, drafter=speculator)
    for request in served:
        scheduler.add(request)
    heard: dict[str, tuple[object, ...]] = {request.request_id: () for request in served}
    now = 0.0
    attempted = accepted = 0
    while scheduler.has_work:
        plan = scheduler.plan(now)
        assert plan is not None
        now += 0.01
        result = (joined or run).run(plan)
        # Times as made up as the curves.
        result = replace(
            result, seconds=0.011, draft_seconds=tuple(1e-4 for _ in result.draft_seconds)
        )
        for guess in plan.model_drafts:
            if guess.sample is not None:
                attempted += plan.requests[guess.place].num_drafts
                accepted += len(result.requests[guess.place].token_ids) - 1
        for event in scheduler.commit(plan, result, now):
            assert event.error is None
            heard[event.request_id] += (*event.token_ids, *event.logprobs)
    if draft_model is not None:
        draft_model.check_integrity()
        assert draft_model.num_free_blocks == BLOCKS
    return heard, attempted, accepted


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_twin_guesses_nearly_everything_right(temperature: float) -> None:
    alone, *_ = answers(requests(temperature))
    heard, attempted, accepted = answers(requests(temperature), drafting("plain", seed=0))
    assert {name: sorted(map(str, parts)) for name, parts in heard.items()} == {
        name: sorted(map(str, parts)) for name, parts in alone.items()
    }
    assert attempted > 60
    assert accepted >= 0.95 * attempted


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_stranger_changes_no_token_and_is_soon_not_asked(temperature: float) -> None:
    alone, *_ = answers(requests(temperature))
    heard, attempted, accepted = answers(requests(temperature), drafting("window", seed=7))
    assert {name: sorted(map(str, parts)) for name, parts in heard.items()} == {
        name: sorted(map(str, parts)) for name, parts in alone.items()
    }
    assert 0 < attempted < 100
    assert accepted < 0.3 * attempted
