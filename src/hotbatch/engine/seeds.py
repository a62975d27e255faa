"""Where seeds come from: the only randomness of a request's life is drawn here.

The core never draws a random number. Whoever makes a Request (server, LLM) gives it a seed,
and a request with `n` > 1 becomes n Requests with seeds derived by `child_seed`, so that a
seeded request gives the same n texts through every door.
"""

from __future__ import annotations

import secrets

_MASK_64 = 2**64 - 1
_MASK_63 = 2**63 - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15


def child_seed(seed: int | None, index: int) -> int:
    """The seed of the `index`-th (from 0) completion of a request.

    Child 0 keeps the seed as it is: the first of n completions equals the only one of n=1.
    The others are the `index`-th output of SplitMix64 started at `seed` (Steele, Lea and
    Flood 2014, "Fast splittable pseudorandom number generators"), cut to 63 bits. A `seed`
    of None draws a fresh one from the operating system for every child.
    """
    if seed is None:
        return secrets.randbits(63)
    if index == 0:
        return seed
    mixed = (seed + index * _GOLDEN_GAMMA) & _MASK_64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return (mixed ^ (mixed >> 31)) & _MASK_63
