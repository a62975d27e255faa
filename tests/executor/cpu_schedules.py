"""Random schedules on random kinds of executor, for hypothesis."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from cpu_runs import (
    ISAS,
    KV_DTYPES,
    PRECISIONS,
    SHAPES,
    VOCABULARY,
    Heard,
    Run,
    assert_same,
    drafts_from,
    eager_speculator,
    executor,
    fields,
    run_alone,
)
from hypothesis import strategies as st

from hotbatch.core.policies import Policies

MAX_LEN = 96


@dataclass(frozen=True)
class Case:
    kind: tuple[str, str, str, str]  # shape, precision, cache dtype, instruction set
    threads: int
    config: dict[str, Any]
    requests: tuple[dict[str, Any], ...]
    max_chunk: int
    drafting: str
    seed: int
    arrival: float  # probability of the next arrival, at each turn
    cancel: float  # and of a cancellation


@st.composite
def cases(draw: st.DrawFn) -> Case:
    max_num_seqs = draw(st.sampled_from([1, 3, 5, 8, 8]))
    config = {
        "num_blocks": draw(st.integers(6, 11)),  # of 16 tokens: one to a few of the requests
        "max_model_len": MAX_LEN,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_seqs + draw(st.integers(0, 60)),
        "batching": draw(st.sampled_from(["continuous"] * 4 + ["static", "request"])),
        "static_batch_size": max_num_seqs,
        "enable_prefix_caching": draw(st.booleans()),
    }
    return Case(
        kind=(
            draw(st.sampled_from(list(SHAPES))),
            draw(st.sampled_from(PRECISIONS)),
            draw(st.sampled_from(KV_DTYPES)),
            draw(st.sampled_from(ISAS)),
        ),
        threads=draw(st.integers(1, 3)),
        config=config,
        requests=tuple(draw(requests())),
        max_chunk=draw(st.integers(1, 70)),
        drafting=draw(st.sampled_from(["none", "scripted", "suffixes"])),
        seed=draw(st.integers(0, 2**32)),
        arrival=draw(st.sampled_from([0.2, 1.0, 1.0])),
        cancel=draw(st.sampled_from([0.0, 0.0, 0.02, 0.1])),
    )


@st.composite
def requests(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Two to six prompts that begin alike for a while, some of them with siblings."""
    common = draw(st.lists(tokens(), min_size=48, max_size=48))
    made: list[dict[str, Any]] = []
    for index in range(draw(st.integers(2, 6))):
        own = draw(st.lists(tokens(), min_size=1, max_size=20))
        prompt = common[: draw(st.sampled_from([0, 15, 16, 40, 48]))] + own
        chosen = draw(params(MAX_LEN - len(prompt)))
        siblings = draw(st.sampled_from([1, 1, 3]))
        for sibling in range(siblings):
            request = fields(f"r{index}.{sibling}", prompt, seed=100 * index + sibling, **chosen)
            if siblings > 1:
                request["group_id"] = f"g{index}"
            made.append(request)
    return made


def tokens() -> st.SearchStrategy[int]:
    return st.integers(0, VOCABULARY - 1)


@st.composite
def params(draw: st.DrawFn, room: int) -> dict[str, Any]:
    max_tokens = min(room, draw(st.sampled_from([1, 5, 12, 24, 40])))
    return {
        "max_tokens": max_tokens,
        "min_tokens": draw(st.integers(0, min(3, max_tokens))),
        "temperature": draw(st.sampled_from([0.0, 0.0, 0.7, 1.5])),
        "top_k": draw(st.sampled_from([0, 0, 1, 20])),
        "top_p": draw(st.sampled_from([1.0, 0.9])),
        "min_p": draw(st.sampled_from([0.0, 0.05])),
        "presence_penalty": draw(st.sampled_from([0.0, 0.0, 0.7])),
        "frequency_penalty": draw(st.sampled_from([0.0, 0.0, 0.4])),
        "repetition_penalty": draw(st.sampled_from([1.0, 1.0, 1.2])),
        "logit_bias": draw(st.sampled_from([(), (), ((5, 4.0), (9, -100.0))])),
        "stop_token_ids": draw(st.sampled_from([(), tuple(range(0, 40, 9))])),
        "ignore_eos": draw(st.booleans()),
        "logprobs": draw(st.sampled_from([None, 0, 4])),
        "prompt_logprobs": draw(st.sampled_from([None, None, None, 2])),
    }


def run_case(case: Case) -> None:
    """Play the case and compare every request with its solo run, on one thread."""
    solo_machine = executor(*case.kind)
    alone = {request["request_id"]: run_alone(solo_machine, request) for request in case.requests}
    run = Run(
        executor(*case.kind, threads=case.threads),
        policies=_policies(case, alone),
        drafter=eager_speculator() if case.drafting == "suffixes" else None,
        **case.config,
    )
    _play(case, run)
    for name, heard in run.heard.items():
        assert_same(heard, alone[name])


def _policies(case: Case, alone: dict[str, Heard]) -> Policies:
    expected = {name: heard.token_ids for name, heard in alone.items()}
    propose = drafts_from(expected, lambda name, index: (index * 5 + len(name)) % 4 == 1)
    return Policies(
        chunk_size=lambda request, uncomputed, left: min(uncomputed, left, case.max_chunk),
        propose_drafts=propose if case.drafting == "scripted" else None,
    )


def _play(case: Case, run: Run, max_turns: int = 3000) -> None:
    random = Random(case.seed)
    to_come = list(reversed(case.requests))
    for _ in range(max_turns):
        if not (to_come or run.scheduler.has_work):
            break
        while to_come and random.random() < case.arrival:
            run.add(to_come.pop())
        if run.heard and random.random() < case.cancel:
            run.cancel(random.choice(list(run.heard)))
        run.step()
    run.finish(0)
