import pytest
import torch

from crossfill_kernels.errors import ArgumentError
from crossfill_kernels.rows import newest_rows, rows_at


def test_rows_fall_into_blocks_of_64_positions():
    rows = rows_at(torch.tensor([3, 63, 64, 300, 301]))
    assert rows.blocks.tolist() == [0, 1, 4]
    assert rows.starts.tolist() == [0, 2, 3, 5]
    assert (rows.count, rows.block_count, rows.last) == (5, 3, 301)


def test_newest_rows_end_the_context():
    rows = newest_rows(3, 130)
    assert rows.positions.tolist() == [127, 128, 129]
    assert rows.blocks.tolist() == [1, 2]


@pytest.mark.parametrize("positions", [range(0), range(5, 5), torch.empty(0, dtype=torch.int64)], ids=str)
def test_no_rows_are_rows(positions):
    rows = rows_at(positions)
    assert (rows.count, rows.block_count, rows.last, rows.starts.tolist()) == (0, 0, -1, [0])


@pytest.mark.parametrize(
    "positions",
    [torch.tensor([2, 2]), torch.tensor([3, 1]), torch.tensor([-1, 0]), torch.tensor([[1]]), torch.tensor([0.0])],
    ids=["twice", "falling", "negative", "rank", "float"],
)
def test_positions_must_ascend_from_0(positions):
    with pytest.raises(ArgumentError, match="positions"):
        rows_at(positions)
