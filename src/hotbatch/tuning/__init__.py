"""Finding the settings that serve most requests as promised on a machine.

`measure_curve` times the loaded model; `search` and `refine` try settings on the simulator with
what was measured; `confirm` runs the best of them on the real engine. The settings are the
sequence limit, the token budget, which bounds the parts of prompts as well, the size of the KV
cache and the number of threads. How much is guessed is no setting: each guess is priced in its
step, by the same curve.
"""

from hotbatch.tuning.confirmation import confirm
from hotbatch.tuning.curve import CurveStepTime, measure_curve
from hotbatch.tuning.finalist import Finalist, choose
from hotbatch.tuning.settings import Figures, Settings, Targets, all_pairs, over_loads
from hotbatch.tuning.trials import Simulator, Trial, refine, search
from hotbatch.tuning.workload import PROFILES, Job, make_jobs

__all__ = [
    "PROFILES",
    "CurveStepTime",
    "Figures",
    "Finalist",
    "Job",
    "Settings",
    "Simulator",
    "Targets",
    "Trial",
    "all_pairs",
    "choose",
    "confirm",
    "make_jobs",
    "measure_curve",
    "over_loads",
    "refine",
    "search",
]
