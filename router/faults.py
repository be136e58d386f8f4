"""Where and what pydantic found wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError

KeyPath = tuple[str | int, ...]


def first_fault(error: ValidationError) -> str:
    """The first fault as one line: the path of its key, where it has one, and pydantic's words."""
    first = error.errors(include_url=False)[0]
    key = ".".join(map(str, first["loc"]))
    return f"{key}: {first['msg']}" if key else first["msg"]


def data_path(data: object, location: Sequence[str | int]) -> KeyPath:
    """The parts of a pydantic error location that are keys of `data`: tags of unions are left out."""
    kept: list[str | int] = []
    for index, part in enumerate(location):
        last = index == len(location) - 1
        if isinstance(data, Mapping) and isinstance(part, str) and (part in data or last):
            kept.append(part)
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            kept.append(part)
            data = data[part]
    return tuple(kept)
