"""The trained student as the adapter file that ships."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from engines.models.adapter_file import Adapter, quantise, write

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from engines.models.healing.student import Student


def export(student: Student, base: str, base_sha256: str, provenance: Mapping[str, Any], path: Path) -> Adapter:
    """Write what `student` learned on top of model `base`, quantised to int8, to `path`."""
    matrices = {
        f"{name}.weight": quantise(matrix.up.detach().numpy(), matrix.down.detach().numpy())
        for name, matrix in student.adapted()
    }
    values = {name: weight.detach().float().numpy() for name, weight in student.norms()}
    adapter = Adapter(base, base_sha256, student.gone(), matrices, values, json.dumps(provenance, sort_keys=True))
    write(path, adapter)
    return adapter
