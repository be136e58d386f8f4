from dataclasses import replace

import pytest

from cache_store.backends.protocol import PageWrite
from cache_store.errors import RecordFault
from cache_store.keys import PAGE, page_keys
from cache_store.records import Kind, Record, encode
from cache_store.verification import faults_of

KEY = page_keys(b"s" * 16, range(PAGE))[0]
RIGHT = Record(Kind.MASS, 3, (4,), "u1", KEY.tokens_digest, b"data")


def page(records):
    return PageWrite(KEY.key, KEY.parent, KEY.tokens_digest, records)


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (encode(RIGHT)[:-1], RecordFault.TRUNCATED),
        (b"", RecordFault.TRUNCATED),
        (encode(RIGHT)[:-1] + b"A", RecordFault.CHECKSUM),
        (encode(replace(RIGHT, layer=4)), RecordFault.KIND),
        (encode(replace(RIGHT, tokens_digest=b"x" * 32)), RecordFault.TOKENS),
    ],
    ids=["truncated", "empty", "flipped", "name", "tokens"],
)
def test_what_is_wrong_is_named_and_what_is_right_is_not(data, fault):
    right = replace(RIGHT, layer=7)
    faults = faults_of(page({"mass/3": data, "mass/7": encode(right)}))
    assert {name: error.fault for name, error in faults.items()} == {"mass/3": fault}


def test_a_right_page_has_no_fault():
    assert faults_of(page({"mass/3": encode(RIGHT)})) == {}
