"""hotbatch tune from end to end, on a made-up model of two layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hotbatch import tune as tune_module
from hotbatch.assembly import assemble
from hotbatch.cli import app
from hotbatch.core.errors import OptionError
from hotbatch.executor import profile as profile_module
from hotbatch.executor.precision import PrecisionChoice
from hotbatch.options import EngineOptions
from hotbatch.tune import Outcome, plot, read_workload, table, tune
from hotbatch.tuning import Figures, Finalist, Settings, Targets, Trial, choose, over_loads
from hotbatch.tuning import settings as grid
from hotbatch.tuning.report import _in_short, frontier

TINY: dict[str, Any] = {
    "model": "tiny",
    "load_format": "dummy",
    "precision": "int8",
    "kv_cache_memory_bytes": 4 << 20,
}


@pytest.fixture(autouse=True)
def _small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_module, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(grid, "SEATS", (4, 16))
    monkeypatch.setattr(grid, "BUDGETS", (64, 256))
    measure = tune_module.measure_ceiling
    monkeypatch.setattr(
        tune_module,
        "measure_ceiling",
        lambda options, precision, full: measure(options, precision),
    )


def test_what_was_found_is_kept_and_served_with(tmp_path: Path) -> None:
    said: list[str] = []
    outcome = tune(
        EngineOptions(**TINY),
        "chat",
        curve_seconds=0.0,
        search_seconds=0.0,
        play_seconds=0.0,
        say=said.append,
    )
    assert outcome.path is not None
    assert any("GB/s" in line for line in said)
    assert {trial.settings.max_num_seqs for trial in outcome.trials} == {4, 16}
    assert sum(finalist.is_plain for finalist in outcome.finalists) == 2
    assert sum(finalist.is_default for finalist in outcome.finalists) == 1
    assert outcome.chosen.real, "it was played"
    assert any("to the real engine" in line and "at most" in line for line in said)
    assert any(" left: " in line for line in said), "how far it is"
    assert set(outcome.guess_seconds) == {None, 8, 0}
    assert min(outcome.guess_seconds.values()) > 0.0
    assert outcome.profile.host_seconds > 0.0
    served = assemble(EngineOptions(**TINY))
    assert not served.known.is_new
    assert served.known.profile == outcome.profile
    assert served.known.profile.is_full and served.known.profile.curve
    assert served.engine._scheduler.cost_model.is_trained
    assert served.tuned == dict(outcome.profile.settings)
    if not outcome.chosen.is_default:
        assert served.options.max_num_seqs == outcome.chosen.trial.settings.max_num_seqs
    lines = table(outcome).splitlines()
    assert any(line.startswith("Guessed tokens in a step") for line in lines)
    assert "first-come batching" in lines[2 + len(outcome.finalists)]
    kept_all = all(one.attainment > 0.98 for one in outcome.finalists)
    assert ("tighter targets" in lines[-1]) == kept_all
    assert sum("chosen" in line for line in lines) == 1
    image = tmp_path / "frontier.png"
    plot(outcome, image)
    assert image.read_bytes()[:4] == b"\x89PNG"


def test_a_limit_of_guesses_that_was_found_is_served_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tune_module, "time_limits", lambda *_: {None: 1.0, 8: 0.9, 0: 0.5})

    def tuned(**changes: Any) -> Outcome:
        options = EngineOptions(**{**TINY, **changes})
        return tune(options, "chat", curve_seconds=0.0, search_seconds=0.0, play_seconds=0.0)

    assert tuned().profile.settings["speculate_max_tokens"] == 0
    served = assemble(EngineOptions(**TINY))
    assert served.tuned["speculate_max_tokens"] == 0
    assert not served.options.distances.tokens
    asked = tuned(speculate_max_tokens=4)
    assert "speculate_max_tokens" not in asked.profile.settings, "the caller's own"
    assert not tuned(speculate=False).guess_seconds


def test_one_precision_is_measured_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is left open it is measured at each start, and tune starts more than once."""
    choices = iter(("bf16", "int8", "int8", "int8"))
    monkeypatch.setattr(
        "hotbatch.executor.precision.choose_precision",
        lambda *_: PrecisionChoice(precision := next(choices), {precision: 1.0}),
    )
    outcome = tune(
        EngineOptions(**{**TINY, "precision": "auto"}),
        "chat",
        with_engine=False,
        curve_seconds=0.0,
        search_seconds=0.0,
    )
    assert outcome.path is not None and "-bf16-" in outcome.path.name
    assert len(list(choices)) == 3, "it was asked once"


def finalist(worth: float, real: float | None, is_default: bool = False) -> Finalist:
    trial = Trial(Settings(8, 64), (Figures(worth, 100.0, 1.0),))
    rounds = () if real is None else (Figures(real / 2, 50.0, 0.5), Figures(1.5 * real, 50.0, 0.5))
    return Finalist(trial, rounds, is_default)


def test_the_default_stays_unless_another_is_clearly_better() -> None:
    default = finalist(1.0, None, is_default=True)
    better = finalist(1.2, None)
    assert choose([default, better]) is better
    assert choose([default, finalist(1.01, None)]) is default
    # What the engine did counts, not what the simulator promised.
    assert choose([finalist(1.0, 1.0, True), finalist(2.0, 0.9)]).is_default
    plain = Finalist(Trial(Settings(8, 64, is_plain=True), better.trial.figures), better.real)
    assert choose([plain, default]) is default, "it is there to compare with"


def test_the_gain_over_first_come_batching_is_told() -> None:
    def last_line(plain_goodput: float) -> str:
        default = finalist(1.0, 3.0, is_default=True)
        plain = Finalist(
            Trial(Settings(8, 64, is_plain=True), default.trial.figures),
            (Figures(plain_goodput, 50.0, 0.5),),
        )
        outcome = Outcome(
            [],
            [plain, default],
            default,
            Targets(1.0, 0.1),
            None,
            None,
            16,  # type: ignore[arg-type]
        )
        return table(outcome).splitlines()[-1]

    assert last_line(1.0) == "1.50 times the goodput of first-come batching"
    assert last_line(0.0) == "First-come batching served nobody as promised"


def test_figures_over_loads_are_means_and_the_best_throughput() -> None:
    light, heavy = Figures(2.0, 50.0, 1.0), Figures(3.0, 90.0, 0.5)
    assert over_loads([light, heavy]) == Figures(2.5, 90.0, 0.75)


def test_the_frontier_is_what_nothing_beats() -> None:
    def trial(throughput: float, worth: float) -> Trial:
        return Trial(Settings(1, 1), (Figures(worth, throughput, 1.0),))

    best, fast, beaten = trial(50.0, 2.0), trial(90.0, 1.0), trial(40.0, 1.5)
    assert frontier([beaten, fast, best]) == [best, fast]


def test_a_bar_says_in_what_a_setting_differs_from_the_default() -> None:
    usual = Settings(256, 512, 100)
    assert _in_short(usual, usual) == "256 x 512"
    other = Settings(64, 1024, 400, threads=1, max_chunk=64)
    assert _in_short(other, usual).splitlines() == [
        "64 x 1024", "64 of one prompt", "4 times the cache", "threads: 1"
    ]  # fmt: skip


def test_a_workload_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="--workload"):
        read_workload("nothing", 10, 100)
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"timestamp": 0, "input_length": 50, "output_length": 5}\n'
        '{"timestamp": 2000, "input_length": 60, "output_length": 6}\n'
    )
    jobs = read_workload(str(trace), 10, 100)
    assert [(job.time, job.num_prompt) for job in jobs] == [(0.0, 50), (1.0, 60)]


def test_the_command_line_offers_it() -> None:
    result = CliRunner().invoke(app, ["tune", "--help"])
    assert result.exit_code == 0
    assert "--workload" in result.stdout
    assert "[MODEL]" in result.stdout, "as in serve"
