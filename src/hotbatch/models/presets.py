"""Shapes of well-known models, for measuring them with made-up weights (`--load-format dummy`).

The numbers are those of the models' published config files.
"""

from __future__ import annotations

from hotbatch.models.config import ModelConfig, RopeScaling

PRESETS = {
    "tiny": ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        layer_windows=(None,) * 2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    ),
    # HuggingFaceTB/SmolLM2-135M-Instruct
    "smollm2-135m": ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        layer_windows=(None,) * 30,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        tie_word_embeddings=True,
    ),
    # Qwen/Qwen2.5-0.5B-Instruct
    "qwen2.5-0.5b": ModelConfig(
        architecture="Qwen2ForCausalLM",
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_layers=24,
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
        layer_windows=(None,) * 24,
        max_position_embeddings=32768,
        rope_theta=1000000.0,
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    # Qwen/Qwen3-0.6B
    "qwen3-0.6b": ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        layer_windows=(None,) * 28,
        max_position_embeddings=40960,
        rope_theta=1000000.0,
        qk_norm=True,
        tie_word_embeddings=True,
    ),
    # meta-llama/Llama-3.2-1B-Instruct
    "llama-1b": ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        layer_windows=(None,) * 16,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=RopeScaling("llama3", factor=32.0),
        tie_word_embeddings=True,
    ),
    # mistralai/Mistral-7B-v0.1
    "mistral-7b": ModelConfig(
        architecture="MistralForCausalLM",
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        layer_windows=(4096,) * 32,
        max_position_embeddings=32768,
        rms_norm_eps=1e-5,
    ),
    # meta-llama/Llama-3.1-8B-Instruct
    "llama-8b": ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        layer_windows=(None,) * 32,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=RopeScaling("llama3", factor=8.0),
    ),
}
