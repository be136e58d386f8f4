"""From raw times to the figures of `crossfill bench store`."""

from __future__ import annotations

import re
import statistics
import sys
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from crossfill.bench_router_report import p99
from crossfill.machine import describe_machine

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rich.table import Table

    from crossfill.bench_radix import MirrorSize, Removal

RATIO_TARGET = 1.5

# Below this number a p99 is little more than the largest value.
_LEAST_FOR_P99 = 100


class Side(StrEnum):
    """Who does the work.

    The store (with keys and checks), its backend alone, plain calls of the library below it with a value for each
    record, and with one value for each page.
    """

    STORE = "store"
    BACKEND = "backend"
    RAW = "raw"
    PACKED = "packed"


@dataclass(frozen=True)
class StoreBench:
    """What to run: stores by URL (none: all that can be started here), lengths, records of a page, rounds.

    `record_bytes` is with header. A prefix is published `rounds` times; looked up and read as often or a multiple, at
    least `least_lookups` times. Memory is measured with `memory_pages`.
    """

    urls: tuple[str, ...] = ()
    tokens: tuple[int, ...] = (4096, 20_000)
    records: int = 30
    record_bytes: int = 600
    rounds: int = 40
    least_lookups: int = 200
    memory_pages: int = 2048
    mirror_pages: tuple[int, ...] = (10**3, 10**4, 10**5, 10**6)


@dataclass(frozen=True)
class Measured:
    """One operation on one store; seconds of each round, by who did the work. `size_bytes` are those of records."""

    url: str
    tokens: int
    operation: str
    pages: int
    size_bytes: int
    taken_s: Mapping[Side, Sequence[float]]

    def ratio(self, side: Side) -> float | None:
        """Backend over plain calls, median over the rounds; None if there is no library."""
        raw = self.taken_s.get(side)
        if raw is None:
            return None
        return statistics.median(a / b for a, b in zip(self.taken_s[Side.BACKEND], raw, strict=True))

    def median_s(self, side: Side) -> float:
        """Median over the rounds."""
        return statistics.median(self.taken_s[side])

    def p99_s(self, side: Side) -> float | None:
        """None for fewer than 100 rounds."""
        taken = self.taken_s[side]
        return p99(taken) if len(taken) >= _LEAST_FOR_P99 else None


@dataclass(frozen=True)
class PageMemory:
    """What a page with so many records takes beside their bytes, in bytes: really, and as the store counts it."""

    url: str
    pages: int
    records: int
    used_bytes: float
    counted_bytes: float


@dataclass(frozen=True)
class Hung:
    """What requests waited for a server that hangs, in seconds, when they were ready to wait `asked_s`."""

    url: str
    asked_s: float
    waited_s: Sequence[float]


@dataclass(frozen=True)
class StoreResults:
    """All of one run."""

    measured: Sequence[Measured]
    memory: Sequence[PageMemory]
    hung: Hung | None
    mirrors: Sequence[MirrorSize]
    removals: Sequence[Removal]


def without_password(text: str) -> str:
    """A URL, or words that hold one, as a report may show them."""
    return re.sub(r"(?<=://)[^/\s]*@", "", text)


def tables(bench: StoreBench, results: StoreResults) -> Iterator[Table]:
    """Everything measured, for people; none wider than 80 columns."""
    yield _stores(bench, results.measured)
    beside_plain = [one for one in results.measured if Side.RAW in one.taken_s]
    if beside_plain:
        yield _plain_calls(beside_plain)
    yield _memory(bench, results.memory)
    yield _mirrors(results.mirrors)
    yield _removals(results.removals)
    if results.hung is not None:
        yield _hung(results.hung)


def _table(title: str, *columns: str, left: int = 0, caption: str = "") -> Table:
    """The first `left` columns hold words, the others numbers."""
    from rich.table import Table

    # Without its edges, and folded rather than cut where it is too wide all the same.
    table = Table(title=title, caption=caption, show_edge=False, pad_edge=False)
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if number < left else "right", overflow="fold")
    return table


def _stores(bench: StoreBench, measured: Sequence[Measured]) -> Table:
    table = _table(
        f"Pages of {bench.records} records of {bench.record_bytes} bytes; times in ms",
        *("store", "tokens", "does", "p50", "p99", "backend", "p99", "pages/s", "MB/s"),
        left=3,
        caption="backend: without keys and checks. A read is one record of every page.",
    )
    for one in measured:
        median_s = one.median_s(Side.STORE)
        rates = f"{one.pages / median_s:,.0f}", f"{one.size_bytes / median_s / 1e6:.0f}" if one.size_bytes else "–"
        table.add_row(*_what(one), *_times(one, Side.STORE), *_times(one, Side.BACKEND), *rates)
    return table


def _plain_calls(measured: Sequence[Measured]) -> Table:
    table = _table(
        "The same bytes by plain calls of lmdb or redis-py; times in ms",
        *("store", "tokens", "does", "records", "p99", "×", "packed", "p99", "×"),
        left=3,
        caption="records: a value for each record; packed: a value for each page; ×: backend over those, in the same "
        f"rounds, at most {RATIO_TARGET} wanted.",
    )
    for one in measured:
        sides = (cell for side in (Side.RAW, Side.PACKED) for cell in (*_times(one, side), _ratio(one, side)))
        table.add_row(*_what(one), *sides)
    return table


def _memory(bench: StoreBench, memory: Sequence[PageMemory]) -> Table:
    table = _table(
        f"What a page takes beside records of {bench.record_bytes} bytes",
        *("store", "records", "pages", "bytes a page", "counted"),
        left=1,
        caption="memory: allocated by Python; lmdb: of the file, in use; redis: used_memory of the server.",
    )
    for one in memory:
        sizes = f"{one.used_bytes:,.0f}", f"{one.counted_bytes:,.0f}"
        table.add_row(_scheme(one.url), str(one.records), str(one.pages), *sizes)
    return table


def _mirrors(mirrors: Sequence[MirrorSize]) -> Table:
    columns = "pages", "bytes a page", "counted", "match p50 µs", "p99 µs"
    table = _table("Radix mirror of prefixes of 20K tokens, eight holders", *columns)
    for size in mirrors:
        per_page = size.used_bytes / size.pages, size.counted_bytes / size.pages
        times = statistics.median(size.match_s), p99(size.match_s)
        table.add_row(str(size.pages), *(f"{value:.1f}" for value in per_page), *(f"{t * 1e6:.1f}" for t in times))
    return table


def _removals(removals: Sequence[Removal]) -> Table:
    columns = "nodes", "taken ms", "matches meanwhile", "longest ms"
    table = _table("Radix mirror, one of eight holders removed", *columns)
    for one in removals:
        table.add_row(str(one.nodes), _ms(one.taken_s), str(len(one.match_s)), _ms(max(one.match_s)))
    return table


def _hung(hung: Hung) -> Table:
    table = _table("A server that hangs", "requests", "ready to wait", "waited p50", "longest")
    asked, median, longest = _ms(hung.asked_s), _ms(statistics.median(hung.waited_s)), _ms(max(hung.waited_s))
    table.add_row(str(len(hung.waited_s)), f"{asked} ms", f"{median} ms", f"{longest} ms")
    return table


def report(bench: StoreBench, results: StoreResults) -> dict[str, Any]:
    """Everything as JSON data, with what is needed to repeat it."""
    return {
        "machine": describe_machine(),
        "command": list(map(without_password, sys.argv)),
        "bench": {**asdict(bench), "urls": list(map(without_password, bench.urls))},
        "targets": {"ratio": RATIO_TARGET},
        "stores": [
            {**asdict(one), "ratio": one.ratio(Side.RAW), "packed_ratio": one.ratio(Side.PACKED)}
            for one in results.measured
        ],
        "memory": [asdict(one) for one in results.memory],
        "hung": asdict(results.hung) if results.hung else None,
        "mirrors": [asdict(size) for size in results.mirrors],
        "removals": [asdict(one) for one in results.removals],
    }


def _what(one: Measured) -> tuple[str, str, str]:
    return _scheme(one.url), str(one.tokens), one.operation


def _scheme(url: str) -> str:
    return url.partition(":")[0]


def _times(one: Measured, side: Side) -> tuple[str, str]:
    return _ms(one.median_s(side)), _ms(one.p99_s(side))


def _ratio(one: Measured, side: Side) -> str:
    ratio = one.ratio(side)
    return "–" if ratio is None else f"{ratio:.2f}"


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.2f}"
