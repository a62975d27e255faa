"""What a chat's next turn will need is made ready when a turn ends.

Two things, both about the text that the client will send back: the ids that the answer was
generated as are remembered (`text/answer_memory`), and the beginning of the next prompt that is
certain whatever will be asked is offered to the engine, to be computed if it has nothing to do
(`core/speculation/warming`). Certain is what two renderings of the conversation with different
next questions have in common, as token ids: that needs no knowledge of any template, and leaves
out what a tokenizer would join to the question.

The second costs two renderings and tokenizations of the conversation, so it is put off until no
request is outstanding; a server that is never idle never does it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any

from hotbatch.core.errors import HotbatchError
from hotbatch.core.owner import Owner
from hotbatch.core.plan import FinishReason
from hotbatch.core.speculation.warming import KnownPrefix
from hotbatch.engine.engine import Engine
from hotbatch.server.output import Follower
from hotbatch.text import ChatTemplate, Tokenizer
from hotbatch.text.answer_memory import AnswerMemory

logger = logging.getLogger(__name__)

_QUESTIONS = ("a", "\n1")  # they begin with nothing in common, not even the kind of character
_MOST_PENDING = 64
_SHORT_TEXT = 4096  # characters that are dealt with at once; longer ones in the text thread


@dataclass(frozen=True, slots=True)
class AskedTurn:
    """A chat request as it was rendered and tokenized.

    Attributes:
        owner: tenant and cache salt.
        messages, options: what the template was given.
        text, token_ids: the prompt.
        answer: what came of it, when the turn has ended.
    """

    owner: Owner
    messages: Sequence[Any]
    options: Mapping[str, Any]
    text: str
    token_ids: Sequence[int]
    answer: str = ""


class _FollowedTurn:
    """Hears an answer to its end, and tells the whole of one that ended by itself."""

    def __init__(self, on_end: Callable[[str, list[int]], None]) -> None:
        self._on_end = on_end
        self._texts: list[str] = []
        self._token_ids: list[int] = []

    def note(self, text: str, token_ids: Sequence[int]) -> None:
        self._texts.append(text)
        self._token_ids += token_ids

    def end(self, reason: str, stop_token_id: int | None) -> None:
        if reason in (FinishReason.STOP.value, FinishReason.LENGTH.value):
            self._on_end("".join(self._texts), self._token_ids)


class NextTurns:
    """Follows chat requests to their ends. For one event loop.

    Args:
        answers: remembers what was generated; None: nobody does.
        text_thread: where long texts are dealt with.
        prefills: whether the engine is offered what the next prompt begins with.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        answers: AnswerMemory | None,
        text_thread: Executor,
        *,
        prefills: bool,
    ) -> None:
        self.answers = answers
        self._engine = engine
        self._tokenizer = tokenizer
        self._template = template
        self._text_thread = text_thread
        self._prefills = prefills
        self._pending: deque[AskedTurn] = deque(maxlen=_MOST_PENDING)

    @property
    def is_active(self) -> bool:
        return self.answers is not None or self._prefills

    def follow(self, turn: AskedTurn) -> Follower:
        """Who is to hear what the client gets."""
        return _FollowedTurn(lambda text, ids: self._ended(turn, text, ids))

    def _ended(self, turn: AskedTurn, answer: str, answer_ids: list[int]) -> None:
        memory = self.answers
        if memory is not None:
            size = len(turn.text) + len(answer)
            self._do(size, lambda: self._remember(memory, turn, answer, answer_ids))
        if self._prefills:
            self._pending.append(replace(turn, answer=answer))
            if self._engine.num_outstanding == 0:
                turns = list(self._pending)
                self._pending.clear()
                self._do(_SHORT_TEXT + 1, lambda: self._offer_all(turns))

    def _do(self, size: int, work: Callable[[], None]) -> None:
        if size <= _SHORT_TEXT:
            work()
        else:
            asyncio.get_running_loop().run_in_executor(self._text_thread, work)

    def _remember(
        self, memory: AnswerMemory, turn: AskedTurn, answer: str, answer_ids: list[int]
    ) -> None:
        memory.remember(turn.owner, turn.text, turn.token_ids, answer, answer_ids)

    def _offer_all(self, turns: Sequence[AskedTurn]) -> None:
        try:
            for turn in turns:
                token_ids = self.known_prefix(turn)
                if token_ids:
                    tenant, salt = turn.owner
                    self._engine.offer(KnownPrefix(token_ids, tenant, salt))
        except HotbatchError as error:  # a template that does not go on like this
            logger.debug("no next turn is made ready: %s", error.message)
        except Exception:
            logger.exception("making a next turn ready failed")

    def known_prefix(self, turn: AskedTurn) -> list[int]:
        """Token ids that the next prompt begins with, whatever is asked.

        Raises:
            InvalidRequestError: the template refuses another question.
        """
        template = self._template
        if template is None:
            return []
        said = [*turn.messages, {"role": "assistant", "content": turn.answer}]
        options = {**turn.options, "add_generation_prompt": True, "continue_final_message": False}
        one, other = (
            self._encode(
                template.render([*said, {"role": "user", "content": question}], **options),
                turn.owner,
            )
            for question in _QUESTIONS
        )
        length = 0
        for left, right in zip(one, other, strict=False):
            if left != right:
                break
            length += 1
        return one[:length]

    def _encode(self, text: str, owner: Owner) -> list[int]:
        if self.answers is not None:
            return self.answers.encode(text, owner, is_asked=False)
        return self._tokenizer.encode(text, add_special_tokens=False)
