import threading

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from crossfill_kernels import dispatch
from crossfill_kernels.blocks import BlockMass
from crossfill_kernels.errors import ArgumentError
from crossfill_kernels.native import library
from crossfill_kernels.select_blocks import select_blocks, select_blocks_reference


def masses(blocks, heads=3, beyond=0, steps=None, left_out=0.0, seed=0):
    """Random masses of row blocks; with `steps` they take few values, so that many are equal or zero."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.tensor(blocks, dtype=torch.int32)
    columns = max(blocks, default=-1) + 1 + beyond
    mass = torch.rand(heads, len(blocks), columns, generator=generator) ** 6
    if steps is not None:
        mass = (torch.rand(heads, len(blocks), columns, generator=generator) * steps).floor()
    mass = mass.masked_fill(torch.arange(columns) > numbers[:, None], 0.0)
    totals = mass.sum(dim=2).amax(dim=0) if steps else torch.full((len(blocks),), 64.0)
    mass = mass if steps else mass / mass.sum(dim=2, keepdim=True) * 64
    return BlockMass(mass * (1 - left_out), numbers, totals)


def lists(index):
    """Columns by (head, place of the row block)."""
    offsets, columns, rows = index.offsets.tolist(), index.columns.tolist(), index.blocks.numel()
    return {
        (h, i): columns[offsets[h * rows + i] : offsets[h * rows + i + 1]]
        for h in range(index.heads)
        for i in range(rows)
    }


def assert_same(got, want):
    assert got.heads == want.heads
    assert torch.equal(got.blocks, want.blocks)
    assert torch.equal(got.offsets, want.offsets)
    assert torch.equal(got.columns, want.columns)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    blocks=st.sets(st.integers(0, 40), max_size=8),
    heads=st.integers(1, 4),
    beyond=st.integers(0, 3),
    steps=st.sampled_from([None, 1, 2, 3, 50]),
    left_out=st.sampled_from([0.0, 0.05, 0.6]),
    top_p=st.one_of(st.sampled_from([1.0, 1e-9, 0.5]), st.floats(0.01, 1.0)),
    cap=st.sampled_from([None, 2, 3, 7, 100]),
    seed=st.integers(0, 2**20),
)
@pytest.mark.usefixtures("native_variant")
def test_native_makes_the_same_choice(blocks, heads, beyond, steps, left_out, top_p, cap, seed):
    mass = masses(sorted(blocks), heads, beyond, steps, left_out, seed)
    got = select_blocks(mass, top_p=top_p, cap=cap)
    assert_same(got, select_blocks_reference(mass, top_p=top_p, cap=cap))
    got.check_content()


@pytest.mark.parametrize("top_p", [0.3, 0.7, 0.9, 0.99])
@pytest.mark.usefixtures("native_variant")
def test_the_share_is_reached_and_no_block_is_too_many(top_p):
    mass = masses([0, 1, 5, 17, 30], heads=4)
    for (h, i), columns in lists(select_blocks(mass, top_p=top_p)).items():
        row, diagonal = mass.mass[h, i].double(), int(mass.blocks[i])
        kept = float(row[columns].sum())
        assert {0, diagonal} <= set(columns)
        assert kept >= top_p * 64 - 1e-9
        free = [c for c in columns if c not in (0, diagonal)]
        if free:
            assert kept - float(row[free].min()) < top_p * 64
            left = [c for c in range(diagonal + 1) if c not in columns]
            assert all(row[c] <= row[free].min() for c in left)


def test_a_small_share_keeps_the_forced_blocks_only():
    kept = lists(select_blocks(masses([0, 3, 9], heads=1), top_p=1e-6))
    assert kept == {(0, 0): [0], (0, 1): [0, 3], (0, 2): [0, 9]}


def test_the_whole_share_keeps_every_causal_block():
    mass = masses([0, 2, 5], heads=2, beyond=3, steps=2)
    kept = lists(select_blocks(mass, top_p=1.0))
    assert all(kept[h, i] == list(range(b + 1)) for h in range(2) for i, b in enumerate([0, 2, 5]))
    # The control: less than the whole share leaves blocks of no mass out.
    assert lists(select_blocks(mass, top_p=0.999)) != kept


def test_equal_masses_are_kept_from_the_left():
    row = torch.tensor([[[0.0, 2, 3, 2, 3, 2, 1]]])
    mass = BlockMass(row, torch.tensor([6], dtype=torch.int32), torch.tensor([13.0]))
    chosen = [lists(select_blocks(mass, top_p=p))[0, 0] for p in (0.1, 0.3, 0.5, 0.6, 0.8, 0.99)]
    assert chosen[0] == [0, 2, 6]
    assert chosen[1] == [0, 2, 6]
    assert chosen[2] == [0, 2, 4, 6]
    assert chosen[3] == [0, 1, 2, 4, 6]
    assert chosen[4] == [0, 1, 2, 3, 4, 6]
    assert chosen[5] == [0, 1, 2, 3, 4, 5, 6]


def test_an_unreachable_share_keeps_every_block_of_positive_mass():
    row = torch.tensor([[[0.0, 2, 0, 1, 0]]])
    mass = BlockMass(row, torch.tensor([4], dtype=torch.int32), torch.tensor([64.0]))
    assert lists(select_blocks(mass, top_p=0.9))[0, 0] == [0, 1, 3, 4]


@pytest.mark.parametrize("top_p", [0.999, 1.0])
def test_a_cap_keeps_the_greatest(top_p):
    mass = masses([0, 12, 25])
    for (h, i), columns in lists(select_blocks(mass, top_p=top_p, cap=5)).items():
        diagonal = int(mass.blocks[i])
        assert len(columns) == min(5, diagonal + 1)
        free = mass.mass[h, i, 1:diagonal].sort(descending=True).values[:3].tolist()
        assert sorted(mass.mass[h, i, c].item() for c in columns if c not in (0, diagonal)) == sorted(free)


def test_no_rows_is_an_empty_index():
    index = select_blocks(masses([]), top_p=0.5)
    assert index.offsets.tolist() == [0]
    assert index.columns.numel() == 0


def test_masses_may_be_strided():
    mass = masses([1, 4, 9])
    wide = mass.mass.repeat_interleave(2, dim=2)[..., ::2]
    assert not wide.is_contiguous()
    assert_same(select_blocks(BlockMass(wide, mass.blocks, mass.totals), top_p=0.7), select_blocks(mass, top_p=0.7))


def test_threads_at_once_choose_the_same():
    mass = masses(list(range(40)), heads=6)
    want, got = select_blocks_reference(mass, top_p=0.8), []
    workers = [threading.Thread(target=lambda: got.append(select_blocks(mass, top_p=0.8))) for _ in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(got) == 6
    for index in got:
        assert_same(index, want)


def test_the_reference_serves_without_a_library():
    before = dispatch.calls().get(("select_blocks", "reference"), 0)
    with library.replaced(None):
        select_blocks(masses([3]), top_p=0.5)
    assert dispatch.calls()["select_blocks", "reference"] == before + 1


@pytest.mark.parametrize(
    ("change", "options", "argument"),
    [
        (lambda m: m, {"top_p": 0.0}, "top_p"),
        (lambda m: m, {"top_p": 1.01}, "top_p"),
        (lambda m: m, {"top_p": float("nan")}, "top_p"),
        (lambda m: m, {"top_p": 0.5, "cap": 1}, "cap"),
        (lambda m: BlockMass(m.mass[..., :5], m.blocks, m.totals), {"top_p": 0.5}, "mass"),
        (lambda m: BlockMass(-m.mass, m.blocks, m.totals), {"top_p": 0.5}, "mass"),
        (lambda m: BlockMass(m.mass * float("nan"), m.blocks, m.totals), {"top_p": 0.5}, "mass"),
        (lambda m: BlockMass(m.mass, m.blocks.flip(0), m.totals), {"top_p": 0.5}, "blocks"),
        (lambda m: BlockMass(m.mass, m.blocks - 5, m.totals), {"top_p": 0.5}, "blocks"),
        (lambda m: BlockMass(m.mass, m.blocks, m.totals.to("meta")), {"top_p": 0.5}, "totals"),
    ],
    ids=["p-0", "p-above-1", "p-nan", "cap", "columns", "negative", "nan", "falling", "before-0", "device"],
)
def test_a_misfit_names_the_argument(change, options, argument):
    with pytest.raises(ArgumentError) as caught:
        select_blocks(change(masses([2, 5])), **options)
    assert caught.value.argument == argument
