"""`crossfill bench maps`: what is timed is what was said, and the tables show it."""

from types import SimpleNamespace

import pytest
from rich.console import Console

from crossfill import bench_maps
from crossfill.bench_maps import MapBench, MapRounds
from crossfill.bench_reuse_workers import Answer
from crossfill.errors import BenchError
from engines.reuse.settings import MapSettings, ModelIdentity, PairSettings, align_suffix
from engines.reuse.study.map_quality import MapStudy, Way
from engines.reuse.study.quality import Quality

SAID = {
    "dense": "none; reason=off",
    "guided": "guided; blocks=1/2; density=0.50; sender=large",
    "map": "map; blocks=1/2; density=0.90; sender=large; queries=skipped",
    "hybrid": "map; blocks=1/2; density=0.60; sender=large; queries=skipped",
}


def answer(outcome, ttft_s=1.0):
    return Answer(ttft_s, ttft_s, 0.2, 0.0, 0, outcome)


class Sender:
    """Packs what it is asked, as far as `packs` goes."""

    def __init__(self, packs=1.0):
        self.packs, self.asked, self.row_blocks = packs, 0, 0.0

    async def ask(self, tokens, reuse):
        assert reuse["reuse"] == "allow"
        self.asked += len(tokens) // 64
        self.row_blocks += self.packs * 3 * (len(tokens) // 64)
        return answer("none; reason=no_pair")

    async def metrics(self):
        return {
            "crossfill_reuse_packed_row_blocks_total": self.row_blocks,
            "crossfill_reuse_packed_slots_total": 100 * self.row_blocks,
            "crossfill_store_published_pages_total": float(self.asked),
        }


class Taker:
    def __init__(self, kind, log, says=None):
        self.kind, self.log, self.says = kind, log, says or SAID[kind]

    async def ask(self, tokens, reuse):
        self.log.append(self.kind)
        assert reuse["reuse"] == ("off" if self.kind == "dense" else "allow")
        return answer(self.says)


def takers(log, **says):
    return {kind: Taker(kind, log, says.get(kind)) for kind in SAID}


async def test_a_round_asks_every_kind_once_in_changing_order():
    log, rounds = [], MapRounds()
    for _ in range(24):
        await bench_maps._round(Sender(), takers(log), [1] * 128, rounds, 3)
    orders = [tuple(log[start : start + 4]) for start in range(0, len(log), 4)]
    assert len(set(orders)) == 24
    assert all(set(order) == set(SAID) for order in orders)
    assert {len(answers) for answers in rounds.answers.values()} == {24}
    assert rounds.slots == [600] * 24


@pytest.mark.parametrize(
    ("kind", "says"),
    [("dense", SAID["guided"]), ("map", "fallback; reason=too_dense"), ("guided", SAID["map"]), ("map", SAID["dense"])],
)
async def test_another_prefill_is_no_figure(kind, says):
    rounds, others = MapRounds(), takers([], **{kind: says})
    # What may be the store's slowness is asked for again at first.
    rounds.again = [""] * 4
    with pytest.raises(BenchError, match=f"was to be {kind} was prefilled otherwise: {says.partition(';')[0]}"):
        await bench_maps._round(Sender(), others, [1] * 128, rounds, 3)


async def test_a_map_that_had_not_come_is_asked_for_again_and_counted():
    rounds, late = MapRounds(), SAID["guided"] + "; map=absent"
    await bench_maps._round(Sender(), takers([], map=late), [1] * 128, rounds, 3)
    assert rounds.again == [late]
    assert not any(rounds.answers.values())
    await bench_maps._round(Sender(), takers([]), [1] * 128, rounds, 3)
    assert {len(answers) for answers in rounds.answers.values()} == {1}


async def test_a_hybrid_of_which_no_layer_is_sparse_is_a_figure():
    rounds, dense = MapRounds(), SAID["guided"] + "; map=too_dense"
    await bench_maps._round(Sender(), takers([], hybrid=dense), [1] * 128, rounds, 3)
    assert rounds.answers["hybrid"][0].outcome == dense


async def test_a_sender_that_does_not_pack_all_is_told(monkeypatch):
    monkeypatch.setattr(bench_maps, "_TIMEOUT_S", 0.05)
    with pytest.raises(BenchError, match=r"packed 3 of 6 row blocks .* pool too small"):
        await bench_maps._round(Sender(packs=0.5), takers([]), [1] * 128, MapRounds(), 3)


def test_tables_fit_into_80_columns_and_show_every_way():
    theirs, own = (
        ModelIdentity(name=name, revision="r", tokenizer="t", template="c", layers=6, heads=4)
        for name in ("large", "small")
    )
    pair = PairSettings(sender=theirs, layers=align_suffix(6, 6))
    bench = MapBench(pair, own.name, (1024,), 6, 1, 8, 0, MapSettings())
    rounds = MapRounds({kind: [answer(said, 2.0 - 0.1 * n)] * 6 for n, (kind, said) in enumerate(SAID.items())})
    rounds.packed_after_s, rounds.slots = [0.5] * 6, [3000] * 6
    quality = {way: Quality([0.5], [0.002], [0.98], [True, False]) for way in Way}
    study = MapStudy(quality, [2], {"dense": 0.4, "guided": 0.2, "map": 0.1, "map, paper": 0.3})
    console = Console(width=80, record=True, file=SimpleNamespace(write=lambda _: None, flush=lambda: None))
    for table in bench_maps._tables(bench, {1024: rounds}, {1024: study}):
        console.print(table)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    for shown in ("0.95", "0.90", "0.85", "400", "hybrid", "2.0", "98.0%", "0.50"):
        assert shown in text
    # 3,000 slots of 4,352 bytes, of 1,024 tokens in two layers.
    assert str(round(3000 * 4352 / 1024 / len(pair.guided))) in text
