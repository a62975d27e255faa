from __future__ import annotations

from collections.abc import Iterator

import pytest
from served_model import ServedModel, serve_model


@pytest.fixture(scope="session")
def shared_server() -> Iterator[ServedModel]:
    """The embedded model at its defaults; each test leaves it idle."""
    with serve_model() as server:
        yield server


@pytest.fixture
def server(shared_server: ServedModel) -> Iterator[ServedModel]:
    yield shared_server
    shared_server.wait_idle()
