"""What is known before serving: measured once, used where it belongs, never against the caller."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hotbatch import profiled
from hotbatch.assembly import assemble
from hotbatch.core.cost_model import StepFeatures
from hotbatch.engine.ceiling import Ceiling
from hotbatch.executor import profile as profile_module
from hotbatch.executor.precision import PrecisionChoice
from hotbatch.executor.profile import Profile, load_profile, store_profile
from hotbatch.options import EngineOptions
from hotbatch.profiled import keep_ceiling, know, primed_cost_model, with_tuned

CEILING = Ceiling(1e10, 1e11, 1e11, "measured by tune")
TINY: dict[str, Any] = {"model": "tiny", "load_format": "dummy", "precision": "int8"}


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_module, "cache_dir", lambda: tmp_path)


def options(**changes: Any) -> EngineOptions:
    return EngineOptions(**{**TINY, "kv_cache_memory_bytes": 1 << 20, **changes})


def test_the_first_start_measures_and_the_second_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    first = assemble(options())
    assert first.known.is_new
    assert load_profile(first.known.key) == first.known.profile
    monkeypatch.setattr(profiled, "measure_ceiling", lambda *a, **k: pytest.fail("again"))
    second = assemble(options())
    assert not second.known.is_new
    assert second.known.profile == first.known.profile
    assert second.engine.ceiling().ceiling == first.known.profile.ceiling


def test_steps_are_timed_at_the_first_start_only(monkeypatch: pytest.MonkeyPatch) -> None:
    first = assemble(options())
    steps = first.known.profile.curve
    assert steps and all(step[-1] > 0.0 for step in steps)
    assert load_profile(first.known.key) == first.known.profile
    monkeypatch.setattr("hotbatch.assembly.warm_up", lambda *a, **k: pytest.fail("again"))
    monkeypatch.setattr("hotbatch.assembly.is_as_known", lambda *a, **k: True)
    second = assemble(options())
    assert second.known.profile.curve == steps
    assert primed_cost_model(second.known.profile).is_trained


def slowed(profile: Profile) -> Profile:
    return replace(profile, curve=tuple((*step[:5], 50.0 * step[5]) for step in profile.curve))


def test_what_was_measured_in_a_busy_moment_is_measured_again() -> None:
    known = assemble(options()).known
    store_profile(known.key, slowed(known.profile))
    parts = assemble(options())
    stored = load_profile(known.key)
    assert stored is not None and stored == parts.known.profile
    assert sum(step[5] for step in stored.curve) < 10 * sum(s[5] for s in known.profile.curve)
    model = parts.engine._scheduler.cost_model
    assert model is not None
    step = StepFeatures(*known.profile.curve[0][:5])
    assert model.predict(step) < 10 * primed_cost_model(known.profile).predict(step)


def test_what_tune_took_a_minute_for_is_not_given_up_for_a_moment(
    caplog: pytest.LogCaptureFixture,
) -> None:
    known = assemble(options()).known
    tuned = replace(slowed(known.profile), is_full=True)
    store_profile(known.key, tuned)
    parts = assemble(options())
    assert load_profile(known.key) == tuned == parts.known.profile
    assert "tune" in caplog.text
    model = parts.engine._scheduler.cost_model
    assert model is not None
    step = StepFeatures(*known.profile.curve[0][:5])
    assert model.predict(step) < 10 * primed_cost_model(known.profile).predict(step)


def test_a_ceiling_that_turned_out_higher_is_kept() -> None:
    parts = assemble(options())
    higher = replace(parts.known.profile.ceiling, bandwidth=1e15)
    keep_ceiling(parts.known, higher)
    assert assemble(options()).known.profile.ceiling == higher
    # Not over what somebody else has found meanwhile.
    keep_ceiling(parts.known, replace(higher, bandwidth=2e15))
    assert assemble(options()).known.profile.ceiling == higher


def test_another_precision_or_cache_is_another_profile() -> None:
    keys = {
        assemble(options(**changes)).known.key.path
        for changes in ({}, {"precision": "bf16"}, {"kv_cache_dtype": "f32"}, {"threads": 1})
    }
    assert len(keys) >= 3 + (profiled._threads(options()) > 1)


def test_tuned_settings_fill_what_the_caller_left_open() -> None:
    profile = Profile(CEILING, made=0.0, settings={"max_num_seqs": 24, "threads": 1, "port": 1})
    tuned = with_tuned(options(), profile)
    assert (tuned.max_num_seqs, tuned.threads) == (24, 1)
    assert with_tuned(options(max_num_seqs=8), profile).max_num_seqs == 8
    assert with_tuned(options(batching="static"), profile).max_num_seqs == 256


def test_a_bound_and_a_limit_that_were_tuned_are_served_with() -> None:
    settings = {"long_prefill_token_threshold": 64, "speculate_max_tokens": 0}
    profile = Profile(CEILING, made=0.0, settings=settings)
    tuned = with_tuned(options(), profile)
    assert tuned.long_prefill_token_threshold == 64
    assert not tuned.distances.tokens and tuned.distances.requests
    asked = options(long_prefill_token_threshold=32, speculate_max_tokens=4)
    assert with_tuned(asked, profile) == asked


def test_settings_that_contradict_the_caller_s_are_left_alone() -> None:
    profile = Profile(CEILING, made=0.0, settings={"max_num_batched_tokens": 64})
    asked = options(max_num_seqs=100)
    assert with_tuned(asked, profile) == asked


def test_a_tuned_profile_is_what_serve_runs_with() -> None:
    known = assemble(options()).known
    settings = {"max_num_seqs": 24, "max_num_batched_tokens": 96}
    store_profile(known.key, replace(known.profile, settings=settings, is_full=True))
    parts = assemble(options())
    config = parts.engine._scheduler.config
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (24, 96)
    assert parts.options.max_num_seqs == 24


def test_a_restart_serves_the_same_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured anew it may be another one by a hair, and answers would differ."""
    choices = iter(("bf16", "int8"))
    monkeypatch.setattr(
        "hotbatch.executor.precision.choose_precision",
        lambda *_: PrecisionChoice(precision := next(choices), {precision: 1.0}),
    )
    assemble(options(precision="int8"))  # the caller's own is nobody's choice
    known = assemble(options(precision="auto")).known
    assert known.key.precision == "bf16"
    again = assemble(options(precision="auto"))
    assert again.known.key.precision == "bf16"
    assert "earlier start" in again.info.description
    store_profile(known.key, replace(known.profile, made=known.profile.made - 2 * 24 * 3600.0))
    assert assemble(options(precision="auto")).known.key.precision == "int8", "too old"
    assert assemble(options(precision="auto")).known.key.precision == "int8"


def test_the_precision_that_was_tuned_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    choices = iter(("bf16", "int8"))
    monkeypatch.setattr(
        "hotbatch.executor.precision.choose_precision",
        lambda *_: PrecisionChoice(precision := next(choices), {precision: 1.0}),
    )
    known = assemble(options(precision="auto")).known
    assert known.key.precision == "bf16"
    store_profile(known.key, replace(known.profile, is_full=True))
    assert assemble(options(precision="auto")).known.key.precision == "bf16"
    assert assemble(options(precision="auto"), as_tuned=False).known.key.precision == "int8"
    assert assemble(options(precision="int8")).known.key.precision == "int8", "the caller's own"


def test_a_curve_trains_the_cost_model_before_the_first_step() -> None:
    assert not primed_cost_model(Profile(CEILING, made=0.0)).is_trained
    curve = tuple(
        (n, n, n * context, n * context, n, 0.004 + 0.0003 * n + n * context * 1e-7)
        for n in (1, 2, 4, 8, 16, 32, 64)
        for context in (128, 1024)
    ) + tuple((n, 1, n, n * (n + 1) // 2, 1, 0.004 + 0.0003 * n) for n in (64, 128, 256, 512))
    model = primed_cost_model(Profile(CEILING, made=0.0, curve=curve))
    assert model.is_trained
    for n in (2, 12, 48):
        step = StepFeatures(n, n, n * 500, n * 500, n)
        assert model.predict(step) == pytest.approx(0.004 + 0.0003 * n + n * 500e-7, rel=0.1)


def test_a_cache_folder_that_cannot_be_written_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    key = assemble(options()).known.key
    monkeypatch.setattr(profile_module, "cache_dir", lambda: file)
    assert know(options(), key).is_new
    assert "cannot be kept" in caplog.text
