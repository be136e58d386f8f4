"""The Lua scripts that the Redis server runs, each whole or not at all; `store.lua` says what lies where."""

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import resources

LAYOUT = 3
"""Version of what lies where in Redis."""

PAGE_OVERHEAD_BYTES = 960
"""Counted for a page beside its entry in the index and its data, both rounded up as the server's allocator does.
Measured as growth of `used_memory` (Redis 7.0, jemalloc 5.3) on every shape of tree and with up to 90 records a page:
310 to 680 bytes, some 60 more if the store has the longest of names, and 172 for a lease."""

STRING_BYTES = 10
"""That the server puts before and behind a string, at most."""

WORK_PAGES = 128
"""Pages that one run of a script may evict."""

LEASES_AT_ONCE = 128
"""Leases that one run may end for being over or released, and that it may look at for a flush."""

SCOPES_AT_ONCE = 64
"""Scopes that one run may ask for a flush, or tell of."""

MERGED_BYTES = 1 << 19
"""Bytes of pages that one run may put together anew, for records that are added to them."""

FLUSHES_AT_ONCE = 16
"""Flushes that may be under way; another one first works on these."""

MAX_SCOPES = 4096
"""Scopes that stay known, for their epochs, though they hold nothing."""

_STORE = ("entry", "store")
_PARTS = {
    "check": (),
    "evict": (*_STORE, "room"),
    "flush": (*_STORE, "room"),
    "lease": (*_STORE, "room"),
    "publish": (*_STORE, "room", "records"),
    "quarantine": (*_STORE, "records"),
    "release": (*_STORE, "room"),
    "stats": (*_STORE, "room"),
}


@dataclass(frozen=True)
class Script:
    """A script as the server gets it, and the digest by which it is called."""

    text: str
    digest: str


@cache
def load_script(name: str) -> Script:
    """The script `name` with what stands before it."""
    constants = f"""
local LAYOUT, PAGE_OVERHEAD, STRING_BYTES = '{LAYOUT}', {PAGE_OVERHEAD_BYTES}, {STRING_BYTES}
local WORK_PAGES, MAX_SCOPES = {WORK_PAGES}, {MAX_SCOPES}
local MERGED_BYTES = {MERGED_BYTES}
local LEASES_AT_ONCE, SCOPES_AT_ONCE, FLUSHES_AT_ONCE = {LEASES_AT_ONCE}, {SCOPES_AT_ONCE}, {FLUSHES_AT_ONCE}
"""
    text = "\n".join([constants, _text("server"), *(_text(part) for part in (*_PARTS.get(name, _STORE), name))])
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


def _text(name: str) -> str:
    return resources.files(__name__).joinpath(f"{name}.lua").read_text("utf-8")
