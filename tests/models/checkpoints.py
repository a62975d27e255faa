"""Tiny random checkpoints of every supported architecture, written by transformers itself.

Weights, biases and norms are all random, so that nothing a loader forgets goes unseen.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import transformers

_SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

# name -> (model class, what its config adds to _SMALL)
VARIANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama-untied": (transformers.LlamaForCausalLM, {}),
    "llama-tied": (transformers.LlamaForCausalLM, {"tie_word_embeddings": True}),
    "llama-no-groups": (transformers.LlamaForCausalLM, {"num_key_value_heads": 4}),
    "llama-biases": (
        transformers.LlamaForCausalLM,
        {"attention_bias": True, "mlp_bias": True},
    ),
    "llama-head-dim": (transformers.LlamaForCausalLM, {"head_dim": 24}),
    "llama3-rope": (transformers.LlamaForCausalLM, {"rope_parameters": _LLAMA3_ROPE}),
    "linear-rope": (
        transformers.LlamaForCausalLM,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}},
    ),
    "mistral-window": (transformers.MistralForCausalLM, {"sliding_window": 7}),
    "mistral-full": (transformers.MistralForCausalLM, {"sliding_window": None}),
    "qwen2": (transformers.Qwen2ForCausalLM, {"rms_norm_eps": 1e-5}),
    "qwen2-window": (
        transformers.Qwen2ForCausalLM,
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": (transformers.Qwen3ForCausalLM, {"head_dim": 32, "tie_word_embeddings": True}),
}


def reference_model(variant: str, dtype: torch.dtype = torch.float32) -> Any:
    """The transformers model with random weights that are exact in `dtype`, kept in f32."""
    model_class, changes = VARIANTS[variant]
    config = model_class.config_class(**_SMALL | changes)
    config._attn_implementation = "eager"
    model = model_class(config).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            values = 1.0 + 0.3 * noise if "norm" in name else 0.15 * noise
            parameter.copy_(values.to(dtype))
    return model


def save(model: Any, folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    """Write the checkpoint as its makers would, in `dtype`; the model itself stays f32."""
    # A copy, as the conversion would also round the model's rotary frequencies.
    copy.deepcopy(model).to(dtype).save_pretrained(folder, **options)
    return folder


@torch.no_grad()
def logits_of(model: Any, token_ids: list[int]) -> torch.Tensor:
    """f32 [len(token_ids), vocab]."""
    return model(torch.tensor([token_ids])).logits[0]
