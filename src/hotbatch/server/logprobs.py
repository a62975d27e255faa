"""Log-probabilities in the two shapes that OpenAI has for them, and vLLM's for prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hotbatch.core.plan import TokenLogprob
from hotbatch.text import Tokenizer

_LOWEST = -9999.0  # JSON has no minus infinity


class LogprobFormatter:
    """Turns TokenLogprobs into JSON values.

    `as_ids` shows tokens as "token_id:123" (vLLM's return_tokens_as_token_ids), which tells
    apart tokens that print alike.
    """

    def __init__(self, tokenizer: Tokenizer, *, num_top: int, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._as_ids = as_ids

    def _name(self, token_id: int) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        return self._tokenizer.token_text(token_id)[0]

    def chat(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Chat's shape: {"content": [{token, logprob, bytes, top_logprobs}]}."""
        return {
            "content": [
                {
                    **self._chat_token(entry.token_id, entry.logprob),
                    "top_logprobs": [
                        self._chat_token(token_id, logprob)
                        for token_id, logprob in entry.top[: self._num_top]
                    ],
                }
                for entry in entries
            ],
            "refusal": None,
        }

    def _chat_token(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._tokenizer.token_text(token_id)[1]
        return {
            "token": self._name(token_id),
            "logprob": max(logprob, _LOWEST),
            "bytes": list(raw),
        }

    def completion(
        self, entries: Sequence[TokenLogprob | int], offset: int = 0
    ) -> tuple[dict[str, list[Any]], int]:
        """Completions' shape, four parallel lists; an int is a token without a probability
        (the first of an echoed prompt). `offset` is where the first token's text starts; the
        second value is where the text after the last one does."""
        tokens: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for entry in entries:
            token_id = entry if isinstance(entry, int) else entry.token_id
            offsets.append(offset)
            tokens.append(self._name(token_id))
            offset += len(self._tokenizer.token_text(token_id)[0])
            if isinstance(entry, int):
                values.append(None)
                tops.append(None)
            else:
                values.append(max(entry.logprob, _LOWEST))
                tops.append(self._top(entry))
        shown: dict[str, list[Any]] = {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": tops,
            "text_offset": offsets,
        }
        return shown, offset

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """The alternatives, and the token itself even if it is not among them."""
        shown: dict[str, float] = {}
        for token_id, logprob in [*entry.top[: self._num_top], (entry.token_id, entry.logprob)]:
            # Parts of characters print alike; the likeliest of them, the first, is shown.
            shown.setdefault(self._name(token_id), max(logprob, _LOWEST))
        return shown

    def prompt(self, entries: Sequence[TokenLogprob]) -> list[dict[str, Any] | None]:
        """vLLM's prompt_logprobs: for each prompt token a dict by token id; None for the first."""
        return [None, *[self._prompt_entry(entry) for entry in entries]]

    def _prompt_entry(self, entry: TokenLogprob) -> dict[str, Any]:
        ranked = [(t, lp, rank) for rank, (t, lp) in enumerate(entry.top, start=1)]
        if entry.token_id not in [token_id for token_id, _, _ in ranked]:
            ranked.append((entry.token_id, entry.logprob, entry.rank))
        return {
            str(token_id): {
                "logprob": max(logprob, _LOWEST),
                "rank": rank,
                "decoded_token": self._tokenizer.token_text(token_id)[0],
            }
            for token_id, logprob, rank in ranked
        }
