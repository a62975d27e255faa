"""Finding how a text goes on: the native form of `core/speculation/suffix_index.py`."""

from hotbatch.kernels._native import RecentText, propose

__all__ = ["RecentText", "propose"]
