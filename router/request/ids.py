"""Ids of requests and conversations: what a client may choose, and what the router makes."""

from __future__ import annotations

import os
import re

ID_PATTERN = "[A-Za-z0-9._:-]{1,128}"
"""As a regular expression."""

ID_RULE = "1 to 128 letters, digits and . _ : -"
"""In words."""

_ID = re.compile(ID_PATTERN)


def is_id(text: str) -> bool:
    """Whether `text` can be an id."""
    return _ID.fullmatch(text) is not None


def random_hex() -> str:
    """32 random hex digits."""
    return os.urandom(16).hex()


def request_id(hex_digits: str) -> str:
    """The id of a request whose client gave none."""
    return f"req_{hex_digits}"
