"""Decodes that take turns, so that a step ends in time for those that have none to lose.

Beside light tenants (`light_tenants`) the decodes of others take turns in one of two ways. Some
of them go on in each step, as many as the pace of the light ones allows and a third at least. Or
all of them do in every second or third step, and none in between. Which is better depends on what
rows cost on this machine: where the first few more are the dearest, as with kernels that compute
rows by fours, one long step after a short one takes less time than two of medium length, and
computes more.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from hotbatch.core.cost_model import CostModel, StepFeatures
from hotbatch.core.request import Request

_TURNS = (2, 3)  # steps, of which all others go on in one
_MARGIN = 0.95  # of the time that some in each step take, on average: all in one are chosen then


@dataclass(frozen=True, slots=True)
class Turns:
    """Who goes on in this step.

    `decodes` are those that do, all in all; `skipped` do not. Prompts of the others have their
    turn in one of `length` steps, too: 0 if it is not this one.
    """

    decodes: StepFeatures
    skipped: Sequence[Request] = ()
    length: int = 1


def take_turns(
    model: CostModel,
    decodes: StepFeatures,
    others: Sequence[Request],
    last: Collection[Request],
    last_two: Collection[Request],
    pace: float,
) -> Turns:
    """Leaves others' decodes out of a step beside light tenants', nobody's three times in a row.

    Args:
        decodes: all that could be in the step.
        others: who can be left out, the most important first.
        last: who was left out of the last step; they go before those that were not.
        last_two: who was left out of the last two.
        pace: seconds in which the step should end.
    """
    in_order = sorted(others, key=lambda request: request not in last)
    most = 2 * len(others) // 3
    able = [request for request in in_order if request not in last_two]
    some = without(model, decodes, able[-most:] if most else [], pace)
    num_some = len(others) - len(some.skipped)
    if not some.skipped:
        return some
    context = sum(len(request.tokens) for request in others)
    reads = context - sum(request.num_shared for request in others)
    num = len(others)
    none = decodes.minus(StepFeatures(num, num, reads, context, num))
    shortest = model.predict(none)
    some_seconds = model.predict(some.decodes) - shortest
    all_seconds = model.predict(decodes) - shortest
    for length in _TURNS:
        # No fewer tokens for the others, and shorter steps for the light ones.
        if num >= length * num_some and all_seconds < _MARGIN * length * some_seconds:
            waited = last if length == _TURNS[0] else last_two
            if any(request in waited for request in others):
                return Turns(decodes, (), length)
            return Turns(none, others, 0)
    return some


def without(
    model: CostModel, decodes: StepFeatures, with_time: Sequence[Request], seconds: float
) -> Turns:
    """The step's decodes without as many of these as have to go for it to end in time, the last
    ones first."""
    left = list(with_time)
    skipped = []
    while left and model.predict_p95(decodes) > seconds:
        request = left.pop()
        skipped.append(request)
        decodes = decodes.plus_decode(len(request.tokens), -1, request.num_shared)
    return Turns(decodes, skipped)
