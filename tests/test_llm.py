"""The Python interface, on the simulated machine: its tokens are known beforehand."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator

import pytest

from hotbatch.core.config import SchedulerConfig
from hotbatch.core.errors import (
    ContextLengthError,
    EngineStoppedError,
    HotbatchError,
    InvalidRequestError,
)
from hotbatch.core.request import Request
from hotbatch.core.sampling_params import SamplingParams
from hotbatch.core.scheduler import Scheduler
from hotbatch.core.service_class import class_of
from hotbatch.engine import Engine, child_seed
from hotbatch.llm import LLM, AsyncLLM, RequestOutput
from hotbatch.simulator import SimulatedExecutor, TokenModel
from hotbatch.text import ChatTemplate
from hotbatch.text.made_up import made_up_tokenizer

VOCABULARY = 1000
TOKENIZER = made_up_tokenizer(VOCABULARY)
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


def make_engine(*, eos_probability: float = 0.0, **options: object) -> Engine:
    model = TokenModel(VOCABULARY, eos_token_id=999, eos_probability=eos_probability)
    executor = SimulatedExecutor(
        num_blocks=64, block_size=4, max_model_len=128, model=model, **options
    )
    scheduler = Scheduler(SchedulerConfig(num_blocks=64, block_size=4, max_model_len=128))
    return Engine(scheduler, executor)


def make_llm(engine: Engine | None = None, **options: object) -> LLM:
    options = {"eos_token_ids": frozenset({999}), **options}
    return LLM.from_parts(engine or make_engine(), TOKENIZER, **options)


@pytest.fixture
def llm() -> Iterator[LLM]:
    with make_llm() as llm:
        yield llm
        assert llm._parts.engine.num_outstanding == 0


def solo_tokens(prompt: str | list[int], params: SamplingParams, seed: int = 0) -> list[int]:
    ids = TOKENIZER.encode(prompt) if isinstance(prompt, str) else prompt
    return TokenModel(VOCABULARY, eos_token_id=999).continuation(
        Request("solo", ids, params, seed=seed), 128
    )[0]


def generate(llm: LLM, *args: object, **options: object) -> list[RequestOutput]:
    return llm.generate(*args, use_tqdm=False, **options)


def test_one_prompt_gives_one_output(llm: LLM):
    (output,) = generate(llm, "hello", GREEDY)
    tokens = solo_tokens("hello", GREEDY)
    assert output.prompt == "hello"
    assert output.prompt_token_ids == TOKENIZER.encode("hello")
    assert output.finished
    (completion,) = output.outputs
    assert completion.token_ids == tokens
    assert completion.text == TOKENIZER.decode(tokens)
    assert (completion.index, completion.finish_reason) == (0, "length")
    assert completion.stop_reason is None
    assert completion.logprobs is None
    assert completion.cumulative_logprob is None


def test_many_prompts_come_back_in_their_order(llm: LLM):
    prompts = [f"prompt number {number}" for number in range(20)]
    outputs = generate(llm, prompts, GREEDY)
    assert [output.prompt for output in outputs] == prompts
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == solo_tokens(prompt, GREEDY)


def test_all_prompts_of_a_call_share_the_batch():
    engine = make_engine()
    sizes = []
    engine.step_observers.append(lambda stats: sizes.append(stats.num_requests))
    with make_llm(engine) as llm:
        generate(llm, ["a", "b", "c", "d"], GREEDY)
    assert max(sizes) > 1


def test_prompts_may_be_token_ids_or_dicts(llm: LLM):
    outputs = generate(llm, [{"prompt_token_ids": [5, 6, 7]}, {"prompt": "hey"}], GREEDY)
    assert outputs[0].prompt is None
    assert outputs[0].outputs[0].token_ids == solo_tokens([5, 6, 7], GREEDY)
    assert outputs[1].outputs[0].token_ids == solo_tokens("hey", GREEDY)


@pytest.mark.parametrize("prompt", [{}, {"prompt_token_ids": ["a"]}, {"text": "x"}, 5])
def test_a_prompt_of_another_form_is_refused(llm: LLM, prompt: object):
    with pytest.raises(InvalidRequestError) as refusal:
        generate(llm, [prompt], GREEDY)
    assert refusal.value.param == "prompt"


def test_each_prompt_may_have_its_own_params(llm: LLM):
    params = [SamplingParams(temperature=0.0, max_tokens=count) for count in (1, 5)]
    outputs = generate(llm, ["same", "same"], params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 5]
    with pytest.raises(InvalidRequestError) as refusal:
        generate(llm, ["same"], params)
    assert refusal.value.param == "sampling_params"


def test_without_params_the_models_defaults_hold():
    with make_llm(generation_defaults={"temperature": 0.25, "top_p": 0.5}) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.25, top_p=0.5)
        (output,) = generate(llm, [{"prompt_token_ids": list(range(120))}])
        assert len(output.outputs[0].token_ids) == 8  # to the end of the context


def test_one_prompt_that_cannot_work_means_that_none_runs(llm: LLM):
    with pytest.raises(ContextLengthError):
        generate(llm, ["fine", "x" * 500], GREEDY)
    (output,) = generate(llm, "after", GREEDY)
    assert output.outputs[0].token_ids == solo_tokens("after", GREEDY)


def test_n_completions_have_the_seeds_that_every_door_derives(llm: LLM):
    params = SamplingParams(n=4, max_tokens=5, seed=42)
    (output,) = generate(llm, "story", params)
    assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
    for index, completion in enumerate(output.outputs):
        assert completion.token_ids == solo_tokens("story", params, child_seed(42, index))


def test_without_seeds_a_script_repeats_itself_but_its_completions_differ():
    params = SamplingParams(max_tokens=5)
    runs = []
    for _ in range(2):
        with make_llm(seed=7) as llm:
            runs.append([generate(llm, "x", params)[0].outputs[0].token_ids for _ in range(3)])
    assert runs[0] == runs[1]
    assert len({tuple(tokens) for tokens in runs[0]}) == 3


def test_a_stop_string_ends_the_completion_and_the_request(llm: LLM):
    tokens = solo_tokens("hello", SamplingParams(temperature=0.0, max_tokens=40))
    third = next(token for token in tokens[3:] if token >= 256)
    params = SamplingParams(temperature=0.0, max_tokens=40, stop=(f" t{third}",))
    (output,) = generate(llm, "hello", params)
    (completion,) = output.outputs
    expected = TOKENIZER.decode(tokens)
    assert completion.text == expected[: expected.index(f" t{third}")]
    assert completion.finish_reason == "stop"
    assert completion.stop_reason == f" t{third}"


def test_end_of_text_is_not_shown():
    engine = make_engine(eos_probability=0.3)
    with make_llm(engine) as llm:
        (output,) = generate(llm, "hello", SamplingParams(temperature=0.0, max_tokens=100))
    (completion,) = output.outputs
    assert completion.finish_reason == "stop"
    assert completion.token_ids[-1] == 999
    assert completion.text == TOKENIZER.decode(completion.token_ids[:-1])
    assert completion.stop_reason is None


def test_logprobs_are_dicts_by_token_with_their_sum(llm: LLM):
    params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=2, prompt_logprobs=1)
    (output,) = generate(llm, "hello", params)
    (completion,) = output.outputs
    assert len(completion.logprobs) == 3
    chosen = [entry[t] for entry, t in zip(completion.logprobs, completion.token_ids, strict=True)]
    assert completion.cumulative_logprob == pytest.approx(sum(item.logprob for item in chosen))
    for token, item in zip(completion.token_ids, chosen, strict=True):
        assert item.decoded_token == TOKENIZER.token_text(token)[0]
    assert output.prompt_logprobs[0] is None
    assert [token in entry for token, entry in zip(
        output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True
    )] == [True] * 4  # fmt: skip


def test_a_cached_prefix_is_told(llm: LLM):
    prompt = {"prompt_token_ids": list(range(20))}
    first, second = (generate(llm, [prompt], GREEDY)[0] for _ in range(2))
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens > 0
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_chat_renders_the_template():
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}|{{ mood }}"
    with make_llm(chat_template=ChatTemplate(source)) as llm:
        conversation = [{"role": "user", "content": "hi"}]
        (output,) = llm.chat(
            conversation, GREEDY, use_tqdm=False, chat_template_kwargs={"mood": "calm"}
        )
        assert output.prompt == "<user>hi|calm"
        assert output.prompt_token_ids == TOKENIZER.encode("<user>hi|calm")
        assert len(llm.chat([conversation, conversation], GREEDY, use_tqdm=False)) == 2


@pytest.mark.parametrize("variables", [{"messages": []}, {"tools": []}])
def test_template_variables_that_are_arguments_are_refused(variables: dict[str, object]):
    with make_llm(chat_template=ChatTemplate("x")) as llm:
        conversation = [{"role": "user", "content": "hi"}]
        with pytest.raises(InvalidRequestError) as caught:
            llm.chat(conversation, GREEDY, use_tqdm=False, chat_template_kwargs=variables)
        assert caught.value.param == "chat_template_kwargs"
        llm.chat(conversation, GREEDY, use_tqdm=False, chat_template_kwargs={"self": 1})


@pytest.mark.parametrize("given", [5, None, [5], {"prompt_token_ids": 5}, {}, ["\udcff"]])
def test_what_is_no_prompt_is_refused(llm: LLM, given: object):
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate(given, GREEDY, use_tqdm=False)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("given", [{"max_tokens": 1}, "x", 5, [GREEDY, None]])
def test_what_are_no_sampling_params_is_refused(llm: LLM, given: object):
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate(["a", "b"], given, use_tqdm=False)
    assert caught.value.param == "sampling_params"


@pytest.mark.parametrize("given", ["hi", None, 5])
def test_what_are_no_messages_is_refused(given: object):
    with make_llm(chat_template=ChatTemplate("x")) as llm:
        with pytest.raises(InvalidRequestError) as caught:
            llm.chat(given, GREEDY, use_tqdm=False)
        assert caught.value.param == "messages"


def test_chat_without_a_template_is_refused(llm: LLM):
    with pytest.raises(InvalidRequestError, match="chat template"):
        llm.chat([{"role": "user", "content": "hi"}], GREEDY, use_tqdm=False)


def test_a_failed_step_is_an_error_and_the_next_call_works():
    with make_llm(make_engine(fail_steps={1: "scripted"})) as llm:
        with pytest.raises(HotbatchError, match="scripted"):
            generate(llm, ["a", "b"], GREEDY)
        assert generate(llm, "a", GREEDY)[0].outputs[0].token_ids == solo_tokens("a", GREEDY)


def test_calls_from_several_threads_do_not_mix(llm: LLM):
    results = {}

    def call(name: str) -> None:
        prompts = [f"{name} {number}" for number in range(5)]
        results[name] = [output.outputs[0].token_ids for output in generate(llm, prompts, GREEDY)]

    threads = [threading.Thread(target=call, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for name in "abc":
        assert results[name] == [solo_tokens(f"{name} {n}", GREEDY) for n in range(5)]


def test_after_shutdown_nothing_is_taken():
    llm = make_llm()
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(EngineStoppedError):
        generate(llm, "late", GREEDY)


def test_an_llm_that_nobody_holds_stops_its_engine():
    llm = make_llm()
    engine, seen = llm._parts.engine, weakref.ref(llm)
    del llm
    gc.collect()
    assert seen() is None
    assert not engine.is_accepting


def test_progress_is_shown_on_stderr(capsys: pytest.CaptureFixture[str]):
    with make_llm() as llm:
        llm.generate(["a", "b"], GREEDY)
    captured = capsys.readouterr()
    assert "2/2" in captured.err
    assert captured.out == ""


# ---- asyncio


def run(scenario: Callable[[AsyncLLM], Awaitable[None]], engine: Engine | None = None) -> None:
    async def main() -> None:
        llm = AsyncLLM.from_parts(
            engine or make_engine(), TOKENIZER, eos_token_ids=frozenset({999})
        )
        try:
            await asyncio.wait_for(scenario(llm), 60)
            while llm._engine.engine.num_outstanding:
                await asyncio.sleep(0.001)
            assert llm._engine.stats().blocks_used == 0
        finally:
            await llm.shutdown()

    asyncio.run(main())


def test_async_outputs_grow_to_the_finished_one():
    async def scenario(llm: AsyncLLM) -> None:
        outputs = [output async for output in llm.generate("hello", GREEDY, "r1")]
        texts = [output.outputs[0].text for output in outputs]
        assert all(later.startswith(earlier) for earlier, later in zip(texts, texts[1:]))  # noqa: B905, RUF007
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert outputs[-1].request_id == "r1"
        assert outputs[-1].outputs[0].token_ids == solo_tokens("hello", GREEDY)

    run(scenario)


def test_async_n_completions_equal_those_of_the_blocking_door():
    params = SamplingParams(n=3, max_tokens=7, seed=5)

    async def scenario(llm: AsyncLLM) -> None:
        async for output in llm.generate("story", params, "r1"):
            final = output
        assert final.finished
        for index, completion in enumerate(final.outputs):
            assert completion.token_ids == solo_tokens("story", params, child_seed(5, index))

    run(scenario)


def test_async_requests_at_once_do_not_mix():
    async def scenario(llm: AsyncLLM) -> None:
        async def last(name: str) -> RequestOutput:
            return [output async for output in llm.generate(name, GREEDY, name)][-1]

        outputs = await asyncio.gather(*(last(f"request {number}") for number in range(10)))
        for number, output in enumerate(outputs):
            assert output.outputs[0].token_ids == solo_tokens(f"request {number}", GREEDY)

    run(scenario)


@pytest.mark.parametrize("n", [1, 2])
def test_async_leaving_early_cancels(n: int):
    params = SamplingParams(n=n, max_tokens=100, seed=1)

    async def scenario(llm: AsyncLLM) -> None:
        outputs = llm.generate("long", params, "r1")
        await anext(outputs)
        await outputs.aclose()

    run(scenario)


def test_async_stop_string():
    tokens = solo_tokens("hello", SamplingParams(temperature=0.0, max_tokens=40))
    stop = f" t{next(token for token in tokens[3:] if token >= 256)}"

    async def scenario(llm: AsyncLLM) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=40, stop=(stop,))
        async for output in llm.generate("hello", params, "r1"):
            final = output
        assert final.finished
        assert final.outputs[0].stop_reason == stop
        assert stop not in final.outputs[0].text

    run(scenario)


def test_async_abort_ends_the_iteration():
    engine = make_engine()
    proceed = threading.Event()
    step, engine._executor.run = engine._executor.run, None

    def waiting(plan):
        if plan.step_id > 0:
            assert proceed.wait(30)
        return step(plan)

    engine._executor.run = waiting

    async def scenario(llm: AsyncLLM) -> None:
        outputs = llm.generate("long", SamplingParams(max_tokens=100, seed=1), "r1")
        await anext(outputs)
        await llm.abort("r1")
        await llm.abort("never-seen")
        proceed.set()
        final = [output async for output in outputs][-1]
        assert final.finished
        assert final.outputs[0].finish_reason == "abort"

    run(scenario, engine)


def test_async_refusal_is_raised():
    async def scenario(llm: AsyncLLM) -> None:
        with pytest.raises(ContextLengthError):
            await anext(llm.generate("x" * 500, GREEDY, "r1"))

    run(scenario)


def test_async_failure_is_raised():
    async def scenario(llm: AsyncLLM) -> None:
        with pytest.raises(HotbatchError, match="scripted"):
            async for _ in llm.generate("a", GREEDY, "r1"):
                pass

    run(scenario, make_engine(fail_steps={1: "scripted"}))


@pytest.mark.parametrize(
    ("priority", "expected"),
    [(None, [0, 0, 0]), (-2, [-2, -2, -2]), ([1, 0, -1], [1, 0, -1])],
)
def test_priorities_reach_the_requests(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, priority: object, expected: list[int]
):
    requests: list[Request] = []
    submit = llm._parts.engine.submit
    monkeypatch.setattr(
        llm._parts.engine, "submit", lambda request: (requests.append(request), submit(request))
    )
    generate(llm, ["a", "b", "c"], GREEDY, priority=priority)
    assert [request.priority for request in requests] == expected
    assert [request.service_class for request in requests] == [
        class_of(None, each) for each in expected
    ]


@pytest.mark.parametrize("priority", [[1, 2], "abc", 1.5, ["x", "y", "z"]])
def test_priorities_that_do_not_fit_are_refused(llm: LLM, priority: object):
    with pytest.raises(InvalidRequestError) as caught:
        generate(llm, ["a", "b", "c"], GREEDY, priority=priority)
    assert caught.value.param == "priority"
