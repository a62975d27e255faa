"""Token ids agree with the models' own tokenizers."""

from __future__ import annotations

import itertools
import json
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_vocabularies import CORPUS, sentencepiece_metadata
from tokenizers import decoders, models, pre_tokenizers, processors

from hotbatch.core.errors import InvalidRequestError, ModelLoadError
from hotbatch.text import Tokenizer
from hotbatch.text.gguf_metadata import read_gguf_metadata
from hotbatch.text.pre_tokenizers import RULES, rule_for

VARIED = [
    *CORPUS,
    "",
    " ",
    "\n\n\t  x",
    "Hello, world!",
    "  leading and trailing  ",
    "It's they're I'll WE'VE don't",
    "3.14159 and 1,000,000 and x2y3",
    "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n",
    "a<|endoftext|>b",
    "<|im_start",
    "日本語のテキスト、中文文本、한국어",
    "العربية עברית हिन्दी ไทย",
    "naïve café coöperate e\u0301",
    "\u200b\u00a0\ufeff zero width",
    "🇻🇳🇩🇪 \U0001d518\U0001d52b \U0001f9d1\u200d\U0001f680",
    "if (a && b) { return [1, 2, 3]; }\r\n",
    "x" * 300,
    "\x00\x01\x7f",
]


@pytest.fixture(scope="module")
def oracle(smollm_path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm_path.parent, gguf_file=smollm_path.name)


@pytest.mark.parametrize("text", VARIED)
@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_gguf_ids_equal_transformers(
    smollm: Tokenizer, oracle: Any, text: str, add_special_tokens: bool
) -> None:
    expected = oracle.encode(text, add_special_tokens=add_special_tokens)
    ids = smollm.encode(text, add_special_tokens)
    assert ids == expected
    for skip in (True, False):
        assert smollm.decode(ids, skip) == oracle.decode(expected, skip_special_tokens=skip)


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=60))
def test_gguf_ids_equal_transformers_on_any_text(smollm: Tokenizer, oracle: Any, text: str) -> None:
    """transformers drops the rule 'every digit alone' when it reads a GGUF file; put back in,
    the two agree on everything."""
    backend = tokenizers.Tokenizer.from_str(oracle.backend_tokenizer.to_str())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
    )
    assert smollm.encode(text) == backend.encode(text).ids


@pytest.mark.parametrize(
    ("text", "tokens"), [("a  1", ["a", "ĠĠ", "1"]), ("½ ²", ["Â½", "Ġ", "Â²"])]
)
def test_digits_are_split_as_in_training(smollm: Tokenizer, text: str, tokens: list[str]) -> None:
    """A digit, also one that is not ASCII, does not take the space before it along."""
    assert [smollm.id_to_token(i) for i in smollm.encode(text)] == tokens


def test_gguf_facts(smollm: Tokenizer) -> None:
    assert smollm.vocab_size == 49152
    assert (smollm.bos_token_id, smollm.eos_token_id) == (1, 2)
    assert (smollm.bos_token, smollm.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert smollm.eos_token_ids == {2}
    assert not smollm.adds_bos
    assert smollm.chat_template is not None and "<|im_start|>" in smollm.chat_template
    assert smollm.token_to_id("<|im_end|>") == 2
    assert smollm.id_to_token(10**9) is None
    assert smollm.id_to_token(-1) is None


@pytest.mark.parametrize("text", ["\ud83d", "half \udcff of it"])
def test_lone_surrogates_are_refused(byte_level: Tokenizer, text: str) -> None:
    with pytest.raises(InvalidRequestError, match="Unicode") as caught:
        byte_level.encode(text)
    assert caught.value.param == "prompt"


def test_many_threads_get_the_same_ids(smollm: Tokenizer) -> None:
    expected = [smollm.encode(text) for text in VARIED]
    with ThreadPoolExecutor(8) as pool:
        for ids in pool.map(lambda _: [smollm.encode(text) for text in VARIED], range(16)):
            assert ids == expected


# --- SentencePiece ----------------------------------------------------------------------------


def sentencepiece_oracle(metadata: dict[str, Any], text: str) -> list[int]:
    """SentencePiece's BPE as its paper has it: merge the neighbours whose union scores highest
    (the leftmost of equals) until none is left; then unknown characters become bytes."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    scores = metadata["tokenizer.ggml.scores"]
    kinds = metadata["tokenizer.ggml.token_type"]
    ids = {token: i for i, token in enumerate(tokens) if kinds[i] == 1}
    parts = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        candidates = [
            (-scores[ids[left + right]], at)
            for at, (left, right) in enumerate(itertools.pairwise(parts))
            if left + right in ids
        ]
        if not candidates:
            break
        _, at = min(candidates)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    out: list[int] = []
    for part in parts:
        if part in ids:
            out.append(ids[part])
        else:
            out += [3 + byte for byte in part.encode("utf-8")]
    return out


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet="theaninger  éñ☃", max_size=30))
def test_sentencepiece_merges_by_score(sentencepiece: Tokenizer, text: str) -> None:
    expected = sentencepiece_oracle(sentencepiece_metadata(), text)
    assert sentencepiece.encode(text, add_special_tokens=False) == expected
    assert sentencepiece.decode(expected) == text


def test_sentencepiece_adds_bos_and_parses_special_tokens(sentencepiece: Tokenizer) -> None:
    assert sentencepiece.adds_bos
    assert sentencepiece.encode("the")[0] == 1
    assert sentencepiece.encode("the", add_special_tokens=False)[0] != 1
    tool = sentencepiece.token_to_id("<tool>")
    assert tool in sentencepiece.encode("a<tool>b</s>")
    assert sentencepiece.encode("a<tool>b</s>")[-1] == 2
    assert sentencepiece.decode([2, tool or 0]) == "<tool>"
    assert sentencepiece.decode([2, tool or 0], skip_special_tokens=False) == "</s><tool>"


def test_sentencepiece_without_prefix_space() -> None:
    metadata = {**sentencepiece_metadata(), "tokenizer.ggml.add_space_prefix": False}
    tokenizer = Tokenizer.from_gguf_metadata(metadata)
    ids = tokenizer.encode("the", add_special_tokens=False)
    assert [tokenizer.id_to_token(i) for i in ids] == ["t", "he"]
    assert tokenizer.decode(tokenizer.encode(" the")) == " the"


# --- pre-tokenizers ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("gpt-2", "it's  a 123", ["it", "'s", "Ġ", "Ġa", "Ġ123"]),
        ("default", "a\n b", ["a", "Ċ", "Ġb"]),
        ("smollm", "ab 123", ["ab", "Ġ", "1", "2", "3"]),
        ("llama-bpe", "IT'S 12345", ["IT", "'S", "Ġ", "123", "45"]),
        ("llama-bpe", "a!\n\nb", ["a", "!ĊĊ", "b"]),
        ("qwen2", "x12 (y)", ["x", "1", "2", "Ġ(", "y", ")"]),
        ("tekken", "HelloWorld/\n", ["Hello", "World", "/Ċ"]),
    ],
)
def test_words_by_rule(name: str, text: str, words: list[str]) -> None:
    cut = rule_for(name).pre_tokenizer().pre_tokenize_str(text)
    assert [word for word, _ in cut] == words


def byte_level_metadata(**more: object) -> dict[str, object]:
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "hel", "<eos>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 1) + [3],
        "tokenizer.ggml.merges": ["h e", "he l"],
        "tokenizer.ggml.bos_token_id": len(tokens) - 1,
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
        **more,
    }


@pytest.mark.parametrize("name", sorted(RULES))
def test_every_rule_round_trips(name: str) -> None:
    tokenizer = Tokenizer.from_gguf_metadata(byte_level_metadata(**{"tokenizer.ggml.pre": name}))
    for text in VARIED:
        ids = tokenizer.encode(text, add_special_tokens=False)
        normalizer = tokenizer.backend.normalizer
        assert tokenizer.decode(ids) == (normalizer.normalize_str(text) if normalizer else text)


def test_bos_by_family_and_by_key() -> None:
    def adds_bos(**more: object) -> bool:
        ids = Tokenizer.from_gguf_metadata(byte_level_metadata(**more)).encode("hel")
        return len(ids) == 2

    assert not adds_bos(**{"tokenizer.ggml.pre": "gpt-2"})
    assert adds_bos(**{"tokenizer.ggml.pre": "llama-bpe"})
    assert not adds_bos(
        **{"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}
    )
    assert adds_bos(**{"tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.add_bos_token": True})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tokenizer.ggml.model": "bert"}, "'bert'"),
        ({"tokenizer.ggml.pre": "martian"}, "martian"),
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.merges": ["h nowhere"]}, "damaged"),
    ],
)
def test_unusable_metadata_is_refused(change: dict[str, object], says: str) -> None:
    with pytest.raises(ModelLoadError, match=says):
        Tokenizer.from_gguf_metadata(byte_level_metadata(**change))


# --- GGUF header ------------------------------------------------------------------------------


def test_header_equals_the_gguf_package(tmp_path: Path) -> None:
    from gguf import GGUFWriter

    path = tmp_path / "tiny.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_uint32("a.u32", 7)
    writer.add_float32("a.f32", 0.5)
    writer.add_bool("a.bool", True)
    writer.add_int64("a.i64", -(2**40))
    writer.add_string("a.text", "Việt ☃")
    writer.add_array("a.words", ["x", "", "ü"])
    writer.add_array("a.numbers", [1, -2, 3])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert read_gguf_metadata(path, prefix="a.") == {
        "a.u32": 7,
        "a.f32": 0.5,
        "a.bool": True,
        "a.i64": -(2**40),
        "a.text": "Việt ☃",
        "a.words": ["x", "", "ü"],
        "a.numbers": [1, -2, 3],
    }
    whole = path.read_bytes()
    for length in range(1, len(whole) - 8, 7):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelLoadError):
            read_gguf_metadata(path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "GGUF file"),
        (b"PK\x03\x04 some zip", "magic"),
        (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "version 9"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=says):
        read_gguf_metadata(path)


# --- Hugging Face folders ---------------------------------------------------------------------


def write_folder(folder: Path, config: dict[str, object], *, template_adds_bos: bool) -> None:
    backend = tokenizers.Tokenizer(
        models.BPE({"<s>": 0, "</s>": 1, "h": 2, "e": 3, "he": 4, "Ġ": 5}, [("h", "e")])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    if template_adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
        )
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("template_adds_bos", [True, False])
@pytest.mark.parametrize(("key", "adds"), [(True, True), (False, False), (None, None)])
def test_folder_bos(
    tmp_path: Path, template_adds_bos: bool, key: bool | None, adds: bool | None
) -> None:
    config: dict[str, object] = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    if key is not None:
        config["add_bos_token"] = key
    write_folder(tmp_path, config, template_adds_bos=template_adds_bos)
    tokenizer = Tokenizer.from_folder(tmp_path)
    expected = template_adds_bos if adds is None else adds
    assert tokenizer.encode("he") == ([0, 4] if expected else [4])
    assert tokenizer.encode("he", add_special_tokens=False) == [4]
    assert tokenizer.encode("he</s>", add_special_tokens=False) == [4, 1]
    assert tokenizer.special_tokens["bos_token"] == "<s>"


def test_folder_configs(tmp_path: Path) -> None:
    config = {
        "eos_token": "</s>",
        "chat_template": [
            {"name": "default", "template": "A"},
            {"name": "tool_use", "template": "B"},
        ],
        "added_tokens_decoder": {"6": {"content": "<extra>", "special": True}},
    }
    write_folder(tmp_path, config, template_adds_bos=False)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 6]}')
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.eos_token_ids == {1, 6}
    assert tokenizer.encode("<extra>") == [6]
    assert (tokenizer.chat_template, tokenizer.named_chat_templates) == ("A", {"tool_use": "B"})
    (tmp_path / "chat_template.jinja").write_text("C")
    assert Tokenizer.from_folder(tmp_path).chat_template == "C"


def test_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelLoadError, match="Cannot read"):
        Tokenizer.from_folder(tmp_path)
