"""The core: decides which tokens go through the model together, and acts on nothing.

No clock, no I/O, no threads, no randomness, and the standard library only: `now` and seeds
are arguments. A `Request` goes into the `Scheduler`; `plan` yields a `StepPlan`, `commit`
takes the `StepResult` and yields `TokenEvent`s.
"""

from hotbatch.core.config import Batching, SchedulerConfig
from hotbatch.core.errors import (
    ContextLengthError,
    EngineStoppedError,
    HotbatchError,
    InvalidRequestError,
    ModelLoadError,
    OverloadedError,
)
from hotbatch.core.plan import (
    FinishReason,
    PlannedRequest,
    Preemption,
    RequestResult,
    SampleSpec,
    StepPlan,
    StepResult,
    TokenEvent,
    TokenLogprob,
)
from hotbatch.core.policies import Policies, full_policies
from hotbatch.core.request import Request, RequestState
from hotbatch.core.sampling_params import SamplingParams
from hotbatch.core.scheduler import Scheduler
from hotbatch.core.service_class import LatencyTargets, ServiceClass, class_of
from hotbatch.core.stats import SchedulerStats

__all__ = [
    "Batching",
    "ContextLengthError",
    "EngineStoppedError",
    "FinishReason",
    "HotbatchError",
    "InvalidRequestError",
    "LatencyTargets",
    "ModelLoadError",
    "OverloadedError",
    "PlannedRequest",
    "Policies",
    "Preemption",
    "Request",
    "RequestResult",
    "RequestState",
    "SampleSpec",
    "SamplingParams",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerStats",
    "ServiceClass",
    "StepPlan",
    "StepResult",
    "TokenEvent",
    "TokenLogprob",
    "class_of",
    "full_policies",
]
