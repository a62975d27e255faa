"""/metrics: vLLM's names, and numbers that add up."""

from __future__ import annotations

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_parts import MODEL, Rig, make_rig, serving

from hotbatch.core.plan import FinishReason
from hotbatch.engine import CAUSES, Ceiling, ModelWork, Phase
from hotbatch.engine.step_stats import RequestTimings
from hotbatch.executor.nvml import DeviceFigures
from hotbatch.server.account_metrics import AccountMetrics
from hotbatch.server.metrics import ServerMetrics

# Names that dashboards made for vLLM ask for, with hotbatch's prefix.
NAMES = [
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "num_preemptions_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "request_success_total",
    "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket",
    "request_time_per_output_token_seconds_bucket",
    "e2e_request_latency_seconds_bucket",
    "request_queue_time_seconds_bucket",
    "request_prefill_time_seconds_bucket",
    "request_decode_time_seconds_bucket",
    "request_inference_time_seconds_bucket",
    "request_prompt_tokens_bucket",
    "request_generation_tokens_bucket",
    "iteration_tokens_total_bucket",
]


def samples(text: str) -> dict[tuple[str, str], float]:
    """(name, the label beside the model's) -> value; buckets by their bound."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            if "info" not in sample.name:
                assert labels.pop("model_name") == MODEL
            name = sample.name.removeprefix("hotbatch:")
            assert name != sample.name
            found[name, ",".join(sorted(labels.values()))] = sample.value
    return found


def test_numbers_after_known_work() -> None:
    with serving(make_rig()) as rig, httpx.Client(base_url=rig.url, trust_env=False) as http:
        before = samples(http.get("/metrics").text)
        assert {name for name, _ in before} >= set(NAMES)
        _work(rig, http)
        found = samples(http.get("/metrics").text)
    assert found["prompt_tokens_total", ""] == 40 + 4 * 3
    assert found["generation_tokens_total", ""] >= 8 + 3 * 5 + 1
    assert found["request_success_total", "length"] == 1 + 3
    assert found["request_success_total", "stop"] == 1
    assert found["request_refused_total", "model_not_found"] == 1
    assert found["time_to_first_token_seconds_count", ""] == 5
    assert found["e2e_request_latency_seconds_count", ""] == 5
    assert found["inter_token_latency_seconds_count", ""] >= 7 + 3 * 4
    assert found["request_prompt_tokens_bucket", "50.0"] == 5
    assert found["request_prompt_tokens_bucket", "20.0"] == 4
    assert found["request_prompt_tokens_sum", ""] == 52
    assert found["kv_cache_usage_perc", ""] == 0
    assert found["num_requests_running", ""] == 0
    assert found["iteration_tokens_total_count", ""] == found["iterations_total", ""] > 0


def _work(rig: Rig, http: httpx.Client) -> None:
    """One prompt of 40 tokens, three answers to one of 3, one that a stop string ends, and
    one request for another model."""

    def post(**body: object) -> int:
        return http.post("/v1/completions", json=body, timeout=30).status_code

    assert post(prompt=[9] * 40, max_tokens=8) == 200
    assert post(prompt=[7, 8, 9], max_tokens=5, n=3) == 200
    first = rig.text(rig.continuation([7, 8, 9], seed=1, max_tokens=30))[0]
    assert post(prompt=[7, 8, 9], max_tokens=30, seed=1, stop=first) == 200
    assert post(prompt="x", model="other") == 404
    rig.wait_idle()


def test_a_histogram_counts_by_upper_bound() -> None:
    class Stats:
        num_running = num_waiting = block_usage = blocks_total = 0
        prefix_query_tokens = prefix_hit_tokens = preemptions = 0
        prompt_tokens = generated_tokens = 0

    metrics = ServerMetrics(MODEL, Stats, {})
    for finished in (0.005, 0.0051, 1e9):
        metrics.on_request(
            RequestTimings("r", 0.0, None, None, None, finished, 3, 0, 0, 0, FinishReason.ABORT)
        )
    found = samples(metrics.render().decode())
    name = "e2e_request_latency_seconds"
    assert found[f"{name}_bucket", "0.005"] == 1
    assert found[f"{name}_bucket", "0.01"] == 2
    assert found[f"{name}_bucket", "7680.0"] == 2
    assert found[f"{name}_bucket", "+Inf"] == found[f"{name}_count", ""] == 3
    assert found[f"{name}_sum", ""] == pytest.approx(1e9 + 0.0101)
    assert found["request_queue_time_seconds_count", ""] == 0


WORK = ModelWork(3e6, 1e6, 700.0, 2.5e8, 0.5e8, 1.0)
CEILING = Ceiling(1e9, 1e12, 1e12, "made up")


def test_the_causes_add_up_to_the_time_since_the_start() -> None:
    rig = make_rig(executor={"work": WORK}, ceiling=CEILING)
    with serving(rig) as rig, httpx.Client(base_url=rig.url, trust_env=False) as http:
        _work(rig, http)
        earlier = rig.engine.totals()
        found = samples(http.get("/metrics").text)
        later = rig.engine.totals()
    by_cause = {cause: found["time_seconds_total", cause.value] for cause in CAUSES}
    assert earlier is not None and later is not None
    assert earlier.seconds <= sum(by_cause.values()) <= later.seconds
    assert found["decode_utilisation_ratio", ""] > 0.0
    for phase in Phase:
        assert found["mbu_ratio", phase.value] >= 0.0
        assert found["mfu_ratio", phase.value] >= 0.0
    assert found["phase_ideal_seconds_total", "decode"] > 0.0
    assert found["step_tokens_total", "prompt"] == found["prompt_tokens_computed_total", ""]
    assert found["knee_tokens", ""] > 0.0
    # The simulated machine takes no time, so the ceiling turns out far higher.
    assert found["ceiling_memory_bytes_per_second", ""] > 1e9
    assert found["step_curve_seconds", "64"] > 0.0
    assert not [name for name, _ in found if name.startswith("nvml")]


def test_without_a_ceiling_nothing_is_claimed() -> None:
    metrics = AccountMetrics(lambda: None, lambda: None)
    assert list(metrics.families({})) == []


def test_the_driver_s_figures_stand_beside_the_measured_ones() -> None:
    figures = DeviceFigures("NVIDIA H200", 4.9e12, 1.0, 0.3, 1 << 30, 2 << 30, 500.0)
    rig = make_rig(executor={"work": WORK}, ceiling=CEILING)
    metrics = AccountMetrics(rig.engine.totals, rig.engine.ceiling, lambda: figures)
    found = {
        sample.name: sample.value
        for family in metrics.families({})
        for sample in family.samples
        if sample.name.startswith("nvml")
    }
    assert found["nvml_bandwidth_bytes_per_second"] == 4.9e12
    assert found["nvml_kernel_ratio"] == 1.0
