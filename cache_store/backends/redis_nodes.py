"""Connections to the server that has a store: the one of its URL, or the node of a cluster that has its slot."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from redis.backoff import NoBackoff
from redis.connection import ConnectionPool
from redis.crc import key_slot
from redis.exceptions import RedisError
from redis.retry import Retry

from cache_store.backends.redis_address import RedisAddress
from cache_store.backends.redis_faults import unavailable
from cache_store.backends.redis_sockets import Deadline, connection_class

MAX_CONNECTIONS = 32
"""Of one process to one server; more threads wait for a free one, within their deadline."""

_Node = tuple[str, int]
_Exchange = Callable[[ConnectionPool, Sequence[tuple[str, ...]]], list[Any]]


class Nodes:
    """Pools of connections, one for each server that was asked. Safe to use from several threads.

    A cluster is asked nothing but `CLUSTER SLOTS`: redis-py's own client also reads a description of every command that
    the server has, which takes longer than all else that opening a store does.

    Args:
        address: of the server, or of any node of the cluster.
        deadline: of what is asked.
        exchange: sends commands to a server and returns the replies, errors among them.
    """

    def __init__(self, address: RedisAddress, deadline: Deadline, deadline_s: float, exchange: _Exchange) -> None:
        self._address, self._deadline, self._exchange = address, deadline, exchange
        self._settings = _settings(address, deadline, deadline_s)
        self._slot = key_slot(address.root)
        self._lock = threading.Lock()
        self._pools: dict[_Node, ConnectionPool] = {}
        self._first = (address.host, address.port)
        self._owner: _Node | None = None if address.cluster else self._first
        # Others of the cluster, in case that the owner does not answer.
        self._others: list[_Node] = []
        self.stale = False
        """Whether the nodes must be asked anew who has the store."""

    def pool(self) -> ConnectionPool:
        """Connections to the server that has the store.

        Raises:
            StoreUnavailableError: no node of the cluster knows, or not in time.
            RedisError, OSError: what the first node that was asked answered, or why it did not.
        """
        owner = self._owner
        if owner is None or (self.stale and self._address.cluster):
            with self._alone():
                if self._owner is None or self.stale:
                    self._owner = self._find_owner()
                    self.stale = False
                owner = self._owner
        return self._pool_of(owner)

    def close(self) -> None:
        """Close all connections."""
        for pool in list(self._pools.values()):
            pool.disconnect()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._lock.acquire(timeout=self._deadline.left_s()):
            raise unavailable(self._address, "timeout", "the cluster's nodes are still being looked for")
        try:
            yield
        finally:
            self._lock.release()

    def _find_owner(self) -> _Node:
        # Who had it last knows best where it went.
        asked = list(dict.fromkeys(filter(None, (self._owner, self._first, *self._others))))
        failure: Exception | None = None
        for number, node in enumerate(asked, start=1):
            # One that hangs leaves time for the others.
            share = self._deadline.left_s() / (2 if number < len(asked) else 1)
            try:
                with self._deadline.within(share):
                    (reply,) = self._exchange(self._pool_of(node), [("CLUSTER", "SLOTS")])
            except (RedisError, OSError) as error:
                # Of the one that should have it; the others were asked only because of that.
                failure = failure or error
                continue
            if isinstance(reply, RedisError):
                failure = failure or reply
                continue
            self._others = [other for _, _, *others in reply for other in self._addresses(others, node)]
            for first, last, *holders in reply:
                if first <= self._slot <= last:
                    return self._addresses(holders, node)[0]
        raise failure or unavailable(self._address, "server", "the cluster does not cover the store's slot")

    @staticmethod
    def _addresses(holders: Sequence[Sequence[Any]], asked: _Node) -> list[_Node]:
        # A node that does not know its own address gives none: it is where it was asked.
        return [((host or b"").decode() or asked[0], int(port)) for host, port, *_ in holders]

    def _pool_of(self, node: _Node) -> ConnectionPool:
        pool = self._pools.get(node)
        if pool is None:
            host, port = node
            # Two threads may both make one; only one is kept.
            pool = self._pools.setdefault(node, ConnectionPool(**self._settings, host=host, port=port))
        return pool


def _settings(address: RedisAddress, deadline: Deadline, deadline_s: float) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "connection_class": connection_class(deadline, tls=address.tls),
        "db": address.database,
        "username": address.username,
        "password": address.password,
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),
        "socket_timeout": deadline_s,
        "socket_connect_timeout": deadline_s,
        "socket_read_size": 1 << 18,
        "max_connections": 2 * MAX_CONNECTIONS,
        # Two round trips less for each new connection.
        "driver_info": None,
    }
    if address.tls:
        settings |= {
            "ssl_ca_certs": address.ca_file,
            "ssl_certfile": address.cert_file,
            "ssl_keyfile": address.key_file,
        }
    return {name: value for name, value in settings.items() if value is not None or name == "driver_info"}
