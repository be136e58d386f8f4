"""A layer some of whose rows maps compute: what is projected, when, and of which rows; its attention is made up."""

from types import SimpleNamespace

import pytest
import torch

from crossfill_kernels.rows import newest_rows
from engines.attention.mapped import AtOnce, MappedForward
from engines.reuse.chunk import Chunk, Part
from engines.reuse.plan import Run

HEADS, KV_HEADS, DIM, SLOTS, LAYER = 2, 1, 4, 64, 3
MODULE = SimpleNamespace(layer_id=LAYER, tp_q_head_num=HEADS, qk_head_dim=DIM, scaling=0.5)


class Pool:
    def __init__(self):
        self.keys, self.values = (torch.full((SLOTS, KV_HEADS, DIM), float("nan")) for _ in range(2))

    def get_key_buffer(self, layer):
        return self.keys

    def get_value_buffer(self, layer):
        return self.values


class Projection:
    """Row r has queries r, keys 100 + r and values 200 + r; notes of which rows each was asked."""

    def __init__(self):
        self.asked = {name: [] for name in ("whole", "queries", "keys", "values")}

    def _of(self, name, rows, heads, base):
        self.asked[name] += range(rows.start, rows.stop)
        return (base + torch.arange(rows.start, rows.stop).float())[:, None, None].expand(-1, heads, DIM)

    def whole(self, rows):
        queries = self._of("whole", rows, HEADS, 0)
        return queries, queries[:, :KV_HEADS] + 100, queries[:, :KV_HEADS] + 200

    def queries(self, rows):
        return self._of("queries", rows, HEADS, 0)

    def keys(self, rows):
        return self._of("keys", rows, KV_HEADS, 100)

    def values(self, rows):
        return self._of("values", rows, KV_HEADS, 200)


class Later:
    """Work that is done as late as it may be."""

    def __init__(self):
        self.work = []

    def start(self, work):
        self.work.append(work)

    def join(self):
        for work in self.work:
            work()
        self.work.clear()


class Layers:
    """In the place of reuse: maps give the values of their rows and -1, all else gives queries and its part's number.

    `stale` parts are found out after they were computed.
    """

    def __init__(self, stale=frozenset()):
        self.stale = stale
        self.skipped = 0

    def mapped(self, chunk, layer):
        assert layer == LAYER
        return {number: "a map" for number, part in enumerate(chunk.parts) if part.run.mapped}

    def attend_maps(self, chunk, layer, values, out):
        for number in self.mapped(chunk, layer):
            place = chunk.place(chunk.parts[number])
            out[place] = values[chunk.slots[chunk.parts[number].run.start : chunk.parts[number].run.stop].long()]
        return frozenset(self.mapped(chunk, layer)) - self.stale

    def note_skipped(self, chunk, done):
        self.skipped += sum(chunk.parts[number].rows.count for number in done)

    def attend(self, chunk, layer, query, keys, values, *, scale, out, done):
        assert not keys[chunk.slots.long()].isnan().any(), "keys are needed and have not come"
        for number, part in enumerate(chunk.parts):
            if number not in done:
                out[chunk.place(part)] = query[chunk.place(part)]


def make_chunk(start, stop, *runs, slots):
    """A chunk whose parts are `runs` of positions."""
    parts = tuple(Part(run, newest_rows(run.stop - run.start, run.stop)) for run in runs)
    return Chunk("r", newest_rows(stop - start, stop), slots[:stop], parts, None, is_last=True)


@pytest.mark.parametrize("aside", [AtOnce, Later])
def test_queries_of_mapped_rows_are_never_computed(aside):
    """Two requests: the first is mapped in the middle, the second at its beginning; then two rows of nobody."""
    slots = torch.arange(SLOTS, dtype=torch.int32)
    first = make_chunk(0, 12, Run(0, 4, False), Run(4, 8, True, True), Run(8, 12, True), slots=slots)
    second = make_chunk(0, 9, Run(0, 6, True, True), Run(6, 9, False), slots=slots[20:])
    pool, layers, projection = Pool(), Layers(), Projection()
    forward = MappedForward(pool, layers, aside())
    forward.begin([first, second])
    mapped = forward.rows(LAYER)
    assert mapped == [slice(4, 8), slice(12, 18)]
    locations = torch.cat([slots[:12], slots[20:29], slots[50:52]]).long()
    out = forward.attend(MODULE, mapped, projection, locations).view(-1, HEADS, DIM)
    by_maps = [*range(4, 8), *range(12, 18)]
    others = [row for row in range(23) if row not in by_maps]
    assert projection.asked == {"whole": others, "queries": [], "keys": by_maps, "values": by_maps}
    assert layers.skipped == len(by_maps)
    assert torch.equal(pool.keys[locations, 0, 0], 100 + torch.arange(23.0))
    assert torch.equal(pool.values[locations, 0, 0], 200 + torch.arange(23.0))
    wanted = torch.arange(23.0)
    wanted[by_maps] += 200
    # Rows of nobody stay zero.
    wanted[21:] = 0
    assert torch.equal(out[:, 0, 0], wanted)


def test_rows_of_a_map_that_was_given_away_meanwhile_get_their_queries_after_all():
    slots = torch.arange(SLOTS, dtype=torch.int32)
    chunk = make_chunk(0, 12, Run(0, 4, True, True), Run(4, 8, True), Run(8, 12, True, True), slots=slots)
    layers, projection = Layers(stale=frozenset({2})), Projection()
    forward = MappedForward(Pool(), layers, Later())
    forward.begin([chunk])
    out = forward.attend(MODULE, forward.rows(LAYER), projection, slots[:12].long()).view(-1, HEADS, DIM)
    assert projection.asked["queries"] == [*range(8, 12)]
    assert layers.skipped == 4
    assert torch.equal(out[:, 0, 0], torch.tensor([200.0, 201, 202, 203, *range(4, 12)]))


def test_where_nothing_is_planned_nothing_is_mapped():
    forward = MappedForward(Pool(), Layers(), AtOnce())
    assert forward.rows(LAYER) == []
