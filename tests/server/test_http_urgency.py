"""Class, order, targets and tenant: from body and headers to the engine's request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from server_parts import MODEL, Rig, make_rig, serving

from hotbatch.core.request import Request
from hotbatch.core.service_class import LatencyTargets, ServiceClass

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture
def submitted(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """The engine's requests of this test."""
    requests: list[Request] = []
    submit = rig.engine.submit
    monkeypatch.setattr(
        rig.engine, "submit", lambda request: (requests.append(request), submit(request))
    )
    return requests


def post(http: httpx.Client, path: str = COMPLETION, **fields: Any) -> httpx.Response:
    headers = fields.pop("headers", None)
    body = {"max_tokens": 2, **({"prompt": [7, 8]} if path == COMPLETION else {"messages": USER})}
    return http.post(path, json=body | fields, headers=headers)


@pytest.mark.parametrize("path", [COMPLETION, CHAT])
@pytest.mark.parametrize(
    ("fields", "service_class", "echoed"),
    [
        ({}, ServiceClass.STANDARD, None),
        ({"service_tier": "auto"}, ServiceClass.STANDARD, "default"),
        ({"service_tier": "default"}, ServiceClass.STANDARD, "default"),
        ({"service_tier": "flex"}, ServiceClass.BATCH, "flex"),
        ({"service_tier": "priority"}, ServiceClass.INTERACTIVE, "priority"),
        ({"priority": -3}, ServiceClass.INTERACTIVE, None),
        ({"priority": 5}, ServiceClass.BATCH, None),
        ({"priority": 0}, ServiceClass.STANDARD, None),
        ({"service_tier": "auto", "priority": -1}, ServiceClass.INTERACTIVE, "priority"),
        ({"service_tier": "flex", "priority": -1}, ServiceClass.BATCH, "flex"),
        ({"service_tier": "priority", "priority": 9}, ServiceClass.INTERACTIVE, "priority"),
    ],
)
def test_classes_and_what_is_echoed(
    http: httpx.Client,
    submitted: list[Request],
    path: str,
    fields: dict[str, Any],
    service_class: ServiceClass,
    echoed: str | None,
) -> None:
    answer = post(http, path, **fields)
    assert answer.status_code == 200
    assert answer.json().get("service_tier") == echoed
    (request,) = submitted
    assert request.service_class is service_class
    assert request.priority == fields.get("priority", 0)


def test_the_official_client_sees_the_tier(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model=MODEL, messages=USER, max_tokens=2, service_tier="flex"
    )
    assert whole.service_tier == "flex"
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=USER,
            max_tokens=2,
            service_tier="auto",
            stream=True,
            extra_body={"priority": -1},
        )
    )
    assert {chunk.service_tier for chunk in chunks} == {"priority"}


@pytest.mark.parametrize(
    ("fields", "headers", "targets"),
    [
        ({}, {}, LatencyTargets()),
        ({"slo": {"ttft_ms": 250}}, {}, LatencyTargets(0.25, None)),
        ({"slo": {"ttft_ms": 250, "tpot_ms": 12.5}}, {}, LatencyTargets(0.25, 0.0125)),
        ({}, {"x-slo-ttft-ms": "100", "X-SLO-TPOT-MS": "20"}, LatencyTargets(0.1, 0.02)),
        (
            {"slo": {"ttft_ms": 300}},
            {"x-slo-ttft-ms": "100", "x-slo-tpot-ms": "20"},
            LatencyTargets(0.3, 0.02),
        ),
    ],
)
def test_targets_come_from_the_body_and_else_from_headers(
    http: httpx.Client,
    submitted: list[Request],
    fields: dict[str, Any],
    headers: dict[str, str],
    targets: LatencyTargets,
) -> None:
    assert post(http, CHAT, headers=headers, **fields).status_code == 200
    assert submitted[0].targets == targets


@pytest.mark.parametrize(
    ("fields", "headers", "param"),
    [
        ({"slo": {"ttft_ms": 0}}, {}, "slo.ttft_ms"),
        ({"slo": {"ttft_ms": -5}}, {}, "slo.ttft_ms"),
        ({"slo": {"tpot_ms": 0}}, {}, "slo.tpot_ms"),
        ({"slo": {"tpot_ms": "fast"}}, {}, "slo.tpot_ms"),
        ({"slo": 5}, {}, "slo"),
        ({}, {"x-slo-ttft-ms": "soon"}, "x-slo-ttft-ms"),
        ({}, {"x-slo-ttft-ms": "nan"}, "x-slo-ttft-ms"),
        ({}, {"x-slo-tpot-ms": "inf"}, "x-slo-tpot-ms"),
        ({}, {"x-slo-tpot-ms": "0"}, "x-slo-tpot-ms"),
        ({"priority": 1.5}, {}, "priority"),
        ({"service_tier": "scale"}, {}, "service_tier"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    http: httpx.Client, fields: dict[str, Any], headers: dict[str, str], param: str
) -> None:
    answer = post(http, headers=headers, **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert param in answer.json()["error"]["message"]


def test_without_keys_the_tenant_is_the_user_and_nothing_else(
    http: httpx.Client, submitted: list[Request]
) -> None:
    post(http, user="alice")
    post(http, CHAT, user="bob", safety_identifier="x", prompt_cache_key="y")
    post(http, CHAT, safety_identifier="x", prompt_cache_key="y", metadata={"user": "z"})
    post(http, headers={"authorization": "Bearer whatever"})
    assert [request.tenant for request in submitted] == ["alice", "bob", "", ""]


@pytest.fixture(scope="module")
def keyed() -> Iterator[Rig]:
    with serving(make_rig(api_keys=("one", "two"))) as rig:
        yield rig


def test_with_keys_the_tenant_is_the_key_and_nothing_else(
    keyed: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenants: list[str] = []
    submit = keyed.engine.submit
    monkeypatch.setattr(
        keyed.engine, "submit", lambda request: (tenants.append(request.tenant), submit(request))
    )
    with httpx.Client(base_url=keyed.url, timeout=30, trust_env=False) as http:
        for key, user in (("one", None), ("two", "alice"), ("one", "key-1"), ("two", "")):
            fields = {} if user is None else {"user": user}
            answer = post(http, headers={"authorization": f"Bearer {key}"}, **fields)
            assert answer.status_code == 200
    assert tenants == ["key-0", "key-1", "key-0", "key-1"]


def test_an_urgent_request_is_served_before_those_that_came_earlier() -> None:
    """One seat: it goes to the class, then to the smaller priority, then to the earlier."""
    with serving(make_rig(max_num_seqs=1)) as rig:
        ended: list[str] = []
        rig.engine.request_observers.append(lambda timings: ended.append(timings.request_id))
        rig.executor.gate.clear()
        with httpx.Client(base_url=rig.url, timeout=30, trust_env=False) as http:
            from concurrent.futures import ThreadPoolExecutor

            waiting = {
                "bulk": {"service_tier": "flex"},
                "late": {"service_tier": "default", "priority": 3},
                "first": {"service_tier": "default"},
                "second": {},
                "urgent": {"service_tier": "priority"},
            }
            with ThreadPoolExecutor(len(waiting) + 1) as pool:
                answers = []
                for count, (name, fields) in enumerate({"running": {}, **waiting}.items()):
                    answers.append(pool.submit(post, http, request_id=name, **fields))
                    rig.wait_until(lambda wanted=count: rig.engine.num_outstanding > wanted)
                rig.executor.gate.set()
                assert all(answer.result().status_code == 200 for answer in answers)
        rig.wait_until(lambda: len(ended) == 6)
        order = [name.removeprefix("cmpl-").removesuffix("-0") for name in ended]
        assert order == ["urgent", "running", "first", "second", "late", "bulk"]
