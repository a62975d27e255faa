"""Reading safetensors: a JSON header, then bytes, mapped and viewed without a copy.

The `safetensors` package has no numpy type for bf16, in which most checkpoints come, and its
torch side would load torch; the format is simple enough to read as it is.

Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hotbatch.core.errors import ModelLoadError
from hotbatch.models.quantization import FORMATS
from hotbatch.models.weights import RawTensor

_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library


def read_safetensors(path: Path) -> Mapping[str, RawTensor]:
    """name -> view of the mapped file. Tensors of other types (an int64 buffer, say) keep
    their own dtype name and raise only when decoded.

    Raises:
        ModelLoadError: the file is not safetensors, damaged or incomplete.
    """
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"Cannot read the model file {path}: {error}.") from error
    header_bytes = int.from_bytes(mapped[:8], "little")
    if len(mapped) < 8 or not 2 <= header_bytes <= min(len(mapped) - 8, _MAX_HEADER_BYTES):
        raise _damaged(path, "its header does not fit the file")
    try:
        header = json.loads(mapped[8 : 8 + header_bytes])
        return {
            name: _view(mapped, path, 8 + header_bytes, name, entry)
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, f"its header cannot be read: {error}") from error


def _view(mapped: mmap.mmap, path: Path, base: int, name: str, entry: Any) -> RawTensor:
    dtype, shape = str(entry["dtype"]), tuple(int(size) for size in entry["shape"])
    first, last = (int(offset) for offset in entry["data_offsets"])
    if not 0 <= first <= last <= len(mapped) - base:
        raise _damaged(path, f"tensor {name} runs past its end")
    rows = math.prod(shape[:-1])
    if dtype in FORMATS and last - first != math.prod(shape) * FORMATS[dtype].block_bytes:
        raise _damaged(path, f"tensor {name} has {last - first} bytes for shape {shape}")
    data = np.frombuffer(mapped, dtype=np.uint8, count=last - first, offset=base + first)
    return RawTensor(name, shape, dtype, data.reshape(rows, -1) if last > first else data[None])


def _damaged(path: Path, what: str) -> ModelLoadError:
    return ModelLoadError(
        f"The model file {path} is damaged or incomplete ({what}). Download it again."
    )
