"""hotbatch: an inference server that fills every step with the work worth most.

From Python: `from hotbatch import LLM, SamplingParams`. The names are looked up when they are
first used, so that importing one room does not load the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hotbatch.core.sampling_params import SamplingParams
    from hotbatch.llm import LLM, AsyncLLM

__version__ = "0.1.0"

__all__ = ["LLM", "AsyncLLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name in ("LLM", "AsyncLLM"):
        from hotbatch import llm

        return getattr(llm, name)
    if name == "SamplingParams":
        from hotbatch.core.sampling_params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
