"""`hotbatch bench serve`: the load generator's command line, named as vLLM's where it can be."""

from __future__ import annotations

import asyncio
import enum
import json
import math
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from hotbatch.bench.client import Record, Target, open_session, parse, send
from hotbatch.bench.load import LoadResult, run_load
from hotbatch.bench.report import DETAILS, METRICS, banner, summarize
from hotbatch.bench.workload import BenchRequest, RandomLengths, arrival_times, random_requests

app = typer.Typer(
    help="Measure a server under load.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class PromptKind(enum.Enum):
    TOKENS = "tokens"
    TEXT = "text"


class Dataset(enum.Enum):
    RANDOM = "random"


@app.callback()
def _bench() -> None:
    """Measure a server under load."""


@app.command()
def serve(
    base_url: Annotated[str, typer.Option(help="Address of the server.")] = "http://127.0.0.1:8000",
    endpoint: Annotated[
        str, typer.Option(help="/v1/completions or /v1/chat/completions.")
    ] = "/v1/completions",
    model: Annotated[
        str | None, typer.Option(help="Model name; default: the first the server lists.")
    ] = None,
    dataset_name: Annotated[Dataset, typer.Option(help="Kind of workload.")] = Dataset.RANDOM,
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests to send.")] = 100,
    random_input_len: Annotated[int, typer.Option(min=1, help="Mean prompt tokens.")] = 128,
    random_output_len: Annotated[int, typer.Option(min=1, help="Mean output tokens.")] = 128,
    random_range_ratio: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Lengths vary by +- this share of the mean.")
    ] = 0.0,
    random_prefix_len: Annotated[
        int, typer.Option(min=0, help="Tokens before the prompt that all requests share.")
    ] = 0,
    prompt_kind: Annotated[
        PromptKind | None,
        typer.Option(help="Token ids (default) or text (needed, and default, for chat)."),
    ] = None,
    token_range: Annotated[
        tuple[int, int], typer.Option(help="Random token ids: lowest, and one past the highest.")
    ] = (1000, 20000),
    max_concurrency: Annotated[
        int | None, typer.Option(min=1, help="At most so many requests under way (closed loop).")
    ] = None,
    request_rate: Annotated[
        float, typer.Option(help="Requests per second (open loop); inf sends all at once.")
    ] = math.inf,
    burstiness: Annotated[
        float, typer.Option(help="Shape of the Gamma-distributed gaps; 1 is a Poisson process.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of prompts, lengths and arrivals.")] = 0,
    ignore_eos: Annotated[bool, typer.Option(help="Generate to the full length.")] = True,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature.")] = 0.0,
    extra_body: Annotated[
        str | None, typer.Option(help="JSON object added to each request's body.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", help="Bearer key.")
    ] = None,
    num_warmups: Annotated[
        int, typer.Option("--num-warmups", "--warmup", min=0, help="Requests before the run.")
    ] = 0,
    ready_check_timeout_sec: Annotated[
        float, typer.Option(min=0.0, help="Wait so long for the server's first answer.")
    ] = 60.0,
    goodput: Annotated[
        list[str] | None,
        typer.Option(help="A limit such as ttft:500 (ms) for goodput; ttft, tpot or e2el."),
    ] = None,
    percentile_metrics: Annotated[
        str, typer.Option(help="Which figures the banner shows.")
    ] = ",".join(METRICS),
    metric_percentiles: Annotated[str, typer.Option(help="Percentiles to report.")] = "90,99",
    save_result: Annotated[bool, typer.Option(help="Write a JSON file.")] = False,
    save_detailed: Annotated[bool, typer.Option(help="With each request's figures.")] = False,
    result_dir: Annotated[Path, typer.Option(help="Folder of the JSON file.")] = Path("."),
    result_filename: Annotated[str | None, typer.Option(help="Name of the JSON file.")] = None,
    metadata: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE, kept in the JSON file.")
    ] = None,
    disable_tqdm: Annotated[bool, typer.Option(help="No progress line.")] = False,
) -> None:
    """Send random requests to an OpenAI-compatible server and report what they met."""
    is_chat = endpoint.rstrip("/").endswith("/chat/completions")
    kind = prompt_kind or (PromptKind.TEXT if is_chat else PromptKind.TOKENS)
    if is_chat and kind is PromptKind.TOKENS:
        raise typer.BadParameter("the chat endpoint takes text; use --prompt-kind text")
    limits = parse_goodput(goodput or [])
    percentiles = _numbers(metric_percentiles, "--metric-percentiles")
    metrics = _metric_names(percentile_metrics)
    notes = _pairs(metadata or [])
    try:
        arrivals = arrival_times(
            num_prompts, request_rate=request_rate, burstiness=burstiness, seed=seed
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    # One more than asked: the first tries the server out and must not warm the cache for others.
    trial, *requests = random_requests(
        1 + num_prompts,
        input_len=RandomLengths(random_input_len, random_range_ratio),
        output_len=RandomLengths(random_output_len, random_range_ratio),
        prefix_len=random_prefix_len,
        as_text=kind is PromptKind.TEXT,
        token_range=_range(token_range),
        seed=seed,
    )
    target = Target(
        base_url=base_url,
        model=model or "",
        endpoint=endpoint,
        api_key=api_key,
        ignore_eos=ignore_eos,
        extra_body={"temperature": temperature, **_json_object(extra_body)},
    )
    try:
        target, load = asyncio.run(
            _run(
                target,
                trial,
                requests,
                arrivals=arrivals,
                max_concurrency=max_concurrency,
                num_warmups=num_warmups,
                patience=ready_check_timeout_sec,
                is_quiet=disable_tqdm or not sys.stderr.isatty(),
            )
        )
    except _NotReadyError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    figures = summarize(load, percentiles=percentiles, goodput=limits)
    typer.echo(
        banner(
            figures,
            metrics=metrics,
            percentiles=percentiles,
            max_concurrency=max_concurrency,
            request_rate=request_rate,
        )
    )
    if save_result or result_filename:
        now = datetime.now().strftime("%Y%m%d-%H%M%S")
        path = result_dir / (
            result_filename or f"openai-{request_rate}qps-{Path(target.model).name}-{now}.json"
        )
        settings = {
            "date": now,
            "backend": "openai",
            "endpoint_type": "openai-chat" if is_chat else "openai",
            "model_id": target.model,
            "num_prompts": num_prompts,
            "request_rate": request_rate if math.isfinite(request_rate) else "inf",
            "burstiness": burstiness,
            "max_concurrency": max_concurrency,
            "random_input_len": random_input_len,
            "random_output_len": random_output_len,
            "random_range_ratio": random_range_ratio,
            "random_prefix_len": random_prefix_len,
            "seed": seed,
            **notes,
        }
        save(path, settings, figures, with_details=save_detailed)
        typer.echo(f"saved to {path}")
    if figures["completed"] == 0:
        raise typer.Exit(1)


@app.command()
def demo(
    model: Annotated[
        str | None, typer.Option(help="As for hotbatch serve; default: the embedded model.")
    ] = None,
    modes: Annotated[
        str, typer.Option(help="Ways of batching to compare; the last is compared to the first.")
    ] = "static,continuous",
    base: Annotated[int, typer.Option(min=1, help="Clients that are there all the time.")] = 5,
    peak: Annotated[int, typer.Option(min=1, help="Clients at the height of the burst.")] = 100,
    base_requests: Annotated[
        int, typer.Option(min=1, help="Requests of each client that is there all the time.")
    ] = 12,
    seed: Annotated[int, typer.Option(help="Seed of prompts and lengths.")] = 0,
    image: Annotated[Path, typer.Option(help="Where to write the plot.")] = Path("burst.png"),
    api_key: Annotated[str | None, typer.Option(envvar="HOTBATCH_API_KEY", hidden=True)] = None,
) -> None:
    """Send the same burst of clients to a static and to a continuous batch."""
    from rich.console import Console

    from hotbatch.bench.demo import Burst, plot, run_mode, table
    from hotbatch.bench.server_process import ServerFailedError

    names = modes.split(",")
    for name in names:
        if name not in ("static", "continuous", "request"):
            raise typer.BadParameter(f"--modes knows static, continuous and request, not {name!r}")
    if peak < base:
        raise typer.BadParameter(f"--peak {peak} is less than --base {base}")
    clients = Burst(base=base, peak=peak, base_requests=base_requests, seed=seed).clients()
    options = [] if model is None else [model]
    results = []
    for name in names:
        typer.echo(f"{name}: a burst from {base} to {peak} clients and back ...", err=True)
        try:
            results.append(run_mode(name, clients, options, api_key=api_key))
        except ServerFailedError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from None
    Console().print(table(results))
    plot(results, image)
    typer.echo(f"plot: {image}")
    if any(result.figures["failed"] for result in results):
        errors = [str(result.figures["first_error"]) for result in results]
        typer.echo(f"error: requests failed: {'; '.join(errors)}", err=True)
        raise typer.Exit(1)


def save(
    path: Path, settings: dict[str, Any], figures: dict[str, Any], *, with_details: bool
) -> None:
    """Writes settings and figures as one JSON object, per-request lists only on demand."""
    kept = {key: value for key, value in figures.items() if with_details or key not in DETAILS}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**settings, **kept}), encoding="utf-8")


def parse_goodput(pairs: list[str]) -> dict[str, float]:
    """["ttft:500 tpot:50"] or ["ttft:500", "tpot:50"] to {"ttft": 500.0, "tpot": 50.0}."""
    limits: dict[str, float] = {}
    for pair in " ".join(pairs).split():
        name, _, value = pair.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = -1.0
        if name not in ("ttft", "tpot", "e2el") or not limit >= 0.0:
            raise typer.BadParameter(f"--goodput takes ttft:MS, tpot:MS or e2el:MS, got {pair!r}")
        limits[name] = limit
    return limits


class _NotReadyError(Exception):
    """The server does not answer as it should; `is_final` if no waiting will change that."""

    def __init__(self, message: str, *, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final


async def _run(
    target: Target,
    trial: BenchRequest,
    requests: list[BenchRequest],
    *,
    arrivals: list[float],
    max_concurrency: int | None,
    num_warmups: int,
    patience: float,
    is_quiet: bool,
) -> tuple[Target, LoadResult]:
    deadline = time.monotonic() + patience
    while True:
        try:
            if not target.model:
                target = await _with_first_model(target)
            await _try_out(target, trial)
            break
        except _NotReadyError as error:
            if error.is_final or time.monotonic() >= deadline:
                raise
            await asyncio.sleep(0.5)
    if num_warmups:
        await run_load(target, [trial] * num_warmups, max_concurrency=max_concurrency)
    progress = _Progress(len(requests), is_quiet)
    load = await run_load(
        target,
        requests,
        arrivals=arrivals,
        max_concurrency=max_concurrency,
        on_end=progress.advance,
    )
    progress.close()
    return target, load


async def _with_first_model(target: Target) -> Target:
    import aiohttp

    url = target.base_url.rstrip("/") + "/v1/models"
    try:
        async with open_session(target) as session, session.get(url) as response:
            if response.status in (401, 403):
                raise _NotReadyError(f"{url} says {response.status}; give --api-key", is_final=True)
            listed = await response.json()
            name = str(listed["data"][0]["id"])
    except (aiohttp.ClientError, OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise _NotReadyError(f"no model list at {url}: {error}") from None
    return Target(
        target.base_url,
        name,
        target.endpoint,
        target.api_key,
        target.ignore_eos,
        target.extra_body,
    )


async def _try_out(target: Target, trial: BenchRequest) -> None:
    record = Record(trial)
    async with open_session(target) as session:
        await send(session, target, record)
    parse(record)
    if record.error is not None:
        raise _NotReadyError(
            f"the trial request to {target.url} failed: {record.error}", is_final=record.is_refused
        )


class _Progress:
    """A line on stderr, redrawn at most twice a second so that it costs nothing."""

    def __init__(self, total: int, is_quiet: bool) -> None:
        self._total = total
        self._is_quiet = is_quiet
        self._done = 0
        self._drawn = 0.0

    def advance(self, _: Record) -> None:
        self._done += 1
        now = time.monotonic()
        if not self._is_quiet and now - self._drawn >= 0.5:
            self._drawn = now
            sys.stderr.write(f"\r{self._done}/{self._total} requests")
            sys.stderr.flush()

    def close(self) -> None:
        if not self._is_quiet:
            sys.stderr.write(f"\r{' ' * 40}\r")


def _json_object(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"--extra-body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise typer.BadParameter("--extra-body must be a JSON object")
    return value


def _numbers(text: str, option: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(0.0 <= value <= 100.0 for value in values):
        raise typer.BadParameter(f"{option} takes numbers from 0 to 100, got {text!r}")
    return values


def _metric_names(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in METRICS and name != "client_queue_time":
            raise typer.BadParameter(f"--percentile-metrics: unknown {name!r}; know {METRICS}")
    return names


def _pairs(items: list[str]) -> dict[str, str]:
    pairs = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals:
            raise typer.BadParameter(f"--metadata takes KEY=VALUE, got {item!r}")
        pairs[key.strip()] = value.strip()
    return pairs


def _range(bounds: tuple[int, int]) -> tuple[int, int]:
    if not 0 <= bounds[0] < bounds[1]:
        raise typer.BadParameter(f"--token-range needs 0 <= lowest < highest, got {bounds}")
    return bounds
