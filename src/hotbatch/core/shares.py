"""How the prompts that are in flight share the tokens of a step.

The first in order takes most, so that it ends soon. Those behind it that were promised a moment
wait for theirs, one token a step. Each that was not is sure of a part of a quarter of the step,
so that a long prompt neither holds the budget alone nor waits for ever behind short ones. What
somebody does not need goes to the first in order again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from hotbatch.core.request import Request

_SURE = 4  # a quarter of the step is shared by those that were promised nothing


def share_out(
    num_tokens: int, wanted: Sequence[int], is_promised: Sequence[bool] | None = None
) -> list[int]:
    """Tokens for each prompt.

    Args:
        num_tokens: what there is to share.
        wanted: what each prompt could use, the most urgent first.
        is_promised: of each, whether its first token is due at some moment; by default, none.
    """
    others = len(wanted) - 1
    sure = max(1, num_tokens // _SURE // others) if others > 0 else 0
    parts = [1 if promised else sure for promised in is_promised or [False] * len(wanted)]
    reserved = sum(parts[1:])
    shares = []
    left = num_tokens
    for index, size in enumerate(wanted):
        share = min(size, max(0, left - reserved))
        shares.append(share)
        left -= share
        if index + 1 < len(parts):
            reserved -= parts[index + 1]
    for index, size in enumerate(wanted):
        more = min(size - shares[index], left)
        shares[index] += more
        left -= more
    return shares


def by_deadline(
    prompts: Sequence[Request],
    service_had: Callable[[Request], float],
    is_light: Callable[[Request], bool] = lambda _: False,
) -> list[Request]:
    """The order in which prompts are computed: those of light tenants before others
    (`light_tenants`), then the nearest deadline first, as those that
    cannot keep theirs have stepped back (`lateness`); where nothing was promised, the tenant
    that was served least. Among equals it is the least remaining work.

    The deadline comes first because tenants take turns when seats are given, and whoever has
    one was charged for its prompt already.

    Args:
        service_had: how much the request's tenant was served, coarsely.
        is_light: does the request's tenant ask for less than its share?
    """
    if len(prompts) < 2:
        return list(prompts)

    def urgency(request: Request) -> tuple[bool, float, float, int, int]:
        remaining = len(request.tokens) - request.num_computed
        tenant = service_had(request) if request.due == inf else 0.0
        return (not is_light(request), request.due, tenant, remaining, request.order)

    return sorted(prompts, key=urgency)
