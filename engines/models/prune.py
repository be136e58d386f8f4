"""Smaller models by dropping whole layers (which ones: see `influence` and `study`)."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

from engines.models import safetensors_file
from engines.models.convert import CONFIG_FILE, WEIGHTS_FILE, copy_shared, write_json
from engines.models.errors import LayerChoiceError, UnusableFolderError
from engines.models.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

_LAYER_PREFIX = "model.layers."


def drop_layers(
    source: Path,
    layers: Collection[int],
    target: Path,
    *,
    change: Callable[[safetensors_file.Tensor], safetensors_file.Tensor] = lambda tensor: tensor,
    progress: Progress = silent,
) -> None:
    """Write the model of `source` without `layers` (numbered from 0) into `target`, a folder that exists and is empty.

    Kept layers keep their bytes and are numbered anew; embeddings, norms and tokenizer are copied. Needs neither torch
    nor numpy.

    Args:
        source: folder of the whole model.
        layers: numbers of the layers to leave out; may be none.
        target: where the new model goes.
        change: called with each kept tensor, named as in `source`; what it returns is written, under the new name.
        progress: called after each tensor.

    Raises:
        LayerChoiceError: a layer that the model does not have, or no layer would be left.
        UnusableFolderError: `source` has no config.json or keeps its weights in several files.
    """
    check_source(source)
    config = json.loads((source / CONFIG_FILE).read_text(encoding="utf-8"))
    count = int(config["num_hidden_layers"])
    dropped = set(layers)
    if not dropped <= set(range(count)) or len(dropped) == count:
        raise LayerChoiceError(sorted(dropped), count)
    new_number = {old: new for new, old in enumerate(i for i in range(count) if i not in dropped)}
    tensors = []
    for tensor in safetensors_file.read(source / WEIGHTS_FILE):
        name = _renumbered(tensor.name, new_number)
        if name is not None:
            tensors.append(replace(change(tensor), name=name))
    safetensors_file.write(
        target / WEIGHTS_FILE, tensors, lambda done, total: progress("writing kept layers", done, total)
    )
    if "layer_types" in config:
        config["layer_types"] = [kind for i, kind in enumerate(config["layer_types"]) if i not in dropped]
    write_json(target / CONFIG_FILE, config | {"num_hidden_layers": count - len(dropped)})
    copy_shared(source, target)


def check_source(folder: Path) -> None:
    """Make sure that `folder` has the two files that layers are dropped from; they are not opened.

    Raises:
        UnusableFolderError: it has no config.json or keeps its weights in several files.
    """
    if not (folder / CONFIG_FILE).is_file() or not (folder / WEIGHTS_FILE).is_file():
        raise UnusableFolderError(folder, f"needs {CONFIG_FILE} and one {WEIGHTS_FILE}")


def layer_of(name: str) -> int | None:
    """The number of the layer that the tensor `name` belongs to; None for embeddings and the last norm."""
    number = name.removeprefix(_LAYER_PREFIX).partition(".")[0]
    return int(number) if name.startswith(_LAYER_PREFIX) and number.isdecimal() else None


def _renumbered(name: str, new_number: dict[int, int]) -> str | None:
    layer = layer_of(name)
    if layer is None:
        return name
    kept = new_number.get(layer)
    part = name.removeprefix(_LAYER_PREFIX).partition(".")[2]
    return None if kept is None else f"{_LAYER_PREFIX}{kept}.{part}"
