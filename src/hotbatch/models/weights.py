"""Weights as they lie in the file: views of mapped bytes that are decoded only when asked.

An executor may take the raw blocks of a quantised file as they are, or decode to f32; nothing
is copied before that. numpy only: the CPU serving path must not load torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotbatch.core.errors import ModelLoadError
from hotbatch.models import quantization

FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]
ByteArray = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class RawTensor:
    """A tensor in its file format.

    name: as in the file, for messages.
    shape: (out, in) for a matrix, (n,) for a vector, in elements.
    dtype: "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", ... (GGUF's names; see `quantization`).
    stored: uint8 [out, bytes a row] for a matrix, [1, bytes] for a vector; a read-only view.
    row_order: where given, row i of the tensor is row row_order[i] of `stored`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    stored: ByteArray
    row_order: IntArray | None = None

    @property
    def data(self) -> ByteArray:
        """uint8 [out, bytes a row] in the tensor's row order: a view where the file has that
        order, else a fresh copy."""
        return self.stored if self.row_order is None else self.stored[self.row_order]

    @property
    def num_bytes(self) -> int:
        """Bytes of `data`."""
        return math.prod(self.shape[:-1]) * int(self.stored.shape[1])

    def to_f32(self) -> FloatArray:
        """The decoded tensor, f32 of `shape`. Raises ModelLoadError for an unknown dtype."""
        return quantization.decode(self.data, self.dtype, self.name).reshape(self.shape)

    def rows_to_f32(self, first: int, last: int) -> FloatArray:
        """Rows first .. last-1 decoded: f32 [last - first, in]; spares decoding it all."""
        if self.row_order is None:
            rows = self.stored[first:last]
        else:
            rows = self.stored[self.row_order[first:last]]
        return quantization.decode(rows, self.dtype, self.name)


@dataclass(frozen=True, slots=True, eq=False)
class LinearWeight:
    """The matrix of one linear layer: parts of equal width, stacked by rows, and a bias.

    A fused layer (query, key and value) keeps one part for each source tensor, since their
    formats may differ. bias: f32 [out] or None.
    """

    name: str
    parts: tuple[RawTensor, ...]
    bias: FloatArray | None = None

    def __post_init__(self) -> None:
        for part in self.parts:
            if len(part.shape) != 2 or part.shape[1] != self.in_features:
                raise ModelLoadError(
                    f"Tensor {part.name} has shape {part.shape}, but {self.name} needs a matrix "
                    f"with {self.in_features} columns. The model's files do not fit together."
                )

    @property
    def out_features(self) -> int:
        return sum(part.shape[0] for part in self.parts)

    @property
    def in_features(self) -> int:
        return self.parts[0].shape[-1]

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    def to_f32(self) -> FloatArray:
        """f32 [out, in], decoded into one fresh array."""
        result = np.empty((self.out_features, self.in_features), dtype=np.float32)
        row = 0
        for part in self.parts:
            result[row : row + part.shape[0]] = part.to_f32()
            row += part.shape[0]
        return result


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One transformer block. H hidden, I intermediate, D head size, Hq and Hkv head counts.

    attention_norm, mlp_norm [H]; qkv [(Hq + 2 Hkv) * D, H]; q_norm, k_norm [D] or None;
    attention_out [H, Hq * D]; gate_up [2 I, H], gate first; down [H, I].
    """

    attention_norm: FloatArray
    qkv: LinearWeight
    attention_out: LinearWeight
    mlp_norm: FloatArray
    gate_up: LinearWeight
    down: LinearWeight
    q_norm: FloatArray | None = None
    k_norm: FloatArray | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LlamaWeights:
    """All weights of a model. embedding [vocab, H]; final_norm [H]; head [vocab, H], which is
    the embedding itself where the two are tied."""

    embedding: RawTensor
    layers: tuple[LayerWeights, ...]
    final_norm: FloatArray
    head: LinearWeight

    @property
    def num_bytes(self) -> int:
        """Bytes of all matrices in their file format, a shared head counted once."""
        linears = [
            linear
            for layer in self.layers
            for linear in (layer.qkv, layer.attention_out, layer.gate_up, layer.down)
        ]
        if not self.head_is_embedding:
            linears.append(self.head)
        return self.embedding.num_bytes + sum(linear.num_bytes for linear in linears)

    @property
    def head_is_embedding(self) -> bool:
        return self.head.parts[0] is self.embedding
