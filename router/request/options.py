"""What a client may ask of Crossfill itself: the `crossfill` object of a request, or the same JSON in a header."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import orjson

from router.errors import InvalidRequestError
from router.request.ids import ID_RULE, is_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    from router.errors import JsonObject

NAME = "crossfill"
"""Of the field and of the header."""

_LONGEST_KEY = 100
_KEYS = f"`{NAME}.reuse`, `{NAME}.session` and `{NAME}.report`"


class Reuse(StrEnum):
    """Whether the prefill of other models and agents may be reused, which makes a request's own KV approximate."""

    OFF = "off"
    ALLOW = "allow"
    REQUIRE = "require"


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """`session` is the client's own id of the conversation, `report` asks to be told within the answer how it came."""

    reuse: Reuse = Reuse.ALLOW
    session: str | None = None
    report: bool = False

    def to_worker(self, tenant: str, cache_salt: str | None) -> JsonObject:
        """What a worker is told, as `custom_params` of its request.

        `tenant` is whose key the request came with: the worker shares state within it, and within its salt if it has
        one.
        """
        return {NAME: {"reuse": self.reuse.value, "tenant": tenant, "salt": cache_salt or ""}}


def read_options(body: JsonObject, headers: Sequence[str] = ()) -> RequestOptions:
    """The options of a request with this `body` and these values of the header `crossfill`; the body wins, key by key.

    Raises InvalidRequestError, `param` being `crossfill` or the key within it.
    """
    given = {
        **(_checked(_parsed(headers), "The header") if headers else {}),
        **(_checked(body[NAME], "The field") if body.get(NAME) is not None else {}),
    }
    return RequestOptions(
        reuse=Reuse(given.get("reuse", Reuse.ALLOW)),
        session=given.get("session"),
        report=given.get("report", False),
    )


def _parsed(headers: Sequence[str]) -> object:
    if len(headers) > 1:
        raise InvalidRequestError(f"The header `{NAME}` is there more than once.", param=NAME)
    try:
        return orjson.loads(headers[0])
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"The header `{NAME}` must be a JSON object: {error}.", param=NAME) from error


def _checked(given: Any, place: str) -> dict[str, Any]:
    """`given` if it is an object of known keys with fit values."""
    if not isinstance(given, dict):
        raise InvalidRequestError(f"{place} `{NAME}` must be a JSON object.", param=NAME)
    for key, value in given.items():
        param = f"{NAME}.{key[:_LONGEST_KEY]}"
        match key:
            case "reuse":
                if value not in list(Reuse):
                    raise InvalidRequestError(f"`{param}` must be one of {', '.join(Reuse)}.", param=param)
            case "session":
                if not (isinstance(value, str) and is_id(value)):
                    raise InvalidRequestError(f"`{param}` must be {ID_RULE}", param=param)
            case "report":
                if not isinstance(value, bool):
                    raise InvalidRequestError(f"`{param}` must be true or false.", param=param)
            case _:
                raise InvalidRequestError(f"`{param}` is unknown; `{NAME}` has {_KEYS}.", param=param)
    return given
