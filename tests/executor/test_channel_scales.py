"""One activation scale a row: how channels are scaled for it, and that it does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cpu_runs import CONTEXT, ISAS, SHAPES, VOCABULARY, model

from hotbatch.core.plan import PlannedRequest, StepPlan
from hotbatch.executor import recorder
from hotbatch.executor.channel_scales import column_scales, trial_tokens
from hotbatch.executor.cpu_executor import CpuExecutor
from hotbatch.models.config import ModelConfig
from hotbatch.models.loader import LoadedModel, load_model
from hotbatch.models.weights import FloatArray, LinearWeight, RawTensor

Choose = Callable[[FloatArray, FloatArray], FloatArray | None]
TOKENS = tuple(int(token) for token in np.random.default_rng(5).integers(3, VOCABULARY, 60))
WIDE = replace(SHAPES["plain"], hidden_size=320, intermediate_size=640, num_heads=20)


def with_outliers(config: ModelConfig) -> LoadedModel:
    """A made-up model as trained ones are: a few channels of each norm's output are up to a hundred
    times as large as the others, and their weights small."""
    plain = load_model("outliers", "dummy", config=config)
    sizes = np.ones(config.hidden_size, np.float32)
    sizes[::40] = np.geomspace(20.0, 100.0, len(sizes[::40]))

    def small(weight: LinearWeight) -> LinearWeight:
        values = np.ascontiguousarray(weight.to_f32() / sizes)
        raw = RawTensor(weight.name, values.shape, "F32", values.view(np.uint8))
        return replace(weight, parts=(raw,))

    layers = tuple(
        replace(
            layer,
            attention_norm=layer.attention_norm * sizes,
            qkv=small(layer.qkv),
            mlp_norm=layer.mlp_norm * sizes,
            gate_up=small(layer.gate_up),
        )
        for layer in plain.weights.layers
    )
    weights = replace(
        plain.weights,
        layers=layers,
        final_norm=plain.weights.final_norm * sizes,
        head=small(plain.weights.head),
    )
    return replace(plain, weights=weights)


def logits(machine: CpuExecutor, tokens: tuple[int, ...] = TOKENS) -> np.ndarray:
    """f32 [tokens, vocabulary] of a prompt; the blocks are the first ones."""
    blocks = tuple(range(-(-len(tokens) // machine.info.block_size)))
    request = PlannedRequest(
        "r", 0, tokens, blocks, prompt_logprobs=0, next_tokens=(*tokens[1:], tokens[0])
    )
    return machine.logits(StepPlan(0, (request,)))


def off(found: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


def int8_logits(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, choose: Choose = column_scales
) -> np.ndarray:
    monkeypatch.setattr(recorder, "column_scales", choose)
    return logits(CpuExecutor(loaded, num_blocks=8, precision="int8", kv_cache_dtype="f32"))


def test_large_channels_are_scaled_down_and_small_weights_up() -> None:
    rng = np.random.default_rng(1)
    tried = rng.standard_normal((64, 256)).astype(np.float32)
    tried[:, 7] *= 400.0
    squares = np.full(256, 0.25, np.float32)
    squares[9] /= 100.0**2
    scales = column_scales(tried, squares)
    assert scales is not None and scales.dtype == np.float32
    others = np.median(scales)
    assert 15.0 < scales[7] / others < 25.0  # the root of 400
    assert 3.5 < scales[9] / others < 4.5  # not the root of 100: it counts as a 16th at least


def test_scaling_changes_no_product() -> None:
    rng = np.random.default_rng(2)
    tried = rng.standard_normal((64, 192)).astype(np.float32)
    tried[:, 3] *= 1000.0
    matrix = rng.standard_normal((50, 192)).astype(np.float32)
    scales = column_scales(tried, (matrix**2).mean(axis=0))
    assert scales is not None
    exact = tried.astype(np.float64) @ matrix.T.astype(np.float64)
    assert off((tried / scales) @ (matrix * scales).T, exact) < 1e-6


def test_where_one_scale_does_not_do_groups_have_their_own() -> None:
    rng = np.random.default_rng(3)
    squares = np.ones(1024, np.float32)
    benign = rng.standard_normal((64, 1024)).astype(np.float32)
    assert column_scales(benign, squares) is not None
    # Another channel stands out in every token, so that none can be scaled down enough. All are in
    # one group and weigh little: groups keep them to themselves.
    odd, weak = benign.copy(), squares.copy()
    odd[np.arange(64), np.arange(64)] = 300.0
    weak[:64] = 0.02**2
    assert column_scales(odd, weak) is None
    broken = benign.copy()
    broken[5, 5] = np.nan
    assert column_scales(broken, squares) is None
    assert column_scales(np.zeros_like(benign), squares) is None
    assert column_scales(benign, 0.0 * squares) is None


def test_trial_tokens_fit_the_model() -> None:
    tokens = trial_tokens(49152, 8192)
    assert tokens.dtype == np.int32 and len(set(tokens.tolist())) == 64
    assert trial_tokens(49152, 20).tolist() == tokens[:20].tolist()
    small = trial_tokens(32, 8192)
    assert small.min() >= 0 and small.max() < 32


def test_quality_with_outliers(monkeypatch: pytest.MonkeyPatch) -> None:
    """One scale a row is far off without scaled channels; with them it is as good as groups."""
    loaded = with_outliers(WIDE)
    exact = logits(CpuExecutor(loaded, num_blocks=8, precision="f32"))
    unscaled = off(
        int8_logits(loaded, monkeypatch, lambda _, squares: np.ones_like(squares)), exact
    )
    groups = off(int8_logits(loaded, monkeypatch, lambda *_: None), exact)
    scaled = off(int8_logits(loaded, monkeypatch), exact)
    assert scaled < 0.5 * unscaled
    assert scaled < 1.1 * groups
    assert scaled < 0.05


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_near_f32_for_every_kind_of_model(shape: str) -> None:
    """Tied heads (whose embedding must stay as it was), biases, norms of queries and keys."""
    exact = logits(CpuExecutor(model(shape), num_blocks=8, precision="f32"))
    found = logits(CpuExecutor(model(shape), num_blocks=8, precision="int8"))
    assert off(found, exact) < 0.05


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_at_every_start(shape: str, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the threads, the cache and the largest step: the scales and the logits."""
    chosen: list[list[FloatArray | None]] = []

    def noted(tried: FloatArray, squares: FloatArray) -> FloatArray | None:
        chosen[-1].append(column_scales(tried, squares))
        return chosen[-1][-1]

    monkeypatch.setattr(recorder, "column_scales", noted)
    found = []
    options: list[dict[str, Any]] = [
        {"num_blocks": 4},
        {"num_blocks": 99, "threads": 3, "max_num_batched_tokens": 768},
        {"num_blocks": 2, "block_size": 32, "max_num_batched_tokens": 61, "max_num_seqs": 1},
        {"num_blocks": 1, "block_size": 64, "max_model_len": 60},
    ]
    for option in options:
        chosen.append([])
        machine = CpuExecutor(model(shape), precision="int8", isa=isa, **option)
        found.append(logits(machine))
    assert len(chosen[0]) == 2 * SHAPES[shape].num_layers + 1
    for scales, result in zip(chosen[1:], found[1:], strict=True):
        for one, other in zip(chosen[0], scales, strict=True):
            assert one is not None and other is not None
            np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(found[0], result)


def test_a_short_context_is_enough() -> None:
    config = replace(SHAPES["plain"], max_position_embeddings=16)
    loaded = load_model("short", "dummy", config=config)
    machine = CpuExecutor(loaded, num_blocks=1, precision="int8", max_num_batched_tokens=16)
    assert np.isfinite(logits(machine, TOKENS[:16])).all()


def test_the_head_is_tried_on_what_steps_give_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last input that was tried, times the head: the logits of the same prompt, up to the
    rounding of that one product. So every operation before it was run, once, and in order."""
    tried: list[FloatArray] = []

    def noted(inputs: FloatArray, squares: FloatArray) -> FloatArray | None:
        tried.append(inputs.copy())
        return column_scales(inputs, squares)

    monkeypatch.setattr(recorder, "column_scales", noted)
    loaded = model("window")
    machine = CpuExecutor(loaded, num_blocks=8, precision="int8")
    tokens = tuple(int(token) for token in trial_tokens(VOCABULARY, CONTEXT))
    expected = tried[-1] @ loaded.weights.head.to_f32().T
    assert off(logits(machine, tokens), expected) < 0.01


@pytest.mark.parametrize("precision", ["f32", "bf16", "int4"])
def test_other_precisions_are_left_alone(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("nothing is tried")

    monkeypatch.setattr(recorder, "column_scales", never)
    CpuExecutor(model("mixed"), num_blocks=1, precision=precision)


def test_only_layers_behind_norms_have_one_scale_a_row() -> None:
    """The others' inputs have no norm to divide, and keep a scale for each group of 64."""
    calls: list[tuple[str, bool]] = []

    class Noting:
        def __init__(self, program: Any) -> None:
            self._program = program

        def __getattr__(self, name: str) -> Any:
            method = getattr(self._program, name)
            if name not in ("norm", "convert", "gated_linear"):
                return method

            def noted(*args: Any) -> Any:
                calls.append((name, name == "norm" and bool(args[-1])))
                return method(*args)

            return noted

    class Recording(recorder.ProgramRecorder):
        def __init__(self, program: Any, *args: Any, **more: Any) -> None:
            super().__init__(Noting(program), *args, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hotbatch.executor.cpu_executor.ProgramRecorder", Recording)
        CpuExecutor(model("plain"), num_blocks=1, precision="int8")
        layer = [("norm", True), ("convert", False), ("norm", True), ("gated_linear", False)]
        assert calls == layer * 2 + [("norm", True)]
        calls.clear()
        patch.setattr(recorder, "column_scales", lambda *_: None)
        CpuExecutor(model("plain"), num_blocks=1, precision="int8")
        assert set(calls) == {("norm", False), ("convert", False), ("gated_linear", False)}
