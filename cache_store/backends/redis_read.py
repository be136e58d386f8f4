"""Looking up and reading pages in Redis, each in one round trip."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from threading import Lock

from cache_store.backends import redis_codec as codec
from cache_store.backends.protocol import Found
from cache_store.backends.redis_link import RedisLink, Together
from cache_store.backends.redis_scripts import load_script

LOOKUP_PAGES = 1024
"""Pages of one run of a script that only looks; longer calls are several runs in one round trip."""

READ_PAGES = 64
"""Pages of one run that reads."""

GUESSES = 1024
"""Scopes of which is remembered what their pages have."""


class RedisReader:
    """Looks up and reads, and remembers of each scope how its pages looked last.

    A page of which all records are wanted is asked for as it lies, beside the script that says whether it is still
    there and of that form. If the guess was wrong the script gives the records itself, so a wrong guess costs time and
    nothing else.
    """

    def __init__(self, link: RedisLink) -> None:
        self._link = link
        self._lock = Lock()
        # Generation and names of records, by scope; the least recently seen first.
        self._seen: OrderedDict[bytes, tuple[bytes, tuple[str, ...]]] = OrderedDict()

    def lookup(self, scope: bytes, keys: Sequence[bytes]) -> Found:
        """See `Backend.lookup`."""
        script = load_script("lookup")
        replies = self._link.run_all([(script, (scope, b"".join(part))) for part in parts_of(keys, LOOKUP_PAGES)])
        found = self._link.understood(lambda: [page for reply in replies for page in self._found(scope, *reply)])
        digests = [page.tokens_digest if page else None for page in found]
        return Found(digests, 0, lambda index: page.sizes if (page := found[index]) else {})

    def _found(self, scope: bytes, generation: bytes, lengths: bytes, entries: bytes) -> Iterator[codec.Entry | None]:
        last = None
        for entry in codec.unpack_lookup(lengths, entries):
            yield entry
            last = entry or last
        if last:
            self._remember(scope, generation, last.names)

    def read(self, scope: bytes, wanted: Sequence[tuple[bytes, str]]) -> list[bytes | None]:
        """See `Backend.read`."""
        groups = codec.group_by_names(wanted)
        parts = [(names, part) for names, keys in groups.items() for part in parts_of(keys, READ_PAGES)]
        asked = [self._ask(scope, names, keys) for names, keys in parts]
        if len(groups) > 1:
            # Each run marks its pages as used; what counts is the order in which they were asked for.
            asked.append(Together(load_script("touch"), (scope, b"".join(key for key, _ in wanted))))
        replies = self._link.run_together(asked)
        found: dict[bytes, dict[str, bytes | None]] = {}

        def take() -> None:
            for (names, keys), (reply, after) in zip(parts, replies, strict=False):
                whole = after[0] if after else [None] * len(keys)
                if reply[1]:
                    self._remember(scope, reply[1], names)
                for key, records in zip(keys, codec.unpack_read(reply, whole, len(names)), strict=True):
                    found[key] = dict(zip(names, records, strict=True))

        self._link.understood(take)
        return [found[key][name] for key, name in wanted]

    def _ask(self, scope: bytes, names: tuple[str, ...], keys: Sequence[bytes]) -> Together:
        with self._lock:
            generation, known = self._seen.get(scope, (b"", ()))
        arguments = (scope, codec.pack_names(names), b"".join(keys))
        if not names or known != names:
            return Together(load_script("read"), (*arguments, b""))
        pages = self._link.address.root + b":p:" + generation
        return Together(
            load_script("read"), (*arguments, generation), after=(("MGET", *(pages + key for key in keys)),)
        )

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
