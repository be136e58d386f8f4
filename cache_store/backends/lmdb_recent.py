"""Pages that were used and whose use is not written yet."""

import threading
from collections.abc import Iterable
from typing import ClassVar


class Recent:
    """Ids of pages, the last used last; bounded, so that a store that cannot be written does not fill memory."""

    AGE_S: ClassVar[float] = 5.0
    COUNT: ClassVar[int] = 4096
    MOST: ClassVar[int] = 65_536

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._used: dict[bytes, None] = {}
        self._damaged: set[bytes] = set()
        self._since_s: float | None = None
        self._asked = False

    def add(self, used: Iterable[bytes], damaged: Iterable[bytes]) -> None:
        """Remember."""
        with self._lock:
            for page in used:
                self._used.pop(page, None)
                self._used[page] = None
            self._damaged.update(damaged)
            while len(self._used) > self.MOST:
                del self._used[next(iter(self._used))]

    def is_due(self, now_s: float) -> bool:
        """Whether it is old or large enough to be written; once, until it was taken."""
        with self._lock:
            if not self._used and not self._damaged:
                return False
            if self._since_s is None:
                self._since_s = now_s
            due = len(self._used) >= self.COUNT or self._damaged or now_s - self._since_s >= self.AGE_S
            if not due or self._asked:
                return False
            self._asked = True
            return True

    def take(self) -> tuple[list[bytes], list[bytes]]:
        """Used and damaged pages, to be written now."""
        with self._lock:
            used, damaged = list(self._used), sorted(self._damaged)
            self._used, self._damaged, self._since_s, self._asked = {}, set(), None, False
            return used, damaged
