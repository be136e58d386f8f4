"""Where and what pydantic found wrong."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

KeyPath = tuple[str | int, ...]

# Up to the last @, since a password that was not encoded may hold any other sign.
_CREDENTIALS = re.compile(r"://\S*@")


def without_credentials(text: str) -> str:
    """`text` with `***` for what stands before the host in a URL."""
    return _CREDENTIALS.sub("://***@", text)


def first_fault(error: ValidationError) -> str:
    """The first fault as one line: the path of its key, where it has one, and pydantic's words."""
    first = error.errors(include_url=False)[0]
    key = ".".join(map(str, first["loc"]))
    return f"{key}: {first['msg']}" if key else first["msg"]


def data_path(data: object, detail: ErrorDetails) -> KeyPath:
    """The parts of a pydantic error's location that are keys of `data`, and the key that is missing.

    Tags of unions are left out.
    """
    kept: list[str | int] = []
    for part in detail["loc"]:
        below = _below(data, part)
        if below is not None:
            kept.append(part)
            data = below[0]
    return (*kept, detail["loc"][-1]) if detail["type"] == "missing" else tuple(kept)


def _below(data: Any, part: str | int) -> tuple[object] | None:
    """What `data` has at `part`, which may be None itself."""
    if isinstance(data, Mapping):
        return (data[part],) if part in data else None
    return (data[part],) if isinstance(data, list) and isinstance(part, int) and part < len(data) else None
