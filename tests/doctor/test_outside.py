"""Servers that do not account for their time: vLLM and SGLang, by what their metrics show."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hotbatch.core.errors import InvalidRequestError
from hotbatch.doctor import Verdict, Window, judge, make_window, read_scrape
from hotbatch.doctor.report import as_json, as_text


def vllm(seconds: float, **rates: float) -> str:
    """What vLLM shows after so many seconds at these rates; gauges are as given."""
    gauges = {"running": 8.0, "waiting": 0.0, "kv": 0.2}
    gauges |= {name: rates.pop(name) for name in list(rates) if name in gauges}
    per_second = {
        "generated": 100.0, "prompt": 50.0, "preempted": 0.0, "drafts": 0.0, "accepted": 0.0,
        "gap": 1.0, "gaps": 100.0, "prefill": 0.1, "decode": 1.0, **rates,
    }  # fmt: skip
    total = {name: value * seconds for name, value in per_second.items()}
    labels = '{engine="0",model_name="m"}'
    lines = [
        "# TYPE vllm:num_requests_running gauge",
        f"vllm:num_requests_running{labels} {gauges['running']}",
        "# TYPE vllm:num_requests_waiting gauge",
        f"vllm:num_requests_waiting{labels} {gauges['waiting']}",
        "# TYPE vllm:kv_cache_usage_perc gauge",
        f"vllm:kv_cache_usage_perc{labels} {gauges['kv']}",
    ]
    for name, key in (
        ("generation_tokens", "generated"),
        ("prompt_tokens", "prompt"),
        ("num_preemptions", "preempted"),
        ("spec_decode_num_draft_tokens", "drafts"),
        ("spec_decode_num_accepted_tokens", "accepted"),
    ):
        lines += [f"# TYPE vllm:{name} counter", f"vllm:{name}_total{labels} {total[key]}"]
    for name, seconds_key, count_key in (
        ("inter_token_latency_seconds", "gap", "gaps"),
        ("request_prefill_time_seconds", "prefill", "gaps"),
        ("request_decode_time_seconds", "decode", "gaps"),
    ):
        lines += [
            f"# TYPE vllm:{name} histogram",
            f'vllm:{name}_bucket{{engine="0",le="+Inf",model_name="m"}} {total[count_key]}',
            f"vllm:{name}_count{labels} {total[count_key]}",
            f"vllm:{name}_sum{labels} {total[seconds_key]}",
        ]
    return "\n".join(lines) + "\n"


def sglang(seconds: float, cached: float = 25.0, **values: float) -> str:
    gauges = {"num_running_reqs": 4.0, "num_queue_reqs": 0.0, "token_usage": 0.1, **values}
    lines = []
    for name, value in gauges.items():
        lines += [f"# TYPE sglang:{name} gauge", f'sglang:{name}{{model_name="m"}} {value}']
    for name, rate in (
        ("prompt_tokens", 100),
        ("generation_tokens", 100),
        ("cached_tokens", cached),
    ):
        lines += [
            f"# TYPE sglang:{name} counter",
            f'sglang:{name}_total{{model_name="m"}} {rate * seconds}',
        ]
    return "\n".join(lines) + "\n"


def window_of(make: Any = vllm, seconds: float = 20.0, **values: float) -> Window:
    scrapes = [
        read_scrape(make(at, **values), at) for at in (5.0, 5.0 + seconds / 2, 5.0 + seconds)
    ]
    return make_window(scrapes)


def verdict_of(make: Any = vllm, **values: float) -> Verdict:
    return judge(window_of(make, **values))


def test_rates_and_means() -> None:
    window = window_of(running=3.0, generated=120.0)
    assert window.server == "vllm"
    assert window.seconds == 20.0
    assert window.running == 3.0
    assert window.generated_rate == pytest.approx(120.0)
    assert window.token_gap == pytest.approx(0.01)
    assert window.prefill_share == pytest.approx(0.1 / 1.1)
    assert window.causes == {} and window.decode_utilisation is None


@pytest.mark.parametrize(
    ("values", "cause"),
    [
        ({"running": 2.0}, "few_clients"),
        ({"running": 20.0, "waiting": 30.0, "kv": 0.97}, "kv_cache"),
        ({"running": 60.0, "preempted": 2.0}, "kv_cache"),
        ({"running": 8.0, "waiting": 30.0, "kv": 0.2}, "seats"),
        ({"running": 40.0, "drafts": 200.0, "accepted": 20.0}, "speculation"),
        ({"running": 40.0, "drafts": 200.0, "accepted": 150.0}, "healthy"),
        ({"running": 40.0, "prefill": 3.0}, "prompts"),
        ({"running": 80.0}, "healthy"),
        ({"running": 0.0, "generated": 0.0, "gaps": 0.0, "gap": 0.0}, "idle"),
    ],
)
def test_vllm(values: dict[str, float], cause: str) -> None:
    verdict = verdict_of(**values)
    assert verdict.cause == cause
    assert verdict.confidence in ("low", "medium"), "nobody can be sure from outside"


def recorded(situation: str) -> Window:
    """vLLM 0.32 for CPU with SmolLM2-135M in bf16 and 16 seats, at the beginning and at the end
    of some 12 seconds, without its buckets and what does not begin with vllm:."""
    folder = Path(__file__).parent / "data"
    texts = [(folder / f"vllm-0.32-{situation}.{part}.txt").read_text() for part in (0, 1)]
    scrapes = [read_scrape(text, at) for text, at in zip(texts, (0.0, 12.0), strict=True)]
    return make_window(scrapes, bandwidth=60e9, weight_bytes=269e6)


def test_two_clients_of_a_real_vllm() -> None:
    window = recorded("few")
    assert judge(window).cause == "few_clients"
    assert (window.running, window.waiting) == (2.0, 0.0)
    assert window.generated_rate == pytest.approx(2002 / 12)
    assert window.prompt_rate == pytest.approx(704 / 12)
    assert window.step_rate == pytest.approx(1012 / 12)
    assert window.step_tokens == pytest.approx(2706 / 1012)
    assert window.token_gap == pytest.approx(0.01245, rel=1e-3)
    assert window.decode_utilisation == pytest.approx(0.36, abs=0.005)


def test_more_clients_than_seats_of_a_real_vllm() -> None:
    window = recorded("seats")
    assert judge(window).cause == "seats"
    assert window.waiting == pytest.approx(15.5)
    assert window.ttft == pytest.approx(2.32, abs=0.005)
    assert window.cache_hit_share == 0.0


def test_a_real_vllm_that_mostly_reads_prompts() -> None:
    window = recorded("prompts")
    verdict = judge(window)
    # Of the requests' time only a third is before their first tokens.
    assert window.prefill_share == pytest.approx(0.31, abs=0.005)
    assert verdict.cause == "prompts"
    assert "2034 tokens in a step, 9 of them generate" in verdict.findings[0].evidence
    assert window.decode_utilisation is None, "no step reads weights only"
    assert "its steps are mostly parts of prompts" in as_text(verdict, window)


def test_sglang() -> None:
    assert verdict_of(sglang).cause == "few_clients"
    assert verdict_of(sglang, num_queue_reqs=20.0, token_usage=0.95).cause == "kv_cache"
    assert verdict_of(sglang, num_running_reqs=64.0).cause == "healthy"
    assert window_of(sglang).cache_hit_share == pytest.approx(0.25)


def test_with_the_machine_s_ceiling_utilisation_is_estimated() -> None:
    scrapes = [read_scrape(vllm(at), at) for at in (0.0, 10.0)]
    window = make_window(scrapes, bandwidth=4e12, weight_bytes=1.6e10)
    # A step each 10 ms reads 16 GB: 1.6 of 4 TB/s.
    assert window.decode_utilisation == pytest.approx(0.4)
    assert "40 %" in as_text(judge(window), window)


def test_what_is_no_server_s_metrics() -> None:
    with pytest.raises(InvalidRequestError, match="no metrics"):
        read_scrape("# TYPE other:thing gauge\nother:thing 1\n", 0.0)
    with pytest.raises(InvalidRequestError, match="/metrics"):
        read_scrape("<html>not found</html>", 0.0)


def test_a_restart_and_a_single_scrape_are_told() -> None:
    scrape = read_scrape(vllm(10.0), 0.0)
    with pytest.raises(InvalidRequestError, match="two scrapes"):
        make_window([scrape])
    with pytest.raises(InvalidRequestError, match="restarted"):
        make_window([scrape, read_scrape(vllm(1.0), 5.0)])


def test_the_text_says_what_to_do_and_how_sure_it_is() -> None:
    window = window_of(running=20.0, waiting=30.0, kv=0.97)
    verdict = judge(window)
    text = as_text(verdict, window)
    assert "KV cache" in text.splitlines()[0]
    assert "--kv-cache-memory-bytes" in text
    assert "--bandwidth" in text, "how to have the utilisation too"
    assert "from outside, as vllm" in text
    assert '"cause": "kv_cache"' in as_json(verdict, window)


def guessing(seconds: float) -> str:
    """A hotbatch that guesses at a distance that is known by name, and at one that is not."""
    lines = ["# TYPE hotbatch:num_requests_running gauge", "hotbatch:num_requests_running 2.0"]
    for name, label, values in (
        ("draft_tokens", "result", {"accepted": 60.0, "wasted": 20.0}),
        ("draft_seconds", "kind", {"spent": 0.02, "wasted": 0.005, "saved": 0.3}),
    ):
        lines.append(f"# TYPE hotbatch:{name} counter")
        for distance, times in (("token", seconds), ("beyond", 2.0 * seconds), ("idle", 1.0)):
            lines += [
                f'hotbatch:{name}_total{{distance="{distance}",{label}="{key}"}} {value * times}'
                for key, value in values.items()
            ]
    return "\n".join(lines) + "\n"


def test_a_line_for_each_distance_that_guessed() -> None:
    window = make_window([read_scrape(guessing(5.0), 5.0), read_scrape(guessing(15.0), 15.0)])
    assert list(window.guesses) == ["token", "beyond"]
    text = as_text(judge(window), window)
    assert (
        "Guesses of next tokens: 80 tokens a second, 75 % right; "
        "in each second they cost 20 ms and saved 300 ms."
    ) in text
    assert "Guesses of beyond: 160 tokens a second" in text
    assert "idle" not in text.partition("Guesses")[2]
    assert '"beyond"' in as_json(judge(window), window)


@pytest.mark.parametrize(
    ("gain", "said"), [(0.3, "30 % more throughput"), (9.5, "10 times the throughput")]
)
def test_a_large_gain_is_told_as_a_factor(gain: float, said: str) -> None:
    window = window_of(running=2.0)
    verdict = judge(window)
    finding = replace(verdict.findings[0], gain=gain)
    assert said in as_text(replace(verdict, findings=(finding,)), window)
