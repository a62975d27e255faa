"""A load generator for any OpenAI-compatible server; it uses nothing else of this package.

`random_requests` and `arrival_times` make a workload, `run_load` or `run_clients` sends it,
`summarize` and `banner` report it under vLLM's names. `hotbatch bench serve` is the command.

The client is aiohttp and not httpx: reading a token's chunk from a stream costs a fraction of
the processor time there, and on a machine shared with the server that time is missing from
what is measured. The cost that is left is printed with every result.
"""

from hotbatch.bench.client import Record, Target
from hotbatch.bench.load import Client, LoadResult, run_clients, run_load
from hotbatch.bench.report import banner, summarize
from hotbatch.bench.workload import BenchRequest, RandomLengths, arrival_times, random_requests

__all__ = [
    "BenchRequest",
    "Client",
    "LoadResult",
    "RandomLengths",
    "Record",
    "Target",
    "arrival_times",
    "banner",
    "random_requests",
    "run_clients",
    "run_load",
    "summarize",
]
