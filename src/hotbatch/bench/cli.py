"""`hotbatch bench serve`: the load generator's command line, named as vLLM's where it can be."""

from __future__ import annotations

import asyncio
import enum
import json
import math
import sys
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from hotbatch.bench.arguments import (
    parse_classes,
    parse_goodput,
    parse_json_object,
    parse_metrics,
    parse_pairs,
    parse_percentiles,
    parse_phases,
    parse_tenants,
    parse_token_range,
)
from hotbatch.bench.client import Target
from hotbatch.bench.load import run_load
from hotbatch.bench.report import DETAILS, METRICS, banner, summarize
from hotbatch.bench.session import Measured, NotReadyError, Work, measure, wait_until_ready
from hotbatch.bench.source import Dataset, Source, gamma_shape, read_rows
from hotbatch.bench.workload import BenchRequest, RandomLengths

app = typer.Typer(
    help="Measure a server under load.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class PromptKind(enum.Enum):
    TOKENS = "tokens"
    TEXT = "text"


_LOAD, _TRACE, _WHO, _REPORT = "Load", "Traces and conversations", "Classes and tenants", "Report"


def _need(*modules: str) -> None:
    """Ends the command before anything is measured if a module is not installed."""
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise typer.BadParameter(
            f"the load generator needs {' and '.join(missing)}: pip install 'hotbatch[bench]'"
        )


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
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", help="Bearer key.")
    ] = None,
    extra_body: Annotated[
        str | None, typer.Option(help="JSON object added to each request's body.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Generate to the full length.")] = True,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature.")] = 0.0,
    dataset_name: Annotated[
        Dataset, typer.Option(help="Kind of workload.", rich_help_panel=_LOAD)
    ] = Dataset.RANDOM,
    num_prompts: Annotated[
        int,
        typer.Option(min=1, help="Requests (or conversations) to send.", rich_help_panel=_LOAD),
    ] = 100,
    random_input_len: Annotated[
        int, typer.Option(min=1, help="Mean prompt tokens.", rich_help_panel=_LOAD)
    ] = 128,
    random_output_len: Annotated[
        int, typer.Option(min=1, help="Mean output tokens.", rich_help_panel=_LOAD)
    ] = 128,
    random_range_ratio: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Lengths vary by +- this share of the mean.",
            rich_help_panel=_LOAD,
        ),
    ] = 0.0,
    random_prefix_len: Annotated[
        int,
        typer.Option(
            min=0, help="Tokens before the prompt that all requests share.", rich_help_panel=_LOAD
        ),
    ] = 0,
    prompt_kind: Annotated[
        PromptKind | None,
        typer.Option(
            help="Token ids (default) or text (needed, and default, for chat).",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    token_range: Annotated[
        tuple[int, int],
        typer.Option(
            help="Random token ids: lowest, and one past the highest.", rich_help_panel=_LOAD
        ),
    ] = (1000, 20000),
    request_rate: Annotated[
        list[float] | None,
        typer.Option(
            help="Requests per second (open loop); inf, the default, sends all at once. Given "
            "several times, one run each.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    burstiness: Annotated[
        float,
        typer.Option(
            help="Shape of the Gamma-distributed gaps; 1 is a Poisson process.",
            rich_help_panel=_LOAD,
        ),
    ] = 1.0,
    arrival_cv: Annotated[
        float | None,
        typer.Option(
            help="The same as a coefficient of variation of the gaps: 1 is Poisson, 2 is bursty.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    max_concurrency: Annotated[
        int | None,
        typer.Option(
            min=1, help="At most so many requests under way (closed loop).", rich_help_panel=_LOAD
        ),
    ] = None,
    burst: Annotated[
        str | None,
        typer.Option(
            help="Clients over time, each with one request at a time: 5-100-5.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    burst_seconds: Annotated[
        str, typer.Option(help="How long each phase lasts: 10-20-10.", rich_help_panel=_LOAD)
    ] = "10",
    seed: Annotated[
        int, typer.Option(help="Seed of all that is random.", rich_help_panel=_LOAD)
    ] = 0,
    dataset_path: Annotated[
        Path | None,
        typer.Option(help="The trace: Azure's CSV or Mooncake's JSONL.", rich_help_panel=_TRACE),
    ] = None,
    trace_start: Annotated[
        int, typer.Option(min=0, help="Number of its first request.", rich_help_panel=_TRACE)
    ] = 0,
    time_scale: Annotated[
        float,
        typer.Option(
            help="Its gaps times this; --request-rate stretches them to a rate instead.",
            rich_help_panel=_TRACE,
        ),
    ] = 1.0,
    input_scale: Annotated[
        float, typer.Option(help="Its prompt lengths times this.", rich_help_panel=_TRACE)
    ] = 1.0,
    output_scale: Annotated[
        float, typer.Option(help="Its output lengths times this.", rich_help_panel=_TRACE)
    ] = 1.0,
    max_total_len: Annotated[
        int | None,
        typer.Option(min=2, help="Cut prompts to fit this many tokens.", rich_help_panel=_TRACE),
    ] = None,
    turns: Annotated[
        int, typer.Option(min=1, help="Mean turns of a conversation.", rich_help_panel=_TRACE)
    ] = 4,
    think_seconds: Annotated[
        float,
        typer.Option(min=0.0, help="Mean pause before the next turn.", rich_help_panel=_TRACE),
    ] = 1.0,
    class_mix: Annotated[
        str | None,
        typer.Option(
            help="Shares of classes, sent as service_tier: interactive=0.3,batch=0.7.",
            rich_help_panel=_WHO,
        ),
    ] = None,
    class_slo: Annotated[
        list[str] | None,
        typer.Option(
            help="Limits of a class: interactive=ttft:500,tpot:50 (ms).", rich_help_panel=_WHO
        ),
    ] = None,
    send_slo: Annotated[
        bool, typer.Option(help="Send a class's limits as `slo`, too.", rich_help_panel=_WHO)
    ] = True,
    tenant_mix: Annotated[
        str | None,
        typer.Option(help="Shares of tenants, sent as user: a=10,b=1.", rich_help_panel=_WHO),
    ] = None,
    tenant_key: Annotated[
        list[str] | None,
        typer.Option(help="A tenant's API key instead: a=KEY.", rich_help_panel=_WHO),
    ] = None,
    num_warmups: Annotated[
        int, typer.Option("--num-warmups", "--warmup", min=0, help="Requests before the run.")
    ] = 0,
    ready_check_timeout_sec: Annotated[
        float, typer.Option(min=0.0, help="Wait so long for the server's first answer.")
    ] = 60.0,
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            help="A limit such as ttft:500 (ms) for goodput; ttft, tpot or e2el.",
            rich_help_panel=_REPORT,
        ),
    ] = None,
    percentile_metrics: Annotated[
        str, typer.Option(help="Which figures the banner shows.", rich_help_panel=_REPORT)
    ] = ",".join(METRICS),
    metric_percentiles: Annotated[
        str, typer.Option(help="Percentiles to report.", rich_help_panel=_REPORT)
    ] = "90,99",
    plot_dir: Annotated[
        Path | None, typer.Option(help="Draw plots into this folder.", rich_help_panel=_REPORT)
    ] = None,
    save_result: Annotated[
        bool, typer.Option(help="Write a JSON file.", rich_help_panel=_REPORT)
    ] = False,
    save_detailed: Annotated[
        bool, typer.Option(help="With each request's figures.", rich_help_panel=_REPORT)
    ] = False,
    result_dir: Annotated[
        Path, typer.Option(help="Folder of the JSON file.", rich_help_panel=_REPORT)
    ] = Path("."),
    result_filename: Annotated[
        str | None, typer.Option(help="Name of the JSON file.", rich_help_panel=_REPORT)
    ] = None,
    metadata: Annotated[
        list[str] | None,
        typer.Option(help="KEY=VALUE, kept in the JSON file.", rich_help_panel=_REPORT),
    ] = None,
    disable_tqdm: Annotated[bool, typer.Option(help="No progress line.")] = False,
) -> None:
    """Send requests to an OpenAI-compatible server and report what they met."""
    _need("aiohttp", *(["matplotlib"] if plot_dir is not None else []))
    is_chat = endpoint.rstrip("/").endswith("/chat/completions")
    kind = prompt_kind or (PromptKind.TEXT if is_chat else PromptKind.TOKENS)
    if is_chat and kind is PromptKind.TOKENS:
        raise typer.BadParameter("the chat endpoint takes text; use --prompt-kind text")
    rates = request_rate or [math.inf]
    if len(rates) > 1 and burst is not None:
        raise typer.BadParameter("--burst has no rate; give --request-rate once or not at all")
    source = Source(
        dataset=dataset_name,
        trace=read_rows(dataset_name, dataset_path, trace_start, num_prompts, time_scale,
                     input_scale, output_scale, max_total_len),
        num_prompts=num_prompts,
        input_len=RandomLengths(random_input_len, random_range_ratio),
        output_len=RandomLengths(random_output_len, random_range_ratio),
        prefix_len=random_prefix_len,
        as_text=kind is PromptKind.TEXT,
        token_range=parse_token_range(token_range),
        burstiness=burstiness if arrival_cv is None else gamma_shape(arrival_cv),
        max_concurrency=max_concurrency,
        phases=parse_phases(burst, burst_seconds),
        turns=turns,
        think=think_seconds,
        classes=parse_classes(class_mix, class_slo or [], send_slo=send_slo),
        tenants=parse_tenants(tenant_mix, tenant_key or []),
        seed=seed,
    )  # fmt: skip
    limits = parse_goodput(goodput or [])
    percentiles = parse_percentiles(metric_percentiles)
    metrics = parse_metrics(percentile_metrics)
    notes = parse_pairs(metadata or [], "--metadata")
    try:
        works = [source.work(rate) for rate in rates]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    target = Target(
        base_url=base_url,
        model=model or "",
        endpoint=endpoint,
        api_key=api_key,
        ignore_eos=ignore_eos,
        extra_body={"temperature": temperature, **parse_json_object(extra_body)},
    )
    is_quiet = disable_tqdm or not sys.stderr.isatty()
    try:
        target, results = asyncio.run(
            _measure_all(
                target,
                source.trial(),
                works,
                num_warmups=num_warmups,
                patience=ready_check_timeout_sec,
                with_samples=plot_dir is not None,
                is_quiet=is_quiet,
            )
        )
    except NotReadyError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None

    now = datetime.now().strftime("%Y%m%d-%H%M%S")
    every = []
    for rate, result in zip(rates, results, strict=True):
        figures = summarize(result.load, percentiles=percentiles, goodput=limits)
        every.append(figures)
        typer.echo(
            banner(
                figures,
                metrics=metrics,
                percentiles=percentiles,
                max_concurrency=max_concurrency,
                request_rate=rate,
            )
        )
        if save_result or result_filename:
            name = result_filename or f"openai-{rate}qps-{Path(target.model).name}-{now}.json"
            if result_filename and len(rates) > 1:
                name = f"{Path(name).stem}-{rate:g}qps{Path(name).suffix}"
            settings = {
                "date": now,
                "backend": "openai",
                "endpoint_type": "openai-chat" if is_chat else "openai",
                "model_id": target.model,
                "num_prompts": num_prompts,
                "dataset_name": dataset_name.value,
                "dataset_path": None if dataset_path is None else str(dataset_path),
                "request_rate": rate if math.isfinite(rate) else "inf",
                "burstiness": source.burstiness,
                "max_concurrency": max_concurrency,
                "burst": burst,
                "random_input_len": random_input_len,
                "random_output_len": random_output_len,
                "random_range_ratio": random_range_ratio,
                "random_prefix_len": random_prefix_len,
                "class_mix": class_mix,
                "class_slo": class_slo,
                "tenant_mix": tenant_mix,
                "seed": seed,
                **notes,
            }
            save(result_dir / name, settings, figures, with_details=save_detailed)
            typer.echo(f"saved to {result_dir / name}")
    if plot_dir is not None:
        _plot(rates, every, results, plot_dir)
    if any(figures["completed"] == 0 for figures in every):
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
    _need("aiohttp", "matplotlib")
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


async def _measure_all(
    target: Target,
    trial: BenchRequest,
    works: list[Work],
    *,
    num_warmups: int,
    patience: float,
    with_samples: bool,
    is_quiet: bool,
) -> tuple[Target, list[Measured]]:
    target = await wait_until_ready(target, trial, patience)
    if num_warmups:
        await run_load(target, [trial] * num_warmups, max_concurrency=works[0].max_concurrency)
    results = [
        await measure(target, work, with_samples=with_samples, is_quiet=is_quiet) for work in works
    ]
    return target, results


def _plot(
    rates: list[float], every: list[dict[str, Any]], results: list[Measured], folder: Path
) -> None:
    """Curves over the rates, and each run's own plots; of a sweep in a folder a rate."""
    from hotbatch.bench.plots import RatePoint, plot_run, plot_sweep

    paths = []
    if len(rates) > 1:
        points = [RatePoint(rate, figures) for rate, figures in zip(rates, every, strict=True)]
        paths += plot_sweep(points, folder)
    for rate, result in zip(rates, results, strict=True):
        own = folder / f"{rate:g}qps" if len(rates) > 1 else folder
        paths += plot_run(result.load, result.samples, own)
    for path in paths:
        typer.echo(f"plot: {path}")
