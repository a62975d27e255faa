"""How urgent a request is, as its body and headers say: class, order, targets, tenant."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.requests import Request as HttpRequest

from hotbatch.core.errors import InvalidRequestError
from hotbatch.core.service_class import NO_TARGETS, LatencyTargets, ServiceClass, class_of
from hotbatch.server.schemas import GenerationBody

TTFT_HEADER, TPOT_HEADER = "x-slo-ttft-ms", "x-slo-tpot-ms"

_TIER_OF = {
    ServiceClass.INTERACTIVE: "priority",
    ServiceClass.STANDARD: "default",
    ServiceClass.BATCH: "flex",
}


@dataclass(frozen=True, slots=True)
class Urgency:
    """`priority` orders requests inside the class, lower first; `tenant` is whose it is;
    `targets` are the request's own."""

    service_class: ServiceClass = ServiceClass.STANDARD
    priority: int = 0
    targets: LatencyTargets = NO_TARGETS
    tenant: str = ""

    @property
    def service_tier(self) -> str:
        """OpenAI's name of the class."""
        return _TIER_OF[self.service_class]


def urgency_of(http: HttpRequest, body: GenerationBody) -> Urgency:
    """Where the server has keys, the key alone says who it is: a client could name any user.

    Raises:
        InvalidRequestError: a target is not a number above 0.
    """
    priority = body.priority or 0
    tenant = http.scope.get("tenant")
    return Urgency(
        service_class=class_of(body.service_tier, priority),
        priority=priority,
        targets=_targets(body, http.headers),
        tenant=(body.user or "") if tenant is None else tenant,
    )


def echoed_tier(body: GenerationBody, urgency: Urgency) -> dict[str, str]:
    """The response's `service_tier`: what was used, if the request said anything about it."""
    return {} if body.service_tier is None else {"service_tier": urgency.service_tier}


def _targets(body: GenerationBody, headers: Mapping[str, str]) -> LatencyTargets:
    """From the body, else from the headers, which a proxy can add."""
    ttft = body.slo.ttft_ms if body.slo is not None else None
    tpot = body.slo.tpot_ms if body.slo is not None else None
    return LatencyTargets(
        _seconds(ttft, "slo.ttft_ms") if ttft is not None else _from_header(headers, TTFT_HEADER),
        _seconds(tpot, "slo.tpot_ms") if tpot is not None else _from_header(headers, TPOT_HEADER),
    )


def _from_header(headers: Mapping[str, str], name: str) -> float | None:
    text = headers.get(name)
    if text is None:
        return None
    try:
        return _seconds(float(text), name)
    except ValueError:
        raise InvalidRequestError(
            f"{name} must be a number of milliseconds, got {text!r:.60}.", param=name
        ) from None


def _seconds(milliseconds: float, name: str) -> float:
    if not 0.0 < milliseconds < math.inf:
        raise InvalidRequestError(
            f"{name} must be a number of milliseconds above 0, got {milliseconds}.", param=name
        )
    return milliseconds / 1000.0
