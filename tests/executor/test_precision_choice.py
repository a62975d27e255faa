"""Which precision a CPU gets when nobody asks for one."""

from __future__ import annotations

import numpy as np
import pytest

from hotbatch.executor.precision import candidates, choose_precision, product_seconds
from hotbatch.models.weights import LinearWeight, RawTensor


def linear(dtype: str, outputs: int = 64, inputs: int = 64) -> LinearWeight:
    row_bytes = {"Q4_1": inputs // 32 * 20, "F32": inputs * 4}[dtype]
    stored = np.zeros((outputs, row_bytes), np.uint8)
    return LinearWeight("layer", (RawTensor("layer.weight", (outputs, inputs), dtype, stored),))


def test_four_bits_are_considered_only_where_the_file_has_them() -> None:
    assert "int4" in candidates([linear("Q4_1")])
    assert "int4" not in candidates([linear("F32")])
    assert "int4" not in candidates([linear("Q4_1"), linear("F32")])


@pytest.mark.parametrize("fastest", ["int8", "int4", "bf16"])
def test_the_fastest_is_chosen_and_the_reason_names_the_others(fastest: str) -> None:
    times = {"int8": 2.0, "int4": 2.0, "bf16": 2.0, fastest: 1.0}
    choice = choose_precision([linear("Q4_1")], 1, times.__getitem__)
    assert choice.precision == fastest
    for other in times.keys() - {fastest}:
        assert f"{other} takes 2.00 times as long" in choice.reason
    assert ("one client" in choice.reason) == (fastest != "int4")


def test_of_two_that_are_about_as_fast_a_stopwatch_does_not_choose() -> None:
    for int4 in (0.95, 1.05):
        times = {"int8": 1.0, "int4": int4, "bf16": 2.0}
        choice = choose_precision([linear("Q4_1")], 1, times.__getitem__)
        assert choice.precision == "int8"
        assert f"int4 takes {int4:.2f} times as long" in choice.reason
        assert ("about the fastest" in choice.reason) == (int4 < 1.0)


@pytest.mark.parametrize("precision", ["int8", "int4", "bf16"])
def test_the_stopwatch_runs_the_native_product(precision: str) -> None:
    weight = linear("Q4_1", outputs=96, inputs=64)
    seconds = product_seconds(weight.parts[0], precision, threads=2)
    assert 0.0 < seconds < 10.0
