"""What several requests begin with is read once, and counted once."""

from __future__ import annotations

from core_factories import LinearCost, make_request, make_scheduler, must_plan, run_step

from hotbatch.core import Request, Scheduler
from hotbatch.core.cost_model import StepFeatures
from hotbatch.core.shared_prefixes import SharedPrefixes
from hotbatch.core.speculation.pricing import Market
from hotbatch.core.step import Step

PROMPT = list(range(100, 116))  # four full blocks


def reader(*blocks: int) -> Request:
    request = make_request(prompt=4 * len(blocks))
    request.block_table = blocks
    return request


def decoding(scheduler: Scheduler) -> StepFeatures:
    """The sums of the next step, all of which decodes."""
    plan = must_plan(scheduler)
    assert plan.mix is not None and plan.mix.all == plan.mix.decode
    return plan.mix.decode


def test_each_counts_what_it_has_beyond_the_others() -> None:
    prefixes = SharedPrefixes(4)
    tree = [reader(1, 2, 3), reader(7), reader(1, 2, 4, 5), reader(1, 6), reader(1, 2, 4, 8)]
    for request in tree:
        prefixes.add(request)
        prefixes.check_integrity(tree[: tree.index(request) + 1])
    assert sum(request.num_shared for request in tree) == 4 * (2 + 1 + 3)
    while tree:
        gone = tree.pop(len(tree) // 2)
        gone.block_table = ()  # they may be taken before the seat is
        prefixes.remove(gone)
        assert gone.num_shared == 0
        prefixes.check_integrity(tree)


def test_a_block_in_common_behind_others_is_not_shared() -> None:
    prefixes = SharedPrefixes(4)
    one, other = reader(1, 3, 5), reader(2, 3, 5)
    prefixes.add(one)
    prefixes.add(other)
    assert (one.num_shared, other.num_shared) == (0, 0)


def test_a_step_reads_a_common_beginning_once_and_attends_to_it_for_each() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [*PROMPT, 1], max_tokens=9))
    run_step(scheduler)
    for name in "bc":
        scheduler.add(make_request(name, [*PROMPT, ord(name)], max_tokens=9))
    plan, _ = run_step(scheduler)
    assert plan.mix is not None
    assert plan.mix.all.context_tokens == 18 + 1 + 1, "a's context; of the others their last token"
    assert plan.mix.decode == StepFeatures(1, 1, 18, 18, 1), "what is left is no negative number"
    assert decoding(scheduler) == StepFeatures(3, 3, 19 + 2 + 2, 19 + 18 + 18, 3)


def test_who_stays_counts_what_the_first_one_did() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [*PROMPT, 1], max_tokens=2))
    run_step(scheduler)
    scheduler.add(make_request("b", [*PROMPT, 2], max_tokens=9))
    run_step(scheduler)
    assert decoding(scheduler).context_tokens == 18, "a has ended"


def test_samples_of_one_prompt_share_it() -> None:
    scheduler = make_scheduler(enable_prefix_caching=False)
    for name in "abc":
        scheduler.add(make_request(name, [*PROMPT, 1], group_id="g", seed=ord(name), max_tokens=9))
    run_step(scheduler)
    run_step(scheduler)
    features = decoding(scheduler)
    assert features.attended - features.context_tokens == 2 * len(PROMPT)


def test_a_decoded_token_is_priced_by_what_is_read() -> None:
    class ByReads(LinearCost):
        def predict(self, features: StepFeatures) -> float:
            return float(features.context_tokens)

        def added_seconds(
            self, base: StepFeatures, context: int, first: int, last: int
        ) -> list[float]:
            return [0.0] * (last + 1 - first)

    step = Step(budget=9)
    for shared in (0, 16):
        request = make_request(prompt=19)
        request.tokens.append(1)
        request.num_computed, request.num_shared = 19, shared
        step.enter_decodes([request])
    assert Market(ByReads(), step).seconds_a_token == (20 + 4) / 2
    assert Market(ByReads(), step, num_expected=4).seconds_a_token == (20 + 4) / 2


def test_leaving_a_decode_out_saves_what_it_alone_reads() -> None:
    decodes = StepFeatures(2, 2, 24, 40, 2)
    assert decodes.plus_decode(20, -1, 16) == StepFeatures(1, 1, 20, 20, 1)
