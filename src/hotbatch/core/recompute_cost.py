"""What it would cost to compute KV again: seconds for tokens, and for what they attend to.

A block deep in a long prefix costs more than one at its beginning, as each of its tokens attends
to all before it. Both prices are read off the cost model at two chunks of the size that prompts
are computed in, and kept for a while. Where no model has learnt anything, a token costs one unit
and attention nothing: enough to compare.
"""

from __future__ import annotations

from hotbatch.core.cost_model import CostModel, StepFeatures

_DEEP = 4096  # tokens before the second of the two chunks
_FRESH = 4096  # questions that are answered by the same prices


class RecomputeCost:
    """Prices of KV.

    Args:
        model: of the steps; None if there is none.
        chunk: tokens of a prompt that a step computes at most.
    """

    def __init__(self, model: CostModel | None, chunk: int) -> None:
        self._model = model
        self._chunk = max(1, chunk)
        self._per_token = 1.0
        self._per_pair = 0.0
        self._left = 0

    def relative(self, depth: float) -> float:
        """Of a token with `depth` others before it, where one without any costs 1."""
        self._refresh()
        return 1.0 + self._per_pair / self._per_token * depth

    def seconds_a_token(self, depth: float) -> float:
        """Of a token with `depth` others before it."""
        self._refresh()
        return self._per_token + self._per_pair * depth

    def seconds(self, start: int, num_tokens: int) -> float:
        """Of `num_tokens` tokens from position `start` on."""
        return num_tokens * self.seconds_a_token(start + num_tokens / 2)

    def _refresh(self) -> None:
        if self._left <= 0:
            self._read()
        self._left -= 1

    def _read(self) -> None:
        self._left = _FRESH
        model = self._model
        if model is None or not model.is_trained:
            self._left = 64
            return
        size = self._chunk
        shallow = model.predict(StepFeatures().plus_chunk(0, size))
        deep = model.predict(StepFeatures().plus_chunk(_DEEP, size))
        self._per_pair = max(0.0, (deep - shallow) / (size * _DEEP))
        self._per_token = max(1e-9, shallow / size - self._per_pair * size / 2)
