"""The scheduler's configuration: frozen, checked when made, never written to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from hotbatch.core.errors import InvalidRequestError

Batching = Literal["continuous", "static", "request"]


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
        batching: `continuous` refills the batch every step; `static` gathers a batch and runs
            it to the end of its longest member; `request` runs one at a time.
        static_batch_size: requests in a static batch.
        static_timeout: seconds after which an incomplete static batch starts.
        enable_prefix_caching: keep full blocks by content and share them.
        watermark: share of the pool that admission leaves free for running requests to grow.
        vocab_size: if known, token ids are checked against it.

    Raises:
        InvalidRequestError: an option is out of range; `param` names it.
    """

    num_blocks: int
    max_model_len: int
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    batching: Batching = "continuous"
    static_batch_size: int = 16
    static_timeout: float = 0.1
    enable_prefix_caching: bool = True
    watermark: float = 0.01
    vocab_size: int | None = None

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

    @property
    def context_len(self) -> int:
        """Tokens that one request can have at most: the model's limit, or the whole pool."""
        return min(self.max_model_len, self.num_blocks * self.block_size)
