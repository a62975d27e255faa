"""The command line: what it derives from the options, and what a person gets to see."""

from __future__ import annotations

import dataclasses
import json
import logging
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from hotbatch import __version__, cli
from hotbatch.core.errors import ModelLoadError
from hotbatch.options import EngineOptions, ServerOptions, flag_of


class Cli:
    """Runs the command line in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        self._monkeypatch.setattr(sys, "argv", ["hotbatch", *arguments])
        self._monkeypatch.setenv("COLUMNS", "160")
        with pytest.raises(SystemExit) as left:
            cli.main()
        out, err = self._capsys.readouterr()
        assert isinstance(left.value.code, int)
        return left.value.code, out, err


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(monkeypatch, capsys)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineOptions, ServerOptions]]:
    """Replaces loading and serving; holds the options that would have been served."""
    seen: list[tuple[EngineOptions, ServerOptions]] = []

    @contextmanager
    def assembled(options: EngineOptions, console: Any) -> Iterator[EngineOptions]:
        yield options

    def serve_it(assembly: Any, options: ServerOptions, _: Any) -> None:
        seen.append((assembly, options))

    monkeypatch.setattr(cli, "_assembled", assembled)
    monkeypatch.setattr(cli, "_run_server", serve_it)
    return seen


def test_without_arguments_the_defaults_are_those_of_the_options(
    run: Cli, served: list[tuple[EngineOptions, ServerOptions]]
) -> None:
    assert run("serve")[0] == 0
    assert served == [(EngineOptions(), ServerOptions())]


def test_every_kind_of_option_arrives(
    run: Cli, served: list[tuple[EngineOptions, ServerOptions]]
) -> None:
    code, _, err = run(
        *("serve", "some/model", "--threads", "3", "--precision", "bf16"),
        *("--kv-cache-memory-bytes", "2G", "--no-enable-prefix-caching"),
        *("--batching", "static", "--static-batch-size", "4", "--static-batch-timeout", "0.5"),
        *("--port", "0", "--api-key", "a", "--api-key", "b", "--max-body-bytes", "1M"),
    )
    assert (code, err) == (0, "")
    [(engine, server)] = served
    assert engine == EngineOptions(
        model="some/model",
        threads=3,
        precision="bf16",
        kv_cache_memory_bytes=2 * 2**30,
        enable_prefix_caching=False,
        batching="static",
        static_batch_size=4,
        static_batch_timeout=0.5,
    )
    assert server == ServerOptions(port=0, api_key=("a", "b"), max_body_bytes=2**20)


def test_keys_from_the_environment(
    run: Cli,
    served: list[tuple[EngineOptions, ServerOptions]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOTBATCH_API_KEY", "one two")
    run("serve")
    assert served[0][1].api_key == ("one", "two")


def test_help_lists_every_option(run: Cli) -> None:
    code, out, _ = run("serve", "--help")
    assert code == 0
    for kind in (EngineOptions, ServerOptions):
        for item in dataclasses.fields(kind):
            assert item.name == "model" or flag_of(item.name) in out
    assert "[MODEL]" in out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["serve", "--port", "70000"], "--port"),
        (["serve", "--port", "x"], "--port"),
        (["serve", "--threads", "0"], "--threads"),
        (["serve", "--precision", "fp4"], "--precision"),
        (["serve", "--kv-cache-memory-bytes", "lots"], "--kv-cache-memory-bytes"),
        (["serve", "--static-batch-size", "4"], "--static-batch-size"),
        (["serve", "--chat-template", "/nowhere.jinja"], "--chat-template"),
        (["serve", "--no-such-option"], "--no-such-option"),
        (["serve", "one", "two"], "two"),
        (["generate"], "PROMPT"),
        (["generate", "--max-tokens", "0", "Hi"], "--max-tokens"),
        (["chat", "--url", "http://127.0.0.1:1", "--temperature", "-1"], "--temperature"),
        (["tune", "--plot", "/nowhere/frontier.png"], "/nowhere"),
        (["nonsense"], "nonsense"),
    ],
)
def test_bad_arguments_end_in_one_line(run: Cli, arguments: list[str], named: str) -> None:
    code, out, err = run(*arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("hotbatch: error: ")
    assert named in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "module", "looked_for_by"),
    [
        (["bench", "serve"], "aiohttp", "bench.cli"),
        (["bench", "serve", "--plot-dir", "plots"], "matplotlib", "bench.cli"),
        (["bench", "demo"], "matplotlib", "bench.cli"),
        (["tune", "--plot", "frontier.png"], "matplotlib", "tuning.report"),
    ],
)
def test_what_an_extra_would_install_is_named_before_anything_is_measured(
    run: Cli,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    module: str,
    looked_for_by: str,
) -> None:
    def find(name: str) -> object:
        return None if name == module else object()

    monkeypatch.setattr(f"hotbatch.{looked_for_by}.find_spec", find)
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert module in err
    assert "pip install 'hotbatch[bench]'" in err
    assert err.count("\n") == 1


def test_other_faults_end_in_one_line_too(run: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ModelLoadError("No such\nmodel.")

    monkeypatch.setattr(cli, "_assembled", fail)
    assert run("serve") == (1, "", "hotbatch: error: No such model.\n")


def test_ctrl_c_is_no_traceback(run: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_assembled", interrupt)
    code, _, err = run("serve")
    assert code == 130
    assert "Traceback" not in err


def test_version(run: Cli) -> None:
    assert run("version") == (0, f"{__version__}\n", "")


def test_without_a_command_there_is_help(run: Cli) -> None:
    code, out, err = run()
    assert code == 2
    assert all(name in out for name in ("serve", "chat", "generate", "bench", "version"))
    assert err == ""


# ---- for real, in processes of their own

TINY = ("--load-format", "dummy", "--threads", "1", "--kv-cache-memory-bytes", "1M")


def hotbatch(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "hotbatch.cli", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


@pytest.fixture
def server() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server of a made-up model, and its address."""
    process = hotbatch("serve", "tiny", *TINY, "--port", "0", "--served-model-name", "toy")
    with process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if line.startswith("Serving on "):
                    break
            else:
                pytest.fail(f"the server ended with {process.wait()} before it was ready")
            yield process, line.split()[2]
        finally:
            process.kill()


def test_serve_says_when_it_is_ready_answers_and_leaves_in_order(
    server: tuple[subprocess.Popen[str], str],
) -> None:
    process, url = server
    body = {"model": "toy", "prompt": "Hi", "max_tokens": 3, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=30).json()
    assert answer["usage"]["completion_tokens"] == 3
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    assert "leaked" not in err  # the native module's word for a model that was not freed


def test_a_taken_port_is_named(server: tuple[subprocess.Popen[str], str]) -> None:
    port = server[1].rpartition(":")[2]
    with hotbatch("serve", "tiny", *TINY, "--port", port) as second:
        _, err = second.communicate(timeout=60)
    assert second.returncode == 2
    assert err.splitlines()[-1].startswith(f"hotbatch: error: --port {port}")


def test_chat_with_a_server(server: tuple[subprocess.Popen[str], str]) -> None:
    with hotbatch("chat", "--url", server[1], "--max-tokens", "4", "--temperature", "0") as talk:
        out, err = talk.communicate("Hello\n/exit\n", timeout=60)
    assert talk.returncode == 0, err
    assert out.startswith("toy.")
    assert "4 tokens" in out


def test_generate_prints_an_answer_a_prompt() -> None:
    command = ["generate", "--model", "tiny", *TINY, "--max-tokens", "4", "--temperature", "0"]
    with hotbatch(*command, "--json", "one", "two") as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    answers = [json.loads(line) for line in out.splitlines()]
    assert [answer["prompt"] for answer in answers] == ["one", "two"]
    assert [answer["completion_tokens"] for answer in answers] == [4, 4]


@pytest.mark.parametrize(
    ("settings", "tuned", "said"),
    [
        ({"max_num_seqs": 48}, {"max_num_seqs": 48}, "As tuned for chat: --max-num-seqs 48"),
        ({}, {}, "As tuned for chat: the defaults are best"),
        ({"max_num_seqs": 48}, {}, ""),  # the caller's own
    ],
)
def test_what_was_tuned_is_said_at_the_start(
    settings: dict[str, int],
    tuned: dict[str, int],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assembly = SimpleNamespace(
        name="m",
        info=SimpleNamespace(num_blocks=2, block_size=16, description="int8", context_len=32),
        tuned=tuned,
        known=SimpleNamespace(profile=SimpleNamespace(tuned_for="chat", settings=settings)),
    )
    cli._announce(cli._stderr_console(), assembly, "http://here", 0.0)  # type: ignore[arg-type]
    heard = capsys.readouterr().err
    assert said in heard and ("tuned" in heard) == bool(said)


def test_what_others_say_at_each_request_is_not_in_the_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loggers = {name: logging.getLogger(name) for name in ("uvicorn", "httpx")}
    for logger in loggers.values():
        monkeypatch.setattr(logger, "level", logging.NOTSET)
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    cli._set_up_logging("debug")
    assert {logger.level for logger in loggers.values()} == {logging.NOTSET}
    cli._set_up_logging("info")
    assert {logger.level for logger in loggers.values()} == {logging.WARNING}
