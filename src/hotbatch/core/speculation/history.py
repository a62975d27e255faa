"""What tenants were answered lately, to guess from; never across tenants or cache salts.

An answer enters with the end of its prompt, so that the same question finds its answer from the
first token on. Texts enter a few hundred tokens a step, as indexing is not free. The whole is
bounded: the tenant that was not heard of for longest is forgotten first.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable

from hotbatch.core.request import Request
from hotbatch.core.speculation.continuing import PLAIN, Text

Owner = tuple[str, str | None]  # tenant and cache salt

_GENERATION = 8192  # tokens of a tenant that are forgotten at once; up to twice as many are kept
_MOST_TOKENS = 262_144  # of all tenants: some 80 MB
_MOST_PENDING = 65_536  # tokens that wait to be indexed; answers beyond are not remembered
_LEAD_IN = 32  # tokens of the prompt before the answer
_LEAST_ANSWER = 4  # tokens; a shorter answer teaches nothing


def owner_of(request: Request) -> Owner:
    return (request.tenant, request.cache_salt)


class AnswerHistory:
    """Recent answers by owner."""

    def __init__(
        self,
        generation: int = _GENERATION,
        most_tokens: int = _MOST_TOKENS,
        make: Callable[[int], Text] = PLAIN.make,
    ) -> None:
        self._make = make
        self._generation = generation
        self._most_tokens = most_tokens
        self._texts: OrderedDict[Owner, Text] = OrderedDict()
        self._pending: deque[tuple[Owner, list[int]]] = deque()
        self._num_pending = 0
        self._num_tokens = 0

    @property
    def num_pending(self) -> int:
        return self._num_pending

    def __len__(self) -> int:
        """Tokens that can be found."""
        return self._num_tokens

    def remember(self, request: Request) -> None:
        """Note the answer of a request that ends, to be indexed bit by bit."""
        if request.num_output < _LEAST_ANSWER or self._num_pending > _MOST_PENDING:
            return
        text = request.tokens[max(0, request.num_prompt - _LEAD_IN) :]
        self._pending.append((owner_of(request), text))
        self._num_pending += len(text)

    def text_of(self, request: Request) -> Text | None:
        """What was answered to its owner."""
        return self._texts.get((request.tenant, request.cache_salt))

    def catch_up(self, num_tokens: int) -> None:
        """Index up to `num_tokens` of what is pending."""
        while self._pending and num_tokens > 0:
            owner, text = self._pending.popleft()
            part, rest = text[:num_tokens], text[num_tokens:]
            self._enter(owner, part, is_whole=not rest)
            num_tokens -= len(part)
            self._num_pending -= len(part)
            if rest:
                self._pending.appendleft((owner, rest))

    def _enter(self, owner: Owner, part: list[int], is_whole: bool) -> None:
        text = self._texts.get(owner)
        if text is None:
            text = self._texts[owner] = self._make(self._generation)
        else:
            self._texts.move_to_end(owner)
        self._num_tokens -= len(text)
        text.extend(part, 0, len(part))
        if is_whole:
            text.break_off()
        self._num_tokens += len(text)
        while self._num_tokens > self._most_tokens and len(self._texts) > 1:
            _, forgotten = self._texts.popitem(last=False)
            self._num_tokens -= len(forgotten)
