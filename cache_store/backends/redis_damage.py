"""Pages of a Redis store that are not what they should be: they are taken away, counted and told of."""

import logging
import time
from collections.abc import Sequence

from cache_store.backends.redis_link import RedisLink
from cache_store.backends.redis_scripts import load_script
from cache_store.errors import StoreError
from cache_store.seldom import SeldomLog

CHECKED_PAGES = 16
"""Pages of one run of a script that checks them: Lua is slow at that."""

_LOG = logging.getLogger(__name__)
_LOG_EVERY_S = 60.0


class Damage:
    """What is done about damaged pages. Safe to use from several threads."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link
        self._log = SeldomLog(_LOG, _LOG_EVERY_S, time.monotonic)

    def take_away(self, scope: bytes, keys: Sequence[bytes]) -> None:
        """Have the server take away those of these pages that it finds damaged too, if it answers."""
        script = load_script("damaged")
        parts = [b"".join(keys[at : at + CHECKED_PAGES]) for at in range(0, len(keys), CHECKED_PAGES)]
        try:
            replies = self._link.run_all([(script, (scope, part)) for part in parts])
            self.tell(self._link.understood(lambda: sum(map(int, replies))))
        except StoreError as error:
            _LOG.info("%s: pages that are damaged are still there: %s", self._link.address.shown, error)

    def tell(self, pages: int) -> None:
        """Log that so many were taken away, if any."""
        if pages:
            self._log.warn(f"{self._link.address.shown}: {pages} pages altered since they were written were taken away")
