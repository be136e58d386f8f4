"""Answers, conversations of many switches, and other ways to guide that are as dense."""

import itertools

import pytest
import torch

from crossfill_kernels.rows import BLOCK
from engines.calibration.answers import ask, f1, rouge_l
from engines.calibration.rivals import UNION, Rival, as_dense, rivals_of
from engines.calibration.switches import SWITCHES, Talk
from engines.calibration.trial import Candidate, Models, Rule
from engines.models import prepare
from engines.models.generation import greedy
from engines.models.loading import load
from engines.models.needle import needles
from engines.reuse.identity import read_identity
from engines.reuse.study.masks import Mask, density
from engines.reuse.study.network import Network, dense
from engines.reuse.study.pair import Planned, Sparse
from engines.reuse.study.passages import inquiries, passage
from engines.reuse.study.runs import NEEDLE_TOKENS


@pytest.fixture(scope="module")
def folder(models_root):
    return prepare("tiny-llama", models_root)


@pytest.fixture(scope="module")
def network(folder):
    return Network(load(folder))


@pytest.fixture(scope="module")
def models(network, folder):
    identity = read_identity("tiny", folder)
    generator = torch.Generator().manual_seed(0)
    weights = {layer: torch.rand(identity.heads, identity.heads, generator=generator) for layer in range(3)}
    fitted = {layer: matrix / matrix.sum(dim=0) for layer, matrix in weights.items()}
    return Models(network, network, identity, tuple(range(identity.layers)), {Rule.FITTED: fitted})


@pytest.fixture(scope="module")
def text(network):
    return passage(network.tokenizer, 512, 0)


@pytest.mark.parametrize(
    ("said", "wanted", "rouge", "common"),
    [
        ("The code is 12345.", "the CODE is 12345", 1.0, 1.0),
        ("12345", "The code is 12345.", 2 / 5, 2 / 5),
        ("a b c d", "d c b a", 1 / 4, 1.0),
        ("a x b y c", "a b c", 6 / 8, 6 / 8),
        ("a a a", "a", 2 / 4, 2 / 4),
        ("nothing", "in common", 0.0, 0.0),
        ("", "a", 0.0, 0.0),
        ("...", "", 0.0, 0.0),
    ],
)
def test_answers_are_scored_by_the_words_that_they_share(said, wanted, rouge, common):
    assert rouge_l(said, wanted) == pytest.approx(rouge)
    assert f1(said, wanted) == pytest.approx(common)
    assert rouge_l(wanted, said) == pytest.approx(rouge)


@pytest.fixture(scope="module")
def small(models_root):
    """One that answers; the others are random."""
    return Network(load(prepare("smollm2-113m-healed", models_root)))


def test_answers_after_a_shared_prefix_are_those_of_whole_prompts(small):
    network = small
    asked = needles(network.loaded, count=3, tokens=NEEDLE_TOKENS, seed=0)
    prompts = inquiries(network.tokenizer, asked, passage(network.tokenizer, 200, 0))
    texts = [network.tokenizer.decode(ids) for ids in prompts]
    network.loaded.model.set_attn_implementation("eager")
    want = greedy(network.loaded, texts, 12, batch=1)
    network.loaded.model.set_attn_implementation("crossfill_study")
    found = network.answers(prompts[0][:192], dense, [ids[192:] for ids in prompts], 12)
    assert tuple(" ".join(network.tokenizer.decode(ids).split()) for ids in found) == want
    assert len(set(want)) == 3
    assert want[0] != ""


def test_questions_are_answered_densely_and_guided(small, models_root):
    identity = read_identity("small", models_root / "smollm2-113m-healed")
    same = {layer: torch.eye(identity.heads) for layer in range(identity.layers)}
    models = Models(small, small, identity, tuple(range(identity.layers)), {Rule.FITTED: same})
    asked = needles(small.loaded, count=4, tokens=NEEDLE_TOKENS, seed=0)
    prose = passage(small.tokenizer, 512, 0)
    found = {p: ask(models.pair(Candidate(1, Rule.FITTED, p)), asked, prose) for p in (0.2, 0.98)}
    assert all(len(answers) == 4 for said in found.values() for answers in said.values())
    assert found[0.2][Mask.DENSE] == found[0.98][Mask.DENSE] == found[0.98][Mask.GUIDED]
    assert found[0.2][Mask.GUIDED] != found[0.2][Mask.DENSE]


@pytest.mark.parametrize("tokens", [1024, 2048, 4096])
def test_turns_follow_one_another(tokens):
    talk = Talk(tokens)
    answers = [talk.answer(turn) for turn in range(max(SWITCHES) + 1)]
    assert answers[-1].stop == tokens
    assert all(one.stop < other.start for one, other in itertools.pairwise(answers))
    assert all(len(one) == tokens // 32 for one in answers)
    assert talk.answer(1).stop - talk.answer(0).stop == tokens // 2
    # Nothing is guided before the sender has answered, nor what it has only said itself.
    assert min(talk.pages) >= talk.answer(0).stop // BLOCK
    assert max(talk.pages) < talk.answer(7).start // BLOCK
    assert len(talk.pages) > tokens // BLOCK * 0.4
    for turn in range(1, max(SWITCHES), 2):
        dense_blocks = range(-(-talk.answer(turn).start // BLOCK), talk.answer(turn + 1).stop // BLOCK)
        assert not talk.pages & set(dense_blocks)


def test_planned_rows_alone_are_guided(models, text):
    pair = models.pair(Candidate(1, Rule.FITTED, 0.4))
    guides = pair.guides(pair.leave(text), len(text) // BLOCK)
    receiver = models.receiver
    whole = receiver.hidden(text, Planned(guides, frozenset(range(len(text) // BLOCK))))
    want = receiver.hidden(text, Sparse({layer: one.index for layer, one in guides.items()}))
    assert torch.allclose(whole, want, atol=1e-5)
    exact = receiver.hidden(text, dense)
    assert torch.allclose(receiver.hidden(text, Planned(guides, frozenset())), exact, atol=1e-5)
    late = receiver.hidden(text, Planned(guides, frozenset({5})))
    assert torch.allclose(late[: 5 * BLOCK], exact[: 5 * BLOCK], atol=1e-5)
    assert not torch.allclose(late[5 * BLOCK : 6 * BLOCK], exact[5 * BLOCK : 6 * BLOCK], atol=1e-3)


def test_rivals_are_all_other_rules_and_a_union(models):
    rivals = rivals_of(models, Candidate(1, Rule.ONE_HOT, 0.9))
    assert [one.name for one in rivals] == ["uniform", "fitted", UNION]
    assert all(list(one.weights) == [1, 2] for one in rivals)


@pytest.mark.parametrize("wanted", [0.45, 0.7])
def test_rivals_are_as_dense_layer_by_layer(models, text, wanted):
    pair = models.pair(Candidate(1, Rule.FITTED, 0.9))
    left, pages = pair.leave(text), len(text) // BLOCK
    for rival in rivals_of(models, Candidate(1, Rule.ONE_HOT, 0.9)):
        found = as_dense(pair, rival, left, pages, {1: wanted, 2: 0.6})
        assert list(found) == [1, 2]
        assert [density(index) for index in found.values()] == pytest.approx([wanted, 0.6], abs=0.06)
        assert all(index.heads == models.receiver.heads for index in found.values())


def test_the_chosen_one_is_its_own_rival(models, text):
    pair = models.pair(Candidate(1, Rule.FITTED, 0.6, ((2, 0.8),)))
    left, pages = pair.leave(text), len(text) // BLOCK
    want = {layer: one.index for layer, one in pair.guides(left, pages).items()}
    densities = {layer: density(index) for layer, index in want.items()}
    assert densities[2] > densities[1]
    found = as_dense(pair, Rival("itself", pair.weights), left, pages, densities)
    for layer, index in want.items():
        assert torch.equal(found[layer].columns, index.columns)


def test_a_union_has_what_any_head_of_the_sender_keeps(models, text):
    pair = models.pair(Candidate(1, Rule.FITTED, 0.6))
    left, pages = pair.leave(text), len(text) // BLOCK
    heads = Rival("heads", dict.fromkeys((1, 2), torch.eye(models.sender.heads)))
    alone, union = (
        as_dense(pair, Rival(name, heads.weights), left, pages, {1: 1.0, 2: 1.0}) for name in ("heads", UNION)
    )
    mask = union[1].mask(pages)
    assert torch.equal(mask[0], alone[1].mask(pages).any(dim=0))
    assert all(torch.equal(mask[0], one) for one in mask)
