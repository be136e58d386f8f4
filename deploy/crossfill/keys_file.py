"""Changes to the file of API keys, one at a time and each of them whole, while a router may be reading it."""

import fcntl
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path

from crossfill.errors import KeysError
from router.tenants.key_file import TENANT, KeyEntry, parse_keys, parse_line, read_text, sha256_of

_PREFIX = "cf-"
# Only for people who find one: what a key may do follows from the file that it is in.
_ADMIN_PREFIX = "cf-admin-"
_KEY_BYTES = 32
_LONGEST_LABEL = 100
_HEAD = "# API keys of a Crossfill router: TENANT sha256:HASH DATE LABEL. `crossfill keys` writes it.\n"
_ADMIN_HEAD = "# Admin keys of a Crossfill router: OPERATOR sha256:HASH DATE LABEL. `crossfill keys` writes it.\n"


def add_key(path: Path, tenant: str, label: str, today: date, *, admin: bool = False) -> tuple[str, KeyEntry]:
    """Make a key for `tenant`, with `admin` an operator, and write its hash into the file; the key and its entry.

    File and folder are made if need be.

    Raises:
        KeysError: tenant or label cannot be written down, or the file cannot be changed.
        ConfigError: the file has a fault; it is left as it is.
    """
    if not TENANT.fullmatch(tenant):
        of = "an operator's" if admin else "a tenant"
        raise KeysError(f"not {of} name: {tenant!r}; use up to 64 letters, digits and . _ -")
    label = label.strip()
    if not label.isprintable() or len(label) > _LONGEST_LABEL:
        raise KeysError(f"a label is one line of at most {_LONGEST_LABEL} characters")
    key = (_ADMIN_PREFIX if admin else _PREFIX) + secrets.token_urlsafe(_KEY_BYTES)
    entry = KeyEntry(tenant, sha256_of(key.encode()), today, label)
    _make_folder(path)
    with _locked(path) as file:
        text = read_text(file) if file.exists() else (_ADMIN_HEAD if admin else _HEAD)
        parse_keys(text, file)
        _replace(file, text + ("" if text.endswith("\n") or not text else "\n") + entry.to_line())
    return key, entry


def revoke_key(path: Path, key_id: str) -> tuple[KeyEntry, int]:
    """Take the key with this id out of the file; its entry, and how many keys are left.

    Raises:
        KeysError: there is no such key, or the file cannot be changed.
        ConfigError: the file cannot be read or has a fault; it is left as it is.
    """
    with _locked(path) as file:
        text = read_text(file)
        entries = parse_keys(text, file)
        revoked = next((entry for entry in entries if entry.id == key_id), None)
        if revoked is None:
            raise KeysError(f"{path}: has no key with the id {key_id!r}; `crossfill keys list` shows them")
        _replace(file, "\n".join(line for line in text.split("\n") if parse_line(line, str(path)) != revoked))
    return revoked, len(entries) - 1


def _make_folder(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KeysError(f"{path.parent}: cannot be made: {error.strerror}") from error


@contextmanager
def _locked(path: Path) -> Iterator[Path]:
    """Wait for other programs that change this file; the file itself, if `path` is a link to it."""
    file = path.resolve()
    try:
        # Beside the file and never removed: the file itself is another one after each change.
        lock = os.open(file.with_name(f".{file.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise KeysError(f"cannot write beside {path}: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield file
    finally:
        os.close(lock)


def _replace(file: Path, text: str) -> None:
    """Put `text` in the place of `file` at once; who could read it before still can, of a new one only the owner."""
    try:
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
        written = Path(name)
        try:
            with os.fdopen(handle, "w", encoding="utf-8", newline="") as new:
                new.write(text)
                new.flush()
                if file.exists():
                    _keep_access(file, handle)
                os.fsync(handle)
            written.replace(file)
        finally:
            written.unlink(missing_ok=True)
    except OSError as error:
        raise KeysError(f"{file}: cannot be written: {error.strerror}") from error


def _keep_access(file: Path, handle: int) -> None:
    before = file.stat()
    if (before.st_uid, before.st_gid) != (os.geteuid(), os.getegid()):
        os.fchown(handle, before.st_uid, before.st_gid)
    os.fchmod(handle, stat.S_IMODE(before.st_mode))
