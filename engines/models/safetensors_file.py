"""Safetensors files written and read without torch, byte for byte the same on every machine.

Format: eight bytes little-endian header length, a JSON header padded with spaces to eight bytes, then the tensors'
bytes (https://github.com/huggingface/safetensors, README, "Format"). The library's own numpy writer has no bfloat16.
"""

from __future__ import annotations

import json
import math
import os
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
_ELEMENT_BYTES = {"BF16": BF16_BYTES, "F32": 4, "I8": 1}
# What numpy can hold: in one dimension, and how many of them.
_MAX_SIZE, _MAX_DIMS = 2**63 - 1, 64


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
    """The tensors of `path` in file order; their bytes are read when asked for.

    Raises:
        ValueError: the header is damaged, names a tensor twice, or does not give every byte after it to one tensor.
    """
    header, base, size_bytes = _read_header(path)
    entries = sorted((*_checked_range(name, entry), name, entry) for name, entry in header.items() if name != _METADATA)
    tensors, reached = [], 0
    for begin, end, name, entry in entries:
        if begin != reached:
            raise ValueError(f"tensor {name!r} begins at byte {begin}, where {reached} was expected")
        reached = end
        reader = _range_reader(path, base + begin, end - begin)
        tensors.append(Tensor(name, tuple(entry["shape"]), entry["dtype"], end - begin, reader))
    if base + reached != size_bytes:
        raise ValueError(f"the tensors end at byte {base + reached} of {size_bytes}")
    return tensors


def read_metadata(path: Path) -> dict[str, str]:
    """The strings that `path` has beside its tensors.

    Raises:
        ValueError: the header is damaged, or what stands there is not strings.
    """
    metadata = _read_header(path)[0].get(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("the metadata must be strings by name")
    return metadata


def _read_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """The header, the offset of the byte after it, and the size of the file."""
    with path.open("rb") as source:
        size_bytes = os.fstat(source.fileno()).st_size
        header_size = int.from_bytes(source.read(_SIZE_BYTES), "little")
        # Eight bytes of another kind of file are a size that no memory holds.
        if _SIZE_BYTES + header_size > size_bytes:
            raise ValueError(f"{path} has no safetensors header")
        text = source.read(header_size)
    try:
        header = json.loads(text, object_pairs_hook=_without_duplicates)
    except RecursionError as error:
        raise ValueError("the header is nested too deeply") from error
    if not isinstance(header, dict):
        raise ValueError("the header is not a JSON object")
    return header, _SIZE_BYTES + header_size, size_bytes


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("the header has a name twice")
    return found


def _checked_range(name: str, entry: Any) -> tuple[int, int]:
    """Where the tensor of a header's `entry` begins and ends, once all three parts of the entry fit each other."""
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise ValueError(f"tensor {name!r} needs dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"tensor {name!r} cannot have dtype {dtype!r}, shape {shape!r}, data_offsets {offsets!r}")
    begin, end = offsets
    # Types that this package does not compute with are only copied.
    known = _ELEMENT_BYTES.get(dtype)
    if begin > end or (known is not None and math.prod(shape) * known != end - begin):
        raise ValueError(f"tensor {name!r}, {dtype} {shape}, cannot lie in bytes {begin} to {end}")
    return begin, end


def _are_sizes(values: Any) -> bool:
    if not isinstance(values, list) or len(values) > _MAX_DIMS:
        return False
    # Not isinstance: true and false are integers to it.
    return all(type(value) is int and 0 <= value <= _MAX_SIZE for value in values)


def _range_reader(path: Path, offset: int, size_bytes: int) -> Callable[[], bytes]:
    def read_range() -> bytes:
        with path.open("rb") as source:
            source.seek(offset)
            return source.read(size_bytes)

    return read_range
