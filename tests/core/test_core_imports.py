"""The core loads nothing but the standard library."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("room", ["hotbatch.core", "hotbatch.simulator"])
def test_importing_a_room_loads_no_third_party_package(room: str) -> None:
    script = f"""
import sys
before = set(sys.modules)  # site-packages may hold start-up hooks of their own
import {room}
roots = {{name.partition('.')[0] for name in set(sys.modules) - before}}
print(sorted(roots - set(sys.stdlib_module_names) - {{'hotbatch'}}))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
