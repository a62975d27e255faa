"""Where the threads of a step run: each has a core of its own, whatever else wakes meanwhile."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from cpu_runs import executor

from hotbatch.engine.warm_up import made_up_step
from hotbatch.executor.cpu_executor import usable_cpus

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the system tells no affinities")

TASKS = Path("/proc/self/task")


def workers() -> set[int]:
    """The threads that steps run on; others of this process come and go at any time."""
    found = set()
    for task in TASKS.iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            if (task / "comm").read_text().strip() == "hotbatch-step":
                found.add(int(task.name))
    return found


def placed(num_threads: int) -> list[set[int]]:
    """The cores that the workers of an executor may use after a step."""
    before = workers()
    cpu = executor.__wrapped__("plain", "f32", "f32", threads=num_threads)
    plan = made_up_step([(0, 9)], cpu.info)
    assert plan is not None
    cpu.run(plan)
    return [os.sched_getaffinity(thread) for thread in workers() - before]


@pytest.mark.skipif(usable_cpus() < 2, reason="one core for everybody")
def test_workers_keep_off_the_callers_core_where_they_need_all_the_others() -> None:
    mine = os.sched_getaffinity(0)
    found = placed(len(mine))
    assert len(found) == len(mine) - 1
    assert all(cores < mine and len(cores) == len(mine) - 1 for cores in found)
    assert os.sched_getaffinity(0) == mine, "the caller goes where it likes"


@pytest.mark.parametrize("off", [-1, 1])
def test_with_fewer_threads_or_more_the_system_decides(off: int) -> None:
    mine = os.sched_getaffinity(0)
    num_threads = max(1, len(mine) + off)
    assert placed(num_threads) == [mine] * (num_threads - 1)
