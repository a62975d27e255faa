"""The simulator: a virtual clock and a machine without a model, for exact and fast tests.

Public testing aids: whoever builds on the core, the engine or the server can test against
them. `Simulation` runs the real scheduler, the one and only, against a `SimulatedExecutor`
that checks every KV block it reads.
"""

from hotbatch.simulator.clock import VirtualClock
from hotbatch.simulator.engine_run import EngineRun
from hotbatch.simulator.executor import SimulatedExecutor, SimulatedFailure
from hotbatch.simulator.simulation import (
    Outcome,
    Simulation,
    SimulationStuckError,
    VirtualExecutor,
)
from hotbatch.simulator.step_time import (
    ConstantStepTime,
    MeasuredStepTime,
    RooflineStepTime,
    StepTime,
    UnsteadyStepTime,
)
from hotbatch.simulator.time_only import TimeOnlyExecutor
from hotbatch.simulator.token_model import TokenModel

__all__ = [
    "ConstantStepTime",
    "EngineRun",
    "MeasuredStepTime",
    "Outcome",
    "RooflineStepTime",
    "SimulatedExecutor",
    "SimulatedFailure",
    "Simulation",
    "SimulationStuckError",
    "StepTime",
    "TimeOnlyExecutor",
    "TokenModel",
    "UnsteadyStepTime",
    "VirtualClock",
    "VirtualExecutor",
]
