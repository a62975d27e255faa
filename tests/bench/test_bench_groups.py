"""Classes, tenants, conversations, clients in phases: who asks, and how it is told apart."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
import typer
from fake_openai_server import FakeServer, running
from test_bench_load import make_requests, make_target

from hotbatch.bench import Target, run_load, summarize
from hotbatch.bench.arguments import parse_classes, parse_phases, parse_tenants
from hotbatch.bench.conversations import Conversation, Turn, random_conversations
from hotbatch.bench.load import Phase, presence, run_conversations, run_phases
from hotbatch.bench.plots import RatePoint, in_flight, plot_run, plot_sweep
from hotbatch.bench.server_metrics import sampling
from hotbatch.bench.session import Work, measure
from hotbatch.bench.workload import BenchRequest, RandomLengths, assigned

CLASSES = parse_classes("interactive=1,batch=3", ["interactive=ttft:500,tpot:50"])
TENANTS = parse_tenants("a=10,b=1", ["b=secret-b"])


def serve_with(server: FakeServer, work):
    async def run():
        async with running(server):
            return await work(make_target(server))

    return asyncio.run(run())


def test_classes_become_tiers_with_their_limits():
    interactive, batch = CLASSES
    assert interactive.fields == {
        "service_tier": "priority",
        "slo": {"ttft_ms": 500.0, "tpot_ms": 50.0},
    }
    assert batch.fields == {"service_tier": "flex"}
    (unsent,) = parse_classes("standard=1", ["standard=ttft:9"], send_slo=False)
    assert unsent.fields == {"service_tier": "default"}
    assert unsent.limits == {"ttft": 9.0}


def test_requests_are_dealt_out_by_share_and_seed():
    requests = assigned(make_requests(4000), classes=CLASSES, tenants=TENANTS, seed=1)
    counts = Counter((request.service_class, request.tenant) for request in requests)
    assert counts["interactive", "a"] == pytest.approx(4000 * 0.25 * 10 / 11, rel=0.1)
    assert counts["batch", "b"] == pytest.approx(4000 * 0.75 / 11, rel=0.25)
    assert requests == assigned(make_requests(4000), classes=CLASSES, tenants=TENANTS, seed=1)
    assert requests != assigned(make_requests(4000), classes=CLASSES, tenants=TENANTS, seed=2)
    assert assigned(make_requests(3)) == make_requests(3)


def test_classes_and_tenants_reach_the_server():
    server = FakeServer()
    requests = assigned(make_requests(60), classes=CLASSES, tenants=TENANTS, seed=1)
    load = serve_with(server, lambda target: run_load(target, requests, max_concurrency=1))
    for request, body, key in zip(requests, server.bodies, server.keys, strict=True):
        assert (
            body["service_tier"]
            == {"interactive": "priority", "batch": "flex"}[request.service_class]
        )
        assert body.get("user") == ("a" if request.tenant == "a" else None)
        assert key == ("Bearer secret-b" if request.tenant == "b" else None)
    figures = summarize(load)
    assert set(figures["by_class"]) == {"interactive", "batch"}
    assert set(figures["by_tenant"]) == {"a", "b"}
    assert sum(group["completed"] for group in figures["by_class"].values()) == 60
    assert figures["by_class"]["batch"]["slo_attainment"] == 1.0  # nothing was promised


def test_refusals_are_failures_by_kind_with_their_retry_after():
    server = FakeServer(
        fail_every=2, fault_status=429, fault_code="queue_requests", retry_after="3"
    )
    load = serve_with(server, lambda target: run_load(target, make_requests(6), max_concurrency=1))
    figures = summarize(load, goodput={"ttft": 1e9})
    assert figures["failures"] == {"429 queue_requests": 3}
    assert figures["rejected"] == 3
    assert figures["slo_attainment"] == pytest.approx(0.5)
    assert {record.retry_after for record in load.records if record.error} == {3.0}


def test_a_client_is_there_in_its_phases():
    phases = [Phase(5, 10.0), Phase(100, 20.0), Phase(5, 10.0)]
    assert presence(phases, 0) == [(0.0, 40.0)]
    assert presence(phases, 5) == presence(phases, 99) == [(10.0, 30.0)]
    assert presence(phases, 100) == []


def test_the_number_of_clients_follows_the_phases():
    server = FakeServer(gather=6)
    phases = [Phase(1, 0.05), Phase(6, 0.05), Phase(0, 0.01)]
    load = serve_with(server, lambda target: run_phases(target, make_requests(3), phases))
    assert server.peak == 6
    assert len(load.records) > 7
    prompts = [record.request.prompt for record in load.records[:6]]
    assert prompts[:3] == [request.prompt for request in make_requests(3)] == prompts[3:]
    early = [r for r in load.records if r.started - load.started < 0.045]
    assert max(in_flight(type(load)(early, load.started, 1.0, 0.0))[1]) == 1


def conversation(start: float = 0.0, think: float = 0.0) -> Conversation:
    turns = (Turn("how are you", 3, 4, 0.0), Turn("and you", 2, 5, think))
    return Conversation(start, turns, BenchRequest("", 0, 0, tenant="t"))


def test_a_turn_holds_all_before_it():
    talk = conversation()
    second = talk.request(1, ["fine"], is_chat=True)
    assert second.prompt == (
        {"role": "user", "content": "how are you"},
        {"role": "assistant", "content": "fine"},
        {"role": "user", "content": "and you"},
    )
    assert (second.prompt_len, second.output_len, second.turn, second.tenant) == (9, 5, 1, "t")
    assert talk.request(1, ["fine"], is_chat=False).prompt == "how are you\nfine\nand you"


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_conversations_are_held_turn_by_turn(endpoint: str):
    server = FakeServer()

    async def talk(target: Target):
        target = Target(target.base_url, "m", endpoint=endpoint)
        return await run_conversations(target, [conversation(think=0.02)] * 2)

    load = serve_with(server, talk)
    assert [record.request.turn for record in load.records] == [0, 1, 0, 1]
    first, second = load.records[:2]
    assert second.started >= first.ended + 0.02
    asked = server.bodies[-1]
    said = asked["prompt"] if "prompt" in asked else asked["messages"][1]["content"]
    assert " t0 t1 t2 t3" in said
    figures = summarize(load)
    assert set(figures["by_turn"]) == {"", "1"}


def test_a_conversation_ends_with_its_first_failure():
    load = serve_with(
        FakeServer(fail_every=1), lambda target: run_conversations(target, [conversation()])
    )
    assert len(load.records) == 1
    assert load.records[0].error is not None


def test_random_conversations_follow_their_seed():
    def make(seed: int):
        return random_conversations(
            [0.0, 1.0], [BenchRequest("", 0, 0)] * 2, num_turns=RandomLengths(4, 0.5),
            question_len=RandomLengths(9), answer_len=RandomLengths(7), think=2.0, seed=seed,
        )  # fmt: skip

    assert make(1) == make(1) != make(2)
    assert [talk.start for talk in make(1)] == [0.0, 1.0]
    assert all(talk.turns[0].think == 0.0 < talk.turns[1].think for talk in make(1))


def test_samples_come_from_any_engine_with_vllms_names():
    server = FakeServer()

    async def work(target: Target):
        return await measure(target, Work(make_requests(40, tokens=80)), with_samples=True)

    assert serve_with(server, work).samples[0].generated == 0.0


def test_a_server_without_metrics_gives_no_samples():
    async def work(target: Target):
        from hotbatch.bench.client import open_session

        async with open_session(target) as session, sampling(session, "http://127.0.0.1:9") as all_:
            return all_

    assert serve_with(FakeServer(), work) == []


def test_plots_are_images(tmp_path):
    requests = assigned(make_requests(12), classes=CLASSES)
    load = serve_with(FakeServer(), lambda target: run_load(target, requests))
    points = [RatePoint(rate, summarize(load)) for rate in (1.0, 2.0)]
    paths = plot_run(load, [], tmp_path) + plot_sweep(points, tmp_path)
    assert len(paths) == 4
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda: parse_classes("vip=1", []), "vip"),
        (lambda: parse_classes("batch=none", []), "NAME=SHARE"),
        (lambda: parse_classes("batch=1", ["standard=ttft:1"]), "does not"),
        (lambda: parse_classes("batch=1", ["batch=speed:1"]), "--class-slo"),
        (lambda: parse_tenants("a=1", ["b=k"]), "--tenant-key"),
        (lambda: parse_tenants("a=1", ["b"]), "NAME=VALUE"),
        (lambda: parse_phases("5-x-5", "1"), "--burst"),
        (lambda: parse_phases("0-0", "1"), "at least one"),
        (lambda: parse_phases("5-9-5", "1-2"), "2 parts"),
        (lambda: parse_phases("5", "0"), "--burst-seconds"),
    ],
)
def test_bad_texts_are_named(call, complaint: str):
    with pytest.raises(typer.BadParameter, match=complaint):
        call()
