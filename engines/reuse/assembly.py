"""Puts reuse together in a worker's scheduler process, from what its environment says."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from prometheus_client import REGISTRY

from cache_store.client.fetch import Fetcher
from cache_store.client.publish import Publisher
from cache_store.errors import StoreError
from cache_store.metrics import StoreMetrics
from cache_store.store import open_store_later
from engines.reuse.engine import ReuseEngine
from engines.reuse.metrics import ReuseMetrics
from engines.reuse.receiver import Receiver
from engines.reuse.sender import Sender

if TYPE_CHECKING:
    from cache_store.store import Store
    from engines.reuse.settings import ReuseSettings

_log = logging.getLogger("crossfill.reuse")


def assemble(settings: ReuseSettings, *, slots: int, store: Store | None = None) -> ReuseEngine:
    """A worker's part in reuse.

    Args:
        slots: of the KV pool.
        store: where state is kept; opened from the settings, when it is first asked, if not given.
    """
    store = store or open_store_later(settings.store, StoreMetrics(REGISTRY))
    metrics = ReuseMetrics()
    fetcher = Fetcher(store, settings.store.fetch_threads, settings.store.fetches_in_flight)
    sender = None
    if settings.publish:
        publisher = Publisher(store, settings.store.queue_bytes)
        deadline_s = settings.store.fetch_deadline_s
        sender = Sender(publisher, metrics, most_bytes=settings.capture_bytes, wait_s=deadline_s)
    receiver = Receiver(settings, fetcher, metrics)
    takes = ", ".join(pair.sender.name for pair in settings.pairs) or "nobody"
    _log.info("%s publishes %d layers and takes from %s", settings.model.name, len(settings.publish), takes)
    # Not by the first request, which would go without.
    threading.Thread(target=_open, args=(store,), name="crossfill-open", daemon=True).start()
    return ReuseEngine(settings, fetcher, receiver, sender, metrics, slots=slots)


def _open(store: Store) -> None:
    # Counted and logged where it fails; the next call tries again.
    with suppress(StoreError):
        store.stats()
