"""Where a Redis store is: its URL, taken apart, with what must not be shown kept out of sight."""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from cache_store.backends.options import read_options
from cache_store.errors import StoreUrlError

SCHEMES = ("redis", "rediss", "redis+cluster")
OPTIONS = ("name", "tls", "ca_file", "cert_file", "key_file")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True)
class RedisAddress:
    """A server (or any node of a cluster) and the store's name on it.

    Attributes:
        host, port, database: of the server.
        cluster: whether the store's shard is found by way of the cluster.
        name: of the store; all its keys start with `{name}`, so it lies on one shard.
        username, password: None for none.
        tls: whether the connection is encrypted.
        ca_file, cert_file, key_file: PEM files for it; None for the system's.
    """

    host: str
    port: int
    database: int = 0
    cluster: bool = False
    name: str = "crossfill"
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    tls: bool = False
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None

    @property
    def shown(self) -> str:
        """The address for messages and logs, without user and password."""
        scheme = "redis+cluster" if self.cluster else "rediss" if self.tls else "redis"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}://{host}:{self.port}/{self.database}?name={self.name}"

    def require_files(self) -> None:
        """Raises StoreUrlError unless the files for TLS can be read."""
        for name in ("ca_file", "cert_file", "key_file"):
            path = getattr(self, name)
            if path is not None and not (Path(path).is_file() and os.access(path, os.R_OK)):
                raise StoreUrlError(f"{self.shown}: {name} {path} cannot be read")

    @property
    def root(self) -> bytes:
        """What every key of the store starts with."""
        return b"{%s}" % self.name.encode()


def parse_address(url: str) -> RedisAddress:
    """Take a store's URL apart: `redis://user:password@host:port/database?name=crossfill`.

    Raises:
        StoreUrlError: something is wrong with it. No message repeats the URL, since it may hold a password.
    """
    try:
        parts = urlsplit(url)
        port = parts.port or 6379
    except ValueError:
        raise StoreUrlError(
            "the Redis URL's host or port cannot be read; special characters in its password must be percent-encoded"
        ) from None
    if parts.scheme not in SCHEMES:
        raise StoreUrlError(f"want a URL that starts with {', '.join(f'{scheme}://' for scheme in SCHEMES)}")
    if parts.fragment:
        raise StoreUrlError("the Redis URL has a #; special characters in its password must be percent-encoded")
    options = _options(parts)
    cluster = parts.scheme == "redis+cluster"
    return RedisAddress(
        host=parts.hostname or "localhost",
        port=port,
        database=_database(parts.path, cluster=cluster),
        cluster=cluster,
        name=options.get("name", "crossfill"),
        username=unquote(parts.username) if parts.username else None,
        password=unquote(parts.password) if parts.password else None,
        tls=parts.scheme == "rediss" or options.get("tls") == "1",
        ca_file=options.get("ca_file"),
        cert_file=options.get("cert_file"),
        key_file=options.get("key_file"),
    )


def _options(parts: SplitResult) -> dict[str, str]:
    options = read_options(parts.query, OPTIONS)
    if not _NAME.fullmatch(options.get("name", "crossfill")):
        raise StoreUrlError("a store's name has 1 to 64 letters, digits, dots, dashes or underscores")
    if options.get("tls", "1") not in {"0", "1"} or (parts.scheme == "rediss" and options.get("tls") == "0"):
        raise StoreUrlError("want tls=1 or tls=0, and for rediss:// none")
    return options


def _database(path: str, *, cluster: bool) -> int:
    number = path.strip("/") or "0"
    if not number.isdecimal():
        raise StoreUrlError("want the number of a database after the host of a Redis URL")
    if cluster and int(number) != 0:
        raise StoreUrlError("a Redis Cluster has database 0 only")
    return int(number)
