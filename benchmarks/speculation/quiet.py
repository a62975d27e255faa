"""Waiting until a server computes nothing any more, what it guesses included.

A server that guesses goes on when its last answer has been given. Another one that is measured
meanwhile would share the cores with it.
"""

from __future__ import annotations

import asyncio

import httpx


async def until_quiet(http: httpx.AsyncClient) -> None:
    """Until no step was made for a quarter of a second.

    Args:
        http: a client whose base URL is the server's.
    """
    steps = -1.0
    while (now := await _num_steps(http)) != steps:
        steps = now
        await asyncio.sleep(0.25)


async def _num_steps(http: httpx.AsyncClient) -> float:
    for line in (await http.get("/metrics")).text.splitlines():
        if line.startswith("hotbatch:iterations_total"):
            return float(line.split()[-1])
    raise RuntimeError("the server does not say how many steps it made")
