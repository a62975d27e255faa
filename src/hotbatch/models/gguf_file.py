"""Reading GGUF: the header into a dictionary, the tensors as views of the mapped file.

The `gguf` package's own reader builds several numpy objects for each of the hundred thousand
strings of a vocabulary and needs seconds and 150 MB for it; this one walks the header with
`struct` in a twentieth of that. Decoding of blocks is left to `quantization`.

Source: the GGUF specification in ggml's `docs/gguf.md`, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hotbatch.core.errors import ModelLoadError
from hotbatch.models.quantization import FORMAT_OF_GGML_TYPE
from hotbatch.models.weights import RawTensor

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
_U32, _U64 = _SCALARS[4], _SCALARS[10]
_MAX_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class GgufFile:
    """metadata: key -> str, number, bool or list of these. tensors: name -> view of the file."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, RawTensor]
    mapped: mmap.mmap

    def release(self) -> None:
        """Let go of the memory that holds what was read. Tensors stay valid: whatever is read
        again comes from the file again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self.mapped.madvise(mmap.MADV_DONTNEED)


def read_gguf(path: Path) -> GgufFile:
    """Map the file and read its header.

    Raises:
        ModelLoadError: it is not GGUF, of another version, truncated, or holds a tensor type
            that cannot be decoded.
    """
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"Cannot read the model file {path}: {error}.") from error
    try:
        return _Header(mapped, path).read()
    except (struct.error, IndexError, UnicodeDecodeError, OverflowError) as error:
        raise ModelLoadError(
            f"The model file {path} is damaged or incomplete ({error}). Download it again."
        ) from error


class _Header:
    """A cursor over the header. Reads past the end raise struct.error."""

    def __init__(self, mapped: mmap.mmap, path: Path) -> None:
        self._mapped = mapped
        self._path = path
        self._offset = 0

    def read(self) -> GgufFile:
        if self._mapped[:4] != b"GGUF":
            raise ModelLoadError(f"{self._path} is not a GGUF file: it does not begin with 'GGUF'.")
        self._offset = 4
        version = self._scalar(_U32)
        if version not in (2, 3):
            raise ModelLoadError(
                f"{self._path} is GGUF version {version}; only little-endian versions 2 and 3 "
                "are supported. Convert the model again with a current llama.cpp."
            )
        num_tensors, num_entries = self._scalar(_U64), self._scalar(_U64)
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self._string()
            metadata[key] = self._value(self._scalar(_U32))
        entries = [self._tensor_entry() for _ in range(num_tensors)]
        alignment = int(metadata.get("general.alignment", 32))
        if alignment < 1:
            raise ModelLoadError(f"{self._path} has general.alignment {alignment}.")
        base = -(-self._offset // alignment) * alignment
        tensors = {entry[0]: self._tensor(base, *entry) for entry in entries}
        return GgufFile(self._path, metadata, tensors, self._mapped)

    def _scalar(self, kind: struct.Struct) -> Any:
        value = kind.unpack_from(self._mapped, self._offset)[0]
        self._offset += kind.size
        return value

    def _string(self) -> str:
        length = self._scalar(_U64)
        end = self._offset + length
        if end > len(self._mapped):
            raise struct.error("a string runs past the end of the file")
        text = self._mapped[self._offset : end].decode("utf-8")
        self._offset = end
        return text

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise struct.error(f"unknown metadata type {kind}")
        return self._scalar(_SCALARS[kind])

    def _array(self) -> list[Any]:
        kind, count = self._scalar(_U32), self._scalar(_U64)
        if count > len(self._mapped):
            raise struct.error("an array runs past the end of the file")
        if kind in _SCALARS:
            code = _SCALARS[kind].format[1:]
            values = struct.unpack_from(f"<{count}{code}", self._mapped, self._offset)
            self._offset += count * _SCALARS[kind].size
            return list(values)
        return [self._value(kind) for _ in range(count)]

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dimensions = self._scalar(_U32)
        if num_dimensions > _MAX_DIMENSIONS:
            raise struct.error(f"tensor {name} has {num_dimensions} dimensions")
        # GGUF lists the fastest-running dimension first.
        shape = tuple(self._scalar(_U64) for _ in range(num_dimensions))[::-1]
        return name, shape, self._scalar(_U32), self._scalar(_U64)

    def _tensor(
        self, base: int, name: str, shape: tuple[int, ...], kind: int, offset: int
    ) -> RawTensor:
        if kind not in FORMAT_OF_GGML_TYPE:
            raise ModelLoadError(
                f"Tensor {name} in {self._path} has ggml type {kind}, which is not supported. "
                f"Supported: {', '.join(f.name for f in FORMAT_OF_GGML_TYPE.values())}."
            )
        format = FORMAT_OF_GGML_TYPE[kind]
        width = shape[-1] if shape else 1
        if width % format.block_size:
            raise ModelLoadError(
                f"Tensor {name} in {self._path} has rows of {width} elements, which blocks of "
                f"{format.block_size} ({format.name}) do not divide. The file is damaged."
            )
        rows = math.prod(shape[:-1])
        row_bytes = format.row_bytes(width)
        start = base + offset
        if start + rows * row_bytes > len(self._mapped):
            raise ModelLoadError(
                f"The model file {self._path} is incomplete: tensor {name} runs past its end. "
                "Download it again."
            )
        data = np.frombuffer(self._mapped, dtype=np.uint8, count=rows * row_bytes, offset=start)
        return RawTensor(name, shape, format.name, data.reshape(rows, row_bytes))
