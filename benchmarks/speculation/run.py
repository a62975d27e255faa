"""What guessing next tokens gains: on against off, and against fixed numbers of guesses.

    python benchmarks/speculation/run.py [--concurrency 1,2,4,8,16,32,64] [--output-len 192]
        [--depths 1,2,3,5,8] [--workloads "edit code,chat"] [--repeats 3] [--precision int8]
        [--temperature 0] [--json speculation.json]

In this process, scheduler and executor of the server without HTTP: for each workload and number
of requests at a time, all variants take turns on the same prompts, and the median of the
repeats is shown. `off` guesses nothing, `on` is what is served, `k=3` lets every request have
three guesses in every step. Each variant keeps its cost model and its table of acceptance from
run to run, as a server would, but no text. That all yield the same tokens is checked.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from machine import describe
from workloads import WORKLOADS

from hotbatch.core.config import SchedulerConfig
from hotbatch.core.cost_model import CostModel
from hotbatch.core.policies import full_policies
from hotbatch.core.request import Request
from hotbatch.core.sampling_params import SamplingParams
from hotbatch.core.scheduler import Scheduler
from hotbatch.core.speculation import Account, CalibrationRow, Speculator
from hotbatch.core.speculation.acceptance import AcceptanceTable
from hotbatch.engine.engine import Engine
from hotbatch.executor.cpu_executor import CpuExecutor
from hotbatch.models.embedded import embedded_model_path
from hotbatch.models.loader import load_model
from hotbatch.text import ChatTemplate, Tokenizer

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Run:
    """One variant's answers to one set of prompts. `answers` are token ids by request."""

    seconds: float
    num_tokens: int
    num_steps: int
    answers: dict[str, tuple[int, ...]]
    account: Account

    @property
    def rate(self) -> float:
        return self.num_tokens / self.seconds


@dataclass
class Variant:
    """`depth` is None for guesses by price, 0 for none, else the number of guesses."""

    name: str
    depth: int | None
    cost_model: CostModel = field(default_factory=CostModel)
    acceptance: AcceptanceTable = field(default_factory=AcceptanceTable)
    calibration: list[CalibrationRow] = field(default_factory=list)

    def speculator(self) -> Speculator | None:
        if self.depth == 0:
            return None
        made = Speculator(self.cost_model, self.depth)
        made.acceptance = self.acceptance
        return made


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
        self._max_seqs = max(arguments.concurrency)
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

    def prompts(self, workload: str, count: int, first: int) -> list[list[int]]:
        texts = [WORKLOADS[workload](first + turn) for turn in range(count)]
        return [
            self._tokenizer.encode(
                self._template.render([{"role": "user", "content": text}]),
                add_special_tokens=False,
            )
            for text in texts
        ]

    def run(self, variant: Variant, prompts: Sequence[Sequence[int]]) -> Run:
        """All prompts at once, to the end of each answer, on a cache that knows nothing."""
        config = SchedulerConfig(
            num_blocks=self._num_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=self._max_len,
            max_num_seqs=self._max_seqs,
            max_num_batched_tokens=512,
            enable_prefix_caching=False,
        )
        speculator = variant.speculator()
        scheduler = Scheduler(config, full_policies(), variant.cost_model, speculator)
        answers: dict[str, tuple[int, ...]] = {}

        def hear(events: list) -> None:
            for event in events:
                assert event.error is None, event.error
                answers[event.request_id] = answers.get(event.request_id, ()) + event.token_ids

        engine = Engine(scheduler, self._executor, deliver=hear)
        for index, prompt in enumerate(prompts):
            engine.submit(self._request(str(index), prompt))
        started = time.perf_counter()
        while engine.num_outstanding:
            engine.tick()
        seconds = time.perf_counter() - started
        account = Account()
        if speculator is not None:
            account = speculator.ledger.account()
            variant.calibration = speculator.ledger.calibration()
        num_tokens = sum(map(len, answers.values()))
        return Run(seconds, num_tokens, scheduler.stats().steps, answers, account)

    def _request(self, name: str, prompt: Sequence[int]) -> Request:
        params = SamplingParams(
            temperature=self._arguments.temperature,
            max_tokens=self._arguments.output_len,
            ignore_eos=True,
        )
        return Request(name, prompt, params, seed=int(name))

    def take_turns(self, prompts: Sequence[Sequence[int]]) -> dict[str, Run]:
        """A run of each variant; all must answer alike."""
        runs = {variant.name: self.run(variant, prompts) for variant in self.variants}
        for name, run in runs.items():
            if run.answers != runs["off"].answers:
                raise RuntimeError(f"{name} answers otherwise than off: speculation lost tokens")
        return runs


def measure(bench: Bench, arguments: argparse.Namespace) -> Iterator[dict[str, object]]:
    """A row for each workload, number of requests and variant."""
    for workload in arguments.workloads:
        for _ in range(arguments.warm_up):
            bench.take_turns(bench.prompts(workload, 2, first=500))
        for count in arguments.concurrency:
            runs: dict[str, list[Run]] = {variant.name: [] for variant in bench.variants}
            for repeat in range(arguments.repeats):
                prompts = bench.prompts(workload, count, first=repeat * count)
                for name, run in bench.take_turns(prompts).items():
                    runs[name].append(run)
            for name, those in runs.items():
                yield _row(workload, count, name, those, runs["off"])


def _row(
    workload: str, count: int, name: str, runs: Sequence[Run], off: Sequence[Run]
) -> dict[str, object]:
    attempted = sum(run.account.attempted for run in runs)
    accepted = sum(run.account.accepted for run in runs)
    return {
        "workload": workload,
        "requests": count,
        "variant": name,
        "tok_per_s": statistics.median(run.rate for run in runs),
        "against_off": statistics.median(
            run.rate / other.rate for run, other in zip(runs, off, strict=True)
        ),
        "tokens_per_step": sum(run.num_tokens for run in runs) / sum(run.num_steps for run in runs),
        "attempted": attempted,
        "accepted": accepted,
        "seconds_saved": sum(run.account.seconds_saved for run in runs),
        "seconds_wasted": sum(run.account.seconds_wasted for run in runs),
    }


def show(row: dict[str, object]) -> None:
    share = row["accepted"] / row["attempted"] if row["attempted"] else 0.0
    print(
        f"{row['workload']:<14}{row['requests']:>9}  {row['variant']:<6}"
        f"{row['tok_per_s']:>9.1f}{row['against_off']:>9.3f}{row['tokens_per_step']:>10.2f}"
        f"{row['attempted']:>8}{share:>9.0%}{row['seconds_saved']:>9.2f}"
        f"{row['seconds_wasted']:>9.2f}",
        flush=True,
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--concurrency", type=_numbers, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--depths", type=_numbers, default=[1, 2, 3, 5, 8], help="fixed ones")
    parser.add_argument("--workloads", type=_names, default=list(WORKLOADS))
    parser.add_argument("--output-len", type=int, default=192, help="tokens of an answer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=1, help="rounds that do not count")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--precision", default="int8")
    parser.add_argument("--model", help="a GGUF file; without it, the embedded model")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args(argv)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def _names(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in WORKLOADS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(WORKLOADS)}")
    return names


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    settings = {key: value for key, value in vars(arguments).items() if key != "json"}
    bench = Bench(arguments)
    print(describe(**settings), flush=True)
    print(f"model     {bench.description}")
    print(
        f"{'workload':<14}{'requests':>9}  {'':<6}{'tok/s':>9}{'/ off':>9}{'tok/step':>10}"
        f"{'drafts':>8}{'right':>9}{'saved s':>9}{'wasted s':>9}"
    )
    rows = []
    for row in measure(bench, arguments):
        show(row)
        rows.append(row)
    print("calibration of the last run with guesses by price: told, true, number")
    for told, true, number in bench.variants[1].calibration:
        print(f"{told:6.2f}{true:6.2f}{number:8d}")
    if arguments.json:
        record = {"machine": describe(**settings).splitlines(), "rows": rows}
        arguments.json.write_text(json.dumps(record, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
