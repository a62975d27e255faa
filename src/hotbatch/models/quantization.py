"""Storage formats of weights: how many bytes a row takes, and how it decodes to f32.

The names and layouts are GGUF's (ggml's `ggml-common.h`). The plain formats and the simple
quantised ones are decoded here with numpy; the K-quants go through the `gguf` package, which
is imported only then, as that takes longer than reading a small model's header.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotbatch.core.errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class Format:
    """`block_size` consecutive elements of a row are stored in `block_bytes` bytes."""

    name: str
    ggml_type: int
    block_size: int
    block_bytes: int

    def row_bytes(self, elements: int) -> int:
        return elements // self.block_size * self.block_bytes


FORMATS = {
    format.name: format
    for format in (
        Format("F32", 0, 1, 4),
        Format("F16", 1, 1, 2),
        Format("BF16", 30, 1, 2),
        Format("Q4_0", 2, 32, 18),
        Format("Q4_1", 3, 32, 20),
        Format("Q5_0", 6, 32, 22),
        Format("Q5_1", 7, 32, 24),
        Format("Q8_0", 8, 32, 34),
        Format("Q2_K", 10, 256, 84),
        Format("Q3_K", 11, 256, 110),
        Format("Q4_K", 12, 256, 144),
        Format("Q5_K", 13, 256, 176),
        Format("Q6_K", 14, 256, 210),
        Format("IQ4_NL", 20, 32, 18),
        Format("IQ4_XS", 23, 256, 136),
    )
}
FORMAT_OF_GGML_TYPE = {format.ggml_type: format for format in FORMATS.values()}


def decode(rows: NDArray[np.uint8], dtype: str, name: str) -> NDArray[np.float32]:
    """uint8 [n, bytes a row] in format `dtype` -> f32 [n, elements a row].

    Raises:
        ModelLoadError: the format is not supported; `name` is the tensor in the message.
    """
    if dtype not in FORMATS:
        raise ModelLoadError(
            f"Tensor {name} is stored as {dtype}, which is not supported. "
            f"Supported: {', '.join(FORMATS)}."
        )
    decoder = _DECODERS.get(dtype)
    if decoder is not None:
        return decoder(np.ascontiguousarray(rows))
    return _decode_with_gguf(rows, FORMATS[dtype])


def _decode_with_gguf(rows: NDArray[np.uint8], format: Format) -> NDArray[np.float32]:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    decoded: Any = dequantize(rows, GGMLQuantizationType(format.ggml_type))
    return np.asarray(decoded, dtype=np.float32)


def _decode_f32(rows: NDArray[np.uint8]) -> NDArray[np.float32]:
    return rows.view("<f4").astype(np.float32)


def _decode_f16(rows: NDArray[np.uint8]) -> NDArray[np.float32]:
    return rows.view("<f2").astype(np.float32)


def _decode_bf16(rows: NDArray[np.uint8]) -> NDArray[np.float32]:
    # A bf16 is the upper half of the f32 of the same value.
    bits = rows.view("<u2").astype(np.uint32)
    bits <<= np.uint32(16)
    return bits.view(np.float32)


def _decode_q8_0(rows: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Block: f16 scale, 32 int8. Value = scale * q."""
    blocks = rows.reshape(rows.shape[0], -1, 34)
    scale = blocks[..., :2].view("<f2").astype(np.float32)
    values = blocks[..., 2:].view(np.int8).astype(np.float32)
    values *= scale
    return values.reshape(rows.shape[0], -1)


def _unpack_nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    # The low nibbles of a block's 16 bytes are its elements 0..15, the high ones 16..31.
    return np.concatenate([packed & 0x0F, packed >> 4], axis=-1)


def _decode_q4_0(rows: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Block: f16 scale, 16 bytes of nibbles. Value = scale * (q - 8)."""
    blocks = rows.reshape(rows.shape[0], -1, 18)
    values = _unpack_nibbles(blocks[..., 2:]).astype(np.float32)
    values -= 8.0
    values *= blocks[..., :2].view("<f2").astype(np.float32)
    return values.reshape(rows.shape[0], -1)


def _decode_q4_1(rows: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Block: f16 scale, f16 minimum, 16 bytes of nibbles. Value = scale * q + minimum."""
    blocks = rows.reshape(rows.shape[0], -1, 20)
    values = _unpack_nibbles(blocks[..., 4:]).astype(np.float32)
    values *= blocks[..., :2].view("<f2").astype(np.float32)
    values += blocks[..., 2:4].view("<f2").astype(np.float32)
    return values.reshape(rows.shape[0], -1)


_DECODERS: dict[str, Callable[[NDArray[np.uint8]], NDArray[np.float32]]] = {
    "F32": _decode_f32,
    "F16": _decode_f16,
    "BF16": _decode_bf16,
    "Q8_0": _decode_q8_0,
    "Q4_0": _decode_q4_0,
    "Q4_1": _decode_q4_1,
}
