"""Conversations out of a trace that says which prompts begin alike, scaled in time and length.

Mooncake's trace has a hash for every 512 tokens of a prompt. A request whose prompt shares two
or more of them with an earlier one is a later turn of the latest such; the first 512 tokens are
a system prompt that nearly all share. Where it shares all that can be told apart, its prompt is
taken to be the earlier prompt, its answer and something new, which fits their lengths in nine of
ten cases; else it begins like the earlier prompt and goes its own way (somebody edited it).

The next turn comes its trace's gap after the answer has ended: people read first. So gaps are
human whatever the server does. Lengths are scaled by a factor, gaps by another, and only a share
of the conversations is kept, chosen by the seed: the way to fit a trace of a large machine to a
small one without changing how people behave.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hotbatch.bench.traces import PREFIX_BLOCK, TraceRow, read_mooncake

_LEAST_THOUGHT = 0.5  # seconds


@dataclass(frozen=True, slots=True)
class Turn:
    """A prompt and its answer.

    Attributes:
        gap: seconds since the answer before it, or since the start of the run.
        kept: tokens of the conversation so far that the prompt begins with.
        new: tokens of its own behind these.
        answer: tokens of the answer.
    """

    gap: float
    kept: int
    new: int
    answer: int

    @property
    def num_prompt(self) -> int:
        return self.kept + self.new


@dataclass(frozen=True, slots=True)
class Conversation:
    """`common` tokens of the first prompt are those of the system prompt."""

    common: int
    turns: tuple[Turn, ...]


def load(path: Path | None, count: int = 4000) -> list[TraceRow]:
    """The trace, or one made up in its shape.

    Raises:
        OSError, TraceError: the file cannot be read.
    """
    return generated(count) if path is None else read_mooncake(path)


def conversations(
    rows: Sequence[TraceRow],
    *,
    keep: float = 1.0,
    time_scale: float = 1.0,
    length_scale: float = 1.0,
    max_total: int,
    seed: int = 0,
) -> list[Conversation]:
    """Those of the trace that were drawn; each ends before it outgrows `max_total` tokens."""
    rng = random.Random(seed)
    result = []
    for chain in _chains(rows):
        if rng.random() >= keep:
            continue
        turns = _turns([rows[index] for index in chain], time_scale, length_scale, max_total)
        if turns:
            common = min(turns[0].new, _scaled(PREFIX_BLOCK, length_scale))
            result.append(Conversation(common, turns))
    return result


def _chains(rows: Sequence[TraceRow]) -> list[list[int]]:
    """Indices of rows by conversation; one that forks is a new conversation from there on."""
    last: dict[int, int] = {}  # a hash, and the latest row that had it
    chain_of: dict[int, list[int]] = {}
    chains = []
    for index, row in enumerate(rows):
        former = None
        if len(row.prefix) > 1 and row.prefix[1] in last:
            shared = _num_shared(row, last)
            former = last[row.prefix[shared - 1]]
        chain = chain_of.get(former) if former is not None else None
        if chain is None or chain[-1] != former:
            chain = []
            chains.append(chain)
        chain.append(index)
        chain_of[index] = chain
        last.update(dict.fromkeys(row.prefix, index))
    return chains


def _num_shared(row: TraceRow, last: dict[int, int]) -> int:
    shared = 0
    while shared < len(row.prefix) and row.prefix[shared] in last:
        shared += 1
    return shared


def _turns(
    rows: Sequence[TraceRow], time_scale: float, length_scale: float, max_total: int
) -> tuple[Turn, ...]:
    turns: list[Turn] = []
    for index, row in enumerate(rows):
        answer = _scaled(row.output_len, length_scale)
        if index == 0:
            turn = Turn(row.time * time_scale, 0, _scaled(row.input_len, length_scale), answer)
        else:
            former, said = rows[index - 1], turns[-1].num_prompt + turns[-1].answer
            shared = len(_common_prefix(row.prefix, former.prefix))
            new = row.input_len - former.input_len - former.output_len
            kept = said
            if shared < len(former.prefix) - 1 or new < 0:
                kept = min(said, _scaled(shared * PREFIX_BLOCK, length_scale))
                new = max(1, row.input_len - shared * PREFIX_BLOCK)
            gap = max(_LEAST_THOUGHT, (row.time - former.time) * time_scale)
            turn = Turn(gap, kept, _scaled(new, length_scale), answer)
        if turn.num_prompt + answer > max_total:
            break
        turns.append(turn)
    return tuple(turns)


def _common_prefix(one: Sequence[int], other: Sequence[int]) -> Sequence[int]:
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return one[:length]


def _scaled(tokens: int, scale: float) -> int:
    return max(1, round(tokens * scale))


# ---- made up


def generated(count: int, *, seed: int = 0) -> list[TraceRow]:
    """About `count` rows in the shape of Mooncake's conversation trace: a third of the first
    turns is followed by a second, more and more of those after it, two minutes later."""
    rng = random.Random(seed)
    rows: list[TraceRow] = []
    next_hash = 1
    start = 0.0
    while len(rows) < count:
        start += rng.expovariate(2.0)
        time, num_prompt, turn, prefix = start, 0, 0, (0,)
        while True:
            num_prompt += min(60_000, round(rng.lognormvariate(math.log(5000.0), 1.0)))
            num_blocks = -(-num_prompt // PREFIX_BLOCK)
            fresh = max(0, num_blocks - len(prefix))
            prefix += tuple(range(next_hash, next_hash + fresh))
            next_hash += fresh
            answer = max(1, round(rng.lognormvariate(math.log(300.0), 0.6)))
            rows.append(TraceRow(time, num_prompt, answer, prefix))
            num_prompt += answer
            if rng.random() > min(0.85, 0.31 + 0.1 * turn):
                break
            time += rng.lognormvariate(math.log(120.0), 0.9)
            turn += 1
            prefix = prefix[: num_prompt // PREFIX_BLOCK] or (0,)
    return sorted(rows, key=lambda row: row.time)
