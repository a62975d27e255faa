"""What the scheduler and the executor say to each other: one StepPlan, one StepResult a step.

Both are frozen and self-contained: an executor needs nothing but the plan (and the tensors it
owns) to run the step, and a simulated one needs no model at all. There is no prefill and no
decode: a `PlannedRequest` says which known tokens to compute, and whether to sample after
the last one.

What is made for every request in every step is a named tuple: just as frozen as a dataclass,
and made in a third of the time.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from hotbatch.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from hotbatch.core.step_mix import StepMix


class FinishReason(enum.Enum):
    STOP = "stop"  # end-of-text, a stop token, or a stop string
    LENGTH = "length"  # max_tokens or the model's context
    ABORT = "abort"  # cancelled by the client, or cut at shutdown
    ERROR = "error"  # the step failed; TokenEvent.error says how


class SampleSpec(NamedTuple):
    """How to sample the token at `position` (0-based within prompt plus output).

    Randomness is counter-based: a function of (`seed`, `position`) alone, so the token
    depends neither on the batch nor on the order of steps. `history` holds all known tokens
    (prompt, then output) where the penalties need them, else it is empty; the first
    `num_prompt` of them are the prompt. `banned` tokens get no probability (end-of-text
    and stop tokens while `min_tokens` is not reached).
    """

    params: SamplingParams
    seed: int
    position: int
    num_prompt: int
    history: tuple[int, ...] = ()
    banned: tuple[int, ...] = ()


class PlannedRequest(NamedTuple):
    """One request's share of a step.

    `tokens` are computed at positions `start .. start+len(tokens)-1`; the last `num_drafts`
    of them are guesses to be verified. `block_ids` is the whole block table, covering at
    least `start + len(tokens)` positions. `sample` is None while the prompt is unfinished.
    With drafts, the executor samples at each of the last `num_drafts + 1` rows and stops at
    the first sampled token that differs from the next draft.
    `prompt_logprobs` asks for the log-probabilities of the *next* prompt token at each row
    (the number of alternatives; None for no).
    """

    request_id: str
    start: int
    tokens: tuple[int, ...]
    block_ids: tuple[int, ...]
    sample: SampleSpec | None = None
    num_drafts: int = 0
    prompt_logprobs: int | None = None
    next_tokens: tuple[int, ...] = ()  # the prompt tokens that follow each row, for the above

    @property
    def context_len(self) -> int:
        return self.start + len(self.tokens)


UNKNOWN = -1
"""Stands for a draft that the draft model is to find right before the step."""


class ModelDraft(NamedTuple):
    """What the draft model computes before a step, for the request at `place` in its plan.

    `tokens` are those of the request that it does not know yet, from position `start` on;
    `block_ids` is the block table in the draft model's own cache, with room for the guesses.
    With `sample`, it guesses the request's `num_drafts` drafts, drawing as the request would;
    without, it only reads.
    """

    place: int
    start: int
    tokens: tuple[int, ...]
    block_ids: tuple[int, ...]
    sample: SampleSpec | None = None


@dataclass(frozen=True, slots=True)
class Preemption:
    """A request that lost its KV blocks in this plan, and why; it `keeps_blocks` if only the
    last ones were taken."""

    request_id: str
    reason: str
    keeps_blocks: bool = False


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One ragged forward pass. `copies` are (source, destination) block ids to copy first;
    `mix` is for those who account for the step's time, None in a plan made by hand. The last
    `num_ahead` requests are guesses: nobody has sent them yet."""

    step_id: int
    requests: tuple[PlannedRequest, ...]
    copies: tuple[tuple[int, int], ...] = ()
    preempted: tuple[Preemption, ...] = ()
    paused: tuple[str, ...] = ()
    predicted_seconds: float | None = None
    mix: StepMix | None = None
    model_drafts: tuple[ModelDraft, ...] = ()
    num_ahead: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(len(request.tokens) for request in self.requests)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log-probability under the model (temperature 1, before penalties), its rank
    (1 is the likeliest), and the `top` alternatives as (token id, logprob), best first."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class RequestResult(NamedTuple):
    """What the step yielded for one planned request, in the plan's order.

    `token_ids` is empty when nothing was sampled; with drafts it holds the accepted drafts
    and one more. `logprobs` runs parallel to it if asked for. `prompt_logprobs` has one entry
    a row of `next_tokens`. `error` says why this request (alone) failed.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """`seconds` is the time of the model; `draft_seconds` that of each pass of the draft model
    before it."""

    step_id: int
    requests: tuple[RequestResult, ...]
    seconds: float
    draft_seconds: tuple[float, ...] = ()


class TokenEvent(NamedTuple):
    """What a client hears of one request after a step: new tokens, or its end, or both.

    `num_cached` is the count of prompt tokens found in the prefix cache (known from the
    first event on). `prompt_logprobs` comes whole with the first sampled token; it has
    len(prompt) - 1 entries, as the first prompt token has no probability.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the token that ended it, if it was one
    error: str | None = None
    error_reason: str | None = None  # the limit that ended it, if one did, as in OverloadedError
    num_prompt: int = 0
    num_output: int = 0
    num_cached: int = 0
