"""Packing a plan into flat arrays, and cutting results out of sampled rows."""

from __future__ import annotations

import numpy as np
import pytest

from hotbatch.core.plan import PlannedRequest, SampleSpec, StepPlan, TokenLogprob
from hotbatch.core.sampling_params import SamplingParams
from hotbatch.executor.inputs import pack
from hotbatch.executor.results import (
    NO_TOKEN,
    LogprobRows,
    collect,
    num_prompt_top,
    num_sample_top,
    prompt_rows,
    sample_rows,
)


def spec(position: int, num_prompt: int = 3, **options: object) -> SampleSpec:
    extra = {key: options.pop(key) for key in ("history", "banned") if key in options}
    return SampleSpec(SamplingParams(**options), 7, position, num_prompt, **extra)  # type: ignore[arg-type]


def plan_of(*requests: PlannedRequest) -> StepPlan:
    return StepPlan(4, requests)


# A whole prompt, a chunk without an end, a decode with two drafts, a scored prompt in two rows.
MIXED = plan_of(
    PlannedRequest("whole", 0, (1, 2, 3, 4, 5), (3, 4), spec(5)),
    PlannedRequest("chunk", 6, (9,), (7, 8, 2), None),
    PlannedRequest("drafts", 4, (9, 8, 7), (5, 6), spec(5, logprobs=1), 2),
    PlannedRequest("scored", 0, (1, 2, 3), (9,), spec(3), 0, 2, (2, 3)),
)


def test_pack_lays_requests_out_one_after_another() -> None:
    inputs = pack(MIXED, block_size=4)
    expected = {
        "token_ids": [1, 2, 3, 4, 5, 9, 9, 8, 7, 1, 2, 3],
        "positions": [0, 1, 2, 3, 4, 6, 4, 5, 6, 0, 1, 2],
        "slots": [12, 13, 14, 15, 16, 34, 24, 25, 26, 36, 37, 38],
        "seq_starts": [0, 5, 6, 9, 12],
        "context_lens": [5, 7, 7, 3],
        "block_table": [[3, 4, 0], [7, 8, 2], [5, 6, 0], [9, 0, 0]],
        "logit_rows": [4, 6, 7, 8, 9, 10, 11],
        "logit_starts": [0, 1, 1, 4, 7],
    }
    for name, values in expected.items():
        array = getattr(inputs, name)
        assert array.dtype == np.int32 and array.flags.c_contiguous, name
        assert array.tolist() == values, name
    assert (inputs.num_tokens, inputs.num_requests) == (12, 4)


def test_pack_of_an_empty_plan() -> None:
    inputs = pack(plan_of(), block_size=4)
    assert inputs.num_tokens == inputs.num_requests == len(inputs.logit_rows) == 0
    assert inputs.seq_starts.tolist() == inputs.logit_starts.tolist() == [0]


def test_rows_to_sample_and_to_score() -> None:
    inputs = pack(MIXED, block_size=4)
    rows = sample_rows(MIXED, inputs)
    assert [(row.logit_row, row.position) for row in rows] == [
        (0, 5),
        (1, 5),
        (2, 6),
        (3, 7),
        (6, 3),
    ]
    logit_rows, targets = prompt_rows(MIXED, inputs)
    assert (logit_rows.tolist(), targets.tolist()) == ([4, 5], [2, 3])
    assert (num_sample_top(MIXED), num_prompt_top(MIXED)) == (1, 2)


def test_prompt_chunk_is_scored_without_being_sampled() -> None:
    plan = plan_of(PlannedRequest("a", 2, (5, 6), (0,), None, 0, 0, (6, 7)))
    inputs = pack(plan, block_size=4)
    assert inputs.logit_rows.tolist() == [0, 1]
    assert sample_rows(plan, inputs) == []
    assert prompt_rows(plan, inputs)[1].tolist() == [6, 7]


def test_draft_rows_see_what_a_later_step_would() -> None:
    """History grows by the drafts before, and bans end when min_tokens is reached."""
    ask = spec(4, min_tokens=3, presence_penalty=1.0, history=(11, 12, 13, 14), banned=(2,))
    plan = plan_of(PlannedRequest("a", 3, (14, 21, 22), (0, 1), ask, 2))
    rows = sample_rows(plan, pack(plan, block_size=4))
    assert [row.history for row in rows] == [
        (11, 12, 13, 14),
        (11, 12, 13, 14, 21),
        (11, 12, 13, 14, 21, 22),
    ]
    # One output token at position 4, so tokens 2, 3 and 4 of the output come from these rows.
    assert [row.banned for row in rows] == [(2,), (2,), ()]


@pytest.mark.parametrize(
    ("sampled", "accepted"),
    [
        ([8, 7, 5], (8, 7, 5)),
        ([8, 6, 5], (8, 6)),
        ([3, 7, 5], (3,)),
    ],
)
def test_drafts_count_up_to_the_first_that_differs(
    sampled: list[int], accepted: tuple[int, ...]
) -> None:
    plan = plan_of(PlannedRequest("drafts", 4, (9, 8, 7), (5, 6), spec(5), 2))
    result = collect(plan, np.array(sampled, np.int32), 0.5)
    assert result.step_id == 4 and result.seconds == 0.5
    assert result.requests[0].token_ids == accepted


def test_collect_gives_each_request_its_own_rows() -> None:
    sampled = np.array([40, 8, 30, 31, 50], np.int32)
    columns = np.arange(5, dtype=np.float32)
    tops = np.stack([columns, columns + 10], axis=1)
    logprobs = LogprobRows(-columns, columns.astype(np.int32), tops.astype(np.int32), -tops)
    scored = LogprobRows(
        np.array([-0.5, -1.5], np.float32),
        np.array([1, 3], np.int32),
        np.array([[2, 6], [7, 8]], np.int32),
        np.array([[-0.5, -1.0], [-0.25, -1.25]], np.float32),
    )
    whole, chunk, drafts, prompt = collect(MIXED, sampled, 0.0, logprobs, scored).requests
    assert (whole.token_ids, whole.logprobs) == ((40,), ())
    assert (chunk.token_ids, chunk.prompt_logprobs) == ((), ())
    assert drafts.token_ids == (8, 30)
    assert drafts.logprobs == (
        TokenLogprob(8, -1.0, 1, ((1, -1.0),)),
        TokenLogprob(30, -2.0, 2, ((2, -2.0),)),
    )
    assert prompt.token_ids == (50,)
    assert prompt.prompt_logprobs == (
        TokenLogprob(2, -0.5, 1, ((2, -0.5), (6, -1.0))),
        TokenLogprob(3, -1.5, 3, ((7, -0.25), (8, -1.25))),
    )


def test_unusable_logits_fail_their_request_alone() -> None:
    plan = plan_of(
        PlannedRequest("bad", 0, (1,), (0,), spec(1)),
        PlannedRequest("good", 0, (1,), (1,), spec(1)),
    )
    bad, good = collect(plan, np.array([NO_TOKEN, 6], np.int32), 0.0).requests
    assert bad.token_ids == () and "no usable logits" in (bad.error or "")
    assert good.token_ids == (6,) and good.error is None
