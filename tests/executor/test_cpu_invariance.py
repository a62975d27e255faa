"""The promise "same tokens, whatever the batch", bit for bit, on the real CPU executor.

Everything here compares a run with the solo run of each of its requests: tokens, raw logits and
log-probabilities must be equal to the last bit. `cpu_schedules.py` lets hypothesis look for a
schedule that breaks it; the tests below it state one way of being batched each, and make sure
that it really happened.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from cpu_runs import (
    CONTEXT,
    ISAS,
    KV_DTYPES,
    PRECISIONS,
    VOCABULARY,
    Run,
    assert_same,
    chunks_of,
    drafts_from,
    eager_speculator,
    executor,
    fields,
    model,
    prompt,
    run_all,
    run_alone,
)
from cpu_schedules import Case, cases, run_case
from hypothesis import HealthCheck, given, settings

from hotbatch.core.policies import Policies
from hotbatch.executor.channel_scales import trial_tokens
from hotbatch.executor.cpu_executor import CpuExecutor
from hotbatch.models.embedded import embedded_model_path
from hotbatch.models.loader import load_model
from hotbatch.models.weights import LinearWeight

QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True}
# A cache dtype for each precision, where trying all pairs would say nothing new.
PAIRS = [("f32", "f32"), ("bf16", "bf16"), ("int8", "bf16"), ("int4", "int8")]
EVERY_KIND = [
    (precision, kv_dtype, isa)
    for isa in ISAS
    for precision in PRECISIONS
    for kv_dtype in KV_DTYPES
    if isa == ISAS[0] or (precision, kv_dtype) in PAIRS
]


@pytest.fixture(autouse=True, scope="module")
def _executors_go_with_the_module() -> Iterator[None]:
    yield
    executor.cache_clear()


@settings(max_examples=40, **QUIET)  # type: ignore[arg-type]
@given(case=cases())
def test_random_schedules_equal_solo_runs(case: Case) -> None:
    run_case(case)


@pytest.mark.slow
@settings(max_examples=200, **QUIET)  # type: ignore[arg-type]
@given(case=cases())
def test_many_random_schedules_equal_solo_runs(case: Case) -> None:
    run_case(case)


@pytest.mark.parametrize(("precision", "kv_dtype", "isa"), EVERY_KIND)
def test_alone_or_among_64_others(precision: str, kv_dtype: str, isa: str) -> None:
    """Prompts from one token to several chunks of keys, so that steps mix single tokens with
    hundreds."""
    lengths = [1 + index * index % 61 for index in range(64)] + [300]
    requests = [
        fields(f"r{index}", prompt(length, seed=index), seed=index, max_tokens=6)
        for index, length in enumerate(lengths)
    ]
    together = run_all(executor("plain", precision, kv_dtype, isa, threads=2), requests)
    for request in requests[::16]:
        name = request["request_id"]
        alone = run_alone(executor("plain", precision, kv_dtype, isa), request)
        assert_same(together[name], alone)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("precision", "kv_dtype"), PAIRS)
@pytest.mark.parametrize("shape", ["plain", "window", "mixed"])
def test_chunks_of_any_size(shape: str, precision: str, kv_dtype: str, isa: str) -> None:
    machine = executor(shape, precision, kv_dtype, isa)
    request = fields("r", prompt(290), prompt_logprobs=2)
    whole = run_alone(machine, request)
    # Every position asks for logits: the prompt's, and those of all outputs but the last.
    assert len(whole.logits) == 290 + 7
    for size in (1, 3, 16, 100, 129) if isa != "portable" else (16, 129):
        chunked = run_all(machine, [request], policies=chunks_of(size))["r"]
        assert chunked.logits.keys() == whole.logits.keys()
        assert_same(chunked, whole)


@pytest.mark.parametrize(("precision", "kv_dtype"), PAIRS)
def test_threads_change_nothing(precision: str, kv_dtype: str) -> None:
    requests = [fields(f"r{index}", prompt(30 + 50 * index, seed=index)) for index in range(5)]
    one, two, three = (
        run_all(executor("mixed", precision, kv_dtype, threads=threads), requests)
        for threads in (1, 2, 3)
    )
    for name, heard in one.items():
        assert_same(two[name], heard)
        assert_same(three[name], heard)


@pytest.mark.parametrize(("precision", "kv_dtype"), PAIRS)
def test_threads_that_are_far_apart_change_nothing(precision: str, kv_dtype: str) -> None:
    """Some dozens of rows are shared out where each thread else has some columns of all."""
    machine = executor("mixed", precision, kv_dtype, threads=2)
    program = machine._program
    heard = {}
    for name, loop_seconds in (("near", 1e-7), ("far", 1e-5)):
        requests = [fields(f"r{index}", prompt(29 + index, seed=index)) for index in range(2)]
        for _ in range(99):
            program.note_loop(loop_seconds)
        assert program.shares_rows(59) == program.shares_rows(48) == (name == "far")
        assert not program.shares_rows(47) and program.shares_rows(96)
        heard[name] = run_all(machine, requests)
    for request in requests:
        alone = run_alone(executor("mixed", precision, kv_dtype), request)
        assert_same(heard["near"][request["request_id"]], alone)
        assert_same(heard["far"][request["request_id"]], alone)


@pytest.mark.parametrize("loops", [(1e-7, -1.0, 0.0), (1e-5, -1.0, 0.0)])
def test_a_loop_that_some_thread_missed_says_nothing(loops: tuple[float, ...]) -> None:
    program = executor("plain", threads=2)._program
    usual, *missed = loops
    for _ in range(99):
        program.note_loop(usual)
    shares_rows = program.shares_rows(60)
    for _ in range(99):
        for seconds in missed:
            program.note_loop(seconds)
    assert program.shares_rows(60) == shares_rows == (usual > 1e-6)


@pytest.mark.parametrize(("precision", "kv_dtype"), PAIRS)
@pytest.mark.parametrize("shape", ["plain", "window"])
def test_eviction_and_recompute(shape: str, precision: str, kv_dtype: str) -> None:
    """Five requests that need 5 blocks each at the end, in a pool of 12."""
    machine = executor(shape, precision, kv_dtype)
    requests = [
        fields(f"r{index}", prompt(30 + index, seed=index), seed=index, max_tokens=40)
        for index in range(5)
    ]
    run = Run(machine, num_blocks=12, max_num_seqs=5, max_num_batched_tokens=24)
    for request in requests:
        run.add(request)
    run.finish()
    assert run.scheduler.stats().preemptions >= 2
    for request in requests:
        assert_same(run.heard[request["request_id"]], run_alone(machine, request))


@pytest.mark.parametrize(("precision", "kv_dtype"), PAIRS)
@pytest.mark.parametrize("shape", ["plain", "mixed"])
def test_prefix_cache_hits(shape: str, precision: str, kv_dtype: str) -> None:
    machine = executor(shape, precision, kv_dtype)
    common = prompt(160)
    run = Run(machine)
    first = fields("first", common, temperature=0.0, max_tokens=24)
    run.add(first)
    run.finish()
    answer = tuple(run.heard["first"].token_ids)
    others = {
        "whole": (fields("whole", common, seed=5), 159),  # all but the token to sample after
        "part": (fields("part", (*common[:70], *prompt(9, seed=2))), 64),
        "turn": (fields("turn", (*common, *answer, *prompt(5, seed=3))), 176),
    }
    for request, _ in others.values():
        run.add(request)
    run.finish()
    for name, (request, num_cached) in others.items():
        assert run.heard[name].num_cached == num_cached
        assert_same(run.heard[name], run_alone(machine, request))


@pytest.mark.parametrize(("precision", "kv_dtype"), PAIRS)
def test_siblings_share_their_prompt(precision: str, kv_dtype: str) -> None:
    """n = 4 of one prompt, whose last block is partly filled and hence copied."""
    machine = executor("plain", precision, kv_dtype)
    siblings = [
        fields(f"s{index}", prompt(37), seed=index) | {"group_id": "g"} for index in range(4)
    ]
    run = Run(machine)
    for sibling in siblings:
        run.add(sibling)
    copies = computed = 0
    while run.scheduler.has_work:
        plan = run.step()
        assert plan is not None
        copies += len(plan.copies)
        computed += plan.num_tokens
    assert copies == 3
    assert computed < 37 + 4 * 16
    assert len({tuple(heard.token_ids) for heard in run.heard.values()}) == 4
    for sibling in siblings:
        assert_same(run.heard[sibling["request_id"]], run_alone(machine, sibling))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("precision", "kv_dtype"), PAIRS)
@pytest.mark.parametrize("shape", ["plain", "window"])
def test_drafts_right_and_wrong(
    shape: str, precision: str, kv_dtype: str, temperature: float
) -> None:
    machine = executor(shape, precision, kv_dtype)
    penalties = ({}, {"repetition_penalty": 1.3, "frequency_penalty": 0.4})
    requests = [
        fields(
            f"r{index}",
            prompt(20 + 31 * index, seed=index),
            seed=index,
            temperature=temperature,
            max_tokens=30,
            **penalties[index % 2],
        )
        for index in range(4)
    ]
    alone = {request["request_id"]: run_alone(machine, request) for request in requests}
    expected = {name: heard.token_ids for name, heard in alone.items()}
    propose = drafts_from(expected, lambda name, index: (index + int(name[1:])) % 7 == 5)
    run = Run(machine, policies=Policies(propose_drafts=propose))
    for request in requests:
        run.add(request)
    run.finish()
    for name, heard in run.heard.items():
        assert_same(heard, alone[name])
    # 4 requests of 30 tokens in lockstep would take 30 steps.
    assert run.scheduler.stats().steps < 20


@pytest.mark.parametrize("temperature", [0.0, 0.3])
@pytest.mark.parametrize(("precision", "kv_dtype"), PAIRS)
def test_guesses_from_repetition(precision: str, kv_dtype: str, temperature: float) -> None:
    """A random model falls into repeating itself, so suffixes guess well; the second half of the
    requests asks what the first half asked."""
    machine = executor("plain", precision, kv_dtype)
    settings = (
        {},
        {"repetition_penalty": 1.05},
        {"stop_token_ids": (40, 41)},
        {"logit_bias": ((5, 2.0),)},
    )
    requests = [
        fields(
            f"r{index}",
            prompt(20 + 9 * (index % 4), seed=index % 4),
            seed=index % 4,
            temperature=temperature,
            max_tokens=60,
            **settings[index % 4],
        )
        for index in range(8)
    ]
    speculator = eager_speculator()
    run = Run(machine, drafter=speculator)
    for half in (requests[:4], requests[4:]):
        for request in half:
            run.add(request)
        run.finish()
    account = speculator.ledger.account()
    assert account.accepted > 20 and account.wasted > 20, "right ones and wrong ones"
    for request in requests:
        assert_same(run.heard[request["request_id"]], run_alone(machine, request))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("precision", "kv_dtype"), PAIRS)
def test_a_poisoned_request_harms_nobody_else(precision: str, kv_dtype: str, isa: str) -> None:
    """A token whose embedding is not a number ruins the request that holds it. Neither its
    neighbours in the step nor whoever gets its blocks afterwards may notice."""
    poison = 6
    # The model would get other weights than the one without poison that it is held against.
    assert poison not in trial_tokens(VOCABULARY, CONTEXT)
    machine = _poisoned(precision, kv_dtype, isa, poison)
    clean = executor("plain", precision, kv_dtype, isa)
    bad = fields("bad", (*prompt(20), poison, *prompt(20)))
    good = [
        fields(f"good{index}", _without(poison, prompt(length, seed=index)), seed=index)
        for index, length in enumerate((25, 35, 150))
    ]
    run = Run(machine, num_blocks=12, enable_prefix_caching=False, keep_logits=False)
    for request in (good[0], bad, good[1]):
        run.add(request)
    run.finish()
    end = run.heard["bad"].end
    assert end is not None
    assert end.error and not run.heard["bad"].token_ids
    run.add(good[2])  # 10 blocks, so that those of the ruined request are among them
    run.finish()
    for request in good:
        alone = run_alone(clean, request, keep_logits=False)
        assert poison not in alone.token_ids
        assert_same(run.heard[request["request_id"]], alone)


def _without(token: int, tokens: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(token + 1 if other == token else other for other in tokens)


def _poisoned(precision: str, kv_dtype: str, isa: str, token: int) -> CpuExecutor:
    """The plain model with NaN as the embedding of one token; the head keeps the numbers."""
    loaded = model("plain")
    table = loaded.weights.embedding
    stored = np.array(table.data)
    stored[token] = np.frombuffer(b"\xc0\x7f" * (stored.shape[1] // 2), dtype=np.uint8)
    weights = replace(
        loaded.weights,
        embedding=replace(table, stored=stored, row_order=None),
        head=LinearWeight("head", (table,)),
    )
    return CpuExecutor(
        replace(loaded, weights=weights),
        num_blocks=12,
        precision=precision,
        kv_cache_dtype=kv_dtype,
        isa=isa,
        threads=1,
        max_num_batched_tokens=768,
    )


def test_logprobs_are_those_of_the_logits() -> None:
    """Ties what a client reads to the logits that the other tests compare."""
    heard = run_alone(executor(), fields("r", prompt(20), logprobs=5, prompt_logprobs=5))
    positions = sorted(heard.logits)
    entries = [*heard.prompt_logprobs, *heard.logprobs]
    assert len(positions) == len(entries) == 19 + 8
    for position, entry in zip(positions, entries, strict=True):
        logits = np.frombuffer(heard.logits[position], dtype=np.float32).astype(np.float64)
        expected = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        assert entry.logprob == pytest.approx(expected[entry.token_id], abs=1e-5)
        assert entry.rank == 1 + int((logits > logits[entry.token_id]).sum())
        assert [token for token, _ in entry.top] == np.argsort(-logits, kind="stable")[:5].tolist()
        assert len(logits) == VOCABULARY


@pytest.mark.slow
def test_the_embedded_model_alone_and_in_a_chunked_batch() -> None:
    """SmolLM2 as it is served: int8, a batch of 16, prompts in chunks, a prefix in common."""
    loaded = load_model(embedded_model_path())
    machine = CpuExecutor(loaded, num_blocks=128, max_num_batched_tokens=128, max_num_seqs=16)
    vocabulary = loaded.config.vocab_size
    system = prompt(33, seed=99, vocabulary=vocabulary)
    requests = [
        fields(
            f"r{index}",
            system + prompt(3 + 4 * index, seed=index, vocabulary=vocabulary),
            seed=index,
            temperature=(0.0, 0.8)[index % 2],
            max_tokens=6,
        )
        for index in range(16)
    ]
    together = run_all(
        machine, requests, policies=chunks_of(29), max_num_seqs=16, max_num_batched_tokens=128
    )
    for request in requests[1::7]:
        run = Run(machine, max_num_seqs=16, max_num_batched_tokens=128, enable_prefix_caching=False)
        run.add(request)
        alone = run.finish().heard[request["request_id"]]
        assert_same(together[request["request_id"]], alone)
