"""Puts reuse together in a worker's scheduler process, from what its environment says."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import REGISTRY

from cache_store.client.fetch import Fetcher
from cache_store.client.publish import Publisher
from cache_store.errors import StoreError, StoreFullError, StoreUnavailableError
from cache_store.metrics import StoreMetrics
from cache_store.pool.geometry import Geometry
from cache_store.pool.metrics import PoolMetrics
from cache_store.pool.shared_memory import open_pool
from cache_store.store import open_store_later
from engines.reuse.engine import ReuseEngine
from engines.reuse.map_reader import MapReader
from engines.reuse.map_sender import MapSender
from engines.reuse.map_storage import map_storage
from engines.reuse.metrics import ReuseMetrics
from engines.reuse.receiver import Receiver
from engines.reuse.refusal import Refusal
from engines.reuse.sender import Sender
from engines.reuse.shadow import Shadow
from engines.reuse.shadow_metrics import ShadowMetrics

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cache_store.pool.shared_memory import SharedMemoryPool
    from cache_store.store import Store
    from engines.reuse.settings import ReuseSettings

_log = logging.getLogger("crossfill.reuse")

_REFRESH_S = 30.0
# Longer than it takes to make a pool of many gigabytes.
_POOL_WAIT_S, _POOL_POLL_S = 20.0, 0.2


def assemble(settings: ReuseSettings, *, slots: int, device: str = "cpu", store: Store | None = None) -> ReuseEngine:
    """A worker's part in reuse.

    Args:
        slots: of the KV pool.
        device: where attention is computed.
        store: where state is kept; opened from the settings, when it is first asked, if not given.
    """
    store = store or open_store_later(settings.store, StoreMetrics(REGISTRY))
    metrics = ReuseMetrics()
    told = settings.store
    fetcher = Fetcher(store, told.fetch_threads, told.fetches_in_flight, held_bytes=told.fetched_bytes)
    sender = packer = None
    pool = _open_pool(settings, device) if settings.has_maps else None
    maps = MapReader(pool, map_storage(pool), _log) if pool else None
    if settings.publish:
        publisher = Publisher(store, told.queue_bytes)
        sender = Sender(publisher, metrics, most_bytes=settings.capture_bytes, wait_s=told.fetch_deadline_s)
        if pool and settings.publish_maps:
            packer = MapSender(
                pool,
                store,
                publisher,
                metrics,
                top_p=settings.publish_maps,
                renormalise=settings.maps.renormalise,
                most_bytes=settings.maps.capture_bytes,
                wait_s=told.fetch_deadline_s,
            )
    receiver = Receiver(settings, fetcher, metrics, maps=maps)
    takes = ", ".join(pair.sender.name for pair in settings.pairs) or "nobody"
    _log.info("%s publishes %d layers and takes from %s", settings.model.name, len(settings.publish), takes)
    # The first time opens the store, which is not left to the first request: it would go without.
    looks = [store.stats, *([PoolMetrics(pool).refresh] if pool else [])]
    threading.Thread(target=watch, args=(looks, threading.Event()), name="crossfill-watch", daemon=True).start()
    return ReuseEngine(settings, fetcher, receiver, sender, metrics, slots=slots, maps=maps, packer=packer)


def _open_pool(settings: ReuseSettings, device: str) -> SharedMemoryPool | None:
    """The machine's block pool; None, logged, if it cannot be opened or used: every layer is then guided."""
    told = settings.maps
    if device != "cpu":
        _log.error("no maps are packed or used, layers are guided instead: the block pool lies in the host's memory")
        return None
    until_s = time.monotonic() + _POOL_WAIT_S
    while True:
        try:
            return open_pool(told.pool, Geometry.within(told.pool_bytes, told.dtype))
        except (StoreUnavailableError, StoreFullError) as error:
            # Another worker may be making it: then its memory is taken twice until one of both is given back.
            failure: StoreError = error
            if time.monotonic() < until_s:
                time.sleep(_POOL_POLL_S)
                continue
        except StoreError as error:
            failure = error
        _log.error("no maps are packed or used, layers are guided instead: %s", failure)
        return None


def assemble_shadow(settings: ReuseSettings, engine: ReuseEngine) -> Shadow:
    """What compares some of a worker's guided prefills, and takes a pair out of use that has drifted."""
    senders = [pair.sender.name for pair in settings.pairs if pair.refused is None]
    told = settings.shadow
    _log.info("%.3g of guided prefills are compared with dense ones", told.share)
    exclude = partial(engine.exclude, reason=Refusal.DRIFTED)
    return Shadow(told, senders, ShadowMetrics(senders), exclude)


def watch(looks: Sequence[Callable[[], object]], ended: threading.Event, refresh_s: float = _REFRESH_S) -> None:
    """Look at what has gauges now and every `refresh_s` seconds, until `ended` is set."""
    while True:
        for look in looks:
            # Counted and logged where it fails; the next call tries again.
            with suppress(StoreError):
                look()
        if ended.wait(refresh_s):
            return
