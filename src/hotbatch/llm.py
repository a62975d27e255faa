"""Text generation from Python, without a server: `LLM` for scripts, `AsyncLLM` for asyncio.

Shaped as in vLLM: what runs there with `LLM(model).generate(prompts, SamplingParams(...))`
runs here, and gives outputs of the same form. All prompts of a call go to the engine at once
and share its batch; the same engine, text and stop rules as behind HTTP, so the same tokens.

Both classes can also be made from ready parts (`from_parts`), for other executors and tests.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from hotbatch.core.errors import EngineStoppedError, HotbatchError, InvalidRequestError
from hotbatch.core.plan import TokenEvent, TokenLogprob
from hotbatch.core.request import Request
from hotbatch.core.sampling_params import SamplingParams
from hotbatch.core.service_class import class_of
from hotbatch.engine import AsyncEngine, Engine, EventStream, child_seed
from hotbatch.server.output import ChoiceOutput, Delta
from hotbatch.text import ChatTemplate, Tokenizer
from hotbatch.text.chat_template import check_variables

Prompt = str | Mapping[str, Any]
"""A text, {"prompt": text} or {"prompt_token_ids": [...]}."""


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log-probability, its rank (1 is the likeliest), and its text."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(slots=True)
class CompletionOutput:
    """One completion. `finish_reason` is "stop", "length" or "abort"; `stop_reason` the stop
    string or stop token id that ended it, where one did. `logprobs` has a dict by token id
    for each token, if asked for, and `cumulative_logprob` is the sum over the tokens."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class RequestOutput:
    """All completions of one prompt. `prompt` is None for a prompt of token ids;
    `prompt_logprobs` starts with None, as the first token has no probability."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool = False
    num_cached_tokens: int = 0


class LLM:
    """Loads a model and generates, blocking until all is done.

    Args:
        model: as for `hotbatch serve`; None is the embedded model.
        options: the fields of `hotbatch.options.EngineOptions`. Completions that bring no
            seed get theirs from `seed` (0 by default) and the order in which they are asked
            for, so a script repeats itself.

    Raises:
        OptionError, ModelLoadError: as `hotbatch.assembly.assemble`.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        self._take(_assembled(model, options))

    @classmethod
    def from_parts(
        cls,
        engine: Engine,
        tokenizer: Tokenizer,
        *,
        chat_template: ChatTemplate | None = None,
        eos_token_ids: frozenset[int] | None = None,
        generation_defaults: Mapping[str, float] | None = None,
        seed: int = 0,
    ) -> LLM:
        """An LLM of an engine that has not been started and delivers to nobody yet."""
        llm = cls.__new__(cls)
        llm._take(
            _Parts(engine, tokenizer, chat_template, eos_token_ids, generation_defaults, seed)
        )
        return llm

    def _take(self, parts: _Parts) -> None:
        self._parts = parts
        self._calls = _Calls()
        self._names = itertools.count()
        parts.engine.connect(self._calls.deliver)
        parts.engine.start()
        # Also at the interpreter's exit, so that no native code runs while it falls apart.
        self._finalizer = weakref.finalize(self, parts.engine.stop)

    def get_tokenizer(self) -> Tokenizer:
        return self._parts.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's makers recommend, else SamplingParams' own defaults."""
        return self._parts.default_params()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generates for each prompt; the outputs are in the order of the prompts.

        `sampling_params` is one for all prompts or one for each. `use_tqdm` shows progress on
        stderr (the name is vLLM's). `priority` is one for all or one for each, and lower goes
        first: below 0 is the interactive class, 0 standard, above 0 batch.

        Raises:
            InvalidRequestError, ContextLengthError: a prompt or parameter can never work;
                nothing is generated then.
            HotbatchError: the engine failed while generating.
        """
        if isinstance(prompts, str | Mapping):
            listed = [prompts]
        elif isinstance(prompts, Iterable):
            listed = list(prompts)
        else:
            raise _no_prompt(prompts)
        jobs = [
            self._parts.job(str(next(self._names)), prompt, params, rank)
            for prompt, params, rank in zip(
                listed,
                self._each(sampling_params, listed),
                _priorities(priority, len(listed)),
                strict=True,
            )
        ]
        return self._run(jobs, use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """`generate` for one conversation (a list of messages) or a list of them.

        Raises what `generate` raises, and InvalidRequestError for a model without a chat
        template or messages that it refuses.
        """
        if not isinstance(messages, Sequence) or isinstance(messages, str):
            raise InvalidRequestError(
                f"messages must be a list of messages or of such lists, got {messages!r:.80}.",
                param="messages",
            )
        one = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if one else messages
        check_variables(chat_template_kwargs or {})
        jobs = []
        for conversation, params, rank in zip(
            conversations,
            self._each(sampling_params, conversations),
            _priorities(priority, len(conversations)),
            strict=True,
        ):
            text = self._parts.render(
                conversation,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                tools=tools,
                **(chat_template_kwargs or {}),
            )
            # The template has written the special tokens already.
            ids = self._parts.tokenizer.encode(text, add_special_tokens=False)
            prompt = {"prompt": text, "prompt_token_ids": ids}
            jobs.append(self._parts.job(str(next(self._names)), prompt, params, rank))
        return self._run(jobs, use_tqdm)

    def shutdown(self) -> None:
        """Stops the engine and frees the model. Idempotent; also done at exit."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()

    def _each(
        self, params: SamplingParams | Sequence[SamplingParams] | None, prompts: Sequence[Any]
    ) -> Sequence[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            return [params] * len(prompts)
        if not isinstance(params, Sequence) or not all(
            isinstance(each, SamplingParams) for each in params
        ):
            raise InvalidRequestError(
                f"sampling_params must be SamplingParams or a list of them, got {params!r:.80}.",
                param="sampling_params",
            )
        if len(params) != len(prompts):
            raise InvalidRequestError(
                f"There are {len(params)} sampling_params for {len(prompts)} prompts; give one "
                "for all, or one for each.",
                param="sampling_params",
            )
        return params

    def _run(self, jobs: list[_Job], show_progress: bool) -> list[RequestOutput]:
        owners = {request.request_id: (job, k) for job in jobs for k, request in enumerate(job)}
        engine = self._parts.engine
        pending = set(owners)
        with self._calls.open(owners) as events, _progress(show_progress, len(owners)) as advance:
            try:
                for job in jobs:
                    for request in job:
                        engine.submit(request)
                while pending:
                    for event in events.get():
                        job, k = owners[event.request_id]
                        delta = job.feed(k, event)
                        if event.finish_reason is None and job.is_finished(k):
                            engine.cancel(event.request_id)  # a stop string came
                        if event.finish_reason is not None:
                            pending.discard(event.request_id)
                        advance(event.finish_reason is not None, len(delta.token_ids))
                        if delta.error is not None:
                            raise _failure(engine, delta.error)
            finally:
                for request_id in pending:
                    engine.cancel(request_id)
        return [job.output() for job in jobs]


class AsyncLLM:
    """Loads a model and generates on asyncio; each call is an async iterator of outputs.

    Args: as for `LLM`; completions without a seed get a random one.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        parts = _assembled(model, options)
        parts.seed = None
        self._take(parts)

    @classmethod
    def from_parts(
        cls,
        engine: Engine,
        tokenizer: Tokenizer,
        *,
        chat_template: ChatTemplate | None = None,
        eos_token_ids: frozenset[int] | None = None,
        generation_defaults: Mapping[str, float] | None = None,
    ) -> AsyncLLM:
        """An AsyncLLM of an engine that has not been started and delivers to nobody yet."""
        llm = cls.__new__(cls)
        llm._take(
            _Parts(engine, tokenizer, chat_template, eos_token_ids, generation_defaults, None)
        )
        return llm

    def _take(self, parts: _Parts) -> None:
        self._parts = parts
        self._engine = AsyncEngine(parts.engine)
        self._children: dict[str, list[EventStream]] = {}
        self._engine.start()
        self._finalizer = weakref.finalize(self, parts.engine.stop)

    def get_tokenizer(self) -> Tokenizer:
        return self._parts.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's makers recommend, else SamplingParams' own defaults."""
        return self._parts.default_params()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        request_id: str,
        *,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Yields the output as it grows (each time all of it); the last one is `finished`.

        Leaving the iteration early cancels the request, once the iterator is closed.
        `priority` is as in `LLM.generate`.

        Raises:
            InvalidRequestError, ContextLengthError: the request can never work.
            HotbatchError: the engine failed while generating.
        """
        params = sampling_params or self.get_default_sampling_params()
        job = self._parts.job(request_id, prompt, params, priority)
        streams: list[EventStream] = []
        try:
            for request in job:
                streams.append(self._engine.submit(request))
            self._children[request_id] = streams
            async for k, event in _merge(streams):
                delta = job.feed(k, event)
                if delta.error is not None:
                    raise _failure(self._engine.engine, delta.error)
                if job.is_finished(k):
                    streams[k].cancel()
                yield job.output()
                if all(job.is_finished(index) for index in range(len(streams))):
                    return
        finally:
            self._children.pop(request_id, None)
            for stream in streams:
                stream.cancel()

    async def abort(self, request_id: str) -> None:
        """Ends a request; its iterator then yields what there is, with finish_reason abort."""
        for stream in self._children.get(request_id, ()):
            stream.cancel()

    async def shutdown(self, grace_seconds: float = 0.0) -> None:
        """Lets requests end within the grace period, cuts the rest, frees the model."""
        await self._engine.stop(grace_seconds)
        self._finalizer.detach()


@dataclass(slots=True)
class _Parts:
    """What both doors need. `seed` None means that each completion draws its own."""

    engine: Engine
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    eos_token_ids: frozenset[int] | None
    generation_defaults: Mapping[str, float] | None
    seed: int | None
    drawn: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def default_params(self) -> SamplingParams:
        return SamplingParams(**(self.generation_defaults or {}))  # type: ignore[arg-type]

    def render(self, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> str:
        if self.chat_template is None:
            raise InvalidRequestError(
                "This model has no chat template; use generate, or give one with the option "
                "chat_template.",
                param="messages",
            )
        return self.chat_template.render(messages, **options)

    def job(
        self, request_id: str, prompt: Prompt, params: SamplingParams, priority: int = 0
    ) -> _Job:
        text, ids = self._tokens(prompt)
        ends = self.tokenizer.eos_token_ids if self.eos_token_ids is None else self.eos_token_ids
        seed = self._base_seed(params)
        requests = [
            Request(
                request_id if params.n == 1 else f"{request_id}-{index}",
                ids,
                params,
                seed=child_seed(seed, index),
                eos_token_ids=ends,
                priority=priority,
                service_class=class_of(None, priority),
                group_id=request_id if params.n > 1 else None,
            )
            for index in range(params.n)
        ]
        return _Job(request_id, text, ids, params, requests, self.tokenizer)

    def _base_seed(self, params: SamplingParams) -> int | None:
        if params.seed is not None or self.seed is None:
            return params.seed
        return child_seed(self.seed, next(self.drawn))

    def _tokens(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        if isinstance(prompt, Mapping):
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            if isinstance(ids, Sequence) and all(type(token) is int for token in ids):
                return text, list(ids)
            if ids is None and isinstance(text, str):
                return text, self.tokenizer.encode(text)
        raise _no_prompt(prompt)


def _priorities(priority: int | Sequence[int] | None, count: int) -> Sequence[int]:
    listed = priority if isinstance(priority, Sequence) else [priority or 0] * count
    if isinstance(listed, str) or not all(type(each) is int for each in listed):
        raise InvalidRequestError(
            f"priority must be an int or a list of ints, got {priority!r:.80}.", param="priority"
        )
    if len(listed) != count:
        raise InvalidRequestError(
            f"There are {len(listed)} priorities for {count} prompts; give one for all, or one "
            "for each.",
            param="priority",
        )
    return listed


def _no_prompt(given: object) -> InvalidRequestError:
    return InvalidRequestError(
        'A prompt is a text, {"prompt": text} or {"prompt_token_ids": [ints]}; '
        f"got {given!r:.80}.",
        param="prompt",
    )


class _Job:
    """One prompt's requests (n of them), and the output they grow into. Iterates over them."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_ids: list[int],
        params: SamplingParams,
        requests: list[Request],
        tokenizer: Tokenizer,
    ) -> None:
        self._requests = requests
        self._params = params
        self._tokenizer = tokenizer
        self._choices = [ChoiceOutput(tokenizer, params, prompt_ids) for _ in requests]
        self._completions = [CompletionOutput(index) for index in range(len(requests))]
        self._whole = RequestOutput(request_id, prompt, prompt_ids, None, self._completions)
        if params.logprobs is not None:
            for completion in self._completions:
                completion.logprobs, completion.cumulative_logprob = [], 0.0

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def is_finished(self, k: int) -> bool:
        return self._completions[k].finish_reason is not None

    def feed(self, k: int, event: TokenEvent) -> Delta:
        """Takes in an event of the k-th completion; what comes after its end is dropped."""
        if self.is_finished(k):
            return Delta("")
        delta = self._choices[k].feed(event)
        completion = self._completions[k]
        completion.text += delta.text
        completion.token_ids += delta.token_ids
        completion.finish_reason = delta.finish_reason
        completion.stop_reason = delta.stop_reason
        if completion.logprobs is not None:
            completion.logprobs += map(self._named, delta.logprobs)
            chosen = sum(entry.logprob for entry in delta.logprobs)
            completion.cumulative_logprob = (completion.cumulative_logprob or 0.0) + chosen
        if delta.prompt_logprobs and self._whole.prompt_logprobs is None:
            self._whole.prompt_logprobs = [None, *map(self._named, delta.prompt_logprobs)]
        if k == 0:
            self._whole.num_cached_tokens = event.num_cached
        return delta

    def output(self) -> RequestOutput:
        """The output so far, independent of what will still come."""
        whole = self._whole
        return RequestOutput(
            whole.request_id,
            whole.prompt,
            whole.prompt_token_ids,
            whole.prompt_logprobs,
            [_copied(completion) for completion in self._completions],
            all(completion.finish_reason is not None for completion in self._completions),
            whole.num_cached_tokens,
        )

    def _named(self, entry: TokenLogprob) -> dict[int, Logprob]:
        named = {
            token: Logprob(logprob, rank, self._tokenizer.token_text(token)[0])
            for rank, (token, logprob) in enumerate(entry.top, start=1)
        }
        named.setdefault(
            entry.token_id,
            Logprob(entry.logprob, entry.rank, self._tokenizer.token_text(entry.token_id)[0]),
        )
        return named


def _copied(completion: CompletionOutput) -> CompletionOutput:
    return CompletionOutput(
        completion.index,
        completion.text,
        list(completion.token_ids),
        completion.cumulative_logprob,
        None if completion.logprobs is None else list(completion.logprobs),
        completion.finish_reason,
        completion.stop_reason,
    )


class _Calls:
    """Hands the engine's events to the calls of `LLM.generate` that wait for them.

    It does not know the LLM, so that an LLM nobody holds any more can go.
    """

    def __init__(self) -> None:
        self._inboxes: dict[str, queue.SimpleQueue[list[TokenEvent]]] = {}
        self._lock = threading.Lock()

    def deliver(self, events: list[TokenEvent]) -> None:
        by_call: dict[int, tuple[queue.SimpleQueue[list[TokenEvent]], list[TokenEvent]]] = {}
        for event in events:
            inbox = self._inboxes.get(event.request_id)
            if inbox is not None:
                by_call.setdefault(id(inbox), (inbox, []))[1].append(event)
        for inbox, own in by_call.values():
            inbox.put(own)

    @contextmanager
    def open(self, request_ids: Mapping[str, Any]) -> Iterator[queue.SimpleQueue[list[TokenEvent]]]:
        inbox: queue.SimpleQueue[list[TokenEvent]] = queue.SimpleQueue()
        with self._lock:
            self._inboxes.update(dict.fromkeys(request_ids, inbox))
        try:
            yield inbox
        finally:
            with self._lock:
                for request_id in request_ids:
                    self._inboxes.pop(request_id, None)


async def _merge(streams: Sequence[EventStream]) -> AsyncIterator[tuple[int, TokenEvent]]:
    """The events of all streams as they come, each with the index of its stream."""
    if len(streams) == 1:
        async for event in streams[0]:
            yield 0, event
        return
    waiting = {asyncio.ensure_future(anext(stream)): k for k, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                k = waiting.pop(task)
                if isinstance(task.exception(), StopAsyncIteration):
                    continue
                waiting[asyncio.ensure_future(anext(streams[k]))] = k
                yield k, task.result()
    finally:
        for task in waiting:
            task.cancel()


def _assembled(model: str | None, options: Mapping[str, Any]) -> _Parts:
    # Here, so that the classes can be used with ready parts without loading any model code.
    from hotbatch.assembly import assemble
    from hotbatch.options import EngineOptions

    chosen = dict(options) if model is None else {"model": model, **options}
    parts = assemble(EngineOptions(**chosen))
    return _Parts(
        parts.engine,
        parts.tokenizer,
        parts.chat_template,
        parts.eos_token_ids,
        parts.generation_defaults,
        parts.options.seed,
    )


def _failure(engine: Engine, message: str) -> HotbatchError:
    return HotbatchError(message) if engine.is_accepting else EngineStoppedError(message)


Advance = Callable[[bool, int], None]
"""Told of each event: whether a completion ended with it, and how many tokens it brought."""


@contextmanager
def _progress(is_shown: bool, total: int) -> Iterator[Advance]:
    """A line on stderr: completions done of `total`, and tokens per second."""
    if not is_shown:
        yield lambda has_ended, num_tokens: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeElapsedColumn as Elapsed

    speed = TextColumn("{task.fields[tokens]} tokens")
    columns = (TextColumn("Generating"), BarColumn(), MofNCompleteColumn(), speed, Elapsed())
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=4) as progress:
        task = progress.add_task("", total=total, tokens=0)
        num_tokens = 0

        def advance(has_ended: bool, new_tokens: int) -> None:
            nonlocal num_tokens
            num_tokens += new_tokens
            progress.update(task, advance=int(has_ended), tokens=num_tokens)

        yield advance
