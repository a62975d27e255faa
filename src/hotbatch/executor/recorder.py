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

from hotbatch.executor.channel_scales import column_scales
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
    # ("norm", weight, eps) of the buffer; ("linear", activation, layer); ("gated", activation,
    # layer): such a layer followed by SiLU(gate) * up.


@dataclass(slots=True)
class _Layer:
    """A linear layer about to be packed, which empties `parts`: they may be decoded copies.
    `column_scales`, f32 [in], multiply its columns."""

    weight: LinearWeight
    form: str
    parts: list[RawTuple]
    column_scales: FloatArray | None = None


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
    """`program` is a native Program with its rotary tables and cache set. Where there are `trial`
    tokens to see how large channels get, an int8 layer behind a norm has one activation scale a
    row; without, one for each group."""

    def __init__(
        self,
        program: Any,
        precision: str,
        num_heads: int,
        progress: Any = None,
        *,
        trial: NDArray[np.int32] | None = None,
    ) -> None:
        self._program = program
        self._precision = precision
        self._num_heads = num_heads
        self._progress = progress
        self._num_trial_tokens = 0 if trial is None else len(trial)
        if trial is not None:
            program.set_trial(trial)
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
        return Recorded(x.buffer, ("norm", weight, eps))

    def linear(
        self, x: Recorded, weight: LinearWeight, residual: Recorded | None = None
    ) -> Recorded:
        form = layer_precision(weight, self._precision, is_head=self._selected)
        if x.pending and x.pending[0] == "norm":
            layer = _Layer(weight, form, [raw_tuple(part) for part in weight.parts])
            activation = self._norm(x, layer)
        else:
            activation = self._activation(x, form)  # packs what makes x, before more is decoded
            layer = _Layer(weight, form, [raw_tuple(part) for part in weight.parts])
        if residual is None and not self._selected:
            return Recorded(pending=("linear", activation, layer))
        target = -1 if residual is None else residual.buffer
        index = self._add_weight(layer, gated=False)
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
        kind, activation, layer = gate_up.pending
        assert kind == "linear", "SiLU follows the linear layer that makes gate and up"
        return Recorded(pending=("gated", activation, layer))

    def select(self, x: Recorded) -> Recorded:
        self._selected = True
        return Recorded(self._program.select(x.buffer))

    def _vector(self, values: FloatArray) -> int:
        return int(self._program.add_vector(np.ascontiguousarray(values, np.float32)))

    def _norm(self, x: Recorded, layer: _Layer) -> int:
        """The norm in the form that `layer` reads; where one scale a row does for it, with the
        layer's columns scaled and the norm's channels the other way."""
        _, weight, eps = x.pending
        if layer.form == "int8" and self._num_trial_tokens:
            tried = np.empty((self._num_trial_tokens, weight.shape[0]), np.float32)
            self._program.try_norm(x.buffer, np.ascontiguousarray(weight, np.float32), eps, tried)
            squares = np.empty(weight.shape[0], np.float32)
            self._program.column_squares(layer.parts, squares)
            layer.column_scales = column_scales(tried, squares)
        scales = layer.column_scales
        vector = self._vector(weight if scales is None else weight / scales)
        return int(self._program.norm(x.buffer, vector, eps, layer.form, scales is not None))

    def _add_weight(self, layer: _Layer, *, gated: bool) -> int:
        bias = layer.weight.bias
        parts, layer.parts = layer.parts, []
        before = self._program.weight_bytes
        index = int(
            self._program.add_weight(
                layer.form,
                parts,
                None if bias is None else np.ascontiguousarray(bias, np.float32),
                gated,
                layer.column_scales,
            )
        )
        if self._selected:
            self.head_bytes += self._program.weight_bytes - before
        if self._progress is not None:
            self._progress(layer.weight.num_bytes)
        return index

    def _materialise(self, x: Recorded) -> int:
        """The buffer of a value that is read as floats."""
        if not x.pending:
            return x.buffer
        kind, activation, layer = x.pending
        assert kind == "linear", kind
        index = self._add_weight(layer, gated=False)
        return int(self._program.linear(activation, index, -1))

    def _activation(self, x: Recorded, form: str) -> int:
        """`x`, which is no norm, in the form that a linear layer reads. Only the residual stream,
        which norms read, lives on; any other buffer has had its one reader."""
        if x.pending and x.pending[0] == "gated":
            _, activation, layer = x.pending
            index = self._add_weight(layer, gated=True)
            return int(self._program.gated_linear(activation, index, form))
        buffer = self._materialise(x)
        converted = int(self._program.convert(buffer, form))
        self._program.release(buffer)
        return converted
