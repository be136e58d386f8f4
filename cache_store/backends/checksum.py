"""A checksum (CRC-32) that stands behind what it is of, so that one call checks any number of such pieces in a row."""

import zlib
from collections.abc import Iterable

INTACT = 0x2144DF1C
"""Whatever came before, the CRC-32 of bytes followed by their CRC-32 is this number. So pieces whose checksums begin
with it, one after the other, have it for a checksum themselves."""

CHECKSUM_BYTES = 4


def seal(piece: bytes) -> bytes:
    """The piece with its checksum behind it."""
    return piece + zlib.crc32(piece, INTACT).to_bytes(CHECKSUM_BYTES, "little")


def are_intact(pieces: Iterable[bytes]) -> bool:
    """Whether all of these, each sealed or several of such in a row, are as they were written."""
    return zlib.crc32(b"".join(pieces), INTACT) == INTACT


def is_intact(piece: bytes | memoryview) -> bool:
    """Whether the piece is as it was sealed."""
    return zlib.crc32(piece, INTACT) == INTACT
