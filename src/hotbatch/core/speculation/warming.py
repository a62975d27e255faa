"""Prefills ahead what the next turn will begin with, while the machine would idle.

When an answer is finished, part of the next prompt is certain whatever will be asked: the answer
as the template repeats it (without its reasoning, say), and the marks around it. Computing it
before it is asked for takes it off the next turn's time to first token. Whoever knows templates
tells which tokens are certain (`KnownPrefix`); here it is decided whether and when they are
computed.

Only a machine that has nothing else to do computes them: a step is given to them when nothing
was planned and nobody waits, a piece at a time, each short enough that whoever arrives in the
middle of it waits no longer than for a decode or two. When somebody has arrived, the blocks are
given back at once; those that are full stay findable, and the rest is computed in a later pause.
Blocks are taken from what is free, or from cached prefixes that are worth less; never from a
request.

Of several prefixes the one goes first that is worth most: chance that the conversation goes on
times the seconds that this saves. Chances are those by which conversations are kept
(`return_order`), or one half where those are not.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from hotbatch.core.cost_model import CostModel, StepFeatures
from hotbatch.core.kv_cache import KvCache
from hotbatch.core.plan import StepPlan, StepResult
from hotbatch.core.prefix_cache import extend_block_keys
from hotbatch.core.recompute_cost import RecomputeCost
from hotbatch.core.request import Request, RequestEvent, RequestState
from hotbatch.core.sampling_params import SamplingParams
from hotbatch.core.speculation.ahead import Fate, GuessNews
from hotbatch.core.speculation.ledger import Account
from hotbatch.core.step import Step

_MOST_OFFERS = 256
_STALE = 600.0  # seconds after which an offer is forgotten
_BRIEF = 0.03  # seconds that a step of this kind may take
_LEAST_PIECE, _BLIND_PIECE = 16, 32  # tokens; the second while no step can be predicted
_UNKNOWN_CHANCE = 0.5
_PARAMS = SamplingParams(max_tokens=1)


@dataclass(frozen=True, slots=True)
class KnownPrefix:
    """Token ids that a next prompt will begin with, if there is one.

    Attributes:
        token_ids: from the first of the prompt on.
        tenant, cache_salt: whose prompt it will be.
    """

    token_ids: Sequence[int]
    tenant: str = ""
    cache_salt: str | None = None


@dataclass(slots=True, eq=False)
class _Offer:
    key: bytes  # of its last block
    request: Request
    since: float
    worth: float  # seconds saved times chance


class Warmer:
    """Computes known prefixes in steps of their own.

    Args:
        kv: the scheduler's blocks.
        model: predicts steps; None: pieces have a fixed size.
        max_tokens: of a step.
        keep_free: blocks that are left alone.
    """

    def __init__(
        self, kv: KvCache, model: CostModel | None, max_tokens: int, keep_free: int
    ) -> None:
        self._kv = kv
        self._model = model
        self._cost = RecomputeCost(model, max_tokens)
        self._max_tokens = max_tokens
        self._keep_free = keep_free
        self._offers: OrderedDict[bytes, _Offer] = OrderedDict()  # by key
        self._current: _Offer | None = None
        self._is_interrupted = False
        self._news: list[GuessNews] = []
        self._num_made = 0
        self._attempted = 0
        self._seconds_spent = 0.0

    @property
    def holders(self) -> Sequence[Request]:
        """Those that hold blocks."""
        return () if self._current is None else (self._current.request,)

    @property
    def has_work(self) -> bool:
        return self._current is not None or bool(self._offers)

    def take_news(self) -> list[GuessNews]:
        """Prefixes that gave their blocks back since the last time, done or not."""
        news, self._news = self._news, []
        return news

    # What is offered

    def offer(self, prefix: KnownPrefix, now: float) -> None:
        """Take note of a prefix; it is computed when there is time, or never."""
        size = self._kv.block_size
        num_blocks = len(prefix.token_ids) // size
        if not num_blocks or not self._kv.enable_prefix_caching:
            return
        # One more token, as the last one of a request is sampled from and these are not.
        tokens = [*prefix.token_ids[: num_blocks * size], prefix.token_ids[-1]]
        self._num_made += 1
        request = Request(
            f"next-turn-{self._num_made}",
            tokens,
            _PARAMS,
            seed=0,
            arrival=now,
            cache_salt=prefix.cache_salt,
            tenant=prefix.tenant,
            speculate=False,
        )
        request.num_cached = 0  # the counters of the cache are of prompts that were asked
        keys = extend_block_keys(request, num_blocks, size)[:num_blocks]
        missing = num_blocks - len(self._kv.prefix_cache.run_of(keys))
        fits = num_blocks + 1 + self._keep_free <= self._kv.pool.num_blocks
        if missing <= 0 or not fits:
            return
        returns = self._kv.returns
        chance = _UNKNOWN_CHANCE if returns is None else returns.chance_of(keys)
        seconds = self._cost.seconds((num_blocks - missing) * size, missing * size)
        self._offers[keys[-1]] = _Offer(keys[-1], request, now, chance * seconds)
        if len(self._offers) > _MOST_OFFERS:
            self._offers.popitem(last=False)

    def _next(self, now: float) -> _Offer | None:
        """The offer that is worth most, if its blocks can be had."""
        for key, offer in list(self._offers.items()):
            if now - offer.since > _STALE:
                del self._offers[key]
        ranked = sorted(self._offers.items(), key=lambda item: -item[1].worth)
        for key, offer in ranked:
            del self._offers[key]
            if self._seat(offer.request):
                return offer
        return None

    def _seat(self, request: Request) -> bool:
        kv = self._kv
        # Of blocks of one token each, the one that is not computed has a key as well.
        num_blocks = (len(request.tokens) - 1) // kv.block_size
        keys = extend_block_keys(request, num_blocks, kv.block_size)[:num_blocks]
        missing = num_blocks - len(kv.prefix_cache.run_of(keys))
        if missing <= 0:
            return False  # somebody computed it meanwhile
        if missing + 1 > kv.pool.num_free and not (kv.returns and kv.returns.is_worth_more(keys)):
            return False
        placement = kv.place(request, None, self._keep_free)
        if placement is None:
            return False
        assert placement.copy is None, "whole blocks need no copy"
        if request.state is not RequestState.RUNNING:
            request.apply(RequestEvent.ADMIT)
        return True

    # Steps

    def fill(self, step: Step, now: float) -> None:
        """Give an empty step to a prefix, if one is offered."""
        assert not step.planned, "a prefix shares no step"
        if self._is_interrupted:
            return
        if self._current is None:
            self._current = self._next(now)
        offer = self._current
        if offer is None or offer.request.in_flight:
            return
        request = offer.request
        left = len(request.tokens) - 1 - request.num_computed
        step.close_asked()
        step.enter_ahead(request, min(left, self._piece(request.num_computed, left)))

    def _piece(self, start: int, left: int) -> int:
        model = self._model
        if model is None or not model.is_trained:
            return min(_BLIND_PIECE, self._max_tokens)
        most = min(left, self._max_tokens)
        size = model.largest_chunk(StepFeatures(), start, most, _BRIEF)
        return min(max(size, _LEAST_PIECE), most)

    def interrupt(self) -> None:
        """Real work has come: blocks go back as soon as no step uses them."""
        offer = self._current
        if offer is None:
            return
        if offer.request.in_flight:
            self._is_interrupted = True
            return
        self._let_go(offer, is_done=False)

    def settle(self, plan: StepPlan, result: StepResult) -> None:
        """A step of ours ran."""
        offer = self._current
        assert offer is not None and len(plan.requests) == 1
        request, (planned,) = offer.request, plan.requests
        request.in_flight -= 1
        if result.requests[0].error is not None:
            self._fail(offer)
            return
        request.num_committed = planned.context_len
        self._kv.index(request, is_ahead=True)
        self._attempted += len(planned.tokens)
        self._seconds_spent += result.seconds
        is_done = request.num_committed >= len(request.tokens) - 1
        if is_done or (self._is_interrupted and not request.in_flight):
            self._let_go(offer, is_done=is_done)

    def drop(self) -> None:
        """A step of ours failed."""
        offer = self._current
        if offer is not None:
            offer.request.in_flight -= 1
            self._fail(offer)

    def _fail(self, offer: _Offer) -> None:
        self._is_interrupted = True
        if not offer.request.in_flight:
            self._let_go(offer, is_done=True)

    def _let_go(self, offer: _Offer, *, is_done: bool) -> None:
        request = offer.request
        self._current = None
        self._is_interrupted = False
        self._kv.release_warmed(request)
        self._news.append(GuessNews(request.request_id, Fate.DROPPED))
        request.num_computed = request.num_committed = request.num_indexed = 0
        if not is_done:
            self._offers[offer.key] = offer

    # Books

    def account(self) -> Account:
        """Tokens computed ahead, and those of them that a prompt found. What still lies there
        and may yet be asked for has not wasted any seconds."""
        warmed = self._kv.warmed
        size = self._kv.block_size
        accepted = warmed.num_found * size
        wasted = max(0, self._attempted - accepted - len(warmed) * size)
        return Account(
            self._attempted,
            accepted,
            self._seconds_spent,
            self._cost.seconds_a_token(warmed.mean_index * size) * accepted,
            self._seconds_spent * wasted / max(1, self._attempted),
        )
