"""OpenVINO GenAI's continuous batching in process: it has no server that batches.

Runs in the peer's own environment (no hotbatch, no HTTP). Loads the model, prints
`{"ready": ...}`, then for each line `{"prompts": [[token, ...], ...], "output_len": n,
"clients": n}` on standard input runs that closed loop and prints one line of figures under
the load generator's names. What the pipeline itself prints goes to standard error.

    python openvino_driver.py MODEL_DIR [--max-num-batched-tokens N] [--cache-gb N]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import openvino
import openvino_genai as ov_genai

# Requests under way at once, so that a burst of 64 is never queued by the pipeline's default.
MAX_NUM_SEQS = 256


@dataclass
class Request:
    handle: Any
    started: float
    times: list[float] = field(default_factory=list)  # of each step that brought tokens
    tokens: int = 0


def load(options: argparse.Namespace) -> Any:
    """The pipeline, with OpenVINO's defaults but for what `options` name."""
    config = ov_genai.SchedulerConfig()
    config.cache_size = options.cache_gb
    config.max_num_seqs = MAX_NUM_SEQS
    if options.max_num_batched_tokens is not None:
        config.max_num_batched_tokens = options.max_num_batched_tokens
    return ov_genai.ContinuousBatchingPipeline(options.model, config, "CPU")


def closed_loop(
    pipeline: Any, prompts: list[list[int]], output_len: int, clients: int
) -> dict[str, Any]:
    """Keeps `clients` requests under way until all prompts are answered."""
    settings = ov_genai.GenerationConfig()
    settings.max_new_tokens = output_len
    settings.ignore_eos = True
    settings.do_sample = False
    waiting = list(enumerate(prompts))[::-1]
    running: list[Request] = []
    ended: list[Request] = []
    start = time.perf_counter()
    while waiting or running:
        while waiting and len(running) < clients:
            number, prompt = waiting.pop()
            ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
            begun = time.perf_counter()
            running.append(Request(pipeline.add_request(number, ids, settings), begun))
        pipeline.step()
        running = [request for request in running if not take(request, ended)]
    return figures(ended, time.perf_counter() - start, sum(map(len, prompts)))


def take(request: Request, ended: list[Request]) -> bool:
    """Reads what the step brought; True (and into `ended`) when the request is done."""
    if request.handle.can_read():
        brought = sum(len(output.generated_ids) for output in request.handle.read().values())
        request.tokens += brought
        if brought:
            request.times.append(time.perf_counter())
    is_done: bool = request.handle.get_status() != ov_genai.GenerationStatus.RUNNING
    if is_done:
        ended.append(request)
    return is_done


def figures(ended: list[Request], duration: float, input_tokens: int) -> dict[str, Any]:
    """As `hotbatch.bench.summarize` names them; times in milliseconds."""
    good = [request for request in ended if request.tokens > 1]
    ttfts = [1000 * (request.times[0] - request.started) for request in good]
    tpots = [
        1000 * (request.times[-1] - request.times[0]) / (request.tokens - 1) for request in good
    ]
    gaps = [1000 * gap for request in good for gap in np.diff(request.times)]
    tokens = sum(request.tokens for request in good)
    return {
        "duration": duration,
        "completed": len(good),
        "failed": len(ended) - len(good),
        "total_input_tokens": input_tokens,
        "total_output_tokens": tokens,
        "output_throughput": tokens / duration,
        "mean_ttft_ms": float(np.mean(ttfts)) if ttfts else 0.0,
        "mean_tpot_ms": float(np.mean(tpots)) if tpots else 0.0,
        "p99_itl_ms": float(np.percentile(gaps, 99)) if gaps else 0.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="folder written by optimum-cli export openvino")
    parser.add_argument("--max-num-batched-tokens", type=int, default=None)
    parser.add_argument("--cache-gb", type=int, default=3)
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the pipeline's own words must not mix with the answers
    pipeline = load(options)
    print(json.dumps({"ready": ov_genai.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        result = closed_loop(pipeline, job["prompts"], job["output_len"], job["clients"])
        print(json.dumps(result), file=answers, flush=True)


if __name__ == "__main__":
    main()
