"""The CPU executor: a model recorded into native code, its KV cache, and one call a step.

Python packs the plan into arrays, native code does everything between token ids and sampled
tokens with the interpreter lock released, and Python unpacks the answer. No torch here: a
server on a CPU starts without it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hotbatch.core.errors import InvalidRequestError, ModelLoadError
from hotbatch.core.plan import StepPlan, StepResult
from hotbatch.engine.protocol import ExecutorInfo
from hotbatch.executor.channel_scales import trial_tokens
from hotbatch.executor.inputs import StepInputs, pack
from hotbatch.executor.model_work import model_work
from hotbatch.executor.recorder import ProgramRecorder
from hotbatch.executor.results import collect
from hotbatch.executor.sample_inputs import SampleOutputs, pack_sampling
from hotbatch.kernels import _native
from hotbatch.models.config import ModelConfig
from hotbatch.models.llama import forward
from hotbatch.models.loader import LoadedModel
from hotbatch.models.rope import inverse_frequencies

PRECISIONS = ("int8", "int4", "bf16", "f32")
KV_DTYPES = ("bf16", "f32", "int8")
# Logits of this many rows are held at once; more rows (prompt log-probabilities) go in slices.
MAX_LOGIT_ROWS = 64
# Seconds to wait for the cache's memory. What is timed meanwhile says nothing of later steps, but
# nobody shall wait for what a cache of many gigabytes takes.
_CACHE_PATIENCE = 1.0


class CpuExecutor:
    """Runs step plans on the CPU.

    Args:
        model: as loaded; its weights are packed here and may be dropped afterwards.
        precision: of weights and products: "int8" (activations in signed bytes, a scale
            for each row behind a norm, else for each group of 64), "int4" (the file's own 4-bit
            grid where it has one), "bf16", "f32".
        why_precision: said in the description, where it was not asked for.
        threads: including the engine's own; None for the CPUs this process may use.
        num_blocks: KV blocks of `block_size` tokens.
        max_model_len: longest prompt plus output, at most the model's context.
        max_num_batched_tokens: rows of the largest step.
        max_num_seqs: requests in a step at most.
        kv_cache_dtype: "auto" (bf16; f32 where precision is f32), "bf16", "f32" or "int8".
        isa: an instruction set for tests; None for the fastest that the machine has.
        progress: called with the bytes of each weight packed.

    Raises:
        InvalidRequestError: an option is out of range.
        ModelLoadError: the model's shape is not supported.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        num_blocks: int,
        precision: str = "int8",
        why_precision: str = "",
        threads: int | None = None,
        block_size: int = 16,
        max_model_len: int | None = None,
        max_num_batched_tokens: int = 512,
        max_num_seqs: int = 256,
        kv_cache_dtype: str = "auto",
        isa: str | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        config = model.config
        context = config.max_position_embeddings
        max_model_len = min(max_model_len or context, context)
        kv_dtype = resolve_kv_dtype(kv_cache_dtype, precision)
        _check_options(precision, kv_dtype, isa)
        _check_shape(config)
        self._block_size = block_size
        self._vocab_size = config.vocab_size
        trial = trial_tokens(config.vocab_size, context)
        self._program = _native.Program(
            max_rows=max(max_num_batched_tokens + max_num_seqs, len(trial)),
            max_logit_rows=MAX_LOGIT_ROWS,
            threads=threads or usable_cpus(),
            isa=isa or _native.best_isa(),
        )
        self._program.set_rotary(*rotary_tables(config, max(max_model_len, len(trial))))
        self._program.set_cache(
            kv_dtype,
            block_size,
            config.num_kv_heads,
            config.head_dim,
            config.num_layers,
            num_blocks,
        )
        self._program.prefault_cache()
        recorder = ProgramRecorder(
            self._program,
            precision,
            config.num_heads,
            progress,
            trial=trial if precision == "int8" else None,
        )
        self._program.finish(forward(recorder, model.weights, config).buffer)
        self._kept = recorder.kept
        self._program.wait_for_cache(_CACHE_PATIENCE)
        self._info = ExecutorInfo(
            model_name=model.name,
            precision=precision,
            device="cpu",
            vocab_size=config.vocab_size,
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            block_size=block_size,
            description=(
                f"{precision} weights ({self._program.weight_bytes / 1e6:.0f} MB"
                f"{', ' + why_precision if why_precision else ''}), {kv_dtype} "
                f"cache ({self._program.cache_bytes / 1e6:.0f} MB), {self._program.isa}, "
                f"{self._program.threads} threads"
            ),
            work=model_work(
                config,
                model.weights,
                kv_dtype,
                body_bytes=self._program.weight_bytes - recorder.head_bytes,
                head_bytes=recorder.head_bytes,
            ),
        )

    @property
    def info(self) -> ExecutorInfo:
        return self._info

    @property
    def program(self) -> _native.Program:
        """The native program, for profiling."""
        return self._program

    def run(self, plan: StepPlan) -> StepResult:
        started = time.perf_counter()
        if plan.copies:
            self._program.copy_blocks(np.array(plan.copies, dtype=np.int32))
        inputs = pack(plan, self._block_size)
        sampling = pack_sampling(plan, inputs)
        outputs = SampleOutputs(len(inputs.logit_rows), _native.MAX_LOGPROBS)
        batch = _native.SampleBatch(
            floats=sampling.floats,
            ints=sampling.ints,
            seeds=sampling.seeds,
            lists=sampling.lists,
            bias_values=sampling.bias_values,
            out_ints=outputs.ints,
            out_floats=outputs.floats,
        )
        self._run(inputs, batch, None)
        logprobs = prompt_logprobs = None
        if (sampling.ints[2] >= 0).any():
            logprobs = outputs.logprobs(sampling.sampled)
            prompt_logprobs = outputs.logprobs(sampling.scored)
        return collect(
            plan,
            outputs.tokens(sampling.sampled),
            time.perf_counter() - started,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    def logits(self, plan: StepPlan) -> np.ndarray:
        """Runs the step without sampling; the raw logits, f32 [S, vocabulary], for tests and
        quality measurements."""
        if plan.copies:
            self._program.copy_blocks(np.array(plan.copies, dtype=np.int32))
        inputs = pack(plan, self._block_size)
        logits = np.empty((len(inputs.logit_rows), self._vocab_size), dtype=np.float32)
        self._run(inputs, None, logits)
        return logits

    def close(self) -> None:
        """Nothing to release early: memory and threads go with the object."""

    def _run(
        self, inputs: StepInputs, batch: _native.SampleBatch | None, logits: np.ndarray | None
    ) -> None:
        self._program.run(
            inputs.token_ids,
            inputs.positions,
            inputs.slots,
            inputs.seq_starts,
            inputs.context_lens,
            inputs.block_table,
            inputs.logit_rows,
            batch,
            logits,
        )


def usable_cpus() -> int:
    """CPUs that this process may use: affinity and control-group quota both count."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = _cgroup_cpus()
    return max(1, min(count or 1, quota) if quota else (count or 1))


def _cgroup_cpus() -> int | None:
    """Whole CPUs of the control group's quota (version 2, then 1), or None without one."""
    root = Path("/sys/fs/cgroup")
    try:
        quota, period = (root / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (root / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (root / "cpu/cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    if quota in ("max", "-1"):
        return None
    return max(1, int(quota) // int(period))


def resolve_kv_dtype(kv_cache_dtype: str, precision: str) -> str:
    if kv_cache_dtype != "auto":
        return kv_cache_dtype
    return "f32" if precision == "f32" else "bf16"


def rotary_tables(config: ModelConfig, positions: int) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of position * frequency, each f32 [positions, head_dim / 2]."""
    angles = np.arange(positions, dtype=np.float32)[:, None] * inverse_frequencies(config)[None, :]
    return np.cos(angles), np.sin(angles)


def _check_options(precision: str, kv_dtype: str, isa: str | None) -> None:
    if precision not in PRECISIONS:
        raise InvalidRequestError(
            f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}.",
            param="precision",
        )
    if kv_dtype not in KV_DTYPES:
        raise InvalidRequestError(
            f"kv_cache_dtype must be auto or one of {', '.join(KV_DTYPES)}, got {kv_dtype!r}.",
            param="kv_cache_dtype",
        )
    if isa is not None and not _native.has_isa(isa):
        raise InvalidRequestError(f"This machine cannot run {isa}.", param="isa")


def _check_shape(config: ModelConfig) -> None:
    """The native kernels work on sixteen numbers at a time."""
    widths = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "head_dim": config.head_dim,
    }
    for name, width in widths.items():
        if width % 16:
            raise ModelLoadError(
                f"The CPU executor needs {name} to be a multiple of 16, but the model has {width}."
            )
    if config.head_dim > 256:
        raise ModelLoadError(
            f"The CPU executor handles head_dim up to 256, but the model has {config.head_dim}."
        )
