"""Steps before the first client: the cost model learns the machine, caches and pages get warm.

Without them the first long prompt would be planned blindly, as one large step through which
everybody waits. The steps are small ones of every kind first, so that a slow model, for which
there is no time for the large ones, still is known where most steps happen.

Each is run twice, and the quicker time is believed: whatever disturbs a step makes it slower, and
the first of its kind loads what the others find.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from hotbatch.core.cost_model import CostModel, StepFeatures
from hotbatch.core.plan import PlannedRequest, SampleSpec, StepPlan
from hotbatch.core.sampling_params import SamplingParams
from hotbatch.engine.protocol import Clock, Executor, ExecutorInfo

_SECONDS = 0.8  # of warming up, give or take a step
_GREEDY = SamplingParams(temperature=0.0)
_CHECK_SECONDS = 0.2  # of looking whether they still take as long
_DECODE_CONTEXTS = (64, 192)
_TIMES = 2  # that each step is run
_ROUNDS = 3  # times that what was measured is shown to a cost model
_OFF = 1.25  # times as long or as short as predicted, a step is not the one that was known
# (requests that decode, tokens of a prompt, its position), from quick to slow.
_SHAPES = (
    *((count, 0, 0) for count in (1, 2, 4)),
    *((0, size, 0) for size in (16, 32)),
    *((count, 0, 0) for count in (8, 16)),
    *((count, size, start) for count, size, start in ((4, 16, 512), (8, 32, 0), (0, 64, 0))),
    *((0, size, start) for size, start in ((32, 2048), (128, 0), (64, 1024))),
    *((count, 0, 0) for count in (32, 64)),
    *((count, size, start) for count, size, start in ((16, 64, 256), (32, 128, 0), (0, 128, 3072))),
    *((0, size, 0) for size in (256, 512)),
)
_CHECKS = ((1, 0, 0), (16, 0, 0), (8, 32, 0), (0, 64, 0), (0, 128, 0))  # a few of them


def warm_up(
    executor: Executor, model: CostModel, clock: Clock, *, max_tokens: int, max_requests: int
) -> list[tuple[StepFeatures, float]]:
    """Run steps until the time is up or all kinds were seen; returns each with its seconds.

    Must be called before anything is planned: the steps write into KV blocks that nobody holds.

    Args:
        max_tokens, max_requests: of a step.
    """
    until = clock.now() + _SECONDS
    steps: list[tuple[StepFeatures, float]] = []
    for plan in _plans(_SHAPES, executor.info, max_tokens, max_requests):
        features = StepFeatures.of_plan(plan)
        steps.append((features, _quickest(executor, plan, clock, until)))
        if clock.now() >= until:
            break
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
        seconds = _quickest(executor, plan, clock, until)
        ratios.append(seconds / model.predict(StepFeatures.of_plan(plan)))
        if clock.now() >= until:
            break
    return not ratios or 1.0 / _OFF <= median(ratios) <= _OFF


def _quickest(executor: Executor, plan: StepPlan, clock: Clock, until: float) -> float:
    seconds = executor.run(plan).seconds
    for _ in range(_TIMES - 1):
        if clock.now() < until:
            seconds = min(seconds, executor.run(plan).seconds)
    return seconds


def _plans(
    shapes: Sequence[tuple[int, int, int]], info: ExecutorInfo, max_tokens: int, max_requests: int
) -> Iterator[StepPlan]:
    for num_decodes, size, start in shapes:
        if num_decodes + size > max_tokens or num_decodes + bool(size) > max_requests:
            continue
        for context in _DECODE_CONTEXTS if num_decodes else _DECODE_CONTEXTS[:1]:
            lengths = [(context - 1, 1)] * num_decodes
            if size:
                lengths.append((start, size))
            plan = made_up_step(lengths, info)
            if plan is not None:
                yield plan


def made_up_step(lengths: Sequence[tuple[int, int]], info: ExecutorInfo) -> StepPlan | None:
    """A step to be timed, of requests that nobody made: (position, tokens) of each.

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
                SampleSpec(_GREEDY, 0, end, end),
            )
        )
        next_block += num_blocks
    return StepPlan(0, tuple(requests))
