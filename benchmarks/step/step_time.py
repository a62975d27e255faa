"""T(n): how long a step takes with n sequences decoding one token each, against the ideal.

The ideal of a step is the larger of the bytes it must read at the measured memory bandwidth
(weights once, the keys and values of every context) and the operations it must do at the
measured compute, attention included; both ceilings are measured in the same run. Printed are
the median and the least over the steps, the share of the ideal, and where the time goes by
kind of operation; a plot is written if matplotlib is there. With `--shared` the sequences have so
many tokens at their beginning in common, which are to be read once.

    python benchmarks/step/step_time.py [--precision int8] [--contexts 128,1024,4096]
        [--rows 1,2,4,8,16,32,64,128,256] [--shared 0] [--prefill 512] [--plot step.png]
        [--json step.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from machine import describe

from hotbatch.core.plan import PlannedRequest, SampleSpec, StepPlan
from hotbatch.core.sampling_params import SamplingParams
from hotbatch.executor.cpu_executor import CpuExecutor, usable_cpus
from hotbatch.kernels import _native
from hotbatch.models.config import ModelConfig
from hotbatch.models.embedded import embedded_model_path
from hotbatch.models.loader import load_model

GREEDY = SamplingParams(temperature=0.0)
CACHE_NUMBER_BYTES = {"bf16": 2, "f32": 4, "int8": 1}


@dataclass(frozen=True)
class Ceiling:
    """Bytes and operations per second of this machine, at the precision in use."""

    bandwidth: float
    compute: float
    attention_compute: float

    @classmethod
    def measure(cls, precision: str, threads: int) -> Ceiling:
        isa = _native.best_isa()
        kind = "int8" if precision in ("int8", "int4") else precision
        return cls(
            bandwidth=_native.measure_read_bandwidth(256, threads, isa, repeats=10),
            compute=_native.measure_compute(kind, threads, isa, repeats=20),
            attention_compute=_native.measure_compute(
                "f32" if precision == "f32" else "bf16", threads, isa, repeats=20
            ),
        )


@dataclass(frozen=True)
class Work:
    """What a step must read and do."""

    weight_bytes: float
    cache_bytes: float
    linear_operations: float
    attention_operations: float

    def ideal_seconds(self, ceiling: Ceiling) -> float:
        reading = (self.weight_bytes + self.cache_bytes) / ceiling.bandwidth
        computing = (
            self.linear_operations / ceiling.compute
            + self.attention_operations / ceiling.attention_compute
        )
        return max(reading, computing)


def linear_weights(config: ModelConfig) -> tuple[int, int]:
    """Weights of all layers, and of the head."""
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    layer = config.hidden_size * (heads + config.num_heads * config.head_dim)
    layer += 3 * config.hidden_size * config.intermediate_size
    return config.num_layers * layer, config.vocab_size * config.hidden_size


def step_work(
    config: ModelConfig,
    executor: CpuExecutor,
    kv_dtype: str,
    lengths: list[tuple[int, int]],
    shared: int = 0,
) -> Work:
    """`lengths` holds (tokens computed, context after them) of each sequence; each samples.
    `shared` tokens are the beginning of all of them."""
    body, head = linear_weights(config)
    rows = sum(count for count, _ in lengths)
    token_bytes = 2 * config.num_kv_heads * config.head_dim * CACHE_NUMBER_BYTES[kv_dtype]
    pairs = sum(
        count * context - count * (count - 1) // 2 for count, context in lengths
    )  # query-key pairs under the causal mask
    read = sum(context for _, context in lengths) - shared * (len(lengths) - 1)
    return Work(
        weight_bytes=executor.program.weight_bytes,
        cache_bytes=float(config.num_layers * token_bytes * read),
        linear_operations=2.0 * (body * rows + head * len(lengths)),
        attention_operations=4.0 * config.num_layers * config.num_heads * config.head_dim * pairs,
    )


def decode_plan(
    rows: int, context: int, block_size: int, chunk: int = 1, shared: int = 0
) -> StepPlan:
    """`rows` sequences, each computing its last `chunk` tokens of `context`, the first `shared` of
    which are those of the first sequence."""
    blocks = -(-context // block_size)
    common = tuple(range(shared // block_size))
    requests = tuple(
        PlannedRequest(
            request_id=str(row),
            start=context - chunk,
            tokens=tuple((row * 131 + i * 7) % 1000 for i in range(chunk)),
            block_ids=common + tuple(range(row * blocks + len(common), (row + 1) * blocks)),
            sample=SampleSpec(GREEDY, seed=row, position=context, num_prompt=context),
        )
        for row in range(rows)
    )
    return StepPlan(step_id=0, requests=requests)


def measure(executor: CpuExecutor, plan: StepPlan, seconds: float) -> tuple[list[float], dict]:
    """Seconds of each step, and of each kind of operation in a profiled step, as medians."""
    for _ in range(3):
        executor.run(plan)
    times: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(times) < 5:
        start = time.perf_counter()
        executor.run(plan)
        times.append(time.perf_counter() - start)
    executor.program.set_profiling(True)
    before = {name: total for name, total, _ in executor.program.profile()}
    repeats = min(20, len(times))
    for _ in range(repeats):
        executor.run(plan)
    executor.program.set_profiling(False)
    kinds = {
        name: (total - before[name]) / repeats for name, total, _ in executor.program.profile()
    }
    return times, {name: value for name, value in kinds.items() if value > 0}


@dataclass(frozen=True)
class Point:
    rows: int
    context: int
    chunk: int
    shared: int
    median_ms: float
    least_ms: float
    ideal_ms: float
    ideal_share: float  # ideal / median
    kinds_ms: dict[str, float]


def measure_point(
    executor: CpuExecutor,
    config: ModelConfig,
    kv_dtype: str,
    ceiling: Ceiling,
    rows: int,
    context: int,
    chunk: int,
    shared: int,
    seconds: float,
) -> Point:
    plan = decode_plan(rows, context, executor.info.block_size, chunk, shared)
    times, kinds = measure(executor, plan, seconds)
    work = step_work(config, executor, kv_dtype, [(chunk, context)] * rows, shared)
    ideal, median = work.ideal_seconds(ceiling), statistics.median(times)
    return Point(
        rows=rows,
        context=context,
        chunk=chunk,
        shared=shared,
        median_ms=median * 1e3,
        least_ms=min(times) * 1e3,
        ideal_ms=ideal * 1e3,
        ideal_share=ideal / median,
        kinds_ms={name: value * 1e3 for name, value in kinds.items()},
    )


def show(point: Point) -> str:
    kinds = "  ".join(f"{name} {ms:.2f}" for name, ms in point.kinds_ms.items() if ms >= 0.005)
    what = f"{point.rows:4d} rows" if point.chunk == 1 else f"{point.chunk:4d} tokens"
    if point.shared:
        what += f", {point.shared} shared,"
    return (
        f"{what} at {point.context:5d}: median {point.median_ms:8.2f} ms  least "
        f"{point.least_ms:8.2f}  ideal {point.ideal_ms:8.2f}  {point.ideal_share:4.0%}   {kinds}"
    )


def plot(points: list[Point], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    contexts = sorted({p.context for p in points if p.chunk == 1 and not p.shared})
    for index, context in enumerate(contexts):
        line = [p for p in points if p.context == context and p.chunk == 1 and not p.shared]
        rows = [p.rows for p in line]
        axes.plot(rows, [p.median_ms for p in line], f"C{index}o-", label=f"context {context}")
        axes.plot(rows, [p.ideal_ms for p in line], f"C{index}--", label=f"ideal at {context}")
    axes.set(xscale="log", yscale="log", xlabel="sequences in the step", ylabel="step, ms")
    ticks = [1, 2, 4, 8, 16, 32, 64, 128, 256]
    axes.set_xticks(ticks, labels=[str(tick) for tick in ticks])
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    axes.set_title("Time of a decode step, measured against this machine's ceiling")
    figure.savefig(path, dpi=120)


def integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=None, help="a model folder, GGUF file or preset")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--precision", default="int8")
    parser.add_argument("--kv-cache-dtype", default="bf16")
    parser.add_argument("--threads", type=int, default=usable_cpus())
    parser.add_argument("--rows", type=integers, default=[1, 2, 4, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--contexts", type=integers, default=[128, 1024, 4096])
    parser.add_argument("--shared", type=integers, default=[0], help="tokens that all begin with")
    parser.add_argument("--prefill", type=integers, default=[512], help="prompt lengths")
    parser.add_argument("--max-cache-gb", type=float, default=8.0, help="skip larger points")
    parser.add_argument("--seconds", type=float, default=1.0, help="of measuring a point")
    parser.add_argument("--plot", default=None)
    parser.add_argument("--json", default=None)
    args = parser.parse_args()

    model = load_model(args.model or str(embedded_model_path()), load_format=args.load_format)
    config = model.config
    token_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    token_bytes *= CACHE_NUMBER_BYTES[args.kv_cache_dtype]
    shapes = [
        (rows, context, 1, shared)
        for context in args.contexts
        for rows in args.rows
        for shared in args.shared
        if rows * context * token_bytes <= args.max_cache_gb * 1e9
        and shared < context <= config.max_position_embeddings
    ]
    shapes += [(1, length, length, 0) for length in args.prefill]
    executor = CpuExecutor(
        model,
        num_blocks=max(rows * -(-context // 16) for rows, context, *_ in shapes),
        precision=args.precision,
        kv_cache_dtype=args.kv_cache_dtype,
        threads=args.threads,
        max_num_batched_tokens=max([512, *args.prefill]),
    )
    ceiling = Ceiling.measure(args.precision, args.threads)
    print(describe(model=model.name, **{k: v for k, v in vars(args).items() if k != "model"}))
    print(
        f"ceiling   {ceiling.bandwidth / 1e9:.1f} GB/s read, {ceiling.compute / 1e9:.0f} G op/s "
        f"in linear layers, {ceiling.attention_compute / 1e9:.0f} G op/s in attention; "
        f"{1e9 * _native.measure_loop(args.threads):.0f} ns to hand out a loop\n"
    )
    points = []
    for shape in shapes:
        point = measure_point(executor, config, args.kv_cache_dtype, ceiling, *shape, args.seconds)
        print(show(point), flush=True)
        points.append(point)
    if args.plot:
        plot(points, args.plot)
    if args.json:
        result = {"ceiling": asdict(ceiling), "points": [asdict(point) for point in points]}
        Path(args.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
