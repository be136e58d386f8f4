"""Observations against transformers' own maps, and moments against the squared error that they stand for."""

import pytest
import torch

from crossfill_kernels.rows import BLOCK
from engines.calibration.moments import Moments, moments_of, moments_of_maps, moments_of_masses
from engines.calibration.observation import observe
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
        found = observed[place].maps(start, stop)
        assert torch.allclose(found, torch.stack([one[0] for one in want])[:, :, start:stop, :stop], atol=1e-5)
    assert not torch.allclose(found[0], found[1], atol=1e-2)


def test_masses_are_sums_of_maps(observed):
    for observation in observed:
        whole = observation.maps(0, len(TOKENS))
        padded = torch.nn.functional.pad(whole, (0, 3 * BLOCK - len(TOKENS), 0, 3 * BLOCK - len(TOKENS)))
        want = padded.unflatten(3, (3, BLOCK)).sum(dim=4).unflatten(2, (3, BLOCK)).sum(dim=3)
        assert torch.allclose(torch.stack(list(observation.masses())), want, atol=1e-4)


def squared_error(sender, receiver, layer, of, head, mixture):
    mixed = torch.einsum("hnc,h->nc", sender[of].double(), mixture)
    return float((receiver[layer, head].double() - mixed).square().sum())


def by_moments(moments: Moments, layer, of, head, mixture):
    gram, cross = moments.gram[of], moments.cross[layer, of, :, head]
    return float(mixture @ gram @ mixture - 2 * cross @ mixture + moments.power[layer, head])


@pytest.mark.parametrize("rows", [64, 50, 1000])
def test_moments_tell_the_squared_error_of_any_mixture(observed, rows):
    sender, receiver = observed
    moments = moments_of_maps(sender, receiver, rows=rows)
    assert moments.rows == len(TOKENS)
    maps = [one.maps(0, len(TOKENS)) for one in observed]
    generator = torch.Generator().manual_seed(0)
    for layer, of, head in ((0, 0, 0), (5, 3, 1), (2, 1, 2)):
        mixture = torch.rand(maps[0].shape[1], generator=generator, dtype=torch.float64)
        want = squared_error(*maps, layer, of, head, mixture)
        assert by_moments(moments, layer, of, head, mixture) == pytest.approx(want, rel=1e-5)
        assert by_moments(moments, layer, of, head, 2 * mixture) != pytest.approx(want, rel=1e-2)


def test_moments_of_texts_add_up(networks, observed):
    sender, receiver = observed
    others = [observe(network, TOKENS[::-1]) for network in networks]
    both = moments_of_masses(sender, receiver) + moments_of_masses(*others)
    assert both.rows == 6
    masses = [torch.stack(list(one.masses())) for one in (sender, others[0], receiver, others[1])]
    whole = moments_of(torch.cat(masses[:2], dim=2), torch.cat(masses[2:], dim=2))
    for name in ("gram", "cross", "power"):
        assert torch.allclose(getattr(both, name), getattr(whole, name), rtol=1e-5)


def test_products_of_many_entries_keep_their_precision(monkeypatch):
    sender = torch.full((1, 2, 500, 1000), 1e-3)
    found = moments_of(sender, sender + 1.0)
    assert found.gram[0, 0, 1].item() == pytest.approx(0.5, rel=1e-5)
    assert found.cross[0, 0, 1, 0].item() == pytest.approx(500_000 * 1e-3 * 1.001, rel=1e-5)
    # All of them added up in float32 do not.
    monkeypatch.setattr("engines.calibration.moments._ENTRIES", 2**20)
    assert moments_of(sender, sender).gram[0, 0, 1].item() != pytest.approx(0.5, rel=1e-5)


def test_what_is_not_of_one_text_is_refused(networks, observed):
    shorter = observe(networks[1], TOKENS[:70])
    for moments in (moments_of_maps, moments_of_masses):
        with pytest.raises(ValueError, match=r"tokens|in common"):
            moments(observed[0], shorter)
