"""How the decodes of others take turns beside those of light tenants."""

from __future__ import annotations

from core_factories import LinearCost, full_scheduler, make_request, run_step, sizes

from hotbatch.core import Scheduler
from hotbatch.core.cost_model import StepFeatures


class ByRows(LinearCost):
    """A step takes as long as the table says of its rows; a millisecond for each beyond it."""

    def __init__(self, *milliseconds: float) -> None:
        super().__init__()
        self._milliseconds = (0.0, *milliseconds)

    def predict(self, features: StepFeatures) -> float:
        last = len(self._milliseconds) - 1
        rows = features.num_tokens
        return 0.001 * (self._milliseconds[min(rows, last)] + max(0, rows - last))

    predict_p95 = predict

    def largest_chunk(
        self, base: StepFeatures, start: int, num_uncomputed: int, seconds: float
    ) -> int:
        sizes = range(num_uncomputed, 0, -1)
        return next((n for n in sizes if self.predict(base.plus_chunk(start, n)) <= seconds), 0)


BY_FOURS = (3.0, 4.0, 4.0, 4.0, 4.5, 4.5, 4.5, 4.5)  # the first few more rows are the dearest


def beside_one(cost: ByRows, heavy: int = 7, seats: int = 8) -> Scheduler:
    """One decode of a light tenant and some of a heavy one."""
    scheduler = full_scheduler(
        cost_model=cost, max_num_seqs=seats, max_num_batched_tokens=64, num_blocks=999
    )
    for index in range(heavy):
        scheduler.add(make_request(f"h{index}", 1, tenant="heavy", max_tokens=90))
    scheduler.add(make_request("l0", 1, tenant="light", max_tokens=90))
    while scheduler.stats().prompt_tokens <= heavy:
        run_step(scheduler)
    run_step(scheduler)
    return scheduler


def turns(scheduler: Scheduler, steps: int = 12) -> list[set[str]]:
    return [set(sizes(run_step(scheduler)[0])) for _ in range(steps)]


def test_all_go_on_in_every_second_step_where_some_in_each_would_take_longer() -> None:
    served = turns(beside_one(ByRows(*BY_FOURS)))
    assert all("l0" in step for step in served)
    numbers = [len(step) for step in served]
    assert numbers == [1, 8] * 6 or numbers == [8, 1] * 6
    # Half of them in each step, at 3.75 ms; three of seven at 4 ms, otherwise.


def test_all_go_on_in_every_third_where_every_second_would_take_longer() -> None:
    cost = ByRows(3.0, 4.0, 4.0, 5.2, 5.2, 5.2, 5.2)
    numbers = [len(step) for step in turns(beside_one(cost, heavy=6))]
    assert sorted(numbers[:3]) == [1, 1, 7] and numbers[3:] == numbers[:-3]


def test_some_go_on_in_each_step_where_rows_cost_the_same_or_the_first_are_free() -> None:
    for cost in (ByRows(3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0), ByRows(*[3.0] * 4, *[6.0] * 4)):
        assert set(map(len, turns(beside_one(cost)))) == {4}


def test_nobody_is_left_out_where_the_pace_allows_all() -> None:
    assert set(map(len, turns(beside_one(ByRows(3.0, *[3.4] * 7))))) == {8}


def test_prompts_of_others_have_their_turn_with_the_decodes() -> None:
    scheduler = beside_one(ByRows(*BY_FOURS), heavy=6)
    scheduler.add(make_request("prompt", 60, tenant="heavy"))
    plans = [sizes(run_step(scheduler)[0]) for _ in range(8)]
    for plan in plans:
        assert plan.get("prompt", 0) == (8 if len(plan) > 1 else 0), "for two steps, in one"
    assert sum("prompt" in plan for plan in plans) == 4


def test_who_is_due_soon_goes_on_in_each_step() -> None:
    scheduler = beside_one(ByRows(*BY_FOURS))
    urgent = next(one for one in scheduler._roster.running if one.request_id == "h0")
    for _ in range(6):
        urgent.due = 0.005
        assert {"h0", "l0"} <= set(sizes(run_step(scheduler)[0]))
