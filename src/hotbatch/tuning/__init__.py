"""Finding the settings that serve most requests as promised on a machine.

`measure_curve` times the loaded model; `search` and `refine` try settings on the simulator with
what was measured; `play_off` has the best of them confirmed on the real engine. The settings are
the sequence limit, the token budget, the bound for the part of one prompt, the size of the KV
cache and the number of threads. How many guesses a step may have is settled by `time_limits`.
"""

from hotbatch.tuning.confirmation import confirm
from hotbatch.tuning.curve import CurveStepTime, measure_curve
from hotbatch.tuning.finalist import Finalist, best_plain, choose, times_better
from hotbatch.tuning.guess_limit import Limit, best_limit, questions, time_limits
from hotbatch.tuning.play_off import Plan, num_jobs, play_off
from hotbatch.tuning.settings import Figures, Settings, Targets, all_pairs, over_loads
from hotbatch.tuning.trials import Simulator, Trial, best_rate, refine, search
from hotbatch.tuning.workload import PROFILES, Job, make_jobs

__all__ = [
    "PROFILES",
    "CurveStepTime",
    "Figures",
    "Finalist",
    "Job",
    "Limit",
    "Plan",
    "Settings",
    "Simulator",
    "Targets",
    "Trial",
    "all_pairs",
    "best_limit",
    "best_plain",
    "best_rate",
    "choose",
    "confirm",
    "make_jobs",
    "measure_curve",
    "num_jobs",
    "over_loads",
    "play_off",
    "questions",
    "refine",
    "search",
    "time_limits",
    "times_better",
]
