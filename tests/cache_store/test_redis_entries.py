"""Entries of a Redis store's index, and the data they stand for, that were altered: they cost at most their page."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import pytest

from cache_store.backends.protocol import PageWrite, Refusal
from cache_store.backends.redis import RedisBackend
from cache_store.backends.redis_codec import pack_page

from .redis_audit import audit
from .sample_pages import ROOMY, A, chain, digest, key, look, page, put

if TYPE_CHECKING:
    from collections.abc import Callable

    import redis

    from .redis_server import RedisServer

    Alter = Callable[[bytes], bytes]

ABC = chain(A, "a", "b", "c")
ENTRY_BYTES = len(pack_page(ABC[1])[0])
WANTED = [(key(name), "mass/0") for name in "abc"]
RECORDS = [page.records["mass/0"] for page in ABC]


class Altered:
    """A store with pages a, b and c, the server's client, and what changes what the store has of b."""

    def __init__(self, server: RedisServer) -> None:
        self.name = uuid.uuid4().hex
        self.client: redis.Redis = server.client()
        self.backend = RedisBackend.from_url(server.url(name=self.name), deadline_s=10)
        put(self.backend, ABC)
        # So that both ways are taken: a lookup that knows where things were, and one that does not.
        self.backend.lookup(A.scope, [key("a")])

    def entry(self, alter: Alter) -> None:
        (index,) = self.client.keys("{" + self.name + "}:i:*")
        self.client.hset(index, key("b"), alter(self.client.hget(index, key("b"))))

    def data(self, alter: Alter) -> None:
        (place,) = (one for one in self.client.keys("{" + self.name + "}:p:*") if one.endswith(key("b")))
        self.client.set(place, alter(self.client.get(place)))

    @property
    def quarantined(self) -> int:
        return self.backend.stats().quarantined

    def audit(self) -> None:
        audit(self.backend, self.client, self.name)


@pytest.fixture
def altered(redis_server: RedisServer) -> Altered:
    return Altered(redis_server)


def flip(at: int, mask: int = 0x10) -> Alter:
    return lambda data: data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :]


EVERY_BYTE = pytest.mark.parametrize("at", range(ENTRY_BYTES), ids=lambda at: f"byte {at}")


def test_an_entry_as_it_was_written_is_no_damage(altered: Altered) -> None:
    altered.entry(lambda data: data)
    assert None not in look(altered.backend, A, "a", "b", "c")
    assert altered.backend.read(A.scope, WANTED) == RECORDS
    assert put(altered.backend, ABC).pages == 3
    assert altered.quarantined == 0


@EVERY_BYTE
def test_a_flipped_byte_of_an_entry_makes_its_page_a_miss_that_is_counted_and_logged(
    altered: Altered, at: int, caplog: pytest.LogCaptureFixture
) -> None:
    altered.entry(flip(at))
    for _ in range(2):
        assert [one and one[1] for one in look(altered.backend, A, "a", "b", "c")] == [
            {"mass/0": 100},
            None,
            {"mass/0": 100},
        ]
    assert altered.quarantined == 1
    assert "1 pages altered since they were written were taken away" in caplog.text
    assert altered.backend.read(A.scope, WANTED) == [RECORDS[0], None, RECORDS[2]]
    altered.audit()
    assert put(altered.backend, ABC).pages == 3
    assert altered.backend.read(A.scope, WANTED) == RECORDS
    altered.audit()
    # Parents know how many children they have, so one after the other may go.
    for left in (["a", "b"], ["a"], []):
        altered.backend.evict(1)
        assert [one for one in "abc" if look(altered.backend, A, one) != [None]] == left


@EVERY_BYTE
def test_a_flipped_byte_of_an_entry_keeps_no_other_page_from_being_read(altered: Altered, at: int) -> None:
    altered.entry(flip(at, 0xFF))
    for names in (["mass/0"], ["mass/0", "mass/1"]):
        found = altered.backend.read(A.scope, [(one, name) for one, _ in WANTED for name in names])
        assert [found[0], found[-len(names)]] == [RECORDS[0], RECORDS[2]]
    assert altered.quarantined <= 1


@EVERY_BYTE
def test_a_publish_puts_an_altered_entry_right(altered: Altered, at: int) -> None:
    altered.entry(flip(at))
    published = put(altered.backend, ABC)
    assert (published.pages, dict(published.refused)) == (3, {})
    assert altered.backend.read(A.scope, WANTED) == RECORDS
    assert altered.quarantined == 1
    altered.audit()


@pytest.mark.parametrize("left", [0, 1, 40, 52, 72, 75, ENTRY_BYTES - 1])
def test_an_entry_that_was_cut_off_makes_its_page_a_miss(altered: Altered, left: int) -> None:
    altered.entry(lambda data: data[:left])
    assert look(altered.backend, A, "b") == [None]
    assert altered.quarantined == 1
    assert put(altered.backend, ABC).pages == 3
    assert altered.backend.read(A.scope, WANTED) == RECORDS


def test_records_added_to_an_altered_entry_are_all_that_is_there(altered: Altered) -> None:
    altered.entry(flip(ENTRY_BYTES - 10))
    assert put(altered.backend, [page("b", "a", {"mass/1": b"new"})]).pages == 1
    assert look(altered.backend, A, "b") == [(digest("b"), {"mass/1": 3})]
    assert altered.quarantined == 1
    altered.audit()


def test_an_altered_digest_is_no_collision_and_another_digest_is_one(altered: Altered) -> None:
    other = PageWrite(key("b"), key("a"), digest("other"), {"mass/0": b"other"})
    assert put(altered.backend, [other]).refused == {Refusal.COLLISION: 1}
    altered.entry(flip(3))
    assert put(altered.backend, [ABC[1]]).pages == 1
    assert look(altered.backend, A, "b") == [(digest("b"), {"mass/0": 100})]


def test_a_scan_takes_altered_entries_away(altered: Altered) -> None:
    altered.entry(flip(80))
    assert {written.key for _, written in altered.backend.scan()} == {key("a"), key("c")}
    assert altered.quarantined == 1
    assert look(altered.backend, A, "b") == [None]
    altered.audit()


def test_a_lease_keeps_what_is_stored_again_in_place_of_a_damaged_page(altered: Altered) -> None:
    altered.backend.lease(A.scope, [key("b")], "reader", None)
    altered.entry(flip(0))
    assert look(altered.backend, A, "b") == [None]
    put(altered.backend, ABC)
    altered.audit()
    altered.backend.evict(2**40)
    assert [one for one in "abc" if look(altered.backend, A, one) != [None]] == ["a", "b"]
    assert altered.backend.release("reader") == 1
    altered.backend.evict(2**40)
    assert altered.backend.stats().size_bytes == 0


def test_flushed_pages_with_altered_entries_are_reclaimed_to_the_byte(altered: Altered) -> None:
    altered.entry(flip(ENTRY_BYTES - 5, 0xFF))
    before = altered.backend.stats().size_bytes
    altered.backend.flush()
    gone = altered.backend.evict(2**40)
    assert (gone.pages, gone.size_bytes) == (3, before)
    altered.audit()


def test_an_altered_size_does_not_change_what_is_counted(altered: Altered) -> None:
    altered.entry(flip(ENTRY_BYTES - 5, 0xFF))
    assert altered.backend.evict(1).pages == 1
    # This takes b, whose entry says another size than it was counted for.
    assert altered.backend.evict(1).pages == 1
    altered.audit()


# The data


CUT = pytest.mark.parametrize("left", [0, 1, 60, 101], ids=lambda left: f"{left} bytes are left")


def cut(left: int) -> Alter:
    return lambda data: (data + b"more")[:left]


@CUT
def test_a_page_with_data_of_another_length_goes_when_it_is_read_and_is_counted(
    altered: Altered, left: int, caplog: pytest.LogCaptureFixture
) -> None:
    altered.data(cut(left))
    for _ in range(2):
        assert altered.backend.read(A.scope, WANTED) == [RECORDS[0], None, RECORDS[2]]
    assert look(altered.backend, A, "b") == [None]
    assert altered.quarantined == 1
    assert "1 pages altered since they were written were taken away" in caplog.text
    altered.audit()


@CUT
def test_a_record_of_a_page_with_data_of_another_length_is_taken_away_with_all_of_it(
    altered: Altered, left: int, caplog: pytest.LogCaptureFixture
) -> None:
    altered.data(cut(left))
    assert altered.backend.quarantine(A.scope, key("b"), "mass/0")
    assert not altered.backend.quarantine(A.scope, key("b"), "mass/0")
    assert look(altered.backend, A, "b") == [None]
    assert altered.quarantined == 1
    assert "1 pages altered since they were written were taken away" in caplog.text
    altered.audit()


@CUT
def test_records_are_not_added_to_data_of_another_length(altered: Altered, left: int) -> None:
    altered.data(cut(left))
    assert put(altered.backend, [page("b", "a", {"mass/1": b"new"})]).pages == 1
    assert look(altered.backend, A, "b") == [(digest("b"), {"mass/1": 3})]
    assert altered.quarantined == 1
    altered.audit()


@CUT
def test_a_scan_takes_pages_with_data_of_another_length_away(altered: Altered, left: int) -> None:
    altered.data(cut(left))
    assert {written.key for _, written in altered.backend.scan()} == {key("a"), key("c")}
    assert altered.quarantined == 1
    altered.audit()


# What the server itself writes


def test_entries_that_the_server_wrote_are_as_good_as_any(altered: Altered) -> None:
    names = [f"page-{number}" for number in range(100)]
    # No two have the same sizes, so each has a checksum of its own to be worked out.
    first = [
        page(name, A.scope, {f"mass/{layer}": bytes([layer]) * (at + layer) for layer in range(30)})
        for at, name in enumerate(names)
    ]
    second = [page(name, A.scope, {"kv/0": name.encode() * at, "mass/3": b""}) for at, name in enumerate(names)]
    put(altered.backend, first, ROOMY)
    assert put(altered.backend, second, ROOMY).pages == 100
    for name in names[::10]:
        assert altered.backend.quarantine(A.scope, key(name), "mass/5")
    found = look(altered.backend, A, *names)
    for at, (one, old, new) in enumerate(zip(found, first, second, strict=True)):
        expected = {name: len(data) for name, data in {**old.records, **new.records}.items()}
        if at % 10 == 0:
            del expected["mass/5"]
        assert one == (digest(names[at]), expected)
    assert altered.quarantined == 10
    altered.audit()
