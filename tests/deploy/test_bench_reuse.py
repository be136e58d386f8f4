"""The reuse benchmark's arithmetic, and that it refuses to time what was not asked for. Speeds are not judged here."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from crossfill.bench_reuse import bench_reuse, read_pair
from crossfill.bench_reuse_report import (
    Figures,
    ReuseBench,
    bound,
    ratios,
    recall_holds,
    report,
    tables,
    verdict,
    verdicts,
)
from crossfill.bench_reuse_workers import Answer, Rounds, measure
from crossfill.errors import BenchError
from engines.models import prepare
from engines.reuse.settings import ModelIdentity, PairSettings
from engines.reuse.study.masks import Mask
from engines.reuse.study.quality import Quality, QualityStudy
from engines.reuse.study.timing import AttentionTimes

SENDER = ModelIdentity(name="large", revision="r", tokenizer="t", template="", layers=6, heads=9)
BENCH = ReuseBench(PairSettings(sender=SENDER, layers=(0, 1, 2, 3, 4, 5)), "small", (1024,), rounds=6)
OUTCOMES = {"off": "none; reason=off", "allow": "guided; blocks=15/16; density=0.50; sender=large"}


def answer(ttft_s, outcome="", attention_s=0.4):
    return Answer(ttft_s, 2 * ttft_s, attention_s, 0.01, 0, outcome)


def quality(density, divergence, recalled):
    return Quality([density], [divergence], [0.9], recalled)


def figures(guided_s=0.78, refused_s=1.0, published_s=1.0, stored=10.0, window=2, guided=9):
    rounds = Rounds(
        [answer(1.0)] * 6,
        [answer(guided_s, attention_s=0.2)] * 6,
        [answer(refused_s)] * 6,
        [answer(1.0)] * 6,
        [answer(published_s)] * 6,
        [0.1] * 6,
    )
    right = {Mask.DENSE: 9, Mask.GUIDED: guided, Mask.RANDOM: 1, Mask.WINDOW: window}
    masks = {mask: quality(0.5, 0.01, [True] * count + [False] * (10 - count)) for mask, count in right.items()}
    times = AttentionTimes([0.4] * 3, [0.36] * 3, [0.12] * 3, [0.01] * 3, 0.5)
    return Figures(1024, rounds, times, QualityStudy(masks, stored), 1536)


def test_the_bound_takes_from_a_prefill_what_its_guided_attention_saves():
    assert bound(0.4, 0.5, 2.0) == pytest.approx(0.9)
    assert bound(0.4, 0.5, 1.0) == 1.0
    assert bound(0.4, 1.0, float("inf")) == pytest.approx(0.6)
    # .4 of the dense prefill is attention, .9 of that is guided, three times as fast.
    assert figures().bound == pytest.approx(1 - 0.4 * 0.9 * (1 - 1 / 3))


def test_k_with_preparing_in_the_computations_own_time_is_less():
    times = figures().times
    assert times.speed_up == pytest.approx(3.0)
    assert times.speed_up_prepared == pytest.approx(0.36 / 0.13)


def test_ratios_are_of_rounds_and_not_of_medians():
    slow = [answer(float(2 * number)) for number in range(1, 8)]
    found = ratios(slow, [answer(float(number)) for number in range(1, 8)])
    assert (found.median, found.interval.low, found.interval.high, found.p99) == (2.0, 2.0, 2.0, None)
    few = ratios(slow[:5], slow[:5])
    assert (few.median, few.interval) == (1.0, None)
    assert ratios(slow, slow[::-1], lambda one: one.cpu_s).median == 1.0


def test_a_p99_needs_a_hundred_rounds():
    above = [answer(1.0)] * 99 + [answer(3.0)]
    assert ratios(above, [answer(1.0)] * 100).p99 > 1
    assert ratios(above[1:], [answer(1.0)] * 99).p99 is None


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        ({"guided_s": 0.81}, "guided"),
        ({"refused_s": 1.06}, "refused"),
        ({"published_s": 1.11}, "sender"),
        ({"stored": 15.4}, "stored"),
        ({"guided": 8}, "recall"),
    ],
)
def test_each_target_can_be_missed_alone(changed, missed):
    assert set(verdicts(figures()).values()) == {True}
    assert {name for name, holds in verdicts(figures(**changed)).items() if not holds} == {missed}


def test_recall_says_nothing_where_a_mask_without_a_sender_does_as_well():
    assert recall_holds(0.9, 0.9, 0.86) is None
    assert recall_holds(0.9, 0.9, 0.2) is True
    assert recall_holds(0.7, 0.9, 0.2) is False
    assert [verdict(holds) for holds in (None, True, False)] == ["–", "PASS", "FAIL"]


def test_tables_fit_into_80_columns_and_show_every_mask():
    found = figures()
    console = Console(width=80, record=True, file=io.StringIO())
    for table in tables(BENCH, [found, replace(found, tokens=7680)]):
        console.print(table)
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)
    assert sum("sink + window" in line for line in lines) == 2
    assert sum(".78 (.78–.78)" in line for line in lines) == 4


def test_a_report_has_what_is_needed_to_repeat_it():
    written = json.loads(json.dumps(report(BENCH, [figures()])))
    assert written["bench"]["pair"]["layers"] == [0, 1, 2, 3, 4, 5]
    assert written["lengths"][0]["verdicts"]["guided"] is True
    assert len(written["lengths"][0]["rounds"]["guided"]) == 6
    assert written["machine"]["cores"] >= 1


class ScriptedWorker:
    """Answers without computing; `says` may turn the outcome of a request."""

    def __init__(self, says=None, stores=1.0):
        self.said = []
        self.stored = 0.0
        self.says = says or (lambda outcome: outcome)
        self.stores = stores

    async def ask(self, tokens, reuse):
        self.said.append(None if reuse is None else reuse["reuse"])
        if reuse is not None:
            self.stored += self.stores * (len(tokens) // 64)
        refused = reuse is not None and reuse["reuse"] == "allow" and reuse["salt"].startswith("nothing")
        outcome = "none; reason=nothing_stored" if refused else OUTCOMES.get((reuse or {}).get("reuse"), "")
        return answer(1.0, self.says(outcome))

    async def wait_for_pages(self, pages):
        if self.stored != pages:
            raise BenchError(f"stored {self.stored}, want {pages}")

    async def stored_pages(self):
        return self.stored


async def test_a_round_has_each_kind_once_and_turns_who_is_first():
    sender, receiver, steps = ScriptedWorker(), ScriptedWorker(), []
    rounds = await measure(sender, receiver, [[1] * 128] * 6, 64, steps.append)
    kinds = (rounds.dense, rounds.guided, rounds.refused, rounds.plain, rounds.published, rounds.stored_after_s)
    assert [len(kind) for kind in kinds] == [6] * 6
    assert sender.said[:4] == ["allow", None, None, "allow"]
    assert receiver.said.count("off") == 6
    assert {receiver.said[number] for number in range(0, 18, 3)} == {"off", "allow"}
    assert steps == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("was", "becomes", "said"),
    [
        ("guided", "fallback; reason=too_dense", "to be guided .*: fallback; reason=too_dense"),
        ("none; reason=off", "guided; blocks=1/2", "to be dense .*: guided"),
        ("none; reason=nothing_stored", "", "to be refused .*: no header"),
    ],
)
async def test_another_prefill_than_the_asked_one_is_no_figure(was, becomes, said):
    receiver = ScriptedWorker(lambda outcome: becomes if outcome.startswith(was) else outcome)
    with pytest.raises(BenchError, match=said):
        await measure(ScriptedWorker(), receiver, [[1] * 128], 64, lambda _: None)


async def test_a_round_for_which_the_store_was_too_slow_is_made_again_and_counted():
    slow = iter([True, *[False] * 100])
    receiver = ScriptedWorker(lambda outcome: "fallback; reason=store_slow" if next(slow) else outcome)
    sender = ScriptedWorker()
    rounds = await measure(sender, receiver, [[1] * 128] * 2, 64, lambda _: None)
    assert rounds.again == ["fallback; reason=store_slow"]
    assert len(rounds.dense) == len(rounds.guided) == len(rounds.plain) == len(rounds.stored_after_s) == 2
    assert sender.said.count("allow") == 3


async def test_a_store_that_is_always_too_slow_ends_the_measurement():
    receiver = ScriptedWorker(lambda _: "fallback; reason=store_slow")
    with pytest.raises(BenchError, match="too slow for every second round"):
        await measure(ScriptedWorker(), receiver, [[1] * 128] * 2, 64, lambda _: None)


@pytest.mark.parametrize("stores", [0.5, 2.0])
async def test_a_sender_that_stores_other_pages_is_no_figure(stores):
    with pytest.raises(BenchError, match=f"stored {stores * 2}, want 2"):
        await measure(ScriptedWorker(stores=stores), ScriptedWorker(), [[1] * 128], 64, lambda _: None)


@pytest.mark.real
def test_two_real_workers_are_measured(models_root, tmp_path):
    folders = {name: prepare(name, models_root) for name in ("tiny-llama", "tiny-qwen3")}
    pair = read_pair(folders, "tiny-llama", "tiny-qwen3", first_layer=0)
    bench = ReuseBench(pair, "tiny-qwen3", (512,), rounds=1, texts=1, needles=2)
    [found] = bench_reuse(
        bench, folders, output=tmp_path / "result.json", console=Console(quiet=True), progress=lambda *_: None
    )
    assert found.rounds.guided[0].outcome.startswith("guided; blocks=7/8")
    assert found.rounds.guided[0].missed_layers <= len(pair.guided)
    for answers in (found.rounds.dense, found.rounds.guided, found.rounds.plain, found.rounds.published):
        assert [0 < one.attention_s < one.ttft_s for one in answers] == [True]
    assert 0 < found.share < 1
    assert found.bound > 0
    assert len(found.study.masks[Mask.GUIDED].recalled) == 2
    assert json.loads((tmp_path / "result.json").read_text())["lengths"][0]["tokens"] == 512
