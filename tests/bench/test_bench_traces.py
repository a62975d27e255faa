from __future__ import annotations

import itertools
import statistics
from pathlib import Path

import pytest

from hotbatch.bench.traces import (
    TraceError,
    TraceRow,
    at_rate,
    generated,
    piece,
    read_azure,
    read_mooncake,
    stretched,
    with_lengths,
)
from hotbatch.bench.workload import trace_requests

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319601,3180,8
2023-11-16 18:18:03.9799600,110,0
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:01+00:00,2399,6
"""
MOONCAKE = """{"timestamp": 7000, "input_length": 1100, "output_length": 50, "hash_ids": [7, 8, 9]}

{"timestamp": 10500, "input_length": 1000, "output_length": 3, "hash_ids": [7, 10]}
"""


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_azure_rows_start_at_zero_and_keep_all_digits(tmp_path: Path):
    rows = read_azure(write(tmp_path / "a.csv", AZURE))
    assert [(row.input_len, row.output_len) for row in rows] == [(4808, 10), (3180, 8), (110, 1)]
    assert rows[0].time == 0.0
    assert rows[1].time == pytest.approx(0.0520001, abs=1e-6)
    assert rows[2].time == pytest.approx(60.0)


def test_azure_rows_with_a_time_zone(tmp_path: Path):
    rows = read_azure(write(tmp_path / "a.csv", AZURE_2024))
    assert rows[1].time == pytest.approx(0.99007)


def test_mooncake_rows_have_prefixes(tmp_path: Path):
    rows = read_mooncake(write(tmp_path / "m.jsonl", MOONCAKE))
    assert rows == [TraceRow(0.0, 1100, 50, (7, 8, 9)), TraceRow(3.5, 1000, 3, (7, 10))]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("time,in\n1,2\n", "line 2"), ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no requests")],
)
def test_what_is_no_azure_trace_is_told(tmp_path: Path, text: str, complaint: str):
    with pytest.raises(TraceError, match=complaint):
        read_azure(write(tmp_path / "a.csv", text))


@pytest.mark.parametrize("line", ["[1]", '{"timestamp": 1}', "no json"])
def test_what_is_no_mooncake_trace_is_told(tmp_path: Path, line: str):
    with pytest.raises(TraceError, match="line 1"):
        read_mooncake(write(tmp_path / "m.jsonl", line))


def test_pieces_begin_at_zero_and_stretch():
    rows = [TraceRow(10.0 * i, 5, 5) for i in range(10)]
    cut = piece(rows, 3, start=4)
    assert [row.time for row in cut] == [0.0, 10.0, 20.0]
    assert [row.time for row in stretched(cut, 0.5)] == [0.0, 5.0, 10.0]
    assert at_rate(cut, 6.0)[-1].time == pytest.approx(0.5)
    with pytest.raises(ValueError, match="10 requests"):
        piece(rows, 3, start=10)


def test_lengths_are_scaled_and_cut_to_the_context():
    (row,) = with_lengths([TraceRow(0.0, 1100, 50, (7, 8, 9))], input_scale=0.5, output_scale=2.0)
    assert (row.input_len, row.output_len, row.prefix) == (550, 100, (7, 8))
    (row,) = with_lengths([TraceRow(0.0, 1100, 50, (7, 8, 9))], max_total=512)
    assert (row.input_len, row.output_len, row.prefix) == (462, 50, (7,))
    (row,) = with_lengths([TraceRow(0.0, 1100, 500)], max_total=100)
    assert (row.input_len, row.output_len) == (1, 99)


def test_equal_prefix_ids_are_equal_tokens():
    rows = [TraceRow(0.0, 1100, 5, (7, 8, 9)), TraceRow(0.0, 1000, 5, (7, 10))]
    first, second = (request.prompt for request in trace_requests(rows, seed=3))
    assert (len(first), len(second)) == (1100, 1000)
    assert first[:512] == second[:512]
    assert first[512:600] != second[512:600]
    assert trace_requests(rows, seed=3)[0].prompt == first
    text = trace_requests(rows, as_text=True)[0].prompt
    assert isinstance(text, str) and len(text.split()) == 1100


@pytest.mark.parametrize(
    ("shape", "mean_in", "mean_out"), [("code", 2048, 28), ("conversation", 1155, 211)]
)
def test_made_up_traces_have_the_shape_of_azures(shape, mean_in: int, mean_out: int):
    rows = generated(shape, 8000, seed=1)
    assert rows == generated(shape, 8000, seed=1) != generated(shape, 8000, seed=2)
    assert statistics.fmean(row.input_len for row in rows) == pytest.approx(mean_in, rel=0.15)
    assert statistics.fmean(row.output_len for row in rows) == pytest.approx(mean_out, rel=0.15)
    assert [row.time for row in rows] == sorted(row.time for row in rows)
    gaps = [b.time - a.time for a, b in itertools.pairwise(rows)]
    variation = statistics.pstdev(gaps) / statistics.fmean(gaps)
    assert variation == pytest.approx(1.0, rel=0.15) if shape == "conversation" else variation > 2
