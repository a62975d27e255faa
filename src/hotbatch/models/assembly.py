"""From a bag of named tensors to LlamaWeights: naming schemes, fusion, and checks of shape.

Hugging Face checkpoints and GGUF files hold the same tensors under other names; a `Naming`
tells them apart and nothing else does. Every tensor is checked against the config, so that
files which do not fit together fail here, by name, and not as a strange answer later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from hotbatch.core.errors import ModelLoadError
from hotbatch.models.config import ModelConfig
from hotbatch.models.weights import (
    FloatArray,
    IntArray,
    LayerWeights,
    LinearWeight,
    LlamaWeights,
    RawTensor,
)


@dataclass(frozen=True, slots=True)
class Naming:
    """What a kind of file calls each tensor; `layer` is the prefix of a layer's, with {}."""

    embedding: str
    final_norm: str
    head: str
    layer: str
    attention_norm: str
    mlp_norm: str
    q: str
    k: str
    v: str
    attention_out: str
    q_norm: str
    k_norm: str
    gate: str
    up: str
    down: str


HF_NAMING = Naming(
    embedding="model.embed_tokens",
    final_norm="model.norm",
    head="lm_head",
    layer="model.layers.{}.",
    attention_norm="input_layernorm",
    mlp_norm="post_attention_layernorm",
    q="self_attn.q_proj",
    k="self_attn.k_proj",
    v="self_attn.v_proj",
    attention_out="self_attn.o_proj",
    q_norm="self_attn.q_norm",
    k_norm="self_attn.k_norm",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
)
GGUF_NAMING = Naming(
    embedding="token_embd",
    final_norm="output_norm",
    head="output",
    layer="blk.{}.",
    attention_norm="attn_norm",
    mlp_norm="ffn_norm",
    q="attn_q",
    k="attn_k",
    v="attn_v",
    attention_out="attn_output",
    q_norm="attn_q_norm",
    k_norm="attn_k_norm",
    gate="ffn_gate",
    up="ffn_up",
    down="ffn_down",
)


def assemble(
    config: ModelConfig, tensors: Mapping[str, RawTensor], naming: Naming, origin: str
) -> LlamaWeights:
    """Build the weights of `config` from `tensors` (name -> tensor).

    Raises:
        ModelLoadError: a tensor is missing, of the wrong shape, or a bias that the config
            knows nothing of; `origin` is where they come from, for the message.
    """
    return _Assembler(config, tensors, naming, origin).weights()


class _Assembler:
    def __init__(
        self, config: ModelConfig, tensors: Mapping[str, RawTensor], naming: Naming, origin: str
    ) -> None:
        self._config = config
        self._tensors = tensors
        self._naming = naming
        self._origin = origin

    def weights(self) -> LlamaWeights:
        config, names = self._config, self._naming
        table = (config.vocab_size, config.hidden_size)
        embedding = self._tensor(f"{names.embedding}.weight", table)
        if config.tie_word_embeddings:
            head = LinearWeight("head", (embedding,))
        else:
            head = LinearWeight("head", (self._tensor(f"{names.head}.weight", table),))
        return LlamaWeights(
            embedding=embedding,
            layers=tuple(self._layer(index) for index in range(config.num_layers)),
            final_norm=self._vector(f"{names.final_norm}.weight", config.hidden_size),
            head=head,
        )

    def _layer(self, index: int) -> LayerWeights:
        config, names = self._config, self._naming
        hidden, inner, heads = config.hidden_size, config.intermediate_size, config.head_dim
        prefix = names.layer.format(index)
        qkv = [(names.q, config.q_size), (names.k, config.kv_size), (names.v, config.kv_size)]
        gate_up = [(names.gate, inner), (names.up, inner)]
        out, down = [(names.attention_out, hidden)], [(names.down, hidden)]
        norms: dict[str, FloatArray] = {}
        if config.qk_norm:
            norms["q_norm"] = self._vector(f"{prefix}{names.q_norm}.weight", heads)
            norms["k_norm"] = self._vector(f"{prefix}{names.k_norm}.weight", heads)
        return LayerWeights(
            attention_norm=self._vector(f"{prefix}{names.attention_norm}.weight", hidden),
            qkv=self._linear(f"{prefix}qkv", prefix, qkv, hidden, config.attention_bias),
            attention_out=self._linear(
                f"{prefix}attention_out", prefix, out, config.q_size, config.attention_out_bias
            ),
            mlp_norm=self._vector(f"{prefix}{names.mlp_norm}.weight", hidden),
            gate_up=self._linear(f"{prefix}gate_up", prefix, gate_up, hidden, config.mlp_bias),
            down=self._linear(f"{prefix}down", prefix, down, inner, config.mlp_bias),
            **norms,
        )

    def _linear(
        self, name: str, prefix: str, parts: list[tuple[str, int]], width: int, biased: bool
    ) -> LinearWeight:
        weights = tuple(
            self._tensor(f"{prefix}{part}.weight", (rows, width)) for part, rows in parts
        )
        bias = None
        if biased:
            bias = np.concatenate(
                [self._vector(f"{prefix}{part}.bias", rows) for part, rows in parts]
            )
        else:
            self._refuse_bias([f"{prefix}{part}.bias" for part, _ in parts])
        return LinearWeight(name, weights, bias)

    def _refuse_bias(self, names: list[str]) -> None:
        for name in names:
            if name in self._tensors:
                raise ModelLoadError(
                    f"{self._origin} holds {name}, but the model's config has no such bias. "
                    "The config and the weights do not belong together."
                )

    def _tensor(self, name: str, shape: tuple[int, ...]) -> RawTensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelLoadError(
                f"{self._origin} has no tensor {name}. The files are incomplete or belong to "
                "another model: download them again."
            )
        if tensor.shape != shape:
            raise ModelLoadError(
                f"Tensor {name} in {self._origin} has shape {tensor.shape}; the model's config "
                f"asks for {shape}. The config and the weights do not belong together."
            )
        return tensor

    def _vector(self, name: str, size: int) -> FloatArray:
        return self._tensor(name, (size,)).to_f32()


def undo_rope_permutation(
    tensors: Mapping[str, RawTensor], num_heads: int, num_kv_heads: int
) -> dict[str, RawTensor]:
    """GGUF tensors of the `llama` architecture with query and key rows back in half-split order.

    llama.cpp rotates neighbouring dimensions, so its converter interleaves the two halves of
    each head's rows (`permute` in convert_hf_to_gguf.py). Blocks run along a row, so moving
    whole rows is right for quantised tensors too.
    """
    restored = dict(tensors)
    for name, tensor in tensors.items():
        part, _, kind = name.rpartition(".")
        if part.endswith((".attn_q", ".attn_k")):
            heads = num_heads if part.endswith(".attn_q") else num_kv_heads
            rows = tensor.shape[0]
            if rows % (2 * heads):
                raise ModelLoadError(
                    f"Tensor {name} has {rows} rows, which do not fit {heads} heads. "
                    "The file is damaged."
                )
            order = _half_split_order(rows, heads)
            restored[name] = (
                replace(tensor, row_order=order) if kind == "weight" else _reordered(tensor, order)
            )
    return restored


def _half_split_order(rows: int, heads: int) -> IntArray:
    """Entry i is the row of the file that holds half-split row i."""
    pairs = np.arange(rows, dtype=np.int64).reshape(heads, rows // heads // 2, 2)
    return pairs.swapaxes(1, 2).reshape(-1)


def _reordered(vector: RawTensor, order: IntArray) -> RawTensor:
    values = np.ascontiguousarray(vector.to_f32()[order])
    return replace(vector, dtype="F32", stored=values.view(np.uint8)[None])
