"""Linear layers against their roofline and against torch (oneDNN), for the shapes of real models.

For each model shape, precision and number of rows: the time of one pass over the layer's
matrices (weights cold in the caches where the model is larger than them), operations per
second, and the share of the roofline, which is the larger of the bytes at the measured bandwidth
and the operations at the measured compute, both measured in the same run. torch runs
`torch._int_mm` (int8) and `torch.nn.functional.linear` (bf16, f32) on the same matrices.

    python benchmarks/kernels/linear.py [--models smollm2-135m,llama-1b,llama-8b]
        [--precisions int8,int4,bf16] [--rows 1,2,4,8,16,32,64,128,256,512] [--no-torch]
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from machine import describe

from hotbatch.executor.cpu_executor import usable_cpus
from hotbatch.kernels import _native
from hotbatch.models.presets import PRESETS

RawTuple = tuple[str, np.ndarray, int]


@dataclass(frozen=True)
class Layer:
    name: str
    inputs: int
    outputs: int
    copies: int  # layers cycled through, so that weights come from memory as in a model

    @property
    def has_row_scale(self) -> bool:
        """Behind a norm, int8 activations have one scale a row."""
        return self.name in ("qkv", "gate_up", "head")


def model_layers(model: str, memory_budget: float) -> list[Layer]:
    config = PRESETS[model]
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    shapes = [
        ("qkv", config.hidden_size, heads),
        ("out", config.num_heads * config.head_dim, config.hidden_size),
        ("gate_up", config.hidden_size, 2 * config.intermediate_size),
        ("down", config.intermediate_size, config.hidden_size),
        ("head", config.hidden_size, config.vocab_size),
    ]
    layers = []
    for name, inputs, outputs in shapes:
        copies = 1 if name == "head" else config.num_layers
        layers.append(
            Layer(name, inputs, outputs, max(1, min(copies, int(memory_budget / inputs / outputs))))
        )
    return layers


def raw_f32(matrix: np.ndarray) -> RawTuple:
    return "F32", np.ascontiguousarray(matrix, dtype=np.float32).view(np.uint8), matrix.shape[1]


def random_matrix(outputs: int, inputs: int) -> np.ndarray:
    """A small random block, repeated: cheap for the largest shapes."""
    block = np.random.default_rng(0).standard_normal(4096 + 61).astype(np.float32)
    return np.resize(block, (outputs, inputs))


class NativeLayer:
    """`copies` recorded layers of one shape, run one after another on the same rows."""

    def __init__(self, layer: Layer, precision: str, threads: int, max_rows: int) -> None:
        self.program = _native.Program(
            max_rows=max_rows, max_logit_rows=max_rows, threads=threads, isa=_native.best_isa()
        )
        self.program.set_rotary(np.ones((1, 8), np.float32), np.zeros((1, 8), np.float32))
        self.program.set_cache("f32", 16, 1, 16, 1, 1)
        self._table = raw_f32(random_matrix(max_rows, layer.inputs))
        x = self.program.select(self.program.embed(self.program.add_table(self._table)))
        weight = raw_f32(random_matrix(layer.outputs, layer.inputs))
        y = x
        for _ in range(layer.copies):
            index = self.program.add_weight(precision, [weight], None)
            form = self.program.convert(x, precision, row_scale=layer.has_row_scale)
            y = self.program.linear(form, index, -1)
        self.program.finish(y)
        self.program.set_profiling(True)
        self._copies = layer.copies

    def _total(self) -> float:
        return next(total for name, total, _ in self.program.profile() if name == "linear")

    def seconds(self, rows: int, budget: float) -> float:
        """Best seconds of one layer, from the program's own clock around its linear layers."""
        zeros = np.zeros(rows, np.int32)
        arrays = (
            np.arange(rows, dtype=np.int32),
            zeros,
            zeros,
            np.array([0, rows], np.int32),
            np.array([1], np.int32),
            np.zeros((1, 1), np.int32),
            np.arange(rows, dtype=np.int32),
            None,
            None,
        )
        best, until, runs = float("inf"), time.perf_counter() + budget, 0
        while time.perf_counter() < until or runs < 3:
            before = self._total()
            self.program.run(*arrays)
            best = min(best, self._total() - before)
            runs += 1
        return best / self._copies


def torch_seconds(layer: Layer, precision: str, rows: int, threads: int, budget: float) -> float:
    import torch

    torch.set_num_threads(threads)
    if precision == "int8":
        left = torch.randint(-127, 127, (rows, layer.inputs), dtype=torch.int8)
        weights = [
            torch.randint(-127, 127, (layer.inputs, layer.outputs), dtype=torch.int8)
            for _ in range(layer.copies)
        ]

        def call(weight: torch.Tensor) -> torch.Tensor:
            return torch._int_mm(left, weight)
    else:
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        right = torch.randn(rows, layer.inputs, dtype=dtype)
        weights = [
            torch.randn(layer.outputs, layer.inputs, dtype=dtype) for _ in range(layer.copies)
        ]

        def call(weight: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(right, weight)

    best, until, runs = float("inf"), time.perf_counter() + budget, 0
    while time.perf_counter() < until or runs < 3:
        start = time.perf_counter()
        for weight in weights:
            call(weight)
        best = min(best, time.perf_counter() - start)
        runs += 1
    return best / layer.copies


WEIGHT_BYTES = {"int8": 1.0, "int4": 0.625, "bf16": 2.0, "f32": 4.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="smollm2-135m,llama-1b,llama-8b")
    parser.add_argument("--precisions", default="int8,int4,bf16")
    parser.add_argument("--rows", default="1,2,4,8,16,32,64,128,256,512")
    parser.add_argument("--layers", default="qkv,out,gate_up,down,head")
    parser.add_argument("--threads", type=int, default=usable_cpus())
    parser.add_argument("--seconds", type=float, default=0.2, help="of measuring a point")
    parser.add_argument("--no-torch", action="store_true")
    args = parser.parse_args()
    if unknown := set(args.models.split(",")) - set(PRESETS):
        parser.error(
            f"--models: no such shape {', '.join(unknown)}; there are {', '.join(PRESETS)}"
        )

    isa = _native.best_isa()
    bandwidth = _native.measure_read_bandwidth(256, args.threads, isa, repeats=10)
    kinds = {"int8": "int8", "int4": "int8", "bf16": "bf16", "f32": "f32"}
    compute = {
        precision: _native.measure_compute(kinds[precision], args.threads, isa, repeats=20)
        for precision in args.precisions.split(",")
    }
    print(describe(**vars(args)))
    print(
        f"ceiling   {bandwidth / 1e9:.1f} GB/s read, "
        + ", ".join(f"{precision} {rate / 1e9:.0f} G op/s" for precision, rate in compute.items())
    )
    rows = [int(part) for part in args.rows.split(",")]
    for model in args.models.split(","):
        for precision in args.precisions.split(","):
            for layer in model_layers(model, memory_budget=300e6 / WEIGHT_BYTES[precision]):
                if layer.name not in args.layers.split(","):
                    continue
                print(
                    f"\n{model} {layer.name} [{layer.outputs} x {layer.inputs}] {precision}, "
                    f"{layer.copies} copies"
                )
                native = NativeLayer(layer, precision, args.threads, max(rows))
                for count in rows:
                    seconds = native.seconds(count, args.seconds)
                    operations = 2.0 * count * layer.inputs * layer.outputs
                    cold = layer.inputs * layer.outputs * WEIGHT_BYTES[precision]
                    ideal = max(cold / bandwidth, operations / compute[precision])
                    rate, read = operations / seconds / 1e9, cold / seconds / 1e9
                    line = f"{count:5d} rows {seconds * 1e6:10.1f} us {rate:7.0f} G op/s"
                    line += f"  {read:6.1f} GB/s  roofline {ideal / seconds:4.0%}"
                    if not args.no_torch and precision != "int4":
                        other = torch_seconds(layer, precision, count, args.threads, args.seconds)
                        line += f"   torch {other * 1e6:10.1f} us ({other / seconds:4.1f}x)"
                    print(line, flush=True)


if __name__ == "__main__":
    main()
