"""Remembers which token ids a text was generated as, and uses them when a prompt repeats it.

A chat client sends the whole conversation as text each time. Tokenizing a generated answer again
need not give the tokens that the model generated: it may write a word in two pieces, or begin
with a line break that the tokenizer would join to the one before it. The KV of the answer would
then not be found, nor that of anything behind it, and the model would read something it never
said. So the ids of a prompt and of the answers to it are remembered, and a prompt that begins
with that very text gets these very ids; only what follows is tokenized.

What comes out always decodes to exactly the prompt's text, byte for byte: the remembered part was
checked when it was remembered, the rest is checked each time, and whatever does not pass is
tokenized as if nothing were known. Texts are found by a chain of BLAKE2b hashes over pieces of 64
characters that starts from the owner, so that nobody is given what somebody else was answered;
of the last piece the text itself is compared.

Tokenizers without a table of bytes, and those that put a space in front of every text they are
given (SentencePiece's dummy prefix), are left alone.

Cost: a hash for each 64 characters of a prompt (half a millisecond for 32 KB), and four bytes for
each token remembered. Safe to use from several threads.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING

from hotbatch.core.owner import Owner

if TYPE_CHECKING:
    from hotbatch.text.token_bytes import TokenBytes
    from hotbatch.text.tokenizer import Tokenizer

_PIECE = 64  # characters
_MOST_ANSWERS = 4  # to one prompt
_MOST_TOKENS = 8_000_000  # of all owners: 32 MB
_MOST_TOKENS_OF_ONE = 1_000_000


@dataclass(slots=True)
class _Answer:
    """`ends[i]` is where the text of the first `i + 1` ids ends in `text`, in bytes."""

    text: bytes
    ids: array[int]
    ends: array[int]


@dataclass(slots=True)
class _Memory:
    """A prompt, and the latest answers to it. `num_chars` is the length of its text."""

    owner: Owner
    key: bytes
    rest: str
    ids: array[int]
    num_chars: int
    answers: list[_Answer] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.ids) + sum(len(answer.ids) for answer in self.answers)


class AnswerMemory:
    """Prompts and answers of late, least recently used ones forgotten.

    Args:
        tokenizer: of the model.
        most_tokens, most_tokens_of_one: bounds of what is remembered, of all owners and of each.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        most_tokens: int = _MOST_TOKENS,
        most_tokens_of_one: int = _MOST_TOKENS_OF_ONE,
    ) -> None:
        self._tokenizer = tokenizer
        table = tokenizer.token_bytes
        self._table: TokenBytes | None = None
        if table is not None and not table.strips_first_space:
            self._table = table
        self._most_tokens = most_tokens
        self._most_tokens_of_one = most_tokens_of_one
        self._buckets: dict[bytes, dict[str, _Memory]] = {}
        self._recent: OrderedDict[Owner, OrderedDict[tuple[bytes, str], _Memory]] = OrderedDict()
        self._num_tokens_of: dict[Owner, int] = {}
        self._num_tokens = 0
        self._lock = threading.Lock()
        self.num_spliced = 0  # prompts that got remembered ids
        self.num_spliced_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Tokens remembered now."""
        return self._num_tokens

    # Using it

    def encode(self, text: str, owner: Owner, *, is_asked: bool = True) -> list[int]:
        """Token ids of a rendered prompt (special tokens written in it become themselves), with
        remembered ids where it begins with something remembered.

        Args:
            is_asked: somebody sent it, so it counts.

        Raises:
            InvalidRequestError: as `Tokenizer.encode`.
        """
        if self._table is not None and self._num_tokens:
            spliced = self._splice(text, owner, is_asked)
            if spliced is not None:
                return spliced
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _splice(self, text: str, owner: Owner, is_asked: bool) -> list[int] | None:
        with self._lock:
            memory = self._longest(text, owner)
            if memory is None:
                return None
            self._touch(memory)
            answers = list(memory.answers)
        known, place = memory.ids.tolist(), memory.num_chars
        best: tuple[int, _Answer] | None = None
        for answer in answers:
            count = _num_repeated(answer, text, place)
            if count and (best is None or answer.ends[count - 1] > best[1].ends[best[0] - 1]):
                best = count, answer
        if best is not None:
            count, answer = best
            known += answer.ids[:count]
            place += len(answer.text[: answer.ends[count - 1]].decode("utf-8"))
        rest = text[place:]
        tail = self._tokenizer.encode(rest, add_special_tokens=False)
        if not self._says(tail, rest):
            return None
        if is_asked:
            with self._lock:
                self.num_spliced += 1
                self.num_spliced_tokens += len(known)
        return known + tail

    def _longest(self, text: str, owner: Owner) -> _Memory | None:
        """The longest remembered prompt that the text begins with."""
        keys = _keys(text, owner)
        for number in range(len(keys) - 1, -1, -1):
            bucket = self._buckets.get(keys[number])
            if bucket is None:
                continue
            start = number * _PIECE
            for length in range(min(_PIECE - 1, len(text) - start), -1, -1):
                memory = bucket.get(text[start : start + length])
                if memory is not None:
                    return memory
        return None

    # Learning

    def remember(
        self,
        owner: Owner,
        prompt: str,
        prompt_ids: Sequence[int],
        answer: str,
        answer_ids: Sequence[int],
    ) -> bool:
        """Keep what a prompt was answered with; False if its ids do not say exactly its text.

        Args:
            prompt: the text that `prompt_ids` were made from, without any token put around it.
            answer: what the client was told. Of `answer_ids` only those are kept whose text it
                begins with: none behind a stop string or a special token that was left out.
        """
        if self._table is None or not self._says(prompt_ids, prompt):
            return False
        learnt = _Answer(answer.encode("utf-8", "surrogatepass"), array("I"), array("I"))
        end = 0
        for token_id in answer_ids:
            piece = self._table[token_id]
            if not piece or not learnt.text.startswith(piece, end):
                break
            end += len(piece)
            learnt.ids.append(token_id)
            learnt.ends.append(end)
        with self._lock:
            self._store(owner, prompt, prompt_ids, learnt)
        return True

    def _says(self, ids: Sequence[int], text: str) -> bool:
        assert self._table is not None
        table = self._table
        return b"".join([table[token] for token in ids]) == text.encode("utf-8", "surrogatepass")

    def _store(self, owner: Owner, prompt: str, prompt_ids: Sequence[int], answer: _Answer) -> None:
        key = _keys(prompt, owner)[-1]
        rest = prompt[len(prompt) - len(prompt) % _PIECE :]
        memory = self._buckets.get(key, {}).get(rest)
        if memory is not None:
            self._drop(memory)
        ids = array("I", prompt_ids)
        answers = [] if memory is None or memory.ids != ids else memory.answers
        answers = [old for old in answers if old.text != answer.text]
        if answer.ids:
            answers = [*answers, answer][-_MOST_ANSWERS:]
        memory = _Memory(owner, key, rest, ids, len(prompt), answers)
        if memory.num_tokens > self._most_tokens_of_one:
            return
        self._buckets.setdefault(key, {})[rest] = memory
        self._recent.setdefault(owner, OrderedDict())[key, rest] = memory
        self._count(owner, memory.num_tokens)
        self._touch(memory)
        while self._num_tokens_of[owner] > self._most_tokens_of_one:
            self._drop(next(iter(self._recent[owner].values())))
        while self._num_tokens > self._most_tokens:
            stalest = next(iter(self._recent.values()))
            self._drop(next(iter(stalest.values())))

    def _touch(self, memory: _Memory) -> None:
        self._recent.move_to_end(memory.owner)
        self._recent[memory.owner].move_to_end((memory.key, memory.rest))

    def _drop(self, memory: _Memory) -> None:
        bucket = self._buckets[memory.key]
        del bucket[memory.rest]
        if not bucket:
            del self._buckets[memory.key]
        of_owner = self._recent[memory.owner]
        del of_owner[memory.key, memory.rest]
        self._count(memory.owner, -memory.num_tokens)
        if not of_owner:
            del self._recent[memory.owner]
            del self._num_tokens_of[memory.owner]

    def _count(self, owner: Owner, num_tokens: int) -> None:
        self._num_tokens += num_tokens
        self._num_tokens_of[owner] = self._num_tokens_of.get(owner, 0) + num_tokens


def _keys(text: str, owner: Owner) -> list[bytes]:
    """Hashes of the text's beginnings: of none, one, two, ... whole pieces."""
    tenant, salt = owner
    root = f"{len(tenant)}:{tenant}{'' if salt is None else ':' + salt}"
    key = blake2b(root.encode("utf-8", "surrogatepass"), digest_size=32, person=b"owner").digest()
    keys = [key]
    for start in range(0, len(text) - _PIECE + 1, _PIECE):
        piece = text[start : start + _PIECE].encode("utf-8", "surrogatepass")
        key = blake2b(key + piece, digest_size=32).digest()
        keys.append(key)
    return keys


def _num_repeated(answer: _Answer, text: str, place: int) -> int:
    """How many ids of an answer a text repeats from `place` on: all, or all but those of white
    space at its end, which templates strip; none if it repeats less than that."""
    said = answer.text.decode("utf-8", "surrogatepass")
    if not text.startswith(said, place):
        said = said.rstrip()
        if not said or not text.startswith(said, place):
            return 0
    end = len(said.encode("utf-8", "surrogatepass"))
    count = len(answer.ids)
    # No id may reach beyond what is repeated, or end in the middle of a character.
    while count and (answer.ends[count - 1] > end or _is_inside(answer, answer.ends[count - 1])):
        count -= 1
    return count


def _is_inside(answer: _Answer, place: int) -> bool:
    return place < len(answer.text) and answer.text[place] & 0xC0 == 0x80
