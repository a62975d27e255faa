"""What is searched, and what a setting is judged by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hotbatch.core.config import SchedulerConfig
from hotbatch.core.policies import Policies, full_policies
from hotbatch.core.request import Request
from hotbatch.core.sampling_params import SamplingParams
from hotbatch.core.service_class import LatencyTargets
from hotbatch.engine.protocol import ExecutorInfo
from hotbatch.tuning.workload import Job

SEATS = (8, 16, 32, 64, 128, 256)
BUDGETS = (64, 128, 256, 512, 1024, 2048)
CHUNKS = (64, 256)


@dataclass(frozen=True, slots=True)
class Settings:
    """One way to serve.

    Attributes:
        max_num_seqs: requests in a step.
        max_num_batched_tokens: tokens in it.
        max_chunk: tokens of one prompt in it; 0 for as many as it holds.
        num_blocks: KV blocks; None for as many as the executor has.
        threads: of the model; None for as many as it has.
        is_plain: first come, first served with a fixed budget: what others do by default.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int | None = None
    threads: int | None = None
    is_plain: bool = False
    max_chunk: int = 0

    def config(self, info: ExecutorInfo) -> SchedulerConfig:
        return SchedulerConfig(
            num_blocks=min(self.num_blocks or info.num_blocks, info.num_blocks),
            block_size=info.block_size,
            max_model_len=info.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            long_prefill_token_threshold=self.max_chunk,
            enable_prefix_caching=False,
            vocab_size=info.vocab_size,
        )

    def policies(self) -> Policies:
        return Policies() if self.is_plain else full_policies()


def all_pairs(base: Settings) -> list[Settings]:
    """Every sequence limit with every token budget that holds a token of each sequence."""
    return [
        replace(base, max_num_seqs=seats, max_num_batched_tokens=budget)
        for seats in SEATS
        for budget in BUDGETS
        if budget >= seats
    ]


@dataclass(frozen=True, slots=True)
class Targets:
    """Seconds to the first token, and for each after it, that a good answer keeps."""

    ttft: float
    tpot: float


@dataclass(frozen=True, slots=True)
class Figures:
    """What a setting brought: good requests and tokens per second, share of requests as
    promised."""

    goodput: float
    throughput: float
    attainment: float


def over_loads(figures: Sequence[Figures]) -> Figures:
    """Of one setting at several loads: means, and the best throughput."""
    return Figures(
        sum(one.goodput for one in figures) / len(figures),
        max(one.throughput for one in figures),
        sum(one.attainment for one in figures) / len(figures),
    )


@dataclass(frozen=True, slots=True)
class Heard:
    """What the client of a job saw: when it asked, and when each token came, in seconds."""

    job: Job
    arrival: float
    token_times: Sequence[float]


def figures_of(answers: Sequence[Heard], targets: Targets) -> Figures:
    num_good = num_tokens = 0
    end = 0.0
    begin = min(heard.arrival for heard in answers)
    for heard in answers:
        times = heard.token_times
        num_tokens += len(times)
        if not times:
            continue
        end = max(end, times[-1])
        gaps = len(times) - 1
        is_quick = times[0] - heard.arrival <= targets.ttft
        is_steady = gaps == 0 or (times[-1] - times[0]) / gaps <= targets.tpot
        num_good += len(times) == heard.job.num_output and is_quick and is_steady
    seconds = max(end - begin, 1e-9)
    return Figures(num_good / seconds, num_tokens / seconds, num_good / len(answers))


def request_of(index: int, job: Job, arrival: float, targets: Targets) -> Request:
    """The job as a request with the name `request_id(index)`; no two prompts begin alike."""
    return Request(
        request_id(index),
        [(index * 7919 + position * 31) % 97 for position in range(job.num_prompt)],
        SamplingParams(temperature=0.0, max_tokens=job.num_output, ignore_eos=True),
        seed=index,
        arrival=arrival,
        targets=LatencyTargets(targets.ttft, targets.tpot),
    )


def request_id(index: int) -> str:
    return f"r{index}"
