"""Whom the settings are for: when requests come and how long they are, at any pace."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random


@dataclass(frozen=True, slots=True)
class Job:
    """One request: when it comes, tokens in, tokens out. `time` is in units of the mean time
    between two requests, so that a workload can be played at any rate."""

    time: float
    num_prompt: int
    num_output: int


@dataclass(frozen=True, slots=True)
class Profile:
    """A kind of traffic: median lengths and their spread (of the logarithm), and how many come
    at once."""

    prompt: float
    prompt_spread: float
    output: float
    output_spread: float
    burst: int = 1


PROFILES = {
    "chat": Profile(prompt=120.0, prompt_spread=0.8, output=100.0, output_spread=0.6),
    "documents": Profile(prompt=600.0, prompt_spread=0.5, output=40.0, output_spread=0.5),
    "bursts": Profile(prompt=80.0, prompt_spread=0.6, output=80.0, output_spread=0.6, burst=32),
}


def make_jobs(profile: Profile, count: int, longest: int, seed: int = 0) -> list[Job]:
    """Args: `longest` is the most tokens that prompt and output may have together."""
    rng = Random(seed)
    jobs = []
    time = 0.0
    for index in range(count):
        if index % profile.burst == 0:
            time += rng.expovariate(1.0 / profile.burst)
        num_output = _length(rng, profile.output, profile.output_spread, longest // 2)
        num_prompt = _length(rng, profile.prompt, profile.prompt_spread, longest - num_output)
        jobs.append(Job(time, num_prompt, num_output))
    # Chance must not decide how much is too much.
    pace = max(1.0, count - profile.burst) / time
    return [replace(job, time=job.time * pace) for job in jobs]


def jobs_of(rows: Sequence[tuple[float, int, int]], longest: int) -> list[Job]:
    """A recorded workload: (seconds, tokens in, tokens out) of each request, in order."""
    span = rows[-1][0] - rows[0][0]
    unit = span / (len(rows) - 1) if len(rows) > 1 and span > 0.0 else 1.0
    jobs = []
    for seconds, num_prompt, num_output in rows:
        num_output = max(1, min(num_output, longest // 2))
        num_prompt = max(1, min(num_prompt, longest - num_output))
        jobs.append(Job((seconds - rows[0][0]) / unit, num_prompt, num_output))
    return jobs


def piece_of(jobs: Sequence[Job], first: int, count: int) -> list[Job]:
    """So many jobs from one on as a workload of its own: it begins at 0, and as many come in its
    time as in any piece, for chance must not decide how much is too much."""
    piece = jobs[first : first + count]
    start, end = piece[0].time, piece[-1].time
    num_before = sum(job.time < end for job in piece)
    pace = num_before / (end - start) if end > start else 0.0
    return [replace(job, time=(job.time - start) * pace) for job in piece]


def _length(rng: Random, median: float, spread: float, most: int) -> int:
    return max(1, min(most, round(rng.lognormvariate(math.log(median), spread))))
