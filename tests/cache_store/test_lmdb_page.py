"""A page of an LMDB store as bytes, and what becomes of one that was altered."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_store.backends.checksum import are_intact
from cache_store.backends.lmdb import LmdbBackend
from cache_store.backends.lmdb_page import is_intact, pack_page, unpack_head, unpack_page, unpack_sizes
from cache_store.backends.protocol import Limits, PageWrite
from cache_store.errors import RecordRefusedError
from cache_store.records import Kind, RecordOf, decode, record_name

from .lmdb_process import LAYERS, SCOPE, digest, true_page

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ROOMY = Limits(2**30, 2**30)

numbered = st.builds(lambda stem, number: f"{stem}{number}", st.sampled_from(["mass/", "kv/", ""]), st.integers(0, 12))
odd = st.sampled_from(["", "a", "01", "a-1", "x" + "9" * 40, "ü/{0}:*", "mass/", "[1]", "0"])
records = st.dictionaries(numbered | odd | st.text(st.characters(codec="utf-8")), st.binary(max_size=40))


@given(records)
def test_what_is_packed_is_unpacked(written: dict[str, bytes]) -> None:
    head, body = pack_page(digest("p"), written)
    stored = unpack_page(head, memoryview(body))
    assert stored is not None
    assert (stored.head.tokens_digest, stored.records()) == (digest("p"), written)
    assert list(unpack_sizes(head).items()) == [(name, len(data)) for name, data in written.items()]


def test_names_with_numbers_in_a_row_take_few_bytes() -> None:
    few, _ = pack_page(digest("p"), {f"mass/{layer}": b"x" * 600 for layer in range(2)})
    many, _ = pack_page(digest("p"), {f"mass/{layer}": b"x" * 600 for layer in range(90)})
    assert len(many) <= len(few) + 1
    jumbled, _ = pack_page(digest("p"), {f"mass/{layer}": b"x" * 600 for layer in range(0, 180, 2)})
    assert len(jumbled) > 5 * len(many)


def test_heads_one_after_the_other_are_intact_in_any_order_and_number() -> None:
    heads = [pack_page(digest(name), {"mass/0": name.encode() * 9, name: b""})[0] for name in "abcdefgh"]
    for number in range(len(heads) + 1):
        random.Random(number).shuffle(heads)
        assert are_intact(heads[:number])


def test_a_flipped_bit_anywhere_in_a_head_is_found_alone_and_among_others() -> None:
    heads = [pack_page(digest(name), {"mass/0": b"x", "kv/3": b"yz"})[0] for name in "abc"]
    for bit in range(8 * len(heads[1])):
        altered = bytearray(heads[1])
        altered[bit // 8] ^= 1 << bit % 8
        assert not is_intact(altered)
        assert unpack_head(bytes(altered)) is None
        assert not are_intact([heads[0], bytes(altered), heads[2]])


def test_a_head_that_was_cut_off_is_none() -> None:
    head, body = pack_page(digest("p"), {"mass/0": b"x"})
    for length in range(len(head)):
        assert unpack_page(head[:length], memoryview(body)) is None


def test_all_but_the_records_of_a_body_is_compared_with_its_head() -> None:
    head, body = pack_page(digest("p"), {"mass/0": b"first", "mass/1": b"second"})
    places = 8 + 4 * 3
    for byte in range(len(body)):
        altered = bytearray(body)
        altered[byte] ^= 0x20
        assert (unpack_page(head, memoryview(altered)) is None) == (byte < places)
    assert unpack_page(head, memoryview(body[:-1])) is None
    assert unpack_page(head, memoryview(body + b"x")) is None
    assert unpack_page(head, None) is None
    assert unpack_page(None, memoryview(body)) is None


def test_sizes_shared_by_pages_cannot_be_changed() -> None:
    head, _ = pack_page(digest("p"), {"mass/0": b"x"})
    sizes = unpack_sizes(head)
    with pytest.raises(TypeError):
        sizes["mass/0"] = 2  # type: ignore[index]
    assert dict(unpack_sizes(head)) == {"mass/0": 1}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


def fill(folder: Path) -> list[PageWrite]:
    """A closed store of three pages, one after the other."""
    pages: list[PageWrite] = []
    for name in "abc":
        pages.append(true_page(name, pages[-1].key if pages else SCOPE.scope))
    backend = LmdbBackend(folder, deadline_s=30)
    backend.publish(SCOPE, pages, ROOMY)
    backend.close()
    return pages


def alter(folder: Path, part: bytes, at: int, change: Callable[[int], int] = lambda byte: byte ^ 1) -> None:
    """Change a byte of some bytes, wherever they lie in the file."""
    data = (folder / "data.mdb").read_bytes()
    assert part in data
    altered = bytearray(part)
    altered[at] = change(altered[at])
    (folder / "data.mdb").write_bytes(data.replace(part, bytes(altered)))


def read_true(backend: LmdbBackend, page: PageWrite) -> list[int]:
    """Layers of the records that come back; what comes back altered is taken away, as by the store."""
    found = backend.read(SCOPE.scope, [(page.key, record_name(Kind.MASS, layer)) for layer in range(LAYERS)])
    layers = []
    for layer, data in enumerate(found):
        if data is None:
            continue
        try:
            decode(data, RecordOf(Kind.MASS, layer), tokens_digest=page.tokens_digest)
            assert data == page.records[record_name(Kind.MASS, layer)]
            layers.append(layer)
        except RecordRefusedError:
            backend.quarantine(SCOPE.scope, page.key, record_name(Kind.MASS, layer))
    return layers


def check_mended(backend: LmdbBackend, page: PageWrite) -> None:
    """The page was taken away and counted once, can be stored again, and leaves nothing behind."""
    backend._writer.change(lambda _: None, 30)
    assert backend.lookup(SCOPE.scope, [page.key]).digests == [None]
    assert backend.publish(SCOPE, [page], ROOMY).pages == 1
    assert backend.stats().quarantined == 1
    assert read_true(backend, page) == list(range(LAYERS))
    assert backend.lookup(SCOPE.scope, [page.key]).digests == [page.tokens_digest]
    assert backend.stats().quarantined == 1
    backend.evict(2**30)
    assert backend.stats().size_bytes == 0
    backend.close()


@pytest.mark.parametrize("at", [0, 31, 32, 40, 42, 50, -1], ids=lambda at: f"byte {at}")
def test_a_flipped_byte_of_a_head_makes_a_miss_that_is_counted(folder: Path, at: int) -> None:
    pages = fill(folder)
    alter(folder, pack_page(pages[1].tokens_digest, pages[1].records)[0], at)
    backend = LmdbBackend(folder, deadline_s=30)
    found = backend.lookup(SCOPE.scope, [page.key for page in pages])
    assert found.digests == [pages[0].tokens_digest, None, pages[2].tokens_digest]
    assert [len(found.sizes(index)) for index in range(3)] == [LAYERS, 0, LAYERS]
    check_mended(backend, pages[1])


def test_a_damaged_page_goes_with_its_leases(folder: Path) -> None:
    pages, now_s = fill(folder), [1e6]
    alter(folder, pack_page(pages[1].tokens_digest, pages[1].records)[0], 0)
    backend = LmdbBackend(folder, deadline_s=30, clock=lambda: now_s[0])
    backend.lease(SCOPE.scope, [page.key for page in pages[:2]], "reader", 10)
    assert backend.lookup(SCOPE.scope, [pages[1].key]).digests == [None]
    backend.publish(SCOPE, pages, ROOMY)
    assert backend.stats().leased_pages == 1
    # When the others end, the new page has none that could be counted off.
    now_s[0] += 20
    assert backend.evict(2**30).pages == 3
    backend.close()


@pytest.mark.parametrize("known", [True, False], ids=["names known", "names unknown"])
@pytest.mark.parametrize("at", [0, 7, 8, 12, 16, 19], ids=lambda at: f"byte {at}")
def test_a_flipped_byte_of_a_bodys_places_gives_no_wrong_record(folder: Path, at: int, known: bool) -> None:
    pages = fill(folder)
    places = pack_page(pages[1].tokens_digest, pages[1].records)[1][: 8 + 4 * (LAYERS + 1)]
    first = next(iter(pages[1].records.values()))
    alter(folder, places + first, at, lambda byte: byte ^ 0x80)
    backend = LmdbBackend(folder, deadline_s=30)
    if known:
        assert read_true(backend, pages[0]) == list(range(LAYERS))
    wanted = [(page.key, "mass/1") for page in pages]
    both_sides = [data for data in backend.read(SCOPE.scope, wanted) if data in {p.records["mass/1"] for p in pages}]
    assert len(both_sides) >= 2
    assert set(read_true(backend, pages[1])) < set(range(LAYERS))
    check_mended(backend, pages[1])


@pytest.mark.parametrize("table", ["heads", "bodies"])
def test_a_page_of_which_a_part_is_gone_is_taken_away(folder: Path, table: str) -> None:
    pages = fill(folder)
    backend = LmdbBackend(folder, deadline_s=30)
    environment = backend._environment

    def lose(txn: object) -> None:
        row = backend._environment.tables[table]
        with environment.view() as view, view.cursor(row) as cursor:
            ids = [bytes(key) for key, _ in cursor]
        (page,) = [one for one in ids if one.endswith(pages[1].key)]
        assert txn.delete(page, db=row)  # type: ignore[attr-defined]

    backend._writer.change(lose, 30)
    # Now the names are known without the head.
    assert read_true(backend, pages[0]) == list(range(LAYERS))
    assert read_true(backend, pages[1]) == ([] if table == "bodies" else list(range(LAYERS)))
    assert sum(1 for _ in backend.scan()) == 2
    check_mended(backend, pages[1])


def test_pages_with_other_lists_of_names_are_read_in_one_call(folder: Path) -> None:
    lists = [{"a": b"1", "b": b"2"}, {"b": b"3", "a": b"4"}, {"b": b"5"}, {}, {"a": b"6", "b": b"7", "c": b"8"}]
    pages = [
        PageWrite(digest(str(number))[:16], SCOPE.scope, digest(str(number)), found)
        for number, found in enumerate(lists)
    ]
    backend = LmdbBackend(folder, deadline_s=30)
    backend.publish(SCOPE, pages, ROOMY)
    asked = [(page.key, name) for name in "bcab" for page in pages] + [(b"absent-absent-ab", "a")]
    expected = [found.get(name) for name in "bcab" for found in lists] + [None]
    for _ in range(2):
        assert backend.read(SCOPE.scope, asked) == expected
        assert backend.read(SCOPE.scope, asked[::-1]) == expected[::-1]
    # All in their lists, at other places.
    assert backend.read(SCOPE.scope, [(pages[0].key, "a"), (pages[1].key, "a")]) == [b"1", b"4"]
    assert backend.read(SCOPE.scope, [(pages[1].key, "a"), (pages[0].key, "a")]) == [b"4", b"1"]
    # As many lists as there may be are remembered, and others are still read.
    backend._reader._MOST_LISTS = 2
    assert backend.read(SCOPE.scope, asked) == expected
    assert len(backend._reader._lists) <= 5
    assert backend.stats().quarantined == 0
    backend.close()
