"""The clock of a running engine. Tests use the simulator's virtual one instead."""

from __future__ import annotations

import time


class MonotonicClock:
    """Seconds since an arbitrary start; never goes back, whatever happens to the wall clock."""

    def now(self) -> float:
        return time.monotonic()
