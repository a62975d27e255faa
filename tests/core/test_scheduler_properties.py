"""Whatever happens, everybody ends, tokens are those of a solo run, and no block is lost."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from random_schedules import Case, cases, mixed_cases, run_case

QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True}


@settings(max_examples=150, **QUIET)  # type: ignore[arg-type]
@given(case=cases())
def test_random_schedules_end_like_solo_runs(case: Case) -> None:
    run_case(case)


@pytest.mark.slow
@settings(max_examples=2000, **QUIET)  # type: ignore[arg-type]
@given(case=cases())
def test_many_random_schedules_end_like_solo_runs(case: Case) -> None:
    run_case(case)


@settings(max_examples=400, **QUIET)  # type: ignore[arg-type]
@given(case=mixed_cases())
def test_random_classes_tenants_pauses_and_evictions_end_like_solo_runs(case: Case) -> None:
    run_case(case)


@pytest.mark.slow
@settings(max_examples=2000, **QUIET)  # type: ignore[arg-type]
@given(case=mixed_cases())
def test_many_random_schedules_with_every_ingredient_end_like_solo_runs(case: Case) -> None:
    run_case(case)
