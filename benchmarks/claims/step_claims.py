"""Claims about single steps: what fills the machine, and what leaves it idle."""

from __future__ import annotations

from claim_parts import Loaded, table

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
_MOST_TOKENS = 4096  # of a step of prompts
_FULL = 0.9  # of the best throughput: saturated


def prefill(machine: Loaded, scale: float) -> None:
    """Batching 32 prompts saturates prefill."""
    counts = (1, 2, 4, 8, 16, 32, 64)
    rows = []
    for length in (32, 128, 512):
        rates = {}
        for count in counts:
            if count > 1 and count * length > _MOST_TOKENS * scale:
                break
            seconds = machine.seconds([(0, length)] * count, repeats=3)
            if seconds is not None:
                rates[count] = count * length / seconds
        best = max(rates.values())
        filled = next(count for count, rate in rates.items() if rate >= _FULL * best)
        for count, rate in rates.items():
            shape = [(0, length)] * count
            ideal = machine.roofline.ideal(machine.features(shape)).compute
            rows.append(
                (
                    f"{count} of {length} tokens",
                    f"{rate:.0f}",
                    f"{rate / best:.0%}",
                    f"{ideal * rate / (count * length):.0%}",
                    "<- 90 % from here" if count == filled else "",
                )
            )
    print(table(("prompts in a step", "tokens/s", "of the best", "of compute", ""), rows))


def decode(machine: Loaded, scale: float) -> None:
    """Decode alone leaves most of the machine idle."""
    rows = []
    alone = None
    for context in (128, 1024):
        for count in _ROWS:
            shape = [(context - 1, 1)] * count
            seconds = machine.seconds(shape, repeats=max(3, int(15 * scale)))
            if seconds is None:
                break
            alone = alone or 1.0 / seconds
            ideal = machine.roofline.ideal(machine.features(shape))
            rows.append(
                (
                    f"{count} at context {context}",
                    f"{1e3 * seconds:.1f}",
                    f"{count / seconds:.0f}",
                    f"{count / seconds / alone:.1f}",
                    f"{ideal.memory / seconds:.0%}",
                    f"{ideal.compute / seconds:.0%}",
                )
            )
    columns = ("sequences", "ms", "tokens/s", "times one", "of bandwidth", "of compute")
    print(table(columns, rows))
