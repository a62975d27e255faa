"""The Llama family: Llama 2 and 3.x, SmolLM2, Mistral, Qwen2/2.5 and Qwen3.

Pre-norm transformer blocks with rotary attention over grouped heads and a SwiGLU MLP (Touvron
et al. 2023, "LLaMA"; "Llama 2"). The members differ only in what their weights carry (biases,
query/key norms, a head of their own) and in numbers from the config (windows, rope), so one
definition covers them. Queries, keys and values come from one fused product, gate and up from
another: fewer, wider matrix products keep small batches fast.

The body runs eagerly or is recorded once, so it has no branch on data: only on the config and
on which weights exist.
"""

from __future__ import annotations

from hotbatch.models.config import ModelConfig
from hotbatch.models.ops import Ops, Value
from hotbatch.models.weights import LayerWeights, LlamaWeights


def forward(ops: Ops[Value], weights: LlamaWeights, config: ModelConfig) -> Value:
    """One step over all its tokens; returns the logits [S, vocab] of the wanted rows."""
    x = ops.embed(weights.embedding)
    for index, layer in enumerate(weights.layers):
        x = attention_block(ops, x, layer, index, config)
        x = mlp_block(ops, x, layer, config)
    # Rows nobody asked logits for stop here, before the widest product of the model.
    x = ops.select(x)
    return ops.linear(ops.rms_norm(x, weights.final_norm, config.rms_norm_eps), weights.head)


def attention_block(
    ops: Ops[Value], x: Value, layer: LayerWeights, index: int, config: ModelConfig
) -> Value:
    eps = config.rms_norm_eps
    qkv = ops.linear(ops.rms_norm(x, layer.attention_norm, eps), layer.qkv)
    q = ops.rotary_and_store(qkv, index, layer.q_norm, layer.k_norm, eps)
    mixed = ops.attention(q, index, config.layer_windows[index])
    return ops.linear(mixed, layer.attention_out, residual=x)


def mlp_block(ops: Ops[Value], x: Value, layer: LayerWeights, config: ModelConfig) -> Value:
    gate_up = ops.linear(ops.rms_norm(x, layer.mlp_norm, config.rms_norm_eps), layer.gate_up)
    return ops.linear(ops.silu_mul(gate_up), layer.down, residual=x)
