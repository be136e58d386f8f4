"""Observations against transformers' own maps, and moments against the squared error that they stand for."""

import pytest
import torch

from crossfill_kernels.rows import BLOCK
from engines.calibration.moments import Moments, moments_of, moments_of_maps
from engines.calibration.observation import observe, observe_masses
from engines.calibration.simplex import squared_errors
from engines.models import prepare
from engines.models.loading import load
from engines.reuse.study.network import Network

TOKENS = list(range(100, 100 + 2 * BLOCK + 20))


@pytest.fixture(scope="module")
def networks(models_root):
    return tuple(Network(load(prepare(name, models_root))) for name in ("tiny-llama", "tiny-qwen3"))


@pytest.fixture(scope="module")
def observed(networks):
    return tuple(observe(network, TOKENS) for network in networks)


@pytest.mark.parametrize("place", [0, 1], ids=["llama", "qwen3"])
def test_maps_are_those_of_transformers(models_root, networks, observed, place):
    loaded = load(prepare(("tiny-llama", "tiny-qwen3")[place], models_root))
    loaded.model.set_attn_implementation("eager")
    with torch.inference_mode():
        want = loaded.model(torch.tensor([TOKENS]), output_attentions=True).attentions
    for start, stop in ((0, 1), (0, len(TOKENS)), (70, 130)):
        found = all_maps(observed[place], start, stop)
        assert torch.allclose(found, torch.stack([one[0] for one in want])[:, :, start:stop, :stop], atol=1e-5)
    assert not torch.allclose(found[0], found[1], atol=1e-2)


def all_maps(observation, start, stop):
    return torch.stack([layer.map(start, stop) for layer in observation.layers.values()])


def test_only_layers_that_are_asked_for_are_kept(networks, observed):
    found = observe(networks[0], TOKENS, {2})
    assert list(found.layers) == [2]
    assert torch.equal(found.layers[2].keys, observed[0].layers[2].keys)


def test_masses_are_sums_of_maps(networks, observed):
    for network, observation in zip(networks, observed, strict=True):
        whole = all_maps(observation, 0, len(TOKENS))
        padded = torch.nn.functional.pad(whole, (0, 3 * BLOCK - len(TOKENS), 0, 3 * BLOCK - len(TOKENS)))
        want = padded.unflatten(3, (3, BLOCK)).sum(dim=4).unflatten(2, (3, BLOCK)).sum(dim=3)
        assert torch.allclose(observe_masses(network, TOKENS), want, atol=1e-4)


@pytest.mark.parametrize("rows", [64, 50, 1000])
def test_moments_tell_the_squared_error_of_any_mixture(observed, rows):
    generator = torch.Generator().manual_seed(0)
    for layer, of in ((0, 0), (5, 3), (2, 1)):
        pair = observed[0].layers[of], observed[1].layers[layer]
        moments = moments_of_maps(*pair, rows=rows)
        assert moments.rows == len(TOKENS)
        maps = [one.map(0, len(TOKENS)).double() for one in pair]
        mixture = torch.rand(len(maps[0]), len(maps[1]), generator=generator, dtype=torch.float64)
        want = (maps[1] - torch.einsum("hnc,hk->knc", maps[0], mixture)).square().sum(dim=(1, 2)).numpy()
        assert by_moments(moments, mixture) == pytest.approx(want, rel=1e-5)
        assert by_moments(moments, 2 * mixture) != pytest.approx(want, rel=1e-2)


def by_moments(moments: Moments, mixture):
    gram, cross, power = (one.numpy() for one in (moments.gram, moments.cross, moments.power))
    return squared_errors(gram, cross, power, mixture.numpy())


def test_moments_of_texts_add_up(networks):
    masses = [[observe_masses(network, text)[1] for network in networks] for text in (TOKENS, TOKENS[::-1])]
    both = moments_of(*masses[0]) + moments_of(*masses[1])
    assert both.rows == 6
    whole = moments_of(*(torch.cat(of, dim=1) for of in zip(*masses, strict=True)))
    for name in ("gram", "cross", "power"):
        assert torch.allclose(getattr(both, name), getattr(whole, name), rtol=1e-5)


def test_products_of_many_entries_keep_their_precision(monkeypatch):
    sender = torch.full((2, 500, 1000), 1e-3)
    found = moments_of(sender, sender + 1.0)
    assert found.gram[0, 1].item() == pytest.approx(0.5, rel=1e-5)
    assert found.cross[0, 1].item() == pytest.approx(500_000 * 1e-3 * 1.001, rel=1e-5)
    # All of them added up in float32 do not.
    monkeypatch.setattr("engines.calibration.moments._ENTRIES", 2**20)
    assert moments_of(sender, sender).gram[0, 1].item() != pytest.approx(0.5, rel=1e-5)


def test_what_is_not_of_one_text_is_refused(networks, observed):
    shorter = observe(networks[1], TOKENS[:70]).layers[0]
    with pytest.raises(ValueError, match="of two texts: 148 and 70 tokens"):
        moments_of_maps(observed[0].layers[0], shorter)
    with pytest.raises(ValueError, match="in common"):
        moments_of(torch.ones(2, 3, 4), torch.ones(2, 3, 5))
