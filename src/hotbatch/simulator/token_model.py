"""A make-believe language model: the next token is a hash of all tokens before it.

As in a real model, the next token depends on every token of the history and on nothing else
but the request's sampling parameters, its seed and the position. Whatever a scheduler does
wrong to a context changes the tokens; whatever it does right cannot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hotbatch.core.plan import FinishReason, TokenLogprob
from hotbatch.core.request import Request
from hotbatch.core.sampling_params import SamplingParams

EMPTY_CONTEXT = 0
_MASK = 2**64 - 1


def _mix(*values: int) -> int:
    """64 well-mixed bits of some ints (splitmix64, Steele et al., OOPSLA 2014)."""
    state = 0
    for value in values:
        state = (state + 0x9E3779B97F4A7C15 + (value & _MASK)) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


@dataclass(frozen=True, slots=True)
class TokenModel:
    """Deterministic tokens from `vocab_size` ids.

    Attributes:
        eos_token_id: the end-of-text token; never sampled if None.
        eos_probability: how often it is sampled, 0 to 1.
    """

    vocab_size: int = 1000
    eos_token_id: int | None = None
    eos_probability: float = 0.0

    def extend(self, context: int, token_id: int) -> int:
        """The context one token later. A context is 64 bits that stand for all its tokens."""
        return _mix(context, token_id + 1)

    def context(self, token_ids: Sequence[int], start: int = EMPTY_CONTEXT) -> int:
        """The context after all of `token_ids`."""
        for token_id in token_ids:
            start = self.extend(start, token_id)
        return start

    def sample(
        self,
        context: int,
        params: SamplingParams,
        *,
        seed: int,
        position: int,
        banned: Sequence[int] = (),
    ) -> int:
        """The token at `position` (0-based in prompt plus output) after `context`."""
        bits = _mix(context, 1) if params.is_greedy else _mix(context, 2, seed, position)
        chance = _mix(bits, 3) / 2**64
        eos = self.eos_token_id
        if eos is not None and eos not in banned and chance < self.eos_probability:
            return eos
        token_id = bits % self.vocab_size
        for _ in range(self.vocab_size):
            if token_id != eos and token_id not in banned:
                return token_id
            token_id = (token_id + 1) % self.vocab_size
        raise ValueError("every token of the vocabulary is banned")

    def logprob(self, context: int, token_id: int, num_top: int) -> TokenLogprob:
        """A made-up but reproducible log-probability with `num_top` alternatives."""
        bits = _mix(context, 4, token_id)
        best = _mix(context, 5)
        top = tuple(
            ((best + rank) % self.vocab_size, -0.1 - 0.5 * rank - (best % 97) / 1000)
            for rank in range(min(num_top, self.vocab_size))
        )
        ranks = {alternative: rank for rank, (alternative, _) in enumerate(top)}
        if token_id in ranks:
            rank = ranks[token_id]
            return TokenLogprob(token_id, top[rank][1], rank + 1, top)
        return TokenLogprob(token_id, -20.0 - (bits % 1000) / 100, len(top) + 1, top)

    def continuation(self, request: Request, max_output: int) -> tuple[list[int], FinishReason]:
        """What the request yields when it has the machine to itself, without any scheduler.

        `max_output` bounds it where `params.max_tokens` is None.
        """
        params = request.params
        limit = params.max_tokens or max_output
        ends = params.stop_token_id_set
        stops = ends if params.ignore_eos else ends | request.eos_token_ids
        num_prompt = request.num_prompt
        context = self.context(request.tokens[:num_prompt])
        output: list[int] = []
        while len(output) < limit:
            early = len(output) < params.min_tokens
            token_id = self.sample(
                context,
                params,
                seed=request.seed,
                position=num_prompt + len(output),
                banned=tuple(ends | request.eos_token_ids) if early else (),
            )
            output.append(token_id)
            if token_id in stops and not early:
                return output, FinishReason.STOP
            context = self.extend(context, token_id)
        return output, FinishReason.LENGTH
