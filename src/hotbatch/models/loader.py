"""From what the user typed to a model ready for an executor.

A source is a GGUF file, a folder (safetensors, or one GGUF file), an id on the hub, or, for
made-up weights, a config.json or the name of a preset. Nothing is decoded here but norms and
biases, so loading takes milliseconds; the executor decodes what it packs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hotbatch.core.errors import ModelLoadError
from hotbatch.models import hub
from hotbatch.models.assembly import (
    GGUF_NAMING,
    HF_NAMING,
    assemble,
    undo_rope_permutation,
)
from hotbatch.models.config import ModelConfig, config_from_gguf, config_from_hf, ids
from hotbatch.models.dummy import dummy_weights
from hotbatch.models.gguf_file import read_gguf
from hotbatch.models.presets import PRESETS
from hotbatch.models.safetensors_file import read_safetensors
from hotbatch.models.weights import LlamaWeights, RawTensor

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model as its files describe it.

    name: what to call it: the hub id, the folder's name or the file's stem.
    tokenizer_source: the folder with tokenizer.json, or the GGUF file; None if there is none.
    chat_template: Jinja source, or None.
    eos_token_ids: every token that ends an answer, from config and generation_config.
    generation_defaults: sampling settings that the model's makers recommend, by parameter name.
    release: lets go of the memory that its files take; weights stay valid. To be called whenever
        some have been packed.
    """

    name: str
    config: ModelConfig
    weights: LlamaWeights
    tokenizer_source: Path | None = None
    chat_template: str | None = None
    eos_token_ids: tuple[int, ...] = ()
    generation_defaults: Mapping[str, float] = field(default_factory=dict)
    release: Callable[[], None] = lambda: None


def load_model(
    source: str | Path,
    load_format: str = "auto",
    *,
    revision: str | None = None,
    seed: int = 0,
    config: ModelConfig | None = None,
    progress: hub.Progress | None = None,
) -> LoadedModel:
    """Find, check and map a model.

    Args:
        source: a .gguf file, a folder, a hub id, or with load_format "dummy" also a
            config.json or the name of a preset (`presets.PRESETS`).
        load_format: one of LOAD_FORMATS. "dummy" makes weights up from `seed`.
        revision: branch, tag or commit on the hub.
        config: with "dummy", the shape to use instead of one read from `source`, which is
            then only a name.
        progress: told (bytes so far, bytes in all) while files are downloaded.

    Raises:
        ModelLoadError: a file is missing, damaged or not supported; the message names it and
            what to do.
    """
    if load_format not in LOAD_FORMATS:
        raise ModelLoadError(
            f"Unknown load format {load_format!r}; choose one of {', '.join(LOAD_FORMATS)}.",
            param="load_format",
        )
    name = str(source)
    if load_format == "dummy" and (config is not None or name in PRESETS):
        shape = config if config is not None else PRESETS[name]
        return LoadedModel(
            name=name,
            config=shape,
            weights=dummy_weights(shape, seed),
            eos_token_ids=shape.eos_token_ids,
        )
    path = Path(source).expanduser()
    from_hub = not path.exists()
    if from_hub:
        path = _fetch(name, load_format, revision, progress)
    if load_format == "dummy":
        return _load_dummy(path, name if from_hub else None, seed)
    if path.is_file():
        return _load_file(path, load_format)
    return _load_folder(path, load_format, name if from_hub else path.resolve().name)


def _fetch(
    name: str, load_format: str, revision: str | None, progress: hub.Progress | None
) -> Path:
    if hub.is_hub_id(name):
        return hub.fetch(name, revision, progress)
    presets = f", or one of the presets {', '.join(PRESETS)}" if load_format == "dummy" else ""
    raise ModelLoadError(
        f"There is no model at {name!r}. Give the path of a GGUF file or of a folder with "
        f"config.json and safetensors, or a hub id such as 'owner/name'{presets}.",
        param="model",
    )


def _load_file(path: Path, load_format: str) -> LoadedModel:
    if path.suffix == ".gguf" and load_format in ("auto", "gguf"):
        return load_gguf(path)
    if path.suffix == ".safetensors" or path.name == "config.json":
        raise ModelLoadError(
            f"{path} is one file of a model; give the folder that holds it.", param="model"
        )
    raise ModelLoadError(
        f"{path} is not a model file of load format {load_format!r}. Give a .gguf file or a "
        "folder with config.json and safetensors.",
        param="model",
    )


def _load_folder(path: Path, load_format: str, name: str) -> LoadedModel:
    if load_format in ("auto", "safetensors") and any(path.glob("*.safetensors*")):
        return load_safetensors(path, name)
    gguf_files = sorted(path.glob("*.gguf"))
    if load_format in ("auto", "gguf") and gguf_files:
        if len(gguf_files) > 1:
            listed = ", ".join(file.name for file in gguf_files)
            raise ModelLoadError(
                f"{path} holds several GGUF files ({listed}): give the path of one.",
                param="model",
            )
        return load_gguf(gguf_files[0])
    if any(path.glob("*.bin")):
        raise ModelLoadError(
            f"{path} holds pickled weights (.bin), which are not read because they may run code. "
            "Convert them to safetensors, or use a revision that has them.",
            param="model",
        )
    wanted = {"auto": ".safetensors or .gguf"}.get(load_format, f".{load_format}")
    raise ModelLoadError(f"{path} holds no {wanted} file.", param="model")


def load_gguf(path: Path) -> LoadedModel:
    """Load one GGUF file. Raises ModelLoadError."""
    file = read_gguf(path)
    tensors = dict(file.tensors)
    origin = str(path)
    if int(file.metadata.get("split.count", 1)) > 1:
        raise ModelLoadError(
            f"{path} is one part of a split GGUF model. Merge the parts first: "
            "llama-gguf-split --merge."
        )
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelLoadError(f"{path} has no tensor token_embd.weight: it is not a whole model.")
    rope_freqs = tensors.get("rope_freqs.weight")
    config = config_from_gguf(
        file.metadata,
        vocab_size=embedding.shape[0],
        has_head="output.weight" in tensors,
        tensor_names=frozenset(tensors),
        rope_factors=() if rope_freqs is None else tuple(rope_freqs.to_f32().tolist()),
        origin=origin,
    )
    if file.metadata["general.architecture"] == "llama":
        tensors = undo_rope_permutation(tensors, config.num_heads, config.num_kv_heads)
    return LoadedModel(
        name=path.stem,
        config=config,
        weights=assemble(config, tensors, GGUF_NAMING, origin),
        tokenizer_source=path,
        chat_template=file.metadata.get("tokenizer.chat_template"),
        eos_token_ids=config.eos_token_ids,
        release=file.release,
    )


def load_safetensors(path: Path, name: str) -> LoadedModel:
    """Load a folder as `save_pretrained` writes it, sharded or not. Raises ModelLoadError."""
    config = config_from_hf(_read_json(path / "config.json"), str(path / "config.json"))
    tensors = _read_shards(path)
    return LoadedModel(
        name=name,
        config=config,
        weights=assemble(config, tensors, HF_NAMING, str(path)),
        **_folder_extras(path, config),
    )


def _load_dummy(path: Path, name: str | None, seed: int) -> LoadedModel:
    """Made-up weights in the shape of a real model's config; its tokenizer, if it is there."""
    if path.suffix == ".gguf":
        loaded = load_gguf(path)
        return LoadedModel(
            name=name or loaded.name,
            config=loaded.config,
            weights=dummy_weights(loaded.config, seed),
            tokenizer_source=path,
            chat_template=loaded.chat_template,
            eos_token_ids=loaded.eos_token_ids,
        )
    file = path / "config.json" if path.is_dir() else path
    config = config_from_hf(_read_json(file), str(file))
    return LoadedModel(
        name=name or file.resolve().parent.name,
        config=config,
        weights=dummy_weights(config, seed),
        **_folder_extras(file.parent, config),
    )


def _read_shards(path: Path) -> dict[str, RawTensor]:
    index = path / "model.safetensors.index.json"
    if not index.exists():
        # A single file; whatever it is called, as long as there is no doubt.
        files = [path / "model.safetensors"]
        if not files[0].exists():
            files = sorted(path.glob("*.safetensors"))
        if len(files) != 1:
            raise ModelLoadError(
                f"{path} holds {len(files)} safetensors files but no {index.name} to say how they "
                "belong together. Download the model again."
            )
        return dict(read_safetensors(files[0]))
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ModelLoadError(f"{index} has no weight_map. Download the model again.")
    shards: dict[str, Mapping[str, RawTensor]] = {}
    tensors: dict[str, RawTensor] = {}
    for tensor_name, file_name in weight_map.items():
        if file_name not in shards:
            if not (path / file_name).exists():
                raise ModelLoadError(
                    f"The shard {file_name} that {index.name} names is missing from {path}. "
                    "Download the model again."
                )
            shards[file_name] = read_safetensors(path / file_name)
        if tensor_name not in shards[file_name]:
            raise ModelLoadError(
                f"{path / file_name} lacks the tensor {tensor_name} that {index.name} places in "
                "it. Download the model again."
            )
        tensors[tensor_name] = shards[file_name][tensor_name]
    return tensors


def _folder_extras(path: Path, config: ModelConfig) -> dict[str, Any]:
    """What lies beside the weights: tokenizer, chat template, recommended settings."""
    generation = _read_json(path / "generation_config.json", optional=True)
    has_tokenizer = (path / "tokenizer.json").exists()
    eos = dict.fromkeys((*ids(generation.get("eos_token_id")), *config.eos_token_ids))
    return {
        "tokenizer_source": path if has_tokenizer else None,
        "chat_template": _chat_template(path),
        "eos_token_ids": tuple(eos),
        "generation_defaults": {
            key: generation[key]
            for key in _SAMPLING_DEFAULTS
            if isinstance(generation.get(key), (int, float))
        },
    }


def _chat_template(path: Path) -> str | None:
    """A file of its own in recent models, an entry of tokenizer_config.json in older ones,
    where it may be a list of named templates."""
    own_file = path / "chat_template.jinja"
    if own_file.exists():
        return own_file.read_text(encoding="utf-8")
    template = _read_json(path / "tokenizer_config.json", optional=True).get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _read_json(path: Path, optional: bool = False) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if optional:
            return {}
        raise ModelLoadError(
            f"{path} is missing. Give the folder of a whole model, with its config.json."
        ) from None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}. Download it again.") from error
    if not isinstance(data, dict):
        raise ModelLoadError(f"{path} does not hold a JSON object. Download it again.")
    return data
