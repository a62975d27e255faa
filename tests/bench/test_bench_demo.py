"""The demo from end to end, with servers that are real but for the model."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from hotbatch.bench import cli, demo
from hotbatch.bench.demo import (
    Burst,
    ModeResult,
    plot,
    run_mode,
    table,
    throughput,
)
from hotbatch.bench.server_metrics import Sample, mean_batch_size, parse_metrics
from hotbatch.bench.server_process import ServerFailedError, serving

COMMAND = (sys.executable, str(Path(__file__).parent / "simulated_serve.py"))
SMALL = Burst(base=2, peak=8, base_requests=2, ramp_start=0.05, ramp_end=0.1)


@pytest.fixture(scope="module")
def results() -> list[ModeResult]:
    clients = SMALL.clients()
    return [run_mode(name, clients, command=COMMAND) for name in ("static", "continuous")]


def test_the_burst_goes_from_base_to_peak_and_is_the_same_every_time():
    burst = Burst()
    clients = burst.clients()
    assert clients == burst.clients()
    assert clients != Burst(seed=1).clients()
    assert Counter(len(client.requests) for client in clients) == {12: 5, 1: 95}
    starts = [client.start for client in clients]
    assert starts[:5] == [0.0] * 5
    assert starts == sorted(starts)
    assert burst.ramp_start <= starts[5] < starts[-1] < burst.ramp_end


def test_lengths_are_mixed():
    lengths = [request.output_len for client in Burst().clients() for request in client.requests]
    short = sum(length <= 48 for length in lengths)
    assert 0.7 < short / len(lengths) < 0.9
    assert max(lengths) > 4 * sorted(lengths)[len(lengths) // 2]


def test_every_mode_serves_the_same_requests_to_their_ends(results: list[ModeResult]):
    expected = [request for client in SMALL.clients() for request in client.requests]
    for result in results:
        assert [record.request for record in result.load.records] == expected
        assert result.figures["failed"] == 0
        wanted = sum(request.output_len for request in expected)
        assert result.figures["total_output_tokens"] == wanted
    texts = [[record.text for record in result.load.records] for result in results]
    assert texts[0] == texts[1]


def test_continuous_batching_keeps_more_in_the_batch(results: list[ModeResult]):
    static, continuous = results
    assert 1.0 <= static.mean_batch <= 4.0
    assert continuous.mean_batch >= 1.0
    for result in results:
        assert result.samples
        assert result.samples[-1].generated <= result.figures["total_output_tokens"]


def test_the_table_shows_the_figures(results: list[ModeResult]):
    console = Console(width=120, record=True)
    with console.capture() as capture:
        console.print(table(results))
    text = capture.get()
    for word in ("static", "continuous", "Time to first token, p99", "Mean batch size", " x"):
        assert word in text


def test_the_plot_is_an_image(results: list[ModeResult], tmp_path: Path):
    path = tmp_path / "new" / "burst.png"
    plot(results, path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_command_prints_and_draws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(demo.run_mode, "__kwdefaults__", {"command": COMMAND, "api_key": None})
    image = tmp_path / "burst.png"
    options = ["--base", "1", "--peak", "2", "--base-requests", "1", "--image", str(image)]
    result = CliRunner().invoke(cli.app, ["demo", "--modes", "continuous", *options])
    assert result.exit_code == 0, result.output
    assert "Mean batch size" in result.output
    assert image.exists()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [(["--modes", "static,magic"], "magic"), (["--base", "9", "--peak", "3"], "--peak")],
)
def test_bad_options_are_named(options: list[str], complaint: str):
    result = CliRunner().invoke(cli.app, ["demo", *options], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert complaint in result.output


def test_a_server_that_fails_to_start_is_quoted():
    refusal = pytest.raises(ServerFailedError, match="cannot start, says the test")
    with refusal, serving(["--fail"], command=COMMAND):
        pass


def test_metrics_are_summed_by_name():
    lines = [
        "# HELP hotbatch:generation_tokens_total Tokens.",
        'hotbatch:generation_tokens_total{model_name="m"} 7.0',
        'hotbatch:request_success_total{finished_reason="stop"} 1.0',
        'hotbatch:request_success_total{finished_reason="length"} 2.0',
        'hotbatch:iteration_requests_bucket{le="1.0"} 5.0',
        "process_start_time_seconds 1.5e3",
    ]
    assert parse_metrics(lines) == {
        "generation_tokens_total": 7.0,
        "request_success_total": 3.0,
        "process_start_time_seconds": 1500.0,
    }


def test_mean_batch_is_requests_per_step_of_the_time_between():
    before = {"iteration_requests_sum": 10.0, "iteration_requests_count": 10.0}
    after = {"iteration_requests_sum": 40.0, "iteration_requests_count": 20.0}
    assert mean_batch_size(before, after) == 3.0
    assert mean_batch_size(before, before) == 0.0


def test_throughput_is_the_rate_over_the_last_second():
    samples = [Sample(0.5 * i, 1, 0, 10.0 * i * i) for i in range(5)]
    times, rates = throughput(samples)
    assert times == [0.5, 1.0, 1.5, 2.0]
    assert rates == [20.0, 40.0, 80.0, 120.0]
