"""What a client may ask of sampling, with OpenAI's and vLLM's names, and its validation."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hotbatch.core.errors import InvalidRequestError

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_N = 128


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when a request ends.

    Names and defaults follow vLLM; `temperature == 0` is greedy. `top_k` 0 or -1 means off.
    `seed` None lets the caller of the core draw one, so the core stays free of randomness.
    `max_tokens` None means up to the model's context.

    Raises:
        InvalidRequestError: a field is out of range; `param` names it.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    stop_token_id_set: frozenset[int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_token_id_set", frozenset(self.stop_token_ids))
        self._check_range("n", self.n, 1, MAX_N)
        self._check_range("temperature", self.temperature, 0.0, 100.0)
        if not (0.0 < self.top_p <= 1.0):
            raise InvalidRequestError(f"top_p must be in (0, 1], got {self.top_p}.", param="top_p")
        if self.top_k < -1:
            raise InvalidRequestError(
                f"top_k must be -1 or 0 (off) or a positive count, got {self.top_k}.",
                param="top_k",
            )
        self._check_range("min_p", self.min_p, 0.0, 1.0)
        self._check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        self._check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if not (0.0 < self.repetition_penalty <= 100.0):
            raise InvalidRequestError(
                f"repetition_penalty must be in (0, 100], got {self.repetition_penalty}.",
                param="repetition_penalty",
            )
        for token_id, bias in self.logit_bias:
            if token_id < 0 or not math.isfinite(bias) or abs(bias) > 100.0:
                raise InvalidRequestError(
                    f"logit_bias for token {token_id} must be a number in [-100, 100] "
                    f"for a token id >= 0, got {bias}.",
                    param="logit_bias",
                )
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidRequestError(
                f"max_tokens must be at least 1, got {self.max_tokens}.", param="max_tokens"
            )
        if self.min_tokens < 0 or (
            self.max_tokens is not None and self.min_tokens > self.max_tokens
        ):
            raise InvalidRequestError(
                f"min_tokens must be between 0 and max_tokens, got {self.min_tokens}.",
                param="min_tokens",
            )
        if len(self.stop) > MAX_STOP_STRINGS or any(not text for text in self.stop):
            raise InvalidRequestError(
                f"stop takes up to {MAX_STOP_STRINGS} non-empty strings.", param="stop"
            )
        if any(token_id < 0 for token_id in self.stop_token_ids):
            raise InvalidRequestError(
                "stop_token_ids must not be negative.", param="stop_token_ids"
            )
        if self.seed is not None and not (-(2**63) <= self.seed < 2**63):
            raise InvalidRequestError("seed must fit in 64 bits.", param="seed")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                self._check_range(name, value, 0, MAX_LOGPROBS)

    @staticmethod
    def _check_range(name: str, value: float, low: float, high: float) -> None:
        # Written so that NaN fails too.
        if not (low <= value <= high):
            raise InvalidRequestError(
                f"{name} must be between {low} and {high}, got {value}.", param=name
            )

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """True if sampling needs to see the tokens that came before."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )
