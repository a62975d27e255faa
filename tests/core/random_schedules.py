"""Random workloads and random schedules for them, and the oracle that judges the outcome."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from core_factories import EOS
from hypothesis import strategies as st

from hotbatch.core import (
    FinishReason,
    LatencyTargets,
    Policies,
    Request,
    SamplingParams,
    Scheduler,
    SchedulerConfig,
    ServiceClass,
    StepPlan,
    StepResult,
    TokenEvent,
    TokenLogprob,
)
from hotbatch.core.cost_model import CostModel, StepFeatures
from hotbatch.core.policies import Reclaim, full_policies
from hotbatch.core.speculation import AheadBook, Drafter, EachAlone, Fate, Speculator
from hotbatch.core.speculation.warming import KnownPrefix
from hotbatch.simulator import RooflineStepTime, SimulatedExecutor, TokenModel

MODEL = TokenModel(vocab_size=40, eos_token_id=EOS, eos_probability=0.08)

PREFIX = "next-turn-"  # of the ids of what next turns begin with
# Steps. Prompts in small parts, of guesses that never cease, would be planned for ever.
_MOST_IN_FLIGHT = 16


@dataclass(frozen=True)
class Habits:
    """How the world treats the scheduler; each is a probability per occasion."""

    seed: int
    arrival: float
    cancel: float
    lookahead: float  # of planning the next step before the last one is committed
    fail_step: float
    fail_request: float
    offer: float = 0.0  # of what a next prompt may begin with
    guess: float = 0.0  # of a whole request before it comes


@dataclass(frozen=True)
class Case:
    config: SchedulerConfig
    requests: tuple[dict[str, Any], ...]  # keyword arguments of Request
    habits: Habits
    max_chunk: int
    drafting: str  # one of DRAFTERS
    policies: Policies | None = None  # None: plain ones with `max_chunk`

    def make_requests(self) -> list[Request]:
        return [Request(**fields) for fields in self.requests]


@st.composite
def configs(draw: st.DrawFn) -> SchedulerConfig:
    block_size = draw(st.sampled_from([1, 2, 3, 4, 8]))
    max_num_seqs = draw(st.integers(1, 6))
    batching = draw(
        st.sampled_from(["continuous", "continuous", "continuous", "static", "request"])
    )
    return SchedulerConfig(
        # Room for 12 to 36 tokens: from hardly one request to most of them.
        num_blocks=-(-draw(st.integers(12, 36)) // block_size),
        block_size=block_size,
        max_model_len=draw(st.sampled_from([20, 36])),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw(st.integers(0, 12)),
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 1, 3])),
        max_draft_tokens=draw(st.sampled_from([None, None, 0, 2])),
        batching=batching,
        static_batch_size=draw(st.integers(1, max_num_seqs)),
        static_timeout=draw(st.sampled_from([0.0, 0.05, 1.0])),
        enable_prefix_caching=draw(st.sampled_from([True, True, False])),
        prefix_eviction=draw(st.sampled_from(["return-time", "return-time", "lru"])),
        prefill_ahead=draw(st.booleans()),
        watermark=draw(st.sampled_from([0.0, 0.01, 0.2])),
        vocab_size=MODEL.vocab_size,
    )


@st.composite
def params(draw: st.DrawFn, max_output: int) -> SamplingParams:
    max_tokens = draw(st.none() | st.integers(1, max_output))
    min_tokens = draw(st.sampled_from([0, 0, 0, 1, 3]))
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 1.0])),
        max_tokens=max_tokens,
        min_tokens=min(min_tokens, max_tokens or max_output),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.5])),
        stop_token_ids=draw(st.sampled_from([(), (), (5, 6)])),
        seed=draw(st.sampled_from([None, 1])),  # that there is one makes an answer known before
        ignore_eos=draw(st.booleans()),
        logprobs=draw(st.sampled_from([None, None, 2])),
        prompt_logprobs=draw(st.sampled_from([None, None, None, 0, 1])),
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    config = draw(configs())
    common = draw(st.lists(st.integers(0, MODEL.vocab_size - 1), min_size=10, max_size=10))
    requests: list[dict[str, Any]] = []
    for index in range(draw(st.integers(1, 7))):
        length = draw(st.integers(1, min(18, config.context_len - 1)))
        own = draw(st.lists(st.integers(0, MODEL.vocab_size - 1), min_size=1, max_size=3))
        num_common = draw(st.integers(0, 10))
        prompt = (common[:num_common] + own * 18)[:length]
        fields: dict[str, Any] = {
            "prompt_token_ids": prompt,
            "params": draw(params(config.context_len - length)),
            "eos_token_ids": frozenset({EOS}),
            "cache_salt": draw(st.sampled_from([None, None, None, "salt"])),
        }
        siblings = draw(st.sampled_from([1, 1, 1, 2, 4]))
        for sibling in range(siblings):
            requests.append(
                fields
                | {
                    "request_id": f"r{index}.{sibling}",
                    "seed": 10 * index + sibling,
                    "group_id": f"g{index}" if siblings > 1 else None,
                }
            )
    rare = st.sampled_from([0.0, 0.0, 0.0, 0.02])
    habits = Habits(
        seed=draw(st.integers(0, 2**32)),
        arrival=draw(st.sampled_from([0.1, 0.5, 1.0])),
        cancel=draw(st.sampled_from([0.0, 0.01, 0.1])),
        lookahead=draw(st.sampled_from([0.0, 0.5, 1.0])),
        fail_step=draw(rare),
        fail_request=draw(rare),
        offer=draw(st.sampled_from([0.0, 0.1, 0.5])),
        guess=draw(st.sampled_from([0.0, 0.1, 0.5])),
    )
    drafting = draw(st.sampled_from(["none", *DRAFTERS]))
    return Case(config, tuple(requests), habits, draw(st.integers(1, 20)), drafting)


def _none_or(values: st.SearchStrategy[float]) -> st.SearchStrategy[float | None]:
    return st.none() | values


@st.composite
def mixed_cases(draw: st.DrawFn) -> Case:
    """Classes, tenants, priorities, targets and times to live, with any set of ingredients."""
    case = draw(cases())
    seconds = st.sampled_from([0.001, 0.01, 0.1])
    targets = st.builds(LatencyTargets, _none_or(seconds), _none_or(seconds))
    config = replace(
        case.config,
        batching=draw(st.sampled_from(["continuous"] * 7 + ["static", "request"])),
        targets=draw(st.dictionaries(st.sampled_from(ServiceClass), targets)),
        queue_time_to_live=draw(st.sampled_from([None, None, 0.02, 0.2])),
        ageing=draw(st.sampled_from([None, 0.01, 0.1])),
        batch_share=draw(st.sampled_from([0.0, 0.05, 0.3])),
        late_share=draw(st.sampled_from([0.0, 0.05, 0.3])),
        tenant_weights=draw(st.sampled_from([{}, {"b": 3.0}])),
    )
    requests = tuple(
        fields
        | {
            "service_class": draw(st.sampled_from(ServiceClass)),
            "priority": draw(st.integers(-1, 1)),
            "tenant": draw(st.sampled_from(["", "a", "b"])),
            "targets": draw(targets),
        }
        for fields in case.requests
    )
    everything = ("classes", "deadlines", "fairness", "forecast", "partial_eviction")
    without = draw(st.sets(st.sampled_from(everything), max_size=2))
    policies = full_policies(**dict.fromkeys(without, False))
    if draw(st.sampled_from([False, False, True])):
        policies = replace(policies, reclaim=keep_long_ones)
    return replace(case, config=config, requests=requests, policies=policies)


def keep_long_ones(victim: Request, num_tokens: int) -> Reclaim:
    return Reclaim.KEEP if num_tokens > 6 else Reclaim.RECOMPUTE


def guess(request: Request, limit: int) -> Sequence[int]:
    """Drafts from the oracle itself, with an error in most of them at a varying place."""
    context = MODEL.context(request.tokens)
    wrong = (len(request.tokens) * 7 + request.seed) % 5
    drafts = []
    for index in range(min(limit, 4)):
        token_id = MODEL.sample(
            context,
            request.params,
            seed=request.seed,
            position=len(request.tokens) + index,
        )
        if index == wrong:
            token_id = (token_id + 1) % MODEL.vocab_size
        drafts.append(token_id)
        context = MODEL.extend(context, token_id)
    return drafts


def wild_guess(request: Request, limit: int) -> Sequence[int]:
    """As many drafts as there may be, hardly any of them right."""
    random = Random(f"{request.request_id} {len(request.tokens)}")
    return [random.randrange(MODEL.vocab_size) for _ in range(random.randint(0, limit))]


def trained_model() -> CostModel:
    """A cost model that has seen a machine on which a few more tokens are nearly free."""
    model = CostModel()
    for _ in range(8):
        for tokens in (1, 2, 4, 8):
            model.observe(StepFeatures(tokens, 1, 20, 20 * tokens, tokens), 0.01 + 1e-4 * tokens)
        model.observe(StepFeatures(16, 2, 20, 200, 1), 0.012)
    return model


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "guess": lambda: EachAlone(guess),
    "wild guess": lambda: EachAlone(wild_guess),
    "priced": lambda: Speculator(trained_model()),
    "deep": lambda: Speculator(trained_model(), depth=5),
}


@dataclass
class Heard:
    """What one client heard."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    end: TokenEvent | None = None


class RandomDay:
    """Runs a case to its end, with something unexpected at every possible moment.

    Integrity is checked after every single thing that happens.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.config = case.config
        self.random = Random(case.habits.seed)
        self.scheduler = Scheduler(
            case.config,
            replace(
                case.policies or Policies(),
                chunk_size=lambda request, uncomputed, left: min(uncomputed, left, case.max_chunk),
            ),
            cost_model=trained_model() if case.habits.seed % 2 else None,
            drafter=DRAFTERS[case.drafting]() if case.drafting in DRAFTERS else None,
            ahead=AheadBook() if case.habits.guess else None,
        )
        self.executor = SimulatedExecutor(
            num_blocks=case.config.num_blocks,
            block_size=case.config.block_size,
            max_model_len=case.config.max_model_len,
            model=MODEL,
            step_time=RooflineStepTime(),
        )
        self.requests = case.make_requests()
        self.to_come = list(reversed(self.requests))
        self.heard = {request.request_id: Heard() for request in self.requests}
        self.in_flight: list[StepPlan] = []
        self.guesses: dict[str, Request] = {}  # that were made and not settled

    def run(self, max_turns: int = 4000) -> None:
        for _ in range(max_turns):
            if not (self.to_come or self.scheduler.has_work):
                return
            self._turn()
        raise AssertionError("some request never ends")

    def _turn(self) -> None:
        self._guess_something()
        self._arrivals()
        self._deliver(self.scheduler.answered())
        self._something_may_happen()
        self._deliver(self.scheduler.expire(self.executor.clock.now()))
        if self._chance(self.case.habits.offer):
            self._offer()
        plan = None
        is_far = len(self.in_flight) >= _MOST_IN_FLIGHT
        if not self.in_flight or (not is_far and self._chance(self.case.habits.lookahead)):
            plan = self.scheduler.plan(self.executor.clock.now())
            self.scheduler.check_integrity()
        if plan is not None:
            self._check_plan(plan)
            self.in_flight.append(plan)
            self._something_may_happen()
            return
        if self.in_flight:
            self._run_oldest()
        else:
            self._wait()

    def _offer(self) -> None:
        """Tokens that some request had, and something else behind them."""
        request = self.random.choice(self.requests)
        kept = self.random.randint(1, len(request.tokens))
        more = [self.random.randrange(MODEL.vocab_size) for _ in range(self.random.randint(0, 9))]
        prefix = KnownPrefix(
            [*request.tokens[:kept], *more][: self.config.context_len],
            request.tenant,
            request.cache_salt,
        )
        self.scheduler.idle_work.offer(prefix, self.executor.clock.now())
        self.scheduler.check_integrity()

    def _arrivals(self) -> None:
        while self.to_come and self._chance(self.case.habits.arrival):
            request = self.to_come.pop()
            request.arrival = self.executor.clock.now()
            self.scheduler.add(request)

    def _guess_something(self) -> None:
        """Guess a request right, wrong, or right but for its sampling; or change one's mind."""
        while self._chance(self.case.habits.guess):
            fields = dict(self.random.choice(self.case.requests))
            name = f"guess-{len(self.heard)}-{self.random.random()}"
            fields |= {"request_id": name, "group_id": None, "arrival": 0.0}
            kind = self.random.choice(["right", "right", "wrong", "longer", "drop"])
            prompt = fields["prompt_token_ids"]
            if kind == "wrong":
                wrong = self.random.randrange(MODEL.vocab_size)
                fields["prompt_token_ids"] = [*prompt[:-1], wrong]
            elif kind == "longer":
                most = self.config.context_len - len(prompt)
                fields["params"] = replace(fields["params"], max_tokens=most)
            elif kind == "drop" and self.guesses:
                self.scheduler.idle_work.reprice(self.random.choice(list(self.guesses)), 0.0)
            request = Request(**fields)
            self.guesses[name] = request
            self.scheduler.idle_work.guess(request, self.random.random(), self.executor.clock.now())
            self.scheduler.check_integrity()
            self._hear_news()

    def _hear_news(self) -> None:
        for news in self.scheduler.idle_work.news():
            if news.request_id.startswith(PREFIX):
                continue
            request = self.guesses[news.request_id]
            if news.fate is not Fate.COMPUTED:
                del self.guesses[news.request_id]
            limit = self.config.context_len - request.num_prompt
            expected, reason = MODEL.continuation(request, limit)
            assert list(news.token_ids) == expected[: len(news.token_ids)]
            if news.finish_reason is not None:
                assert (list(news.token_ids), news.finish_reason) == (expected, reason)

    def _wait(self) -> None:
        now = self.executor.clock.now()
        wakeup = self.scheduler.next_wakeup(now)
        if wakeup is not None:
            self.executor.clock.advance_to(wakeup)
        elif self.scheduler.has_work:
            # Only a future arrival may be what everybody waits for, and nobody ever does.
            raise AssertionError("requests are left, yet nothing is planned")

    def _run_oldest(self) -> None:
        if self._chance(self.case.habits.fail_step):
            # A step that fails takes with it those that were planned upon it.
            while self.in_flight:
                self._deliver(self.scheduler.fail(self.in_flight.pop(0), "scripted"))
                self.scheduler.check_integrity()
            return
        plan = self.in_flight.pop(0)
        result = self._with_errors(self.executor.run(plan))
        self._something_may_happen()
        self._deliver(self.scheduler.commit(plan, result, self.executor.clock.now()))
        self.scheduler.check_integrity()

    def _with_errors(self, result: StepResult) -> StepResult:
        requests = tuple(
            outcome._replace(token_ids=(), logprobs=(), error="scripted")
            if self._chance(self.case.habits.fail_request)
            else outcome
            for outcome in result.requests
        )
        return replace(result, requests=requests)

    def _something_may_happen(self) -> None:
        while self._chance(self.case.habits.cancel):
            request = self.random.choice(self.requests)
            reason = self.random.choice([FinishReason.ABORT, FinishReason.STOP])
            event = self.scheduler.cancel(request.request_id, reason)
            if event is not None:
                self._deliver([event])
            self.scheduler.check_integrity()

    def _check_plan(self, plan: StepPlan) -> None:
        assert plan.num_tokens <= self.config.max_num_batched_tokens
        assert len(plan.requests) <= self.config.max_num_seqs
        for planned in plan.requests:
            assert len(planned.tokens) - planned.num_drafts <= self.config.max_chunk
        if self.config.max_draft_tokens is not None:
            num_drafts = sum(planned.num_drafts for planned in plan.requests)
            assert num_drafts <= self.config.max_draft_tokens
        assert self.scheduler.stats().num_running <= self.config.max_num_seqs
        if self.config.batching == "request":
            assert self.scheduler.stats().num_running <= 1
        asked = plan.requests[: len(plan.requests) - plan.num_ahead]
        for planned in plan.requests[len(asked) :]:
            if planned.request_id.startswith(PREFIX):
                assert len(plan.requests) == 1, "the beginning of a next turn shares no step"
                assert self.scheduler.stats().num_running == 0, "nor does it run beside requests"
            else:
                assert planned.request_id in self.guesses
        for planned in asked:
            assert self.heard[planned.request_id].end is None, "planned after its end"

    def _deliver(self, events: list[TokenEvent]) -> None:
        for event in events:
            heard = self.heard[event.request_id]
            assert heard.end is None, f"{event.request_id} speaks after its end"
            heard.token_ids += event.token_ids
            heard.logprobs += event.logprobs
            heard.prompt_logprobs = heard.prompt_logprobs or event.prompt_logprobs
            assert event.num_output == len(heard.token_ids)
            if event.finish_reason is not None:
                heard.end = event

    def _chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def judge(self) -> None:
        """Everything is given back, and everybody heard what a solo run would have told."""
        self._end_guesses()
        self.scheduler.check_integrity()
        stats = self.scheduler.stats()
        assert stats.blocks_cached == stats.blocks_total - stats.blocks_free
        assert (stats.blocks_used, stats.num_running, stats.num_waiting) == (0, 0, 0)
        assert self.scheduler.plan(self.executor.clock.now()) is None
        for request in self.requests:
            self._judge_request(request, self.heard[request.request_id])

    def _end_guesses(self) -> None:
        """With nothing else to do, all that is guessed is computed, and holds no block after it."""
        for _ in range(4000):
            plan = self.scheduler.plan(self.executor.clock.now())
            if plan is None:
                break
            self._check_plan(plan)
            assert plan.num_ahead == len(plan.requests), "a request was left"
            result = self.executor.run(plan)
            assert not self.scheduler.commit(plan, result, self.executor.clock.now())
            self.scheduler.check_integrity()
            self._hear_news()
        else:
            raise AssertionError("some guess never ends")
        assert not any(True for _ in self.scheduler.idle_work.holders)

    def _judge_request(self, request: Request, heard: Heard) -> None:
        limit = self.config.context_len - request.num_prompt
        expected, reason = MODEL.continuation(request, limit)
        assert heard.end is not None, f"{request!r} never ended"
        if heard.end.error_reason == "queue_ttl":
            assert self.config.queue_time_to_live is not None and not heard.token_ids
        was_cut = heard.end.error is not None or heard.end.finish_reason is FinishReason.ABORT
        if was_cut or len(heard.token_ids) < len(expected):
            assert heard.token_ids == expected[: len(heard.token_ids)]
            assert was_cut or self.case.habits.cancel > 0
        else:
            assert heard.token_ids == expected
            assert heard.end.finish_reason is reason
        prompt = request.tokens[: request.num_prompt]
        if request.params.prompt_logprobs is not None and heard.token_ids:
            assert heard.prompt_logprobs == tuple(
                MODEL.logprob(
                    MODEL.context(prompt[:index]), prompt[index], request.params.prompt_logprobs
                )
                for index in range(1, len(prompt))
            )
        if request.params.logprobs is not None:
            assert heard.logprobs == [
                MODEL.logprob(
                    MODEL.context([*prompt, *expected[:index]]),
                    expected[index],
                    request.params.logprobs,
                )
                for index in range(len(heard.token_ids))
            ]


def run_case(case: Case) -> RandomDay:
    day = RandomDay(case)
    day.run()
    day.judge()
    return day
