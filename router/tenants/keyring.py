"""The API keys that are valid now: looked up at each request, and read again when their file changes."""

from __future__ import annotations

import asyncio
import hmac
import logging
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from router.background import LastingTasks
from router.errors import ConfigError
from router.tenants.key_file import KeyEntry, read_keys, sha256_of

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping
    from pathlib import Path
    from types import TracebackType

    from router.config import AuthConfig
    from router.telemetry.metrics import RouterMetrics

_log = logging.getLogger("crossfill.keys")

_POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class _Purpose:
    """What keys are for: the setting that names their file, and what nobody could use without one."""

    setting: str
    what: str


_CLIENTS = _Purpose("auth.keys_file", "the router")
_OPERATORS = _Purpose("auth.admin_keys_file", "its administration")


class Keyring:
    """The keys of one file.

    Raises ConfigError if the file is bad, or has no key: a router that nobody may use is a slip. A file that loses its
    last key later is taken as it is, and nobody may in.
    """

    def __init__(self, path: Path, purpose: _Purpose = _CLIENTS) -> None:
        self.path = path
        self._purpose = purpose
        self._stamp: tuple[int, ...] | None = None
        self._by_hash: dict[str, KeyEntry] = {}
        self._other: Keyring | None = None
        self.refresh()
        if not self._by_hash:
            raise ConfigError(
                f"{path}: has no key, nobody could use {purpose.what}; `crossfill keys add` makes one "
                f"({purpose.setting})"
            )

    def __len__(self) -> int:
        return len(self._by_hash)

    def keep_apart(self, other: Keyring) -> None:
        """From now on no key counts in both rings: a new version of a file with one of the other's is refused.

        Raises ConfigError if they have one in common already.
        """
        self._check_apart(self._by_hash, other)
        self._other, other._other = other, self

    def owner_of(self, key: bytes) -> str | None:
        """Whose key this is, the first word of its line; None if it is not valid.

        Looking up by hash is safe although the time it takes may tell how a hash compares with the stored ones: who
        sends keys cannot choose their hashes, and whoever knew a stored hash would still not know its key.
        """
        sha256 = sha256_of(key)
        entry = self._by_hash.get(sha256)
        if entry is None or not hmac.compare_digest(entry.sha256, sha256):
            return None
        # Two files that got the same key at once may each have been read before the other.
        return None if self._other is not None and sha256 in self._other._by_hash else entry.tenant

    def refresh(self) -> bool:
        """Read the file if it is not the one read last; whether it was.

        Raises ConfigError, and keeps the keys it has, if the file cannot be read or used; the next call tries again.
        """
        found = self._look()
        stamp = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        if stamp == self._stamp:
            return False
        by_hash = {entry.sha256: entry for entry in read_keys(self.path)}
        if self._other is not None:
            self._check_apart(by_hash, self._other)
        self._by_hash = by_hash
        # Taken before the file was read: what was written meanwhile shows at the next call.
        self._stamp = stamp
        if found.st_mode & (stat.S_IRGRP | stat.S_IROTH):
            mode = stat.S_IMODE(found.st_mode)
            _log.warning("%s can be read by others than its owner (mode %04o)", self.path, mode)
        return True

    def _check_apart(self, by_hash: Mapping[str, KeyEntry], other: Keyring) -> None:
        both = sorted(by_hash.keys() & other._by_hash.keys())
        if both:
            raise ConfigError(
                f"{self.path}: the key {by_hash[both[0]].id} is in {other.path} too; a key is a client's "
                f"({_CLIENTS.setting}) or an operator's ({_OPERATORS.setting}), never both"
            )

    def _look(self) -> os.stat_result:
        try:
            return self.path.stat()
        except OSError as error:
            made = isinstance(error, FileNotFoundError)
            hint = f"; `crossfill keys add` makes it ({self._purpose.setting})" if made else ""
            raise ConfigError(f"{self.path}: cannot be read: {error.strerror}{hint}") from error


@dataclass(frozen=True, slots=True)
class Keyrings:
    """The keys of clients, None if they need none, and those of operators, None if there is no administration."""

    clients: Keyring | None = None
    operators: Keyring | None = None


def open_keyrings(auth: AuthConfig) -> Keyrings:
    """The configured keys. Raises ConfigError, also for a key that is in both files."""
    clients = None if auth.keys_file is None else Keyring(auth.keys_file)
    operators = None if auth.admin_keys_file is None else Keyring(auth.admin_keys_file, _OPERATORS)
    if clients is not None and operators is not None:
        operators.keep_apart(clients)
    return Keyrings(clients, operators)


class KeyWatch:
    """Keeps `keyring` in step with its file, from entering the context to leaving it."""

    def __init__(self, keyring: Keyring | None, metrics: RouterMetrics, *, poll_s: float = _POLL_S) -> None:
        self._keyring = keyring
        self._metrics = metrics
        self._poll_s = poll_s
        self._fault: str | None = None
        # One that ended unseen would leave revoked keys valid.
        self._tasks = LastingTasks(_log, "the keys file is no longer watched")

    async def __aenter__(self) -> Self:
        if self._keyring is not None:
            _log.info("%d keys from %s", len(self._keyring), self._keyring.path)
            self._tasks.start(self._watch(self._keyring))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._tasks.cancel()

    async def _watch(self, keyring: Keyring) -> None:
        while True:
            await asyncio.sleep(self._poll_s)
            await self.check(keyring)

    async def check(self, keyring: Keyring) -> None:
        """Look at the file once. A fault is logged and counted when it appears, not each time it is still there."""
        try:
            # In a thread: a file system may be slow, and requests go on meanwhile.
            has_changed = await asyncio.to_thread(keyring.refresh)
        except ConfigError as error:
            if str(error) != self._fault:
                self._fault = str(error)
                self._metrics.count_keys_reload_failure()
                _log.error("the keys stay as they were: %s", error)
            return
        self._fault = None
        if has_changed:
            _log.info("read %s again: %d keys", keyring.path, len(keyring))
