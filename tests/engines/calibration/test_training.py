"""End-to-end training of mixtures between tiny models, through guided prefill and through maps."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from engines.calibration.mixture import Mixture
from engines.calibration.training import Loss, Through, Training, train
from engines.calibration.trial import Candidate, Models, Rule, Trials
from engines.errors import CalibrationFitError
from engines.models import prepare
from engines.models.loading import load
from engines.reuse.identity import read_identity
from engines.reuse.settings import align_suffix
from engines.reuse.study.network import Network
from engines.reuse.study.pair import Sparse

TAIL = 32
# Of logarithms, for differences.
STEP = 0.2
GUIDED = Training(first_layer=1, top_p=0.6, tail=TAIL, answer=TAIL, steps=4, learning_rate=0.3)
MAPS = replace(GUIDED, through=Through.MAP, top_p=1.0)


@pytest.fixture(scope="module")
def networks(models_root):
    folders = {name: prepare(name, models_root) for name in ("tiny-llama", "tiny-qwen3")}
    return {name: (Network(loud(load(folder))), read_identity(name, folder)) for name, folder in folders.items()}


def loud(loaded):
    """With attention that looks at little and counts for much, as these models were never taught to attend."""
    with torch.no_grad():
        for layer in loaded.layers:
            layer.self_attn.q_proj.weight *= 4
            layer.self_attn.o_proj.weight *= 8
    return loaded


@pytest.fixture(scope="module")
def texts(networks):
    """Of few different tokens, which come again, so that heads differ in where they look."""
    generator = np.random.default_rng(0)
    return [tuple(map(int, generator.integers(5, 60, 256 + TAIL))) for _ in range(2)]


@pytest.fixture(scope="module")
def long_text():
    """Of so many row blocks that there is something to choose from."""
    return tuple(map(int, np.random.default_rng(0).integers(5, 60, 512 + TAIL)))


@pytest.fixture(scope="module")
def pair(networks):
    (sender, identity), (receiver, own) = networks["tiny-llama"], networks["tiny-qwen3"]
    return Models(sender, receiver, identity, align_suffix(own.layers, identity.layers), {})


@pytest.fixture(scope="module")
def same(networks):
    network, identity = networks["tiny-llama"]
    return Models(network, network, identity, tuple(range(identity.layers)), {})


def start(models, weights):
    return {layer: weights.clone() for layer in range(1, models.receiver.layers - 1)}


def identity(models):
    return torch.eye(models.receiver.heads)


def off(weights):
    """Weight beyond the diagonal, a share of all."""
    return float(torch.stack([1 - one.diagonal().mean() for one in weights.values()]).mean())


@pytest.mark.parametrize("plan", [replace(GUIDED, top_p=0.7), MAPS])
def test_from_the_wrong_heads_training_comes_nearer_to_the_dense_run(same, long_text, plan):
    wrong = start(same, identity(same).roll(1, dims=0))
    found = train(same, wrong, [long_text], replace(plan, steps=30), held_out=[long_text])
    assert found.after.divergence < 0.8 * found.before.divergence
    # Not just by reading more.
    assert found.after.density < found.before.density + 0.04
    assert np.mean(found.losses[-5:]) < np.mean(found.losses[:5])
    assert off(found.weights) < 0.8 * off(wrong)


def test_answers_are_learned_by_their_tokens_too(pair, texts):
    plan = replace(MAPS, loss=Loss.CROSS_ENTROPY, steps=12)
    found = train(pair, start(pair, identity(pair)), texts[:1], plan)
    assert found.losses[-1] < found.losses[0]


def test_a_receiver_that_is_the_sender_loses_nothing_by_its_own_maps_and_finds_them(same, texts):
    nothing = train(same, start(same, identity(same)), texts, replace(MAPS, steps=0, spread=0.0), held_out=texts)
    assert nothing.before == nothing.after
    assert nothing.before.divergence == pytest.approx(0, abs=1e-6)
    assert (nothing.before.agreement, nothing.before.density) == (1.0, 1.0)
    uniform = start(same, torch.full((4, 4), 0.25))
    found = train(same, uniform, texts, replace(MAPS, steps=30), held_out=texts)
    assert found.before.divergence > 1e-4
    assert found.after.divergence < 0.3 * found.before.divergence
    assert off(found.weights) < 0.5 < off(uniform)


def loss_of(models, text, weights, plan):
    """Of the first step, which is made before any weight is moved."""
    return train(models, weights, [text], replace(plan, steps=1)).losses[0]


@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_the_gradient_through_maps_is_what_differences_say(pair, texts, top_p):
    plan = replace(MAPS, top_p=top_p, spread=0.0, steps=1)
    generator = torch.Generator().manual_seed(1)
    logits = {layer: torch.randn(4, 4, generator=generator) for layer in range(1, 5)}
    seen = []
    train(pair, mixed(logits), texts[:1], plan, on_step=seen.append)
    # The first mean of gradients is a tenth of the first gradient.
    slopes = {layer: seen[0][f"mean.{layer}"] * 10 for layer in logits}
    size = float(torch.stack([slope.norm() for slope in slopes.values()]).norm())
    # Along the gradient a difference is greatest, so least of it is rounding.
    up, down = (
        loss_of(pair, texts[0], mixed({layer: one + way * slopes[layer] / size for layer, one in logits.items()}), plan)
        for way in (STEP, -STEP)
    )
    assert size == pytest.approx((up - down) / (2 * STEP), rel=0.03)


def mixed(logits):
    return {layer: one.softmax(dim=0) for layer, one in logits.items()}


@pytest.mark.parametrize("answer", [8, TAIL])
def test_guided_training_sees_what_serving_does(pair, texts, answer):
    weights = start(
        pair, torch.tensor([[0.6, 0.1, 0.0, 0.25], [0.4, 0.2, 0.0, 0.25], [0, 0, 1, 0.25], [0, 0.7, 0, 0.25]])
    )
    served = replace(pair, weights={Rule.FITTED: weights}).pair(Candidate(1, Rule.FITTED, 0.6))
    guides = {layer: one.index for layer, one in served.guides(served.leave(texts[0]), 4).items()}
    hidden = pair.receiver.hidden(texts[0], Sparse(guides))
    logs = pair.receiver.log_probabilities(hidden[-answer - 1 : -1])
    expected = -logs[range(answer), list(texts[0][-answer:])].mean()
    plan = replace(GUIDED, loss=Loss.CROSS_ENTROPY, spread=0.0, answer=answer)
    assert loss_of(pair, texts[0], weights, plan) == pytest.approx(float(expected), abs=1e-4)
    other = loss_of(pair, texts[0], start(pair, identity(pair)), plan)
    assert abs(other - float(expected)) > 1e-3
    trials = Trials(replace(pair, weights={Rule.FITTED: weights}), [Candidate(1, Rule.FITTED, 0.6)], TAIL)
    trials.read(texts[0])
    (tried,) = trials.tried.values()
    held = train(pair, weights, texts, replace(GUIDED, steps=0), held_out=texts[:1]).before
    assert held.density == pytest.approx(tried.density[0])


@pytest.mark.parametrize("plan", [GUIDED, MAPS])
def test_only_the_answer_counts(pair, texts, plan):
    weights = start(pair, torch.full((4, 4), 0.25))
    plan = replace(plan, loss=Loss.CROSS_ENTROPY, spread=0.0, steps=1)
    seen = {}
    for answer in (8, TAIL):
        for text in (texts[0], (*texts[0][:-1], texts[0][-1] + 1)):
            train(
                pair, weights, [text], replace(plan, answer=answer), on_step=seen.setdefault((answer, text), {}).update
            )
    few, other, many, _ = seen.values()
    assert float(few["mean.1"].norm()) > 0
    for one in (other, many):
        assert float((few["mean.1"] - one["mean.1"]).norm()) > 0.01 * float(few["mean.1"].norm())


def test_models_stay_as_they_are_and_weights_stay_mixtures(pair, texts):
    before = {
        name: one.clone() for of in (pair.sender, pair.receiver) for name, one in of.loaded.model.state_dict().items()
    }
    seen = []
    found = train(pair, start(pair, identity(pair)), texts, GUIDED, on_step=seen.append)
    after = {name: one for of in (pair.sender, pair.receiver) for name, one in of.loaded.model.state_dict().items()}
    assert all(torch.equal(after[name], one) for name, one in before.items())
    assert all(one.grad is None for of in (pair.sender, pair.receiver) for one in of.loaded.model.parameters())
    assert len(seen) == len(found.losses) == 4
    assert list(found.weights) == [1, 2, 3, 4]
    passed = [state[f"logits.{layer}"].softmax(dim=0) for state in seen for layer in found.weights]
    for weights in (*passed, *found.weights.values()):
        assert weights.dtype == torch.float32
        assert bool((weights >= 0).all())
        assert torch.allclose(weights.sum(dim=0), torch.ones(4), atol=1e-6)
    assert not torch.equal(seen[0]["logits.1"], seen[3]["logits.1"])


@pytest.mark.parametrize("plan", [GUIDED, MAPS])
def test_a_run_that_is_gone_on_with_ends_as_one_at_once(pair, texts, plan):
    weights, states = start(pair, torch.full((4, 4), 0.25)), []
    whole = train(pair, weights, texts, plan, on_step=states.append)
    rest = train(pair, weights, texts, plan, state=states[1])
    assert rest.losses == whole.losses
    assert all(torch.equal(one, whole.weights[layer]) for layer, one in rest.weights.items())
    fresh = train(pair, weights, texts, replace(plan, steps=2))
    assert not torch.equal(fresh.weights[1], whole.weights[1])


def test_a_loss_that_is_no_number_ends_the_run_and_names_the_step(pair, texts):
    states = []
    train(pair, start(pair, identity(pair)), texts, replace(GUIDED, steps=2), on_step=states.append)
    states[1]["logits.2"][0, 0] = float("nan")
    with pytest.raises(CalibrationFitError, match="step 3"):
        train(pair, start(pair, identity(pair)), texts, replace(MAPS, steps=4), state=states[1])


def test_a_state_of_other_layers_is_refused(pair, texts):
    states = []
    train(pair, start(pair, identity(pair)), texts, replace(GUIDED, steps=1), on_step=states.append)
    with pytest.raises(CalibrationFitError, match="other layers"):
        train(pair, start(pair, identity(pair)), texts, replace(GUIDED, first_layer=2), state=states[0])


def test_what_cannot_be_trained_is_refused(pair, texts):
    good = start(pair, identity(pair))
    with pytest.raises(ValueError, match="whole row blocks"):
        train(pair, good, [texts[0][1:]], GUIDED)
    with pytest.raises(ValueError, match="whole row blocks"):
        train(pair, good, texts, GUIDED, held_out=[texts[0][:TAIL]])
    with pytest.raises(ValueError, match="no text"):
        train(pair, good, [], GUIDED)
    with pytest.raises(ValueError, match=r"layers \[4\]"):
        train(pair, {layer: good[layer] for layer in (1, 2, 3)}, texts, GUIDED)
    with pytest.raises(CalibrationFitError, match=r"layer 2 .* no mixture"):
        train(pair, good | {2: 2 * good[2]}, texts, GUIDED)
    with pytest.raises(ValueError, match="answer within the tail"):
        replace(GUIDED, answer=TAIL + 1)


def test_weights_that_are_next_to_nothing_are_dropped_in_the_end():
    weights = torch.tensor([[0.9992, 0.5], [0.0008, 0.5]])
    found = Mixture({3: weights}, 0.0).sparse()[3]
    assert found[:, 0].tolist() == [1.0, 0.0]
    assert found[:, 1].tolist() == pytest.approx([0.5, 0.5])
