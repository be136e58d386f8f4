"""The trained student as the adapter file that ships."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from engines.models.adapter_file import Adapter, Factors, quantise, write

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from engines.models.healing.student import AdaptedLinear, Student


def export(
    student: Student, base: str, base_sha256: str, provenance: Mapping[str, Any], path: Path, *, rank: int
) -> Adapter:
    """Write what `student` learned on top of model `base` to `path`: the best `rank` of every product, in int8."""
    matrices = {f"{name}.weight": _shipped(matrix, rank) for name, matrix in student.adapted()}
    values = {name: weight.detach().float().numpy() for name, weight in student.norms()}
    adapter = Adapter(base, base_sha256, student.gone(), matrices, values, json.dumps(provenance, sort_keys=True))
    scratch = path.with_suffix(".new")
    write(scratch, adapter)
    scratch.replace(path)
    return adapter


def _shipped(matrix: AdaptedLinear, rank: int) -> Factors:
    # The singular values of up · down are those of the small product of the triangles.
    with torch.no_grad():
        left, upper = torch.linalg.qr(matrix.up)
        right, lower = torch.linalg.qr(matrix.down.T)
        rows, sizes, columns = torch.linalg.svd(upper @ lower.T, full_matrices=False)
        up = left @ (rows[:, :rank] * sizes[:rank])
        down = columns[:rank] @ right.T
    return quantise(up.numpy(), down.numpy())
