"""Sizes in bytes as people write them: `4 GiB`, `8MiB`, or a number."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

# Also the pattern of the JSON Schema, so without what editors read otherwise: `\d`, `\s`.
_SIZE = re.compile(r"([0-9]+) *(B|KiB|MiB|GiB)")
_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_MOST = 2**40


def _parse(value: object) -> object:
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value)
    if match is None:
        raise ValueError(f"not a size: {value!r}; write bytes, or a number with B, KiB, MiB or GiB")
    return int(match[1]) * _UNITS[match[2]]


def _check(size: int) -> int:
    if size > _MOST:
        raise ValueError(f"is more than 1 TiB ({_MOST} bytes)")
    return size


_Written = Annotated[int, Field(le=_MOST)] | Annotated[str, Field(pattern=f"^{_SIZE.pattern}$")]

SizeBytes = Annotated[int, AfterValidator(_check), BeforeValidator(_parse, json_schema_input_type=_Written)]
"""A size in bytes, up to 1 TiB; a file may also say `8MiB`."""
