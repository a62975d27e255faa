"""Requests through the real scheduler and the real CPU executor, with every logit kept.

A run yields, for each request, all that its client heard and the raw logits it was sampled from,
so that two runs can be compared to the last bit: most of all any run with a solo run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Any

import numpy as np

from hotbatch.core.config import SchedulerConfig
from hotbatch.core.cost_model import CostModel, StepFeatures
from hotbatch.core.plan import (
    FinishReason,
    StepPlan,
    TokenEvent,
    TokenLogprob,
)
from hotbatch.core.policies import Policies
from hotbatch.core.request import Request
from hotbatch.core.sampling_params import SamplingParams
from hotbatch.core.scheduler import Scheduler
from hotbatch.core.speculation import Drafter, Speculator
from hotbatch.executor.cpu_executor import CpuExecutor
from hotbatch.executor.inputs import pack
from hotbatch.kernels import _native
from hotbatch.models.config import ModelConfig
from hotbatch.models.loader import LoadedModel, load_model

ISAS = [name for name in ("avx512bf16", "avx512vnni", "avx2", "portable") if _native.has_isa(name)]
PRECISIONS = ("f32", "bf16", "int8", "int4")
KV_DTYPES = ("f32", "bf16", "int8")
VOCABULARY = 160
EOS = 2
CONTEXT = 512

Fields = Mapping[str, Any]
"""Keyword arguments of a Request; requests change while they run, these can be used again."""

# Small shapes that differ in what the kernels branch on: widths that fill their groups of 64 or
# not, heads shared by two and by three, windows in all layers or in some, norms and biases.
SHAPES = {
    "plain": ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=112,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        layer_windows=(None, None),
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
    ),
    "window": ModelConfig(
        architecture="MistralForCausalLM",
        vocab_size=VOCABULARY,
        hidden_size=80,
        intermediate_size=96,
        num_layers=2,
        num_heads=6,
        num_kv_heads=2,
        head_dim=16,
        layer_windows=(21, 21),
        max_position_embeddings=CONTEXT,
    ),
    "mixed": ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=144,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        layer_windows=(None, 40),
        max_position_embeddings=CONTEXT,
        attention_bias=True,
        qk_norm=True,
        tie_word_embeddings=True,
    ),
}


@cache
def model(shape: str) -> LoadedModel:
    return load_model(shape, "dummy", config=SHAPES[shape])


@lru_cache(maxsize=64)
def executor(
    shape: str = "plain",
    precision: str = "f32",
    kv_dtype: str = "f32",
    isa: str = ISAS[0],
    threads: int = 1,
) -> CpuExecutor:
    """Kept from test to test, so its cache is full of what others left there."""
    return CpuExecutor(
        model(shape),
        num_blocks=640,
        precision=precision,
        kv_cache_dtype=kv_dtype,
        isa=isa,
        threads=threads,
        max_num_batched_tokens=768,
        max_num_seqs=80,
    )


def fields(name: str, prompt: Iterable[int], *, seed: int = 0, **params: Any) -> dict[str, Any]:
    settings = {"temperature": 1.0, "max_tokens": 8, "logprobs": 3, "ignore_eos": True} | params
    return {
        "request_id": name,
        "prompt_token_ids": tuple(prompt),
        "params": SamplingParams(**settings),
        "seed": seed,
        "eos_token_ids": frozenset({EOS}),
    }


def prompt(length: int, seed: int = 0, vocabulary: int = VOCABULARY) -> tuple[int, ...]:
    drawn = np.random.default_rng(seed).integers(3, vocabulary, size=length)
    return tuple(int(token) for token in drawn)


@dataclass
class Heard:
    """What one client heard. `logits` has the bytes of each row of logits that was asked for, by
    the position of the row's token."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    logits: dict[int, bytes] = field(default_factory=dict)
    end: TokenEvent | None = None
    num_cached: int = 0

    def note_logits(self, position: int, row: bytes) -> None:
        """A position that is computed again, after eviction, must come out as before."""
        assert self.logits.setdefault(position, row) == row, f"logits at {position} changed"

    def note_event(self, event: TokenEvent) -> None:
        assert self.end is None, f"{event.request_id} speaks after its end"
        self.token_ids += event.token_ids
        self.logprobs += event.logprobs
        self.prompt_logprobs = self.prompt_logprobs or event.prompt_logprobs
        self.num_cached = event.num_cached
        if event.finish_reason is not None:
            self.end = event


def assert_same(heard: Heard, alone: Heard) -> None:
    """Bit for bit what was heard alone, up to where a cancelled request was cut."""
    count = len(heard.token_ids)
    assert heard.end is not None and heard.end.error is None
    if heard.end.finish_reason is FinishReason.ABORT:
        assert heard.token_ids == alone.token_ids[:count]
    else:
        assert heard.token_ids == alone.token_ids
        assert alone.end is not None and heard.end.finish_reason is alone.end.finish_reason
    assert heard.logprobs == alone.logprobs[:count]
    if heard.prompt_logprobs:
        assert heard.prompt_logprobs == alone.prompt_logprobs
    for position, row in heard.logits.items():
        assert row == alone.logits[position], f"logits at {position} differ"


class Run:
    """One scheduler in front of one executor. `step` plans, runs, records and commits.

    With `keep_logits` every step runs twice: once to sample and once for its raw logits, which
    writes the same keys and values to the same places again.
    """

    def __init__(
        self,
        machine: CpuExecutor,
        *,
        policies: Policies | None = None,
        drafter: Drafter | None = None,
        keep_logits: bool = True,
        **config: Any,
    ) -> None:
        info = machine.info
        settings = {
            "num_blocks": info.num_blocks,
            "block_size": info.block_size,
            "max_model_len": info.max_model_len,
            "max_num_seqs": 80,
            "max_num_batched_tokens": 768,
            "vocab_size": info.vocab_size,
            "watermark": 0.0,
        }
        self.machine = machine
        self.scheduler = Scheduler(
            SchedulerConfig(**(settings | config)), policies, drafter=drafter
        )
        self.heard: dict[str, Heard] = {}
        self.now = 0.0
        self._keep_logits = keep_logits

    def add(self, request: Fields) -> None:
        self.scheduler.add(Request(**request, arrival=self.now))
        self.heard[request["request_id"]] = Heard()

    def cancel(self, request_id: str) -> None:
        event = self.scheduler.cancel(request_id)
        if event is not None:
            self.heard[request_id].note_event(event)

    def step(self) -> StepPlan | None:
        plan = self.scheduler.plan(self.now)
        if plan is None:
            self.now = self.scheduler.next_wakeup(self.now) or self.now
            return None
        result = self.machine.run(plan)
        logits = self.machine.logits(replace(plan, copies=())) if self._keep_logits else None
        events = self.scheduler.commit(plan, result, self.now)
        if logits is not None:
            self._note_logits(plan, logits, events)
        for event in events:
            self.heard[event.request_id].note_event(event)
        self.scheduler.check_integrity()
        return plan

    def finish(self, max_steps: int = 5000) -> Run:
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                break
            self.step()
        stats = self.scheduler.stats()
        assert (stats.num_running, stats.num_waiting, stats.blocks_used) == (0, 0, 0)
        return self

    def _note_logits(self, plan: StepPlan, logits: np.ndarray, events: list[TokenEvent]) -> None:
        inputs = pack(plan, self.machine.info.block_size)
        positions = inputs.positions[inputs.logit_rows].tolist()
        starts = inputs.logit_starts.tolist()
        num_new = {event.request_id: len(event.token_ids) for event in events}
        for index, request in enumerate(plan.requests):
            last = starts[index + 1]
            if request.sample is not None:
                # Rows behind a wrong draft, or behind the last token, had no real context.
                last -= request.num_drafts + 1 - num_new[request.request_id]
            for row in range(starts[index], last):
                self.heard[request.request_id].note_logits(positions[row], logits[row].tobytes())


def run_all(machine: CpuExecutor, requests: Iterable[Fields], **options: Any) -> dict[str, Heard]:
    """All requests at once, to their end."""
    run = Run(machine, **options)
    for request in requests:
        run.add(request)
    return run.finish().heard


def run_alone(machine: CpuExecutor, request: Fields, *, keep_logits: bool = True) -> Heard:
    """By itself: the whole prompt in one step, no cache to look into, no sibling."""
    run = Run(machine, keep_logits=keep_logits, enable_prefix_caching=False)
    run.add({key: value for key, value in request.items() if key != "group_id"})
    return run.finish().heard[request["request_id"]]


def chunks_of(size: int) -> Policies:
    """Prompts enter in parts of at most `size` tokens."""
    return Policies(chunk_size=lambda request, uncomputed, left: min(uncomputed, left, size))


def eager_speculator() -> Speculator:
    """One that knows a machine on which a few more rows cost nearly nothing."""
    model = CostModel()
    for _ in range(8):
        for tokens in (1, 2, 4, 8):
            model.observe(StepFeatures(tokens, 1, 20, 20 * tokens, tokens), 0.01 + 1e-5 * tokens)
        model.observe(StepFeatures(64, 2, 64, 2000, 1), 0.0107)
    return Speculator(model)


def drafts_from(
    expected: Mapping[str, list[int]], is_wrong: Callable[[str, int], bool], depth: int = 4
) -> Callable[[Request, int], list[int]]:
    """A policy that drafts the tokens of `expected` (all outputs by request id), with another
    token wherever `is_wrong(request id, index in the output)` says so."""

    def propose(request: Request, limit: int) -> list[int]:
        first = request.num_output
        right = expected[request.request_id][first : first + min(limit, depth)]
        return [
            (token + 1) % VOCABULARY if is_wrong(request.request_id, first + index) else token
            for index, token in enumerate(right)
        ]

    return propose
