from __future__ import annotations

import pytest

from hotbatch.bench import BenchRequest, LoadResult, Record, banner, summarize


def make_record(
    *, started: float = 0.0, times: tuple[float, ...] = (1.0, 2.0, 4.0), error: str | None = None
) -> Record:
    return Record(
        BenchRequest((1, 2), 2, len(times)),
        due=started,
        started=started,
        ended=started + times[-1],
        chunk_times=[started + time for time in times],
        prompt_tokens=2,
        output_tokens=len(times),
        error=error,
    )


def make_load(*records: Record, duration: float = 10.0) -> LoadResult:
    return LoadResult(list(records), started=0.0, duration=duration, client_cpu_seconds=0.5)


def test_figures_of_known_records():
    figures = summarize(make_load(make_record(), make_record(started=2.0, times=(3.0,))))
    assert figures["completed"] == 2
    assert figures["failed"] == 0
    assert figures["total_input_tokens"] == 4
    assert figures["total_output_tokens"] == 4
    assert figures["request_throughput"] == pytest.approx(0.2)
    assert figures["output_throughput"] == pytest.approx(0.4)
    assert figures["total_token_throughput"] == pytest.approx(0.8)
    assert figures["mean_ttft_ms"] == pytest.approx(2000.0)
    assert figures["mean_tpot_ms"] == pytest.approx(1500.0)  # a lone token has no TPOT
    assert figures["mean_itl_ms"] == pytest.approx(1500.0)
    assert figures["p99_itl_ms"] == pytest.approx(1990.0)
    assert figures["mean_e2el_ms"] == pytest.approx(3500.0)
    assert figures["max_concurrent_requests"] == 2
    assert figures["max_output_tokens_per_s"] == 1.0
    assert figures["client_cpu_us_per_token"] == pytest.approx(125000.0)


def test_failures_are_counted_apart_and_the_first_is_told():
    load = make_load(make_record(), make_record(error="HTTP 500: oh"), make_record(error="late"))
    figures = summarize(load)
    assert (figures["completed"], figures["failed"]) == (1, 2)
    assert figures["total_output_tokens"] == 3
    assert figures["output_lens"] == [3, 0, 0]
    assert "HTTP 500: oh" in banner(figures)


def test_a_run_in_which_all_failed_still_reports():
    figures = summarize(make_load(make_record(error="no")))
    assert figures["completed"] == 0
    assert figures["output_throughput"] == 0.0


def test_goodput_needs_every_limit_kept():
    load = make_load(make_record(), make_record(times=(0.5, 5.0)))
    assert summarize(load)["request_goodput"] is None
    assert summarize(load, goodput={"ttft": 1000})["request_goodput"] == pytest.approx(0.2)
    assert summarize(load, goodput={"ttft": 600, "tpot": 2000})["request_goodput"] == 0.0
    assert summarize(load, goodput={"tpot": 1500})["request_goodput"] == pytest.approx(0.1)


def test_consecutive_requests_do_not_overlap():
    figures = summarize(make_load(make_record(), make_record(started=4.0)))
    assert figures["max_concurrent_requests"] == 1


def test_banner_has_the_lines_that_tools_look_for():
    text = banner(summarize(make_load(make_record())), max_concurrency=8, request_rate=2.0)
    lines = text.splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert lines[-1] == "=" * 50
    assert "Successful requests:                     1         " in lines
    assert "Maximum request concurrency:             8         " in lines
    assert "Request rate configured (RPS):           2.00      " in lines
    assert "---------------Time to First Token----------------" in lines
    assert "-----Time per Output Token (excl. 1st token)------" in lines
    assert "---------------Inter-token Latency----------------" in lines
    assert "----------------End-to-end Latency----------------" in lines
    assert "P99 TTFT (ms):                           1000.00   " in lines
