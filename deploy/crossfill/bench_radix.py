"""What the radix mirror costs: memory a page and the time of a lookup, from a thousand pages to a million."""

from __future__ import annotations

import gc
import random
import time
import tracemalloc
from dataclasses import dataclass
from typing import TYPE_CHECKING

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


def bench_radix(sizes: Sequence[int], progress: Bars) -> list[MirrorSize]:
    """Measure mirrors of these numbers of pages.

    Raises:
        BenchError: a prefix that was inserted is not found whole.
    """
    return [_measure(pages, progress) for pages in sizes]


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
    used_bytes = tracemalloc.get_traced_memory()[0]
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
