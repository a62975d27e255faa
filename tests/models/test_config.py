"""Configs: what is read from config.json of transformers 4 and 5, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import transformers

from hotbatch.core.errors import ModelLoadError
from hotbatch.models.config import config_from_gguf, config_from_hf
from hotbatch.models.presets import PRESETS
from hotbatch.models.rope import inverse_frequencies


def hf(**changes: Any) -> dict[str, Any]:
    base = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    }
    return {key: value for key, value in (base | changes).items() if value is not ...}


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize("kind_key", ["rope_type", "type"])
def test_old_and_new_rope_entries_mean_the_same(kind_key: str) -> None:
    old = hf(rope_theta=5e5, rope_scaling={kind_key: "llama3", **LLAMA3})
    new = hf(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3})
    assert config_from_hf(old) == config_from_hf(new)
    assert config_from_hf(old).rope_theta == 5e5


def test_defaults_are_those_of_transformers() -> None:
    config = config_from_hf(hf())
    assert (config.num_kv_heads, config.head_dim, config.rope_theta) == (4, 16, 10000.0)
    assert config.layer_windows == (None, None, None) and config.sliding_window is None
    assert not (config.attention_bias or config.tie_word_embeddings or config.qk_norm)


def test_model_type_stands_in_for_a_missing_architecture() -> None:
    config = config_from_hf(hf(architectures=None, model_type="qwen3", head_dim=32))
    assert config.architecture == "Qwen3ForCausalLM" and config.qk_norm and config.head_dim == 32


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"architectures": ["MistralForCausalLM"]}, (4096, 4096, 4096)),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, (None,) * 3),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 9}, (None,) * 3),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 9,
                "use_sliding_window": True,
                "max_window_layers": 2,
            },
            (None, None, 9),
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "sliding_window": 9,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (9, None, 9),
        ),
    ],
)
def test_windows_layer_by_layer(changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert config_from_hf(hf(**changes)).layer_windows == windows


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": None}, "nothing"),
        ({"hidden_size": ...}, "hidden_size"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_hidden_layers": 0}, "num_layers"),
        ({"num_key_value_heads": 3}, "multiple"),
        ({"head_dim": 15}, "head_dim"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "kinds of layers"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ModelLoadError, match=told):
        config_from_hf(hf(**changes))


def test_gguf_features_that_would_change_the_result_are_refused() -> None:
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 112,
        "llama.attention.head_count": 4,
        "llama.context_length": 128,
    }
    assert config_from_gguf(metadata, vocab_size=96, has_head=False).tie_word_embeddings
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    scaling = config_from_gguf(metadata | linear, vocab_size=96, has_head=True).rope_scaling
    assert scaling is not None and (scaling.kind, scaling.factor) == ("linear", 4.0)
    for change, told in (
        ({"llama.expert_count": 8}, "experts"),
        ({"llama.rope.dimension_count": 8}, "dimension_count"),
        ({"llama.rope.scaling.type": "yarn"}, "yarn"),
    ):
        with pytest.raises(ModelLoadError, match=told):
            config_from_gguf(metadata | change, vocab_size=96, has_head=True)


@pytest.mark.parametrize("name", ["llama-1b", "qwen3-0.6b", "smollm2-135m"])
def test_frequencies_are_those_of_transformers(name: str) -> None:
    shape = PRESETS[name]
    rope: dict[str, Any] = {"rope_theta": shape.rope_theta, "rope_type": "default"}
    if shape.rope_scaling is not None:
        rope |= LLAMA3 | {"rope_type": "llama3", "factor": shape.rope_scaling.factor}
    config = transformers.LlamaConfig(
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_position_embeddings,
        rope_parameters=rope,
    )
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    expected = LlamaRotaryEmbedding(config).inv_freq.numpy()
    np.testing.assert_allclose(inverse_frequencies(shape), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "millions"),
    [("smollm2-135m", 134.5), ("llama-1b", 1235.8), ("llama-8b", 8030.3), ("mistral-7b", 7241.7)],
)
def test_presets_have_the_published_sizes(name: str, millions: float) -> None:
    assert PRESETS[name].num_parameters / 1e6 == pytest.approx(millions, abs=0.1)
