"""What a step of a model needs at least: bytes to read, operations to do."""

from __future__ import annotations

from hotbatch.engine.ceiling import ModelWork
from hotbatch.executor.kv_sizing import kv_bytes_per_token
from hotbatch.models.config import ModelConfig
from hotbatch.models.weights import LinearWeight, LlamaWeights


def model_work(
    config: ModelConfig,
    weights: LlamaWeights,
    kv_dtype: str,
    *,
    body_bytes: float,
    head_bytes: float,
) -> ModelWork:
    """`body_bytes` and `head_bytes` are the weights as the executor holds them."""
    body = sum(
        _size(linear)
        for layer in weights.layers
        for linear in (layer.qkv, layer.attention_out, layer.gate_up, layer.down)
    )
    return ModelWork(
        body_bytes=float(body_bytes),
        head_bytes=float(head_bytes),
        kv_bytes=float(
            kv_bytes_per_token(config.num_layers, config.num_kv_heads, config.head_dim, kv_dtype)
        ),
        body_operations=2.0 * body,
        head_operations=2.0 * _size(weights.head),
        # A product with the key and one with the value, in every head of every layer.
        attention_operations=4.0 * config.num_layers * config.num_heads * config.head_dim,
    )


def _size(linear: LinearWeight) -> int:
    return linear.out_features * linear.in_features
