"""What is done to a Redis store as a whole: going through its pages, and deleting what belongs to nothing."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from cache_store.backends.protocol import PageWrite, Reclaimed
from cache_store.backends.redis_codec import Entry, find_damaged, unpack_entry
from cache_store.backends.redis_damage import Damage
from cache_store.backends.redis_link import RedisLink
from cache_store.backends.redis_scripts import load_script

SCAN_PAGES = 64
"""Pages read at once."""

_OF_GENERATIONS = b":[piukgsaoc]:*"


def scan_pages(link: RedisLink, scope: bytes, damage: Damage) -> Iterator[PageWrite]:
    """The pages of a scope with their records, parents before children; read in passing, without counting as use."""
    generation, entries = _entries(link, scope, damage)
    order = list(_parents_first(entries))
    for start in range(0, len(order), SCAN_PAGES):
        part = order[start : start + SCAN_PAGES]
        values = link.ask_one("MGET", *(link.address.root + b":p:" + generation + key for key in part))
        altered = []
        for key, data in zip(part, values, strict=True):
            entry = entries[key]
            if isinstance(data, bytes) and len(data) == (entry.ends[-1] if entry.ends else 0):
                yield PageWrite(key, entry.parent, entry.tokens_digest, entry.records(data))
            else:
                altered.append(key)
        # Others of them were changed or went meanwhile; the server looks.
        damage.take_away(scope, altered)


def _entries(link: RedisLink, scope: bytes, damage: Damage) -> tuple[bytes, Mapping[bytes, Entry]]:
    generation, cursor, entries = b"", b"0", dict[bytes, Entry]()
    while True:
        generation, cursor, found = link.run(load_script("entries"), scope, generation, cursor)
        damaged = link.understood(partial(_unpack, entries, found))
        damage.take_away(scope, damaged)
        if cursor == b"0":
            return generation, entries


def _unpack(entries: dict[bytes, Entry], found: Sequence[bytes]) -> list[bytes]:
    """Adds those that are as they were written; the keys of the others."""
    damaged = set(find_damaged(found[1::2]))
    pairs = list(enumerate(zip(found[::2], found[1::2], strict=True)))
    entries |= {key: unpack_entry(entry) for place, (key, entry) in pairs if place not in damaged}
    return [key for place, (key, _) in pairs if place in damaged]


def _parents_first(entries: Mapping[bytes, Entry]) -> Iterator[bytes]:
    children: dict[bytes, list[bytes]] = {}
    for key, entry in entries.items():
        children.setdefault(entry.parent, []).append(key)
    waiting = [key for key, entry in entries.items() if entry.parent not in entries]
    while waiting:
        key = waiting.pop()
        yield key
        waiting += children.get(key, [])


def delete_orphans(link: RedisLink) -> Reclaimed:
    """Delete keys of the store that its index does not name: left behind when other keys were taken from outside."""
    pages, size_bytes, cursor = 0, 0, b"0"
    while True:
        cursor, keys = link.ask_one("SCAN", cursor, "MATCH", link.address.root + _OF_GENERATIONS, "COUNT", 500)
        if keys:
            gone, size = link.run(load_script("orphans"), *keys)
            pages, size_bytes = pages + gone, size_bytes + size
        if cursor == b"0":
            return Reclaimed(pages, size_bytes)
