"""What redis-py's errors mean for a store."""

import ssl
from collections.abc import Sequence

from redis import exceptions as redis

from cache_store.backends.redis_address import RedisAddress
from cache_store.backends.redis_sockets import ReplyTooLargeError
from cache_store.errors import StoreError, StoreUnavailableError, StoreVersionError

UNREADABLE = (ValueError, IndexError, KeyError, TypeError, AttributeError, RecursionError, MemoryError, OverflowError)
"""What redis-py's parser, and ours, raise for bytes that are no reply."""

ACCESS_REFUSED = (redis.AuthenticationError, redis.AuthorizationError, redis.NoPermissionError)


def unavailable(address: RedisAddress, reason: str, detail: str) -> StoreUnavailableError:
    """The error for a store that does not do what it should."""
    return StoreUnavailableError(f"{address.shown}: {detail}", reason)


def explain(error: redis.RedisError, address: RedisAddress) -> StoreError:
    """The store's error for one of redis-py."""
    text = _first_line(error)
    if "CROSSFILLLAYOUT" in text:
        found = text.split("CROSSFILLLAYOUT", 1)[1].split()[0]
        return StoreVersionError(
            f"{address.shown}: the store has layout {found}, which another version of Crossfill wrote; flush it with "
            "that version, or use another name"
        )
    for part, reason, detail in _BY_TEXT:
        if part in text:
            return unavailable(address, reason, detail)
    for kind, reason, detail in _BY_KIND:
        if isinstance(error, kind):
            return unavailable(address, reason, detail)
    if isinstance(error, redis.ConnectionError):
        return _of_connection(error, address)
    return unavailable(address, "server", f"the server says: {text}")


MOVING = "its slot is being moved to another shard"
_NO_MEMORY = "the server has no memory left (maxmemory); raise it or lower the store's budget"
_REPLICA = "the server is a read-only replica; want the address of the primary"
# redis-py cuts off the first word of an error that it has a class for, and does not know those that Redis 6 wraps.
_BY_TEXT = (
    ("OOM ", "full", _NO_MEMORY),
    ("used memory > 'maxmemory'", "full", _NO_MEMORY),
    ("MISCONF ", "io", "the server cannot save to disk and takes no writes"),
    ("READONLY ", "server", _REPLICA),
    ("read only replica", "server", _REPLICA),
    ("during rehashing of slot", "server", MOVING),
    ("cluster support disabled", "server", "it is no cluster; want a URL with redis://"),
)
_BY_KIND: tuple[tuple[type[Exception] | tuple[type[Exception], ...], str, str], ...] = (
    (redis.TimeoutError, "timeout", "no answer in time"),
    (ACCESS_REFUSED, "server", "the server refuses the user or password"),
    (redis.BusyLoadingError, "server", "the server is still loading its data"),
    (redis.InvalidResponse, "server", "its answer is not one of Redis"),
)


def _of_connection(error: BaseException, address: RedisAddress) -> StoreError:
    causes = _causes(error)
    for cause in causes:
        if isinstance(cause, ssl.SSLError):
            return _of_tls(cause, address)
    return _of_sockets(error, causes, address)


def _of_tls(error: ssl.SSLError, address: RedisAddress) -> StoreError:
    if isinstance(error, ssl.SSLCertVerificationError):
        detail = f"its certificate is refused ({error.verify_message}); is ca_file right, and the host's name?"
        return unavailable(address, "refused", detail)
    return unavailable(address, "refused", f"no TLS with it ({error.reason or 'broken off'})")


def _of_sockets(error: BaseException, causes: Sequence[BaseException], address: RedisAddress) -> StoreError:
    if any(isinstance(cause, ReplyTooLargeError) for cause in causes):
        return unavailable(address, "server", "its answer is larger than any of a store")
    if any(isinstance(cause, ConnectionRefusedError) for cause in causes):
        return unavailable(address, "refused", "connection refused; is the server running?")
    if any(isinstance(cause, ConnectionResetError | BrokenPipeError) for cause in causes):
        return unavailable(address, "closed", "the connection broke")
    if "closed by server" in str(error) or "has data" in str(error):
        return unavailable(address, "closed", "the server closed the connection")
    if any(isinstance(cause, OSError) for cause in causes):
        return unavailable(address, "refused", "it cannot be reached")
    return unavailable(address, "closed", "the connection broke")


def _causes(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:200]
