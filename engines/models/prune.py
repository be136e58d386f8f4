"""Smaller models by dropping whole layers (which ones: see `influence` and `study`)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from engines.models import safetensors_file
from engines.models.convert import CONFIG_FILE, WEIGHTS_FILE, copy_shared, write_json
from engines.models.errors import LayerChoiceError, UnusableFolderError
from engines.models.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

_LAYER_PREFIX = "model.layers."


def drop_layers(source: Path, layers: Collection[int], target: Path, *, progress: Progress = silent) -> None:
    """Write the model of `source` without `layers` (numbered from 0) into `target`, a folder that exists and is empty.

    Kept layers keep their bytes and are numbered anew; embeddings, norms and tokenizer are copied. Needs neither torch
    nor numpy.

    Raises:
        LayerChoiceError: a layer that the model does not have, or no layer would be left.
        UnusableFolderError: `source` has no config.json or keeps its weights in several files.
    """
    if not (source / CONFIG_FILE).is_file() or not (source / WEIGHTS_FILE).is_file():
        raise UnusableFolderError(source, f"needs {CONFIG_FILE} and one {WEIGHTS_FILE}")
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
            tensors.append(safetensors_file.Tensor(name, tensor.shape, tensor.dtype, tensor.size_bytes, tensor.read))
    safetensors_file.write(
        target / WEIGHTS_FILE, tensors, lambda done, total: progress("copying kept layers", done, total)
    )
    if "layer_types" in config:
        config["layer_types"] = [kind for i, kind in enumerate(config["layer_types"]) if i not in dropped]
    write_json(target / CONFIG_FILE, config | {"num_hidden_layers": count - len(dropped)})
    copy_shared(source, target)


def _renumbered(name: str, new_number: dict[int, int]) -> str | None:
    if not name.startswith(_LAYER_PREFIX):
        return name
    number, _, part = name.removeprefix(_LAYER_PREFIX).partition(".")
    kept = new_number.get(int(number))
    return None if kept is None else f"{_LAYER_PREFIX}{kept}.{part}"
