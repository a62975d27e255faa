"""The native module, which a type checker cannot look into; csrc/module.cpp declares it."""

from typing import Any

def __getattr__(name: str) -> Any: ...
