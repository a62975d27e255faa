"""The only loop: take in what clients sent, plan a step, run it, commit it, tell the clients.

One thread owns the scheduler and the executor, so neither needs a lock. Everybody else talks
to it through an inbox (submit, cancel, stop) and hears from it through one callback a step.
While there is nothing to do the thread sleeps on the inbox; it never polls.

Faults stay where they belong. A request that can never run is refused on the caller's thread.
A step that raises ends the requests that were in it, and the loop goes on; several in a row
make the engine unhealthy. An exception from the scheduler is our bug: its state can no longer
be trusted, so every outstanding request hears of an error and the engine is dead. In no case
is a client left waiting.

`tick` is one turn of the loop. Tests call it directly, with a virtual clock and no thread.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from hotbatch.core.admission import Load
from hotbatch.core.config import SchedulerConfig
from hotbatch.core.errors import EngineStoppedError, HotbatchError, OverloadedError
from hotbatch.core.plan import FinishReason, StepPlan, StepResult, TokenEvent
from hotbatch.core.policies import batch_size
from hotbatch.core.request import Request
from hotbatch.core.scheduler import Scheduler
from hotbatch.core.speculation import GuessNews
from hotbatch.core.speculation.warming import KnownPrefix
from hotbatch.core.stats import SchedulerStats
from hotbatch.core.step_mix import StepMix
from hotbatch.engine.accounting import Accountant, StepAccount, Totals
from hotbatch.engine.ceiling import Ceiling, CeilingSnapshot, Roofline
from hotbatch.engine.clock import MonotonicClock
from hotbatch.engine.drain import DrainRates
from hotbatch.engine.live_view import LiveView
from hotbatch.engine.outstanding import Heard, Outstanding
from hotbatch.engine.protocol import Clock, Executor, ExecutorInfo
from hotbatch.engine.step_stats import RequestTimings, StepStats
from hotbatch.engine.step_trace import StepTrace

logger = logging.getLogger(__name__)

Deliver = Callable[[list[TokenEvent]], None]
_T = TypeVar("_T")

# The integrity check walks over all blocks; a client that asks again at once should not wait
# for it, so it runs only after this much quiet.
_QUIET_SECONDS = 0.05
# A step that has not returned this long after the grace period is taken for stuck.
_STUCK_SECONDS = 30.0
_CURVE_ROWS = 64  # up to which the step curve is shown at least


@dataclass(frozen=True, slots=True)
class _Cancel:
    request_id: str


@dataclass(frozen=True, slots=True)
class _Stop:
    deadline: float


@dataclass(frozen=True, slots=True)
class _Guess:
    """A request that may come; without one, a new chance of a guess that was made."""

    request_id: str
    chance: float
    request: Request | None = None


_Message = Request | KnownPrefix | _Cancel | _Stop | _Guess


class Engine:
    """Runs a scheduler and an executor in a thread of its own.

    `deliver` is called on the engine's thread, once a step, with the events of that step; it
    must be quick and must not block. `step_observers` and `request_observers` are lists of
    callables for statistics, called on the same thread after `deliver`; one that raises is
    logged and dropped. `tracers` see plans and results too, after the step observers; they may
    come and go while the engine runs. `guess_observers` hear what became of guessed requests.
    `account_observers` hear where a step's time went, if
    `ceiling`, the machine's best, is given and the executor says what its model needs.
    `unhealthy_after` is how many steps must fail in a row before `is_healthy` turns False (the
    next good step makes it True again).
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: Clock | None = None,
        *,
        deliver: Deliver | None = None,
        ceiling: Ceiling | None = None,
        unhealthy_after: int = 3,
    ) -> None:
        self.step_observers: list[Callable[[StepStats], None]] = []
        self.request_observers: list[Callable[[RequestTimings], None]] = []
        self.account_observers: list[Callable[[StepAccount], None]] = []
        self.tracers: list[Callable[[StepTrace], None]] = []
        self.guess_observers: list[Callable[[list[GuessNews]], None]] = []
        self._scheduler = scheduler
        self._executor = executor
        self._clock: Clock = MonotonicClock() if clock is None else clock
        self.accountant = self._make_accountant(ceiling)
        self._deliver = deliver
        self._unhealthy_after = unhealthy_after
        self._failures_in_a_row = 0
        self._inbox: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._outstanding = Outstanding()
        config = scheduler.config
        self._num_seats = (
            config.max_num_seqs if config.batching == "continuous" else batch_size(config)
        )
        self.view = LiveView(scheduler, self._outstanding, self._clock, self._num_seats)
        self._drain = DrainRates(config.max_num_batched_tokens)
        self._events: list[TokenEvent] = []  # of this turn, not yet delivered
        self._empty_turns = 0  # in a row, although there was work
        self._stats = scheduler.stats()
        self._stats_begun = 0  # prompt tokens that had begun when these were taken
        self._thread: threading.Thread | None = None
        self._gate = threading.Lock()  # between "is it open?" and "put it in the inbox"
        self._is_open = True
        self._stop_deadline: float | None = None
        self._fault: BaseException | None = None
        self._is_closed = False

    # ---- what other threads may call

    @property
    def executor(self) -> Executor:
        """For measuring it while the engine does not run; its thread's own once it does."""
        return self._executor

    @property
    def info(self) -> ExecutorInfo:
        return self._executor.info

    @property
    def config(self) -> SchedulerConfig:
        return self._scheduler.config

    @property
    def is_accepting(self) -> bool:
        """False once `stop` began or the engine died."""
        return self._is_open

    @property
    def is_healthy(self) -> bool:
        """False if the engine died or its last steps all failed."""
        return self._fault is None and self._failures_in_a_row < self._unhealthy_after

    @property
    def num_outstanding(self) -> int:
        """Requests accepted that have not ended."""
        return len(self._outstanding)

    def now(self) -> float:
        """Seconds on the engine's clock, the one of `Request.arrival`."""
        return self._clock.now()

    def stats(self) -> SchedulerStats:
        """The scheduler's figures after the last turn (a snapshot; any thread)."""
        return self._stats

    def totals(self) -> Totals | None:
        """Where the time went since the start; None where no ceiling is known (any thread)."""
        return None if self.accountant is None else self.accountant.totals(self._clock.now())

    def ceiling(self) -> CeilingSnapshot | None:
        """The machine, the model's curve and where the server works on it (any thread)."""
        return None if self.accountant is None else self.accountant.snapshot()

    def load(self) -> Load:
        """What waits, what is free and how fast it goes, at this moment (any thread)."""
        config, stats = self._scheduler.config, self._stats
        waiting, waiting_tokens = self._outstanding.waiting()
        running, running_tokens = self._outstanding.running()
        # What began since the figures were taken holds blocks that they call free.
        begun = self._outstanding.begun_tokens - self._stats_begun
        free_blocks = stats.blocks_free + stats.blocks_cached
        free_tokens = max(0, free_blocks * config.block_size - begun)
        # A class takes from those below it: all of their seats, and of their memory at least
        # what their prompts hold.
        below = range(len(running)) if self._scheduler.has_classes else [0] * len(running)
        return Load(
            waiting=waiting,
            waiting_tokens=waiting_tokens,
            free_seats=[max(0, self._num_seats - sum(running[rank:])) for rank in below],
            free_tokens=[free_tokens + sum(running_tokens[:rank]) for rank in below],
            num_seats=self._num_seats,
            num_tokens=config.num_blocks * config.block_size,
            completions_per_second=self._drain.completions_per_second(sum(running)),
            prompt_tokens_per_second=self._drain.prompt_tokens_per_second,
            tenants=self._outstanding.waiting_of_tenants if self._scheduler.is_fair else None,
            weights=config.tenant_weights,
        )

    def connect(self, deliver: Deliver) -> None:
        """Sets the callback that hears the events. There can be only one."""
        assert self._deliver is None, "the engine already delivers to somebody"
        self._deliver = deliver

    def start(self) -> None:
        """Starts the thread. Raises EngineStoppedError after `stop`."""
        with self._gate:
            self._check_open()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run_thread, name="hotbatch-engine", daemon=True
                )
                self._thread.start()

    def submit(self, request: Request) -> None:
        """Accepts a request: from here on it will end with exactly one last event.

        Raises:
            InvalidRequestError, ContextLengthError: it can never run, or its id is in use.
            EngineStoppedError: the engine is stopping or has died.
        """
        self._scheduler.check(request)
        with self._gate:
            self._check_open()
            if not request.arrival:
                request.arrival = self._clock.now()
            self._outstanding.add(
                request.request_id,
                arrival=request.arrival,
                num_prompt=request.num_prompt,
                service_class=request.service_class,
                targets=self._scheduler.config.targets_of(request.service_class, request.targets),
                tenant=request.tenant,
            )
            self._inbox.put(request)

    @property
    def prefills_ahead(self) -> bool:
        """Is there any use for `offer`?"""
        return self._scheduler.config.prefill_ahead

    def offer(self, prefix: KnownPrefix) -> None:
        """Tells what a next prompt will begin with; computed if there is nothing else to do."""
        if self._is_open:
            self._inbox.put(prefix)

    def cancel(self, request_id: str) -> None:
        """Asks for an end; its last event (ABORT) comes with the next step. Idempotent.

        A request that has ended or was never submitted is left alone.
        """
        if request_id in self._outstanding:
            self._inbox.put(_Cancel(request_id))

    @property
    def guesses_requests(self) -> bool:
        """True if requests that nobody has sent are taken, to be computed ahead."""
        return self._scheduler.idle_work.takes_guesses

    def guess(self, request: Request, chance: float) -> None:
        """Takes a request that may come. Nobody is owed an answer; `guess_observers` hear what
        becomes of it.

        Raises:
            InvalidRequestError, ContextLengthError: it could never run.
        """
        self._scheduler.check(request)
        self._inbox.put(_Guess(request.request_id, chance, request))

    def reprice_guess(self, request_id: str, chance: float) -> None:
        """Says that a guess became more or less likely; 0 ends it. Idempotent."""
        self._inbox.put(_Guess(request_id, chance))

    def stop(self, grace_seconds: float = 0.0) -> None:
        """Refuses new requests, lets the others end within the grace period, cuts the rest.

        Returns when the thread has ended and the executor is closed. May be called again,
        also meanwhile (the shorter grace counts), and on an engine that never started.
        """
        with self._gate:
            self._is_open = False
            thread = self._thread
            self._inbox.put(_Stop(self._clock.now() + max(0.0, grace_seconds)))
        if thread is None:
            self._cut_outstanding()
        elif thread is not threading.current_thread():
            thread.join(max(0.0, grace_seconds) + _STUCK_SECONDS)
            if thread.is_alive():
                # The executor is in use and cannot be closed; the clients can be told.
                logger.error("the step that runs does not end; leaving it behind")
                self._die(TimeoutError("the step that runs does not end"))
                return
        with self._gate:
            if self._is_closed:
                return
            self._is_closed = True
        self._executor.close()

    def _make_accountant(self, ceiling: Ceiling | None) -> Accountant | None:
        work = self._executor.info.work
        if ceiling is None or work is None:
            return None
        return Accountant(
            Roofline(work, ceiling),
            self._clock.now(),
            cost_model=self._scheduler.cost_model,
            # Beyond the limit as well, so that it can be seen what a higher one would bring.
            max_rows=max(_CURVE_ROWS, self._scheduler.config.max_num_seqs),
        )

    def _check_open(self) -> None:
        if self._fault is not None:
            raise EngineStoppedError(
                f"The engine has died ({_describe(self._fault)}); restart the server."
            )
        if not self._is_open:
            raise EngineStoppedError("The engine is shutting down and takes no more requests.")

    # ---- the loop

    def tick(self) -> bool:
        """One turn: inbox, expiries, plan, run, commit, deliver. True if a step ran."""
        try:
            return self._turn()
        except Exception as error:
            self._die(error)
            return False

    def _run_thread(self) -> None:
        try:
            self._main_loop()
            self._cut_outstanding()
        except BaseException as error:
            self._die(error)

    def _main_loop(self) -> None:
        while not self._is_time_to_leave():
            # The turn may have taken in a stop: nobody would end the rest after that.
            if not self.tick() and not self._is_time_to_leave():
                self._rest()

    def _is_time_to_leave(self) -> bool:
        if self._fault is not None:
            return True
        if self._stop_deadline is None:
            return False
        return len(self._outstanding) == 0 or self._clock.now() >= self._stop_deadline

    def _turn(self) -> bool:
        started = self._clock.now()
        self._drain_inbox()
        self._events += self._scheduler.answered()
        self._events += self._scheduler.expire(started)
        plan = self._scheduler.plan(started)
        if plan is None:
            self._tell_guesses()
            if self.accountant is not None:
                self.accountant.note_idle(started)
            if self._events:
                self._take_stats()
                self._flush(self._clock.now())
            return False
        self._empty_turns = 0
        planned = self._clock.now()
        self._outstanding.note_plan(plan, planned)
        result = self._execute(plan)
        executed = self._clock.now()
        if self._fault is not None:
            return False  # given up as stuck while the step ran; everybody has been told
        if isinstance(result, StepResult):
            self._events += self._scheduler.commit(plan, result, executed)
        else:
            self._events += self._scheduler.fail(plan, result)
        self._take_stats()
        mix = StepMix.of_plan(plan)
        num_decode = mix.decode.num_tokens
        self._drain.note_step(mix.all.num_tokens - num_decode, executed - planned)
        committed = self._clock.now()
        heard = self._flush(committed)
        self._tell_guesses()
        if self.step_observers or self.tracers:
            moments = (started, planned, executed, committed, self._clock.now())
            done = result if isinstance(result, StepResult) else None
            stats = self._step_stats(plan, mix, moments, heard, done is None)
            _tell(self.step_observers, stats)
            if self.tracers:
                _tell(self.tracers, StepTrace(plan, done, stats))
        if self.accountant is not None and not mix.all.num_tokens:
            self.accountant.note_idle(started)  # nobody asked for what was computed
        elif self.accountant is not None:
            account = self.accountant.account(
                plan,
                result if isinstance(result, StepResult) else None,
                started=started,
                planned=planned,
                executed=executed,
                delivered=self._clock.now(),
            )
            _tell(self.account_observers, account)
        return True

    def _execute(self, plan: StepPlan) -> StepResult | str:
        """The step's result, or what to tell the clients if it raised."""
        try:
            result = self._executor.run(plan)
        except Exception as error:
            self._failures_in_a_row += 1
            logger.exception("step %d failed (%d in a row)", plan.step_id, self._failures_in_a_row)
            return f"The model step failed: {_describe(error)}"
        self._failures_in_a_row = 0
        return result

    def _take_stats(self) -> None:
        self._stats_begun = self._outstanding.begun_tokens
        self._stats = self._scheduler.stats()

    def _rest(self) -> None:
        """Sleeps until a message comes or the scheduler wants to be asked again."""
        now = self._clock.now()
        wakeup = self._scheduler.next_wakeup(now)
        if self._scheduler.has_work:
            if wakeup is not None:
                self._sleep(wakeup - now)
                return
            # Nothing planned although there is work: ask again, but not for ever.
            self._empty_turns += 1
            assert self._empty_turns < 3, "requests wait, yet nothing would ever wake them"
        elif not self._sleep(_QUIET_SECONDS):
            self._check_at_rest()
            self._sleep(None if wakeup is None else wakeup - self._clock.now())

    def _sleep(self, seconds: float | None) -> bool:
        """Waits for a message, at most `seconds`; True if one came (and was taken in)."""
        if self._stop_deadline is not None:
            remaining = self._stop_deadline - self._clock.now()
            seconds = remaining if seconds is None else min(seconds, remaining)
        try:
            message = self._inbox.get(timeout=None if seconds is None else max(0.0, seconds))
        except queue.Empty:
            return False
        self._take(message)
        return True

    def _check_at_rest(self) -> None:
        """No work: every block must be in one state, and nobody may be owed an answer."""
        self._scheduler.check_integrity()
        with self._gate:
            if self._inbox.empty():
                lost = self._outstanding.ids()
                assert not lost, f"the scheduler lost {lost}"

    # ---- inbox

    def _drain_inbox(self) -> None:
        while True:
            try:
                message = self._inbox.get_nowait()
            except queue.Empty:
                return
            self._take(message)

    def _take(self, message: _Message) -> None:
        if isinstance(message, Request):
            self._add(message)
        elif isinstance(message, KnownPrefix):
            self._scheduler.idle_work.offer(message, self._clock.now())
        elif isinstance(message, _Guess):
            self._take_guess(message)
        elif isinstance(message, _Cancel):
            event = self._scheduler.cancel(message.request_id)
            if event is not None:
                self._events.append(event)
        else:
            earlier = self._stop_deadline
            self._stop_deadline = (
                message.deadline if earlier is None else min(earlier, message.deadline)
            )

    def _take_guess(self, guess: _Guess) -> None:
        if guess.request is None:
            self._scheduler.idle_work.reprice(guess.request_id, guess.chance)
        elif self._stop_deadline is None:
            self._scheduler.idle_work.guess(guess.request, guess.chance, self._clock.now())

    def _add(self, request: Request) -> None:
        try:
            self._scheduler.add(request)
        except HotbatchError as error:
            # Passed the check at the door and is refused now: an answer all the same.
            self._events.append(
                TokenEvent(
                    request_id=request.request_id,
                    finish_reason=FinishReason.ERROR,
                    error=error.message,
                    error_reason=error.reason if isinstance(error, OverloadedError) else None,
                    num_prompt=request.num_prompt,
                )
            )

    # ---- what goes out

    def _flush(self, now: float) -> Heard:
        """Delivers the events gathered since the last time."""
        events, self._events = self._events, []
        heard = self._outstanding.note_events(events, now)
        if events and self._deliver is not None:
            try:
                self._deliver(events)
            except Exception:
                logger.exception("delivering the events of a step failed")
        for timings in heard.ended:
            began = timings.first_scheduled
            if began is not None and timings.finish_reason is not FinishReason.ERROR:
                self._drain.note_end(now - began)
        if self.request_observers:
            for timings in heard.ended:
                _tell(self.request_observers, timings)
        return heard

    def _tell_guesses(self) -> None:
        news = self._scheduler.idle_work.news()
        if news:
            _tell(self.guess_observers, news)

    def _step_stats(
        self,
        plan: StepPlan,
        mix: StepMix,
        moments: tuple[float, float, float, float, float],
        heard: Heard,
        failed: bool,
    ) -> StepStats:
        """`moments` are the turn's start and the ends of plan, run, commit and delivery."""
        started, planned, executed, committed, delivered = moments
        stats = self._stats
        num_tokens, num_decode = mix.all.num_tokens, mix.decode.num_tokens
        return StepStats(
            step_id=plan.step_id,
            started=started,
            plan_seconds=planned - started,
            execute_seconds=executed - planned,
            commit_seconds=committed - executed,
            deliver_seconds=delivered - committed,
            num_requests=len(plan.requests) - plan.num_ahead,
            num_tokens=num_tokens,
            num_prompt_tokens=num_tokens - num_decode,
            num_decode_tokens=num_decode,
            num_sampled_tokens=heard.num_tokens,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            blocks_used=stats.blocks_used,
            blocks_total=stats.blocks_total,
            num_preemptions=len(plan.preempted),
            predicted_seconds=plan.predicted_seconds,
            time_to_first_token=tuple(heard.time_to_first_token),
            inter_token=tuple(heard.inter_token),
            failed=failed,
            num_ahead_tokens=mix.ahead.num_tokens,
        )

    # ---- ends

    def _cut_outstanding(self) -> None:
        """The grace period is over: whoever is left hears ABORT."""
        try:
            self._drain_inbox()
            self._events += self._scheduler.answered()  # before the end of one that goes on
            for request_id in self._outstanding.ids():
                event = self._scheduler.cancel(request_id)
                if event is not None:
                    self._events.append(event)
            self._take_stats()
            self._flush(self._clock.now())
            lost = self._outstanding.ids()
            assert not lost, f"the scheduler lost {lost}"
        except Exception as error:
            self._die(error)

    def _die(self, error: BaseException) -> None:
        """The state can no longer be trusted: everybody hears of it, nobody waits."""
        with self._gate:
            if self._fault is not None:
                return
            self._fault = error
            self._is_open = False
        logger.critical("the engine has died: %s", _describe(error), exc_info=error)
        message = f"The engine has died: {_describe(error)}"
        self._events = self._outstanding.end_all(FinishReason.ERROR, message)
        self._flush(self._clock.now())


def _tell(observers: list[Callable[[_T], None]], value: _T) -> None:
    for observer in list(observers):
        try:
            observer(value)
        except Exception:
            logger.exception("an observer failed and is dropped: %r", observer)
            observers.remove(observer)


def _describe(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
