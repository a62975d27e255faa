from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_openai_server import FakeServer, running
from typer.testing import CliRunner, Result

from hotbatch.bench.arguments import parse_goodput
from hotbatch.bench.cli import app


@pytest.fixture
def server() -> Iterator[FakeServer]:
    """A fake server in a thread: the command runs its own event loop in this one."""
    fake = FakeServer()
    loop = asyncio.new_event_loop()
    is_up = threading.Event()
    stop = asyncio.Event()

    async def main() -> None:
        async with running(fake):
            is_up.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    assert is_up.wait(10)
    yield fake
    loop.call_soon_threadsafe(stop.set)
    thread.join()
    loop.close()


def bench(server: FakeServer, *options: str) -> Result:
    return CliRunner().invoke(app, ["serve", "--base-url", server.base_url, *options])


def test_command_prints_the_banner_and_saves_the_figures(server: FakeServer, tmp_path: Path):
    result = bench(
        server, "--num-prompts", "5", "--random-input-len", "4", "--random-output-len", "3",
        "--max-concurrency", "2", "--warmup", "2", "--metadata", "machine=here", "--save-result",
        "--result-dir", str(tmp_path), "--result-filename", "out.json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "Serving Benchmark Result" in result.output
    saved = json.loads((tmp_path / "out.json").read_text())
    assert saved["completed"] == 5
    assert saved["total_input_tokens"] == 20
    assert saved["total_output_tokens"] == 15
    assert saved["model_id"] == "fake-model"
    assert saved["request_rate"] == "inf"
    assert saved["machine"] == "here"
    assert "ttfts" not in saved
    assert len(server.bodies) == 1 + 2 + 5  # the trial, the warm-up, the run


def test_details_are_saved_on_demand(server: FakeServer, tmp_path: Path):
    bench(
        server, "--num-prompts", "3", "--random-output-len", "2", "--save-detailed",
        "--result-dir", str(tmp_path), "--result-filename", "out.json",
    )  # fmt: skip
    saved = json.loads((tmp_path / "out.json").read_text())
    assert len(saved["ttfts"]) == 3
    assert [len(gaps) for gaps in saved["itls"]] == [1, 1, 1]


def test_chat_endpoint_gets_text(server: FakeServer):
    result = bench(server, "--endpoint", "/v1/chat/completions", "--num-prompts", "2")
    assert result.exit_code == 0, result.output
    assert isinstance(server.bodies[-1]["messages"][0]["content"], str)


def test_a_server_that_refuses_ends_the_command_with_its_word(server: FakeServer):
    server.fail_every = 1
    result = bench(server, "--num-prompts", "2", "--ready-check-timeout-sec", "0")
    assert result.exit_code == 1
    assert "scripted fault" in result.output


@pytest.mark.parametrize("status", [400, 401, 404])
def test_a_refusal_is_not_waited_for(server: FakeServer, status: int):
    server.fail_every, server.fault_status = 1, status
    result = bench(server, "--num-prompts", "2")
    assert result.exit_code == 1
    assert "scripted fault" in result.output
    assert len(server.bodies) == 1


def test_a_sweep_saves_and_draws_each_rate(server: FakeServer, tmp_path: Path):
    result = bench(
        server, "--num-prompts", "3", "--random-output-len", "3", "--request-rate", "200",
        "--request-rate", "400", "--class-mix", "interactive=1,batch=1",
        "--class-slo", "interactive=ttft:5000", "--result-dir", str(tmp_path),
        "--result-filename", "out.json", "--plot-dir", str(tmp_path / "plots"),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert result.output.count("Serving Benchmark Result") == 2
    assert "Served as promised (%):" in result.output
    saved = json.loads((tmp_path / "out-200qps.json").read_text())
    assert (saved["request_rate"], saved["slo_attainment"]) == (200.0, 1.0)
    drawn = {str(path.relative_to(tmp_path / "plots")) for path in tmp_path.rglob("*.png")}
    assert {"throughput_latency.png", "attainment.png", "200qps/occupancy.png"} <= drawn


def test_a_trace_is_replayed(server: FakeServer, tmp_path: Path):
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 10 * i, "input_length": 10 + i, "output_length": 3} for i in range(9)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    result = bench(
        server, "--dataset-name", "mooncake", "--dataset-path", str(trace), "--trace-start", "2",
        "--num-prompts", "3", "--output-scale", "2", "--max-total-len", "18",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    sizes = [(len(body["prompt"]), body["max_tokens"]) for body in server.bodies[1:]]
    assert sizes == [(12, 6), (12, 6), (12, 6)]


def test_conversations_and_bursts_run(server: FakeServer):
    talk = bench(
        server, "--dataset-name", "conversation", "--num-prompts", "2", "--turns", "2",
        "--think-seconds", "0", "--endpoint", "/v1/chat/completions", "--random-output-len", "2",
    )  # fmt: skip
    assert talk.exit_code == 0, talk.output
    assert any(len(body["messages"]) > 1 for body in server.bodies)
    burst = bench(server, "--burst", "1-3-1", "--burst-seconds", "0.05", "--random-output-len", "2")
    assert burst.exit_code == 0, burst.output
    assert server.peak == 3


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--dataset-name", "azure"], "--dataset-path"),
        (["--dataset-name", "azure", "--dataset-path", "/nowhere"], "nowhere"),
        (["--arrival-cv", "0"], "--arrival-cv"),
        (["--burst", "5", "--request-rate", "1", "--request-rate", "2"], "--burst"),
        (["--class-mix", "vip=1"], "vip"),
        (["--goodput", "speed:3"], "--goodput"),
        (["--metric-percentiles", "200"], "--metric-percentiles"),
        (["--percentile-metrics", "nonsense"], "nonsense"),
        (["--extra-body", "[1]"], "--extra-body"),
        (["--metadata", "oops"], "--metadata"),
        (["--token-range", "5", "5"], "--token-range"),
        (["--request-rate", "0"], "request_rate"),
        (["--endpoint", "/v1/chat/completions", "--prompt-kind", "tokens"], "--prompt-kind"),
    ],
)
def test_bad_options_are_named(options: list[str], complaint: str):
    result = CliRunner().invoke(app, ["serve", *options], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert complaint in result.output


def test_goodput_limits_are_parsed():
    assert parse_goodput(["ttft:500 tpot:50", "e2el:9"]) == {"ttft": 500, "tpot": 50, "e2el": 9}
