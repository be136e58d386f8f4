"""Verdicts that follow from what was measured, figure by figure."""

import numpy as np
import pytest

from engines.calibration.gate import Limits, Verdicts, divergence_over, figures, recalled_beyond
from engines.calibration.judging import after
from engines.reuse.study.masks import Mask

WAYS = ("guided", "random", "sink + window", "uniform")


def verdicts(
    *,
    guided=0.001,
    agreement=0.99,
    kept=0.5,
    recalled=9,
    window=0.01,
    uniform=0.01,
    spread=0.0,
    late=0.001,
    late_agreement=0.99,
    rouge=0.8,
    f1=0.8,
    uniform_recalled=5,
    other=0.001,
):
    found = Verdicts()
    for number, step in enumerate((-1, 0, 1, 0)):
        far = guided if number < 3 else other
        of = {"guided": far + step * spread, "random": 0.02, "sink + window": window, "uniform": uniform}
        told = {name: np.array([kl, agreement]) for name, kl in of.items()}
        told |= {after(4): np.array([0.001, 0.99]), after(8): np.array([late, late_agreement])}
        found.add_text("one" if number < 3 else "another", {"density": np.array([kept - 0.1, kept + 0.1]), **told})
    counts = {"dense": 9, "guided": recalled, "random": 1, "sink + window": 2, "uniform": uniform_recalled}
    recalls = {name: np.array([True] * count + [False] * (10 - count)) for name, count in counts.items()}
    found.add_conversation({"density": np.array([kept - 0.1, kept + 0.1]), **recalls})
    found.add_answers({"dense": np.full((4, 2), 0.82), "guided": np.tile([rouge, f1], (4, 1))})
    return found


@pytest.mark.parametrize(
    ("changed", "failed"),
    [
        ({}, set()),
        ({"guided": 0.011, "other": 0.009, "window": 0.02, "uniform": 0.03}, {"divergence", "divergence, one"}),
        # The mean is within the limit, and the end of its interval is not.
        ({"guided": 0.008, "other": 0.008, "spread": 0.003, "window": 0.05, "uniform": 0.05}, {"divergence"}),
        # One source is not as the other, though all of them together would do.
        ({"other": 0.0102, "window": 0.03, "uniform": 0.03}, {"divergence", "divergence, another"}),
        ({"agreement": 0.94}, {"agreement"}),
        ({"late": 0.02}, {"divergence after 8 switches"}),
        ({"late_agreement": 0.9}, {"agreement after 8 switches"}),
        ({"recalled": 8}, {"recall lost"}),
        ({"rouge": 0.76}, {"ROUGE-L lost"}),
        ({"f1": 0.76}, {"F1 lost"}),
        ({"kept": 0.8}, {"density"}),
        ({"window": 0.0005}, {"over sink + window"}),
        ({"uniform": 0.001}, {"over uniform"}),
        ({"uniform_recalled": 10}, {"recall beyond uniform"}),
    ],
)
def test_each_limit_can_fail(changed, failed):
    found = figures(verdicts(**changed), Limits())
    assert {one.name for one in found if not one.passed} == failed
    assert all(one.low is None or one.low - 1e-12 <= one.value <= one.high + 1e-12 for one in found)


def test_where_the_dense_run_recalls_nothing_nothing_is_shown():
    found = verdicts()
    for name in found.recalled:
        found.recalled[name] = [False] * 10
    failed = {one.name for one in figures(found, Limits()) if not one.passed}
    assert failed == {"recall lost"}


def test_density_is_told_layer_by_layer():
    assert verdicts().layer_density == pytest.approx((0.4, 0.6))
    assert verdicts().density == pytest.approx(0.5)


def test_uniform_weights_need_not_beat_themselves():
    found = verdicts()
    for of in (found.divergence, found.agreement, found.recalled):
        del of["uniform"]
    assert not any("uniform" in one.name for one in figures(found, Limits()))


def test_ways_are_compared_on_the_same_texts_and_facts():
    found = verdicts()
    assert found.compared == WAYS
    share, interval = divergence_over(found, Mask.RANDOM)
    assert share == pytest.approx(0.05)
    assert interval.low == pytest.approx(interval.high)
    beyond, interval = recalled_beyond(found, "uniform")
    assert beyond == pytest.approx(0.4)
    # Four of ten differ by one; Student's t of nine degrees of freedom is 2.262.
    assert interval.high - beyond == pytest.approx(2.262 * np.std([1] * 4 + [0] * 6, ddof=1) / 10**0.5, abs=1e-3)
