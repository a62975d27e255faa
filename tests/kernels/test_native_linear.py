"""Linear layers and what feeds them, native against the torch references, on every instruction
set that this machine has. A program with a single layer is recorded for each case: its embedding
table holds the inputs, so that token i is input row i, and its logits are the layer's output.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hotbatch.kernels import _native
from hotbatch.kernels.activation.reference import silu_mul
from hotbatch.kernels.matmul import reference
from hotbatch.kernels.norm.reference import rms_norm

ISAS = [name for name in ("avx512bf16", "avx512vnni", "avx2", "portable") if _native.has_isa(name)]
PRECISIONS = ["f32", "bf16", "int8", "int4"]
# Accumulation order differs from torch's; bf16 and int8 inputs are rounded alike on both sides,
# but a last-bit difference before rounding may move a value to the neighbouring step.
TOLERANCE = {"f32": 2e-5, "bf16": 4e-3, "int8": 4e-3, "int4": 4e-3}


def raw_f32(matrix: np.ndarray) -> tuple[str, np.ndarray, int]:
    matrix = np.ascontiguousarray(matrix, dtype=np.float32)
    return "F32", matrix.view(np.uint8), matrix.shape[1]


class LayerProgram:
    """A program that applies one recorded layer to rows of a table."""

    def __init__(self, table: np.ndarray, record, *, isa: str, threads: int = 1) -> None:
        self.program = _native.Program(max_rows=1024, max_logit_rows=64, threads=threads, isa=isa)
        self.program.set_rotary(np.ones((1, 8), np.float32), np.zeros((1, 8), np.float32))
        self.program.set_cache("f32", 16, 1, 16, 1, 1)
        self._table = raw_f32(table)
        x = self.program.embed(self.program.add_table(self._table))
        self.program.finish(record(self.program, self.program.select(x)))

    def __call__(self, rows: list[int]) -> np.ndarray:
        count = len(rows)
        zeros = np.zeros(count, np.int32)
        out = np.empty((count, self.program.vocabulary), np.float32)
        self.program.run(
            np.array(rows, np.int32),
            zeros,
            zeros,
            np.array([0, count], np.int32),
            np.array([1], np.int32),
            np.zeros((1, 1), np.int32),
            np.arange(count, dtype=np.int32),
            None,
            out,
        )
        return out


def expected_linear(
    x: torch.Tensor, weight: torch.Tensor, precision: str, bias: torch.Tensor | None
) -> torch.Tensor:
    if precision == "f32":
        return reference.linear(x, weight, bias)
    if precision == "bf16":
        return reference.linear_bf16(x, weight.to(torch.bfloat16), bias)
    if precision == "int8":
        return reference.linear_int8(x, *reference.quantize_weight_int8(weight), bias)
    return reference.linear_int4(x, reference.quantize_weight_int4(weight), bias)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 32), (192, 80), (48, 33), (576, 7)])
def test_linear_matches_reference(isa: str, precision: str, inputs: int, outputs: int) -> None:
    rng = np.random.default_rng(inputs * outputs)
    table = rng.standard_normal((70, inputs)).astype(np.float32)
    weight = rng.standard_normal((outputs, inputs)).astype(np.float32)
    bias = rng.standard_normal(outputs).astype(np.float32)

    def record(program, x):
        index = program.add_weight(precision, [raw_f32(weight[:5]), raw_f32(weight[5:])], bias)
        return program.linear(program.convert(x, precision), index, -1)

    actual = LayerProgram(table, record, isa=isa)(list(range(70)))
    expected = expected_linear(
        torch.from_numpy(table), torch.from_numpy(weight), precision, torch.from_numpy(bias)
    ).numpy()
    scale = np.abs(expected).max()
    np.testing.assert_allclose(actual, expected, atol=TOLERANCE[precision] * scale)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_row_result_does_not_depend_on_batch_or_threads(isa: str, precision: str) -> None:
    rng = np.random.default_rng(7)
    table = rng.standard_normal((40, 320)).astype(np.float32)
    weight = rng.standard_normal((96, 320)).astype(np.float32)
    norm = rng.standard_normal(320).astype(np.float32)

    def record(program, x):
        index = program.add_weight(precision, [raw_f32(weight)], None)
        return program.linear(program.norm(x, program.add_vector(norm), 1e-5, precision), index, -1)

    alone = LayerProgram(table, record, isa=isa)
    shared = LayerProgram(table, record, isa=isa, threads=3)
    solo = np.concatenate([alone([row]) for row in range(40)])
    for rows in (list(range(40)), [3, 1, 2], [39, 0, 5, 5, 8, 13, 21], list(range(25))):
        np.testing.assert_array_equal(shared(rows), solo[rows])


@pytest.mark.parametrize("isa", ISAS)
def test_norm_and_silu_match_reference(isa: str) -> None:
    rng = np.random.default_rng(3)
    table = (rng.standard_normal((9, 96)) * 8).astype(np.float32)
    weight = rng.standard_normal(96).astype(np.float32)
    square, half = np.eye(96, dtype=np.float32), np.eye(48, dtype=np.float32)

    def record_norm(program, x):
        index = program.add_weight("f32", [raw_f32(square)], None)
        return program.linear(program.norm(x, program.add_vector(weight), 1e-5, "f32"), index, -1)

    def record_silu(program, x):
        index = program.add_weight("f32", [raw_f32(half)], None)
        return program.linear(program.silu_mul(x, "f32"), index, -1)

    rows = list(range(9))
    x = torch.from_numpy(table)
    normed = rms_norm(x, torch.from_numpy(weight), 1e-5).numpy()
    np.testing.assert_allclose(LayerProgram(table, record_norm, isa=isa)(rows), normed, rtol=2e-6)
    gated = silu_mul(x).numpy()
    np.testing.assert_allclose(
        LayerProgram(table, record_silu, isa=isa)(rows), gated, rtol=2e-6, atol=1e-6
    )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_residual_is_added(isa: str, precision: str) -> None:
    rng = np.random.default_rng(5)
    table = rng.standard_normal((8, 64)).astype(np.float32)
    weight = np.zeros((64, 64), np.float32)

    def record(program, x):
        index = program.add_weight(precision, [raw_f32(weight)], None)
        return program.linear(program.convert(x, precision), index, x)

    actual = LayerProgram(table, record, isa=isa)(list(range(8)))
    np.testing.assert_array_equal(actual, table)


@pytest.mark.parametrize("dtype", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_file_formats_decode_like_the_loader(dtype: str) -> None:
    gguf = pytest.importorskip("gguf")
    rng = np.random.default_rng(11)
    weight = rng.standard_normal((40, 128)).astype(np.float32)
    kind = gguf.GGMLQuantizationType[dtype]
    stored = gguf.quants.quantize(weight, kind)
    expected = gguf.quants.dequantize(stored, kind)
    raw = (dtype, np.ascontiguousarray(stored).view(np.uint8), 128)
    identity = np.eye(128, dtype=np.float32)

    def record(program, x):
        return program.linear(program.convert(x, "f32"), program.add_weight("f32", [raw], None), -1)

    actual = LayerProgram(identity, record, isa=_native.best_isa())(list(range(128))).T
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["Q4_0", "Q4_1"])
def test_int4_keeps_the_grid_of_the_file(isa: str, dtype: str) -> None:
    gguf = pytest.importorskip("gguf")
    rng = np.random.default_rng(13)
    kind = gguf.GGMLQuantizationType[dtype]
    stored = gguf.quants.quantize(rng.standard_normal((64, 96)).astype(np.float32), kind)
    expected = gguf.quants.dequantize(stored, kind)
    raw = (dtype, np.ascontiguousarray(stored).view(np.uint8), 96)
    # 127 makes the activation's own scale exact.
    identity = np.eye(96, dtype=np.float32) * 127

    def record(program, x):
        return program.linear(
            program.convert(x, "int4"), program.add_weight("int4", [raw], None), -1
        )

    actual = LayerProgram(identity, record, isa=isa)(list(range(96))).T / 127
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)


def test_misfits_are_refused() -> None:
    program = _native.Program(max_rows=4, max_logit_rows=4, threads=1, isa="portable")
    with pytest.raises(ValueError, match="columns"):
        program.add_weight("f32", [raw_f32(np.ones((2, 16))), raw_f32(np.ones((2, 32)))], None)
    with pytest.raises(ValueError, match="precision"):
        program.add_weight("int3", [raw_f32(np.ones((2, 16)))], None)
    with pytest.raises(ValueError, match="rows of Q8_0"):
        program.add_weight("int8", [("Q8_0", np.zeros((2, 33), np.uint8), 32)], None)
    with pytest.raises(ValueError, match="cannot run"):
        _native.Program(max_rows=4, max_logit_rows=4, threads=1, isa="mmx")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("width", [48, 96, 144])
def test_gated_layer_equals_its_parts(isa: str, precision: str, width: int) -> None:
    """Fused or apart, gate and up and the product after them give the same bits."""
    rng = np.random.default_rng(width)
    table = rng.standard_normal((60, 64)).astype(np.float32)
    gate_up = raw_f32(rng.standard_normal((2 * width, 64)))
    bias = rng.standard_normal(2 * width).astype(np.float32)
    down = raw_f32(rng.standard_normal((40, width)))

    def record_apart(program, x):
        index = program.add_weight(precision, [gate_up], bias)
        both = program.linear(program.convert(x, precision), index, -1)
        inner = program.silu_mul(both, precision)
        return program.linear(inner, program.add_weight(precision, [down], None), -1)

    def record_fused(program, x):
        index = program.add_weight(precision, [gate_up], bias, True)
        inner = program.gated_linear(program.convert(x, precision), index, precision)
        return program.linear(inner, program.add_weight(precision, [down], None), -1)

    apart = LayerProgram(table, record_apart, isa=isa)
    fused = LayerProgram(table, record_fused, isa=isa, threads=2)
    for rows in ([0], list(range(60)), [5, 4, 3]):
        np.testing.assert_array_equal(fused(rows), apart(rows))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_broken_row_breaks_no_other(isa: str, precision: str, fused: bool) -> None:
    """Rows are quantised sixteen at a time where there are so many: what is not a number shows in
    its own row, a row of zeros stays zero, and all others are what they are alone."""
    rng = np.random.default_rng(11)
    table = rng.standard_normal((40, 128)).astype(np.float32)
    broken = {3: np.nan, 17: np.inf, 18: -np.inf}
    for row, value in broken.items():
        table[row, 70] = value
    table[5] = 0.0
    weight = raw_f32(rng.standard_normal((128, 128)))
    down = raw_f32(rng.standard_normal((33, 64)))

    def record(program, x):
        x = program.convert(x, precision)
        if not fused:
            return program.linear(x, program.add_weight(precision, [weight], None), -1)
        inner = program.gated_linear(
            x, program.add_weight(precision, [weight], None, True), precision
        )
        return program.linear(inner, program.add_weight(precision, [down], None), -1)

    program = LayerProgram(table, record, isa=isa)
    together = program(list(range(40)))
    for row in range(40):
        if row in broken:
            assert np.isnan(together[row]).all()
        else:
            np.testing.assert_array_equal(together[row], program([row])[0])
    assert not together[5].any()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("inputs", "outputs"), [(48, 33), (192, 80), (576, 7), (1536, 64)])
def test_one_scale_a_row_matches_reference(isa: str, inputs: int, outputs: int) -> None:
    rng = np.random.default_rng(inputs)
    table = rng.standard_normal((40, inputs)).astype(np.float32)
    weight = rng.standard_normal((outputs, inputs)).astype(np.float32)

    def record(program, x):
        index = program.add_weight("int8", [raw_f32(weight)], None)
        return program.linear(program.convert(x, "int8", row_scale=True), index, -1)

    actual = LayerProgram(table, record, isa=isa)(list(range(40)))
    quantized = reference.quantize_weight_int8(torch.from_numpy(weight))
    expected = reference.linear_int8(torch.from_numpy(table), *quantized, group=inputs).numpy()
    np.testing.assert_allclose(
        actual, expected, atol=TOLERANCE["int8"] * float(np.abs(expected).max())
    )


@pytest.mark.parametrize("isa", ISAS)
def test_one_scale_a_row_does_not_depend_on_batch_or_threads(isa: str) -> None:
    """Tiles of every height, a broken row and a row of zeros."""
    rng = np.random.default_rng(7)
    table = rng.standard_normal((40, 320)).astype(np.float32)
    table[17, 3], table[18, 5], table[5] = np.nan, np.inf, 0.0
    weight = raw_f32(rng.standard_normal((96, 320)))
    norm = rng.standard_normal(320).astype(np.float32)

    def record(program, x):
        x = program.norm(x, program.add_vector(norm), 1e-5, "int8", row_scale=True)
        return program.linear(x, program.add_weight("int8", [weight], None), -1)

    alone = LayerProgram(table, record, isa=isa)
    shared = LayerProgram(table, record, isa=isa, threads=3)
    solo = np.concatenate([alone([row]) for row in range(40)])
    for count in range(1, 41):
        np.testing.assert_array_equal(shared(list(range(count))), solo[:count])
    assert np.isnan(solo[[17, 18]]).all()
    assert not solo[5].any()


@pytest.mark.parametrize("isa", ISAS)
def test_the_longest_row_does_not_overflow(isa: str) -> None:
    """Equal bytes throughout make the largest sums that there can be."""
    inputs = 1 << 15
    table = np.ones((2, inputs), np.float32)
    table[1] = -1.0
    weight = raw_f32(np.ones((32, inputs)))

    def record(program, x):
        index = program.add_weight("int8", [weight], None)
        return program.linear(program.convert(x, "int8", row_scale=True), index, -1)

    actual = LayerProgram(table, record, isa=isa)([0, 1])
    np.testing.assert_allclose(actual[0], inputs, rtol=1e-6)
    np.testing.assert_allclose(actual[1], -inputs, rtol=1e-6)
