"""What is stored: a header that says of what and how it was made, and a payload. Verified whenever it is read."""

from __future__ import annotations

import hashlib
import re
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from cache_store.errors import RecordFault, RecordRefusedError
from cache_store.keys import DIGEST_BYTES

VERSION = 2
_MAGIC = b"CfR\x00"
# magic, version, kind, provenance, hops, layer, shard, shards, rank, 4 dimensions, dtype, digest of the tokens, length
# of the payload
_HEADER = struct.Struct(f"<4sHBBHHHHH4I8s{DIGEST_BYTES}sQ")
_CHECKSUM_BYTES = 16
HEADER_BYTES = _HEADER.size + _CHECKSUM_BYTES
MAX_RANK = 4
_NUMBER = "[0-9]{1,5}"
_NAME = re.compile(f"(?P<kind>[a-z]+)/(?P<layer>{_NUMBER})(?:/(?P<shard>{_NUMBER})-(?P<shards>{_NUMBER}))?", re.ASCII)


class Kind(IntEnum):
    """What a record holds."""

    MASS = 1
    MAP = 2
    KV = 3
    ANCHOR = 4
    RIDGE = 5


class Provenance(IntEnum):
    """How the state that a record was made from was computed."""

    EXACT = 0
    GUIDED = 1
    MAP = 2
    CORRECTED = 3


@dataclass(frozen=True)
class Record:
    """One layer's state of one page (or one anchor).

    Attributes:
        kind: what it is.
        layer: of the model that computed it.
        shape: at most 4 dimensions, of what the payload unpacks to.
        dtype: at most 8 ASCII letters; the kind says how it is read.
        tokens_digest: 32 bytes, of the tokens it belongs to (`PageKey.tokens_digest`).
        payload: the bytes.
        provenance: how it was made.
        hops: reuses between the exact computation and this.
        shard, shards: which part of the layer's heads it is of, and how many parts there are (tensor parallelism).
    """

    kind: Kind
    layer: int
    shape: tuple[int, ...]
    dtype: str
    tokens_digest: bytes
    payload: bytes
    provenance: Provenance = Provenance.EXACT
    hops: int = 0
    shard: int = 0
    shards: int = 1

    @property
    def of(self) -> RecordOf:
        """What it is of."""
        return RecordOf(self.kind, self.layer, self.shard, self.shards)

    @property
    def name(self) -> str:
        """What the record is called within its page."""
        return record_name(self.kind, self.layer, self.shard, self.shards)


class RecordOf(NamedTuple):
    """What a record is of, apart from its page."""

    kind: Kind
    layer: int
    shard: int = 0
    shards: int = 1


def record_name(kind: Kind, layer: int, shard: int = 0, shards: int = 1) -> str:
    """Name of a record within its page, such as `mass/12`, or `mass/12/0-2` for the first of two shards."""
    name = f"{kind.name.lower()}/{layer}"
    return name if shards == 1 else f"{name}/{shard}-{shards}"


def read_record_name(name: str) -> RecordOf:
    """What a record of this name is of; the inverse of `record_name`.

    Raises:
        ValueError: no record has such a name.
    """
    found = _NAME.fullmatch(name)
    kind = Kind.__members__.get(found["kind"].upper()) if found else None
    if found and kind:
        of = RecordOf(kind, int(found["layer"]), int(found["shard"] or 0), int(found["shards"] or 1))
        # Numbers have no zeros before them, and a whole layer no shard.
        if record_name(*of) == name and of.shard < of.shards:
            return of
    raise ValueError(f"no name of a record: {name!r}; they are such as mass/12")


def encode(record: Record) -> bytes:
    """Header, payload and checksum as bytes, the same on every machine.

    Raises:
        ValueError: the record does not fit the header.
    """
    if len(record.shape) > MAX_RANK or len(record.dtype) > 8 or len(record.tokens_digest) != DIGEST_BYTES:
        raise ValueError(f"want at most {MAX_RANK} dimensions, 8 letters of dtype and a digest of {DIGEST_BYTES} bytes")
    dimensions = (*record.shape, *(0,) * (MAX_RANK - len(record.shape)))
    try:
        header = _HEADER.pack(
            _MAGIC,
            VERSION,
            record.kind,
            record.provenance,
            record.hops,
            record.layer,
            record.shard,
            record.shards,
            len(record.shape),
            *dimensions,
            record.dtype.encode("ascii"),
            record.tokens_digest,
            len(record.payload),
        )
    except struct.error as error:
        raise ValueError(f"a dimension, layer or count of hops does not fit the header: {error}") from None
    return header + _checksum(header, record.payload) + record.payload


def decode(data: bytes, of: RecordOf, *, tokens_digest: bytes) -> Record:
    """The record in `data`, if it is intact and the one that was asked for.

    Raises:
        RecordRefusedError: it is not; the fault says why.
    """
    record = decode_any(data)
    if record.kind != of.kind:
        raise RecordRefusedError(RecordFault.KIND, f"want {of.kind.name.lower()}, found {record.kind.name.lower()}")
    if record.layer != of.layer:
        raise RecordRefusedError(RecordFault.LAYER, f"want layer {of.layer}, found {record.layer}")
    if record.of != of:
        found = f"shard {record.shard} of {record.shards}"
        raise RecordRefusedError(RecordFault.SHARD, f"want shard {of.shard} of {of.shards}, found {found}")
    if record.tokens_digest != tokens_digest:
        raise RecordRefusedError(RecordFault.TOKENS, "it belongs to other tokens")
    return record


def decode_any(data: bytes) -> Record:
    """The record in `data`, if it is intact, whatever it is of; for inspection.

    Raises:
        RecordRefusedError: truncated, altered, or of another version.
    """
    if len(data) < HEADER_BYTES:
        raise RecordRefusedError(RecordFault.TRUNCATED, f"{len(data)} bytes are no header")
    header, checksum, payload = data[: _HEADER.size], data[_HEADER.size : HEADER_BYTES], data[HEADER_BYTES:]
    magic, version, kind, provenance, hops, layer, shard, shards, rank, *rest = _HEADER.unpack(header)
    dimensions, dtype, digest, length = rest[:MAX_RANK], rest[MAX_RANK], rest[MAX_RANK + 1], rest[MAX_RANK + 2]
    if magic == _MAGIC and version != VERSION:
        raise RecordRefusedError(RecordFault.VERSION, f"version {version}, this is version {VERSION}")
    if len(payload) < length:
        raise RecordRefusedError(RecordFault.TRUNCATED, f"{len(payload)} of {length} bytes")
    if magic != _MAGIC or len(payload) > length or checksum != _checksum(header, payload):
        raise RecordRefusedError(RecordFault.CHECKSUM, "altered since it was written")
    # The checksum is no signature: whoever made it may have known another format, or none.
    if rank > MAX_RANK:
        raise RecordRefusedError(RecordFault.VERSION, f"{rank} dimensions, this version has at most {MAX_RANK}")
    try:
        made, name = (Kind(kind), Provenance(provenance)), dtype.rstrip(b"\0").decode("ascii")
    except ValueError as error:
        raise RecordRefusedError(RecordFault.VERSION, str(error)) from None
    return Record(made[0], layer, tuple(dimensions[:rank]), name, digest, payload, made[1], hops, shard, shards)


def _checksum(header: bytes, payload: bytes) -> bytes:
    digest = hashlib.blake2b(header, digest_size=_CHECKSUM_BYTES, person=b"crossfill-record")
    digest.update(payload)
    return digest.digest()
