import pytest
import torch

from crossfill_kernels.blocks import BlockIndex, BlockMass, MapStorage, PackedMap, index_of
from crossfill_kernels.errors import ArgumentError


def blocks(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def test_an_index_and_its_mask_say_the_same():
    mask = torch.rand(3, 4, 9, generator=torch.Generator().manual_seed(0)) < 0.4
    mask &= torch.arange(9)[None, :] <= torch.tensor([0, 2, 5, 8])[:, None]
    index = index_of(mask, blocks(0, 2, 5, 8))
    index.check_content()
    assert torch.equal(index.mask(9), mask)


def test_an_index_drops_what_lies_beyond_the_diagonal():
    index = index_of(torch.ones(1, 2, 4, dtype=torch.bool), blocks(0, 2))
    assert index.columns.tolist() == [0, 0, 1, 2]
    assert index.offsets.tolist() == [0, 1, 4]


@pytest.mark.parametrize(
    ("offsets", "columns", "argument"),
    [
        ([0, 2, 1], [0, 1], "offsets"),
        ([1, 1, 2], [0, 1], "offsets"),
        ([0, 1, 3], [0, 1], "offsets"),
        ([0, 1, 3], [0, 2, 1], "columns"),
        ([0, 1, 3], [0, 1, 1], "columns"),
        ([0, 1, 2], [1, 0], "columns"),
        ([0, 1, 2], [0, -1], "columns"),
    ],
    ids=["falling", "not-from-0", "beyond", "unsorted", "twice", "above-diagonal", "negative"],
)
def test_bad_lists_are_named(offsets, columns, argument):
    index = BlockIndex(1, blocks(0, 3), blocks(*offsets), blocks(*columns))
    with pytest.raises(ArgumentError) as caught:
        index.check_content()
    assert caught.value.argument == argument


def test_lists_may_be_shorter_than_their_buffer():
    BlockIndex(1, blocks(0, 3), blocks(0, 1, 2), blocks(0, 3, 77, -5)).check_content()


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: BlockMass(torch.zeros(1, 2), blocks(0, 1), torch.ones(2)), "mass"),
        (lambda: BlockMass(torch.zeros(1, 2, 2), blocks(0), torch.ones(2)), "blocks"),
        (lambda: BlockMass(torch.zeros(1, 2, 2), blocks(0, 1), torch.ones(3)), "totals"),
        (lambda: BlockIndex(2, blocks(0, 1), blocks(0, 1, 2), blocks(0, 1)), "offsets"),
        (lambda: BlockIndex(1, blocks(0), blocks(0, 1), torch.zeros(1)), "columns"),
        (lambda: MapStorage(torch.zeros(3, 64, 32)), "blocks"),
        (lambda: MapStorage(torch.zeros(3, 64, 64, dtype=torch.uint8)), "scales"),
        (lambda: MapStorage(torch.zeros(3, 64, 64), torch.zeros(3, 64)), "scales"),
        (
            lambda: PackedMap(1, blocks(0), blocks(0, 1), blocks(0), blocks(0, 1), MapStorage(torch.zeros(2, 64, 64))),
            "slots",
        ),
        (lambda: BlockIndex(1, blocks(0), blocks(0, 1).to("meta"), blocks(0)), "offsets"),
        (lambda: BlockMass(torch.zeros(1, 1, 1), blocks(0), torch.ones(1, device="meta")), "totals"),
        (lambda: index_of(torch.ones(1, 2, 2), blocks(0, 1)), "mask"),
    ],
    ids=[
        "mass",
        "mass-blocks",
        "totals",
        "offsets",
        "columns",
        "slots-shape",
        "no-scales",
        "scales",
        "slots",
        "index-device",
        "mass-device",
        "mask",
    ],
)
def test_a_misfit_names_the_argument(make, argument):
    with pytest.raises(ArgumentError) as caught:
        make()
    assert caught.value.argument == argument
