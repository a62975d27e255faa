"""The vocabulary in which a model is written: seven operations over opaque values.

A model definition calls these and nothing else, so the same definition runs eagerly on torch
tensors and is recorded once into a native program. Values are opaque: a definition may pass
them on, but never look into them. What changes from step to step (token ids, positions, block
tables, the wanted rows) is held by the implementation, not passed through the model.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from hotbatch.models.weights import FloatArray, LinearWeight, RawTensor

Value = TypeVar("Value")


class Ops(Protocol[Value]):
    """Shapes: N rows (tokens) of the step, of which S need logits; Hq query heads and Hkv
    key/value heads of D numbers each; I the width of the MLP."""

    def embed(self, table: RawTensor) -> Value:
        """The embeddings of the step's tokens: [N, hidden], the start of the residual stream."""
        ...

    def rms_norm(self, x: Value, weight: FloatArray, eps: float) -> Value:
        """x / sqrt(mean(x^2) + eps) * weight along the last axis, ready for `linear`."""
        ...

    def linear(self, x: Value, weight: LinearWeight, residual: Value | None = None) -> Value:
        """x @ weight.T, plus the weight's bias if it has one, plus `residual` if given."""
        ...

    def rotary_and_store(
        self,
        qkv: Value,
        layer_index: int,
        q_norm: FloatArray | None = None,
        k_norm: FloatArray | None = None,
        eps: float = 0.0,
    ) -> Value:
        """Split [N, (Hq + 2 Hkv) * D] into queries, keys and values; normalise each query and
        key head (RMS over D) where norms are given; rotate both by position; write keys and
        values into the layer's cache at the step's slots. Returns the queries, [N, Hq * D]."""
        ...

    def attention(self, q: Value, layer_index: int, window: int | None) -> Value:
        """Causal attention of [N, Hq * D] queries over the layer's paged cache. A query at
        position p sees keys at p - window + 1 .. p, or all up to p without a window."""
        ...

    def silu_mul(self, gate_up: Value) -> Value:
        """[N, 2 I] -> silu(first half) * second half, [N, I]."""
        ...

    def select(self, x: Value) -> Value:
        """Only the rows whose logits are wanted: [N, hidden] -> [S, hidden]."""
        ...
