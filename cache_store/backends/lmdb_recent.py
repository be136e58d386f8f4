"""Pages that were used and whose use is not written yet."""

import threading
from collections.abc import Collection, Sequence
from itertools import chain, islice
from typing import ClassVar


class Recent:
    """Ids of pages, the last used last; bounded, so that a store that cannot be written does not fill memory."""

    AGE_S: ClassVar[float] = 5.0
    COUNT: ClassVar[int] = 4096
    MOST: ClassVar[int] = 65_536

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._used: list[bytes] = []
        # What was added since, as it came: putting it in order at once would cost every lookup.
        self._added: list[Sequence[bytes]] = []
        self._added_pages = 0
        self._damaged: set[bytes] = set()
        self._old = self._asked = False

    def add(self, used: Sequence[bytes], damaged: Collection[bytes]) -> bool:
        """Remember; `used` must not change afterwards. Whether all should be written now: once, until it was taken."""
        with self._lock:
            self._added.append(used)
            self._added_pages += len(used)
            if not damaged and self._added_pages < self.COUNT:
                return False
            self._damaged.update(damaged)
            self._merge()
            return self._ask(bool(self._damaged) or len(self._used) >= self.COUNT)

    def is_old(self) -> bool:
        """Whether anything waits since this was asked before, every `AGE_S`, and should be written; once, as `add`."""
        with self._lock:
            self._merge()
            old, self._old = self._old, bool(self._used)
            return self._ask(old and bool(self._used))

    def take(self) -> tuple[list[bytes], list[bytes]]:
        """Used and damaged pages, to be written now."""
        with self._lock:
            self._merge()
            used, damaged = self._used, sorted(self._damaged)
            self._used, self._damaged, self._old, self._asked = [], set(), False, False
            return used, damaged

    def _ask(self, due: bool) -> bool:
        due = due and not self._asked
        self._asked |= due
        return due

    def _merge(self) -> None:
        every = [*self._used, *chain.from_iterable(self._added)]
        every.reverse()
        # Each by its last use.
        self._used = list(islice(dict.fromkeys(every), self.MOST))
        self._used.reverse()
        self._added, self._added_pages = [], 0
