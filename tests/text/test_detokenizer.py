"""However a token sequence is cut into pieces, the text is the same, and never half a character."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotbatch.text import IncrementalDetokenizer, Tokenizer

TEXTS = [
    "Xin chào Việt Nam, trời đẹp quá! Phở bò rất ngon.",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇻🇳 ☃️",
    "日本語、中文、한국어 العربية हिन्दी",
    "e\u0301 \u200d\u200b \ufffd real replacement",
    "plain",
    " leading space",
]


def pieces(tokenizer: Tokenizer, cuts: list[list[int]], **options: object) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, **options)  # type: ignore[arg-type]
    return [*[detokenizer.push(cut) for cut in cuts], detokenizer.flush()]


@st.composite
def cut_up(draw: st.DrawFn, size: int) -> list[list[int]]:
    ids = draw(st.lists(st.integers(0, size - 1), max_size=40))
    cuts: list[list[int]] = []
    while ids:
        length = draw(st.integers(0, len(ids)))
        cuts.append(ids[:length])
        ids = ids[length:] if length else ids
        if len(cuts) > 60:
            cuts.append(ids)
            break
    return cuts


@settings(max_examples=300, deadline=None)
@given(data=st.data(), skip=st.booleans())
@pytest.mark.parametrize("name", ["byte_level", "sentencepiece", "wordpiece"])
def test_any_split_gives_the_text_of_decoding_at_once(
    request: pytest.FixtureRequest, name: str, data: st.DataObject, skip: bool
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    cuts = data.draw(cut_up(tokenizer.vocab_size + 2))
    whole = [token for cut in cuts for token in cut]
    text = "".join(pieces(tokenizer, cuts, skip_special_tokens=skip))
    assert text == tokenizer.decode(whole, skip_special_tokens=skip)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_byte_level_equals_the_librarys_decoder(
    byte_level: Tokenizer, data: st.DataObject, skip: bool
) -> None:
    ids = data.draw(st.lists(st.integers(0, byte_level.vocab_size + 2), max_size=40))
    expected = byte_level.backend.decode(ids, skip_special_tokens=skip)
    assert byte_level.decode(ids, skip_special_tokens=skip) == expected


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", ["byte_level", "sentencepiece", "smollm"])
def test_no_piece_shows_half_a_character(
    request: pytest.FixtureRequest, name: str, text: str
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    ids = tokenizer.encode(text, add_special_tokens=False)
    shown = pieces(tokenizer, [[token] for token in ids])
    assert "".join(shown) == text
    assert shown[-1] == ""
    for piece in shown:
        assert piece.count("\ufffd") <= text.count("\ufffd")
    # A character is out with its last byte: nothing is held longer than that.
    for count in range(1, len(ids) + 1):
        so_far = "".join(shown[:count])
        complete = tokenizer.decode(ids[:count]).removesuffix("\ufffd").rstrip("\ufffd")
        assert so_far.rstrip("\ufffd") == complete


def test_an_emoji_comes_with_its_last_byte(byte_level: Tokenizer) -> None:
    ids = [byte_level.token_to_id(char) or 0 for char in "ðŁĺĢ"]  # the four bytes of U+1F600
    assert pieces(byte_level, [[i] for i in ids]) == ["", "", "", "\U0001f600", ""]


def test_an_unfinished_character_is_shown_at_the_end_only(byte_level: Tokenizer) -> None:
    ids = [byte_level.token_to_id(char) or 0 for char in "ðŁĺ"]
    assert pieces(byte_level, [[i] for i in ids]) == ["", "", "", "\ufffd"]


def test_garbage_is_not_held_for_ever(wordpiece: Tokenizer, byte_level: Tokenizer) -> None:
    lead = byte_level.token_to_id("ð") or 0
    shown = pieces(byte_level, [[lead]] * 100)
    assert "".join(shown) == "\ufffd" * 100
    assert all(len(piece) <= 1 for piece in shown)


def test_special_tokens(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a<|end|>b<tool call>c")
    assert "".join(pieces(byte_level, [ids])) == "ab<tool call>c"
    shown = pieces(byte_level, [[token] for token in ids], skip_special_tokens=False)
    assert "".join(shown) == "a<|end|>b<tool call>c"


def test_output_continues_its_prompt(sentencepiece: Tokenizer, wordpiece: Tokenizer) -> None:
    """The first token of an answer keeps its space, which it would lose at a text's start."""
    the = [sentencepiece.token_to_id("▁the") or 0]
    assert "".join(pieces(sentencepiece, [the])) == "the"
    assert "".join(pieces(sentencepiece, [the], prefix_ids=the)) == " the"
    hello, ing = (wordpiece.token_to_id(token) or 0 for token in ("hello", "##ing"))
    assert "".join(pieces(wordpiece, [[hello], [ing]], prefix_ids=[hello])) == " helloing"


def test_token_text(byte_level: Tokenizer, sentencepiece: Tokenizer) -> None:
    assert byte_level.token_text(byte_level.token_to_id("Ġ") or 0) == (" ", b" ")
    assert byte_level.token_text(byte_level.token_to_id("ð") or 0) == ("\ufffd", b"\xf0")
    assert sentencepiece.token_text(3 + 0xE2) == ("\ufffd", b"\xe2")
    assert sentencepiece.token_text(sentencepiece.token_to_id("▁the") or 0) == (" the", b" the")
