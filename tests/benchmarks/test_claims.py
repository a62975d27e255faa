"""The claims' measurements run on any model, and count what they say they count."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "claims"
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]

import batch_claims  # noqa: E402
import step_claims  # noqa: E402
from claim_parts import Ask, Loaded, Played, loaded, table  # noqa: E402

from hotbatch.core.plan import PlannedRequest, StepPlan  # noqa: E402
from hotbatch.executor import profile as profile_module  # noqa: E402
from hotbatch.options import EngineOptions  # noqa: E402


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    cache = tmp_path_factory.mktemp("cache")
    patch = pytest.MonkeyPatch()
    patch.setattr(profile_module, "cache_dir", lambda: cache)
    options = EngineOptions(
        model="tiny",
        load_format="dummy",
        precision="int8",
        kv_cache_memory_bytes=8 << 20,
        max_num_seqs=64,
        max_num_batched_tokens=512,
    )
    with loaded(options) as machine:
        yield machine
    patch.undo()


@pytest.mark.parametrize(
    ("claim", "said"),
    [
        (step_claims.prefill, "prompts in a step"),
        (step_claims.decode, "1 at context 128"),
        (batch_claims.static, "continuous, 64 seats"),
        (batch_claims.utilisation, "decode utilisation"),
        (batch_claims.costs, "fragmentation"),
    ],
)
def test_each_claim_is_measured(
    claim: object, said: str, machine: Loaded, capsys: pytest.CaptureFixture[str]
) -> None:
    claim(machine, 0.05)  # type: ignore[operator]
    assert said in capsys.readouterr().out


def step(*members: tuple[str, int, int]) -> StepPlan:
    """(name, context, blocks) of each."""
    return StepPlan(
        0,
        tuple(
            PlannedRequest(name, context - 1, (1,), tuple(range(blocks)))
            for name, context, blocks in members
        ),
    )


def test_a_static_batch_reserves_its_longest_for_each_seat_until_the_last_ends() -> None:
    asks = [Ask(0.0, 10, 10), Ask(0.0, 10, 30), Ask(0.0, 5, 5)]
    played = Played(plans=[(step(("r0", 20, 2), ("r1", 20, 2)), 1.0), (step(("r1", 40, 3)), 3.0)])
    # 40 tokens for each of two seats, all the time.
    assert batch_claims.used_of_padded(played, asks, 2) == (1 * 40 + 3 * 40) / (4 * 80)
    alone = Played(plans=[(step(("r2", 10, 1)), 1.0)])
    assert batch_claims.used_of_padded(alone, asks, 2) == 1.0


def test_of_blocks_only_the_last_is_not_full() -> None:
    played = Played(plans=[(step(("r0", 20, 2), ("r1", 16, 1)), 1.0)])
    assert batch_claims.used_of_blocks(played) == 36 / 48


def test_a_table_is_as_wide_as_its_widest_cells() -> None:
    assert table(("a", "b"), [("long", 1), ("x", 100)]).splitlines() == [
        "a       b",
        "long    1",
        "x     100",
    ]
