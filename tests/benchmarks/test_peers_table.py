"""The table: medians, ratios, aims, failures, and where it goes in the document."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "peers"))

from peer_catalog import PEERS
from peer_table import AIMS, Aim, cell_of, markdown, write_section


def run(peer, workload, rate, *, repeat=0, failed=0):
    figures = {
        "output_throughput": rate,
        "mean_ttft_ms": 10.0,
        "mean_tpot_ms": 2.0,
        "completed": 8,
        "failed": failed,
    }
    return {
        "peer": peer,
        "workload": workload,
        "repeat": repeat,
        "figures": figures,
        "peak_memory_mb": 500.0 + repeat,
    }


def failure(peer, workload, error):
    return {"peer": peer, "workload": workload, "repeat": 0, "error": error}


def results(*runs, model="smollm2-135m"):
    return {
        "model": model,
        "date": "2026-01-02",
        "machine": {"cpu": "A CPU", "cores": 2},
        "threads": 2,
        "repeats": 3,
        "versions": {"hotbatch": "0.1"},
        "runs": list(runs),
    }


def row_of(text, peer):
    (row,) = [line for line in text.splitlines() if line.startswith(f"| {peer} |")]
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_a_cell_is_the_median_of_its_repeats():
    runs = [run("vllm-w8a8", "128x128@16", rate, repeat=i) for i, rate in enumerate((90, 110, 300))]
    cell = cell_of([*runs, run("vllm-w8a8", "128x128@32", 1.0)], "vllm-w8a8", "128x128@16")
    assert cell.rate == 110
    assert cell.spread == pytest.approx(210 / 110)
    assert cell.peak_mb == 502
    assert cell_of(runs, "hotbatch", "128x128@16") is None


def test_the_ratio_is_ours_over_theirs_and_an_aim_is_met_or_missed():
    text = markdown(
        results(
            run("hotbatch", "128x128@16", 900),
            run("vllm-w8a8", "128x128@16", 450),
            run("openvino-int8", "128x128@16", 460),
        )
    )
    assert row_of(text, "hotbatch")[-2:] == ["", ""]
    assert row_of(text, "vllm-w8a8")[-2:] == ["2.00", "1.80 met"]
    assert row_of(text, "openvino-int8")[-2:] == ["1.96", "2.00 missed"]


def test_four_bits_are_compared_with_four_bits():
    text = markdown(
        results(
            run("hotbatch", "128x128@1", 200),
            run("hotbatch-int4", "128x128@1", 300),
            run("ik-q4_0", "128x128@1", 250),
            run("ik-q8_0", "128x128@1", 100),
        )
    )
    assert row_of(text, "ik-q4_0")[-2:] == ["1.20 (hotbatch-int4)", "1.10 met"]
    assert row_of(text, "ik-q8_0")[-2:] == ["2.00", "1.25 met"]


def test_workloads_stand_in_order_of_size():
    labels = ["512x128@16", "128x128@64", "128x128@1"]
    text = markdown(results(*(run("hotbatch", label, 1.0) for label in labels)))
    places = [
        text.index(words)
        for words in ("**1 client, 128 in", "**64 clients, 128 in", "**16 clients, 512 in")
    ]
    assert places == sorted(places)


def test_a_peer_that_failed_is_a_row_and_a_reason():
    text = markdown(
        results(
            run("hotbatch", "128x128@16", 900),
            failure("vllm-w8a8", "128x128@16", "ended with\nexit | code 1"),
        )
    )
    assert row_of(text, "vllm-w8a8")[2] == "failed"
    assert "- vllm-w8a8 at 128x128@16: 1 runs failed: ended with exit / code 1" in text


def test_an_aim_is_missed_when_ours_was_not_measured():
    text = markdown(results(run("vllm-w8a8", "128x128@16", 450)))
    assert row_of(text, "vllm-w8a8")[-2:] == ["", "1.80 missed"]


def test_failed_requests_are_told():
    text = markdown(results(run("llamacpp-q4_0", "128x128@16", 90, failed=3)))
    assert "- llamacpp-q4_0 at 128x128@16: 3 requests failed." in text


def test_every_aim_names_a_peer_that_is_measured_there():
    for aims in AIMS.values():
        assert {aim.peer for aim in aims} | {aim.ours for aim in aims} <= set(PEERS)
        assert len(aims) == len({(aim.peer, aim.workload) for aim in aims})
    assert Aim("512x128@64", "openvino-int8", 1.8) in AIMS["smollm2-135m"]


def test_a_section_is_replaced_and_all_else_stays(tmp_path):
    document = tmp_path / "docs" / "performance.md"
    write_section(document, "smollm2-135m", "first")
    write_section(document, "llama-1b-dummy", "other model")
    document.write_text(document.read_text() + "\n## After\n")
    write_section(document, "smollm2-135m", "second")
    text = document.read_text()
    assert "first" not in text
    assert text.count("second") == text.count("other model") == text.count("## After") == 1
    assert text.index("second") < text.index("other model") < text.index("## After")


def test_a_section_without_its_end_is_not_guessed(tmp_path):
    document = tmp_path / "performance.md"
    document.write_text("<!-- peers smollm2-135m: begin -->\nprose")
    with pytest.raises(ValueError, match="has no <!-- peers smollm2-135m: end -->"):
        write_section(document, "smollm2-135m", "text")
    assert document.read_text().endswith("prose")
