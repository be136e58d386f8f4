"""What the radix mirror costs: memory a page, the time of a lookup, and what lookups wait for while a holder goes."""

from __future__ import annotations

import gc
import random
import threading
import time
import tracemalloc
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cache_store import radix
from cache_store.keys import KEY_BYTES, PAGE
from cache_store.radix import RadixMirror
from crossfill.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from crossfill.progress import Bars

_PLENTY = 2**40
_LOOKUPS, _LOOKED_UP = 2000, 200
# 20K tokens, of which a third begins like many others'.
_PREFIX_PAGES, _SHARED_PAGES, _BEGINNINGS = 20_000 // PAGE, 100, 8
_HOLDERS = 8
# Between two lookups beside a removal: a thread that never waits would keep the interpreter to itself.
_LOOKUP_PAUSE_S = 1e-4


@dataclass(frozen=True)
class MirrorSize:
    """A mirror of so many pages and prefixes of 20K tokens, held by eight workers; seconds of lookups that find all.

    `counted_bytes` is what it counts towards its budget, `used_bytes` what Python has allocated for it.
    """

    pages: int
    prefixes: int
    used_bytes: int
    counted_bytes: int
    match_s: Sequence[float]


@dataclass(frozen=True)
class Removal:
    """One of eight holders removed from a mirror whose pages are each a node; seconds of all lookups beside that."""

    nodes: int
    taken_s: float
    match_s: Sequence[float]


def bench_radix(sizes: Sequence[int], progress: Bars) -> list[MirrorSize]:
    """Measure mirrors of these numbers of pages.

    Raises:
        BenchError: a prefix that was inserted is not found whole.
    """
    return [_measure(pages, progress) for pages in sizes]


def bench_removals(sizes: Sequence[int], progress: Bars) -> list[Removal]:
    """Remove a holder from mirrors of these numbers of pages, while another thread looks up others' prefixes.

    Raises:
        BenchError: the removed holder is still found, or another is not.
    """
    return [_remove(pages, progress) for pages in sizes]


def _remove(pages: int, progress: Bars) -> Removal:
    stage = f"removal from {pages} nodes"
    rng, mirror = random.Random(pages), RadixMirror(_PLENTY)
    beginnings = [rng.randbytes(KEY_BYTES) for _ in range(_BEGINNINGS)]
    kept: dict[int, list[bytes]] = {}
    for number in range(pages):
        keys = [rng.choice(beginnings), rng.randbytes(KEY_BYTES)]
        mirror.insert(f"worker-{number % _HOLDERS}", keys)
        kept.setdefault(number % _HOLDERS, keys)
        if number % 4096 == 0:
            progress(stage, number, pages)
    taken_s: list[float] = []

    def remove() -> None:
        started_s = time.perf_counter()
        mirror.remove("worker-0")
        taken_s.append(time.perf_counter() - started_s)

    removal = threading.Thread(target=remove)
    match_s: list[float] = []
    removal.start()
    while removal.is_alive() or not match_s:
        started_s = time.perf_counter()
        found = mirror.match(kept[1])
        match_s.append(time.perf_counter() - started_s)
        if found.by_holder.get("worker-1") != len(kept[1]):
            raise BenchError("the radix mirror lost a holder's pages while another was removed")
        time.sleep(_LOOKUP_PAUSE_S)
    removal.join()
    if "worker-0" in mirror.match(kept[0]).by_holder:
        raise BenchError("the radix mirror still knows a holder that was removed")
    progress(stage, pages, pages)
    return Removal(pages, taken_s[0], match_s)


def _measure(pages: int, progress: Bars) -> MirrorSize:
    rng = random.Random(pages)
    beginnings = [[rng.randbytes(KEY_BYTES) for _ in range(_SHARED_PAGES)] for _ in range(_BEGINNINGS)]
    # To be looked up later; made before memory is watched, so that only the mirror's own is.
    kept = [_prefix(rng, beginnings) for _ in range(min(_LOOKED_UP, pages // _PREFIX_PAGES))]
    gc.collect()
    tracemalloc.start()
    mirror, prefixes = RadixMirror(_PLENTY), 0
    while mirror.pages < pages:
        mirror.insert(*(kept[prefixes] if prefixes < len(kept) else _prefix(rng, beginnings)))
        prefixes += 1
        if prefixes % 64 == 0:
            progress(f"radix mirror of {pages} pages", mirror.pages, max(pages, mirror.pages))
    # Bars are drawn meanwhile, so only what the mirror's own module allocated.
    own = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, radix.__file__)])
    used_bytes = sum(found.size for found in own.statistics("filename"))
    tracemalloc.stop()
    match_s = []
    for _ in range(_LOOKUPS):
        holder, keys = rng.choice(kept)
        started_s = time.perf_counter()
        found = mirror.match(keys)
        match_s.append(time.perf_counter() - started_s)
        if found.by_holder.get(holder) != len(keys):
            raise BenchError(f"the radix mirror found {found.by_holder.get(holder, 0)} of {len(keys)} pages")
    progress(f"radix mirror of {pages} pages", mirror.pages, mirror.pages)
    return MirrorSize(mirror.pages, prefixes, used_bytes, mirror.size_bytes, match_s)


def _prefix(rng: random.Random, beginnings: Sequence[list[bytes]]) -> tuple[str, list[bytes]]:
    """A holder, and the keys of a prefix."""
    own = [rng.randbytes(KEY_BYTES) for _ in range(_PREFIX_PAGES - _SHARED_PAGES)]
    return f"worker-{rng.randrange(_HOLDERS)}", [*rng.choice(beginnings), *own]
