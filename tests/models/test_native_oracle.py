"""The CPU executor at f32 against Hugging Face transformers, for every supported architecture."""

from __future__ import annotations

import random
from pathlib import Path

import checkpoints
import pytest
import torch
from stepping import logits_in_steps

from hotbatch.core.errors import ModelLoadError
from hotbatch.executor.cpu_executor import CpuExecutor
from hotbatch.models.loader import load_model

# The executor works on sixteen numbers at a time and says so where a model's heads do not fit.
TOO_NARROW = "llama-head-dim"
SEQUENCES = [
    random.Random(seed).choices(range(96), k=length) for seed, length in enumerate((190, 41, 9))
]
# Prompts in chunks beside single tokens, sequences that join late and sit steps out.
STEPS = [(16, 0, 0), (130, 20, 0), (7, 1, 4), (0, 1, 1), (16, 18, 1), *[(1, 0, 0)] * 20, (1, 1, 3)]


@pytest.mark.parametrize("variant", [name for name in checkpoints.VARIANTS if name != TOO_NARROW])
def test_logits_equal_transformers_through_chunks_and_decodes(variant: str, tmp_path: Path) -> None:
    reference = checkpoints.reference_model(variant)
    loaded = load_model(checkpoints.save(reference, tmp_path))
    executor = CpuExecutor(loaded, num_blocks=40, precision="f32", threads=2)

    found = logits_in_steps(executor, SEQUENCES, STEPS)

    for logits, sequence in zip(found, SEQUENCES, strict=True):
        expected = checkpoints.logits_of(reference, sequence)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_heads_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    loaded = load_model(checkpoints.save(checkpoints.reference_model(TOO_NARROW), tmp_path))
    with pytest.raises(ModelLoadError, match=r"head_dim .* multiple of 16, but the model has 24"):
        CpuExecutor(loaded, num_blocks=4)
