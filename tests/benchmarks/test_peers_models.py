"""The forms of a model that peers read: names, layout, quantisation."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "peers"))

import torch
from peer_models import (
    LLAMA_1B,
    dummy_tensors,
    halves_apart,
    hf_folder,
    hf_name,
    make_once,
    write_dummy_gguf,
    write_hf_folder,
    write_w8a8_folder,
)
from safetensors.torch import load_file, save_file

from hotbatch.models.embedded import embedded_model_path
from hotbatch.models.loader import load_model


def test_names_of_tensors():
    assert hf_name("token_embd.weight") == "model.embed_tokens.weight"
    assert hf_name("blk.12.attn_q.weight") == "model.layers.12.self_attn.q_proj.weight"
    assert hf_name("blk.0.ffn_norm.weight") == "model.layers.0.post_attention_layernorm.weight"


def test_rotated_pairs_move_half_a_head_apart():
    neighbours = torch.tensor([[0.0], [10.0], [1.0], [11.0], [100.0], [110.0], [101.0], [111.0]])
    apart = halves_apart(neighbours, num_heads=2)
    assert apart.flatten().tolist() == [0, 1, 10, 11, 100, 101, 110, 111]


def test_int8_weights_times_scale_are_the_weights(tmp_path):
    source = tmp_path / "hf"
    source.mkdir()
    weight = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    weight[3] = 0.0
    norm = torch.ones(16)
    tensors = {"model.layers.0.mlp.up_proj.weight": weight, "model.norm.weight": norm}
    save_file(tensors, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps({"model_type": "llama"}))
    write_w8a8_folder(source, tmp_path / "w8a8")
    written = load_file(tmp_path / "w8a8" / "model.safetensors")
    rounded = written["model.layers.0.mlp.up_proj.weight"]
    scale = written["model.layers.0.mlp.up_proj.weight_scale"]
    assert rounded.dtype == torch.int8
    assert scale.shape == (8, 1)
    step = weight.abs().amax(1, keepdim=True) / 127
    assert (rounded * scale.float() - weight).abs().le(step * 1.1 + 1e-6).all()
    assert torch.equal(written["model.norm.weight"], norm)
    config = json.loads((tmp_path / "w8a8" / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == ["lm_head"]


def test_the_made_up_model_has_the_layers_of_llama_1b():
    shapes = dummy_tensors(LLAMA_1B, 49152)
    assert len(shapes) == 16 * 9 + 2
    assert shapes["blk.15.attn_v.weight"] == (512, 2048)
    assert sum(a * b for a, b in (s for s in shapes.values() if len(s) == 2)) == (
        16 * (2048 * (2048 * 2 + 512 * 2) + 3 * 2048 * 8192) + 49152 * 2048
    )


@pytest.mark.slow
def test_a_made_up_model_can_be_served_and_becomes_a_hugging_face_folder(tmp_path):
    shape = {**LLAMA_1B, "block_count": 2, "embedding_length": 128, "feed_forward_length": 256}
    shape |= {"attention.head_count": 4, "attention.head_count_kv": 2, "rope.dimension_count": 32}
    write_dummy_gguf(tmp_path / "dummy.gguf", shape)
    original = load_model(tmp_path / "dummy.gguf")
    assert (original.config.num_layers, original.config.vocab_size) == (2, 49152)
    assert original.config.rope_theta == 500000.0
    write_hf_folder(tmp_path / "dummy.gguf", tmp_path / "hf")
    written = load_model(tmp_path / "hf")
    assert written.config == original.config
    for ours, theirs in zip(
        written.weights.layers[1].qkv.parts, original.weights.layers[1].qkv.parts, strict=True
    ):
        np.testing.assert_allclose(ours.to_f32(), theirs.to_f32(), rtol=2**-8)


def test_what_is_there_is_not_written_again_and_what_broke_off_is(tmp_path):
    path = tmp_path / "form"

    def breaks_off(out):
        out.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        make_once(path, breaks_off)
    assert not path.exists()
    make_once(path, lambda out: out.write_text("whole"))
    make_once(path, breaks_off)
    assert path.read_text() == "whole"


@pytest.mark.slow
def test_the_hugging_face_folder_holds_the_weights_of_the_file(tmp_path, monkeypatch):
    original = load_model(embedded_model_path())
    monkeypatch.setenv("HOTBATCH_PEERS", str(tmp_path))
    written = load_model(hf_folder("smollm2-135m"))
    assert written.config == original.config
    ours, theirs = written.weights.layers[29], original.weights.layers[29]
    np.testing.assert_array_equal(ours.attention_norm, theirs.attention_norm)
    for linear in ("qkv", "attention_out", "gate_up", "down"):
        parts = zip(getattr(ours, linear).parts, getattr(theirs, linear).parts, strict=True)
        for one, other in parts:  # bf16 keeps 8 bits
            np.testing.assert_allclose(one.to_f32(), other.to_f32(), rtol=2**-8)
