"""A calibration of tiny models from end to end, whose verdicts mean nothing but must follow from what was measured."""

import statistics
from dataclasses import replace

import numpy as np
import pytest
import torch

from engines.calibration.calibration import Wanted, calibrate
from engines.calibration.gate import Limits, Verdicts, figures, mean_interval
from engines.calibration.profile import fit_weights, profile
from engines.calibration.samples import gather
from engines.calibration.texts import Purpose, built_in
from engines.calibration.trial import Candidate, Models, Rule, Trials
from engines.errors import CalibrationDataError
from engines.models import prepare
from engines.models.loading import load
from engines.reuse.artifact import read_manifest, read_weights, write_artifact
from engines.reuse.identity import read_identity
from engines.reuse.study.masks import Mask
from engines.reuse.study.network import Network

SMALL = Wanted(
    tokens=640, tail=32, fit=1, choice=1, gate=2, choice_needles=2, needles=2, first_layers=(0, 1), top_ps=(0.5, 0.9)
)


@pytest.fixture(scope="module")
def folders(models_root):
    return {name: prepare(name, models_root) for name in ("tiny-llama", "tiny-qwen3")}


@pytest.fixture(scope="module")
def network(folders):
    return Network(load(folders["tiny-llama"]))


@pytest.fixture(scope="module")
def texts(network):
    generator = np.random.default_rng(0)
    return [tuple(map(int, generator.integers(5, 400, 256 + 32))) for _ in range(2)]


@pytest.fixture(scope="module")
def samples(network, texts):
    return gather(network, network, texts)


def test_shares_of_row_blocks_sum_to_one(samples):
    assert samples.row_blocks == 8
    for of in (samples.sender, samples.receiver):
        assert np.allclose(of.sum(axis=2), samples.row_blocks, atol=1e-3)
        assert (of >= 0).all()


def test_texts_without_a_row_block_are_refused(network, texts):
    with pytest.raises(ValueError, match="no text has 64 tokens"):
        gather(network, network, [texts[0][:63]])


def test_a_model_explains_itself_layer_by_layer_and_head_by_head(samples):
    found = profile(samples)
    layers = len(samples.sender)
    assert found.best == tuple(range(layers))
    assert np.allclose(found.variation.diagonal(), 0, atol=1e-5)
    assert found.variation[0, 1:].min() > 1e-3
    weights = fit_weights(samples, range(layers), range(1, layers - 1))
    assert list(weights) == list(range(1, layers - 1))
    for matrix in weights.values():
        assert np.allclose(matrix, np.eye(len(matrix)), atol=1e-6)


def models(network, folders, weights):
    identity = read_identity("tiny", folders["tiny-llama"])
    return Models(network, network, identity, tuple(range(identity.layers)), weights)


def test_rules_mix_as_they_say(network, folders):
    fitted = torch.tensor([[0.2, 0.7], [0.8, 0.3]])
    made = models(network, folders, {1: fitted, 2: fitted})
    mixed = {rule: made.pair(Candidate(1, rule, 0.9)).weights[1] for rule in Rule}
    assert mixed[Rule.FITTED] is fitted
    assert mixed[Rule.UNIFORM].tolist() == [[0.5, 0.5], [0.5, 0.5]]
    assert mixed[Rule.ONE_HOT].tolist() == [[0.0, 1.0], [1.0, 0.0]]


def test_candidates_that_keep_more_are_nearer_and_save_less(network, folders, texts):
    heads = read_identity("tiny", folders["tiny-llama"]).heads
    weights = {layer: torch.eye(heads) for layer in range(3)}
    candidates = [Candidate(first, Rule.FITTED, p) for first in (0, 2) for p in (0.3, 0.6, 1.0)]
    trials = Trials(models(network, folders, weights), candidates, 32)
    for text in texts:
        trials.read(text)
    tried = {one: trials.tried[one] for one in candidates}
    assert all(len(one.divergence) == 2 for one in tried.values())
    for first in (0, 2):
        of = [tried[Candidate(first, Rule.FITTED, p)] for p in (0.3, 0.6, 1.0)]
        assert statistics.fmean(of[0].density) < statistics.fmean(of[1].density) < 1.0 == of[2].density[0]
        assert statistics.fmean(of[0].divergence) > statistics.fmean(of[2].divergence)
        assert statistics.fmean(of[2].divergence) == pytest.approx(0, abs=1e-5)
        assert set(of[2].agreement) == {1.0}
    few, many = (Candidate(first, Rule.FITTED, 0.3) for first in (2, 0))
    assert tried[many].saved(many, 4) > tried[few].saved(few, 4)


def test_a_text_whose_prefix_is_no_row_blocks_is_refused(network, folders, texts):
    weights = {layer: torch.eye(2) for layer in range(3)}
    trials = Trials(models(network, folders, weights), [Candidate(1, Rule.FITTED, 0.9)], 33)
    with pytest.raises(ValueError, match="whole row blocks"):
        trials.read(texts[0])


def verdicts(guided=0.001, agreement=0.99, kept=0.5, recalled=9, window=0.01, spread=0.0):
    found = Verdicts()
    for step in (-1, 0, 1):
        found.divergence[Mask.GUIDED].append(guided + step * spread)
        found.divergence[Mask.WINDOW].append(window)
        found.divergence[Mask.RANDOM].append(0.02)
        found.agreement.append(agreement)
        found.density.append(kept)
    for mask, count in ((Mask.DENSE, 9), (Mask.GUIDED, recalled), (Mask.RANDOM, 1), (Mask.WINDOW, 2)):
        found.recalled[mask] = [True] * count + [False] * (10 - count)
    return found


@pytest.mark.parametrize(
    ("changed", "failed"),
    [
        ({}, set()),
        ({"guided": 0.011, "window": 0.015}, {"divergence"}),
        # The mean is within the limit, and the end of its interval is not.
        ({"guided": 0.009, "spread": 0.002, "window": 0.05}, {"divergence"}),
        ({"agreement": 0.94}, {"agreement"}),
        ({"recalled": 8}, {"recall lost"}),
        ({"kept": 0.8}, {"density"}),
        ({"window": 0.0005}, {"over sink + window"}),
    ],
)
def test_each_limit_can_fail_alone(changed, failed):
    found = figures(verdicts(**changed), Limits())
    assert {one.name for one in found if not one.passed} == failed
    assert all(one.low is None or one.low <= one.value <= one.high for one in found)


def test_an_interval_needs_two_values_and_is_as_wide_as_they_differ():
    with pytest.raises(ValueError, match="two values"):
        mean_interval([1.0])
    found = mean_interval([1.0, 2.0, 3.0])
    # Student's t of two degrees of freedom is 4.303.
    reach = 4.303 / 3**0.5
    assert [found.low, found.high] == pytest.approx([2 - reach, 2 + reach], abs=1e-3)


def test_a_pair_is_calibrated_and_its_artifact_says_so(folders, tmp_path):
    seen = []
    found = calibrate(
        ("large", folders["tiny-llama"]),
        ("small", folders["tiny-qwen3"]),
        built_in(),
        replace(SMALL, limits=Limits(divergence=10, agreement=0, recall=1, density=1)),
        progress=lambda stage, done, total: seen.append((stage, done, total)),
    )
    assert found.chosen in found.tried
    assert len(found.tried) == 2 * 3 * 2
    best = max(found.tried, key=lambda one: found.tried[one].saved(one, found.receiver.layers))
    assert found.chosen == best
    assert {one.purpose for one in found.data} == set(Purpose)
    assert {stage for stage, _, _ in seen} == {
        "reading",
        "comparing layers",
        "fitting weights",
        "trying candidates",
        "recalling",
        "judging",
    }
    assert all(any(done == total for at, done, total in seen if at == stage) for stage, _, _ in seen)
    manifest = write_artifact(
        tmp_path, found.manifest({"by": "test"}), {layer: one.numpy() for layer, one in found.weights.items()}
    )
    assert read_manifest(tmp_path) == manifest
    assert list(read_weights(tmp_path, manifest)) == list(manifest.guided)
    assert manifest.first_layer == found.chosen.first_layer
    assert {one.name for one in manifest.gate if not one.passed} <= {"over random", "over sink + window"}


def test_where_nothing_is_good_enough_the_nearest_is_judged_and_refused(folders):
    found = calibrate(
        ("large", folders["tiny-llama"]),
        ("small", folders["tiny-qwen3"]),
        built_in(),
        replace(SMALL, limits=Limits(divergence=0), top_ps=(0.3, 0.6), rules=(Rule.UNIFORM,)),
    )
    nearest = min(found.tried, key=lambda one: sum(found.tried[one].divergence))
    assert found.chosen == nearest
    assert not found.manifest({}).passed


def test_models_that_share_no_tokenizer_are_refused(folders, tmp_path):
    for file in folders["tiny-qwen3"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "tokenizer.json").write_text((tmp_path / "tokenizer.json").read_text() + " ")
    with pytest.raises(CalibrationDataError, match="different tokenizers"):
        calibrate(("large", folders["tiny-llama"]), ("small", tmp_path), built_in(), SMALL)


def test_a_purpose_without_text_is_refused(folders):
    sources = [source for source in built_in() if source.purpose is not Purpose.CHOICE]
    with pytest.raises(CalibrationDataError, match="no text for choice"):
        calibrate(("large", folders["tiny-llama"]), ("small", folders["tiny-qwen3"]), sources, SMALL)
