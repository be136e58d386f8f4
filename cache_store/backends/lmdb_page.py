"""A page as bytes: a head, which lookups copy whole, and a body, in which one record is found by its place.

A head is the digest of the tokens, what the body's list of names is called, the size of each record, the names, and a
checksum. It is kept small: runs of equal sizes, and of names with consecutive numbers.

A body begins with what its list of names is called and where each record begins and ends, so a reader that knows the
list needs no head. Nothing checks a body's places: records carry checksums of their own, and no place leads out of the
body.
"""

import hashlib
import json
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, chain, groupby, pairwise
from types import MappingProxyType

from cache_store.backends import checksum
from cache_store.backends.checksum import CHECKSUM_BYTES, seal
from cache_store.keys import DIGEST_BYTES

_SIZES_AT = DIGEST_BYTES + 8
_RUN = struct.Struct("<HI")
_MOST_BYTES = 2**31 - 1

FindSpan = Callable[[memoryview], tuple[int, int, int]]
"""From a body: what its list of names is called, start and end of one record."""


@dataclass(frozen=True, slots=True)
class Head:
    """What there is of a page.

    Attributes:
        tokens_digest: as it was written.
        names_id: what the list of names is called in the body.
        sizes: of the records, by name, in the order they lie.
    """

    tokens_digest: bytes
    names_id: int
    sizes: Mapping[str, int]

    def offsets(self) -> list[int]:
        """Where each record begins in the body, and where the last one ends."""
        return list(accumulate(self.sizes.values(), initial=8 + 4 * (len(self.sizes) + 1)))


@dataclass(frozen=True, slots=True)
class Stored:
    """A page that is what its head says.

    Attributes:
        head: of the page.
        body: in LMDB's memory: valid only as long as the transaction.
    """

    head: Head
    body: memoryview = field(repr=False)

    def records(self) -> dict[str, bytes]:
        """Copies of the records by name."""
        spans = pairwise(self.head.offsets())
        return {name: bytes(self.body[start:end]) for name, (start, end) in zip(self.head.sizes, spans, strict=True)}


def pack_page(tokens_digest: bytes, records: Mapping[str, bytes]) -> tuple[bytes, bytes]:
    """Head and body of a page.

    Raises:
        ValueError: the digest is not 32 bytes, there are more than 65,535 records, or all of it is 2 GiB.
    """
    if len(tokens_digest) != DIGEST_BYTES:
        raise ValueError(f"want a digest of {DIGEST_BYTES} bytes, got {len(tokens_digest)}")
    names_id, names = _pack_names(tuple(records))
    sizes = list(map(len, records.values()))
    offsets = list(accumulate(sizes, initial=8 + 4 * (len(sizes) + 1)))
    if offsets[-1] > _MOST_BYTES:
        raise ValueError(f"want less than 2 GiB a page, got {offsets[-1]} bytes")
    head = b"".join([tokens_digest, names_id, _pack_sizes(sizes), names])
    places = struct.pack(f"<{len(offsets)}I", *offsets)
    return seal(head), b"".join([names_id, places, *records.values()])


def is_intact(head: bytes | memoryview) -> bool:
    """Whether the head is as it was written."""
    return len(head) > _SIZES_AT and checksum.is_intact(head)


def unpack_head(head: bytes | memoryview) -> Head | None:
    """What a head says; None if it was altered since it was written."""
    if not is_intact(head):
        return None
    head = bytes(head)
    return Head(head[:DIGEST_BYTES], int.from_bytes(head[DIGEST_BYTES:_SIZES_AT], "little"), unpack_sizes(head))


def unpack_sizes(head: bytes) -> Mapping[str, int]:
    """Size of each record by name, from an intact head; one mapping for all heads that say the same."""
    return _unpack_sizes(head[_SIZES_AT:-CHECKSUM_BYTES])


def unpack_page(head: bytes | memoryview | None, body: memoryview | None) -> Stored | None:
    """A page, without copying records; None if a part is missing or anything but a record was altered."""
    found = None if head is None else unpack_head(head)
    if found is None or body is None:
        return None
    offsets = found.offsets()
    places = struct.pack(f"<Q{len(offsets)}I", found.names_id, *offsets)
    intact = offsets[-1] == len(body) and body[: len(places)] == places
    return Stored(found, body) if intact else None


def find_spans(head: Head) -> dict[str, FindSpan]:
    """How to find each record of a page with such a head, by name."""
    return {name: find_span(index) for index, name in enumerate(head.sizes)}


@lru_cache(maxsize=4096)
def find_span(index: int) -> FindSpan:
    """How to find the record of this place; raises `struct.error` on a body that is too short."""
    find: FindSpan = struct.Struct(f"<Q{4 * index}xII").unpack_from
    return find


def _pack_sizes(sizes: Iterable[int]) -> bytes:
    runs = [(len(list(run)), size) for size, run in groupby(sizes)]
    return struct.pack("<H" + "HI" * len(runs), len(runs), *chain.from_iterable(runs))


@lru_cache(maxsize=1024)
def _unpack_sizes(packed: bytes) -> Mapping[str, int]:
    names_at = 2 + _RUN.size * int.from_bytes(packed[:2], "little")
    sizes = [size for count, size in _RUN.iter_unpack(packed[2:names_at]) for _ in range(count)]
    return MappingProxyType(dict(zip(_unpack_names(packed[names_at:]), sizes, strict=True)))


# Most pages have the same names.
@lru_cache(maxsize=256)
def _pack_names(names: tuple[str, ...]) -> tuple[bytes, bytes]:
    if len(names) > 0xFFFF:
        raise ValueError("want at most 65,535 records a page")
    runs: list[tuple[str, int, int]] = []
    for name in names:
        stem, number = _split_name(name)
        before, first, count = runs[-1] if runs else ("", -1, 0)
        if first >= 0 and before == stem and number == first + count:
            runs[-1] = (stem, first, count + 1)
        else:
            runs.append((stem, number, 1))
    packed = json.dumps(runs, separators=(",", ":")).encode()
    return hashlib.blake2b(packed, digest_size=8).digest(), packed


@lru_cache(maxsize=256)
def _unpack_names(packed: bytes) -> tuple[str, ...]:
    runs = json.loads(packed)
    return tuple(
        stem if first < 0 else f"{stem}{number}"
        for stem, first, count in runs
        for number in range(first, first + count)
    )


def _split_name(name: str) -> tuple[str, int]:
    """What a name begins with and the number that it ends with; all of it and -1 if a number would not give it back."""
    stem = name.rstrip("0123456789")
    number = name[len(stem) :]
    if not number or len(number) > 9 or str(int(number)) != number:
        return name, -1
    return stem, int(number)
