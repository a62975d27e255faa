"""Finding the settings that serve most requests as promised on a machine.

`measure_curve` times the loaded model; `search` tries settings on the simulator with what was
measured; `confirm` runs the best of them on the real engine. The settings are the sequence
limit and the token budget, which bounds the chunks of prompts as well.
"""

from hotbatch.tuning.confirmation import confirm
from hotbatch.tuning.curve import CurveStepTime, measure_curve
from hotbatch.tuning.trials import Figures, Settings, Targets, Trial, search
from hotbatch.tuning.workload import PROFILES, Job, make_jobs

__all__ = [
    "PROFILES",
    "CurveStepTime",
    "Figures",
    "Job",
    "Settings",
    "Targets",
    "Trial",
    "confirm",
    "make_jobs",
    "measure_curve",
    "search",
]
