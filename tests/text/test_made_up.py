"""The tokenizer of made-up models."""

from __future__ import annotations

import pytest

from hotbatch.text.made_up import made_up_tokenizer


def test_every_text_is_its_bytes_and_comes_back() -> None:
    tokenizer = made_up_tokenizer(512)
    for text in ["", "plain", " two  spaces\n", "xin chào 🙂"]:
        ids = tokenizer.encode(text)
        assert len(ids) == len(text.encode())
        assert max(ids, default=0) < 256
        assert tokenizer.decode(ids) == text


def test_other_ids_read_as_words_of_their_own() -> None:
    tokenizer = made_up_tokenizer(512)
    assert tokenizer.decode([300, 511]) == " t300 t511"
    assert tokenizer.vocab_size == 512
    assert not tokenizer.eos_token_ids


def test_a_vocabulary_smaller_than_the_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="256"):
        made_up_tokenizer(255)
