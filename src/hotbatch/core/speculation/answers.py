"""Answers that are known before they are asked for: what a request will yield, token by token.

A request's tokens depend on its prompt, its sampling parameters and its seed, and on nothing
else. So where these are known (greedy, or a seed that the client sent), so is the answer of
whoever asks the same again, as far as it was ever computed: for a request that was answered, or
for a guess that was computed ahead. What ends an answer (a length, a stop token, a stop string)
is the affair of whoever asks, and not part of the key; so a beginning serves, too.

Never across tenants or cache salts. Bounded by tokens; the answer that was not asked for longest
is forgotten first. A key costs a hash of the prompt, some tens of microseconds for a long one.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from hotbatch.core.plan import TokenLogprob
from hotbatch.core.request import Request
from hotbatch.core.sampling_params import SamplingParams

_MOST_TOKENS = 524_288  # of all answers: some 4 MB, and their keys
_LOGPROB_WEIGHT = 16  # what a token with log-probabilities counts for
_MIN_COST = 32  # tokens that the shortest answer counts for

PromptKey = tuple[str, str | None, bytes]
"""Tenant, cache salt, and a hash of the prompt's ids that no two prompts share."""


class AnswerKey(NamedTuple):
    """Two requests of one key have the same answer, up to where each ends."""

    prompt: PromptKey
    sampling: tuple[Any, ...]


class Answer(NamedTuple):
    """The first tokens of an answer; `logprobs` are parallel to them where they were asked for.

    `guess_id` names the guess that computed it; None for one that was given to somebody.
    """

    token_ids: Sequence[int]
    logprobs: tuple[TokenLogprob, ...] = ()
    guess_id: str | None = None


def prompt_key(request: Request) -> PromptKey:
    tokens = array("q", request.tokens[: request.num_prompt])
    return (request.tenant, request.cache_salt, blake2b(tokens.tobytes(), digest_size=32).digest())


def answer_key(request: Request, prompt: PromptKey | None = None) -> AnswerKey | None:
    """The key of a request's answer; None if it cannot be known before it is computed.

    Args:
        prompt: its prompt's key, if it is known.
    """
    params = request.params
    if params.prompt_logprobs is not None or not is_known_before(params):
        return None
    sampling = (
        params.temperature,
        params.top_p,
        params.top_k,
        params.min_p,
        params.presence_penalty,
        params.frequency_penalty,
        params.repetition_penalty,
        params.logit_bias,
        params.logprobs,
        (params.min_tokens, request.banned_early) if params.min_tokens else None,
        None if params.is_greedy else request.seed,
    )
    return AnswerKey(prompt or prompt_key(request), sampling)


def is_known_before(params: SamplingParams) -> bool:
    """Whoever asks the same again gets the same: nothing is drawn for one request alone."""
    return params.is_greedy or params.seed is not None


class AnswerStore:
    """Answers by key."""

    def __init__(self, most_tokens: int = _MOST_TOKENS) -> None:
        self._most_tokens = most_tokens
        self._answers: OrderedDict[AnswerKey, Answer] = OrderedDict()
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._answers)

    @property
    def num_tokens(self) -> int:
        """What all of them count for."""
        return self._num_tokens

    def put(self, key: AnswerKey, answer: Answer) -> list[Answer]:
        """Keep an answer unless a longer one is known; returns those that had to go."""
        known = self._answers.get(key)
        if known is not None and len(known.token_ids) >= len(answer.token_ids):
            self._answers.move_to_end(key)
            return []
        gone = [] if known is None else [known]
        if known is not None:
            self._num_tokens -= _cost(known)
        self._answers[key] = answer._replace(token_ids=array("i", answer.token_ids))
        self._answers.move_to_end(key)
        self._num_tokens += _cost(answer)
        while self._num_tokens > self._most_tokens and len(self._answers) > 1:
            _, forgotten = self._answers.popitem(last=False)
            self._num_tokens -= _cost(forgotten)
            gone.append(forgotten)
        return gone

    def get(self, key: AnswerKey) -> Answer | None:
        answer = self._answers.get(key)
        if answer is not None:
            self._answers.move_to_end(key)
        return answer

    def own(self, key: AnswerKey) -> None:
        """A guess's answer was given: from now on it is one like any other."""
        answer = self._answers.get(key)
        if answer is not None:
            self._answers[key] = answer._replace(guess_id=None)

    def discard(self, key: AnswerKey) -> None:
        answer = self._answers.pop(key, None)
        if answer is not None:
            self._num_tokens -= _cost(answer)


def _cost(answer: Answer) -> int:
    num_tokens = max(len(answer.token_ids), _MIN_COST)
    return num_tokens * (_LOGPROB_WEIGHT if answer.logprobs else 1)
