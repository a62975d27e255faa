"""Options: declared once, checked by name, the same from Python and from the command line."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from hotbatch.core.errors import OptionError
from hotbatch.core.service_class import LatencyTargets, ServiceClass
from hotbatch.options import (
    Distances,
    EngineOptions,
    PerClass,
    ServerOptions,
    flag_of,
    parse_bytes,
    parse_distances,
    parse_per_class,
    parse_weights,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1048576", 2**20),
        ("512M", 512 * 2**20),
        ("512mib", 512 * 2**20),
        ("2G", 2 * 2**30),
        ("1.5GB", 3 * 2**29),
        (" 4 k", 4096),
        (7, 7),
    ],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "G", "-1", "1X", "1e9", "two"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="512M"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["9" * 400, "2000T"])
def test_no_machine_is_that_large(text: str) -> None:
    with pytest.raises(ValueError, match="more than any machine"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("kind", "values", "flag"),
    [
        (EngineOptions, {"threads": 0}, "--threads"),
        (EngineOptions, {"threads": True}, "--threads"),
        (EngineOptions, {"batching": "dynamic"}, "--batching"),
        (EngineOptions, {"precision": "fp4"}, "--precision"),
        (EngineOptions, {"max_num_seqs": "8"}, "--max-num-seqs"),
        (EngineOptions, {"max_num_seqs": 0}, "--max-num-seqs"),
        (EngineOptions, {"max_model_len": 1}, "--max-model-len"),
        (EngineOptions, {"block_size": 24}, "--block-size"),
        (EngineOptions, {"kv_cache_memory_bytes": 0}, "--kv-cache-memory-bytes"),
        (EngineOptions, {"static_batch_size": 4}, "--static-batch-size"),
        (EngineOptions, {"static_batch_timeout": 1.0}, "--static-batch-timeout"),
        (
            EngineOptions,
            {"batching": "static", "static_batch_timeout": math.nan},
            "--static-batch-timeout",
        ),
        (
            EngineOptions,
            {"batching": "static", "static_batch_size": 9, "max_num_seqs": 8},
            "--static-batch-size",
        ),
        (EngineOptions, {"max_num_batched_tokens": 255}, "--max-num-batched-tokens"),
        (EngineOptions, {"long_prefill_token_threshold": -1}, "--long-prefill-token-threshold"),
        (EngineOptions, {"long_prefill_token_threshold": None}, "--long-prefill-token-threshold"),
        (EngineOptions, {"speculate_max_tokens": -1}, "--speculate-max-tokens"),
        (EngineOptions, {"chat_template": Path("/nowhere/x.jinja")}, "--chat-template"),
        (EngineOptions, {"kv_cache_memory_bytes": 2**60}, "--kv-cache-memory-bytes"),
        (ServerOptions, {"host": " "}, "--host"),
        (ServerOptions, {"port": 65536}, "--port"),
        (ServerOptions, {"port": -1}, "--port"),
        (ServerOptions, {"api_key": ("",)}, "--api-key"),
        (ServerOptions, {"api_key": "one"}, "--api-key"),
        (ServerOptions, {"max_body_bytes": 10}, "--max-body-bytes"),
        (ServerOptions, {"shutdown_grace": -0.5}, "--shutdown-grace"),
        (ServerOptions, {"log_level": "loud"}, "--log-level"),
    ],
)
def test_bad_values_name_their_option(kind: Any, values: dict[str, Any], flag: str) -> None:
    with pytest.raises(OptionError) as caught:
        kind(**values)
    assert caught.value.param == flag
    assert flag in caught.value.message
    assert "\n" not in caught.value.message


def test_bounds_themselves_are_allowed() -> None:
    assert ServerOptions(port=0).port == 0
    assert ServerOptions(port=65535, shutdown_grace=0).shutdown_grace == 0
    assert EngineOptions(max_num_seqs=1, max_num_batched_tokens=1).max_num_seqs == 1


def test_options_are_frozen_and_keys_stay_out_of_sight() -> None:
    options = ServerOptions(api_key=("sesame",))
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.port = 1  # type: ignore[misc]
    assert "sesame" not in repr(options)


def test_every_option_says_what_it_means() -> None:
    for kind in (EngineOptions, ServerOptions):
        for item in dataclasses.fields(kind):
            assert item.metadata["help"].rstrip().endswith("."), flag_of(item.name)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("500", PerClass(500.0, 500.0, None)),
        ("12.5", PerClass(12.5, 12.5, None)),
        ("interactive=500,standard=2000,batch=none", PerClass(500.0, 2000.0, None)),
        (" batch = 9000 , interactive=NONE ", PerClass(None, None, 9000.0)),
    ],
)
def test_targets_by_class(text: str, value: PerClass) -> None:
    assert parse_per_class(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "-1",
        "nan",
        "inf",
        "fast",
        "gold=5",
        "interactive",
        "standard=",
        "batch=x",
        "500,standard=3",
        "batch=1,batch=2",
    ],
)
def test_what_is_no_target(text: str) -> None:
    with pytest.raises(ValueError):
        parse_per_class(text)


def test_targets_are_in_seconds_and_defaults_are_no_promise() -> None:
    options = EngineOptions()
    assert options.targets()[ServiceClass.INTERACTIVE] == LatencyTargets(1.0, 0.1)
    assert options.targets()[ServiceClass.BATCH] == LatencyTargets()
    assert options.promised()[ServiceClass.INTERACTIVE] == LatencyTargets()
    options = EngineOptions(ttft_slo=parse_per_class("standard=2000"))
    assert options.targets()[ServiceClass.STANDARD] == LatencyTargets(2.0, 0.2)
    assert options.targets()[ServiceClass.INTERACTIVE] == LatencyTargets(None, 0.1)
    assert options.promised()[ServiceClass.STANDARD] == LatencyTargets(2.0, None)


def test_weights_of_tenants() -> None:
    assert parse_weights("key-0=2, alice=0.5,a=b=3") == {"key-0": 2.0, "alice": 0.5, "a=b": 3.0}
    for text in ("", "alice", "alice=", "=2", "alice=0", "alice=-1", "a=1,a=2", "a=nan"):
        with pytest.raises(ValueError):
            parse_weights(text)
    with pytest.raises(OptionError, match="--tenant-weights"):
        EngineOptions(tenant_weights={"a": 0.0})
    with pytest.raises(OptionError, match="--tenant-weights"):
        EngineOptions(tenant_weights=["a"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "distances"),
    [
        ("tokens", Distances(tokens=True)),
        ("requests", Distances(requests=True)),
        ("requests, tokens", Distances(tokens=True, requests=True)),
        (Distances(tokens=True), Distances(tokens=True)),
    ],
)
def test_distances(text: str, distances: Distances) -> None:
    assert parse_distances(text) == distances


@pytest.mark.parametrize("text", ["", "turn", "tokens,", "all"])
def test_distances_that_there_are_not(text: str) -> None:
    with pytest.raises(ValueError, match="tokens, turns, requests"):
        parse_distances(text)


def test_everything_is_guessed_unless_told_otherwise() -> None:
    assert EngineOptions().distances == Distances(tokens=True, turns=True, requests=True)
    assert EngineOptions(speculate_on=Distances(turns=True)).distances == Distances(turns=True)
    assert EngineOptions(speculate=False).distances == Distances()
    assert EngineOptions(speculate_max_tokens=1).distances.tokens
    assert EngineOptions(speculate_max_tokens=0).distances == Distances(turns=True, requests=True)


@pytest.mark.parametrize("batching", ["static", "request"])
def test_closed_batches_guess_nothing(batching: Any) -> None:
    assert EngineOptions(batching=batching).distances == Distances()


def test_the_share_of_guessed_requests_is_one() -> None:
    with pytest.raises(OptionError, match="speculate-kv-share"):
        EngineOptions(speculate_kv_share=1.5)
