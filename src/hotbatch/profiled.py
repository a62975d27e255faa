"""What is known of a model on this machine before it serves, and how it is put to use.

At the first start the ceiling is measured in passing; `hotbatch tune` measures everything, finds
the best settings, and both keep it in a profile (executor/profile.py). A later start with the
same model, precision, hardware and version begins with what the profile says. An option that
the caller gave always wins over one that was tuned.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hotbatch import __version__
from hotbatch.core.cost_model import CostModel, StepFeatures
from hotbatch.core.errors import OptionError
from hotbatch.engine.ceiling import Ceiling
from hotbatch.engine.warm_up import show
from hotbatch.executor.machine import hardware_name, measure_cpu, measure_cuda
from hotbatch.executor.profile import CurveStep, Profile, ProfileKey, load_profile, store_profile
from hotbatch.models.loader import LoadedModel
from hotbatch.options import EngineOptions

logger = logging.getLogger(__name__)

TUNABLE = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "long_prefill_token_threshold",
    "kv_cache_memory_bytes",
    "threads",
    "speculate_max_tokens",
)
"""Options that a profile may set."""


@dataclass(frozen=True, slots=True)
class Known:
    """A profile with its key. `is_new` is True if it was made by this start."""

    key: ProfileKey
    profile: Profile
    is_new: bool


def profile_key(
    options: EngineOptions, model: LoadedModel, precision: str, kv_dtype: str
) -> ProfileKey:
    """What a profile must have been made for to be of use here."""
    config = model.config
    size = (
        f"{config.num_layers} layers, {config.hidden_size} wide, {config.vocab_size} words, "
        f"{model.weights.num_bytes} bytes"
    )
    return ProfileKey(
        model=model.name,
        size=size,
        precision=precision,
        kv_dtype=kv_dtype,
        hardware=hardware_name(options.device, _threads(options)),
        version=__version__,
    )


def know(options: EngineOptions, key: ProfileKey) -> Known:
    """The stored profile, or a new one with a ceiling measured now, which is stored. Either way it
    is noted if the precision was left to us, so that later starts choose the same."""
    profile = load_profile(key)
    is_choice = options.precision == "auto"
    if profile is not None:
        if is_choice and not profile.is_choice:
            profile = dataclasses.replace(profile, is_choice=True)
            store_profile(key, profile)
        return Known(key, profile, is_new=False)
    ceiling = measure_ceiling(options, key.precision)
    profile = Profile(ceiling=ceiling, made=time.time(), is_choice=is_choice)
    if store_profile(key, profile) is None:
        logger.warning("the profile cannot be kept in %s", key.path.parent)
    return Known(key, profile, is_new=True)


def last_tuned(keys: Sequence[ProfileKey]) -> str | None:
    """Of keys that differ in precision, that of the newest profile by `hotbatch tune`."""
    return _newest(keys, lambda profile: profile.is_full)


def last_chosen(keys: Sequence[ProfileKey]) -> str | None:
    """Of keys that differ in precision, the one that was chosen last."""
    return _newest(keys, lambda profile: profile.is_choice)


def _newest(keys: Sequence[ProfileKey], is_meant: Callable[[Profile], bool]) -> str | None:
    found = [
        (profile.made, key.precision)
        for key in keys
        for profile in [load_profile(key)]
        if profile is not None and is_meant(profile)
    ]
    return max(found)[1] if found else None


def keep_ceiling(known: Known, ceiling: Ceiling) -> None:
    """Let the next start know of a ceiling that turned out higher than it was measured."""
    if ceiling != known.profile.ceiling and load_profile(known.key) == known.profile:
        store_profile(known.key, dataclasses.replace(known.profile, ceiling=ceiling))


def keep_steps(
    known: Known, steps: Sequence[tuple[StepFeatures, float]], host_seconds: float
) -> Known:
    """Let the next start know what steps take, the model and the host. What `tune` took a minute
    for is not given up for it: a busy moment may have been measured."""
    profile = known.profile
    if profile.is_full and profile.curve:
        logger.warning(
            "Steps take another time than when this machine was tuned. Either it is busy now, or "
            "`hotbatch tune` should be run again."
        )
        return known
    curve = tuple((*features, seconds) for features, seconds in steps)
    profile = dataclasses.replace(profile, curve=curve, host_seconds=host_seconds)
    store_profile(known.key, profile)
    return dataclasses.replace(known, profile=profile)


def measure_ceiling(options: EngineOptions, precision: str, *, full: bool = False) -> Ceiling:
    """The machine's best at this precision, on the device and threads of these options."""
    if options.device == "cuda":
        return measure_cuda(precision, "cuda", full=full)
    return measure_cpu(precision, _threads(options), full=full)


def with_tuned(options: EngineOptions, profile: Profile) -> EngineOptions:
    """The options, with what was tuned wherever the caller left the default.

    A combination that the options refuse (the caller's own with tuned ones) is not applied.
    """
    if options.batching != "continuous":
        return options
    tuned: dict[str, Any] = {}
    for item in dataclasses.fields(options):
        if item.name in TUNABLE and getattr(options, item.name) == item.default:
            value = profile.settings.get(item.name)
            if value is not None:
                tuned[item.name] = value
    try:
        return dataclasses.replace(options, **tuned)
    except OptionError as error:
        logger.warning("the tuned settings do not go with these options: %s", error.message)
        return options


def changed(asked: EngineOptions, used: EngineOptions) -> dict[str, Any]:
    """The options that a profile set, with their values."""
    return {
        name: getattr(used, name) for name in TUNABLE if getattr(used, name) != getattr(asked, name)
    }


def primed_cost_model(profile: Profile) -> CostModel:
    """A cost model that has seen the profile's curve, if it has one."""
    model = CostModel()
    show([(features_of(step), step[-1]) for step in profile.curve], model)
    return model


def features_of(step: CurveStep) -> StepFeatures:
    return StepFeatures(*step[:5])


def _threads(options: EngineOptions) -> int:
    if options.device == "cuda":
        return 0
    from hotbatch.executor.cpu_executor import usable_cpus

    return options.threads or usable_cpus()
