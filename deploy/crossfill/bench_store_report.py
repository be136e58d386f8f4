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

    from crossfill.bench_radix import MirrorSize

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

    `record_bytes` is with header. An operation is done `rounds` times or a small multiple of it.
    """

    urls: tuple[str, ...] = ()
    tokens: tuple[int, ...] = (4096, 20_000)
    records: int = 30
    record_bytes: int = 600
    rounds: int = 40
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
class Hung:
    """What requests waited for a server that hangs, in seconds, when they were ready to wait `asked_s`."""

    url: str
    asked_s: float
    waited_s: Sequence[float]


@dataclass(frozen=True)
class StoreResults:
    """All of one run."""

    measured: Sequence[Measured]
    hung: Hung | None
    mirrors: Sequence[MirrorSize]


def without_password(text: str) -> str:
    """A URL, or words that hold one, as a report may show them."""
    return re.sub(r"(?<=://)[^/\s]*@", "", text)


def tables(bench: StoreBench, results: StoreResults) -> Iterator[Table]:
    """Everything measured, for people."""
    from rich.table import Table

    stores = Table(
        title=f"Pages of {bench.records} records of {bench.record_bytes} bytes; ms, median / p99",
        caption="store: with keys and checks; backend: alone; records: plain calls of lmdb or redis-py, a value for "
        "each record; packed: the same, a value for each page; ×: backend over those, same bytes and rounds, at most "
        f"{RATIO_TARGET} wanted. A read is one record of every page.",
    )
    for name in ("store", "tokens", "operation"):
        stores.add_column(name)
    for name in ("store", "backend", "records", "×", "packed", "×", "pages/s", "MB/s"):
        stores.add_column(name, justify="right")
    for one in results.measured:
        stores.add_row(*_cells(one))
    yield stores
    mirror = Table(title="Radix mirror of prefixes of 20K tokens, eight holders")
    for name in ("pages", "bytes a page", "counted", "match p50 µs", "p99 µs"):
        mirror.add_column(name, justify="right")
    for size in results.mirrors:
        per_page = size.used_bytes / size.pages, size.counted_bytes / size.pages
        times = statistics.median(size.match_s), p99(size.match_s)
        mirror.add_row(str(size.pages), *(f"{value:.1f}" for value in per_page), *(f"{t * 1e6:.1f}" for t in times))
    yield mirror
    if results.hung is not None:
        hung = Table(title="A server that hangs")
        for name in ("requests", "ready to wait", "waited p50", "longest"):
            hung.add_column(name, justify="right")
        waited = results.hung.waited_s
        asked, median, longest = _ms(results.hung.asked_s), _ms(statistics.median(waited)), _ms(max(waited))
        hung.add_row(str(len(waited)), f"{asked} ms", f"{median} ms", f"{longest} ms")
        yield hung


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
        "hung": asdict(results.hung) if results.hung else None,
        "mirrors": [asdict(size) for size in results.mirrors],
    }


def _cells(one: Measured) -> tuple[str, ...]:
    median_s = one.median_s(Side.STORE)
    return (
        one.url.partition(":")[0],
        str(one.tokens),
        one.operation,
        _times(one, Side.STORE),
        _times(one, Side.BACKEND),
        *(cell for side in (Side.RAW, Side.PACKED) for cell in (_times(one, side), _ratio(one, side))),
        f"{one.pages / median_s:,.0f}",
        f"{one.size_bytes / median_s / 1e6:.0f}" if one.size_bytes else "–",
    )


def _times(one: Measured, side: Side) -> str:
    return f"{_ms(one.median_s(side))} / {_ms(one.p99_s(side))}" if side in one.taken_s else "–"


def _ratio(one: Measured, side: Side) -> str:
    ratio = one.ratio(side)
    return "–" if ratio is None else f"{ratio:.2f}"


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.2f}"
