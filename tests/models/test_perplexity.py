"""The quality benchmark: its arithmetic, and that the command runs on the reference executor."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest

from hotbatch.core.plan import TokenLogprob
from hotbatch.executor.torch_executor import TorchExecutor
from hotbatch.models.loader import load_model

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "quality" / "perplexity.py"


@pytest.fixture(scope="module")
def perplexity() -> ModuleType:
    spec = importlib.util.spec_from_file_location("perplexity", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["perplexity"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_windows_cover_the_text_once(perplexity: ModuleType) -> None:
    windows = perplexity.windows_of(list(range(9)), 4)
    assert windows == [(0, 1, 2, 3), (4, 5, 6, 7)]  # one token alone predicts nothing
    assert perplexity.windows_of([1, 2, 3], 8) == [(1, 2, 3)]


def test_scores_are_those_of_the_logits(perplexity: ModuleType) -> None:
    executor = TorchExecutor(load_model("tiny", "dummy"), num_blocks=4, block_size=16)
    windows = [(3, 500, 41, 7), (9, 9)]
    entries, seconds = perplexity.score_windows(executor, windows)
    assert [entry.token_id for entry in entries] == [500, 41, 7, 9] and seconds > 0
    score = perplexity.compare("text", "f32", entries, entries, seconds)
    assert score.perplexity == pytest.approx(math.exp(-sum(e.logprob for e in entries) / 4))
    assert (score.ratio, score.top_agreement, score.predicted) == (1.0, 1.0, 4)


def test_ratio_and_agreement(perplexity: ModuleType) -> None:
    def entry(logprob: float, top: int) -> TokenLogprob:
        return TokenLogprob(5, logprob, 1, ((top, logprob),))

    score = perplexity.compare(
        "text", "int8", [entry(-2.0, 5), entry(-4.0, 6)], [entry(-2.0, 5), entry(-2.0, 5)], 2.0
    )
    assert score.ratio == pytest.approx(math.e) and score.perplexity == pytest.approx(math.e**3)
    assert score.top_agreement == 0.5 and score.tokens_per_second == 1.0
    assert score.deviation == pytest.approx(math.sqrt(2.0))


@pytest.mark.slow
def test_command(
    perplexity: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "scores.json"
    common = ["--executor", "torch", "--window", "48", "--max-tokens", "96"]
    assert perplexity.main([*common, "--limit", "0.2", "--json", str(written)]) == 0
    scores = json.loads(written.read_text())["scores"]
    assert [(s["text"], s["precision"]) for s in scores] == [
        ("code", "f32"),
        ("prose", "f32"),
        ("code", "int8"),
        ("prose", "int8"),
    ]
    assert all(1.0 < s["perplexity"] < 200.0 for s in scores)
    assert scores[2]["ratio"] != 1.0
    assert "same top" in capsys.readouterr().out
    assert perplexity.main([*common, "--limit", "-0.5"]) == 1
