"""Every option, declared once.

A field of these two frozen classes is the whole declaration of an option: its name, type,
default, bounds, help, and where it stands in `--help`. The command line derives from the
fields (cli.py), and so does the check of values, so that `hotbatch serve` and a Python caller
get the same names, the same defaults and the same complaints.

Names follow `vllm serve` where the meaning is the same.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from hotbatch.core.errors import InvalidRequestError, OptionError
from hotbatch.core.sampling_params import SamplingParams
from hotbatch.core.service_class import LatencyTargets, ServiceClass
from hotbatch.models.embedded import EMBEDDED_MODEL_NAME

MAX_BYTES = 2**50
_BYTE_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_bytes(text: str | int) -> int:
    """Read a size such as 512M, 2G, 1.5GiB or 1048576; units are powers of 1024.

    Raises:
        ValueError: the text is no size; the message says what is.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", str(text).strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is not a size; write bytes or a unit, such as 512M or 2G")
    size = float(match[1]) * _BYTE_UNITS[match[2].upper()]
    if size > MAX_BYTES:  # so many digits that it would be infinite, too
        raise ValueError(f"{text!r:.40} is more than any machine has")
    return int(size)


_CLASSES = {service_class.label: service_class for service_class in ServiceClass}


@dataclass(frozen=True, slots=True)
class PerClass:
    """A number for each service class; None where nothing was said or 'none'."""

    interactive: float | None = None
    standard: float | None = None
    batch: float | None = None

    def of(self, service_class: ServiceClass) -> float | None:
        value: float | None = getattr(self, service_class.label)
        return value


def parse_per_class(text: str | float) -> PerClass:
    """Read '500' (interactive and standard) or 'interactive=500,standard=2000,batch=none'.

    Raises:
        ValueError: a class that there is not, or no positive number; the message says what is.
    """
    parts = [part.strip() for part in str(text).split(",")]
    if len(parts) == 1 and "=" not in parts[0]:
        value = _positive(parts[0])
        return PerClass(value, value)
    values: dict[str, float | None] = {}
    for part in parts:
        name, equals, number = (piece.strip() for piece in part.partition("="))
        if not equals or name not in _CLASSES:
            raise ValueError(f"{part!r} is not CLASS=NUMBER; the classes are {', '.join(_CLASSES)}")
        if name in values:
            raise ValueError(f"{name} is given twice")
        values[name] = None if number.lower() == "none" else _positive(number)
    return PerClass(**values)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < math.inf:
        raise ValueError(f"{text!r} is not a number above 0")
    return value


def parse_weights(text: str) -> dict[str, float]:
    """Read 'key-0=2,alice=0.5'.

    Raises:
        ValueError: not of this form, a name twice, or a weight that is not above 0.
    """
    weights: dict[str, float] = {}
    for part in text.split(","):
        # A user's name may hold an equals sign, a number cannot.
        name, equals, number = part.strip().rpartition("=")
        if not equals or not name:
            raise ValueError(f"{part!r} is not TENANT=WEIGHT, such as alice=2")
        if name in weights:
            raise ValueError(f"tenant {name} is given twice")
        weights[name] = _positive(number)
    return weights


@dataclass(frozen=True, slots=True)
class Distances:
    """How far ahead is guessed: the next tokens of an answer, what the next turn of a conversation
    begins with, whole next requests."""

    tokens: bool = False
    turns: bool = False
    requests: bool = False


EVERY_DISTANCE = Distances(tokens=True, turns=True, requests=True)


def parse_distances(text: str | Distances) -> Distances:
    """Read some of 'tokens', 'turns' and 'requests', separated by commas.

    Raises:
        ValueError: it names something else, or nothing.
    """
    if isinstance(text, Distances):
        return text
    known = [item.name for item in dataclasses.fields(Distances)]
    names = [part.strip() for part in text.split(",")]
    for name in names:
        if name not in known:
            raise ValueError(f"{name!r} is none of {', '.join(known)}")
    return Distances(**dict.fromkeys(names, True))


def option(
    default: Any,
    help: str,
    *,
    group: str,
    low: float | None = None,
    high: float | None = None,
    env: str | None = None,
    metavar: str | None = None,
    parse: Callable[[str], Any] | None = None,
    secret: bool = False,
) -> Any:
    """Declare one option as a dataclass field.

    `low` and `high` are inclusive bounds, `env` names an environment variable that is read
    when the option is not given, `parse` turns the command line's text into a value (raising
    ValueError), `secret` keeps the value out of `repr` and of the help.
    """
    metadata = {
        "help": help,
        "group": group,
        "low": low,
        "high": high,
        "env": env,
        "metavar": metavar,
        "parse": parse,
        "secret": secret,
    }
    return field(default=default, metadata=metadata, repr=not secret)


MODEL, BATCH, MEMORY, REUSE = "Model", "Batching", "KV cache", "Reuse"
SERVICE = "Service"
SERVER, SAMPLING = "Server", "Sampling"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What is served and how it is batched; enough to build an engine.

    Raises:
        OptionError: a value is out of range or two options contradict each other; `param`
            and the message name the option.
    """

    model: str = option(
        EMBEDDED_MODEL_NAME,
        "A GGUF file, a folder with safetensors, or a hub id. Without it the embedded "
        "SmolLM2-135M-Instruct is served (fetched once, 93 MB).",
        group=MODEL,
        metavar="MODEL",
    )
    load_format: Literal["auto", "gguf", "safetensors", "dummy"] = option(
        "auto",
        "How to read the weights. 'dummy' makes random ones from the model's config, to measure "
        "the speed of a shape.",
        group=MODEL,
    )
    precision: Literal["auto", "int8", "int4", "bf16", "f32"] = option(
        "auto",
        "Of the weights in memory. 'auto' is bf16 on CUDA, and on a CPU int8 unless another that "
        "keeps the model's quality is a tenth faster: measured at the first start, and kept to.",
        group=MODEL,
    )
    device: Literal["cpu", "cuda"] = option("cpu", "Where the model runs.", group=MODEL)
    threads: int | None = option(
        None,
        "CPU threads of the model; without it, as many as this process may use.",
        group=MODEL,
        low=1,
        high=1024,
    )
    seed: int = option(
        0,
        "Seeds the requests that bring no seed of their own, and dummy weights.",
        group=MODEL,
        low=0,
        high=2**63 - 1,
    )
    chat_template: Path | None = option(
        None, "A Jinja file that replaces the model's chat template.", group=MODEL
    )
    max_model_len: int | None = option(
        None,
        "Longest prompt plus output in tokens; without it, the model's own limit, or less if "
        "the KV cache holds less.",
        group=MODEL,
        low=2,
    )
    batching: Literal["continuous", "static", "request"] = option(
        "continuous",
        "'continuous' lets requests join and leave at every step. 'static' waits for a full "
        "batch and runs it to the end of its longest member, 'request' runs one at a time: "
        "both are there to compare with.",
        group=BATCH,
    )
    max_num_seqs: int = option(256, "Most requests in one step.", group=BATCH, low=1, high=65536)
    max_num_batched_tokens: int | None = option(
        None,
        "Most tokens in one step, prompt chunks and decodes together; without it, 512 on CPU "
        "and 2048 on CUDA, or --max-num-seqs if that is more.",
        group=BATCH,
        low=1,
    )
    long_prefill_token_threshold: int = option(
        0,
        "Most tokens of one prompt in a step, so that a longer prompt leaves room for others; 0 "
        "for as many as the step holds and its time allows.",
        group=BATCH,
        low=0,
    )
    static_batch_size: int | None = option(
        None,
        "With --batching static: the size of a full batch; without it, 16, or --max-num-seqs if "
        "that is less.",
        group=BATCH,
        low=1,
    )
    static_batch_timeout: float | None = option(
        None,
        "With --batching static: seconds after which a batch runs though it is not full; "
        "without it, 0.1.",
        group=BATCH,
        low=0.0,
        metavar="SECONDS",
    )
    scheduling: Literal["full", "first-come"] = option(
        "full",
        "'full' knows service classes, deadlines, tenants and expected lengths: urgent requests "
        "go first and displace others, nobody starves. 'first-come' is plain continuous "
        "batching with a fixed token budget, there to compare with.",
        group=SERVICE,
    )
    ttft_slo: PerClass | None = option(
        None,
        "Target for the time to the first token in milliseconds: one number for interactive and "
        "standard requests, or like 'interactive=500,standard=2000,batch=none'. A request may "
        "bring its own. Without it, 1000 for interactive and 5000 for standard ones.",
        group=SERVICE,
        metavar="MS",
        parse=parse_per_class,
    )
    tpot_slo: PerClass | None = option(
        None,
        "Target for the time of each token after the first, likewise. Without it, 100 for "
        "interactive and 200 for standard requests.",
        group=SERVICE,
        metavar="MS",
        parse=parse_per_class,
    )
    queue_ttl: float | None = option(
        None,
        "Seconds after which a request that still waits is ended with an error; without it, "
        "none is.",
        group=SERVICE,
        low=0.001,
        metavar="SECONDS",
    )
    tenant_weights: Mapping[str, float] | None = option(
        None,
        "Shares of tenants relative to others in their class, such as 'key-0=2,alice=0.5'; 1 "
        "where not named. A tenant is an API key (key-0 is the first), or without keys the "
        "request's user.",
        group=SERVICE,
        metavar="TENANT=N",
        parse=parse_weights,
    )
    kv_cache_memory_bytes: int | None = option(
        None,
        "Size of the KV cache, such as 512M or 2G; without it, what two of the longest requests "
        "need but at least 512M, and at most a quarter of the free memory.",
        group=MEMORY,
        low=1,
        high=MAX_BYTES,
        metavar="BYTES",
        parse=parse_bytes,
    )
    kv_cache_dtype: Literal["auto", "bf16", "f32", "int8"] = option(
        "auto",
        "Of the keys and values. 'auto' is f32 with --precision f32 and bf16 otherwise.",
        group=MEMORY,
    )
    block_size: int = option(
        16, "Tokens in a KV block, a multiple of 16.", group=MEMORY, low=16, high=1024
    )
    enable_prefix_caching: bool = option(
        True,
        "Keep the KV blocks of prompts and answers for those that begin alike. On by default; "
        "--no-enable-prefix-caching turns it off.",
        group=REUSE,
    )
    prefix_eviction: Literal["return-time", "lru"] = option(
        "return-time",
        "Which cached blocks go first when memory is short. 'return-time' keeps conversations by "
        "the chance that they go on, learnt of each tenant, times what computing them again "
        "would cost; 'lru' keeps what was used last.",
        group=REUSE,
    )

    speculate: bool = option(
        True,
        "Guess in capacity that would idle what will be asked for: next tokens, from a request's "
        "own text and its tenant's recent answers; what a chat's next prompt will begin with; and "
        "whole next requests, from what their client sent before. The same tokens, sooner where "
        "texts or clients repeat themselves. On by default; only --batching continuous guesses.",
        group=REUSE,
    )
    speculate_on: Distances | None = option(
        None,
        "What is guessed, of 'tokens', 'turns' and 'requests'; without this option, all.",
        group=REUSE,
        metavar="WHAT,...",
        parse=parse_distances,
    )
    speculate_max_tokens: int | None = option(
        None,
        "Most guessed next tokens in a step, of all requests together; 0 guesses none. Without it "
        "as many as pay by the measured cost of a step.",
        group=REUSE,
        low=0,
    )
    speculate_kv_share: float = option(
        0.25,
        "Share of the KV cache that requests guessed ahead may hold, from 0 to 1; they are the "
        "first to lose it.",
        group=REUSE,
        low=0.0,
        high=1.0,
        metavar="SHARE",
    )
    draft_model: str | None = option(
        None,
        "A smaller model of the same vocabulary (a GGUF file, a folder or a hub id) that guesses "
        "as well, where its own time pays.",
        group=REUSE,
        metavar="MODEL",
    )

    @property
    def distances(self) -> Distances:
        """What is guessed. Static batches are how it was done before, and guess nothing."""
        if not self.speculate or self.batching != "continuous":
            return Distances()
        distances = self.speculate_on or EVERY_DISTANCE
        if self.speculate_max_tokens == 0:
            return dataclasses.replace(distances, tokens=False)
        return distances

    def __post_init__(self) -> None:
        check_fields(self)
        if self.batching != "static":
            for name in ("static_batch_size", "static_batch_timeout"):
                if getattr(self, name) is not None:
                    raise OptionError(
                        f"{flag_of(name)} needs --batching static, which is "
                        f"{self.batching!r} here.",
                        param=flag_of(name),
                    )
        if self.static_batch_size is not None and self.static_batch_size > self.max_num_seqs:
            raise OptionError(
                f"--static-batch-size {self.static_batch_size} exceeds --max-num-seqs "
                f"{self.max_num_seqs}.",
                param="--static-batch-size",
            )
        if self.max_num_batched_tokens is not None and (
            self.max_num_batched_tokens < self.max_num_seqs
        ):
            raise OptionError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} is less than "
                f"--max-num-seqs {self.max_num_seqs}: a step must hold a token of each. "
                "Raise the first or lower the second.",
                param="--max-num-batched-tokens",
            )
        if self.block_size % 16:
            raise OptionError(
                f"--block-size must be a multiple of 16; got {self.block_size}.",
                param="--block-size",
            )
        if self.draft_model is not None and not self.distances.tokens:
            raise OptionError(
                "--draft-model guesses tokens, which is off: add --speculate, with 'tokens' among "
                "what --speculate-on names, a --speculate-max-tokens above 0 and --batching "
                "continuous, or leave it out.",
                param="--draft-model",
            )
        if self.tenant_weights is not None:
            for tenant, weight in self.tenant_weights.items():
                if not 0.0 < weight < math.inf:
                    raise OptionError(
                        f"--tenant-weights: the weight of {tenant!r} must be above 0, "
                        f"got {weight}.",
                        param="--tenant-weights",
                    )
        if self.chat_template is not None and not self.chat_template.is_file():
            raise OptionError(
                f"--chat-template {self.chat_template}: there is no such file.",
                param="--chat-template",
            )

    def targets(self) -> dict[ServiceClass, LatencyTargets]:
        """Targets by class: those given, else the defaults."""
        return _targets(self.ttft_slo or _DEFAULT_TTFT, self.tpot_slo or _DEFAULT_TPOT)

    def promised(self) -> dict[ServiceClass, LatencyTargets]:
        """Those that were given only."""
        return _targets(self.ttft_slo or PerClass(), self.tpot_slo or PerClass())


def _targets(ttft: PerClass, tpot: PerClass) -> dict[ServiceClass, LatencyTargets]:
    return {
        service_class: LatencyTargets(
            _seconds(ttft.of(service_class)), _seconds(tpot.of(service_class))
        )
        for service_class in ServiceClass
    }


# Milliseconds. Slower than this, somebody who watches feels it; twice as slow, one who waits.
_DEFAULT_TTFT = PerClass(interactive=1000.0, standard=5000.0)
_DEFAULT_TPOT = PerClass(interactive=100.0, standard=200.0)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Where the server listens and whom it answers.

    Raises:
        OptionError: a value is out of range; `param` and the message name the option.
    """

    host: str = option(
        "127.0.0.1",
        "Address to listen on; 0.0.0.0 is every one of this machine.",
        group=SERVER,
        metavar="HOST",
    )
    port: int = option(
        8000, "Port to listen on; 0 takes a free one.", group=SERVER, low=0, high=65535
    )
    served_model_name: tuple[str, ...] = option(
        (),
        "The name clients ask for; may be repeated. Without it, the model's own name.",
        group=SERVER,
        metavar="NAME",
    )
    api_key: tuple[str, ...] = option(
        (),
        "Clients must bring this key as a bearer token; may be repeated. Without it, anyone "
        "who reaches the port is answered.",
        group=SERVER,
        env="HOTBATCH_API_KEY",
        metavar="KEY",
        secret=True,
    )
    shutdown_grace: float = option(
        10.0,
        "Seconds that running requests get to finish at shutdown.",
        group=SERVER,
        low=0.0,
        metavar="SECONDS",
    )
    max_body_bytes: int = option(
        16 * 2**20,
        "Larger request bodies are refused.",
        group=SERVER,
        low=1024,
        high=MAX_BYTES,
        metavar="BYTES",
        parse=parse_bytes,
    )
    splice_answers: bool = option(
        False,
        "Give a chat prompt that repeats an answer of this server the token ids that it was "
        "generated as, instead of tokenizing its text again, so that its cached prefix is found. "
        "The ids say exactly the same text. Off by default, as the same text may then be answered "
        "otherwise once the server has forgotten them.",
        group=REUSE,
    )
    otlp_traces_endpoint: str | None = option(
        None,
        "OpenTelemetry collector, such as http://localhost:4318, that gets a trace of each "
        "request: queue, prefill, decode, pauses.",
        group=SERVER,
        metavar="URL",
    )
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "info", "How much the server says.", group=SERVER
    )

    max_queue_requests: int | None = option(
        10_000,
        "Most requests of a class and those above it that may wait because they cannot run yet; "
        "more are refused with 429. 0 lets nobody wait.",
        group=SERVICE,
        low=0,
    )
    max_queue_tokens: int | None = option(
        None, "Most prompt tokens that may wait, likewise.", group=SERVICE, low=0
    )
    max_queue_wait: float | None = option(
        None,
        "Requests whose first token is predicted to take more seconds are refused with 429, but "
        "for those of the batch class.",
        group=SERVICE,
        low=0.001,
        metavar="SECONDS",
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.host.strip():  # to the system it would mean every address
            raise OptionError(
                "--host must not be empty; 0.0.0.0 is every address of this machine.",
                param="--host",
            )
        for name in ("served_model_name", "api_key"):
            if any(not value.strip() for value in getattr(self, name)):
                raise OptionError(f"{flag_of(name)} must not be empty.", param=flag_of(name))


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How `hotbatch chat` and `hotbatch generate` sample; SamplingParams has the bounds.

    Raises:
        OptionError: a value is out of range; `param` and the message name the option.
    """

    max_tokens: int = option(512, "Most tokens of an answer.", group=SAMPLING)
    temperature: float = option(0.7, "0 takes the likeliest token.", group=SAMPLING)
    top_p: float = option(
        0.95, "Sample among the likeliest tokens of this joint probability.", group=SAMPLING
    )
    stop: tuple[str, ...] = option(
        (), "Text that ends an answer; may be repeated.", group=SAMPLING, metavar="TEXT"
    )

    def __post_init__(self) -> None:
        check_fields(self)
        try:
            self.params()
        except InvalidRequestError as error:
            flag = flag_of(error.param or "")
            raise OptionError(f"{flag}: {error.message}", param=flag) from error

    def params(self) -> SamplingParams:
        return SamplingParams(**dataclasses.asdict(self))


def flag_of(name: str) -> str:
    """The command-line spelling of a field: max_num_seqs becomes --max-num-seqs."""
    return "--" + name.replace("_", "-")


def check_fields(options: Any) -> None:
    """Check each field's type, choices and bounds.

    Raises:
        OptionError: names the option, the value and what it may be.
    """
    hints = get_type_hints(type(options))
    for item in dataclasses.fields(options):
        _check_value(item, hints[item.name], getattr(options, item.name))


def _check_value(item: dataclasses.Field[Any], hint: Any, value: Any) -> None:
    if value is None and type(None) in get_args(hint):
        return
    name = flag_of(item.name)
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            choices = ", ".join(get_args(hint))
            raise OptionError(f"{name} must be one of {choices}; got {value!r}.", param=name)
        return
    if not _fits(value, hint):
        raise OptionError(f"{name} cannot be {value!r}.", param=name)
    low, high = item.metadata["low"], item.metadata["high"]
    if low is not None and not low <= value:  # written so that NaN fails too
        raise OptionError(f"{name} must be at least {low}; got {value}.", param=name)
    if high is not None and not value <= high:
        raise OptionError(f"{name} must be at most {high}; got {value}.", param=name)


def _fits(value: Any, hint: Any) -> bool:
    """True if `value` is of the annotated type, as far as options use types."""
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_fits(part, get_args(hint)[0]) for part in value)
    kinds = tuple(kind for kind in get_args(hint) if kind is not type(None)) or (hint,)
    kinds = tuple(get_origin(kind) or kind for kind in kinds)  # a Mapping[...] is a Mapping
    if isinstance(value, bool):
        return bool in kinds
    return isinstance(value, (int, float) if float in kinds else kinds)
