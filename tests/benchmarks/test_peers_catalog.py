"""Peers and workloads: what is measured, and how each peer is started."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "peers"))

from peer_catalog import (
    DEFAULT_PEERS,
    PEERS,
    Workload,
    is_measured,
    parse_workloads,
    vllm_preloads,
)
from peer_models import peers_root


def test_a_specification_names_a_workload_for_each_number_of_clients():
    assert parse_workloads(["128x64@1,16", "512x128@4"]) == [
        Workload(128, 64, 1),
        Workload(128, 64, 16),
        Workload(512, 128, 4),
    ]


@pytest.mark.parametrize(
    "spec", ["128x128", "128@1", "axb@1", "128x128@", "128x128@1,,2", "1x2x3@4"]
)
def test_another_form_is_refused_by_name(spec):
    with pytest.raises(ValueError, match="is not a workload such as 128x128@1,16,32") as caught:
        parse_workloads([spec])
    assert repr(spec) in str(caught.value)


@pytest.mark.parametrize("spec", ["0x128@1", "128x1@1", "128x128@0"])
def test_a_workload_without_work_is_refused(spec):
    with pytest.raises(ValueError, match="a prompt and a client at least, and two tokens out"):
        parse_workloads([spec])


@pytest.mark.parametrize(
    ("peer", "workload", "expected"),
    [
        ("hotbatch", "512x128@64", True),
        ("hotbatch-int4", "128x128@1", True),
        ("hotbatch-int4", "128x128@16", False),
        ("ik-q4_0", "128x128@2", False),
        ("llamacpp-q4_0", "128x128@64", True),
        ("llamacpp-q4_0", "512x128@16", False),
        ("openvino-int8-2048", "128x128@16", False),
        ("openvino-int8-2048", "128x128@32", True),
    ],
)
def test_a_peer_is_measured_within_its_limits(peer, workload, expected):
    assert is_measured(PEERS[peer], *parse_workloads([workload])) is expected


def test_hotbatch_goes_first_and_the_default_has_every_aims_peer():
    assert DEFAULT_PEERS[0] == "hotbatch"
    assert {
        "hotbatch-int4",
        "ik-q4_0",
        "ik-q8_0",
        "llamacpp-q4_0",
        "openvino-int8",
        "vllm-w8a8",
    } <= {*DEFAULT_PEERS}


@pytest.mark.parametrize("name", PEERS)
def test_every_command_uses_the_model_and_its_own_installation(name, monkeypatch, tmp_path):
    monkeypatch.setenv("HOTBATCH_PEERS", str(tmp_path))
    command = PEERS[name].command("llama-1b-dummy", 3)
    assert any(str(tmp_path / "models" / "llama-1b-dummy") in word for word in command)
    if PEERS[name].product:
        assert any(word.startswith(str(tmp_path / PEERS[name].product)) for word in command)


def test_threads_reach_each_server(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTBATCH_PEERS", str(tmp_path))
    assert "VLLM_CPU_OMP_THREADS_BIND=0-4" in PEERS["vllm-w8a8"].command("smollm2-135m", 5)
    for name in ("ik-q8_0", "llamacpp-q8_0"):
        command = PEERS[name].command("smollm2-135m", 5)
        assert command[command.index("-t") + 1] == "5"
        assert command[command.index("-tb") + 1] == "5"
    command = PEERS["hotbatch"].command("smollm2-135m", 5)
    assert command[command.index("--threads") + 1] == "5"


def test_peers_are_compared_without_guesses():
    assert "--no-speculate" in PEERS["hotbatch"].command("smollm2-135m", 2)
    assert "--no-speculate" in PEERS["hotbatch-int4"].command("smollm2-135m", 2)
    assert "--no-speculate" not in PEERS["hotbatch-guessing"].command("smollm2-135m", 2)


def test_only_libraries_that_are_there_are_preloaded(tmp_path):
    before = vllm_preloads(tmp_path)
    library = tmp_path / "lib" / "libiomp5.so"
    library.parent.mkdir()
    library.touch()
    assert str(library) not in before
    assert vllm_preloads(tmp_path).split(":")[-1] == str(library)


def test_peers_lie_in_the_cache_unless_told_otherwise(monkeypatch, tmp_path):
    monkeypatch.delenv("HOTBATCH_PEERS", raising=False)
    monkeypatch.setenv("HOTBATCH_CACHE", str(tmp_path))
    assert peers_root() == tmp_path / "peers"
    monkeypatch.setenv("HOTBATCH_PEERS", str(tmp_path / "elsewhere"))
    assert peers_root() == tmp_path / "elsewhere"
