"""The cost model against machines whose step times are known."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotbatch.core.cost_model import CostModel, StepFeatures
from hotbatch.core.least_squares import RecentQuantiles, RecursiveLeastSquares
from hotbatch.core.plan import PlannedRequest, SampleSpec, StepPlan
from hotbatch.core.sampling_params import SamplingParams
from hotbatch.simulator.step_time import RooflineStepTime

Machine = Callable[[StepFeatures], float]


def roofline(step: StepFeatures) -> float:
    """What RooflineStepTime says, without the plan (see the first test)."""
    model = RooflineStepTime()
    memory = model.weights + model.per_context_token * step.context_tokens
    return model.overhead + max(memory, model.per_token * step.num_tokens)


def layered(step: StepFeatures) -> float:
    """A machine that does one thing after the other: its time is a sum of maxima."""
    linear = max(0.006, 0.002 + 0.001 * step.num_tokens)
    attention = max(2e-7 * step.context_tokens, 1e-7 * step.attended)
    return 0.0004 + linear + attention + 0.0002 * step.num_sampled


def toothed(step: StepFeatures) -> float:
    """Kernels that compute eight rows in the time of one."""
    return layered(step._replace(num_tokens=-(-step.num_tokens // 8) * 8))


def mixed_load(rng: random.Random, num_steps: int, max_running: int = 64) -> Iterator[StepFeatures]:
    """Steps of a server under changing load: decodes, and prompts in chunks beside them."""
    running: list[int] = []
    prompts: list[list[int]] = []
    for _ in range(num_steps):
        if rng.random() < 0.15 and len(running) < max_running:
            prompts.append([0, rng.choice([20, 100, 300, 900, 2000])])
        step = StepFeatures()
        for context in running:
            step = step.plus_decode(context)
        for prompt in list(prompts):
            size = min(512 - step.num_tokens, prompt[1] - prompt[0])
            if size <= 0:
                break
            ends = prompt[0] + size == prompt[1]
            step = step.plus_chunk(prompt[0], size, int(ends))
            prompt[0] += size
            if ends:
                prompts.remove(prompt)
                running.append(prompt[1])
        running = [context + 1 for context in running if rng.random() > 0.01]
        if step.num_tokens:
            yield step


def trained(machine: Machine, *, seed: int = 0, num_steps: int = 1500) -> CostModel:
    rng = random.Random(seed)
    model = CostModel()
    for step in mixed_load(rng, num_steps):
        model.observe(step, machine(step) * math.exp(rng.gauss(0.0, 0.02)))
    return model


def make_plan(*shares: tuple[int, int, bool]) -> StepPlan:
    """A plan of (start, number of tokens, whether it is sampled)."""
    sample = SampleSpec(SamplingParams(), 0, 0, 1)
    return StepPlan(
        0,
        tuple(
            PlannedRequest(str(i), start, (1,) * size, (), sample if sampled else None)
            for i, (start, size, sampled) in enumerate(shares)
        ),
    )


def test_features_of_a_plan_equal_those_added_one_by_one() -> None:
    plan = make_plan((9, 1, True), (4, 1, True), (10, 5, False), (0, 3, True))
    step = StepFeatures().plus_decode(10).plus_decode(5).plus_chunk(10, 5).plus_chunk(0, 3, 1)
    assert StepFeatures.of_plan(plan) == step
    # 10 + 5, then 11..15, then 1..3
    assert step == StepFeatures(10, 4, 10 + 5 + 15 + 3, 15 + 65 + 6, 3)
    assert roofline(step) == RooflineStepTime()(plan)


@pytest.mark.parametrize("machine", [roofline, layered, toothed])
@pytest.mark.parametrize("seed", range(3))
def test_errors_are_small_on_mixed_load_with_noise(machine: Machine, seed: int) -> None:
    rng = random.Random(seed)
    model = CostModel()
    kinds: dict[bool, list[float]] = {True: [], False: []}
    kept = []
    for index, step in enumerate(mixed_load(rng, 3000)):
        seconds = machine(step) * math.exp(rng.gauss(0.0, 0.03))
        if rng.random() < 0.01:
            seconds *= rng.uniform(2.0, 6.0)  # the machine was busy
        if index >= 300:
            predicted = model.predict(step)
            kinds[step.is_decode_only].append(abs(predicted - machine(step)) / machine(step))
            kept.append(seconds <= model.predict_p95(step))
        model.observe(step, seconds)
    for errors in kinds.values():
        errors.sort()
        assert errors[len(errors) // 2] < 0.05
        assert errors[int(0.95 * len(errors))] < 0.20
    reported = model.errors()
    assert reported.median < 0.08
    assert reported.p95 < 0.20
    assert 0.92 < sum(kept) / len(kept) < 0.98


def test_the_teeth_of_small_steps_are_learnt() -> None:
    model = CostModel()
    steps = [StepFeatures(n, n, 200 * n, 200 * n, n) for n in range(1, 41)]
    for _ in range(150):
        for step in steps:
            model.observe(step, toothed(step))
    for step in steps:
        assert model.predict(step) == pytest.approx(toothed(step), rel=0.05)


def long_prompt(machine: Machine, model: CostModel, rng: random.Random) -> StepFeatures:
    """Eight that decode, half of the time beside a prompt of 4,000 tokens in small parts, as often
    as it takes; returns the step of the eight at the end of the last prompt."""
    for _ in range(5):
        context = 64
        done = 0
        while context < 900:
            step = StepFeatures(8, 8, 8 * context, 8 * context, 8)
            if context > 400 and done < 4000:
                step = step.plus_chunk(done, 16)
                done += 16
            model.observe(step, machine(step) * math.exp(rng.gauss(0.0, 0.02)))
            context += 1
            if done == 4000:
                break
    return StepFeatures(8, 8, 8 * context, 8 * context, 8)


def test_what_decodes_cost_is_known_at_the_end_of_a_long_prompt_too() -> None:
    """Hundreds of steps with a part of a prompt, none without, and contexts that grew meanwhile."""
    rng = random.Random(5)
    model = trained(layered)
    decodes = long_prompt(layered, model, rng)
    assert model.predict(decodes) == pytest.approx(layered(decodes), rel=0.08)


def test_before_and_after_the_first_observations() -> None:
    model = CostModel()
    step = StepFeatures(8, 8, 800, 800, 8)
    assert model.predict(step) == model.predict_p95(step) == 0.0
    assert not model.is_trained
    assert model.errors() == (0.0, 0.0)
    model.observe(step, 0.01)
    assert model.predict(step) == pytest.approx(0.01, rel=0.01)
    for _ in range(100):
        model.observe(step, 0.01)
    assert not model.is_trained, "no part of a prompt was seen yet"
    for _ in range(4):
        model.observe(step.plus_chunk(0, 100), 0.05)
    assert model.is_trained


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_impossible_times_are_ignored(seconds: float) -> None:
    model = trained(layered, num_steps=200)
    step = StepFeatures(8, 8, 800, 800, 8)
    before = model.predict(step)
    model.observe(step, seconds)
    assert model.predict(step) == before


def test_one_outlier_moves_little() -> None:
    model = trained(layered)
    step = StepFeatures(20, 20, 4000, 4000, 20)
    before = model.predict(step)
    model.observe(step, 100 * before)
    assert model.predict(step) == pytest.approx(before, rel=0.08)


@pytest.mark.parametrize("factor", [0.2, 5.0])
def test_a_changed_machine_is_followed_within_some_steps(factor: float) -> None:
    model = trained(layered)
    errors = []
    for step in mixed_load(random.Random(9), 200):
        seconds = factor * layered(step)
        errors.append(abs(model.predict(step) - seconds) / seconds)
        model.observe(step, seconds)
    assert sorted(errors[40:])[len(errors[40:]) // 2] < 0.10


def gently_rising(step: StepFeatures) -> float:
    """A machine on which the next row is cheap."""
    rows = 0.003 + 0.00012 * step.num_tokens + 0.00004 * max(0, step.num_tokens - 16)
    return rows + 1e-7 * step.context_tokens + 2e-9 * step.attended + 2e-5 * step.num_sampled


@pytest.mark.parametrize(
    ("slower", "steps"), [(3.0, 20), (3.0, 100), (3.0, 400), (1.5, 100), (0.4, 200)]
)
@pytest.mark.parametrize("number", [8, 32])
def test_a_slow_moment_leaves_no_other_prices_behind(
    number: int, slower: float, steps: int
) -> None:
    """What is seen while all steps take longer must not look dear, or cheap, beside the rest when
    it is over: neither the next rows of a small batch, in the table, nor those of a large one."""
    rng = random.Random(1)
    model = CostModel()
    base = StepFeatures(number, number, 250 * number, 250 * number, number)

    def run(num_steps: int, factor: float) -> None:
        for _ in range(num_steps):
            drafts = rng.choice([0, 2, 4, 8, 16, 24])
            step = base.plus(StepFeatures(drafts, 0, 0, 250 * drafts, drafts))
            if rng.random() < 0.15:
                step = step.plus_chunk(0, rng.choice([16, 40, 100, 200]))
            noise = math.exp(rng.gauss(0.0, 0.03))
            model.observe(step, factor * gently_rising(step) * noise)

    run(600, 1.0)
    run(steps, slower)
    for _ in range(10):
        run(10, 1.0)
        for rows in (4, 16):
            added = model.added_seconds(base, 250, rows, rows)[0] / model.predict(base)
            more = base.plus(StepFeatures(rows, 0, 0, 250 * rows, rows))
            real = gently_rising(more) / gently_rising(base) - 1.0
            assert added == pytest.approx(real, rel=0.35)


def test_chunks_are_not_forgotten_during_a_long_time_of_decodes() -> None:
    model = trained(layered)
    rng = random.Random(4)
    chunk = StepFeatures().plus_decode(500).plus_chunk(0, 400, 1)
    for _ in range(5000):
        step = StepFeatures()
        for _ in range(rng.randrange(1, 32)):
            step = step.plus_decode(rng.randrange(100, 1000))
        model.observe(step, layered(step) * math.exp(rng.gauss(0.0, 0.02)))
    assert model.predict(chunk) == pytest.approx(layered(chunk), rel=0.15)


@pytest.mark.parametrize("machine", [roofline, layered])
def test_largest_chunk_is_the_largest_that_fits(machine: Machine) -> None:
    model = trained(machine)
    base = StepFeatures()
    for context in range(100, 900, 100):
        base = base.plus_decode(context)
    sizes = []
    for seconds in (0.001, 0.02, 0.05, 0.1, 0.3, 10.0):
        size = model.largest_chunk(base, 64, 1000, seconds)
        sizes.append(size)
        by_search = [
            n
            for n in range(1, 1001)
            if model.predict_p95(base.plus_chunk(64, n, int(n == 1000))) <= seconds
        ]
        assert size == max(by_search, default=0)
    assert sizes == sorted(sizes)
    assert sizes[0] == 0
    assert sizes[-1] == 1000
    assert model.largest_chunk(base, 64, 0, 10.0) == 0


_step = st.builds(
    lambda n, ctx, chunk, start, sampled: StepFeatures(n, n, n * ctx, n * ctx, n).plus_chunk(
        start, chunk, sampled
    ),
    st.integers(0, 300),
    st.integers(1, 100_000),
    st.integers(1, 4096),
    st.integers(0, 100_000),
    st.integers(0, 1),
)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(_step, st.floats(1e-7, 1e3)), max_size=80),
    _step,
)
def test_whatever_it_sees_predictions_are_sane(
    seen: list[tuple[StepFeatures, float]], asked: StepFeatures
) -> None:
    """Positive, finite, and never less for a longer chunk."""
    model = CostModel()
    for step, seconds in seen:
        model.observe(step, seconds)
    previous = 0.0
    for size in (1, 2, 5, 8, 9, 50, 200, 513, 4000):
        predicted = model.predict(asked.plus_chunk(100, size))
        assert math.isfinite(predicted)
        assert predicted >= previous * (1 - 1e-9)
        assert model.predict_p95(asked.plus_chunk(100, size)) >= predicted
        if seen:
            assert predicted > 0.0
        previous = predicted


def test_recursive_least_squares_equals_the_batch_solution() -> None:
    rng = random.Random(0)
    truth = [0.5, -2.0, 3.0]
    fit = RecursiveLeastSquares(3, forgetting=1.0, prior=1e6)
    for _ in range(200):
        x = [1.0, rng.uniform(-1, 1), rng.uniform(0, 5)]
        fit.update(x, sum(a * b for a, b in zip(truth, x, strict=True)))
    assert fit.theta == pytest.approx(truth, abs=1e-4)


def test_what_is_observed_is_followed_and_what_is_not_stays_as_well_known_as_it_was() -> None:
    fit = RecursiveLeastSquares(2, forgetting=0.99, prior=1e3)
    for _ in range(100):
        fit.update([1.0, 0.0], 1.0)
        fit.update([0.0, 1.0], 2.0)
    for _ in range(2000):
        fit.update([1.0, 0.0], 1.5)  # the first changed; the second is not seen
    assert fit.theta == pytest.approx([1.5, 2.0], abs=0.02)
    fit.update([1.0, 1.0], 4.5)  # one that was off by one
    assert fit.theta[1] == pytest.approx(2.0, abs=0.1)
    for _ in range(1000):
        fit.update([1.0, 1.0], 4.5)  # and it was no accident
    assert sum(fit.theta) == pytest.approx(4.5, abs=0.02)


def test_lifting_holds_a_bound_and_leaves_what_is_observed() -> None:
    fit = RecursiveLeastSquares(2, forgetting=1.0, prior=1.0)
    for _ in range(100):
        fit.update([1.0, 1.0], 1.0)  # only the sum is observed
    fit.theta[1] -= 0.7
    fit.theta[0] += 0.7
    fit.lift([0.0, 1.0])
    assert fit.theta[1] == pytest.approx(0.0, abs=1e-12)
    assert sum(fit.theta) == pytest.approx(1.0, abs=0.02)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.integers(1, 20), st.floats(0.0, 1.0))
def test_recent_quantiles_equal_sorting_the_window(
    values: list[float], size: int, share: float
) -> None:
    window = RecentQuantiles(size)
    for value in values:
        window.add(value)
    recent = sorted(values[-size:])
    assert len(window) == len(recent)
    assert window.quantile(share) == recent[min(int(share * len(recent)), len(recent) - 1)]
