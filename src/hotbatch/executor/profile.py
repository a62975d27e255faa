"""What was learnt of a model on a machine, kept from one start to the next.

A profile is a JSON file in the cache folder, named after its key: the model and its size, the
precision, the hardware and the version of hotbatch. One with another key is another
file; a file whose content does not say the same key (copied from elsewhere), that is damaged or
too old is not used. What was measured in a tenth of a second is believed for a day; what `tune`
took a minute for, for a month: virtual machines change their neighbours.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hotbatch.engine.ceiling import Ceiling
from hotbatch.models.embedded import cache_dir

_FORMAT = 1
_QUICK_SECONDS = 24 * 3600.0
_FULL_SECONDS = 30 * _QUICK_SECONDS

CurveStep = tuple[int, int, int, int, int, float]
"""A measured step: the five StepFeatures, then its seconds."""


@dataclass(frozen=True, slots=True)
class ProfileKey:
    """What a profile is valid for. `size` tells models of one name apart."""

    model: str
    size: str
    precision: str
    kv_dtype: str
    hardware: str
    version: str

    @property
    def path(self) -> Path:
        """Where the profile of this key is kept."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        name = re.sub(r"[^a-z0-9.]+", "-", Path(self.model).name.lower()).strip("-") or "model"
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        return cache_dir() / "profiles" / f"{name[:60]}-{self.precision}-{digest}.json"


@dataclass(frozen=True, slots=True)
class Profile:
    """What is known of a model on a machine.

    Attributes:
        ceiling: the machine's best.
        made: seconds since 1970.
        is_full: measured by `hotbatch tune`, not in passing.
        curve: steps measured for the curve T(n); empty where it is learnt while serving.
        host_seconds: of the host per step of a middling batch, measured; 0 if not.
        settings: option names and values that `hotbatch tune` found best.
        tuned_for: the workload that they were found for.
        is_choice: the precision was left to us, and this one was chosen.
    """

    ceiling: Ceiling
    made: float
    is_full: bool = False
    curve: tuple[CurveStep, ...] = ()
    host_seconds: float = 0.0
    settings: Mapping[str, Any] = field(default_factory=dict)
    tuned_for: str = ""
    is_choice: bool = False


def load_profile(key: ProfileKey, now: float | None = None) -> Profile | None:
    """The profile of this key; None if there is none that can be used."""
    try:
        stored = json.loads(key.path.read_text(encoding="utf-8"))
        if stored["format"] != _FORMAT or stored["key"] != dataclasses.asdict(key):
            return None
        profile = _profile_of(stored["profile"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
    age = (time.time() if now is None else now) - profile.made
    return profile if 0.0 <= age <= (_FULL_SECONDS if profile.is_full else _QUICK_SECONDS) else None


def store_profile(key: ProfileKey, profile: Profile) -> Path | None:
    """Write it, whole or not at all; None where the cache folder cannot be written."""
    path = key.path
    text = json.dumps(
        {
            "format": _FORMAT,
            "key": dataclasses.asdict(key),
            "profile": dataclasses.asdict(profile),
        },
        indent=1,
    )
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError:
        return None
    return path


def _profile_of(stored: Mapping[str, Any]) -> Profile:
    ceiling = Ceiling(**stored["ceiling"])
    figures = (ceiling.bandwidth, ceiling.compute, ceiling.attention_compute)
    if not all(isinstance(figure, float) and figure > 0.0 for figure in figures):
        raise ValueError("a ceiling must be above 0")
    if not isinstance(stored["settings"], dict):
        raise ValueError("settings are names with values")
    return Profile(
        ceiling=ceiling,
        made=float(stored["made"]),
        is_full=bool(stored["is_full"]),
        curve=tuple(_curve_step(step) for step in stored["curve"]),
        host_seconds=float(stored["host_seconds"]),
        settings=stored["settings"],
        tuned_for=str(stored["tuned_for"]),
        is_choice=bool(stored.get("is_choice", False)),
    )


def _curve_step(stored: list[float]) -> CurveStep:
    tokens, requests, context, attended, sampled, seconds = stored
    return int(tokens), int(requests), int(context), int(attended), int(sampled), float(seconds)
