"""The accounts of the engine: they add up, and each second goes to whatever took it."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotbatch.core.config import SchedulerConfig
from hotbatch.core.cost_model import CostModel, StepFeatures
from hotbatch.core.policies import Policies, full_policies
from hotbatch.core.request import Request
from hotbatch.core.sampling_params import SamplingParams
from hotbatch.core.scheduler import Scheduler
from hotbatch.core.step_mix import HeldBack
from hotbatch.engine import CAUSES, Cause, Ceiling, ModelWork, Phase, StepAccount
from hotbatch.engine.accounting import Accountant
from hotbatch.engine.ceiling import Roofline
from hotbatch.simulator import EngineRun, RooflineStepTime, SimulatedExecutor, StepTime

# One gigabyte and one teraoperation a second: weights take 4 ms, a row 0.3 ms, a token of
# context 0.7 us. The knee lies at 13.3 rows.
CEILING = Ceiling(bandwidth=1e9, compute=1e12, attention_compute=1e12)
WORK = ModelWork(
    body_bytes=3e6,
    head_bytes=1e6,
    kv_bytes=700.0,
    body_operations=2.5e8,
    head_operations=0.5e8,
    attention_operations=0.0,
)
IDEAL = RooflineStepTime(overhead=0.0, weights=0.004, per_token=0.0003, per_context_token=7e-7)


class Books:
    """An engine in virtual time, with all accounts that it gave."""

    def __init__(
        self,
        *,
        step_time: StepTime = IDEAL,
        policies: Policies | None = None,
        host_seconds: float = 0.0,
        trained: bool = False,
        fail_steps: dict[int, str] | None = None,
        **config: object,
    ) -> None:
        options = {"num_blocks": 512, "max_model_len": 512, **config}
        executor = SimulatedExecutor(
            num_blocks=options["num_blocks"],
            block_size=options.get("block_size", 16),
            max_model_len=options["max_model_len"],
            step_time=step_time,
            work=WORK,
            fail_steps=fail_steps,
        )
        self.scheduler = Scheduler(
            SchedulerConfig(**options), policies, _trained(step_time) if trained else None
        )
        self.run = EngineRun(self.scheduler, executor, ceiling=CEILING, host_seconds=host_seconds)
        self.accounts: list[StepAccount] = []
        self.run.engine.account_observers.append(self.accounts.append)

    def serve(self, requests: Sequence[Request]) -> list[StepAccount]:
        for request in requests:
            self.run.arrive(request)
        self.run.run()
        return self.accounts

    def share(self, cause: Cause) -> float:
        totals = self.run.engine.totals()
        assert totals is not None
        return totals.by_cause[cause] / totals.seconds


def _trained(step_time: StepTime) -> CostModel:
    from hotbatch.core.plan import PlannedRequest, StepPlan

    model = CostModel()
    rng = Random(1)
    for index in range(300):
        sizes = [1] * rng.randint(1, 40) + [rng.randint(2, 100)] * (index % 3)
        plan = StepPlan(
            0, tuple(PlannedRequest(str(i), 30, (0,) * n, ()) for i, n in enumerate(sizes))
        )
        model.observe(StepFeatures.of_plan(plan), step_time(plan))
    return model


def request(name: str, *, prompt: int = 20, tokens: int = 10, arrival: float = 0.001) -> Request:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    first = sum(map(ord, name)) % 30  # no common prefixes
    ids = [(first + i * i) % 97 for i in range(prompt)]
    return Request(name, ids, params, seed=len(name), arrival=arrival)


def many(count: int, **fields: int) -> list[Request]:
    return [request(f"r{index}", **fields) for index in range(count)]


def check(books: Books) -> None:
    """Accounts without a hole, parts that sum to the whole, nothing below zero."""
    moment = 0.0
    for account in books.accounts:
        assert account.started == pytest.approx(moment)
        assert sum(account.times) == pytest.approx(account.seconds, abs=1e-9)
        assert all(seconds >= -1e-9 for seconds in account.times), account.by_cause
        moment = account.started + account.seconds
    totals = books.run.engine.totals()
    assert totals is not None
    assert totals.seconds == pytest.approx(books.run.clock.now())
    assert sum(totals.by_cause.values()) == pytest.approx(totals.seconds, rel=1e-6)


# ---- the ideal


def test_the_ideal_time_is_the_larger_of_reading_and_computing():
    roofline = Roofline(WORK, CEILING)
    one = roofline.ideal(StepFeatures(1, 1, 100, 100, 1))
    assert one.memory == pytest.approx(0.004 + 100 * 7e-7)
    assert one.compute == pytest.approx(0.0003)
    assert one.seconds == one.memory
    assert roofline.ideal(StepFeatures(40, 40, 0, 0, 40)).seconds == pytest.approx(40 * 0.0003)
    assert roofline.knee == pytest.approx(40 / 3)


def test_the_head_is_read_and_computed_only_where_something_is_sampled():
    step = StepFeatures(8, 1, 8, 36, 0)
    assert WORK.bytes_of(step) == 3e6 + 8 * 700
    assert WORK.operations_of(step) == 8 * 2.5e8
    assert WORK.bytes_of(step._replace(num_sampled=1)) == 4e6 + 8 * 700


# ---- adding up


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    count=st.integers(1, 12),
    num_blocks=st.integers(8, 60),
    seats=st.integers(1, 8),
    stall=st.sampled_from([0.0, 0.0005, 0.01]),
    pace=st.sampled_from([0.0, 0.01, 0.2]),
    drafting=st.booleans(),
    trained=st.booleans(),
    full=st.booleans(),
    batching=st.sampled_from(["continuous", "continuous", "static"]),
    overhead=st.sampled_from([0.0, 0.001]),
)
def test_the_parts_add_up_to_the_wall_time(
    seed, count, num_blocks, seats, stall, pace, drafting, trained, full, batching, overhead
):
    rng = Random(seed)
    policies = full_policies() if full else Policies()
    if drafting:
        from dataclasses import replace

        policies = replace(policies, propose_drafts=lambda r, limit: [rng.randrange(40)] * limit)
    books = Books(
        step_time=RooflineStepTime(overhead=overhead),
        policies=policies,
        host_seconds=stall,
        trained=trained,
        fail_steps={rng.randrange(20): "broken"},
        num_blocks=num_blocks,
        block_size=4,
        max_model_len=32,
        max_num_seqs=seats,
        max_num_batched_tokens=seats + rng.randint(0, 40),
        static_batch_size=rng.randint(1, seats),
        batching=batching,
    )
    requests = []
    moment = 0.001
    for index in range(count):
        moment += rng.random() * pace
        requests.append(
            request(
                f"r{index}", prompt=rng.randint(1, 20), tokens=rng.randint(1, 12), arrival=moment
            )
        )
    books.serve(requests)
    check(books)
    books.run.run(until=books.run.clock.now() + 1.0)  # and while nothing happens
    check(books)


# ---- causes


def test_waiting_for_work_is_counted_also_before_it_ends():
    books = Books()
    books.serve([request("a", arrival=2.0)])
    assert books.accounts[0].idle_seconds == pytest.approx(2.0)
    books.run.run(until=10.0)
    totals = books.run.engine.totals()
    busy = sum(account.seconds - account.idle_seconds for account in books.accounts)
    assert totals.by_cause[Cause.NO_WORK] == pytest.approx(10.0 - busy)
    assert totals.seconds == pytest.approx(10.0)


def test_a_slow_host_is_counted_with_the_step_that_it_holds_up():
    books = Books(host_seconds=0.003)
    accounts = books.serve(many(4))
    for account in accounts:
        assert account.by_cause[Cause.HOST_GAP] == pytest.approx(0.003)


def test_few_sequences_are_charged_with_the_weights_that_others_would_have_shared():
    accounts = Books().serve([request("a", prompt=1, tokens=8)])
    decode = accounts[-1]
    assert decode.phase is Phase.DECODE
    assert decode.by_cause[Cause.FEW_SEQUENCES] == pytest.approx(0.004 * (1 - 1 / (40 / 3)))
    assert decode.by_cause[Cause.DECODE] == pytest.approx(0.0003 + 8 * 7e-7, rel=0.01)
    assert decode.mbu == pytest.approx(1.0)
    assert decode.decode_utilisation == decode.mbu > decode.mfu


def test_a_full_step_at_the_ceiling_loses_nothing():
    books = Books()
    books.serve(many(20, prompt=1, tokens=30))
    decode = books.accounts[-1]
    assert decode.num_decode_tokens == 20
    assert decode.mfu == pytest.approx(1.0)
    assert decode.by_cause[Cause.DECODE] == pytest.approx(decode.seconds)


def test_reading_much_context_is_work_and_not_too_few_sequences():
    books = Books(max_model_len=8192, num_blocks=1024, max_num_batched_tokens=8192)
    books.serve([request("a", prompt=8000, tokens=4)])
    decode = books.accounts[-1]
    few = 0.004 * (1 - 3 / 40)
    assert decode.by_cause[Cause.FEW_SEQUENCES] == pytest.approx(few)
    assert decode.by_cause[Cause.DECODE] == pytest.approx(decode.seconds - few)


@pytest.mark.parametrize(
    ("config", "count", "reason", "cause"),
    [
        ({"num_blocks": 8, "enable_prefix_caching": False}, 10, HeldBack.KV, Cause.KV_LIMIT),
        ({"max_num_seqs": 2}, 10, HeldBack.SEATS, Cause.SEAT_LIMIT),
        ({"batching": "static", "static_batch_size": 2}, 10, HeldBack.SEATS, Cause.SEAT_LIMIT),
        ({}, 2, None, Cause.FEW_SEQUENCES),
    ],
)
def test_below_the_knee_the_cause_is_what_keeps_the_others_out(config, count, reason, cause):
    books = Books(**config)
    books.serve(many(count, prompt=40, tokens=20))
    early = [account for account in books.accounts[:10] if account.phase is Phase.DECODE]
    assert early
    assert all(account.held_back is reason for account in early)
    assert all(account.by_cause[cause] > 0.3 * account.seconds for account in early)
    check(books)


def test_what_is_computed_twice_is_charged_to_the_cache():
    books = Books(num_blocks=20, block_size=4, enable_prefix_caching=False, watermark=0.0)
    books.serve(many(5, prompt=10, tokens=40))
    repeated = [account for account in books.accounts if account.num_recomputed_tokens]
    assert repeated
    for account in repeated:
        assert account.by_cause[Cause.KV_LIMIT] > 0.0
        assert account.num_recomputed_tokens <= account.num_prompt_tokens
    check(books)


def test_prompts_are_charged_with_what_the_decodes_beside_them_wait():
    books = Books(trained=True)
    requests = [request("a", prompt=1, tokens=60), request("b", prompt=200, arrival=0.05)]
    books.serve(requests)
    [mixed] = [account for account in books.accounts if account.phase is Phase.MIXED]
    # 201 rows take 60 ms; the decode alone would have taken 4.
    assert mixed.by_cause[Cause.PREFILL_INTERFERENCE] == pytest.approx(0.056, rel=0.1)
    assert mixed.num_prompt_tokens == 200
    assert mixed.by_cause[Cause.FEW_SEQUENCES] == pytest.approx(0.0)


def test_a_prompt_alone_is_work():
    books = Books()
    books.serve([request("a", prompt=200, tokens=1)])
    [prefill] = books.accounts
    assert prefill.phase is Phase.PREFILL
    assert prefill.decode_utilisation is None
    assert prefill.by_cause[Cause.PREFILL] == pytest.approx(200 * 2.5e-4 + 5e-5)


def test_refused_drafts_are_charged_by_the_curve_and_are_no_use_of_the_machine():
    wrong = Policies(propose_drafts=lambda request, limit: [96] * min(limit, 9))
    books = Books(policies=wrong, trained=True)
    books.serve(many(8, prompt=1, tokens=20))
    step = next(
        account
        for account in books.accounts
        if account.num_draft_tokens > 40 and account.phase is Phase.DECODE
    )
    assert step.num_rejected_tokens > 0.9 * step.num_draft_tokens
    rows = step.num_decode_tokens
    assert step.execute_seconds == pytest.approx(rows * 0.0003, rel=0.02)
    kept = max(0.004, (rows - step.num_rejected_tokens) * 0.0003)
    assert step.by_cause[Cause.SPECULATION_WASTE] == pytest.approx(
        step.execute_seconds - kept, rel=0.1
    )
    assert step.mfu < 0.5
    check(books)


def test_accepted_drafts_are_work():
    from hotbatch.simulator import TokenModel

    model = TokenModel()

    def oracle(request: Request, limit: int) -> list[int]:
        tokens = list(request.tokens)
        drafts = []
        for _ in range(min(limit, 4)):
            token = model.sample(
                model.context(tokens), request.params, seed=request.seed, position=len(tokens)
            )
            drafts.append(token)
            tokens.append(token)
        return drafts

    books = Books(policies=Policies(propose_drafts=oracle))
    books.serve(many(4, prompt=1, tokens=20))
    assert sum(account.num_draft_tokens for account in books.accounts) > 20
    assert sum(account.num_rejected_tokens for account in books.accounts) == 0
    assert books.share(Cause.SPECULATION_WASTE) == 0.0


def test_what_the_model_takes_beyond_the_ideal_is_the_kernels():
    books = Books(step_time=RooflineStepTime(overhead=0.002))
    accounts = books.serve(many(20, prompt=1, tokens=5))
    assert accounts[-1].by_cause[Cause.KERNEL_INEFFICIENCY] == pytest.approx(0.002)


def test_what_is_thought_of_the_decodes_beside_a_prompt_does_not_raise_the_ceiling():
    """A curve by which decodes are nearly free leaves them less time than they need at best."""

    class Steep:
        is_trained = True

        def predict(self, step):
            return 1e-6 * step.num_tokens**2

    books = Books(max_num_batched_tokens=256)
    books.run.engine.accountant = Accountant(Roofline(WORK, CEILING), 0.0, cost_model=Steep())
    books.serve([*many(8, prompt=1, tokens=60), request("long", prompt=400, arrival=0.05)])
    assert {account.phase for account in books.accounts} >= {Phase.DECODE, Phase.MIXED}
    assert books.run.engine.ceiling().ceiling is CEILING
    check(books)


def test_a_step_that_beats_the_ceiling_shows_that_it_was_measured_too_low():
    books = Books(step_time=lambda plan: 0.001)
    accounts = books.serve(many(2))
    raised = books.run.engine.ceiling().ceiling
    assert raised.bandwidth == pytest.approx(4e9, rel=0.05)
    assert raised.compute > CEILING.compute  # by the prompts
    assert accounts[-1].mbu == pytest.approx(1.0, rel=0.05)
    for account in accounts:
        assert account.by_cause[Cause.KERNEL_INEFFICIENCY] == pytest.approx(0.0, abs=1e-12)
    check(books)


def test_a_step_that_raises_is_the_hosts():
    books = Books(fail_steps={0: "broken"})
    [account] = books.serve([request("a")])
    assert account.by_cause[Cause.HOST_GAP] == account.seconds - account.idle_seconds


# ---- what is read


def test_totals_sum_the_accounts_and_tell_phases_apart():
    books = Books(host_seconds=0.001)
    accounts = books.serve(many(6, prompt=50, tokens=30))
    totals = books.run.engine.totals()
    for cause, seconds in totals.by_cause.items():
        expected = sum(account.times[CAUSES.index(cause)] for account in accounts)
        assert seconds == pytest.approx(expected, abs=1e-9)
    for phase, sums in totals.phases.items():
        steps = [account for account in accounts if account.phase is phase]
        assert sums.steps == len(steps)
        assert sums.ideal == pytest.approx(sum(account.ideal_seconds for account in steps))
    assert totals.tokens.decode == sum(account.num_decode_tokens for account in accounts)
    assert totals.tokens.prompt == 6 * 50
    decode = totals.phases[Phase.DECODE]
    assert decode.mbu > decode.mfu > 0.0
    assert totals.decode_utilisation_since_start == pytest.approx(
        decode.ideal / decode.busy, rel=0.05
    )


def test_recent_steps_outweigh_old_ones():
    books = Books(host_seconds=0.0)
    books.serve(many(16, prompt=1, tokens=400))  # near the ceiling
    assert books.run.engine.totals().decode_utilisation > 0.95
    books.run.host_seconds = 0.03
    later = [
        request(f"s{i}", prompt=1, tokens=450, arrival=books.run.clock.now()) for i in range(16)
    ]
    books.serve(later)
    totals = books.run.engine.totals()
    assert totals.decode_utilisation < 0.3
    assert totals.decode_utilisation_since_start > totals.decode_utilisation


def test_the_snapshot_shows_the_curve_and_where_the_server_works():
    books = Books(trained=True, host_seconds=0.001, max_num_seqs=32)
    books.serve(many(8, prompt=30, tokens=100))
    seen = books.run.engine.ceiling()
    assert seen.ceiling is CEILING
    assert seen.is_learnt
    assert seen.knee == pytest.approx(40 / 3)
    assert seen.operating_tokens == pytest.approx(8, rel=0.1)
    assert seen.operating_seconds == pytest.approx(0.0045, rel=0.1)
    assert 30 < seen.context < 130
    assert seen.host_seconds == pytest.approx(0.001, rel=0.01)
    counts = [point.num_tokens for point in seen.curve]
    assert counts[0] == 1 and counts[-1] == 64 and counts == sorted(counts)
    for point in seen.curve:
        assert point.predicted_seconds == pytest.approx(point.ideal_seconds, rel=0.4)


def test_what_the_curve_says_beyond_what_was_seen_is_not_quicker_than_the_ceiling():
    class Hopeful:
        is_trained = True

        def predict(self, step):
            return 1e-6

    accountant = Accountant(Roofline(WORK, CEILING), 0.0, cost_model=Hopeful())
    for point in accountant.snapshot().curve:
        assert point.predicted_seconds == point.ideal_seconds > 1e-3


def test_without_a_ceiling_there_are_no_accounts():
    executor = SimulatedExecutor(num_blocks=64, work=WORK)
    run = EngineRun(Scheduler(SchedulerConfig(num_blocks=64, max_model_len=64)), executor)
    assert run.engine.accountant is None
    assert run.engine.totals() is None and run.engine.ceiling() is None


def test_a_request_that_lost_its_seat_or_blocks_knows_when():
    books = Books(num_blocks=20, block_size=4, enable_prefix_caching=False, watermark=0.0)
    ended = []
    books.run.engine.request_observers.append(ended.append)
    books.serve(many(5, prompt=10, tokens=40))
    paused = [timings for timings in ended if timings.pauses]
    assert paused
    assert {timings.request_id for timings in ended if timings.num_preemptions} == {
        timings.request_id for timings in paused
    }
    for timings in paused:
        moments = [moment for pause in timings.pauses for moment in pause]
        assert moments == sorted(moments)
        assert timings.first_scheduled <= moments[0] and moments[-1] <= timings.finished
