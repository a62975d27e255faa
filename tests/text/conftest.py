"""Tokenizers for the tests: the embedded model's own, and small ones made up on the spot."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import tokenizers
from sample_vocabularies import CORPUS, sentencepiece_metadata
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from hotbatch.models.embedded import embedded_model_path
from hotbatch.text import Tokenizer

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def smollm_path() -> Path:
    return embedded_model_path()


@pytest.fixture(scope="session")
def smollm(smollm_path: Path) -> Tokenizer:
    return Tokenizer.from_gguf(smollm_path)


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    """A small byte-level BPE in which most characters outside ASCII take several tokens."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<tool call>", special=False, normalized=False)])
    return Tokenizer(backend, bos_token_id=0, eos_token_id=1)


@pytest.fixture(scope="session")
def sentencepiece() -> Tokenizer:
    return Tokenizer.from_gguf_metadata(sentencepiece_metadata())


@pytest.fixture(scope="session")
def wordpiece() -> Tokenizer:
    """A tokenizer whose decoder has no byte table: the generic way of detokenizing."""
    words = ["[UNK]", "hello", "##ing", "wor", "##ld", "a", "##b", ",", "."]
    backend = tokenizers.Tokenizer(
        models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    return Tokenizer(backend)
