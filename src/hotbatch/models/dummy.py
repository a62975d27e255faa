"""Made-up weights of a given shape, to measure how fast a model would run without having it.

The values come from one small pool of random numbers which every tensor views at an offset of
its own, repeating rows where it is larger than the pool: an 8B model costs a few megabytes
until it is decoded. Scaled so that activations stay of ordinary size through many layers.
"""

from __future__ import annotations

import numpy as np

from hotbatch.models.assembly import HF_NAMING, assemble
from hotbatch.models.config import ModelConfig
from hotbatch.models.weights import ByteArray, LlamaWeights, RawTensor

_POOL_VALUES = 1 << 21


def dummy_weights(config: ModelConfig, seed: int = 0) -> LlamaWeights:
    """Random bf16 weights for `config`, a function of `seed` alone."""
    pools = _Pools(seed)
    tensors = {
        name: pools.tensor(name, index, shape)
        for index, (name, shape) in enumerate(_shapes(config).items())
    }
    return assemble(config, tensors, HF_NAMING, "the made-up model")


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    names, hidden, inner = HF_NAMING, config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        f"{names.embedding}.weight": (config.vocab_size, hidden),
        f"{names.final_norm}.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes[f"{names.head}.weight"] = (config.vocab_size, hidden)
    linears = (
        (names.q, config.q_size, hidden, config.attention_bias),
        (names.k, config.kv_size, hidden, config.attention_bias),
        (names.v, config.kv_size, hidden, config.attention_bias),
        (names.attention_out, hidden, config.q_size, config.attention_out_bias),
        (names.gate, inner, hidden, config.mlp_bias),
        (names.up, inner, hidden, config.mlp_bias),
        (names.down, hidden, inner, config.mlp_bias),
    )
    norms = [(names.attention_norm, hidden), (names.mlp_norm, hidden)]
    if config.qk_norm:
        norms += [(names.q_norm, config.head_dim), (names.k_norm, config.head_dim)]
    for index in range(config.num_layers):
        prefix = names.layer.format(index)
        shapes |= {f"{prefix}{name}.weight": (size,) for name, size in norms}
        for name, rows, width, biased in linears:
            shapes[f"{prefix}{name}.weight"] = (rows, width)
            if biased:
                shapes[f"{prefix}{name}.bias"] = (rows,)
    return shapes


class _Pools:
    """One pool of normal numbers, and its bf16 copies scaled for each row width."""

    def __init__(self, seed: int) -> None:
        generator = np.random.Generator(np.random.PCG64(seed))
        self._values = generator.standard_normal(_POOL_VALUES, dtype=np.float32)
        self._scaled: dict[int, ByteArray] = {}

    def tensor(self, name: str, index: int, shape: tuple[int, ...]) -> RawTensor:
        if len(shape) == 1:
            return self._vector(name, index, shape[0])
        rows, width = shape
        pool_rows = min(rows, max(1, _POOL_VALUES // (2 * width)))
        # Another window of the pool for each tensor, so that no two layers are alike.
        first = index * 7919 * 64 % (_POOL_VALUES - pool_rows * width)
        window = self._bf16(width)[2 * first : 2 * (first + pool_rows * width)]
        order = None if pool_rows == rows else np.arange(rows, dtype=np.int64) % pool_rows
        return RawTensor(name, shape, "BF16", window.reshape(pool_rows, 2 * width), order)

    def _vector(self, name: str, index: int, size: int) -> RawTensor:
        first = index * 7919 * 64 % (_POOL_VALUES - size)
        values = 0.1 * self._values[first : first + size]
        if name.endswith(".weight"):
            values = values + np.float32(1.0)  # a norm
        return RawTensor(name, (size,), "F32", values.view(np.uint8)[None])

    def _bf16(self, width: int) -> ByteArray:
        if width not in self._scaled:
            values = self._values * np.float32(width**-0.5)
            self._scaled[width] = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return self._scaled[width]
