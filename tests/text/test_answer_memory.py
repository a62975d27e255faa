"""Token ids that an answer was generated as come back when a prompt repeats its text."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotbatch.core.owner import Owner
from hotbatch.text import Tokenizer
from hotbatch.text.answer_memory import AnswerMemory

ME, OTHER = Owner("me", None), Owner("other", None)
PROMPT = "<|begin|>user: hello the quick\n<|begin|>assistant: "
NEXT = "\n<|begin|>user: and then?\n<|begin|>assistant: "


def letters(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids that say a text otherwise than the tokenizer would: each byte by itself."""
    table = tokenizer.token_bytes
    assert table is not None
    by_bytes = {table[token]: token for token in range(tokenizer.vocab_size - 1, -1, -1)}
    return [by_bytes[bytes([byte])] for byte in text.encode()]


def said(tokenizer: Tokenizer, ids: list[int]) -> bytes:
    table = tokenizer.token_bytes
    assert table is not None
    return b"".join(table[token] for token in ids)


def taught(tokenizer: Tokenizer, answer: str, **bounds: int) -> tuple[AnswerMemory, list[int]]:
    memory = AnswerMemory(tokenizer, **bounds)
    ids = letters(tokenizer, answer)
    prompt_ids = tokenizer.encode(PROMPT, add_special_tokens=False)
    assert memory.remember(ME, PROMPT, prompt_ids, answer, ids)
    return memory, ids


def test_a_repeated_answer_gets_the_ids_that_it_was_generated_as(byte_level: Tokenizer) -> None:
    memory, ids = taught(byte_level, "the quick brown")
    text = PROMPT + "the quick brown" + NEXT
    plain = byte_level.encode(text, add_special_tokens=False)
    spliced = memory.encode(text, ME)
    start = len(byte_level.encode(PROMPT, add_special_tokens=False))
    assert spliced[start : start + len(ids)] == ids
    assert spliced != plain
    assert said(byte_level, spliced) == text.encode()
    assert memory.num_spliced == 1


def test_nobody_is_given_what_another_was_answered(byte_level: Tokenizer) -> None:
    memory, _ = taught(byte_level, "the quick brown")
    text = PROMPT + "the quick brown" + NEXT
    plain = byte_level.encode(text, add_special_tokens=False)
    for owner in (OTHER, Owner("me", "salt"), Owner("", None)):
        assert memory.encode(text, owner) == plain
    assert memory.num_spliced == 0


@pytest.mark.parametrize("change", ["The quick brown", "the quick", "another answer"])
def test_another_answer_is_tokenized_as_it_is(byte_level: Tokenizer, change: str) -> None:
    memory, _ = taught(byte_level, "the quick brown")
    text = PROMPT + change + NEXT
    assert said(byte_level, memory.encode(text, ME)) == text.encode()
    tail = memory.encode(text, ME)[len(byte_level.encode(PROMPT, add_special_tokens=False)) :]
    assert tail == byte_level.encode(change + NEXT, add_special_tokens=False)


def test_white_space_at_the_end_may_be_stripped(byte_level: Tokenizer) -> None:
    memory, ids = taught(byte_level, "hello \n")
    text = PROMPT + "hello" + NEXT
    start = len(byte_level.encode(PROMPT, add_special_tokens=False))
    assert memory.encode(text, ME)[start : start + 5] == ids[:5]


def test_what_lies_behind_a_stop_string_is_not_kept(byte_level: Tokenizer) -> None:
    memory = AnswerMemory(byte_level)
    prompt_ids = byte_level.encode(PROMPT, add_special_tokens=False)
    memory.remember(ME, PROMPT, prompt_ids, "he", letters(byte_level, "hello"))
    text = PROMPT + "hello" + NEXT
    known = memory.encode(text, ME)[len(prompt_ids) :]
    assert known[:2] == letters(byte_level, "he")
    assert known[2:] == byte_level.encode("llo" + NEXT, add_special_tokens=False)


def test_a_prompt_whose_ids_say_something_else_is_not_kept(byte_level: Tokenizer) -> None:
    memory = AnswerMemory(byte_level)
    assert not memory.remember(ME, PROMPT, [5, 6, 7], "hello", letters(byte_level, "hello"))
    assert memory.num_tokens == 0


@pytest.mark.parametrize("name", ["sentencepiece", "wordpiece"])
def test_tokenizers_whose_pieces_do_not_add_up_are_left_alone(
    name: str, request: pytest.FixtureRequest
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    memory = AnswerMemory(tokenizer)
    text = "hello world"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert not memory.remember(ME, text, ids, " a", ids)
    assert memory.encode(text, ME) == ids


def test_the_stalest_is_forgotten_and_nobody_takes_all(byte_level: Tokenizer) -> None:
    memory = AnswerMemory(byte_level, most_tokens=400, most_tokens_of_one=200)
    for owner in (ME, OTHER):
        for number in range(40):
            prompt = f"<|begin|>user: {number}\n"
            ids = byte_level.encode(prompt, add_special_tokens=False)
            memory.remember(owner, prompt, ids, "hello", letters(byte_level, "hello"))
            assert memory.num_tokens <= 400
            assert memory._num_tokens_of[owner] <= 200
    assert memory.num_tokens > 300

    def is_known(number: int, owner: Owner) -> bool:
        before = memory.num_spliced
        memory.encode(f"<|begin|>user: {number}\nhello", owner)
        return memory.num_spliced > before

    assert is_known(39, ME) and is_known(39, OTHER)
    assert not is_known(0, ME) and not is_known(0, OTHER)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10_000))
def test_whatever_was_remembered_a_prompt_says_its_own_text(
    byte_level: Tokenizer, seed: int
) -> None:
    """Random answers in random ids, broken characters among them, over random conversations."""
    chance = random.Random(seed)
    memory = AnswerMemory(byte_level, most_tokens=chance.choice([60, 10_000]))
    table = byte_level.token_bytes
    assert table is not None
    conversations = ["<|begin|>user: hi\n<|begin|>assistant: "]
    for _ in range(8):
        prompt = chance.choice(conversations)
        owner = chance.choice([ME, OTHER])
        ids = memory.encode(prompt, owner)
        assert said(byte_level, ids) == prompt.encode()
        answer_ids = [
            chance.randrange(2, byte_level.vocab_size) for _ in range(chance.randrange(9))
        ]
        answer = said(byte_level, answer_ids).decode("utf-8", "replace")
        memory.remember(owner, prompt, ids, answer[: chance.randrange(12)], answer_ids)
        said_back = chance.choice([answer, answer.strip(), answer[:2], "đẹp 👩"])
        conversations.append(prompt + said_back + NEXT)
