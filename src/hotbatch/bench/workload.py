"""What to ask, for whom and when: prompts of given lengths, classes, tenants, moments.

Everything here is a function of its arguments and a seed, so that two servers get the very
same requests at the very same moments.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hotbatch.bench.traces import PREFIX_BLOCK, TraceRow

# Frequent short words: nearly every tokenizer spends one token on each (with its space), so a
# text prompt of n words is close to n tokens without knowing the server's tokenizer.
_WORDS = """
    the of and to in is was for that it with as on be at by this had not are but from or have
    an they which one you were all her she there would their we him been has when who will no
    more if out so up said what its about than into them can only other time new some could
    these two may first then do any like my now over such our man me even most made after also
    did many off before must well back through years much where your way down should because
    long each just state those people too mr how little good make world still see own work men
    day here between both life being under three never know same last another while us might
    great old year come since go against right came take used himself few house use place water
""".split()  # noqa: SIM905 - prose is easier to read than 160 quoted words


Message = dict[str, str]
Prompt = str | tuple[int, ...] | tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request to send. `prompt_len` and `output_len` are tokens, as planned.

    Attributes:
        prompt: text, token ids, or the messages of a chat.
        service_class, tenant: names under which the report groups it; "" is none.
        limits: what goodput asks of it, milliseconds by ttft, tpot, e2el; None: the run's.
        fields: goes into the body as it is.
        api_key: instead of the target's.
        turn: its place in a conversation, from 0.
    """

    prompt: Prompt
    prompt_len: int
    output_len: int
    service_class: str = ""
    tenant: str = ""
    limits: Mapping[str, float] | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    api_key: str | None = None
    turn: int = 0


@dataclass(frozen=True, slots=True)
class RandomLengths:
    """Lengths drawn evenly from `mean * (1 - spread)` to `mean * (1 + spread)`, at least 1."""

    mean: int
    spread: float = 0.0

    def draw(self, rng: random.Random) -> int:
        low = max(1, math.floor(self.mean * (1.0 - self.spread)))
        high = max(low, math.ceil(self.mean * (1.0 + self.spread)))
        return rng.randint(low, high)


def random_requests(
    count: int,
    *,
    input_len: RandomLengths,
    output_len: RandomLengths,
    seed: int = 0,
    prefix_len: int = 0,
    as_text: bool = False,
    token_range: tuple[int, int] = (1000, 20000),
) -> list[BenchRequest]:
    """Random prompts; the first `prefix_len` tokens are the same for all of them.

    `input_len` does not count the prefix. Prompts are lists of token ids from `token_range`
    (the end excluded), or with `as_text` words of about a token each.
    """
    rng = random.Random(seed)
    prefix = _random_tokens(rng, prefix_len, as_text, token_range)
    requests = []
    for _ in range(count):
        tokens = prefix + _random_tokens(rng, input_len.draw(rng), as_text, token_range)
        prompt = " ".join(map(str, tokens)) if as_text else tuple(map(int, tokens))
        requests.append(BenchRequest(prompt, len(tokens), output_len.draw(rng)))
    return requests


def _random_tokens(
    rng: random.Random, count: int, as_text: bool, token_range: tuple[int, int]
) -> list[str] | list[int]:
    if as_text:
        return rng.choices(_WORDS, k=count)
    return [rng.randrange(*token_range) for _ in range(count)]


def trace_requests(
    rows: Sequence[TraceRow],
    *,
    seed: int = 0,
    as_text: bool = False,
    token_range: tuple[int, int] = (1000, 20000),
) -> list[BenchRequest]:
    """Prompts of a trace's lengths; rows that share prefix ids share that much of the prompt."""
    rng = random.Random(seed)
    requests = []
    for row in rows:
        if row.prefix:
            tokens: list[Any] = []
            for id_ in row.prefix:
                block = random.Random(f"{seed}:{id_}")
                tokens += _random_tokens(block, PREFIX_BLOCK, as_text, token_range)
            del tokens[row.input_len :]
        else:
            tokens = _random_tokens(rng, row.input_len, as_text, token_range)
        prompt = " ".join(tokens) if as_text else tuple(tokens)
        requests.append(BenchRequest(prompt, row.input_len, row.output_len))
    return requests


# ---- whose they are


@dataclass(frozen=True, slots=True)
class Group:
    """A class or a tenant: the `share` of requests that belong to it, what these carry
    (`fields` of the body, `api_key`), and what they were promised (`limits`, milliseconds)."""

    name: str
    share: float
    fields: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, float] | None = None
    api_key: str | None = None


def assigned(
    requests: Sequence[BenchRequest],
    *,
    classes: Sequence[Group] = (),
    tenants: Sequence[Group] = (),
    seed: int = 0,
) -> list[BenchRequest]:
    """Gives each request a class and a tenant, drawn by their shares and independently."""
    rng = random.Random(f"groups {seed}")
    result = []
    for request in requests:
        if classes:
            (group,) = rng.choices(classes, [one.share for one in classes])
            request = replace(
                request,
                service_class=group.name,
                limits=group.limits,
                fields={**request.fields, **group.fields},
            )
        if tenants:
            (group,) = rng.choices(tenants, [one.share for one in tenants])
            request = replace(
                request,
                tenant=group.name,
                api_key=group.api_key,
                fields={**request.fields, **group.fields},
            )
        result.append(request)
    return result


def arrival_times(
    count: int, *, request_rate: float, burstiness: float = 1.0, seed: int = 0
) -> list[float]:
    """Seconds from the start at which each request is sent.

    The gaps follow a Gamma distribution of mean 1 / `request_rate` and shape `burstiness`: 1
    is a Poisson process, less is burstier, more is more even. As in vLLM's benchmark the
    whole is stretched to end at count / rate, so that seeds do not change the offered load.
    An infinite rate sends all at once.
    """
    if not request_rate > 0.0 or not burstiness > 0.0:
        raise ValueError(
            f"request_rate and burstiness must be positive, got {request_rate} and {burstiness}"
        )
    if math.isinf(request_rate):
        return [0.0] * count
    rng = random.Random(seed)
    scale = 1.0 / (request_rate * burstiness)
    times: list[float] = []
    now = 0.0
    for _ in range(count):
        now += rng.gammavariate(burstiness, scale)
        times.append(now)
    stretch = (count / request_rate) / now if now > 0.0 else 1.0
    return [time * stretch for time in times]
