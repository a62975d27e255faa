"""Where the threads of a step run: each has a core of its own, whatever else wakes meanwhile."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from cpu_runs import executor

from hotbatch.engine.warm_up import made_up_step
from hotbatch.executor.cpu_executor import usable_cpus

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the system tells no affinities")

TASKS = Path("/proc/self/task")


def threads() -> set[int]:
    return {int(task.name) for task in TASKS.iterdir()}


def placed(num_threads: int) -> list[set[int]]:
    """The cores that the workers of an executor may use after a step."""
    before = threads()
    cpu = executor.__wrapped__("plain", "f32", "f32", threads=num_threads)
    plan = made_up_step([(0, 9)], cpu.info)
    assert plan is not None
    cpu.run(plan)
    return [os.sched_getaffinity(thread) for thread in threads() - before]


@pytest.mark.skipif(usable_cpus() < 2, reason="one core for everybody")
def test_workers_keep_off_the_callers_core_where_they_need_all_the_others() -> None:
    mine = os.sched_getaffinity(0)
    workers = [cores for cores in placed(len(mine)) if cores != mine]
    assert len(workers) == len(mine) - 1
    assert all(cores < mine and len(cores) == len(mine) - 1 for cores in workers)
    assert os.sched_getaffinity(0) == mine, "the caller goes where it likes"


@pytest.mark.parametrize("off", [-1, 1])
def test_with_fewer_threads_or_more_the_system_decides(off: int) -> None:
    mine = os.sched_getaffinity(0)
    assert all(cores == mine for cores in placed(max(1, len(mine) + off)))
