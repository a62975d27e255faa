"""Every bad request gets its clear 4xx, in OpenAI's shape, with the field's name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from server_parts import MAX_MODEL_LEN, MODEL, Rig, make_rig, serving

from hotbatch.core.errors import OverloadedError

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
# Within what the JSON parser takes, beyond what Python prints, renders or parses.
DEEP_TEXT = "[" * 1000 + "]" * 1000


def check(
    answer: httpx.Response, status: int, param: str | None, code: str | None = None, says: str = ""
) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    assert code is None or error["code"] == code
    assert says in error["message"]
    if param is not None:
        assert param.split(".")[0].split("[")[0] in error["message"]


SHARED: list[tuple[dict[str, Any], str]] = [
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": "2"}, "n"),
    ({"n": 1.5}, "n"),
    ({"n": True}, "n"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": 1e9}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 2**31}, "top_k"),
    ({"top_k": 2**64 - 1}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 1e-40}, "repetition_penalty"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"999999": 1}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": MAX_MODEL_LEN}, "max_tokens"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop": {"a": 1}}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids"),
    ({"stop_token_ids": "x"}, "stop_token_ids"),
    ({"seed": 2**63}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"ignore_eos": "yes"}, "ignore_eos"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 3}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": []}, "stream_options"),
    ({"service_tier": "gold"}, "service_tier"),
    ({"priority": "high"}, "priority"),
    ({"best_of": 5}, "best_of"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"length_penalty": 0.5}, "length_penalty"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"response_format": "json"}, "response_format"),
    ({"guided_json": {}}, "guided_json"),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"allowed_token_ids": [1]}, "allowed_token_ids"),
    ({"bad_words": ["x"]}, "bad_words"),
    ({"logits_processors": ["x"]}, "logits_processors"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"request_id": ""}, "request_id"),
    ({"request_id": "x" * 300}, "request_id"),
    ({"model": 5}, "model"),
]
COMPLETION_ONLY: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [[1], ["a"]]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [10**6]}, "prompt"),
    ({"prompt": ["a"] * 1025}, "prompt"),
    ({"prompt": ["a"] * 100, "n": 100}, "prompt"),
    ({"suffix": "x"}, "suffix"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"echo": "yes"}, "echo"),
    ({"prompt_embeds": "x"}, "prompt_embeds"),
]
CHAT_ONLY: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0]",
    ),
    ({"logprobs": 3}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": MAX_MODEL_LEN}, "max_completion_tokens"),
    (
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"function": {"arguments": DEEP_TEXT}}]}
            ]
        },
        "messages[0].tool_calls",
    ),
    ({"tools": "x"}, "tools"),
    ({"tools": [{}], "tool_choice": "required"}, "tool_choice"),
    ({"functions": [{}]}, "functions"),
    ({"documents": [{"text": "x"}]}, "documents"),
    ({"echo": True}, "echo"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"audio": {"voice": "a"}}, "audio"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    (
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
    ),
]
CASES = [
    *[(COMPLETION, fields, param) for fields, param in SHARED + COMPLETION_ONLY],
    *[(CHAT, fields, param) for fields, param in SHARED + CHAT_ONLY],
]


@pytest.mark.parametrize(("path", "fields", "param"), CASES, ids=str)
def test_bad_field(http: httpx.Client, path: str, fields: dict[str, Any], param: str) -> None:
    base = {"prompt": "hello"} if path == COMPLETION else {"messages": USER}
    check(http.post(path, json={"model": MODEL, **base, **fields}), 400, param)


@pytest.mark.parametrize("path", [COMPLETION, CHAT, "/tokenize", "/detokenize"])
@pytest.mark.parametrize("raw", [b"", b"{", b"[1]", b'"x"', b"\xff\xfe", b'{"a": NaN}'])
def test_not_a_json_object(http: httpx.Client, path: str, raw: bytes) -> None:
    check(http.post(path, content=raw), 400, None, says="JSON")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": USER}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["x"]}, "tokens.0"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
    ],
)
def test_bad_text_request(http: httpx.Client, path: str, body: Any, param: str) -> None:
    check(http.post(path, json=body), 400, param)


@pytest.mark.parametrize(
    ("path", "field"),
    [
        *[(COMPLETION, field) for field in ("prompt", "model", "logit_bias", "stop", "unknown")],
        *[(CHAT, field) for field in ("messages", "tools", "chat_template_kwargs", "n")],
        *[("/tokenize", field) for field in ("prompt", "messages")],
        ("/detokenize", "tokens"),
    ],
)
@pytest.mark.parametrize("inner", ["%s", '[{"role": "user", "content": %s}]', '{"a": %s}'])
def test_too_deep_a_value(http: httpx.Client, path: str, field: str, inner: str) -> None:
    for depth in (101, 980, 1015):
        value = inner % ("[" * depth + "]" * depth)
        check(http.post(path, content=f'{{"{field}": {value}}}'), 400, field)


def test_depth_alone_is_no_fault(http: httpx.Client) -> None:
    wide = {"prompt": [[1]] * 200, "max_tokens": 1}  # many brackets, two levels
    assert http.post(COMPLETION, json=wide).status_code == 200
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(30):
        schema = {"type": "object", "properties": {"a": schema}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    assert http.post("/tokenize", json={"messages": USER, "tools": tools}).status_code == 200


def test_template_variables_may_have_any_other_name(http: httpx.Client) -> None:
    body = {"messages": USER, "chat_template_kwargs": {"self": 1, "text": 2, "param": 3}}
    assert http.post("/tokenize", json=body).status_code == 200


def test_long_values_are_not_sent_back(http: httpx.Client) -> None:
    for path, body in (
        (COMPLETION, {"prompt": "x", "model": "m" * 10**5}),
        (COMPLETION, {"prompt": "x", "logit_bias": {"b" * 10**5: 1}}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "t" * 10**5}]}]}),
    ):
        assert len(http.post(path, json=body).content) < 1000


@pytest.mark.parametrize("path", [COMPLETION, CHAT, "/tokenize", "/detokenize"])
def test_unknown_model(http: httpx.Client, path: str) -> None:
    body = {"model": "gpt-9", "prompt": "x", "messages": USER, "tokens": [1]}
    check(http.post(path, json=body), 404, "model", "model_not_found", "gpt-9")


def test_no_model_is_the_model(http: httpx.Client) -> None:
    assert http.post(COMPLETION, json={"prompt": "x"}).json()["model"] == MODEL


@pytest.mark.parametrize("text", ["x y " * MAX_MODEL_LEN, "x" * 10**6])
def test_too_long_a_prompt(http: httpx.Client, text: str) -> None:
    code = "context_length_exceeded"
    check(http.post(COMPLETION, json={"prompt": text}), 400, "prompt", code)
    messages = [{"role": "user", "content": text}]
    check(http.post(CHAT, json={"messages": messages}), 400, "messages", code)


def test_the_client_raises_its_own_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="x", temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "not_found"),
        ("POST", "/v1/embeddings", 404, "not_found"),
        ("GET", COMPLETION, 405, "method_not_allowed"),
        ("PUT", CHAT, 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
        ("GET", "//v1/models", 404, "not_found"),
    ],
)
def test_wrong_path_or_method(
    http: httpx.Client, method: str, path: str, status: int, code: str
) -> None:
    check(http.request(method, path), status, None, code)


@pytest.fixture(scope="module")
def small() -> Iterator[Rig]:
    with serving(make_rig(max_body_bytes=2000, chat_template=None, api_keys=("k1", "ключ"))) as rig:
        yield rig


def keyed(rig: Rig, key: str | bytes | None) -> httpx.Client:
    headers: dict[str, Any] = {}
    if key is not None:
        raw = key if isinstance(key, bytes) else b"Bearer " + key.encode()
        headers = {"authorization": raw}
    return httpx.Client(base_url=rig.url, headers=headers, timeout=30, trust_env=False)


def test_too_large_a_body(small: Rig) -> None:
    with keyed(small, "k1") as http:
        big = {"prompt": "x" * 3000}
        check(http.post(COMPLETION, json=big), 413, None, "request_too_large", "2000")

        def pieces() -> Iterator[bytes]:  # sent chunked, without a Content-Length
            for _ in range(50):
                yield b" " * 100

        check(http.post(COMPLETION, content=pieces()), 413, None, "request_too_large")
        assert http.post(COMPLETION, json={"prompt": "x"}).status_code == 200


def test_no_chat_template(small: Rig) -> None:
    with keyed(small, "k1") as http:
        check(http.post(CHAT, json={"messages": USER}), 400, "messages", says="chat template")


@pytest.mark.parametrize("key", ["k1", "ключ", b"bearer k1"])
def test_right_key(small: Rig, key: str | bytes) -> None:
    with keyed(small, key) as http:
        assert http.get("/v1/models").status_code == 200


@pytest.mark.parametrize("key", [None, b"Bearer", "k", "k2", "k11", b"k1", b"Basic k1"])
@pytest.mark.parametrize("path", ["/v1/models", COMPLETION, CHAT, "/v1/nothing", "/tokenize"])
def test_wrong_key(small: Rig, key: str | bytes | None, path: str) -> None:
    with keyed(small, key) as http:
        answer = http.get(path)
        check(answer, 401, None, "invalid_api_key")
        assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("path", ["/health", "/version", "/metrics", "/"])
def test_open_paths(small: Rig, path: str) -> None:
    with keyed(small, None) as http:
        assert http.get(path).status_code == 200


def test_the_tenant_is_the_key(small: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    submit = small.engine.submit
    monkeypatch.setattr(small.engine, "submit", lambda r: (seen.append(r.tenant), submit(r)))
    with keyed(small, "ключ") as http:
        assert http.post(COMPLETION, json={"prompt": "x", "user": "u"}).status_code == 200
    assert seen == ["key-1"]


def test_overload(rig: Rig, http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise OverloadedError("The queue is full.", retry_after=2.5)

    monkeypatch.setattr(rig.engine, "submit", refuse)
    answer = http.post(COMPLETION, json={"prompt": "x"})
    check(answer, 429, None, "overloaded")
    assert answer.headers["retry-after"] == "3"


@pytest.mark.parametrize("refused", [1, 2])
def test_one_refused_choice_leaves_none_behind(
    rig: Rig, http: httpx.Client, monkeypatch: pytest.MonkeyPatch, refused: int
) -> None:
    submit, calls = rig.engine.submit, []

    def sometimes(request: Any) -> None:
        calls.append(request.request_id)
        if len(calls) > refused:
            raise OverloadedError("The queue is full.")
        submit(request)

    monkeypatch.setattr(rig.engine, "submit", sometimes)
    assert http.post(COMPLETION, json={"prompt": "x", "n": 4}).status_code == 429


def test_our_own_fault(
    rig: Rig, http: httpx.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: object) -> None:
        raise RuntimeError("a secret detail")

    monkeypatch.setattr(rig.engine, "submit", broken)
    answer = http.post(COMPLETION, json={"prompt": "x"})
    check(answer, 500, None, "internal_error")
    assert "secret" not in answer.text
    rig.wait_until(lambda: any("secret" in str(r.exc_info) for r in caplog.records))


def test_a_failed_step(rig: Rig, http: httpx.Client) -> None:
    rig.executor.fault = RuntimeError("bad kernel")
    check(http.post(COMPLETION, json={"prompt": "x"}), 500, None, says="bad kernel")
    rig.executor.fault = RuntimeError("bad kernel")
    answer = http.post(COMPLETION, json={"prompt": "x", "stream": True})
    assert answer.status_code == 200
    events = answer.text.strip().split("\n\n")
    assert "bad kernel" in events[0]
    assert events[0].startswith('data: {"error":')
    assert events[-1] == "data: [DONE]"
    assert http.post(COMPLETION, json={"prompt": "x"}).status_code == 200


def test_a_failed_step_reaches_a_streaming_client(rig: Rig, client: openai.OpenAI) -> None:
    rig.executor.fault = RuntimeError("bad kernel")
    with pytest.raises(openai.APIError, match="bad kernel"):
        list(client.completions.create(model=MODEL, prompt="x", stream=True))
