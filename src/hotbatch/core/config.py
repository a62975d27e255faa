"""The scheduler's configuration: frozen, checked when made, never written to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from hotbatch.core.errors import InvalidRequestError
from hotbatch.core.service_class import NO_TARGETS, LatencyTargets, ServiceClass

Batching = Literal["continuous", "static", "request"]
PrefixEviction = Literal["return-time", "lru"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Sizes and modes of one scheduler.

    Args:
        num_blocks: KV blocks in the pool.
        block_size: tokens a block.
        max_model_len: longest prompt plus output, in tokens.
        max_num_seqs: requests that may run at once.
        max_num_batched_tokens: the token budget of a step; at least `max_num_seqs`, so that
            every running request can decode in every step.
        long_prefill_token_threshold: tokens of one prompt in a step, at most; 0 for as many as
            the step holds.
        batching: `continuous` refills the batch every step; `static` gathers a batch and runs
            it to the end of its longest member; `request` runs one at a time.
        static_batch_size: requests in a static batch.
        static_timeout: seconds after which an incomplete static batch starts.
        enable_prefix_caching: keep full blocks by content and share them.
        prefix_eviction: which cached blocks go first: those of least chance of return times
            recompute cost, or plain LRU.
        prefill_ahead: compute what the next turn of a conversation will begin with while there
            is nothing else to do.
        watermark: share of the pool that admission leaves free for running requests to grow.
        vocab_size: if known, token ids are checked against it.
        targets: what a request of a class is promised if it does not say so itself; nothing
            where a class is missing.
        queue_time_to_live: seconds that a request may wait for its first seat; after that it
            ends with an error. None: for ever.
        ageing: seconds of waiting that lift a request of the batch class by one class; None
            for never.
        batch_share: share of all tokens that the batch class gets at least, as long as it has
            work.
        late_share: the same for those whose first token is overdue by several times its target.
        tenant_weights: a tenant's share relative to others of its class; 1 where not named.
        max_draft_tokens: guessed next tokens in a step, at most; None for as many as pay.
        ahead_kv_share: share of the pool that requests computed ahead may hold.

    Raises:
        InvalidRequestError: an option is out of range; `param` names it.
    """

    num_blocks: int
    max_model_len: int
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    long_prefill_token_threshold: int = 0
    batching: Batching = "continuous"
    static_batch_size: int = 16
    static_timeout: float = 0.1
    enable_prefix_caching: bool = True
    prefix_eviction: PrefixEviction = "lru"
    prefill_ahead: bool = False
    watermark: float = 0.01
    vocab_size: int | None = None
    targets: Mapping[ServiceClass, LatencyTargets] = field(default_factory=dict)
    queue_time_to_live: float | None = None
    ageing: float | None = 30.0
    batch_share: float = 0.05
    late_share: float = 0.02
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    max_draft_tokens: int | None = None
    ahead_kv_share: float = 0.25

    def __post_init__(self) -> None:
        for name in (
            "num_blocks",
            "max_model_len",
            "block_size",
            "max_num_seqs",
            "max_num_batched_tokens",
            "static_batch_size",
        ):
            if getattr(self, name) < 1:
                raise InvalidRequestError(
                    f"{name} must be at least 1, got {getattr(self, name)}.", param=name
                )
        for name in ("long_prefill_token_threshold", "max_draft_tokens"):
            limit = getattr(self, name)
            if limit is not None and limit < 0:
                raise InvalidRequestError(f"{name} must be at least 0, got {limit}.", param=name)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InvalidRequestError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): raise the first or lower the second.",
                param="max_num_batched_tokens",
            )
        if self.batching not in get_args(Batching):
            raise InvalidRequestError(
                f"batching must be one of {', '.join(get_args(Batching))}, got {self.batching!r}.",
                param="batching",
            )
        if self.prefix_eviction not in get_args(PrefixEviction):
            raise InvalidRequestError(
                f"prefix_eviction must be one of {', '.join(get_args(PrefixEviction))}, "
                f"got {self.prefix_eviction!r}.",
                param="prefix_eviction",
            )
        if self.batching == "static" and self.static_batch_size > self.max_num_seqs:
            raise InvalidRequestError(
                f"static_batch_size ({self.static_batch_size}) must not exceed "
                f"max_num_seqs ({self.max_num_seqs}).",
                param="static_batch_size",
            )
        if not self.static_timeout >= 0.0:
            raise InvalidRequestError(
                f"static_timeout must be at least 0 seconds, got {self.static_timeout}.",
                param="static_timeout",
            )
        if not 0.0 <= self.watermark < 1.0:
            raise InvalidRequestError(
                f"watermark must be in [0, 1), got {self.watermark}.", param="watermark"
            )
        self._check_service()

    def _check_service(self) -> None:
        for service_class, targets in self.targets.items():
            for name in ("ttft", "tpot"):
                seconds = getattr(targets, name)
                if seconds is not None and not seconds > 0.0:
                    raise InvalidRequestError(
                        f"targets: {name} of the class {service_class.label} must be above 0 "
                        f"seconds, got {seconds}; None promises nothing.",
                        param="targets",
                    )
        for name in ("queue_time_to_live", "ageing"):
            seconds = getattr(self, name)
            if seconds is not None and not seconds > 0.0:
                raise InvalidRequestError(
                    f"{name} must be above 0 seconds, got {seconds}; None switches it off.",
                    param=name,
                )
        for name in ("batch_share", "late_share"):
            share = getattr(self, name)
            if not 0.0 <= share <= 0.5:
                raise InvalidRequestError(f"{name} must be in [0, 0.5], got {share}.", param=name)
        if not 0.0 <= self.ahead_kv_share <= 1.0:
            raise InvalidRequestError(
                f"ahead_kv_share must be in [0, 1], got {self.ahead_kv_share}.",
                param="ahead_kv_share",
            )
        for tenant, weight in self.tenant_weights.items():
            if not weight > 0.0:
                raise InvalidRequestError(
                    f"tenant_weights: the weight of {tenant!r} must be above 0, got {weight}.",
                    param="tenant_weights",
                )

    def targets_of(self, service_class: ServiceClass, own: LatencyTargets) -> LatencyTargets:
        """A request's targets: each its own, else its class's."""
        default = self.targets.get(service_class, NO_TARGETS)
        if default is NO_TARGETS:
            return own
        return LatencyTargets(
            default.ttft if own.ttft is None else own.ttft,
            default.tpot if own.tpot is None else own.tpot,
        )

    @property
    def max_chunk(self) -> int:
        """Tokens of one prompt that a step computes at most."""
        budget = self.max_num_batched_tokens
        return min(self.long_prefill_token_threshold or budget, budget)

    @property
    def context_len(self) -> int:
        """Tokens that one request can have at most: the model's limit, or the whole pool."""
        return min(self.max_model_len, self.num_blocks * self.block_size)
