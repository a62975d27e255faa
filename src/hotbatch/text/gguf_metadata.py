"""The key-value header of a GGUF file, and nothing else of it.

A tokenizer needs the vocabulary, its merges and a chat template, which stand in the header.
Reading them takes some tens of milliseconds here; a general reader, which also maps every
tensor and wraps every string in an array, takes seconds.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3,
little-endian).
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from pathlib import Path

from hotbatch.core.errors import ModelLoadError

_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


def read_gguf_metadata(path: str | Path, *, prefix: str = "") -> Mapping[str, object]:
    """All metadata of a GGUF file whose key starts with `prefix`: scalars, strings, lists.

    Raises:
        ModelLoadError: not a GGUF file, an unknown version, or cut short.
    """
    path = Path(path)
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Header(data).read(prefix)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"Cannot read GGUF file {path}: {error}", param="model") from error
    except (struct.error, IndexError) as error:
        raise ModelLoadError(
            f"GGUF file {path} is cut short or damaged; fetch it again.", param="model"
        ) from error


class _Header:
    """A cursor over the header's bytes."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def read(self, prefix: str) -> dict[str, object]:
        if self._data[:4] != b"GGUF":
            raise ValueError("it does not start with the GGUF magic")
        self._at = 4
        version = self._scalar(_U32)
        if version not in (2, 3):
            raise ValueError(f"version {version} is not supported (2 and 3 are)")
        self._scalar(_U64)  # the number of tensors
        fields: dict[str, object] = {}
        for _ in range(int(self._scalar(_U64))):
            key = self._string()
            kind = int(self._scalar(_U32))
            # Values have no length field, so those not wanted are parsed all the same.
            value = self._value(kind)
            if key.startswith(prefix):
                fields[key] = value
        return fields

    def _scalar(self, layout: struct.Struct) -> int | float | bool:
        (value,) = layout.unpack_from(self._data, self._at)
        self._at += layout.size
        return value  # type: ignore[no-any-return]

    def _string(self) -> str:
        (length,) = _U64.unpack_from(self._data, self._at)
        start = self._at + 8
        self._at = start + length
        if self._at > len(self._data):
            raise IndexError
        return self._data[start : self._at].decode("utf-8", errors="replace")

    def _value(self, kind: int) -> object:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise ValueError(f"unknown value type {kind}")
        return self._scalar(_SCALARS[kind])

    def _array(self) -> list[object]:
        kind = int(self._scalar(_U32))
        count = int(self._scalar(_U64))
        if kind in _SCALARS:
            layout = struct.Struct(f"<{count}{_SCALARS[kind].format[1:]}")
            values = layout.unpack_from(self._data, self._at)
            self._at += layout.size
            return list(values)
        return [self._value(kind) for _ in range(count)]
