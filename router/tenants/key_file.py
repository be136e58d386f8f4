"""The file of API keys: a line a key, with the key's SHA-256 and never the key.

::

    # tenant  sha256 of the key                          created     label
    acme      sha256:60303ae22b998861bce3b28f33eec1be…   2026-01-31  build server

The date may be `-`, date and label may be absent. A key is 256 random bits, so nobody can search for one that has a
given hash: a fast hash is right here, and a slow one, made for passwords, would only make each request dear.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING

from router.config.text_file import read_bounded
from router.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

KEY_PATTERN = "[!-~]{1,512}"
"""Of what a client may send as a key, as a regular expression: visible ASCII, anything else is refused unhashed."""

TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)

_HASH = re.compile(r"sha256:([0-9a-fA-F]{64})", re.ASCII)
_MOST_BYTES = 8 * 2**20
_ID_DIGITS = 12


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """What is known of one key. `sha256` is 64 lower-case hex digits."""

    tenant: str
    sha256: str
    created: date | None = None
    label: str = ""

    @property
    def id(self) -> str:
        """What people call the key: the first digits of its hash, which tell nothing of the key."""
        return self.sha256[:_ID_DIGITS]

    def to_line(self) -> str:
        """The entry as a line of the file."""
        created = self.created.isoformat() if self.created else "-"
        return f"{self.tenant} sha256:{self.sha256} {created} {self.label}".rstrip() + "\n"


def sha256_of(key: bytes) -> str:
    """The hash under which `key` is listed."""
    return hashlib.sha256(key).hexdigest()


def read_keys(path: Path) -> tuple[KeyEntry, ...]:
    """The keys of the file, possibly none. Raises ConfigError, one line with file and line number."""
    return parse_keys(read_text(path), path)


def read_text(path: Path) -> str:
    """What the file says, not yet checked. Raises ConfigError."""
    return read_bounded(path, _MOST_BYTES)


def parse_keys(text: str, path: Path) -> tuple[KeyEntry, ...]:
    """The keys of `text`, which was read from `path`. Raises ConfigError."""
    entries: dict[str, tuple[int, KeyEntry]] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        entry = parse_line(line, f"{path}:{number}")
        if entry is None:
            continue
        first, _ = entries.setdefault(entry.sha256, (number, entry))
        if first != number:
            raise ConfigError(f"{path}:{number}: the key {entry.id} is already in line {first}")
    return tuple(entry for _, entry in entries.values())


def parse_line(line: str, where: str) -> KeyEntry | None:
    """The key of one line, None for a comment or an empty line. Raises ConfigError that begins with `where`."""
    if not line.strip() or line.lstrip().startswith("#"):
        return None
    # No message repeats what the line says: somebody may have written a key into it.
    tenant, *rest = line.split(None, 3)
    sha256, created, label = (*rest, *("", "-", "")[len(rest) :])
    if (match := _HASH.fullmatch(sha256)) is None:
        raise ConfigError(f"{where}: not a key: write TENANT sha256:HASH [DATE] [LABEL], HASH with 64 hex digits")
    if not TENANT.fullmatch(tenant):
        raise ConfigError(
            f"{where}: not a tenant name: use up to 64 letters, digits and . _ -, a letter or digit first"
        )
    try:
        day = None if created == "-" else date.fromisoformat(created)
    except ValueError:
        raise ConfigError(f"{where}: not a date: write YYYY-MM-DD, or - for none") from None
    return KeyEntry(tenant, match[1].lower(), day, label.strip())
