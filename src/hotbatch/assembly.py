"""Joins the rooms into something that serves: options in, an engine with its text parts out.

The only place that knows all of them. Server, command line and the Python interface each get
an Assembly and add nothing but their own door.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotbatch.core.config import SchedulerConfig
from hotbatch.core.cost_model import CostModel
from hotbatch.core.errors import InvalidRequestError, OptionError
from hotbatch.core.policies import Policies, full_policies
from hotbatch.core.scheduler import Scheduler
from hotbatch.core.service_class import LatencyTargets, ServiceClass
from hotbatch.core.speculation import AheadBook, DraftModel, Speculator, Texts
from hotbatch.draft_model import join, load_draft_model, num_draft_blocks
from hotbatch.engine.clock import MonotonicClock
from hotbatch.engine.engine import Engine
from hotbatch.engine.host_time import measure_host
from hotbatch.engine.protocol import Executor, ExecutorInfo
from hotbatch.engine.warm_up import is_as_known, warm_up
from hotbatch.executor.kv_sizing import (
    default_kv_bytes,
    free_memory_bytes,
    kv_bytes_per_token,
)
from hotbatch.executor.nvml import DeviceFigures, read_device
from hotbatch.kernels import continuation
from hotbatch.models.embedded import EMBEDDED_MODEL_NAME, embedded_model_path
from hotbatch.models.loader import LoadedModel, load_model
from hotbatch.options import EngineOptions, flag_of
from hotbatch.profiled import (
    Known,
    changed,
    keep_ceiling,
    keep_steps,
    know,
    last_chosen,
    last_tuned,
    primed_cost_model,
    profile_key,
    with_tuned,
)
from hotbatch.text import ChatTemplate, Tokenizer
from hotbatch.text.made_up import made_up_tokenizer

if TYPE_CHECKING:
    from hotbatch.models.config import ModelConfig

Report = Callable[[str, int, int], None]
"""Told (what is going on, done so far, in all) while parts are fetched and loaded."""

# Tokens in a step when nobody says. On CPU the step of a full budget is what a decoding client
# waits through when a long prompt arrives beside it; a GPU computes four times as many sooner.
_DEFAULT_BATCHED_TOKENS = {"cpu": 512, "cuda": 2048}
_STATIC_BATCH_SIZE = 16
_STATIC_BATCH_TIMEOUT = 0.1  # seconds
_HOST_MEASURING = 0.15  # seconds, at the first start
_MAX_SLOTS = 2**31 - 1  # executors count the places of tokens in 32 bits


@dataclass(frozen=True, slots=True)
class Assembly:
    """A loaded model behind an engine that has not been started.

    `options` are those in force; `tuned` are those of them that a profile set, by name; `known`
    is what was known or measured of the machine. `name` is the model's own; `eos_token_ids` end
    an answer; `chat_template` is None for a model without one; `generation_defaults` are the
    sampling settings that its makers recommend, by parameter name. Whoever starts `engine` stops
    it; `close` is for all others.
    """

    options: EngineOptions
    tuned: Mapping[str, Any]
    name: str
    engine: Engine
    known: Known
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    eos_token_ids: frozenset[int]
    generation_defaults: Mapping[str, float]

    @property
    def queue_ttl(self) -> float | None:
        """Seconds after which a request that still waits is ended."""
        return self.options.queue_ttl

    @property
    def promised(self) -> Mapping[ServiceClass, LatencyTargets]:
        """Targets that the operator set, by class; the defaults are no promise."""
        return self.options.promised()

    @property
    def read_device(self) -> Callable[[], DeviceFigures | None]:
        """Reads what the driver says of the GPU; None where there is none."""
        return read_device if self.options.device == "cuda" else lambda: None

    @property
    def info(self) -> ExecutorInfo:
        return self.engine.info

    @property
    def config(self) -> SchedulerConfig:
        return self.engine.config

    def close(self) -> None:
        """Stop the engine at once, keep what it learnt and free the model. Idempotent."""
        self.engine.stop()
        if self.engine.accountant is not None:
            keep_ceiling(self.known, self.engine.accountant.roofline.ceiling)


def assemble(
    options: EngineOptions, report: Report | None = None, *, as_tuned: bool = True
) -> Assembly:
    """Load the model and join the parts.

    Args:
        as_tuned: options that were left at their default are as `hotbatch tune` found them best.

    Raises:
        ModelLoadError: the model cannot be found, fetched or read.
        OptionError: an option does not fit the model or the machine.
    """
    model = _load(options, report)
    tokenizer = _tokenizer(model)
    template = _chat_template(options, model, tokenizer)
    if options.device == "cuda":
        _require_gpu()
    draft = load_draft_model(options, tokenizer, _tokenizer)
    precision, why_precision = _precision(options, model, as_tuned)
    known = know(options, profile_key(options, model, precision, _kv_dtype(options, precision)))
    asked = options
    if as_tuned:
        options = with_tuned(options, known.profile)
    executor = _executor(options, model, precision, why_precision, report)
    draft_model = None
    if draft is not None:
        config = _scheduler_config(options, executor.info)
        executor, draft_model = join(
            executor, _draft_executor(options, draft, executor.info, precision), config
        )
    config = _scheduler_config(options, executor.info)
    cost_model, known = _cost_model(executor, config, known)
    scheduler = _scheduler(options, executor.info, cost_model, draft_model)
    return Assembly(
        options=options,
        tuned=changed(asked, options),
        name=model.name,
        engine=Engine(scheduler, executor, ceiling=known.profile.ceiling),
        known=known,
        tokenizer=tokenizer,
        chat_template=template,
        eos_token_ids=frozenset(model.eos_token_ids) | tokenizer.eos_token_ids,
        generation_defaults=dict(model.generation_defaults),
    )


# ---- model and text


def _load(options: EngineOptions, report: Report | None) -> LoadedModel:
    def progress(done: int, total: int) -> None:
        if report is not None:
            report(f"Fetching {options.model}", done, total)

    if options.model == EMBEDDED_MODEL_NAME and not Path(options.model).exists():
        path = embedded_model_path(progress)
        loaded = load_model(path, options.load_format, seed=options.seed)
        return replace(loaded, name=EMBEDDED_MODEL_NAME)
    return load_model(options.model, options.load_format, seed=options.seed, progress=progress)


def _tokenizer(model: LoadedModel) -> Tokenizer:
    source = model.tokenizer_source
    if source is None:
        return made_up_tokenizer(model.config.vocab_size)
    return Tokenizer.from_folder(source) if source.is_dir() else Tokenizer.from_gguf(source)


def _chat_template(
    options: EngineOptions, model: LoadedModel, tokenizer: Tokenizer
) -> ChatTemplate | None:
    source = model.chat_template or tokenizer.chat_template
    if options.chat_template is not None:
        source = _read_template(options.chat_template)
    return None if source is None else ChatTemplate(source, tokenizer.special_tokens)


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise OptionError(
            f"--chat-template {path} cannot be read: {error}.", param="--chat-template"
        ) from error


# ---- executor and scheduler


@dataclass(frozen=True, slots=True)
class _Shape:
    """What the executor gets where the options leave it open."""

    precision: str
    why_precision: str  # empty where it was asked for
    kv_dtype: str
    num_blocks: int
    max_model_len: int


def _executor(
    options: EngineOptions,
    model: LoadedModel,
    precision: str,
    why_precision: str,
    report: Report | None,
) -> Executor:
    kv_dtype = _kv_dtype(options, precision)
    max_model_len = _max_model_len(options, model.config)
    shape = _Shape(
        precision=precision,
        why_precision=why_precision,
        kv_dtype=kv_dtype,
        num_blocks=_num_blocks(options, model.config, kv_dtype, max_model_len),
        max_model_len=max_model_len,
    )
    try:
        if options.device == "cuda":
            return _torch_executor(options, model, shape)
        return _cpu_executor(options, model, shape, report)
    except InvalidRequestError as error:
        flag = flag_of(error.param or "device")
        raise OptionError(f"{flag}: {error.message}", param=flag) from error
    except MemoryError as error:
        tokens = shape.num_blocks * options.block_size
        raise OptionError(
            f"This machine has too little memory for the weights and a KV cache of {tokens} "
            "tokens; lower --kv-cache-memory-bytes.",
            param="--kv-cache-memory-bytes",
        ) from error


def _precision(options: EngineOptions, model: LoadedModel, as_tuned: bool) -> tuple[str, str]:
    """The weights' precision, and why where it was left to us: that for which `hotbatch tune`
    measured last, else the one that an earlier start chose (answers differ by it, and a restart
    must not change them because two are about as fast), else the fastest."""
    if options.precision != "auto":
        return options.precision, ""
    if options.device == "cuda":
        return "bf16", ""
    from hotbatch.executor.cpu_executor import usable_cpus
    from hotbatch.executor.precision import candidates, choose_precision

    layer = model.weights.layers[0]
    weights = (layer.qkv, layer.attention_out, layer.gate_up, layer.down)
    if as_tuned:
        keys = [
            profile_key(options, model, precision, _kv_dtype(options, precision))
            for precision in candidates(weights)
        ]
        tuned = last_tuned(keys)
        if tuned is not None:
            return tuned, "as it was tuned"
        chosen = last_chosen(keys)
        if chosen is not None:
            return chosen, "chosen at an earlier start"
    choice = choose_precision(weights, options.threads or usable_cpus())
    return choice.precision, choice.reason


def _kv_dtype(options: EngineOptions, precision: str) -> str:
    if options.kv_cache_dtype != "auto":
        return options.kv_cache_dtype
    return "f32" if precision == "f32" else "bf16"


def _cpu_executor(
    options: EngineOptions, model: LoadedModel, shape: _Shape, report: Report | None
) -> Executor:
    from hotbatch.executor.cpu_executor import CpuExecutor

    done = 0
    total = _linear_bytes(model)

    def progress(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        model.release()
        if report is not None:
            report(f"Loading {model.name}", done, total)

    return CpuExecutor(
        model,
        num_blocks=shape.num_blocks,
        precision=shape.precision,
        why_precision=shape.why_precision,
        threads=options.threads,
        block_size=options.block_size,
        max_model_len=shape.max_model_len,
        max_num_batched_tokens=_batched_tokens(options),
        max_num_seqs=options.max_num_seqs,
        kv_cache_dtype=shape.kv_dtype,
        progress=progress,
    )


def _require_gpu() -> None:
    try:
        import torch
    except ModuleNotFoundError as error:
        raise OptionError(
            f"--device cuda needs torch ({error}): pip install 'hotbatch[cuda]', or make setup.",
            param="--device",
        ) from error
    if not torch.cuda.is_available():
        raise OptionError(
            "--device cuda: torch finds no GPU that it can use here.", param="--device"
        )


def _torch_executor(options: EngineOptions, model: LoadedModel, shape: _Shape) -> Executor:
    from hotbatch.executor.torch_executor import TorchExecutor

    return TorchExecutor(
        model,
        device="cuda",
        precision=shape.precision,
        num_blocks=shape.num_blocks,
        block_size=options.block_size,
        max_model_len=shape.max_model_len,
        kv_dtype=shape.kv_dtype,
    )


def _linear_bytes(model: LoadedModel) -> int:
    """Bytes of all matrices that are packed, as they lie in the file."""
    layers = (
        (layer.qkv, layer.attention_out, layer.gate_up, layer.down)
        for layer in model.weights.layers
    )
    return model.weights.head.num_bytes + sum(
        weight.num_bytes for layer in layers for weight in layer
    )


def _max_model_len(options: EngineOptions, config: ModelConfig) -> int:
    """The longest prompt plus output: what is asked for, within what the model was made for."""
    most = config.max_position_embeddings
    if options.max_model_len is not None and options.max_model_len > most:
        raise OptionError(
            f"--max-model-len {options.max_model_len} exceeds the {most} positions that "
            "the model was made for.",
            param="--max-model-len",
        )
    return options.max_model_len or most


def _batched_tokens(options: EngineOptions) -> int:
    default = max(_DEFAULT_BATCHED_TOKENS[options.device], options.max_num_seqs)
    return options.max_num_batched_tokens or default


def _num_blocks(
    options: EngineOptions, config: ModelConfig, kv_dtype: str, max_model_len: int
) -> int:
    per_token = kv_bytes_per_token(
        config.num_layers, config.num_kv_heads, config.head_dim, kv_dtype
    )
    asked = options.kv_cache_memory_bytes
    num_bytes = asked or default_kv_bytes(_free_bytes(options.device), per_token, max_model_len)
    num_blocks = num_bytes // (per_token * options.block_size)
    if num_blocks < 1:
        raise OptionError(
            f"--kv-cache-memory-bytes: the KV cache of {num_bytes} bytes holds not even one "
            f"block ({per_token * options.block_size} bytes). Give it more.",
            param="--kv-cache-memory-bytes",
        )
    if num_blocks * options.block_size > _MAX_SLOTS:
        raise OptionError(
            f"--kv-cache-memory-bytes: the KV cache of {num_bytes} bytes holds more than the "
            f"{_MAX_SLOTS} tokens that can be told apart. Give it less.",
            param="--kv-cache-memory-bytes",
        )
    return num_blocks


def _free_bytes(device: str) -> int:
    if device == "cpu":
        return free_memory_bytes()
    import torch

    free: int = torch.cuda.mem_get_info()[0]
    return free


def _scheduler_config(options: EngineOptions, info: ExecutorInfo) -> SchedulerConfig:
    timeout = options.static_batch_timeout
    return SchedulerConfig(
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        max_model_len=info.max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=_batched_tokens(options),
        long_prefill_token_threshold=options.long_prefill_token_threshold,
        batching=options.batching,
        static_batch_size=options.static_batch_size
        or min(_STATIC_BATCH_SIZE, options.max_num_seqs),
        static_timeout=_STATIC_BATCH_TIMEOUT if timeout is None else timeout,
        enable_prefix_caching=options.enable_prefix_caching,
        prefix_eviction=options.prefix_eviction,
        prefill_ahead=options.distances.turns,
        vocab_size=info.vocab_size,
        targets=options.targets(),
        queue_time_to_live=options.queue_ttl,
        tenant_weights=options.tenant_weights or {},
        max_draft_tokens=options.speculate_max_tokens,
        ahead_kv_share=options.speculate_kv_share,
    )


def _draft_executor(
    options: EngineOptions, draft: LoadedModel, info: ExecutorInfo, precision: str
) -> Executor:
    kv_dtype = _kv_dtype(options, precision)
    shape = _Shape(
        precision=precision,
        why_precision="",
        kv_dtype=kv_dtype,
        num_blocks=num_draft_blocks(draft, info, kv_dtype),
        max_model_len=min(info.max_model_len, draft.config.max_position_embeddings),
    )
    if options.device == "cuda":
        return _torch_executor(options, draft, shape)
    return _cpu_executor(options, draft, shape, None)


def _cost_model(
    executor: Executor, config: SchedulerConfig, known: Known
) -> tuple[CostModel, Known]:
    """One that knows what steps take: from the profile if the machine is as it was, else from
    steps that are run now."""
    limits = {"max_tokens": config.max_num_batched_tokens, "max_requests": config.max_num_seqs}
    clock = MonotonicClock()
    model = primed_cost_model(known.profile)
    if model.is_trained and is_as_known(executor, model, clock, **limits):
        return model, known
    model = CostModel()
    steps = warm_up(executor, model, clock, **limits)
    host_seconds = measure_host(executor, config, _HOST_MEASURING)
    return model, keep_steps(known, steps, host_seconds)


def _scheduler(
    options: EngineOptions,
    info: ExecutorInfo,
    cost_model: CostModel,
    draft_model: DraftModel | None,
) -> Scheduler:
    config, policies = _scheduler_config(options, info), _policies(options)
    distances = options.distances
    drafter = make_speculator(cost_model, draft_model) if distances.tokens else None
    ahead = AheadBook() if distances.requests else None
    return Scheduler(config, policies, cost_model, drafter, ahead)


def make_speculator(cost_model: CostModel, draft_model: DraftModel | None = None) -> Speculator:
    """What guesses next tokens, on native texts."""
    texts = Texts(continuation.RecentText, continuation.propose)
    return Speculator(cost_model, draft_model=draft_model, texts=texts)


def _policies(options: EngineOptions) -> Policies:
    """Closed batches are there to compare with: nobody displaces anybody in them."""
    if options.scheduling == "full" and options.batching == "continuous":
        return full_policies()
    return Policies()
