"""Keys of pages: a hash chain over blocks of 64 tokens."""

import hashlib
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

PAGE = 64
"""Tokens of a page; rows of a block of an attention map."""

KEY_BYTES, DIGEST_BYTES = 16, 32


@dataclass(frozen=True, slots=True)
class PageKey:
    """Where a page's records lie, and what they must be of.

    Attributes:
        key: 16 bytes, from the namespace and all tokens up to the end of this page.
        parent: key of the page before; the scope for the first.
        tokens_digest: 32 bytes over the same tokens by another hash: what a hit is checked against, so that a collision
            of keys is a miss.
    """

    key: bytes
    parent: bytes
    tokens_digest: bytes


Hash = Callable[[bytes], bytes]


def _hash_key(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=KEY_BYTES, person=b"crossfill-page").digest()


def page_keys(scope: bytes, tokens: Sequence[int], *, hash_key: Hash = _hash_key) -> list[PageKey]:
    """Keys of the complete pages of a prefix; tokens beyond the last complete page have none.

    Args:
        scope: 16 bytes of the namespace (`Namespace.scope`).
        tokens: token ids, 0 … 2³² - 1.
        hash_key: replaced only by tests that want collisions.

    Raises:
        ValueError: a token id is no unsigned 32-bit number, the tokens are bytes, or the scope is not 16 bytes.
    """
    if len(scope) != KEY_BYTES:
        raise ValueError(f"want a scope of {KEY_BYTES} bytes, got {len(scope)}")
    data = _little_endian(tokens[: len(tokens) // PAGE * PAGE])
    keys, parent, digest = [], scope, scope
    for start in range(0, len(data), 4 * PAGE):
        page = data[start : start + 4 * PAGE]
        digest = hashlib.blake2b(digest + page, digest_size=DIGEST_BYTES, person=b"crossfill-tok").digest()
        key = hash_key(parent + page)
        keys.append(PageKey(key, parent, digest))
        parent = key
    return keys


def _little_endian(tokens: Sequence[int]) -> bytes:
    if isinstance(tokens, bytes | bytearray):
        # An array would take them as numbers that are already packed.
        raise ValueError("want token ids, got bytes")
    # "I" has 4 bytes on every platform that torch runs on; the check keeps it so.
    try:
        numbers = array("I", tokens)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"a token id is no unsigned 32-bit number: {error}") from error
    if numbers.itemsize != 4:
        return b"".join(int(token).to_bytes(4, "little") for token in tokens)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()
