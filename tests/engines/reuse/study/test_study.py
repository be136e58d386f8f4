"""The study of a pair: texts, masks and runs on small random models, whose figures mean nothing but must be right."""

from dataclasses import replace

import pytest
import torch

from crossfill_kernels.blocks import BlockIndex, index_of
from crossfill_kernels.map_attention import map_attention_reference
from crossfill_kernels.rows import rows_at
from engines.models import prepare
from engines.models.loading import load
from engines.models.needle import needles
from engines.reuse.guided import mixtures
from engines.reuse.identity import read_identity
from engines.reuse.map_records import union
from engines.reuse.settings import PairSettings, ReuseMode
from engines.reuse.study.map_quality import Way, study_maps
from engines.reuse.study.maps import leave_maps, usable_maps
from engines.reuse.study.masks import Mask, density, like
from engines.reuse.study.network import Network, dense
from engines.reuse.study.pair import Pair, Planned, Sparse
from engines.reuse.study.passages import passage, recollection
from engines.reuse.study.quality import study_quality
from engines.reuse.study.runs import Runs
from engines.reuse.study.timing import time_attention

TOKENS = 256


@pytest.fixture(scope="module")
def folder(models_root):
    return prepare("tiny-llama", models_root)


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def loaded(folder):
    return load(folder)


@pytest.fixture(scope="module")
def pair(folder, loaded):
    identity = read_identity("tiny", folder)

    def made(top_p=0.5):
        settings = PairSettings(
            sender=identity, layers=tuple(range(identity.layers)), first_layer=0, weights="identity", top_p=top_p
        )
        return Pair(network, network, settings, mixtures(settings, identity))

    network = Network(loaded)
    return made


@pytest.fixture
def guided():
    """Two heads that keep one to three of four column blocks."""
    mask = torch.eye(4, dtype=torch.bool).repeat(2, 1, 1)
    mask[:, :, 0] = True
    mask[1, 3, 1] = True
    return index_of(mask, torch.arange(4, dtype=torch.int32))


def kept(index: BlockIndex) -> list[int]:
    return index.offsets.diff().tolist()


def test_a_passage_has_its_length_and_depends_on_the_seed(loaded):
    one, again, other = (passage(loaded.tokenizer, 300, seed) for seed in (0, 0, 1))
    assert len(one) == len(other) == 300
    assert one == again
    assert one != other
    assert passage(loaded.tokenizer, 100, 0) == one[:100]


def test_a_passage_longer_than_the_text_begins_anew(loaded):
    tokens = passage(loaded.tokenizer, 80_000, 0)
    assert len(tokens) == 80_000
    start = tokens[:32]
    assert any(tokens[index : index + 32] == start for index in range(32, 79_900))


@pytest.mark.parametrize("count", [1, 8])
def test_a_recollection_asks_for_facts_within_its_tokens(loaded, count):
    asked = needles(loaded, count=count, tokens=256)
    talk = recollection(loaded.tokenizer, asked, 1024, 0)
    text = loaded.tokenizer.decode(talk.tokens)
    assert len(talk.tokens) == 1024
    for needle, value in zip(asked, talk.values, strict=True):
        said = loaded.tokenizer.decode(talk.tokens[value.start : value.stop])
        assert said.strip() == needle.value
        # Once in the prose, and once as the answer.
        assert text.count(needle.fact) == 2
        assert loaded.tokenizer.decode(talk.tokens[: value.start]).count(needle.fact) == 1
    # What follows the last answer is at most what did not fit: every question is before it.
    assert talk.values[-1].stop > 900


def test_a_recollection_without_room_is_refused(loaded):
    with pytest.raises(ValueError, match="no room for prose"):
        recollection(loaded.tokenizer, needles(loaded, count=8, tokens=256), 256, 0)


@pytest.mark.parametrize("mask", [Mask.RANDOM, Mask.WINDOW])
def test_controls_keep_as_many_blocks_in_every_list_with_sink_and_diagonal(guided, mask):
    control = like(guided, mask, torch.Generator().manual_seed(0))
    control.check_content()
    assert kept(control) == kept(guided)
    assert density(control) == density(guided) == 15 / 20
    mine = control.mask(4)
    assert bool(mine[:, :, 0].all())
    assert bool(mine.diagonal(dim1=1, dim2=2).all())


def test_a_window_is_next_to_the_diagonal_and_random_blocks_are_drawn(guided):
    window = like(guided, Mask.WINDOW, torch.Generator())
    assert window.mask(4)[1, 3].tolist() == [True, False, True, True]
    drawn = {tuple(like(guided, Mask.RANDOM, torch.Generator().manual_seed(s)).columns.tolist()) for s in range(20)}
    assert len(drawn) == 2
    assert torch.equal(like(guided, Mask.GUIDED, torch.Generator()).columns, guided.columns)


def test_the_studied_network_computes_what_transformers_does(folder, loaded, pair):
    tokens = passage(loaded.tokenizer, TOKENS, 0)
    with torch.inference_mode():
        want = load(folder).model.model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
    torch.testing.assert_close(pair().receiver.hidden(tokens, dense), want, atol=1e-4, rtol=1e-4)


def test_everything_kept_is_dense_attention_and_less_is_not(pair, loaded):
    tokens = passage(loaded.tokenizer, TOKENS + 10, 0)
    found = {}
    for top_p in (0.3, 1.0):
        one = pair(top_p)
        guides = one.guides(one.leave(tokens), TOKENS // 64)
        assert [layer.index.blocks.numel() for layer in guides.values()] == [4] * len(guides)
        found[top_p] = one.receiver.hidden(tokens, Sparse({layer: guide.index for layer, guide in guides.items()}))
    want = pair().receiver.hidden(tokens, dense)
    torch.testing.assert_close(found[1.0], want, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(found[0.3], want, atol=1e-3)


def test_a_study_compares_every_mask_with_the_dense_run(pair, loaded):
    steps = []
    study = study_quality(
        pair(0.3),
        1024,
        texts=2,
        needles=needles(loaded, count=9, tokens=256),
        seed=0,
        progress=lambda *s: steps.append(s),
    )
    assert [len(quality.recalled) for quality in study.masks.values()] == [9] * 4
    assert [len(quality.divergence) for quality in study.masks.values()] == [2] * 4
    assert study.masks[Mask.DENSE].divergence == [0.0, 0.0]
    assert study.masks[Mask.DENSE].agreement == [1.0, 1.0]
    assert all(min(study.masks[mask].divergence) > 0 for mask in Mask if mask is not Mask.DENSE)
    guided, random, window = (study.masks[mask].densities for mask in (Mask.GUIDED, Mask.RANDOM, Mask.WINDOW))
    assert guided == random == window
    assert max(guided) < 1
    assert study.stored_bytes > 0
    assert steps[-1] == ("1024 tokens, quality", 16, 16)


def test_a_prefix_that_ends_within_a_block_is_refused(pair):
    with pytest.raises(ValueError, match="whole row blocks"):
        study_quality(pair(), 100, texts=1, needles=(), seed=0)


def test_times_of_chunks_are_of_all_layers_and_of_the_guided_ones(pair):
    one = pair()
    times = time_attention(one, TOKENS, chunk=96, rounds=2, seed=0)
    guided, layers = len(one.settings.guided), one.receiver.layers
    assert guided < layers
    assert 0 < times.share < 1
    assert len(times.dense_s) == len(times.guided_s) == len(times.prepare_s) == 2
    assert all(own < whole for own, whole in zip(times.dense_guided_s, times.dense_s, strict=True))
    assert 0 < times.speed_up_prepared < times.speed_up
    assert 0 < times.density <= 1


@pytest.fixture(scope="module")
def mapped(pair):
    """`mapped(**changes)`: the identical pair whose layers are computed by maps."""

    def made(**changes):
        own = pair()
        return replace(
            own, settings=own.settings.model_copy(update={"mode": ReuseMode.MAP, "map_top_p": 1.0, **changes})
        )

    return made


def test_all_maps_of_the_same_model_are_its_dense_run(mapped):
    whole = mapped()
    ids = passage(whole.receiver.tokenizer, TOKENS + 40, 0)
    exact = whole.receiver.hidden(ids, dense)
    apart = {}
    for name, one in {"whole": whole, "thin": mapped(map_top_p=0.3), "turned": turned(whole)}.items():
        runs = Runs(one, ids, TOKENS, torch.Generator())
        assert len(runs.maps) == len(whole.settings.guided)
        [(_, attend)] = runs.under([Mask.GUIDED])
        apart[name] = float((one.receiver.hidden(ids, attend) - exact).norm() / exact.norm())
    # Bytes are 1e-2 away at most.
    assert apart["whole"] < 1e-2
    assert apart["thin"] > 3 * apart["whole"]
    assert apart["turned"] > 3 * apart["whole"]


def turned(pair):
    """Each head by another head's map."""
    return replace(pair, weights={layer: matrix.roll(1, dims=0) for layer, matrix in pair.weights.items()})


def test_a_pair_that_guides_leaves_no_maps_and_a_hybrid_those_that_are_sparse(pair, mapped):
    own = pair()
    ids = passage(own.receiver.tokenizer, TOKENS, 0)
    assert usable_maps(own, ids) == {}
    left = leave_maps(own, ids, top_p=0.5)
    unions = {layer: union(left[of]) for layer, of in own.settings.guided.items()}
    least = min(unions.values())
    for most in (least - 0.01, least, 1.0):
        found = usable_maps(mapped(mode=ReuseMode.HYBRID, map_top_p=0.5, map_density=most), ids)
        assert set(found) == {layer for layer, one in unions.items() if one <= most}
    assert least > 0.01


def test_row_blocks_that_are_planned_are_mapped_and_no_others(mapped):
    own = mapped(map_top_p=0.3)
    ids = passage(own.receiver.tokenizer, TOKENS, 0)
    runs = Runs(own, ids, TOKENS, torch.Generator())
    exact = own.receiver.hidden(ids, dense)

    def by_maps(layer, query, keys, values, scale):
        if layer not in runs.maps:
            return dense(layer, query, keys, values, scale)
        rows = rows_at(range(TOKENS))
        return map_attention_reference(runs.maps[layer], own.weights[layer], values, slice(0, TOKENS), rows)

    pages = frozenset(range(TOKENS // 64))
    whole = own.receiver.hidden(ids, Planned(runs.guides, pages, runs.maps, own.weights))
    torch.testing.assert_close(whole, own.receiver.hidden(ids, by_maps), atol=1e-4, rtol=1e-4)
    some = own.receiver.hidden(ids, Planned(runs.guides, frozenset({2}), runs.maps, own.weights))
    torch.testing.assert_close(some[:128], exact[:128], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(some[128:192], exact[128:192], atol=1e-3)


def test_a_study_of_maps_has_every_way_at_every_text(mapped):
    own = mapped(map_top_p=0.5, map_density=0.9)
    asked = needles(own.receiver.loaded, count=2, tokens=256, seed=0)
    seen = []
    found = study_maps(
        own, 640, texts=1, needles=asked, seed=0, progress=lambda stage, done, total: seen.append((done, total))
    )
    assert seen[-1] == (8, 8)
    assert {len(one.densities) for one in found.ways.values()} == {2}
    assert {len(one.recalled) for one in found.ways.values()} == {2}
    assert found.ways[Way.DENSE].divergence == [0.0]
    assert all(seconds > 0 for seconds in found.kernel_s.values())
    assert list(found.kernel_s) == ["dense", "guided", "map", "map, paper"]
    assert found.ways[Way.GUIDED].divergence[0] > 0
