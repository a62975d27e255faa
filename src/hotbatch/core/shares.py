"""How the prompts that are in flight share the tokens of a step.

The first in order takes most, so that it ends soon; but each behind it is sure of a part of a
quarter of the step, so that a long prompt neither holds the budget alone nor waits for ever
behind short ones. What somebody does not need goes to the first in order again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from hotbatch.core.request import Request

_SURE = 4  # a quarter of the step is shared by all but the first


def share_out(num_tokens: int, wanted: Sequence[int]) -> list[int]:
    """Tokens for each prompt.

    Args:
        num_tokens: what there is to share.
        wanted: what each prompt could use, the most urgent first.
    """
    others = len(wanted) - 1
    sure = max(1, num_tokens // _SURE // others) if others > 0 else 0
    shares = []
    left = num_tokens
    for index, size in enumerate(wanted):
        share = min(size, max(0, left - sure * (others - index)))
        shares.append(share)
        left -= share
    for index, size in enumerate(wanted):
        more = min(size - shares[index], left)
        shares[index] += more
        left -= more
    return shares


def by_deadline(
    prompts: Sequence[Request],
    now: float,
    seconds_for: Callable[[int], float],
    service_had: Callable[[Request], float],
) -> list[Request]:
    """The order in which prompts are computed.

    Those that can still keep their deadline come first: of the tenants that were served least,
    the nearest deadline before others. Then come the rest. Among equals, and where nothing was
    promised, it is the least remaining work.

    Args:
        seconds_for: predicted time for a number of prompt tokens.
        service_had: how much the request's tenant was served, coarsely.
    """
    if len(prompts) < 2:
        return list(prompts)

    def urgency(request: Request) -> tuple[bool, float, float, int, int]:
        remaining = len(request.tokens) - request.num_computed
        is_lost = request.due < inf and now + seconds_for(remaining) > request.due
        due = 0.0 if is_lost else request.due
        return (is_lost, service_had(request), due, remaining, request.order)

    return sorted(prompts, key=urgency)
