"""Adapters: what training changed in a model, in a file of a few megabytes that merges to the same bits everywhere.

A corrected matrix W, [out, in], is stored as two int8 factors and two float32 scales, and merged as::

    bf16(W + row_scale[:, None] * (up @ down) * column_scale[None, :])        computed in float32, from left to right

The integer product is exact in float32 whatever the order of summation and whether or not the processor fuses
multiplication and addition, because no partial sum exceeds 128² · rank ≤ 2²⁴. What follows is one IEEE operation an
element. So the merged bits depend neither on the machine nor on numpy's matrix library.

On disk (safetensors), beside each `<name>` of the base model's file, before layers are dropped: `<name>.up` I8
[out, rank], `<name>.down` I8 [rank, in], `<name>.row_scale` F32 [out], `<name>.column_scale` F32 [in]; or, for a weight
that is replaced as a whole, `<name>.value` BF16. The metadata has `adapter_format`, `base`, `base_sha256`,
`dropped_layers` (a JSON list) and `provenance` (JSON, for readers).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engines.models import safetensors_file
from engines.models.errors import AdapterError, AdapterFileError, AdapterTensorError, MissingDependencyError
from engines.models.prune import layer_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

FORMAT = 1
# 128² · 1024 = 2²⁴, up to which float32 has every integer.
MAX_RANK = 1024
_LARGEST_INT8 = 127
_FACTOR_PARTS = ("up", "down", "row_scale", "column_scale")
_DTYPES = {"up": "I8", "down": "I8", "row_scale": "F32", "column_scale": "F32", "value": "BF16"}
# Widest first, so that every tensor is aligned to its own elements.
_FILE_ORDER = ("row_scale", "column_scale", "value", "up", "down")


@dataclass(frozen=True, eq=False)
class Factors:
    """The correction of one matrix.

    `up` int8 [out, rank], `down` int8 [rank, in], `row_scale` float32 [out], `column_scale` float32 [in].
    """

    up: npt.NDArray[np.int8]
    down: npt.NDArray[np.int8]
    row_scale: npt.NDArray[np.float32]
    column_scale: npt.NDArray[np.float32]

    @property
    def rank(self) -> int:
        """Columns of `up`, rows of `down`."""
        return int(self.up.shape[1])

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the matrix: out, in."""
        return int(self.up.shape[0]), int(self.down.shape[1])

    def delta(self) -> npt.NDArray[np.float32]:
        """What is added to the matrix: float32 [out, in], the same bits on every machine."""
        import numpy as np

        product = self.up.astype(np.float32) @ self.down.astype(np.float32)
        product *= self.row_scale[:, None]
        product *= self.column_scale[None, :]
        return product


@dataclass(frozen=True, eq=False)
class Adapter:
    """A trained correction of the model `base`, whose model.safetensors has the SHA-256 `base_sha256`.

    `matrices` and `values` are by the name of the base's weight, numbered before `dropped_layers` (from 0) are gone.
    `values` replace small tensors (norms) as a whole; they are float32 here and bfloat16 in the file. `provenance` is
    JSON that says how the adapter was trained.

    Raises:
        AdapterError: a name or the digest is not printable text, or `dropped_layers` is not different layer numbers.
        AdapterTensorError: arrays that do not fit each other, a rank above `MAX_RANK`, a scale that is not finite, a
            layer both dropped and corrected, or a tensor both corrected and replaced.
        ValueError: `provenance` is not JSON.
    """

    base: str
    base_sha256: str
    dropped_layers: tuple[int, ...]
    matrices: Mapping[str, Factors]
    values: Mapping[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    provenance: str = "{}"

    def __post_init__(self) -> None:
        self._check_names()
        json.loads(self.provenance)
        for name in (*self.matrices, *self.values):
            if layer_of(name) in self.dropped_layers:
                raise AdapterTensorError(name, f"layer {layer_of(name)} is dropped, so it cannot be corrected too")
        for name in self.matrices:
            fault = "it is both corrected and replaced" if name in self.values else _factors_fault(self.matrices[name])
            if fault:
                raise AdapterTensorError(name, fault)
        for name, value in self.values.items():
            if value.dtype.name != "float32" or not _all_finite(value):
                raise AdapterTensorError(name, "a new value must be float32 and finite")

    def _check_names(self) -> None:
        for text in (self.base, self.base_sha256, *self.matrices, *self.values):
            if not isinstance(text, str) or not text.isprintable():
                raise AdapterError(f"names and digests of an adapter must be printable text, {text!r} is not")
        # Not isinstance: True and False are integers to it.
        if not all(type(layer) is int and layer >= 0 for layer in self.dropped_layers):
            raise AdapterError(f"an adapter's dropped layers must be whole numbers from 0, not {self.dropped_layers!r}")
        if len(set(self.dropped_layers)) != len(self.dropped_layers):
            raise AdapterError(f"an adapter drops each layer once, not {self.dropped_layers!r}")


def _all_finite(values: npt.NDArray[np.float32]) -> bool:
    import numpy as np

    return bool(np.isfinite(values).all())


def _factors_fault(factors: Factors) -> str | None:
    up, down, rows, columns = (getattr(factors, part) for part in _FACTOR_PARTS)
    kinds = [(array.dtype.name, array.ndim) for array in (up, down, rows, columns)]
    if kinds != [("int8", 2), ("int8", 2), ("float32", 1), ("float32", 1)]:
        return f"needs int8 matrices and float32 vectors, has {kinds}"
    if (up.shape[1], *factors.shape) != (down.shape[0], *rows.shape, *columns.shape):
        return f"shapes {up.shape}, {down.shape}, {rows.shape} and {columns.shape} do not fit each other"
    if factors.rank > MAX_RANK:
        return f"rank {factors.rank} is above {MAX_RANK}, from which on the product is not exact; train a smaller rank"
    return None if _all_finite(rows) and _all_finite(columns) else "a scale is not finite"


def write(path: Path, adapter: Adapter) -> None:
    """Write `adapter`: the same bytes for the same adapter, whatever the order of its mappings."""
    tensors = []
    for name, factors in adapter.matrices.items():
        tensors += [safetensors_file.array_tensor(f"{name}.{part}", getattr(factors, part)) for part in _FACTOR_PARTS]
    for name, value in adapter.values.items():
        tensors.append(safetensors_file.bf16_tensor(f"{name}.value", value.shape, value.copy))
    tensors.sort(key=lambda tensor: (_FILE_ORDER.index(tensor.name.rpartition(".")[2]), tensor.name))
    metadata = {
        "adapter_format": str(FORMAT),
        "base": adapter.base,
        "base_sha256": adapter.base_sha256,
        "dropped_layers": json.dumps(sorted(adapter.dropped_layers)),
        "provenance": adapter.provenance,
    }
    safetensors_file.write(path, tensors, lambda _done, _total: None, metadata=metadata)


def read(path: Path) -> Adapter:
    """The adapter in `path`, all of it in memory.

    Raises:
        MissingDependencyError: numpy is not installed.
        AdapterFileError: no adapter, one of another format version, or one whose names, digest, dropped layers or
            provenance `Adapter` refuses.
        AdapterTensorError: as `Adapter` raises it.
    """
    try:
        import numpy  # noqa: F401 - asked here, once, for a readable error
    except ImportError as error:
        raise MissingDependencyError("numpy", "merge an adapter into a model") from error
    try:
        metadata = safetensors_file.read_metadata(path)
        version = metadata.get("adapter_format", "none")
        if version != str(FORMAT):
            raise AdapterFileError(path, f"it has adapter format {version!r}, this version reads {FORMAT}")
        dropped = json.loads(metadata["dropped_layers"])
        if not isinstance(dropped, list):
            raise AdapterFileError(path, f"dropped_layers must be a list, not {dropped!r}")
        matrices, values = _arrays(path)
        return Adapter(
            base=metadata["base"],
            base_sha256=metadata["base_sha256"],
            dropped_layers=tuple(dropped),
            matrices=matrices,
            values=values,
            provenance=metadata["provenance"],
        )
    except (AdapterFileError, AdapterTensorError):
        raise
    except AdapterError as error:
        raise AdapterFileError(path, str(error)) from error
    # RecursionError: metadata can be nested as deeply as its maker likes.
    except (OSError, ValueError, KeyError, RecursionError) as error:
        raise AdapterFileError(path, repr(error)) from error


def _arrays(path: Path) -> tuple[dict[str, Factors], dict[str, npt.NDArray[np.float32]]]:
    parts: dict[str, dict[str, npt.NDArray[Any]]] = {}
    for tensor in safetensors_file.read(path):
        name, _, part = tensor.name.rpartition(".")
        if _DTYPES.get(part) != tensor.dtype:
            raise AdapterFileError(path, f"unexpected tensor {tensor.name!r} of type {tensor.dtype!r}")
        parts.setdefault(name, {})[part] = safetensors_file.to_array(tensor)
    values = {name: found.pop("value") for name, found in parts.items() if "value" in found}
    # KeyError where one of the four is missing; a replaced tensor has none of them.
    matrices = {
        name: Factors(**{part: found[part] for part in _FACTOR_PARTS}) for name, found in parts.items() if found
    }
    return matrices, values


def quantise(delta_up: npt.NDArray[np.float32], delta_down: npt.NDArray[np.float32]) -> Factors:
    """The product of the float `delta_up`, [out, r], and `delta_down`, [r, in], as int8 factors of its correction.

    The rank of the result is the least of r, out and in.

    Any factors of one product do. These are chosen so that eight bits cost little: the singular values are split evenly
    between the two sides, and the rank axis is rotated by a cosine transform, which spreads each singular direction
    over all columns. Each entry of a row then has about the same size, so one scale a row serves all of them. The
    relative error of the product (Frobenius) is 0.6 % at rank 8 to 0.9 % at rank 128 for equal singular values, and
    less the faster they fall (0.3 % at rank 32 where each is 26 % below the one before). Scales alone, without that
    choice, cost up to 100 % on factors that lean on each other.

    Which bits come out depends on the machine's matrix library; those of a merge do not.

    Raises:
        ValueError: the factors do not fit each other or have no finite product.
    """
    import numpy as np

    # (up)(down) = Qu (Ru Rdᵀ) Qdᵀ: the decomposition of a small square instead of the whole matrix.
    up_basis, up_rest = np.linalg.qr(np.asarray(delta_up, dtype=np.float64))
    down_basis, down_rest = np.linalg.qr(np.asarray(delta_down, dtype=np.float64).T)
    left, sizes, right = np.linalg.svd(up_rest @ down_rest.T, full_matrices=False)
    rotation = _cosine_transform(len(sizes))
    up, row_scale = _to_int8(up_basis @ (left * np.sqrt(sizes)) @ rotation)
    down, column_scale = _to_int8(down_basis @ (right.T * np.sqrt(sizes)) @ rotation)
    return Factors(up, np.ascontiguousarray(down.T), row_scale, column_scale)


def _cosine_transform(size: int) -> npt.NDArray[np.float64]:
    """The orthonormal DCT-II, [size, size]: it exists in every size, a Hadamard matrix does not."""
    import numpy as np

    rows, columns = np.arange(size)[:, None], np.arange(size)[None, :]
    matrix: npt.NDArray[np.float64] = np.sqrt(2.0 / size) * np.cos(np.pi * (2 * columns + 1) * rows / (2 * size))
    matrix[0] /= np.sqrt(2.0)
    return matrix


def _to_int8(rows: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """Each row as int8, nearest even, and its scale."""
    import numpy as np

    scale = (np.abs(rows).max(axis=1) / _LARGEST_INT8).astype(np.float32)
    # A row of zeros stays one, whatever it is divided by.
    steps = np.rint(rows / np.where(scale > 0, scale, np.float32(1))[:, None])
    return np.clip(steps, -_LARGEST_INT8, _LARGEST_INT8).astype(np.int8), scale
