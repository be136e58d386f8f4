"""Pages of a Redis store that were used, which the server is told later and of many at once."""

import threading
from collections.abc import Sequence
from itertools import groupby

from cache_store.backends.redis_link import Command
from cache_store.backends.redis_scripts import Script, load_script

TOUCH_PAGES = 512
"""Pages of one run of a script that marks them as used."""

AGE_S = 5.0
COUNT = 4096
"""The server is told of uses that are so old, or of so many pages."""

MOST = 65_536
"""Pages that are remembered; of more, the oldest uses are forgotten, as those of a client that ended would be."""


class Recent:
    """Pages in the order of their last use. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # As they come, since to sort them out takes a lookup longer than anything else.
        self._raw: list[tuple[bytes, Sequence[bytes]]] = []
        self._raw_pages = 0
        self._used: dict[tuple[bytes, bytes], None] = {}
        self._since_s: float | None = None

    def add(self, scope: bytes, keys: Sequence[bytes], now_s: float) -> None:
        """Remember a use of pages that are there, in this order."""
        with self._lock:
            self._raw.append((scope, keys))
            self._raw_pages += len(keys)
            if self._raw_pages >= COUNT:
                self._sort_out()
            if self._since_s is None:
                self._since_s = now_s

    def take_due(self, now_s: float) -> list[tuple[Script, Command]]:
        """Calls for a few of the uses, the oldest, if they are many or old; for the next round trip."""
        with self._lock:
            old = self._since_s is not None and now_s - self._since_s >= AGE_S
            if not old and len(self._used) < COUNT:
                return []
            return self._take(TOUCH_PAGES)

    def take(self) -> list[tuple[Script, Command]]:
        """Calls for all uses, for before anything that makes room."""
        with self._lock:
            return self._take(MOST)

    def _sort_out(self) -> None:
        for scope, keys in self._raw:
            for key in keys:
                page = (scope, key)
                self._used.pop(page, None)
                self._used[page] = None
        self._raw, self._raw_pages = [], 0
        while len(self._used) > MOST:
            del self._used[next(iter(self._used))]

    def _take(self, most: int) -> list[tuple[Script, Command]]:
        self._sort_out()
        pages = list(self._used)[:most]
        for page in pages:
            del self._used[page]
        if not self._used:
            self._since_s = None
        calls = []
        for scope, group in groupby(pages, key=lambda page: page[0]):
            keys = [key for _, key in group]
            calls += [touch_call(scope, keys[at : at + TOUCH_PAGES]) for at in range(0, len(keys), TOUCH_PAGES)]
        return calls


def touch_call(
    scope: bytes, keys: Sequence[bytes], *, before: int | None = None, flushes: int | None = None
) -> tuple[Script, Command]:
    """The call that marks pages as used, with the ticks after `before`; with `flushes` unless there was one since."""
    return load_script("touch"), (
        scope,
        b"".join(keys),
        "" if before is None else before,
        "" if flushes is None else flushes,
    )
