"""What the engine shows to whoever watches the batch itself: each step with its plan and result.

Nobody watches most of the time, so nothing is made for it: a trace is three references, and it
is made only while there is a tracer.
"""

from __future__ import annotations

from typing import NamedTuple

from hotbatch.core.plan import StepPlan, StepResult
from hotbatch.core.service_class import LatencyTargets, ServiceClass
from hotbatch.engine.step_stats import StepStats


class StepTrace(NamedTuple):
    """`result` is None if the step failed; it names requests in the plan's order."""

    plan: StepPlan
    result: StepResult | None
    stats: StepStats


class Promise(NamedTuple):
    """What is known of an outstanding request from the moment it came (arrival in seconds on
    the engine's clock)."""

    arrival: float
    num_prompt: int
    service_class: ServiceClass
    targets: LatencyTargets
