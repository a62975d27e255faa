"""Tiny GGUF files, written with the gguf package as llama.cpp's converter would."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter

HF_TO_GGUF = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
Encode = Callable[[str, np.ndarray], tuple[np.ndarray, GGMLQuantizationType | None]]


def plain(name: str, values: np.ndarray) -> tuple[np.ndarray, GGMLQuantizationType | None]:
    return values, None


def write(path: Path, model: Any, architecture: str, encode: Encode = plain, **extra: Any) -> Path:
    """Write a transformers model as GGUF; `encode` turns a matrix into raw bytes and their type,
    `extra` are further tensors."""
    config = model.config
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_key_length(head_dim_of(config))
    writer.add_value_length(head_dim_of(config))
    writer.add_tokenizer_model("gpt2")
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(7)
    writer.add_chat_template("{{ messages }}")
    for hf_name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        if architecture == "llama" and "q_proj" in hf_name:
            values = interleave(values, config.num_attention_heads)
        if architecture == "llama" and "k_proj" in hf_name:
            values = interleave(values, config.num_key_value_heads)
        raw, kind = encode(hf_name, values) if values.ndim == 2 else (values, None)
        writer.add_tensor(gguf_name(hf_name), raw, raw_dtype=kind)
    for name, values in extra.items():
        writer.add_tensor(name.replace("__", "."), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def head_dim_of(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def gguf_name(hf_name: str) -> str:
    stem, _, kind = hf_name.rpartition(".")
    if stem in HF_TO_GGUF:
        return f"{HF_TO_GGUF[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{HF_TO_GGUF[part]}.{kind}"


def interleave(values: np.ndarray, heads: int) -> np.ndarray:
    """`LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py."""
    rows = values.shape[0]
    split = values.reshape(heads, 2, rows // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(values.shape))
