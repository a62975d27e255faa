"""Finding the settings that serve most requests as promised on a machine.

`measure_curve` times the loaded model; `search` and `refine` try settings on the simulator with
what was measured; `play_off` has the best of them confirmed on the real engine. The settings are
the sequence limit, the token budget, which bounds the parts of prompts as well, the size of the
KV cache and the number of threads. How much is guessed is no setting: each guess is priced in
its step, by the same curve.
"""

from hotbatch.tuning.confirmation import confirm
from hotbatch.tuning.curve import CurveStepTime, measure_curve
from hotbatch.tuning.finalist import Finalist, best_plain, choose, times_better
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
    "Plan",
    "Settings",
    "Simulator",
    "Targets",
    "Trial",
    "all_pairs",
    "best_plain",
    "best_rate",
    "choose",
    "confirm",
    "make_jobs",
    "measure_curve",
    "num_jobs",
    "over_loads",
    "play_off",
    "refine",
    "search",
    "times_better",
]
