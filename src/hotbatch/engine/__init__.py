"""The only loop: inbox, clock, plan, execute, commit, deliver.

`Engine` runs a scheduler and an executor in a thread; `AsyncEngine` is its face towards
asyncio. `StepStats` and `RequestTimings` are what observers get; `child_seed` is where the
seeds of a request's completions come from. Nothing here knows a model or a socket.
"""

from hotbatch.engine.accounting import CAUSES, Cause, Phase, StepAccount, Totals
from hotbatch.engine.async_engine import AsyncEngine, EventStream, merge_events
from hotbatch.engine.ceiling import Ceiling, CeilingSnapshot, ModelWork
from hotbatch.engine.clock import MonotonicClock
from hotbatch.engine.engine import Engine
from hotbatch.engine.protocol import Clock, Executor, ExecutorInfo
from hotbatch.engine.seeds import child_seed
from hotbatch.engine.step_stats import RequestTimings, StepStats

__all__ = [
    "CAUSES",
    "AsyncEngine",
    "Cause",
    "Ceiling",
    "CeilingSnapshot",
    "Clock",
    "Engine",
    "EventStream",
    "Executor",
    "ExecutorInfo",
    "ModelWork",
    "MonotonicClock",
    "Phase",
    "RequestTimings",
    "StepAccount",
    "StepStats",
    "Totals",
    "child_seed",
    "merge_events",
]
