"""How an int8 layer comes to do with one activation scale a row.

A few channels of a norm's output are many times as large as the others. Where they share a scale
with all of a row, the others get few of its 255 steps. So each channel is divided by a factor, and
its column of the weights multiplied by it: SmoothQuant (Xiao et al., arXiv 2211.10438) with alpha
0.5, that is the root of activation over weight. An activation counts by the largest magnitude, as
in the paper. A column of weights counts by its root mean square instead of its largest: what an
activation's rounding does to the outputs goes by that, and one weight tells little of a column.
Measured, the model is then about as near to f32 as with a scale for each group of 64, which it is
not with largest weights or with powers of two for factors (docs/kernels.md).

How large channels get is seen while the model is recorded: a short prompt of token ids from all
over the vocabulary goes through what is recorded already (csrc/program_trial.cpp). That needs no
text and no file, takes about as long as one step, and gives the same at each start.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hotbatch.kernels import _native
from hotbatch.models.weights import FloatArray

_NUM_TRIAL_TOKENS = 64
_STRIDE, _FIRST = 7919, 11  # a prime: neighbours have nothing to do with each other
# What is smaller than so many times the median counts as this: a channel that is silent in the
# trial may speak later.
_LEAST = 1.0 / 16.0
# Steps of rounding may be twice as wide as those of groups, in the mean of squares.
_MOST_ERROR = 4.0


def trial_tokens(vocab_size: int, context: int) -> NDArray[np.int32]:
    """The prompt to try a model with: 64 token ids, fewer where its context is shorter."""
    count = min(_NUM_TRIAL_TOKENS, context)
    return ((np.arange(count) * _STRIDE + _FIRST) % vocab_size).astype(np.int32)


def column_scales(tried: FloatArray, squares: FloatArray) -> FloatArray | None:
    """What to multiply each column of a weight by and divide its input by.

    Args:
        tried: inputs of the layer, f32 [tokens, in].
        squares: the mean square of each column of the weight, f32 [in].

    Returns f32 [in], or None where one scale a row would not do: rounding would cost far more than
    with a scale for each group, or numbers are not finite.
    """
    if not (np.isfinite(tried).all() and np.isfinite(squares).all()):
        return None
    activations = np.abs(tried).max(axis=0)
    weights = np.sqrt(squares)
    if not (activations.any() and weights.any()):
        return None
    scales: FloatArray = np.sqrt(_at_least(activations) / _at_least(weights))
    one = rounding_error(tried / scales, squares * scales**2, len(squares))
    groups = rounding_error(tried, squares, _native.INT8_GROUP)
    return scales if one <= _MOST_ERROR * groups else None


def rounding_error(inputs: FloatArray, squares: FloatArray, group: int) -> float:
    """By how much an output is off in the mean of squares, up to a factor, where each `group` of a
    row's inputs shares the scale that its largest one asks for."""
    starts = np.arange(0, len(squares), group)
    largest = np.maximum.reduceat(np.abs(inputs), starts, axis=1)
    return float((largest**2).mean(axis=0) @ np.add.reduceat(squares, starts))


def _at_least(values: FloatArray) -> FloatArray:
    """None is 0 or far below the others."""
    present = values[values > 0.0]
    return np.maximum(values, np.float32(_LEAST) * np.median(present))
