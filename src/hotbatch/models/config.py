"""The shape of a model, read from a Hugging Face config.json or from GGUF metadata.

Both sources are checked here, once: whatever the code could not honour (an unknown
architecture, a rope variant, a quantised checkpoint) raises ModelLoadError naming it, as a
model that silently computes something else is worse than none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hotbatch.core.errors import ModelLoadError

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
_GGUF_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_MODEL_TYPES = {name.removesuffix("ForCausalLM").lower(): name for name in ARCHITECTURES}


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched for contexts longer than trained.

    kind "linear": all divided by `factor`. kind "llama3": low frequencies divided by `factor`,
    high ones kept, a ramp between (Llama 3.1). kind "factors": frequency i divided by
    `factors[i]` (GGUF's `rope_freqs.weight`, which is llama3 worked out).
    """

    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The numbers that define a model of the Llama family. All sizes count elements.

    layer_windows has an entry a layer: the attention window in tokens (the query's own
    included), or None for full attention. The three bias flags say which linear layers have
    one; qk_norm whether query and key heads are normalised before rotation.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layer_windows: tuple[int | None, ...]
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for field in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            if getattr(self, field) < 1:
                raise ModelLoadError(
                    f"The model's config has {field} = {getattr(self, field)}; "
                    "it must be at least 1."
                )
        if self.num_heads % self.num_kv_heads:
            raise ModelLoadError(
                f"The model's config has {self.num_heads} attention heads, which is not a "
                f"multiple of its {self.num_kv_heads} key/value heads."
            )
        if self.head_dim % 2:
            raise ModelLoadError(
                f"The model's config has head_dim = {self.head_dim}; rotary embedding needs "
                "an even one."
            )
        if len(self.layer_windows) != self.num_layers:
            raise ModelLoadError(
                f"The model's config has {self.num_layers} layers but attention types for "
                f"{len(self.layer_windows)}."
            )

    @property
    def sliding_window(self) -> int | None:
        """The widest attention window if every layer has one, else None: keys older than
        this are never read again."""
        windows = [window for window in self.layer_windows if window is not None]
        return max(windows) if len(windows) == self.num_layers else None

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Count of matrix weights and norms, a tied head counted once; biases left out."""
        layer = (
            self.hidden_size * (2 * self.q_size + 2 * self.kv_size)
            + 3 * self.hidden_size * self.intermediate_size
            + 2 * self.hidden_size
        )
        tables = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * layer + tables + self.hidden_size


def config_from_hf(data: Mapping[str, Any], origin: str = "config.json") -> ModelConfig:
    """Read the dictionary of a config.json (of transformers 4 or 5).

    Raises:
        ModelLoadError: an entry is missing or asks for something unsupported; `origin` is the
            file named in the message.
    """
    architecture = _hf_architecture(data, origin)
    _refuse_hf_features(data, origin)
    num_layers = _int(data, "num_hidden_layers", origin)
    num_heads = _int(data, "num_attention_heads", origin)
    hidden_size = _int(data, "hidden_size", origin)
    qwen = architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM")
    # transformers' class default, which its Qwen3 files may leave out.
    default_head_dim = 128 if architecture == "Qwen3ForCausalLM" else hidden_size // num_heads
    attention_bias = bool(data.get("attention_bias", False))
    rope_theta, rope_scaling = _hf_rope(data, origin)
    return ModelConfig(
        architecture=architecture,
        vocab_size=_int(data, "vocab_size", origin),
        hidden_size=hidden_size,
        intermediate_size=_int(data, "intermediate_size", origin),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=int(data.get("num_key_value_heads") or num_heads),
        head_dim=int(data.get("head_dim") or default_head_dim),
        layer_windows=_hf_windows(data, architecture, num_layers, qwen),
        max_position_embeddings=int(data.get("max_position_embeddings", 2048)),
        rms_norm_eps=float(data.get("rms_norm_eps", 1e-6)),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        attention_bias=attention_bias or architecture == "Qwen2ForCausalLM",
        attention_out_bias=attention_bias and architecture != "Qwen2ForCausalLM",
        mlp_bias=bool(data.get("mlp_bias", False)),
        qk_norm=architecture == "Qwen3ForCausalLM",
        tie_word_embeddings=bool(data.get("tie_word_embeddings", False)),
        bos_token_id=first_id(data.get("bos_token_id")),
        eos_token_ids=ids(data.get("eos_token_id")),
    )


def ids(value: Any) -> tuple[int, ...]:
    """Token ids as config files have them: an int, a list of ints, or null."""
    if value is None:
        return ()
    return tuple(int(item) for item in value) if isinstance(value, list) else (int(value),)


def first_id(value: Any) -> int | None:
    found = ids(value)
    return found[0] if found else None


def _int(data: Mapping[str, Any], key: str, origin: str) -> int:
    value = data.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ModelLoadError(f"{origin} has no whole number {key!r} (found {value!r}).")
    return value


def _hf_architecture(data: Mapping[str, Any], origin: str) -> str:
    by_type = _MODEL_TYPES.get(str(data.get("model_type", "")), "")
    architecture = str((data.get("architectures") or [by_type])[0])
    if architecture not in ARCHITECTURES:
        raise ModelLoadError(
            f"{origin} names the architecture "
            f"{architecture or data.get('model_type') or 'nothing'!r}, "
            f"which is not supported. Supported: {', '.join(ARCHITECTURES)}."
        )
    return architecture


def _refuse_hf_features(data: Mapping[str, Any], origin: str) -> None:
    if data.get("quantization_config"):
        method = data["quantization_config"].get("quant_method", "unknown")
        raise ModelLoadError(
            f"{origin} describes a checkpoint quantised with {method!r}, which is not "
            "supported. Use the unquantised safetensors or a GGUF file of the model."
        )
    activation = data.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelLoadError(
            f"{origin} asks for hidden_act {activation!r}; only silu is supported."
        )
    rope = data.get("rope_parameters") or data.get("rope_scaling") or {}
    for partial in (data.get("partial_rotary_factor"), rope.get("partial_rotary_factor")):
        if partial is not None and float(partial) != 1.0:
            raise ModelLoadError(
                f"{origin} has partial_rotary_factor {partial}; only whole-head rotation (1.0) "
                "is supported."
            )


def _hf_rope(data: Mapping[str, Any], origin: str) -> tuple[float, RopeScaling | None]:
    """transformers 5 writes `rope_parameters` with everything; 4 `rope_theta` and
    `rope_scaling`, whose `rope_type` was once called `type`."""
    rope: Mapping[str, Any] = data.get("rope_parameters") or data.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta") or data.get("rope_theta") or 10000.0)
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ModelLoadError(
            f"{origin} has rope parameters of their own for kinds of layers, "
            "which is not supported."
        )
    if kind == "default":
        return theta, None
    try:
        if kind == "linear":
            return theta, RopeScaling("linear", factor=float(rope["factor"]))
        if kind == "llama3":
            return theta, RopeScaling(
                "llama3",
                factor=float(rope["factor"]),
                low_freq_factor=float(rope["low_freq_factor"]),
                high_freq_factor=float(rope["high_freq_factor"]),
                original_max_position_embeddings=int(rope["original_max_position_embeddings"]),
            )
    except KeyError as error:
        raise ModelLoadError(f"{origin} asks for {kind} rope scaling without {error}.") from None
    raise ModelLoadError(
        f"{origin} asks for rope scaling {kind!r}, which is not supported. "
        "Supported: default, linear, llama3."
    )


def _hf_windows(
    data: Mapping[str, Any], architecture: str, num_layers: int, qwen: bool
) -> tuple[int | None, ...]:
    """Mistral slides in every layer (4096 is transformers' default when the entry is left out,
    null means off). Qwen slides only with `use_sliding_window`, from layer
    `max_window_layers` on, or where `layer_types` says so."""
    if architecture == "MistralForCausalLM":
        window = data.get("sliding_window", 4096)
        return (None if window is None else int(window),) * num_layers
    window = data.get("sliding_window", 4096)
    if not qwen or not data.get("use_sliding_window", False) or window is None:
        return (None,) * num_layers
    types = data.get("layer_types")
    if types is not None:
        return tuple(int(window) if kind == "sliding_attention" else None for kind in types)
    first = int(data.get("max_window_layers", 28))
    return tuple(int(window) if layer >= first else None for layer in range(num_layers))


def config_from_gguf(
    metadata: Mapping[str, Any],
    *,
    vocab_size: int,
    has_head: bool,
    tensor_names: frozenset[str] = frozenset(),
    rope_factors: tuple[float, ...] = (),
    origin: str = "the GGUF file",
) -> ModelConfig:
    """Read GGUF metadata (key -> value) and the facts that only its tensors tell.

    Args:
        vocab_size: rows of the embedding; the metadata may leave it out.
        has_head: whether the file has an `output.weight`, else the head is tied.
        tensor_names: all names in the file, from which the bias flags follow.
        rope_factors: contents of `rope_freqs.weight`, empty if there is none.

    Raises:
        ModelLoadError: an entry is missing or asks for something unsupported.
    """
    kind = str(metadata.get("general.architecture", ""))
    if kind not in _GGUF_ARCHITECTURES:
        raise ModelLoadError(
            f"{origin} holds a model of architecture {kind!r}, which is not supported. "
            f"Supported: {', '.join(_GGUF_ARCHITECTURES)}."
        )
    values = {
        key.removeprefix(f"{kind}."): value
        for key, value in metadata.items()
        if key.startswith(f"{kind}.")
    }
    if values.get("expert_count"):
        raise ModelLoadError(f"{origin} holds a mixture of experts, which is not supported.")
    num_layers = _int(values, "block_count", origin)
    num_heads = _int(values, "attention.head_count", origin)
    hidden_size = _int(values, "embedding_length", origin)
    head_dim = int(values.get("attention.key_length") or hidden_size // num_heads)
    for key in ("rope.dimension_count", "attention.value_length"):
        if int(values.get(key) or head_dim) != head_dim:
            raise ModelLoadError(
                f"{origin} has {kind}.{key} = {values[key]} with heads of {head_dim}; only "
                "equal sizes are supported."
            )
    window = values.get("attention.sliding_window")
    eos = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return ModelConfig(
        architecture=_GGUF_ARCHITECTURES[kind],
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=_int(values, "feed_forward_length", origin),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=int(values.get("attention.head_count_kv") or num_heads),
        head_dim=head_dim,
        layer_windows=(int(window) if window else None,) * num_layers,
        max_position_embeddings=_int(values, "context_length", origin),
        rms_norm_eps=float(values.get("attention.layer_norm_rms_epsilon", 1e-6)),
        rope_theta=float(values.get("rope.freq_base", 10000.0)),
        rope_scaling=_gguf_rope_scaling(values, rope_factors, origin),
        attention_bias="blk.0.attn_q.bias" in tensor_names,
        attention_out_bias="blk.0.attn_output.bias" in tensor_names,
        mlp_bias="blk.0.ffn_down.bias" in tensor_names,
        qk_norm=kind == "qwen3",
        tie_word_embeddings=not has_head,
        bos_token_id=first_id(metadata.get("tokenizer.ggml.bos_token_id")),
        eos_token_ids=tuple(dict.fromkeys(int(item) for item in eos if item is not None)),
    )


def _gguf_rope_scaling(
    values: Mapping[str, Any], factors: tuple[float, ...], origin: str
) -> RopeScaling | None:
    if factors:
        return RopeScaling("factors", factors=factors)
    kind = values.get("rope.scaling.type", "none")
    # Files of before the type was written have the factor of linear scaling alone.
    factor = float(values.get("rope.scaling.factor") or values.get("rope.scale_linear") or 1.0)
    if kind == "none" and "rope.scale_linear" not in values:
        return None
    if kind in ("none", "linear"):
        return RopeScaling("linear", factor=factor)
    raise ModelLoadError(
        f"{origin} asks for rope scaling {kind!r}, which is not supported. "
        "Supported: none, linear, and Llama 3's rope_freqs tensor."
    )
