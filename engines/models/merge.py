"""A model folder from another one and an adapter: layers dropped, corrections added, tensors replaced."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from engines.models import adapter_file, safetensors_file
from engines.models.convert import WEIGHTS_FILE
from engines.models.errors import AdapterBaseError, AdapterTensorError, DigestMismatchError
from engines.models.manifest import sha256_of
from engines.models.progress import Progress, silent
from engines.models.prune import check_source, drop_layers

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from engines.models.adapter_file import Adapter
    from engines.models.catalogue import HealedRecipe

# Part of the package: in a wheel as in a checkout.
ADAPTERS = Path(__file__).parent / "adapters"
# 2¹²⁸ - 2¹¹⁹, halfway from the largest bfloat16 to 2¹²⁸: from here on, rounding gives infinity.
_ROUNDS_TO_INFINITY = float.fromhex("0x1.ffp127")
_REMEDY = "this installation is damaged; install Crossfill again"


def shipped_adapter(recipe: HealedRecipe) -> Adapter:
    """The adapter of `recipe` that came with Crossfill.

    Raises:
        DigestMismatchError: the file is missing or has other bytes than the pinned ones.
        MissingDependencyError: numpy is not installed.
        AdapterError: the pinned file is not a usable adapter.
    """
    path = ADAPTERS / recipe.adapter
    found = f"sha256 {sha256_of(path)}" if path.is_file() else "no file"
    if found != f"sha256 {recipe.adapter_sha256}":
        raise DigestMismatchError(path, f"sha256 {recipe.adapter_sha256}", found, _REMEDY)
    return adapter_file.read(path)


def merge(base: Path, base_name: str, adapter: Adapter, target: Path, *, progress: Progress = silent) -> None:
    """Write the model of `base` as corrected by `adapter` into `target`, a folder that exists and is empty.

    The same bytes on every machine; see `adapter_file`. One tensor at a time is in memory.

    Args:
        base: folder of the whole base model, in bfloat16.
        base_name: what the adapter must call it.
        adapter: what changes, and which layers go.
        target: where the new model goes.
        progress: called after each tensor.

    Raises:
        AdapterBaseError: the adapter was made for a model of another name or with other weights.
        AdapterTensorError: it corrects or replaces a tensor that the base lacks or has in another shape or type; or,
            found only while `target` is written, it makes a weight too large for bfloat16 or no number.
        LayerChoiceError: it drops a layer that the base lacks, or all of them.
        UnusableFolderError: `base` has no config.json or keeps its weights in several files.
    """
    if base_name != adapter.base:
        raise AdapterBaseError(repr(adapter.base), repr(base_name), "name that base, or train another adapter")
    check_source(base)
    progress(f"checking {base_name}", 0, None)
    # Not the digest in the base's manifest: those bytes may have changed on disk since.
    found = sha256_of(base / WEIGHTS_FILE)
    if found != adapter.base_sha256:
        remedy = f"if {base_name} is damaged, `crossfill models prepare --rebuild {base_name}` mends it"
        raise AdapterBaseError(f"weights of sha256 {adapter.base_sha256}", f"sha256 {found}", remedy)
    _check_tensors(base, adapter)
    drop_layers(
        base, adapter.dropped_layers, target, change=lambda tensor: _corrected(tensor, adapter), progress=progress
    )


def _check_tensors(base: Path, adapter: Adapter) -> None:
    there = {tensor.name: tensor for tensor in safetensors_file.read(base / WEIGHTS_FILE)}
    wanted = {name: factors.shape for name, factors in adapter.matrices.items()}
    for name, shape in {**wanted, **{name: value.shape for name, value in adapter.values.items()}}.items():
        if name not in there:
            raise AdapterTensorError(name, f"{adapter.base} has no such tensor")
        tensor = there[name]
        if (tensor.shape, tensor.dtype) != (shape, "BF16"):
            raise AdapterTensorError(name, f"{shape} does not fit the base's {tensor.dtype} {tensor.shape}")


def _corrected(tensor: safetensors_file.Tensor, adapter: Adapter) -> safetensors_file.Tensor:
    def values() -> npt.NDArray[np.float32]:
        weight = _new_weight(tensor, adapter)
        # Two passes without a copy; a NaN makes both comparisons false.
        least, greatest = weight.min(initial=0.0), weight.max(initial=0.0)
        if not (least > -_ROUNDS_TO_INFINITY and greatest < _ROUNDS_TO_INFINITY):
            reason = "the new weight is too large for bfloat16 or no number; train the adapter again"
            raise AdapterTensorError(tensor.name, reason)
        return weight

    if tensor.name not in adapter.values and tensor.name not in adapter.matrices:
        return tensor
    return replace(tensor, read=lambda: safetensors_file.to_bf16_bytes(values()))


def _new_weight(tensor: safetensors_file.Tensor, adapter: Adapter) -> npt.NDArray[np.float32]:
    import numpy as np

    if tensor.name in adapter.values:
        return adapter.values[tensor.name]
    weight = safetensors_file.from_bf16_bytes(tensor.read(), tensor.shape)
    # Finite scales can overflow together: an error of ours, not a warning of numpy's.
    with np.errstate(over="ignore", invalid="ignore"):
        weight += adapter.matrices[tensor.name].delta()
    return weight
