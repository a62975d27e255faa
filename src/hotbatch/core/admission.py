"""The door: who is refused at once because of overload, and when to come again.

A client that waits longer than it wants to hangs up, after its prompt was rendered, tokenized
and maybe computed; under overload a server can spend all its time on such requests. So the door
asks before any of that, with an estimate of the prompt's length, and a request that would wait
too long is told so within a millisecond.

Three limits: requests that wait, prompt tokens that wait, and the predicted time to the first
token. What fits the machine right now waits for nothing and is never refused by the first two.
Everything between the door and the engine counts as waiting, so a burst of simultaneous
requests cannot slip through while none of them has reached the queue yet.

Pure: what the engine's queue looks like, and the time, come as arguments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil

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
        free_seats: requests that could join the batch now.
        displaceable: for each class, the running requests that one of it would displace.
        free_tokens: KV tokens that are free or can be reclaimed.
        num_seats: requests that the batch holds when it is empty.
        num_tokens: KV tokens that the pool holds when it is empty.
        completions_per_second: how often a running request ends; 0 if not known.
        prompt_tokens_per_second: how fast prompts are computed; 0 if not known.
    """

    waiting: Sequence[int] = (0,) * _NUM_CLASSES
    waiting_tokens: Sequence[int] = (0,) * _NUM_CLASSES
    free_seats: int = 0
    displaceable: Sequence[int] = (0,) * _NUM_CLASSES
    free_tokens: int = 0
    num_seats: int = 0
    num_tokens: int = 0
    completions_per_second: float = 0.0
    prompt_tokens_per_second: float = 0.0


@dataclass(slots=True, eq=False)
class Reservation:
    """A place between the door and the engine; to be closed exactly once by `Door.close`,
    when the engine has the requests or when it is clear that it never will."""

    service_class: ServiceClass
    num_requests: int
    num_tokens: int
    is_open: bool = True


@dataclass(slots=True)
class Door:
    """Refuses what would wait too long. For one thread.

    Attributes:
        refused: rejections since the start, by reason.
    """

    limits: QueueLimits = NO_LIMITS
    refused: Counter[str] = field(default_factory=Counter)
    _entering: list[int] = field(default_factory=lambda: [0] * _NUM_CLASSES)
    _entering_tokens: list[int] = field(default_factory=lambda: [0] * _NUM_CLASSES)

    @property
    def num_entering(self) -> int:
        """Requests between the door and the engine."""
        return sum(self._entering)

    def enter(
        self,
        load: Load,
        num_requests: int,
        num_tokens: int,
        service_class: ServiceClass = ServiceClass.STANDARD,
        max_wait: float | None = None,
    ) -> Reservation:
        """Let requests in, or refuse them all.

        Args:
            load: of this moment.
            num_requests: how many sequences the client asks for.
            num_tokens: of their prompts together, estimated; a prompt that several share
                counts once.
            service_class: what is below it does not make it wait.
            max_wait: predicted seconds to the first token that this client puts up with, if
                that is less than the limit of all.

        Raises:
            OverloadedError: with the reason, and `retry_after` in seconds.
            InvalidRequestError: an idle server would not let them in either.
        """
        self._check_ever(load, num_requests, num_tokens)
        try:
            self._check_queue(load, num_requests, num_tokens, service_class)
            self._check_wait(load, num_requests, num_tokens, service_class, max_wait)
        except OverloadedError as error:
            self.refused[error.reason] += 1
            raise
        self._entering[service_class] += num_requests
        self._entering_tokens[service_class] += num_tokens
        return Reservation(service_class, num_requests, num_tokens)

    def close(self, reservation: Reservation) -> None:
        """The requests are in the engine's hands, or will never be. Idempotent."""
        if not reservation.is_open:
            return
        reservation.is_open = False
        self._entering[reservation.service_class] -= reservation.num_requests
        self._entering_tokens[reservation.service_class] -= reservation.num_tokens

    def retry_after(self, load: Load) -> float:
        """When all that waits now will have begun, in whole seconds."""
        return _bounded(_time_to_end(load, sum(load.waiting) + self.num_entering))

    def _check_ever(self, load: Load, num_requests: int, num_tokens: int) -> None:
        """What an idle server would refuse is refused for good, or its client tried for ever."""
        limits = self.limits
        room = _room(load.num_seats, load.num_tokens, num_requests, num_tokens)
        queued = num_requests - room
        if queued <= 0 or limits.max_requests is None or queued <= limits.max_requests:
            return
        raise InvalidRequestError(
            f"The request asks for {num_requests} sequences at once; this server runs {room} of "
            f"them and lets {limits.max_requests} more wait. Ask for fewer (prompts times n).",
            param="n",
        )

    def _ahead(self, load: Load, service_class: ServiceClass) -> tuple[int, int]:
        """Requests and prompt tokens that wait and are not below this class."""
        requests = sum(load.waiting[service_class:]) + sum(self._entering[service_class:])
        tokens = sum(load.waiting_tokens[service_class:])
        return requests, tokens + sum(self._entering_tokens[service_class:])

    def _check_queue(
        self, load: Load, num_requests: int, num_tokens: int, service_class: ServiceClass
    ) -> None:
        """The first two limits: whoever cannot run at once counts, but for lower classes, so
        that a flood of these does not shut out the others."""
        limits = self.limits
        requests, tokens = self._ahead(load, service_class)
        requests += num_requests
        tokens += num_tokens
        seats = load.free_seats + load.displaceable[service_class]
        queued = requests - _room(seats, load.free_tokens, requests, tokens)
        if queued <= 0:
            return
        if limits.max_requests is not None and queued > limits.max_requests:
            raise _refusal(
                QUEUE_REQUESTS,
                f"The queue of this server is full: {limits.max_requests} requests may wait "
                f"(--max-queue-requests), and this would make it {queued}.",
                _time_to_end(load, queued - limits.max_requests),
            )
        queued_tokens = tokens * queued // requests
        if limits.max_tokens is not None and queued_tokens > limits.max_tokens:
            raise _refusal(
                QUEUE_TOKENS,
                f"The queue of this server is full: {limits.max_tokens} prompt tokens may wait "
                f"(--max-queue-tokens), and this would make it {queued_tokens}.",
                max(
                    _time_to_compute(load, queued_tokens - limits.max_tokens),
                    _time_to_end(load, 1),
                ),
            )

    def _check_wait(
        self,
        load: Load,
        num_requests: int,
        num_tokens: int,
        service_class: ServiceClass,
        max_wait: float | None,
    ) -> None:
        limit, name = self.limits.max_wait, "--max-queue-wait"
        if service_class is ServiceClass.BATCH:
            limit = None
        if max_wait is not None and (limit is None or max_wait < limit):
            limit, name = max_wait, "the target for the first token"
        if limit is None:
            return
        ahead, ahead_tokens = self._ahead(load, service_class)
        queue = predicted_wait(load, service_class, ahead + num_requests, ahead_tokens)
        first_token = queue + _time_to_compute(load, num_tokens)
        if queue > 0.0 and first_token > limit:  # when nobody is before it, waiting cannot help
            raise _refusal(
                QUEUE_WAIT,
                f"The first token would come after {first_token:.1f} s, and {name} allows "
                f"{limit:.1f} s.",
                min(first_token - limit, queue),
            )


def predicted_wait(
    load: Load, service_class: ServiceClass, num_requests: int, ahead_tokens: int
) -> float:
    """Seconds until a newcomer's prompt is computed; what is not known costs nothing.

    Args:
        num_requests: the newcomer and all that are served before it.
        ahead_tokens: prompt tokens that are computed before its own.
    """
    seats = load.free_seats + load.displaceable[service_class]
    return max(_time_to_end(load, num_requests - seats), _time_to_compute(load, ahead_tokens))


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
