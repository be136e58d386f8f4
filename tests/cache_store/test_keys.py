"""Keys of pages: a chain over the tokens, the same everywhere."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_store.keys import DIGEST_BYTES, KEY_BYTES, PAGE, page_keys

SCOPE = bytes.fromhex("b32655ee697bf440e48f921a61256ab3")
tokens = st.lists(st.integers(0, 2**32 - 1), min_size=3 * PAGE, max_size=3 * PAGE + 5)


def test_keys_are_the_same_on_every_machine() -> None:
    first, second = page_keys(SCOPE, list(range(130)))
    assert (first.key.hex(), first.parent) == ("f045c8d8619be4513ffd7af38b1832f0", SCOPE)
    assert first.tokens_digest.hex() == "fe08a2eb885e895a32c534e72da4edef601d666e6fc2d56e9f6da7b99a321403"
    assert (second.key.hex(), second.parent) == ("bb3ef9994588acfec5b54d449002a207", first.key)
    assert second.tokens_digest.hex() == "287ac53bd2bb2198dd1de485d5fbf750b6e88e42cc99ee6c04d4a635dd350f9a"


def test_a_key_is_the_hash_of_the_parents_key_and_the_tokens() -> None:
    data = b"".join(token.to_bytes(4, "little") for token in range(PAGE, 2 * PAGE))
    first, second = page_keys(SCOPE, range(2 * PAGE))
    assert second.key == hashlib.blake2b(first.key + data, digest_size=16, person=b"crossfill-page").digest()
    chained = hashlib.blake2b(first.tokens_digest + data, digest_size=32, person=b"crossfill-tok").digest()
    assert second.tokens_digest == chained


@pytest.mark.parametrize("length", [0, 1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE - 1, 2 * PAGE, 10 * PAGE + 7])
def test_only_complete_pages_have_keys(length: int) -> None:
    keys = page_keys(SCOPE, list(range(length)))
    assert len(keys) == length // PAGE
    assert all(len(key.key) == KEY_BYTES and len(key.tokens_digest) == DIGEST_BYTES for key in keys)


@given(tokens, st.integers(0, 3 * PAGE - 1), st.integers(1, 2**32 - 1))
def test_another_token_changes_its_page_and_all_after_it_only(ids: list[int], at: int, change: int) -> None:
    other = list(ids)
    other[at] ^= change
    same = [one == two for one, two in zip(page_keys(SCOPE, ids), page_keys(SCOPE, other), strict=True)]
    assert same == [page < at // PAGE for page in range(3)]


@given(tokens)
def test_a_longer_prefix_has_the_keys_of_the_shorter(ids: list[int]) -> None:
    assert page_keys(SCOPE, ids)[:2] == page_keys(SCOPE, ids[: 2 * PAGE])


@given(tokens, st.permutations(range(3)))
def test_the_same_pages_in_another_order_have_other_keys(ids: list[int], order: list[int]) -> None:
    pages = [ids[page * PAGE : (page + 1) * PAGE] for page in range(3)]
    turned = [token for page in order for token in pages[page]]
    assert (page_keys(SCOPE, turned)[2] == page_keys(SCOPE, ids)[2]) == (turned == ids[: 3 * PAGE])


def test_another_scope_has_other_keys_and_digests() -> None:
    (one,), (other,) = page_keys(SCOPE, range(PAGE)), page_keys(b"another scope...", range(PAGE))
    assert one.key != other.key
    assert one.tokens_digest != other.tokens_digest


def test_keys_that_collide_still_differ_in_their_digests() -> None:
    (one,) = page_keys(SCOPE, range(PAGE), hash_key=lambda _: b"k" * 16)
    (other,) = page_keys(SCOPE, range(1, PAGE + 1), hash_key=lambda _: b"k" * 16)
    assert one.key == other.key
    assert one.tokens_digest != other.tokens_digest


def test_the_largest_token_has_a_key() -> None:
    (key,) = page_keys(SCOPE, [2**32 - 1] * PAGE)
    assert key.key.hex() == "8d7f47b9885e85bf106312f98bf01d0f"


@pytest.mark.parametrize("token", [-1, 2**32, 1.0, "1", None])
def test_what_is_no_token_is_refused(token: object) -> None:
    with pytest.raises(ValueError, match="32-bit"):
        page_keys(SCOPE, [0] * (PAGE - 1) + [token])  # type: ignore[list-item]


def test_bytes_are_no_tokens() -> None:
    with pytest.raises(ValueError, match="got bytes"):
        page_keys(SCOPE, bytes(4 * PAGE))


@pytest.mark.parametrize("scope", [b"", b"x" * 15, b"x" * 17])
def test_a_scope_of_another_length_is_refused(scope: bytes) -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        page_keys(scope, range(PAGE))
