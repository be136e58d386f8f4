"""Block masses as records: what comes out is what went in, small, and nothing else is taken for it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cache_store.records import Kind, RecordOf, decode, encode
from crossfill_kernels.blocks import BlockMass
from crossfill_kernels.mix_mass import mix_mass, quantise_mass
from engines.errors import MassRecordError
from engines.reuse.mass_records import pack_masses, unpack_masses


def masses(heads, blocks, seed):
    """Random masses of these whole row blocks; each row of 64 sums to 64 over its causal column blocks."""
    width = blocks[-1] + 1
    random = torch.rand(heads, len(blocks), width, generator=torch.Generator().manual_seed(seed)) ** 6
    mass = random * (torch.arange(width) <= torch.tensor(blocks)[:, None])
    mass = 64 * mass / mass.sum(-1, keepdim=True)
    return BlockMass(mass, torch.tensor(blocks, dtype=torch.int32), torch.full((len(blocks),), 64.0))


def digests(blocks):
    return [bytes([block]) * 32 for block in blocks]


def packed(heads=4, blocks=(0, 3, 9), seed=1):
    mass = masses(heads, list(blocks), seed)
    return mass, dict(zip(blocks, pack_masses(mass, 7, digests(blocks)), strict=True))


@given(
    st.integers(1, 5),
    st.sets(st.integers(0, 40), min_size=1, max_size=6).map(sorted),
    st.integers(0, 1000),
)
def test_masses_come_back_as_they_were_quantised(heads, blocks, seed):
    mass = masses(heads, blocks, seed)
    records = pack_masses(mass, 7, digests(blocks))
    stored = [decode(encode(r), RecordOf(Kind.MASS, 7), tokens_digest=r.tokens_digest) for r in records]
    assert [record.tokens_digest for record in stored] == digests(blocks)
    found, want = unpack_masses([dict(zip(blocks, stored, strict=True))], heads), quantise_mass(mass)
    for name in ("blocks", "offsets", "columns", "codes"):
        assert torch.equal(getattr(found, name), getattr(want, name)), name


def test_any_subset_of_row_blocks_in_any_order_is_the_masses_of_those():
    mass, records = packed()
    some = unpack_masses([{9: records[9], 0: records[0]}], 4)
    assert some.blocks.tolist() == [0, 9]
    mixed = mix_mass(some, torch.eye(4), 10)
    torch.testing.assert_close(mixed.mass[:, 1], mass.mass[:, 2] / 64, atol=0.03, rtol=0.05)


def test_no_records_are_no_masses():
    nothing = unpack_masses([{}], 4)
    assert (nothing.blocks.numel(), nothing.codes.numel()) == (0, 0)


def test_a_mass_takes_a_byte_and_a_bit():
    _, records = packed(blocks=(63,))
    kept = quantise_mass(masses(4, [63], 1)).codes.numel()
    assert len(records[63].payload) == kept + 4 * 8


@pytest.mark.parametrize(
    "alter",
    [
        lambda r: replace(r, dtype="mass9"),
        lambda r: replace(r, shape=(5, r.shape[1])),
        lambda r: replace(r, shape=(r.shape[0], 9)),
        lambda r: replace(r, payload=r.payload[:-1]),
        lambda r: replace(r, payload=r.payload + b"x"),
        lambda r: replace(r, payload=b""),
        lambda r: replace(r, payload=bytes(np.frombuffer(r.payload, np.uint8) ^ 255)),
    ],
    ids=["layout", "heads", "blocks", "short", "long", "empty", "bits"],
)
def test_what_is_no_masses_of_this_row_block_is_refused(alter):
    _, records = packed()
    unpack_masses([{9: records[9]}], 4)
    with pytest.raises(MassRecordError):
        unpack_masses([{9: alter(records[9])}], 4)


def test_bits_beyond_the_diagonal_are_not_read():
    _, records = packed(blocks=(9,))
    payload = bytearray(records[9].payload)
    # Column blocks 10 … 15 of head 0 have bits in its second byte.
    payload[1] |= 0xFC
    found = unpack_masses([{9: replace(records[9], payload=bytes(payload))}], 4)
    assert int(found.columns.max()) <= 9
