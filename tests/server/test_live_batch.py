"""The fold: what frames say of requests, however many steps lie between two of them."""

from __future__ import annotations

from hotbatch.core.plan import (
    FinishReason,
    PlannedRequest,
    Preemption,
    RequestResult,
    SampleSpec,
    StepPlan,
    StepResult,
)
from hotbatch.core.sampling_params import SamplingParams
from hotbatch.core.service_class import NO_TARGETS, ServiceClass
from hotbatch.engine.step_stats import RequestTimings, StepStats
from hotbatch.engine.step_trace import Promise, StepTrace
from hotbatch.server.live_batch import (
    CUT,
    DONE,
    EVICTED,
    FAILED,
    LANE_FIELDS,
    PAUSED,
    RUNNING,
    LiveBatch,
)

PROMPT = 10
PARAMS = SamplingParams()


def part(
    request_id: str, start: int, size: int, *, drafts: int = 0, sampled: bool = True
) -> PlannedRequest:
    spec = SampleSpec(PARAMS, 0, start + size - drafts, PROMPT) if sampled else None
    return PlannedRequest(request_id, start, (7,) * size, (), spec, drafts)


def trace(
    *parts: tuple[PlannedRequest, int],
    at: float = 0.0,
    seconds: float = 0.01,
    failed: bool = False,
    **plan: tuple[object, ...],
) -> StepTrace:
    """A step of these parts, each with the number of tokens it yielded."""
    requests = tuple(planned for planned, _ in parts)
    step_plan = StepPlan(0, requests, **plan)  # type: ignore[arg-type]
    results = tuple(RequestResult(p.request_id, (5,) * count) for p, count in parts)
    num_tokens = step_plan.num_tokens
    num_decode = sum(len(p.tokens) for p in requests if p.start >= PROMPT)
    stats = StepStats(
        step_id=0,
        started=at,
        plan_seconds=0.001,
        execute_seconds=seconds,
        commit_seconds=0.001,
        deliver_seconds=0.0,
        num_requests=len(requests),
        num_tokens=num_tokens,
        num_prompt_tokens=num_tokens - num_decode,
        num_decode_tokens=num_decode,
        num_sampled_tokens=sum(count for _, count in parts),
        num_running=0,
        num_waiting=0,
        blocks_used=0,
        blocks_total=1,
        num_preemptions=0,
        predicted_seconds=None,
        time_to_first_token=(),
        inter_token=(),
        failed=failed,
    )
    return StepTrace(step_plan, None if failed else StepResult(0, results, seconds), stats)


def ended(
    request_id: str, reason: FinishReason, service_class: ServiceClass = ServiceClass.STANDARD
) -> RequestTimings:
    return RequestTimings(
        request_id, 0.0, 0.0, 0.0, 0.0, 1.0, PROMPT, 1, 0, 0, reason, service_class
    )


def batch_of(**classes: ServiceClass) -> LiveBatch:
    """Knows these requests, which all arrived at 0."""

    def lookup(request_id: str) -> Promise | None:
        known = classes.get(request_id)
        return None if known is None else Promise(0.0, PROMPT, known, NO_TARGETS)

    return LiveBatch(lookup, ("mine-",))


def lanes(frame: dict[str, object]) -> list[dict[str, int]]:
    flat = frame["lanes"]
    assert isinstance(flat, list)
    size = len(LANE_FIELDS)
    return [
        dict(zip(LANE_FIELDS, flat[at : at + size], strict=True))
        for at in range(0, len(flat), size)
    ]


def test_a_frame_sums_up_its_steps() -> None:
    batch = batch_of(a=ServiceClass.INTERACTIVE)
    batch.note_step(trace((part("a", 0, 6, sampled=False), 0)))
    batch.note_step(trace((part("a", 6, 4), 1), at=0.02))
    batch.note_step(trace((part("a", 10, 1), 1), at=0.04))
    batch.note_step(trace((part("a", 11, 1), 1), at=0.06))
    frame = batch.take_frame()
    assert lanes(frame) == [
        {
            "number": 0,
            "class": int(ServiceClass.INTERACTIVE),
            "state": RUNNING,
            "prompt": 10,
            "decode": 2,
            "drafts": 0,
            "accepted": 0,
            "context": 12,
        }
    ]
    assert frame["span"] == (0.0, 0.071)
    [again] = lanes(batch.take_frame())
    assert (again["prompt"], again["decode"], again["context"]) == (0, 0, 12)
    assert "span" not in batch.take_frame()


def test_recomputing_after_an_eviction_is_reading() -> None:
    batch = batch_of(a=ServiceClass.STANDARD)
    batch.note_step(trace((part("a", 0, 14), 1)))
    [lane] = lanes(batch.take_frame())
    assert (lane["prompt"], lane["decode"]) == (14, 0)


def test_drafts_are_told_apart() -> None:
    batch = batch_of(a=ServiceClass.STANDARD)
    batch.note_step(trace((part("a", 10, 4, drafts=3), 3)))
    batch.note_step(trace((part("a", 13, 4, drafts=3), 1)))
    [lane] = lanes(batch.take_frame())
    assert (lane["decode"], lane["drafts"], lane["accepted"]) == (4, 6, 2)


def test_who_is_paused_or_evicted_stays_so_until_it_computes() -> None:
    batch = batch_of(a=ServiceClass.BATCH, b=ServiceClass.BATCH, c=ServiceClass.BATCH)
    batch.note_step(trace(*[(part(name, 10, 1), 1) for name in "abc"]))
    batch.note_step(
        trace(
            paused=("a", "c"),
            preempted=(Preemption("b", "no room"), Preemption("c", "gave some", True)),
        )
    )
    assert [lane["state"] for lane in lanes(batch.take_frame())] == [PAUSED, EVICTED, PAUSED]
    assert [lane["state"] for lane in lanes(batch.take_frame())] == [PAUSED, EVICTED, PAUSED]
    batch.note_step(trace((part("a", 11, 1), 1), (part("b", 0, 11), 1)))
    states = [lane["state"] for lane in lanes(batch.take_frame())]
    assert states == [RUNNING, RUNNING, PAUSED]


def test_an_ended_lane_is_told_once_more() -> None:
    batch = batch_of(a=ServiceClass.STANDARD, b=ServiceClass.STANDARD, c=ServiceClass.STANDARD)
    batch.note_step(trace(*[(part(name, 10, 1), 1) for name in "abc"]))
    batch.take_frame()
    batch.note_end(ended("a", FinishReason.LENGTH))
    batch.note_end(ended("b", FinishReason.ABORT))
    batch.note_end(ended("c", FinishReason.ERROR))
    batch.note_step(trace((part("a", 11, 1), 1)))
    frame = batch.take_frame()
    assert [lane["state"] for lane in lanes(frame)] == [DONE, CUT, FAILED]
    assert lanes(frame)[0]["decode"] == 1
    assert lanes(batch.take_frame()) == []


def test_who_never_had_a_seat_never_had_a_lane() -> None:
    batch = batch_of()
    batch.note_end(ended("a", FinishReason.ABORT))
    assert lanes(batch.take_frame()) == []


def test_a_request_of_one_step_has_its_class() -> None:
    """It has ended before its only step is told, so the engine does not know it any more."""
    batch = batch_of()
    batch.note_end(ended("a", FinishReason.STOP, ServiceClass.INTERACTIVE))
    batch.note_step(trace((part("a", 0, 10), 1)))
    [lane] = lanes(batch.take_frame())
    assert (lane["class"], lane["state"]) == (int(ServiceClass.INTERACTIVE), DONE)


def test_only_marked_ids_are_published() -> None:
    """And only for a while, in case a frame is missed."""
    batch = batch_of()
    batch.note_step(trace((part("mine-1", 10, 1), 1), (part("other-1", 10, 1), 1)))
    named = [batch.take_frame()["named"] for _ in range(20)]
    assert named == [[(0, "mine-1")]] * 10 + [[]] * 10


def test_numbers_are_not_used_again() -> None:
    batch = batch_of()
    numbers = []
    for _ in range(3):
        batch.note_step(trace((part("a", 10, 1), 1)))
        batch.note_end(ended("a", FinishReason.STOP))
        numbers.append(lanes(batch.take_frame())[0]["number"])
    assert numbers == [0, 1, 2]


def test_latencies_by_class() -> None:
    batch = batch_of(a=ServiceClass.INTERACTIVE, b=ServiceClass.BATCH)
    batch.note_step(trace((part("a", 0, 10), 1), at=0.1, seconds=0.1))
    batch.note_step(trace((part("a", 10, 1), 1), at=0.301, seconds=0.0))
    batch.note_step(trace((part("a", 11, 3, drafts=2), 2), at=0.5, seconds=0.001))
    batch.note_step(trace((part("b", 12, 1), 1), at=0.6))  # its first token was before
    told = batch.latencies(1.0)
    assert told[ServiceClass.INTERACTIVE] == ((201.0, 201.0), (100.0, 100.0))
    assert told[ServiceClass.STANDARD] == told[ServiceClass.BATCH] == (None, None)
    assert batch.latencies(100.0)[ServiceClass.INTERACTIVE] == (None, None)


def test_a_failed_step_computes_nothing() -> None:
    batch = batch_of(a=ServiceClass.STANDARD)
    batch.note_step(trace((part("a", 0, 10), 0), failed=True))
    frame = batch.take_frame()
    assert lanes(frame)[0]["prompt"] == 0
    assert frame["points"] == []
    assert batch.totals()["failed"] == 1


def test_totals_and_points() -> None:
    batch = batch_of()
    for number in range(9):
        batch.note_step(trace((part("a", 10, 1), 1), seconds=number / 1000))
    batch.note_step(trace((part("b", 0, 8), 1), seconds=0.5))
    points = batch.take_frame()["points"]
    assert points == [(1, 6.0, 0), (1, 7.0, 0), (1, 8.0, 0), (8, 500.0, 1)]
    totals = batch.totals()
    assert totals["steps"] == totals["sampled_tokens"] == 10
    assert (totals["prompt_tokens"], totals["decode_tokens"]) == (8, 9)
    assert (totals["prompt_seconds"], totals["decode_seconds"]) == (0.5, 0.036)
    batch.take_frame()
    assert batch.totals() == totals


def test_lanes_whose_end_was_missed_are_dropped() -> None:
    batch = batch_of(b=ServiceClass.STANDARD)
    batch.note_step(trace((part("a", 10, 1), 1), (part("b", 10, 1), 1)))
    batch.forget_lost()
    assert [lane["number"] for lane in lanes(batch.take_frame())] == [1]
