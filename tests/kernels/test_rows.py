import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from crossfill_kernels.errors import ArgumentError
from crossfill_kernels.rows import Rows, newest_rows, rows_at


def test_rows_fall_into_blocks_of_64_positions():
    rows = rows_at(torch.tensor([3, 63, 64, 300, 301]))
    assert rows.blocks.tolist() == [0, 1, 4]
    assert rows.starts.tolist() == [0, 2, 3, 5]
    assert (rows.count, rows.block_count, rows.last) == (5, 3, 301)


def test_newest_rows_end_the_context():
    rows = newest_rows(3, 130)
    assert rows.positions.tolist() == [127, 128, 129]
    assert rows.blocks.tolist() == [1, 2]


@given(count=st.integers(0, 200), before=st.integers(0, 200))
def test_newest_rows_are_the_rows_of_their_range(count, before):
    got, want = newest_rows(count, before + count), rows_at(range(before, before + count))
    for name in ("positions", "blocks", "starts"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
        assert getattr(got, name).dtype == getattr(want, name).dtype
    assert got.last == want.last


def test_more_new_rows_than_tokens_are_refused():
    with pytest.raises(ArgumentError, match="positions"):
        newest_rows(3, 2)


@pytest.mark.parametrize("positions", [range(0), range(5, 5), torch.empty(0, dtype=torch.int64)], ids=str)
def test_no_rows_are_rows(positions):
    rows = rows_at(positions)
    assert (rows.count, rows.block_count, rows.last, rows.starts.tolist()) == (0, 0, -1, [0])


def test_rows_keep_their_positions_when_the_caller_goes_on():
    positions = torch.arange(3)
    rows = rows_at(positions)
    positions += 64
    assert rows.positions.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"positions": torch.arange(3, dtype=torch.int32)}, "positions"),
        ({"positions": torch.arange(6)[::2]}, "positions"),
        ({"blocks": torch.zeros(1, dtype=torch.int64)}, "blocks"),
        ({"starts": torch.zeros(3, dtype=torch.int32)}, "starts"),
        ({"starts": torch.zeros(2, dtype=torch.int32, device="meta")}, "starts"),
    ],
    ids=["dtype", "strided", "blocks", "starts", "device"],
)
def test_rows_made_by_hand_are_checked(change, argument):
    made = rows_at(range(3))
    fields = {"positions": made.positions, "blocks": made.blocks, "starts": made.starts, "last": 2}
    with pytest.raises(ArgumentError) as caught:
        Rows(**(fields | change))
    assert caught.value.argument == argument


@pytest.mark.parametrize(
    "positions",
    [
        range(10, 0, -1),
        torch.tensor([2, 2]),
        torch.tensor([3, 1]),
        torch.tensor([-1, 0]),
        torch.tensor([[1]]),
        torch.tensor([0.0]),
    ],
    ids=["backwards", "twice", "falling", "negative", "rank", "float"],
)
def test_positions_must_ascend_from_0(positions):
    with pytest.raises(ArgumentError, match="positions"):
        rows_at(positions)
