"""Pairs with fitted weights: every layer is mixed by its own, and what was not found good enough is not used."""

import statistics

import numpy as np
import pytest
import torch

from cache_store.config import StoreSettings
from crossfill_kernels.guided_attention import guided_attention_reference
from crossfill_kernels.mix_mass import mix_mass
from crossfill_kernels.rows import rows_at
from crossfill_kernels.select_blocks import select_blocks
from engines.reuse.artifact import MANIFEST, WEIGHTS, Manifest, Measured, read_manifest, write_artifact
from engines.reuse.refusal import Refusal
from engines.reuse.settings import ReuseSettings
from engines.reuse.study.masks import density

from .conftest import HEADS, LARGE, SCALE, SMALL, make_pair
from .test_receiver import GUIDED, assert_dense, dense, left  # noqa: F401  # a fixture
from .test_sender import TOKENS, expected

# Two receiver layers are guided by one sender layer, each by a mixture of its own.
FROM = (0, 1, 4, 4, 6, 7)


@pytest.fixture
def folder(tmp_path):
    gate = (Measured(name="kl", limit=1, value=0, passed=True),)
    manifest = Manifest(
        sender=LARGE, receiver=SMALL, layers=FROM, first_layer=2, top_p=0.6, min_tokens=64, max_density=1.0, gate=gate
    )
    write_artifact(tmp_path, manifest, weights())
    return tmp_path


def weights():
    generator = np.random.default_rng(3)
    return {layer: generator.dirichlet(np.full(HEADS, 0.1), HEADS).T.astype(np.float32) for layer in GUIDED}


def fitted(receive, folder, **changes):
    told = {"layers": FROM, "weights": "fitted", "artifact": str(folder), "top_p": 0.6}
    return receive(**{**told, **changes})


@pytest.mark.parametrize("layer_top_p", [{}, {GUIDED[1]: 0.4}])
def test_each_layer_is_mixed_and_cut_by_its_own(left, receive, folder, layer_top_p):  # noqa: F811
    write_artifact(folder, read_manifest(folder).model_copy(update={"layer_top_p": layer_top_p}), weights())
    worker = fitted(receive, folder, layer_top_p=layer_top_p)
    worker.arrive("r", TOKENS)
    out = worker.prefill("r", TOKENS)
    assert worker.counted("row_blocks_total", outcome="guided") == 5
    for layer in GUIDED:
        rows, slots = rows_at(range(320)), slice(0, 320)
        query, keys, values = (of[layer] for of in (worker.query, worker.key, worker.value))

        def attention(of, top_p, layer=layer, query=query, keys=keys, values=values, rows=rows, slots=slots):
            index = select_blocks(mix_mass(expected(left, FROM[layer], 5), of, 5), top_p=top_p)
            return guided_attention_reference(query[:320], keys, values, slots, rows, index, scale=SCALE)

        own = torch.from_numpy(weights()[layer])
        top_p = layer_top_p.get(layer, 0.6)
        torch.testing.assert_close(out[layer, :320], attention(own, top_p), atol=1e-5, rtol=1e-5)
        assert not torch.allclose(out[layer, :320], attention(own, 1 - top_p), atol=1e-3)
        other = torch.from_numpy(weights()[GUIDED[0] if layer != GUIDED[0] else GUIDED[1]])
        assert not torch.allclose(out[layer, :320], attention(other, top_p), atol=1e-3)


def test_density_is_that_of_every_guided_layer(left, receive, folder):  # noqa: F811
    worker = fitted(receive, folder)
    worker.arrive("r", TOKENS)
    worker.wait()
    assert worker.engine.admit("r", 0, len(TOKENS)) is None
    mixed = [mix_mass(expected(left, FROM[layer], 5), torch.from_numpy(weights()[layer]), 5) for layer in GUIDED]
    kept = [density(select_blocks(masses, top_p=0.6)) for masses in mixed]
    assert kept[0] != kept[1]
    assert worker.engine._known["r"].plan.density == pytest.approx(statistics.fmean(kept))


@pytest.mark.parametrize("reason", [Refusal.GATE_FAILED, Refusal.ARTIFACT_MISMATCH])
def test_a_pair_that_is_refused_takes_nothing(left, receive, folder, reason):  # noqa: F811
    worker = fitted(receive, folder, refused=reason)
    worker.arrive("r", TOKENS)
    assert_dense(worker, worker.prefill("r", TOKENS), receive, reason)


def recalibrated(folder, **changed):
    write_artifact(folder, read_manifest(folder).model_copy(update=changed), weights())


BAD = Measured(name="kl", limit=1, value=2, passed=False)


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / MANIFEST).unlink(),
        lambda folder: (folder / WEIGHTS).write_bytes(b""),
        lambda folder: (folder / MANIFEST).write_text((folder / MANIFEST).read_text().replace('"r2"', '"r3"')),
        lambda folder: recalibrated(folder, gate=(BAD,)),
        lambda folder: recalibrated(folder, top_p=0.7),
    ],
    ids=["no manifest", "damaged weights", "of another model", "refused since", "of another share"],
)
def test_an_artifact_that_cannot_be_used_is_not(left, receive, folder, damage, caplog):  # noqa: F811
    damage(folder)
    worker = fitted(receive, folder)
    worker.arrive("r", TOKENS)
    assert_dense(worker, worker.prefill("r", TOKENS), receive, Refusal.ARTIFACT_UNUSABLE)
    assert str(folder) in caplog.text


def test_another_pair_of_the_model_goes_on(left, receive, folder, start):  # noqa: F811
    elsewhere = LARGE.model_copy(update={"name": "elsewhere"})
    refused = make_pair(
        sender=elsewhere, layers=FROM, weights="fitted", artifact=str(folder), refused=Refusal.GATE_FAILED
    )
    settings = ReuseSettings(
        model=SMALL, pairs=(refused, make_pair(top_p=1.0)), store=StoreSettings(url="memory://"), wait_s=30
    )
    worker = start(settings, seed=2)
    worker.arrive("r", TOKENS)
    torch.testing.assert_close(worker.prefill("r", TOKENS), dense(receive), atol=1e-5, rtol=1e-5)
    assert worker.counted("row_blocks_total", outcome="guided") == 5


@pytest.mark.parametrize("told", [{"weights": "fitted"}, {"artifact": "/somewhere"}])
def test_fitted_weights_and_an_artifact_go_together(told):
    with pytest.raises(ValueError, match="artifact of a calibration"):
        make_pair(**told)
