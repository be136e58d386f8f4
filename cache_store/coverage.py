"""What a lookup found: which pages of a prefix have which records."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from cache_store.keys import PAGE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from cache_store.keys import PageKey


@dataclass(frozen=True)
class Coverage:
    """Which row blocks of a prefix have which records. Holes are allowed: a page without any may stand between others.

    Attributes:
        pages: keys of all complete pages of the prefix, in order.
        hits: whether each page is stored.
        flushes: how often the store had been flushed; goes with what is published of this prefix.
        sizes: bytes of a stored page's records by name, by its index.
    """

    pages: tuple[PageKey, ...]
    hits: Sequence[bool]
    flushes: int
    sizes: Callable[[int], Mapping[str, int]] = field(repr=False, compare=False)

    @cached_property
    def records(self) -> tuple[Mapping[str, int], ...]:
        """Of each page, bytes of its records by name; empty where there are none."""
        return tuple(self.sizes(index) if hit else {} for index, hit in enumerate(self.hits))

    @property
    def tokens(self) -> int:
        """Tokens of all complete pages, covered or not."""
        return PAGE * len(self.pages)

    @property
    def keys(self) -> tuple[bytes, ...]:
        """Keys of the pages that have records."""
        return tuple(page.key for page, records in zip(self.pages, self.records, strict=True) if records)

    @property
    def names(self) -> frozenset[str]:
        """Names of records that some page has."""
        return frozenset().union(*self.records)

    def pages_with(self, name: str) -> tuple[int, ...]:
        """Indices of the pages that have a record of this name."""
        return tuple(index for index, records in enumerate(self.records) if name in records)

    def contiguous_pages(self, name: str) -> int:
        """How many pages from the first on have a record of this name, up to the first that has none."""
        for index, records in enumerate(self.records):
            if name not in records:
                return index
        return len(self.records)

    def size_bytes(self, names: Iterable[str]) -> int:
        """Bytes of all records of these names."""
        wanted = frozenset(names)
        return sum(size for records in self.records for name, size in records.items() if name in wanted)
