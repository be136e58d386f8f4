"""Workers without SGLang: random queries, keys and values of a few layers, prefilled in chunks through the engine."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from cache_store.backends.memory import MemoryBackend
from cache_store.backends.protocol import Limits
from cache_store.client.fetch import Fetcher
from cache_store.client.publish import Publisher
from cache_store.config import StoreSettings
from cache_store.metrics import StoreMetrics
from cache_store.store import Store
from crossfill_kernels.rows import newest_rows
from engines.reuse.asked import Asked, Mode
from engines.reuse.engine import ReuseEngine
from engines.reuse.map_reader import MapReader
from engines.reuse.map_sender import MapSender
from engines.reuse.map_storage import map_storage
from engines.reuse.metrics import ReuseMetrics
from engines.reuse.receiver import Receiver
from engines.reuse.sender import Sender
from engines.reuse.settings import ModelIdentity, PairSettings, ReuseSettings, align_suffix

if TYPE_CHECKING:
    from cache_store.pool.shared_memory import SharedMemoryPool

LAYERS, HEADS, KV_HEADS, DIM, SLOTS, SCALE = 6, 4, 2, 16, 2048, 0.3
# Longer than anything here takes.
LONG_S = 30.0
LARGE = ModelIdentity(name="large", revision="r1", tokenizer="t", template="c", layers=LAYERS + 2, heads=HEADS)
SMALL = ModelIdentity(name="small", revision="r2", tokenizer="t", template="c", layers=LAYERS, heads=HEADS)
ALLOW = Asked(Mode.ALLOW, "acme")


def make_pair(**changes: Any) -> PairSettings:
    settings: dict[str, Any] = {"sender": LARGE, "layers": align_suffix(LAYERS, LAYERS + 2), "first_layer": 2}
    return PairSettings(**{**settings, "min_tokens": 64, "max_density": 1.0, **changes})


class Slow:
    """A backend whose calls can be made to wait and to fail."""

    def __init__(self, backend: MemoryBackend) -> None:
        self.backend = backend
        self.error: Exception | None = None
        self.calls: defaultdict[str, int] = defaultdict(int)
        self.open: defaultdict[str, threading.Event] = defaultdict(threading.Event)
        self.hanging: set[str] = set()

    def hang(self, *names: str) -> None:
        self.hanging |= set(names)

    def go_on(self) -> None:
        self.hanging.clear()
        for event in self.open.values():
            event.set()

    def __getattr__(self, name: str) -> Any:
        work = getattr(self.backend, name)

        def call(*arguments: Any, **named: Any) -> Any:
            self.calls[name] += 1
            if name in self.hanging:
                self.open[name].wait(LONG_S)
            if self.error:
                raise self.error
            return work(*arguments, **named)

        return call


class Worker:
    """One worker: its engine, its pool, and a model whose attention inputs are random but fixed."""

    def __init__(self, store: Store, settings: ReuseSettings, seed: int, pool: SharedMemoryPool | None = None) -> None:
        self.registry = CollectorRegistry()
        metrics = ReuseMetrics(self.registry)
        self.fetcher = Fetcher(store)
        self.publisher = Publisher(store)
        self.sender = None
        if settings.publish:
            self.sender = Sender(self.publisher, metrics, most_bytes=settings.capture_bytes, wait_s=LONG_S)
        maps = MapReader(pool, map_storage(pool), logging.getLogger("test")) if pool else None
        self.packer = None
        if pool and settings.publish_maps:
            self.packer = MapSender(
                pool,
                store,
                self.publisher,
                metrics,
                top_p=settings.publish_maps,
                renormalise=settings.maps.renormalise,
                most_bytes=settings.maps.capture_bytes,
                wait_s=LONG_S,
            )
        receiver = Receiver(settings, self.fetcher, metrics, maps=maps)
        self.engine = ReuseEngine(
            settings, self.fetcher, receiver, self.sender, metrics, slots=SLOTS, maps=maps, packer=self.packer
        )
        self.layers = settings.model.layers
        generator = torch.Generator().manual_seed(seed)
        shape = (self.layers, SLOTS)
        self.query = torch.randn(*shape, HEADS, DIM, generator=generator)
        self.key = torch.randn(*shape, KV_HEADS, DIM, generator=generator)
        self.value = torch.randn(*shape, KV_HEADS, DIM, generator=generator)
        self.keys, self.values = torch.zeros_like(self.key), torch.zeros_like(self.value)
        self.slots = torch.randperm(SLOTS, generator=generator).int()

    def counted(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"crossfill_reuse_{name}", labels) or 0.0

    def arrive(self, request_id: str, tokens: list[int], asked: Asked | None = ALLOW, **more: Any) -> None:
        self.engine.arrive(request_id, asked, tokens, **more)

    def wait(self) -> None:
        """Until all that the engine asked of the store has come, and all that it left is published."""
        for known in self.engine._known.values():
            fetches = [known.stored] if known.stored else []
            if hasattr(known.taken, "fetches"):
                fetches += [fetch for _, fetch in known.taken.fetches]
            for fetch in fetches:
                # No layer has this number, so that is a wait for the end.
                fetch.wait_for(-1, LONG_S)
                assert fetch.end is not None
        for sender in (self.sender, self.packer):
            assert sender is None or sender.drain(LONG_S)
        assert self.publisher.drain(LONG_S)

    def compute(self, request_id: str, start: int, stop: int, total: int) -> torch.Tensor:
        """One chunk through all layers; outputs [layers, rows, H, d]."""
        self.engine.begin_batch()
        self.engine.admit(request_id, start, total)
        where = self.slots[start:stop].long()
        chunk = self.engine.chunk(request_id, newest_rows(stop - start, stop), self.slots[:stop])
        out = torch.empty(self.layers, stop - start, HEADS, DIM)
        for layer in range(self.layers):
            self.keys[layer, where], self.values[layer, where] = (
                self.key[layer, start:stop],
                self.value[layer, start:stop],
            )
            query = self.query[layer, start:stop]
            self.engine.layers.attend(
                chunk, layer, query, self.keys[layer], self.values[layer], scale=SCALE, out=out[layer]
            )
        self.engine.computed(chunk)
        return out

    def prefill(
        self, request_id: str, tokens: list[int], *, cuts: tuple[int, ...] = (), prefix: int = 0
    ) -> torch.Tensor:
        """The whole prompt in chunks that end at `cuts`, once the store has answered; outputs [layers, rows, H, d]."""
        self.wait()
        bounds = [prefix, *cuts, len(tokens)]
        outputs = [self.compute(request_id, *chunk, len(tokens)) for chunk in itertools.pairwise(bounds)]
        self.wait()
        return torch.cat(outputs, dim=1)

    def close(self) -> None:
        self.fetcher.close()
        self.publisher.close(LONG_S)
        for sender in (self.sender, self.packer):
            if sender is not None:
                sender.close(LONG_S)


@pytest.fixture
def backend():
    slow = Slow(MemoryBackend())
    yield slow
    slow.go_on()


@pytest.fixture
def store_registry():
    return CollectorRegistry()


@pytest.fixture
def store(backend, store_registry):
    return Store(backend, Limits(2**30, 2**30), StoreMetrics(store_registry))


@pytest.fixture
def start(store):
    """`start(settings, seed, pool)`: a worker on the test's store."""
    started = []

    def start(settings: ReuseSettings, seed: int = 1, pool: SharedMemoryPool | None = None) -> Worker:
        started.append(Worker(store, settings, seed, pool))
        return started[-1]

    yield start
    for worker in started:
        worker.close()


@pytest.fixture
def sender(start):
    """The large model, which publishes what `make_pair` wants."""
    layers = tuple(sorted(set(make_pair().guided.values())))
    return start(ReuseSettings(model=LARGE, publish=layers, store=StoreSettings(url="memory://")))


@pytest.fixture
def receive(start):
    """`receive(**changes)`: the small model, with a changed pair."""

    def receive(*, wait_s: float = LONG_S, wait_share: float = 1e6, **changes: Any) -> Worker:
        pairs = (make_pair(**changes),)
        settings = ReuseSettings(
            model=SMALL, pairs=pairs, store=StoreSettings(url="memory://"), wait_s=wait_s, wait_share=wait_share
        )
        return start(settings, seed=2)

    return receive
