"""What a worker would do to a store, in a process of its own: `python store_process.py URL`, commands on stdin."""

from __future__ import annotations

import sys
import threading

from prometheus_client import CollectorRegistry

from cache_store.config import StoreSettings
from cache_store.keys import PAGE, page_keys
from cache_store.metrics import StoreMetrics
from cache_store.namespace import Namespace
from cache_store.records import Kind, Record
from cache_store.store import Store, open_store

PREFIX_PAGES = 3


def namespace_of(tenant: str, model: str, revision: str) -> Namespace:
    return Namespace(tenant, model, revision, "tokenizer", "template")


def put(store: Store, namespace: Namespace, tokens: list[int]) -> None:
    records = {
        index: [Record(Kind.MASS, 0, (4,), "u1", page.tokens_digest, b"mass")]
        for index, page in enumerate(page_keys(namespace.scope, tokens))
    }
    published = store.publish(namespace, tokens, records)
    assert published.pages == len(records), published


def found(store: Store, namespace: Namespace, tokens: list[int]) -> int:
    coverage = store.match(namespace, tokens)
    return sum(bool(records) for records in coverage.records)


class Traffic:
    """Publishes one prefix after the other, and looks each up again, until it is told to end."""

    namespace = namespace_of("acme", "small", "busy")

    def __init__(self, store: Store) -> None:
        self._store = store
        self._ended = threading.Event()
        self.number = 0
        self.partly_found = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @staticmethod
    def tokens(number: int) -> list[int]:
        return [number] * (PREFIX_PAGES * PAGE)

    def _run(self) -> None:
        while not self._ended.is_set():
            put(self._store, self.namespace, self.tokens(self.number))
            self.number += 1
            # One lookup sees all of a prefix, or after a flush nothing.
            if found(self._store, self.namespace, self.tokens(self.number - 1)) not in {0, PREFIX_PAGES}:
                self.partly_found += 1

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


def main(url: str) -> None:
    store = open_store(StoreSettings(url=url, deadline_s=20), StoreMetrics(CollectorRegistry()))
    say("open")
    traffic: Traffic | None = None
    for line in sys.stdin:
        match line.split():
            case ["publish", tenant, model, revision, pages]:
                put(store, namespace_of(tenant, model, revision), list(range(int(pages) * PAGE)))
                say("done")
            case ["find", tenant, model, revision, pages]:
                say(str(found(store, namespace_of(tenant, model, revision), list(range(int(pages) * PAGE)))))
            case ["traffic"]:
                traffic = Traffic(store)
                say("running")
            case ["number"] if traffic:
                say(str(traffic.number))
            case ["older", number] if traffic:
                older = (found(store, traffic.namespace, traffic.tokens(one)) for one in range(int(number)))
                say(str(sum(pages > 0 for pages in older)))
            case ["end"] if traffic:
                traffic.end()
                say(f"partly found {traffic.partly_found}")


def say(line: str) -> None:
    print(line, flush=True)  # noqa: T201  # what the test reads


if __name__ == "__main__":
    main(sys.argv[1])
