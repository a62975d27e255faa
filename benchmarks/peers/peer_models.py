"""One model in every peer's form: from a GGUF file to Hugging Face, W8A8, GGUF and OpenVINO.

All forms of a model come from the same file, so that every server does the same arithmetic
work. `smollm2-135m` is the embedded model. `llama-1b-dummy` has the layers of Llama 3.2 1B
with made-up weights and SmolLM2's vocabulary of 49,152 (so every token has a text, and a
client sees each of them): good for speed, good for nothing else.

Each form is made once: a folder or file appears under its name only when it is whole.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hotbatch.models.embedded import cache_dir, embedded_model_path

MODELS = ("smollm2-135m", "llama-1b-dummy")
# llama.cpp's numbers of file types, as its quantise tool takes them.
_GGUF_TYPES = {"F16": "1", "Q4_0": "2", "Q8_0": "7"}

# Llama 3.2 1B; the vocabulary is the embedded model's.
Shape = Mapping[str, int | float]
LLAMA_1B: Shape = {
    "block_count": 16,
    "context_length": 8192,
    "embedding_length": 2048,
    "feed_forward_length": 8192,
    "attention.head_count": 32,
    "attention.head_count_kv": 8,
    "rope.dimension_count": 64,
    "rope.freq_base": 500000.0,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
_DUMMY_STD = 0.02


def peers_root() -> Path:
    """Where peers and their models are kept: $HOTBATCH_PEERS, else peers/ in hotbatch's cache."""
    if explicit := os.environ.get("HOTBATCH_PEERS"):
        return Path(explicit).expanduser().resolve()
    return cache_dir() / "peers"


def model_folder(model: str) -> Path:
    return peers_root() / "models" / model


def form_path(model: str, form: str) -> Path:
    """Where a form of a model lies; `form` is hf, w8a8, openvino-int8, or a GGUF type."""
    return model_folder(model) / (f"{form}.gguf" if form in _GGUF_TYPES else form)


def source_gguf(model: str) -> Path:
    """The file that all forms of `model` are made from."""
    if model == "smollm2-135m":
        return embedded_model_path()
    return make_once(form_path(model, "F16"), write_dummy_gguf)


def make_once(path: Path, write: Callable[[Path], None]) -> Path:
    """`path`, written by `write` to a temporary name first unless it is there already."""
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"partial-{path.name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.unlink(missing_ok=True)
    print(f"writing {path}", flush=True)
    write(partial)
    partial.rename(path)
    return path


# ---- Hugging Face folders, for vLLM and for OpenVINO's export


def hf_folder(model: str) -> Path:
    """config.json, bf16 safetensors and the tokenizer."""
    source = source_gguf(model)
    return make_once(form_path(model, "hf"), lambda out: write_hf_folder(source, out))


def write_hf_folder(gguf_file: Path, out: Path) -> None:
    """Decodes a GGUF file of the Llama kind; needs torch and transformers."""
    import gguf
    import torch
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    reader = gguf.GGUFReader(gguf_file)
    config = hf_config({key: field.contents() for key, field in reader.fields.items()})
    heads = {
        "q_proj": config["num_attention_heads"],
        "k_proj": config["num_key_value_heads"],
    }
    tensors = {}
    for tensor in reader.tensors:
        name = hf_name(tensor.name)
        values = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
        for part, count in heads.items():
            if f".{part}." in name:
                values = halves_apart(values, count)
        tensors[name] = values.to(torch.bfloat16).contiguous()
    out.mkdir()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=2))
    tokenizer = AutoTokenizer.from_pretrained(str(gguf_file.parent), gguf_file=gguf_file.name)
    tokenizer.save_pretrained(out)
    settings = json.loads((out / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # the name every release knows
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def hf_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """config.json from the key-value pairs of a GGUF file of the Llama kind."""
    heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",  # its name before transformers 5
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.embedding_length"] // heads,
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": fields["llama.rope.freq_base"],
        "vocab_size": fields["llama.vocab_size"],
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


_HF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_name(gguf_name: str) -> str:
    """blk.3.attn_q.weight becomes model.layers.3.self_attn.q_proj.weight."""
    *block, part, kind = gguf_name.split(".")
    prefix = f"model.layers.{block[1]}." if block else ""
    return f"{prefix}{_HF_NAMES[part]}.{kind}"


def halves_apart(rows: Any, num_heads: int) -> Any:
    """Query or key rows (rows, columns) in Hugging Face's order.

    Rotary embedding turns pairs of rows of a head: GGUF's are neighbours, Hugging Face's lie
    half a head apart (`permute` in llama.cpp's converter, undone).
    """
    total, columns = rows.shape
    pairs = rows.reshape(num_heads, total // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(total, columns)


def w8a8_folder(model: str) -> Path:
    """For vLLM: int8 weights with a scale a channel, int8 activations with a scale a token."""
    source = hf_folder(model)
    return make_once(form_path(model, "w8a8"), lambda out: write_w8a8_folder(source, out))


def write_w8a8_folder(source: Path, out: Path) -> None:
    """Writes vLLM's `compressed-tensors` form of a Hugging Face folder; the head stays bf16."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    out.mkdir()
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a dictionary
                tensors |= _w8a8_tensors(name, opened.get_tensor(name))
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    for file in source.iterdir():
        if file.is_file() and "safetensors" not in file.name:
            shutil.copy(file, out)
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"] = w8a8_config()
    (out / "config.json").write_text(json.dumps(config, indent=2))


def _w8a8_tensors(name: str, weight: Any) -> dict[str, Any]:
    import torch

    if not name.endswith("_proj.weight"):
        return {name: weight}
    values = weight.float()
    scale = (values.abs().amax(dim=1, keepdim=True) / 127.0).clamp(min=1e-8)
    rounded = torch.round(values / scale).clamp(-127, 127).to(torch.int8)
    return {name: rounded, f"{name}_scale": scale.to(torch.bfloat16)}


def w8a8_config() -> dict[str, Any]:
    """The `quantization_config` that lets vLLM choose its int8 x int8 kernel."""
    grid = {"num_bits": 8, "type": "int", "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**grid, "strategy": "channel", "dynamic": False},
                "input_activations": {**grid, "strategy": "token", "dynamic": True},
            }
        },
    }


# ---- GGUF, for llama.cpp and ik_llama.cpp


def quantised_gguf(model: str, kind: str, quantise: Path) -> Path:
    """The model as Q4_0 or Q8_0, by llama.cpp's own tool (`quantise`), by way of F16."""
    source = source_gguf(model)

    def convert(origin: Path, kind: str) -> Path:
        command = [str(quantise), "--allow-requantize", str(origin)]
        return make_once(
            form_path(model, kind),
            lambda out: run_quietly([*command, str(out), _GGUF_TYPES[kind], "2"]),
        )

    return convert(convert(source, "F16"), kind)


def write_dummy_gguf(out: Path, shape: Shape = LLAMA_1B) -> None:
    """Random F16 weights, with the embedded model's tokenizer; `shape` as GGUF's llama.* keys."""
    import gguf
    import numpy as np

    reader = gguf.GGUFReader(embedded_model_path())
    writer = gguf.GGUFWriter(out, "llama")
    for key, value in shape.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"llama.{key}", value)
    for key, entry in reader.fields.items():
        if key.startswith("tokenizer.") or key == "llama.vocab_size":
            kind = entry.types[0]
            sub_kind = entry.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, entry.contents(), kind, sub_type=sub_kind)
    writer.add_file_type(1)
    rng = np.random.default_rng(0)
    vocab_size = int(reader.fields["llama.vocab_size"].contents())
    for name, sizes in dummy_tensors(shape, vocab_size).items():
        if len(sizes) == 1:
            writer.add_tensor(name, np.ones(sizes, np.float32))
        else:
            values = rng.standard_normal(sizes, np.float32) * np.float32(_DUMMY_STD)
            writer.add_tensor(name, values.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def dummy_tensors(shape: Shape, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Name and sizes (rows, columns) of each tensor; the head is the embedding."""
    hidden, inner = int(shape["embedding_length"]), int(shape["feed_forward_length"])
    kv_size = int(hidden // shape["attention.head_count"] * shape["attention.head_count_kv"])
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,),
        "attn_q": (hidden, hidden),
        "attn_k": (kv_size, hidden),
        "attn_v": (kv_size, hidden),
        "attn_output": (hidden, hidden),
        "ffn_norm": (hidden,),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    tensors: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab_size, hidden)}
    for index in range(int(shape["block_count"])):
        tensors |= {f"blk.{index}.{name}.weight": sizes for name, sizes in layer.items()}
    return tensors | {"output_norm.weight": (hidden,)}


# ---- OpenVINO


def openvino_folder(model: str, optimum_cli: Path) -> Path:
    """The model exported with int8 weights by optimum-intel's command line."""
    source = hf_folder(model)
    command = [str(optimum_cli), "export", "openvino", "-m", str(source)]
    command += ["--task", "text-generation-with-past", "--weight-format", "int8"]
    return make_once(
        form_path(model, "openvino-int8"), lambda out: run_quietly([*command, str(out)])
    )


def run_quietly(command: list[str]) -> None:
    """Runs a command; its output is shown only if it fails.

    Raises:
        RuntimeError: it failed; the message has its last words.
    """
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    if done.returncode != 0:
        raise RuntimeError(
            f"{' '.join(command)} ended with {done.returncode}. Its last words:\n"
            f"{done.stdout[-3000:]}"
        )
