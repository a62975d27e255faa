"""What all endpoints share: the engine, the text parts, the names, the limits.

The one place where a validated request turns into work: prompts are checked and tokenized
here (in a thread of their own when they are long, so that the event loop keeps serving
streams), and every choice becomes a Request for the engine.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import hotbatch
from hotbatch.core.admission import NO_LIMITS, QueueLimits
from hotbatch.core.errors import (
    ContextLengthError,
    EngineStoppedError,
    InvalidRequestError,
)
from hotbatch.core.owner import Owner
from hotbatch.core.plan import FinishReason, TokenEvent
from hotbatch.core.request import Request
from hotbatch.core.sampling_params import SamplingParams
from hotbatch.core.service_class import LatencyTargets, ServiceClass
from hotbatch.engine.async_engine import AsyncEngine, EventStream
from hotbatch.engine.engine import Engine
from hotbatch.engine.foresight import Followed, Foresight, Manner, Words, symbols
from hotbatch.engine.seeds import child_seed
from hotbatch.server import speculation_metrics
from hotbatch.server.account_metrics import AccountMetrics, ReadDevice
from hotbatch.server.entrance import Entrance
from hotbatch.server.errors import ModelNotFoundError
from hotbatch.server.live import LiveFeed
from hotbatch.server.metrics import ServerMetrics
from hotbatch.server.next_turn import NextTurns
from hotbatch.server.output import ChoiceOutput
from hotbatch.server.service_metrics import ServiceMetrics
from hotbatch.server.urgency import Urgency
from hotbatch.text import ChatTemplate, Tokenizer
from hotbatch.text.answer_memory import AnswerMemory

logger = logging.getLogger(__name__)
T = TypeVar("T")

# Text up to this length is tokenized on the event loop (under a millisecond); handing it to
# a thread would cost more.
_SHORT_TEXT = 4096
_MAX_REQUEST_ID = 256


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    """`served_names`: the first is the one shown; clients may ask for any. `max_choices`
    bounds prompts x n of one HTTP request. `generation_defaults` hold sampling settings for
    fields that a request leaves out. `limits` bound the queue; `promised` are the targets by
    class that the operator set, which the door looks at. `splice_answers`: a chat prompt that
    repeats an answer gets the ids that it was generated as."""

    served_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 16 * 2**20
    max_choices: int = 1024
    generation_defaults: Mapping[str, float] | None = None
    limits: QueueLimits = NO_LIMITS
    promised: Mapping[ServiceClass, LatencyTargets] = field(default_factory=dict)
    splice_answers: bool = False


@dataclass(frozen=True, slots=True)
class PromptText:
    """What a prompt was before it became tokens; `text` is None where ids were sent."""

    text: str | None
    add_special_tokens: bool = False


@dataclass(slots=True)
class Job:
    """One choice being generated: its stream of events and the text it becomes."""

    index: int
    prompt_ids: list[int]
    stream: EventStream
    output: ChoiceOutput


class Service:
    """Everything the endpoints need. The engine may be started later.

    Args:
        engine: an engine that delivers to nobody yet.
        tokenizer: of the model.
        config: names, keys and limits.
        chat_template: None for a model without one; chat requests are then refused.
        eos_token_ids: tokens that end an answer; without them, the tokenizer's.
        read_device: the driver's figures of the GPU, for /metrics.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        config: ServiceConfig,
        *,
        chat_template: ChatTemplate | None = None,
        eos_token_ids: frozenset[int] | None = None,
        read_device: ReadDevice = lambda: None,
    ) -> None:
        self.engine = AsyncEngine(engine)
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.config = config
        self.eos_token_ids = tokenizer.eos_token_ids if eos_token_ids is None else eos_token_ids
        self.generation_defaults = dict(config.generation_defaults or {})
        self.model_name = config.served_names[0]
        # What one request can have here: clients cut their prompts to what they are told.
        self.max_model_len = self.engine.info.context_len
        self.created = int(time.time())
        self.version = hotbatch.__version__
        self.is_accepting = True  # False from the first signal to stop on
        self.entrance = Entrance(self.engine, config.limits, config.promised)
        service_metrics = ServiceMetrics(
            self.engine.load, self.engine.stats, lambda: self.entrance.refused
        )
        account_metrics = AccountMetrics(engine.totals, engine.ceiling, read_device)
        info = self.engine.info
        self.live = LiveFeed(
            self.engine,
            self.entrance,
            {
                "version": self.version,
                "model": self.model_name,
                "has_chat": chat_template is not None,
            },
        )
        self.metrics = ServerMetrics(
            self.model_name,
            self.engine.stats,
            {"version": self.version, "precision": info.precision, "device": info.device},
            lambda labels: [
                *service_metrics.families(labels),
                *speculation_metrics.families(labels, self.engine.stats(), self.turns.answers),
                *account_metrics.families(labels),
            ],
        )
        engine.step_observers += [self.metrics.on_step, service_metrics.on_step]
        engine.request_observers += [self.metrics.on_request, service_metrics.on_request]
        self._foresight_thread: ThreadPoolExecutor | None = None
        self._foresight: Foresight | None = None
        if engine.guesses_requests:
            self._foresight_thread = ThreadPoolExecutor(1, thread_name_prefix="hotbatch-foresight")
            self._foresight = Foresight(
                engine,
                Words(tokenizer.encode, self._shown),
                self.eos_token_ids,
                self._foresight_thread.submit,
            )
        # One thread is enough to keep the loop free, and leaves the cores to the model.
        self._text_thread = ThreadPoolExecutor(1, thread_name_prefix="hotbatch-text")
        self.turns = NextTurns(
            engine,
            tokenizer,
            chat_template,
            AnswerMemory(tokenizer) if config.splice_answers else None,
            self._text_thread,
            prefills=engine.prefills_ahead,
        )

    # --- checks ---------------------------------------------------------------------------

    def check_accepting(self) -> None:
        if not self.is_accepting:
            raise EngineStoppedError(
                "The server is shutting down and takes no more requests; try again later."
            )

    def check_model(self, name: str | None) -> None:
        if name and name not in self.config.served_names:
            raise ModelNotFoundError(
                f"The model {name!r:.100} does not exist here; this server has "
                f"{', '.join(self.config.served_names)}.",
                param="model",
            )

    def check_count(self, num_prompts: int, n: int) -> None:
        if num_prompts * n > self.config.max_choices:
            raise InvalidRequestError(
                f"{num_prompts} prompts with n = {n} make {num_prompts * n} choices; at most "
                f"{self.config.max_choices} are taken in one request.",
                param="n" if n > num_prompts else "prompt",
            )

    # --- text -----------------------------------------------------------------------------

    async def off_loop(self, size: int, work: Callable[[], T]) -> T:
        """Runs `work` here if `size` characters are few, else in the text thread."""
        if size <= _SHORT_TEXT:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._text_thread, work)

    async def tokenize(
        self, text: str, *, add_special_tokens: bool, param: str, owner: Owner | None = None
    ) -> list[int]:
        """`param` is the field that the text came from; what its `owner` was answered before gets
        the ids that it was generated as.

        Raises:
            ContextLengthError: the text cannot fit whatever its tokens are.
            InvalidRequestError: it is not valid Unicode.
        """
        # The model's limit, also where the KV cache holds less: the text may yet be truncated.
        limit = self.engine.info.max_model_len
        if len(text) > limit * self.tokenizer.max_token_chars:
            raise ContextLengthError(
                f"This model's maximum context length is {limit} tokens. {param} "
                f"has {len(text)} characters, which is more in any case. Please shorten it.",
                param=param,
            )
        answers = self.turns.answers

        def encode() -> list[int]:
            if answers is None or owner is None or add_special_tokens:
                return self.tokenizer.encode(text, add_special_tokens)
            return answers.encode(text, owner)

        try:
            return await self.off_loop(len(text), encode)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{param}: {error.message}", param=param) from error

    async def render_chat(self, messages: list[Any] | None, /, **options: Any) -> str:
        """Raises InvalidRequestError: bad messages, or the model has no chat template."""
        template = self.chat_template
        if template is None:
            raise InvalidRequestError(
                "messages cannot be rendered: this model has no chat template. Use "
                "/v1/completions, or start the server with --chat-template.",
                param="messages",
            )
        if messages is None:
            raise InvalidRequestError("messages is required.", param="messages")
        size = sum(len(str(m.get("content"))) for m in messages if isinstance(m, dict))
        return await self.off_loop(size, lambda: template.render(messages, **options))

    # --- work -----------------------------------------------------------------------------

    def submit(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        *,
        request_id: str,
        urgency: Urgency,
        cache_salt: str | None = None,
        speculate: bool = True,
        source: PromptText | None = None,
    ) -> list[Job]:
        """Every prompt, `params.n` times, into the engine; choice i x n + k is the k-th of
        prompt i. If one is refused, none stays. A lone prompt whose `source` is known is followed,
        to foresee what its client asks next.

        Raises what `Engine.submit` raises.
        """
        self.check_accepting()
        jobs: list[Job] = []
        try:
            for number, prompt_ids in enumerate(prompts):
                group = f"{request_id}-{number}" if params.n > 1 else None
                for k in range(params.n):
                    index = number * params.n + k
                    request = Request(
                        f"{request_id}-{index}",
                        prompt_ids,
                        params,
                        seed=child_seed(params.seed, k),
                        eos_token_ids=self.eos_token_ids,
                        priority=urgency.priority,
                        group_id=group,
                        cache_salt=cache_salt,
                        tenant=urgency.tenant,
                        service_class=urgency.service_class,
                        targets=urgency.targets,
                        speculate=speculate,
                    )
                    stream = self.engine.submit(request)
                    output = ChoiceOutput(self.tokenizer, params, prompt_ids)
                    followed = self._follow(request, source if speculate else None)
                    if followed is not None:
                        output.followers.append(followed)
                    jobs.append(Job(index, prompt_ids, stream, output))
        except BaseException:
            for job in jobs:
                job.stream.cancel()
            raise
        return jobs

    def _follow(self, request: Request, source: PromptText | None) -> Followed | None:
        if self._foresight is None or source is None:
            return None
        owner = Owner(request.tenant, request.cache_salt)
        if source.text is None:
            prompt = symbols(request.tokens[: request.num_prompt])
            return self._foresight.arrived(prompt, owner, Manner(request.params, None))
        manner = Manner(request.params, source.add_special_tokens)
        return self._foresight.arrived(source.text, owner, manner)

    def _shown(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        prompt_ids: Sequence[int],
        stop_token_id: int | None,
    ) -> str:
        """What a client would be shown of a whole answer."""
        output = ChoiceOutput(self.tokenizer, params, prompt_ids)
        reason = FinishReason.LENGTH if stop_token_id is None else FinishReason.STOP
        event = TokenEvent("", tuple(token_ids), finish_reason=reason, stop_token_id=stop_token_id)
        return output.feed(event).text

    def new_id(self, prefix: str, wanted: str | None) -> str:
        if wanted is None:
            return f"{prefix}-{uuid.uuid4().hex}"
        if not wanted or len(wanted) > _MAX_REQUEST_ID:
            raise InvalidRequestError(
                f"request_id must have 1 to {_MAX_REQUEST_ID} characters.", param="request_id"
            )
        return f"{prefix}-{wanted}"

    def close(self) -> None:
        """Ends the text thread and the live streams. The engine is stopped by whoever started
        it."""
        self.live.close()
        if self._foresight_thread is not None:
            self._foresight_thread.shutdown(wait=False, cancel_futures=True)
        self._text_thread.shutdown(wait=False, cancel_futures=True)
