"""A request, from its prompt to its last token, and the table of its states.

There is no prefill phase and no decode phase. A request has known tokens (prompt, then
output) and a count of those whose KV is computed or being computed; every step lets the
count catch up with the known tokens, and a sampled token makes one more known. A finished
prompt, a decode, and a recompute after eviction differ only in how far behind the count is.

The client's facts are set once; the progress below them belongs to the scheduler, which
alone may change it. Block tables are tuples, rebuilt only when a block is added, so that a
plan can hold them without copying.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING

from hotbatch.core.plan import FinishReason, TokenLogprob
from hotbatch.core.sampling_params import SamplingParams
from hotbatch.core.service_class import NO_TARGETS, LatencyTargets, ServiceClass

if TYPE_CHECKING:
    from hotbatch.core.group import RequestGroup


class RequestState(enum.Enum):
    WAITING = "waiting"  # accepted, never had a seat, holds no blocks
    RUNNING = "running"  # has a seat and blocks, takes part in steps
    PAUSED = "paused"  # gave up its seat, keeps its blocks (or most), goes on where it was
    EVICTED = "evicted"  # lost all its blocks, waits at the head of its class to be recomputed
    FINISHED = "finished"  # ended; its blocks come back as soon as no step uses them


class RequestEvent(enum.Enum):
    ADMIT = "admit"  # gets a seat and blocks
    PAUSE = "pause"
    RESUME = "resume"
    EVICT = "evict"
    FINISH = "finish"


TRANSITIONS: dict[tuple[RequestState, RequestEvent], RequestState] = {
    (RequestState.WAITING, RequestEvent.ADMIT): RequestState.RUNNING,
    (RequestState.WAITING, RequestEvent.FINISH): RequestState.FINISHED,
    (RequestState.RUNNING, RequestEvent.PAUSE): RequestState.PAUSED,
    (RequestState.RUNNING, RequestEvent.EVICT): RequestState.EVICTED,
    (RequestState.RUNNING, RequestEvent.FINISH): RequestState.FINISHED,
    (RequestState.PAUSED, RequestEvent.RESUME): RequestState.RUNNING,
    (RequestState.PAUSED, RequestEvent.EVICT): RequestState.EVICTED,
    (RequestState.PAUSED, RequestEvent.FINISH): RequestState.FINISHED,
    (RequestState.EVICTED, RequestEvent.ADMIT): RequestState.RUNNING,
    (RequestState.EVICTED, RequestEvent.FINISH): RequestState.FINISHED,
}
"""Every legal move; a pair that is not here is a bug of ours."""


class Request:
    """One sequence to be continued. `n > 1` is several of these with one `group_id`.

    Args:
        request_id: unique among the live requests of a scheduler.
        prompt_token_ids: at least one token id.
        params: how to sample and when to stop.
        seed: 64 bits; with the position it determines all randomness of this request.
        arrival: seconds on the engine's clock.
        eos_token_ids: tokens that end the text unless `params.ignore_eos`.
        priority: order inside the class, lower first (vLLM's polarity).
        group_id: siblings of one group compute their common prompt once.
        cache_salt: prefixes are shared only between requests of the same salt.
        tenant: whose it is, for fairness between tenants.
        service_class: what it displaces and what displaces it.
        targets: what its client was promised.
        speculate: whether its tokens may be guessed, and guessed from.
    """

    __slots__ = (
        "account",
        "arrival",
        "banned_early",
        "base_rank",
        "block_keys",
        "block_table",
        "cache_salt",
        "capacity",
        "due",
        "eos_token_ids",
        "expected_output",
        "finish_reason",
        "first_token_at",
        "group",
        "group_id",
        "in_flight",
        "is_lifted",
        "max_output",
        "needs_history",
        "num_cached",
        "num_committed",
        "num_computed",
        "num_evictions",
        "num_indexed",
        "num_once_computed",
        "num_pauses",
        "num_prompt",
        "num_shared",
        "order",
        "params",
        "priority",
        "promised",
        "prompt_logprobs",
        "quantum_end",
        "queue_key",
        "rank",
        "request_id",
        "seed",
        "service_class",
        "speculate",
        "state",
        "stop_token_id",
        "stop_tokens",
        "targets",
        "tenant",
        "tokens",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        seed: int,
        arrival: float = 0.0,
        eos_token_ids: frozenset[int] = frozenset(),
        priority: int = 0,
        group_id: str | None = None,
        cache_salt: str | None = None,
        tenant: str = "",
        service_class: ServiceClass = ServiceClass.STANDARD,
        targets: LatencyTargets = NO_TARGETS,
        speculate: bool = True,
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.seed = seed
        self.arrival = arrival
        self.eos_token_ids = eos_token_ids
        self.priority = priority
        self.group_id = group_id
        self.cache_salt = cache_salt
        self.tenant = tenant
        self.service_class = service_class
        self.targets = targets
        self.speculate = speculate

        self.num_prompt = len(prompt_token_ids)
        self.needs_history = params.has_penalties
        ends = params.stop_token_id_set
        self.stop_tokens = ends if params.ignore_eos else ends | eos_token_ids
        self.banned_early = tuple(sorted(ends | eos_token_ids)) if params.min_tokens else ()

        self.tokens: list[int] = list(prompt_token_ids)
        self.state = RequestState.WAITING
        self.order = -1  # place in the order of arrival, given by the scheduler
        self.queue_key: tuple[float, ...] = ()  # place in the queue it stands in
        self.base_rank = (
            0  # what it competes as: its class, or lifted by age, or late; set on arrival
        )
        self.rank = self.base_rank  # the same, or what it inherits or is owed for a while
        self.promised = targets  # its own targets, else those of its class; set on arrival
        self.due = inf  # when its next token is due, in seconds on the engine's clock
        self.is_lifted = False  # waits, and its age has lifted it into a higher class
        self.account: tuple[int, str] = (0, "")  # (rank, tenant) that pays for its tokens
        self.max_output = 0  # params.max_tokens, or what the context leaves; set on arrival
        self.group: RequestGroup | None = None

        self.num_computed = 0  # tokens whose KV is computed, steps in flight included
        self.num_committed = 0  # the same, committed steps only
        self.in_flight = 0  # steps that were planned with this request and not yet committed
        self.block_table: tuple[int, ...] = ()
        self.capacity = 0  # tokens that fit the block table
        self.block_keys: list[bytes] = []  # content keys of the full blocks of `tokens`
        self.num_indexed = 0  # blocks of the table known to the prefix cache
        self.num_shared = 0  # tokens that others with a seat read too, and are counted for
        self.num_cached: int | None = None  # prompt tokens found in the cache; None: not asked yet

        self.first_token_at: float | None = None
        self.expected_output = 0  # output tokens it is expected to have in all
        self.quantum_end = 0  # of num_computed: before, its equals leave it alone

        self.num_evictions = 0  # times it lost blocks
        self.num_pauses = 0  # times it lost its seat
        self.num_once_computed = 0  # tokens whose KV was there before the last such loss
        self.prompt_logprobs: list[TokenLogprob] = []
        self.finish_reason: FinishReason | None = None
        self.stop_token_id: int | None = None

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.state.value}, "
            f"{self.num_computed}/{len(self.tokens)} tokens)"
        )

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    def apply(self, event: RequestEvent) -> None:
        """Move along the table of states."""
        target = TRANSITIONS.get((self.state, event))
        assert target is not None, f"{self!r} cannot {event.value}"
        self.state = target

    def append(self, token_id: int) -> FinishReason | None:
        """Make a sampled token known; says whether it is the last one, and why.

        A stop token belongs to the output; what of it becomes text is the server's matter.
        It does not count before `min_tokens` others were sampled (it was banned until then).
        """
        num_before = len(self.tokens) - self.num_prompt
        self.tokens.append(token_id)
        if token_id in self.stop_tokens and num_before >= self.params.min_tokens:
            self.stop_token_id = token_id
            return FinishReason.STOP
        if num_before + 1 >= self.max_output:
            return FinishReason.LENGTH
        return None

    def banned(self) -> tuple[int, ...]:
        """Tokens that may not be sampled next, as `min_tokens` is not reached."""
        if self.banned_early and len(self.tokens) - self.num_prompt < self.params.min_tokens:
            return self.banned_early
        return ()
