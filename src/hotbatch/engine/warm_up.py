"""Steps before the first client: the cost model learns the machine, caches and pages get warm.

Without them the first long prompt would be planned blindly, as one large step through which
everybody waits. The steps are small ones of every kind first, so that a slow model, for which
there is no time for the large ones, still is known where most steps happen.

All are run once, then all once more, and of each the quicker time is believed: whatever disturbs
a step makes it slower, the first of its kind loads what the others find, and a neighbour who is
busy for a moment is gone when its turn comes again. Run twice at once, all large steps could be
slow together, and rows would be thought too dear for hundreds of steps to come.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

from hotbatch.core.cost_model import CostModel, StepFeatures
from hotbatch.core.plan import PlannedRequest, SampleSpec, StepPlan
from hotbatch.core.sampling_params import SamplingParams
from hotbatch.engine.protocol import Clock, Executor, ExecutorInfo

_SECONDS = 0.9  # of warming up, give or take a step
_KINDS_SECONDS = 0.5  # of them, after which no more kinds of steps are tried
_GREEDY = SamplingParams(temperature=0.0)
_CHECK_SECONDS = 0.2  # of looking whether they still take as long
_DECODE_CONTEXTS = (64, 192)
_ROUNDS = 3  # times that what was measured is shown to a cost model
_OFF = 1.25  # times as long or as short as predicted, a step is not the one that was known


class _Shape(NamedTuple):
    """So many requests that decode, with so many guesses each, and a part of a prompt."""

    decodes: int = 0
    prompt: int = 0
    start: int = 0
    guesses: int = 0


# From quick to slow. Guesses tell the price of a row from that of a request.
_SHAPES = (
    *map(_Shape, (1, 2, 4)),
    _Shape(2, guesses=3),
    *(_Shape(prompt=size) for size in (16, 32)),
    *map(_Shape, (8, 16)),
    _Shape(4, 16, 512),
    _Shape(8, 32),
    _Shape(8, guesses=3),
    _Shape(prompt=64),
    _Shape(prompt=32, start=2048),
    _Shape(prompt=128),
    _Shape(prompt=64, start=1024),
    *map(_Shape, (32, 64)),
    _Shape(16, guesses=3),
    _Shape(16, 64, 256),
    _Shape(32, 128),
    _Shape(64, guesses=1),
    _Shape(prompt=128, start=3072),
    *(_Shape(prompt=size) for size in (256, 512)),
)
_CHECKS = (_Shape(1), _Shape(16), _Shape(8, 32), _Shape(prompt=64), _Shape(prompt=128))


def warm_up(
    executor: Executor, model: CostModel, clock: Clock, *, max_tokens: int, max_requests: int
) -> list[tuple[StepFeatures, float]]:
    """Run steps until the time is up or all kinds were seen; returns each with its seconds.

    Must be called before anything is planned: the steps write into KV blocks that nobody holds.

    Args:
        max_tokens, max_requests: of a step.
    """
    began = clock.now()
    plans: list[StepPlan] = []
    times: list[float] = []
    for plan in _plans(_SHAPES, executor.info, max_tokens, max_requests):
        if not plans:
            executor.run(plan)  # loads what all the others find
        plans.append(plan)
        times.append(executor.run(plan).seconds)
        if clock.now() >= began + _KINDS_SECONDS:
            break
    for index, plan in enumerate(plans):
        if clock.now() >= began + _SECONDS:
            break
        times[index] = min(times[index], executor.run(plan).seconds)
    steps = list(zip(map(StepFeatures.of_plan, plans), times, strict=True))
    show(steps, model)
    return steps


def show(steps: Sequence[tuple[StepFeatures, float]], model: CostModel) -> None:
    """Let a cost model that knows nothing learn from steps that were measured before."""
    for _ in range(_ROUNDS):
        for features, seconds in steps:
            model.observe(features, seconds, is_live=False)


def is_as_known(
    executor: Executor, model: CostModel, clock: Clock, *, max_tokens: int, max_requests: int
) -> bool:
    """Do a few steps take as long as a trained model says? A tenth of a second tells; where steps
    are slow, the first of them do.

    A machine may have been busy when it was measured, or have another neighbour since. Must be
    called before anything is planned, like `warm_up`.
    """
    until = None
    ratios = []
    for plan in _plans(_CHECKS, executor.info, max_tokens, max_requests):
        if until is None:
            executor.run(plan)  # loads what the others find, and is like none of them
            until = clock.now() + _CHECK_SECONDS
        seconds = executor.run(plan).seconds
        if clock.now() < until:
            seconds = min(seconds, executor.run(plan).seconds)
        ratios.append(seconds / model.predict(StepFeatures.of_plan(plan)))
        if clock.now() >= until:
            break
    return not ratios or 1.0 / _OFF <= median(ratios) <= _OFF


def _plans(
    shapes: Sequence[_Shape], info: ExecutorInfo, max_tokens: int, max_requests: int
) -> Iterator[StepPlan]:
    for decodes, size, start, guesses in shapes:
        rows = 1 + guesses
        if decodes * rows + size > max_tokens or decodes + bool(size) > max_requests:
            continue
        for context in _DECODE_CONTEXTS if decodes and not guesses else _DECODE_CONTEXTS[-1:]:
            lengths = [(context - 1, rows)] * decodes
            if size:
                lengths.append((start, size))
            plan = made_up_step(lengths, info, guesses)
            if plan is not None:
                yield plan


def made_up_step(
    lengths: Sequence[tuple[int, int]], info: ExecutorInfo, num_drafts: int = 0
) -> StepPlan | None:
    """A step to be timed, of requests that nobody made: (position, tokens) of each.

    The last `num_drafts` tokens of each are guesses to be verified.

    Its blocks are counted from the first on. None if the machine does not hold it.
    """
    requests: list[PlannedRequest] = []
    next_block = 0
    for start, size in lengths:
        end = start + size
        num_blocks = -(-end // info.block_size)
        if end > info.context_len or next_block + num_blocks > info.num_blocks:
            return None
        requests.append(
            PlannedRequest(
                f"made-up-{len(requests)}",
                start,
                tuple((index * 7 + 1) % info.vocab_size for index in range(size)),
                tuple(range(next_block, next_block + num_blocks)),
                SampleSpec(_GREEDY, 0, end - num_drafts, end - num_drafts),
                num_drafts,
            )
        )
        next_block += num_blocks
    return StepPlan(0, tuple(requests))
