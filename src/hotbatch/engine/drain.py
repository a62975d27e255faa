"""How fast the engine gets rid of work, measured while it does: what a wait is predicted from."""

from __future__ import annotations

_MEMORY = 32  # endings after which a service time counts for a third
_LARGE = 0.5  # share of the token budget from which on a step says how fast prompts are computed
_SMOOTHING = 0.1  # weight of the newest such step


class DrainRates:
    """Written on the engine's thread, read on any. Both rates are 0 until something is known.

    By Little's law requests end at the rate (those that run) / (mean time from begin to end),
    whatever it is that holds them up.

    Args:
        token_budget: most tokens of a step.
    """

    def __init__(self, token_budget: int) -> None:
        self._large = _LARGE * token_budget
        self._service_seconds = 0.0
        self._num_ended = 0
        self.prompt_tokens_per_second = 0.0

    def note_step(self, num_prompt_tokens: int, seconds: float) -> None:
        """A step took so long; only one that is mostly prompts tells something."""
        if num_prompt_tokens < self._large or seconds <= 0.0:
            return
        rate = num_prompt_tokens / seconds
        known = self.prompt_tokens_per_second
        self.prompt_tokens_per_second = known + _SMOOTHING * (rate - known) if known else rate

    def note_end(self, seconds: float) -> None:
        """A request ended, so long after it had begun."""
        self._num_ended = min(self._num_ended + 1, _MEMORY)
        self._service_seconds += (seconds - self._service_seconds) / self._num_ended

    def completions_per_second(self, num_running: int) -> float:
        """How often one of so many running requests ends."""
        if self._service_seconds <= 0.0:
            return 0.0
        return num_running / self._service_seconds
