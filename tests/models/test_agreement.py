"""The model definition against Hugging Face transformers, for every supported architecture."""

from __future__ import annotations

import random
from pathlib import Path

import checkpoints
import pytest
import torch
from stepping import logits_in_steps

from hotbatch.executor.torch_executor import TorchExecutor
from hotbatch.models.loader import load_model

SEQUENCES = [
    random.Random(seed).choices(range(96), k=length) for seed, length in enumerate((41, 23, 9))
]
# Chunks of several sizes beside single tokens, sequences that join late and sit steps out.
STEPS = [(16, 0, 0), (1, 20, 0), (7, 1, 4), (0, 1, 1), (16, 1, 1), (1, 0, 3)]


@pytest.mark.parametrize("variant", checkpoints.VARIANTS)
def test_logits_equal_transformers_through_chunks_and_paged_cache(
    variant: str, tmp_path: Path
) -> None:
    reference = checkpoints.reference_model(variant)
    loaded = load_model(checkpoints.save(reference, tmp_path))
    executor = TorchExecutor(loaded, num_blocks=40, block_size=4)

    found = logits_in_steps(executor, SEQUENCES, STEPS)

    for logits, sequence in zip(found, SEQUENCES, strict=True):
        expected = checkpoints.logits_of(reference, sequence)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sharded_half_precision_checkpoint(dtype: torch.dtype, tmp_path: Path) -> None:
    reference = checkpoints.reference_model("qwen3", dtype)
    checkpoints.save(reference, tmp_path, dtype, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    loaded = load_model(tmp_path)
    assert (
        loaded.weights.layers[0].qkv.parts[0].dtype
        == {torch.bfloat16: "BF16", torch.float16: "F16"}[dtype]
    )
    executor = TorchExecutor(loaded, num_blocks=16, block_size=4)

    (logits,) = logits_in_steps(executor, SEQUENCES[:1], [(41,)])

    expected = checkpoints.logits_of(reference, SEQUENCES[0])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_windows_matter_in_these_tests(tmp_path: Path) -> None:
    """The sequences are long enough that a loader which forgot the window would be caught."""
    reference = checkpoints.reference_model("mistral-window")
    full = checkpoints.reference_model("mistral-full")
    difference = checkpoints.logits_of(reference, SEQUENCES[0]) - checkpoints.logits_of(
        full, SEQUENCES[0]
    )
    assert difference[:7].abs().max() < 1e-5 < 0.01 < difference[8:].abs().max()


@pytest.mark.parametrize(("precision", "bound"), [("bf16", 0.02), ("int8", 0.08), ("int4", 0.6)])
def test_lower_precisions_stay_near(precision: str, bound: float, tmp_path: Path) -> None:
    """Bounds are loose, as random weights amplify rounding; perplexity tells what it costs."""
    reference = checkpoints.reference_model("llama-untied")
    loaded = load_model(checkpoints.save(reference, tmp_path))
    executor = TorchExecutor(loaded, precision=precision, num_blocks=16, block_size=4)

    (logits,) = logits_in_steps(executor, SEQUENCES[:1], [(41,)])

    expected = checkpoints.logits_of(reference, SEQUENCES[0])
    error = (logits - expected).norm() / expected.norm()
    assert 1e-5 < error < bound
