"""The command line: arguments become options, the parts are joined, and a person is told.

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
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import GenericAlias
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from hotbatch.core.errors import HotbatchError, OptionError
from hotbatch.options import EngineOptions, ServerOptions

if TYPE_CHECKING:
    from rich.console import Console

    from hotbatch.assembly import Assembly, Report

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
    in other servers, and an option wherever the arguments are something else.
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
                parameter.annotation, model_is_positional=function.__name__ == "serve"
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
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=total)
                if not console.is_terminal:
                    console.print(f"{stage} ({total / 1e6:.0f} MB)")
            progress.update(tasks[stage], completed=done, total=total)

        from hotbatch.assembly import assemble

        assembly = assemble(options, report)
    try:
        yield assembly
    finally:
        assembly.close()


def _announce(console: Console, assembly: Assembly, url: str, started: float) -> None:
    """The line that says it is ready, and with what."""
    info = assembly.info
    tokens = info.num_blocks * info.block_size
    facts = [
        f"[bold]{assembly.name}[/bold] in {info.precision} on {info.device}",
        f"KV cache {info.num_blocks} blocks, {tokens} tokens",
        f"context {info.max_model_len}",
        *([info.description] if info.description else []),
        f"ready in {time.perf_counter() - started:.1f} s",
    ]
    console.print("; ".join(facts), soft_wrap=True)
    console.print(f"Serving on [bold]{url}[/bold] (Ctrl-C to stop)", soft_wrap=True)


# ---- commands


@_command
def serve(engine: EngineOptions, server: ServerOptions) -> None:
    """Serve a model on an OpenAI-compatible address."""
    from hotbatch.server.run import run_server

    started = time.perf_counter()
    console = _stderr_console()
    with _assembled(engine, console) as assembly:
        run_server(
            assembly,
            server,
            on_ready=lambda url: _announce(console, assembly, url, started),
        )


@_command
def generate(
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT...", help="Texts to continue.")],
    engine: EngineOptions,
    chat: Annotated[
        bool, typer.Option("--chat/--raw", help="Put prompts through the chat template, or not.")
    ] = True,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of each answer.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample among the likeliest of this mass.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a prompt.")] = False,
) -> None:
    """Answer prompts in this process, all in one batch, and leave."""


@app.command()
def version() -> None:
    """Print the version."""
    from hotbatch import __version__

    print(__version__)


if __name__ == "__main__":
    main()
