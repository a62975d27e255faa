"""What the CPU executor's precisions cost the embedded model, on a short fixed text.

A guard for every run of the tests; `benchmarks/quality/perplexity.py` measures on more text.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from hotbatch.core.plan import PlannedRequest, StepPlan
from hotbatch.executor.cpu_executor import CpuExecutor
from hotbatch.models.embedded import embedded_model_path
from hotbatch.models.loader import load_model
from hotbatch.text import Tokenizer

TEXT = Path(__file__).parents[2] / "benchmarks" / "quality" / "data" / "prose.txt"
WINDOW, NUM_WINDOWS = 384, 2


def perplexity(precision: str) -> float:
    """Over windows that each start with an empty context, as `--precision` serves them."""
    path = embedded_model_path()
    tokens = Tokenizer.from_gguf(path).encode(TEXT.read_text(encoding="utf-8"))
    executor = CpuExecutor(
        load_model(path), num_blocks=WINDOW // 16, precision=precision, max_num_seqs=1
    )
    nats: list[float] = []
    for index in range(NUM_WINDOWS):
        window = tuple(tokens[index * WINDOW : (index + 1) * WINDOW])
        request = PlannedRequest(
            "text",
            0,
            window,
            tuple(range(WINDOW // 16)),
            prompt_logprobs=0,
            next_tokens=window[1:],
        )
        (result,) = executor.run(StepPlan(index, (request,))).requests
        nats += [-entry.logprob for entry in result.prompt_logprobs]
    assert len(nats) == NUM_WINDOWS * (WINDOW - 1)
    return math.exp(sum(nats) / len(nats))


@pytest.fixture(scope="module")
def perplexity_f32() -> float:
    value = perplexity("f32")
    assert 10 < value < 40, "the model does not understand English"
    return value


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "bound"), [("bf16", 0.005), ("int8", 0.02), ("int4", 0.02)])
def test_perplexity_is_near_f32(precision: str, bound: float, perplexity_f32: float) -> None:
    assert abs(perplexity(precision) / perplexity_f32 - 1.0) < bound
