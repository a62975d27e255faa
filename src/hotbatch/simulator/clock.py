"""A clock that stands still until it is told otherwise."""

from __future__ import annotations

import threading


class VirtualClock:
    """Seconds that pass only by `advance`; fits `hotbatch.engine.protocol.Clock`.

    Safe to read and advance from several threads.
    """

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self._lock = threading.Lock()

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass.

        Raises:
            ValueError: `seconds` is negative; clocks never go back.
        """
        if not seconds >= 0.0:
            raise ValueError(f"seconds must be at least 0, got {seconds}")
        with self._lock:
            self._now += seconds

    def advance_to(self, moment: float) -> None:
        """Let time pass until `moment`; nothing happens if that is in the past."""
        with self._lock:
            self._now = max(self._now, moment)
