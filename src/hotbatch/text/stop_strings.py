"""Stop strings in streamed text: nothing past one gets out, and nothing is held needlessly.

Text is held back only while its tail could still grow into a stop string. With several
stop strings the one that is complete first (whose last character comes first) wins, and
among those that end at the same place the longest: a definition that does not depend on
how the text was cut into pieces. Cost: one `str.find` a stop string over the new text plus
as much of the old as a stop string is long.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStringMatcher:
    """Finds the first stop string in a text fed piece by piece.

    After `push` or `flush`, `matched` is the stop string found, or None. Once one is found
    all further text is dropped.
    """

    def __init__(self, stops: Sequence[str], *, include_stop_str_in_output: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include_stop_str_in_output
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that is now safe to show; ends before the stop string that matched, or
        after it where it is to be included."""
        if not self._stops:
            return text
        if self.matched is not None or not text:
            return ""
        text = self._held + text
        found = self._first_match(text)
        if found is not None:
            end, stop = found
            self.matched = stop
            self._held = ""
            return text[: end if self._include else end - len(stop)]
        keep = self._possible_start(text)
        self._held = text[keep:]
        return text[:keep]

    def flush(self) -> str:
        """The text held back, at the end of the sequence."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        best: tuple[int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start < 0:
                continue
            end = start + len(stop)
            if best is None or end < best[0] or (end == best[0] and len(stop) > len(best[1])):
                best = (end, stop)
        return best

    def _possible_start(self, text: str) -> int:
        """The first index from which the tail of `text` is a beginning of some stop string."""
        first = len(text)
        for stop in self._stops:
            at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while 0 <= at < first:
                if stop.startswith(text[at:]):
                    first = at
                    break
                at = text.find(stop[0], at + 1)
        return first
