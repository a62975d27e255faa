"""A real server on a loopback port, over the real engine and scheduler and a simulated model."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tokenizers
import uvicorn
from tokenizers import decoders, models, pre_tokenizers, trainers

from hotbatch.core.config import SchedulerConfig
from hotbatch.core.plan import StepPlan, StepResult
from hotbatch.core.policies import Policies, full_policies
from hotbatch.core.request import Request
from hotbatch.core.sampling_params import SamplingParams
from hotbatch.core.scheduler import Scheduler
from hotbatch.core.speculation import AheadBook
from hotbatch.engine import Ceiling, Engine
from hotbatch.engine.seeds import child_seed
from hotbatch.server.app import create_app
from hotbatch.server.run import address_of, listen
from hotbatch.server.service import Service, ServiceConfig
from hotbatch.simulator import SimulatedExecutor, TokenModel
from hotbatch.text import ChatTemplate, Tokenizer

MODEL = "simulated"
MAX_MODEL_LEN = 512
NUM_BLOCKS = 1024
EOS = 1
TEMPLATE = (
    "{% for m in messages %}<|begin|>{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% if add_generation_prompt %}<|begin|>assistant: {% endif %}"
)
WAIT_SECONDS = 120.0  # a hang, told from a machine that stood still for a while


def small_tokenizer() -> Tokenizer:
    """Byte-level BPE over a few sentences: random tokens make random bytes, hence every kind
    of broken and whole character."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = [
        "Xin chào Việt Nam, trời đẹp quá!",
        "the quick brown fox 👩‍👩‍👧",
        "user: assistant: hello",
    ]
    backend.train_from_iterator(text, trainer)
    return Tokenizer(backend, bos_token_id=0, eos_token_id=EOS)


class GatedExecutor(SimulatedExecutor):
    """Runs freely while `gate` is set; a test can hold it before a step. `fault` is raised in
    the next step."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.gate = threading.Event()
        self.gate.set()
        self.fault: Exception | None = None

    def run(self, plan: StepPlan) -> StepResult:
        assert self.gate.wait(WAIT_SECONDS), "the test never opened the gate"
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault
        return super().run(plan)


@dataclass
class Rig:
    """A service with its parts in reach."""

    service: Service
    engine: Engine
    scheduler: Scheduler
    executor: GatedExecutor
    tokenizer: Tokenizer
    url: str = ""

    def continuation(self, prompt: list[int], index: int = 0, **params: Any) -> list[int]:
        """The tokens a request yields when it is alone on the machine."""
        sampling = SamplingParams(**params)
        request = Request(
            "solo",
            prompt,
            sampling,
            seed=child_seed(sampling.seed, index),
            eos_token_ids=frozenset({EOS}),
        )
        tokens, _ = self.executor.model.continuation(request, MAX_MODEL_LEN - len(prompt))
        return tokens

    def text(self, tokens: list[int]) -> str:
        """What a client sees of these output tokens."""
        return self.tokenizer.decode(tokens)

    def chat_prompt(self, content: str) -> list[int]:
        assert self.service.chat_template is not None
        text = self.service.chat_template.render([{"role": "user", "content": content}])
        return self.tokenizer.encode(text, add_special_tokens=False)

    def wait_idle(self) -> None:
        """Until no request is left; then no block may be in use."""
        self.wait_until(lambda: self.engine.num_outstanding == 0)
        self.wait_until(lambda: self.engine.stats().num_running == 0)
        stats = self.engine.stats()
        assert (stats.num_waiting, stats.blocks_used) == (0, 0)

    @staticmethod
    def wait_until(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not condition():
            assert time.monotonic() < deadline, "it never came true"
            time.sleep(0.002)


def make_rig(
    *,
    chat_template: str | None = TEMPLATE,
    eos_probability: float = 0.0,
    max_num_seqs: int = 256,
    num_blocks: int = NUM_BLOCKS,
    executor: dict[str, Any] | None = None,
    scheduler: dict[str, Any] | None = None,
    policies: Policies | None = None,
    ceiling: Ceiling | None = None,
    ahead: AheadBook | None = None,
    **config: Any,
) -> Rig:
    tokenizer = small_tokenizer()
    model = TokenModel(
        vocab_size=tokenizer.vocab_size, eos_token_id=EOS, eos_probability=eos_probability
    )
    machine = GatedExecutor(
        num_blocks=num_blocks,
        max_model_len=MAX_MODEL_LEN,
        model=model,
        strict=False,
        **(executor or {}),
    )
    planner = Scheduler(
        SchedulerConfig(
            num_blocks=num_blocks,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=max_num_seqs,
            vocab_size=tokenizer.vocab_size,
            **(scheduler or {}),
        ),
        policies or full_policies(),
        ahead=ahead,
    )
    engine = Engine(planner, machine, ceiling=ceiling)
    template = None
    if chat_template is not None:
        template = ChatTemplate(chat_template, tokenizer.special_tokens)
    settings = {"served_names": (MODEL, "alias"), **config}
    service = Service(engine, tokenizer, ServiceConfig(**settings), chat_template=template)
    return Rig(service, engine, planner, machine, tokenizer)


@contextmanager
def serving(rig: Rig) -> Iterator[Rig]:
    """The rig behind uvicorn, in a thread with an event loop of its own."""
    listener = listen("127.0.0.1", 0)
    rig.url = address_of(listener)
    server = uvicorn.Server(
        uvicorn.Config(
            create_app(rig.service), log_config=None, lifespan="off", timeout_graceful_shutdown=1
        )
    )
    rig.engine.start()
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()
    try:
        Rig.wait_until(lambda: server.started)
        yield rig
    finally:
        rig.executor.gate.set()
        server.should_exit = True
        rig.engine.stop()
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive()
        listener.close()
