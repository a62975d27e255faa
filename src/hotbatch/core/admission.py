"""The door: who is refused at once because of overload, and when to come again.

A client that waits longer than it wants to hangs up, after its prompt was rendered, tokenized
and maybe computed; under overload a server can spend all its time on such requests. So the door
asks before any of that, with an estimate of the prompt's length, and a request that would wait
too long is told so within a millisecond.

Three limits: requests that wait, prompt tokens that wait, and the predicted time to the first
token. What fits the machine right now waits for nothing and is never refused by the first two.
Everything between the door and the engine counts as waiting, so a burst of simultaneous
requests cannot slip through while none of them has reached the queue yet. Lower classes do not
count, as they make nobody wait; nor does what a tenant has piled up beyond the newcomer's own
tenant, where tenants take turns: a greedy one must not shut out the others.

Pure: what the engine's queue looks like, and the time, come as arguments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, floor

from hotbatch.core.errors import InvalidRequestError, OverloadedError
from hotbatch.core.service_class import ServiceClass

# Reasons of refusal and of expiry, as they stand in metrics and error bodies.
QUEUE_REQUESTS = "queue_requests"
QUEUE_TOKENS = "queue_tokens"
QUEUE_WAIT = "queue_wait"
QUEUE_TTL = "queue_ttl"

_NUM_CLASSES = len(ServiceClass)
_SOONEST, _LATEST = 1.0, 120.0  # seconds that Retry-After may say


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """Bounds of the waiting queue; None is no bound.

    Args:
        max_requests: requests that wait because they cannot run yet.
        max_tokens: prompt tokens of these.
        time_to_live: seconds after which a request that still waits is ended.
        max_wait: predicted seconds to the first token beyond which a request is refused, unless
            it is of the batch class, which may wait.

    Raises:
        InvalidRequestError: a bound is out of range; `param` names it.
    """

    max_requests: int | None = None
    max_tokens: int | None = None
    time_to_live: float | None = None
    max_wait: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_requests", "max_tokens"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise InvalidRequestError(f"{name} must be at least 0, got {value}.", param=name)
        for name in ("time_to_live", "max_wait"):
            value = getattr(self, name)
            if value is not None and not value > 0.0:
                raise InvalidRequestError(f"{name} must be above 0, got {value}.", param=name)


NO_LIMITS = QueueLimits()


@dataclass(frozen=True, slots=True)
class Load:
    """What the engine has to do and what it manages, at one moment.

    Attributes:
        waiting: requests that were submitted and not computed yet, by class, lowest first.
        waiting_tokens: prompt tokens of these.
        free_seats: for each class, the seats that it could have now: nobody's, or a lower one's.
        free_tokens: KV tokens likewise.
        num_seats: requests that the batch holds when it is empty.
        num_tokens: KV tokens that the pool holds when it is empty.
        completions_per_second: how often a running request ends; 0 if not known.
        prompt_tokens_per_second: how fast prompts are computed; 0 if not known.
        tenants: of a class, how many requests of each tenant wait, where tenants are served in
            turn; it is asked only when a request would be refused.
        weights: of tenants: how many turns one gets in the time of another; 1 where not named.
    """

    waiting: Sequence[int] = (0,) * _NUM_CLASSES
    waiting_tokens: Sequence[int] = (0,) * _NUM_CLASSES
    free_seats: Sequence[int] = (0,) * _NUM_CLASSES
    free_tokens: Sequence[int] = (0,) * _NUM_CLASSES
    num_seats: int = 0
    num_tokens: int = 0
    completions_per_second: float = 0.0
    prompt_tokens_per_second: float = 0.0
    tenants: Callable[[int], Mapping[str, int]] | None = None
    weights: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Newcomer:
    """What a client asks for, as far as the door looks at it.

    Attributes:
        num_requests: sequences that will be generated.
        num_tokens: of their prompts together, estimated; a prompt that several share counts
            once.
        service_class: what is below it does not make it wait.
        tenant: whose it is.
        max_wait: predicted seconds to the first token that this client puts up with, if that
            is less than the limit of all; None if it said nothing.
    """

    num_requests: int
    num_tokens: int
    service_class: ServiceClass = ServiceClass.STANDARD
    tenant: str = ""
    max_wait: float | None = None


@dataclass(slots=True, eq=False)
class Reservation:
    """A place between the door and the engine; to be closed exactly once by `Door.close`,
    when the engine has the requests or when it is clear that it never will."""

    newcomer: Newcomer
    is_open: bool = True


class Door:
    """Refuses what would wait too long. For one thread.

    Attributes:
        refused: rejections since the start, by reason.
    """

    def __init__(self, limits: QueueLimits = NO_LIMITS) -> None:
        self.limits = limits
        self.refused: Counter[str] = Counter()
        self._entering = [0] * _NUM_CLASSES
        self._entering_tokens = [0] * _NUM_CLASSES
        self._entering_tenants: list[Counter[str]] = [Counter() for _ in ServiceClass]

    @property
    def num_entering(self) -> int:
        """Requests between the door and the engine."""
        return sum(self._entering)

    def enter(self, load: Load, newcomer: Newcomer) -> Reservation:
        """Let a newcomer in with all it asks for, or refuse it.

        Args:
            load: of this moment.

        Raises:
            OverloadedError: with the reason, and `retry_after` in seconds.
            InvalidRequestError: an idle server would not let it in either.
        """
        self._check_ever(load, newcomer)
        ahead, tokens = self._ahead(load, newcomer.service_class)
        error = self._refusal(load, newcomer, ahead, tokens)
        if error is not None and load.tenants is not None:
            fair = self._fairly_ahead(load, newcomer)
            if fair < ahead and not self._is_bursting(load, newcomer, ahead):
                error = self._refusal(load, newcomer, fair, tokens * fair // ahead)
        if error is not None:
            self.refused[error.reason] += 1
            raise error
        self._count(newcomer, 1)
        return Reservation(newcomer)

    def close(self, reservation: Reservation) -> None:
        """The requests are in the engine's hands, or will never be. Idempotent."""
        if reservation.is_open:
            reservation.is_open = False
            self._count(reservation.newcomer, -1)

    def retry_after(self, load: Load) -> float:
        """When all that waits now will have begun, in whole seconds."""
        return _bounded(_time_to_end(load, sum(load.waiting) + self.num_entering))

    def _count(self, newcomer: Newcomer, sign: int) -> None:
        rank, count = newcomer.service_class, sign * newcomer.num_requests
        self._entering[rank] += count
        self._entering_tokens[rank] += sign * newcomer.num_tokens
        tenants = self._entering_tenants[rank]
        tenants[newcomer.tenant] += count
        if not tenants[newcomer.tenant]:
            del tenants[newcomer.tenant]

    # Who is before it

    def _ahead(self, load: Load, service_class: ServiceClass) -> tuple[int, int]:
        """Requests and prompt tokens that wait and are not below this class: a flood of lower
        ones shuts nobody out."""
        requests = sum(load.waiting[service_class:]) + sum(self._entering[service_class:])
        tokens = sum(load.waiting_tokens[service_class:])
        return requests, tokens + sum(self._entering_tokens[service_class:])

    def _fairly_ahead(self, load: Load, newcomer: Newcomer) -> int:
        """The same, where tenants of a class are served in turn: no other tenant has more served
        before the newcomer than the newcomer's own tenant has, times their weights."""
        assert load.tenants is not None
        rank = newcomer.service_class
        waiting = Counter(load.tenants(rank))
        waiting.update(self._entering_tenants[rank])
        own = waiting[newcomer.tenant] + newcomer.num_requests
        higher = sum(load.waiting[rank + 1 :]) + sum(self._entering[rank + 1 :])
        turns = own / load.weights.get(newcomer.tenant, 1.0)
        others = sum(
            min(count, floor(turns * load.weights.get(tenant, 1.0)))
            for tenant, count in waiting.items()
            if tenant != newcomer.tenant
        )
        return higher + others + waiting[newcomer.tenant]

    def _is_bursting(self, load: Load, newcomer: Newcomer, ahead: int) -> bool:
        """Twice as many wait as may: many tenants with little each are a flood, too."""
        most = self.limits.max_requests
        if most is None:
            return False
        room = load.free_seats[newcomer.service_class]
        return ahead + newcomer.num_requests - room > 2 * most

    # The limits

    def _check_ever(self, load: Load, newcomer: Newcomer) -> None:
        """What an idle server would refuse is refused for good, or its client tried for ever."""
        most, wanted = self.limits.max_requests, newcomer.num_requests
        room = _room(load.num_seats, load.num_tokens, wanted, newcomer.num_tokens)
        if most is None or wanted - room <= most or wanted == 1:
            return
        raise InvalidRequestError(
            f"The request asks for {wanted} sequences at once; this server runs {room} of "
            f"them and lets {most} more wait. Ask for fewer (prompts times n).",
            param="n",
        )

    def _refusal(
        self, load: Load, newcomer: Newcomer, ahead: int, ahead_tokens: int
    ) -> OverloadedError | None:
        """Why the newcomer must not stand behind so many requests and tokens, if so."""
        requests = ahead + newcomer.num_requests
        tokens = ahead_tokens + newcomer.num_tokens
        rank = newcomer.service_class
        room = _room(load.free_seats[rank], load.free_tokens[rank], requests, tokens)
        queued = max(0, requests - room)
        return (
            self._too_many_requests(load, queued)
            or self._too_many_tokens(load, tokens * queued // requests)
            or self._too_late(load, newcomer, queued, ahead_tokens)
        )

    def _too_many_requests(self, load: Load, queued: int) -> OverloadedError | None:
        most = self.limits.max_requests
        if most is None or queued <= most:
            return None
        return _refusal(
            QUEUE_REQUESTS,
            f"The queue of this server is full: {most} requests may wait (--max-queue-requests), "
            f"and this would make it {queued}.",
            _time_to_end(load, queued - most),
        )

    def _too_many_tokens(self, load: Load, queued: int) -> OverloadedError | None:
        most = self.limits.max_tokens
        if most is None or queued <= most:
            return None
        return _refusal(
            QUEUE_TOKENS,
            f"The queue of this server is full: {most} prompt tokens may wait "
            f"(--max-queue-tokens), and this would make it {queued}.",
            max(_time_to_compute(load, queued - most), _time_to_end(load, 1)),
        )

    def _too_late(
        self, load: Load, newcomer: Newcomer, queued: int, ahead_tokens: int
    ) -> OverloadedError | None:
        limit, name = self.limits.max_wait, "--max-queue-wait"
        if newcomer.service_class is ServiceClass.BATCH:
            limit = None
        if newcomer.max_wait is not None and (limit is None or newcomer.max_wait < limit):
            limit, name = newcomer.max_wait, "the target for the first token"
        if limit is None:
            return None
        wait = max(_time_to_end(load, queued), _time_to_compute(load, ahead_tokens))
        first_token = wait + _time_to_compute(load, newcomer.num_tokens)
        if wait <= 0.0 or first_token <= limit:  # where nobody is before it, waiting cannot help
            return None
        return _refusal(
            QUEUE_WAIT,
            f"The first token would come after {first_token:.1f} s, and {name} allows "
            f"{limit:.1f} s.",
            min(first_token - limit, wait),
        )


def _room(seats: int, free_tokens: int, requests: int, tokens: int) -> int:
    """How many of the waiting requests could run now: as seats and KV cache allow."""
    if tokens <= free_tokens:
        return seats
    return min(seats, requests * free_tokens // tokens)


def _time_to_end(load: Load, count: int) -> float:
    if count <= 0 or load.completions_per_second <= 0.0:
        return 0.0
    return count / load.completions_per_second


def _time_to_compute(load: Load, num_tokens: int) -> float:
    if num_tokens <= 0 or load.prompt_tokens_per_second <= 0.0:
        return 0.0
    return num_tokens / load.prompt_tokens_per_second


def _refusal(reason: str, message: str, seconds: float) -> OverloadedError:
    retry_after = _bounded(seconds)
    return OverloadedError(
        f"{message} Retry in {retry_after:.0f} s.", reason=reason, retry_after=retry_after
    )


def _bounded(seconds: float) -> float:
    return float(ceil(min(max(seconds, _SOONEST), _LATEST)))
