"""What the scheduler tells about itself: gauges of the moment and counters since the start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hotbatch.core.speculation.ledger import Account, CalibrationRow


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Requests by state, blocks by state, and counters that only grow.

    `blocks_cached` are unreferenced but findable; `blocks_free` are empty; together with
    `blocks_used` they sum to `blocks_total`. `prefix_query_tokens` counts the prompt tokens
    of admitted requests that asked the cache, `prefix_hit_tokens` those it had. `guesses` has
    what guesses earned and cost, by their distance; empty where nothing is guessed. `returns` is
    how well the chances were told that conversations go on.
    """

    num_running: int
    num_waiting: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    blocks_used: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    preemptions: int
    steps: int
    prompt_tokens: int  # of requests whose first token was sampled
    generated_tokens: int
    num_paused: int = 0  # hold blocks, but no seat
    num_evicted: int = 0  # of those that wait: had a seat, and lost all their blocks
    pauses: int = 0
    expired: int = 0  # waited longer than the queue's time to live
    guesses: Mapping[str, Account] = field(default_factory=dict)
    returns: Sequence[CalibrationRow] = ()
    num_guesses: int = 0  # requests guessed and neither come nor given up yet

    @property
    def block_usage(self) -> float:
        """Share of the pool in use, 0 to 1."""
        return self.blocks_used / self.blocks_total
