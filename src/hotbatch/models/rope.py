"""Rotary frequencies: the one part of rotary embedding that depends on the model's config.

Computed in double precision and rounded once, so every executor starts from the same numbers.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from hotbatch.core.errors import ModelLoadError
from hotbatch.models.config import ModelConfig, RopeScaling


def inverse_frequencies(config: ModelConfig) -> NDArray[np.float32]:
    """Radians per position for each pair of a head's dimensions: f32 [head_dim / 2].

    Dimension i turns together with dimension i + head_dim / 2 (the half-split layout of
    GPT-NeoX, as in Hugging Face transformers) by position * result[i].

    Source: Su et al. 2021, "RoFormer"; Llama 3.1's scaling as published by Meta in
    `llama_models` (`apply_scaling`).
    """
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    frequencies = 1.0 / np.power(float(config.rope_theta), exponents)
    if config.rope_scaling is not None:
        frequencies = _scaled(frequencies, config.rope_scaling)
    return frequencies.astype(np.float32)


def _scaled(frequencies: NDArray[np.float64], scaling: RopeScaling) -> NDArray[np.float64]:
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "factors":
        if len(scaling.factors) != len(frequencies):
            raise ModelLoadError(
                f"The model has {len(scaling.factors)} rope factors for heads of "
                f"{2 * len(frequencies)}; it needs {len(frequencies)}."
            )
        return frequencies / np.asarray(scaling.factors, dtype=np.float64)
    assert scaling.kind == "llama3", scaling.kind
    return _llama3(frequencies, scaling)


def _llama3(frequencies: NDArray[np.float64], scaling: RopeScaling) -> NDArray[np.float64]:
    """Frequencies that turned fewer than low_freq_factor times over the original context are
    slowed by the factor, those above high_freq_factor turns are kept, those between blended."""
    turns = scaling.original_max_position_embeddings * frequencies / (2.0 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = np.clip((turns - scaling.low_freq_factor) / span, 0.0, 1.0)
    return (1.0 - kept) * frequencies / scaling.factor + kept * frequencies
