"""Where and what pydantic found wrong."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection

    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

KeyPath = tuple[str | int, ...]


class PlacedError(ValueError):
    """A value that does not go with another section: `keys` say where it stands, from the top of the file."""

    def __init__(self, keys: KeyPath, text: str) -> None:
        super().__init__(text)
        self.keys = keys


def unknown_model(keys: KeyPath, name: str, known: Collection[str]) -> PlacedError:
    """`name` at `keys` is none of the models that are `known`."""
    close = difflib.get_close_matches(name, known, n=1)
    meant = f"; did you mean {close[0]!r}?" if close else ""
    return PlacedError(keys, f"there is no model {name!r} ({', '.join(known)}){meant}")


def placed_at(detail: ErrorDetails) -> KeyPath:
    """Where a `PlacedError` says that a fault is; nothing for other faults."""
    error = detail.get("ctx", {}).get("error")
    return error.keys if isinstance(error, PlacedError) else ()


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
