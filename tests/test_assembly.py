"""From options to a served model: what the options leave open, and that the parts fit."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from hotbatch import assembly as assembly_module
from hotbatch.assembly import Assembly, assemble
from hotbatch.core.errors import ModelLoadError, OptionError
from hotbatch.core.sampling_params import SamplingParams
from hotbatch.core.service_class import LatencyTargets, ServiceClass
from hotbatch.llm import LLM
from hotbatch.models.embedded import EMBEDDED_MODEL_NAME
from hotbatch.options import EngineOptions, PerClass, parse_distances

MIB = 2**20
TINY: dict[str, Any] = {
    "model": "tiny",
    "load_format": "dummy",
    "threads": 1,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": MIB,
}


def tiny(**changes: Any) -> Assembly:
    return assemble(EngineOptions(**{**TINY, **changes}))


def scheduler_config(assembly: Assembly) -> Any:
    return assembly.engine._scheduler.config


def test_a_made_up_model_answers() -> None:
    parts = tiny()
    assert parts.name == "tiny"
    with LLM.from_parts(parts.engine, parts.tokenizer, eos_token_ids=parts.eos_token_ids) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=5)
        [output] = llm.generate("Hello", params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 5


@pytest.mark.parametrize(
    ("text", "accounts"),
    [
        ("tokens", {"token"}),
        ("turns", {"turn"}),
        ("requests", {"request", "repeat"}),
        (None, {"token", "turn", "request", "repeat"}),
    ],
)
def test_distances_can_be_chosen(text: str | None, accounts: set[str]) -> None:
    distances = None if text is None else parse_distances(text)
    parts = tiny(speculate=True, speculate_on=distances)
    assert parts.engine._scheduler.stats().guesses.keys() == accounts
    assert parts.engine.guesses_requests == ("request" in accounts)
    parts.close()


def test_guessing_is_on_unless_switched_off_and_changes_no_token() -> None:
    answers = []
    for speculate in (True, False):
        parts = tiny() if speculate else tiny(speculate=False)
        assert ("token" in parts.engine._scheduler.stats().guesses) == speculate
        with LLM.from_parts(
            parts.engine, parts.tokenizer, eos_token_ids=parts.eos_token_ids
        ) as llm:
            params = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
            prompts = [{"prompt_token_ids": [5, 6, 7, 5, 6, 7, 5, index]} for index in range(3)]
            outputs = llm.generate(prompts, params, use_tqdm=False)
            answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_draft_model_changes_no_token(temperature: float) -> None:
    answers = []
    for draft_model in ("tiny", None):
        parts = tiny(speculate=True, draft_model=draft_model)
        with LLM.from_parts(
            parts.engine, parts.tokenizer, eos_token_ids=parts.eos_token_ids
        ) as llm:
            params = SamplingParams(temperature=temperature, max_tokens=60, ignore_eos=True, seed=3)
            prompts = [{"prompt_token_ids": [5, 60, 7, 81, 9, index]} for index in range(3)]
            outputs = llm.generate(prompts, params, use_tqdm=False)
            answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1]


def test_a_draft_model_must_speak_the_same_tokens(tmp_path: Path) -> None:
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    }
    (tmp_path / "config.json").write_text(json.dumps(shape))
    with pytest.raises(OptionError, match="another vocabulary") as caught:
        tiny(speculate=True, draft_model=str(tmp_path))
    assert caught.value.param == "--draft-model"
    with pytest.raises(OptionError, match="--draft-model nowhere") as caught:
        tiny(speculate=True, draft_model="nowhere/there.gguf", load_format="dummy")
    assert caught.value.param == "--draft-model"


@pytest.mark.parametrize(
    "options", [{"speculate": False}, {"speculate": True, "speculate_on": "turns,requests"}]
)
def test_a_draft_model_needs_guessing(options: dict[str, Any]) -> None:
    if "speculate_on" in options:
        options = {**options, "speculate_on": parse_distances(options["speculate_on"])}
    with pytest.raises(OptionError, match="add --speculate") as caught:
        tiny(**options, draft_model="tiny")
    assert caught.value.param == "--draft-model"


def test_close_is_idempotent_and_works_before_start() -> None:
    parts = tiny()
    parts.close()
    parts.close()
    assert not parts.engine.is_accepting


def test_kv_memory_becomes_blocks() -> None:
    # tiny: 2 layers x 2 heads x 16 numbers, keys and values.
    assert tiny().info.num_blocks == MIB // (2 * 2 * 2 * 16 * 2 * 16)
    assert tiny(kv_cache_dtype="f32").info.num_blocks == MIB // (2 * 2 * 2 * 16 * 4 * 16)
    assert tiny(precision="f32").info.num_blocks == MIB // (2 * 2 * 2 * 16 * 4 * 16)
    assert tiny(block_size=32).info.num_blocks == MIB // (2 * 2 * 2 * 16 * 2 * 32)


def test_without_a_size_the_rule_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly_module, "free_memory_bytes", lambda: 40 * MIB)
    parts = tiny(kv_cache_memory_bytes=None)
    assert parts.info.num_blocks == 10 * MIB // (2 * 2 * 2 * 16 * 2 * 16)


def test_defaults_of_precision_and_step() -> None:
    parts = tiny()
    assert parts.info.precision == "int8"
    assert scheduler_config(parts).max_num_batched_tokens == 512
    assert scheduler_config(tiny(max_num_seqs=600)).max_num_batched_tokens == 600
    assert scheduler_config(tiny(max_num_batched_tokens=64)).max_num_batched_tokens == 64


def test_limits_reach_the_scheduler() -> None:
    config = scheduler_config(tiny(long_prefill_token_threshold=48, speculate_max_tokens=5))
    assert (config.long_prefill_token_threshold, config.max_draft_tokens) == (48, 5)
    config = scheduler_config(tiny())
    assert (config.max_chunk, config.max_draft_tokens) == (512, None)


def test_static_batching_s_settings() -> None:
    config = scheduler_config(tiny(batching="static"))
    assert (config.static_batch_size, config.static_timeout) == (8, 0.1)
    config = scheduler_config(
        tiny(batching="static", static_batch_size=3, static_batch_timeout=0.0)
    )
    assert (config.static_batch_size, config.static_timeout) == (3, 0.0)


def test_prefix_caching_can_be_turned_off() -> None:
    assert scheduler_config(tiny()).enable_prefix_caching
    assert not scheduler_config(tiny(enable_prefix_caching=False)).enable_prefix_caching


def test_context_is_the_model_s_or_less() -> None:
    assert tiny().info.max_model_len == 2048
    assert tiny(max_model_len=100).info.max_model_len == 100
    with pytest.raises(OptionError, match="--max-model-len 4096 exceeds the 2048"):
        tiny(max_model_len=4096)


def test_a_cache_without_room_for_a_block_is_refused() -> None:
    with pytest.raises(OptionError, match="--kv-cache-memory-bytes"):
        tiny(kv_cache_memory_bytes=100)


def test_a_template_from_a_file_replaces_the_model_s(tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text("Q: {{ messages[0].content }} A:")
    template = tiny(chat_template=path).chat_template
    assert template is not None
    assert template.render([{"role": "user", "content": "why?"}]) == "Q: why? A:"


def test_a_model_that_is_not_there() -> None:
    with pytest.raises(ModelLoadError, match="no-such-model"):
        assemble(EngineOptions(model="no-such-model"))


def test_cuda_without_a_gpu_says_so() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(OptionError, match="--device"):
        tiny(device="cuda")


@pytest.mark.parametrize("content", [b"\xd0\x00\xff", None])
def test_a_template_that_cannot_be_read(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "template.jinja"
    path.write_bytes(content or b"")
    options = EngineOptions(**{**TINY, "chat_template": path})
    if content is None:
        path.unlink()  # gone since the options were checked
    with pytest.raises(OptionError, match="--chat-template"):
        assemble(options)


def test_a_cache_that_the_machine_cannot_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="--kv-cache-memory-bytes") as caught:
        tiny(kv_cache_memory_bytes=2**50)
    assert caught.value.param == "--kv-cache-memory-bytes"

    def full(*_: object, **__: object) -> None:
        raise MemoryError("std::bad_alloc")

    monkeypatch.setattr("hotbatch.executor.cpu_executor.CpuExecutor.__init__", full)
    with pytest.raises(OptionError, match="--kv-cache-memory-bytes"):
        tiny()


def test_cuda_without_torch_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(OptionError, match=r"hotbatch\[cuda\]"):
        tiny(device="cuda", kv_cache_memory_bytes=None)


def test_the_embedded_model_and_its_progress() -> None:
    told: list[tuple[str, int, int]] = []
    parts = assemble(
        EngineOptions(kv_cache_memory_bytes=64 * MIB, threads=2), lambda *step: told.append(step)
    )
    assert parts.name == EMBEDDED_MODEL_NAME
    assert parts.chat_template is not None
    assert parts.eos_token_ids
    loading = [(done, total) for stage, done, total in told if stage.startswith("Loading")]
    assert loading[-1][0] == loading[-1][1] > 0
    parts.close()


def test_service_options_reach_the_scheduler() -> None:
    parts = tiny(
        ttft_slo=PerClass(interactive=500.0), queue_ttl=30.0, tenant_weights={"alice": 2.0}
    )
    config = scheduler_config(parts)
    assert config.targets[ServiceClass.INTERACTIVE] == LatencyTargets(0.5, 0.1)
    assert config.queue_time_to_live == parts.queue_ttl == 30.0
    assert config.tenant_weights == {"alice": 2.0}
    assert parts.promised[ServiceClass.INTERACTIVE] == LatencyTargets(0.5, None)


@pytest.mark.parametrize(
    ("options", "has_classes"),
    [({}, True), ({"scheduling": "first-come"}, False), ({"batching": "static"}, False)],
)
def test_the_full_scheduler_is_the_default(options: dict[str, Any], has_classes: bool) -> None:
    assert tiny(**options).engine._scheduler.has_classes is has_classes
