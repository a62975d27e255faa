"""GGUF: the header, every storage format, and llama.cpp's order of query and key rows."""

from __future__ import annotations

import sys
from pathlib import Path

import checkpoints
import gguf_checkpoints
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize
from stepping import logits_in_steps

from hotbatch.assembly import assemble
from hotbatch.core.errors import ModelLoadError
from hotbatch.executor.torch_executor import TorchExecutor
from hotbatch.models.embedded import embedded_model_path
from hotbatch.models.gguf_file import read_gguf
from hotbatch.models.loader import load_model
from hotbatch.models.quantization import FORMATS, decode
from hotbatch.options import EngineOptions

TOKENS = list(range(3, 60, 2))


@pytest.mark.parametrize(
    ("variant", "architecture"),
    [
        ("llama-untied", "llama"),
        ("llama-tied", "llama"),
        ("llama-head-dim", "llama"),
        ("llama-biases", "llama"),
        ("qwen2", "qwen2"),
        ("qwen3", "qwen3"),
    ],
)
def test_logits_equal_transformers(variant: str, architecture: str, tmp_path: Path) -> None:
    reference = checkpoints.reference_model(variant)
    path = gguf_checkpoints.write(tmp_path / "tiny.gguf", reference, architecture)
    executor = TorchExecutor(load_model(path), num_blocks=16, block_size=4)

    (logits,) = logits_in_steps(executor, [TOKENS], [(17,), (12,)])

    expected = checkpoints.logits_of(reference, TOKENS)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_rope_factors_tensor_is_llama3_scaling(tmp_path: Path) -> None:
    """llama.cpp's converter writes Llama 3's scaling as a tensor of divisors."""
    reference = checkpoints.reference_model("llama3-rope")
    from hotbatch.models.config import ModelConfig, config_from_hf
    from hotbatch.models.rope import inverse_frequencies

    scaled = config_from_hf(reference.config.to_dict())
    fields = {name: getattr(scaled, name) for name in ModelConfig.__dataclass_fields__}
    plain = ModelConfig(**fields | {"rope_scaling": None})
    factors = inverse_frequencies(plain) / inverse_frequencies(scaled)
    assert factors.max() == pytest.approx(4.0) and factors.min() == pytest.approx(1.0)

    path = gguf_checkpoints.write(
        tmp_path / "tiny.gguf", reference, "llama", rope_freqs__weight=factors
    )
    executor = TorchExecutor(load_model(path), num_blocks=16, block_size=4)
    (logits,) = logits_in_steps(executor, [TOKENS], [(29,)])
    expected = checkpoints.logits_of(reference, TOKENS)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_formats_that_gguf_can_write(name: str, tmp_path: Path) -> None:
    """Every matrix, the permuted ones too, decodes to what the gguf package says it holds."""
    reference = checkpoints.reference_model("llama-no-groups")
    kind = GGMLQuantizationType[name]
    held: dict[str, np.ndarray] = {}

    def encode(hf_name: str, values: np.ndarray) -> tuple[np.ndarray, GGMLQuantizationType]:
        if values.shape[1] % 32:  # the tiny MLP's width suits no block
            kept = values.astype(np.float16)
            held[hf_name] = kept.astype(np.float32)
            return kept, GGMLQuantizationType.F16
        raw = quantize(values, kind)
        held[hf_name] = dequantize(raw, kind)
        return raw, kind

    path = gguf_checkpoints.write(tmp_path / "tiny.gguf", reference, "llama", encode)
    weights = load_model(path).weights

    assert weights.embedding.dtype == name
    np.testing.assert_array_equal(weights.embedding.to_f32(), held["model.embed_tokens.weight"])
    attention = "model.layers.1.self_attn"
    for part, projection in zip(weights.layers[1].qkv.parts, "qkv", strict=True):
        file_order = held[f"{attention}.{projection}_proj.weight"]
        if projection == "v":
            np.testing.assert_array_equal(part.to_f32(), file_order)
        else:
            interleaved = gguf_checkpoints.interleave(part.to_f32(), 4)
            np.testing.assert_array_equal(interleaved, file_order)
    np.testing.assert_array_equal(
        weights.layers[2].down.to_f32(), held["model.layers.2.mlp.down_proj.weight"]
    )


@pytest.mark.parametrize("name", [n for n, f in FORMATS.items() if f.block_size > 1])
def test_blocks_decode_as_the_gguf_package_does(name: str) -> None:
    """Random blocks of every quantised format: any bytes are valid but for the scales, where
    bytes that make an infinity are avoided."""
    format = FORMATS[name]
    generator = np.random.default_rng(11)
    raw = generator.integers(0, 120, (6, 3 * format.block_bytes), dtype=np.uint8)
    expected = dequantize(raw, GGMLQuantizationType(format.ggml_type))

    found = decode(raw, name, "tensor")

    assert found.shape == (6, 3 * format.block_size) and np.isfinite(expected).all()
    assert np.unique(expected).size > 20
    np.testing.assert_array_equal(found, expected)


def test_format_table_is_that_of_the_gguf_package() -> None:
    for format in FORMATS.values():
        kind = GGMLQuantizationType(format.ggml_type)
        assert kind.name == format.name
        assert GGML_QUANT_SIZES[kind] == (format.block_size, format.block_bytes)


def test_metadata_reaches_the_loaded_model(tmp_path: Path) -> None:
    path = gguf_checkpoints.write(
        tmp_path / "some-model.gguf", checkpoints.reference_model("qwen2"), "qwen2"
    )
    loaded = load_model(tmp_path)  # the folder's only model file
    assert loaded.name == "some-model"
    assert loaded.tokenizer_source == path
    assert loaded.chat_template == "{{ messages }}"
    assert loaded.eos_token_ids == (2, 7)
    assert loaded.config.architecture == "Qwen2ForCausalLM"
    assert loaded.config.attention_bias and not loaded.config.attention_out_bias


@pytest.fixture
def tiny_file(tmp_path: Path) -> Path:
    return gguf_checkpoints.write(
        tmp_path / "tiny.gguf", checkpoints.reference_model("llama-tied"), "llama"
    )


@pytest.mark.parametrize("kept", [0, 3, 20, 60, 700, 0.5, 0.999])
def test_truncated_files_are_told_so(kept: float, tiny_file: Path) -> None:
    whole = tiny_file.read_bytes()
    tiny_file.write_bytes(whole[: int(kept * len(whole)) if 0 < kept < 1 else int(kept)])
    with pytest.raises(ModelLoadError, match=r"tiny\.gguf"):
        load_model(tiny_file)


def test_other_files_and_versions_are_refused(tiny_file: Path) -> None:
    whole = tiny_file.read_bytes()
    tiny_file.write_bytes(b"PK\x03\x04" + whole[4:])
    with pytest.raises(ModelLoadError, match="not a GGUF file"):
        load_model(tiny_file)
    tiny_file.write_bytes(whole[:4] + b"\x01\x00\x00\x00" + whole[8:])
    with pytest.raises(ModelLoadError, match="version 1"):
        load_model(tiny_file)


def test_unsupported_architecture_is_named(tmp_path: Path) -> None:
    path = gguf_checkpoints.write(
        tmp_path / "tiny.gguf", checkpoints.reference_model("llama-tied"), "gemma2"
    )
    with pytest.raises(ModelLoadError, match="'gemma2', which is not supported"):
        load_model(path)


def test_header_reader_agrees_with_the_gguf_package_on_the_embedded_model() -> None:
    from gguf import GGUFReader

    path = embedded_model_path()
    ours, theirs = read_gguf(path), GGUFReader(path)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert ours.metadata[key] == field.contents(), key
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))
        assert mine.stored.tobytes() == tensor.data.tobytes()


def resident_kb(path: Path) -> int:
    """Memory of this process that holds a file's content."""
    total, is_this = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(maxsplit=1)[0]:
            is_this = line.endswith(str(path))
        elif is_this and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not tell")
def test_a_file_that_was_read_takes_memory_only_until_it_is_released() -> None:
    path = embedded_model_path()
    model = load_model(path)
    layer = model.weights.layers[0].down
    before = layer.to_f32()
    assert resident_kb(path) > 100
    model.release()
    assert resident_kb(path) == 0
    assert (layer.to_f32() == before).all(), "and is read again when it is wanted"


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not tell")
def test_packed_weights_leave_none_of_their_file_in_memory() -> None:
    parts = assemble(EngineOptions(precision="int8", kv_cache_memory_bytes=1 << 24))
    try:
        # The table of embeddings is read from the file, a row for each token.
        assert resident_kb(embedded_model_path()) < 30_000
    finally:
        parts.close()


@pytest.mark.slow
def test_embedded_model_has_the_weights_transformers_finds_in_it() -> None:
    import transformers
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = embedded_model_path()
    loaded = load_model(path)
    shape = loaded.config
    with torch.device("meta"):  # transformers only takes the names of the parameters from it
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=shape.vocab_size,
                hidden_size=shape.hidden_size,
                intermediate_size=shape.intermediate_size,
                num_hidden_layers=shape.num_layers,
                num_attention_heads=shape.num_heads,
                num_key_value_heads=shape.num_kv_heads,
                tie_word_embeddings=True,
            )
        )
    # `from_pretrained(gguf_file=...)` reads with this function, but asks for accelerate too.
    reference = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    weights = loaded.weights

    def assert_same(found: np.ndarray, *names: str) -> None:
        expected = torch.cat([reference[name] for name in names])
        np.testing.assert_array_equal(found, expected.numpy())

    assert weights.head_is_embedding
    assert_same(weights.embedding.to_f32(), "model.embed_tokens.weight")
    assert_same(weights.final_norm, "model.norm.weight")
    for index, layer in enumerate(weights.layers):
        prefix = f"model.layers.{index}."
        attention = [f"{prefix}self_attn.{name}_proj.weight" for name in "qkv"]
        assert_same(layer.qkv.to_f32(), *attention)
        assert_same(layer.attention_out.to_f32(), f"{prefix}self_attn.o_proj.weight")
        gate_up = [f"{prefix}mlp.{name}_proj.weight" for name in ("gate", "up")]
        assert_same(layer.gate_up.to_f32(), *gate_up)
        assert_same(layer.down.to_f32(), f"{prefix}mlp.down_proj.weight")
        assert_same(layer.attention_norm, f"{prefix}input_layernorm.weight")
        assert_same(layer.mlp_norm, f"{prefix}post_attention_layernorm.weight")
