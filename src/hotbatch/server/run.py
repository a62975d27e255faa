"""From a service to a process that serves: socket, signals, and a shutdown in order.

On the first SIGTERM or SIGINT new requests are refused with 503 while running ones get the
grace period to finish; what is left then is cut. A second signal cuts at once. Either way the
process ends by returning 0 from here.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import uvicorn

from hotbatch.core.admission import QueueLimits
from hotbatch.core.errors import InvalidRequestError, OptionError
from hotbatch.core.service_class import LatencyTargets, ServiceClass
from hotbatch.engine.engine import Engine
from hotbatch.server.account_metrics import ReadDevice
from hotbatch.server.app import create_app
from hotbatch.server.service import Service, ServiceConfig
from hotbatch.server.tracing import RequestTracer
from hotbatch.text import ChatTemplate, Tokenizer

logger = logging.getLogger(__name__)

# Longer than HTTP clients keep idle connections (aiohttp 15 s, httpx 5 s, proxies up to a minute):
# whoever closes first must be the client, or its next request meets a closing connection.
_KEEP_ALIVE_SECONDS = 75
_BACKLOG = 2048
# After the engine has stopped, all that is left is to write out the last chunks; a client that
# does not read them gets this long.
_FLUSH_SECONDS = 2
# The engine's thread wants the interpreter back as soon as a step's native code is done;
# Python's default lets another thread keep it for 5 ms, as long as a whole step.
_SWITCH_INTERVAL = 0.0005


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Where to listen (port 0 takes a free one) and how long running requests get at
    shutdown, in seconds."""

    host: str = "127.0.0.1"
    port: int = 8000
    shutdown_grace: float = 10.0
    log_level: str = "info"


class ServedModel(Protocol):
    """A loaded model behind an engine that has not been started."""

    @property
    def name(self) -> str: ...
    @property
    def engine(self) -> Engine: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def chat_template(self) -> ChatTemplate | None: ...
    @property
    def eos_token_ids(self) -> frozenset[int]: ...
    @property
    def generation_defaults(self) -> Mapping[str, float]: ...
    @property
    def queue_ttl(self) -> float | None: ...
    @property
    def read_device(self) -> ReadDevice: ...
    @property
    def promised(self) -> Mapping[ServiceClass, LatencyTargets]: ...


class ServerSettings(Protocol):
    """The command line's options, as far as they concern the server."""

    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def served_model_name(self) -> tuple[str, ...]: ...
    @property
    def api_key(self) -> tuple[str, ...]: ...
    @property
    def shutdown_grace(self) -> float: ...
    @property
    def max_body_bytes(self) -> int: ...
    @property
    def max_queue_requests(self) -> int | None: ...
    @property
    def max_queue_tokens(self) -> int | None: ...
    @property
    def max_queue_wait(self) -> float | None: ...
    @property
    def splice_answers(self) -> bool: ...
    @property
    def log_level(self) -> str: ...
    @property
    def otlp_traces_endpoint(self) -> str | None: ...


def run_server(
    model: ServedModel, settings: ServerSettings, on_ready: Callable[[str], None] | None = None
) -> int:
    """Serves a model until a signal ends it; 0 if all went well.

    `on_ready` hears the address once requests are taken.

    Raises:
        OptionError: the address cannot be listened on, or that of the traces is none; `param`
            names the option.
    """
    service = Service(
        model.engine,
        model.tokenizer,
        ServiceConfig(
            served_names=settings.served_model_name or (model.name,),
            api_keys=settings.api_key,
            max_body_bytes=settings.max_body_bytes,
            generation_defaults=model.generation_defaults,
            limits=QueueLimits(
                max_requests=settings.max_queue_requests,
                max_tokens=settings.max_queue_tokens,
                max_wait=settings.max_queue_wait,
                time_to_live=model.queue_ttl,
            ),
            promised=model.promised,
            splice_answers=settings.splice_answers,
        ),
        chat_template=model.chat_template,
        eos_token_ids=model.eos_token_ids,
        read_device=model.read_device,
    )
    config = ServerConfig(
        host=settings.host,
        port=settings.port,
        shutdown_grace=settings.shutdown_grace,
        log_level=settings.log_level,
    )
    with _traced(service, settings.otlp_traces_endpoint):
        return serve(config, service, on_ready)


@contextlib.contextmanager
def _traced(service: Service, endpoint: str | None) -> Iterator[None]:
    """Sends a trace of each request while the server runs, if there is somebody to send to."""
    if endpoint is None:
        yield
        return
    engine = service.engine
    try:
        tracer = RequestTracer(endpoint, service.model_name, engine.now)
    except InvalidRequestError as error:
        flag = "--otlp-traces-endpoint"
        raise OptionError(f"{flag}: {error.message}", param=flag) from error
    engine.engine.request_observers.append(tracer.on_request)
    try:
        yield
    finally:
        tracer.close()


def serve(
    config: ServerConfig, service: Service, on_ready: Callable[[str], None] | None = None
) -> int:
    """Serves a service until a signal ends it; starts and stops its engine. See `run_server`."""
    listener = listen(config.host, config.port)
    with listener, _switch_interval(), asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_serve(config, service, listener, on_ready))


def listen(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        OptionError: the port is taken, may not be used, or the host is not of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise OptionError(f"--host {host}: {error.strerror or error}.", param="--host") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise _refused_address(host, port, error) from error
    listener.setblocking(False)
    return listener


def _refused_address(host: str, port: int, error: OSError) -> OptionError:
    if error.errno == errno.EADDRINUSE:
        return OptionError(
            f"--port {port} on {host} is in use by another process; stop it, choose another "
            "port, or 0 for any free one.",
            param="--port",
        )
    if error.errno == errno.EACCES:
        return OptionError(
            f"--port {port} may not be used by this user; choose one from 1024 up.",
            param="--port",
        )
    return OptionError(f"Cannot listen on {host}:{port}: {error.strerror}.", param="--host")


def address_of(listener: socket.socket) -> str:
    """The address as a URL, with the port that was really taken."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:  # not there on every platform
        return asyncio.new_event_loop
    return uvloop.new_event_loop


@contextlib.contextmanager
def _switch_interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_INTERVAL)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


class _Uvicorn(uvicorn.Server):
    """uvicorn, with the signals left to us: it would raise them again after its shutdown, and
    the process would not end with 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(
    config: ServerConfig,
    service: Service,
    listener: socket.socket,
    on_ready: Callable[[str], None] | None,
) -> int:
    server = _Uvicorn(
        uvicorn.Config(
            create_app(service),
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=_FLUSH_SECONDS,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            backlog=_BACKLOG,
        )
    )
    service.engine.start()
    stopping = _watch_signals(service)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await _until_started(server, serving)
        gc.collect()
        gc.freeze()  # what start-up left lives to the end; no collection need look at it again
        if on_ready is not None:
            on_ready(address_of(listener))
        await _signal_or_end(stopping, serving)
        await _drain(config, service, stopping)
    finally:
        server.should_exit = True
        service.is_accepting = False
        await service.engine.stop(0.0)
        service.close()
        gc.unfreeze()  # so that the model is freed in order, and not with the interpreter
    await serving
    return 0


class _Stopping:
    """Counts the signals to stop."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    def signal(self, name: str) -> None:
        if self.first.is_set():
            logger.info("%s again: cutting what still runs", name)
            self.second.set()
        else:
            logger.info("%s: taking no more requests, finishing those that run", name)
            self.first.set()


def _watch_signals(service: Service) -> _Stopping:
    stopping = _Stopping()
    loop = asyncio.get_running_loop()

    def on_signal(name: str) -> None:
        service.is_accepting = False
        stopping.signal(name)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number.name)
    return stopping


async def _until_started(server: uvicorn.Server, serving: asyncio.Task[None]) -> None:
    while not server.started and not serving.done():
        await asyncio.sleep(0.005)
    if serving.done():
        await serving


async def _signal_or_end(stopping: _Stopping, serving: asyncio.Task[None]) -> None:
    first = asyncio.create_task(stopping.first.wait())
    await asyncio.wait({first, serving}, return_when=asyncio.FIRST_COMPLETED)
    first.cancel()


async def _drain(config: ServerConfig, service: Service, stopping: _Stopping) -> None:
    """Lets running requests finish in the grace period; a second signal ends it at once."""
    stopped = asyncio.create_task(service.engine.stop(config.shutdown_grace))
    second = asyncio.create_task(stopping.second.wait())
    await asyncio.wait({stopped, second}, return_when=asyncio.FIRST_COMPLETED)
    if second.done():
        await service.engine.stop(0.0)
    second.cancel()
    await stopped
