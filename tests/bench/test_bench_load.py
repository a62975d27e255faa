from __future__ import annotations

import asyncio

import pytest
from fake_openai_server import FakeServer, running

from hotbatch.bench import (
    Client,
    LoadResult,
    RandomLengths,
    Target,
    random_requests,
    run_clients,
    run_load,
)
from hotbatch.bench.client import open_session


def make_target(server: FakeServer, **options: object) -> Target:
    return Target(server.base_url, "fake-model", **options)


def make_requests(count: int, *, tokens: int = 6, as_text: bool = False) -> list:
    return random_requests(
        count, input_len=RandomLengths(9), output_len=RandomLengths(tokens), as_text=as_text
    )


def load(server: FakeServer, count: int = 12, *, tokens: int = 6, **options: object) -> LoadResult:
    async def run() -> LoadResult:
        async with running(server):
            requests = make_requests(count, tokens=tokens)
            return await run_load(make_target(server), requests, **options)

    return asyncio.run(run())


def test_every_request_is_sent_once_and_every_token_counted():
    server = FakeServer()
    result = load(server, 12)
    assert [record.error for record in result.records] == [None] * 12
    assert sorted(tuple(body["prompt"]) for body in server.bodies) == sorted(
        record.request.prompt for record in result.records
    )
    assert {record.output_tokens for record in result.records} == {6}
    assert {len(record.chunk_times) for record in result.records} == {6}
    assert {record.prompt_tokens for record in result.records} == {9}
    assert {record.text for record in result.records} == {" t0 t1 t2 t3 t4 t5"}


def test_times_are_in_order():
    for record in load(FakeServer(), 3).records:
        assert record.due <= record.started <= record.chunk_times[0]
        assert record.chunk_times == sorted(record.chunk_times)
        assert record.chunk_times[-1] == record.ended


def test_closed_loop_keeps_to_its_cap_and_uses_it():
    server = FakeServer()
    load(server, 20, max_concurrency=3)
    assert server.peak == 3


def test_no_cap_sends_all_at_once():
    server = FakeServer()
    load(server, 20, tokens=40)
    assert server.peak > 3


def test_open_loop_sends_no_earlier_than_due():
    result = load(FakeServer(), 4, arrivals=[0.0, 0.01, 0.02, 0.03])
    for record, due in zip(result.records, [0.0, 0.01, 0.02, 0.03], strict=True):
        assert record.started - result.started >= due


def test_a_refused_request_counts_as_failed_with_its_error():
    result = load(FakeServer(fail_every=3), 9, max_concurrency=1)
    errors = [record.error for record in result.records if record.error]
    assert len(errors) == 3
    assert "HTTP 500" in errors[0]
    assert "scripted fault" in errors[0]


def test_a_stream_that_breaks_off_is_a_failure():
    result = load(FakeServer(cut_after=2), 2)
    assert all(record.error for record in result.records)


def test_a_server_that_is_not_there_is_a_failure():
    result = asyncio.run(run_load(Target("http://127.0.0.1:9", "m"), make_requests(2)))
    assert all("Connect" in (record.error or "") for record in result.records)


def test_without_usage_the_chunks_are_counted():
    result = load(FakeServer(with_usage=False), 2)
    assert {record.output_tokens for record in result.records} == {6}
    assert {record.prompt_tokens for record in result.records} == {9}


def test_an_empty_chunk_is_no_token():
    result = load(FakeServer(empty_first_chunk=True), 2)
    assert {len(record.chunk_times) for record in result.records} == {6}


def test_chat_sends_messages_and_skips_the_role_chunk():
    async def run() -> tuple[FakeServer, LoadResult]:
        async with running(FakeServer()) as server:
            target = make_target(server, endpoint="/v1/chat/completions", api_key="secret")
            return server, await run_load(target, make_requests(2, as_text=True))

    server, result = asyncio.run(run())
    assert server.bodies[0]["messages"][0]["role"] == "user"
    assert server.keys == ["Bearer secret"] * 2
    assert {len(record.chunk_times) for record in result.records} == {6}


def test_chat_with_token_ids_is_refused():
    target = Target("http://x", "m", endpoint="/v1/chat/completions")
    with pytest.raises(ValueError, match="text"):
        target.body(make_requests(1)[0])


def test_body_asks_for_usage_and_takes_extras():
    body = Target("http://x", "m", extra_body={"temperature": 0.5}).body(make_requests(1)[0])
    assert body["stream_options"] == {"include_usage": True}
    assert body["ignore_eos"] is True
    assert body["temperature"] == 0.5
    assert "ignore_eos" not in Target("http://x", "m", ignore_eos=False).body(make_requests(1)[0])


def test_clients_ask_one_after_the_other():
    async def run() -> tuple[FakeServer, LoadResult]:
        async with running(FakeServer()) as server:
            clients = [Client(0.0, tuple(make_requests(4))), Client(0.0, tuple(make_requests(2)))]
            return server, await run_clients(make_target(server), clients)

    server, result = asyncio.run(run())
    assert server.peak <= 2
    assert len(result.records) == 6
    assert all(record.is_success for record in result.records)
    for earlier, later in zip(result.records[:3], result.records[1:4], strict=True):
        assert earlier.ended <= later.started


def test_idle_connections_are_dropped_before_a_server_drops_them():
    async def keepalive() -> float:
        async with open_session(Target("http://127.0.0.1:1", model="m")) as session:
            return session.connector._keepalive_timeout

    assert asyncio.run(keepalive()) < 5
