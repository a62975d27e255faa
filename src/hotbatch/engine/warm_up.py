"""Steps before the first client: the cost model learns the machine, caches and pages get warm.

Without them the first long prompt would be planned blindly, as one large step through which
everybody waits. The steps are small ones of every kind first, so that a slow model, for which
there is no time for the large ones, still is known where most steps happen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hotbatch.core.cost_model import CostModel, StepFeatures
from hotbatch.core.plan import PlannedRequest, SampleSpec, StepPlan
from hotbatch.core.sampling_params import SamplingParams
from hotbatch.engine.protocol import Clock, Executor, ExecutorInfo

_SECONDS = 0.8  # of warming up, give or take a step
_GREEDY = SamplingParams(temperature=0.0)
_DECODE_CONTEXTS = (64, 192)
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
    for plan in _plans(executor.info, max_tokens, max_requests):
        result = executor.run(plan)
        features = StepFeatures.of_plan(plan)
        model.observe(features, result.seconds)
        steps.append((features, result.seconds))
        if clock.now() >= until:
            break
    return steps


def _plans(info: ExecutorInfo, max_tokens: int, max_requests: int) -> Iterator[StepPlan]:
    for num_decodes, size, start in _SHAPES:
        if num_decodes + size > max_tokens or num_decodes + bool(size) > max_requests:
            continue
        for context in _DECODE_CONTEXTS:
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
