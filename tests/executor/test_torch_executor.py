"""The reference executor as the engine sees it: plans in, tokens out."""

from __future__ import annotations

import math

import pytest
import torch

from hotbatch.core.errors import ModelLoadError
from hotbatch.core.plan import PlannedRequest, RequestResult, SampleSpec, StepPlan
from hotbatch.core.sampling_params import SamplingParams
from hotbatch.executor.inputs import pack
from hotbatch.executor.torch_executor import TorchExecutor
from hotbatch.models.loader import load_model

PROMPT = (5, 99, 300, 7, 41, 8, 8, 250, 13)


@pytest.fixture
def executor() -> TorchExecutor:
    return TorchExecutor(load_model("tiny", "dummy"), num_blocks=12, block_size=4)


def ask(
    tokens: tuple[int, ...],
    start: int = 0,
    blocks: tuple[int, ...] = (4, 1, 7, 2, 9),
    **rest: object,
) -> PlannedRequest:
    drafts = int(rest.pop("num_drafts", 0))  # type: ignore[call-overload]
    known = start + len(tokens) - drafts
    options = {"temperature": 0.0, "seed": 3} | rest
    spec = SampleSpec(SamplingParams(**options), 3, known, len(PROMPT))  # type: ignore[arg-type]
    return PlannedRequest("r", start, tokens, blocks, spec, drafts)


def run(executor: TorchExecutor, *requests: PlannedRequest, **plan: object) -> list[RequestResult]:
    return list(executor.run(StepPlan(0, requests, **plan)).requests)  # type: ignore[arg-type]


def generate(executor: TorchExecutor, count: int, **options: object) -> list[int]:
    tokens = list(PROMPT)
    start = 0
    for _ in range(count):
        (result,) = run(executor, ask(tuple(tokens[start:]), start, **options))
        start = len(tokens)
        tokens += result.token_ids
    return tokens[len(PROMPT) :]


def test_info(executor: TorchExecutor) -> None:
    info = executor.info
    assert (info.model_name, info.precision, info.device) == ("tiny", "f32", "cpu")
    assert (info.num_blocks, info.block_size, info.vocab_size) == (12, 4, 512)
    assert info.max_model_len == 2048
    short = TorchExecutor(load_model("tiny", "dummy"), max_model_len=64)
    assert short.info.max_model_len == 64


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_are_lossless(executor: TorchExecutor, temperature: float) -> None:
    """Right drafts are taken, and one more token; after a wrong one its correction ends it."""
    options = {"temperature": temperature}
    plain = generate(executor, 6, **options)
    length = len(PROMPT)
    (first,) = run(executor, ask(PROMPT, **options))
    assert list(first.token_ids) == plain[:1]
    right = ask((plain[0], plain[1], plain[2]), length, num_drafts=2, **options)
    assert list(run(executor, right)[0].token_ids) == plain[1:4]
    wrong = ask((plain[0], plain[1], (plain[2] + 1) % 512), length, num_drafts=2, **options)
    assert list(run(executor, wrong)[0].token_ids) == plain[1:3]
    # The rejected draft left its keys in the cache; going on overwrites them.
    onward = ask((plain[2],), length + 2, **options)
    assert list(run(executor, onward)[0].token_ids) == plain[3:4]


def test_sampled_tokens_differ_by_seed_position_not_by_neighbours(executor: TorchExecutor) -> None:
    alone = generate(executor, 5, temperature=1.0)
    assert len(set(alone)) > 1
    request = ask(PROMPT, temperature=1.0)
    other = ask((1, 2, 3), blocks=(0,))._replace(request_id="other")
    assert run(executor, other, request)[1].token_ids == (alone[0],)


def test_logprobs_are_those_of_the_raw_logits(executor: TorchExecutor) -> None:
    request = ask(PROMPT, temperature=0.0, logprobs=3, logit_bias=((11, 100.0),))
    logits = executor.logits(pack(StepPlan(0, (request,)), 4))[0]
    expected = logits.log_softmax(dim=0)
    (result,) = run(executor, request)
    assert result.token_ids == (11,)
    (entry,) = result.logprobs
    assert entry.token_id == 11
    assert entry.logprob == pytest.approx(float(expected[11]), abs=1e-5)
    assert entry.rank == 1 + int((expected > expected[11]).sum())
    best = expected.topk(3)
    assert [token for token, _ in entry.top] == best.indices.tolist()
    assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_prompt_logprobs_do_not_depend_on_chunks(executor: TorchExecutor) -> None:
    def scored(start: int, end: int) -> PlannedRequest:
        request = ask(PROMPT[start:end], start)
        return request._replace(
            sample=request.sample if end == len(PROMPT) else None,
            prompt_logprobs=2,
            next_tokens=PROMPT[start + 1 : end + 1],
        )

    (whole,) = run(executor, scored(0, 9))
    assert len(whole.prompt_logprobs) == 8 and len(whole.token_ids) == 1
    assert [entry.token_id for entry in whole.prompt_logprobs] == list(PROMPT[1:])
    assert all(len(entry.top) == 2 and entry.logprob < 0 for entry in whole.prompt_logprobs)
    pieces = [run(executor, scored(*ends))[0] for ends in ((0, 4), (4, 5), (5, 9))]
    joined = [entry for piece in pieces for entry in piece.prompt_logprobs]
    assert [entry.logprob for entry in joined] == pytest.approx(
        [entry.logprob for entry in whole.prompt_logprobs], abs=1e-5
    )
    assert pieces[-1].token_ids == whole.token_ids


def test_block_copies_come_first(executor: TorchExecutor) -> None:
    expected = generate(executor, 2)
    run(executor, ask(PROMPT))
    # 9 prompt tokens: two full blocks (4, 1) and one token in block 7, copied to block 10.
    moved = ask((expected[0],), len(PROMPT), blocks=(4, 1, 10))
    assert run(executor, moved, copies=((7, 10),))[0].token_ids == (expected[1],)


def test_shared_prefix_blocks_are_read_by_both(executor: TorchExecutor) -> None:
    expected = generate(executor, 1)
    run(executor, ask(PROMPT[:8]))
    second = ask(PROMPT[8:], 8, blocks=(4, 1, 11))
    assert list(run(executor, second)[0].token_ids) == expected


def test_broken_logits_fail_one_request(executor: TorchExecutor) -> None:
    # Position 0 alone is poisoned: only the sequence which reads that block sees it.
    run(executor, ask(PROMPT[:4], blocks=(4,)))
    executor.kv_caches[0][1][4] = math.nan
    poisoned = ask((1,), 4, blocks=(4, 5))
    healthy = ask((1, 2), 0, blocks=(6,))
    bad, good = run(executor, poisoned, healthy)
    assert bad.token_ids == () and bad.error
    assert len(good.token_ids) == 1 and good.error is None


def test_empty_plan(executor: TorchExecutor) -> None:
    result = executor.run(StepPlan(9, ()))
    assert (result.step_id, result.requests) == (9, ())


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"precision": "fp3"}, "precision"),
        ({"kv_dtype": "int2"}, "kv_dtype"),
        ({"device": "abacus"}, "device"),
    ],
)
def test_bad_options_are_named(options: dict[str, str], param: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        TorchExecutor(load_model("tiny", "dummy"), **options)  # type: ignore[arg-type]
    assert caught.value.param == param


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has a CUDA device")
def test_missing_cuda_is_explained() -> None:
    with pytest.raises(ModelLoadError, match="No CUDA device"):
        TorchExecutor(load_model("tiny", "dummy"), "cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["f32", "bf16", "int8", "int4"])
def test_cuda_agrees_with_cpu(precision: str) -> None:
    model = load_model("tiny", "dummy")
    request = ask(PROMPT)
    inputs = pack(StepPlan(0, (request,)), 4)
    cpu, cuda = (
        TorchExecutor(model, device, precision, num_blocks=12, block_size=4).logits(inputs).cpu()
        for device in ("cpu", "cuda")
    )
    torch.testing.assert_close(cpu, cuda, atol=2e-3, rtol=2e-3)
