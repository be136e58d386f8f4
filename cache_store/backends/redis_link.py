"""Runs the store's scripts on the server that has it: pooled connections, one deadline, one round trip."""

import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from redis.backoff import NoBackoff
from redis.cluster import RedisCluster
from redis.connection import Connection, ConnectionPool
from redis.exceptions import AskError, MovedError, NoScriptError, RedisClusterException, RedisError, ResponseError
from redis.retry import Retry

from cache_store.backends.breaker import Breaker
from cache_store.backends.redis_address import RedisAddress
from cache_store.backends.redis_faults import UNREADABLE, explain, unavailable
from cache_store.backends.redis_scripts import Script
from cache_store.backends.redis_sockets import Deadline, connection_class
from cache_store.errors import StoreError, StoreUnavailableError

MAX_CONNECTIONS = 32
"""Of one process to one server; more threads wait for a free one, within their deadline."""

Argument = bytes | str | int | float
Command = tuple[Argument, ...]
Call = tuple[Script, Command]
Value = TypeVar("Value")


@dataclass(frozen=True)
class Together:
    """A script, and commands that the server runs right before and after it, all in one transaction."""

    script: Script
    arguments: Command
    before: tuple[Command, ...] = ()
    after: tuple[Command, ...] = ()


class RedisLink:
    """A store's server.

    Args:
        address: where it is.
        deadline_s: longest that an operation may take, connecting and all tries included.
        breaker: keeps callers from waiting, one after the other, for a server that is hung.
    """

    def __init__(self, address: RedisAddress, *, deadline_s: float, breaker: Breaker | None = None) -> None:
        self.address, self.deadline_s = address, deadline_s
        self.breaker = breaker or Breaker()
        self._deadline = Deadline()
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._lock = threading.Lock()
        self._cluster: RedisCluster | None = None
        self._pool: ConnectionPool | None = None if address.cluster else ConnectionPool(**self._pool_settings())
        # Whether the nodes of a cluster must be asked anew who has the store.
        self._stale = False
        self._closed = False

    def close(self) -> None:
        """Close all connections; what is asked later raises `StoreUnavailableError`."""
        self._closed = True
        if self._pool is not None:
            self._pool.disconnect()
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            # It holds a list for each of 16384 slots, so it is let go of.
            cluster.close()

    @contextmanager
    def operation(self) -> Iterator[None]:
        """All that is asked inside has one deadline."""
        with self._deadline.within(self.deadline_s):
            yield

    def run(self, script: Script, *arguments: Argument) -> Any:
        """The reply of one script."""
        return self.run_all([(script, arguments)])[0]

    def run_all(self, calls: Sequence[Call]) -> list[Any]:
        """The replies of several scripts in one round trip (two if the server does not know one yet).

        Raises:
            StoreUnavailableError: the server refused, broke off, or did not answer in time.
            StoreVersionError: the store there is of another version.
        """
        return self.run_after((), calls)

    def run_after(self, commands: Sequence[Command | bytes], calls: Sequence[Call]) -> list[Any]:
        """The replies to plain commands and to the scripts that run after them, not at once; as `run_all`."""
        scripts: list[Command] = [
            ("EVALSHA", script.digest, 1, self.address.root, *arguments) for script, arguments in calls
        ]
        if not commands and not scripts:
            return []
        replies = self.ask([*commands, *scripts])
        unknown = [at for at, reply in enumerate(replies[len(commands) :]) if isinstance(reply, NoScriptError)]
        if unknown:
            # A restart or SCRIPT FLUSH. A script that is not known did nothing, so the others need no repetition.
            texts = {calls[at][0].text for at in unknown}
            again = self.ask([*(("SCRIPT", "LOAD", text) for text in texts), *(scripts[at] for at in unknown)])
            for at, reply in zip(unknown, again[len(texts) :], strict=True):
                replies[len(commands) + at] = reply
        for reply in replies:
            if isinstance(reply, RedisError):
                raise explain(reply, self.address) from reply
        return replies

    def run_together(self, calls: Sequence[Together]) -> list[tuple[Any, Sequence[Any]]]:
        """Of each call, the script's reply and those to the commands after it; one round trip, as `run_all`.

        Raises:
            StoreUnavailableError, StoreVersionError: as for `run_all`.
        """
        if not calls:
            return []
        replies = self._transact(calls, ())
        unknown = {call.script.text for call, reply in zip(calls, replies, strict=True) if _has(reply, NoScriptError)}
        if unknown:
            # What stands before a script only prepares it, so all of it can be done again.
            replies = self._transact(calls, tuple(("SCRIPT", "LOAD", text) for text in unknown))
        for reply in replies:
            for value in reply:
                if isinstance(value, RedisError):
                    raise explain(value, self.address) from value
        places = [len(call.before) for call in calls]
        return [(reply[at], reply[at + 1 :]) for at, reply in zip(places, replies, strict=True)]

    def _transact(self, calls: Sequence[Together], first: tuple[Command, ...]) -> list[Sequence[Any]]:
        commands, lengths = list(first), list[int]()
        for call in calls:
            script: Command = ("EVALSHA", call.script.digest, 1, self.address.root, *call.arguments)
            inner = (*call.before, script, *call.after)
            # A script alone is a transaction.
            whole = (("MULTI",), *inner, ("EXEC",)) if len(inner) > 1 else inner
            commands += whole
            lengths.append(len(whole))
        replies, at, results = self.ask(commands), len(first), list[Sequence[Any]]()
        for length in lengths:
            queued, result = replies[at : at + length - 1], replies[at + length - 1]
            # A transaction that was not run says only that; why, says the command that was refused.
            results.append(result if queued and isinstance(result, list) else [*queued, result])
            at += length
        return results

    def ask_one(self, *command: Argument) -> Any:
        """The reply to one command.

        Raises:
            StoreUnavailableError: as for `ask`, and if the reply is an error.
        """
        reply = self.ask([command])[0]
        if isinstance(reply, RedisError):
            raise explain(reply, self.address) from reply
        return reply

    def ask(self, commands: Sequence[Command | bytes]) -> list[Any]:
        """The replies to commands (bytes are packed already), in one round trip; a command's error is its reply.

        Raises:
            StoreUnavailableError: the server refused, broke off, or did not answer in time.
        """
        if self._closed:
            raise StoreUnavailableError(f"{self.address.shown}: the store was closed", "closed")
        if not self.breaker.admit():
            raise StoreUnavailableError(
                f"{self.address.shown}: not asked, because it did not answer several times; it is tried again soon",
                "timeout",
            )
        try:
            with self._deadline.within(self.deadline_s):
                replies = self._ask_within(commands)
        except StoreUnavailableError as error:
            # Another node of a cluster may have taken over.
            self._stale = True
            if error.reason != "timeout":
                self.breaker.succeed()
            elif not self._deadline.answered:
                # What spends its time on many questions that are answered (to evict for a publish) is not hung.
                self.breaker.fail()
            raise
        self.breaker.succeed()
        self._deadline.answered = True
        return replies

    def _ask_within(self, commands: Sequence[Command | bytes]) -> list[Any]:
        if not self._places.acquire(timeout=self._deadline.left_s()):
            raise unavailable(self.address, "timeout", f"all {MAX_CONNECTIONS} connections are in use")
        try:
            with self._explained():
                replies = _exchange(self._current_pool(), commands)
                if any(isinstance(reply, AskError) for reply in replies):
                    self._follow(replies)
                    replies = _exchange(self._current_pool(), commands)
                return replies
        finally:
            self._places.release()

    def _follow(self, replies: Sequence[Any]) -> None:
        # A store has one slot, so either all commands were redirected or none. While a slot is being moved key by key
        # (ASK) its store is in two places; it is not available until that is over.
        for reply in replies:
            # In redis-py the one is a kind of the other.
            if isinstance(reply, AskError) and not isinstance(reply, MovedError):
                raise unavailable(self.address, "server", "its slot is being moved to another shard")
            if isinstance(reply, MovedError) and not self.address.cluster:
                raise unavailable(self.address, "server", "it is part of a cluster; want a URL with redis+cluster://")
        self._stale = True

    def _current_pool(self) -> ConnectionPool:
        if self._pool is not None:
            return self._pool
        cluster = self._cluster
        if cluster is None or self._stale:
            cluster = self._find_cluster()
        # redis-py gives this no types.
        node = cluster.get_node_from_key(self.address.root)  # type: ignore[no-untyped-call]
        if node is None:
            raise unavailable(self.address, "server", "no node of the cluster has the store's slot")
        pool = cluster.get_redis_connection(node).connection_pool
        assert isinstance(pool, ConnectionPool)
        return pool

    def _find_cluster(self) -> RedisCluster:
        if not self._lock.acquire(timeout=self._deadline.left_s()):
            raise unavailable(self.address, "timeout", "the cluster's nodes are still being looked for")
        try:
            if self._cluster is None:
                self._cluster = self._discover()
            elif self._stale:
                self._cluster.nodes_manager.initialize()
            self._stale = False
            return self._cluster
        finally:
            self._lock.release()

    def _discover(self) -> RedisCluster:
        settings = self._pool_settings()
        return RedisCluster(
            url=f"redis://{self._host_in_url()}:{settings.pop('port')}",
            retry=Retry(NoBackoff(), 0),
            require_full_coverage=False,
            **{name: value for name, value in settings.items() if name not in {"host", "db", "retry"}},
        )

    def _host_in_url(self) -> str:
        return f"[{self.address.host}]" if ":" in self.address.host else self.address.host

    def _pool_settings(self) -> dict[str, Any]:
        address = self.address
        settings: dict[str, Any] = {
            "connection_class": connection_class(self._deadline, tls=address.tls),
            "host": address.host,
            "port": address.port,
            "db": address.database,
            "username": address.username,
            "password": address.password,
            "protocol": 2,
            "retry": Retry(NoBackoff(), 0),
            "socket_timeout": self.deadline_s,
            "socket_connect_timeout": self.deadline_s,
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

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except (RedisError, RedisClusterException) as error:
            raise explain(error, self.address) from error
        except TimeoutError as error:
            raise unavailable(self.address, "timeout", "no answer in time") from error
        except OSError as error:
            raise unavailable(self.address, "closed", "the connection broke") from error
        except UNREADABLE as error:
            self._refuse(error)

    def _refuse(self, error: Exception) -> NoReturn:
        raise unavailable(self.address, "server", "its answer is not one of Redis") from error

    def understood(self, decode: Callable[[], Value]) -> Value:
        """What `decode` makes of a reply.

        Raises:
            StoreUnavailableError: the reply has another form than the scripts give it.
        """
        try:
            return decode()
        except (struct.error, *UNREADABLE) as error:
            self._refuse(error)


def _has(reply: Sequence[Any], kind: type[Exception]) -> bool:
    return any(isinstance(value, kind) for value in reply)


def _exchange(pool: ConnectionPool, commands: Sequence[Command | bytes]) -> list[Any]:
    connection: Connection = pool.get_connection()
    complete = False
    try:
        packed: list[bytes] = []
        for command in commands:
            # redis-py gives these no types.
            packed += [command] if isinstance(command, bytes) else connection.pack_command(*command)  # type: ignore[no-untyped-call]
        # One long piece: a system call for each argument takes longer than to copy it.
        connection.send_packed_command([b"".join(packed)])  # type: ignore[no-untyped-call]
        replies = [_reply(connection) for _ in commands]
        complete = True
        return replies
    finally:
        if not complete:
            # Its answer may still come, and must not be taken for that of the next.
            connection.disconnect()  # type: ignore[no-untyped-call]
        pool.release(connection)


def _reply(connection: Connection) -> Any:
    try:
        return connection.read_response()
    except ResponseError as error:
        return error
