"""What guessing next tokens gains: on against off, and against fixed numbers of guesses.

    python benchmarks/speculation/run.py [--concurrency 1,2,4,8,16,32,64] [--output-len 128]
        [--depths 1,2,3,5,8] [--workloads "edit code,chat"] [--repeats 4] [--turns 2]
        [--waves 2] [--temperature 0] [--precision int8] [--seats 64] [--minutes 4] [--json FILE]

In this process, scheduler and executor of the server without HTTP: for each workload and number
of requests at a time, all variants take turns on the same prompts. There are `--waves` times as
many as run at a time (and at least eight): as one ends, the next comes, and each may be half to one
and a half times `--output-len` long, so that they do not march in step. `finish` is the mean time
from a request's arrival to its last token, against `off`. With `--waves 1` all start at once and
none follows: then the last one to end decides about tokens per second, however soon the others
were done, and `finish` says what they gained. `off` guesses nothing, `on`
is what is served, `k=3` lets every request have three guesses in every step, whatever they cost;
`k=0` is `off` once more and tells how noisy the machine is. The same prompts are run `--turns`
times, as the least of several times is the machine's and the rest its neighbours'.
Each variant keeps its cost model and its table of acceptance from run to run, as a server would,
but no text. That all yield the same tokens is checked, so that rates compare. An answer ends
where the model ends it.

A sweep takes long: with `--json` each round is kept in the file, rounds that are there already
are not run again, and `--minutes` stops before the first that would not end in time. `table.py`
makes a table of one or several such files.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from machine import describe
from workloads import WORKLOADS

from hotbatch.core.config import SchedulerConfig
from hotbatch.core.cost_model import CostModel
from hotbatch.core.plan import StepPlan, StepResult, TokenEvent
from hotbatch.core.policies import full_policies
from hotbatch.core.request import Request
from hotbatch.core.sampling_params import SamplingParams
from hotbatch.core.scheduler import Scheduler
from hotbatch.core.speculation import Account, CalibrationRow, Speculator, Texts
from hotbatch.core.speculation.acceptance import AcceptanceTable
from hotbatch.core.speculation.speculator import Drafts
from hotbatch.core.step import Step
from hotbatch.engine.clock import MonotonicClock
from hotbatch.engine.engine import Engine
from hotbatch.engine.warm_up import show, warm_up
from hotbatch.executor.cpu_executor import CpuExecutor
from hotbatch.kernels import continuation
from hotbatch.models.embedded import embedded_model_path
from hotbatch.models.loader import load_model
from hotbatch.text import ChatTemplate, Tokenizer

BLOCK_SIZE = 16
TEXTS = Texts(continuation.RecentText, continuation.propose)
MAX_BATCHED_TOKENS = 512
_LEAST_PROMPTS = 8  # where more come than run at a time


@dataclass(frozen=True)
class Run:
    """One variant's answers to one set of prompts. `answers` are token ids by request, and
    `first_tokens` the seconds until the first of each, counted from its arrival; `finished` are
    those until the last."""

    num_steps: int
    answers: dict[str, tuple[int, ...]]
    first_tokens: list[float]
    account: Account
    speculator_seconds: float
    seconds: float
    finished: list[float]

    def figures(self) -> dict[str, float]:
        """What is kept of it."""
        num_tokens = sum(map(len, self.answers.values()))
        firsts = sorted(self.first_tokens)
        return {
            "seconds": self.seconds,
            "tokens": num_tokens,
            "steps": self.num_steps,
            "tok_per_s": num_tokens / self.seconds,
            "finish_mean": statistics.fmean(self.finished),
            "ttft_p50": firsts[len(firsts) // 2],
            "ttft_p99": firsts[min(int(0.99 * len(firsts)), len(firsts) - 1)],
            "attempted": self.account.attempted,
            "accepted": self.account.accepted,
            "seconds_spent": self.account.seconds_spent,
            "seconds_saved": self.account.seconds_saved,
            "seconds_wasted": self.account.seconds_wasted,
            "speculator_us": 1e6 * self.speculator_seconds / self.num_steps,
        }


class Timed(Speculator):
    """A speculator that knows how long it took. Its timer takes less than a microsecond a step."""

    seconds = 0.0

    def draft(
        self, step: Step, num_expected: int, limit_of: Callable[[Request], int], now: float
    ) -> Sequence[Drafts]:
        began = time.perf_counter()
        drafts = super().draft(step, num_expected, limit_of, now)
        self.seconds += time.perf_counter() - began
        return drafts

    def settle(self, plan: StepPlan, result: StepResult) -> None:
        began = time.perf_counter()
        super().settle(plan, result)
        self.seconds += time.perf_counter() - began


@dataclass
class Variant:
    """`depth` is None for guesses by price, 0 for none, else the number of guesses."""

    name: str
    depth: int | None
    cost_model: CostModel = field(default_factory=CostModel)
    acceptance: AcceptanceTable = field(default_factory=AcceptanceTable)
    calibration: list[CalibrationRow] = field(default_factory=list)

    def speculator(self) -> Timed | None:
        if self.depth == 0:
            return None
        made = Timed(self.cost_model, self.depth, texts=TEXTS)
        made.guesser.acceptance = self.acceptance
        return made


@dataclass(frozen=True)
class Round:
    """Figures by variant of one set of prompts."""

    workload: str
    requests: int
    repeat: int
    runs: dict[str, dict[str, float]]

    @property
    def key(self) -> tuple[object, ...]:
        return (self.workload, self.requests, self.repeat)


class Bench:
    """A model, and the variants that take turns on it."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        path = Path(arguments.model) if arguments.model else embedded_model_path()
        model = load_model(path)
        self._tokenizer = Tokenizer.from_gguf(path)
        source = model.chat_template or self._tokenizer.chat_template
        assert source is not None, "the benchmark needs a model with a chat template"
        self._template = ChatTemplate(source, self._tokenizer.special_tokens)
        self._eos_token_ids = frozenset(model.eos_token_ids) | self._tokenizer.eos_token_ids
        self._max_seqs = arguments.seats or max(arguments.concurrency)
        length = 1024 + arguments.output_len
        self._num_blocks = (self._max_seqs + 1) * -(-length // BLOCK_SIZE)
        self._max_len = length
        self._executor = CpuExecutor(
            model,
            num_blocks=self._num_blocks,
            precision=arguments.precision,
            block_size=BLOCK_SIZE,
            max_model_len=length,
            max_num_seqs=self._max_seqs,
        )
        self.description = self._executor.info.description
        self.variants = [Variant("off", 0), Variant("on", None)]
        self.variants += [Variant(f"k={depth}", depth) for depth in arguments.depths]
        steps = warm_up(
            self._executor,
            CostModel(),
            MonotonicClock(),
            max_tokens=MAX_BATCHED_TOKENS,
            max_requests=self._max_seqs,
        )
        for variant in self.variants:
            show(steps, variant.cost_model)  # as a server that knows the machine's profile

    def prompts(self, workload: str, count: int, first: int) -> list[list[int]]:
        texts = [WORKLOADS[workload](first + turn) for turn in range(count)]
        return [
            self._tokenizer.encode(
                self._template.render([{"role": "user", "content": text}]),
                add_special_tokens=False,
            )
            for text in texts
        ]

    def run(self, variant: Variant, prompts: Sequence[Sequence[int]], at_a_time: int) -> Run:
        """All prompts, so many at a time, to the end of each answer, on a cache that knows
        nothing."""
        config = SchedulerConfig(
            num_blocks=self._num_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=self._max_len,
            max_num_seqs=self._max_seqs,
            max_num_batched_tokens=MAX_BATCHED_TOKENS,
        )
        speculator = variant.speculator()
        scheduler = Scheduler(config, full_policies(), variant.cost_model, speculator)
        answers: dict[str, tuple[int, ...]] = {}
        arrivals: dict[str, float] = {}
        first_tokens: dict[str, float] = {}
        finished: dict[str, float] = {}
        waiting = [
            self._request(index, prompt, at_a_time, len(prompts))
            for index, prompt in enumerate(prompts)
        ][::-1]

        def send() -> None:
            request = waiting.pop()
            arrivals[request.request_id] = time.perf_counter()
            engine.submit(request)

        def hear(events: list[TokenEvent]) -> None:
            now = time.perf_counter()
            for event in events:
                name = event.request_id
                assert event.error is None, event.error
                if event.token_ids:
                    first_tokens.setdefault(name, now - arrivals[name])
                answers[name] = answers.get(name, ()) + event.token_ids
                if event.finish_reason is None:
                    continue
                finished[name] = now - arrivals[name]
                if waiting:
                    send()

        engine = Engine(scheduler, self._executor, deliver=hear)
        started = time.perf_counter()
        for _ in range(min(at_a_time, len(prompts))):
            send()
        while engine.num_outstanding:
            engine.tick()
        seconds = time.perf_counter() - started
        account = Account()
        if speculator is not None:
            account = speculator.ledger.account()
            variant.calibration = speculator.ledger.calibration()
        return Run(
            scheduler.stats().steps,
            answers,
            list(first_tokens.values()),
            account,
            0.0 if speculator is None else speculator.seconds,
            seconds,
            list(finished.values()),
        )

    def _request(self, index: int, prompt: Sequence[int], at_a_time: int, count: int) -> Request:
        length = self._arguments.output_len
        if count > at_a_time:
            length = max(1, round(length * (0.5 + index * 0.618034 % 1.0)))
        params = SamplingParams(temperature=self._arguments.temperature, max_tokens=length)
        return Request(str(index), prompt, params, seed=index, eos_token_ids=self._eos_token_ids)

    def take_turns(
        self, prompts: Sequence[Sequence[int]], at_a_time: int, first: int = 0
    ) -> dict[str, Run]:
        """A run of each variant, beginning with the `first`; all must answer alike."""
        turn = first % len(self.variants)
        order = [*self.variants[turn:], *self.variants[:turn]]
        runs = {variant.name: self.run(variant, prompts, at_a_time) for variant in order}
        for name, run in runs.items():
            if run.answers != runs["off"].answers:
                raise RuntimeError(f"{name} answers otherwise than off: speculation lost tokens")
        return runs


def measure(
    bench: Bench, arguments: argparse.Namespace, known: Collection[tuple[object, ...]]
) -> Iterator[Round]:
    """The rounds that are not `known` yet, as long as there is time."""
    until = time.monotonic() + 60.0 * arguments.minutes
    for workload in arguments.workloads:
        missing = [
            (count, repeat)
            for count in arguments.concurrency
            for repeat in range(arguments.repeats)
            if (workload, count, repeat) not in known
        ]
        if not missing:
            continue
        began = time.monotonic()
        for _ in range(arguments.warm_up):
            bench.take_turns(bench.prompts(workload, 2, first=500), 2)
        a_request = (time.monotonic() - began) / 2  # of all variants, and more than it will be
        for count, repeat in missing:
            began = time.monotonic()
            if began + a_request * count > until:
                return
            total = count if arguments.waves == 1 else max(_LEAST_PROMPTS, arguments.waves * count)
            prompts = bench.prompts(workload, total, first=repeat // arguments.turns * total)
            runs = bench.take_turns(prompts, count, first=repeat)
            a_request = (time.monotonic() - began) / count
            figures = {name: run.figures() for name, run in runs.items()}
            yield Round(workload, count, repeat, figures)


def print_round(done: Round) -> None:
    off = done.runs["off"]
    for name, run in done.runs.items():
        share = run["accepted"] / run["attempted"] if run["attempted"] else 0.0
        print(
            f"{done.workload:<14}{done.requests:>9}{done.repeat:>3}  {name:<5}"
            f"{run['tok_per_s']:>9.1f}{run['tok_per_s'] / off['tok_per_s']:>8.3f}"
            f"{run['finish_mean'] / off['finish_mean']:>8.3f}"
            f"{run['ttft_p99'] / off['ttft_p99']:>9.2f}{run['attempted']:>8}{share:>8.0%}"
            f"{run['seconds_saved']:>9.2f}{run['seconds_wasted']:>9.2f}{run['speculator_us']:>8.0f}",
            flush=True,
        )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--concurrency", type=_numbers, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--depths", type=_numbers, default=[1, 2, 3, 5, 8], help="fixed ones")
    parser.add_argument("--workloads", type=_names, default=list(WORKLOADS))
    parser.add_argument("--output-len", type=int, default=128, help="most tokens of an answer")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--turns", type=int, default=2, help="repeats of the same prompts")
    parser.add_argument("--waves", type=int, default=2, help="times as many as run at a time")
    parser.add_argument("--warm-up", type=int, default=1, help="rounds that do not count")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--precision", default="int8")
    parser.add_argument("--model", help="a GGUF file; without it, the embedded model")
    parser.add_argument("--seats", type=int, help="max_num_seqs; else the most at a time")
    parser.add_argument("--minutes", type=float, default=600.0, help="start no round after that")
    parser.add_argument("--json", type=Path, help="keep the rounds in this file")
    return parser.parse_args(argv)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part.strip()]


def _names(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in WORKLOADS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(WORKLOADS)}")
    return names


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    settings = {
        name: getattr(arguments, name)
        for name in (
            "depths",
            "output_len",
            "temperature",
            "precision",
            "model",
            "seats",
            "turns",
            "waves",
        )
    }
    rounds = stored(arguments.json, settings)
    bench = Bench(arguments)
    machine = describe(**settings)
    print(f"{machine}\nmodel     {bench.description}")
    print(
        f"{'workload':<14}{'requests':>9}{'':>3}  {'':<5}{'tok/s':>9}{'/ off':>8}{'finish':>8}"
        f"{'p99 1st':>9}{'drafts':>8}{'right':>8}{'saved s':>9}{'wasted s':>9}{'us/step':>8}"
    )
    for done in measure(bench, arguments, {done.key for done in rounds}):
        print_round(done)
        rounds.append(done)
        if arguments.json:
            record = {
                "machine": machine.splitlines(),
                "settings": settings,
                "rounds": [asdict(done) for done in rounds],
            }
            arguments.json.write_text(json.dumps(record, indent=1))
    print("calibration of the last run with guesses by price: told, true, number")
    for told, true, number in bench.variants[1].calibration:
        print(f"{told:6.2f}{true:6.2f}{number:8d}")
    return 0


def stored(path: Path | None, settings: dict[str, object]) -> list[Round]:
    """The rounds of an earlier go with the same settings."""
    if path is None or not path.exists():
        return []
    record = json.loads(path.read_text())
    if record["settings"] != settings:
        raise SystemExit(f"{path} holds rounds of other settings; name another file with --json.")
    return [Round(**done) for done in record["rounds"]]


if __name__ == "__main__":
    sys.exit(main())
