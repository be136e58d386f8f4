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
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

_ALIGN = 8
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


def bf16_tensor(name: str, shape: Sequence[int], values: Callable[[], npt.NDArray[np.float32]]) -> Tensor:
    """A bfloat16 tensor whose float32 `values` are computed only when it is written."""
    elements = 1
    for dim in shape:
        elements *= dim
    return Tensor(name, tuple(shape), "BF16", elements * BF16_BYTES, lambda: to_bf16_bytes(values()))


def write(path: Path, tensors: Sequence[Tensor], on_tensor: Callable[[int, int], None]) -> None:
    """Write `tensors` in the given order, one in memory at a time; `on_tensor(done, total)` after each."""
    # Transformers refuses a file whose metadata does not name the framework that laid it out.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
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
    with path.open("rb") as source:
        (header_size,) = struct.unpack("<Q", source.read(8))
        header: dict[str, Any] = json.loads(source.read(header_size))
    base = 8 + header_size
    tensors = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        reader = _range_reader(path, base + begin, end - begin)
        tensors.append((begin, Tensor(name, tuple(entry["shape"]), entry["dtype"], end - begin, reader)))
    return [tensor for _, tensor in sorted(tensors, key=lambda pair: pair[0])]


def _range_reader(path: Path, offset: int, size_bytes: int) -> Callable[[], bytes]:
    def read_range() -> bytes:
        with path.open("rb") as source:
            source.seek(offset)
            return source.read(size_bytes)

    return read_range
