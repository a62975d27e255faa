"""`hotbatch serve` on a machine without a model, as a program: the real server and scheduler."""

from __future__ import annotations

import argparse
import sys
import time
from types import SimpleNamespace

from hotbatch.core.config import SchedulerConfig
from hotbatch.core.scheduler import Scheduler
from hotbatch.engine import Engine
from hotbatch.options import ServerOptions
from hotbatch.server.run import run_server
from hotbatch.simulator import ConstantStepTime, SimulatedExecutor, TokenModel
from hotbatch.text.made_up import made_up_tokenizer

VOCABULARY = 20_000


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batching", default="continuous")
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--fail", action="store_true")
    parser.add_argument("--no-speculate", action="store_true")
    arguments = parser.parse_args()
    if arguments.fail:
        sys.exit("cannot start, says the test")
    executor = SimulatedExecutor(
        num_blocks=512,
        model=TokenModel(VOCABULARY),
        step_time=ConstantStepTime(0.001),
        sleep=time.sleep,
        strict=False,
    )
    config = SchedulerConfig(
        num_blocks=512,
        max_model_len=4096,
        batching=arguments.batching,
        max_num_seqs=arguments.max_num_seqs,
        static_batch_size=4,
        static_timeout=0.01,
    )
    model = SimpleNamespace(
        name="simulated",
        engine=Engine(Scheduler(config), executor),
        tokenizer=made_up_tokenizer(VOCABULARY),
        chat_template=None,
        eos_token_ids=frozenset(),
        generation_defaults={},
        queue_ttl=None,
        promised={},
        read_device=None,
    )
    settings = ServerOptions(
        host=arguments.host, port=arguments.port, shutdown_grace=1.0, log_level="warning"
    )
    return run_server(model, settings)


if __name__ == "__main__":
    sys.exit(main())
