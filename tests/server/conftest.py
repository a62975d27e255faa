from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest
from server_parts import Rig, make_rig, serving


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    """One server for a module's tests; each leaves it idle."""
    with serving(make_rig()) as rig:
        yield rig


@pytest.fixture
def http(rig: Rig) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=rig.url, timeout=30, trust_env=False) as client:
        yield client
    rig.wait_idle()


@pytest.fixture
def client(rig: Rig) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{rig.url}/v1", api_key="none", max_retries=0) as client:
        yield client
    rig.wait_idle()
