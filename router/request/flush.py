"""What an operator asks to be flushed from the store."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from router.errors import InvalidRequestError, JsonObject
from router.request.schema import Checked, sentence

_FILTERS = ("tenant", "model", "revision")
_FIELDS = (*_FILTERS, "all")
_LONGEST_KEY = 100


def _check_name(name: Any) -> Any:
    """A null would mean "any", which must be said by leaving the field out: a slip flushes too much."""
    if not isinstance(name, str) or not 0 < len(name) <= 200 or not name.isprintable():
        raise PydanticCustomError("name", "must be a string of 1 to 200 printable characters")
    return name


def _check_all(value: Any) -> Any:
    if value is not True:
        raise PydanticCustomError("all", "must be true, or left out")
    return value


_Name = Annotated[
    str | None,
    BeforeValidator(_check_name, json_schema_input_type=Annotated[str, Field(min_length=1, max_length=200)]),
]
_All = Annotated[bool, BeforeValidator(_check_all, json_schema_input_type=Literal[True])]


class FlushBody(Checked):
    """What goes: everything that fits all of the fields that are given. `all` is for everything, and goes alone."""

    model_config = ConfigDict(title="FlushRequest", extra="forbid", json_schema_extra={"minProperties": 1})

    tenant: _Name = None
    model: _Name = None
    revision: _Name = None
    all: _All = False

    @property
    def filter(self) -> dict[str, str]:
        """The fields that choose, by name; empty for everything."""
        chosen = {name: getattr(self, name) for name in _FILTERS}
        return {name: value for name, value in chosen.items() if value is not None}


def refuse_repeated(body: bytes) -> None:
    """Raise InvalidRequestError if valid JSON names a field twice: the last would silently win."""

    def check(pairs: list[tuple[str, object]]) -> None:
        names = [name for name, _ in pairs]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            shown = twice[:_LONGEST_KEY]
            raise InvalidRequestError(f"`{shown}` is there twice; a flush takes each field once.", param=shown)

    json.loads(body, object_pairs_hook=check)


def parse_flush(body: JsonObject) -> FlushBody:
    """What `body` asks for. Raises InvalidRequestError, `param` being the field that is wrong or missing."""
    unknown = next((name for name in body if name not in _FIELDS), None)
    if unknown is not None:
        shown = unknown[:_LONGEST_KEY]
        listed = ", ".join(f"`{name}`" for name in _FIELDS)
        raise InvalidRequestError(f"`{shown}` is unknown; a flush has {listed}.", param=shown)
    try:
        asked = FlushBody.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        param = str(first["loc"][0])
        raise InvalidRequestError(sentence(param, first["type"], first["msg"]), param=param) from None
    if asked.all and asked.filter:
        raise InvalidRequestError(
            f"`all` goes without `{next(iter(asked.filter))}`: it flushes everything.", param="all"
        )
    if not asked.all and not asked.filter:
        raise InvalidRequestError(
            "Say what to flush by `tenant`, `model` or `revision`, or everything by `all: true`.", param="all"
        )
    return asked
