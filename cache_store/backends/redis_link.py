"""Runs the store's scripts on the server that has it: pooled connections, one deadline, one round trip."""

import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from redis.connection import Connection, ConnectionPool
from redis.exceptions import AskError, MovedError, NoScriptError, RedisError, ResponseError

from cache_store.backends.breaker import Breaker
from cache_store.backends.redis_address import RedisAddress
from cache_store.backends.redis_faults import MOVING, UNREADABLE, explain, unavailable
from cache_store.backends.redis_nodes import MAX_CONNECTIONS, Nodes
from cache_store.backends.redis_scripts import Script
from cache_store.backends.redis_sockets import Deadline
from cache_store.errors import StoreError, StoreUnavailableError

Argument = bytes | str | int | float
Command = tuple[Argument, ...]
Call = tuple[Script, Command]
Value = TypeVar("Value")

_NO_ANSWER = "its answer is not one of Redis"


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
        self._nodes = Nodes(address, self._deadline, deadline_s, _exchange)
        self._closed = False

    def close(self) -> None:
        """Close all connections; what is asked later raises `StoreUnavailableError`."""
        self._closed = True
        self._nodes.close()

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
        scripts: list[Command] = [self._evalsha(script, arguments) for script, arguments in calls]
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
            script = self._evalsha(call.script, call.arguments)
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

    def _evalsha(self, script: Script, arguments: Command) -> Command:
        # The second key never exists. While a slot is moved key by key, a node does nothing that names a key which is
        # not there; without it a script would run on half a store and find that damaged.
        root = self.address.root
        return ("EVALSHA", script.digest, 2, root, root + b":moving", *arguments)

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
            self._nodes.stale = True
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
                replies = _exchange(self._nodes.pool(), commands)
                if any(isinstance(reply, AskError) for reply in replies):
                    self._follow(replies)
                    replies = _exchange(self._nodes.pool(), commands)
                return replies
        finally:
            self._places.release()

    def _follow(self, replies: Sequence[Any]) -> None:
        # A store has one slot, so either all commands were redirected or none. While a slot is being moved key by key
        # (ASK) its store is in two places; it is not available until that is over.
        for reply in replies:
            # In redis-py the one is a kind of the other.
            if isinstance(reply, AskError) and not isinstance(reply, MovedError):
                raise unavailable(self.address, "server", MOVING)
            if isinstance(reply, MovedError) and not self.address.cluster:
                raise unavailable(self.address, "server", "it is part of a cluster; want a URL with redis+cluster://")
        self._nodes.stale = True

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except (RedisError, OSError, *UNREADABLE) as error:
            if self._closed:
                # Its connections are closed under those who wait, and fail in any of these ways.
                message = f"{self.address.shown}: the store was closed before the server answered"
                raise StoreUnavailableError(message, "closed") from error
            raise self._explain(error) from error

    def _explain(self, error: Exception) -> StoreError:
        if isinstance(error, RedisError):
            return explain(error, self.address)
        if isinstance(error, TimeoutError):
            return unavailable(self.address, "timeout", "no answer in time")
        if isinstance(error, OSError):
            return unavailable(self.address, "closed", "the connection broke")
        return unavailable(self.address, "server", _NO_ANSWER)

    def understood(self, decode: Callable[[], Value]) -> Value:
        """What `decode` makes of a reply.

        Raises:
            StoreUnavailableError: the reply has another form than the scripts give it.
        """
        try:
            return decode()
        except (struct.error, *UNREADABLE) as error:
            raise unavailable(self.address, "server", _NO_ANSWER) from error


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
