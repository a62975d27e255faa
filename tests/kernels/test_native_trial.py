"""What a program tells of a layer's input and weights before the layer is packed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_native_linear import ISAS, LayerProgram, raw_f32

from hotbatch.kernels import _native
from hotbatch.kernels.norm.reference import rms_norm

INPUTS, TOKENS = 80, 20


def new_program(isa: str, *, threads: int = 1, max_rows: int = 64) -> _native.Program:
    program = _native.Program(max_rows=max_rows, max_logit_rows=64, threads=threads, isa=isa)
    program.set_rotary(np.ones((32, 8), np.float32), np.zeros((32, 8), np.float32))
    program.set_cache("f32", 16, 1, 16, 1, 1)
    return program


@pytest.mark.parametrize("isa", ISAS)
def test_a_norm_is_tried_on_what_all_layers_before_it_make(isa: str) -> None:
    """Each is run once: the residual stream would show it if one ran again."""
    rng = np.random.default_rng(0)
    table = rng.standard_normal((64, INPUTS)).astype(np.float32)
    norms = rng.standard_normal((2, INPUTS)).astype(np.float32)
    matrix = rng.standard_normal((INPUTS, INPUTS)).astype(np.float32)
    tokens = rng.integers(0, 64, TOKENS).astype(np.int32)
    program = new_program(isa, threads=2)
    program.set_trial(tokens)
    raw_table = raw_f32(table)
    stream = program.embed(program.add_table(raw_table))
    expected = torch.from_numpy(table[tokens])
    for weight in norms:
        tried = np.empty((TOKENS, INPUTS), np.float32)
        program.try_norm(stream, weight, 1e-5, tried)
        normed = rms_norm(expected, torch.from_numpy(weight), 1e-5)
        np.testing.assert_allclose(tried, normed, atol=1e-4)
        x = program.norm(stream, program.add_vector(weight), 1e-5, "f32")
        index = program.add_weight("f32", [raw_f32(matrix)], None)
        assert program.linear(x, index, stream) == stream
        expected = expected + normed @ torch.from_numpy(matrix).T


def test_what_cannot_be_tried_is_refused() -> None:
    isa = ISAS[0]
    table = raw_f32(np.ones((8, INPUTS)))
    weight, out = np.ones(INPUTS, np.float32), np.empty((1, INPUTS), np.float32)
    program = new_program(isa)
    stream = program.embed(program.add_table(table))
    with pytest.raises(ValueError, match="wrong shapes"):  # no tokens, so no rows of output
        program.try_norm(stream, weight, 1e-5, out)
    with pytest.raises(ValueError, match="before all else"):
        program.set_trial(np.zeros(1, np.int32))
    with pytest.raises(ValueError, match="too many tokens"):
        new_program(isa, max_rows=4).set_trial(np.zeros(5, np.int32))
    with pytest.raises(ValueError, match="outside the model's context"):
        new_program(isa).set_trial(np.zeros(33, np.int32))
    program = new_program(isa)
    program.set_trial(np.array([8], np.int32))
    stream = program.embed(program.add_table(table))
    with pytest.raises(ValueError, match="outside the vocabulary"):
        program.try_norm(stream, weight, 1e-5, out)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [1, 100, 2500])
def test_mean_squares_of_columns(isa: str, rows: int) -> None:
    """Of more than 1024 rows every so many count, whichever tensor they lie in."""
    rng = np.random.default_rng(rows)
    matrix = rng.standard_normal((rows, INPUTS)).astype(np.float32)
    parts = [raw_f32(matrix[: rows // 3]), raw_f32(matrix[rows // 3 :])]
    found = []
    for threads in (1, 3):
        found.append(np.empty(INPUTS, np.float32))
        new_program(isa, threads=threads).column_squares(parts, found[-1])
    np.testing.assert_array_equal(*found)
    step = -(-rows // 1024)
    np.testing.assert_allclose(found[0], (matrix[::step] ** 2).mean(axis=0), rtol=1e-5)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("gated", [False, True])
def test_columns_are_scaled_when_packed(isa: str, gated: bool) -> None:
    """As if the file held the scaled matrix."""
    rng = np.random.default_rng(3)
    table = rng.standard_normal((9, INPUTS)).astype(np.float32)
    matrix = rng.standard_normal((96, INPUTS)).astype(np.float32)
    scales = np.exp(rng.standard_normal(INPUTS)).astype(np.float32)

    def outputs(matrix: np.ndarray, scales: np.ndarray | None) -> np.ndarray:
        def record(program, x):
            parts = [raw_f32(matrix[:40]), raw_f32(matrix[40:])]
            index = program.add_weight("int8", parts, None, gated, scales)
            x = program.convert(x, "int8", row_scale=True)
            if not gated:
                return program.linear(x, index, -1)
            x = program.gated_linear(x, index, "f32")
            return program.linear(x, program.add_weight("f32", [raw_f32(np.eye(48))], None), -1)

        return LayerProgram(table, record, isa=isa)(list(range(9)))

    np.testing.assert_array_equal(outputs(matrix, scales), outputs(matrix * scales, None))


def test_only_int8_columns_are_scaled() -> None:
    parts, scales = [raw_f32(np.ones((32, INPUTS)))], np.ones(INPUTS, np.float32)
    for precision in ("f32", "bf16", "int4"):
        with pytest.raises(ValueError, match="only int8"):
            new_program(ISAS[0]).add_weight(precision, parts, None, False, scales)
    with pytest.raises(ValueError, match="one scale a column"):
        new_program(ISAS[0]).add_weight("int8", parts, None, False, scales[1:])
