"""The command line: arguments become options, parts are joined, and a person is told.

The options of a command are the fields of the classes in options.py: `_command` replaces a
parameter annotated with such a class by one option a field. Everything heavy is imported
inside the command that needs it, so `hotbatch --help` answers at once.

Every fault of the caller ends in one line on stderr that names the option, and exit code 2
for options or 1 for everything else; a traceback means a bug of ours.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import GenericAlias
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from hotbatch import __version__
from hotbatch.core.errors import HotbatchError, OptionError
from hotbatch.models.embedded import EMBEDDED_MODEL_NAME
from hotbatch.options import EngineOptions, SamplingOptions, ServerOptions, flag_of

if TYPE_CHECKING:
    from rich.console import Console

    from hotbatch.assembly import Assembly

app = typer.Typer(
    help="Serve language models with dynamic batching.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Entry point of the `hotbatch` command."""
    try:
        code = app(standalone_mode=False)
    except typer.TyperException as error:
        _complain(error.format_message())
        raise SystemExit(error.exit_code) from None
    except HotbatchError as error:
        _complain(error.message)
        raise SystemExit(2 if isinstance(error, OptionError) else 1) from None
    except (typer.Abort, KeyboardInterrupt):
        raise SystemExit(130) from None
    except BrokenPipeError:  # the reader of our output has left
        sys.stderr.close()
        raise SystemExit(1) from None
    raise SystemExit(code if isinstance(code, int) else 0)


def _complain(message: str) -> None:
    if message:  # a command without arguments has shown its help instead
        print("hotbatch: error: " + " ".join(message.split()), file=sys.stderr)


# ---- options


def _command(function: Callable[..., None]) -> Callable[..., None]:
    """Register a command whose option classes are spread into single options.

    A parameter annotated with a dataclass of options.py becomes one option for each of its
    fields; the other parameters are typer's as they stand. MODEL is positional in `serve`, as
    in other servers, and in `tune`, and an option wherever the arguments are something else.
    """
    signature = inspect.signature(function, eval_str=True)
    declared = {
        parameter.name: parameter.annotation
        for parameter in signature.parameters.values()
        if dataclasses.is_dataclass(parameter.annotation)
    }
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        if parameter.name in declared:
            parameters += _typer_parameters(
                parameter.annotation, model_is_positional=function.__name__ in ("serve", "tune")
            )
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    def run(**arguments: Any) -> None:
        values = {name: _take(kind, arguments) for name, kind in declared.items()}
        function(**values, **arguments)

    run.__name__, run.__doc__ = function.__name__, function.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return app.command()(run)


def _take(kind: Any, arguments: dict[str, Any]) -> Any:
    """Build an option class from its fields' arguments, which are removed."""
    values = {}
    for item in dataclasses.fields(kind):
        value = arguments.pop(item.name)
        values[item.name] = tuple(value) if isinstance(value, list) else value
    return kind(**values)


def _typer_parameters(kind: Any, *, model_is_positional: bool) -> list[inspect.Parameter]:
    hints = get_type_hints(kind)
    parameters = []
    for item in dataclasses.fields(kind):
        hint: Any = hints[item.name]
        default: Any = item.default
        if get_origin(hint) is tuple:  # typer repeats lists only
            hint, default = GenericAlias(list, get_args(hint)[:1]), list(default)
        described: Any
        if item.name == "model" and model_is_positional:
            described = typer.Argument(help=item.metadata["help"], metavar="MODEL")
        else:
            described = _typer_option(item, hint, default)
        parameters.append(
            inspect.Parameter(
                item.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=default,
                annotation=Annotated[hint, described],
            )
        )
    return parameters


def _typer_option(item: dataclasses.Field[Any], hint: Any, default: Any) -> Any:
    facts = item.metadata
    help, metavar = facts["help"], facts["metavar"]
    if get_origin(hint) is Literal:
        # In the help text, for as a metavar they leave no room for the option's name.
        help, metavar = f"{help} ({', '.join(get_args(hint))})", "KIND"
    elif metavar is None:
        metavar = " " if hint is bool else "FILE" if Path in get_args(hint) else "N"
    return typer.Option(
        help=help,
        rich_help_panel=facts["group"],
        envvar=facts["env"],
        metavar=metavar,
        parser=None if facts["parse"] is None else _parser(facts["parse"], metavar),
        show_default=hint is not bool and default not in (None, []) and not facts["secret"],
    )


def _parser(parse: Callable[[str], Any], name: str) -> Callable[[str], Any]:
    """`parse` with its ValueError turned into typer's complaint, which names the option."""

    def read(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    read.__name__ = name
    return read


# ---- what a person sees


def _stderr_console() -> Console:
    """Talk goes to stderr, so that stdout carries answers alone."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


@contextmanager
def _assembled(options: EngineOptions, console: Console) -> Iterator[Assembly]:
    """Load the model behind a progress bar; free it at the end."""
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TaskID,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = [TextColumn("{task.description}"), BarColumn(), DownloadColumn()]
    tasks: dict[str, TaskID] = {}
    bar = Progress(
        *columns,
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
                if not console.is_terminal:
                    console.print(f"{stage} ({total / 1e6:.0f} MB)")
            bar.update(tasks[stage], completed=done, total=total)

        from hotbatch.assembly import assemble

        assembly = assemble(options, report)
    try:
        yield assembly
    finally:
        assembly.close()


def _announce(console: Console, assembly: Assembly, url: str, started: float) -> None:
    """The line that says it is ready, and with what."""
    from rich.markup import escape

    info = assembly.info
    tokens = info.num_blocks * info.block_size
    facts = [
        f"[bold]{escape(assembly.name)}[/bold]: {info.description or info.precision}",
        f"{info.num_blocks} KV blocks for {tokens} tokens",
        f"context {info.context_len}",
        f"ready in {time.perf_counter() - started:.1f} s",
    ]
    console.print("; ".join(facts), soft_wrap=True)
    profile = assembly.known.profile
    if profile.tuned_for and (assembly.tuned or not profile.settings):
        tuned = [f"{flag_of(name)} {value}" for name, value in assembly.tuned.items()]
        words = ", ".join(tuned) or "the defaults are best"
        console.print(f"As tuned for {escape(profile.tuned_for)}: {words}", soft_wrap=True)
    console.print(f"Serving on [bold]{url}[/bold] (Ctrl-C to stop)", soft_wrap=True)


# ---- commands


@_command
def serve(engine: EngineOptions, server: ServerOptions) -> None:
    """Serve a model on an OpenAI-compatible address."""
    started = time.perf_counter()
    console = _stderr_console()
    _set_up_logging(server.log_level)
    with _assembled(engine, console) as assembly:
        _run_server(assembly, server, lambda url: _announce(console, assembly, url, started))


@_command
def generate(
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT...", help="What to answer.")],
    engine: EngineOptions,
    sampling: SamplingOptions,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the texts, without the chat template.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a prompt.")] = False,
) -> None:
    """Answer prompts in this process, all in one batch, and leave."""
    with _assembled(engine, _stderr_console()) as assembly:
        from hotbatch.llm import LLM

        llm = LLM.from_parts(
            assembly.engine,
            assembly.tokenizer,
            chat_template=assembly.chat_template,
            eos_token_ids=assembly.eos_token_ids,
            seed=engine.seed,
        )
        if raw or assembly.chat_template is None:
            outputs = llm.generate(prompts, sampling.params(), use_tqdm=False)
        else:
            conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
            outputs = llm.chat(conversations, sampling.params(), use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        completion = output.outputs[0]
        if as_json:
            facts = {
                "prompt": prompt,
                "text": completion.text,
                "finish_reason": completion.finish_reason,
                "prompt_tokens": len(output.prompt_token_ids),
                "completion_tokens": len(completion.token_ids),
            }
            print(json.dumps(facts, ensure_ascii=False))
        else:
            print(completion.text)


@_command
def chat(
    engine: EngineOptions,
    sampling: SamplingOptions,
    url: Annotated[
        str | None,
        typer.Option(help="Talk to the server at this address instead of loading a model."),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="HOTBATCH_API_KEY", help="Key for that server.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
) -> None:
    """Talk to a model in the terminal."""
    from rich.console import Console

    from hotbatch.chat import Conversation, LocalModel, RemoteModel, run_chat

    conversation = Conversation(sampling.params(), system)
    console = Console(highlight=False)
    if url is not None:
        named = None if engine.model == EMBEDDED_MODEL_NAME else engine.model
        with closing(RemoteModel(url, named, api_key)) as remote:
            run_chat(remote, conversation, console)
        return
    with _assembled(engine, _stderr_console()) as assembly:
        run_chat(LocalModel(assembly), conversation, console)


@app.command()
def top(
    url: Annotated[str, typer.Argument(metavar="[URL]", help="The server.")] = (
        "http://127.0.0.1:8000"
    ),
    api_key: Annotated[
        str | None, typer.Option(envvar="HOTBATCH_API_KEY", help="Key for that server.")
    ] = None,
) -> None:
    """Watch a server's batch in the terminal; the page at the server's address shows more."""
    from rich.console import Console

    from hotbatch.dashboard.stream import LiveError
    from hotbatch.dashboard.terminal import run_top

    try:
        run_top(url, api_key, Console(highlight=False))
    except LiveError as error:
        _complain(str(error))
        raise typer.Exit(1) from None


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def bench(context: typer.Context) -> None:
    """Measure a server under load; see hotbatch bench --help."""
    from hotbatch.bench.cli import app as bench_app  # loads numpy

    code = bench_app(context.args, prog_name="hotbatch bench", standalone_mode=False)
    if isinstance(code, int) and code:
        raise typer.Exit(code)


@_command
def tune(
    engine: EngineOptions,
    workload: Annotated[
        str,
        typer.Option(help="chat, documents, bursts, or a trace: Azure's CSV, Mooncake's JSONL."),
    ] = "chat",
    confirm: Annotated[bool, typer.Option(help="Try the best settings on the real engine.")] = True,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw all settings into this image.")
    ] = None,
) -> None:
    """Measure this machine, find the settings that serve most requests within the targets of
    the standard class (--ttft-slo, --tpot-slo), and keep them for serve."""
    from hotbatch import tune as tuning
    from hotbatch.tuning.report import check_plot

    if plot is not None:
        check_plot(plot)
    console = _stderr_console()
    outcome = tuning.tune(
        engine,
        workload,
        with_engine=confirm,
        say=lambda text: console.print(text, markup=False, soft_wrap=True),
    )
    print(tuning.table(outcome))
    if plot is not None:
        tuning.plot(outcome, plot)
    if outcome.path is not None:
        console.print(f"Kept in {outcome.path}; serve uses it.", markup=False, soft_wrap=True)
        if engine.ttft_slo is not None or engine.tpot_slo is not None:
            console.print("Give serve the same --ttft-slo and --tpot-slo.")


@app.command()
def doctor(
    url: Annotated[str, typer.Argument(metavar="URL", help="The server to look at.")] = (
        "http://127.0.0.1:8000"
    ),
    seconds: Annotated[float, typer.Option(help="How long to watch.", min=0.5)] = 10.0,
    load: Annotated[
        int, typer.Option(help="Clients of our own that send requests meanwhile.", min=0)
    ] = 0,
    bandwidth: Annotated[
        float | None,
        typer.Option(help="Of servers that do not know it: the machine's measured GB/s."),
    ] = None,
    weight_bytes: Annotated[
        str | None,
        typer.Option(help="Of servers that do not know it: the model's weights, such as 16G."),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="HOTBATCH_API_KEY", help="Key for that server.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Watch a running server (hotbatch, vLLM, SGLang) and say what holds it back."""
    from hotbatch.doctor import judge, make_window
    from hotbatch.doctor.report import as_json as to_json
    from hotbatch.doctor.report import as_text
    from hotbatch.doctor.watch import watch
    from hotbatch.options import parse_bytes

    with _stderr_console().status("") as status:
        scrapes = watch(
            url,
            seconds,
            api_key=api_key,
            num_clients=load,
            on_scrape=lambda left: status.update(f"Watching {url}: {left:.0f} s left"),
        )
    try:
        size = None if weight_bytes is None else float(parse_bytes(weight_bytes))
    except ValueError as error:
        raise OptionError(f"--weight-bytes: {error}.", param="--weight-bytes") from error
    window = make_window(
        scrapes, bandwidth=None if bandwidth is None else bandwidth * 1e9, weight_bytes=size
    )
    verdict = judge(window)
    print(to_json(verdict, window) if as_json else as_text(verdict, window))


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


def _run_server(
    assembly: Assembly, options: ServerOptions, on_ready: Callable[[str], None]
) -> None:
    from hotbatch.server.run import run_server

    run_server(assembly, options, on_ready)


def _set_up_logging(level: str) -> None:
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    if level == "info":  # that it has started and stopped is said by us, and each trace by nobody
        for name in ("uvicorn", "httpx"):
            logging.getLogger(name).setLevel(logging.WARNING)


if __name__ == "__main__":
    main()
