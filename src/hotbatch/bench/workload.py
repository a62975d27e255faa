"""What to ask and when: random prompts of given lengths, and the moments they are sent.

Everything here is a function of its arguments and a seed, so that two servers get the very
same requests at the very same moments.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request to send. `prompt_len` and `output_len` are tokens, as planned."""

    prompt: str | tuple[int, ...]
    prompt_len: int
    output_len: int


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
