"""/v1/completions with the official client: every form of prompt, and every extra."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from server_parts import MAX_MODEL_LEN, MODEL, Rig, make_rig, serving

PROMPT = "hello"


def create(client: openai.OpenAI, **fields: Any) -> Any:
    return client.completions.create(**{"model": MODEL, "prompt": PROMPT, **fields})


def streamed(client: openai.OpenAI, **fields: Any) -> list[Any]:
    return list(create(client, stream=True, **fields))


def test_text_is_that_of_the_request_alone(rig: Rig, client: openai.OpenAI) -> None:
    ids = rig.tokenizer.encode(PROMPT)
    answer = create(client, seed=3, max_tokens=40)
    assert answer.object == "text_completion"
    assert answer.model == MODEL
    assert answer.choices[0].text == rig.text(rig.continuation(ids, seed=3, max_tokens=40))
    assert answer.choices[0].finish_reason == "length"
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(ids), 40)
    assert usage.total_tokens == len(ids) + 40


def test_sixteen_tokens_unless_asked(rig: Rig, client: openai.OpenAI) -> None:
    assert create(client).usage.completion_tokens == 16
    room_for_three = [5] * (MAX_MODEL_LEN - 3)
    assert create(client, prompt=room_for_three).usage.completion_tokens == 3


def test_greedy_ignores_the_seed(client: openai.OpenAI) -> None:
    one, two = (create(client, temperature=0, seed=seed).choices[0].text for seed in (1, 2))
    assert one == two


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("xin chào", ["xin chào"]),
        (["xin", "chào"], ["xin", "chào"]),
        ([10, 11, 12], [[10, 11, 12]]),
        ([[10, 11], [12]], [[10, 11], [12]]),
    ],
)
@pytest.mark.parametrize("n", [1, 3])
def test_every_form_of_prompt(
    rig: Rig, client: openai.OpenAI, prompt: Any, texts: list[Any], n: int
) -> None:
    prompts = [rig.tokenizer.encode(p) if isinstance(p, str) else p for p in texts]
    expected = [
        rig.text(rig.continuation(ids, k, seed=5, max_tokens=12))
        for ids in prompts
        for k in range(n)
    ]
    fields = {"prompt": prompt, "n": n, "seed": 5, "max_tokens": 12}
    answer = create(client, **fields)
    assert [choice.text for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == list(range(len(expected)))
    assert answer.usage.prompt_tokens == sum(map(len, prompts))
    assert answer.usage.completion_tokens == 12 * len(expected)

    shown = dict.fromkeys(range(len(expected)), "")
    ends: dict[int, str] = {}
    for chunk in streamed(client, **fields):
        for choice in chunk.choices:
            assert choice.index not in ends
            shown[choice.index] += choice.text
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    assert list(shown.values()) == expected
    assert ends == dict.fromkeys(range(len(expected)), "length")


def test_siblings_differ_and_repeat(client: openai.OpenAI) -> None:
    first = [choice.text for choice in create(client, n=4, seed=9).choices]
    assert len(set(first)) == 4
    assert [choice.text for choice in create(client, n=4, seed=9).choices] == first
    assert create(client, seed=9).choices[0].text == first[0]
    assert create(client).choices[0].text != create(client).choices[0].text


def test_stream_ends_with_usage_if_asked(client: openai.OpenAI) -> None:
    chunks = streamed(client, max_tokens=5, stream_options={"include_usage": True})
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 5
    assert all(chunk.usage is None for chunk in streamed(client, max_tokens=5))


def test_usage_in_every_chunk_if_asked(client: openai.OpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = streamed(client, max_tokens=5, stream_options=options)
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 5


def test_wire_format(rig: Rig, http: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "stream": True, "max_tokens": 3, "logprobs": 0}
    answer = http.post("/v1/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith('data: {"id":"cmpl-') for event in events[:-2])


def test_stop_string(rig: Rig, client: openai.OpenAI) -> None:
    ids = rig.tokenizer.encode(PROMPT)
    tokens = rig.continuation(ids, seed=3, max_tokens=60)
    whole = rig.text(tokens)
    stop = whole[20:23]
    cut = whole.index(stop)
    for choice_of in (
        lambda **f: create(client, **f).choices[0],
        lambda **f: _joined(streamed(client, **f)),
    ):
        choice = choice_of(seed=3, max_tokens=60, stop=["never seen", stop])
        assert choice.text == whole[:cut]
        assert choice.finish_reason == "stop"
        assert choice.stop_reason == stop
        extra = {"include_stop_str_in_output": True}
        choice = choice_of(seed=3, max_tokens=60, stop=stop, extra_body=extra)
        assert choice.text == whole[: cut + len(stop)]
    # Nothing past the stop string counts, whatever the engine computed meanwhile.
    used = create(client, seed=3, max_tokens=60, stop=stop).usage.completion_tokens
    fewest = next(n for n in range(61) if stop in rig.text(tokens[:n]))
    assert used == fewest


class _joined:
    """The one choice of a stream, put together."""

    def __init__(self, chunks: list[Any]) -> None:
        choices = [choice for chunk in chunks for choice in chunk.choices]
        self.text = "".join(choice.text for choice in choices)
        self.finish_reason = choices[-1].finish_reason
        self.stop_reason = choices[-1].stop_reason


def test_min_tokens_delays_stop_strings(rig: Rig, client: openai.OpenAI) -> None:
    ids = rig.tokenizer.encode(PROMPT)
    whole = rig.text(rig.continuation(ids, seed=3, max_tokens=30))
    fields = {"seed": 3, "max_tokens": 30, "stop": whole[0]}
    assert create(client, **fields).choices[0].text == ""
    late = create(client, **fields, extra_body={"min_tokens": 30})
    assert late.choices[0].text == whole
    assert late.choices[0].finish_reason == "length"


def test_stop_token_ids(rig: Rig, client: openai.OpenAI) -> None:
    tokens = rig.continuation(rig.tokenizer.encode(PROMPT), seed=3, max_tokens=20)
    at = next(i for i in range(3, 20) if tokens[i] not in tokens[:i])
    answer = create(client, seed=3, max_tokens=20, extra_body={"stop_token_ids": [tokens[at]]})
    choice = answer.choices[0]
    assert choice.text == rig.text(tokens[:at])
    assert (choice.finish_reason, choice.stop_reason) == ("stop", tokens[at])
    assert answer.usage.completion_tokens == at + 1


def test_echo(rig: Rig, client: openai.OpenAI) -> None:
    ids = rig.tokenizer.encode(PROMPT)
    text = rig.text(rig.continuation(ids, seed=3, max_tokens=8))
    fields = {"seed": 3, "max_tokens": 8, "echo": True}
    assert create(client, **fields).choices[0].text == PROMPT + text
    assert _joined(streamed(client, **fields)).text == PROMPT + text


@pytest.mark.parametrize("stream", [False, True])
def test_echo_alone_scores_a_prompt(rig: Rig, client: openai.OpenAI, stream: bool) -> None:
    fields = {"max_tokens": 0, "echo": True, "logprobs": 2}
    if stream:
        chunks = streamed(client, **fields, stream_options={"include_usage": True})
        answer, usage = chunks[0], chunks[-1].usage
        assert _joined(chunks[:-1]).text == PROMPT
    else:
        answer = create(client, **fields)
        usage = answer.usage
        assert answer.choices[0].text == PROMPT
    ids = rig.tokenizer.encode(PROMPT)
    assert len(answer.choices[0].logprobs.tokens) == len(ids)
    assert usage.completion_tokens == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
def test_logprobs(rig: Rig, client: openai.OpenAI, stream: bool, echo: bool) -> None:
    ids = rig.tokenizer.encode(PROMPT)
    tokens = rig.continuation(ids, seed=3, max_tokens=6)
    fields = {"seed": 3, "max_tokens": 6, "logprobs": 3, "echo": echo}
    shape: dict[str, list[Any]] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    chunks = streamed(client, **fields) if stream else [create(client, **fields)]
    for chunk in chunks:
        for name, values in shape.items():
            values += getattr(chunk.choices[0].logprobs, name)
    shown = [*(ids if echo else []), *tokens]
    assert shape["tokens"] == [rig.tokenizer.token_text(token)[0] for token in shown]
    model = rig.executor.model
    first = len(ids) if not echo else 1
    expected = [
        model.logprob(model.context([*ids, *tokens][:at]), [*ids, *tokens][at], 3)
        for at in range(first, len(ids) + 6)
    ]
    values = shape["token_logprobs"][echo:]
    assert values == pytest.approx([entry.logprob for entry in expected])
    for top, entry in zip(shape["top_logprobs"][echo:], expected, strict=True):
        named = {rig.tokenizer.token_text(token)[0] for token, _ in entry.top}
        assert top.keys() == named | {rig.tokenizer.token_text(entry.token_id)[0]}
        assert max(top.values()) == pytest.approx(entry.top[0][1])
    if echo:
        assert shape["token_logprobs"][0] is shape["top_logprobs"][0] is None
    offsets = [0]
    for token in shape["tokens"]:
        offsets.append(offsets[-1] + len(token))
    assert shape["text_offset"] == offsets[:-1]


def test_vllm_extras(rig: Rig, client: openai.OpenAI) -> None:
    ids = rig.tokenizer.encode(PROMPT)
    extra = {
        "return_token_ids": True,
        "prompt_logprobs": 1,
        "request_id": "mine",
        "cache_salt": "s",
        "priority": 3,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "an_unknown_field": 1,
    }
    answer = create(client, seed=3, max_tokens=4, extra_body=extra)
    choice = answer.choices[0]
    assert answer.id == "cmpl-mine"
    assert choice.prompt_token_ids == ids
    assert choice.token_ids == rig.continuation(ids, seed=3, max_tokens=4)
    assert choice.prompt_logprobs[0] is None
    assert [
        str(token) in entry
        for token, entry in zip(ids[1:], choice.prompt_logprobs[1:], strict=True)
    ]
    named = {"return_tokens_as_token_ids": True}
    answer = create(client, seed=3, max_tokens=1, logprobs=0, extra_body=named)
    assert answer.choices[0].logprobs.tokens == [f"token_id:{choice.token_ids[0]}"]


def test_skip_special_tokens(client: openai.OpenAI) -> None:
    fields = {"prompt": "a<|begin|>b", "echo": True, "max_tokens": 0}
    assert create(client, **fields).choices[0].text == "ab"


def test_truncated_prompt(rig: Rig, client: openai.OpenAI) -> None:
    extra = {"truncate_prompt_tokens": 2, "return_token_ids": True}
    answer = create(client, prompt=[10, 11, 12, 13], max_tokens=1, extra_body=extra)
    assert answer.choices[0].prompt_token_ids == [12, 13]


@pytest.fixture(scope="module")
def cramped() -> Iterator[Rig]:
    """The model's context is 512 tokens, the KV cache holds 64."""
    with serving(make_rig(num_blocks=4)) as rig:
        yield rig


def test_the_context_is_no_longer_than_the_kv_cache(cramped: Rig) -> None:
    with httpx.Client(base_url=cramped.url, trust_env=False) as http:
        assert http.get("/v1/models").json()["data"][0]["max_model_len"] == 64
        answer = http.post("/v1/completions", json={"prompt": [5] * 60}).json()
        assert answer["usage"]["completion_tokens"] == 4
        answer = http.post("/v1/completions", json={"prompt": [5] * 64}).json()
        assert answer["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(("asked", "kept"), [({}, 48), ({"max_tokens": 10}, 54)])
def test_a_prompt_can_be_cut_to_what_fits(cramped: Rig, asked: dict[str, int], kept: int) -> None:
    fields = {"truncate_prompt_tokens": -1, **asked}
    with httpx.Client(base_url=cramped.url, trust_env=False) as http:
        for prompt in ([5] * 1000, "the quick brown fox " * 50):
            answer = http.post("/v1/completions", json={"prompt": prompt, **fields}).json()
            assert answer["usage"]["prompt_tokens"] == kept
        messages = [{"role": "user", "content": "the quick brown fox " * 50}]
        body = {"messages": messages, **fields}
        answer = http.post("/v1/chat/completions", json=body).json()
        assert answer["usage"]["prompt_tokens"] == (kept if asked else 63)
        assert answer["usage"]["total_tokens"] == 64


@pytest.mark.parametrize("named", [False, True])
def test_streamed_logprobs_are_those_of_one_piece(client: openai.OpenAI, named: bool) -> None:
    fields = {"seed": 3, "max_tokens": 20, "logprobs": 2, "echo": True}
    extra = {"extra_body": {"return_tokens_as_token_ids": named}}
    whole = create(client, **fields, **extra).choices[0].logprobs
    chunks = [chunk.choices[0].logprobs for chunk in create(client, stream=True, **fields, **extra)]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [v for chunk in chunks for v in getattr(chunk, name)] == getattr(whole, name), name


def test_tokenize_and_detokenize(rig: Rig, http: httpx.Client) -> None:
    text = "Việt <|end|> 👩‍👩‍👧"
    ids = rig.tokenizer.encode(text)
    answer = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert answer["tokens"] == ids
    assert answer["count"] == len(ids)
    assert answer["max_model_len"] == MAX_MODEL_LEN
    assert answer["token_strs"] == [rig.tokenizer.id_to_token(i) for i in ids]
    back = http.post("/detokenize", json={"tokens": ids})
    assert back.json() == {"prompt": text}
    messages = [{"role": "user", "content": "hi"}]
    chat = http.post("/tokenize", json={"messages": messages}).json()
    assert chat["tokens"] == rig.chat_prompt("hi")


def test_long_text_is_tokenized_the_same(rig: Rig, http: httpx.Client) -> None:
    """Long text takes another way, through a thread."""
    text = "the quick brown fox " * 400
    answer = http.post("/tokenize", json={"prompt": text}).json()
    assert answer["tokens"] == rig.tokenizer.encode(text)
