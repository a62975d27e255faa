"""Finding a model: folders, hub ids and made-up weights, and clear words for what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import checkpoints
import huggingface_hub
import numpy as np
import pytest

from hotbatch.core.errors import ModelLoadError
from hotbatch.models.dummy import dummy_weights
from hotbatch.models.loader import load_model
from hotbatch.models.presets import PRESETS


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sharded checkpoint in a folder of its own."""
    model = checkpoints.reference_model("qwen2")
    return checkpoints.save(model, tmp_path / "my-model", max_shard_size="60KB")


def test_folder_extras(folder: Path) -> None:
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [5, 2], "temperature": 0.7, "top_k": 20, "do_sample": True})
    )
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": [{"name": "default", "template": "from config"}]})
    )
    loaded = load_model(folder)
    assert loaded.name == "my-model"
    assert loaded.eos_token_ids == (5, 2)
    assert loaded.generation_defaults == {"temperature": 0.7, "top_k": 20}
    assert loaded.tokenizer_source == folder
    assert loaded.chat_template == "from config"
    (folder / "chat_template.jinja").write_text("own file")
    assert load_model(folder).chat_template == "own file"


def test_nothing_beside_the_weights_is_needed(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    loaded = load_model(str(folder))
    assert loaded.tokenizer_source is None and loaded.chat_template is None
    assert loaded.eos_token_ids == (2,)


def test_fused_layers_keep_their_parts_and_biases(folder: Path) -> None:
    reference = checkpoints.reference_model("qwen2").state_dict()
    layer = load_model(folder).weights.layers[1]
    prefix = "model.layers.1.self_attn."
    for kind, found in (("weight", layer.qkv.to_f32()), ("bias", layer.qkv.bias)):
        expected = [reference[f"{prefix}{name}_proj.{kind}"].numpy() for name in "qkv"]
        assert found is not None
        np.testing.assert_array_equal(found, np.concatenate(expected))
    assert layer.attention_out.bias is None
    np.testing.assert_array_equal(
        layer.gate_up.parts[1].rows_to_f32(3, 9), layer.gate_up.to_f32()[112 + 3 : 112 + 9]
    )


def _break_shard(folder: Path) -> None:
    shard = min(folder.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-10])


def _empty_shard(folder: Path) -> None:
    min(folder.glob("*.safetensors")).write_bytes(b"")


def _garble_header(folder: Path) -> None:
    shard = min(folder.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[8] = ord("x")
    shard.write_bytes(bytes(data))


def _lose_shard(folder: Path) -> None:
    min(folder.glob("*.safetensors")).unlink()


def _lose_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()


def _garble_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{")


def _lose_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _other_width(folder: Path) -> None:
    _change_config(folder, intermediate_size=128)


def _more_layers(folder: Path) -> None:
    _change_config(folder, num_hidden_layers=4, layer_types=None)


def _no_biases(folder: Path) -> None:
    _change_config(folder, architectures=["LlamaForCausalLM"])


def _only_pickles(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80")


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (_break_shard, r"model-00001.*runs past its end.*Download it again"),
        (_empty_shard, r"model-00001"),
        (_garble_header, r"model-00001.*header cannot be read"),
        (_lose_shard, r"shard model-00001.* is missing"),
        (_lose_index, r"no model\.safetensors\.index\.json"),
        (_garble_index, r"index\.json cannot be read"),
        (_lose_config, r"config\.json is missing"),
        (_other_width, r"gate_proj\.weight .* \(112, 64\); .* \(128, 64\)"),
        (_more_layers, r"no tensor model\.layers\.3\."),
        (_no_biases, r"q_proj\.bias, but the model's config has no such bias"),
        (_only_pickles, r"pickled weights"),
    ],
)
def test_damaged_folders_are_named_with_a_remedy(folder: Path, harm, told: str) -> None:  # type: ignore[no-untyped-def]
    harm(folder)
    with pytest.raises(ModelLoadError, match=told):
        load_model(folder)


def test_sources_that_are_not_models(tmp_path: Path, folder: Path) -> None:
    for source, told in (
        (tmp_path / "nowhere.gguf", "There is no model at"),
        ("./a/b/c", "There is no model at"),
        (tmp_path, "holds no .safetensors or .gguf file"),
        (folder / "config.json", "give the folder"),
    ):
        with pytest.raises(ModelLoadError, match=told) as caught:
            load_model(source)
        assert caught.value.param == "model"
    with pytest.raises(ModelLoadError, match="Unknown load format") as caught:
        load_model(folder, "pickle")
    assert caught.value.param == "load_format"
    with pytest.raises(ModelLoadError, match=r"holds no \.gguf file"):
        load_model(folder, "gguf")
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ModelLoadError, match=r"a\.gguf, b\.gguf"):
        load_model(tmp_path)


def test_hub_id_is_downloaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def download(hub_id: str, **options: object) -> str:
        asked.update(options, hub_id=hub_id)
        bar_class = options["tqdm_class"]
        files = bar_class(total=2, desc="Fetching 2 files")  # type: ignore[operator]
        big = bar_class(total=300, unit="B", unit_scale=True)  # type: ignore[operator]
        small = bar_class(total=50, unit="B", unit_scale=True)  # type: ignore[operator]
        big.update(100)
        small.update(50)
        files.update(1)
        big.update(200)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    seen: list[tuple[int, int]] = []
    loaded = load_model(
        "owner/model-1", revision="v2", progress=lambda done, total: seen.append((done, total))
    )
    assert loaded.name == "owner/model-1"
    assert (asked["hub_id"], asked["revision"]) == ("owner/model-1", "v2")
    assert "model*.safetensors" in asked["allow_patterns"]
    assert seen == [(100, 300), (150, 350), (350, 350)]


def test_unreachable_hub_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(hub_id: str, **options: object) -> str:
        raise OSError("Name or service not known")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelLoadError, match=r"could not be fetched.*Name or service") as caught:
        load_model("owner/model")
    assert caught.value.param == "model"


def test_dummy_weights_are_a_function_of_the_seed() -> None:
    first, again, other = (
        load_model("tiny", "dummy", seed=seed).weights.layers[1].qkv.to_f32() for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    assert first.std() == pytest.approx(64**-0.5, rel=0.1)


def test_dummy_of_a_large_shape_takes_little_memory() -> None:
    shape = PRESETS["llama-8b"]
    weights = dummy_weights(shape)
    assert weights.num_bytes > 15e9
    held = {
        id(part.stored.base): part.stored
        for layer in weights.layers
        for part in layer.gate_up.parts
    }
    assert sum(stored.nbytes for stored in held.values()) < 50e6
    part = weights.layers[0].gate_up.parts[0]
    assert part.data.nbytes == part.num_bytes == 14336 * 4096 * 2


def test_dummy_takes_shape_and_tokenizer_from_a_real_model(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    for shard in folder.glob("*.safetensors*"):
        shard.unlink()
    loaded = load_model(folder, "dummy")
    assert loaded.config.architecture == "Qwen2ForCausalLM"
    assert loaded.weights.layers[0].qkv.bias is not None
    assert loaded.tokenizer_source == folder
    assert load_model(folder / "config.json", "dummy").config == loaded.config


def test_loading_needs_no_torch(folder: Path) -> None:
    """The serving path must not pay for it."""
    script = (
        "import sys; from hotbatch.models.loader import load_model; "
        f"load_model({str(folder)!r}); load_model('tiny', 'dummy'); "
        "print([m for m in ('torch', 'transformers', 'huggingface_hub', 'gguf') "
        "if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
