"""What an id may look like that a client chose, of a request or of a conversation."""

from __future__ import annotations

import re

ID_PATTERN = "[A-Za-z0-9._:-]{1,128}"
"""As a regular expression."""

ID_RULE = "1 to 128 letters, digits and . _ : -"
"""In words."""

_ID = re.compile(ID_PATTERN)


def is_id(text: str) -> bool:
    """Whether `text` can be an id."""
    return _ID.fullmatch(text) is not None
