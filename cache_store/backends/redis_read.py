"""Looking up and reading pages in Redis, each in one round trip."""

import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from threading import Lock

from cache_store.backends import redis_codec as codec
from cache_store.backends.protocol import Found
from cache_store.backends.redis_damage import Damage
from cache_store.backends.redis_link import RedisLink, Together
from cache_store.backends.redis_recent import Recent
from cache_store.backends.redis_scripts import load_script
from cache_store.keys import DIGEST_BYTES

LOOKUP_PAGES = 1024
"""Pages of one run of a script that only looks; longer calls are several runs in one round trip."""

READ_PAGES = 64
"""Pages of one run that reads."""

GUESSES = 1024
"""Scopes of which is remembered what their pages have."""

# Generation, number of flushes, and in parts what the index knows of each page.
_Looked = tuple[bytes, bytes, Sequence[Sequence[bytes | None]]]


class RedisReader:
    """Looks up and reads, and remembers of each scope how its pages looked last.

    A lookup is a plain command that looks into the generation it saw last, and a small script that says whether that
    was still the right one; else it asks once more, by a script that finds the generation. A page of which all records
    are wanted is asked for as it lies, beside the script that says whether it is still there and of that form. So a
    wrong guess costs time and nothing else.

    The server is told later that pages were used (`Recent`): by whoever makes room before that, else by and by.
    """

    def __init__(self, link: RedisLink) -> None:
        self._link = link
        self._lock = Lock()
        # Generation and names of records, by scope; the least recently seen first.
        self._seen: OrderedDict[bytes, tuple[bytes, tuple[str, ...]]] = OrderedDict()
        self.recent = Recent()
        self.damage = Damage(link)

    def lookup(self, scope: bytes, keys: Sequence[bytes]) -> Found:
        """See `Backend.lookup`."""
        with self._link.operation():
            return self._lookup(scope, keys)

    def _lookup(self, scope: bytes, keys: Sequence[bytes]) -> Found:
        now_s = time.monotonic()
        reply = self._look_where_it_was(scope, keys, now_s) or self._look(scope, keys)
        generation, flushes, entries = self._link.understood(lambda: _entries(*reply, len(keys)))
        damaged = codec.find_damaged(entries)
        if damaged:
            for place in damaged:
                entries[place] = None
            self.damage.take_away(scope, [keys[place] for place in damaged])
        last = next(filter(None, reversed(entries)), None)
        if last:
            self._remember(scope, generation, self._link.understood(lambda: codec.unpack_entry(last)).names)
            there = [key for key, entry in zip(keys, entries, strict=True) if entry] if None in entries else keys
            self.recent.add(scope, there, now_s)

        def sizes(index: int) -> Mapping[str, int]:
            entry = entries[index]
            return self._link.understood(lambda: codec.unpack_entry(entry).sizes) if entry else {}

        return Found([entry and entry[:DIGEST_BYTES] for entry in entries], flushes, sizes)

    def _look_where_it_was(self, scope: bytes, keys: Sequence[bytes], now_s: float) -> _Looked | None:
        generation, names = self._guess(scope)
        if not generation or not keys:
            return None
        table = self._link.address.root + b":i:" + generation
        commands = [codec.pack_hmget(table, part) for part in parts_of(keys, LOOKUP_PAGES)]
        # Only after all the others: what it says holds for what they saw.
        check = (load_script("check"), (scope, generation))
        *found, flushes = self._link.run_after(commands, [*self.recent.take_due(now_s), check])
        if flushes is None:
            self._remember(scope, b"", names)
            return None
        return generation, flushes, found[: len(commands)]

    def _look(self, scope: bytes, keys: Sequence[bytes]) -> _Looked:
        script = load_script("lookup")
        parts = list(parts_of(keys, LOOKUP_PAGES)) or [[]]
        replies = self._link.run_all([(script, (scope, b"".join(part))) for part in parts])

        def join() -> _Looked:
            generation, flushes, _ = replies[-1]
            # One that ended between two parts is seen in the first ones only.
            found = [
                entries if of == generation and entries else [None] * len(part)
                for (of, _, entries), part in zip(replies, parts, strict=True)
            ]
            return generation, flushes, found

        return self._link.understood(join)

    def read(self, scope: bytes, wanted: Sequence[tuple[bytes, str]]) -> list[bytes | None]:
        """See `Backend.read`."""
        now_s = time.monotonic()
        groups = codec.group_by_names(wanted)
        parts = [(names, part) for names, keys in groups.items() for part in parts_of(keys, READ_PAGES)]
        asked = [self._ask(scope, names, keys) for names, keys in parts]
        late = [Together(*call) for call in self.recent.take_due(now_s)]
        replies = self._link.run_together([*asked, *late])
        found: dict[bytes, Mapping[str, bytes | None]] = {}
        damaged = [0]

        def take() -> None:
            for (names, keys), (reply, after) in zip(parts, replies, strict=False):
                whole = after[0] if after else [None] * len(keys)
                if reply[1]:
                    self._remember(scope, reply[1], names)
                damaged[0] += int(reply[2])
                for key, records in zip(keys, codec.unpack_read(reply, whole, len(names)), strict=True):
                    found[key] = dict(zip(names, records, strict=True))

        self._link.understood(take)
        self.damage.tell(damaged[0])
        # Each once, by its last mention.
        used = dict.fromkeys(key for key, _ in reversed(wanted))
        self.recent.add(scope, list(reversed(used)), now_s)
        return [found[key][name] for key, name in wanted]

    def anchors(self, scope: bytes, slot: str) -> dict[str, bytes]:
        """See `Backend.anchors`. They may be large, so they come by themselves, beside the script that checks."""
        generation, names = self._guess(scope)
        if generation:
            end = generation + slot.encode()
            pool, ages = (self._link.address.root + kind + end for kind in (b":a:", b":o:"))
            asked = Together(
                load_script("check"), (scope, generation), after=(("HGETALL", pool), ("ZRANGE", ages, 0, -1))
            )
            ((flushes, found),) = self._link.run_together([asked])
            if flushes is not None:
                return self._link.understood(lambda: _by_age(*found))
        reply = self._link.run(load_script("anchors"), scope, slot)

        def take() -> dict[str, bytes]:
            generation, *rest = reply
            self._remember(scope, generation, names)
            return _by_age(rest, rest[::2])

        return self._link.understood(take)

    def _ask(self, scope: bytes, names: tuple[str, ...], keys: Sequence[bytes]) -> Together:
        generation, known = self._guess(scope)
        arguments = (scope, codec.pack_names(names), b"".join(keys))
        if not names or not generation or known != names:
            return Together(load_script("read"), (*arguments, b""))
        pages = self._link.address.root + b":p:" + generation
        return Together(
            load_script("read"), (*arguments, generation), after=(("MGET", *(pages + key for key in keys)),)
        )

    def _guess(self, scope: bytes) -> tuple[bytes, tuple[str, ...]]:
        with self._lock:
            return self._seen.get(scope, (b"", ()))

    def remember_generation(self, scope: bytes, generation: bytes) -> None:
        """What a publish said."""
        known, names = self._guess(scope)
        if generation != known:
            self._remember(scope, generation, names)

    def _remember(self, scope: bytes, generation: bytes, names: tuple[str, ...]) -> None:
        with self._lock:
            self._seen[scope] = (generation, names)
            self._seen.move_to_end(scope)
            if len(self._seen) > GUESSES:
                self._seen.popitem(last=False)


def parts_of(keys: Sequence[bytes], size: int) -> Iterator[Sequence[bytes]]:
    """The keys in parts of at most `size`."""
    for start in range(0, len(keys), size):
        yield keys[start : start + size]


def _entries(
    generation: bytes, flushes: bytes, parts: Sequence[Sequence[bytes | None]], number: int
) -> tuple[bytes, int, list[bytes | None]]:
    entries = list(chain.from_iterable(parts))
    if len(entries) != number:
        raise ValueError(f"want {number} entries, got {len(entries)}")
    return generation, int(flushes), entries


def _by_age(pairs: Sequence[bytes], ages: Sequence[bytes]) -> dict[str, bytes]:
    found = dict(zip(pairs[::2], pairs[1::2], strict=True))
    return {identity.decode(): found[identity] for identity in ages if identity in found}
