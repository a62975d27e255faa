"""What a precision costs: perplexity on fixed prose and code, against f32 in the same run.

    python benchmarks/quality/perplexity.py --precisions int8,bf16 --executor native

Each text is cut into windows of equal length which are scored as prompts, one a step, through
the executor's own prompt log-probabilities; so the very code that serves is measured. Beside
the ratio of perplexities stands how often the likeliest next token is that of f32, and how far
tokens' log-probabilities are from those of f32 (root mean square). Of the three the last is the
steadiest: deviations cancel in a ratio, and it moves by half a per cent with the least change.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from machine import describe

from hotbatch.core.plan import PlannedRequest, StepPlan, TokenLogprob
from hotbatch.engine.protocol import Executor
from hotbatch.models.embedded import embedded_model_path
from hotbatch.models.loader import LoadedModel, load_model
from hotbatch.text.tokenizer import Tokenizer

DATA = Path(__file__).parent / "data"
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Score:
    """`predicted` tokens of a text had the mean negative log-probability `nats`; `top_agreement`
    is the share of positions at which the likeliest token is the baseline's, `deviation` the root
    mean square of the tokens' log-probabilities less the baseline's."""

    text: str
    precision: str
    predicted: int
    nats: float
    perplexity: float
    ratio: float
    top_agreement: float
    deviation: float
    tokens_per_second: float


def windows_of(token_ids: Sequence[int], length: int) -> list[tuple[int, ...]]:
    """Consecutive windows of `length` tokens; a last one shorter than two is left out."""
    cut = [tuple(token_ids[i : i + length]) for i in range(0, len(token_ids), length)]
    return [window for window in cut if len(window) > 1]


def score_windows(
    executor: Executor, windows: Sequence[tuple[int, ...]]
) -> tuple[list[TokenLogprob], float]:
    """The log-probability of every token but each window's first, and the seconds it took."""
    entries: list[TokenLogprob] = []
    seconds = 0.0
    for step_id, window in enumerate(windows):
        blocks = tuple(range(-(-len(window) // executor.info.block_size)))
        request = PlannedRequest(
            "text", 0, window, blocks, prompt_logprobs=1, next_tokens=window[1:]
        )
        result = executor.run(StepPlan(step_id, (request,)))
        entries.extend(result.requests[0].prompt_logprobs)
        seconds += result.seconds
    return entries, seconds


def compare(
    text: str,
    precision: str,
    entries: Sequence[TokenLogprob],
    baseline: Sequence[TokenLogprob],
    seconds: float,
) -> Score:
    nats, base_nats = (
        -sum(entry.logprob for entry in part) / len(part) for part in (entries, baseline)
    )
    agreed = sum(
        mine.top[0][0] == theirs.top[0][0] for mine, theirs in zip(entries, baseline, strict=True)
    )
    squares = [
        (mine.logprob - theirs.logprob) ** 2 for mine, theirs in zip(entries, baseline, strict=True)
    ]
    return Score(
        text=text,
        precision=precision,
        predicted=len(entries),
        nats=nats,
        perplexity=math.exp(nats),
        ratio=math.exp(nats - base_nats),
        top_agreement=agreed / len(entries),
        deviation=math.sqrt(sum(squares) / len(squares)),
        tokens_per_second=len(entries) / seconds,
    )


def make_executor(
    kind: str, model: LoadedModel, precision: str, kv_dtype: str | None, window: int, device: str
) -> Executor:
    num_blocks = -(-window // BLOCK_SIZE) + 1
    if kind == "torch":
        from hotbatch.executor.torch_executor import TorchExecutor

        return TorchExecutor(
            model,
            device,
            precision,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            kv_dtype=kv_dtype,
        )
    from hotbatch.executor.cpu_executor import CpuExecutor

    return CpuExecutor(
        model,
        precision=precision,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=window,
        kv_cache_dtype=kv_dtype or "auto",
    )


def tokenizer_of(model: LoadedModel) -> Tokenizer:
    source = model.tokenizer_source
    if source is None:
        raise SystemExit(f"The model {model.name} has no tokenizer.")
    return Tokenizer.from_folder(source) if source.is_dir() else Tokenizer.from_gguf(source)


def measure(arguments: argparse.Namespace) -> list[Score]:
    """Score every text at f32 and at each precision; prints a row as each is done."""
    model = load_model(arguments.model or embedded_model_path())
    tokenizer = tokenizer_of(model)
    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted(DATA.glob("*.txt"))}
    windows = {
        name: windows_of(tokenizer.encode(text)[: arguments.max_tokens], arguments.window)
        for name, text in texts.items()
    }
    digests = {n: hashlib.sha256(t.encode()).hexdigest()[:12] for n, t in texts.items()}
    print(
        f"# {model.name}, {arguments.executor} executor, windows of {arguments.window} tokens, "
        f"KV cache {arguments.kv_cache_dtype or 'as the precision has it'}"
    )
    print(describe(texts=json.dumps(digests), precisions=arguments.precisions))
    print(
        f"{'text':<7}{'precision':<11}{'tokens':>7}{'perplexity':>12}{'vs f32':>9}"
        f"{'same top':>10}{'deviation':>11}{'tokens/s':>10}"
    )
    baselines: dict[str, list[TokenLogprob]] = {}
    scores: list[Score] = []
    wanted = [p for p in arguments.precisions.split(",") if p and p != "f32"]
    for precision in ["f32", *wanted]:
        # The baseline keeps its cache in f32 too, so that the cache's cost is counted.
        kv_dtype = "f32" if precision == "f32" else arguments.kv_cache_dtype
        executor = make_executor(
            arguments.executor, model, precision, kv_dtype, arguments.window, arguments.device
        )
        for name, cut in windows.items():
            entries, seconds = score_windows(executor, cut)
            score = compare(name, precision, entries, baselines.setdefault(name, entries), seconds)
            scores.append(score)
            print(
                f"{name:<7}{precision:<11}{score.predicted:>7}{score.perplexity:>12.4f}"
                f"{100 * (score.ratio - 1):>+8.2f}%{100 * score.top_agreement:>9.2f}%"
                f"{score.deviation:>11.4f}{score.tokens_per_second:>10.0f}",
                flush=True,
            )
        executor.close()
    return scores


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="as for hotbatch serve; the embedded model by default")
    parser.add_argument("--executor", choices=("native", "torch"), default="native")
    parser.add_argument("--device", default="cpu", help="for the torch executor")
    parser.add_argument("--precisions", default="int8", help="compared with f32, e.g. int8,bf16")
    parser.add_argument("--kv-cache-dtype", help="of the compared precisions, e.g. bf16 or int8")
    parser.add_argument("--window", type=int, default=512, help="tokens a window")
    parser.add_argument("--max-tokens", type=int, help="of each text; all by default")
    parser.add_argument("--limit", type=float, help="fail if a ratio exceeds 1 by more, e.g. 0.02")
    parser.add_argument("--json", type=Path, help="also write the scores to this file")
    arguments = parser.parse_args(argv)
    started = time.perf_counter()
    scores = measure(arguments)
    print(f"# took {time.perf_counter() - started:.1f} s")
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"machine": describe(), "scores": [asdict(s) for s in scores]}, indent=2)
        )
    worst = max(score.ratio for score in scores) - 1.0
    if arguments.limit is not None and worst > arguments.limit:
        print(f"# too much: {100 * worst:+.2f}% exceeds the limit of {100 * arguments.limit:.2f}%")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
