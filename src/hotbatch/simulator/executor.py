"""An executor without a model that checks what a real one would silently get wrong.

It keeps, for every slot of every KV block, which token was computed there, at which position
and after which context. A step reads its context from these slots alone: a lost block, a
stale prefix, a bad copy or two requests writing to one block either trips a check or changes
the tokens, and both fail a test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hotbatch.core.plan import (
    PlannedRequest,
    RequestResult,
    SampleSpec,
    StepPlan,
    StepResult,
    TokenLogprob,
)
from hotbatch.engine.ceiling import ModelWork
from hotbatch.engine.protocol import ExecutorInfo
from hotbatch.simulator.clock import VirtualClock
from hotbatch.simulator.step_time import ConstantStepTime, StepTime
from hotbatch.simulator.token_model import EMPTY_CONTEXT, TokenModel


class SimulatedFailure(RuntimeError):
    """A step failed because the script said so."""


@dataclass(frozen=True, slots=True)
class _Slot:
    """One token's KV: `context` stands for all tokens up to and including this one."""

    token_id: int
    position: int
    context: int


class SimulatedExecutor:
    """Fits `hotbatch.engine.protocol.Executor`; deterministic, needs no model.

    Args:
        num_blocks, block_size, max_model_len: the machine, as in `ExecutorInfo`.
        model: where the tokens come from.
        step_time: seconds a plan takes.
        clock: advanced by each step's time; a new one if not given.
        sleep: also spend each step's time really, e.g. with `time.sleep`.
        strict: check every slot of every context, which costs time linear in the context.
            Otherwise only the last one is read, which suits long simulations.
        work: what a step needs, for an engine that accounts for its time.
        fail_steps: step id -> message of the `SimulatedFailure` that `run` raises for it.
        fail_requests: request id -> error in its result, as soon as it would sample.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int = 16,
        max_model_len: int = 4096,
        model: TokenModel | None = None,
        step_time: StepTime | None = None,
        clock: VirtualClock | None = None,
        sleep: Callable[[float], None] | None = None,
        strict: bool = True,
        work: ModelWork | None = None,
        fail_steps: Mapping[int, str] | None = None,
        fail_requests: Mapping[str, str] | None = None,
    ) -> None:
        self.model = model or TokenModel()
        self.clock = clock or VirtualClock()
        self.steps_run = 0
        self.closed = False
        self._step_time = step_time or ConstantStepTime()
        self._sleep = sleep
        self._strict = strict
        self._fail_steps = dict(fail_steps or {})
        self._fail_requests = dict(fail_requests or {})
        self._block_size = block_size
        self._slots: list[list[_Slot | None]] = [[None] * block_size for _ in range(num_blocks)]
        self._info = ExecutorInfo(
            model_name="simulated",
            precision="none",
            device="simulated",
            vocab_size=self.model.vocab_size,
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            block_size=block_size,
            description="simulated executor, no model",
            work=work,
        )

    @property
    def info(self) -> ExecutorInfo:
        return self._info

    def close(self) -> None:
        self.closed = True

    def run(self, plan: StepPlan) -> StepResult:
        """Compute a step.

        Raises:
            SimulatedFailure: the script has this step fail.
            AssertionError: the plan would corrupt or misread the KV cache.
        """
        assert not self.closed, "run() after close()"
        if plan.step_id in self._fail_steps:
            raise SimulatedFailure(self._fail_steps[plan.step_id])
        self._check_plan(plan)
        for source, destination in plan.copies:
            self._slots[destination] = list(self._slots[source])
        # All contexts are read before anything is written: no step may lean on its own writes
        # through another request's blocks.
        contexts = [self._read_context(request) for request in plan.requests]
        results = []
        for request, context in zip(plan.requests, contexts, strict=True):
            results.append(self._compute(request, context))
        seconds = self._step_time(plan)
        self.clock.advance(seconds)
        if self._sleep is not None:
            self._sleep(seconds)
        self.steps_run += 1
        return StepResult(plan.step_id, tuple(results), seconds)

    def _check_plan(self, plan: StepPlan) -> None:
        assert plan.requests, "an empty plan"
        ids = [request.request_id for request in plan.requests]
        assert len(set(ids)) == len(ids), "a request is planned twice in one step"
        size = self._block_size
        written: dict[int, str] = {}
        for request in plan.requests:
            name = request.request_id
            assert request.tokens, f"{name}: nothing to compute"
            assert request.context_len <= self._info.max_model_len, f"{name}: context too long"
            assert request.context_len <= len(request.block_ids) * size, f"{name}: no block"
            assert all(0 <= block < len(self._slots) for block in request.block_ids), name
            assert len(set(request.block_ids)) == len(request.block_ids), f"{name}: block twice"
            last = (request.context_len - 1) // size
            for block in request.block_ids[request.start // size : last + 1]:
                assert block not in written, f"{name} and {written[block]} write block {block}"
                written[block] = name
        if self._strict:
            self._check_sharing(plan, written)

    def _check_sharing(self, plan: StepPlan, written: Mapping[int, str]) -> None:
        for request in plan.requests:
            for block in request.block_ids[: request.start // self._block_size]:
                assert block not in written, (
                    f"{request.request_id} reads block {block} while {written[block]} writes it"
                )
        copied = {destination for _, destination in plan.copies}
        assert len(copied) == len(plan.copies), "two copies into one block"
        for source, destination in plan.copies:
            assert source not in copied, f"block {source} is source and destination of copies"
            assert destination in written, f"block {destination} is copied into for nobody"

    def _read_context(self, request: PlannedRequest) -> int:
        """The context before the first token to compute, read from the request's blocks."""
        if request.start == 0:
            return EMPTY_CONTEXT
        if not self._strict:
            return self._slot_at(request, request.start - 1).context
        context = EMPTY_CONTEXT
        for position in range(request.start):
            slot = self._slot_at(request, position)
            context = self.model.extend(context, slot.token_id)
            assert slot.context == context, (
                f"{request.request_id}: position {position} was computed after other tokens"
            )
        return context

    def _slot_at(self, request: PlannedRequest, position: int) -> _Slot:
        block, offset = divmod(position, self._block_size)
        slot = self._slots[request.block_ids[block]][offset]
        assert slot is not None, f"{request.request_id}: position {position} was never computed"
        assert slot.position == position, (
            f"{request.request_id}: position {position} holds that of {slot.position}"
        )
        return slot

    def _compute(self, request: PlannedRequest, context: int) -> RequestResult:
        """Write the KV of all rows, then sample where asked."""
        row_contexts: list[int] = []
        for index, token_id in enumerate(request.tokens):
            position = request.start + index
            context = self.model.extend(context, token_id)
            block, offset = divmod(position, self._block_size)
            self._slots[request.block_ids[block]][offset] = _Slot(token_id, position, context)
            row_contexts.append(context)
        prompt_logprobs = self._prompt_logprobs(request, row_contexts)
        spec = request.sample
        if spec is None:
            assert request.num_drafts == 0, f"{request.request_id}: drafts without sampling"
            return RequestResult(request.request_id, prompt_logprobs=prompt_logprobs)
        if request.request_id in self._fail_requests:
            error = self._fail_requests[request.request_id]
            return RequestResult(request.request_id, error=error)
        return self._sample(request, spec, row_contexts, prompt_logprobs)

    def _sample(
        self,
        request: PlannedRequest,
        spec: SampleSpec,
        row_contexts: list[int],
        prompt_logprobs: tuple[TokenLogprob, ...],
    ) -> RequestResult:
        first_row = len(request.tokens) - 1 - request.num_drafts
        self._check_spec(request, spec, row_contexts[first_row], first_row)
        drafts = request.tokens[first_row + 1 :]
        token_ids: list[int] = []
        logprobs: list[TokenLogprob] = []
        for index, context in enumerate(row_contexts[first_row:]):
            token_id = self.model.sample(
                context,
                spec.params,
                seed=spec.seed,
                position=spec.position + index,
                banned=spec.banned,
            )
            token_ids.append(token_id)
            if spec.params.logprobs is not None:
                logprobs.append(self.model.logprob(context, token_id, spec.params.logprobs))
            if index < len(drafts) and token_id != drafts[index]:
                break
        return RequestResult(request.request_id, tuple(token_ids), tuple(logprobs), prompt_logprobs)

    def _check_spec(
        self, request: PlannedRequest, spec: SampleSpec, context: int, first_row: int
    ) -> None:
        name = request.request_id
        assert spec.position == request.start + first_row + 1, f"{name}: wrong position"
        assert 0 < spec.num_prompt <= spec.position, f"{name}: wrong prompt length"
        if not spec.params.has_penalties:
            assert not spec.history, f"{name}: a history that nobody needs"
        else:
            assert len(spec.history) == spec.position, f"{name}: history of wrong length"
            if self._strict:
                assert self.model.context(spec.history) == context, f"{name}: wrong history"

    def _prompt_logprobs(
        self, request: PlannedRequest, row_contexts: list[int]
    ) -> tuple[TokenLogprob, ...]:
        if request.prompt_logprobs is None:
            return ()
        assert 0 < len(request.next_tokens) <= len(request.tokens), request.request_id
        assert request.next_tokens[: len(request.tokens) - 1] == request.tokens[1:], (
            f"{request.request_id}: next_tokens do not follow the rows"
        )
        return tuple(
            self.model.logprob(context, token_id, request.prompt_logprobs)
            for context, token_id in zip(row_contexts, request.next_tokens, strict=False)
        )
