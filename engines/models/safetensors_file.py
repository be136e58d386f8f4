"""Safetensors files written and read without torch, byte for byte the same on every machine.

Format: eight bytes little-endian header length, a JSON header padded with spaces to eight bytes, then the tensors'
bytes (https://github.com/huggingface/safetensors, README, "Format"). The library's own numpy writer has no bfloat16.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

_ALIGN = 8
_SIZE_BYTES = 8
_METADATA = "__metadata__"
BF16_BYTES = 2


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file: its name, shape, dtype tag as the format spells it, and where its bytes come from."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    read: Callable[[], bytes]

    @property
    def elements(self) -> int:
        """Number of scalars."""
        count = 1
        for dim in self.shape:
            count *= dim
        return count


def to_bf16_bytes(values: npt.NDArray[np.float32]) -> bytes:
    """Round finite float32 `values` (any shape) to bfloat16, nearest even, as little-endian bytes in C order."""
    import numpy as np

    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    # Half a unit in the last kept place, less one when the kept part is even: ties go to the even neighbour.
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    return rounded.astype("<u2").tobytes()


def from_bf16_bytes(data: bytes, shape: Sequence[int]) -> npt.NDArray[np.float32]:
    """The float32 values of little-endian bfloat16 `data` in C order; exact.

    Raises:
        ValueError: `data` is not as long as `shape` asks.
    """
    import numpy as np

    bits: npt.NDArray[np.uint32] = np.frombuffer(data, dtype="<u2").astype(np.uint32)
    # A bfloat16 is the upper half of a float32.
    return (bits << np.uint32(16)).view(np.float32).reshape(tuple(shape))


def to_array(tensor: Tensor) -> npt.NDArray[np.float32] | npt.NDArray[np.int8]:
    """The values of a BF16, F32 (both as float32) or I8 tensor.

    Raises:
        KeyError: another dtype.
        ValueError: the file is too short for the tensor.
    """
    import numpy as np

    if tensor.dtype == "BF16":
        return from_bf16_bytes(tensor.read(), tensor.shape)
    stored = {"F32": "<f4", "I8": "|i1"}[tensor.dtype]
    values: npt.NDArray[np.float32] | npt.NDArray[np.int8] = np.frombuffer(tensor.read(), stored).reshape(tensor.shape)
    return values


def bf16_tensor(name: str, shape: Sequence[int], values: Callable[[], npt.NDArray[np.float32]]) -> Tensor:
    """A bfloat16 tensor whose float32 `values` are computed only when it is written."""
    elements = 1
    for dim in shape:
        elements *= dim
    return Tensor(name, tuple(shape), "BF16", elements * BF16_BYTES, lambda: to_bf16_bytes(values()))


def array_tensor(name: str, values: npt.NDArray[np.int8] | npt.NDArray[np.float32]) -> Tensor:
    """A tensor that keeps the int8 or float32 `values` as they are.

    Raises:
        KeyError: another dtype.
    """
    tag, stored = {"int8": ("I8", "|i1"), "float32": ("F32", "<f4")}[values.dtype.name]
    return Tensor(name, values.shape, tag, values.nbytes, lambda: values.astype(stored).tobytes())


def write(
    path: Path,
    tensors: Sequence[Tensor],
    on_tensor: Callable[[int, int], None],
    *,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write `tensors` in the given order, one in memory at a time; `on_tensor(done, total)` after each.

    `metadata` goes into the header in the given order.
    """
    # Transformers refuses a file whose metadata does not name the framework that laid it out.
    header: dict[str, Any] = {_METADATA: {"format": "pt", **(metadata or {})}}
    offset = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.size_bytes],
        }
        offset += tensor.size_bytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % _ALIGN)
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(encoded)))
        out.write(encoded)
        for done, tensor in enumerate(tensors, 1):
            data = tensor.read()
            assert len(data) == tensor.size_bytes, tensor.name
            out.write(data)
            on_tensor(done, len(tensors))


def read(path: Path) -> list[Tensor]:
    """The tensors of `path` in file order; their bytes are read when asked for."""
    header, base = _read_header(path)
    tensors = []
    for name, entry in header.items():
        if name == _METADATA:
            continue
        begin, end = entry["data_offsets"]
        reader = _range_reader(path, base + begin, end - begin)
        tensors.append((begin, Tensor(name, tuple(entry["shape"]), entry["dtype"], end - begin, reader)))
    return [tensor for _, tensor in sorted(tensors, key=lambda pair: pair[0])]


def read_metadata(path: Path) -> dict[str, str]:
    """The strings that `path` has beside its tensors."""
    header, _ = _read_header(path)
    metadata: dict[str, str] = header.get(_METADATA, {})
    return metadata


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    with path.open("rb") as source:
        (header_size,) = struct.unpack("<Q", source.read(_SIZE_BYTES))
        # Eight bytes of another kind of file are a size that no memory holds.
        if header_size > path.stat().st_size:
            raise ValueError(f"{path} has no safetensors header")
        header: dict[str, Any] = json.loads(source.read(header_size))
    return header, _SIZE_BYTES + header_size


def _range_reader(path: Path, offset: int, size_bytes: int) -> Callable[[], bytes]:
    def read_range() -> bytes:
        with path.open("rb") as source:
            source.seek(offset)
            return source.read(size_bytes)

    return read_range
