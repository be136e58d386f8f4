"""Options in the query of a store's URL."""

import difflib
from collections.abc import Collection
from urllib.parse import parse_qsl

from cache_store.errors import StoreUrlError


def read_options(query: str, known: Collection[str]) -> dict[str, str]:
    """The options of a URL's query, each at most once.

    Raises:
        StoreUrlError: an option that is not `known` (the message says which there are), that comes twice or that has
            no value.
    """
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True) if query else []
    except ValueError as error:
        raise StoreUrlError(f"options of a store's URL are written as name=value&name=value: {error}") from None
    options: dict[str, str] = {}
    for name, value in pairs:
        if name not in known:
            close = difflib.get_close_matches(name, sorted(known), n=1)
            there = f"there are {', '.join(sorted(known))}" if known else "there are none"
            raise StoreUrlError(f"unknown option {name!r}; " + (f"did you mean {close[0]!r}?" if close else there))
        if name in options or not value:
            raise StoreUrlError(f"option {name!r} needs one value, once")
        options[name] = value
    return options


def read_count(options: dict[str, str], name: str, default: int) -> int:
    """A whole number above zero.

    Raises:
        StoreUrlError: it is none.
    """
    text = options.get(name, str(default))
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise StoreUrlError(f"option {name!r} must be a whole number above zero, not {text!r}")
    return int(text)
