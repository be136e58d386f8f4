"""A calibration of tiny models from end to end, whose verdicts mean nothing but must follow from what was measured."""

import shutil
import statistics
from dataclasses import replace

import numpy as np
import pytest
import torch

from engines.calibration.calibration import Wanted, calibrate
from engines.calibration.gate import Limits
from engines.calibration.judging import after
from engines.calibration.profile import fit_weights, profile
from engines.calibration.rivals import UNION
from engines.calibration.samples import gather
from engines.calibration.texts import Purpose, built_in
from engines.calibration.trial import Candidate, Models, Rule, Trials
from engines.errors import CalibrationDataError
from engines.models import prepare
from engines.models.loading import load
from engines.reuse.artifact import read_manifest, read_weights, write_artifact
from engines.reuse.identity import read_identity
from engines.reuse.study.network import Network

SMALL = Wanted(
    tokens=640,
    gate_tokens=1024,
    tail=32,
    fit=1,
    choice=1,
    gate=2,
    choice_needles=2,
    needles=2,
    answers=2,
    first_layers=(0, 1),
    top_ps=(0.5, 0.9),
)


LAX = Limits(divergence=10, agreement=0, recall=1, answers=1, density=1)


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
    return Models(network, network, identity, tuple(range(identity.layers)), {Rule.FITTED: weights})


def test_rules_mix_as_they_say(network, folders):
    fitted = torch.tensor([[0.2, 0.7], [0.8, 0.3]])
    made = models(network, folders, {1: fitted, 2: fitted})
    assert made.rules == (Rule.UNIFORM, Rule.ONE_HOT, Rule.FITTED)
    mixed = {rule: made.pair(Candidate(1, rule, 0.9)).weights[1] for rule in made.rules}
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


def test_a_pair_is_calibrated_and_its_artifact_says_so(folders, tmp_path):
    seen = []
    found = calibrate(
        ("large", folders["tiny-llama"]),
        ("small", folders["tiny-qwen3"]),
        built_in(),
        replace(SMALL, limits=LAX, train_steps=2),
        kept=tmp_path / "steps",
        progress=lambda stage, done, total: seen.append((stage, done, total)),
    )
    assert found.chosen in found.tried
    # Four rules and two top-p, one of the rules from another layer on too; and what was tried of groups of layers.
    assert sum(not one.layer_top_p for one in found.tried) == (4 + 1) * 2
    assert {one.rule for one in found.tried if one.first_layer == 1} == {found.chosen.rule}
    assert len(found.losses) == 2
    of_rule = [one for one in found.tried if one.rule is found.chosen.rule]
    assert found.chosen == max(of_rule, key=lambda one: found.tried[one].saved(one, found.receiver.layers))
    assert {one.purpose for one in found.data} == set(Purpose)
    assert {stage for stage, _, _ in seen} == {
        "reading",
        "comparing layers",
        "fitting weights",
        "fitting maps",
        "training weights",
        "trying rules",
        "trying candidates",
        "trying groups of layers",
        "trying combinations",
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
    assert list(manifest.layer_density) == list(manifest.guided)
    assert dict(found.chosen.layer_top_p) == manifest.layer_top_p
    # Random models may be no better than a mask of the nearest blocks, and know nothing that they could lose.
    assert all(one.passed or {"over", "beyond", "lost"} & set(one.name.split()) for one in manifest.gate)
    ways = {"guided", "random", "sink + window", UNION, *(rule.value for rule in Rule)}
    assert set(found.verdicts.compared) == ways - {found.chosen.rule.value}
    assert all(len(found.verdicts.divergence[name]) == 4 for name in (*found.verdicts.compared, after(4), after(8)))
    assert {len(scores) for scores in found.verdicts.rouge.values()} == {2}


def test_a_calibration_that_is_ended_goes_on_where_it_was(folders, tmp_path, monkeypatch):
    models = ("large", folders["tiny-llama"]), ("small", folders["tiny-qwen3"])
    wanted = replace(SMALL, rules=(Rule.UNIFORM,), top_ps=(0.9,), limits=LAX)
    ended = []

    def end(stage, done, total):
        if stage == "judging" and done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(*models, built_in(), wanted, kept=tmp_path, progress=end)
    before = {one: one.stat().st_mtime_ns for one in tmp_path.iterdir()}
    assert len([one for one in before if one.name.startswith("judge-texts")]) == 2
    real = Network.hidden
    monkeypatch.setattr(Network, "hidden", lambda *own: ended.append(len(own[1])) or real(*own))
    found = calibrate(*models, built_in(), wanted, kept=tmp_path)
    # Nothing was read again but what had not been judged: two texts of four, a conversation and its questions.
    read_anew = len(ended)
    assert {one: one.stat().st_mtime_ns for one in before} == before
    ended.clear()
    again = calibrate(*models, built_in(), wanted, kept=tmp_path)
    assert not ended
    assert again.gate == found.gate
    assert again.seconds.keys() == found.seconds.keys()
    assert all(again.seconds[name] == found.seconds[name] for name in found.seconds if name != "load")
    ended.clear()
    fresh = calibrate(*models, built_in(), wanted)
    assert fresh.gate == found.gate
    assert len(ended) > read_anew > 0
    # Another limit is another verdict of the same figures; another seed is another calibration.
    ended.clear()
    strict = calibrate(*models, built_in(), replace(wanted, limits=replace(LAX, divergence=1e-9)), kept=tmp_path)
    assert not strict.manifest({}).passed
    ended.clear()
    calibrate(*models, built_in(), replace(wanted, seed=1), kept=tmp_path)
    assert ended


def test_training_that_is_ended_goes_on_with_its_next_step(folders, tmp_path):
    models = ("large", folders["tiny-llama"]), ("small", folders["tiny-qwen3"])
    wanted = replace(SMALL, rules=(Rule.TRAINED,), top_ps=(0.9,), first_layers=(3,), train_steps=4, limits=LAX)

    def end(stage, done, total):
        if stage == "training weights" and done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(*models, built_in(), wanted, kept=tmp_path, progress=end)
    seen = []
    found = calibrate(*models, built_in(), wanted, kept=tmp_path, progress=lambda *step: seen.append(step))
    assert [done for stage, done, _ in seen if stage == "training weights"] == [2, 3, 4]
    whole = calibrate(*models, built_in(), wanted)
    assert found.losses == pytest.approx(whole.losses, rel=1e-5)
    assert found.seconds["train weights"] > 0


def test_maps_are_tried_if_they_are_wanted_and_judged_if_they_are_chosen(folders, tmp_path):
    """Of a model and itself, whose maps at half the work are as good as it gets."""
    found = calibrate(
        ("large", folders["tiny-llama"]),
        ("small", folders["tiny-llama"]),
        built_in(),
        replace(SMALL, limits=LAX, rules=(Rule.ONE_HOT,), top_ps=(0.9,), first_layers=(0,), map_densities=(0.01, 1.0)),
        kept=tmp_path / "steps",
    )
    tried = {(one.rule, one.map_density): of for one, of in found.tried.items() if not one.layer_top_p}
    assert set(tried) >= {(rule, density) for rule in (Rule.ONE_HOT, Rule.MAPS) for density in (0.01, 1.0)}
    # No layer is so sparse.
    assert tried[Rule.ONE_HOT, 0.01].divergence == tried[Rule.ONE_HOT, 0.0].divergence
    assert tried[Rule.ONE_HOT, 1.0].divergence != tried[Rule.ONE_HOT, 0.0].divergence
    assert statistics.fmean(tried[Rule.ONE_HOT, 1.0].density) <= 0.5
    assert found.chosen.map_density == 1.0
    manifest = found.manifest({})
    assert (manifest.mode, manifest.map_top_p, manifest.map_density) == ("map", 0.9, 1.0)
    assert found.verdicts.divergence["guided"] != [0.0] * 4


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


def test_a_receiver_without_a_chat_template_is_refused_at_once(folders, tmp_path):
    shutil.copytree(folders["tiny-qwen3"], tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(CalibrationDataError, match="no chat template"):
        calibrate(("large", folders["tiny-llama"]), ("small", tmp_path), built_in(), SMALL)


def test_a_purpose_without_text_is_refused(folders):
    sources = [source for source in built_in() if source.purpose is not Purpose.CHOICE]
    with pytest.raises(CalibrationDataError, match="no text for choice"):
        calibrate(("large", folders["tiny-llama"]), ("small", folders["tiny-qwen3"]), sources, SMALL)
