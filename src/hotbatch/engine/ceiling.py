"""What a step needs, what the machine can do at best, and so how quick a step could be.

A step reads the weights of all layers once, those of the head if anything is sampled, and the
keys and values of every context; it multiplies each of its rows with all weights, each sampled
row with the head, and each row with the context that it attends to. Whichever takes longer at
the machine's best, reading or computing, is the ideal time of the step (Williams, Waterman,
Patterson: "Roofline", CACM 2009).

The ceilings are measured on the machine at hand (executor/machine.py, profile.py), never taken
from a data sheet. Layers that attend to a window are counted as if they saw the whole context.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hotbatch.core.cost_model import StepFeatures


@dataclass(frozen=True, slots=True)
class ModelWork:
    """Bytes and operations (a multiply-add is two) of a loaded model.

    Attributes:
        body_bytes: weights of all layers as they lie in memory, read once a step.
        head_bytes: weights of the head, read once in a step that samples.
        kv_bytes: keys and values of one token in all layers.
        body_operations: of one row through all layers, without attention.
        head_operations: of one sampled row.
        attention_operations: of one row with one token that it attends to.
    """

    body_bytes: float
    head_bytes: float
    kv_bytes: float
    body_operations: float
    head_operations: float
    attention_operations: float

    def bytes_of(self, step: StepFeatures) -> float:
        """Bytes that a step must read."""
        weights = self.body_bytes + (self.head_bytes if step.num_sampled else 0.0)
        return weights + self.kv_bytes * step.context_tokens

    def operations_of(self, step: StepFeatures) -> float:
        """Operations that a step must do."""
        return (
            self.body_operations * step.num_tokens
            + self.head_operations * step.num_sampled
            + self.attention_operations * step.attended
        )


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The machine's best.

    Attributes:
        bandwidth: bytes per second read from memory.
        compute: operations per second in linear layers, at the weights' precision.
        attention_compute: operations per second in attention.
        origin: where the figures come from, for people: "measured at start", "profile of ...".
    """

    bandwidth: float
    compute: float
    attention_compute: float
    origin: str = ""


class IdealTime(NamedTuple):
    """Seconds of a step at the machine's best: of reading, and of computing."""

    memory: float
    compute: float

    @property
    def seconds(self) -> float:
        return max(self.memory, self.compute)


class Roofline:
    """A model on a machine, ready to be asked in every step."""

    def __init__(self, work: ModelWork, ceiling: Ceiling) -> None:
        self.work = work
        self.ceiling = ceiling
        self._body_seconds = work.body_bytes / ceiling.bandwidth
        self._head_seconds = work.head_bytes / ceiling.bandwidth
        self._context_seconds = work.kv_bytes / ceiling.bandwidth
        self._row_seconds = work.body_operations / ceiling.compute
        self._sampled_seconds = work.head_operations / ceiling.compute
        self._pair_seconds = work.attention_operations / ceiling.attention_compute

    @property
    def knee(self) -> float:
        """Decoding rows, without their contexts, that take as long to compute as the weights
        take to be read: up to here one more is free at the machine's best."""
        reading = self._body_seconds + self._head_seconds
        return reading / (self._row_seconds + self._sampled_seconds)

    def ideal(self, step: StepFeatures) -> IdealTime:
        return IdealTime(
            self.weights_seconds(step) + self._context_seconds * step.context_tokens,
            self._row_seconds * step.num_tokens
            + self._sampled_seconds * step.num_sampled
            + self._pair_seconds * step.attended,
        )

    def weights_seconds(self, step: StepFeatures) -> float:
        """The part of reading that is the same however many rows there are."""
        return self._body_seconds + (self._head_seconds if step.num_sampled else 0.0)


class CurvePoint(NamedTuple):
    """A step of `num_tokens` rows that decode: its predicted and its ideal seconds."""

    num_tokens: int
    predicted_seconds: float
    ideal_seconds: float


@dataclass(frozen=True, slots=True)
class CeilingSnapshot:
    """The machine, the model on it, and where the server works, at one moment.

    Attributes:
        ceiling: the machine's best.
        work: what the model needs.
        knee: rows at which a decode step turns from memory-bound to compute-bound, ideally.
        context: mean context of recent decoding rows, at which the curve is drawn.
        is_learnt: the curve was learnt from steps; else it is the ideal one.
        curve: T(n), the time of a step in which n sequences decode at that context.
        host_seconds: mean seconds of the host per recent step: planning, booking, delivering,
            and what lay between two steps.
        operating_tokens: mean rows of recent steps that decode.
        operating_seconds: mean measured seconds of these.
    """

    ceiling: Ceiling
    work: ModelWork
    knee: float
    context: float
    is_learnt: bool
    curve: tuple[CurvePoint, ...]
    host_seconds: float
    operating_tokens: float
    operating_seconds: float
