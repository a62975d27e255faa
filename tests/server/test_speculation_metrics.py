"""/metrics on guesses, and the body's way out of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest
from server_parts import Rig

from hotbatch.core.request import Request
from hotbatch.core.speculation import Account
from hotbatch.server.speculation_metrics import families


def test_tokens_and_seconds_by_distance_and_result(rig: Rig) -> None:
    account = Account(10, 7, seconds_spent=0.5, seconds_saved=2.0, seconds_wasted=0.125)
    stats = replace(rig.engine.stats(), guesses={"token": account})
    tokens, seconds, *_ = families({"model_name": "m"}, stats)
    assert {sample.labels["result"]: sample.value for sample in tokens.samples} == {
        "accepted": 7,
        "wasted": 3,
    }
    assert all(sample.labels["distance"] == "token" for sample in tokens.samples)
    assert {sample.labels["kind"]: sample.value for sample in seconds.samples} == {
        "spent": 0.5,
        "wasted": 0.125,
        "saved": 2.0,
    }


def test_metrics_name_the_families(http: httpx.Client) -> None:
    text = http.get("/metrics").text
    assert "# TYPE hotbatch:draft_tokens_total counter" in text
    assert "# TYPE hotbatch:draft_seconds_total counter" in text


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(("given", "expected"), [(None, True), (True, True), (False, False)])
def test_a_body_may_opt_out(
    http: httpx.Client,
    rig: Rig,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    given: bool | None,
    expected: bool,
) -> None:
    seen: list[Request] = []
    submit = rig.engine.submit
    monkeypatch.setattr(
        rig.engine, "submit", lambda request: (seen.append(request), submit(request))
    )
    body: dict[str, Any] = {"max_tokens": 2}
    if path.endswith("chat/completions"):
        body["messages"] = [{"role": "user", "content": "hi"}]
    else:
        body["prompt"] = [7, 8]
    if given is not None:
        body["speculate"] = given
    assert http.post(path, json=body).status_code == 200
    assert [request.speculate for request in seen] == [expected]


def test_speculate_is_a_truth_value(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"prompt": [7], "speculate": "no"})
    assert answer.status_code == 400
    assert "speculate" in answer.text
