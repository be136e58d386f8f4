"""From a URL to a backend."""

from urllib.parse import urlsplit

from cache_store.backends.protocol import Backend
from cache_store.errors import StoreUrlError

SCHEMES = ("memory", "lmdb", "redis", "rediss", "redis+cluster")


def open_backend(url: str, *, deadline_s: float = 1.0) -> Backend:
    """Open the store that `url` names.

    `memory://`, `lmdb:///folder`, `redis://host:port/0`, `rediss://…`, `redis+cluster://host:port`; options follow as a
    query, such as `lmdb:///var/store?map_bytes=1073741824` or `redis://localhost?name=crossfill`.

    Args:
        url: what to open.
        deadline_s: longest that an operation may take.

    Raises:
        StoreUrlError: the scheme or an option is unknown; the message names what there is.
        StoreError: the store cannot be opened.
    """
    scheme = urlsplit(url).scheme
    if scheme == "memory":
        from cache_store.backends.memory import MemoryBackend

        return MemoryBackend.from_url(url)
    if scheme == "lmdb":
        from cache_store.backends.lmdb import LmdbBackend

        return LmdbBackend.from_url(url, deadline_s=deadline_s)
    if scheme in {"redis", "rediss", "redis+cluster"}:
        from cache_store.backends.redis import RedisBackend

        return RedisBackend.from_url(url, deadline_s=deadline_s)
    # Only the scheme: the rest may hold a password.
    found = repr(scheme) if "://" in url else "that"
    raise StoreUrlError(f"{found} is no kind of store; there are {', '.join(f'{name}://' for name in SCHEMES)}")
