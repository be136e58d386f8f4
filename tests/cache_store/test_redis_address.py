"""What a Redis store's URL may say, and that nothing it says in confidence is repeated."""

import traceback

import pytest

from cache_store.backends.redis_address import parse_address
from cache_store.errors import StoreUrlError

SECRET = "hunter2/#"


def test_all_parts_are_taken() -> None:
    address = parse_address("redis://ann:p%40ss%2F@cache.example:7000/3?name=west-1")
    assert (address.host, address.port, address.database, address.name) == ("cache.example", 7000, 3, "west-1")
    assert (address.username, address.password, address.tls, address.cluster) == ("ann", "p@ss/", False, False)


def test_what_is_left_out_has_a_default() -> None:
    address = parse_address("redis://")
    assert (address.host, address.port, address.database, address.name) == ("localhost", 6379, 0, "crossfill")
    assert (address.username, address.password) == (None, None)


def test_schemes_say_tls_and_cluster() -> None:
    assert parse_address("rediss://h?ca_file=/x.pem").tls
    assert parse_address("redis+cluster://h").cluster
    assert parse_address("redis+cluster://h?tls=1").tls
    assert not parse_address("redis+cluster://h?tls=0").tls


def test_ipv6_hosts_are_shown_in_brackets() -> None:
    assert parse_address("redis://[::1]:6380").shown == "redis://[::1]:6380/0?name=crossfill"


def test_every_key_of_a_store_has_its_hash_tag() -> None:
    assert parse_address("redis://h?name=west.1").root == b"{west.1}"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis://h?nam=x", "did you mean 'name'"),
        ("redis://h?socket_timeout=9", "there are"),
        ("redis://h?name={a}", "letters"),
        ("redis://h?name=a&name=b", "once"),
        ("redis://h/first", "number of a database"),
        ("redis://h:port", "cannot be read"),
        ("redis://h:70000", "cannot be read"),
        ("redis://h?tls=yes", "tls=1"),
        ("rediss://h?tls=0", "tls=1"),
        ("redis+cluster://h/2", "database 0"),
        ("redis://h?name=a#b", "percent-encoded"),
        ("http://h", "redis://"),
    ],
)
def test_what_is_wrong_is_said(url: str, says: str) -> None:
    with pytest.raises(StoreUrlError, match=says):
        parse_address(url)


@pytest.mark.parametrize(
    "url",
    [
        f"redis://:{SECRET}@h",
        "redis://:hunter2/@h",
        "redis://ann:hunter2@h:port",
        "redis://:hunter2@h?nam=x",
        "redis://:hunter2@h/db",
        "http://:hunter2@h",
        "redis://:hunter2@[h",
    ],
)
def test_no_error_repeats_a_password(url: str) -> None:
    with pytest.raises(StoreUrlError) as raised:
        parse_address(url)
    assert "hunter2" not in "".join(traceback.format_exception(raised.value)[-1:]) + str(raised.value)
    assert raised.value.__suppress_context__ or raised.value.__context__ is None


def test_what_is_shown_holds_no_user_and_password() -> None:
    address = parse_address("redis://ann:hunter2@h:7000/3?name=west")
    assert address.shown == "redis://h:7000/3?name=west"
    assert "hunter2" not in repr(address)
    assert "ann" not in repr(address)
