"""Reads a text file that somebody named in a configuration: whole, and never more than a bound."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from router.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def read_bounded(path: Path, limit_bytes: int) -> str:
    """The UTF-8 text of `path`, line ends as they are.

    Raises ConfigError, one line, if it cannot be read, is no regular file, has more than `limit_bytes` bytes or is not
    UTF-8.
    """
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError(f"{path}: cannot be read: it is not a regular file")
            content = file.read(limit_bytes + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    # Before decoding: what was read of a larger file may end within a character.
    if len(content) > limit_bytes:
        raise ConfigError(f"{path}: is larger than {limit_bytes} bytes")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: cannot be read: it is not UTF-8 text") from error


def _open_at_once(name: str, flags: int) -> int:
    """Open without waiting, as opening a named pipe would for a writer who may never come."""
    return os.open(name, flags | os.O_NONBLOCK | os.O_NOCTTY)
