"""What a client may ask of sampling, with OpenAI's and vLLM's names, and its validation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from hotbatch.core.errors import InvalidRequestError

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_N = 128
# Executors hold counts in 32 bits; more than any vocabulary has anyway.
MAX_TOP_K = 2**31 - 1
# Logits are multiplied or divided by the penalty, in 32 bits, and have to stay finite.
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0

_COUNTS = ("n", "top_k", "min_tokens")
_OPTIONAL_COUNTS = ("max_tokens", "seed", "logprobs", "prompt_logprobs")
_NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
_FLAGS = ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when a request ends.

    Names and defaults follow vLLM; `temperature == 0` is greedy. `top_k` 0 or -1 means off.
    `seed` None lets the caller of the core draw one, so the core stays free of randomness.
    `max_tokens` None means up to the model's context. As in vLLM, `stop` may be given as one
    string, `logit_bias` as a mapping, and each of these and `stop_token_ids` as None or any
    iterable: whatever was given, tuples are what they become.

    Raises:
        InvalidRequestError: a field is of a wrong type or out of range; `param` names it.
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
        object.__setattr__(self, "stop", _texts("stop", self.stop))
        object.__setattr__(
            self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids)
        )
        object.__setattr__(self, "logit_bias", _biases("logit_bias", self.logit_bias))
        self._check_types()
        self._check_ranges()
        object.__setattr__(self, "stop_token_id_set", frozenset(self.stop_token_ids))

    def _check_types(self) -> None:
        """A wrong type that got past here would fail within a step, and its neighbours too."""
        for name in _COUNTS:
            _check_type(name, getattr(self, name), Integral, "a whole number")
        for name in _OPTIONAL_COUNTS:
            if getattr(self, name) is not None:
                _check_type(name, getattr(self, name), Integral, "a whole number or None")
        for name in _NUMBERS:
            _check_type(name, getattr(self, name), Real, "a number")
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise _wrong_type(name, "true or false", getattr(self, name))

    def _check_ranges(self) -> None:
        self._check_range("n", self.n, 1, MAX_N)
        self._check_range("temperature", self.temperature, 0.0, 100.0)
        if not (0.0 < self.top_p <= 1.0):
            raise InvalidRequestError(f"top_p must be in (0, 1], got {self.top_p}.", param="top_p")
        if not (-1 <= self.top_k <= MAX_TOP_K):
            raise InvalidRequestError(
                f"top_k must be -1 or 0 (off) or a positive count up to {MAX_TOP_K}, "
                f"got {self.top_k}.",
                param="top_k",
            )
        self._check_range("min_p", self.min_p, 0.0, 1.0)
        self._check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        self._check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        self._check_range(
            "repetition_penalty",
            self.repetition_penalty,
            MIN_REPETITION_PENALTY,
            MAX_REPETITION_PENALTY,
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


def _texts(name: str, value: Any) -> tuple[str, ...]:
    """One string, or several: a string is an iterable too, and must not fall into letters."""
    if isinstance(value, str):
        return (value,)
    values = _tuple(name, value, "a string or a list of strings")
    if not all(isinstance(text, str) for text in values):
        raise _wrong_type(name, "a string or a list of strings", value)
    return values


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    values = _tuple(name, value, "a list of token ids")
    for token_id in values:
        _check_type(name, token_id, Integral, "a list of token ids")
    return values


def _biases(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    expected = "a mapping of token ids to numbers"
    pairs = _tuple(name, value.items() if isinstance(value, Mapping) else value, expected)
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise _wrong_type(name, expected, value)
        _check_type(name, pair[0], Integral, expected)
        _check_type(name, pair[1], Real, expected)
    return tuple((pair[0], pair[1]) for pair in pairs)


def _tuple(name: str, value: Any, expected: str) -> tuple[Any, ...]:
    if value is None:
        return ()
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise _wrong_type(name, expected, value)
    return tuple(value)


def _check_type(name: str, value: Any, kind: Any, expected: str) -> None:
    plain = type(value)
    if plain is int or (plain is float and kind is Real):
        return  # nearly always; asking an abstract class takes longer
    # bool is an int to isinstance, but not to us.
    if plain is bool or not isinstance(value, kind):
        raise _wrong_type(name, expected, value)


def _wrong_type(name: str, expected: str, value: Any) -> InvalidRequestError:
    return InvalidRequestError(f"{name} must be {expected}, got {value!r:.80}.", param=name)
