"""Records a model's definition into a native program.

The definition in `models/` runs once with this class as its `Ops`; every call appends one
operation to the program. Conversions that the definition need not know of are put in here: the
output of a norm, of SiLU or of attention is written straight into the form (float, bf16,
signed bytes with scales) that the linear layer reading it wants.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotbatch.models.ops import Ops
from hotbatch.models.weights import FloatArray, LinearWeight, RawTensor

# Formats that the native module decodes itself; others are decoded here, to f32.
NATIVE_FORMATS = frozenset({"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"})
FOUR_BIT_FORMATS = frozenset({"Q4_0", "Q4_1"})

RawTuple = tuple[str, NDArray[np.uint8], int]


@dataclass(frozen=True, slots=True)
class Recorded:
    """A value of the recording: a buffer that is there, or an operation that waits until its
    reader says in which form it wants the result."""

    buffer: int = -1
    pending: tuple[Any, ...] = ()
    # ("norm", vector, eps) of the buffer; ("linear", activation, weight); ("gated", activation,
    # weight): such a layer followed by SiLU(gate) * up.


def raw_tuple(tensor: RawTensor) -> RawTuple:
    """The tensor as the native module takes it: format, uint8 [rows, bytes a row], columns."""
    cols = tensor.shape[-1]
    if tensor.dtype in NATIVE_FORMATS:
        return tensor.dtype, np.ascontiguousarray(tensor.data), cols
    values = np.ascontiguousarray(tensor.to_f32().reshape(-1, cols))
    return "F32", values.view(np.uint8), cols


def layer_precision(weight: LinearWeight, precision: str, is_head: bool) -> str:
    """int4 keeps a file's own 4-bit grid; what the file holds finer (usually the head, which
    suffers most from coarse weights) stays int8."""
    if precision != "int4":
        return precision
    if all(part.dtype in FOUR_BIT_FORMATS for part in weight.parts):
        return "int4"
    return "int8" if is_head or any(part.dtype == "Q8_0" for part in weight.parts) else "int4"


class ProgramRecorder(Ops[Recorded]):
    """`program` is a native Program with its rotary tables and cache set."""

    def __init__(self, program: Any, precision: str, num_heads: int, progress: Any = None) -> None:
        self._program = program
        self._precision = precision
        self._num_heads = num_heads
        self._progress = progress
        self._selected = False
        self._keep: list[Any] = []  # arrays that the program points into
        self.head_bytes = 0  # of the program's weights, those of sampled rows only

    @property
    def kept(self) -> list[Any]:
        """Must live as long as the program."""
        return self._keep

    def embed(self, table: RawTensor) -> Recorded:
        raw = raw_tuple(table)
        self._keep.append(raw)
        return Recorded(self._program.embed(self._program.add_table(raw)))

    def rms_norm(self, x: Recorded, weight: FloatArray, eps: float) -> Recorded:
        return Recorded(x.buffer, ("norm", self._vector(weight), eps))

    def linear(
        self, x: Recorded, weight: LinearWeight, residual: Recorded | None = None
    ) -> Recorded:
        form = layer_precision(weight, self._precision, is_head=self._selected)
        activation = self._activation(x, form)
        if residual is None and not self._selected:
            return Recorded(pending=("linear", activation, weight))
        target = -1 if residual is None else residual.buffer
        index = self._add_weight(weight, gated=False)
        return Recorded(self._program.linear(activation, index, target))

    def rotary_and_store(
        self,
        qkv: Recorded,
        layer_index: int,
        q_norm: FloatArray | None = None,
        k_norm: FloatArray | None = None,
        eps: float = 0.0,
    ) -> Recorded:
        q_vector = -1 if q_norm is None else self._vector(q_norm)
        k_vector = -1 if k_norm is None else self._vector(k_norm)
        buffer = self._materialise(qkv)
        q = self._program.rotary(buffer, layer_index, q_vector, k_vector, eps, self._num_heads)
        self._program.release(buffer)
        return Recorded(q)

    def attention(self, q: Recorded, layer_index: int, window: int | None) -> Recorded:
        mixed = self._program.attention(q.buffer, layer_index, window or 0)
        self._program.release(q.buffer)
        return Recorded(mixed)

    def silu_mul(self, gate_up: Recorded) -> Recorded:
        kind, activation, weight = gate_up.pending
        assert kind == "linear", "SiLU follows the linear layer that makes gate and up"
        return Recorded(pending=("gated", activation, weight))

    def select(self, x: Recorded) -> Recorded:
        self._selected = True
        return Recorded(self._program.select(x.buffer))

    def _vector(self, values: FloatArray) -> int:
        return int(self._program.add_vector(np.ascontiguousarray(values, np.float32)))

    def _add_weight(self, weight: LinearWeight, *, gated: bool) -> int:
        form = layer_precision(weight, self._precision, is_head=self._selected)
        parts = [raw_tuple(part) for part in weight.parts]
        bias = None if weight.bias is None else np.ascontiguousarray(weight.bias, np.float32)
        before = self._program.weight_bytes
        index = int(self._program.add_weight(form, parts, bias, gated))
        if self._selected:
            self.head_bytes += self._program.weight_bytes - before
        if self._progress is not None:
            self._progress(weight.num_bytes)
        return index

    def _materialise(self, x: Recorded) -> int:
        """The buffer of a value that is read as floats."""
        if not x.pending:
            return x.buffer
        kind, activation, weight = x.pending
        assert kind == "linear", kind
        index = self._add_weight(weight, gated=False)
        return int(self._program.linear(activation, index, -1))

    def _activation(self, x: Recorded, form: str) -> int:
        """`x` in the form that a linear layer reads. Only the residual stream, which norms read,
        lives on; any other buffer has had its one reader."""
        if x.pending and x.pending[0] == "norm":
            _, vector, eps = x.pending
            return int(self._program.norm(x.buffer, vector, eps, form))
        if x.pending and x.pending[0] == "gated":
            _, activation, weight = x.pending
            index = self._add_weight(weight, gated=True)
            return int(self._program.gated_linear(activation, index, form))
        buffer = self._materialise(x)
        converted = int(self._program.convert(buffer, form))
        self._program.release(buffer)
        return converted
