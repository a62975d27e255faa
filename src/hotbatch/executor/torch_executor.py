"""The reference executor: any step on plain torch kernels, on CPU or CUDA. Slow but right.

It is the oracle for the native executor and the way to run on a GPU until that has kernels of
its own. Each operation of the model's vocabulary calls the reference of its kernel folder, at the
precision asked for; in f32 the results agree with Hugging Face transformers.

Library matrix products may sum in another order for another number of rows, so unlike the native
executor this one keeps a request's tokens equal across batches only up to rounding.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hotbatch.core.errors import ModelLoadError
from hotbatch.core.plan import StepPlan, StepResult
from hotbatch.engine.ceiling import ModelWork
from hotbatch.engine.protocol import ExecutorInfo
from hotbatch.executor import results
from hotbatch.executor.inputs import Int32Array, StepInputs, pack
from hotbatch.executor.model_work import model_work
from hotbatch.executor.recorder import layer_precision
from hotbatch.kernels.activation.reference import silu_mul
from hotbatch.kernels.attention.reference import paged_attention
from hotbatch.kernels.embedding.reference import embed
from hotbatch.kernels.matmul import reference as matmul
from hotbatch.kernels.norm.reference import rms_norm
from hotbatch.kernels.rotary.reference import rotate, store
from hotbatch.kernels.sampling import reference as sampling
from hotbatch.models.config import ModelConfig
from hotbatch.models.llama import forward
from hotbatch.models.loader import LoadedModel
from hotbatch.models.rope import inverse_frequencies
from hotbatch.models.weights import FloatArray, LinearWeight, LlamaWeights, RawTensor

PRECISIONS = ("f32", "bf16", "int8", "int4")
KV_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
_MAX_SCORED_ROWS = 64  # rows of prompt log-probabilities sorted at a time, to bound memory
_ON_FOUR_BIT_GRID = ("Q4_0", "Q4_1")


@dataclass(frozen=True, slots=True, eq=False)
class _Linear:
    """A linear layer on the device: `weight` [N, K] is f32 (also for int4, then on a 4-bit
    grid), bf16, or int8 with `scales` [N]."""

    precision: str
    weight: Tensor
    scales: Tensor | None
    bias: Tensor | None


class TorchExecutor:
    """Runs steps of a loaded model with the reference kernels.

    Args:
        model: from `load_model`.
        device: a torch device, such as "cpu" or "cuda".
        precision: of linear layers: "f32", "bf16", "int8" or "int4" (with the head and what
            the file holds finer in int8); activations between them stay f32.
        num_blocks, block_size: size of the KV cache, in blocks and in tokens a block.
        max_model_len: longest prompt plus output; None for the model's own limit.
        kv_dtype: "f32" or "bf16"; None for f32 where the precision is f32, else bf16.

    Raises:
        ModelLoadError: an option or the device is not available.
    """

    def __init__(
        self,
        model: LoadedModel,
        device: str = "cpu",
        precision: str = "f32",
        *,
        num_blocks: int = 512,
        block_size: int = 16,
        max_model_len: int | None = None,
        kv_dtype: str | None = None,
    ) -> None:
        self.device = _device(device)
        self.precision = _choice("precision", precision, PRECISIONS)
        default_kv = "f32" if precision == "f32" else "bf16"
        kv = KV_DTYPES[_choice("kv_dtype", kv_dtype or default_kv, tuple(KV_DTYPES))]
        self.config: ModelConfig = model.config
        self.weights: LlamaWeights = model.weights
        cache_shape = (num_blocks, block_size, self.config.num_kv_heads, self.config.head_dim)
        self.kv_caches = [  # keys and values of each layer
            (
                torch.zeros(cache_shape, dtype=kv, device=self.device),
                torch.zeros(cache_shape, dtype=kv, device=self.device),
            )
            for _ in range(self.config.num_layers)
        ]
        self.inverse_frequencies = self._to_device(inverse_frequencies(self.config))
        self.embedding = self._to_device(self.weights.embedding.to_f32())
        self.linears: dict[LinearWeight, _Linear] = {}
        self.vectors: dict[int, Tensor] = {}
        self._prepare_weights()
        self._info = ExecutorInfo(
            model_name=model.name,
            precision=precision,
            device=str(self.device),
            vocab_size=self.config.vocab_size,
            max_model_len=min(
                max_model_len or self.config.max_position_embeddings,
                self.config.max_position_embeddings,
            ),
            num_blocks=num_blocks,
            block_size=block_size,
            description=f"{model.name}, {precision} on {self.device} (torch reference)",
            work=self._work("bf16" if kv is torch.bfloat16 else "f32"),
        )

    def _work(self, kv_dtype: str) -> ModelWork:
        def num_bytes(linear: _Linear) -> int:
            return int(linear.weight.numel() * linear.weight.element_size())

        head = num_bytes(self.linears[self.weights.head])
        return model_work(
            self.config,
            self.weights,
            kv_dtype,
            body_bytes=sum(map(num_bytes, self.linears.values())) - head,
            head_bytes=head,
        )

    @property
    def info(self) -> ExecutorInfo:
        return self._info

    def close(self) -> None:
        """Let go of weights and cache; the executor cannot run after this."""
        self.kv_caches.clear()
        self.linears.clear()
        self.vectors.clear()

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Compute the step; see the Executor protocol."""
        started = time.perf_counter()
        self._copy_blocks(plan.copies)
        inputs = pack(plan, self._info.block_size)
        logits = self.logits(inputs)
        rows = results.sample_rows(plan, inputs)
        token_ids = _sample(logits, rows)
        num_top = results.num_sample_top(plan)
        sampled = None
        if num_top is not None:
            logit_rows = np.array([row.logit_row for row in rows], dtype=np.int32)
            sampled = _logprobs(logits, logit_rows, np.maximum(token_ids, 0), num_top)
        num_top = results.num_prompt_top(plan)
        scored = None
        if num_top is not None:
            scored = _logprobs(logits, *results.prompt_rows(plan, inputs), num_top)
        seconds = time.perf_counter() - started
        return results.collect(plan, token_ids, seconds, sampled, scored)

    @torch.inference_mode()
    def logits(self, inputs: StepInputs) -> Tensor:
        """One forward pass, which also fills the cache: f32 [S, vocab] for inputs.logit_rows."""
        return forward(_TorchOps(self, inputs), self.weights, self.config)

    def _copy_blocks(self, copies: tuple[tuple[int, int], ...]) -> None:
        if not copies:
            return
        sources, destinations = (
            torch.tensor(blocks, device=self.device) for blocks in zip(*copies, strict=True)
        )
        for caches in self.kv_caches:
            for cache in caches:
                cache[destinations] = cache[sources]

    def _to_device(self, values: FloatArray) -> Tensor:
        return torch.from_numpy(np.array(values)).to(self.device)  # a copy, as files are read-only

    def _prepare_weights(self) -> None:
        weights = self.weights
        linears = [weights.head]
        vectors = [weights.final_norm]
        for layer in weights.layers:
            linears += [layer.qkv, layer.attention_out, layer.gate_up, layer.down]
            vectors += [layer.attention_norm, layer.mlp_norm]
            vectors += [norm for norm in (layer.q_norm, layer.k_norm) if norm is not None]
        self.linears = {linear: self._prepare_linear(linear) for linear in linears}
        # Arrays are known by identity; self.weights keeps them alive, so ids stay theirs.
        self.vectors = {id(vector): self._to_device(vector) for vector in vectors}

    def _prepare_linear(self, linear: LinearWeight) -> _Linear:
        if linear.parts[0] is self.weights.embedding:
            weight = self.embedding
        else:
            weight = self._to_device(linear.to_f32())
        precision = layer_precision(linear, self.precision, linear is self.weights.head)
        scales = None
        if precision == "bf16":
            weight = weight.to(torch.bfloat16)
        elif precision == "int8":
            weight, scales = matmul.quantize_weight_int8(weight)
        elif precision == "int4":
            weight = _on_four_bit_grid(linear, weight)
        bias = None if linear.bias is None else self._to_device(linear.bias)
        return _Linear(precision, weight, scales, bias)


class _TorchOps:
    """The model's vocabulary, eagerly, for one step."""

    def __init__(self, executor: TorchExecutor, inputs: StepInputs) -> None:
        def on_device(array: Int32Array) -> Tensor:
            return torch.from_numpy(array).to(executor.device)

        self._executor = executor
        self._token_ids = on_device(inputs.token_ids)
        self._positions = on_device(inputs.positions)
        self._slots = on_device(inputs.slots)
        self._logit_rows = on_device(inputs.logit_rows)
        self._block_table = on_device(inputs.block_table)
        # Read by Python loops: these stay on the host.
        self._seq_starts = torch.from_numpy(inputs.seq_starts)
        self._context_lens = torch.from_numpy(inputs.context_lens)

    def embed(self, table: RawTensor) -> Tensor:
        assert table is self._executor.weights.embedding
        return embed(self._executor.embedding, self._token_ids)

    def rms_norm(self, x: Tensor, weight: FloatArray, eps: float) -> Tensor:
        return rms_norm(x, self._executor.vectors[id(weight)], eps)

    def linear(self, x: Tensor, weight: LinearWeight, residual: Tensor | None = None) -> Tensor:
        layer = self._executor.linears[weight]
        if layer.scales is not None:
            return matmul.linear_int8(x, layer.weight, layer.scales, layer.bias, residual)
        product = {
            "f32": matmul.linear,
            "bf16": matmul.linear_bf16,
            "int4": matmul.linear_int4,
        }[layer.precision]
        return product(x, layer.weight, layer.bias, residual)

    def rotary_and_store(
        self,
        qkv: Tensor,
        layer_index: int,
        q_norm: FloatArray | None = None,
        k_norm: FloatArray | None = None,
        eps: float = 0.0,
    ) -> Tensor:
        config = self._executor.config
        sizes = [config.q_size, config.kv_size, config.kv_size]
        q, k, v = (part.unflatten(1, (-1, config.head_dim)) for part in qkv.split(sizes, dim=1))
        if q_norm is not None:
            q = self.rms_norm(q, q_norm, eps)
        if k_norm is not None:
            k = self.rms_norm(k, k_norm, eps)
        frequencies = self._executor.inverse_frequencies
        k_cache, v_cache = self._executor.kv_caches[layer_index]
        store(k_cache, self._slots, rotate(k, self._positions, frequencies))
        store(v_cache, self._slots, v)
        return rotate(q, self._positions, frequencies).flatten(1)

    def attention(self, q: Tensor, layer_index: int, window: int | None) -> Tensor:
        k_cache, v_cache = self._executor.kv_caches[layer_index]
        heads = q.unflatten(1, (-1, self._executor.config.head_dim))
        mixed = paged_attention(
            heads,
            k_cache,
            v_cache,
            self._seq_starts,
            self._context_lens,
            self._block_table,
            window,
        )
        return mixed.flatten(1)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return silu_mul(gate_up)

    def select(self, x: Tensor) -> Tensor:
        return x[self._logit_rows.long()]


def _device(name: str) -> torch.device:
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ModelLoadError(
            "No CUDA device can be used: torch sees none. Use --device cpu, or install a torch "
            "built for CUDA and check the driver.",
            param="device",
        )
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ModelLoadError(f"Unknown device {name!r}: {error}.", param="device") from None


def _choice(option: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ModelLoadError(
            f"Unknown {option} {value!r}; choose one of {', '.join(allowed)}.", param=option
        )
    return value


def _on_four_bit_grid(linear: LinearWeight, weight: Tensor) -> Tensor:
    """Parts that lie on a 4-bit grid in the file keep it exactly; others are rounded to one."""
    parts = weight.split([part.shape[0] for part in linear.parts])
    rounded = [
        values if part.dtype in _ON_FOUR_BIT_GRID else matmul.quantize_weight_int4(values)
        for part, values in zip(linear.parts, parts, strict=True)
    ]
    return torch.cat(rounded)


def _sample(logits: Tensor, rows: list[results.SampleRow]) -> Int32Array:
    """int32 [R], a token for each row or NO_TOKEN."""
    tokens = [sampling.sample(logits[row.logit_row], _controls(row)) for row in rows]
    return np.array(tokens, dtype=np.int32)


def _controls(row: results.SampleRow) -> sampling.Controls:
    params = row.params
    return sampling.Controls(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=params.logit_bias,
        banned=row.banned,
        prompt=row.history[: row.num_prompt],
        output=row.history[row.num_prompt :],
        seed=row.seed,
        position=row.position,
    )


def _logprobs(
    logits: Tensor, logit_rows: Int32Array, token_ids: Int32Array, num_top: int
) -> results.LogprobRows:
    """Score `token_ids` [R] at `logit_rows` [R] of the logits."""
    pieces: list[tuple[Tensor, ...]] = []
    for first in range(0, max(len(logit_rows), 1), _MAX_SCORED_ROWS):
        part = slice(first, first + _MAX_SCORED_ROWS)
        rows = torch.from_numpy(logit_rows[part]).to(logits.device).long()
        chosen = torch.from_numpy(token_ids[part]).to(logits.device)
        pieces.append(sampling.logprobs_of(logits[rows], chosen, num_top))
    logprobs, ranks, top_ids, top_logprobs = (
        torch.cat(part).cpu().numpy() for part in zip(*pieces, strict=True)
    )
    return results.LogprobRows(
        logprobs, ranks.astype(np.int32), top_ids.astype(np.int32), top_logprobs
    )
