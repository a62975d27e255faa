"""From a request's events to what its client sees: text, logprobs, and why it ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hotbatch.core.plan import FinishReason, TokenEvent, TokenLogprob
from hotbatch.core.sampling_params import SamplingParams
from hotbatch.text import IncrementalDetokenizer, StopStringMatcher, Tokenizer


@dataclass(slots=True)
class Delta:
    """What one event adds. `stop_reason` is the stop string or stop token id, where one of the
    client's own ended it (vLLM's field)."""

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    error_reason: str | None = None  # the limit that ended it, if one did


class Follower(Protocol):
    """Hears what the client sees of a choice, to make ready what it may ask next."""

    def note(self, text: str, token_ids: Sequence[int]) -> None:
        """The client got more."""
        ...

    def end(self, reason: str, stop_token_id: int | None) -> None:
        """That was all, for a reason as clients are told it."""
        ...


class ChoiceOutput:
    """One choice on its way to the client.

    After a delta with a `finish_reason` it is complete, though the engine may not know yet
    (a stop string): whoever feeds it then cancels the request. `followers` may be added before it
    is fed.
    """

    __slots__ = (
        "_detokenizer",
        "_matcher",
        "_params",
        "followers",
        "num_cached",
        "num_output",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        prompt_ids: Sequence[int],
    ) -> None:
        self._params = params
        self.followers: list[Follower] = []
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, skip_special_tokens=params.skip_special_tokens, prefix_ids=prompt_ids
        )
        self._matcher = StopStringMatcher(
            params.stop, include_stop_str_in_output=params.include_stop_str_in_output
        )
        self.num_output = 0  # tokens, as usage counts them: nothing past a stop string
        self.num_cached = 0

    def feed(self, event: TokenEvent) -> Delta:
        self.num_cached = event.num_cached
        delta = self._with_stops(event) if self._params.stop else self._plain(event)
        self.num_output += len(delta.token_ids)
        delta.prompt_logprobs = event.prompt_logprobs
        if delta.finish_reason is None and event.finish_reason is not None:
            self._end(delta, event)
        for follower in self.followers:
            follower.note(delta.text, delta.token_ids)
            if delta.finish_reason is not None:
                follower.end(delta.finish_reason, event.stop_token_id)
        return delta

    def _plain(self, event: TokenEvent) -> Delta:
        text = self._detokenizer.push(self._shown(event))
        return Delta(text, event.token_ids, event.logprobs)

    def _with_stops(self, event: TokenEvent) -> Delta:
        """Token by token, so that tokens after a stop string are neither shown nor counted."""
        shown = self._shown(event)
        text = ""
        for count, token in enumerate(shown, start=1):
            piece = self._detokenizer.push((token,))
            if self.num_output + count <= self._params.min_tokens:
                text += piece  # too early to stop
                continue
            text += self._matcher.push(piece)
            if self._matcher.matched is not None:
                return Delta(
                    text,
                    event.token_ids[:count],
                    event.logprobs[:count],
                    finish_reason="stop",
                    stop_reason=self._matcher.matched,
                )
        return Delta(text, event.token_ids, event.logprobs)

    def _shown(self, event: TokenEvent) -> tuple[int, ...]:
        """The tokens that become text: a token that ended the output does not, unless asked."""
        if event.stop_token_id is None or self._params.include_stop_str_in_output:
            return event.token_ids
        return event.token_ids[:-1]

    def _end(self, delta: Delta, event: TokenEvent) -> None:
        reason = event.finish_reason
        assert reason is not None
        tail = self._matcher.push(self._detokenizer.flush())
        if self._matcher.matched is not None:  # half a character can complete a stop string
            delta.text += tail
            delta.finish_reason, delta.stop_reason = "stop", self._matcher.matched
            return
        delta.text += tail + self._matcher.flush()
        delta.finish_reason = reason.value
        if reason is FinishReason.STOP and event.stop_token_id in self._params.stop_token_id_set:
            delta.stop_reason = event.stop_token_id
        elif reason is FinishReason.ERROR:
            delta.error = event.error or "The request failed."
            delta.error_reason = event.error_reason
