"""Virtual time passes when told to, and never goes back."""

from __future__ import annotations

import pytest

from hotbatch.engine.protocol import Clock
from hotbatch.simulator import VirtualClock


def test_time_stands_still_until_advanced() -> None:
    clock = VirtualClock(5.0)
    as_protocol: Clock = clock
    assert as_protocol.now() == clock.now() == 5.0
    clock.advance(1.5)
    assert clock.now() == 6.5
    clock.advance_to(6.0)
    assert clock.now() == 6.5
    clock.advance_to(7.0)
    assert clock.now() == 7.0


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
def test_time_never_goes_back(seconds: float) -> None:
    with pytest.raises(ValueError, match="seconds"):
        VirtualClock().advance(seconds)
