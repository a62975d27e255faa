"""Six servers in trouble, or none: the doctor names the cause and the lever."""

from __future__ import annotations

import pytest
from staged import CEILING, STEP_TIME, Server

from hotbatch.core.plan import StepPlan
from hotbatch.core.policies import Policies
from hotbatch.doctor import Verdict

WRONG = Policies(propose_drafts=lambda request, limit: [250] * min(limit, 5))


def check(verdict: Verdict, cause: str, lever: str) -> None:
    assert verdict.cause == cause, (verdict.headline, verdict.shares)
    assert lever in verdict.findings[0].lever
    assert verdict.findings[0].evidence
    assert sum(verdict.shares.values()) == pytest.approx(1.0)
    assert verdict.confidence in ("high", "medium")


def test_few_clients() -> None:
    verdict = Server(clients=2, prompt=20).verdict()
    check(verdict, "few_clients", "concurrency")
    assert verdict.confidence == "high"
    # At the knee 13 sequences take about as long as 2.
    assert 3.0 < verdict.findings[0].gain < 12.0


def test_clients_that_think_for_long() -> None:
    verdict = Server(clients=4, prompt=20, think=2.0).verdict()
    check(verdict, "few_clients", "concurrency")
    assert verdict.shares["no_work"] > 0.4


def test_a_tiny_cache() -> None:
    server = Server(clients=30, prompt=100, tokens=100, num_blocks=30, enable_prefix_caching=False)
    verdict = server.verdict()
    check(verdict, "kv_cache", "--kv-cache-memory-bytes")
    assert any("evictions" in line or "KV cache" in line for line in verdict.findings[0].evidence)
    assert verdict.findings[0].gain > 0.3


def test_a_host_that_stalls() -> None:
    verdict = Server(clients=30, prompt=20, host_seconds=0.015).verdict()
    check(verdict, "host", "CPU")
    assert verdict.decode_utilisation < 0.6
    assert verdict.findings[0].gain == pytest.approx(
        verdict.shares["host_gap"] / (1 - verdict.shares["host_gap"])
    )


def test_a_prompt_heavy_load() -> None:
    verdict = Server(clients=30, prompt=800, tokens=20).verdict()
    check(verdict, "prompts", "prefix cache")


def test_useless_guesses() -> None:
    verdict = Server(clients=16, prompt=20, policies=WRONG).verdict()
    check(verdict, "speculation", "speculation off")
    assert "refused" in " ".join(verdict.findings[0].evidence)
    verdict = Server(clients=2, prompt=20, policies=WRONG).verdict()
    few = next(finding for finding in verdict.findings if finding.cause == "few_clients")
    assert any("rows, guesses among them" in line for line in few.evidence)


def test_a_healthy_server() -> None:
    verdict = Server(clients=48, prompt=10, tokens=200).verdict()
    assert verdict.cause == "healthy", verdict.shares
    assert not verdict.findings
    assert verdict.decode_utilisation > 0.8
    assert verdict.confidence == "high"


def test_too_few_seats() -> None:
    verdict = Server(clients=30, prompt=20, max_num_seqs=3).verdict()
    check(verdict, "seats", "--max-num-seqs")
    assert verdict.findings[0].gain > 1.0


def test_a_static_batch_wastes_its_seats() -> None:
    server = Server(clients=30, prompt=20, batching="static", static_batch_size=8)
    check(server.verdict(), "seats", "continuous")


def test_slow_kernels() -> None:
    verdict = Server(
        clients=48, prompt=10, tokens=200, step_time=lambda plan: 2.5 * STEP_TIME(plan)
    ).verdict()
    check(verdict, "kernels", "--precision")


def test_a_small_batch_is_named_before_the_kernels_that_make_it_dear() -> None:
    """Kernels at a third of the ceiling leave little of the time to the weights' ideal reading;
    more sequences would share the rest of it just as well."""

    def slow(plan: StepPlan) -> float:
        return 3.0 * STEP_TIME(plan)

    verdict = Server(clients=6, prompt=20, step_time=slow).verdict()
    assert verdict.shares["few_sequences"] < 0.15 < verdict.shares["kernel_inefficiency"]
    check(verdict, "few_clients", "concurrency")
    assert any("learnt curve" in line for line in verdict.findings[0].evidence)
    options = {"num_blocks": 24, "enable_prefix_caching": False}
    server = Server(clients=30, prompt=20, tokens=40, step_time=slow, **options)
    verdict = server.verdict()
    assert verdict.shares["kv_limit"] < 0.15 < verdict.shares["kernel_inefficiency"]
    check(verdict, "kv_cache", "--kv-cache-memory-bytes")
    verdict = Server(clients=30, prompt=20, max_num_seqs=6, step_time=slow).verdict()
    assert verdict.shares["seat_limit"] < 0.15 < verdict.shares["kernel_inefficiency"]
    check(verdict, "seats", "--max-num-seqs")


def test_a_batch_at_the_knee_is_not_full_yet() -> None:
    """Nobody is held back as far as the accounts look, which is to the knee."""
    verdict = Server(
        clients=14,
        prompt=20,
        policies=Policies(deadlines=True),  # learns the curve
        step_time=lambda plan: 0.012 + 0.0003 * plan.num_tokens,
    ).verdict()
    assert verdict.shares.get("few_sequences", 0.0) < 0.02
    check(verdict, "few_clients", "concurrency")


def test_an_idle_server() -> None:
    verdict = Server(clients=0).verdict()
    assert verdict.cause == "idle"
    assert verdict.decode_utilisation is None


def test_a_glance_is_not_sure() -> None:
    assert Server(clients=2).verdict(seconds=1.0).confidence == "low"


def test_the_ceiling_is_told() -> None:
    window = Server(clients=20).watch(seconds=2.0)
    assert window.knee == pytest.approx(40 / 3)
    assert set(window.curve) >= {1, 8, 64}
    assert CEILING.bandwidth == 1e9
