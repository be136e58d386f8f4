"""What redis-py's errors mean for a store."""

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


def explain(error: redis.RedisError | redis.RedisClusterException, address: RedisAddress) -> StoreError:
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
    if isinstance(error, redis.RedisClusterException):
        return _of_cluster(error, address)
    return unavailable(address, "server", f"the server says: {text}")


_NO_MEMORY = "the server has no memory left (maxmemory); raise it or lower the store's budget"
_REPLICA = "the server is a read-only replica; want the address of the primary"
# redis-py cuts off the first word of an error that it has a class for, and does not know those that Redis 6 wraps.
_BY_TEXT = (
    ("OOM ", "full", _NO_MEMORY),
    ("used memory > 'maxmemory'", "full", _NO_MEMORY),
    ("MISCONF ", "io", "the server cannot save to disk and takes no writes"),
    ("READONLY ", "server", _REPLICA),
    ("read only replica", "server", _REPLICA),
)
_BY_KIND: tuple[tuple[type[Exception] | tuple[type[Exception], ...], str, str], ...] = (
    (redis.TimeoutError, "timeout", "no answer in time"),
    (ACCESS_REFUSED, "server", "the server refuses the user or password"),
    (redis.BusyLoadingError, "server", "the server is still loading its data"),
    (redis.InvalidResponse, "server", "its answer is not one of Redis"),
)


def _of_connection(error: BaseException, address: RedisAddress) -> StoreError:
    causes = _causes(error)
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


def _of_cluster(error: BaseException, address: RedisAddress) -> StoreError:
    # redis-py tries all nodes and reports the last one's error as the cause.
    for cause in _causes(error)[1:]:
        if isinstance(cause, redis.RedisError) and not isinstance(cause, redis.RedisClusterException):
            return explain(cause, address)
    if "not enabled" in str(error):
        return unavailable(address, "server", "it is no cluster; want a URL with redis://")
    return unavailable(address, "server", "the cluster does not cover the store's slot")


def _causes(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:200]
