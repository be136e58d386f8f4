"""Records: what comes back is what was written, or a refusal that says why."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_store import records
from cache_store.errors import RecordFault, RecordRefusedError
from cache_store.records import (
    HEADER_BYTES,
    Kind,
    Provenance,
    Record,
    RecordOf,
    decode,
    decode_any,
    encode,
    read_record_name,
    record_name,
)

DIGEST = bytes(range(32))
KV = Record(Kind.KV, 3, (2, 64, 3), "bf16", DIGEST, b"payload", Provenance.CORRECTED, 2)
ENCODED = bytes.fromhex(
    "4366520002000303020003000000010003000200000040000000030000000000000062663136000000000001020304050607"
    "08090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f070000000000000028be45e6094f2c28165f9d5dd9732be37061"
    "796c6f6164"
)

any_record = st.builds(
    Record,
    kind=st.sampled_from(Kind),
    layer=st.integers(0, 2**16 - 1),
    shape=st.lists(st.integers(0, 2**32 - 1), max_size=4).map(tuple),
    dtype=st.text("abcdefuif0123456789", max_size=8),
    tokens_digest=st.binary(min_size=32, max_size=32),
    payload=st.binary(max_size=200),
    provenance=st.sampled_from(Provenance),
    hops=st.integers(0, 2**16 - 1),
    shard=st.integers(0, 2**16 - 1),
    shards=st.integers(0, 2**16 - 1),
)


def refused(data: bytes) -> RecordFault:
    with pytest.raises(RecordRefusedError) as caught:
        decode(data, RecordOf(Kind.KV, 3), tokens_digest=DIGEST)
    return caught.value.fault


def test_a_record_has_the_same_bytes_on_every_machine() -> None:
    assert encode(KV) == ENCODED
    assert decode(ENCODED, RecordOf(Kind.KV, 3), tokens_digest=DIGEST) == KV


@given(any_record)
def test_every_record_comes_back_as_it_was(record: Record) -> None:
    data = encode(record)
    assert decode_any(data) == record
    assert decode(data, record.of, tokens_digest=record.tokens_digest) == record
    assert len(data) == HEADER_BYTES + len(record.payload)


def test_every_flipped_bit_is_refused() -> None:
    for at in range(len(ENCODED)):
        for bit in range(8):
            altered = bytearray(ENCODED)
            altered[at] ^= 1 << bit
            with pytest.raises(RecordRefusedError):
                decode_any(bytes(altered))


def test_every_truncation_is_refused_as_one() -> None:
    assert {refused(ENCODED[:length]) for length in range(len(ENCODED))} == {RecordFault.TRUNCATED}


def test_bytes_behind_the_end_are_refused() -> None:
    assert refused(ENCODED + b"\0") is RecordFault.CHECKSUM


@given(st.binary(max_size=300))
def test_noise_is_refused(data: bytes) -> None:
    with pytest.raises(RecordRefusedError):
        decode_any(data)


@given(st.binary(max_size=300))
def test_noise_behind_a_true_beginning_is_refused(data: bytes) -> None:
    if data != ENCODED[6:]:
        with pytest.raises(RecordRefusedError):
            decode_any(ENCODED[:6] + data)


def test_another_version_is_refused_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "VERSION", records.VERSION + 1)
    later = encode(KV)
    monkeypatch.undo()
    assert refused(later) is RecordFault.VERSION


@pytest.mark.parametrize("field", ["kind", "provenance"])
def test_a_kind_or_provenance_that_this_version_does_not_know_is_refused_as_its_version(field: str) -> None:
    assert refused(encode(replace(KV, **{field: 200}))) is RecordFault.VERSION


def sealed(**header: object) -> bytes:
    """A record whose checksum is right and whose header says this."""
    fields = {"rank": 3, "dtype": b"bf16", "length": 7} | header
    dimensions = (2, 64, 3, 0)
    packed = records._HEADER.pack(
        records._MAGIC,
        2,
        Kind.KV,
        0,
        0,
        3,
        0,
        1,
        fields["rank"],
        *dimensions,
        fields["dtype"],
        DIGEST,
        fields["length"],
    )
    return packed + records._checksum(packed, b"payload") + b"payload"


@pytest.mark.parametrize(
    ("header", "fault"),
    [
        ({"rank": 5}, RecordFault.VERSION),
        ({"rank": 65535}, RecordFault.VERSION),
        ({"dtype": b"\xff" * 8}, RecordFault.VERSION),
        ({"length": 0}, RecordFault.CHECKSUM),
        ({"length": 6}, RecordFault.CHECKSUM),
        ({"length": 8}, RecordFault.TRUNCATED),
    ],
    ids=str,
)
def test_a_header_that_no_record_has_is_refused_though_its_checksum_is_right(
    header: dict[str, object], fault: RecordFault
) -> None:
    assert refused(sealed(**header)) is fault
    # The control: the same way of sealing makes a record.
    assert decode_any(sealed()).shape == (2, 64, 3)


@pytest.mark.parametrize(
    ("other", "fault"),
    [
        ({"kind": Kind.MASS}, RecordFault.KIND),
        ({"layer": 4}, RecordFault.LAYER),
        ({"tokens_digest": bytes(32)}, RecordFault.TOKENS),
    ],
    ids=["kind", "layer", "tokens"],
)
def test_a_record_of_something_else_is_refused(other: dict[str, object], fault: RecordFault) -> None:
    assert refused(encode(replace(KV, **other))) is fault


@pytest.mark.parametrize(
    "wrong",
    [
        {"shape": (1, 2, 3, 4, 5)},
        {"shape": (-1,)},
        {"shape": (2**32,)},
        {"dtype": "bfloat16e"},
        {"dtype": "ü"},
        {"tokens_digest": b"short"},
        {"layer": -1},
        {"layer": 2**16},
        {"hops": 2**16},
    ],
    ids=str,
)
def test_what_does_not_fit_the_header_cannot_be_written(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the message is of the field that is wrong
        encode(replace(KV, **wrong))


def test_names_say_kind_and_layer() -> None:
    assert record_name(Kind.MASS, 12) == Record(Kind.MASS, 12, (), "", DIGEST, b"").name == "mass/12"
    assert len({record_name(kind, layer) for kind in Kind for layer in range(30)}) == 30 * len(Kind)


@pytest.mark.parametrize("of", [RecordOf(Kind.MASS, 12), RecordOf(Kind.MAP, 0, 1, 2), RecordOf(Kind.KV, 65535, 7, 8)])
def test_a_name_says_what_a_record_is_of(of: RecordOf) -> None:
    assert read_record_name(record_name(*of)) == of
    assert decode_any(encode(replace(KV, kind=of.kind, layer=of.layer, shard=of.shard, shards=of.shards))).of == of


@pytest.mark.parametrize(
    "name",
    [
        "",
        "mass",
        "mass/",
        "mass/x",
        "mass/-1",
        "nothing/1",
        "mass/01",
        "mass/1/0-1",
        "mass/1/2-2",
        "mass/1/0",
        "Mass/1",
    ],
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="no name of a record"):
        read_record_name(name)


def test_a_shard_is_no_other_shard() -> None:
    data = encode(replace(KV, shard=1, shards=2))
    assert decode(data, RecordOf(Kind.KV, 3, 1, 2), tokens_digest=DIGEST).shard == 1
    for other in (RecordOf(Kind.KV, 3), RecordOf(Kind.KV, 3, 0, 2), RecordOf(Kind.KV, 3, 1, 4)):
        with pytest.raises(RecordRefusedError) as refusal:
            decode(data, other, tokens_digest=DIGEST)
        assert refusal.value.fault is RecordFault.SHARD
