"""What a step of a model needs, by hand for a small shape."""

from __future__ import annotations

import pytest

from hotbatch.executor.cpu_executor import CpuExecutor
from hotbatch.models.loader import LoadedModel, load_model


def model() -> LoadedModel:
    return load_model("tiny", "dummy")


@pytest.mark.parametrize("precision", ["int8", "f32"])
def test_the_native_executor_says_what_a_step_needs(precision: str) -> None:
    loaded = model()
    config = loaded.config
    executor = CpuExecutor(loaded, num_blocks=4, precision=precision, kv_cache_dtype="f32")
    work = executor.info.work
    assert work is not None
    width = config.head_dim * (config.num_heads + 2 * config.num_kv_heads)
    layer = config.hidden_size * (width + config.num_heads * config.head_dim)
    layer += 3 * config.hidden_size * config.intermediate_size
    head = config.hidden_size * config.vocab_size
    assert work.body_operations == 2 * config.num_layers * layer
    assert work.head_operations == 2 * head
    assert work.kv_bytes == 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4
    assert work.attention_operations == 4 * config.num_layers * config.num_heads * config.head_dim
    size = {"int8": 1, "f32": 4}[precision]
    assert work.body_bytes == pytest.approx(config.num_layers * layer * size, rel=0.15)
    assert work.head_bytes == pytest.approx(head * size, rel=0.15)
    assert work.body_bytes + work.head_bytes == executor.program.weight_bytes


def test_the_torch_executor_says_the_same_in_f32() -> None:
    torch_executor = pytest.importorskip("hotbatch.executor.torch_executor")
    loaded = model()
    theirs = torch_executor.TorchExecutor(loaded, num_blocks=4, kv_dtype="f32").info.work
    ours = CpuExecutor(loaded, num_blocks=4, precision="f32", kv_cache_dtype="f32").info.work
    assert theirs is not None and ours is not None
    assert theirs.body_operations == ours.body_operations
    assert theirs.kv_bytes == ours.kv_bytes
    assert theirs.body_bytes == pytest.approx(ours.body_bytes, rel=0.05)
    assert theirs.head_bytes == pytest.approx(ours.head_bytes, rel=0.05)
