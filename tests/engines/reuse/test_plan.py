"""Which rows of a chunk are computed how."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.reuse.plan import Run, pages_to_guide, rows_in, runs_of
from engines.reuse.refusal import Refusal


def test_rows_are_cut_where_guided_and_other_row_blocks_meet():
    assert runs_of(30, 400, frozenset({1, 2, 4})) == (
        Run(30, 64, guided=False),
        Run(64, 192, guided=True),
        Run(192, 256, guided=False),
        Run(256, 320, guided=True),
        Run(320, 400, guided=False),
    )


@given(st.integers(0, 500), st.integers(1, 500), st.sets(st.integers(0, 20)))
def test_runs_cover_every_row_once_and_never_two_kinds_side_by_side(start, count, pages):
    runs = runs_of(start, start + count, frozenset(pages))
    rows = [(row, run.guided) for run in runs for row in range(run.start, run.stop)]
    assert rows == [(row, row // 64 in pages) for row in range(start, start + count)]
    assert all(one.guided != other.guided for one, other in itertools.pairwise(runs))


@pytest.mark.parametrize(
    ("prefix", "total", "pages"),
    [
        (0, 321, {0, 1, 3, 4}),
        # The last row is in page 4, which is dense.
        (0, 320, {0, 1, 3}),
        (64, 321, {1, 3, 4}),
        (65, 321, {1, 3, 4}),
        (128, 321, {3, 4}),
        (320, 321, set()),
    ],
)
def test_guided_are_row_blocks_that_are_covered_not_cached_and_not_the_last(prefix, total, pages):
    covered = [True, True, False, True, True]
    assert pages_to_guide(covered, prefix, total) == pages


def test_rows_of_a_page_that_is_cached_in_part_count_in_part():
    assert rows_in(frozenset({1, 3}), 100) == 28 + 64


def test_every_refusal_is_either_a_fallback_or_nothing_to_expect():
    assert {refusal.mode for refusal in Refusal} == {"none", "fallback"}
    assert Refusal.STORE_SLOW.mode == "fallback"
    assert Refusal.NOTHING_STORED.mode == "none"
