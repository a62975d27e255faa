"""Traffic of every kind at once, played to an engine in this process.

Chats come one by one and documents between them; now and then a burst of short questions comes
at once, and bulk work of the batch class runs beneath. So the steps are of every kind: few
decodes, many, parts of prompts alone and beside decodes, short contexts and long ones; and
between two bursts there are moments without work.
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass

from hotbatch.core.plan import TokenEvent
from hotbatch.core.request import Request
from hotbatch.core.sampling_params import SamplingParams
from hotbatch.core.service_class import ServiceClass
from hotbatch.engine.engine import Engine
from hotbatch.engine.protocol import ExecutorInfo

_PATIENCE = 120.0  # seconds that the last answer may take


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: when it comes, its lengths, its class."""

    time: float
    num_prompt: int
    num_output: int
    service_class: ServiceClass


def make_asks(seconds: float, seed: int = 0) -> list[Ask]:
    """What comes within `seconds`, in order."""
    rng = random.Random(seed)
    asks: list[Ask] = []
    chats = {"interactive": ServiceClass.INTERACTIVE, "standard": ServiceClass.STANDARD}

    def add(moment: float, prompt: float, output: float, service_class: ServiceClass) -> None:
        num_prompt = int(min(2500, max(8, rng.lognormvariate(0.0, 0.6) * prompt)))
        num_output = int(min(400, max(4, rng.lognormvariate(0.0, 0.5) * output)))
        asks.append(Ask(moment, num_prompt, num_output, service_class))

    moment = 0.0
    while (moment := moment + rng.expovariate(2.0)) < seconds:
        add(moment, 120, 80, chats[rng.choice(list(chats))])
    moment = 0.0
    while (moment := moment + rng.expovariate(0.25)) < seconds:
        add(moment, 900, 40, ServiceClass.STANDARD)
    moment = 3.0
    while moment < seconds:
        size = rng.choice((8, 24, 48))
        for _ in range(size):
            add(moment, 60, 50, ServiceClass.STANDARD)
        for _ in range(size // 4):
            add(moment, 200, 120, ServiceClass.BATCH)
        moment += 10.0
    return sorted(asks, key=lambda ask: ask.time)


class Load:
    """Plays asks to an engine and waits until all were answered."""

    def __init__(self, asks: list[Ask], seed: int = 0) -> None:
        self._asks = asks
        self._rng = random.Random(seed)
        self._num_left = len(asks)
        self._all_ended = threading.Event()
        self.num_errors = 0

    def hear(self, events: list[TokenEvent]) -> None:
        """To be connected to the engine."""
        for event in events:
            self._num_left -= event.finish_reason is not None
            self.num_errors += event.error is not None
        if self._num_left == 0:
            self._all_ended.set()

    def play(self, engine: Engine) -> None:
        """Returns when the last answer has ended.

        Raises:
            TimeoutError: it did not end in time.
        """
        began = engine.now()
        for index, ask in enumerate(self._asks):
            time.sleep(max(0.0, began + ask.time - engine.now()))
            engine.submit(self._request(index, ask, engine.info))
        if not self._all_ended.wait(_PATIENCE):
            raise TimeoutError(f"{self._num_left} requests have not ended")

    def _request(self, index: int, ask: Ask, info: ExecutorInfo) -> Request:
        """Cut where the model's context is short; its rare tokens are left out."""
        num_output = min(ask.num_output, info.context_len // 2)
        num_prompt = min(ask.num_prompt, info.context_len - num_output)
        tokens = range(info.vocab_size // 50, info.vocab_size // 2)
        params = SamplingParams(
            max_tokens=num_output,
            ignore_eos=True,
            temperature=self._rng.choice((0.0, 0.8)),
            top_p=0.95,
        )
        return Request(
            f"r{index}",
            self._rng.choices(tokens, k=num_prompt),
            params,
            seed=index,
            service_class=ask.service_class,
        )
